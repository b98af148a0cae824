"""`rwsim experiment` of trainings that are compared: settings.json, table.csv, runs.csv and summary.md, or its --json file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from rwsim.page.chart import Axis, Series, chart
from rwsim.page.html import Html, join, tag
from rwsim.page.table import Column, table
from rwsim.report.read import File, checked
from rwsim.report.sheet import BAD, GOOD, UNSURE, Sheet, figures, note, num, plural, tone

_TONES = {"held": GOOD, "did not hold": BAD, "undecided": UNSURE}
_NUMBERS = ("difference", "interval", "margin", "a", "a_spread", "b", "b_spread")


class _Claim(BaseModel):
    subject: str
    claim: str
    rule: str
    verdict: str
    unit: str = ""
    seeds: int
    note: str = ""
    difference: float | None = None
    interval: float | None = None
    margin: float | None = None
    a: float | None = None
    a_spread: float | None = None
    b: float | None = None
    b_spread: float | None = None


class _Result(BaseModel):
    meta: dict[str, Any]
    claims: list[_Claim]
    says: list[str]


def is_mine(file: File) -> bool:
    """Whether a file of `rwsim experiment` is of a study."""
    return "stages" in file.json or {"claims", "says", "meta"} <= set(file.json)


def sheet(file: File, says: Sequence[Html], facts: Sequence[tuple[str, Any]]) -> Sheet:
    """A report of it.

    Args:
        file: settings.json or what --json wrote.
        says: Its paragraphs; the first is the summary.
        facts: Provenance.
    """
    if "claims" in file.json:
        result = checked(_Result, file)
        meta, claims, runs = result.meta, result.claims, None
    else:
        meta, claims = file.json, _claims(File.of(file.path.with_name("table.csv")))
        kept = file.path.with_name("runs.csv")
        runs = _runs(File.of(kept)) if kept.is_file() else None
    sections: list[tuple[str, Any]] = [("Claims", join(figures(*_differences(claims)), _table(claims)))]
    if runs is not None:
        sections.append(("Configurations", runs))
    verdict, colour = _verdict(claims)
    return Sheet(
        title=f"Experiment: {meta.get('experiment', 'experiment')}", tone=colour, verdict=verdict, summary=says[:1], sections=sections,
        facts=facts, command=str(meta.get("command") or ""),
        remark="" if meta.get("command") else "This file holds no command; settings.json of its directory does.",
    )  # fmt: skip


def _claims(file: File) -> list[_Claim]:
    columns = file.csv
    texts = {name: columns.text(name) for name in ("subject", "claim", "rule", "verdict", "unit", "note")}
    numbers = {name: columns.numbers(name) for name in _NUMBERS}
    seeds = columns.numbers("seeds")
    found = []
    for i in range(columns.rows):
        values = {name: float(column[i]) if np.isfinite(column[i]) else None for name, column in numbers.items()}
        words = {name: "" if str(column[i]) == "nan" else str(column[i]) for name, column in texts.items()}
        found.append(_Claim(seeds=int(np.nan_to_num(seeds[i])), **words, **values))
    return found


def _verdict(claims: Sequence[_Claim]) -> tuple[str, str]:
    count = {verdict: sum(one.verdict == verdict for one in claims) for verdict in _TONES}
    if not claims:
        return "Nothing is judged.", UNSURE
    if count["held"] == len(claims):
        return f"Holds: {plural(len(claims), 'claim')} held.", GOOD
    told = f"of {plural(len(claims), 'claim')} {count['held']} held, {count['did not hold']} did not, {count['undecided']} are undecided"
    if count["did not hold"]:
        return f"{'Holds in part' if count['held'] else 'Does not hold'}: {told}.", BAD
    return f"{'Holds in part' if count['held'] else 'Undecided'}: {told}.", UNSURE


def _differences(claims: Sequence[_Claim]) -> list[Html]:
    """Of each unit its claims' differences by their number, with intervals; lines at the margins."""
    found: list[Html] = []
    for unit in dict.fromkeys(_unit(one) for one in claims):
        own = [(k, one) for k, one in enumerate(claims, 1) if _unit(one) == unit]
        known = [(k, one.difference, one.interval) for k, one in own if one.difference is not None and one.interval is not None]
        if known:
            places, values, halves = zip(*known, strict=True)
            margin = {one.margin or 0.0 for _, one in own}
            marks = [(0.0, ""), *((sign * size, "margin") for size in margin if size for sign in (1, -1))]
            series = [Series("", "measured", places, values, "dots", halves)]
            title = f"Differences{f', {unit}' if unit else ''}"
            found.append(chart(f"differences-{len(found)}", title, series, Axis("claim, by number"), Axis("a - b"), marks=marks))
    return found


def _unit(one: _Claim) -> str:
    return one.unit or ("relative" if one.rule == "near" else "")


def _table(claims: Sequence[_Claim]) -> Html:
    columns = [
        Column("number", "number"),
        Column("training"),
        Column("claim", "words"),
        Column("verdict"),
        Column("difference", "number"),
        Column("± 95 %", "number"),
    ]
    columns += [Column("margin", "number"), Column("unit"), Column("a", "number"), Column("b", "number"), Column("seeds", "number")]
    rows = [
        [
            num(k), one.subject, one.claim, tone(one.verdict, _TONES.get(one.verdict, "")), num(one.difference, 3), num(one.interval, 2),
            num(one.margin or None), _unit(one), num(one.a), num(one.b), num(one.seeds),
            one.note,
        ]
        for k, one in enumerate(claims, 1)
    ]  # fmt: skip
    words = (
        "Difference: mean over seeds of a less b, runs of one seed paired; of rotations against predictions, measured over predicted less "
        "one. Of losses a lower one is higher. Held: the 95 % interval lies on the claim's side, or within the margin."
    )
    return join(note(words), table("claims", "Claims and what the runs say of them", [*columns, Column("note", "words")], rows))


def _runs(file: File) -> Html:
    """Means over the seeds of every configuration."""
    columns = file.csv
    arms = columns.text("arm")
    numbers = {name: columns.numbers(name) for name in ("accuracy", "loss", "test_accuracy", "test_loss", "diverged")}
    rows = []
    for arm in dict.fromkeys(arms.tolist()):
        own = arms == arm
        kept = {name: column[own][np.isfinite(column[own])] for name, column in numbers.items()}
        means = [num(float(kept[name].mean()) if len(kept[name]) else None) for name in ("accuracy", "loss", "test_accuracy", "test_loss")]
        rows.append([arm, num(int(own.sum())), num(len(kept["diverged"])), *means])
    names = ("runs", "diverged", "validation accuracy", "validation loss", "test accuracy", "test loss")
    shown = table(
        "runs",
        "Means over seeds, of runs that did not diverge",
        [Column("configuration"), *(Column(name, "number") for name in names)],
        rows,
    )
    return join(tag("p", "Searches look at validation data alone.", class_="soft small"), shown)
