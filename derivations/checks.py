"""How a step is checked: numerically at random admissible points to 30 digits, and symbolically where sympy can."""

import mpmath as mp
import sympy as sp

from derivations.sample import POINTS, points
from derivations.sums import summed

DIGITS = 30
_TOLERANCE = mp.mpf(10) ** -DIGITS


class StepFailed(AssertionError):
    """A step of a derivation does not hold; the message says where."""


def settle(expr):
    """Carry out sums, limits, integrals and expectations."""
    return summed(sp.sympify(expr)).doit()


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
