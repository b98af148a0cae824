"""Sweeps that are no two-dimensional grid: lines over one axis, scattered points, and walks over time."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from rwsim.plots.data import QUANTITIES, Axis, Quantity
from rwsim.plots.maps import (
    COLUMN_TITLES,
    DIVERGED,
    DIVERGED_LABEL,
    ERROR_MAP,
    PRODUCT_STYLE,
    UNDER_WAY_LABEL,
    VALUE_MAP,
    color_bar,
    empty,
    error_bar_label,
    fix_layout,
    product_lines,
    style_axis,
)  # fmt: skip
from rwsim.plots.style import COLORS, QUANTITY_LABELS, Array, color_norm, error_cap, finite, percent, set_ticks

_ERROR_BARS: dict[str, Any] = {"lw": 0, "elinewidth": 1, "capsize": 2, "ms": 4.5}


def _fit_log(axis: Axes, which: str, *arrays: Array) -> None:
    """A log scale around all finite values, if they are positive."""
    values = finite(*arrays)
    if not len(values) or values.min() <= 0:
        return
    low, high = values.min() / 1.15, values.max() * 1.15
    axis.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    set_ticks(axis.xaxis if which == "x" else axis.yaxis, low, high)


def _marks(under_way: bool, diverged: bool, marker: str) -> list[Line2D]:
    handles = []
    if under_way:
        handles.append(Line2D([], [], color="0.3", marker=marker, markerfacecolor="white", lw=0, label=UNDER_WAY_LABEL))
    if diverged:
        handles.append(Line2D([], [], color=DIVERGED, marker="X", lw=0, label=DIVERGED_LABEL))
    return handles


def line_figure(title: str, x: Axis, lines: list[tuple[str, Array, list[Quantity]]]) -> Figure:
    """A row per quantity; columns: values and relative errors over `x`. `lines` are (label, places on x, quantities)."""
    rows = len(lines[0][2])
    figure, axes = plt.subplots(rows, 2, figsize=(10, 2.5 * rows + 1.2), squeeze=False, sharex=True, layout="constrained")
    under_way = diverged = False
    for row, (values, errors) in enumerate(axes):
        quantities = [q[row] for _, _, q in lines]
        for i, (color, (_, where, _), q) in enumerate(zip(COLORS, lines, quantities, strict=False)):
            # A line through one place, or between words, shows nothing.
            dash = {"marker": "_", "ms": 18.0} if len(where) == 1 or not x.numeric else {}
            values.plot(where, q.exact, color=color, lw=1.2, **dash)
            values.plot(where, q.paper, color="0.35", lw=1.0, ls="--", zorder=2.5, **dash)
            relative = q.mcse / np.where(q.exact == 0, np.nan, np.abs(q.exact))
            # Side by side, or the error bars of several lines would hide one another.
            beside = _shifted(where, x, 0.012 * (i - (len(lines) - 1) / 2))
            for axis, places, height, bar in ((values, where, q.measured, q.mcse), (errors, beside, q.error, relative)):
                for mask, face in ((~q.under_way, color), (q.under_way, "white")):
                    if mask.any():
                        bars = np.nan_to_num(bar[mask])
                        axis.errorbar(places[mask], height[mask], bars, color=color, marker="o", markerfacecolor=face, **_ERROR_BARS)
            gone = ~np.isfinite(q.measured) & q.logged
            values.plot(where[gone], np.full(gone.sum(), 0.04), "X", color=DIVERGED, ms=6, transform=values.get_xaxis_transform())
            under_way |= bool(q.under_way.any())
            diverged |= bool(gone.any())
        _fit_log(values, "y", *(a for q in quantities for a in (q.measured, q.exact, q.paper)))
        _frame_errors(errors, quantities)
        values.set_ylabel(QUANTITY_LABELS[quantities[0].name], fontsize=9)
        for axis in (values, errors):
            axis.tick_params(labelsize=8)
            if not quantities[0].logged:
                empty(axis, "not measured")
    axes[0][0].set_title("measured (bars: one standard error) and predicted", fontsize=9)
    axes[0][1].set_title(COLUMN_TITLES[2], fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel(x.label, fontsize=9)
        if not x.numeric:
            axis.set_xticks(range(len(x.values)), x.values.tolist(), rotation=0 if len(x.values) < 6 else 30)
            axis.set_xlim(-0.5, len(x.values) - 0.5)
        elif x.varies:
            low, high = _limits(x)
            axis.set(xscale="log" if x.log else "linear", xlim=(low, high))
            if x.log:
                set_ticks(axis.xaxis, low, high)
    figure.suptitle(title, fontsize=10)
    handles = [Line2D([], [], color=c, marker="o", lw=1.2, label=label) for c, (label, _, _) in zip(COLORS, lines, strict=False) if label]
    handles += [Line2D([], [], color="0.3", lw=1.2, label="exact"), Line2D([], [], color="0.35", lw=1, ls="--", label="Table 1")]
    handles += _marks(under_way, diverged, "o")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    return figure


def _shifted(where: Array, x: Axis, share: float) -> Array:
    """Places moved sideways by a share of the axis."""
    if not x.numeric:
        return where + share * len(x.values)
    if x.log:
        return where * (x.values[-1] / x.values[0]) ** share
    return where + share * (x.values[-1] - x.values[0])


def _frame_errors(axis: Axes, quantities: list[Quantity]) -> None:
    """A symmetric frame around the errors of settled walks, 100 % at most; says how many points lie outside."""
    reach = np.abs(finite(*(q.trusted_error for q in quantities)))
    bars = finite(*(np.where(q.settled, q.mcse / np.where(q.exact == 0, np.nan, np.abs(q.exact)), np.nan) for q in quantities))
    frame = 1.1 * min(max(reach.max(initial=0.005) + bars.max(initial=0), 0.005), 1.0)
    axis.axhline(0, color="0.4", lw=0.8)
    axis.set_ylim(-frame, frame)
    axis.yaxis.set_major_formatter(FuncFormatter(percent))
    outside = int((np.abs(finite(*(q.error for q in quantities))) > frame).sum())
    if outside:
        axis.text(0.02, 0.96, f"{outside} points outside the frame", transform=axis.transAxes, va="top", fontsize=8, color="0.3")


def _limits(axis: Axis) -> Array:
    """Room around the outermost points."""
    ends = axis.values[[0, -1]].astype(float)
    if axis.log:
        return ends * (ends[1] / ends[0]) ** np.array([-0.06, 0.06])
    return ends + (ends[1] - ends[0]) * np.array([-0.06, 0.06])


def scatter_figure(title: str, x: Axis, y: Axis, where: tuple[Array, Array], quantities: list[Quantity]) -> Figure:
    """A row per quantity; columns: measured and relative error over two axes, and measured against predicted."""
    rows = len(quantities)
    figure, axes = plt.subplots(rows, 3, figsize=(10, 2.7 * rows + 1.2), squeeze=False, layout="constrained")
    under_way = diverged = False
    for row, q in zip(axes, quantities, strict=True):
        norm, cap = color_norm(q.trusted, q.exact), error_cap(q.trusted_error)
        for axis, values, scale, colors in ((row[0], q.measured, norm, VALUE_MAP), (row[1], q.error, Normalize(-cap, cap), ERROR_MAP)):
            style_axis(axis, x, y, _limits(x), _limits(y))
            axis.set_ylabel(y.label, fontsize=9)
            if not q.logged:
                empty(axis, "not measured")
                continue
            for mask, marker in ((q.settled, "o"), (~q.settled, "v")):
                shown = mask & np.isfinite(values)
                places = where[0][shown], where[1][shown]
                if axis is row[1] and marker == "v":
                    # The error of a walk under way says nothing about the theory.
                    axis.scatter(*places, color="0.85", s=34, edgecolors="0.3", linewidths=0.6, marker=marker, zorder=2)
                else:
                    axis.scatter(
                        *places, c=values[shown], cmap=colors, norm=scale, s=34, edgecolors="0.3", linewidths=0.6, marker=marker, zorder=2
                    )
            gone = ~np.isfinite(q.measured)
            axis.scatter(where[0][gone], where[1][gone], color=DIVERGED, marker="X", s=40, linewidths=0, zorder=2)
            under_way |= bool(q.under_way.any())
            diverged |= bool(gone.any())
        color_bar(figure, list(row[:1]), q.measured, norm, QUANTITY_LABELS[q.name])
        color_bar(figure, list(row[1:2]), q.trusted_error, Normalize(-cap, cap), error_bar_label(q, cap), error=True)
        _parity(row[2], q)
    for axis, text in zip(axes[0], ("measured", COLUMN_TITLES[2], "measured against exact"), strict=True):
        axis.set_title(text, fontsize=9)
    for axis in axes[-1, :2]:
        axis.set_xlabel(x.label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    by_product = {x.name, y.name} == {"lr", "weight_decay"}
    handles = _marks(under_way, diverged, "v")
    if by_product:
        handles.append(Line2D([], [], **PRODUCT_STYLE, label="learning rate × weight decay"))  # noqa: RUF001 - a product
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    if by_product:
        fix_layout(figure)
        for row in axes:
            product_lines(row[0], labelled=False)
            product_lines(row[1], labelled=True)
    return figure


def _parity(axis: Axes, q: Quantity) -> None:
    axis.tick_params(labelsize=8)
    axis.set_xlabel(f"exact {QUANTITY_LABELS[q.name]}", fontsize=8.5)
    axis.set_ylabel("measured (bars: one standard error)", fontsize=8)
    both = np.isfinite(q.measured) & np.isfinite(q.exact)
    if not both.any():
        empty(axis, "nothing to compare")
        return
    for mask, marker, face in ((both & q.settled, "o", COLORS[0]), (both & ~q.settled, "v", "white")):
        if mask.any():
            bars = np.nan_to_num(q.mcse[mask])
            axis.errorbar(q.exact[mask], q.measured[mask], bars, color=COLORS[0], marker=marker, markerfacecolor=face, **_ERROR_BARS)
    values = np.concatenate([q.exact[both], q.measured[both]])
    axis.axline((values.min(), values.min()), slope=1, color="0.4", lw=0.8)
    for which in "xy":
        _fit_log(axis, which, values)


@dataclass(frozen=True)
class Curve:
    """One walk: what was varied, its quantities over time and their predicted equilibrium."""

    label: str
    values: dict[str, Array]
    exact: dict[str, float]


def trajectory_figure(title: str, time: Array, curves: list[Curve]) -> Figure:
    """Norm, rotation and RMS update over time, coloured by rank of predicted rotation; dashed: the exact equilibrium."""
    figure, axes = plt.subplots(len(QUANTITIES), 1, figsize=(10, 9), sharex=True, layout="constrained")
    order = np.argsort([c.exact.get("rotation", np.nan) for c in curves], kind="stable")
    curves = [curves[i] for i in order]
    # The yellow end of the map is too pale for a line.
    colors = VALUE_MAP(np.linspace(0, 0.92, len(curves)))
    for axis, name in zip(axes, QUANTITIES, strict=True):
        for color, curve in zip(colors, curves, strict=True):
            if name in curve.values:
                axis.plot(time, curve.values[name], color=color, lw=1.1)
            if np.isfinite(curve.exact.get(name, np.nan)):
                axis.axhline(curve.exact[name], color=color, lw=0.9, ls="--")
        predictions = np.array([c.exact.get(name, np.nan) for c in curves])
        _fit_log(axis, "y", predictions, *(c.values[name] for c in curves if name in c.values))
        axis.set_ylabel(QUANTITY_LABELS[name], fontsize=9)
        axis.tick_params(labelsize=8)
    _fit_log(axes[-1], "x", time.astype(float))
    axes[-1].set_xlabel("step", fontsize=9)
    figure.suptitle(title, fontsize=10)
    handles = [Line2D([], [], color=c, lw=1.6, label=curve.label or "walk") for c, curve in zip(colors, curves, strict=True)]
    handles.append(Line2D([], [], color="0.3", lw=0.9, ls="--", label="exact equilibrium"))
    heading = "by predicted rotation, slowest first"
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False, title=heading, title_fontsize=8.5)
    return figure
