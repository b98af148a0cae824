"""rwsim: a random-walk laboratory for optimizers with weight decay.

The door loads what is asked for when it is asked for: `import rwsim` alone brings neither torch nor sympy.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rwsim.optimizers import RULES

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rwsim.audit.audit import audit
    from rwsim.convert import convert
    from rwsim.plan import plan
    from rwsim.sweeps.sweep import sweep
    from rwsim.theory.predict import predict
    from rwsim.validate import validate
    from rwsim.walk.simulate import simulate

_LAZY = {
    "audit": "rwsim.audit.audit",
    "convert": "rwsim.convert",
    "plan": "rwsim.plan",
    "predict": "rwsim.theory.predict",
    "simulate": "rwsim.walk.simulate",
    "sweep": "rwsim.sweeps.sweep",
    "validate": "rwsim.validate",
}


class _Door(ModuleType):
    """The package itself: importing the submodule `rwsim.validate` must not hide the function `rwsim.validate`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rwsim' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


__all__ = ["RULES", "__version__", "audit", "convert", "plan", "predict", "simulate", "sweep", "validate"]
