"""Rotation per step and equilibrium norm as functions of hyperparameters alone: what a rotational optimizer needs to know.

A rotational optimizer sets the rotation itself, so its rate must not hang on the gradients it will meet. Table 1's rate and
the exact one are such functions for every rule whose updates have a size of their own or whose norm follows their size;
Adam+l2's is not (appendix E: it depends on E g~^2).
"""

import numpy as np
import sympy as sp

from rwsim.errors import InvalidArgument, UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.forms import settled
from rwsim.theory.moments import stationary_moments
from rwsim.theory.noise import IdealWalk
from rwsim.theory.rates import series, small, total_decay
from rwsim.theory.signs import sign_autocovariance

FORMS = ("paper", "exact")


def check_form(form: str) -> None:
    if form not in FORMS:
        raise InvalidArgument("rate", f"must be one of {', '.join(FORMS)}", form)


@cached
def relative_sq_form(rule: type[UpdateRule], form: str = "paper") -> sp.Expr | None:
    """r^2, the mean square of a step over that of the weights, in equilibrium; None where it is a sum without closed form.

    ``"paper"`` is Table 1, squared; for a rule that the table lacks the leading order in eta lambda of the exact form.
    ``"exact"`` is 2 (1 - E<w_t, w_t+1> / E||w||^2), to all orders in eta lambda.

    Raises:
        InvalidArgument: No such form.
        UnsupportedRule: The rotation depends on the gradients, or the theory cannot carry the rule.

    Example:
        >>> from rwsim.optimizers import AdamW, SGDM
        >>> relative_sq_form(AdamW)
        -2*eta*lambda*(beta_1 - 1)/(beta_1 + 1)
        >>> relative_sq_form(SGDM, "exact")
        2*eta*lambda/(alpha + 1)
    """
    check_form(form)
    column = paper.TABLE_1.get(rule.name)
    if form == "paper" and column is not None:
        return sp.factor(_free(rule, column.rotation) ** 2)
    if settled(rule).direction == "sign":
        return None
    moments = stationary_moments(rule)
    relative_sq = _free(rule, sp.factor(2 * (1 - moments.lag_one / moments.weight_sq)))
    return relative_sq if form == "exact" else _leading(relative_sq)


def rotation_form(rule: type[UpdateRule], form: str = "paper") -> sp.Expr | None:
    """eta_r, radians per step: r for ``"paper"``, 2 arcsin(r/2) for ``"exact"``; see `relative_sq_form`.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> rotation_form(SGDM)
        sqrt(2)*sqrt(eta)*sqrt(lambda)/sqrt(alpha + 1)
    """
    relative_sq = relative_sq_form(rule, form)
    if relative_sq is None:
        return None
    relative = sp.sqrt(relative_sq)
    return 2 * sp.asin(relative / 2) if form == "exact" else relative


@cached
def norm_sq_form(rule: type[UpdateRule], form: str = "paper") -> sp.Expr | None:
    """E||omega||^2 of a vector of `sym.C` coordinates in equilibrium, in weight units squared, at a negligible eps; None where it
    is a sum without closed form.

    Raises:
        InvalidArgument: No such form.
        UnsupportedRule: The norm depends on the size of the gradients.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> norm_sq_form(AdamW)
        C*eta/(2*lambda)
    """
    check_form(form)
    column = paper.TABLE_1.get(rule.name)
    if form == "paper" and column is not None:
        return sp.factor(_free(rule, column.norm) ** 2)
    if settled(rule).direction == "sign":
        return None
    # Without eps the root of the second moment is the gradient's own size, which cancels.
    weight_sq = stationary_moments(rule).weight_sq.subs({sym.normalizer: sp.sqrt(sym.grad_sq), sym.epsilon: 0})
    weight_sq = _free(rule, sp.factor(weight_sq))
    return sym.C * (weight_sq if form == "exact" else _leading(weight_sq))


def _leading(expression: sp.Expr) -> sp.Expr:
    """To leading order in eta lambda."""
    return sp.factor(series(expression, 0).subs(small, sym.eta * sym.lam))


def _free(rule: type[UpdateRule], expression: sp.Expr) -> sp.Expr:
    """The expression, which must hold nothing but hyperparameters."""
    if expression.has(sym.grad_sq, sym.normalizer, *paper.GRADIENT):
        raise UnsupportedRule(rule.name, "its equilibrium depends on the size of the gradients, not on hyperparameters alone")
    return expression


def rotation_of(rule: UpdateRule, form: str = "paper") -> float:
    """eta_r of a rule at its hyperparameters, radians per step, where `relative_sq_form` has none.

    A sign's updates correlate by the arcsine law: r^2 = 2 d / (1 + 2 sum gamma_k) to leading order in the decay d of a step,
    and `rwsim.theory.equilibrium` to all orders, under gradients of constant length.

    Example:
        >>> from rwsim.optimizers.signum import Signum
        >>> round(rotation_of(Signum(lr=1e-3, weight_decay=0.1, momentum=0.9)), 6)
        0.003881
    """
    check_form(form)
    if not rule.values.lr or not rule.values.weight_decay:
        return 0.0
    law = IdealWalk(2)
    if form == "exact":
        return predict_equilibrium(rule, law).exact.rotation
    return float(np.sqrt(2 * _decay(rule) / (1 + 2 * sign_autocovariance(rule, law)[0].sum())))


def norm_of(rule: UpdateRule, fan_in: int, form: str = "paper") -> float:
    """Equilibrium norm of `fan_in` coordinates at a rule's hyperparameters, where `norm_sq_form` has none.

    Example:
        >>> from rwsim.optimizers import Lion
        >>> round(norm_of(Lion(lr=1e-3, weight_decay=0.1), 128, "exact"), 4)
        5.3955
    """
    check_form(form)
    if not rule.values.lr or not rule.values.weight_decay:
        return 0.0
    law = IdealWalk(2)
    if form == "exact":
        return predict_equilibrium(rule, law).exact.norm * float(np.sqrt(fan_in / 2))
    step = float(sp.lambdify(sym.flat(sym.hyper_symbols(type(rule))), settled(type(rule)).sign_drive[0])(*sym.flat(rule.values)))
    long_run = 1 + 2 * sign_autocovariance(rule, law)[0].sum()
    return float(np.sqrt(fan_in * step**2 * long_run / (2 * _decay(rule))))


def _decay(rule: UpdateRule) -> float:
    """What a step's decay takes of a weight, in all."""
    form = sp.lambdify((*sym.flat(sym.hyper_symbols(type(rule))), sym.normalizer), total_decay(type(rule)))
    return -float(form(*sym.flat(rule.values), 1.0))
