"""The user's own measurements beside the predictions: a CSV of norms or angles with hyperparameters."""

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rwsim.errors import InvalidArgument
from rwsim.optimizers import find_rule
from rwsim.sweeps import result
from rwsim.sweeps.grid import SETTINGS, Axis, Grid, SweepConfig, entries
from rwsim.walk.measure import QUANTITIES

if TYPE_CHECKING:
    import xarray

# Column -> quantity and factor.
_MEASURED = {
    **{name: (name, 1.0) for name in QUANTITIES}, **{f"{name}_mcse": (f"{name}_mcse", 1.0) for name in QUANTITIES},
    "angle": ("rotation", 1.0), "angle_deg": ("rotation", math.pi / 180),
}  # fmt: skip


def read_log(path: Path, config: SweepConfig) -> "xarray.Dataset":
    """Measurements from a CSV with a header, and predictions for the hyperparameters of every line.

    Columns: hyperparameters as axes are named (lr, weight_decay, momentum, beta_1, ...) and settings (batch, fan_in,
    loss_scale), whatever varies; the others are fixed by `config`. Measured: norm, rotation (radians per step; or angle, or
    angle_deg), rms_update, each with its error ``..._mcse`` if there is one. Other columns are ignored; an empty field is
    unknown.

    Args:
        path: The CSV.
        config: One optimizer, its fixed hyperparameters, and the layer; `axes` and everything about the walk is ignored.

    Returns:
        Data as a sweep's, dimensions (optimizer, point), without settled and burn_in.

    Raises:
        InvalidArgument: No such file, no column that is known, a field that is no number, a value out of its range.
    """
    result.need_xarray()
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument("log", "must be a readable CSV", str(path), str(error)) from None
    if len(config.optimizer) != 1:
        raise InvalidArgument("optimizer", "must be one for a log", config.optimizer)
    header = [name for name in (lines[0] if lines else {}) if name]
    known = [*entries(find_rule(config.optimizer[0])), *(name for name in SETTINGS if name != "schedule")]
    swept, found = [name for name in header if name in known], [name for name in header if name in _MEASURED]
    if not lines or not swept or not found:
        remedy = f"it needs a header, a hyperparameter ({', '.join(known)}) and a measurement ({', '.join(_MEASURED)})"
        raise InvalidArgument("log", "must hold measurements", str(path), remedy)
    if len({_MEASURED[name][0] for name in found}) < len(found):
        raise InvalidArgument("log", "must give a quantity once", ", ".join(found), "drop one of the columns")

    def number(line: int, name: str) -> float:
        text = (lines[line][name] or "").strip()
        try:
            return float(text) if text else math.nan
        except ValueError:
            raise InvalidArgument(f"log, line {line + 2}, {name}", "must be a number", text, "leave it empty if unknown") from None

    columns = {name: [number(i, name) for i in range(len(lines))] for name in (*swept, *found)}
    for name in swept:
        if (missing := next((i for i, x in enumerate(columns[name]) if not math.isfinite(x)), None)) is not None:
            raise InvalidArgument(
                f"log, line {missing + 2}, {name}",
                "must be a finite number",
                lines[missing][name],
                "leave the cell empty if it is not known",
            )
    axes = tuple(Axis(name, tuple(dict.fromkeys(columns[name])), "list") for name in swept)
    rows = tuple(zip(*([int(x) if SETTINGS.get(name) is int else x for x in columns[name]] for name in swept), strict=True))
    config = config.model_copy(update={"points": len(rows), "design": "random", "replicates": 1, "axes": {n: [] for n in swept}})
    grid = Grid(config, axes, rows, (find_rule(config.optimizer[0]),))
    variables = dict(result.Predicted(grid).values)
    for name in found:
        quantity, factor = _MEASURED[name]
        variables[quantity] = np.array(columns[name]) * factor
    return result.dataset(grid, variables, {**result.provenance(grid, "none", "none"), "title": f"rwsim sweep --log {path.name}"})
