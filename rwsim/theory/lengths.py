"""Random gradient lengths: what their spread does to mean angles and to second-moment averages.

In the toy system a gradient is a Gaussian vector times a length l_t that is drawn anew each step (`noise.ToySystem`,
B chi2_{B-2} / chi2_{B-1}; scaled here to E l^2 = 1). Expectations of roots and ratios of weighted sums of l^2 are taken by
Laplace transforms, which turn a sum over past steps into a product:

    sqrt(V) = 1/(2 sqrt pi) int_0^inf (1 - e^{-s V}) s^{-3/2} ds,      1/sqrt(v) = 1/sqrt(pi) int_0^inf e^{-s v} s^{-1/2} ds.

Integrals run over y = log s by the trapezoidal rule, whose error falls exponentially with 1/step for such integrands.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import erfcx

from rwsim.theory.noise import Array, GradientLaw

# Trapezoidal step in log s: |Gamma(1/2 + 2 pi i / step)| bounds the relative error, 2e-7 here.
_STEP = 0.6
_LOW, _HIGH = -26.0, 9.0
# Weights of past steps are dropped once they have fallen by this factor.
_TAIL = 1e-13
# Past steps are kept one by one up to this lag, and in blocks beyond, within which a weight changes by this share.
_SINGLE, _BLOCK = 48, 0.04
# Where E sqrt(V) takes its integrand.
_ROOT_STEP = 0.2
_ROOT_AT = np.exp(np.arange(-40.0, 30.0, _ROOT_STEP))
# Where transforms of one length are tabulated: they are smooth in log s.
_TABLE_AT = np.exp(np.arange(-40.0, 24.5, 0.125))


def horizon(rate: float) -> int:
    """Steps until an average of rate `rate` has forgotten all but `_TAIL`."""
    return 1 if rate <= 0 else max(1, math.ceil(math.log(_TAIL) / math.log(rate)))


def blocks(count: int, rate: float, share: float = _BLOCK) -> tuple[Array, Array]:
    """First lags and lengths of blocks that cover the lags 0 ... count - 1; in each, rate^lag changes by `share` at most."""
    width = 1 if rate <= 0 else max(1, int(share / -math.log(rate)))
    single = min(count, _SINGLE)
    edges = np.unique(np.concatenate([np.arange(single), np.arange(single, count, width), [count]]))
    return edges[:-1].astype(np.float64), np.diff(edges).astype(np.float64)


def geometric(rate: float, first: Array, size: Array) -> Array:
    """Mean of (1 - rate) rate^lag over each block: their sum is that of the steps, which a block's midpoint misses by share^2/24."""
    return rate**first * (1 - rate**size) / size


@dataclass(frozen=True)
class Lengths:
    """The law of l^2, E l^2 = 1, as nodes and weights.

    Attributes:
        nodes: Values of l^2.
        weights: Their probabilities.
    """

    nodes: Array
    weights: Array

    @classmethod
    def of(cls, law: GradientLaw) -> "Lengths":
        nodes, weights = law.length_squared(24)
        return cls(nodes / (weights @ nodes), weights)

    @property
    def variance(self) -> float:
        """Var l^2."""
        return float(self.weights @ self.nodes**2) - 1

    @cached_property
    def _of_length(self) -> tuple[CubicSpline, CubicSpline]:
        s = _TABLE_AT[:, None]
        tilted = np.exp(-s * (self.nodes - self.nodes.min())) * self.weights
        return _tables(_TABLE_AT * self.nodes.min() - np.log(tilted.sum(-1)), self.variance, tilted @ self.nodes / tilted.sum(-1))

    @cached_property
    def _of_square(self) -> tuple[CubicSpline, CubicSpline]:
        base = 1 + 2 * _TABLE_AT[:, None] * self.nodes
        whole = base**-0.5 @ self.weights
        return _tables(-np.log(whole), 2 + 3 * self.variance, (base**-1.5 * self.nodes) @ self.weights / whole)

    def log_laplace(self, s: Array) -> Array:
        """log E e^{-s l^2}."""
        return -np.exp(self._of_length[0](_clipped_log(s)))

    def tilted_mean(self, s: Array) -> Array:
        """E[l^2 e^{-s l^2}] / E e^{-s l^2}."""
        return np.exp(self._of_length[1](_clipped_log(s)))

    def log_laplace_square(self, s: Array) -> Array:
        """log E e^{-s x} of a squared coordinate x = xi^2 l^2, xi a standard normal."""
        return -np.exp(self._of_square[0](_clipped_log(s)))

    def tilted_mean_square(self, s: Array) -> Array:
        """E[x e^{-s x}] / E e^{-s x} of a squared coordinate."""
        return np.exp(self._of_square[1](_clipped_log(s)))


def _tables(exponent: Array, variance: float, tilted: Array) -> tuple[CubicSpline, CubicSpline]:
    """Of log(-log E e^{-s x}) and of the log of the tilted mean, over log s; at small s from the first two cumulants."""
    exponent = np.where(_TABLE_AT < 1e-4, _TABLE_AT - _TABLE_AT**2 / 2 * variance, exponent)
    return CubicSpline(np.log(_TABLE_AT), np.log(exponent)), CubicSpline(np.log(_TABLE_AT), np.log(tilted))


