"""What an audit says: findings, and the report that holds them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

FAULT: Final = "fault"
CONVENTION: Final = "convention"
NOTE: Final = "note"
Kind = Literal["fault", "convention", "note"]

# Of the JSON text; raised when what it holds changes its meaning.
FORMAT = 1

# How much a finding changes training, not how sure it is.
SEVERITIES = ("low", "medium", "high")
Severity = Literal["low", "medium", "high"]
Status = Literal["held", "departed", "not applicable", "unfinished"]


@dataclass(frozen=True)
class Finding:
    """One thing that an audit has to say about an optimizer.

    Attributes:
        code: What it is, in words joined by hyphens, e.g. ``decay-twice``. Stable between versions.
        kind: ``fault``: not what it claims to be, or unsafe to use. ``convention``: a documented choice in which good
            implementations differ. ``note``: worth knowing; torch.optim itself does it, or nothing follows from it.
        severity: ``high`` changes the equilibrium or stops training, ``medium`` the first steps or one path, ``low`` corners.
        text: The diagnosis in words.
        probes: Probes that see it, e.g. ``("P1", "P5")``.
        effect: Its size, relative to what the law does (0.5 = half as much again); None where it has none.
        error: Uncertainty of `effect`: rounding for a computed one, z times the MCSE for a measured one.
        snippet: The smallest program that shows it; may be empty.
    """

    code: str
    kind: Kind
    severity: Severity
    text: str
    probes: tuple[str, ...] = ()
    effect: float | None = None
    error: float | None = None
    snippet: str = ""


@dataclass(frozen=True)
class Outcome:
    """How one probe ended.

    Attributes:
        probe: Its name.
        status: ``held``, ``departed``, ``not applicable`` or ``unfinished``.
        reason: Why it does not apply, or what kept it from its end.
        seconds: How long it took.
        measured: Its numbers by name.
    """

    probe: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """An audit of one optimizer.

    Attributes:
        subject: ``MODULE:CLASS``.
        law: The rule that it was held against; None if it was to be identified.
        identity: What it is, in words.
        findings: Faults first.
        outcomes: One for each probe that ran.
        meta: Versions, seed and settings.
    """

    subject: str
    law: str | None
    identity: str
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]
    meta: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """Whether every probe came to its end. A probe that the optimizer itself broke has: that is a fault."""
        return all(outcome.status != "unfinished" for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """No fault; held against a law, no documented difference from it either; and the audit came to its end."""
        kinds = {finding.kind for finding in self.findings}
        tested = any(outcome.status == "held" for outcome in self.outcomes)
        return self.finished and tested and FAULT not in kinds and not (self.law is not None and CONVENTION in kinds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; the order is fixed, so that equal audits give equal text."""
        return {
            "format": FORMAT,
            "subject": self.subject,
            "law": self.law,
            "identity": self.identity,
            "passed": self.passed,
            "finished": self.finished,
            "findings": [asdict(finding) for finding in self.findings],
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "meta": dict(self.meta),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text. Times are left out of it: a fixed seed gives the same text again."""
        data = self.to_dict()
        for outcome in data["outcomes"]:
            del outcome["seconds"]
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Faults, conventions, notes; the severe ones first; otherwise in the order found."""
    kinds: Sequence[str] = (FAULT, CONVENTION, NOTE)
    return tuple(sorted(findings, key=lambda finding: (kinds.index(finding.kind), -SEVERITIES.index(finding.severity))))
