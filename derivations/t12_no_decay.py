"""T12: without decay the rotation falls as t^(-1/2), not exponentially, for every rule."""

import sympy as sp

from derivations import balance
from derivations.balance import D, W
from derivations.core import Derivation, Step, for_rules
from derivations.expectation import E, g, t
from derivations.printed import TRANSIENT, TRANSIENT_OF, index, start_sq
from derivations.t01_table_1 import update_sq
from rwsim.theory import symbols as sym
from rwsim.theory.paper import unit_grad_norm_sq

time = sp.Symbol("t", positive=True)


def _grown(rule):
    """E||omega_t||^2 of the recurrence at lambda = 0, for long times, and the increment it comes from."""
    u, d = balance.contributions(rule)
    after = E((balance.omega * (1 + d.subs(sym.lam, 0)) + u * g[t]) ** 2, (balance.omega, W)).doit()
    if balance.kind(rule) == "linear":
        return after.subs(sym.grad_sq, unit_grad_norm_sq / W)
    if balance.kind(rule) == "sign":
        return W + balance.eliminate(rule, after - W)
    return W + sym.C * (after - W).subs(sym.grad_sq, D**2)


def _gain(rule):
    """What the recurrence adds per step, to E||omega||^2, or to its square where gradients shrink with the norm."""
    new = _grown(rule)
    return sp.limit(sp.expand(new**2 - W**2), W, sp.oo) if balance.kind(rule) == "linear" else sp.simplify(new - W)


def rotation_without_decay(rule):
    """RMS update over norm at time t, from the start norm W_0."""
    gain, size = _gain(rule), update_sq(rule).doit()
    if balance.kind(rule) == "linear":
        norm_sq = sp.sqrt(start_sq**2 + gain * time)
        return sp.sqrt(size.subs(sym.grad_sq, unit_grad_norm_sq / norm_sq) / norm_sq)
    return sp.sqrt(sym.C * size.subs(sym.grad_sq, D**2) / (start_sq + gain * time))


def steps(context):
    for rule in context.rules:
        new, gain = _grown(rule), _gain(rule)
        if balance.kind(rule) == "linear":
            yield Step(
                f"{rule.name}: growth", new**2 - W**2, gain,
                "Without decay the norm^4 gains a constant per step once it is large: gradients shrink as the norm grows.",
                relation="~", small=W, towards=sp.oo,
            )  # fmt: skip
        else:
            yield Step(f"{rule.name}: growth", new, W + gain, "Without decay the norm^2 gains E||u||^2, a constant, at every step.")
        slope = sp.simplify(sp.diff(sp.log(rotation_without_decay(rule)), time))
        yield Step(
            f"{rule.name}: the rotation falls as t^(-1/2)", slope * time, -sp.Rational(1, 2),
            "d log(rotation) / d log t tends to -1/2.", relation="~", small=time, towards=sp.oo,
        )  # fmt: skip
        yield Step(
            f"{rule.name}: no exponential", -1 / slope, 2 * time,
            "An exponential would have a constant -rotation / (d rotation / dt); it grows as 2 t instead.",
            relation="~", small=time, towards=sp.oo,
        )  # fmt: skip
        if rule.name in TRANSIENT_OF:
            x = sp.Symbol("x", positive=True)
            printed = TRANSIENT.subs(sym.lam, x / sym.eta).subs(index, 7)
            yield Step(
                f"{rule.name}: the paper's own solution", printed - start_sq, (gain * 7),
                "The printed transient (T3) has the same limit: at step 7, as eta lambda -> 0 with W_0 = 0 it is 7 times the gain.",
                relation="~", small=x,
            )  # fmt: skip


DERIVATION = Derivation("T12", "Without decay the rotation falls as t^(-1/2)", "section 5.1, appendix J", for_rules(), steps)
