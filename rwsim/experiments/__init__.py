"""The paper's experiments on real networks, at small scale. `EXPERIMENTS` maps each name to its `Experiment`."""

from rwsim.experiments.case import Experiment
from rwsim.experiments.dynamics import DYNAMICS

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (DYNAMICS,)}

__all__ = ["EXPERIMENTS", "Experiment"]
