"""`sweep`: from a configuration to labelled results, by way of a ledger."""

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rwsim.errors import InvalidArgument, WalkInterrupted
from rwsim.sweeps import result, run
from rwsim.sweeps.grid import Grid, SweepConfig
from rwsim.sweeps.ledger import Ledger
from rwsim.sweeps.outcome import Outcome
from rwsim.sweeps.run import EXECUTORS, Interrupted, Plan, Submits, drive, plan, resolve, tasks
from rwsim.walk.simulate import single_threaded

if TYPE_CHECKING:
    import xarray

# Seconds after which Python's threads take turns while cards walk.
_INTERVAL = 2e-4


@dataclass(frozen=True)
class Sweep:
    """A finished sweep.

    Attributes:
        grid: What was walked.
        data: Measured and predicted variables over the grid's dimensions: see `result.dataset`.
        keys: Of the points in the ledger, in order.
        identity: What the ledger says that it holds.
        folder: Where it is.
    """

    grid: Grid
    data: "xarray.Dataset"
    keys: tuple[str, ...]
    identity: Mapping[str, Any]
    folder: Path

    def traces(self) -> "xarray.Dataset":
        """Norm, rotation and RMS update of every window, read from the ledger."""
        ledger = Ledger(self.folder, self.identity, resume=True)
        try:
            return result.traces(self.grid, ledger.get(self.keys), self.data.attrs)
        finally:
            ledger.close()


