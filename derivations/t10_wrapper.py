"""T10: the rotational wrapper (Algorithm 1) turns every vector by eta_r on average, at constant norm."""

import sympy as sp

from derivations.core import Derivation, Step, for_rules
from derivations.expectation import E

FAN_IN = 3
norm, eta_r, beta, nu_sq = sp.symbols("n eta_r beta nu", positive=True)
count = sp.Symbol("t", integer=True, positive=True)


def vector(name):
    return sp.Matrix(sp.symbols(f"{name}_1:{FAN_IN + 1}", real=True))


def project(update, param):
    """Line 14 of Algorithm 1: both projections at once."""
    ones = sp.ones(FAN_IN, 1)
    return update - update.dot(param) / param.dot(param) * param - update.dot(ones) / ones.dot(ones) * ones


def steps(context):
    raw, update = vector("p"), vector("Delta")
    param = raw - sp.ones(FAN_IN, 1) * sum(raw) / FAN_IN  # line 4 removes the mean
    tangent = project(update, param)
    yield Step(
        "orthogonal to the vector", tangent.dot(param), sp.Integer(0), "For a centred p the two projections do not disturb each other."
    )
    yield Step("orthogonal to ones", sum(tangent), sp.Integer(0), "So the vector stays centred.")
    yield Step(
        "a vector with a mean would not do", project(update, raw).dot(raw), sp.Integer(0),
        "Projecting off p and off ones in one go needs p orthogonal to ones: the reason for the initial centring.", relation="!=",
    )  # fmt: skip
    scale = norm / sp.sqrt(param.dot(param))
    at_norm = scale * param
    moved = at_norm + eta_r * norm * tangent / sp.sqrt(nu_sq)
    yield Step(
        "Pythagoras", moved.dot(moved), norm**2 * (1 + eta_r**2 * tangent.dot(tangent) / nu_sq),
        "The step is orthogonal to p: the squared norm grows by the squared step.", symbolic=False,
    )  # fmt: skip
    new = norm * moved / sp.sqrt(moved.dot(moved))
    yield Step("constant norm", new.dot(new), norm**2, "The last line of the algorithm.", symbolic=False)
    cosine = new.dot(at_norm) / norm**2
    yield Step(
        "the angle", 1 / cosine**2 - 1, eta_r**2 * tangent.dot(tangent) / nu_sq,
        "tan^2 of the rotation is eta_r^2 times the squared projected update over its tracked mean square; rescaling does not turn.",
        symbolic=False,
    )  # fmt: skip
    k = sp.Symbol("k", integer=True, positive=True)
    q = sp.Symbol("q", positive=True)  # E||Delta||^2 of every step
    tracker = (1 - beta / (1 + beta)) * sp.Sum((beta / (1 + beta)) ** (count - k) * q, (k, 1, count))
    yield Step(
        "the tracker is unbiased", tracker / (1 - (beta / (1 + beta)) ** count), q,
        "The expected tracked square, after the correction by 1 - decay^t, is E||Delta||^2 at every t (decay written b/(1+b)).",
    )  # fmt: skip
    delta = sp.Symbol("Delta", real=True)
    yield Step(
        "rotation on average", E(eta_r**2 * delta**2 / q, (delta, q)), eta_r**2,
        "With the tracker at its expectation the mean square of tan(angle) is eta_r^2: the average turn is an RMS, to leading order.",
    )  # fmt: skip
    small = sp.Symbol("s", positive=True)
    yield Step(
        "small angles", sp.atan(small), small,
        "The tangent is the angle to leading order; the angle falls short by a third of its cube.", relation="~", small=small,
    )  # fmt: skip
    yield Step(
        "what is left out", small - sp.atan(small), small**3 / 3, "The first correction.", relation="~", small=small,
    )  # fmt: skip


DERIVATION = Derivation(
    "T10", "Rotational wrapper: turns by eta_r at constant norm", "section 4, Algorithm 1, appendix I", for_rules(), steps
)
