"""Hold other people's optimizers against theory: probes, diagnosis, report. The door is `audit`."""

from rwsim.audit.audit import audit
from rwsim.audit.finding import Finding, Outcome, Report
from rwsim.audit.probes import PROBES

__all__ = ["PROBES", "Finding", "Outcome", "Report", "audit"]
