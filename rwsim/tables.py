"""Tables and footnotes of a validation, for the terminal and for Markdown."""

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from rwsim.stats.verdict import AGREES, DIFFERS, FALSE_ALARM_RATE
from rwsim.validate import CaseResult, Record, Validation

_HEADER = ("quantity", "measured", "± mcse", "full", "error", "paper", "error", "verdict")
_STYLE = {AGREES: "green", DIFFERS: "red"}


def cells(record: Record) -> tuple[str, ...]:
    """One record as text: measured, relative standard error, predictions and relative errors, verdict."""

    def percent(value: float | None, sign: str = "+") -> str:
        if value is None or not math.isfinite(value):
            return "-"
        return f"{value:{sign}.{2 if abs(value) < 1 else 0}%}"

    def number(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"

    return (
        record.quantity,
        number(record.measured),
        percent(record.mcse / record.measured, sign="") if record.measured else "-",
        number(record.predicted["full"]),
        percent(record.relative_error["full"]),
        number(record.predicted["paper"]),
        percent(record.relative_error["paper"]),
        record.verdict,
    )


def heading(result: CaseResult) -> str:
    """Optimizer, hyperparameters, and how much of the walk counts."""
    case = result.case
    burn_in = "never in equilibrium" if case.burn_in is None else f"{case.burn_in} steps dropped"
    layers = f"{case.layers} layer{'s' if case.layers > 1 else ''} of {case.layer.neurons} neurons"
    return f"{case.label}\n{layers}, {burn_in} of {result.walk.steps}"


def case_table(result: CaseResult) -> Table:
    """The three records of one optimizer; fits 80 columns."""
    table = Table(
        title=heading(result), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in _HEADER:
        table.add_column(name, justify="left" if name in ("quantity", "verdict") else "right", no_wrap=True)
    for record in result.records:
        *values, verdict = cells(record)
        table.add_row(*values, f"[{_STYLE.get(verdict, 'yellow')}]{verdict}[/]")
    return table


def markdown(result: Validation) -> str:
    """All records as one Markdown table: the README's is made by this."""
    lines = ["| optimizer | " + " | ".join(_HEADER) + " |", "|---" * (len(_HEADER) + 1) + "|"]
    for case in result.cases:
        for record in case.records:
            lines.append(f"| {case.case.label} | " + " | ".join(cells(record)) + " |")
    return "\n".join(lines)


def footnotes(result: Validation) -> Iterator[str]:
    """What a reader of the table must know."""
    margin = result.settings.margin
    if result.cases:
        yield "error: measured / predicted - 1. ± mcse: one standard error. rotation: radians per step."
        yield (
            f"Verdict: whether the full prediction's error, with its confidence interval, lies within {margin:.1%}; "
            f"false-alarm rate {FALSE_ALARM_RATE:g} for the whole run."
        )
        moments = (
            f"{c.case.rule.name} {c.unit_grad_norm_sq['measured']:.4g} / {c.unit_grad_norm_sq['computed']:.4g}" for c in result.cases
        )
        yield f"Predictions come from hyperparameters, none is fitted. E||g~||^2 measured / computed: {', '.join(moments)}."
        if any(c.case.rule.name == "adam_l2" and c.case.layer.loss_scale == 0.1 for c in result.cases):
            yield "adam_l2 runs at loss scale 0.1: at 1 its slow coordinates are not in equilibrium after 15,000 steps."
    for case in result.cases:
        grouped: dict[str, list[str]] = {}
        for record in case.records:
            if record.verdict != AGREES:
                grouped.setdefault(f"{record.verdict}: {record.reason}", []).append(record.quantity)
        for reason, quantities in grouped.items():
            yield f"{case.case.label}: {', '.join(quantities)} {reason}"
