"""`rwsim validate`: validation.json, and walk.csv beside it."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rwsim.page.chart import Axis, Series, chart
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import percent, share
from rwsim.page.table import Column, table
from rwsim.report.draw import Mark, forest, spread_of, thin
from rwsim.report.read import Columns, File, checked
from rwsim.report.sheet import BAD, GOOD, UNSURE, Sheet, figures, known, note, num, pct, plural, tone
from rwsim.report.words import AXES, FORMS, QUANTITIES, called, heading

NAME = "validate"
NAMES = ("validation.json",)
WRITES = "validation.json of rwsim validate"
TONES = {"agrees": GOOD, "differs": BAD, "undecided": UNSURE}


class _Record(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    optimizer: str
    hyper: dict[str, Any]
    loss_scale: float
    quantity: str
    measured: float | None
    mcse: float | None
    predicted: dict[str, float | None]
    relative_error: dict[str, float | None]
    verdict: str
    reason: str = ""
    margin: float
    interval: float | None = None
    burn_in: int | None = None
    steps: int | None = None


class _Validation(BaseModel):
    meta: dict[str, Any]
    records: list[_Record]


def is_mine(file: File) -> bool:
    """Whether a file is a validation."""
    if file.form != "json" or not {"meta", "records"} <= set(file.json):
        return False
    records = file.json["records"]
    return isinstance(records, list) and all(isinstance(one, dict) and "verdict" in one for one in records)


def sheet(file: File) -> Sheet:
    """A report of it."""
    found = checked(_Validation, file)
    meta, records = found.meta, found.records
    cases: dict[str, list[_Record]] = {}
    for record in records:
        cases.setdefault(_label(record), []).append(record)
    names = _short_names(cases)
    margin = max((record.margin for record in records), default=0.01)
    walk = file.path.with_name("walk.csv")
    sections: list[tuple[str, Any]] = []
    if records:
        shown = [_errors(quantity, cases, names, margin) for quantity in QUANTITIES]
        explained = note(
            f"Measured over predicted, less one. Shaded: the margin of {share(margin)}. Bars: the interval of the verdict, "
            "which follows the full prediction. What lies beyond the axis is written at its edge."
        )
        sections = [("Errors of the predictions", join(explained, figures(*shown))), ("Every quantity", _table(records))]
    if walk.is_file():
        sections.append(("The walks", _walks(File.of(walk).csv, cases, names)))
    verdict, colour = _verdict(meta, records)
    return Sheet(
        title=f"Validation: {', '.join(dict.fromkeys(r.optimizer for r in records)) or 'nothing finished'}",
        tone=colour,
        verdict=verdict,
        summary=_summary(records, cases, names),
        sections=sections,
        facts=[
            ("Date", meta.get("created") or file.date), ("rwsim", meta.get("rwsim")), ("torch", meta.get("torch")),
            ("Device, engine", f"{meta.get('device')}, {meta.get('engine')} (as asked for)"), ("Seed", meta.get("seed")),
            ("Steps", meta.get("steps")), ("Neurons, fan-in, batch", [meta.get(k) for k in ("neurons", "fan_in", "batch")]),
            ("Gradient, gammas", f"{meta.get('gradient')}, {meta.get('gamma')}"), ("Margin", share(margin)),
            ("False-alarm rate", meta.get("false_alarm_rate")), ("Took", f"{meta.get('seconds')} s"), ("Read from", file.name),
        ],
        command=_command(meta, cases),
    )  # fmt: skip


def _label(record: _Record) -> str:
    """As the column `optimizer` of walk.csv has it."""
    text = " ".join(
        f"{k}={'/'.join(f'{x:g}' for x in v) if isinstance(v, list) else f'{v:g}'}" for k, v in record.hyper.items() if k != "eps" or v
    )
    return f"{record.optimizer} {text} loss_scale={record.loss_scale:g}"


def _short_names(cases: Mapping[str, list[_Record]]) -> dict[str, str]:
    """The optimizer, with what tells it from others of its name."""
    found = {}
    for label, (first, *_) in cases.items():
        twins = [one for (one, *_) in cases.values() if one.optimizer == first.optimizer]
        differ = [k for k, v in first.hyper.items() if any(one.hyper.get(k) != v for one in twins)]
        values = (first.hyper[k] for k in differ)
        found[label] = " ".join([first.optimizer, *("/".join(f"{x:g}" for x in v) if isinstance(v, list) else f"{v:g}" for v in values)])
    return found


def _verdict(meta: Mapping[str, Any], records: list[_Record]) -> tuple[str, str]:
    if meta.get("status", "complete") != "complete":
        return f"Ended early, nothing is decided: {meta.get('message') or meta['status']}", BAD
    if not records:
        return "Nothing was measured.", UNSURE
    margin = share(max(record.margin for record in records))
    count = {verdict: sum(record.verdict == verdict for record in records) for verdict in TONES}
    if count["agrees"] == len(records):
        return f"Agrees: all {plural(len(records), 'quantity', 'quantities')} lie within {margin} of the full prediction.", GOOD
    rest = [f"{n} {'differ' if n > 1 and verdict == 'differs' else verdict}" for verdict, n in count.items() if n and verdict != "agrees"]
    said = f"{' and '.join(rest)} of {plural(len(records), 'quantity', 'quantities')}, at a margin of {margin}."
    return f"{'Does not agree' if count['differs'] else 'Undecided'}: {said}", BAD if count["differs"] else UNSURE


def _summary(records: list[_Record], cases: Mapping[str, list[_Record]], names: Mapping[str, str]) -> list[str]:
    parts = []
    for form, said in FORMS:
        errors = [(abs(r.relative_error[form] or 0), r) for r in records if known(r.relative_error.get(form))]
        if errors:
            most, worst = max(errors, key=lambda one: one[0])
            what = f"{names[_label(worst)]} {called(worst.quantity)}"
            parts.append(f"{said} at most {percent(most, sign=False)} off ({what})")
    if not parts:
        return []
    return [f"{plural(len(cases), 'random walk')}, measured after burn-in. Beside the measurement: {'; '.join(parts)}."]


def _errors(quantity: str, cases: Mapping[str, list[_Record]], names: Mapping[str, str], margin: float) -> Html:
    rows = []
    for label, records in cases.items():
        for record in records:
            if record.quantity == quantity:
                marks = [Mark(form, record.relative_error.get(form), record.interval if form == "full" else None) for form, _ in FORMS]
                rows.append((names[label], marks))
    return forest(f"errors-{quantity}", heading(quantity), rows, FORMS, band=margin, label="error, %")


def _table(records: list[_Record]) -> Html:
    columns = [
        Column("optimizer"), Column("quantity"), Column("measured", "number"), Column("± mcse", "number"), Column("full", "number"),
        Column("its error", "number"), Column("exact", "number"), Column("its error", "number"), Column("paper", "number"),
        Column("its error", "number"), Column("verdict"), Column("hyperparameters"), Column("burn-in, steps", "number"),
        Column("walked, steps", "number"), Column("reason"),
    ]  # fmt: skip
    rows = []
    for r in records:
        relative = r.mcse / r.measured if r.mcse is not None and r.measured else None
        forms = [cell for form, _ in FORMS for cell in (num(r.predicted.get(form)), pct(r.relative_error.get(form)))]
        hyper = _label(r).removeprefix(f"{r.optimizer} ")
        rows.append(
            [
                r.optimizer,
                called(r.quantity),
                num(r.measured),
                pct(relative, sign=False),
                *forms,
                tone(r.verdict, TONES.get(r.verdict, "")),
                hyper,
                num(r.burn_in),
                num(r.steps),
                r.reason,
            ]
        )
    caption = (
        "Measured and predicted. Error: measured over predicted, less one; ± mcse: one standard error of the measurement; "
        "rotation in radians per step"
    )
    return table("records", caption, columns, rows)


def _walks(walk: Columns, cases: Mapping[str, list[_Record]], names: Mapping[str, str]) -> Html:
    """Norm, rotation and RMS update along the walk, with the levels that were predicted."""
    labels = walk.text("optimizer")
    step = walk.numbers("step")
    parts: list[Any] = [note("Means over the layer, window by window; levels: what was predicted for equilibrium.")]
    for i, label in enumerate(dict.fromkeys(labels.tolist())):
        mine = labels == label
        records = {record.quantity: record for record in cases.get(label, [])}
        parts += [tag("h3", names.get(label, label)), note(label)]
        drawn = []
        for quantity in QUANTITIES:
            x, y = thin(step[mine]), thin(walk.numbers(quantity)[mine])
            series = [Series("measured", "measured", x.tolist(), y.tolist())]
            for form, name in FORMS:
                level = records[quantity].predicted.get(form) if quantity in records else None
                if known(level):
                    series.append(Series(name, form, [float(x[0]), float(x[-1])], [level, level]))  # type: ignore[list-item]
            up = Axis(AXES[quantity], spread_of(series[:1]) > 20)
            drawn.append(chart(f"walk-{i}-{quantity}", heading(quantity), series, Axis("step"), up))
        parts.append(figures(*drawn))
    return join(parts)


def _command(meta: Mapping[str, Any], cases: Mapping[str, list[_Record]]) -> str:
    from rwsim.config import PAPER_CASES, Settings

    def plain(optimizer: str, scale: float, hyper: Mapping[str, Any]) -> str:
        return json.dumps(
            [optimizer, scale, {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(hyper.items()) if k != "eps" or v}]
        )

    walked = [plain(r.optimizer, r.loss_scale, r.hyper) for (r, *_) in cases.values()]
    paper = {plain(name, scale, hyper): name for name, scale, hyper in PAPER_CASES}
    words = ["rwsim", "validate"]
    if walked != list(paper) and not (meta.get("status", "complete") != "complete" and set(walked) <= set(paper)):
        for name in dict.fromkeys(r.optimizer for (r, *_) in cases.values()):
            words += ["--optimizer", name]
        if len(walked) == 1:
            ((record, *_),) = cases.values()
            for key, value in record.hyper.items():
                if key != "eps" or value:
                    words += [f"--{key.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    defaults = Settings()
    for key in type(defaults).model_fields:
        value = meta.get(key)
        if key != "window" and value is not None and value != getattr(defaults, key):
            words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)
