"""The geometric model, executed for any rule: total update contributions, the Pythagorean balance and its solution.

Everything here comes from the rule's one `update`; what depends on the kind of direction (linear, normalized, sign) is
how E g^2 of a coordinate is eliminated.
"""

import sympy as sp

from derivations.checks import settle
from derivations.expectation import E, g, t
from derivations.sample import points
from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import rates
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import linear_response, lyapunov, stationary_moments
from rwsim.theory.paper import unit_grad_l1, unit_grad_norm_sq
from rwsim.theory.response import argument_kernel

W = sp.Symbol("W", positive=True)  # E||omega||^2; of one coordinate for a coupled normalized rule
omega = sp.Symbol("omega", real=True)
x = sp.Symbol("x", positive=True)  # lr times weight decay (over sqrt(v) for a coupled normalized rule)
G, D = sym.grad_sq, sym.normalizer


@cached
def kind(rule: type[UpdateRule]) -> str:
    """``linear``, ``normalized``, ``coupled`` (normalized, with the decay in the buffers) or ``sign``."""
    response = linear_response(rule)
    return "coupled" if response.direction == "normalized" and not response.decoupled else response.direction


@cached
def contributions(rule: type[UpdateRule]) -> tuple[sp.Expr, sp.Expr]:
    """u per unit of gradient and d per unit of weight, summed."""
    return rates.total_response(rule).subs(sym.epsilon, 0), rates.total_decay(rule).subs(sym.epsilon, 0)


def after_one(rule: type[UpdateRule]) -> E:
    """E of the squared weight after one total contribution of each kind: the right side of the balance."""
    u, d = contributions(rule)
    return E((omega + d * omega + u * g[t]) ** 2, (omega, W))


@cached
def argument_sq(rule: type[UpdateRule]) -> sp.Expr:
    """E n^2 of a sign's argument, unevaluated."""
    return E(argument_kernel(rule).output(g, t) ** 2)


def normalizer_sq(rule: type[UpdateRule]) -> sp.Expr:
    """E v of a normalized rule: what its second-moment average settles to, as a function of G and W."""
    match linear_response(rule).square:
        case (square, of_grad):
            return square[0, 0] * W + of_grad * G
        case _:
            raise UnsupportedRule(rule.name, "it has no second-moment average")


@cached
def eliminate(rule: type[UpdateRule], expr: sp.Expr) -> sp.Expr:
    """Replace G (and D) in a quadratic form of one coordinate, so that the whole vector's balance remains."""
    match kind(rule):
        case "linear":  # inverse proportionality: E||g||^2 = E||g~||^2 / W
            return expr.subs(G, unit_grad_norm_sq / W)
        case "normalized":  # E g^2 / v = 1 in each of C coordinates
            return sym.C * expr.subs(G, D**2)
        case "coupled":  # v = E g^2 + lambda^2 W, still one coordinate
            return expr.subs(G, sp.solve(normalizer_sq(rule) - D**2, G)[0])
        case _:  # the linear part of the sign of a normal n is n/D, D^2 = pi/2 E n^2
            return sym.C * sp.simplify(expr.subs(D, sp.sqrt(sp.pi / 2 * settle(argument_sq(rule)))))


def balanced(rule: type[UpdateRule]) -> tuple[sp.Expr, sp.Expr]:
    """Both sides of the balance with the gradient eliminated: W and what one total contribution makes of it."""
    u, d = contributions(rule)
    return W, (1 + d) ** 2 * W + eliminate(rule, u**2 * G)


@cached
def full_norm_sq(rule: type[UpdateRule]) -> sp.Expr:
    """The solution of the balance: E||omega||^2 (E omega_k^2 as a function of D for a coupled normalized rule)."""
    left, right = balanced(rule)
    roots = sp.solve(sp.expand((right - left) * W * D**2), W)
    positive = [root for root in roots if all(sp.N(root.subs(point)).is_positive for point in points(root.free_symbols, 3))]
    if len(positive) != 1:
        raise ValueError(f"the balance of {rule.name} has {len(positive)} positive solutions, not one")
    (solution,) = positive
    return sp.factor(solution)


@cached
def leading_norm_sq(rule: type[UpdateRule]) -> sp.Expr:
    """The leading term of the solution as lambda -> 0; for a coupled rule with assumption 4 (v = E g^2) and summed
    over coordinates: W = c S / sqrt(W), S = <1, sqrt(E g~^2)>, where E omega_k^2 = c sqrt(v_k)."""
    solution = full_norm_sq(rule)
    if kind(rule) == "coupled":
        solution = sp.root(solution / D * unit_grad_l1, 3) ** 2
    return sp.powdenest(sp.factor(solution).as_leading_term(sym.lam), force=True)


@cached
def exact_norm_sq(rule: type[UpdateRule]) -> sp.Expr:
    """The exact second moments, with the gradient eliminated as in the balance; the linear part only under a sign."""
    if kind(rule) == "sign":
        response = linear_response(rule).settled().linearized()
        moment = lyapunov(response.transition, response.drive)[0, 0]
    else:
        moment = stationary_moments(rule).weight_sq.subs(sym.epsilon, 0)
    if kind(rule) == "linear":
        return sp.sqrt(sp.factor(moment / G * unit_grad_norm_sq))
    if kind(rule) == "coupled":
        per_unit = sp.factor(moment / G)
        return sp.factor(sp.solve(W - per_unit * sp.solve(normalizer_sq(rule) - D**2, G)[0], W)[0])
    return sp.factor(eliminate(rule, moment))


def in_small(rule: type[UpdateRule], expr: sp.Expr) -> sp.Expr:
    """`expr` as a function of the small number x."""
    return expr.subs(sym.lam, x * (D if kind(rule) == "coupled" else 1) / sym.eta)
