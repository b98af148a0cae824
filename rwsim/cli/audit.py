"""`rwsim audit`."""

import ast
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from rwsim.cli.shared import FAILS, HOLDS, INTERNAL, OUTPUT, Whole, check_place, refuse
from rwsim.errors import AuditInterrupted, InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from rwsim.audit.baseline import Change
    from rwsim.audit.finding import Report

_RUNNING = Group("Running", sort_key=3)
_STYLE = {"fault": "red", "convention": "yellow", "note": "dim", "departed": "red", "unfinished": "red", "held": "green", "worse": "red"}


def audit(
    optimizer: str,
    /,
    *,
    law: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    probe: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    baseline: Path | None = None,
    seed: Whole = 0,
    compiled: Annotated[bool, Parameter(negative=(), group=_RUNNING)] = False,
    timeout: Annotated[float, Parameter(group=_RUNNING)] = 60.0,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    junit_file: Annotated[Path | None, Parameter(name="--junit", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Hold somebody's optimizer against theory; without a law, find out what it is.

    Importing the class runs its code, in a process of its own. Exit status: 0 if it holds the law (without one: is identified
    and has no fault), 1 if not, 2 bad usage, 3 if the audit could not finish.

    ```sh
    rwsim audit torch.optim:AdamW --law adamw
    rwsim audit mine.py:MyAdamW --set betas=0.9,0.99 --probe P1 P6
    ```

    Parameters
    ----------
    optimizer
        MODULE:CLASS or FILE.py:CLASS; a torch optimizer, or a function that returns an optax-style init and update.
    law
        The rule that it claims to be (a name, or FILE.py:RULE).
    set_
        KEY=VALUE, a keyword for its constructor in its own words; may be repeated. A VALUE is a Python literal, or a word.
    probe
        Run these probes only: P1 P6, or P1,P6. Default: all.
    baseline
        A report that --json wrote before: say what changed since, and exit 1 if something got worse.
    seed
        Of every random number; the same seed gives the same report.
    compiled
        Leave torch.compile on, and compare a compiled step too.
    timeout
        Seconds that one probe may take.
    json_file
        Also write the report to this file.
    junit_file
        Also write the report to this file as JUnit XML.
    quiet
        Print nothing but errors.
    """
    # Absolute: the audit says what an optimizer does to the working directory, and must not stumble over it.
    places = {"--json": json_file and json_file.absolute(), "--junit": junit_file and junit_file.absolute()}
    for option, place in places.items():
        if place is not None:
            check_place(option, place, folder=False)
    settings = _settings(set_ or [])
    probes = [name for text in probe or [] for name in text.replace(",", " ").split()]
    if not 0 < timeout < float("inf"):
        raise InvalidArgument("timeout", "must lie in (0, inf)", timeout, "give seconds")
    if probe and not probes:
        raise InvalidArgument("probe", "must name probes", ",".join(probe), "for example --probe P1 P6")
    from rich.console import Console

    from rwsim.audit import baseline as before

    old = None if baseline is None else before.read(baseline)
    console = Console(quiet=quiet, highlight=False, markup=False)
    began = time.monotonic()
    interrupted: AuditInterrupted | None = None
    try:
        report = _watched(console, optimizer, law, settings=settings, probes=probes, seed=seed, compiled=compiled, seconds=timeout)
    except AuditInterrupted as error:
        interrupted, report = error, error.report
    changes = [] if old is None else before.compare(old, report)
    _show(console, report, time.monotonic() - began)
    if old is not None:
        _show_changes(console, changes, before.differently_asked(old, report))
    if (place := places["--json"]) is not None:
        _write(place, report.to_json())
    if (place := places["--junit"]) is not None:
        from rwsim.audit.junit import junit

        _write(place, junit(report, changes))
    if interrupted is not None:
        return refuse(interrupted, INTERNAL)
    if not report.finished:
        reasons = dict.fromkeys(f"{o.probe}: {o.reason}" for o in report.outcomes if o.status == "unfinished")
        return refuse(f"the audit could not finish ({'; '.join(reasons)})", INTERNAL)
    return FAILS if not report.passed or any(change.direction == "worse" for change in changes) else HOLDS


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def _settings(texts: list[str]) -> dict[str, Any]:
    """``key=value`` pairs, the values as Python literals; what is a word is a string."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgument("set", "must be KEY=VALUE", text, "for example --set betas=0.9,0.99")
        if key in found:
            raise InvalidArgument("set", "must be given once for each key", text, f"{key} was given as {found[key]!r}")
        try:
            found[key] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            if not re.fullmatch(r"[A-Za-z_][\w.:/-]*", value.strip()):
                remedy = "for example 0.1, True, None, (0.9,0.99), [1,2], 'text' or word"
                raise InvalidArgument(f"set {key}", "must be a Python literal or a word", value, remedy) from None
            found[key] = value.strip()
    return found


def _watched(console: "Console", optimizer: str, law: str | None, **options: Any) -> "Report":
    """Audit behind a line that says which probe runs."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    import rwsim

    # No refresh of its own: a thread that draws must not be forked.
    shown = console.is_terminal and not console.quiet
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False, disable=not shown
    ) as bar:
        row = bar.add_task(f"importing {optimizer}")

        def progress(probes: str) -> None:
            bar.update(row, description=f"{optimizer}: {probes}")
            bar.refresh()

        bar.refresh()
        return rwsim.audit(optimizer, law, progress=progress, **options)


def _show(console: "Console", report: "Report", seconds: float) -> None:
    from rich.text import Text

    from rwsim.audit.render import size, verdict, worst

    console.print(Text(f"{report.subject}: {verdict(report)}", style="bold"), soft_wrap=True)
    if report.identity:
        console.print(f"identified as {report.identity}", soft_wrap=True)
    if report.findings:
        table = _table("kind", "severity", "finding", "effect", "seen by")
        for finding in report.findings:
            row = (finding.kind, finding.severity, finding.text, size(finding), " ".join(finding.probes) or "-")
            table.add_row(Text(row[0], style=_STYLE[row[0]]), *map(Text, row[1:]))
        console.print(table)
    titles = _titles()
    table = _table("probe", "outcome", "time", "")
    for outcome in report.outcomes:
        name = f"{outcome.probe} {titles.get(outcome.probe, '')}".strip()
        cells = (
            Text(name),
            Text(outcome.status, style=_STYLE.get(outcome.status, "")),
            Text(f"{outcome.seconds:.1f} s"),
            Text(outcome.reason),
        )
        table.add_row(*cells)
    console.print(table)
    shown = worst(report)
    if shown is not None:
        console.print(f"The smallest program that shows {shown.code}:\n\n{shown.snippet}", soft_wrap=True)
    counted = [f"{n} {kind}{'s' if n > 1 else ''}" for kind in ("fault", "convention", "note") if (n := _count(report, kind))]
    console.print(f"{', '.join(counted) or 'nothing found'}  ({seconds:.0f} s)")


def _count(report: "Report", kind: str) -> int:
    return sum(finding.kind == kind for finding in report.findings)


def _titles() -> dict[str, str]:
    from rwsim.audit.probes import PROBES

    return {name: room.TITLE for name, room in PROBES.items()}


def _table(*header: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    return table


def _show_changes(console: "Console", changes: "list[Change]", asked: list[str]) -> None:
    from rich.text import Text

    for line in asked:
        console.print(f"The baseline was asked otherwise: {line}", soft_wrap=True)
    if not changes:
        console.print("Nothing changed since the baseline.")
        return
    table = _table("since the baseline", "what", "before", "now")
    for change in changes:
        table.add_row(
            Text(change.direction, style=_STYLE.get(change.direction, "")), *map(Text, (change.what, change.before, change.after))
        )
    console.print(table)
