"""Heat maps of a sweep over two axes: measured, predicted and their relative error."""

from typing import Any

import matplotlib.patheffects as effects
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rwsim.plots.data import Axis, Quantity
from rwsim.plots.style import (
    QUANTITY_LABELS,
    Array,
    cell_edges,
    color_norm,
    error_cap,
    extend,
    finite,
    number,
    percent,
    round_levels,
    set_ticks,
)

VALUE_MAP = plt.get_cmap("viridis")
ERROR_MAP = plt.get_cmap("BrBG")
# In neither map, for any kind of colour vision.
DIVERGED = "#EE3377"
_HATCH = "////"
_VEIL, _COVER = (1.0, 1.0, 1.0, 0.35), (0.85, 0.85, 0.85, 1.0)
CONTOUR_LABEL = r"predicted $\eta_r$ (rad/step)"
DIVERGED_LABEL = "no value (diverged)"
UNDER_WAY_LABEL = "not settled: no equilibrium"
COLUMN_TITLES = ("measured", "predicted (exact)", "relative error, measured / exact − 1")  # noqa: RUF001 - a minus sign
_OUTLINE: list[effects.AbstractPathEffect] = [effects.withStroke(linewidth=2.0, foreground="black")]
PRODUCT_STYLE: dict[str, Any] = {"color": "0.15", "ls": (0, (4, 3)), "lw": 0.8}
# Seen on dark cells too.
_PRODUCT_HALO: list[effects.AbstractPathEffect] = [effects.withStroke(linewidth=1.8, foreground=(1, 1, 1, 0.6))]


def hatched(axis: Axes, x_edges: Array, y_edges: Array, mask: Array, face: tuple[float, float, float, float]) -> None:
    """Cover and hatch the cells of the mask (rows are y): one outline of all runs of cells, so that 10,000 cells stay cheap."""
    rectangles = []
    for row, cells in enumerate(mask):
        change = np.flatnonzero(np.diff(np.concatenate([[0], cells.astype(int), [0]])))
        for start, stop in change.reshape(-1, 2):
            left, right, low, high = x_edges[start], x_edges[stop], y_edges[row], y_edges[row + 1]
            rectangles.append(Outline([(left, low), (right, low), (right, high), (left, high), (left, low)], closed=True))
    if rectangles:
        outline = Outline.make_compound_path(*rectangles)
        axis.add_patch(PathPatch(outline, facecolor=face, edgecolor="0.25", hatch=_HATCH, lw=0, gid="unsettled"))


def color_bar(figure: Figure, axes: list[Axes], values: Array, norm: Normalize, label: str, error: bool = False) -> None:
    mappable = plt.cm.ScalarMappable(norm, ERROR_MAP if error else VALUE_MAP)
    bar = figure.colorbar(mappable, ax=axes, extend=extend(values, norm), pad=0.015, fraction=0.05, aspect=18)
    low, high = float(norm.vmin or 0), float(norm.vmax or 0)
    if error:
        bar.set_ticks([low, low / 2, 0, high / 2, high])
        bar.ax.yaxis.set_major_formatter(FuncFormatter(percent))
    elif low > 0:
        set_ticks(bar.ax.yaxis, low, high)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=9)


def error_bar_label(quantity: Quantity, cap: float) -> str:
    worst = np.abs(finite(quantity.trusted_error))
    return f"error (colours end at ±{100 * cap:g} %)" if len(worst) and worst.max() > cap else "error"


def contour_levels(rotation: Array) -> Array:
    """Round levels between which the predicted rotation varies; none where it does not."""
    values = finite(rotation)
    if not len(values) or min(rotation.shape) < 2 or values.min() <= 0 or np.ptp(values) < 1e-6 * values.max():
        return np.array([])
    low, high = float(values.min()), float(values.max())
    # Not so close to an end that only a speck in a corner would show.
    margin = (high / low) ** 0.04
    levels = round_levels(low, high, 7)
    return levels[(levels > low * margin) & (levels < high / margin)]


def rotation_contours(axis: Axes, x: Array, y: Array, rotation: Array, levels: Array) -> ContourSet:
    """Lines of equal predicted rotation, labelled."""
    lines = axis.contour(x, y, np.ma.masked_invalid(rotation), levels=levels, colors="white", linewidths=1.1)
    lines.set_path_effects(_OUTLINE)
    for label in axis.clabel(lines, fmt=number, fontsize=7.5, inline_spacing=3):
        label.set_path_effects(_OUTLINE)
    return lines


