"""A report in plain words: rows for a table, lines for a failure message."""

import textwrap
from collections.abc import Iterator

from rwsim.audit.finding import NOTE, Finding, Report


def size(finding: Finding) -> str:
    """Effect ± error, as percentages; ``-`` where it has none."""
    if finding.effect is None:
        return "-"
    effect = f"{finding.effect:+.2%}" if abs(finding.effect) < 0.1 else f"{finding.effect:+.0%}"
    return effect if finding.error is None or finding.error < 5e-5 else f"{effect} ± {finding.error:.1%}"


def worst(report: Report) -> Finding | None:
    """The first finding that has a program to show it."""
    return next((finding for finding in report.findings if finding.snippet and finding.kind != NOTE), None)


def verdict(report: Report) -> str:
    """What came of it, in one line."""
    if not report.finished:
        return "could not finish"
    if report.law is None:
        return "no fault" if report.passed else "faults"
    return f"holds the law {report.law}" if report.passed else f"departs from the law {report.law}"


def lines(report: Report) -> Iterator[str]:
    """The whole diagnosis as text: what it is, each finding, the probes that did not hold, a program."""
    yield f"{report.subject}: {verdict(report)}"
    if report.identity:
        yield f"identified as {report.identity}"
    for finding in report.findings:
        seen = f" (seen by {', '.join(finding.probes)})" if finding.probes else ""
        yield f"{finding.kind}, {finding.severity}: {finding.text}{seen}" + ("" if finding.effect is None else f" Effect {size(finding)}.")
    for outcome in report.outcomes:
        if outcome.status == "unfinished":
            yield f"{outcome.probe} unfinished: {outcome.reason}"
    shown = worst(report)
    if shown is not None:
        yield f"The smallest program that shows {shown.code}:"
        yield textwrap.indent(shown.snippet.rstrip(), "    ")
