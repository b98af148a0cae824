"""Records of `rwsim.DynamicsProbe`: NetCDF of to_netcdf, or the CSV of a CSVWriter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rwsim.page.chart import Axis, Series, chart
from rwsim.page.html import Html, join, tag
from rwsim.page.table import Column, table
from rwsim.report.draw import Mark, forest, spread_of, thin
from rwsim.report.read import Array, File
from rwsim.report.sheet import Sheet, figures, note, num, pct, plural
from rwsim.report.words import AXES

NAME = "probe"
NAMES: tuple[str, ...] = ()
WRITES = "NetCDF or CSV of rwsim.DynamicsProbe"
_LINES = (
    ("measured", "measured", ""),
    ("exact", "equilibrium, exact", "predicted_"),
    ("full", "corrected by what was measured", "corrected_"),
    ("path", "expected way there", "transient_"),
)
_FORMS = (("exact", "equilibrium, exact"), ("full", "corrected"))
# Layers that are drawn over the steps.
_MOST_LAYERS = 12
# What the diagnosis of a probe calls too fast or too slow.
_PACE = 0.05


@dataclass(frozen=True)
class Probe:
    """Averages over the neurons of each layer: name -> (step, layer)."""

    step: Array
    layers: list[str]
    values: Mapping[str, Array]
    facts: Mapping[str, Any]

    def late(self, name: str) -> Array:
        """Mean over the second half of the measured steps, of each layer; NaN where nothing is known."""
        half = self.values[name][len(self.step) // 2 :] if name in self.values else np.full((1, len(self.layers)), np.nan)
        known = np.isfinite(half)
        return np.where(known, half, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)

    def error(self, quantity: str, form: str) -> Array:
        """measured / predicted - 1 over the second half."""
        with np.errstate(all="ignore"):
            return self.late(quantity) / self.late(f"{form}_{quantity}") - 1


def is_mine(file: File) -> bool:
    """Whether a file holds a probe's records."""
    if file.form == "netcdf":
        return str(file.netcdf.attributes.get("title", "")).startswith("rwsim probe")
    return file.form == "csv" and {"step", "layer", "norm", "rotation", "predicted_norm"} <= set(file.header)


def sheet(file: File) -> Sheet:
    """A report of it."""
    probe = _netcdf(file) if file.form == "netcdf" else _csv(file)
    if not len(probe.step) or not probe.layers:
        raise file.damaged("it holds no measured step")
    off = probe.error("rotation", "predicted")
    known = np.isfinite(off)
    near = int((np.abs(off[known]) <= _PACE).sum())
    fast, slow = int((off[known] > _PACE).sum()), int((off[known] < -_PACE).sum())
    verdict = (
        f"In the second half of the measured steps {near} of {plural(int(known.sum()), 'layer')} rotate within 5 % of the prediction, "
        f"{fast} faster, {slow} slower."
    )
    if not known.any():
        verdict = "Nothing is predicted for these layers: the optimizer's rule is not known, or nothing was measured."
    first, last = int(probe.step[0]), int(probe.step[-1])
    return Sheet(
        title=f"Dynamics of {plural(len(probe.layers), 'layer')} over {last:,} steps",
        tone="",
        verdict=verdict,
        summary=[
            f"{plural(len(probe.step), 'measured step')} from {first:,} to {last:,}. These are means, not the diagnosis: probe.diagnose() "
            "also knows whether a layer has settled, and the error of each mean."
        ],
        sections=[("Off the prediction", _errors(probe)), ("Along the training", _along(probe)), ("Layers", _table(probe))],
        facts=[
            ("Date", file.date),
            *probe.facts.items(),
            ("Layers", len(probe.layers)),
            ("Measured steps", len(probe.step)),
            ("Device, seed", None),
            ("Read from", file.name),
        ],
        remark="A probe hangs on a training of yours: run that again. docs/probe.md of rwsim shows how.",
    )


def _netcdf(file: File) -> Probe:
    found = file.netcdf
    values = {name: array for name, (dims, array) in found.variables.items() if dims == ("step", "layer")}
    for name in ("step", "layer"):
        if name not in found.variables:
            raise file.damaged(f"it has no {name}")
    rules = found.variables.get("rule", ((), np.array([])))[1]
    facts = {"rwsim": found.attributes.get("rwsim"), "Rules": ", ".join(dict.fromkeys(str(rule) or "unknown" for rule in rules))}
    return Probe(found.variables["step"][1].astype(float), [str(x) for x in found.variables["layer"][1]], values, facts)


