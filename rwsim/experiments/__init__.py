"""The paper's experiments on real networks, at small scale. `EXPERIMENTS` maps each name to its `Experiment`."""

from rwsim.experiments.assumptions import ASSUMPTIONS
from rwsim.experiments.case import Experiment
from rwsim.experiments.dynamics import DYNAMICS
from rwsim.experiments.transients import TRANSIENTS

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (DYNAMICS, TRANSIENTS, ASSUMPTIONS)}

__all__ = ["EXPERIMENTS", "Experiment"]
