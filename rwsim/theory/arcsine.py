"""Sign rules exactly: stationary moments as arcsine sums, evaluated to any precision with a stated error bound.

For a Gaussian argument n_t of autocorrelation rho_k, E[sign n_t sign n_{t+k}] = (2/pi) arcsin rho_k, so that with
w' = rho w + b sign(n)

    E w^2 = b^2 / (1 - rho^2) (1 + (4/pi) sum_k rho^k arcsin rho_k),    E[w w'] = rho E w^2 + b^2 (2/pi) sum_k rho^(k-1) arcsin rho_k.
"""

from dataclasses import dataclass

import mpmath
import sympy as sp

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import linear_response
from rwsim.theory.response import argument_kernel, lag


@dataclass(frozen=True)
class SignMoments:
    """The pieces of the two sums, in symbols. `correlation` is rho_k as a function of `response.lag`."""

    keep: sp.Expr
    step: sp.Expr
    correlation: sp.Expr

    @property
    def weight_sq(self) -> sp.Expr:
        """E w^2 of one coordinate, the sum unevaluated."""
        total = sp.Sum(self.keep**lag * sp.asin(self.correlation), (lag, 1, sp.oo))
        return self.step**2 / (1 - self.keep**2) * (1 + 4 / sp.pi * total)

    @property
    def lag_one(self) -> sp.Expr:
        """E[w_t w_{t+1}] of one coordinate, the sum unevaluated."""
        total = sp.Sum(self.keep ** (lag - 1) * sp.asin(self.correlation), (lag, 1, sp.oo))
        return self.keep * self.weight_sq + self.step**2 * 2 / sp.pi * total


@cached
def sign_moments(rule: type[UpdateRule]) -> SignMoments:
    """Read off the rule: one momentum buffer under one sign.

    Raises:
        UnsupportedRule: No sign, or an argument that is not one geometric kernel.

    Example:
        >>> from rwsim.optimizers import Signum
        >>> sp.simplify(sign_moments(Signum).correlation)
        alpha**k
    """
    response = linear_response(rule).settled()
    kernel = argument_kernel(rule)
    rate = sp.simplify(kernel.tail.subs(lag, lag + 1) / kernel.tail) if kernel.tail != 0 else sp.Integer(0)
    if rate.has(lag):
        raise UnsupportedRule(rule.name, "the sign's argument is not one geometric average")
    first = kernel.tail.subs(lag, 1) if kernel.tail != 0 else sp.Integer(0)
    # sum_{j>=1} a_j a_{j+k} = rate^k sum_{j>=1} a_j^2, a geometric series.
    past = first**2 / (1 - rate**2)
    correlation = (kernel.head * kernel.tail + past * rate**lag) / (kernel.head**2 + past)
    return SignMoments(response.transition[0, 0], response.sign_drive[0], sp.simplify(correlation))


def evaluate(rule: UpdateRule, digits: int = 30) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    """(E w^2, E[w w'], bound) of one coordinate in the ideal walk, to `digits` digits.

    Summed until the bound on what is left is below 10^-digits of the first sum: |arcsin rho_k| <= (pi/2) |rho_k|, and rho_k
    falls geometrically, so that the tail after K terms is at most (pi/2) rho_K keep^K q / (1 - q), q = keep rho_{K+1}/rho_K.

    Returns:
        The two moments and the bound on the relative error of either.

    Example:
        >>> from rwsim.optimizers import Lion
        >>> value, _, bound = evaluate(Lion(lr=1e-2, weight_decay=1.0, betas=(0.0, 0.5)))
        >>> mpmath.nstr(value, 12), bool(bound < 1e-30)
        ('0.00502512562814', True)
    """
    moments = sign_moments(type(rule))
    names = sym.flat(sym.hyper_symbols(type(rule)))
    with mpmath.workdps(digits + 10):
        values = [mpmath.mpf(repr(float(v))) for v in sym.flat(rule.values)]
        keep, step = (sp.lambdify(names, e, "mpmath")(*values) for e in (moments.keep, moments.step))
        correlation = sp.lambdify((*names, lag), moments.correlation, "mpmath")
        total, k, left = mpmath.mpf(0), 0, mpmath.mpf(1)
        while left > mpmath.mpf(10) ** -digits * (1 + total):
            k += 1
            rho, after = correlation(*values, k), correlation(*values, k + 1)
            total += keep**k * mpmath.asin(rho)
            if rho == 0:
                break
            q = keep * after / rho
            left = mpmath.pi / 2 * abs(rho) * keep**k * q / (1 - q)
        weight_sq = step**2 / (1 - keep**2) * (1 + 4 / mpmath.pi * total)
        return (
            weight_sq,
            keep * weight_sq + step**2 * 2 / mpmath.pi * total / keep,
            4 / mpmath.pi * left / keep if rho != 0 else mpmath.mpf(0),
        )
