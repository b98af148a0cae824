"""Gradient laws of the walks, as far as the theory needs them: coordinate second moments given the spread of the
weights, and the law of the gradient's length. Everything is computed from hyperparameters; nothing is measured.

Axes here are (neuron, dim) without time and config; an axis of length 1 broadcasts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import roots_jacobi
from scipy.stats import norm, qmc

Array = NDArray[np.float64]


@dataclass(frozen=True)
class IdealWalk:
    """Free i.i.d. gradients of unit second moment: the walk in which the second-moment closure is exact.

    Attributes:
        fan_in: Number of coordinates C.
    """

    fan_in: int
    neurons: int = 1

    def second_moment(self, spread: Array) -> Array:
        """E g_c^2 = 1, shape (1, dim), whatever the weights."""
        return np.ones((1, self.fan_in))

    def length_squared(self) -> tuple[Array, Array]:
        """Nodes and weights of ||g||^2 / E||g||^2 given the direction's Gaussian: constant."""
        return np.ones(1), np.ones(1)


@dataclass(frozen=True)
class ToySystem:
    """Exact gradient law of the paper's toy system (appendix F; THEORY.md section 3).

    Given w, with w~ = gamma_in * w, P the projector orthogonal to w~ and s = loss_scale / (K B),

        g = gamma_in * P xi * |gamma_out| s / ||w~|| * sqrt(B chi2_{B-2} / chi2_{B-1}),      xi ~ N(0, I),

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

    @property
    def fan_in(self) -> int:
        return self.gamma_in.shape[-1]

    @cached_property
    def _gamma_sq(self) -> Array:
        return self.gamma_in**2

    @cached_property
    def _numerator(self) -> Array:
        return self.scale_sq * self._gamma_sq

    @property
    def scale_sq(self) -> Array:
        """gamma_out^2 s^2 B (B-2)/(B-3), shape (neuron, 1): E||g||^2 ||w~||^2 / (gamma_in-weighted dimension)."""
        s = self.loss_scale / (self.neurons * self.batch)
        return (self.gamma_out * s) ** 2 * self.batch * (self.batch - 2) / (self.batch - 3)

    def second_moment(self, spread: Array) -> Array:
        """E g_c^2 with w_c^2 at its mean `spread` (E w_c^2), shape (neuron, dim)."""
        scaled = self._gamma_sq * spread
        effective = scaled.sum(-1, keepdims=True)
        return self._numerator * (1 - scaled / effective) / effective

    def length_squared(self, nodes: int = 12) -> tuple[Array, Array]:
        """Gauss nodes and weights of the chi-square ratio, scaled to mean 1.

        chi2_{B-2} / (chi2_{B-2} + chi2_{B-1}) is Beta((B-2)/2, (B-1)/2), whose Gauss rule is Gauss-Jacobi.
        """
        a, b = (self.batch - 2) / 2, (self.batch - 1) / 2
        x, weights = roots_jacobi(nodes, b - 1, a - 1)
        ratio = (1 + x) / (1 - x)
        # Its mean is (B-2)/(B-3), exactly; the rule itself is exact for polynomials in the beta variable only.
        return ratio * (self.batch - 3) / (self.batch - 2), weights / weights.sum()


GradientLaw = IdealWalk | ToySystem


def gammas_over_draws(fan_in: int, draws: int = 512) -> tuple[Array, Array]:
    """Standard normal (gamma_in, gamma_out) of `draws` layers of one neuron, for expectations over draws.

    Scrambled Sobol points with a fixed seed: a deterministic quadrature, not a random sample.

    Returns:
        Arrays of shape (draws, fan_in) and (draws, 1).
    """
    points = qmc.Sobol(fan_in + 1, scramble=True, rng=np.random.default_rng(0)).random(draws)
    values = norm.ppf(np.clip(points, 1e-12, 1 - 1e-12))
    return values[:, :-1], values[:, -1:]
