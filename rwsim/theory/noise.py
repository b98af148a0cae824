"""Gradient laws of the walks, as far as the theory needs them: coordinate second moments given the spread of the
weights and the spread that agrees with its own gradient, and the law of the gradient's length. Everything is computed
from hyperparameters; nothing is measured.

Axes here are (neuron, dim) without time and config; an axis of length 1 broadcasts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, roots_jacobi

from rwsim.errors import RwsimError
from rwsim.theory._cache import cached

Array = NDArray[np.float64]
# E g_c^2 -> the spread q it sustains, and d log q / d log E g_c^2.
Sustain = Callable[[Array], tuple[Array, Array | float]]

# Newton steps before the damped ones; they take 2 to 8 where they work.
_NEWTON_STEPS = 30
_STEPS = 500
# A Newton step of log size d leaves an error of order elasticity d^2.
_STEP_ERROR = 1e-15


@dataclass(frozen=True)
class IdealWalk:
    """Free i.i.d. gradients of unit second moment: the walk in which the second-moment closure is exact.

    Attributes:
        fan_in: Number of coordinates C.
    """

    fan_in: int
    neurons: int = 1
    scale_invariant: ClassVar[bool] = False

    def second_moment(self, spread: Array) -> Array:
        """E g_c^2 = 1, shape (1, dim), whatever the weights."""
        return np.ones((1, self.fan_in))

    def of_kinds(self, first: NDArray[np.intp], count: Array) -> Callable[[Array], Array]:
        """`second_moment` of coordinates of which some are alike: see `ToySystem.of_kinds`."""
        return lambda spread: np.ones((1, len(first)))

    @property
    def own_spread(self) -> Array:
        """The spread that equals its E g_c^2."""
        return np.ones((1, self.fan_in))

    @property
    def first(self) -> "IdealWalk":
        """The law of the first neuron."""
        return self

    def settle(self, sustain: Sustain, start: Array) -> Array:
        """The spread that the gradient sustains; here the gradient does not depend on it."""
        return sustain(self.second_moment(start))[0]

    def length_squared(self, nodes: int = 1) -> tuple[Array, Array]:
        """Nodes and weights of ||g||^2 / E||g||^2 given the direction's Gaussian: constant."""
        return np.ones(1), np.ones(1)


@dataclass(frozen=True)
class ToySystem:
    """Exact gradient law of the paper's toy system (appendix F; THEORY.md section 3).

    Given w, with w~ = gamma_in * w, P the projector orthogonal to w~ and s = loss_scale / (K B),

        g = gamma_in * P xi * abs(gamma_out) s / ||w~|| * sqrt(B chi2_{B-2} / chi2_{B-1}),      xi ~ N(0, I),

    so that E g_c^2 = gamma_in,c^2 (1 - w~_c^2/||w~||^2) gamma_out^2 s^2 B (B-2) / ((B-3) ||w~||^2), finite for B >= 4.

    Attributes:
        gamma_in: Input scales, shape (neuron or 1, dim).
        gamma_out: Output scales, shape (neuron, 1).
        batch: B >= 4.
        loss_scale: Factor on the output gradients.
        neurons: K of the layer, which sets s. Differs from the rows of `gamma_out` when those are draws.
    """

    gamma_in: Array
    gamma_out: Array
    batch: int
    loss_scale: float
    neurons: int
    scale_invariant: ClassVar[bool] = True

    @property
    def fan_in(self) -> int:
        return self.gamma_in.shape[-1]

    @cached_property
    def gamma_sq(self) -> Array:
        """gamma_in^2."""
        return self.gamma_in**2

    @cached_property
    def _numerator(self) -> Array:
        return self.scale_sq * self.gamma_sq

    @property
    def scale_sq(self) -> Array:
        """gamma_out^2 s^2 B (B-2)/(B-3), shape (neuron, 1): E||g||^2 ||w~||^2 / (gamma_in-weighted dimension)."""
        return output_scale_sq(self.gamma_out, self.loss_scale, self.neurons, self.batch)

    def second_moment(self, spread: Array) -> Array:
        """E g_c^2 with w_c^2 at its mean `spread` (E w_c^2), shape (neuron, dim)."""
        return self._moment_and_share(spread)[0]

    def of_kinds(self, first: NDArray[np.intp], count: Array) -> Callable[[Array], Array]:
        """`second_moment` of coordinates of which some are alike, as a function of the spread of each kind.

        Args:
            first: A coordinate of each kind, shape (kind,).
            count: How many there are of it, shape (kind,).
        """
        gamma_sq, numerator = self.gamma_sq[:, first], self._numerator[:, first]

        def second_moment(spread: Array) -> Array:
            scaled = gamma_sq * spread
            effective = (scaled @ count)[:, None]
            return coordinate_moment(numerator, scaled / effective, effective)

        return second_moment

    def _moment_and_share(self, spread: Array) -> tuple[Array, Array]:
        scaled = self.gamma_sq * spread
        effective = scaled.sum(-1, keepdims=True)
        share = scaled / effective
        return coordinate_moment(self._numerator, share, effective), share

    @cached_property
    def own_spread(self) -> Array:
        """The spread that equals its E g_c^2: up to a factor that of every linear rule. Not finite where there is none."""
        return self.settle(lambda grad_sq: (grad_sq, 1.0), np.ones(self._numerator.shape))

    @cached_property
    def first(self) -> "ToySystem":
        """The law of the first neuron."""
        return replace(self, gamma_in=self.gamma_in[:1], gamma_out=self.gamma_out[:1])

    def settle(self, sustain: Sustain, start: Array) -> Array:
        """The spread q = f(G(q)) that sustains itself, with G = `second_moment`, f = `sustain`; Newton's method in log q.

        With shares t = w~_c^2/||w~||^2, r = t/(1 - t) and sigma = d log ||w~||^2 = sum t dx, d log G = -sigma - r (dx - sigma).
        At elasticity e of f the Jacobian is a diagonal and a rank-one part, so that a step, from the gap y = log f(G)/q, is

            dx = (y + e (r - 1) sigma) / (1 + e r),      sigma solved from sum t dx = sigma.

        Where f is not positive (an unstable recurrence) q is made to grow, and without an end the result is not finite.
        """
        spread = start
        for step in range(_STEPS):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                grad_sq, share = self._moment_and_share(spread)
                target, elasticity = sustain(grad_sq)
                ratio = target / spread
                positive = ratio.min() > 0
                if positive and not np.any(elasticity):
                    return target
                gap = _log(ratio) if positive else np.where(ratio > 0, np.log(np.abs(ratio)), 3.0)
                if positive and step < _NEWTON_STEPS:
                    rest = 1 - share
                    below = rest + elasticity * share
                    own, common = gap * rest / below, elasticity * (share - rest) / below
                    sigma = np.vecdot(share, own) / (1 - np.vecdot(share, common))
                    move = own + common * sigma[:, None]
                else:
                    # f(G(q)) is a power of q's size with an exponent in [-1, 0]: half the gap always approaches.
                    move = gap / 2
                spread = spread * _exp(move)
            if not np.isfinite(spread).all():
                return spread
            if positive and np.abs(elasticity * move * move).max() < _STEP_ERROR:
                return spread
        raise RwsimError(f"the equilibrium of weights and gradients did not settle: last relative change {np.abs(move).max():.1e}.")

    def length_squared(self, nodes: int = 12) -> tuple[Array, Array]:
        """Gauss nodes and weights of the chi-square ratio, scaled to mean 1."""
        return _length_squared(self.batch, nodes)


