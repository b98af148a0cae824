"""The sign of a momentum, for T2: its linear part is the paper's result, the rest does not vanish as lambda -> 0."""

import math
from functools import partial
from itertools import pairwise

import sympy as sp

from derivations import balance
from derivations.checks import settle
from derivations.core import Step
from derivations.expectation import E, g, t
from derivations.printed import ARGUMENT_SQ, CORRELATION, SIGN_U_SQ, STATED_EXCESS
from derivations.sample import points
from rwsim.errors import UnsupportedRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import linear_response, lyapunov
from rwsim.theory.response import argument_kernel, lag, through_buffers
from rwsim.theory.symbols import beta1, beta2

ARCS = sp.Symbol("A", positive=True)  # sum over k >= 1 of arcsin rho_k
_z = sp.Symbol("z", real=True)


@cached
def correlation(rule):
    """E[n_t n_{t+k}] / E n_t^2 of the sign's argument."""
    kernel = argument_kernel(rule)
    shifted = settle(E(kernel.output(g, t) * kernel.output(g, t + lag)))
    return sp.factor(shifted / settle(balance.argument_sq(rule)))


def arcsine_mean(theta):
    """Mean of sign(cos phi) sign(cos(phi - theta)) over a full turn, arc by arc between the changes of sign."""
    ends = [theta - sp.pi / 2, sp.pi / 2, sp.pi / 2 + theta, 3 * sp.pi / 2, 3 * sp.pi / 2 + theta]
    arcs = [(a, b, (a + b) / 2) for a, b in pairwise(ends)]
    return sp.Add(*((b - a) * sp.sign(sp.cos(mid)) * sp.sign(sp.cos(mid - theta)) for a, b, mid in arcs)) / (2 * sp.pi)


@cached
def by_state(rule):
    """E n_t^2 and E[n_t n_{t+k}] from the second moment of the buffers: another way than the sums over gradients."""
    response = linear_response(rule).settled()
    match response.argument:
        case (h, own):
            pass
        case _:
            raise UnsupportedRule(rule.name, "it has no sign")
    row, buffers, drive = h[0, 1:], response.transition[1:, 1:], response.drive[1:, :]
    moment = lyapunov(buffers, drive)
    carried = buffers * moment * row.T + own * drive * sym.grad_sq
    return (row * moment * row.T)[0] + own**2 * sym.grad_sq, through_buffers(row, buffers, carried)


@cached
def excess(rule):
    """lim E||omega||^2 / (the norm^2 of the balance) as eta lambda -> 0, with ARCS for the sum of arcsin rho_k over lags."""
    response = linear_response(rule).settled()
    keep, gain = response.transition[0, 0], response.sign_drive[0]
    small = sp.limit((1 - keep**2) / sym.lam, sym.lam, 0) * sym.lam
    return sp.simplify(sym.C * gain**2 / small / balance.leading_norm_sq(rule)) * (1 + 2 * (2 / sp.pi) * ARCS)


def excess_at(rule, betas):
    """`excess` as a number; the sum is cut where the kernel has died out."""
    at = {beta1: betas[0], beta2: betas[1]}
    term = sp.lambdify(lag, sp.asin(correlation(rule).subs(at)), "math")
    reach = math.ceil(math.log(1e-12) / math.log(betas[1]))
    return float(excess(rule).subs(at).subs(ARCS, math.fsum(term(k) for k in range(1, reach))))


def _stated_numbers(rule):
    for betas, text in STATED_EXCESS.get(rule.name, {}).items():
        yield Step(
            f"{rule.name}: norm^2 over the paper's at betas {betas}", excess(rule), sp.Symbol(text),
            "kappa (pi/2) (1 + (4/pi) A) with A = sum arcsin rho_k: the limit eta lambda -> 0, with the sum carried out in floating point.",
            relation="≈", evaluate=partial(excess_at, rule, betas),
        )  # fmt: skip


