"""How a step is checked: numerically at random admissible points to 30 digits, and symbolically where sympy can."""

import random

import mpmath as mp
import sympy as sp

from rwsim.theory import symbols as sym

POINTS = 30
DIGITS = 30
_TOLERANCE = mp.mpf(10) ** -DIGITS
# Where hyperparameters are drawn from. In all of it lr times weight decay stays below 1 - momentum.
_RANGES = {sym.eta: (1e-3, 0.2), sym.lam: (1e-2, 0.5), sym.alpha: (0.05, 0.9), sym.beta1: (0.05, 0.9), sym.beta2: (0.05, 0.95)}


class StepFailed(AssertionError):
    """A step of a derivation does not hold; the message says where."""


def points(symbols, count=POINTS):
    """`count` random admissible values of `symbols`, always the same ones."""
    rng = random.Random(20240716)
    ordered = sorted(symbols, key=lambda s: (s.name, str(s.assumptions0)))
    for _ in range(count):
        yield {s: _draw(s, rng) for s in ordered}


def _draw(symbol, rng):
    if symbol in _RANGES:
        return mp.mpf(rng.uniform(*_RANGES[symbol]))
    if symbol.is_integer:
        return mp.mpf(rng.randint(2, 40))
    return mp.mpf(rng.uniform(0.1, 4.0) if symbol.is_nonnegative else rng.uniform(-3.0, 3.0))


def settle(expr):
    """Carry out sums, limits and expectations; of a conditional result keep the branch of the admissible region."""
    expr = sp.sympify(expr).doit()

    def branch(piecewise):
        conditions = [condition for _, condition in piecewise.args]
        if not all(s.is_nonnegative for c in conditions for s in sp.sympify(c).free_symbols):
            return piecewise  # a condition on variables (a ReLU), not on where a sum converges
        values = []
        for point in points(piecewise.free_symbols):
            values.append(next((value for value, condition in piecewise.args if condition.subs(point) == True), None))  # noqa: E712
        return values[0] if values[0] is not None and values.count(values[0]) == len(values) else piecewise

    def gone(power):  # sympy sums b^k (b - 1) by telescoping and leaves b^oo
        return sp.Integer(0) if all(abs(power.base.subs(point)) < 1 for point in points(power.free_symbols)) else power

    expr = expr.replace(lambda e: isinstance(e, sp.Piecewise), branch)
    return expr.replace(lambda e: e.is_Pow and e.exp is sp.oo, gone)


def vanishes(expr):
    """Whether sympy proves that an expression is 0; False also where it cannot."""
    for simplified in (sp.expand, lambda e: sp.cancel(sp.together(e)), lambda e: sp.simplify(sp.powdenest(e, force=True))):
        try:
            if simplified(expr) == 0:
                return True
        except sp.PolynomialError:
            continue
    return False


def _pairs(lhs, rhs, fixed=()):
    symbols = (lhs.free_symbols | rhs.free_symbols) - {s for s, _ in fixed}
    arguments = [*symbols, *(s for s, _ in fixed)]
    evaluate = sp.lambdify(arguments, [lhs, rhs], modules="mpmath", cse=True)
    for point in points(symbols, POINTS if symbols else 1):
        yield point, [mp.mpmathify(x) for x in evaluate(*(point[s] for s in symbols), *(v for _, v in fixed))]


def _where(point):
    return ", ".join(f"{s} = {mp.nstr(v, 5)}" for s, v in point.items()) or "no free symbol"


def equal(step):
    """lhs = rhs."""
    lhs, rhs = settle(step.lhs), settle(step.rhs)
    with mp.workdps(DIGITS + 20):
        for point, (a, b) in _pairs(lhs, rhs):
            if not (mp.isfinite(a) and mp.isfinite(b) and abs(a - b) <= _TOLERANCE * max(1, abs(a), abs(b))):
                raise StepFailed(f"the sides are {mp.nstr(a, 8)} and {mp.nstr(b, 8)} at {_where(point)}")
    return "symbolic, numeric" if step.symbolic and (vanishes(lhs - rhs) or vanishes(lhs / rhs - 1 if rhs != 0 else lhs)) else "numeric"


def asymptotic(step):
    """lhs / rhs -> 1 as the small (or large) symbol goes to 0 (or infinity)."""
    lhs, rhs = settle(step.lhs), settle(step.rhs)
    with mp.workdps(250):
        far = mp.mpf(10) ** (60 if step.towards is sp.oo else -60)
        for point, (a, b) in _pairs(lhs, rhs, [(step.small, far)]):
            if not (mp.isfinite(a) and mp.isfinite(b) and b != 0 and abs(a / b - 1) < mp.mpf(10) ** -15):
                raise StepFailed(f"the ratio of the sides tends to {mp.nstr(a / b, 8) if b else 'no number'}, not 1, at {_where(point)}")
    return "numeric limit"


def differs(step):
    """lhs differs from rhs at every admissible point."""
    lhs, rhs = settle(step.lhs), settle(step.rhs)
    with mp.workdps(DIGITS + 20):
        for point, (a, b) in _pairs(lhs, rhs):
            if not abs(a - b) > mp.mpf(10) ** -12 * max(abs(a), abs(b)):
                raise StepFailed(f"the sides agree at {_where(point)}")
    return "numeric"


def greater(step):
    """lhs > rhs at every admissible point."""
    lhs, rhs = settle(step.lhs), settle(step.rhs)
    with mp.workdps(DIGITS + 20):
        for point, (a, b) in _pairs(lhs, rhs):
            if not a > b:
                raise StepFailed(f"{mp.nstr(a, 8)} is not above {mp.nstr(b, 8)} at {_where(point)}")
    return "numeric"


def rounds(step):
    """lhs, a number, rounds to the decimals of rhs (a `sp.Float` made from a string, or an exact number)."""
    text = str(step.rhs)
    half_unit = 0.5 * 10.0 ** -len(text.partition(".")[2])
    got = float(settle(step.lhs) if step.evaluate is None else step.evaluate())
    if abs(got - float(text)) > half_unit:
        raise StepFailed(f"got {got:.6f}, stated {text}")
    return "numeric"


CHECKS = {"=": equal, "~": asymptotic, "!=": differs, ">": greater, "≈": rounds}