# A step of Newton's method corrects the last one's error, so its logarithms may be coarse: within 3 % of 1 the Cayley pair
# (relative error d^2/12), elsewhere in single precision; both are ten times as fast as double precision.
_NEAR = 0.03


def _log(ratio: Array) -> Array:
    off = ratio - 1
    if np.abs(off).max() < _NEAR:
        return 2 * off / (ratio + 1)
    return np.log(np.clip(ratio, 1e-30, 1e30).astype(np.float32)).astype(np.float64)


def _exp(move: Array) -> Array:
    if np.abs(move).max() < _NEAR:
        return (2 + move) / (2 - move)
    return np.exp(move.astype(np.float32)).astype(np.float64)


@cached
def _length_squared(batch: int, nodes: int) -> tuple[Array, Array]:
    """chi2_{B-2} / (chi2_{B-2} + chi2_{B-1}) is Beta((B-2)/2, (B-1)/2), whose Gauss rule is Gauss-Jacobi."""
    x, weights = roots_jacobi(nodes, *jacobi_exponents(batch))
    return length_sq_at(x, batch), weights / weights.sum()


# The law's formulas by themselves: numbers, arrays and symbols alike.


def output_scale_sq(gamma_out: Any, loss_scale: Any, neurons: Any, batch: Any) -> Any:
    """gamma_out^2 s^2 B (B-2)/(B-3), s = loss_scale / (K B)."""
    s = loss_scale / (neurons * batch)
    return (gamma_out * s) ** 2 * batch * (batch - 2) / (batch - 3)


def coordinate_moment(numerator: Any, share: Any, effective: Any) -> Any:
    """E g_c^2 from gamma_in,c^2 times `output_scale_sq`, the share w~_c^2/||w~||^2 and ||w~||^2."""
    return numerator * (1 - share) / effective


def jacobi_exponents(batch: Any) -> tuple[Any, Any]:
    """Exponents of 1 - x and 1 + x in the weight of `length_sq_at`'s rule."""
    a, b = (batch - 2) / 2, (batch - 1) / 2
    return b - 1, a - 1


def length_sq_at(x: Any, batch: Any) -> Any:
    """||g||^2 / E||g||^2 at a node x in (-1, 1)."""
    # The ratio's mean is (B-2)/(B-3), exactly; the rule itself is exact for polynomials in the beta variable only.
    return (1 + x) / (1 - x) * (batch - 3) / (batch - 2)


GradientLaw = IdealWalk | ToySystem


def gammas_over_draws(fan_in: int, draws: int = 512) -> tuple[Array, Array]:
    """Standard normal (gamma_in, gamma_out) of `draws` layers of one neuron, for expectations over draws.

    Scrambled Sobol points with a fixed seed: a deterministic quadrature, not a random sample.

    Returns:
        Arrays of shape (draws, fan_in) and (draws, 1).
    """
    from scipy.stats import qmc  # a second to load

    points = qmc.Sobol(fan_in + 1, scramble=True, rng=np.random.default_rng(0)).random(draws)
    values = ndtri(np.clip(points, 1e-12, 1 - 1e-12))
    return values[:, :-1], values[:, -1:]
