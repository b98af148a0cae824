"""The paper's experiments on real networks, at small scale: `EXPERIMENTS` measure dynamics against theory, `STUDIES` compare trainings.

Both map a name to what it is, and load torch with their first use; `NAMES` does not.
"""

from typing import TYPE_CHECKING

from rwsim._door import make_door

# Each is the constant of its name in the module of its name, with underscores for hyphens.
EXPERIMENT_NAMES = ("dynamics", "transients", "assumptions", "scale-sensitive")
STUDY_NAMES = ("constrain", "nodecay", "tradeoff", "adam", "warmup", "standardize", "imbalance", "sensitivity")
NAMES = (*EXPERIMENT_NAMES, *STUDY_NAMES)

if TYPE_CHECKING:
    from rwsim.experiments.case import Experiment
    from rwsim.experiments.registry import EXPERIMENTS, STUDIES
    from rwsim.experiments.study import Study

make_door(
    __name__,
    {
        "EXPERIMENTS": "rwsim.experiments.registry",
        "STUDIES": "rwsim.experiments.registry",
        "Experiment": "rwsim.experiments.case",
        "Study": "rwsim.experiments.study",
    },
)

__all__ = ["EXPERIMENTS", "EXPERIMENT_NAMES", "NAMES", "STUDIES", "STUDY_NAMES", "Experiment", "Study"]
