"""Pictures of the studies, like the paper's, drawn from their files alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rwsim.plots.style import COLORS, QUANTITY_LABELS, number

if TYPE_CHECKING:
    from rwsim.experiments.conduct import StudyResult
    from rwsim.experiments.study import Arm, Trained


def save_study(result: "StudyResult", folder: Path) -> Path:
    """Write ``figure.png`` to `folder`."""
    figure = FIGURES[result.study.name](result.trained)
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
    return "- loss (nats)" if one.recipe.text else "accuracy (%)"


def _dots(axis: Axes, trained: "Trained", arms: Sequence["Arm"], names: Sequence[str]) -> None:
    """A row an arm: every seed's score, and their mean."""
    for row, one in enumerate(arms):
        scores, color = trained.scores(one), COLORS[row % len(COLORS)]
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
        _dots(top, trained, arms, names if top is axes[0, 0] else names)
        _tidy(top, task, f"test {_score(arms[0])}")
        for color, one, name in zip(COLORS, arms, names, strict=False):
            _over_time(bottom, trained, one, color, name)
        bottom.set_ylim(0)
        _tidy(bottom, "", "step", QUANTITY_LABELS["rotation"])
    axes[1, 0].legend(fontsize=6, frameon=False)
    return figure


FIGURES: Mapping[str, Callable[["Trained"], Figure]] = {"constrain": constrain_figure}
