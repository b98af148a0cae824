"""The paper's experiments on real networks, at small scale: `EXPERIMENTS` measure dynamics against theory, `STUDIES` compare trainings.

Both map a name to what it is.
"""

from rwsim.experiments.assumptions import ASSUMPTIONS
from rwsim.experiments.case import Experiment
from rwsim.experiments.constrain import CONSTRAIN
from rwsim.experiments.dynamics import DYNAMICS
from rwsim.experiments.study import Study
from rwsim.experiments.transients import TRANSIENTS

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (DYNAMICS, TRANSIENTS, ASSUMPTIONS)}
STUDIES: dict[str, Study] = {one.name: one for one in (CONSTRAIN,)}

__all__ = ["EXPERIMENTS", "STUDIES", "Experiment", "Study"]
