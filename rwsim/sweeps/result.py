"""A sweep's outcomes as labelled data, with the prediction beside the measurement."""

import csv
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rwsim.errors import StorageError, Unavailable, UnsupportedRule
from rwsim.optimizers import UpdateRule
from rwsim.stats.mcse import estimate
from rwsim.sweeps.grid import Grid, Setting
from rwsim.sweeps.outcome import Outcome
from rwsim.theory.equilibrium import predict_equilibria
from rwsim.theory.transient import time_constants
from rwsim.walk.measure import QUANTITIES
from rwsim.walk.system import Layer

if TYPE_CHECKING:
    import xarray

# A walk counts as settled if this many time constants passed after its burn-in: what it forgets slower looks steady, and is not.
_TIME_CONSTANTS = 2.0
# Windows that an error bar from time alone needs.
_FEW = 4
# Points whose neurons are looked at at a time.
_TOGETHER = 256
UNITS = {
    "norm": "1", "rotation": "radian", "rms_update": "1", "burn_in": "steps", "time_constant": "steps", "diverged": "steps",
    "lr": "1", "weight_decay": "1",
}  # fmt: skip
_LONG = {
    "norm": "root mean square of the weight norm over neurons and time",
    "rotation": "mean rotation per step",
    "rms_update": "root mean square of the gradient part of an update",
    "burn_in": "steps left out before averaging",
    "time_constant": "steps in which the squared norm forgets its start, to leading order in lr times weight decay",
    "settled": "1 if the walk reached equilibrium: steady from its middle on, and two time constants long after the burn-in",
    "diverged": "first step with NaN or Inf (of its window in the fused engine), 0 if there is none",
}


def need_xarray(what: str = "a sweep") -> None:
    """Refuse before the walk, not after it; xarray itself takes a second to load, which a walk need not wait for."""
    if importlib.util.find_spec("xarray") is None:
        raise Unavailable(f"{what} needs xarray for its results, which is not here; pip install 'rwsim[sweep]'.")


def load_xarray() -> None:
    """All that xarray loads, some of it when the first file is written."""
    import xarray as xr

    xr.Dataset({"x": ("y", np.zeros(1))}).to_netcdf(engine="scipy", format="NETCDF3_64BIT")


class Predicted:
    """Predictions of every point at constant hyperparameters: arrays over points, NaN where theory has none.

    Args:
        grid: Of which points.
        heard: Called now and then; may raise.

    Attributes:
        values: Of each quantity, the form (``norm_exact``, ``norm_paper``, ...), and ``time_constant``.
    """

    def __init__(self, grid: Grid, heard: Callable[[], None] | None = None) -> None:
        config, points = grid.config, grid.points
        names = (*(f"{quantity}_{form}" for form in ("exact", "paper") for quantity in QUANTITIES), "time_constant")
        self.values = {name: np.full(len(points), math.nan) for name in names}
        # Expected norm^2, angle and squared RMS update of every neuron, in units of their means: NaN where unknown.
        self.shares = np.full((len(points), 3, config.neurons * config.layers), math.nan)
        groups: dict[tuple[type[UpdateRule], Setting], list[int]] = {}
        for i, point in enumerate(points):
            if point.setting.schedule == "constant":
                groups.setdefault((type(point.rule), point.setting), []).append(i)
        for (kind, setting), members in groups.items():
            layer = Layer.draw(setting.fan_in, config.neurons, setting.batch, setting.loss_scale, config.gamma, config.seed)
            rules = [points[i].rule for i in members]
            try:
                prediction = predict_equilibria(rules, layer.law(config.gradient), heard)
            except UnsupportedRule:
                continue  # measured all the same
            for form, found in (("exact", prediction.exact), ("paper", prediction.paper)):
                if found is not None:
                    for quantity in QUANTITIES:
                        self.values[f"{quantity}_{form}"][members] = getattr(found, quantity)
            self.values["time_constant"][members] = time_constants(kind, rules, prediction.exact)
            exact = prediction.exact
            for q, values in enumerate((exact.norm_sq, exact.angle, exact.update_sq)):
                self.shares[members, q] = np.tile(values / values.mean(-1, keepdims=True), config.layers)


