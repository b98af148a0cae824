"""T3: how AdamW's norm approaches equilibrium."""

import sympy as sp

from derivations import balance
from derivations.balance import D, W
from derivations.core import Derivation, Step, for_rules
from derivations.expectation import E, g, t
from derivations.printed import RATE, TRANSIENT, index, start_sq
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response


def steps(context):
    for rule in context.rules:
        u, d = balance.contributions(rule)
        gain = (sym.C * u**2 * D**2).subs(sym.epsilon, 0)
        yield Step(
            f"{rule.name}: one step of the recurrence", E((balance.omega * (1 + d) + u * g[t]) ** 2, (balance.omega, W)),
            RATE * W + sym.eta**2 * sym.grad_sq / D**2,
            "The balance as a recurrence, per coordinate: the weight shrinks by the decay's contribution and gains u^2, where E g^2 / "
            "v = 1.",
        )  # fmt: skip
        moment = sp.Function("W")
        solution = sp.rsolve(moment(index + 1) - (1 + d) ** 2 * moment(index) - gain, moment(index), {moment(0): start_sq})
        yield Step(
            f"{rule.name}: its solution", solution, TRANSIENT,
            "The linear recurrence solved from E omega_0^2 = W_0, the whole vector (C coordinates).",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: a is a square", RATE, (1 + d) ** 2, "The printed rate is the square of what one decay leaves of the weight."
        )  # fmt: skip
        yield Step(
            f"{rule.name}: the limit", TRANSIENT.subs(RATE**index, 0),
            balance.full_norm_sq(rule), "For a < 1 the power dies out and the equilibrium of T2 remains.",
        )  # fmt: skip
        response = linear_response(rule).settled()
        y = sp.Symbol("y")
        slow = response.transition.charpoly(y).as_expr().subs(y, 1 + d)
        yield Step(
            f"{rule.name}: a is exact", slow, sp.Integer(0),
            "1 - eta lambda is an eigenvalue of the true update with its momentum, so the norm's slowest mode is exactly a per step; the "
            "momentum only adds modes beta_1^2 and beta_1 (1 - eta lambda) that die out first.",
        )  # fmt: skip
        fast = response.transition.charpoly(y).as_expr().subs(y, sym.beta1)
        yield Step(f"{rule.name}: the other mode", fast, sp.Integer(0), "beta_1 is the other eigenvalue.")


DERIVATION = Derivation("T3", "Transient of AdamW's norm", "section 3.2, eq. adamw_norm_convergence", for_rules("adamw"), steps)
