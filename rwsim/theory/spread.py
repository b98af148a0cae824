"""How neurons of one kind differ: the covariance of the Gram matrix Gamma = sum_c z_c z_c^T of (w, buffers), step by step.

    Gamma' = A Gamma A^T + (A p b^T + b p^T A^T) + ||g||^2 b b^T,        p = sum_c z_c g_c.

Given Gamma, p is Gaussian of covariance E g_c^2 (Gamma - Gamma e e^T Gamma / Gamma_ww) as g is orthogonal to w, and ||g||^2
has the spread of a chi-square and of the random length. What differs between neurons enters means at second order, 1/dim:
E[1/||w||^2] of a scale-invariant gradient, the mean of the angle, and the pull of a sign on w.
"""

from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import sympy as sp

from rwsim.theory._cache import cached
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.recurrence import Compiled, Recurrence, listed, symmetric

# E w^4 / (E w^2)^2 of starting weights, uniform as torch's.
_START_FOURTH = 9 / 5


@cached
def _covariance(n: int) -> Compiled:
    """(A, b, b of ||g||^2, Gamma, cov, E of a squared coordinate of g, its total, Var of ||g||^2, feedback, white drive and
    power) -> relative Var of w . step and of ||w'||^2; mean, Var, and Cov with the relative ||w'||^2, of the squared step across
    w; and the new cov."""
    a, b, sized = sp.Matrix(n, n, sp.symbols(f"a_:{n}:{n}")), sp.Matrix(sp.symbols(f"b_:{n}")), sp.Matrix(sp.symbols(f"s_:{n}"))
    each, total, variance, feedback, drive, power = sp.symbols("each total variance feedback drive power")
    gram = symmetric("G", n)
    pairs = list(combinations_with_replacement(range(n), 2))
    cov = symmetric("V", len(pairs))
    # One more row: the step across w.
    along = (a[0, :] * gram[:, 0])[0] / gram[0, 0]
    across = a[0, :] - along * sp.eye(n)[0, :]
    rows, drives, sizes = sp.Matrix([a, across]), sp.Matrix([b, [b[0]]]), sp.Matrix([sized, [sized[0]]])
    whites = sp.Matrix([drive, *[0] * (n - 1), drive])
    wanted = [*pairs, (n, n)]

    def entry(i: int, j: int, k: int, m: int) -> sp.Expr:
        return rows[i, k] * rows[j, m] + (rows[i, m] * rows[j, k] if k != m else 0)

    change = sp.Matrix([[entry(i, j, k, m) for k, m in pairs] for i, j in wanted])
    for row, (i, j) in enumerate(wanted):
        change[row, 0] -= feedback * total / gram[0, 0] * sizes[i] * sizes[j]
    free = each * rows * (gram - gram[:, 0] * gram[0, :] / gram[0, 0]) * rows.T
    noisy = power * rows * gram * rows.T

    def crossed(h: sp.Matrix, x: sp.Matrix, i: int, j: int, k: int, m: int) -> sp.Expr:
        return h[i, k] * x[j] * x[m] + h[i, m] * x[j] * x[k] + h[j, k] * x[i] * x[m] + h[j, m] * x[i] * x[k]

    carried = change * cov * change.T
    new = sp.zeros(len(wanted), len(wanted))
    for s, t in combinations_with_replacement(range(len(wanted)), 2):
        four = (*wanted[s], *wanted[t])
        noise = crossed(free, drives, *four) + crossed(noisy, whites, *four)
        new[s, t] = carried[s, t] + noise + variance * sp.prod(sizes[i] for i in four)
    last = len(pairs)
    mean = rows * gram * rows.T + total * drives * drives.T
    with_w = [pairs.index((0, i)) for i in range(n)]
    pull = sum(across[i] * across[j] * cov[with_w[i], with_w[j]] for i in range(n) for j in range(n)) + drive**2 * power * gram[0, 0]
    w, u = mean[0, 0], mean[n, n]
    outputs = [pull / gram[0, 0] ** 2, new[0, 0] / w**2, u, new[last, last], new[0, last] / w, *listed(new[:last, :last])]
    inputs = (*a, *b, *sized, *listed(gram), *listed(cov), each, total, variance, feedback, drive, power)
    return Compiled(inputs, outputs)