class Measured:
    """What was measured of every point, put together as it comes."""

    def __init__(self, grid: Grid) -> None:
        count = len(grid)
        self.grid = grid
        self.there = np.zeros(count, dtype=bool)
        self.means = np.empty((count, 3, grid.config.neurons * grid.config.layers))
        self.head = np.zeros((count, 3), dtype=np.int32)  # burn-in, divergence, steadiness
        self.errors = np.full((count, 3), math.nan)

    def add(self, point: int, outcome: Outcome) -> None:
        """One point's."""
        self.there[point], self.means[point] = True, outcome.means
        self.head[point] = outcome.burn_in, outcome.diverged, outcome.steady
        if self.grid.config.gradient == "faithful":  # neurons share inputs: the error is that of the layer's mean over time
            window = self.grid.config.window_steps
            full, first = max(1, self.grid.config.steps // window), outcome.burn_in // window
            if not outcome.diverged and full - first >= _FEW:
                self.errors[point] = [estimate(series[:, None]).mcse for series in outcome.traces[:, first:full]]

    def variables(self, predicted: Predicted) -> dict[str, np.ndarray]:
        """Variables over points: what was measured, with errors, and what was predicted."""
        grid, head = self.grid, self.head
        self.means[~self.there] = math.nan
        constant = np.array([point.setting.schedule == "constant" for point in grid.points])
        long = ~(grid.config.steps - head[:, 0] < _TIME_CONSTANTS * predicted.values["time_constant"])
        if grid.config.gradient != "faithful":
            self._independent_errors(predicted)
        # Two are roots of a mean square.
        measured = zip(QUANTITIES, self.means.mean(-1).T, self.errors.T, strict=True)
        variables, errors = {}, {}
        for quantity, x, error in measured:
            variables[quantity] = x if quantity == "rotation" else np.sqrt(x)
            errors[f"{quantity}_mcse"] = error if quantity == "rotation" else error / (2 * variables[quantity])
        settled = (head[:, 2] == 1) & (head[:, 1] == 0) & long & constant
        rest = {"burn_in": head[:, 0], "settled": settled.astype(np.int8), "diverged": head[:, 1]}
        return {**variables, **errors, **predicted.values, **rest}

    def _independent_errors(self, predicted: Predicted) -> None:
        """Standard error of the means over neurons that are independent, each around its own expectation."""
        rows = self.means.shape[-1]
        if rows == 1:
            return
        # Some points at a time: their arrays stay in the processor's cache.
        for first in range(0, len(self.means), _TOGETHER):
            means, shares = self.means[first : first + _TOGETHER], predicted.shares[first : first + _TOGETHER]
            around = means - means.mean(-1, keepdims=True) * np.where(np.isfinite(shares), shares, 1.0)
            self.errors[first : first + _TOGETHER] = np.sqrt((around**2).sum(-1) / (rows * (rows - 1)))


def dataset(grid: Grid, variables: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> "xarray.Dataset":
    """Labelled data: dimensions of the grid, measured and predicted variables, units, provenance."""
    import xarray as xr

    dims = grid.dims
    shape = tuple(dims.values())

    def variable(name: str, array: np.ndarray) -> tuple[Any, ...]:
        base, _, kind = name.rpartition("_") if name.endswith(("_mcse", "_exact", "_paper")) else (name, "", "")
        what = {"mcse": "standard error of the ", "exact": "exact prediction: ", "paper": "Table 1: "}.get(kind, "") + _LONG.get(base, base)
        return tuple(dims), array.reshape(shape), {"units": UNITS.get(base, "1"), "long_name": what}

    coordinates: dict[str, Any] = {"optimizer": list(grid.config.optimizer)}
    for i, axis in enumerate(grid.axes):
        values = axis.values if grid.config.points is None else [row[i] for row in grid.rows]
        dim = axis.name if grid.config.points is None else "point"
        coordinates[axis.name] = (dim, _numbers(values), {"units": UNITS.get(axis.name, "1")})
    if grid.config.points is not None:
        coordinates["point"] = np.arange(len(grid.rows), dtype=np.int32)
    return xr.Dataset({name: variable(name, array) for name, array in variables.items()}, coordinates, dict(attributes))


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """NetCDF 3 has no 64-bit integers."""
    array = np.array(values)
    return array.astype(np.int32) if array.dtype.kind == "i" else array


def provenance(grid: Grid, engine: str, device: str) -> dict[str, Any]:
    """Attributes of the files: settings, versions, when."""
    import torch

    from rwsim import __version__

    config = grid.config
    fixed = config.model_dump(include={"steps", "neurons", "fan_in", "batch", "gradient", "gamma", "layers", "loss_scale", "design"})
    axes = ",".join(f"{axis.name}:{axis.scale}" for axis in grid.axes)
    return {
        **fixed, "window": config.window_steps, "seed": str(config.seed), "axes": axes, "hyper": json.dumps(config.hyper),
        "engine": engine, "device": device, "rwsim": __version__, "torch": torch.__version__, "Conventions": "CF-1.11",
        "title": "rwsim sweep", "created": datetime.now(UTC).isoformat(timespec="seconds"), "configuration": config.model_dump_json(),
    }  # fmt: skip


def traces(grid: Grid, outcomes: Iterable[Outcome | None], attributes: Mapping[str, Any]) -> "xarray.Dataset":
    """Norm, rotation and RMS update of every window, over neurons as in the results; last dimension ``time``."""
    import xarray as xr

    config = grid.config
    dims, window = grid.dims, config.window_steps
    windows = -(-config.steps // window)
    stacked = np.full((len(grid), 3, windows), math.nan)
    for row, outcome in zip(stacked, outcomes, strict=True):
        if outcome is not None:
            row[:] = outcome.traces
    shape = (*dims.values(), windows)
    data = {}
    for q, quantity in enumerate(QUANTITIES):
        values = stacked[:, q] if quantity == "rotation" else np.sqrt(stacked[:, q])
        data[quantity] = ((*dims, "time"), values.reshape(shape), {"units": UNITS[quantity], "long_name": _LONG[quantity]})
    base = dataset(grid, {}, attributes)
    ends = np.minimum(np.arange(1, windows + 1) * window, config.steps).astype(np.int32)
    coordinates = {**base.coords, "time": ("time", ends, {"units": "steps", "long_name": "last step of the window"})}
    return xr.Dataset(data, coordinates, dict(attributes))


def records(data: "xarray.Dataset") -> list[dict[str, Any]]:
    """One flat mapping per point: coordinates, then variables; NaN becomes None."""
    flat = data.stack(row=list(data.sizes), create_index=False)
    columns = {name: flat[name].values.tolist() for name in (*flat.coords, *flat.data_vars) if name != "row"}
    names = list(columns)
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in zip(names, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


def summary(data: "xarray.Dataset") -> Iterator[str]:
    """What happened, in a few lines."""
    total = data["norm_exact"].size
    if "settled" in data:
        settled, ended = int((data["settled"] == 1).sum()), int((data["diverged"] > 0).sum())
        yield f"{total:,} points: {settled:,} in equilibrium, {total - settled - ended:,} not yet, {ended:,} diverged."
    keep = data["settled"] == 1 if "settled" in data else True
    for quantity in QUANTITIES:
        if quantity in data:
            off = np.abs((data[quantity] / data[f"{quantity}_exact"] - 1).where(keep).values)
            off = off[np.isfinite(off)]
            if off.size:
                where = " in equilibrium" if "settled" in data else ""
                yield f"{quantity}{where}: median {np.median(off):.2%} from the exact prediction, 95 % within {np.quantile(off, 0.95):.2%}."


def write_netcdf(data: "xarray.Dataset", path: Path) -> None:
    """NetCDF 3 by way of a file beside it, so that an old result is there until the new one is whole."""
    with whole(path) as draft:
        data.to_netcdf(draft, engine="scipy", format="NETCDF3_64BIT")


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line per point; what is not known is empty."""
    with whole(path) as draft, draft.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class whole:
    """A context that gives a draft's path and puts the draft in place of `path` when it is complete.

    Raises:
        StorageError: The disk is full, the place went away.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.draft = path, path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self.draft

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            try:
                os.replace(self.draft, self.path)
            except OSError as problem:
                error = problem
        if error is not None:
            self.draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}; make room and run again with --resume.") from error
