"""Signs along a walk: the gain of their linear part, what the arcsine law has beyond it, and how signs correlate in equilibrium.

The formulas take numbers, arrays and symbols alike; `xp` is numpy, or the same functions of symbols.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.forms import numeric, settled
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.recurrence import Recurrence

# Correlations below this are as good as linear under the arcsine (rho^2/6 < 0.05 %).
LINEAR = 0.05
# Autocovariances are summed until the kernel has fallen by this factor; what is cut is below it in relative terms.
KERNEL_TAIL = 1e-12
# Lags whose arcsines (one for each pair of gradient lengths) are held at a time.
_LAGS = 4096


def sign_gain(past: Any, own: Any, node: Any, xp: Any) -> Any:
    """Gain of the linear part of sign(n) at one squared length of the gradient: sqrt(2/pi)/sigma.

    Args:
        past: E of the squared buffer part of n.
        own: E of the squared part of the step's own gradient, at a length of 1.
        node: The gradient's squared length over its mean.
        xp: Supplies sqrt and pi.
    """
    return xp.sqrt(2 / xp.pi) / xp.sqrt(own * node + past)


def arcsine_beyond(rho: Any, xp: Any) -> Any:
    """What E[sign sign] of correlation rho has beyond its linear part."""
    return 2 / xp.pi * (xp.arcsin(rho) - rho)


class Signs:
    """What the arcsine law has beyond its linear part, summed over the lags where correlations are large, neuron by neuron
    for the mean coordinate."""

    def __init__(self, recurrence: Recurrence, neurons: int) -> None:
        self.recurrence, buffers = recurrence, recurrence.states - 1
        self.past = np.zeros((0, buffers, neurons))  # Cov(buffers, n_j) of earlier steps j
        self.sigma = np.zeros((0, neurons))
        self.weight = np.zeros(0)  # of s_j in w

    def beyond_linear(self, system: list, h: list, k: float, drive: float, past: Any, grad: Any, p: list) -> Array:
        """E[w s] of this step less its linear part, shape (neuron,)."""
        n, order, neurons = self.recurrence.states, self.recurrence.order, self.past.shape[-1]

        def mean(x: Any) -> Array:
            return x.mean(-1) if np.ndim(x) else np.array([x] * neurons)

        size, row = mean(grad), np.array(h[1:])
        sigma = np.sqrt(mean(past) + k**2 * size)
        found = np.zeros(neurons)
        if len(self.weight):
            rho = ((row @ self.past) / (self.sigma * sigma)).clip(-1, 1)
            found = self.weight @ arcsine_beyond(rho, np)
            alive = (np.abs(rho) > LINEAR).any(-1)
            if not alive.all():
                self.past, self.sigma, self.weight = self.past[alive], self.sigma[alive], self.weight[alive]
        buffers = np.array([[system[i * n + j] for j in range(1, n)] for i in range(1, n)])
        moments = np.zeros((n, n, neurons))
        for (i, j), x in zip(order, p, strict=True):
            moments[i, j] = moments[j, i] = mean(x)
        own = np.einsum("ij,jmn,m->in", buffers, moments[1:, 1:], row) + np.outer(system[n * n + 1 :], k * size)
        self.past = np.concatenate([buffers @ self.past, own[None]])
        self.sigma = np.concatenate([self.sigma, sigma[None]])
        self.weight = np.append(self.weight * system[0], drive)
        return found


def sign_autocovariance(rule: UpdateRule, law: GradientLaw) -> tuple[Array, Array]:
    """E[sign(n_t) sign(n_{t+k})] for k = 1, 2, ... until the kernel has died out, and its linearization.

    For a Gaussian n of correlation rho this is (2/pi) arcsin rho (the arcsine law). Gradient lengths vary from step to
    step, so n is Gaussian only given them: the law is averaged over the lengths of the two steps compared, with the
    conditional covariance over the product of the conditional deviations (THEORY.md section 4). Lengths of other
    steps enter through their mean. The linearization, (2/pi) rho at constant lengths, is the paper's model of the sign.
    """
    response = settled(type(rule))
    if response.argument is None:
        raise UnsupportedRule(rule.name, "it has no sign")
    h, k = response.argument
    buffers = response.transition[1:, 1:]
    entries = numeric(type(rule), (*buffers, *response.drive[1:, 0], *h[0, 1:], k), ())(*sym.flat(rule.values))
    nodes, weights = law.length_squared()
    return _sign_autocovariance(tuple(map(float, entries)), buffers.rows, tuple(nodes), tuple(weights))


def responses(row: Array, transition: Array, drive: Array, head: float, count: int) -> Array:
    """What a gradient does at once and in each of the `count` steps after: head, then row A^j drive for j = 0, 1, ..."""
    found, state = np.empty(count + 1), drive
    found[0] = head
    for j in range(1, count + 1):
        found[j] = row @ state
        state = transition @ state
    return found


def autocorrelation(kernel: Array) -> Array:
    """sum_j a_j a_{j+k} at k = 0, 1, ..., shape of `kernel`."""
    spectrum = np.fft.rfft(kernel, 2 * len(kernel))
    return np.fft.irfft(np.abs(spectrum) ** 2, 2 * len(kernel))[: len(kernel)]


# lr and decay do not enter, so that neighbours of a sweep share it; few, since at beta_2 = 0.99999 one takes 40 MB.
@lru_cache(maxsize=4)
def _sign_autocovariance(entries: tuple[float, ...], n: int, nodes: tuple[float, ...], weights: tuple[float, ...]) -> tuple[Array, Array]:
    transition = np.array(entries[: n * n]).reshape(n, n)
    drive, row = np.array(entries[n * n : n * n + n]), np.array(entries[n * n + n : n * n + 2 * n])
    radius = max(abs(np.linalg.eigvals(transition)))
    length = 2 if radius == 0 else max(2, math.ceil(math.log(KERNEL_TAIL) / math.log(radius)))
    kernel = responses(row, transition, drive, entries[-1], length)  # of g_{t-j} in n_t
    past = np.append(autocorrelation(kernel[1:]), 0.0)  # sum_{j>=1} a_j a_{j+k} at k = 0, 1, ...
    early, late = np.array(nodes)[:, None, None], np.array(nodes)[None, :, None]
    own = kernel[0]
    averaged = np.empty(length)
    for first in range(0, length, _LAGS):
        lags = slice(first, first + _LAGS)
        lagged, shared = kernel[1:][lags], past[1:][lags]
        arcsine = sign_product(own, lagged, shared, past[0], early, late, np)
        averaged[lags] = np.einsum("i,j,ijk->k", weights, weights, arcsine)
    return averaged, 2 / math.pi * (own * kernel[1:] + past[1:]) / (own**2 + past[0])


def sign_product(own: Any, lagged: Any, shared: Any, past: Any, early: Any, late: Any, xp: Any) -> Any:
    """E[sign(n_t) sign(n_{t+k})] given the squared lengths of the gradients of both steps, the others at their mean.

    Args:
        own: Kernel of the step's own gradient in n.
        lagged: Kernel at lag k.
        shared: sum_{j>=1} a_j a_{j+k} of the kernel.
        past: The same at k = 0.
        early: Squared length of g_t over its mean.
        late: Squared length of g_{t+k} over its mean.
        xp: Supplies sqrt, arcsin, clip and pi: numpy, or the same on symbols.
    """
    covariance = own * lagged * early + shared
    deviation = xp.sqrt((own**2 * early + past) * (own**2 * late + past + lagged**2 * (early - 1)))
    return 2 / xp.pi * xp.arcsin(xp.clip(covariance / deviation, -1.0, 1.0))


def summed_closure(decay: Any, past: Any) -> tuple[Any, Any]:
    """`sign_closure` from past = sum_{k>=1} (1 - decay)^(k-1) gamma_k; numbers, arrays and symbols alike."""
    keep = 1 - decay
    whole = 1 + 2 * keep * past
    return whole / (decay * (2 - decay)), decay * (1 - decay * past) / whole


def sign_closure(decay: Any, gamma: Array) -> tuple[Array, Array]:
    """E w^2 in units of b^2, and 1 - E[w w'] / E w^2, of w' = (1 - decay) w + b s: (1 + 2 sum rho^k gamma_k) / (1 - rho^2) is the first.

    Args:
        decay: 1 - rho in (0, 2), any shape.
        gamma: E[s_t s_{t+k}] at k = 1, 2, ...

    Example:
        >>> sign_closure(0.5, np.zeros(1))
        (array(1.33333333), array(0.5))
    """
    decay = np.asarray(decay, dtype=float)
    past = (1 - decay)[..., None] ** np.arange(len(gamma)) @ gamma
    relative, turn = summed_closure(decay, past)
    return np.asarray(relative), np.asarray(turn)
