"""`rwsim plan`: plan.json of --out, or its --json file."""

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rwsim.page.chart import Axis, Series, chart
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import number
from rwsim.page.table import Column, table
from rwsim.report.read import File, checked
from rwsim.report.sheet import GOOD, UNSURE, Sheet, figures, note, num, pct, plural
from rwsim.report.words import AXES, heading

NAME = "plan"
NAMES = ("plan.json",)
WRITES = "plan.json of rwsim plan"
# Layers that are drawn.
_MOST_LAYERS = 12


class _Layer(BaseModel):
    name: str
    fan_in: int
    start_norm: float | None = None
    time_constant: float | None = None
    reached: int | None = None
    share: float | None = None
    transient: float | None = None
    lag: float | None = None
    eta_r: float | None = None
    eta_g: float | None = None
    hyper: dict[str, Any] = {}
    path: dict[str, list[float | None]]


class _Plan(BaseModel):
    meta: dict[str, Any]
    layers: list[_Layer]
    warnings: list[str]


def is_mine(file: File) -> bool:
    """Whether a file is a plan."""
    return file.form == "json" and {"meta", "layers", "warnings"} <= set(file.json)


def sheet(file: File) -> Sheet:
    """A report of it."""
    found = checked(_Plan, file)
    meta, layers = found.meta, found.layers
    if not layers:
        raise file.damaged("it holds no layer")
    for layer in layers:
        if {len(values) for values in layer.path.values()} != {len(layer.path.get("step", ()))}:
            raise file.damaged(f"the path of {layer.name} has no steps or columns of different lengths")
    count = len(found.warnings)
    verdict = (
        f"{plural(count, 'warning')} for {plural(len(layers), 'layer')}."
        if count
        else f"Nothing to warn of in {plural(len(layers), 'layer')}."
    )
    summary: list[Any] = [tag("span", warning) for warning in found.warnings[:20]]
    if count > 20:
        summary.append(f"{count - 20} more warnings are left out here.")
    sections: list[tuple[str, Any]] = [("What will happen", join(_drawn(layers))), ("Layers", _table(layers))]
    return Sheet(
        title=f"Plan: {meta.get('optimizer')}, {number(meta['steps']) if isinstance(meta.get('steps'), int) else meta.get('steps')} steps",
        tone=UNSURE if count else GOOD,
        verdict=verdict,
        summary=summary,
        sections=sections,
        facts=[
            ("Date", file.date), ("rwsim", meta.get("rwsim")), ("Optimizer", meta.get("optimizer")),
            ("Steps", meta.get("steps")), ("Device", "none: a plan simulates nothing"), ("Hyperparameters at the peak", layers[0].hyper),
            ("Read from", file.name),
        ],
        command=_command(meta, layers),
        remark="A plan does not record its schedule's name: add --schedule and --warmup; the learning rate is drawn above.",
    )  # fmt: skip


def _drawn(layers: list[_Layer]) -> list[Html | None]:
    parts: list[Html | None] = []
    for i, layer in enumerate(layers[:_MOST_LAYERS]):
        step = [float(v or 0) for v in layer.path["step"]]
        drawn = []
        for quantity in ("norm", "rotation", "lr"):
            series = []
            for style, name, key in (
                ("exact", "equilibrium of the moment", f"equilibrium_{quantity}"),
                ("path", "expected path", quantity),
            ):
                if key in layer.path:
                    values = [float("nan") if v is None else v for v in layer.path[key]]
                    series.append(Series("" if quantity == "lr" else name, "measured" if quantity == "lr" else style, step, values))
            values = [v for one in series for v in one.y if v > 0]
            log = quantity == "norm" and bool(values) and max(values) > 8 * min(values)
            drawn.append(chart(f"path-{i}-{quantity}", heading(quantity), series, Axis("step"), Axis(AXES[quantity], log)))
        parts += [tag("h3", layer.name), figures(*drawn)]
    if len(layers) > _MOST_LAYERS:
        parts.append(note(f"{plural(len(layers) - _MOST_LAYERS, 'layer')} are not drawn; the table has them all."))
    return parts


def _table(layers: list[_Layer]) -> Html:
    columns = [
        Column("layer"),
        *(
            Column(x, "number")
            for x in (
                "fan-in",
                "norm at the start",
                "at the end",
                "time constant, steps",
                "equilibrium at step",
                "share in it",
                "rotation before it, of the intended",
                "at the end, of the intended",
                "eta_r, radians",
                "eta_g",
            )
        ),
    ]
    rows = []
    for layer in layers:
        last = (layer.path.get("norm") or [None])[-1]
        rows.append(
            [
                layer.name,
                num(layer.fan_in),
                num(layer.start_norm),
                num(last),
                num(layer.time_constant),
                num(layer.reached),
                pct(layer.share, sign=False),
                num(layer.transient),
                num(layer.lag),
                num(layer.eta_r),
                num(layer.eta_g),
            ]
        )
    return table("layers", "What will happen to each layer; missing: never", columns, rows)


def _command(meta: Mapping[str, Any], layers: list[_Layer]) -> str:
    first = layers[0]
    words = ["rwsim", "plan", "--optimizer", str(meta.get("optimizer")), "--steps", str(meta.get("steps")), "--fan-in", str(first.fan_in)]
    words += ["--init-norm", f"{first.start_norm:g}"] if first.start_norm is not None else []
    for key, value in first.hyper.items():
        if key != "eps" or value:
            words += [f"--{key.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)
