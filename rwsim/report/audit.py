"""`rwsim audit --json`."""

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rwsim.page.html import Html, join, tag
from rwsim.page.table import Cell, Column, table
from rwsim.report.draw import Mark, forest
from rwsim.report.read import File, checked
from rwsim.report.sheet import BAD, GOOD, UNSURE, Sheet, figures, known, note, num, pct, plural, said, tone
from rwsim.report.words import called

NAME = "audit"
NAMES = ("audit.json",)
WRITES = "--json of rwsim audit"
# As the rooms of rwsim.audit.probes have them, which would bring torch.
PROBES = {
    "P1": "first step", "P2": "zero gradient", "P3": "impulse and flip sweep", "P4": "scale sweep", "P5": "learning rate changes",
    "P6": "equilibrium", "P7": "path parity", "P8": "lifecycle", "P9": "low precision", "P10": "metamorphic relations",
}  # fmt: skip
_KINDS = {"fault": BAD, "convention": UNSURE, "note": ""}
_STATUS = {"held": GOOD, "departed": BAD, "unfinished": BAD}
_SEVERITY = {"low": 1, "medium": 2, "high": 3}


class _Finding(BaseModel):
    code: str
    kind: str
    severity: str
    text: str
    probes: list[str] = []
    effect: float | None = None
    error: float | None = None
    snippet: str = ""


class _Outcome(BaseModel):
    probe: str
    status: str
    reason: str = ""
    measured: dict[str, Any] = {}


class _Audit(BaseModel):
    subject: str
    law: str | None
    identity: str = ""
    passed: bool
    finished: bool
    findings: list[_Finding]
    outcomes: list[_Outcome]
    meta: dict[str, Any]


def is_mine(file: File) -> bool:
    """Whether a file is an audit."""
    return file.form == "json" and {"subject", "findings", "outcomes"} <= set(file.json)


def sheet(file: File) -> Sheet:
    """A report of it."""
    found = checked(_Audit, file)
    count = {kind: sum(one.kind == kind for one in found.findings) for kind in _KINDS}
    counted = ", ".join(plural(n, kind) for kind, n in count.items() if n) or "no finding"
    probes = {status: sum(one.status == status for one in found.outcomes) for status in dict.fromkeys(o.status for o in found.outcomes)}
    summary = [f"{counted[0].upper()}{counted[1:]}. Probes: {', '.join(f'{n} {status}' for status, n in probes.items()) or 'none ran'}."]
    if found.identity:
        summary.insert(0, f"Identified as {found.identity.rstrip('.')}.")
    sections: list[tuple[str, Any]] = []
    if found.findings:
        sections.append(("Findings", _findings(found)))
    if (drawn := _equilibrium(found)) is not None:
        sections.append(("Equilibrium", drawn))
    if any(one.snippet for one in found.findings):
        sections.append(("Programs that show it", _programs(found)))
    sections.append(("Probes", _outcomes(found)))
    meta = found.meta
    verdict, colour = _verdict(found)
    return Sheet(
        title=f"Audit of {found.subject}",
        tone=colour,
        verdict=verdict,
        summary=summary,
        sections=sections,
        facts=[
            ("Date", file.date), ("rwsim", meta.get("rwsim")), ("torch", meta.get("torch")),
            ("Python", meta.get("python")),
            ("Device", "cpu"), ("Seed", meta.get("seed")), ("Law", found.law or "none: it was to be identified"),
            ("Settings", meta.get("settings")), ("Compiled step", meta.get("compiled")), ("Read from", file.name),
        ],
        command=_command(found),
    )  # fmt: skip


def _verdict(found: _Audit) -> tuple[str, str]:
    """As `rwsim.audit.render.verdict`, from what was written."""
    if not found.finished:
        reasons = dict.fromkeys(f"{one.probe}: {one.reason}" for one in found.outcomes if one.status == "unfinished")
        return f"The audit could not finish ({'; '.join(reasons)}).", BAD
    if found.law is None:
        return ("No fault was found.", GOOD) if found.passed else ("It has faults.", BAD)
    return (f"Holds the law {found.law}.", GOOD) if found.passed else (f"Departs from the law {found.law}.", BAD)