def _clipped_log(s: Array) -> Array:
    return np.log(np.clip(s, _TABLE_AT[0], _TABLE_AT[-1]))


def mean_root(kernel: Array, lengths: Lengths) -> float:
    """E sqrt(V) / sqrt(E V) of V = sum_j a_j^2 l_j^2: mean over RMS of the size of an update that sums past gradients.

    Args:
        kernel: a_j, weight of the gradient j steps ago; shape (lag,).
        lengths: Law of l^2.

    Example:
        >>> round(mean_root(np.ones(1), Lengths(np.array([0.5, 1.5]), np.array([0.5, 0.5]))), 6)
        0.965926
    """
    squares = kernel**2 / (kernel @ kernel)
    squares = squares[squares > _TAIL]
    return _mean_root(lengths.log_laplace(_ROOT_AT[:, None] * squares).sum(-1))


def mean_root_normal(variances: Array) -> float:
    """E sqrt(Q) / sqrt(E Q) of Q = sum_c lambda_c z_c^2 with standard normal z: mean over RMS of a Gaussian vector's length.

    Example:
        >>> round(mean_root_normal(np.ones(2)) - math.sqrt(math.pi) / 2, 6) + 0.0  # sqrt(pi/2) / sqrt(2)
        0.0
    """
    shares = variances / variances.sum()
    return _mean_root(-0.5 * np.log1p(2 * _ROOT_AT[:, None] * shares).sum(-1))


def _mean_root(log_laplace: Array) -> float:
    """E sqrt(V) from log E e^{-s V} at `_ROOT_AT`."""
    return float((-np.expm1(log_laplace) / np.sqrt(_ROOT_AT)).sum() * _ROOT_STEP / (2 * math.sqrt(math.pi)))


def mean_root_normalized(kernel: Array, rate: float, lengths: Lengths) -> float:
    """E sqrt(V/W) / sqrt(E V/W), V = sum_j a_j^2 l_j^2 over W = (1 - rate) sum_j rate^j (1 + 2 e_j) l_j^2, e_j = a_j^2 / sum a^2.

    |u|^2 of many coordinates given the lengths, to first order in W: those are random for all coordinates at once. A coordinate's
    own square is in its v too, with E xi^4 = 3: hence the 2 e_j.
    """
    squares = kernel**2 / (kernel @ kernel)
    count = int(np.flatnonzero(squares > _TAIL)[-1]) + 1
    # V is no linear function of a_j^2: blocks must be short where a_j moves, too.
    first, size = blocks(count, min(rate, _TAIL ** (1 / count)), 0.3)
    squares = np.add.reduceat(squares[:count], first.astype(int))
    each, plain = squares / size, geometric(rate, first, size)
    inner = plain * (1 + 2 * each)
    # What lies beyond s = e^{+-28} is below 1e-6 of the root.
    s, r = np.exp(np.arange(-28.0, 28.0, 0.5)), np.exp(np.arange(_LOW, _HIGH, 0.5))
    whole_first, whole_size = blocks(horizon(rate), rate)
    whole = geometric(rate, whole_first, whole_size)
    older = lengths.log_laplace(r[:, None] * whole) @ whole_size - lengths.log_laplace(r[:, None] * plain) @ size
    free = np.exp(older + lengths.log_laplace(r[:, None] * inner) @ size)
    decay = np.exp(older + lengths.log_laplace(s[:, None, None] * each + r[None, :, None] * inner) @ size)
    of_root = ((free - decay) / np.sqrt(s)[:, None]).sum(0) * 0.5 / (2 * math.sqrt(math.pi))
    weight = 0.5 * np.sqrt(r / math.pi)
    weight[0] += 2 * math.exp((_LOW - 0.25) / 2) / math.sqrt(math.pi)
    ratio = 0.5 * (free * r) @ (lengths.tilted_mean(r[:, None] * inner) @ squares)
    return float(of_root @ weight) / math.sqrt(ratio)


