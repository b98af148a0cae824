"""T4: diffusion rates of Table 6, extended to Lion and Adam+l2, and why they are rates of diffusion."""

import sympy as sp

from derivations import balance, signs
from derivations.balance import D, G
from derivations.checks import settle
from derivations.core import Derivation, Step, for_rules
from derivations.expectation import E, g, t
from derivations.printed import BEYOND_DIFFUSION, DIFFUSION
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response
from rwsim.theory.response import gradient_kernel, lag


def contribution_sq(rule):
    """E||u||^2 of the vector."""
    u, _ = balance.contributions(rule)
    match balance.kind(rule):
        case "linear":
            return u**2 * paper.grad_norm_sq
        case "sign":
            return balance.eliminate(rule, u**2 * G)
        case _:
            return sym.C * u**2 * D**2


def _long_run(rule):
    """gamma_0 + 2 sum gamma_k of the updates, each autocovariance by expectation."""
    kernel = gradient_kernel(rule)
    now = kernel.output(g, t)
    lagged = sp.factor(sp.powsimp(sp.expand(settle(E(now * kernel.output(g, t + lag))))))
    return E(now**2) + 2 * sp.Sum(lagged, (lag, 1, sp.oo))


def steps(context):
    for rule in context.rules:
        name, (u, _) = rule.name, balance.contributions(rule)
        yield Step(
            f"{name}: long-run variance per step", _long_run(rule), u**2 * G,
            "Without decay the variance of a sum of T updates grows as T times the sum of their autocovariances, and that is the square "
            "of the total contribution: the diffusion rate per step"
            + (", of the sign's linear part." if balance.kind(rule) == "sign" else "."),
        )  # fmt: skip
        claim = DIFFUSION.get(name) or BEYOND_DIFFUSION.get(name)
        if claim is None:
            continue
        where = "Table 6" if name in DIFFUSION else "Beyond Table 6"
        tau_g, tau_r = claim
        yield Step(f"{name}: tau_g", sp.sqrt(contribution_sq(rule)), tau_g, f"{where}: the size of one gradient's total contribution.")
        norm_sq = balance.leading_norm_sq(rule)
        size = contribution_sq(rule).subs(paper.grad_norm_sq, paper.unit_grad_norm_sq / norm_sq)
        if tau_r is not None:
            yield Step(f"{name}: tau_r", sp.sqrt(size / norm_sq), tau_r, f"{where}: relative to the leading equilibrium norm.")
        else:
            yield Step(
                f"{name}: tau_r", sp.sqrt(size / norm_sq), sp.sqrt(2 * sym.eta * sym.lam),
                "The linearized rotational diffusion rate is AdamW's, whatever the averages: with decoupled decay tau_g^2 = 2 eta lambda "
                "times the norm^2.",
            )  # fmt: skip
        if balance.kind(rule) == "sign":
            gain = linear_response(rule).settled().sign_drive[0]
            yield Step(
                f"{name}: tau_g without linearizing", sym.C * gain**2 * (1 + 2 * (2 / sp.pi) * signs.ARCS),
                signs.excess(rule) * contribution_sq(rule),
                "The sign's own autocovariances, 1 and (2/pi) arcsin rho_k, added up (A = sum arcsin rho_k). It exceeds the linear part by "
                "the factor by which the norm^2 does (T2).",
            )  # fmt: skip


DERIVATION = Derivation("T4", "Diffusion rates", "Table 6, appendix L", for_rules(), steps)
