"""One step of a rule's second moments, in symbols, compiled once per rule for numbers and for arrays.

    P' = A P A^T + G b b^T,        P = E[z z^T] of one coordinate, z = (w, buffers), G = E g_c^2,

with what a square root or a sign adds. The normalizer fluctuates: with v' = E v' (1 + e), A and b are expanded to second
order in e, and the moments close once K = Cov(z z^T, v) and Var v are carried along. A sign is replaced by its linear part,
with one gain for the buffers and another for the gradient of the step, and white noise of the remaining power.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import sympy as sp

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import LinearResponse, linear_response

gain, own_gain = sp.symbols("gain own_gain", positive=True)
_e_sq, _e_grad = sp.symbols("e_sq e_grad", nonnegative=True)


class Compiled:
    """Expressions as a function of numbers (fast) or of arrays, worked out and compiled when first asked for: that takes longer than
    many walks."""

    def __init__(self, arguments: tuple[Any, ...], expressions: list[Any] | Callable[[], list[Any]]) -> None:
        self.arguments, self._given = arguments, expressions

    @cached_property
    def expressions(self) -> list[Any]:
        return self._given() if callable(self._given) else self._given

    @cached_property
    def numbers(self) -> Callable[..., list]:
        return sp.lambdify(self.arguments, self.expressions, "math", cse=True)

    @cached_property
    def arrays(self) -> Callable[..., list]:
        return sp.lambdify(self.arguments, self.expressions, "numpy", cse=True)

    def of(self, arrays: bool) -> Callable[..., list]:
        return self.arrays if arrays else self.numbers


@dataclass(frozen=True)
class Recurrence:
    """One step of a rule. Symmetric matrices over z are listed in `order`; `hyper` is flat, in declaration order.

    Attributes:
        states: Length n of z.
        order: Pairs (i, j), i <= j.
        normalizer: (hyper, t, G, kurt, v, Var v, mu, P, K, K_g) -> v', Var v', D, E e^2, E[e g^2]/G, E[z g e], E[z z^T e],
            E[z_g z_g^T e]; mu = E z; z_g are the buffers of the gradient part. None without a root.
        argument: (hyper, P) -> E of the squared buffer part of the sign's argument, its coefficient k of g, its row h, the
            sign's drive. None without a sign.
        step: (hyper, t, D, G, E e^2, E[e g^2]/G, gain, own gain, mu, E[z g e], P, E[z z^T e], P_g, E[z_g z_g^T e]) -> P',
            Cov(z' z'^T, v')/v', E[w w'], E of the squared gradient part, mu', P_g', Cov(z_g' z_g'^T, v')/v'.
        system: (hyper, t, D, gain, own gain) -> A and b, a sign replaced by its linear part.
        plain: (hyper, t, D, G, gain, own gain, P) -> P' at e = 0.
        moved: Arguments of `plain` -> E of the squared part of w's step that is orthogonal to w, E of w times the step, and of w
            times what the buffers add to it; free of the cancellation of their parts.
        plain_normalizer: (hyper, t, G, v, P) -> v', D.
        separate: Whether the gradient part needs buffers of its own, which have seen gradients only.
    """

    states: int
    order: tuple[tuple[int, int], ...]
    normalizer: Compiled | None
    argument: Compiled | None
    step: Compiled
    system: Compiled
    plain: Compiled
    moved: Compiled
    plain_normalizer: Compiled | None
    separate: bool


def listed(matrix: sp.Matrix) -> list[sp.Expr]:
    """Upper triangle, row by row."""
    return [matrix[i, j] for i, j in combinations_with_replacement(range(matrix.rows), 2)]


def symmetric(name: str, n: int) -> sp.Matrix:
    return sp.Matrix(n, n, lambda i, j: sp.Symbol(f"{name}_{min(i, j)}{max(i, j)}"))


def _in_e(m: sp.Matrix) -> tuple[sp.Matrix, sp.Matrix, sp.Matrix]:
    """Derivatives by e at e = 0, where D is proportional to sqrt(1 + e): d/de = (D/2) d/dD, d^2/de^2 its square less itself."""
    half = sym.normalizer / 2
    first = half * m.diff(sym.normalizer)
    return m, first, half * first.diff(sym.normalizer) - first


def _pair(x: sp.Matrix, m: sp.Matrix, y: sp.Matrix) -> sp.Matrix:
    half = x * m * y.T
    return half + half.T


def _moments(a: sp.Matrix, b: sp.Matrix, p: sp.Matrix, pe: sp.Matrix, ge: sp.Matrix) -> tuple[sp.Matrix, sp.Matrix]:
    """E[z' z'^T] and E[z' z'^T e] to second order in e, from p = E[z z^T], pe = E[z z^T e], ge = E[z g e]."""
    (a0, a1, a2), (b0, b1, b2), one, grad = _in_e(a), _in_e(b), sp.eye(1), sym.grad_sq
    second = a1 * p * a1.T + _pair(a2, p, a0) / 2 + grad * (b1 * b1.T + _pair(b2, one, b0) / 2)
    first = _pair(a1, pe, a0) + grad * _e_grad * _pair(b1, one, b0) + _pair(a1, ge, b0) + _pair(a0, ge, b1)
    new = a0 * p * a0.T + grad * b0 * b0.T + first + _e_sq * second
    with_e = a0 * pe * a0.T + _pair(a0, ge, b0) + grad * _e_grad * b0 * b0.T
    return new, with_e + _e_sq * (_pair(a1, p, a0) + grad * _pair(b1, one, b0))


def _normalizer(response: LinearResponse, hyper: tuple[Any, ...], p: sp.Matrix, mu: sp.Matrix) -> tuple[Compiled, Compiled]:
    assert response.square is not None
    (q, c), rate, fresh, grad, n = response.square, response.average, 1 - response.average, sym.grad_sq, p.rows
    v, v_var, kurt = sp.symbols("v v_var kurt", positive=True)
    k, kg = symmetric("K", n), symmetric("L", n)
    square = (q * p).trace() + c * grad
    # Isserlis' theorem for z of mean mu: Cov(z_i z_j, z_k z_l) = P_ik P_jl + P_il P_jk - 2 mu_i mu_j mu_k mu_l.
    still = (mu.T * q * mu)[0]
    square_var = 2 * square**2 + (kurt - 3) * c**2 * grad**2 - 2 * still**2
    new_v = rate * v + fresh * square
    new_var = rate**2 * v_var + fresh**2 * square_var + 2 * rate * fresh * (q * k).trace()
    with_e = (rate * k + 2 * fresh * (p * q * p - still * mu * mu.T)) / new_v
    # The square is that of sqrt(c) g + sqrt(q) z: it holds their product too.
    with_grad = 2 * fresh * grad * p * q.applyfunc(lambda x: sp.sqrt(x * c)) * sp.ones(n, 1) / new_v
    outputs = [new_v, new_var, sp.sqrt(new_v * response.correction), new_var / new_v**2, fresh * c * (kurt - 1) * grad / new_v]
    outputs += [*with_grad, *listed(with_e), *listed(rate * kg / new_v)]
    whole = Compiled((*hyper, sym.t, grad, kurt, v, v_var, *mu, *listed(p), *listed(k), *listed(kg)), outputs)
    return whole, Compiled((*hyper, sym.t, grad, v, *listed(p)), [outputs[0], outputs[2]])


@cached
def recurrence(rule: type[UpdateRule]) -> Recurrence:
    """Read off the rule.

    Raises:
        UnsupportedRule: The theory cannot carry the rule.
    """
    response = linear_response(rule)
    n = len(response.states)
    hyper, grad = sym.flat(sym.hyper_symbols(rule)), sym.grad_sq
    known = (*hyper, sym.t, sym.normalizer)
    p, pe, pg, pge = (symmetric(name, n) for name in ("P", "E", "Q", "F"))
    mu, ge = (sp.Matrix(sp.symbols(f"{name}_:{n}")) for name in ("mu", "ge"))
    a, b, white, argument = response.transition, response.drive, sp.zeros(n, n), None
    if response.argument is not None:
        (h, k), drive = response.argument, response.sign_drive
        a, b, past = a + drive * h * gain, b + drive * k * own_gain, (h * p * h.T)[0]
        white = drive * drive.T * (1 - gain**2 * past - own_gain**2 * k**2 * grad)
        argument = Compiled((*hyper, *listed(p)), [past, k, *h, drive[0]])
    separate = not response.decoupled

    def outputs() -> list[Any]:
        new, with_e = _moments(a, b, p, pe, ge)
        (a0, a1, a2), b1 = _in_e(a), _in_e(b)[1]
        lagged = (a0 * p + a1 * pe + a2 * p * _e_sq / 2 + b1 * ge.T)[0, 0]
        ag, bg = (m.subs(sym.lam, 0) for m in (a, b))
        ag[:, 0] = sp.zeros(n, 1)
        new_g, with_eg = _moments(ag, bg, pg, pge, sp.zeros(n, 1)) if separate else _moments(ag, bg, p, pe, ge)
        update_sq = new_g[0, 0] if response.argument is None else response.sign_drive[0] ** 2
        found = [*listed(new + white), *listed(with_e), lagged, update_sq, *((a0 + a2 * _e_sq / 2) * mu)]
        return [*found, *listed(new_g), *listed(with_eg)] if separate else found

    plain = listed(a * p * a.T + grad * b * b.T + white)
    kept, row, with_w = sp.factor(a[0, 0] - 1), a[0, 1:], p[1:, 0]
    along = (row * with_w)[0]
    across = (row * (p[1:, 1:] - with_w * with_w.T / p[0, 0]) * row.T)[0] + grad * b[0] ** 2 + white[0, 0]
    moved = [across, kept * p[0, 0] + along, along]
    of_plain = (*known, grad, gain, own_gain, *listed(p))
    normalizer, plain_normalizer = (None, None) if response.square is None else _normalizer(response, hyper, p, mu)
    matrices = (*listed(p), *listed(pe), *listed(pg), *listed(pge))
    return Recurrence(
        n, tuple(combinations_with_replacement(range(n), 2)), normalizer, argument,
        Compiled((*known, grad, _e_sq, _e_grad, gain, own_gain, *mu, *ge, *matrices), outputs),
        Compiled((*known, gain, own_gain), [*a, *b]),
        Compiled(of_plain, plain), Compiled(of_plain, moved), plain_normalizer, separate,
    )  # fmt: skip
