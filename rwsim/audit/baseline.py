"""What changed between two audits: findings that are new or gone or changed in size, the identity, the outcomes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rwsim.audit.finding import FORMAT, NOTE, Finding, Outcome, Report
from rwsim.audit.render import size
from rwsim.errors import InvalidArgument

Direction = Literal["worse", "better", "different"]


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: What changed: ``fault decay-twice``, ``identity``, ``P6``.
        before: In the old audit.
        after: In the new one.
        direction: ``worse`` if it is a new departure or a larger one, ``better`` if one is gone or smaller.
    """

    what: str
    before: str
    after: str
    direction: Direction


def read(path: Path) -> Report:
    """The report of a JSON file that an audit wrote.

    Raises:
        InvalidArgument: No file, no JSON, not an audit's, or written by a later rwsim.
    """

    def refuse(rule: str, remedy: str = "name a file that rwsim audit --json wrote") -> InvalidArgument:
        return InvalidArgument("--baseline", rule, str(path), remedy)

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"must be a file that can be read ({error.strerror})") from None
    except ValueError:
        raise refuse("must be JSON") from None
    if isinstance(data, Mapping) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
        raise refuse(f"must have a format up to {FORMAT}, not {data['format']}", "audit with the rwsim that wrote it, or write it anew")
    try:
        findings = tuple(Finding(**{**each, "probes": tuple(each["probes"])}) for each in data["findings"])
        outcomes = tuple(Outcome(**each) for each in data["outcomes"])
        return Report(str(data["subject"]), data["law"], str(data["identity"]), findings, outcomes, dict(data["meta"]))
    except (KeyError, TypeError, ValueError):
        raise refuse("must be the report of an audit") from None


def compare(old: Report, new: Report) -> list[Change]:
    """Every difference that matters, the worse ones first. Wording, severity and versions do not."""
    changes = [*_identity(old, new), *_findings(old, new), *_outcomes(old, new)]
    return sorted(changes, key=lambda change: ("worse", "different", "better").index(change.direction))


def differently_asked(old: Report, new: Report) -> list[str]:
    """What was asked otherwise in the old audit, so that a difference may come from that."""
    found = [f"{name}: {before}, now {after}" for name, before, after in (("law", old.law, new.law),) if before != after]
    for key in ("settings", "seed", "compiled"):
        if old.meta.get(key) != new.meta.get(key):
            found.append(f"{key}: {old.meta.get(key)}, now {new.meta.get(key)}")
    return found


def _identity(old: Report, new: Report) -> list[Change]:
    # What follows the colon is the formula or the differences; the latter have findings of their own.
    before, after = (report.identity.partition(":")[0] for report in (old, new))
    if not before or not after or before == after or {o.probe for o in old.outcomes} != {o.probe for o in new.outcomes}:
        return []
    return [Change("identity", before, after, "better" if new.passed and not old.passed else "worse")]


def _key(finding: Finding, counted: dict[str, int]) -> tuple[str, int]:
    counted[finding.code] = counted.get(finding.code, 0) + 1
    return finding.code, counted[finding.code]


def _keyed(report: Report) -> dict[tuple[str, int], Finding]:
    counted: dict[str, int] = {}
    return {_key(finding, counted): finding for finding in report.findings}


def _findings(old: Report, new: Report) -> list[Change]:
    before, after = _keyed(old), _keyed(new)
    # A probe that did not run now says nothing about what it saw before, and the other way round.
    ran_before, ran_after = ({o.probe for o in r.outcomes if o.status in ("held", "departed")} for r in (old, new))
    changes = []
    for key, finding in after.items():
        was = before.get(key)
        if was is None:
            unasked = bool(finding.probes) and not ran_before & set(finding.probes)
            direction: Direction = "different" if finding.kind == NOTE or unasked else "worse"
            changes.append(Change(f"{finding.kind} {finding.code}", "-" if not unasked else "not probed", finding.text, direction))
        elif was.kind != finding.kind:
            direction = "worse" if _weight(finding) > _weight(was) else "better"
            changes.append(Change(finding.code, was.kind, finding.kind, direction))
        elif _apart(was, finding):
            grown = abs(finding.effect or 0.0) > abs(was.effect or 0.0)
            direction = "different" if finding.kind == NOTE else "worse" if grown else "better"
            changes.append(Change(f"{finding.kind} {finding.code}", size(was), size(finding), direction))
    for key, finding in before.items():
        if key not in after:
            unasked = bool(finding.probes) and not ran_after & set(finding.probes)
            direction = "different" if finding.kind == NOTE or unasked else "better"
            changes.append(Change(f"{finding.kind} {finding.code}", finding.text, "not probed" if unasked else "-", direction))
    return changes


def _weight(finding: Finding) -> int:
    return ("note", "convention", "fault").index(finding.kind)


def _apart(was: Finding, now: Finding) -> bool:
    """Whether the effects differ by more than their errors and a thousandth, which rounding and versions of torch explain."""
    if was.effect is None or now.effect is None:
        return False
    allowed = (was.error or 0.0) + (now.error or 0.0) + 1e-3 * max(abs(was.effect), abs(now.effect))
    return abs(was.effect - now.effect) > allowed


def _outcomes(old: Report, new: Report) -> list[Change]:
    before: dict[str, Any] = {outcome.probe: outcome.status for outcome in old.outcomes}
    after: dict[str, Any] = {outcome.probe: outcome.status for outcome in new.outcomes}
    changes = []
    for probe in dict.fromkeys([*before, *after]):
        was, now = before.get(probe, "not run"), after.get(probe, "not run")
        if was != now:
            direction: Direction = "worse" if was == "held" and now in ("departed", "unfinished") else "different"
            direction = "better" if was == "departed" and now == "held" else direction
            changes.append(Change(probe, was, now, direction))
    return changes