def _csv(file: File) -> Probe:
    columns = file.csv
    names, step = columns.text("layer"), columns.numbers("step")
    layers = list(dict.fromkeys(names.tolist()))
    steps = np.unique(step)
    if not np.isfinite(steps).all():
        raise file.damaged("a line without its step")
    place = np.searchsorted(steps, step), np.searchsorted(np.array(layers)[np.argsort(layers)], names)
    order = np.argsort(layers)
    values = {}
    for name in columns:
        if name not in ("step", "layer"):
            table = np.full((len(steps), len(layers)), np.nan)
            table[place[0], order[place[1]]] = columns.numbers(name)
            values[name] = table
    return Probe(steps, layers, values, {"rwsim": None})


def _errors(probe: Probe) -> Html:
    """Of each layer, a row: measured over predicted and over corrected, less one."""
    drawn = []
    for quantity in ("rotation", "norm"):
        errors = {form: probe.error(quantity, key) for form, key in (("exact", "predicted"), ("full", "corrected"))}
        rows = [
            (layer, [Mark(form, float(errors[form][i])) for form, _ in _FORMS])
            for i, layer in enumerate(probe.layers[: 4 * _MOST_LAYERS])
        ]  # fmt: skip
        drawn.append(forest(f"off-{quantity}", quantity.capitalize(), rows, _FORMS, band=_PACE, label="error, %"))
    return join(
        note("Means over the second half of the measured steps. Shaded: 5 %. What lies beyond the axis is written at its edge."),
        figures(*drawn),
    )


def _along(probe: Probe) -> Html:
    off = np.nan_to_num(np.abs(probe.error("rotation", "predicted")), nan=-1.0)
    chosen = np.sort(np.argsort(-off, kind="stable")[:_MOST_LAYERS]).tolist()
    parts: list[Any] = []
    if len(chosen) < len(probe.layers):
        left = plural(len(probe.layers) - len(chosen), "layer")
        parts.append(note(f"The {len(chosen)} layers whose rotation is furthest off; {left} are left out here and stand in the table."))
    x = thin(probe.step)
    for i in chosen:
        drawn = []
        for quantity in ("rotation", "norm"):
            series = [
                Series(name, style, x.tolist(), thin(probe.values[f"{prefix}{quantity}"][:, i]).tolist())
                for style, name, prefix in _LINES
                if f"{prefix}{quantity}" in probe.values
            ]
            up = Axis(AXES[quantity], spread_of(series) > 8)
            drawn.append(chart(f"along-{i}-{quantity}", quantity.capitalize(), series, Axis("step"), up))
        parts += [tag("h3", probe.layers[i]), figures(*drawn, pairs=True)]
    return join(parts)


def _table(probe: Probe) -> Html:
    heads = [
        "rotation",
        "predicted",
        "off",
        "norm",
        "predicted",
        "off",
        "RMS update",
        "predicted",
        "lambda_u / lambda",
        "scaled gradient",
        "weight-gradient angle, radians",
    ]
    columns = [Column("layer"), *(Column(head, "number") for head in heads)]
    late = {
        name: probe.late(name)
        for name in (
            "rotation",
            "predicted_rotation",
            "norm",
            "predicted_norm",
            "rms_update",
            "predicted_rms_update",
            "lambda_ratio",
            "scaled_grad",
            "weight_grad_angle",
        )
    }
    off = {quantity: probe.error(quantity, "predicted") for quantity in ("rotation", "norm")}
    rows = []
    for i, layer in enumerate(probe.layers):
        cells = {name: num(float(values[i])) for name, values in late.items()}
        rows.append(
            [layer, cells["rotation"], cells["predicted_rotation"], pct(float(off["rotation"][i])), cells["norm"], cells["predicted_norm"],
             pct(float(off["norm"][i])), cells["rms_update"], cells["predicted_rms_update"], cells["lambda_ratio"], cells["scaled_grad"],
             cells["weight_grad_angle"]]
        )  # fmt: skip
    return table("layers", "Means over the second half of the measured steps; rotation in radians per step", columns, rows)
