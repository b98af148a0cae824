"""The dynamics of a real network beside theory: a probe on the optimizer's step, writers, diagnosis."""

from typing import TYPE_CHECKING

from rwsim._door import make_door

if TYPE_CHECKING:
    from rwsim.probe.diagnose import Diagnosis
    from rwsim.probe.probe import DynamicsProbe
    from rwsim.probe.writers import CSVWriter, TensorBoardWriter, WandbWriter

make_door(
    __name__,
    {
        "CSVWriter": "rwsim.probe.writers",
        "Diagnosis": "rwsim.probe.diagnose",
        "DynamicsProbe": "rwsim.probe.probe",
        "TensorBoardWriter": "rwsim.probe.writers",
        "WandbWriter": "rwsim.probe.writers",
    },
)

__all__ = ["CSVWriter", "Diagnosis", "DynamicsProbe", "TensorBoardWriter", "WandbWriter"]
