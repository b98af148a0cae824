"""`rwsim experiment`: settings.json, table.csv, summary.md and records.csv.gz, or its --json file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from rwsim.errors import InvalidArgument
from rwsim.page.chart import Axis, Series, chart
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import number
from rwsim.page.table import Column, table
from rwsim.report import study
from rwsim.report.draw import Mark, forest, spread_of, thin
from rwsim.report.read import Array, Columns, File, checked
from rwsim.report.sheet import BAD, GOOD, UNSURE, Sheet, figures, known, note, num, pct, plural, said, tone

NAME = "experiment"
NAMES = ("settings.json",)
WRITES = "settings.json and table.csv of rwsim experiment, or its --json"
_TONES = {"inside": GOOD, "outside": BAD, "undecided": UNSURE}
_FORMS = (("measured", "predicted"), ("exact", "corrected"), ("paper", "paper, Table 1"))
# Layers of a case that are drawn over the steps: the furthest off, and the middle one.
_SERIES = (
    ("measured", "measured, mean of the seeds", ""),
    ("path", "predicted path", "path_"),
    ("exact", "equilibrium, exact", "predicted_"),
)


class _Row(BaseModel):
    case: str
    layer: str
    fan_in: int
    invariant: bool
    quantity: str
    band: float
    verdict: str
    measured: float | None = None
    predicted: float | None = None
    error: float | None = None
    interval: float | None = None
    paper: float | None = None
    corrected: float | None = None
    note: str = ""


class _Settings(BaseModel):
    experiment: str
    cases: dict[str, dict[str, Any]]


class _Result(BaseModel):
    meta: dict[str, Any]
    rows: list[_Row]
    says: list[str]


def is_mine(file: File) -> bool:
    """Whether a file is of an experiment."""
    return file.form == "json" and (
        (file.name == "settings.json" and "experiment" in file.json) or {"rows", "says", "meta"} <= set(file.json) or study.is_mine(file)
    )


def sheet(file: File) -> Sheet:
    """A report of it."""
    if study.is_mine(file):
        if "stages" in file.json:
            _table_beside(file)
        meta = file.json.get("meta", file.json)
        says = file.json["says"] if "says" in file.json else _paragraphs(file)
        return study.sheet(file, [_bold(str(paragraph)) for paragraph in says], _facts(meta, file))
    if "rows" in file.json:
        result = checked(_Result, file)
        meta, rows, says, records = result.meta, result.rows, result.says, None
    else:
        checked(_Settings, file)
        meta = file.json
        rows = _rows(file)
        says = _paragraphs(file)
        kept = file.path.with_name("records.csv.gz")
        records = File.of(kept).csv if kept.is_file() else None
    judged = [row for row in rows if row.verdict in _TONES]
    sections: list[tuple[str, Any]] = [("Verdicts", _counts(rows))]
    if says[1:]:
        sections.append(("Case by case", join(tag("p", _bold(paragraph)) for paragraph in says[1:])))
    if errors := _errors(rows):
        sections.append(("Errors by layer", errors))
    if records is not None:
        sections.append(("Along the training", _trainings(rows, records)))
    sections.append(("Every layer and quantity", _table(rows)))
    verdict, colour = _verdict(judged)
    name = str(meta.get("experiment", "experiment"))
    return Sheet(
        title=f"Experiment: {name}",
        tone=colour,
        verdict=verdict,
        summary=[_bold(paragraph) for paragraph in says[:1]],
        sections=sections,
        facts=_facts(meta, file),
        command=str(meta.get("command") or ""),
        remark="" if meta.get("command") else "This file holds no command; settings.json of its directory does.",
    )


def _table_beside(file: File) -> Path:
    """table.csv of its directory."""
    place = file.path.with_name("table.csv")
    if not place.is_file():
        unfinished = (file.path.parent / "runs").is_dir()
        remedy = "rwsim experiment --resume finishes it" if unfinished else "rwsim experiment --replot writes it"
        raise InvalidArgument("path", "must hold table.csv of a finished experiment", str(file.path.parent), remedy)
    return place


def _rows(file: File) -> list[_Row]:
    columns = File.of(_table_beside(file)).csv
    found = []
    texts = {name: columns.text(name) for name in ("case", "layer", "invariant", "quantity", "verdict", "note")}
    numbers = {
        name: columns.numbers(name) for name in ("fan_in", "band", "measured", "predicted", "error", "interval", "paper", "corrected")
    }
    for i in range(columns.rows):
        values = {name: float(column[i]) if np.isfinite(column[i]) else None for name, column in numbers.items()}
        words = {name: str(column[i]) for name, column in texts.items()}
        fan_in, band = int(values.pop("fan_in") or 0), values.pop("band") or 0.0
        invariant = words.pop("invariant") == "True"
        found.append(_Row(fan_in=fan_in, band=band, invariant=invariant, **words, **values))
    return found


def _paragraphs(file: File) -> list[str]:
    """The paragraphs of summary.md: what is no heading, no table, and not the line that tells how it was run."""
    place = file.path.with_name("summary.md")
    try:
        text = place.read_text(encoding="utf-8") if place.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("path", "must hold a readable summary.md", str(place), type(error).__name__) from None
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    return [block for block in blocks if block and block[0] not in "#|" and not block.endswith("`")]


def _bold(text: str) -> Html:
    """What a summary uses of Markdown: **bold**."""
    pieces = re.split(r"\*\*(.+?)\*\*", text)
    return join(tag("strong", piece) if i % 2 else piece for i, piece in enumerate(pieces))


def _verdict(judged: Sequence[_Row]) -> tuple[str, str]:
    count = {verdict: sum(row.verdict == verdict for row in judged) for verdict in _TONES}
    told = f"{count['inside']} are inside their bands, {count['outside']} outside, {count['undecided']} undecided"
    if not judged:
        return "Nothing is judged.", UNSURE
    if count["inside"] == len(judged):
        return f"Holds: all {plural(len(judged), 'judged quantity', 'judged quantities')} are inside their bands.", GOOD
    word = "Does not hold everywhere" if count["outside"] else "Undecided"
    return f"{word}: of {plural(len(judged), 'judged quantity', 'judged quantities')} {told}.", BAD if count["outside"] else UNSURE


def _counts(rows: Sequence[_Row]) -> Html:
    columns = [
        Column("case"),
        Column("quantity"),
        *(Column(x, "number") for x in (*_TONES, "median |error|", "largest |error|", "median corrected")),
    ]
    groups: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        if row.verdict in _TONES:
            groups.setdefault((row.case, row.quantity), []).append(row)
    found = []
    for (case, quantity), own in groups.items():
        off = [abs(row.error) for row in own if row.error is not None]
        mended = [abs(row.corrected) for row in own if row.corrected is not None]
        counts = [num(sum(row.verdict == verdict for row in own)) for verdict in _TONES]
        middle = [pct(float(np.median(values)) if values else None, sign=False) for values in (off, mended)]
        found.append([case, quantity, *counts, middle[0], pct(max(off, default=None), sign=False), middle[1]])
    return table("counts", "Judged layers by case and quantity", columns, found)


def _errors(rows: Sequence[_Row]) -> Html | None:
    """Relative errors of norm and rotation, a row a layer."""
    drawn: list[Html] = []
    for case in dict.fromkeys(row.case for row in rows):
        for quantity in ("rotation", "norm", "rotation path", "norm path"):
            own = [row for row in rows if row.case == case and row.quantity == quantity and row.error is not None]
            if not own:
                continue
            band = own[0].band or 0.05
            reach = max(5 * band, min(0.6, 1.05 * max(abs(row.error or 0) for row in own)))
            lanes = [
                (
                    row.layer + ("" if row.invariant else " ∘"),
                    [Mark("measured", row.error, row.interval), Mark("exact", row.corrected), Mark("paper", row.paper)],
                )
                for row in own
            ]
            drawn.append(
                forest(
                    f"error-{len(drawn)}",
                    f"{case}: {quantity}",
                    lanes,
                    _FORMS,
                    band=band,
                    label="error, %",
                    reach=reach,
                )
            )
    if not drawn:
        return None
    words = (
        "Measured over predicted, less one. Shaded: the band. Bars: 95 % intervals. Corrected: what is left with the measured departures "
        "from a random walk put in. ∘: not scale-invariant."
    )
    return join(note(words), figures(*drawn))


def _trainings(rows: Sequence[_Row], records: Columns) -> Html:
    """Of each case the furthest-off layer and the middle one, over the steps."""
    case_of, layer_of = records.text("case"), records.text("layer")
    step, seed = records.numbers("step"), records.text("seed")
    parts: list[Any] = [note("Of each case the layer whose rotation is furthest off and the one in the middle; means of the seeds.")]
    for c, case in enumerate(dict.fromkeys(case_of.tolist())):
        own = [r for r in rows if r.case == case and r.quantity in ("rotation", "rotation path") and known(r.error)]
        if not own:
            continue
        own.sort(key=lambda row: abs(row.error or 0))
        chosen = dict.fromkeys([own[-1].layer, own[len(own) // 2].layer])
        drawn = []
        for k, layer in enumerate(chosen):
            mine = (case_of == case) & (layer_of == layer)
            if not mine.any():
                continue
            for quantity, unit in (("rotation", "rotation, radians per step"), ("norm", "norm")):
                drawn.append(_training(records, mine, step, seed, quantity, unit, f"{layer}: {quantity}", f"training-{c}-{k}-{quantity}"))
        parts += [tag("h3", case), figures(*drawn, pairs=True)]
    return join(parts)


def _training(records: Columns, mine: Array, step: Array, seed: Array, quantity: str, unit: str, title: str, ident: str) -> Html:
    x = np.unique(step[mine])
    series = []
    for style, name, prefix in _SERIES:
        if f"{prefix}{quantity}" in records:
            values = records.numbers(f"{prefix}{quantity}")[mine]
            places = np.searchsorted(x, step[mine])
            there = np.isfinite(values)
            total, count = (np.bincount(places[there], weights, len(x)) for weights in (values[there], None))
            mean = total / np.where(count > 0, count, np.nan)
            series.append(Series(name, style, thin(x).tolist(), thin(mean).tolist()))
    return chart(ident, f"{title} ({plural(len(np.unique(seed[mine])), 'seed')})", series, Axis("step"), Axis(unit, spread_of(series) > 8))


def _table(rows: Sequence[_Row]) -> Html:
    columns = [Column("case"), Column("layer"), Column("fan-in", "number"), Column("quantity"), Column("measured", "number")]
    columns += [Column(x, "number") for x in ("predicted", "error", "± 95 %", "band")] + [Column("verdict")]
    columns += [Column("Table 1, error", "number"), Column("corrected, error", "number"), Column("note", "words")]
    found = []
    for r in rows:
        judged = r.verdict in _TONES
        found.append(
            [
                r.case,
                r.layer,
                num(r.fan_in),
                r.quantity,
                num(r.measured),
                num(r.predicted),
                pct(r.error),
                pct(r.interval, sign=False),
                pct(r.band if judged else None, sign=False),
                tone(r.verdict, _TONES.get(r.verdict, "")),
                pct(r.paper),
                pct(r.corrected),
                r.note,
            ]
        )
    return table("rows", "Error: measured over predicted, less one; rotation in radians per step", columns, found)


def _facts(meta: Mapping[str, Any], file: File) -> list[tuple[str, Any]]:
    get = meta.get
    facts: list[tuple[str, Any]] = [
        ("Date", get("date") or file.date),
        ("rwsim", get("rwsim")),
        ("torch, CUDA, Python", [get(k) for k in ("torch", "cuda", "python") if get(k)]),
        ("Device", f"{get('device')} ({get('card')})" if get("card") else get("device")),
        ("Configuration", get("config")),
        ("Seed", get("seed")),
        ("Took", f"{number(get('seconds'))} s" if isinstance(get("seconds"), (int, float)) else None),
        ("Read from", file.name),
    ]
    cases = get("cases")
    for name, case in cases.items() if isinstance(cases, Mapping) else ():
        recipe = case.get("recipe") if isinstance(case, Mapping) else None
        if isinstance(recipe, Mapping):
            flat = {k: v for k, v in recipe.items() if k not in ("hyper", "size")}
            hyper = recipe.get("hyper")
            facts.append((f"Case {name}", said({**flat, **(hyper if isinstance(hyper, Mapping) else {})})))
    return facts
