"""How a walk approaches its equilibrium, and from which step on it is there."""

from dataclasses import dataclass

import numpy as np

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.schedule import plain_norm


@dataclass(frozen=True)
class Approach:
    """Expected approach to equilibrium, mean over the law's neurons.

    Attributes:
        deviation: E||omega_t||^2 over its limit, minus 1, after step t = 1 ... T; shape (time,), dimensionless.
    """

    deviation: Array

    def burn_in(self, tolerance: float) -> int | None:
        """Fewest steps to drop so that the rest is in equilibrium; None where the walk ends before.

        In the rest, ||omega||^2 must stay within 2.5 `tolerance` of its limit, and within `tolerance` on average of
        the absolute value (an oscillation may not cancel).
        """
        off = np.abs(self.deviation)
        off[~np.isfinite(off)] = np.inf
        worst = np.maximum.accumulate(off[::-1])[::-1]
        average = np.cumsum(off[::-1])[::-1] / np.arange(len(off), 0, -1)
        good = np.flatnonzero((worst <= 2.5 * tolerance) & (average <= tolerance))
        return int(good[0]) if len(good) else None


def approach(rule: UpdateRule, law: GradientLaw, start_sq: float, steps: int) -> Approach:
    """The plain recurrence from weights of coordinate second moment `start_sq` and empty buffers, against its own limit.

    Args:
        rule: The optimizer.
        law: Gradient law; a few representative neurons suffice.
        start_sq: E omega_c^2 at the start.
        steps: T >= 1.

    Raises:
        NoEquilibrium, UnsupportedRule: As `predict_equilibrium`.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> rule = AdamW(lr=1e-2, weight_decay=0.5)
        >>> approach(rule, IdealWalk(128), 1 / 384, 1000).burn_in(0.01)
        312
        >>> approach(rule, IdealWalk(128), 1 / 384, 100).burn_in(0.01) is None
        True
    """
    limit = predict_equilibrium(rule, law).linear_norm_sq
    return Approach(plain_norm(rule, law, steps, start_sq) ** 2 / limit - 1)
