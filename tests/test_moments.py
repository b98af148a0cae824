"""The linear response read off `update`, and the closed forms it implies."""

import random
from types import SimpleNamespace

import mpmath
import pytest
import sympy as sp

from rwsim.errors import UnsupportedRule
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion, UpdateRule
from rwsim.theory import paper
from rwsim.theory.moments import linear_response, lyapunov, stationary_moments
from rwsim.theory.symbols import alpha, beta1, epsilon, eta, flat, grad_sq, hyper_symbols, lam, normalizer

RATIONAL = [name for name in RULES if linear_response(RULES[name]).direction != "sign"]

# The closed forms of THEORY.md section 2, typed here independently of the code: what the derivation must arrive at.
rho = 1 - eta * lam
CLAIMED = {
    "sgdm": (eta * grad_sq / (lam * (1 - alpha) * (2 - eta * lam / (1 + alpha))), 2 * eta * lam / (1 + alpha)),
    "adamw": (
        eta**2
        * (grad_sq / (normalizer + epsilon) ** 2)
        * (1 - beta1)
        * (1 + rho * beta1)
        / ((1 + beta1) * (1 - rho * beta1) * (1 - rho**2)),
        2 * eta * lam * (1 - beta1) / (1 + rho * beta1),
    ),
}


def random_point(rng, symbols):
    ranges = {"eta": (1e-4, 0.5), "lambda": (1e-4, 0.5), "G": (0.1, 3.0), "D": (0.5, 2.0), "epsilon": (0.0, 0.1)}
    return {s: mpmath.mpf(rng.uniform(*ranges.get(s.name, (0.01, 0.98)))) for s in symbols}


def test_kinds_are_read_off():
    assert {name for name, rule in RULES.items() if linear_response(rule).direction == "sign"} == {"lion", "signum"}
    assert {name for name, rule in RULES.items() if linear_response(rule).direction == "linear"} == {
        "sgdm", "sgd", "nesterov", "dampened", "sgdw", "qhm",
    }  # fmt: skip
    assert {name for name, rule in RULES.items() if not linear_response(rule).decoupled} == {
        "sgdm",
        "adam_l2",
        "nesterov",
        "dampened",
        "qhm",
    }


def test_linear_response_of_each_room():
    sgdm = linear_response(SGDM)
    assert sgdm.transition == sp.Matrix([[1 - eta * lam, -eta * alpha], [lam, alpha]])
    assert sgdm.drive == sp.Matrix([-eta, 1])
    lion = linear_response(Lion).settled()
    assert lion.transition == sp.diag(1 - eta * lam, sp.Symbol("beta_2", nonnegative=True))
    assert lion.argument[0] == sp.Matrix([[0, beta1]]) and lion.argument[1] == 1 - beta1
    adam = linear_response(AdamL2)
    assert adam.square[0] == sp.diag(lam**2, 0) and adam.square[1] == 1


@pytest.mark.parametrize("name", CLAIMED)
def test_closed_forms_match_theory(name):
    weight_sq, relative_sq = CLAIMED[name]
    moments = stationary_moments(RULES[name])
    assert sp.simplify(moments.weight_sq - weight_sq) == 0
    assert sp.simplify(2 * (1 - moments.lag_one / moments.weight_sq) - relative_sq) == 0


@pytest.mark.parametrize("name", RATIONAL)
def test_moments_solve_their_recurrence_to_30_digits(name):
    """P = A P A^T + G b b^T, iterated from the closed form: nothing moves."""
    response = linear_response(RULES[name]).settled()
    p = lyapunov(response.transition, response.drive)
    residual = response.transition * p * response.transition.T + grad_sq * response.drive * response.drive.T - p
    rng = random.Random(0)
    symbols = sorted(residual.free_symbols | p.free_symbols, key=str)
    function = sp.lambdify(symbols, [*residual, *p], "mpmath")
    with mpmath.workdps(40):
        for _ in range(30):
            values = function(*random_point(rng, symbols).values())
            size = max(abs(x) for x in values[len(residual) :])
            assert max(abs(x) for x in values[: len(residual)]) <= size * mpmath.mpf(10) ** -30


