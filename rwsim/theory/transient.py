"""The second-moment recurrence step by step: how a walk approaches its equilibrium, without a sample.

The same linear response as `equilibrium`, iterated from the walk's start instead of solved for its end, with the bias
corrections, the memory of the normalizer and the dependence of scale-invariant gradients on the norm. A sign is
replaced by its best linear response and white noise of the remaining power (Bussgang): sign(n) = n/D + e with
D = sqrt(pi/2 E n^2), E e^2 = 1 - 2/pi. Used to choose burn-in and to draw the expected approach.
"""

from dataclasses import dataclass

import numpy as np
import sympy as sp

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.rates import second_moment_step


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
    """Iterate the recurrence from weights of coordinate second moment `start_sq` and empty buffers.

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
    response = linear_response(type(rule))
    n = len(response.states)
    index = [(i, j) for i in range(n) for j in range(i, n)]
    symbols = {ij: sp.Symbol(f"P_{ij[0]}{ij[1]}") for ij in index}
    p = sp.Matrix(n, n, lambda i, j: symbols[min(i, j), max(i, j)])
    root, average = sp.Integer(1), sp.Integer(0)
    v = sp.Symbol("v")
    if response.argument is not None:
        h, k = response.argument
        root = sp.sqrt(sp.pi / 2 * ((h * p * h.T)[0] + k**2 * sym.grad_sq))
    if response.square is not None:
        mean_square = (response.square[0] * p).trace() + response.square[1] * sym.grad_sq
        average = response.average * v + (1 - response.average) * mean_square
        root = sp.sqrt(v * response.correction)
    moments = (*symbols.values(),)
    new = second_moment_step(response, p)
    # Hyperparameters become numbers before compilation: the loop below is what costs.
    known = dict(zip(sym.flat(sym.hyper_symbols(type(rule))), sym.flat(rule.values), strict=True))
    compiled = [
        sp.lambdify((sym.t, sym.grad_sq, sym.normalizer, v, *moments), [sp.sympify(e).subs(known).evalf() for e in part], "numpy", cse=True)
        for part in ([average], [root], [new[ij] for ij in index])
    ]

    grad_sq = law.second_moment(np.full((1, law.fan_in), start_sq))
    state = [np.full(grad_sq.shape, start_sq if ij == (0, 0) else 0.0) for ij in index]
    second = np.zeros(grad_sq.shape)
    deviation = np.empty(steps)
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(1, steps + 1):
            grad_sq = law.second_moment(state[0])
            (second,) = compiled[0](step, grad_sq, 1.0, second, *state)
            (normalizer,) = compiled[1](step, grad_sq, 1.0, second, *state)
            state = compiled[2](step, grad_sq, normalizer, second, *state)
            deviation[step - 1] = state[0].sum() / len(grad_sq) / limit - 1
    return Approach(deviation)
