"""Pictures of the experiments on real networks, drawn from their records alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rwsim.plots.style import COLORS, QUANTITY_LABELS, number

if TYPE_CHECKING:
    from rwsim.experiments.records import Series
    from rwsim.experiments.run import Result

# Layers whose norms one panel can tell apart.
_MOST = 5


def save_experiment(result: "Result", folder: Path) -> Path:
    """Write ``figure.png`` to `folder`."""
    figure = FIGURES[result.experiment.name](result)
    path = folder / "figure.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _tidy(axis: Axes) -> None:
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_formatter(FuncFormatter(number))
    axis.grid(alpha=0.25, lw=0.6)


def _middle(series: "Series") -> np.ndarray:
    """Middle of each window."""
    return (series.step + np.concatenate([[0], series.step[:-1]])) / 2


def _picked(series: "Series") -> list[int]:
    """Layers spread over the network."""
    count = len(series.layers)
    return sorted({round(k) for k in np.linspace(0, count - 1, min(_MOST, count))})


def dynamics_figure(result: "Result") -> Figure:
    """A column a case. Norm of some layers and rotation of all of them, mean over seeds, beside the predicted path (dashed); and the
    rotation over the predicted one with its band. Grey: layers that are not scale-invariant. Shaded: the predicted transient."""
    records = result.records
    figure, axes = plt.subplots(3, len(records), figsize=(2.9 * len(records) + 0.8, 7.2), squeeze=False, sharex="col", layout="constrained")
    for column, (case, series) in enumerate(records.items()):
        at, mean = _middle(series), {name: value.mean(0) for name, value in series.values.items()}
        top, middle, bottom = (axes[row][column] for row in range(3))
        for color, k in zip(COLORS, _picked(series), strict=False):
            top.plot(at, mean["norm"][:, k], color=color, lw=1.3, label=series.layers[k].name)
            top.plot(at, mean["predicted_norm"][:, k], color=color, lw=1.0, ls="--")
        for k, layer in enumerate(series.layers):
            style: Mapping[str, Any] = {"color": COLORS[0] if layer.invariant else "0.6", "lw": 0.8, "alpha": 0.7, "zorder": 2 if layer.invariant else 1}
            middle.plot(at, mean["rotation"][:, k], **style)
            middle.plot(at, mean["predicted_rotation"][:, k], color="black", lw=0.6, ls="--", zorder=3)
            bottom.plot(at, mean["rotation"][:, k] / mean["predicted_rotation"][:, k], **style)
        reached = result.findings.paths.get((case, ""), {}).get("reached", 0)
        bottom.axhspan(0.97, 1.03, color=COLORS[2], alpha=0.2, lw=0)
        bottom.axhline(1, color="black", lw=1.0, ls="--")
        bottom.set_ylim(0.7, 1.3)
        middle.set_ylim(0, None)
        middle.set_ylim(0, 2.5 * float(np.median(mean["predicted_rotation"][-1])))
        top.set_ylim(0, None)
        top.set_title(case, fontsize=9)
        top.legend(fontsize=6, frameon=False)
        bottom.set_xlabel("step", fontsize=8)
        for axis in (top, middle, bottom):
            axis.axvspan(0, reached, color="0.5", alpha=0.12, lw=0)
            _tidy(axis)
            axis.set_xlim(0, series.step[-1])
    for row, label in enumerate((QUANTITY_LABELS["norm"], QUANTITY_LABELS["rotation"], "rotation / predicted")):
        axes[row][0].set_ylabel(label, fontsize=9)
    return figure


FIGURES: Mapping[str, Callable[["Result"], Figure]] = {"dynamics": dynamics_figure}
