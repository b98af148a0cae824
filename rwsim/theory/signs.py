"""Signs along a walk: the gain of their linear part, and what the arcsine law has beyond it.

The formulas take numbers, arrays and symbols alike; `xp` is numpy, or the same functions of symbols.
"""

from typing import Any

import numpy as np

from rwsim.theory.noise import Array
from rwsim.theory.recurrence import Recurrence

# Correlations below this are as good as linear under the arcsine (rho^2/6 < 0.05 %).
LINEAR = 0.05


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
