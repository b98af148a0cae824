"""Tables that scroll by themselves and sort."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rwsim.page.document import part
from rwsim.page.html import Html, tag

# For the page's script: every table of class ``sorts`` gets headers that sort it.
SORT = part("sort.js")


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: Its header.
        kind: ``text`` or ``number`` (aligned at the right), ``words`` (long text that wraps).
    """

    title: str
    kind: str = "text"


@dataclass(frozen=True)
class Cell:
    """What a cell shows, what it sorts by (a number; None: its text, or last if the column has numbers), and a class."""

    shown: Any
    value: float | int | None = None
    class_: str | None = None


def table(ident: str, caption: Any, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> Html:
    """A table with caption, column and row headers (the first cell of each row), in a region that scrolls.

    Args:
        ident: Of the region, its own on the page.
        caption: Says what the table holds.
        columns: One a cell.
        rows: Cells, or what they show. More than one: its headers sort them.
    """
    heads = [tag("th", c.title, scope="col", class_=_class(c)) for c in columns]
    body = [tag("tr", [_cell(cell, column, i == 0) for i, (cell, column) in enumerate(zip(row, columns, strict=True))]) for row in rows]
    inner = tag(
        "table", tag("caption", tag("span", caption), id=f"{ident}-caption"), tag("thead", tag("tr", heads)), tag("tbody", body),
        class_="sorts" if len(body) > 1 else None,
    )  # fmt: skip
    return tag("div", inner, class_="scroll", id=ident, role="region", aria_labelledby=f"{ident}-caption", tabindex="0")


def _class(column: Column) -> str | None:
    return {"number": "n", "words": "w"}.get(column.kind)


def _cell(cell: Any, column: Column, first: bool) -> Html:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    value = cell.value if cell.value is not None and math.isfinite(cell.value) else None
    known = " ".join(filter(None, (_class(column), cell.class_)))
    sort_by = None if value is None else f"{value:.12g}"
    return tag("th" if first else "td", cell.shown, scope="row" if first else None, class_=known or None, data_v=sort_by)
