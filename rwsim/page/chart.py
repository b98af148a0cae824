"""Figures as SVG: lines, points and grids; text stays text, colours are the style sheet's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rwsim.page.html import Html, join, tag
from rwsim.page.scale import Scale, number, span, tick_texts, ticks

# Drawn at this size, a figure's text is about as large as the page's small print on a phone.
WIDTH, HEIGHT = 360, 236
_RIGHT, _TOP, _BOTTOM = 10, 10, 40
# What a heatmap's colours need below it.
_RAMP = 34
# More points than this in one series make a picture that nobody can read and few browsers like.
MOST_POINTS = 600


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, its scale, and its ends (by default those of the data)."""

    label: str
    log: bool = False
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Values to draw. What is not finite is left out and breaks a line.

    Attributes:
        name: In the legend; empty: not there.
        style: A role of the style sheet: measured, full, exact, paper, path, or c1 to c6.
        kind: ``line`` or ``dots``.
        error: Half widths of error bars.
    """

    name: str
    style: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    kind: str = "line"
    error: Sequence[float | int] = field(default=())


def chart(
    ident: str, title: str, series: Sequence[Series], x: Axis, y: Axis, *, description: str = "", marks: Sequence[tuple[float, str]] = (),
) -> Html:  # fmt: skip
    """Lines and points over two axes, with a legend.

    Args:
        ident: Of the figure, its own on the page.
        title: What the figure shows; its caption and its SVG title.
        series: Drawn in this order.
        x, y: Axes.
        description: For who does not see it; by default which series there are and from where to where they go.
        marks: Horizontal lines: place and label.

    Raises:
        ValueError: A series with more than `MOST_POINTS` dots: draw an aggregate of them.
    """
    if any(len(one.x) > MOST_POINTS and one.kind != "line" for one in series):
        raise ValueError(f"at most {MOST_POINTS} dots a series")
    values = [v for one in series for v in _reach(one)] + [place for place, _ in marks]
    up = Scale(*(y.ends or span(values, y.log)), HEIGHT - _BOTTOM, _TOP, y.log)
    low, high = x.ends or span([v for one in series for v in one.x], x.log, room=0.02)
    across = Scale(low, high, _left(up), WIDTH - _RIGHT, x.log)
    known = any(across.holds(a) and up.holds(b) for one in series for a, b in zip(one.x, one.y, strict=True))
    drawn = [_frame(across, up, x, y)]
    for place, label in marks:
        if up.holds(place):
            level = f"{up(place):.1f}"
            drawn.append(tag("line", class_="mark", x1=f"{across.start:.1f}", x2=WIDTH - _RIGHT, y1=level, y2=level))
            drawn.append(tag("text", label, class_="tick", x=WIDTH - _RIGHT - 3, y=f"{up(place) - 4:.1f}", text_anchor="end"))
    drawn += [_series(one, across, up) for one in series]
    if not known:
        drawn.append(tag("text", "nothing to draw", class_="tick", x=WIDTH / 2, y=HEIGHT / 2 - 15, text_anchor="middle"))
    return figure(ident, title, description or _said(series, x, y), join(drawn), legend(series))


def figure(ident: str, title: str, description: str, drawn: Html, legend: Html | None = None, height: int = HEIGHT) -> Html:
    """A figure around what is drawn in a field of `WIDTH` by `height`."""
    svg = tag(
        "svg", tag("title", title, id=f"{ident}-title"), tag("desc", description, id=f"{ident}-desc"), drawn,
        class_="plot", viewBox=f"0 0 {WIDTH} {height}", role="img", aria_labelledby=f"{ident}-title", aria_describedby=f"{ident}-desc",
    )  # fmt: skip
    return tag("figure", tag("figcaption", title), svg, legend, id=ident)


def _reach(one: Series) -> list[float]:
    values = [float(v) for v in one.y]
    if one.error:
        values += [v + s * e for v, e in zip(one.y, one.error, strict=True) for s in (-1, 1) if math.isfinite(e)]
    return values


def _left(up: Scale) -> float:
    """Where a field begins: there is room for its widest tick, and the label."""
    return 26 + 6.2 * max(map(len, tick_texts(ticks(up.low, up.high, up.log))), default=0)


def _frame(across: Scale, up: Scale, x: Axis, y: Axis) -> Html:
    """Grid, ticks and labels."""
    left, bottom, parts = across.start, HEIGHT - _BOTTOM, []
    values = ticks(up.low, up.high, y.log)
    for value, said in zip(values, tick_texts(values), strict=True):
        level = up(value)
        parts.append(tag("line", class_="grid", x1=f"{left:.1f}", x2=WIDTH - _RIGHT, y1=f"{level:.1f}", y2=f"{level:.1f}"))
        parts.append(tag("text", said, class_="tick", x=f"{left - 5:.1f}", y=f"{level + 3.5:.1f}", text_anchor="end"))
    values = ticks(across.low, across.high, x.log, 5)
    for value, said in zip(values, tick_texts(values), strict=True):
        place = across(value)
        parts.append(tag("line", class_="grid", x1=f"{place:.1f}", x2=f"{place:.1f}", y1=_TOP, y2=bottom))
        anchor = "end" if place > WIDTH - _RIGHT - 12 else "middle"
        parts.append(tag("text", said, class_="tick", x=f"{place:.1f}", y=bottom + 14, text_anchor=anchor))
    middle = (_TOP + bottom) / 2
    parts.append(tag("line", class_="axis", x1=f"{left:.1f}", x2=WIDTH - _RIGHT, y1=bottom, y2=bottom))
    parts.append(tag("text", x.label, class_="label", x=f"{(left + WIDTH - _RIGHT) / 2:.1f}", y=HEIGHT - 6, text_anchor="middle"))
    parts.append(tag("text", y.label, class_="label", transform=f"translate(11 {middle}) rotate(-90)", text_anchor="middle"))
    return join(parts)


def _series(one: Series, across: Scale, up: Scale) -> Html:
    """A line as one path, dots as one path, error bars as one path."""
    spots = [
        (across(a), up(b)) if across.holds(a) and up.holds(b) else None
        for a, b in zip(one.x, one.y, strict=True)
    ]  # fmt: skip
    parts = []
    if one.error:
        bars = []
        for spot, value, error in zip(spots, one.y, one.error, strict=True):
            low, high = value - error, value + error
            if spot and math.isfinite(error) and up.holds(high):
                bars.append(f"M{spot[0]:.1f} {up(low) if up.holds(low) else HEIGHT - _BOTTOM:.1f}V{up(high):.1f}")
        parts.append(tag("path", class_=f"bar {one.style}", d="".join(bars)))
    if one.kind == "line":
        path, pen = [], "M"
        for spot in spots:
            path.append(f"{pen}{spot[0]:.1f} {spot[1]:.1f}" if spot else "")
            pen = "L" if spot else "M"
        parts.append(tag("path", class_=f"line {one.style}", d="".join(path)))
    if one.kind == "dots":
        # A stroke of no length with round ends is a dot.
        parts.append(tag("path", class_=f"dot {one.style}", d="".join(f"M{spot[0]:.1f} {spot[1]:.1f}h0" for spot in spots if spot)))
    return join(parts)


def legend(series: Sequence[Series], least: int = 2) -> Html | None:
    """What each named series is, with its mark; None where there are fewer than `least`: the title says it."""
    entries = [one for one in series if one.name]
    if len(entries) < least:
        return None
    items = []
    for one in entries:
        line = one.kind == "line"
        drawn = tag("path", class_=f"{'line' if line else 'dot'} {one.style}", d="M1 6H23" if line else "M12 6h0")
        key = tag("svg", drawn, class_="plot key", viewBox="0 0 24 12", aria_hidden="true")
        items.append(tag("li", key, " ", one.name))
    return tag("ul", items, class_="legend")


def _said(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Which series there are, and from where to where they go."""
    parts = [f"{y.label} over {x.label}."]
    for one in series:
        known = [float(v) for v in one.y if math.isfinite(v)]
        if known:
            parts.append(f"{one.name or one.style}: from {number(min(known), 3)} to {number(max(known), 3)}, last {number(known[-1], 3)}.")
    return " ".join(parts)