def sweep(
    config: SweepConfig | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    executor: Any = "local",
    workers: int | None = None,
    scheduler: str = "",
    planned: Callable[[Plan, int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Sweep:
    """Walk every point of a configuration that the ledger lacks, and label what was measured.

    A point's numbers depend on what the point is and on engine and device type, not on batches, order, workers, devices or
    interruptions: a resumed sweep equals an uninterrupted one bit by bit.

    Args:
        config: What to walk: a `SweepConfig`, or its fields.
        out: Folder of ``ledger.sqlite`` and ``sweep.nc``.
        resume: Go on with the ledger that is there.
        executor: ``"local"`` (this process; every visible GPU), ``"processes"``, ``"dask"``, or any object with `submit`.
        workers: Processes or dask workers; by default one per core.
        scheduler: Address of a dask scheduler; by default a cluster of this machine's.
        planned: Called before the first walk with the plan and the number of points that are kept already.
        progress: Called with the number of points finished since.

    Raises:
        InvalidArgument: A configuration that makes no grid, a ledger that cannot be gone on with, a point that does not fit.
        Unavailable: A device, engine or library that is not there.
        StorageError: Results cannot be kept.
        WalkInterrupted: Ctrl-C; finished points are kept.

    Example:
        >>> import tempfile
        >>> config = {"optimizer": ["adamw"], "axes": {"lr": [0.01, 0.02]}, "hyper": {"weight_decay": 0.5}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = sweep({**config, "fan_in": 16, "neurons": 8, "steps": 400}, folder)
        >>> found.data["norm"].dims, found.data["norm"].shape
        (('optimizer', 'lr'), (1, 2))
    """
    result.need_xarray()
    if isinstance(executor, str) and executor not in EXECUTORS:
        raise InvalidArgument("executor", f"must be one of {', '.join(EXECUTORS)}, or an object with submit", executor)
    if workers is not None and workers < 1:
        raise InvalidArgument("workers", "must be at least 1", workers, "leave it out for one a core")
    if not isinstance(config, SweepConfig):
        config = SweepConfig.checked(**config)
    with _frozen():
        return _sweep(config, Path(out), resume, executor, workers, scheduler, planned, progress)


def _sweep(
    config: SweepConfig, folder: Path, resume: bool, executor: Any, workers: int | None, scheduler: str,
    planned: Callable[[Plan, int], None] | None, progress: Callable[[int], None] | None,
) -> Sweep:  # fmt: skip
    grid = Grid.of(config)
    engine, device = resolve(grid)
    keys = grid.keys(engine, device)
    identity = {**config.model_dump(mode="json", exclude={"engine", "device"}), "engine": engine, "device": device}
    ledger = Ledger(folder, identity, resume)
    try:
        measured = result.Measured(grid)
        missing = list(range(len(keys)))
        if ledger.keys():
            kept = ledger.get(keys)
            missing = [i for i, outcome in enumerate(kept) if outcome is None]
            for i, outcome in enumerate(kept):
                if outcome is not None:
                    measured.add(i, outcome)
        # While cards walk the processor is free; the blocked engine has no core to spare for this, and forks.
        with _aside(grid) if device == "cuda" else nullcontext(lambda: result.Predicted(grid)) as predicted:
            if missing:
                _walk(grid, keys, missing, engine, device, ledger, measured, executor, workers, scheduler, planned, progress)
            variables = measured.variables(predicted())
        data = result.dataset(grid, variables, result.provenance(grid, engine, device))
        result.write_netcdf(data, folder / "sweep.nc")
        return Sweep(grid, data, keys, identity, folder)
    finally:
        ledger.close()


@contextmanager
def _frozen() -> Iterator[None]:
    """Garbage is looked for among what is new: with all that torch and sympy hold, one search takes as long as the rest of a start."""
    ours = gc.get_freeze_count() == 0
    gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


@contextmanager
def _aside(grid: Grid) -> Iterator[Callable[[], result.Predicted]]:
    """Predict in a thread; what is given waits for it. An error or Ctrl-C does not: the thread hears of it and ends."""
    ended = threading.Event()

    def heard() -> None:
        if ended.is_set():
            raise CancelledError

    def work() -> result.Predicted:
        predicted = result.Predicted(grid, heard)
        heard()
        result.load_xarray()
        return predicted

    # A thread that launches kernels is not to wait for one that computes: by default 5 ms whenever it waited for a card.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_INTERVAL)
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(work).result
        finally:
            ended.set()
            sys.setswitchinterval(interval)


def _walk(
    grid: Grid, keys: tuple[str, ...], missing: list[int], engine: str, device: str, ledger: Ledger, measured: result.Measured,
    chosen: Any, workers: int | None, scheduler: str, planned: Callable[[Plan, int], None] | None,
    progress: Callable[[int], None] | None,
) -> None:  # fmt: skip
    """Walk the points that are missing, and keep them."""
    points = [grid.points[i] for i in missing]
    # The blocked engine takes every core for one walk; its peer on the CPU takes one.
    count = 1 if chosen == "local" and (engine == "blocked" or device == "cuda") else workers or os.cpu_count() or 1
    found = plan(grid, points, engine, device, count)
    if planned is not None:
        planned(found, len(keys) - len(missing))
    stop = threading.Event()
    work = tasks(grid, points, engine, device, found.batch, 2 * len(found.devices) if device == "cuda" else 0)
    done = 0

    def keep(outcomes: list[tuple[int, Outcome]]) -> None:
        nonlocal done
        ledger.put((keys[missing[i]], outcome) for i, outcome in outcomes)
        for i, outcome in outcomes:
            measured.add(missing[i], outcome)
        done += len(outcomes)
        if progress is not None:
            progress(done)

    context = run.executor(chosen, device, count, scheduler, stop) if isinstance(chosen, str) else _given(chosen, count)
    # How torch shares a sum among threads is not to show in the numbers.
    with single_threaded(), context as (make, flight):
        try:
            drive(work, make, flight, keep, stop)
        except Interrupted:
            held = len(keys) - len(missing) + done
            text = f"interrupted: {held:,} of {len(keys):,} points are kept in {ledger.path.parent}; go on with --resume"
            raise WalkInterrupted(text, 0, None) from None


@contextmanager
def _given(pool: Any, workers: int) -> Iterator[tuple[Callable[[], Submits], int]]:
    """An executor of the caller's, who closes it."""
    if not isinstance(pool, Submits):
        raise InvalidArgument("executor", "must have a method submit", pool)
    yield lambda: pool, 2 * workers
