"""Diffusion rates, time constants, series and transients of any rule, derived from its linear response."""

import sympy as sp

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import linear_response, stationary_moments

small = sp.Symbol("x", positive=True)  # eta lambda


@cached
def total_response(rule: type[UpdateRule]) -> sp.Expr:
    """Sum of the changes that one unit of gradient ever makes to a coordinate, decay aside: the paper's u per unit of g.

    The buffers pass it on as B^k, whose sum is (I - B)^-1. Under a sign it is that of the linear part n/D,
    D = `sym.normalizer`.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> total_response(SGDM)
        eta/(alpha - 1)
    """
    transition, drive = linear_response(rule).settled().linearized().gradient_part()
    return _added_up(transition, drive)


@cached
def total_decay(rule: type[UpdateRule]) -> sp.Expr:
    """Sum of the changes that one step's decay ever makes, per unit of weight: the paper's d.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> total_decay(SGDM)
        eta*lambda/(alpha - 1)
    """
    response = linear_response(rule).settled().linearized()
    return _added_up(response.transition, response.decay_drive())


def _added_up(transition: sp.Matrix, into: sp.Matrix) -> sp.Expr:
    """What `into`, once added to the weight and the buffers, does to the weight in all: at once, and passed on as B^k."""
    buffers = transition[1:, 1:]
    passed_on = transition[0, 1:] * (sp.eye(buffers.rows) - buffers).inv() * into[1:, :]
    return sp.factor(into[0] + passed_on[0])


def diffusion_sq(rule: type[UpdateRule]) -> sp.Expr:
    """tau_g^2 of one coordinate: the long-run variance per step of the summed updates without decay (paper, Table 6).

    The squared total response times G = `sym.grad_sq`, because gradients are uncorrelated. Over E||omega||^2 it is the
    rotational rate tau_r^2. Unit: weights squared per step.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> diffusion_sq(SGDM)
        G*eta**2/(alpha - 1)**2
    """
    return total_response(rule) ** 2 * sym.grad_sq


@cached
def memory(rule: type[UpdateRule]) -> sp.Expr:
    """tau_g^2 over the mean square of one step's gradient part: what momentum adds up. 1 without it; free of lr and decay.

    Raises:
        UnsupportedRule: A sign rule, whose updates correlate by an arcsine law (`signs.sign_autocovariance`).

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> memory(SGDM)
        -(alpha + 1)/(alpha - 1)
    """
    return sp.factor(sp.simplify(diffusion_sq(rule) / stationary_moments(rule).update_sq))


@cached
def relaxation_rate(rule: type[UpdateRule]) -> sp.Expr:
    """Rate per step at which E||omega||^2 forgets its start, to leading order in lambda: -2 ln of the slowest eigenvalue.

    With p(mu) = det(mu I - A) and p(1) = 0 at lambda = 0, the eigenvalue leaves 1 as 1 - lambda (dp/dlambda)/(dp/dmu).
    Gradients keep their scale; under scale invariance the norm^4 of an SGD-like rule relaxes at twice this rate. The time
    constant is its inverse. Unit: 1/steps.

    Example:
        >>> from rwsim.optimizers import AdamW, SGDM
        >>> relaxation_rate(AdamW), relaxation_rate(SGDM)
        (2*eta*lambda, -2*eta*lambda/(alpha - 1))
    """
    response = linear_response(rule).settled()
    mu = sp.Symbol("mu")
    characteristic = (mu * sp.eye(len(response.states)) - response.transition).det()
    at_one = {mu: 1, sym.lam: 0}
    slope = sp.diff(characteristic, sym.lam).subs(at_one) / sp.diff(characteristic, mu).subs(at_one)
    return sp.factor(2 * sym.lam * sp.simplify(slope))


def series(expression: sp.Expr, order: int) -> sp.Expr:
    """A rational function of lambda expanded in `small` = eta lambda at fixed eta: its leading power and `order` more.

    Example:
        >>> from rwsim.optimizers import SGD
        >>> from rwsim.theory.moments import stationary_moments
        >>> series(stationary_moments(SGD).weight_sq, 1)
        G*eta**2/4 + G*eta**2/(2*x)
    """
    numerator, denominator = sp.fraction(sp.cancel(sp.together(expression.subs(sym.lam, small / sym.eta))))
    top, bottom = (sp.Poly(part, small).all_coeffs()[::-1] for part in (numerator, denominator))
    shift = [next(i for i, c in enumerate(part) if c != 0) for part in (top, bottom)]
    top, bottom = ([*part[i:], *[sp.Integer(0)] * (order + 1)] for part, i in zip((top, bottom), shift, strict=True))
    quotient: list[sp.Expr] = []
    for n in range(order + 1):
        known = sum((bottom[j] * quotient[n - j] for j in range(1, n + 1)), sp.Integer(0))
        quotient.append(sp.factor((top[n] - known) / bottom[0]))
    return sum((c * small ** (n + shift[0] - shift[1]) for n, c in enumerate(quotient)), sp.Integer(0))


@cached
def weight_sq_after(rule: type[UpdateRule], steps: int) -> sp.Expr:
    """E omega^2 of one coordinate after `steps` steps from weight `omega_0` and empty buffers, at a settled normalizer.

    Example:
        >>> from rwsim.optimizers import SGD
        >>> weight_sq_after(SGD, 1).coeff(sym.grad_sq)
        eta**2
    """
    response = linear_response(rule).settled()
    if response.direction == "sign":
        raise UnsupportedRule(rule.name, "the transient of a sign is an arcsine sum; `schedule.expected_path` evaluates it")
    n = len(response.states)
    p = sp.zeros(n, n)
    p[0, 0] = sp.Symbol("omega_0") ** 2
    for _ in range(steps):
        p = (response.transition * p * response.transition.T + response.drive * response.drive.T * sym.grad_sq).applyfunc(sp.expand)
    return p[0, 0]
