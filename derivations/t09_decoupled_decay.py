"""T9: the original decoupled AdamW (decay not multiplied by eta): eta_r depends on lambda only, eta_g on eta only."""

import sympy as sp

from derivations import balance
from derivations.balance import D
from derivations.core import Derivation, Step, for_rules
from derivations.t01_table_1 import update_sq
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response


def steps(context):
    for rule in context.rules:
        original = {sym.lam: sym.lam / sym.eta}
        keep = linear_response(rule).settled().transition[0, 0]
        yield Step(
            f"{rule.name}: the original decay", keep.subs(original), 1 - sym.lam,
            "Loshchilov and Hutter write lambda where torch writes eta lambda: the same walk with lambda / eta for lambda.",
        )  # fmt: skip
        size = (sym.C * update_sq(rule).doit()).subs(sym.grad_sq, D**2)
        eta_g = sp.simplify(sp.sqrt(size).subs(original))
        eta_r_exact = sp.simplify(sp.sqrt(size / balance.full_norm_sq(rule)).subs(original))
        eta_r = sp.simplify(sp.sqrt(size / balance.leading_norm_sq(rule)).subs(original))
        yield Step(f"{rule.name}: eta_g without lambda", sp.diff(eta_g, sym.lam), sp.Integer(0), "No decay in the RMS update.")
        yield Step(
            f"{rule.name}: eta_g grows with eta", sp.diff(eta_g, sym.eta), eta_g / sym.eta, "It is proportional to the learning rate."
        )  # fmt: skip
        yield Step(
            f"{rule.name}: eta_r without eta", sp.diff(eta_r, sym.eta), sp.Integer(0),
            "The learning rate cancels between update and norm.",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: also before the approximation", sp.diff(eta_r_exact, sym.eta), sp.Integer(0),
            "To all orders of the balance.",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: eta_r grows with the root of lambda", sym.lam * sp.diff(eta_r, sym.lam), eta_r / 2,
            "Two separate knobs, hence the separable hyperparameter space.",
        )  # fmt: skip
        yield Step(
            f"{rule.name}: torch's form is not separable", sp.diff(sp.sqrt(size / balance.leading_norm_sq(rule)), sym.eta), sp.Integer(0),
            "With the decay multiplied by eta the rotation depends on eta.", relation="!=",
        )  # fmt: skip


DERIVATION = Derivation("T9", "Original decoupled AdamW: separate knobs", "section 5.3", for_rules("adamw"), steps)
