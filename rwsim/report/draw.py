"""Figures that reports share: relative errors of rows beside each other, and the distribution of many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rwsim.page.chart import WIDTH, Axis, Series, chart, figure, legend
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import Scale, percent, tick_texts, ticks
from rwsim.report.sheet import cut

_LEFT, _RIGHT, _LANE, _GAP, _FOOT = 116, 12, 8, 10, 40
# Errors below this are drawn at it.
_LEAST = 1e-5
_STEPS = 160


@dataclass(frozen=True)
class Mark:
    """A relative error on its lane, with the half width of its interval."""

    style: str
    value: float | int | None
    half: float | int | None = None


def forest(
    ident: str, title: str, rows: Sequence[tuple[str, Sequence[Mark]]], names: Sequence[tuple[str, str]], *, band: float, label: str,
    reach: float | None = None,
) -> Html:  # fmt: skip
    """Relative errors, a row of lanes each: dots with intervals, a band of what is allowed; what lies beyond the axis is written.

    Args:
        ident: Of the figure.
        title: What it shows.
        rows: Label, and one mark for each of `names`.
        names: Styles and what they are called.
        band: Half width of the shaded band.
        label: Of the axis.
        reach: Half width of the axis; by default five times the band.
    """
    reach = reach or 5 * band
    row = _LANE * len(names) + _GAP
    height = 8 + row * len(rows) + _FOOT
    bottom = height - _FOOT
    across = Scale(-reach, reach, _LEFT, WIDTH - _RIGHT)
    places = ticks(-reach, reach, most=5)
    parts = [tag("rect", class_="band", x=f"{across(-band):.1f}", width=f"{across(band) - across(-band):.1f}", y=4, height=bottom - 4)]
    for place, text in zip(places, tick_texts([round(100 * p, 9) for p in places]), strict=True):
        kind, at = "axis" if place == 0 else "grid", f"{across(place):.1f}"
        parts.append(tag("line", class_=kind, x1=at, x2=at, y1=4, y2=bottom))
        parts.append(tag("text", text, class_="tick", x=at, y=bottom + 14, text_anchor="middle"))
    lanes: list[Html | None] = []
    for i, (name, marks) in enumerate(rows):
        top = 8 + i * row
        parts.append(tag("text", cut(name, 17), class_="label", x=_LEFT - 8, y=f"{top + (row - _GAP) / 2 + 4:.1f}", text_anchor="end"))
        for lane, mark in enumerate(marks):
            lanes.append(_mark(mark, across, reach, top + _LANE * (lane + 0.5)))
    parts.append(tag("text", label, class_="label", x=(_LEFT + WIDTH - _RIGHT) / 2, y=height - 6, text_anchor="middle"))
    told = "; ".join(
        f"{name}: " + ", ".join(f"{said} {percent(m.value)}" for (_, said), m in zip(names, marks, strict=True)) for name, marks in rows
    )
    keys = legend([Series(name, style, (), (), "dots") for style, name in names], least=1)
    return figure(ident, title, f"{label}. {told}.", join(parts, lanes), keys, height)


def _mark(mark: Mark, across: Scale, reach: float, y: float) -> Html | None:
    if mark.value is None or not math.isfinite(mark.value):
        return None
    if abs(mark.value) > reach:
        right = mark.value > 0
        x = WIDTH - _RIGHT if right else _LEFT + 2
        text = f"{percent(mark.value)} ▸" if right else f"◂ {percent(mark.value)}"
        return tag("text", text, class_=f"far {mark.style}", x=x, y=f"{y + 3:.1f}", text_anchor="end" if right else "start")
    parts = []
    if mark.half is not None and math.isfinite(mark.half):
        low, high = (across(max(-reach, min(reach, mark.value + s * mark.half))) for s in (-1, 1))
        parts.append(tag("path", class_=f"bar {mark.style}", d=f"M{low:.1f} {y:.1f}H{high:.1f}"))
    parts.append(tag("path", class_=f"dot {mark.style}", d=f"M{across(mark.value):.1f} {y:.1f}h0"))
    return join(parts)


def distribution(ident: str, title: str, errors: Sequence[tuple[str, str, np.ndarray]]) -> Html:
    """Share of points whose absolute error is at most so large; a line each of (name, style, errors), as many points as there are."""
    series = []
    for name, style, values in errors:
        found = np.sort(np.abs(values[np.isfinite(values)]))
        if len(found):
            # So many quantiles say as much as all of them.
            shares = np.linspace(0, 1, min(len(found), _STEPS))
            off = 100 * np.maximum(np.quantile(found, shares), _LEAST)
            series.append(Series(name, style, off.tolist(), (100 * shares).tolist()))
    sizes = [float(v) for one in series for v in one.x]
    ends = (10.0 ** math.floor(math.log10(min(sizes))), 10.0 ** math.ceil(math.log10(1.001 * max(sizes)))) if sizes else None
    said = "" if not series else " ".join(f"{one.name}: half of the points within {np.interp(50, one.y, one.x):.2g} %." for one in series)
    return chart(
        ident, title, series, Axis("absolute error, %", True, ends), Axis("share of points, %", ends=(0.0, 100.0)),
        description=f"Share of points over the absolute error, which is logarithmic. {said}",
    )  # fmt: skip


def spread_of(series: Sequence[Series]) -> float:
    """Largest over smallest value drawn, which says whether a logarithmic axis is wanted; 0 where one has no logarithm."""
    values = np.concatenate([np.asarray(one.y, dtype=float) for one in series]) if series else np.zeros(0)
    values = values[np.isfinite(values)]
    return float(values.max() / values.min()) if len(values) and values.min() > 0 else 0.0


def thin(values: np.ndarray, most: int = 300) -> np.ndarray:
    """A series at no more than so many places: means of blocks."""
    if len(values) <= most:
        return values
    edges = np.linspace(0, len(values), most + 1).astype(int)
    with np.errstate(invalid="ignore"):
        return np.array([np.nanmean(part) if np.isfinite(part := values[a:b]).any() else math.nan for a, b in pairwise(edges.tolist())])