@cached
def _sign_pull(n: int) -> Compiled:
    """(h, Gamma, cov, own) -> change of E[w . sign(n)] over its gain, n = h z + k g, by what neurons differ in: with q = w . hz,
    y = ||hz||^2 and own = E||k g||^2 inverse to ||w||^2 = W, the sign's linear part is q (own/W + y)^(-1/2)."""
    h, own = sp.Matrix(sp.symbols(f"h_:{n}")), sp.Symbol("own")
    gram = symmetric("G", n)
    pairs = list(combinations_with_replacement(range(n), 2))
    cov = symmetric("V", len(pairs))
    rows = (
        sp.Matrix([[1 if pair == (0, 0) else 0 for pair in pairs]]),
        sp.Matrix([[h[j] if i == 0 else 0 for i, j in pairs]]),
        sp.Matrix([[h[i] * h[j] * (1 if i == j else 2) for i, j in pairs]]),
    )
    q = (gram[0, :] * h)[0]
    size = gram[0, 0], sp.Integer(1), (h.T * gram * h)[0]
    ww, wq, wy, qy, yy = ((rows[i] * cov * rows[j].T)[0] / (size[i] * size[j]) for i, j in ((0, 0), (0, 1), (0, 2), (1, 2), (2, 2)))
    past = size[2] / (size[2] + own)
    rest = 1 - past
    change = -(past * qy - rest * wq) / 2 + q * sp.Rational(3, 8) * (past**2 * yy - 2 * past * rest * wy + rest**2 * ww)
    return Compiled((*h, *listed(gram), *listed(cov), own), [change])


class Spread:
    """The covariance on its way. Aggregates have shape (neuron,), or are numbers.

    Attributes:
        boost: E[1/||w||^2] E||w||^2.
    """

    def __init__(self, recurrence: Recurrence, law: GradientLaw, gamma: Array, share: Array, start_sq: float) -> None:
        # A gradient through the normalizer keeps its size whatever the norm.
        self.recurrence, self.feedback = recurrence, float(law.scale_invariant and recurrence.normalizer is None)
        nodes, weights = law.length_squared()
        self.fourth, self.dim = float(weights @ nodes**2), law.fan_in
        self.scale: Any = gamma**2 if self.feedback else np.ones_like(gamma)
        size = len(recurrence.order)
        self.cov: list[Any] = [0.0] * (size * (size + 1) // 2)
        own = self.scale**2 @ share
        self.cov[0] = (_START_FOURTH - 1) * start_sq**2 * own
        self.boost: Any = 1 + self.feedback * (_START_FOURTH - 1) * own / (self.scale @ share) ** 2

    def become_numbers(self) -> None:
        """Go on with one neuron of one kind of coordinate."""
        self.scale = float(self.scale.flat[0])
        self.cov = [float(np.ravel(x)[0]) for x in self.cov]
        self.boost = float(np.ravel(self.boost)[0])

    def follow(self, total: Any, system: list, p: list, grad: Any, white: tuple[float, Any] | None, sized: bool, arrays: bool) -> Any:
        """Take a step; relative variance of w . step, and the factor from the RMS angle to the mean angle.

        Args:
            total: Sum over coordinates.
            system: A and b, one for all coordinates.
            p: E[z z^T] before the step.
            grad: E g_c^2.
            white: Drive of a sign and power of its white part.
            sized: Whether a gradient's length shows in the step.
            arrays: Whether arguments are arrays.
        """
        n = self.recurrence.states
        weighted = grad * self.scale
        size = total(weighted)
        each = total(weighted * weighted) / size
        variance = size**2 * (self.fourth - 1 + 2 * self.fourth * each / size) if sized else 0.0
        drive, power = (0.0, 0.0) if white is None else (white[0], total(white[1] * self.scale) / self.dim)
        # A sign has one size.
        sizes = system[n * n :] if white is None else [0.0, *system[n * n + 1 :]]
        gram = [total(x * self.scale) for x in p]
        found = _covariance(n).of(arrays)(*system, *sizes, *gram, *self.cov, each, size, variance, self.feedback, drive, power)
        pull, ww, u, uu, wu, *self.cov = found
        self.boost = 1 + self.feedback * ww
        if white is not None or not np.all(u):  # a sign has one size, and without a step there is none
            uu = wu = 0.0
        else:
            uu, wu = uu / u**2, wu / u
        # Log-normal: E sqrt(U/W) over sqrt(E U/E W).
        return pull, 1 - uu / 8 + 3 * ww / 8 - wu / 4

    def sign_pull(self, total: Any, h: list, k: float, p: list, grad: Any, arrays: bool) -> Any:
        """Change of E[w_c sign(n_c)] of order 1/dim, over the gain. Besides what neurons differ in: a coordinate whose w_c^2 has the
        share x of ||w||^2 sees less of the gradient, which is orthogonal to w, and follows its momentum better, by x/2; and
        E[w m] weights it by w_c^2: (3 - 1)/(dim + 2) (dim - 1)/dim."""
        if not self.feedback or not np.any(p[-1]):
            return 0.0
        gram = [total(x * self.scale) for x in p]
        (change,) = _sign_pull(self.recurrence.states).of(arrays)(*h, *gram, *self.cov, k**2 * total(grad * self.scale))
        pulled = sum(h[i] * gram[i] for i in range(1, self.recurrence.states))
        return (change + pulled * (self.dim - 1) / (self.dim + 2) / self.dim) / total(self.scale)
