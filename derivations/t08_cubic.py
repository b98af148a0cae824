"""T8: Adam+l2 without assumption 4: the cubic, where it is exact, and its limit."""

import sympy as sp

from derivations import balance
from derivations.balance import D, W, x
from derivations.core import Derivation, Step, for_rules
from rwsim.optimizers import SGDM
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.moments import stationary_moments
from rwsim.theory.paper import unit_grad_l1

_q = sp.Symbol("q", positive=True)  # E g~_k^2, the same in every coordinate


def cubic(rule, moment, w):
    """The polynomial in w = E omega_k^2 when all coordinates are alike: v = q/(C w) + lambda^2 w put into w = moment(v).

    v is what the room's normalizer settles to, with E g_k^2 = q / ||omega||^2.
    """
    v = balance.normalizer_sq(rule).subs({sym.grad_sq: _q / (sym.C * w), W: w})
    return sp.numer(sp.together(moment**2 / D**2 * v - w**2))


def steps(context):
    w = sp.Symbol("w", positive=True)
    for rule in context.rules:
        model, exact = balance.full_norm_sq(rule), balance.exact_norm_sq(rule)
        polynomial = sp.Poly(cubic(rule, model, w), w)
        root_of_q = sp.solve(polynomial.as_expr(), _q)[0]
        yield Step(
            f"{rule.name}: the cubic", polynomial.as_expr().subs(_q, root_of_q), sp.Integer(0),
            "E omega_k^2 = eta sqrt(v)/(2 lambda), squared, with v = q/(C w) + lambda^2 w, is a polynomial in w = E omega_k^2; here "
            "with the "
            "q = E g~_k^2 that solves it.",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: its degree", sp.Integer(polynomial.degree()), sp.Integer(3), "The root of a third-degree polynomial, as stated."
        )  # fmt: skip
        yield Step(
            f"{rule.name}: exact without momentum", exact.subs(sym.beta1, 0), model,
            "At beta_1 = 0 the exact second moments obey the same relation between w and v.",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: not exact with momentum", exact, model,
            "For beta_1 > 0 the exact relation holds another term: the cubic ignores beta_1.", relation="!=",
        )  # fmt: skip
        ratio = sp.factor(balance.in_small(rule, model / exact))
        yield Step(
            f"{rule.name}: what momentum changes", ratio - 1, sp.diff(ratio, x).subs(x, 0) * x,
            "Model over exact: the cubic's moment is too large at first order in x = eta lambda / sqrt(v).", relation="~", small=x,
        )  # fmt: skip
        swap = {sym.alpha: sym.beta1, sym.eta: sym.eta * (1 - sym.beta1) / D}
        yield Step(
            f"{rule.name}: a coordinate is an SGDM walk", stationary_moments(rule).weight_sq.subs(sym.epsilon, 0),
            stationary_moments(SGDM).weight_sq.subs(swap, simultaneous=True),
            "Its exact second moment is SGDM's with momentum beta_1 and learning rate eta (1 - beta_1) / sqrt(v_k).",
        )  # fmt: skip
        # Parametrize by v: eta lambda / sqrt(v) is the small number.
        small_w = balance.in_small(rule, model)
        q_of_w = root_of_q.subs(sym.lam, x * D / sym.eta).subs(w, small_w)
        printed = paper.TABLE_1[rule.name].norm ** 2
        yield Step(
            f"{rule.name}: the limit of the cubic",
            sym.C * small_w, printed.subs(unit_grad_l1, sym.C * sp.sqrt(q_of_w)).subs(sym.lam, x * D / sym.eta),
            "Along the cubic, with x = eta lambda / sqrt(v) as the small number, C w is the printed norm^2 with <1, sqrt(E g~^2)> = C "
            "sqrt(q).",
            relation="~", small=x,
        )  # fmt: skip
        off = sp.powdenest(sym.C * small_w / printed.subs(unit_grad_l1, sym.C * sp.sqrt(q_of_w)).subs(sym.lam, x * D / sym.eta), force=True)
        off = sp.simplify(off)
        yield Step(
            f"{rule.name}: how far from the limit", off - 1, sp.diff(off, x).subs(x, 0) * x,
            "The first correction is linear in x: lambda -> 0 at fixed eta brings it to 0.", relation="~", small=x,
        )  # fmt: skip


DERIVATION = Derivation("T8", "Adam+l2 without assumption 4: the cubic", "appendix E, assumption 4", for_rules("adam_l2"), steps)