def heatmap(
    ident: str, title: str, x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], levels: Sequence[Sequence[int | None]],
    bounds: Sequence[str], *, prefix: str = "q", description: str = "", faint: Sequence[Sequence[bool]] = (),
) -> Html:  # fmt: skip
    """A grid of cells, each in the colour of its level; one path a level, so ten thousand cells are light.

    Args:
        ident: Of the figure.
        title: What it shows.
        x, y: Axes.
        xs, ys: Edges of the cells, one more than there are; ascending.
        levels: Of each row (y) and column (x), a level: 0 below the first bound, ...; None: nothing is known.
        bounds: Between the levels, as text for the legend.
        prefix: Of the style sheet's classes of the levels: ``q0``, ``q1``, ...
        description: For who does not see it.
        faint: Cells to draw faint.
    """
    up = Scale(ys[0], ys[-1], HEIGHT - _BOTTOM, _TOP, y.log)
    across = Scale(xs[0], xs[-1], _left(up), WIDTH - _RIGHT, x.log)
    right, above = [across(v) for v in xs], [up(v) for v in ys]
    paths: dict[str, list[str]] = {}
    for j, row in enumerate(levels):
        first = 0
        while first < len(row):
            kind = _kind(row, j, first, faint, prefix)
            last = first + 1
            while last < len(row) and _kind(row, j, last, faint, prefix) == kind:
                last += 1
            if kind:
                low, high = above[j], above[j + 1]
                paths.setdefault(kind, []).append(f"M{right[first]:.1f} {low:.1f}H{right[last]:.1f}V{high:.1f}H{right[first]:.1f}z")
            first = last
    cells = [tag("path", class_=f"cell {kind}", d="".join(pieces)) for kind, pieces in sorted(paths.items())]
    drawn = join(cells, _frame(across, up, x, y), _ramp(bounds, prefix, across.start))
    return figure(ident, title, description, drawn, height=HEIGHT + _RAMP)


def _ramp(bounds: Sequence[str], prefix: str, left: float | int) -> Html:
    """The colours side by side, with what lies between them."""
    size = (WIDTH - _RIGHT - left) / (len(bounds) + 1)
    parts = []
    for i in range(len(bounds) + 1):
        x = left + i * size
        parts.append(tag("rect", class_=f"cell {prefix}{i}", x=f"{x:.1f}", y=HEIGHT + 8, width=f"{size:.1f}", height=10))
        if i:
            parts.append(tag("text", bounds[i - 1], class_="tick", x=f"{x:.1f}", y=HEIGHT + 30, text_anchor="middle"))
    return join(parts)


def _kind(row: Sequence[int | None], j: int, i: int, faint: Sequence[Sequence[bool]], prefix: str) -> str:
    level = row[i]
    return "" if level is None else f"{prefix}{level}{' faint' if faint and faint[j][i] else ''}"
