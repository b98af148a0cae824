"""What a rule's settled recurrence says as formulas, and formulas as numpy functions: per coordinate, of hyperparameters and normalizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy as sp
from sympy.printing.numpy import NumPyPrinter

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import LinearResponse, linear_response, stationary_moments


@cached
def settled(rule: type[UpdateRule]) -> LinearResponse:
    return linear_response(rule).settled()


class _Reciprocals(NumPyPrinter):
    """numpy has squares and reciprocals as such, but x**(-2) goes by logarithms."""

    def _print_Pow(self, expr: sp.Pow, rational: bool = False) -> str:
        if expr.exp.is_Integer and expr.exp < -1:
            return f"(1/({self._print(expr.base)})**{-expr.exp})"
        return super()._print_Pow(expr, rational)


@cached
def numeric(rule: type[UpdateRule], expressions: tuple[sp.Expr, ...], extra: tuple[sp.Symbol, ...]) -> Callable[..., list]:
    """numpy function of (hyperparameters in declaration order, *extra) for a tuple of expressions."""
    return sp.lambdify((*sym.flat(sym.hyper_symbols(rule)), *extra), list(expressions), modules="numpy", cse=True, printer=_Reciprocals)


@dataclass(frozen=True)
class Forms:
    """Per coordinate: a factor of hyperparameters alone and one that depends on the normalizer D.

    Attributes:
        weight: E omega^2 / E g_c^2.
        turn: (E omega^2 - lag one) / E omega^2, free of the cancellation and of the poles of its parts.
        update: E of the squared update / E g_c^2.
        slope: d log weight / d log D.
    """

    weight: tuple[sp.Expr, sp.Expr]
    turn: tuple[sp.Expr, sp.Expr]
    update: tuple[sp.Expr, sp.Expr]
    slope: sp.Expr


@cached
def forms_of(rule: type[UpdateRule]) -> Forms:
    moments, root = stationary_moments(rule), sym.normalizer
    weight, turn, update = (
        sp.factor(form.subs(sym.grad_sq, 1)).as_independent(root, as_Add=False)
        for form in (moments.weight_sq, 1 - moments.lag_one / moments.weight_sq, moments.update_sq)
    )
    slope = sp.factor(root * sp.diff(weight[1], root) / weight[1])
    weight, turn, update = ((scale, _collected(shape)) for scale, shape in (weight, turn, update))
    return Forms(weight, turn, update, _collected(slope))


def _collected(form: sp.Expr) -> sp.Expr:
    """Sums by powers of the normalizer, the one array: what remains is arithmetic on numbers."""
    return form.replace(lambda e: e.is_Add, lambda e: sp.collect(sp.expand(e), sym.normalizer))


@cached
def stability(rule: type[UpdateRule]) -> tuple[sp.Expr, ...]:
    """Coefficients, highest first, of the characteristic polynomial of the transition in w, z = (1 + w)/(1 - w): |z| < 1 is
    Re w < 0. Symbolic, since lr times decay would drown in the rounding of 1 - lr decay."""
    transition = settled(rule).transition
    n, w = transition.rows, sp.Symbol("w")
    terms = sum(c * (1 + w) ** (n - k) * (1 - w) ** k for k, c in enumerate(transition.charpoly().all_coeffs()))
    numerator, denominator = sp.together(terms).as_numer_denom()
    return tuple(_collected(sp.factor(c / denominator)) for c in sp.Poly(numerator, w).all_coeffs())


@cached
def square(rule: type[UpdateRule]) -> tuple[sp.Expr, sp.Expr]:
    """The normalizer's shares of E omega^2 and of E g_c^2."""
    response = settled(rule)
    form, of_grad = response.square or (sp.zeros(1, 1), sp.Integer(0))
    if form != sp.diag(form[0, 0], *[0] * (form.rows - 1)):
        raise UnsupportedRule(rule.name, "the normalizer averages momentum")
    return form[0, 0], of_grad


@cached
def bends(rule: type[UpdateRule]) -> bool:
    """Whether stability depends on the normalizer."""
    return any(c.has(sym.normalizer) for c in stability(rule))


def stable(coefficients: list[Any]) -> Any:
    """Whether all roots of a real polynomial lie in the left half plane (Routh); entries may be arrays."""
    upper, lower = coefficients[0::2], coefficients[1::2]
    verdict = np.asarray(upper[0] > 0)
    while lower:
        verdict = verdict & (lower[0] > 0)
        ratio = upper[0] / lower[0]
        upper, lower = lower, [x - ratio * y for x, y in zip(upper[1:], [*lower[1:], 0.0], strict=False)]
    return verdict
