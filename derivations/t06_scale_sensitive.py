"""T6: a radial gradient acts as a weight decay: lambda_e = lambda + lambda_u, in norm and in rotation."""

import sympy as sp

from derivations import balance
from derivations.core import Derivation, Step, for_rules
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response, stationary_moments

lam_u = sp.Symbol("lambda_u", positive=True)


def steps(context):
    for rule in context.rules:
        response = linear_response(rule).settled()
        radial = response.transition + response.drive * sp.Matrix([[lam_u] + [0] * (len(response.states) - 1)])
        effective = response.transition.subs(sym.lam, sym.lam + lam_u)
        for i, row in enumerate(response.states):
            for j, column in enumerate(response.states):
                yield Step(
                    f"{rule.name}: {row} from {column}", radial[i, j], effective[i, j],
                    "A gradient lambda_u omega + g_perp put into the update equals the update with decay lambda + lambda_u: the momentum "
                    "carries both alike, entry by entry of the transition.",
                )  # fmt: skip
        lam_e = sp.Symbol("lambda_e", positive=True)
        printed = paper.TABLE_1[rule.name]
        norm = sp.sqrt(balance.full_norm_sq(rule)).subs(sym.lam, sym.lam + lam_u).subs(lam_u, lam_e - sym.lam)
        yield Step(
            f"{rule.name}: norm", norm, printed.norm.subs(sym.lam, lam_e),
            "So the norm is the table's with lambda_e, to leading order; the orthogonal part alone drives it.",
            relation="~", small=lam_e,
        )  # fmt: skip
        yield Step(
            f"{rule.name}: rotation", sp.sqrt(2 * (1 - _cosine(rule).subs(sym.lam, sym.lam + lam_u))),
            printed.rotation.subs(sym.lam, sym.lam + lam_u),
            "And the rotation, exactly: what turns the weight is the total of both radial parts.",
        )  # fmt: skip
        u, d = balance.contributions(rule)
        yield Step(
            f"{rule.name}: lambda_u from the contribution", sym.lam * (u * lam_u) / d, lam_u,
            "In terms of total contributions lambda_u = lambda E[u_par] / d: the momentum's factor 1/(1 - alpha) is in both and cancels.",
        )  # fmt: skip


def _cosine(rule):
    moments = stationary_moments(rule)
    return moments.lag_one / moments.weight_sq


DERIVATION = Derivation("T6", "Scale-sensitive weights: effective weight decay", "section 3.4, appendix H", for_rules("sgdm"), steps)
