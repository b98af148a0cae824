"""The picture of a plan: schedule, norm and rotation over the run, each beside what the hyperparameters ask for."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rwsim.plots.style import COLORS, OPTIMIZER_TITLES, number, set_ticks

if TYPE_CHECKING:
    from rwsim.plan import LayerPlan, Plan

# Layers that one picture can tell apart; more are drawn as the first ones.
_MOST = 6
# Points of a curve: a run has many more steps than a picture columns.
_POINTS = 2000
_LABELS = ("learning rate", r"norm $\|\omega\|$", r"rotation $\eta_r$" + "\n(rad/step)", "rotation\n/ intended")


def _title(layer: "LayerPlan") -> str:
    name = OPTIMIZER_TITLES.get(layer.rule.name, layer.rule.name)
    values = vars(layer.rule.values)
    parts = [f"lr {values['lr']:g}", f"weight decay {values['weight_decay']:g}"]
    parts += [f"momentum {values['momentum']:g}"] if "momentum" in values else []
    parts += [f"betas {', '.join(f'{b:g}' for b in values['betas'])}"] if "betas" in values else []
    return f"{name}: {', '.join(parts)}"


def _shade(axis: Axes, layer: "LayerPlan") -> None:
    """Orange before equilibrium, blue after it."""
    before = layer.steps if layer.reached is None else layer.reached
    axis.axvspan(0, before, color=COLORS[1], alpha=0.13, lw=0)
    if layer.left is not None:
        axis.axvspan(layer.left, layer.steps, color=COLORS[4], alpha=0.18, lw=0)


def plan_figure(plan: "Plan") -> Figure:
    """Learning rate, norm, rotation, and rotation over the intended one. Solid: expected. Dashed: equilibrium at each step's
    hyperparameters. With one layer the run is shaded before equilibrium and after it."""
    layers = plan.layers[:_MOST]
    figure, axes = plt.subplots(4, 1, figsize=(8, 8.2), sharex=True, layout="constrained", height_ratios=(0.6, 1, 1, 0.8))
    for i, layer in enumerate(layers):
        path, color = layer.path, COLORS[0] if len(layers) == 1 else COLORS[i]
        at = np.unique(np.linspace(0, layer.steps - 1, _POINTS).round().astype(int))
        live = np.where(layer.live, 1.0, np.nan)[at]
        axes[0].plot(at + 1, layer.lr[at], color=color if len(layers) > 1 else "0.2", lw=1.5)
        label = "expected" if len(layers) == 1 else f"{layer.name} (fan-in {layer.fan_in})"
        for axis, expected, target in (
            (axes[1], path.norm, path.equilibrium_norm),
            (axes[2], path.rotation, path.equilibrium_rotation),
        ):
            axis.plot(at + 1, target[at], color="black" if len(layers) == 1 else color, ls="--", lw=1.2)
            axis.plot(at + 1, expected[at], color=color, lw=1.8, label=label)
        with np.errstate(invalid="ignore", divide="ignore"):
            axes[3].plot(at + 1, (path.rotation / path.equilibrium_rotation)[at] * live, color=color, lw=1.8)
    axes[1].plot([], [], color="black", ls="--", lw=1.2, label="equilibrium at each step's hyperparameters")
    axes[3].axhline(1, color="black", ls="--", lw=1.2)
    if len(layers) == 1:
        layer = layers[0]
        for axis in axes:
            _shade(axis, layer)
        axes[1].fill_between([], [], color=COLORS[1], alpha=0.3, lw=0, label="before equilibrium")
        if layer.left is not None:
            axes[1].fill_between([], [], color=COLORS[4], alpha=0.4, lw=0, label="out of equilibrium again")
    for axis, label in zip(axes, _LABELS, strict=True):
        axis.set_ylabel(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlim(0, layers[0].steps)
        axis.yaxis.set_major_formatter(FuncFormatter(number))
        axis.grid(alpha=0.25, lw=0.6)
    for axis in axes[:2]:
        axis.set_ylim(bottom=0)
    _log(axes[1], *[layer.path.norm for layer in layers], *[layer.path.equilibrium_norm[layer.live] for layer in layers])
    _log(axes[2], *[x[layer.live] for layer in layers for x in (layer.path.rotation, layer.path.equilibrium_rotation)])
    _log(axes[3], *[(layer.path.rotation / layer.path.equilibrium_rotation)[layer.live] for layer in layers])
    axes[3].set_xlabel("step", fontsize=9)
    axes[3].xaxis.set_major_formatter(FuncFormatter(number))
    axes[0].set_title(_title(layers[0]), fontsize=10)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _log(axis: Axes, *values: np.ndarray) -> None:
    """A log scale with a margin where the values spread over more than a factor of four."""
    flat = np.concatenate([np.ravel(x) for x in values])
    flat = flat[np.isfinite(flat) & (flat > 0)]
    if len(flat) and flat.max() > 4 * flat.min():
        axis.set_yscale("log")
        low, high = flat.min() / 1.3, flat.max() * 1.3
        axis.set_ylim(low, high)
        set_ticks(axis.yaxis, low, high)


def save_plan(plan: "Plan", folder: Path) -> Path:
    """Write ``plan.png`` to `folder`."""
    figure = plan_figure(plan)
    path = folder / "plan.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