def _findings(found: _Audit) -> Html:
    columns = [
        Column("finding"),
        Column("kind"),
        Column("severity"),
        Column("what", "words"),
        Column("effect", "number"),
        Column("±", "number"),
    ]
    columns += [Column("seen by")]
    rows = []
    for one in found.findings:
        error = one.error if one.error is not None and one.error >= 5e-5 else None
        severity = Cell(one.severity, _SEVERITY.get(one.severity))
        rows.append(
            [
                one.code,
                tone(one.kind, _KINDS.get(one.kind, "")),
                severity,
                one.text,
                pct(one.effect),
                pct(error, sign=False),
                " ".join(one.probes),
            ]
        )
    caption = "Faults first. Effect: relative to what the law does; 100 % is as much again"
    return table("findings", caption, columns, rows)


def _equilibrium(found: _Audit) -> Html | None:
    """What probe P6 measured against the law."""
    quantities = next((one.measured.get("quantities") for one in found.outcomes if one.probe == "P6"), None)
    if not isinstance(quantities, Mapping) or not quantities:
        return None
    rows, lanes = [], []
    for name, one in quantities.items():
        if not isinstance(one, Mapping):
            return None
        values = [one.get(key) if isinstance(one.get(key), (int, float)) else None for key in ("measured", "mcse", "predicted")]
        measured, mcse, predicted = values
        error = measured / predicted - 1 if known(measured) and predicted else None
        half = 2 * mcse / predicted if known(mcse) and predicted else None  # type: ignore[operator]
        rows.append([called(str(name)), num(measured), num(mcse), num(predicted), pct(error)])
        lanes.append((called(str(name)), [Mark("measured", error, half)]))
    columns = [Column("quantity"), *(Column(x, "number") for x in ("measured", "± mcse", "law predicts", "error"))]
    reach = max([0.05, *(1.15 * abs(marks[0].value) for _, marks in lanes if known(marks[0].value))])  # type: ignore[arg-type]
    drawn = forest(
        "equilibrium", "Equilibrium, measured over what the law predicts, less one", lanes, [("measured", "measured, ± 2 mcse")],
        band=0.01, label="error, %", reach=min(reach, 2.0),
    )  # fmt: skip
    return join(figures(drawn), table("quantities", "Probe P6: a random walk through the optimizer", columns, rows))


def _programs(found: _Audit) -> Html:
    """The first program that shows a fault is open, the others fold."""
    parts: list[Html] = []
    for one in (one for one in found.findings if one.snippet):
        code = tag("pre", tag("code", one.snippet.rstrip()), tabindex="0", role="region", aria_label=f"Program that shows {one.code}")
        parts.append(tag("details", tag("summary", f"{one.code} ({one.kind})"), code, open=not parts and one.kind != "note"))
    return join(note("The smallest program that shows each."), parts)


def _outcomes(found: _Audit) -> Html:
    columns = [Column("probe"), Column("what it does"), Column("outcome"), Column("numbers", "words")]
    rows = []
    for one in found.outcomes:
        numbers = {key: value for key, value in one.measured.items() if key != "quantities"}
        text = "; ".join(f"{key.replace('_', ' ')}: {_value(value)}" for key, value in numbers.items())
        detail = join(one.reason, tag("br") if one.reason and text else None, tag("span", text, class_="soft small") if text else None)
        number = int(one.probe[1:]) if one.probe[1:].isdecimal() else None
        rows.append([Cell(one.probe, number), PROBES.get(one.probe, ""), tone(one.status, _STATUS.get(one.status, "")), detail])
    return table("outcomes", "One row a probe, with the numbers that it took", columns, rows)


def _value(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else said(value)


def _command(found: _Audit) -> str:
    words = ["rwsim", "audit", found.subject] + (["--law", found.law] if found.law else [])
    settings = found.meta.get("settings")
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        words += ["--set", f"{key}={value!r}" if not isinstance(value, list) else f"{key}={tuple(value)!r}"]
    asked = [one.probe for one in found.outcomes]
    if asked and set(asked) != set(PROBES):
        words += ["--probe", *asked]
    if found.meta.get("seed"):
        words += ["--seed", str(found.meta["seed"])]
    if found.meta.get("compiled"):
        words.append("--compiled")
    return shlex.join(words)
