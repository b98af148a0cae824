"""Tables 1 and 6, and single equations, as Markdown with LaTeX, written from the derived forms: README and docs hold what this prints."""

import sympy as sp

from derivations.printed import BEYOND_DIFFUSION, DIFFUSION
from derivations.render import tex
from rwsim.optimizers import RULES
from rwsim.theory import paper, rates
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response, stationary_moments


def _tex(expression: sp.Expr) -> str:
    return f"${sp.latex(expression)}$".replace("|", r"\vert ")


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_1() -> str:
    """The paper's twelve cells (T1 derives each): RMS update, rotation, norm."""
    rows = [[name, _tex(column.rms_update), _tex(column.rotation), _tex(column.norm)] for name, column in paper.TABLE_1.items()]
    return _rows(["optimizer", "RMS update", "rotation (rad/step)", "norm"], rows)


def table_6() -> str:
    """Diffusion rates (T4 derives each); adam_l2 and lion are beyond the paper, Lion's linearized."""
    forms = {**DIFFUSION, **BEYOND_DIFFUSION}
    rotational = {name: sp.sqrt(2 * sym.eta * sym.lam) if tau_r is None else tau_r for name, (_, tau_r) in forms.items()}
    rows = [[name, _tex(tau_g), _tex(rotational[name])] for name, (tau_g, _) in forms.items()]
    return _rows(["optimizer", "diffusion of a parameter", "of a direction"], rows)


def exact_forms() -> str:
    """Every rule with a rational form: exact E omega^2 and squared relative update of a coordinate, and how fast it settles."""
    rows = []
    for name, rule in RULES.items():
        if linear_response(rule).direction == "sign":
            continue
        moments = stationary_moments(rule)
        weight_sq, relative_sq = (
            sp.factor(e.subs(sym.epsilon, 0)) for e in (moments.weight_sq, 2 * (1 - moments.lag_one / moments.weight_sq))
        )
        if max(sp.count_ops(weight_sq), sp.count_ops(relative_sq)) > 90:
            rows.append([name, f"too long for a table: `rwsim.theory.moments.stationary_moments({rule.__name__})`", "", ""])
            continue
        rows.append([name, _tex(weight_sq), _tex(relative_sq), _tex(rates.relaxation_rate(rule).subs(sym.epsilon, 0))])
    return _rows(["rule", "norm² of a coordinate", "squared relative update", "relaxation rate (1/steps)"], rows)


def equation(derivation: str, step: str) -> str:
    """The line of one step, for the paper's rules, as a displayed formula.

    Raises:
        ValueError: No such step.

    Example:
        >>> print(equation("T3", "adamw: a is a square"))
        $$
        \\eta^{2} \\lambda^{2} - 2 \\eta \\lambda + 1 = \\left(- \\eta \\lambda + 1\\right)^{2}
        $$
    """
    from derivations import DERIVATIONS, PAPER_RULES, Context

    found = DERIVATIONS[derivation]
    for each in found.steps(Context(tuple(rule for rule in PAPER_RULES if found.relevant(rule)))):
        if each.name == step:
            return f"$$\n{tex(each)}\n$$"
    raise ValueError(f"{derivation} has no step {step!r}")
