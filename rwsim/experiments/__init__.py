"""The paper's experiments on real networks, at small scale: `EXPERIMENTS` measure dynamics against theory, `STUDIES` compare trainings.

Both map a name to what it is.
"""

from rwsim.experiments.adam import ADAM
from rwsim.experiments.assumptions import ASSUMPTIONS
from rwsim.experiments.case import Experiment
from rwsim.experiments.constrain import CONSTRAIN
from rwsim.experiments.dynamics import DYNAMICS
from rwsim.experiments.imbalance import IMBALANCE
from rwsim.experiments.nodecay import NODECAY
from rwsim.experiments.scale_sensitive import SCALE_SENSITIVE
from rwsim.experiments.sensitivity import SENSITIVITY
from rwsim.experiments.standardize import STANDARDIZE
from rwsim.experiments.study import Study
from rwsim.experiments.tradeoff import TRADEOFF
from rwsim.experiments.transients import TRANSIENTS
from rwsim.experiments.warmup import WARMUP

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (DYNAMICS, TRANSIENTS, ASSUMPTIONS, SCALE_SENSITIVE)}
STUDIES: dict[str, Study] = {
    one.name: one for one in (CONSTRAIN, NODECAY, TRADEOFF, ADAM, WARMUP, STANDARDIZE, IMBALANCE, SENSITIVITY)
}  # fmt: skip

__all__ = ["EXPERIMENTS", "STUDIES", "Experiment", "Study"]
