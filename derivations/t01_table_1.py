"""T1: the twelve cells of Table 1, by the paper's own route.

For each optimizer: the size of one update (the energy of its kernel), the norm at which the total update contributions
of gradient and decay balance (derived in T2), and their ratio, the rotation.
"""

import sympy as sp

from derivations import balance
from derivations.balance import D, G, W
from derivations.core import Derivation, Step
from derivations.expectation import E, g, t
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import linear_response
from rwsim.theory.response import gradient_kernel


@cached
def update_sq(rule):
    """E of the squared update of one coordinate, unevaluated; under a sign the square of the sign itself."""
    response = linear_response(rule).settled()
    if response.direction == "sign":
        n = sp.Symbol("n", real=True, nonzero=True)
        return (response.sign_drive[0] * sp.sign(n)) ** 2
    return E(gradient_kernel(rule).output(g, t) ** 2)


def _rms(rule, printed):
    name, kind = rule.name, balance.kind(rule)
    if kind == "sign":
        yield Step(
            f"{name}: RMS update", sym.C * update_sq(rule), printed.rms_update**2,
            "Each of the C entries of a sign has square 1, so that the update has size eta in each coordinate.",
        )  # fmt: skip
    elif kind == "linear":
        yield Step(
            f"{name}: RMS update", update_sq(rule), (printed.rms_update**2).subs(paper.grad_norm_sq, G),
            "An update holds the gradients g_{t-k} with the momentum's weights. Gradients of different steps are uncorrelated, so the "
            "squared weights add up; summed over coordinates G becomes E||g||^2.",
        )  # fmt: skip
    else:
        yield Step(
            f"{name}: RMS update", update_sq(rule).subs(G, D**2), printed.rms_update**2 / sym.C * G / D**2,
            "As for SGDM, per coordinate and over the normalizer D = sqrt(v). With E g^2 = v each of the C coordinates contributes alike.",
        )  # fmt: skip


def _norm(rule, printed):
    name = rule.name
    if balance.kind(rule) != "coupled":
        yield Step(
            f"{name}: equilibrium norm", sp.sqrt(balance.full_norm_sq(rule)), printed.norm,
            "The norm that the balance of total contributions leaves unchanged (T2), to leading order in lambda.",
            relation="~", small=sym.lam,
        )  # fmt: skip
        return
    per_root_v = balance.full_norm_sq(rule) / D
    yield Step(
        f"{name}: one coordinate", per_root_v * D, sp.solve(sp.Eq(*balance.balanced(rule)), W)[0],
        "The balance of one coordinate, with E g_k^2 = v_k - lambda^2 E omega_k^2, is linear in E omega_k^2 and gives a multiple of "
        "sqrt(v_k).",
    )  # fmt: skip
    yield Step(
        f"{name}: equilibrium norm", (per_root_v * paper.unit_grad_l1 / sp.sqrt(W)).subs(W, printed.norm**2), printed.norm**2,
        "Assumption 4 (the decay is negligible in v) and scale invariance give sqrt(v_k) = sqrt(E g~_k^2 / W). Summed over coordinates, "
        "W is the stated multiple of <1, sqrt(E g~^2)> / sqrt(W), which the printed cube root solves.",
    )  # fmt: skip


def _rotation(rule, printed):
    norm_sq = balance.leading_norm_sq(rule)
    size = update_sq(rule).doit()
    if balance.kind(rule) == "linear":
        size = size.subs(G, paper.unit_grad_norm_sq / norm_sq)
    else:
        size = sym.C * size.subs(G, D**2)
    yield Step(
        f"{rule.name}: rotation", sp.sqrt(size / norm_sq), printed.rotation,
        "The expected rotation is the relative size of an update: RMS update over equilibrium norm"
        + (", with E||g||^2 = E||g~||^2 / E||omega||^2." if balance.kind(rule) == "linear" else "."),
    )  # fmt: skip


def steps(context):
    for rule in context.rules:
        printed = paper.TABLE_1[rule.name]
        yield from _rms(rule, printed)
        yield from _norm(rule, printed)
        yield from _rotation(rule, printed)


DERIVATION = Derivation(
    "T1", "Table 1: RMS update, rotation and equilibrium norm", "Table 1; section 3.2; appendices C, D, E",
    lambda rule: rule.name in paper.TABLE_1, steps,
)  # fmt: skip
