"""Figures. A leaf: nothing imports it but the command line. `studies`, which brings torch, is imported by itself."""

import os

import matplotlib

# Figures are written to files, on machines without a display; but a notebook, which names its backend, shows them.
if "MPLBACKEND" not in os.environ:
    matplotlib.use("Agg")

from rwsim.plots.experiments import save_experiment
from rwsim.plots.plan import plan_figure, save_plan
from rwsim.plots.sweep import save_sweep, save_trajectories, sweep_figures, trajectory_figures
from rwsim.plots.validation import save_validation, validation_figure

__all__ = [
    "plan_figure", "save_experiment", "save_plan", "save_sweep", "save_trajectories", "save_validation", "sweep_figures",
    "trajectory_figures", "validation_figure",
]  # fmt: skip
