"""Hold other people's optimizers against theory: probes, diagnosis, report. The door is `audit`.

What is asked for loads when it is asked for: pytest imports the plugin of this package at every start.
"""

from typing import TYPE_CHECKING

from rwsim._door import make_door

if TYPE_CHECKING:
    from rwsim.audit.audit import audit
    from rwsim.audit.finding import Finding, Outcome, Report
    from rwsim.audit.probes import PROBES
    from rwsim.audit.transform import transform

make_door(
    __name__,
    {
    "PROBES": "rwsim.audit.probes", "Finding": "rwsim.audit.finding", "Outcome": "rwsim.audit.finding",
    "Report": "rwsim.audit.finding", "audit": "rwsim.audit.audit", "transform": "rwsim.audit.transform",
    },
)  # fmt: skip

__all__ = ["PROBES", "Finding", "Outcome", "Report", "audit", "transform"]
