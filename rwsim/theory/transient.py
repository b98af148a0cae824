"""How a walk approaches its equilibrium, and from which step on it is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import Equilibrium, predict_equilibrium
from rwsim.theory.fluctuations import Groups
from rwsim.theory.forms import numeric, settled
from rwsim.theory.noise import Array, GradientLaw, ToySystem
from rwsim.theory.rates import memory, relaxation_rate
from rwsim.theory.schedule import plain_norm_sq


@dataclass(frozen=True)
class Approach:
    """Expected approach to equilibrium, mean over the law's neurons; arrays of shape (time,), after step t = 1 ... T, dimensionless.

    Attributes:
        deviation: E||omega_t||^2 over its limit, minus 1.
        turning: Rotation over its limit, minus 1, mean over neurons, as `approach` takes it from their norms. The mean norm does not show
            neurons of small gradients: their norm has far to fall, and until it has they hardly turn.
    """

    deviation: Array
    turning: Array

    def burn_in(self, tolerance: float) -> int | None:
        """Fewest steps to drop so that the rest is in equilibrium; None where the walk ends before.

        In the rest, ||omega||^2 must stay within 2.5 `tolerance` of its limit, and within `tolerance` on average of
        the absolute value (an oscillation may not cancel); the rotation within half of that.
        """
        off = np.maximum(np.abs(self.deviation), 2 * np.abs(self.turning))
        off[~np.isfinite(off)] = np.inf
        worst = np.maximum.accumulate(off[::-1])[::-1]
        average = np.cumsum(off[::-1])[::-1] / np.arange(len(off), 0, -1)
        good = np.flatnonzero((worst <= 2.5 * tolerance) & (average <= tolerance))
        return int(good[0]) if len(good) else None


def approach(rule: UpdateRule, law: GradientLaw, start_sq: float, steps: int) -> Approach:
    """The plain recurrence from weights of coordinate second moment `start_sq` and empty buffers, against its own limit.

    Coordinates and neurons are taken in groups (`fluctuations.Groups`), the neurons of the smallest gradients one by one: burn-ins come
    out within some percent of those of all. A neuron turns by the size of its update over its norm; the size is taken to stay where
    gradients are normalized or do not depend on the norm, and to go with the inverse of the norm otherwise. A normalizer that
    remembers for longer than the weights keeps up late: the rotation may then be off by 1 % where half of that is said.

    Args:
        rule: The optimizer.
        law: Gradient law.
        start_sq: E omega_c^2 at the start.
        steps: T >= 1.

    Raises:
        NoEquilibrium, UnsupportedRule: As `predict_equilibrium`.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> rule = AdamW(lr=1e-2, weight_decay=0.5)
        >>> approach(rule, IdealWalk(128), 1 / 384, 1000).burn_in(0.01)
        314
        >>> approach(rule, IdealWalk(128), 1 / 384, 100).burn_in(0.01) is None
        True
    """
    count = np.ones(1)
    if isinstance(law, ToySystem):
        law, count = _grouped(law)
    prediction = predict_equilibrium(rule, law)
    limit = prediction.exact.norm_sq[:, None]
    limit = limit * (prediction.linear_norm_sq / limit.mean())
    norm_sq = plain_norm_sq(rule, law, steps, start_sq)
    power = 1.0 if law.scale_invariant and settled(type(rule)).direction == "linear" else 0.5
    with np.errstate(all="ignore"):
        share = count[:, None] / count.sum()
        deviation = (share * norm_sq).sum(0) / (share * limit).sum() - 1
        turning = (share * (limit / norm_sq) ** power).sum(0) - 1
    return Approach(deviation, turning)


def _grouped(law: ToySystem) -> tuple[ToySystem, Array]:
    """A law of groups of coordinates and of neurons, and the number of neurons in each; where neurons differ in gamma_in, of all."""
    if len(law.gamma_in) > 1:
        return law, np.ones(len(law.gamma_in))
    with np.errstate(divide="ignore"):
        coordinates, neurons = Groups.by_size(law.gamma_sq[0]), Groups.by_size(1 / law.gamma_out[:, 0] ** 2)
    gamma_in, gamma_out = np.sqrt(coordinates.gamma_sq[coordinates.of])[None], 1 / np.sqrt(neurons.gamma_sq)[:, None]
    return replace(law, gamma_in=gamma_in, gamma_out=gamma_out), neurons.count


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