@pytest.mark.parametrize("name", [name for name in RATIONAL if name in paper.TABLE_1])
def test_leading_order_is_the_papers(name):
    """Norm and rotation at eta lambda -> 0, with G = D = C = 1 a coordinate: Table 1's form."""
    moments = stationary_moments(RULES[name])
    small = sp.Symbol("x", positive=True)  # eta lambda
    forms = (moments.weight_sq, 2 * (1 - moments.lag_one / moments.weight_sq), moments.update_sq)
    column = paper.TABLE_1[name]
    printed = (column.norm**2, column.rotation**2, column.rms_update**2)
    for form, claim in zip(forms, printed, strict=True):
        exact = form.subs(epsilon, 0).subs({grad_sq: 1, normalizer: 1}).subs(lam, small / eta)
        at_one = {paper.grad_norm_sq: 1, sp.Symbol("C", positive=True, integer=True): 1}
        # ||omega|| of unit second moment: g~ = omega g, so both unit moments are functions of the printed norm.
        norm_sq = {"sgdm": eta / (2 * lam * (1 - alpha)), "adam_l2": eta / (2 * lam)}.get(name, sp.Integer(1))
        at_one |= {paper.unit_grad_norm_sq: norm_sq, paper.unit_grad_l1: sp.sqrt(norm_sq)}
        claimed = sp.simplify(claim.subs(at_one).subs(lam, small / eta))
        assert sp.simplify(sp.limit(sp.simplify(exact / claimed), small, 0)) == 1


def test_update_share_excludes_decay():
    """The gradient part of SGDM's update is that of SGDM without decay."""
    moments = stationary_moments(SGDM)
    assert sp.simplify(moments.update_sq - eta**2 * grad_sq / (1 - alpha**2)) == 0
    total = 2 * (moments.weight_sq - moments.lag_one)
    assert sp.simplify(moments.update_sq / total - (1 - eta * lam / (2 * (1 + alpha)))) == 0


def make(update, **attributes):
    return type(
        "Made", (UpdateRule,), {"name": "made", "hyper": {"lr": ..., "weight_decay": ...}, "update": staticmethod(update), **attributes}
    )


def _clip(grad, state, hyper, xp):
    return {"param": state.param - hyper.lr * grad / (1 + grad**2)}


def _coupled_sign(grad, state, hyper, xp):
    return {"param": state.param - hyper.lr * xp.sign(grad + hyper.weight_decay * state.param)}


def _two_signs(grad, state, hyper, xp):
    return {"param": state.param - hyper.lr * (xp.sign(grad) + xp.sign(2 * grad)) - hyper.lr * hyper.weight_decay * state.param}


def _sign_plus_gradient(grad, state, hyper, xp):
    return {"param": state.param - hyper.lr * (xp.sign(grad) + grad) - hyper.lr * hyper.weight_decay * state.param}


def _root_of_gradient(grad, state, hyper, xp):
    return {"param": state.param - hyper.lr * grad / xp.sqrt(grad**2 + 1)}


def _square_without_root(grad, state, hyper, xp):
    v = 0.9 * state.v + 0.1 * grad**2
    return {"param": state.param - hyper.lr * grad - hyper.lr * v, "v": v}


@pytest.mark.parametrize(
    ("update", "state", "missing"),
    [
        (_clip, (), "not linear"),
        (_coupled_sign, (), "decay enters under the sign"),
        (_two_signs, (), "more than one root or sign"),
        (_sign_plus_gradient, (), "sign is not the whole direction"),
        (_root_of_gradient, (), "exactly one second-moment average"),
        (_square_without_root, ("v",), "acts without a root"),
    ],
)
def test_what_the_theory_cannot_carry_is_named(update, state, missing):
    with pytest.raises(UnsupportedRule, match=missing):
        linear_response(make(update, state=state))


def test_sign_rules_have_no_rational_form():
    with pytest.raises(UnsupportedRule, match="arcsine sums"):
        stationary_moments(Lion)


def test_symbols_of_unknown_names():
    rule = make(lambda *_: {}, hyper={"lr": ..., "damping": 0.5, "pair": (0.1, 0.2)})
    symbols = hyper_symbols(rule)
    assert [str(s) for s in flat(symbols)] == ["eta", "damping", "pair_1", "pair_2"]
    assert flat(SimpleNamespace(a=1.0, b=(2.0, 3.0))) == (1.0, 2.0, 3.0)


def test_adamw_normalizer_averages_squares():
    response = linear_response(AdamW)
    assert response.square[0] == sp.zeros(2) and response.square[1] == 1
    assert response.settled().correction == 1
