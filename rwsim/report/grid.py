"""Figures of a sweep: error maps, slices along an axis, measured over predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rwsim.page.chart import MOST_POINTS, Series, chart, heatmap
from rwsim.page.chart import Axis as Across
from rwsim.page.html import Html, join
from rwsim.page.scale import number, percent, share
from rwsim.report.draw import spread_of
from rwsim.report.read import Array, Columns
from rwsim.report.sheet import figures, note
from rwsim.report.words import AXES, heading

if TYPE_CHECKING:
    from rwsim.report.sweep import Points

_LABELS = {"lr": "learning rate", "weight_decay": "weight decay", "fan_in": "fan-in", "loss_scale": "loss scale"}
# Caps of an error map's colours: the first that 95 % of the errors lie within.
_CAPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# Bins of a density.
_BINS = 48
# Cells of a map along an axis; more are not seen, and values are drawn where they are nearest.
_MOST_CELLS = 120
# Dots along an axis of a slice.
_MOST_DOTS = 60


@dataclass(frozen=True)
class Axis:
    """What was swept.

    Attributes:
        name: Of the column.
        values: Of every point.
        numeric: Whether they are numbers.
        log: Whether they are spread logarithmically.
    """

    name: str
    values: Array
    numeric: bool
    log: bool

    @classmethod
    def of(cls, name: str, scale: str, columns: Columns) -> "Axis":
        """A column; the scale where it is known, else from how the values are spread."""
        if not columns.is_numeric(name):
            return cls(name, columns.text(name), False, False)
        values = columns.numbers(name)
        levels = np.unique(values[np.isfinite(values)])
        positive = bool(len(levels)) and bool(levels[0] > 0)
        wide = positive and bool(levels[-1] >= 20 * levels[0])
        return cls(name, values, True, positive and (scale == "log" or (scale != "linear" and wide)))

    @property
    def levels(self) -> Array:
        return np.unique(self.values[np.isfinite(self.values)] if self.numeric else self.values)

    @property
    def varies(self) -> bool:
        return len(self.levels) > 1

    @property
    def label(self) -> str:
        return _LABELS.get(self.name, self.name.replace("_", " "))

    @property
    def said(self) -> str:
        levels = self.levels
        if not self.numeric or len(levels) <= 6:
            return ", ".join(number(float(v)) if self.numeric else str(v) for v in levels[:12])
        return f"{len(levels):,} values from {number(float(levels[0]))} to {number(float(levels[-1]))}{', logarithmic' if self.log else ''}"


def maps(points: "Points", mine: Array, axes: Sequence[Axis], ident: str) -> Html:
    """Measured over exact, less one, over the first two axes; the median where there are more."""
    x, y = axes[:2]
    across, up = (_cells(axis, mine) for axis in (x, y))
    drawn = []
    settled = points.settled[mine]
    for quantity in points.quantities:
        errors = points.error(quantity, "exact")[mine]
        trusted = np.abs(errors[settled & np.isfinite(errors)])
        cap = next((c for c in _CAPS if len(trusted) == 0 or np.quantile(trusted, 0.95) <= c), _CAPS[-1])
        bounds = cap * np.array([-1, -0.5, -0.1, 0.1, 0.5, 1])
        grid, faint = _median(errors, settled, across, up)
        levels = [[None if np.isnan(v) else int(np.searchsorted(bounds, v)) for v in row] for row in grid]
        off = f"median of all cells {percent(float(np.nanmedian(grid)))}" if np.isfinite(grid).any() else "nothing is known"
        drawn.append(
            heatmap(
                f"{ident}-{quantity}", f"{heading(quantity)}, error", Across(x.label, x.log), Across(y.label, y.log),
                across[1], up[1], levels, [share(float(b)) for b in bounds], faint=faint,
                description=f"Colours over {x.label} and {y.label}; {off}; of points in equilibrium 95 % within {share(cap)}.",
            )
        )  # fmt: skip
    rest = f"; medians over {', '.join(axis.label for axis in axes[2:])}" if len(axes) > 2 else ""
    return join(
        note(f"Measured over exact, less one{rest}. Faint: the walk is not in equilibrium, which says nothing about the prediction."),
        figures(*drawn),
    )


def _cells(axis: Axis, mine: Array) -> tuple[Array, list[float]]:
    """Of every point its cell, and the edges of the cells: one a level, or fewer even ones."""
    values = np.log(axis.values[mine]) if axis.log else axis.values[mine].astype(float)
    levels = np.unique(values)
    if len(levels) > _MOST_CELLS:
        edges = np.linspace(levels[0], levels[-1], _MOST_CELLS + 1)
    elif len(levels) > 1:
        middle = (levels[1:] + levels[:-1]) / 2
        edges = np.concatenate([[2 * levels[0] - middle[0]], middle, [2 * levels[-1] - middle[-1]]])
    else:
        edges = levels[0] + np.array([-0.5, 0.5])
    cell = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return cell, (np.exp(edges) if axis.log else edges).tolist()


def _median(values: Array, settled: Array, across: tuple[Array, list[float]], up: tuple[Array, list[float]]) -> tuple[Array, Any]:
    """Of each cell the median of its points in equilibrium; where there is none, of all of them, and faint."""
    shape = len(up[1]) - 1, len(across[1]) - 1
    place = up[0] * shape[1] + across[0]
    grid = np.full(shape[0] * shape[1], np.nan)
    faint = np.ones(shape, dtype=bool)
    for which in (np.isfinite(values), settled & np.isfinite(values)):
        where, found = place[which], values[which]
        order = np.lexsort((found, where))
        cells, first, count = np.unique(where[order], return_index=True, return_counts=True)
        low, high = found[order][first + (count - 1) // 2], found[order][first + count // 2]
        grid[cells] = (low + high) / 2
    faint.ravel()[cells] = False
    return grid.reshape(shape), faint.tolist()


def slices(points: "Points", mine: Array, axes: Sequence[Axis], ident: str) -> Html:
    """Measured, exact and paper along the first axis, at up to three values of the second and the middle one of every other."""
    x, *others = axes
    keep = np.ones(len(mine), dtype=bool)
    fixed = []
    for axis in [*others[1:], *(a for a in points.axes if a.varies and not a.numeric)]:
        middle = axis.levels[len(axis.levels) // 2]
        keep &= axis.values[mine] == middle
        fixed.append(f"{axis.label} {number(float(middle), 3) if axis.numeric else middle}")
    cuts: list[tuple[str, Array]] = [("", keep)]
    if others:
        levels = others[0].levels
        chosen = dict.fromkeys(levels[i] for i in (0, len(levels) // 2, -1))
        cuts = [(f" at {others[0].label} {number(float(v), 3)}", keep & (others[0].values[mine] == v)) for v in chosen]
    drawn = [
        _slice(points, mine[which], x, quantity, where, f"{ident}-{k}-{quantity}")
        for k, (where, which) in enumerate(cuts)
        for quantity in points.quantities
    ]
    told = f"Held fixed: {', '.join(fixed)}. " if fixed else ""
    return join(note(f"{told}Grey dots: not in equilibrium. Bars: two standard errors, often smaller than the dots."), figures(*drawn))


def _slice(points: "Points", which: Array, x: Axis, quantity: str, where: str, ident: str) -> Html:
    which = which[np.argsort(x.values[which], kind="stable")]
    places = x.values[which].astype(float)
    get = points.columns.numbers
    dots = np.unique(np.linspace(0, len(which) - 1, min(len(which), _MOST_DOTS)).astype(int)) if len(which) else np.array([], dtype=int)
    settled, measured = points.settled[which], get(quantity)[which]
    has_error = f"{quantity}_mcse" in points.columns
    error = 2 * get(f"{quantity}_mcse")[which] if has_error else np.full(len(which), np.nan)
    series = []
    for form, said in (("paper", "paper"), ("exact", "exact")):
        series.append(Series(said, form, places.tolist(), get(f"{quantity}_{form}")[which].tolist()))
    for said, style, some in (("not in equilibrium", "open", ~settled), ("measured", "measured", settled)):
        mask = dots[some[dots]]
        if len(mask):
            series.append(Series(said, style, places[mask].tolist(), measured[mask].tolist(), "dots", tuple(error[mask].tolist())))
    return chart(ident, f"{heading(quantity)}{where}", series, Across(x.label, x.log), Across(AXES[quantity], spread_of(series) > 5))


def scatter(points: "Points", mine: Array, ident: str) -> Html:
    """Measured over exact and paper; as a density where there are too many points for dots."""
    drawn = []
    for quantity in points.quantities:
        measured, settled = points.columns.numbers(quantity)[mine], points.settled[mine]
        title = heading(quantity)
        label = AXES[quantity]
        series = []
        for form, said, style in (("paper", "paper", "paper"), ("exact", "exact", "exact")):
            ratio = points.error(quantity, form)[mine]
            good = np.isfinite(ratio) & settled & (measured > 0)
            series.append((said, style, points.columns.numbers(f"{quantity}_{form}")[mine][good], ratio[good]))
        if max(len(one[2]) for one in series) <= MOST_POINTS:
            dots = [Series(said, style, x.tolist(), (100 * y).tolist(), "dots") for said, style, x, y in series]
            drawn.append(
                chart(
                    f"{ident}-{quantity}",
                    title,
                    dots,
                    Across(f"predicted {label}", True),
                    Across("error, %", ends=_ends(dots)),
                    marks=[(0.0, "")],
                )
            )
        else:
            _, _, x, y = series[1]
            drawn.append(_density(f"{ident}-{quantity}", f"{title}, exact form", x, y, label))
    return join(note("Points in equilibrium."), figures(*drawn))


def _ends(dots: Sequence[Series]) -> tuple[float, float] | None:
    """Of an axis of errors in percent: rounding is not spread over it."""
    most = max((abs(v) for one in dots for v in one.y), default=0.0)
    return (-0.01, 0.01) if most < 0.01 else None


def _density(ident: str, title: str, x: Array, y: Array, label: str) -> Html:
    """How many points lie in each cell."""
    reach = max(float(np.quantile(np.abs(y), 0.99)), 1e-6)
    edges = np.exp(np.linspace(np.log(x.min()), np.log(x.max() * (1 + 1e-9)), _BINS + 1)), np.linspace(-reach, reach, _BINS + 1)
    counts, _, _ = np.histogram2d(x, np.clip(y, -reach, reach), bins=edges)
    most = max(int(counts.max()), 1)
    bounds = np.unique(np.geomspace(1, most + 1, 6).astype(int))
    levels = [[None if n == 0 else int(np.searchsorted(bounds, n, side="right")) - 1 for n in row] for row in counts.T]
    names = [f"{bound:,}" for bound in bounds[1:-1]]
    return heatmap(
        ident, title, Across(f"predicted {label}", True), Across("error, %"), edges[0].tolist(), (100 * edges[1]).tolist(), levels, names,
        prefix="s", description=f"How many of {len(x):,} points lie where; 99 % are within {percent(reach, sign=False)}.",
    )  # fmt: skip
