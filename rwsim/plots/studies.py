"""Pictures of the studies, like the paper's, drawn from their files alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import sympy as sp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from rwsim.experiments.nodecay import expected
from rwsim.plots.style import COLORS, QUANTITY_LABELS, cell_edges, number
from rwsim.theory.paper import TABLE_1
from rwsim.theory.symbols import beta1, eta, lam

if TYPE_CHECKING:
    from rwsim.experiments.conduct import StudyResult
    from rwsim.experiments.study import Arm, Trained


def save_study(result: "StudyResult", folder: Path) -> Path:
    """Write ``figure.png`` to `folder`."""
    figure = FIGURES[result.name](result.trained)
    path = folder / "figure.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _tidy(axis: Axes, title: str = "", x: str = "", y: str = "") -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25, lw=0.6)


def _over_time(axis: Axes, trained: "Trained", one: "Arm", color: str, label: str, quantity: str = "rotation") -> None:
    """Mean over scale-invariant layers and seeds; shaded: least to largest seed."""
    path, step = trained.path(one, quantity), trained.runs[one.name][0].step
    axis.plot(step, path.mean(0), color=color, lw=1.2, label=label)
    axis.fill_between(step, path.min(0), path.max(0), color=color, alpha=0.2, lw=0)
    axis.xaxis.set_major_formatter(FuncFormatter(number))
    axis.xaxis.set_major_locator(plt.MaxNLocator(4))


def _score(one: "Arm") -> str:
    return "loss (nats)" if one.recipe.text else "accuracy (%)"


def _scores(trained: "Trained", one: "Arm") -> np.ndarray:
    """Accuracies, or losses as they are."""
    return (-1 if one.recipe.text else 1) * trained.scores(one)


def _dots(axis: Axes, trained: "Trained", arms: Sequence["Arm"], names: Sequence[str]) -> None:
    """A row an arm: every seed's score, and their mean."""
    for row, one in enumerate(arms):
        scores, color = _scores(trained, one), COLORS[row % len(COLORS)]
        axis.plot(scores, np.full(len(scores), row), "o", color=color, ms=3.5, alpha=0.6)
        axis.plot([scores.mean()] * 2, [row - 0.3, row + 0.3], color=color, lw=2)
    axis.set_yticks(range(len(arms)), names)
    axis.set_ylim(len(arms) - 0.4, -0.6)


def constrain_figure(trained: "Trained") -> Figure:
    """A column a task. Top: test score of every seed, mean as a bar. Bottom: rotation of scale-invariant layers over the run."""
    tasks = list(dict.fromkeys(str(one.facts["task"]) for one in trained.select(final=True)))
    figure, axes = plt.subplots(2, len(tasks), figsize=(3.4 * len(tasks), 5.6), squeeze=False, layout="constrained", height_ratios=(1, 1.3))
    for (top, bottom), task in zip(axes.T, tasks, strict=True):
        arms = trained.select(final=True, task=task)
        names = [str(one.facts["kind"]) for one in arms]
        _dots(top, trained, arms, names)
        _tidy(top, task, f"test {_score(arms[0])}")
        for color, one, name in zip(COLORS, arms, names, strict=False):
            _over_time(bottom, trained, one, color, name)
        bottom.set_ylim(0)
        _tidy(bottom, "", "step", QUANTITY_LABELS["rotation"])
    axes[1, 0].legend(fontsize=6, frameon=False)
    return figure


def _curve(axis: Axes, trained: "Trained", arms: Sequence["Arm"], color: str, label: str, fact: str = "lr", style: str = "-") -> None:
    """Mean score against a fact of the arms, with every seed."""
    arms = sorted(arms, key=lambda one: float(one.facts[fact]))
    at, scores = [float(one.facts[fact]) for one in arms], [_scores(trained, one) for one in arms]
    axis.plot(at, [some.mean() for some in scores], f"o{style}", color=color, lw=1.3, ms=3.5, label=label)
    for x, some in zip(at, scores, strict=True):
        if len(some) > 1:
            axis.plot([x] * len(some), some, ".", color=color, ms=3, alpha=0.5)


def _log(axis: Axes, which: str = "x") -> None:
    for one, line in (("x", axis.xaxis), ("y", axis.yaxis)):
        if one in which:
            axis.set(**{f"{one}scale": "log"})
            line.set_major_formatter(FuncFormatter(number))
            low, high = line.get_view_interval()
            line.set_minor_formatter(FuncFormatter(number) if high < 10 * low else NullFormatter())
            axis.tick_params(which="minor", labelsize=6)