@dataclass(frozen=True)
class FiniteAverage:
    """What a second-moment average of finite memory does to normalized updates u_t = sum_j a_j g_{t-j} / (sqrt(v_t) + eps).

    v_t holds the squares that it divides. Signs of the gradients being free, for all second moments of u

        E[u_t u_{t+k}] = sum_j a_j a_{j+k} E[g_{t-j}^2 / ((sqrt(v_t) + eps)(sqrt(v_{t+k}) + eps))],

    and 1/(sqrt(v) + eps) is a Laplace transform, of 1/sqrt(pi s) - eps e^{eps^2 s} erfc(eps sqrt s). Of two averages k steps apart
    the older steps enter together, so that the sum over them is a function of one variable.

    Attributes:
        kernel: a_j, shape (lag,).
        rate: beta_2.
        eps: In units of sqrt(E g^2).
        lengths: Law of the gradient's length.
    """

    kernel: Array
    rate: float
    eps: float
    lengths: Lengths

    @cached_property
    def _transform(self) -> tuple[Array, Array]:
        s = np.exp(np.arange(_LOW, _HIGH, _STEP))
        weights = s * _STEP * (1 / np.sqrt(math.pi * s) - self.eps * erfcx(self.eps * np.sqrt(s)))
        weights[0] += 2 * math.exp((_LOW - _STEP / 2) / 2) / math.sqrt(math.pi)  # all below the first node
        return s, weights

    @cached_property
    def _old(self) -> tuple[Array, Array, Array, Array]:
        """log sigma; log E e^{-sigma v}; first lags of blocks; and the tilted means E[g^2 e^{..}]/E e^{..} of their steps."""
        y = np.arange(_LOW - 1, _HIGH + 2, 0.25)
        sigma = np.exp(y)
        first, size = blocks(horizon(self.rate), self.rate)
        weight = geometric(self.rate, first, size)
        log_laplace = self.lengths.log_laplace_square(sigma[:, None] * weight) @ size
        first, size = blocks(len(self.kernel), self.rate)
        weight = geometric(self.rate, first, size)
        return y, log_laplace, first, self.lengths.tilted_mean_square(sigma[:, None] * weight)

    def autocovariance(self, lag: int) -> float:
        """E[u_t u_{t+lag}] over what it is at a constant normalizer, sum_j a_j a_{j+lag} / (1 + eps)^2."""
        weights = self._transform[1]
        both = self._older(lag) + self._new(lag)
        return float(weights @ np.exp(both) @ weights) * (1 + self.eps) ** 2

    def _older(self, lag: int) -> Array:
        """log of sum_j a_j a_{j+lag} E[g_{t-j}^2 e^{-s v_t - s' o}] / sum_j a_j a_{j+lag}, o what v_{t+lag} has of v_t; axes (s, s')."""
        products = self.kernel[: len(self.kernel) - lag] * self.kernel[lag:]
        y, log_laplace, first, tilted = self._old
        starts = first[first < len(products)].astype(int)
        shares = np.add.reduceat(products, starts) / products.sum()
        s = self._transform[0]
        return CubicSpline(y, log_laplace + np.log(tilted[:, : len(starts)] @ shares))(np.log(s[:, None] + s * self.rate**lag))

    def _new(self, lag: int) -> Array:
        """log E e^{-s v'} of the part of v that the last `lag` steps make up."""
        if lag == 0:
            return np.zeros(len(self._transform[0]))
        first, size = blocks(lag, self.rate)
        weight = geometric(self.rate, first, size)
        return self.lengths.log_laplace_square(self._transform[0][:, None] * weight) @ size

    def follows(self, lag: int) -> float:
        """E[u_t u_{t+lag} n / v_{t+lag}] over the same autocovariance, n the part of v_{t+lag} that the last `lag` steps make up.

        By how much a normalizer follows squares that are younger than an update; without eps.
        """
        s = self._transform[0]
        first, size = blocks(lag, self.rate)
        weight = geometric(self.rate, first, size)
        new = np.exp(self._new(lag)) * (self.lengths.tilted_mean_square(s[:, None] * weight) @ (size * weight))
        outer = s * _STEP * np.sqrt(s)
        inner = s * _STEP / np.sqrt(s)
        inner[0] += 2 * math.exp((_LOW - _STEP / 2) / 2)
        return float(2 / math.pi * inner @ np.exp(self._older(lag)) @ (outer * new))

    @cached_property
    def inverse(self) -> float:
        """E[1/(sqrt(v) + eps)] (1 + eps): what becomes of a constant that the normalizer divides."""
        y, log_laplace, *_ = self._old
        s, weights = self._transform
        return float(weights @ np.exp(CubicSpline(y, log_laplace)(np.log(s)))) * (1 + self.eps)

    @cached_property
    def joined(self) -> float:
        """sum_j a_j E[d u_t / d c_{t-j}] / sum_j a_j (1 + eps) where a constant c joins the gradients, c << g: decay inside the square.

        `inverse` less sum_j a_j b_j E[g_{t-j}^2 v^{-3/2}] / sum_j a_j, b_j the weights of v: squares of g + c grow where both have one
        sign, which takes the more from g.
        """
        y, log_laplace, first, tilted = self._old
        products = self.kernel * (1 - self.rate) * self.rate ** np.arange(len(self.kernel)) / self.kernel.sum()
        s = self._transform[0]
        shared = tilted @ np.add.reduceat(products, first.astype(int))
        own = np.exp(CubicSpline(y, log_laplace + np.log(shared))(np.log(s)))
        return self.inverse - float(2 / math.sqrt(math.pi) * _STEP * (s**1.5 @ own)) / (1 + self.eps)


def over_lags(function: Callable[[int], float], most: int) -> Array:
    """A function of the lag at 0 ... most, from some thirty lags: it must be smooth in the logarithm of the lag."""
    few = sorted({*range(min(most, 5) + 1), *(round(x) for x in np.geomspace(1, max(1, most), 24) if most)})
    values = np.array([function(k) for k in few])
    return values if len(few) < 5 else CubicSpline(np.log1p(few), values)(np.log1p(np.arange(most + 1)))
