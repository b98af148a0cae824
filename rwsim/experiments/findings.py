"""What an experiment says: a row for every layer and quantity, and paragraphs made of their numbers."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

INSIDE, OUTSIDE, UNDECIDED, SHOWN = "inside", "outside", "undecided", "not judged"


@dataclass(frozen=True)
class Row:
    """One quantity of one layer.

    Attributes:
        case: Which training.
        layer: Of it.
        fan_in: Of its neurons.
        invariant: Whether they are scale-invariant.
        quantity: ``norm``, ``rotation``: in equilibrium. ``norm path``, ``rotation path``: along the predicted path, where it is furthest
            off. Others: an assumption of the random walk.
        band: What it may be off by.
        verdict: inside, outside, undecided; not judged where no claim is made.
        measured: Mean over time and seeds; nan of a path.
        predicted: From hyperparameters and the norm at the start.
        error: measured / predicted - 1.
        interval: Half width of its 95 % confidence interval.
        paper: Relative error of Table 1.
        corrected: What is left of the error with the measured departures from the random walk put in; nan where there is none.
        note: Why, where it is not inside.
    """

    case: str
    layer: str
    fan_in: int
    invariant: bool
    quantity: str
    band: float
    verdict: str
    measured: float = math.nan
    predicted: float = math.nan
    error: float = math.nan
    interval: float = math.nan
    paper: float = math.nan
    corrected: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Findings:
    """Rows, judged and not judged ones, and paragraphs."""

    rows: tuple[Row, ...]
    says: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every row that is judged is inside its band."""
        judged = [row.verdict for row in self.rows if row.verdict != SHOWN]
        return bool(judged) and set(judged) == {INSIDE}

    def table(self) -> str:
        """As CSV."""
        return csv_of(Row, self.rows)

    def to_json(self) -> dict[str, Any]:
        return {"rows": json_of(self.rows), "says": list(self.says), "passed": self.passed}

    def markdown(self, name: str, settings: Mapping[str, Any]) -> str:
        """The summary: paragraphs, then the table."""
        return "\n\n".join([*heading(name, settings), *self.says, markdown_of(_SHOWN, map(cells, self.rows))]) + "\n"

    def text(self) -> str:
        """For the terminal: a line a row, then the paragraphs."""
        widths = [max(len(line[i]) for line in [_SHOWN, *map(cells, self.rows)]) for i in range(len(_SHOWN) - 1)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)) for line in [_SHOWN, *map(cells, self.rows)]
        ]
        return "\n".join([*lines, "", *(say.replace("**", "") for say in self.says)])


_SHOWN = ("case", "layer", "fan-in", "quantity", "measured", "predicted", "error", "±", "band", "verdict", "Table 1", "corrected", "note")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    return (
        row.case, row.layer, str(row.fan_in), row.quantity, _number(row.measured), _number(row.predicted), percent(row.error),
        percent(row.interval, ""), f"{row.band:.0%}" if row.verdict != SHOWN else "-", row.verdict, percent(row.paper),
        percent(row.corrected), row.note,
    )  # fmt: skip


def percent(value: float, sign: str = "+") -> str:
    """A relative error as text, `-` where there is none."""
    return f"{value:{sign}.1%}" if math.isfinite(value) else "-"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"


# How whatever an experiment finds is written.


def csv_of(kind: type[Any], rows: Iterable[Any]) -> str:
    """Instances of a dataclass, a line each under its fields' names; empty where there is no number."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = [one.name for one in fields(kind)]
    lines.writerow(names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        lines.writerow([(f"{x:.6g}" if math.isfinite(x) else "") if isinstance(x, float) else x for x in values])
    return out.getvalue()


def json_of(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Instances of a dataclass as objects; null where there is no number."""
    return [{key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in vars(row).items()} for row in rows]


def markdown_of(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *("| " + " | ".join(row) + " |" for row in rows)])


def heading(name: str, settings: Mapping[str, Any]) -> list[str]:
    """What a summary begins with."""
    ran = f"{settings['config']} configuration on {settings['card']}, {settings['date']}, torch {settings['torch']}"
    return [f"# {name}", f"{ran}: `{settings['command']}`"]