def product_lines(axis: Axes, labelled: bool) -> list[Line2D]:
    """Dashed lines of constant x y (learning rate times weight decay) across the panel, at round products."""
    (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()
    if min(x0, y0) <= 0:
        return []
    drawn = []
    for level in round_levels(x0 * y0, x1 * y1, 8):
        left, right = max(x0, level / y1), min(x1, level / y0)
        if np.log(right / left) < 0.1 * np.log(x1 / x0):
            continue
        x = np.geomspace(left, right, 100)
        drawn += axis.plot(x, level / x, **PRODUCT_STYLE, path_effects=_PRODUCT_HALO, zorder=1.5, gid="product")
        if labelled:
            ends = axis.transData.transform([(x[45], level / x[45]), (x[55], level / x[55])])
            angle = np.degrees(np.arctan2(ends[1, 1] - ends[0, 1], ends[1, 0] - ends[0, 0]))
            axis.text(
                x[50], level / x[50], number(level), rotation=angle, rotation_mode="anchor", ha="center", va="center",
                fontsize=7.5, clip_on=True, zorder=1.6, gid="product label",
                # Or the dash before it reads as a minus sign.
                bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 0.8},
            )  # fmt: skip
    axis.set_xlim(x0, x1)
    axis.set_ylim(y0, y1)
    return drawn


def empty(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color="0.3")


def style_axis(axis: Axes, x: Axis, y: Axis, x_edges: Array, y_edges: Array) -> None:
    for which, ticks, swept, edges in (("x", axis.xaxis, x, x_edges), ("y", axis.yaxis, y, y_edges)):
        axis.set(**{f"{which}scale": "log" if swept.log else "linear", f"{which}lim": (edges[0], edges[-1])})
        if swept.few:
            ticks.set_major_locator(FixedLocator(list(swept.values.astype(float))))
            ticks.set_major_formatter(FuncFormatter(number))
            ticks.set_minor_locator(NullLocator())
        elif swept.log:
            set_ticks(ticks, edges[0], edges[-1])
    axis.tick_params(labelsize=8)


def fix_layout(figure: Figure) -> None:
    """Give the panels their final shape: labels on lines turn with them, and are set after this."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")


def map_figure(title: str, x: Axis, y: Axis, quantities: list[Quantity], rotation: Array) -> Figure:
    """A row per quantity; columns: measured, predicted, relative error. Arrays have shape (x, y).

    Solid lines: constant predicted rotation. Dashed: constant learning rate times weight decay, where these are the
    axes. Hatched: walks under way, which are no equilibrium. Measured and predicted share a colour scale.
    """
    figure, axes = plt.subplots(
        len(quantities), 3, figsize=(10, 2.7 * len(quantities) + 1.2), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    x_edges, y_edges = cell_edges(x.values, x.log), cell_edges(y.values, y.log)
    missing = hatch = False
    for row, quantity in zip(axes, quantities, strict=True):
        norm, cap = color_norm(quantity.trusted, quantity.exact), error_cap(quantity.trusted_error)
        panels = (quantity.measured, norm, VALUE_MAP), (quantity.exact, norm, VALUE_MAP), (quantity.error, Normalize(-cap, cap), ERROR_MAP)
        for column, (axis, (values, scale, colors)) in enumerate(zip(row, panels, strict=True)):
            style_axis(axis, x, y, x_edges, y_edges)
            if column != 1 and not quantity.logged:
                empty(axis, "not measured")
                continue
            missing |= not np.isfinite(values).all()
            shown = np.ma.masked_invalid(values.T)
            axis.pcolormesh(x_edges, y_edges, shown, cmap=colors.with_extremes(bad=DIVERGED), norm=scale, rasterized=True)
            if column != 1:
                # The error of a walk under way says nothing about the theory: it is covered.
                hatched(axis, x_edges, y_edges, quantity.under_way.T, _VEIL if column == 0 else _COVER)
                hatch |= bool(quantity.under_way.any())
        color_bar(figure, list(row[:2]), np.concatenate([quantity.measured, quantity.exact]), norm, QUANTITY_LABELS[quantity.name])
        color_bar(figure, list(row[2:]), quantity.trusted_error, Normalize(-cap, cap), error_bar_label(quantity, cap), error=True)
        row[0].set_ylabel(y.label, fontsize=9)
    for axis, text in zip(axes[0], COLUMN_TITLES, strict=True):
        axis.set_title(text, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel(x.label, fontsize=9)
    figure.suptitle(title, fontsize=10)

    handles: list[Line2D | Patch] = []
    levels = contour_levels(rotation)
    if len(levels):
        handles.append(Line2D([], [], color="white", lw=1.1, path_effects=_OUTLINE, label=CONTOUR_LABEL))
    by_product = {x.name, y.name} == {"lr", "weight_decay"}
    if by_product:
        handles.append(Line2D([], [], **PRODUCT_STYLE, label="learning rate × weight decay"))  # noqa: RUF001 - a product
    if hatch:
        handles.append(Patch(facecolor="0.9", edgecolor="0.25", hatch=_HATCH, lw=0, label=UNDER_WAY_LABEL))
    if missing:
        handles.append(Patch(facecolor=DIVERGED, label=DIVERGED_LABEL))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    fix_layout(figure)
    for row in axes:
        for column, axis in enumerate(row):
            if by_product:
                product_lines(axis, labelled=column == 2)
            if len(levels) and column < 2:
                rotation_contours(axis, x.values, y.values, rotation.T, levels)
    return figure
