"""rwsim: a random-walk laboratory for optimizers with weight decay.

The door loads what is asked for when it is asked for: `import rwsim` alone brings neither torch nor sympy.
"""

from typing import TYPE_CHECKING

from rwsim._door import make_door
from rwsim.optimizers import RULES

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rwsim.audit.audit import audit
    from rwsim.convert import convert
    from rwsim.export.harness import export, verify
    from rwsim.plan import plan
    from rwsim.probe.probe import DynamicsProbe
    from rwsim.report.report import report
    from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalSGDM, RotationalWrapper
    from rwsim.sweeps.sweep import sweep
    from rwsim.theory.predict import predict
    from rwsim.validate import validate
    from rwsim.walk.simulate import simulate

make_door(
    __name__,
    {
        "DynamicsProbe": "rwsim.probe.probe",
        "RotationalAdam": "rwsim.rotational.adam",
        "RotationalAdamW": "rwsim.rotational.adamw",
        "RotationalLion": "rwsim.rotational.lion",
        "RotationalSGDM": "rwsim.rotational.sgdm",
        "RotationalWrapper": "rwsim.rotational.wrapper",
        "audit": "rwsim.audit.audit",
        "convert": "rwsim.convert",
        "export": "rwsim.export.harness",
        "plan": "rwsim.plan",
        "predict": "rwsim.theory.predict",
        "report": "rwsim.report.report",
        "simulate": "rwsim.walk.simulate",
        "sweep": "rwsim.sweeps.sweep",
        "validate": "rwsim.validate",
        "verify": "rwsim.export.harness",
    },
)

__all__ = [
    "RULES",
    "DynamicsProbe",
    "RotationalAdam",
    "RotationalAdamW",
    "RotationalLion",
    "RotationalSGDM",
    "RotationalWrapper",
    "__version__",
    "audit",
    "convert",
    "export",
    "plan",
    "predict",
    "report",
    "simulate",
    "sweep",
    "validate",
    "verify",
]
