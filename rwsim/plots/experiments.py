"""Pictures of the experiments on real networks, drawn from their records alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rwsim.plots.style import COLORS, QUANTITY_LABELS, finite, number, percent

if TYPE_CHECKING:
    from rwsim.experiments.findings import Row
    from rwsim.experiments.records import Series
    from rwsim.experiments.run import Result

# Layers that one panel can tell apart by colour.
_MOST = 5
_GREY = "0.6"
# Windows of a running mean.
_SMOOTH = 5
# Factors of a rotation that are off by more are drawn at the edge.
_GAP = 0.4


def save_experiment(result: "Result", folder: Path) -> Path:
    """Write ``figure.png`` to `folder`."""
    figure = FIGURES[result.name](result)
    path = folder / "figure.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _middle(series: "Series") -> np.ndarray:
    """Middle of each window."""
    return (series.step + np.concatenate([[0], series.step[:-1]])) / 2


def _off(mean: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Relative error along the predicted path, (time, layer), a running mean over windows: one holds few steps."""
    sums = [np.apply_along_axis(np.convolve, 0, values, np.ones(_SMOOTH), "same") for values in (mean[name], mean[f"path_{name}"])]
    return sums[0] / sums[1] - 1


def _picked(series: "Series", most: int) -> list[int]:
    """Layers spread over the network."""
    count = len(series.layers)
    return sorted({round(k) for k in np.linspace(0, count - 1, min(most, count))})


def _tidy(axis: Axes, series: "Series") -> None:
    axis.set_xlim(0, series.step[-1])
    axis.xaxis.set_major_formatter(FuncFormatter(number))
    axis.xaxis.set_major_locator(plt.MaxNLocator(4))
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25, lw=0.6)


def _error_axis(axis: Axes, band: float) -> None:
    """A relative error with its band."""
    axis.axhspan(-band, band, color=COLORS[2], alpha=0.18, lw=0)
    axis.axhline(0, color="black", lw=0.9, ls="--")
    axis.set_ylim(-0.3, 0.3)
    axis.yaxis.set_major_formatter(FuncFormatter(percent))


