"""Where a probe's records go as they come: CSV, TensorBoard, Weights and Biases."""

import contextlib
import csv
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument, StorageError, Unavailable
from rwsim.probe.quantities import QUANTITIES
from rwsim.probe.reading import PREDICTIONS, Reading

QUANTILES = (0.1, 0.5, 0.9)
COLUMNS = (
    "step", "layer", *(f"{name}{end}" for name in QUANTITIES for end in ("", *(f"_q{round(100 * q)}" for q in QUANTILES))), *PREDICTIONS,
)  # fmt: skip


def rows(readings: Sequence[Reading]) -> Iterator[dict[str, Any]]:
    """One flat mapping a measured step and layer, in order of steps: averages and quantiles over neurons, predictions."""
    columns = []
    for reading in readings:
        found: dict[str, Any] = {}
        for name in QUANTITIES:
            values = reading.found[name]
            found[name] = reading.measured[name]
            some = np.isfinite(values).any(1)
            quantiles = np.full((len(QUANTILES), len(values)), math.nan)
            if some.any():
                # The one that knows NaN is many times slower.
                quantile = np.quantile if np.isfinite(values[some]).all() else np.nanquantile
                quantiles[:, some] = quantile(values[some], QUANTILES, axis=1)
            found |= {f"{name}_q{round(100 * q)}": x for q, x in zip(QUANTILES, quantiles, strict=True)}
        columns.append(found | {name: values for name, values in reading.predicted.items()})
    for t, step in enumerate(readings[0].steps.tolist()):
        for reading, found in zip(readings, columns, strict=True):
            yield {"step": step, "layer": reading.layer.name} | {name: float(values[t]) for name, values in found.items()}


class Writer:
    """What a probe asks of a writer."""

    def write(self, readings: Sequence[Reading]) -> None:
        """Take the records of measured steps that are new."""
        raise NotImplementedError("a writer must define `write`")  # reached only by a subclass without one

    def resume(self, step: int) -> None:
        """Forget what came after a step: the run goes on from there."""

    def close(self) -> None:
        """No more will come."""


class CSVWriter(Writer):
    """One line a measured step and layer, averages and quantiles over neurons; what is not known is empty.

    The file is complete up to its last flush whenever a run is killed.

    Args:
        path: Of the file.
        resume: Go on with a file that is there: what it holds beyond the step that `DynamicsProbe.load_state_dict` brings is cut off.

    Raises:
        InvalidArgument: The file is there and is not to be resumed; no such directory.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise InvalidArgument("path", "must be a file in a directory that is there", str(path))
        if self.path.exists() and not resume:
            raise InvalidArgument("path", "must not be there yet", str(path), "move it away, or go on with it by resume=True")
        self._file: Any = None

    def write(self, readings: Sequence[Reading]) -> None:
        try:
            if self._file is None:
                fresh = not self.path.exists() or not self.path.stat().st_size
                self._file = self.path.open("a", newline="", encoding="utf-8")
                if fresh:
                    csv.writer(self._file, lineterminator="\n").writerow(COLUMNS)
            out = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
            for row in rows(readings):
                out.writerow({name: _text(value) for name, value in row.items()})
            self._file.flush()
        except OSError as problem:
            with contextlib.suppress(OSError):  # it tries to write the rest once more
                self.close()
            raise StorageError(f"cannot write {self.path}: {problem.strerror or problem}.") from problem

    def resume(self, step: int) -> None:
        self.close()
        if not self.path.exists():
            return
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with self.path.open(newline="", encoding="utf-8") as old, draft.open("w", newline="", encoding="utf-8") as new:
            for i, line in enumerate(old):
                first = line.partition(",")[0]
                # The last line of a run that was killed may be half a line.
                if i == 0 or (line.endswith("\n") and first.isdigit() and int(first) <= step):
                    new.write(line)
        os.replace(draft, self.path)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class TensorBoardWriter(Writer):
    """Scalars ``layer/quantity`` of the averages and predictions.

    Args:
        target: A directory for a new SummaryWriter, or one that is there already.

    Raises:
        Unavailable: A directory without the package tensorboard.
    """

    def __init__(self, target: Any) -> None:
        self._own = isinstance(target, (str, Path))
        if self._own:
            if importlib.util.find_spec("tensorboard") is None:
                raise Unavailable("TensorBoardWriter needs the package tensorboard, which is not here; pip install tensorboard.")
            from torch.utils.tensorboard import SummaryWriter

            target = SummaryWriter(str(target))
        elif not hasattr(target, "add_scalar"):
            raise InvalidArgument("target", "must be a directory or a SummaryWriter", target)
        self.target = target

    def write(self, readings: Sequence[Reading]) -> None:
        for step, scalars in _scalars(readings):
            for name, value in scalars.items():
                self.target.add_scalar(name, value, step)
        self.target.flush()

    def close(self) -> None:
        if self._own:
            self.target.close()


class WandbWriter(Writer):
    """One `log` a measured step with ``layer/quantity`` of the averages and predictions, and ``probe/step``.

    The step is a value of its own: W&B's counter belongs to the run.

    Args:
        run: What `wandb.init` returned; None: the run that is going on.

    Raises:
        Unavailable: No run, and no package wandb.
        InvalidArgument: No run is going on.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            if importlib.util.find_spec("wandb") is None:
                raise Unavailable("WandbWriter needs the package wandb, which is not here; pip install wandb.")
            run = importlib.import_module("wandb").run
        if not hasattr(run, "log"):
            raise InvalidArgument("run", "must be a W&B run", run, "pass what wandb.init returns")
        self.run = run

    def write(self, readings: Sequence[Reading]) -> None:
        for step, scalars in _scalars(readings):
            self.run.log({**scalars, "probe/step": step})


def _scalars(readings: Sequence[Reading]) -> Iterator[tuple[int, dict[str, float]]]:
    """Of each step, ``layer/quantity`` -> value, where there is one."""
    found: dict[str, float] = {}
    last = None
    for row in rows(readings):
        if row["step"] != last and last is not None:
            yield last, found
            found = {}
        last = row["step"]
        layer = row["layer"]
        found |= {f"{layer}/{name}": x for name, x in row.items() if isinstance(x, float) and math.isfinite(x)}
    if last is not None:
        yield last, found


def _text(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:.7g}" if math.isfinite(value) else ""


def is_first_process() -> bool:
    """Whether this process is the only one, or the first of several."""
    import torch

    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or torch.distributed.get_rank() == 0
