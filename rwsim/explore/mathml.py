"""The same expressions for people: MathML that the browser sets."""

import re
from dataclasses import replace
from typing import Any

import sympy as sp
from sympy.printing.mathml import MathMLPresentationPrinter

from rwsim.explore.formulas import time_constant
from rwsim.optimizers import RULES
from rwsim.page.html import Html, tag
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.arcsine import sign_moments
from rwsim.theory.forms import settled, square
from rwsim.theory.moments import stationary_moments

_omega_sq, _D_sq = sp.Symbol("E_omega2", positive=True), sp.Symbol("D", positive=True) ** 2


def _mean(of: str) -> str:
    return f"<mrow><mi>E</mi><mo>[</mo>{of}<mo>]</mo></mrow>"


def _square(of: str) -> str:
    return f"<msup>{of}<mn>2</mn></msup>"


_TILDE = "<mi>g&#x303;</mi>"
_TILDE_SQ = f"<msubsup>{_TILDE}<mi>c</mi><mn>2</mn></msubsup>"
# A weight and the one after the next step.
_BOTH = "<msub><mi>ω</mi><mi>c</mi></msub><msubsup><mi>ω</mi><mi>c</mi><mo>&#x2032;</mo></msubsup>"
_NORM = "<mrow><mo>‖</mo>{}<mo>‖</mo></mrow>"
# How symbols of moments are set.
_SET = {
    paper.grad_norm_sq.name: _mean(_square(_NORM.format("<mi>g</mi>"))),
    paper.unit_grad_norm_sq.name: _mean(_square(_NORM.format(_TILDE))),
    paper.unit_grad_l1.name: f"<mrow><munder><mo>∑</mo><mi>c</mi></munder><msqrt>{_mean(_TILDE_SQ)}</msqrt></mrow>",
    _omega_sq.name: _mean("<msubsup><mi>ω</mi><mi>c</mi><mn>2</mn></msubsup>"),
    "relative_update": "<mrow><msub><mi>η</mi><mi>g</mi></msub><mo>/</mo><mo>‖</mo><mi>ω</mi><mo>‖</mo></mrow>",
}  # fmt: skip


_EXACT = (
    "Of one coordinate, ω\N{PRIME} being its weight after the next step. ‖ω‖² is the sum over coordinates, "
    "ηᵣ = 2 arcsin(r/2) with r² = 2 - 2 E[ωω\N{PRIME}]/E[ω²]; "
)


class _Printer(MathMLPresentationPrinter):
    def _print_Symbol(self, expr: sp.Symbol, style: str = "plain") -> Any:
        if expr.name not in _SET:
            return super()._print_Symbol(expr, style)
        node = self.dom.createElement("mi")
        node.appendChild(self.dom.createTextNode(f"@{expr.name}@"))
        return node


def math(expression: sp.Expr) -> str:
    """Presentation MathML of an expression, without the ``math`` element.

    Example:
        >>> math(sym.eta * sym.lam)
        '<mrow><mi>&#951;</mi><mo>&InvisibleTimes;</mo><mi>&#955;</mi></mrow>'
    """
    text = _Printer().doprint(expression)
    return re.sub(r"<mi>@(\w+)@</mi>", lambda found: _SET[found[1]], text)


# Where a factor's sign is that of most settings: small steps, averages in between.
_USUAL = {sym.eta: 0.01, sym.lam: 0.01, sym.alpha: 0.5, sym.beta1: 0.5, sym.beta2: 0.6, sym.normalizer: 1}


def tidy(expression: sp.Expr) -> sp.Expr:
    """The same product with factors that are positive at usual settings.

    Example:
        >>> tidy(-sym.eta / (sym.alpha - 1))
        eta/(1 - alpha)
    """
    factors, sign = [], 1
    for factor in sp.Mul.make_args(expression):
        base, power = factor.as_base_exp()
        if base.is_Add and power.is_Integer and base.subs(_USUAL).is_negative:
            base, sign = -base, sign * (-1) ** abs(int(power))
        factors.append(base**power if base.is_Add else factor)
    return sp.Mul(sign, *factors)


def _power(name: str, expression: sp.Expr) -> Html:
    """An equation of the lowest power of a positive expression that is rational: a root over a fraction needs fonts that many lack."""
    for degree in (1, 2, 3, 4, 6):
        inside = sp.powdenest(sp.expand_power_base(expression**degree), force=True)
        if all(power.exp.is_Integer for power in inside.atoms(sp.Pow) if power.free_symbols - set(paper.GRADIENT)):
            return _equation(name if degree == 1 else f"<msup>{name}<mn>{degree}</mn></msup>", sp.factor(inside))
    return _equation(name, expression)


def _equation(left: str, right: sp.Expr) -> Html:
    content = Html(f"<math display='block'><mrow>{left}<mo>=</mo>{math(tidy(right))}</mrow></math>")
    return tag("div", content, class_="scroll formula", tabindex="0", role="region", aria_label="Formula")


def rule_formulas(name: str) -> Html:
    """Table 1's column, and the exact moments of one coordinate, at eps = 0."""
    rule, column = RULES[name], paper.TABLE_1[name]
    norm, eta = _NORM.format("<mi>ω</mi>"), "<msub><mi>η</mi><mi>{}</mi></msub>".format
    printed = [_power(left, right) for left, right in ((norm, column.norm), (eta("r"), column.rotation), (eta("g"), column.rms_update))]
    weight_sq = _SET[_omega_sq.name]
    turned = f"<mrow><mn>2</mn><mo>&#x2212;</mo><mn>2</mn>{_mean(_BOTH)}<mo>/</mo>{weight_sq}</mrow>"
    if settled(rule).direction == "sign":
        known = sign_moments(rule)
        moments: Any = replace(known, correlation=sp.Symbol("rho_k", real=True))
        said = "if gradients have one length; the page averages the arcsine over the lengths that a batch gives them"
        total = sp.Symbol(_omega_sq.name, positive=True)
        later = moments.keep * total + (moments.lag_one - moments.keep * moments.weight_sq)
        correlation = "<msub><mi>&#x3C1;</mi><mi>k</mi></msub>"
        derived = [_equation(weight_sq, moments.weight_sq), _equation(_mean(_BOTH), later), _equation(correlation, known.correlation)]
    else:
        moments = stationary_moments(rule)
        said = "with G = E[g²] of its gradient"
        derived = [
            _equation(weight_sq, moments.weight_sq.subs(sym.epsilon, 0)),
            _equation(turned, sp.factor((2 - 2 * moments.lag_one / moments.weight_sq).subs(sym.epsilon, 0))),
            _equation(_square(eta("g")), sym.C * moments.update_sq.subs(sym.epsilon, 0)),
        ]
        if settled(rule).square is not None:
            of_weight, of_grad = square(rule)
            derived.append(_equation(_square("<mi>D</mi>"), of_grad * sym.grad_sq + of_weight * _omega_sq))
            said += " and D the normalizer, the root of its second-moment average"
    forgets = [tag("h3", "Steps in which ‖ω‖² forgets its start"), _equation("<mi>τ</mi>", time_constant(rule))]
    exact = [tag("h3", "Exact"), tag("p", _EXACT, said, "."), derived]
    return tag("div", tag("div", tag("h3", "Paper, Table 1"), printed, forgets), tag("div", exact), class_="forms")