def dynamics_figure(result: "Result") -> Figure:
    """A column a case, mean over seeds: norms of some layers and rotations of all, the predicted path dashed, and what norm and rotation
    are off by, with bands. Grey: layers that are not scale-invariant. Below: the factors of which rotations in equilibrium are off."""
    from rwsim.experiments.gap import OF_ROTATION  # torch comes with it

    records = result.records
    shown = [row for row in result.findings.rows if row.quantity.startswith(OF_ROTATION)]
    figure = plt.figure(figsize=(2.9 * len(records) + 0.8, 11.2 if shown else 8.6), layout="constrained")
    above, *below = figure.subfigures(2, 1, height_ratios=(8.6, 2.6), squeeze=False)[:, 0] if shown else (figure,)
    axes = above.subplots(4, len(records), squeeze=False, sharex="col")
    for part in below:
        _gaps(list(part.subplots(1, len(records), squeeze=False, sharey=True)[0]), list(records), shown)
    for column, (case, series) in enumerate(records.items()):
        at, mean = _middle(series), {name: value.mean(0) for name, value in series.values.items()}
        norms, turns, norm_off, turn_off = axes[:, column]
        for color, k in zip(COLORS, _picked(series, _MOST), strict=False):
            norms.plot(at, mean["norm"][:, k], color=color, lw=1.3, label=series.layers[k].name)
            norms.plot(at, mean["path_norm"][:, k], color=color, lw=1.0, ls="--")
        for k, layer in enumerate(series.layers):
            color, order = (COLORS[0], 2) if layer.invariant else (_GREY, 1)
            turns.plot(at, mean["rotation"][:, k], color=color, lw=0.8, alpha=0.7, zorder=order)
            turns.plot(at, mean["path_rotation"][:, k], color="black", lw=0.7, ls="--", zorder=3)
            for axis, name in ((norm_off, "norm"), (turn_off, "rotation")):
                axis.plot(at, _off(mean, name)[:, k], color=color, lw=0.8, alpha=0.7, zorder=order)
        _error_axis(norm_off, 0.05)
        _error_axis(turn_off, 0.03)
        norms.set_ylim(0, 1.1 * finite(mean["norm"][len(at) // 8 :, _picked(series, _MOST)]).max(initial=0.1))
        ends = finite(mean["path_rotation"][-1])
        turns.set_ylim(0, (2.2 * float(np.median(ends)) if len(ends) else 0) or 1.0)
        norms.set_title(case, fontsize=9)
        norms.legend(fontsize=6, frameon=False)
        turn_off.set_xlabel("step", fontsize=8)
        for axis in axes[:, column]:
            _tidy(axis, series)
    labels = (QUANTITY_LABELS["norm"], QUANTITY_LABELS["rotation"], "norm: off by", "rotation: off by")
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label, fontsize=9)
    return figure


def _gaps(axes: list[Axes], cases: list[str], rows: "list[Row]") -> None:
    """Each factor of each case's settled layers, a dot a layer; a bar is the median."""
    from rwsim.experiments.gap import OF_ROTATION
    from rwsim.probe.factors import FACTORS

    for axis, case in zip(axes, cases, strict=True):
        if not any(row.case == case for row in rows):  # nothing settled, or not measured then
            axis.set_axis_off()
            continue
        for at, name in enumerate(FACTORS):
            errors = finite(np.array([row.error for row in rows if row.case == case and row.quantity == OF_ROTATION + name]))
            if len(errors):
                beside = at + np.linspace(-0.25, 0.25, len(errors))
                axis.scatter(beside, np.clip(errors, -_GAP, _GAP), s=7, color=COLORS[0], alpha=0.7, lw=0)
                axis.hlines(np.median(errors), at - 0.35, at + 0.35, color="black", lw=1.4)
        axis.axhline(0, color="black", lw=0.9, ls="--")
        axis.set_xticks(range(len(FACTORS)), list(FACTORS), rotation=60, fontsize=7)
        axis.set_ylim(-1.05 * _GAP, 1.05 * _GAP)
        axis.yaxis.set_major_formatter(FuncFormatter(percent))
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25, lw=0.6, axis="y")
    axes[0].set_ylabel("rotation: off by,\nfactor by factor", fontsize=9)


def transients_figure(result: "Result") -> Figure:
    """As the paper's middle and right panel: norm and rotation of a middle layer for each pair, planned path dashed, equilibrium dotted.
    Below: what all scale-invariant layers are off by."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True, height_ratios=(1.3, 1))
    for (top, bottom), name in zip(axes.T, ("norm", "rotation"), strict=True):
        seen: list[float] = []
        for color, (case, series) in zip(COLORS, result.records.items(), strict=False):
            at, mean = _middle(series), {key: value.mean(0) for key, value in series.values.items()}
            invariant = [k for k, layer in enumerate(series.layers) if layer.invariant]
            middle = invariant[len(invariant) // 2]
            live = np.where(mean["lr"][:, 0] >= 0.01 * mean["lr"].max(), 1.0, np.nan)
            hyper = result.settings["cases"][case]["recipe"]["hyper"]
            top.plot(at, mean[name][:, middle], color=color, lw=1.4, label=f"lr {hyper['lr']:g}, decay {hyper['weight_decay']:g}")
            top.plot(at, mean[f"path_{name}"][:, middle], color="black", lw=1.0, ls="--")
            top.plot(at, mean[f"predicted_{name}"][:, middle], color=color, lw=0.9, ls=":")
            seen += [*(mean[name][:, middle] * live), *(mean[f"path_{name}"][:, middle] * live)]
            for k in invariant:
                bottom.plot(at, _off(mean, name)[:, k] * live, color=color, lw=0.7, alpha=0.6)
            _tidy(top, series)
            _tidy(bottom, series)
        _error_axis(bottom, 0.1)
        bottom.set_xlabel("step", fontsize=8)
        bottom.set_ylabel(f"{name}: off by", fontsize=8)
        top.set_yscale("log")
        shown = finite(np.array(seen))
        if len(shown):
            top.set_ylim(0.7 * shown.min(), 1.4 * shown.max())
        top.set_title(f"{QUANTITY_LABELS[name]}, {series.layers[middle].name}", fontsize=9)
    axes[0][0].plot([], [], color="black", lw=1.0, ls="--", label="planned path")
    axes[0][0].plot([], [], color="0.4", lw=0.9, ls=":", label="equilibrium at each step's lr")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def assumptions_figure(result: "Result") -> Figure:
    """The paper's appendix G: a column a network, some of its layers; what a random walk has is dashed, or the path predicted from it."""
    records = result.records
    rows = (
        (r"$\angle(\omega, g)$ (degrees)", lambda v, k: np.degrees(v["weight_grad_angle"][:, k]), lambda v, k: 90.0),
        (r"$\angle(g, m)$ (degrees)", lambda v, k: np.degrees(v["momentum_grad_angle"][:, k]), lambda v, k: 90.0),
        (r"$\|g/\sqrt{v}\|/\sqrt{C}$", lambda v, k: v["scaled_grad"][:, k], lambda v, k: 1.0),
        (r"$\lambda_u/\lambda$", lambda v, k: v["lambda_ratio"][:, k], lambda v, k: 0.0),
        (QUANTITY_LABELS["norm"], lambda v, k: v["norm"][:, k], lambda v, k: v["path_norm"][:, k]),
        (QUANTITY_LABELS["rotation"], lambda v, k: v["rotation"][:, k], lambda v, k: v["path_rotation"][:, k]),
    )  # fmt: skip
    figure, axes = plt.subplots(
        len(rows), len(records), figsize=(3.4 * len(records) + 0.6, 10), squeeze=False, sharex="col", layout="constrained"
    )
    for column, (case, series) in enumerate(records.items()):
        at, mean = _middle(series), {name: value.mean(0) for name, value in series.values.items()}
        settled = slice(len(at) // 4, None)
        for row, (label, measured, expected) in enumerate(rows):
            axis = axes[row][column]
            seen = []
            for color, k in zip(COLORS, _picked(series, 4), strict=False):
                values = measured(mean, k)
                axis.plot(at, values, color=color, lw=0.9, label=series.layers[k].name)
                axis.plot(at, np.broadcast_to(expected(mean, k), at.shape), color=color if row > 3 else "black", lw=1.0, ls="--", zorder=3)
                seen += [*values[settled], *np.broadcast_to(expected(mean, k), at.shape)[settled]]
            shown = finite(np.array(seen))
            if len(shown):
                margin = 0.15 * np.ptp(shown) or 1.0
                axis.set_ylim(shown.min() - margin, shown.max() + margin)
            _tidy(axis, series)
            if column == 0:
                axis.set_ylabel(label, fontsize=9)
        axes[0][column].set_title(f"{case}: {result.settings['cases'][case]['recipe']['network']}", fontsize=9)
        axes[0][column].legend(fontsize=6, frameon=False, ncols=2)
        axes[-1][column].set_xlabel("step", fontsize=8)
    return figure


def scale_sensitive_figure(result: "Result") -> Figure:
    """The paper's VGG figure: a column a case, some layers; dashed: in equilibrium at the measured lambda_e, dotted: at lambda."""
    records = result.records
    figure, axes = plt.subplots(3, len(records), figsize=(3.4 * len(records) + 0.6, 7.5), squeeze=False, sharex="col", layout="constrained")
    for column, (case, series) in zip(axes.T, records.items(), strict=True):
        at, mean = _middle(series), {name: value.mean(0) for name, value in series.values.items()}
        for axis, name in zip(column, ("norm", "rotation"), strict=False):
            for color, k in zip(COLORS, _picked(series, 3), strict=False):
                axis.plot(at, mean[name][:, k], color=color, lw=1.2, label=series.layers[k].name)
                axis.plot(at, mean[f"effective_{name}"][:, k], color=color, lw=1.0, ls="--")
                axis.plot(at, mean[f"predicted_{name}"][:, k], color=color, lw=0.8, ls=":")
            shown = finite(mean[name][:, _picked(series, 3)])
            axis.set_ylim(0, 1.6 * float(np.quantile(shown, 0.95)) if len(shown) else 1.0)
        for color, k in zip(COLORS, _picked(series, 3), strict=False):
            column[2].plot(at, 1 + mean["lambda_ratio"][:, k], color=color, lw=1.0)
        column[2].axhline(1, color="black", lw=0.9, ls=":")
        column[2].ticklabel_format(useOffset=False)
        column[2].set_ylim(min(0.9, column[2].get_ylim()[0]), max(1.1, column[2].get_ylim()[1]))
        for axis, label in zip(column, (QUANTITY_LABELS["norm"], QUANTITY_LABELS["rotation"], r"$\lambda_e/\lambda$"), strict=True):
            _tidy(axis, series)
            axis.set_ylabel(label, fontsize=9)
        column[0].set_title(case, fontsize=9)
        column[0].legend(fontsize=6, frameon=False)
        column[-1].set_xlabel("step", fontsize=8)
    return figure


FIGURES: Mapping[str, Callable[["Result"], Figure]] = {
    "dynamics": dynamics_figure, "transients": transients_figure, "assumptions": assumptions_figure,
    "scale-sensitive": scale_sensitive_figure,
}  # fmt: skip
