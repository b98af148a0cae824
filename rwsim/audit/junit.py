"""A report as JUnit XML, the form that CI systems read: a test case for each probe."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from rwsim.audit.baseline import Change
from rwsim.audit.finding import CONVENTION, FAULT, Finding, Report
from rwsim.audit.probes import PROBES
from rwsim.audit.render import size

# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report, changes: Sequence[Change] = ()) -> str:
    """The XML text. What departs is a failure, a probe without an end an error, one that does not apply skipped.

    Args:
        report: The audit.
        changes: What became worse or better since a baseline: worse is a failure of a case of its own.
    """
    suites = ElementTree.Element("testsuites", name="rwsim audit")
    suite = ElementTree.SubElement(suites, "testsuite", name=_text(report.subject))
    failing = (FAULT, CONVENTION) if report.law is not None else (FAULT,)
    # A finding that several probes see fails each of them; one that none sees has a case of its own.
    for outcome in report.outcomes:
        title = getattr(PROBES.get(outcome.probe), "TITLE", "")
        case = _case(suite, report, f"{outcome.probe} {title}".strip(), outcome.seconds)
        seen = [finding for finding in report.findings if outcome.probe in finding.probes]
        _judge(case, [finding for finding in seen if finding.kind in failing])
        if outcome.status == "unfinished":
            ElementTree.SubElement(case, "error", message=_text(outcome.reason), type="unfinished")
        elif outcome.status == "not applicable" and not len(case):
            ElementTree.SubElement(case, "skipped", message=_text(outcome.reason or "not applicable"))
        elif outcome.status == "departed" and not len(case) and outcome.reason:
            ElementTree.SubElement(case, "failure", message=_text(outcome.reason), type="departed")
        if said := [_words(finding) for finding in seen if finding.kind not in failing]:
            ElementTree.SubElement(case, "system-out").text = _text("\n".join(said))
    alone = [finding for finding in report.findings if not finding.probes]
    if alone:
        case = _case(suite, report, "process", 0.0)
        _judge(case, [finding for finding in alone if finding.kind in failing])
    if changes:
        case = _case(suite, report, "baseline", 0.0)
        told = [f"{change.direction}: {change.what}: {change.before} -> {change.after}" for change in changes]
        if any(change.direction == "worse" for change in changes):
            failure = ElementTree.SubElement(case, "failure", message="worse than the baseline", type="baseline")
            failure.text = _text("\n".join(told))
        else:
            ElementTree.SubElement(case, "system-out").text = _text("\n".join(told))
    for element in (suites, suite):
        counted = {name: len(list(suite.iterfind(f"testcase/{tag}"))) for name, tag in _COUNTED.items()}
        element.attrib |= {"tests": str(len(suite)), **{name: str(count) for name, count in counted.items()}}
        element.set("time", f"{sum(outcome.seconds for outcome in report.outcomes):.3f}")
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _case(suite: ElementTree.Element, report: Report, name: str, seconds: float) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_text(report.subject), name=name, time=f"{seconds:.3f}")


def _judge(case: ElementTree.Element, findings: Sequence[Finding]) -> None:
    """One failure for all: readers expect one at most."""
    if findings:
        failure = ElementTree.SubElement(case, "failure", message=_text(findings[0].text), type=findings[0].code)
        failure.text = _text("\n\n".join(_words(finding) for finding in findings))


def _words(finding: Finding) -> str:
    effect = "" if finding.effect is None else f" Effect {size(finding)}."
    return f"{finding.kind}, {finding.severity}, {finding.code}: {finding.text}{effect}" + (
        f"\n\n{finding.snippet}" if finding.snippet else ""
    )


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
