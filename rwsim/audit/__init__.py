"""Hold other people's optimizers against theory: probes, diagnosis, report. The door is `audit`.

What is asked for loads when it is asked for: pytest imports the plugin of this package at every start.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rwsim.audit.audit import audit
    from rwsim.audit.finding import Finding, Outcome, Report
    from rwsim.audit.probes import PROBES
    from rwsim.audit.transform import transform

_LAZY = {
    "PROBES": "rwsim.audit.probes", "Finding": "rwsim.audit.finding", "Outcome": "rwsim.audit.finding",
    "Report": "rwsim.audit.finding", "audit": "rwsim.audit.audit", "transform": "rwsim.audit.transform",
}  # fmt: skip


class _Door(ModuleType):
    """Importing the submodule `rwsim.audit.transform` must not hide the function of that name, as in `rwsim` itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rwsim.audit' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


__all__ = ["PROBES", "Finding", "Outcome", "Report", "audit", "transform"]