def nodecay_figure(trained: "Trained") -> Figure:
    """Norm and rotation over the run, a column a schedule; dashed: the expected path."""
    schedules = list(dict.fromkeys(str(one.facts["schedule"]) for one in trained.arms.values()))
    figure, axes = plt.subplots(2, len(schedules), figsize=(4.2 * len(schedules), 6), squeeze=False, layout="constrained")
    for (top, bottom), schedule in zip(axes.T, schedules, strict=True):
        for color, one in zip(COLORS, trained.select(schedule=schedule), strict=False):
            _over_time(top, trained, one, color, str(one.facts["kind"]), "norm")
            _over_time(bottom, trained, one, color, str(one.facts["kind"]))
            if one.recipe.rotational is None:
                bottom.plot(trained.runs[one.name][0].step, expected(trained, one), color="black", lw=1, ls="--")
        _log(bottom, "y")
        _tidy(top, schedule, "", QUANTITY_LABELS["norm"])
        _tidy(bottom, "", "step", QUANTITY_LABELS["rotation"])
    axes[1, 0].plot([], [], color="black", lw=1, ls="--", label="expected path")
    axes[1, 0].legend(fontsize=7, frameon=False)
    return figure


def tradeoff_figure(trained: "Trained") -> Figure:
    """A row a task. Left: test score along the line of constant lr times decay. Then norm and rotation of the baseline at three of its
    learning rates, on the right of the variant at its smallest (black)."""
    tasks = list(dict.fromkeys(str(one.facts["task"]) for one in trained.arms.values()))
    figure, axes = plt.subplots(len(tasks), 3, figsize=(11, 3.1 * len(tasks)), squeeze=False, layout="constrained")
    for (left, middle, right), task in zip(axes, tasks, strict=True):
        baseline, variant = (trained.select(task=task, kind=kind) for kind in ("baseline", "RV"))
        _curve(left, trained, baseline, "black", "baseline")
        _curve(left, trained, variant, COLORS[0], "RV")
        frozen = _scores(trained, trained.one(task=task, kind="RV, frozen")).mean()
        left.axhline(frozen, color=COLORS[5], lw=1, ls=":", label="RV, gains and biases frozen")
        _log(left)
        _tidy(left, f"{task}: lr times decay constant", "lr", f"test {_score(baseline[0])}")
        left.legend(fontsize=6, frameon=False)
        for color, k in zip(COLORS[1:], sorted({0, len(baseline) // 2, len(baseline) - 1}), strict=False):
            for axis, quantity in ((middle, "norm"), (right, "rotation")):
                _over_time(axis, trained, baseline[k], color, f"lr {baseline[k].facts['lr']:g}", quantity)
        _over_time(right, trained, variant[0], "black", "RV")
        _log(middle, "y")
        for axis, quantity in ((middle, "norm"), (right, "rotation")):
            _tidy(axis, "", "step", QUANTITY_LABELS[quantity])
        right.set_ylim(0, 3 * float(np.nanmax(trained.path(variant[0]))))
        right.legend(fontsize=6, frameon=False)
    return figure


def adam_figure(trained: "Trained") -> Figure:
    """Above: validation accuracy over lr and decay, the best cell marked, lines of equal eta_r by Table 1, each a factor of 2 from the next
    (of Adam+l2 at one size of gradients). Below: rotation of every layer at the best setting; dashed: the head."""
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
    for (top, bottom), optimizer, name in zip(axes.T, ("adamw", "adam_l2"), ("AdamW", "Adam+l2"), strict=True):
        arms = trained.select(final=False, kind=optimizer)
        lrs, decays = (np.unique([float(one.facts[fact]) for one in arms]) for fact in ("lr", "decay"))
        table = np.full((len(decays), len(lrs)), np.nan)
        for one in arms:
            table[np.searchsorted(decays, one.facts["decay"]), np.searchsorted(lrs, one.facts["lr"])] = trained.scores(one).mean()
        mesh = top.pcolormesh(cell_edges(lrs, True), cell_edges(decays, True), table, cmap="viridis")
        bar = figure.colorbar(mesh, ax=top)
        bar.set_label("validation accuracy (%)", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        middle = np.nanmean([np.nanmin(table), np.nanmax(table)])
        for x, column in zip(lrs, table.T, strict=True):
            for y, value in zip(decays, column, strict=True):
                top.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=6, color="white" if value < middle else "black")
        best = trained.best(arms)
        top.plot(best.facts["lr"], best.facts["decay"], "s", mfc="none", mec=COLORS[5], ms=22, mew=1.5)
        rotation = TABLE_1[optimizer].rotation
        others = {symbol: 1 for symbol in rotation.free_symbols - {eta, lam}}
        fine = np.meshgrid(*(np.geomspace(low, high, 40) for low, high in (top.get_xlim(), top.get_ylim())))
        octaves = np.log2(sp.lambdify((eta, lam), rotation.subs({**others, beta1: 0.9}), "numpy")(*fine))
        top.contour(*fine, octaves, np.arange(np.floor(octaves.min()), octaves.max()), colors=COLORS[1], linewidths=0.8, linestyles="--")
        _log(top, "xy")
        _tidy(top, name, "lr", "decay")
        top.grid(visible=False)
        one = trained.one(final=True, kind=name)
        runs = trained.runs[one.name]
        turned = np.mean([run.rotation for run in runs], 0)
        for k, layer in enumerate(runs[0].layers):
            style = "-" if layer.invariant else "--"
            bottom.plot(runs[0].step, turned[:, k], style, color=plt.get_cmap("viridis")(k / len(runs[0].layers)), lw=0.9)
        _log(bottom, "y")
        _tidy(bottom, f"{name}: every layer", "step", QUANTITY_LABELS["rotation"])
    return figure


def warmup_figure(trained: "Trained") -> Figure:
    """A row a task. Left: training loss of the best with and without warmup. Middle: validation score over learning rates, one seed.
    Right: test score of every seed at the best of each."""
    tasks = list(dict.fromkeys(str(one.facts["task"]) for one in trained.arms.values()))
    figure, axes = plt.subplots(len(tasks), 3, figsize=(12, 3.2 * len(tasks)), squeeze=False, layout="constrained")
    for (left, middle, right), task in zip(axes, tasks, strict=True):
        final = trained.select(final=True, task=task)
        names = [f"{one.facts['kind']}, {one.facts['start']}" for one in final]
        for color, one, name in zip(COLORS, final, names, strict=False):
            losses = np.mean([run.losses for run in trained.runs[one.name]], 0)
            left.plot(np.linspace(0, one.recipe.steps, len(losses) + 1)[1:], losses, color=color, lw=1, label=name)
            searched = trained.select(final=False, task=task, kind=one.facts["kind"], start=one.facts["start"])
            _curve(middle, trained, searched, color, name, style="--" if one.facts["start"] == "no warmup" else "-")
        _log(middle)
        _tidy(left, task, "step", "training loss")
        left.legend(fontsize=6, frameon=False)
        _tidy(middle, "one seed", "lr", f"validation {_score(final[0])}")
        _dots(right, trained, final, names)
        _tidy(right, "each at its best lr", f"test {_score(final[0])}")
    return figure


def standardize_figure(trained: "Trained") -> Figure:
    """Validation accuracy over learning rates; rotation of single neurons of a middle layer late in the run; and over the run its mean,
    with a standard deviation of the logarithm over neurons."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for color, one in zip(COLORS, trained.select(final=True), strict=False):
        kind = str(one.facts["kind"])
        _curve(left, trained, trained.select(final=False, kind=kind), color, kind)
        run = trained.runs[one.name][0]
        k = len(run.layers) // 2
        neurons = np.sort(run.last[k])
        middle.plot(np.linspace(0, 100, len(neurons)), neurons, ".-", color=color, lw=0.8, ms=4)
        mean, off = run.rotation[:, k], run.spread[:, k]
        right.plot(run.step, mean, color=color, lw=1.2, label=kind)
        right.fill_between(run.step, mean * np.exp(-off), mean * np.exp(off), color=color, alpha=0.2, lw=0)
    _log(left)
    _log(middle, "y")
    _log(right, "y")
    left.legend(fontsize=7, frameon=False)
    _tidy(left, "two seeds", "lr", "validation accuracy (%)")
    _tidy(middle, f"one seed: neurons of {run.layers[k].name}, last fifth", "percentile", QUANTITY_LABELS["rotation"])
    _tidy(right, "one seed: their mean and deviation", "step", QUANTITY_LABELS["rotation"])
    return figure


def imbalance_figure(trained: "Trained") -> Figure:
    """Test accuracy against the share of neurons that keep their rate, against the factor of the others, against width."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    even = trained.select(final=True, kind="balanced")
    for color, kind in zip(COLORS, ("slower", "both"), strict=False):
        arms = trained.select(final=True, kind=kind)
        factor, share = max(float(one.facts["factor"]) for one in arms), min(float(one.facts["share"]) for one in arms)
        _curve(axes[0], trained, [*even, *(one for one in arms if one.facts["factor"] == factor)], color, kind, "share")
        _curve(axes[1], trained, [*even, *(one for one in arms if one.facts["share"] == share)], color, kind, "factor")
    _curve(axes[2], trained, [*even, *trained.select(final=True, kind="narrow")], COLORS[2], "balanced, narrower", "width")
    _log(axes[1])
    titles = (f"factor {factor:g}", f"share {share:g}", "")
    for axis, title, label in zip(axes, titles, ("share p that keeps its rate", "factor f", "width"), strict=True):
        _tidy(axis, title, label, "test accuracy (%)" if axis is axes[0] else "")
        axis.legend(fontsize=7, frameon=False)
    return figure


def sensitivity_figure(trained: "Trained") -> Figure:
    """Test score of every seed, mean as a bar; a panel a task."""
    tasks = list(dict.fromkeys(str(one.facts["task"]) for one in trained.arms.values()))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.2), squeeze=False, layout="constrained")
    for axis, task in zip(axes[0], tasks, strict=True):
        arms = trained.select(final=True, task=task)
        _dots(axis, trained, arms, [str(one.facts["kind"]) for one in arms])
        _tidy(axis, task, f"test {_score(arms[0])}")
    return figure


FIGURES: Mapping[str, Callable[["Trained"], Figure]] = {
    "constrain": constrain_figure, "nodecay": nodecay_figure, "tradeoff": tradeoff_figure, "adam": adam_figure, "warmup": warmup_figure,
    "standardize": standardize_figure, "imbalance": imbalance_figure, "sensitivity": sensitivity_figure,
}  # fmt: skip
