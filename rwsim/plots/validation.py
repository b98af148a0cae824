"""The picture of a validation: the paper's Figure 9."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from rwsim.plots.style import OPTIMIZER_TITLES, QUANTITY_LABELS

if TYPE_CHECKING:
    from rwsim.validate import Case, CaseResult, Validation

# Okabe-Ito: told apart by colour-blind readers too.
_NEURON_COLORS = ("#CC79A7", "#E69F00", "#009E73", "#0072B2")


def _title(case: "Case") -> str:
    name = OPTIMIZER_TITLES.get(case.rule.name, case.rule.name)
    values = vars(case.rule.values)
    extra = [f"momentum {values['momentum']:g}"] if "momentum" in values else []
    extra += [f"betas {values['betas'][0]:g}, {values['betas'][1]:g}"] if "betas" in values else []
    extra += [f"loss scale {case.layer.loss_scale:g}"] if case.layer.loss_scale != 1 else []
    return f"{name}\nlr {values['lr']:g}, wd {values['weight_decay']:g}\n{', '.join(extra)}"


def validation_figure(results: Sequence["CaseResult"]) -> Figure:
    """The paper's Figure 9: RMS update, rotation and norm over time, a column per optimizer.

    Coloured: four neurons of different gradient norm. Black: the layer's mean. Dashed red: full prediction; dashed
    grey: Table 1. Dotted red, in the norm row: the expected approach from the walk's start. Shaded: burn-in.
    """
    # It loads torch, which the pictures of a sweep do without.
    from rwsim.walk.measure import layer_mean

    rows = ("rms_update", "rotation", "norm")
    figure, axes = plt.subplots(
        len(rows), len(results), figsize=(2.7 * len(results) + 0.6, 6.8), squeeze=False, sharex="col", layout="constrained"
    )
    for column, result in enumerate(results):
        case, walk = result.case, result.walk
        # The paper's experiment, not how the walk goes on after it.
        shown = len(case.approach.deviation)
        step = np.cumsum(walk.lengths)
        step = step[step <= max(shown, walk.window)]
        order = np.argsort(np.abs(case.layer.gamma_out), kind="stable")
        picks = [order[round(q * (len(order) - 1))] for q in (0.15, 0.5, 0.8, 0.97)]
        for row, quantity in enumerate(rows):
            axis = axes[row][column]
            traces = walk.trace(quantity)[: len(step), 0]
            for color, neuron in zip(_NEURON_COLORS, picks, strict=True):
                axis.plot(step, traces[:, neuron], color=color, lw=0.7)
            mean = layer_mean(walk, quantity)[: len(step)]
            axis.plot(step, mean, color="black", lw=1.4, label="layer mean")
            full = getattr(case.full, quantity)
            if case.prediction.paper is not None:
                axis.axhline(getattr(case.prediction.paper, quantity), color="0.45", ls="--", lw=1.2, label="Table 1")
            axis.axhline(full, color="red", ls="--", lw=1.2, label="full")
            if quantity == "norm":
                expected = full * np.sqrt(np.maximum(1 + case.approach.deviation, 0))
                axis.plot(np.arange(1, len(expected) + 1), expected, color="red", ls=":", lw=1.0, label="expected approach")
            axis.axvspan(0, shown if case.burn_in is None else case.burn_in, color="0.5", alpha=0.1, lw=0)
            settled = traces[len(traces) // 3 :, picks]
            top = 1.6 * max(float(settled.max()), full) if len(settled) else full
            axis.set_ylim(0, min(top, 1.15 * max(float(np.nanmax(traces[:, picks])), full)))
            axis.set_xlim(0, shown)
            axis.tick_params(labelsize=7)
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axis.yaxis.get_offset_text().set_fontsize(7)
            if column == 0:
                axis.set_ylabel(QUANTITY_LABELS[quantity], fontsize=9)
            if row == 0:
                axis.set_title(_title(case), fontsize=8)
            if row == len(rows) - 1:
                axis.set_xlabel("step", fontsize=8)
    handles, labels = axes[-1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def save_validation(result: "Validation", folder: Path) -> Path | None:
    """Write ``walk.png`` to `folder`; None where there is nothing to draw (an earlier run's picture is removed)."""
    path = folder / "walk.png"
    if not result.cases:
        path.unlink(missing_ok=True)
        return None
    figure = validation_figure(result.cases)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