def steps(rule):
    sigma, n = sp.symbols("sigma n", positive=True)
    size, lagged = by_state(rule)
    density = sp.exp(-(n**2) / (2 * sigma**2)) / sp.sqrt(2 * sp.pi * sigma**2)
    yield Step(
        f"{rule.name}: linear part of a sign", 2 * sp.Integral(n * density, (n, 0, sp.oo)) / sigma**2, 1 / sp.sqrt(sp.pi / 2 * sigma**2),
        "E[n sign n] / E n^2 for a normal n: the best linear stand-in for the sign is n/D with D = sqrt(pi/2) times n's deviation.",
    )  # fmt: skip
    yield Step(
        f"{rule.name}: size of the argument", balance.argument_sq(rule), ARGUMENT_SQ.get(rule.name, size),
        "The momentum's weights squared and added"
        + ("; appendix D prints the result correctly." if rule.name in ARGUMENT_SQ else ": what the buffers' second moment gives."),
    )  # fmt: skip
    if rule.name in SIGN_U_SQ:
        u, _ = balance.contributions(rule)
        yield Step(
            f"{rule.name}: squared total contribution", balance.eliminate(rule, u**2 * sym.grad_sq), SIGN_U_SQ[rule.name],
            "The weights of one gradient in all arguments add up to 1. Appendix D prints eta where eta^2 is meant.",
        )  # fmt: skip
    theta = sp.acos(sp.tanh(_z))
    yield Step(
        f"{rule.name}: arcsine law", arcsine_mean(theta), 2 / sp.pi * sp.asin(sp.tanh(_z)),
        "Two normal variables of correlation cos(theta) are the projections of a direction uniform on the circle; their signs differ on "
        "two arcs of length theta. So E[sign sign] = (2/pi) arcsin of the correlation, here tanh z.",
        symbolic=False,
    )  # fmt: skip
    rho = correlation(rule)
    yield Step(
        f"{rule.name}: correlation of the argument", rho, CORRELATION.get(rule.name, lagged / size),
        "E[n_t n_{t+k}] / E n_t^2, by expectation over the gradients that the two arguments share.",
    )  # fmt: skip
    yield Step(
        f"{rule.name}: the linear part alone", 1 + 2 * sp.Sum(rho, (lag, 1, sp.oo)), argument_kernel(rule).total ** 2 * sym.grad_sq / size,
        "With arcsin rho replaced by rho the correlations add up to the squared sum of the weights over the sum of their squares: the "
        "balance of total contributions, of the linear part.",
    )  # fmt: skip
    keep, r = sp.symbols("rho r", positive=True)
    signs = lyapunov(sp.Matrix([[keep, r], [0, r]]), sp.Matrix([1, 1]))[0, 0].subs(sym.grad_sq, 1 - r**2)
    keep_in, r_in = sp.symbols("a b", positive=True)  # any two numbers in (0, 1), written a/(1+a), b/(1+b)
    inside = {keep: keep_in / (1 + keep_in), r: r_in / (1 + r_in)}
    product = inside[keep] * inside[r]
    yield Step(
        f"{rule.name}: norm from autocovariances", signs.subs(inside), (1 + 2 * product / (1 - product)) / (1 - inside[keep] ** 2),
        "omega' = rho omega + s has E omega^2 = (gamma_0 + 2 sum rho^k gamma_k) / (1 - rho^2); checked on gamma_k = r^k, to which any "
        "mixture of decaying autocovariances adds up linearly.",
    )  # fmt: skip
    if all(sp.N(rho.subs(point)) > 0 for point in points(rho.free_symbols, 3)):
        yield from _remainder(rule, rho)
    for memory in (s for s in sym.flat(sym.hyper_symbols(rule)) if rho.subs(s, 0) == 0):
        yield Step(
            f"{rule.name}: without momentum the norm^2 is off by pi/2", excess(rule).subs(memory, 0).subs(ARCS, 0), sp.pi / 2,
            f"At {memory} = 0 arguments are uncorrelated, the sign has size eta sqrt(C) and the linear part only 2/pi of its square.",
        )  # fmt: skip
    yield from _stated_numbers(rule)


def _remainder(rule, rho):
    positive = sp.Symbol("z", positive=True)
    yield Step(
        f"{rule.name}: correlations are positive", rho, sp.Integer(0),
        "No lag can cancel what follows.", relation=">",
    )  # fmt: skip
    yield Step(
        f"{rule.name}: the remainder is positive", sp.asin(sp.tanh(positive)), sp.tanh(positive),
        "arcsin rho > rho, and at lag 0 the sign has square 1, not 2/pi: the remainder (1 - 2/pi) + (4/pi) sum (arcsin rho_k - rho_k) has "
        "a limit above 1 - 2/pi however small eta lambda is.", relation=">",
    )  # fmt: skip
