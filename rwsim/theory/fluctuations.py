"""Fluctuations of a neuron about its equilibrium, to first order: covariances of the squares and products of its coordinates.

A coordinate's z = (omega, buffers) follows z' = A z + b g. Its products y = z z^T follow

    y' = A y A^T + (A z b^T + b z^T A^T) g + b b^T g^2,

linear in y but for the gradient, whose size depends on all coordinates through S = ||w~||^2 and on its own through the share
t_c = w~_c^2 / S (`noise.ToySystem`). With normalized gradients (E g_c^2 = 1) the noise about the mean has the covariances

    c = d:   E[(A z)(A z)^T] b b^T  and  b b^T b b^T (E g^4 - 1),
    c != d:  -h_c h_d^T, h_c = E[(A z) omega] b |gamma_c| / sqrt(S)  (g is orthogonal to omega)  and
             b b^T b b^T (Var l^2 + 2 t_c t_d E l^4)  (so are its squares: Var ||g||^2 is that of C - 1 directions),

and the gradient's size answers a fluctuation by -(1 - 2 t_c) dS/S - gamma_c^2 d(omega_c^2)/S. What follows is a Lyapunov equation.
Coordinates of like gamma are taken together, so that its size does not follow the fan-in.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from rwsim.theory.noise import Array

# Coordinates of the largest |gamma| that are taken one by one, and groups of the others.
_LONE, _GROUPS = 8, 16
_FEW = 40


@dataclass(frozen=True)
class Groups:
    """Coordinates in groups of like gamma_in^2.

    Attributes:
        gamma_sq: Mean gamma_in^2 of each group.
        count: Coordinates in each.
        of: Each coordinate's group.
    """

    gamma_sq: Array
    count: Array
    of: np.ndarray

    @classmethod
    def by_size(cls, gamma_sq: Array) -> "Groups":
        dim = len(gamma_sq)
        if np.ptp(gamma_sq) <= 1e-12 * gamma_sq.max():
            return cls(gamma_sq[:1].copy(), np.array([float(dim)]), np.zeros(dim, dtype=int))
        order = np.argsort(gamma_sq)
        parts = (
            np.array_split(order, dim)
            if dim <= _FEW
            else [*np.array_split(order[:-_LONE], _GROUPS), *np.array_split(order[-_LONE:], _LONE)]
        )
        of = np.empty(dim, dtype=int)
        for i, part in enumerate(parts):
            of[part] = i
        count = np.array([float(len(part)) for part in parts])
        return cls(np.bincount(of, gamma_sq) / count, count, of)

    def mean(self, values: Array) -> Array:
        """Of each group."""
        return np.bincount(self.of, values) / self.count


@dataclass(frozen=True)
class Fluctuations:
    """Relative variances and covariances in equilibrium (dimensionless; of order 1/C and of the variance of lengths).

    Attributes:
        size: Var S / (E S)^2 of S = ||w~||^2.
        norm: Var ||omega||^2 / (E ||omega||^2)^2.
        norm_long: Its autocovariance summed over all lags: the variance of the mean over n steps is `norm_long` / n.
        step: Var ||Delta||^2 / (E ||Delta||^2)^2 of the whole step Delta = omega' - omega.
        step_norm: Cov(||Delta||^2, ||omega||^2), relative; mean over the norms before and after.
        radial: E (||omega'||^2 - ||omega||^2)^2 / (2 E ||omega||^2)^2: what of ||Delta||^2 does not turn the neuron.
        coordinate_size: Cov(omega_c^2, S) / (E omega_c^2 E S) by group.
    """

    size: float
    norm: float
    norm_long: float
    step: float
    step_norm: float
    radial: float
    coordinate_size: Array


def fluctuations(
    transition: Array,
    drive: Array,
    groups: Groups,
    spread: Array,
    *,
    lengths_variance: float,
    answer: float,
    inverse_size: float = 1.0,
    rest: Array | None = None,
    free: bool = False,
) -> Fluctuations:
    """Solve for the fluctuations.

    Args:
        transition: A by group, shape (group, n, n); the parameter first.
        drive: b by group, shape (group, n); up to a factor, which `spread` sets.
        groups: Of coordinates.
        spread: E omega_c^2 by group.
        lengths_variance: Var l^2 (E l^2 = 1).
        answer: Share of a slow change of the gradient's size that reaches the update: 1, or less where a normalizer follows it.
        inverse_size: E[1/S] E S.
        rest: Drive of further white noise that is free of the weights (what a sign has besides its linear part), shape (group, n).
        free: Gradients do not depend on the weights (the ideal walk).

    Raises:
        numpy.linalg.LinAlgError: The linear system is unstable.
    """
    count, gamma_sq = groups.count, groups.gamma_sq
    g, n = drive.shape
    # Delta joins the states: it is what w' - w is made of.
    a = np.zeros((g, n + 1, n + 1))
    a[:, :n, :n] = transition
    a[:, n, :n] = transition[:, 0]
    a[:, n, 0] -= 1
    b = np.concatenate([drive, drive[:, :1]], 1)
    extra = np.zeros_like(b) if rest is None else np.concatenate([rest, rest[:, :1]], 1)
    pairs = [(i, j) for i in range(n + 1) for j in range(i, n + 1)]
    first, second = (np.array(x) for x in zip(*pairs, strict=True))
    m = len(pairs)

    share = gamma_sq * spread / ((count * gamma_sq) @ spread)
    # The gradient's free part, before it is made orthogonal to w~, is larger than the gradient.
    moments = _stationary(a, b, extra)
    scale = np.sqrt(spread / moments[:, 0, 0])
    moments *= (scale**2)[:, None, None]
    b, extra = b * (scale if free else scale / np.sqrt(1 - share / inverse_size))[:, None], extra * scale[:, None]
    # Gradients and weights may be decades apart. What comes out is relative: weights and steps get the unit of the layer's, buffers
    # of each group their own.
    unit = np.sqrt(np.diagonal(moments, axis1=1, axis2=2))
    unit[:, [0, n]] = np.sqrt(count @ unit[:, [0, n]] ** 2 / count.sum())
    a = a * unit[:, None, :] / unit[:, :, None]
    b, extra, spread = b / unit, extra / unit, spread / unit[:, 0] ** 2
    moments = moments / (unit[:, :, None] * unit[:, None, :])
    carried = a @ moments @ a.swapaxes(1, 2)
    squared = _pairs(b, b, first, second) / 2  # b b^T in terms of y

    total = m * g
    jacobian, noise = np.zeros((total, total)), np.zeros((total, total))
    size = np.zeros(total)
    whole = float((count * gamma_sq) @ spread)
    measured = squared if free else squared * (1 - share)[:, None]  # what E g_c^2 leaves of it
    # Squares of a Gaussian vector's coordinates covary by twice the squares of its covariances, P_cc = 1 - t_c and P_cd^2 = t_c t_d:
    # 2 (1 - 2 t_c) of its own and 2 t_c t_d of all.
    own = np.ones(g) if free else 1 - 2 * share
    of_weight, of_step = m * np.arange(g), m * np.arange(g) + m - 1
    size[of_weight] = gamma_sq
    for k in range(g):
        mine = slice(m * k, m * k + m)
        jacobian[mine, mine] = _products(a[k], first, second)
        noise[mine, mine] = count[k] * (_mixed(carried[k], b[k], first, second) + _mixed(carried[k], extra[k], first, second))
        if rest is None:
            noise[mine, mine] += count[k] * 2 * (1 + lengths_variance) * own[k] * np.outer(squared[k], squared[k])
        if not free:
            change = -(1 - 2 * share[k]) * count[k] * size / whole
            change[m * k] -= gamma_sq[k] / whole
            jacobian[mine] += answer * np.outer(squared[k], change)
    if not free:
        ahead = (a @ moments)[:, :, 0]
        orthogonal = (count * np.sqrt(gamma_sq / whole))[:, None] * _pairs(ahead, b, first, second)
        noise -= np.outer(orthogonal, orthogonal)
    if rest is None:
        common = count[:, None] * measured
        noise += lengths_variance * np.outer(common, common)
        if not free:
            shared = (count * share)[:, None] * squared
            noise += 2 * (1 + lengths_variance) * np.outer(shared, shared)
    covariance = solve_discrete_lyapunov(jacobian, noise)

    ones, steps = np.zeros(total), np.zeros(total)
    ones[of_weight], steps[of_step] = 1, 1
    norm, step = count @ spread, count @ moments[:, n, n]
    following = jacobian @ covariance
    of_norm = ones @ covariance @ ones / norm**2
    long = 2 * ones @ np.linalg.solve(np.eye(total) - jacobian, covariance @ ones) / norm**2 - of_norm
    return Fluctuations(
        size=float(size @ covariance @ size) / whole**2,
        norm=float(of_norm),
        norm_long=float(long),
        step=float(steps @ covariance @ steps) / step**2,
        step_norm=float(steps @ covariance @ ones + steps @ following @ ones) / (2 * step * norm),
        radial=float(of_norm - ones @ following @ ones / norm**2) / 2,
        coordinate_size=(covariance @ size)[of_weight] / (count * spread * whole),
    )


def _stationary(a: Array, b: Array, extra: Array) -> Array:
    """E z z^T by group."""
    n = a.shape[1]
    products = np.einsum("gij,gkl->gikjl", a, a).reshape(len(a), n * n, n * n)
    source = (np.einsum("gi,gj->gij", b, b) + np.einsum("gi,gj->gij", extra, extra)).reshape(len(a), n * n, 1)
    return np.linalg.solve(np.eye(n * n) - products, source).reshape(len(a), n, n)


def _pairs(u: Array, v: Array, first: np.ndarray, second: np.ndarray) -> Array:
    """u v^T + v u^T in terms of y."""
    return u[..., first] * v[..., second] + v[..., first] * u[..., second]


def _products(a: Array, first: np.ndarray, second: np.ndarray) -> Array:
    """y -> A y A^T."""
    direct = a[np.ix_(first, first)] * a[np.ix_(second, second)]
    crossed = a[np.ix_(first, second)] * a[np.ix_(second, first)]
    return direct + crossed * (first != second)


def _mixed(p: Array, b: Array, first: np.ndarray, second: np.ndarray) -> Array:
    """Covariance of x b^T + b x^T in terms of y, E x x^T = p."""

    def part(i: np.ndarray, j: np.ndarray, k: np.ndarray, m: np.ndarray) -> Array:
        return p[np.ix_(i, k)] * np.outer(b[j], b[m])

    return (
        part(first, second, first, second)
        + part(first, second, second, first)
        + part(second, first, first, second)
        + part(second, first, second, first)
    )


def mean_inverses(groups: Groups, spread: Array) -> tuple[float, Array]:
    """E[1/S] E S, and E[w~_c^2 / S^2] over E w~_c^2 / (E S)^2 by group, if coordinates were independent and Gaussian.

    1/S = int_0^inf e^{-s S} ds and E e^{-s w~^2} = (1 + 2 s E w~^2)^{-1/2}: exact, however few coordinates carry S.
    """
    share = groups.gamma_sq * spread / ((groups.count * groups.gamma_sq) @ spread)
    s = np.exp(np.arange(-25.0, 40.0, 0.1))
    base = 1 + 2 * s[:, None] * share
    decay = np.exp(-0.5 * np.log(base) @ groups.count)
    return float(decay @ s) * 0.1, 0.1 * (decay * s**2) @ (1 / base)
