"""T2: total update contributions, the Pythagorean balance they feed, and how far its solution is exact.

Works for any rule that `rwsim.theory` can read; where the paper prints a line, the line is tested.
"""

from types import SimpleNamespace

import sympy as sp

from derivations import balance, printed, signs
from derivations.balance import W, x
from derivations.core import Derivation, Step, for_rules
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.moments import linear_response, stationary_moments
from rwsim.theory.response import decay_kernel, gradient_kernel

_SMALL = {"linear": "eta lambda", "normalized": "eta lambda", "coupled": "eta lambda / sqrt(v)", "sign": "eta lambda"}


def _update(rule):
    """The room's own update against the printed equations, evaluated on the same symbols."""
    names = ("p", "m", "v")[: 1 + len(rule.state)]
    symbols = (printed.p, printed.m, printed.v)
    state = SimpleNamespace(param=printed.p, step=sym.t, **dict(zip(rule.state, symbols[1:], strict=False)))
    new = rule.update(printed.gradient, state, sym.hyper_symbols(rule), SimpleNamespace(sqrt=sp.sqrt, sign=sp.sign))
    for name, key in zip(names, ("param", *rule.state), strict=True):
        # Squares under the root make every normalizer real; the check draws m, v at random, so v is made positive.
        positive = {printed.v: sp.Symbol("v", positive=True)}
        yield Step(
            f"{rule.name}: the new {name}", sp.sympify(new[key]).subs(positive), printed.UPDATES[rule.name][name].subs(positive),
            "The room's update, evaluated on symbols, is the printed update equation.",
        )  # fmt: skip


def _contributions(rule):
    name = rule.name
    u, d = balance.contributions(rule)
    yield Step(
        f"{name}: total contribution of a gradient", gradient_kernel(rule).total, printed.U.get(name, u),
        "The effects of g_t on the update of its own step and of every later one, added up"
        + ("; the sign is replaced by its linear part n/D." if balance.kind(rule) == "sign" else "."),
    )  # fmt: skip
    yield Step(
        f"{name}: total contribution of the decay", decay_kernel(rule).total, printed.DECAY.get(name, d),
        "The effects of one step's decay, per unit of weight: it passes the momentum with the gradient if it is part of it, and acts at "
        "once if it is decoupled.",
    )  # fmt: skip


def _balance(rule):
    name, (u, d), solution = rule.name, balance.contributions(rule), balance.full_norm_sq(rule)
    yield Step(
        f"{name}: Pythagorean balance", balance.after_one(rule), (1 + d) ** 2 * W + u**2 * balance.G,
        "u is uncorrelated with the weight, so that the expected square after one contribution of each kind has two legs.",
    )  # fmt: skip
    left, right = balance.balanced(rule)
    yield Step(
        f"{name}: its solution", right.subs(W, solution), left.subs(W, solution),
        "With the gradient's second moment eliminated, the solution is the norm that the two contributions leave as it is.",
    )  # fmt: skip
    if name in printed.FULL_NORM:
        yield Step(
            f"{name}: the printed solution", sp.sqrt(solution), printed.FULL_NORM[name],
            "The solution is the printed one, before its term of higher order is dropped.",
        )  # fmt: skip


def _exactness(rule, order):
    """The balance treats the contributions as if they arrived at once; the exact second moments do not."""
    name, small = rule.name, _SMALL[balance.kind(rule)]
    exact, model = balance.exact_norm_sq(rule), balance.full_norm_sq(rule)
    power = 2 if balance.kind(rule) == "linear" else 1  # there both sides are square roots of rational functions
    ratio = sp.root(sp.cancel(sp.together((balance.in_small(rule, exact) / balance.in_small(rule, model)) ** power)), power)
    yield Step(
        f"{name}: exact to leading order", ratio, sp.Integer(1),
        f"The exact second moments (Lyapunov equation of the update) over the solution of the balance; x = {small}."
        + (" Of the sign only the linear part is compared here." if balance.kind(rule) == "sign" else ""),
        relation="~", small=x,
    )  # fmt: skip
    shown = sp.Integer(1)
    for n in range(1, order + 1):
        term = sp.factor(sp.diff(ratio, x, n).subs(x, 0) / sp.factorial(n))
        if term == 0:
            continue
        yield Step(
            f"{name}: where they part, order {n}", ratio - shown, term * x**n,
            "What the geometric model misses at this order: momentum spreads a contribution over steps in which the weight has decayed.",
            relation="~", small=x,
        )  # fmt: skip
        shown += term * x**n


def _exact_rotation(rule):
    moments = stationary_moments(rule)
    yield Step(
        f"{rule.name}: the rotation is exact", 2 * (1 - moments.lag_one / moments.weight_sq), paper.TABLE_1[rule.name].rotation ** 2,
        "At a steady norm the squared relative update is 2 (1 - cos), and cos is the weight's correlation at lag one. For SGDM this "
        "equals the printed rotation squared to all orders in eta lambda.",
    )  # fmt: skip


def steps(context):
    for rule in context.rules:
        if rule.name in printed.UPDATES:
            yield from _update(rule)
        yield from _contributions(rule)
        yield from _balance(rule)
        yield from _exactness(rule, context.order)
        if rule.name == "sgdm":
            yield from _exact_rotation(rule)
        if rule.name in printed.V:
            yield from _normalizer(rule)
        if linear_response(rule).direction == "sign":
            yield from signs.steps(rule)


def _normalizer(rule):
    yield Step(
        f"{rule.name}: what v settles to", balance.normalizer_sq(rule), printed.V[rule.name],
        "The stationary second-moment average: E g^2, plus the square of the decay where the decay is part of the gradient.",
    )  # fmt: skip


DERIVATION = Derivation(
    "T2", "Total update contributions and the Pythagorean balance", "section 3.1; section 3.2; appendices C, D, E", for_rules(), steps
)
