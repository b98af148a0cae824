"""Exceptions that carry evidence: what was asked, which rule it breaks, what was measured before it broke."""

from typing import Any


class RwsimError(Exception):
    """Base of every error that rwsim raises on purpose; the command line prints it as one line."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions come back from a worker process by calling their class with the message alone: ours take more than that.
        return _restored, (type(self), self.args, self.__dict__)


class InvalidArgument(RwsimError, ValueError):
    """A user's value breaks a rule.

    Args:
        argument: Name as the user wrote it, e.g. ``betas[1]``.
        rule: What must hold, e.g. ``must lie in [0, 1)``.
        got: The offending value.
        remedy: What to do instead; may be empty.

    Example:
        >>> str(InvalidArgument("lr", "must lie in [0, inf)", -1.0, "give a learning rate such as 1e-3"))
        '`lr` must lie in [0, inf), got -1.0; give a learning rate such as 1e-3.'
    """

    def __init__(self, argument: str, rule: str, got: Any, remedy: str = "") -> None:
        self.argument, self.rule, self.got, self.remedy = argument, rule, got, remedy
        super().__init__(f"`{argument}` {rule}, got {got!r}" + (f"; {remedy}." if remedy else "."))


class UnsupportedRule(RwsimError):
    """The theory cannot carry an update rule; `missing` names the property that it lacks. The rule still simulates."""

    def __init__(self, rule: str, missing: str) -> None:
        self.rule, self.missing = rule, missing
        super().__init__(f"no exact theory for {rule}: {missing}; it can still be simulated.")


class NoEquilibrium(RwsimError, ValueError):
    """Legal hyperparameters under which no equilibrium exists (lr or weight decay 0, or an unstable recurrence)."""


class Unavailable(RwsimError, ValueError):
    """An engine or device that was asked for is not there; the message names what is."""


class WalkStopped(RwsimError):
    """A walk ended before its last step. `walk` holds what was measured up to `step`."""

    def __init__(self, message: str, step: int, walk: Any) -> None:
        self.step, self.walk = step, walk
        super().__init__(message)


class WalkDiverged(WalkStopped):
    """NaN or Inf in a walk, with the first step and configuration that show it; `configs` holds whichever show it by then."""

    def __init__(self, message: str, step: int, walk: Any, configs: tuple[int, ...]) -> None:
        self.configs = configs
        super().__init__(message, step, walk)


class StorageError(RwsimError):
    """Results cannot be kept: a full disk, a place that went away. What is there already is left as it is."""


class WalkInterrupted(WalkStopped, KeyboardInterrupt):
    """Ctrl-C during a walk; a KeyboardInterrupt too, so that nothing swallows it by accident."""


class AuditInterrupted(RwsimError, KeyboardInterrupt):
    """Ctrl-C during an audit; `report` holds what was found, the probes that did not end marked ``unfinished``."""

    def __init__(self, report: Any) -> None:
        self.report = report
        super().__init__("interrupted")


def _restored(kind: type[RwsimError], args: tuple[Any, ...], evidence: dict[str, Any]) -> RwsimError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(evidence)
    return error


class ExportRefused(RwsimError):
    """What was to be exported does not hold, and nothing was written; `checks` says what was found."""

    def __init__(self, message: str, checks: tuple[Any, ...]) -> None:
        self.checks = checks
        super().__init__(message)
