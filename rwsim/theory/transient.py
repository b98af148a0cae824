"""How a walk approaches its equilibrium, and from which step on it is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import Equilibrium, predict_equilibrium
from rwsim.theory.forms import numeric
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.rates import memory, relaxation_rate
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


def time_constants(kind: type[UpdateRule], rules: Sequence[UpdateRule], exact: Equilibrium) -> Array:
    """Steps in which E||omega||^2 forgets its start, shape (config,): 1/`relaxation_rate`, to leading order in lr times decay.

    Where that depends on the normalizer (decay inside the average), it is the layer's: in equilibrium diffusion makes up for
    decay, so the rate is tau_g^2 / E||omega||^2, with tau_g^2 the RMS update squared times `memory`.
    """
    rate, balance = relaxation_rate(kind), 1.0
    if rate.has(sym.normalizer):
        rate = memory(kind)
        balance = (exact.rms_update / exact.norm) ** 2
        if rate.has(sym.normalizer):
            return np.full(len(rules), math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        hyper = np.array([sym.flat(rule.values) for rule in rules], dtype=np.float64).T
        (values,) = numeric(kind, (rate,), ())(*hyper)
        return np.broadcast_to(1 / (np.asarray(values, dtype=np.float64) * balance), len(rules))
