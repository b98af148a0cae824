"""T7: what errors of the two main assumptions do to the predictions for AdamW (lambda_err, C_err)."""

import sympy as sp

from derivations import balance
from derivations.balance import D, W
from derivations.core import Derivation, Step, for_rules
from derivations.expectation import E, g, t
from derivations.t01_table_1 import update_sq
from rwsim.theory import paper
from rwsim.theory import symbols as sym

lam_err, c_err = sp.symbols("lambda_err C_err", positive=True)


def _balance_with(rule, radial, scaled_sq):
    """The norm^2 that balances when the decay is multiplied by `radial` and E||g/sqrt(v)||^2 is C times `scaled_sq`."""
    u, d = balance.contributions(rule)
    after = E((balance.omega * (1 + radial * d) + u * g[t]) ** 2, (balance.omega, W)).doit()
    vector = after.subs(sym.grad_sq, D**2 * sym.C * scaled_sq)
    return sp.solve(sp.expand(vector - W), W)[0]


def steps(context):
    for rule in context.rules:
        printed = paper.TABLE_1[rule.name]
        size = (sym.C * update_sq(rule).doit()).subs(sym.grad_sq, D**2)
        with_decay = _balance_with(rule, lam_err, 1)
        yield Step(
            f"{rule.name}: norm with lambda_err", sp.sqrt(with_decay), printed.norm / sp.sqrt(lam_err),
            "A radial gradient multiplies the decay's contribution by lambda_err = lambda_e / lambda.", relation="~", small=sym.lam,
        )  # fmt: skip
        yield Step(
            f"{rule.name}: rotation with lambda_err", sp.sqrt(size / with_decay), printed.rotation * sp.sqrt(lam_err),
            "The size of an update is unchanged, so the rotation changes inversely to the norm.", relation="~", small=sym.lam,
        )  # fmt: skip
        with_size = _balance_with(rule, 1, c_err)
        yield Step(
            f"{rule.name}: norm with C_err", sp.sqrt(with_size), printed.norm * sp.sqrt(c_err),
            "C enters through the square: E||g/sqrt(v)||^2 = C C_err. (The definition is printed without the square, see slips.)",
            relation="~", small=sym.lam,
        )  # fmt: skip
        yield Step(
            f"{rule.name}: rotation with C_err", sp.sqrt(size * c_err / with_size), printed.rotation,
            "The update grows with the norm, so that the rotation does not feel C_err at all.", relation="~", small=sym.lam,
        )  # fmt: skip


DERIVATION = Derivation("T7", "Error factors for real networks", "appendix G", for_rules("adamw"), steps)
