"""`rwsim sweep`: sweep.nc, sweep.csv or its --json file, on columns over points."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import percent
from rwsim.page.table import Column, table
from rwsim.report.draw import distribution
from rwsim.report.grid import Axis, maps, scatter, slices
from rwsim.report.read import Array, Columns, File
from rwsim.report.sheet import Sheet, figures, note, num, pct, plural
from rwsim.report.words import QUANTITIES, called, heading

NAME = "sweep"
NAMES = ("sweep.nc", "sweep.csv")
WRITES = "sweep.nc, sweep.csv or --json of rwsim sweep"
FORMS = (("exact", "exact prediction"), ("paper", "paper, Table 1"))
# Points that the table holds; more make a page that nobody reads and that opens slowly.
SHOWN = 300
# Optimizers that get figures.
_MOST_OPTIMIZERS = 6


@dataclass(frozen=True)
class Points:
    """A sweep's points: columns, attributes, axes.

    Attributes:
        file: Where they are from.
        columns: One value a point.
        attributes: Provenance; empty for a CSV.
        axes: What was swept.
    """

    file: File
    columns: Columns
    attributes: Mapping[str, Any]
    axes: tuple[Axis, ...]

    def error(self, quantity: str, form: str) -> Array:
        """measured / predicted - 1, NaN where there is none."""
        with np.errstate(all="ignore"):
            found = self.columns.numbers(quantity) / self.columns.numbers(f"{quantity}_{form}") - 1
        return np.where(np.isfinite(found), found, np.nan)

    @property
    def quantities(self) -> list[str]:
        return [name for name in QUANTITIES if name in self.columns]

    @property
    def optimizers(self) -> list[str]:
        return list(dict.fromkeys(self.columns.text("optimizer").tolist()))

    @property
    def settled(self) -> Array:
        """Which points count: those in equilibrium; all of them where that is not known."""
        if "settled" not in self.columns:
            return np.ones(self.columns.rows, dtype=bool)
        return self.columns.numbers("settled") == 1

    @property
    def diverged(self) -> Array:
        return self.columns.numbers("diverged") > 0 if "diverged" in self.columns else np.zeros(self.columns.rows, dtype=bool)


def is_mine(file: File) -> bool:
    """Whether a file is a sweep."""
    if file.form == "netcdf":
        return str(file.netcdf.attributes.get("title", "")).startswith("rwsim sweep")
    if file.form == "json":
        return {"meta", "points"} <= set(file.json)
    return {"optimizer", "norm_exact", "norm_paper"} <= set(file.header)


def sheet(file: File) -> Sheet:
    """A report of it."""
    points = _points(file)
    attributes = points.attributes
    total, settled, diverged = points.columns.rows, int(points.settled.sum()), int(points.diverged.sum())
    known = "settled" in points.columns
    verdict = (
        f"{plural(total, 'point')}: {settled:,} in equilibrium, {total - settled - diverged:,} not yet, {diverged:,} diverged."
        if known
        else f"{plural(total, 'point')} measured elsewhere, beside the predictions."
    )
    of = " in equilibrium" if known else ""
    summary = []
    for quantity in points.quantities:
        off = np.abs(points.error(quantity, "exact")[points.settled])
        off = off[np.isfinite(off)]
        if len(off):
            half, most = (percent(float(np.quantile(off, q)), sign=False) for q in (0.5, 0.95))
            summary.append(f"{heading(quantity)}: half of the points{of} within {half} of the exact prediction, 95 % within {most}.")
    sections: list[tuple[str, Any]] = [
        (
            "How far off",
            join(_off(points), note("Share of the points whose absolute error is at most so large."), figures(*_distributions(points))),
        )
    ]
    for i, optimizer in enumerate(points.optimizers[:_MOST_OPTIMIZERS]):
        sections.append((f"{optimizer}: measured, exact and paper", _drawn(points, optimizer, i)))
    if left := points.optimizers[_MOST_OPTIMIZERS:]:
        sections[-1] = (sections[-1][0], join(sections[-1][1], note(f"Left out here: {', '.join(left)}.")))
    sections.append(("Points", _worst(points)))
    return Sheet(
        title=f"Sweep of {', '.join(points.optimizers)} over {', '.join(axis.label for axis in points.axes) or 'nothing'}",
        tone="",
        verdict=verdict,
        summary=[" ".join(summary)] if summary else [],
        sections=sections,
        facts=_facts(points),
        command=_command(attributes),
        remark="" if attributes else "This file holds no configuration: sweep.nc beside it does.",
    )


def _points(file: File) -> Points:
    """The same columns, whatever the file."""
    attributes: Mapping[str, Any] = {}
    if file.form == "netcdf":
        attributes, columns = file.netcdf.attributes, _flat(file)
    elif file.form == "json":
        attributes, rows = file.json["meta"], file.json["points"]
        if not isinstance(attributes, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise file.damaged("its points are not a list of objects")
        names = list(rows[0]) if rows else []
        columns = Columns(file.name, {name: np.array([row.get(name) for row in rows], dtype=object) for name in names})
    else:
        columns = file.csv
    for name in ("optimizer", "norm_exact", "norm_paper"):
        columns.text(name)
    if not columns.rows:
        raise file.damaged("it holds no point")
    points = Points(file, columns, attributes, _axes(columns, attributes))
    for quantity in points.quantities:
        points.error(quantity, "exact"), points.error(quantity, "paper")  # numbers, or refused here
    return points


def _flat(file: File) -> Columns:
    """Every variable at every point."""
    variables = file.netcdf.variables
    if "norm_exact" not in variables:
        raise InvalidArgument("path", "must be a sweep's sweep.nc", str(file.path), "it holds traces; name sweep.nc beside it")
    dims = variables["norm_exact"][0]
    shape = dict(zip(dims, variables["norm_exact"][1].shape, strict=True))
    found = {}
    for name, (own, values) in variables.items():
        if not set(own) <= set(dims) or values.shape != tuple(shape[dim] for dim in own):
            raise file.damaged(f"{name} has other dimensions than norm_exact")
        where = tuple(slice(None) if dim in own else None for dim in dims)
        ordered = values.transpose([own.index(dim) for dim in dims if dim in own])
        found[name] = np.broadcast_to(ordered[where], tuple(shape.values())).ravel()
    return Columns(file.name, found)


def _axes(columns: Columns, attributes: Mapping[str, Any]) -> tuple[Axis, ...]:
    """From the attribute ``axes``; without it, what comes before the first quantity."""
    text = attributes.get("axes")
    if isinstance(text, str):
        named = [part.rpartition(":") for part in text.split(",") if part]
        pairs = [(name, scale) for name, _, scale in named if name in columns]
    else:
        names = list(columns)
        first = min(names.index(name) for name in names if name in QUANTITIES or name == "norm_exact")
        pairs = [(name, "") for name in names[:first] if name not in ("optimizer", "point")]
    return tuple(Axis.of(name, scale, columns) for name, scale in pairs)


def _off(points: Points) -> Html:
    """Median, 95 % and largest error by optimizer, quantity and form."""
    columns = [Column("optimizer"), Column("quantity"), Column("prediction"), Column("points", "number")]
    columns += [Column(name, "number") for name in ("median", "95 %", "largest")]
    rows = []
    own = points.columns.text("optimizer")
    for optimizer in points.optimizers:
        for quantity in points.quantities:
            for form, said in FORMS:
                off = np.abs(points.error(quantity, form)[points.settled & (own == optimizer)])
                off = off[np.isfinite(off)]
                values = [float(np.quantile(off, q)) for q in (0.5, 0.95, 1.0)] if len(off) else [None] * 3
                rows.append([optimizer, called(quantity), said, num(len(off)), *(pct(value, sign=False) for value in values)])
    what = "points in equilibrium" if "settled" in points.columns else "all points"
    return table("off", f"Absolute relative error, measured over predicted, of {what}", columns, rows)


def _distributions(points: Points) -> list[Html]:
    found = []
    for quantity in points.quantities:
        errors = [(said, form, points.error(quantity, form)[points.settled]) for form, said in FORMS]
        found.append(distribution(f"share-{quantity}", heading(quantity), errors))
    return found


def _drawn(points: Points, optimizer: str, i: int) -> Html:
    """Figures along the axes of a grid; of a random design measured over predicted."""
    mine = np.flatnonzero(points.columns.text("optimizer") == optimizer)
    axes = [axis for axis in points.axes if axis.varies and axis.numeric]
    on_grid = bool(axes) and "point" not in points.columns
    parts: list[Any] = []
    if on_grid and len(axes) > 1:
        parts += [tag("h3", "Error of the exact prediction"), maps(points, mine, axes, f"map-{i}")]
    if on_grid:
        along = f"Along {axes[0].label}" + (f", at some values of {axes[1].label}" if len(axes) > 1 else "")
        parts += [tag("h3", along), slices(points, mine, axes, f"slice-{i}")]
    else:
        parts += [tag("h3", "Measured over predicted"), scatter(points, mine, f"scatter-{i}")]
    return join(parts)


def _worst(points: Points) -> Html:
    """All points, or those that are furthest off, with what was left out."""
    errors = {q: points.error(q, "exact") for q in points.quantities}
    off = np.nan_to_num(np.max(np.abs([*errors.values()] or [np.zeros(points.columns.rows)]), axis=0), nan=-1.0)
    total = points.columns.rows
    # Those in equilibrium first: what has not settled is far off for another reason.
    order = np.lexsort((-off, ~points.settled))[:SHOWN]
    columns = [Column("point", "number"), Column("optimizer")] if len(points.optimizers) > 1 else [Column("point", "number")]
    columns += [Column(axis.label, "number" if axis.numeric else "text") for axis in points.axes]
    for quantity in points.quantities:
        columns += [Column(called(quantity), "number"), Column("exact", "number"), Column("off", "number")]
        columns += [Column("paper", "number")]
    known = "settled" in points.columns
    columns += [Column("state"), Column("burn-in, steps", "number")] if known else []
    text = points.columns.text("optimizer")
    values = {name: points.columns.numbers(name) for q in points.quantities for name in (q, f"{q}_exact", f"{q}_paper")}
    burn = points.columns.numbers("burn_in") if "burn_in" in points.columns else np.full(total, np.nan)
    rows = []
    for i in order.tolist():
        row: list[Any] = [num(i), text[i]] if len(points.optimizers) > 1 else [num(i)]
        row += [num(float(axis.values[i]), 3) if axis.numeric else str(axis.values[i]) for axis in points.axes]
        for q in points.quantities:
            row += [
                num(float(values[q][i])),
                num(float(values[f"{q}_exact"][i])),
                pct(float(errors[q][i])),
                num(float(values[f"{q}_paper"][i])),
            ]
        if known:
            row += ["diverged" if points.diverged[i] else "equilibrium" if points.settled[i] else "not yet", num(float(burn[i]))]
        rows.append(row)
    left = total - len(order)
    said = f"All {plural(total, 'point')}, those in equilibrium first, the furthest off first."
    if left:
        said = f"{plural(len(order), 'point')} of {total:,}: those in equilibrium first, the furthest from the exact prediction first."
    rest = note(f"{plural(left, 'point')} are left out of this table; {points.file.name} has them all.") if left else None
    return join(table("points", said, columns, rows), rest)


def _facts(points: Points) -> list[tuple[str, Any]]:
    get = points.attributes.get
    return [
        ("Date", get("created") or points.file.date), ("rwsim", get("rwsim")), ("torch", get("torch")),
        ("Device, engine", f"{get('device')}, {get('engine')}" if get("device") else None), ("Seed", get("seed")),
        ("Steps, window", [get("steps"), get("window")] if get("steps") else None),
        ("Neurons, fan-in, batch", [get(k) for k in ("neurons", "fan_in", "batch")] if get("neurons") else None),
        ("Gradient, gammas", f"{get('gradient')}, {get('gamma')}" if get("gradient") else None), ("Design", get("design")),
        ("Axes", ", ".join(f"{axis.name}: {axis.said}" for axis in points.axes)), ("Fixed hyperparameters", _loaded(get("hyper"))),
        ("Read from", points.file.name),
    ]  # fmt: skip


def _loaded(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _command(attributes: Mapping[str, Any]) -> str:
    """Options that give the configuration again, or the configuration itself where an option is missing for something."""
    from rwsim.sweeps.grid import SweepConfig

    config = _loaded(attributes.get("configuration"))
    if not isinstance(config, dict):
        return ""
    title = str(attributes.get("title", ""))
    words = ["rwsim", "sweep"]
    if title.startswith("rwsim sweep --log "):
        words += ["--log", title.removeprefix("rwsim sweep --log ")]
    for name in _list(config.get("optimizer")):
        words += ["--optimizer", str(name)]
    axes = config.get("axes")
    for name, spec in axes.items() if isinstance(axes, dict) else ():
        text = ",".join(map(str, spec)) if isinstance(spec, list) else str(spec)
        words += ["--axis", f"{name}={text}"] if text else []
    hyper = config.get("hyper")
    for name, value in hyper.items() if isinstance(hyper, dict) else ():
        words += [f"--{name.replace('_', '-')}", *map(str, _list(value))]
    for name, field in SweepConfig.model_fields.items():
        value = config.get(name)
        if name not in ("optimizer", "axes", "hyper") and value is not None and value != field.default:
            if name != "points" or config.get("design") != "random" or "--log" not in words:
                words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
