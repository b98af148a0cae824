"""Verdict by equivalence: what may be said of a relative error, given its uncertainty and a margin."""

import math
from dataclasses import dataclass

from scipy.special import stdtrit

AGREES, DIFFERS, UNDECIDED = "agrees", "differs", "undecided"

# Chance that a run gives a wrong `agrees` or `differs` anywhere, split evenly over its checks (Bonferroni).
FALSE_ALARM_RATE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """`verdict` is agrees, differs or undecided; `interval` is the half width of the confidence interval."""

    verdict: str
    reason: str
    interval: float


def critical_value(checks: int, freedom: float, rate: float = FALSE_ALARM_RATE) -> float:
    """Two-sided Student quantile at `rate` split over `checks`.

    Example:
        >>> round(critical_value(15, 1e9), 2)
        3.99
    """
    return float(-stdtrit(freedom, rate / checks / 2))


def judge(relative_error: float, relative_mcse: float, margin: float, critical: float, obstacle: str = "") -> Verdict:
    """Compare the confidence interval of a relative error with the margin.

    Args:
        relative_error: measured / predicted - 1.
        relative_mcse: Its standard error.
        margin: Largest difference that counts as agreement, > 0.
        critical: Half width of the interval in standard errors.
        obstacle: Why the measurement cannot be trusted; if given, the verdict is undecided with this reason.

    Example:
        >>> judge(0.001, 0.001, 0.02, 4.0).verdict, judge(0.05, 0.001, 0.02, 4.0).verdict, judge(0.019, 0.001, 0.02, 4.0).verdict
        ('agrees', 'differs', 'undecided')
    """
    half = critical * relative_mcse
    if obstacle:
        return Verdict(UNDECIDED, obstacle, half)
    if not (math.isfinite(relative_error) and math.isfinite(half)):
        return Verdict(UNDECIDED, "no finite estimate", half)
    low, high = relative_error - half, relative_error + half
    span = f"interval [{low:+.2%}, {high:+.2%}]"
    if -margin <= low and high <= margin:
        return Verdict(AGREES, f"{span} within {margin:.1%}", half)
    if low > margin or high < -margin:
        return Verdict(DIFFERS, f"{span} outside {margin:.1%}", half)
    return Verdict(UNDECIDED, f"{span} crosses {margin:.1%}: more neurons or steps are needed", half)
