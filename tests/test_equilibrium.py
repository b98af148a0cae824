"""Numeric equilibrium: limits, fixed points, scaling laws, the arcsine law, and what has no equilibrium."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import rwsim
from rwsim.errors import InvalidArgument, NoEquilibrium, UnsupportedRule
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.noise import IdealWalk, ToySystem, gammas_over_draws
from rwsim.theory.signs import sign_autocovariance

SETTINGS = {
    "sgdm": SGDM(lr=0.5, weight_decay=1e-4),
    "adamw": AdamW(lr=1.25e-2, weight_decay=8e-2),
    "adam_l2": AdamL2(lr=7.813e-4, weight_decay=1.25e-4),
    "lion": Lion(lr=5e-4, weight_decay=1.0),
}


def toy(gamma_in, gamma_out, batch=32, loss_scale=1.0, neurons=128):
    return ToySystem(np.atleast_2d(gamma_in), np.atleast_2d(gamma_out).T, batch, loss_scale, neurons)


@pytest.mark.parametrize(("betas", "ratio"), [((0.9, 0.999), 1.006), ((0.9, 0.99), 1.015), ((0.95, 0.98), 1.06), ((0.0, 0.9), math.pi / 2)])
def test_lion_norm_keeps_a_remainder_in_the_limit(betas, ratio):
    """As eta lambda -> 0 the exact norm^2 over the paper's tends to these ratios, not to 1 (THEORY.md section 2)."""
    prediction = predict_equilibrium(Lion(lr=1e-7, weight_decay=1.0, betas=betas), IdealWalk(64))
    assert (prediction.exact.norm / prediction.paper.norm) ** 2 == pytest.approx(ratio, abs=1.2e-3)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2"])
def test_paper_is_the_limit_in_the_ideal_walk(name):
    hyper = {"lr": 1e-5, "weight_decay": 1e-2}
    prediction = predict_equilibrium(RULES[name](**hyper), IdealWalk(64))
    for quantity in ("norm", "rotation", "rms_update"):
        assert getattr(prediction.exact, quantity) == pytest.approx(getattr(prediction.paper, quantity), rel=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_steady_norm_identity(name):
    """At a steady norm cos = 1 - r^2/2 and total update^2 = r^2 norm^2: rotation and norm are not independent claims."""
    prediction = predict_equilibrium(SETTINGS[name], IdealWalk(64)).exact
    eta_lambda = SETTINGS[name].values.lr * SETTINGS[name].values.weight_decay
    total_sq = (2 * math.sin(prediction.rotation / 2)) ** 2 * prediction.norm**2
    # The gradient part is the total but for the decay's share, which is of relative order eta lambda.
    assert total_sq == pytest.approx(prediction.rms_update**2, rel=30 * eta_lambda + 1e-9)


@pytest.mark.parametrize(("name", "power"), [("sgdm", 0.5), ("adamw", 0.0), ("lion", 0.0)])
@given(factor=st.floats(1e-3, 1e3))
def test_norm_scales_exactly_with_the_gradient(name, power, factor):
    """w -> c w, gamma_out -> c^2 gamma_out leaves an SGDM walk's law: norm ~ gamma_out^(1/2). AdamW and Lion: none."""
    rng = np.random.default_rng(0)
    gamma = rng.standard_normal(16)
    base = predict_equilibrium(SETTINGS[name], toy(gamma, [1.0]))
    scaled = predict_equilibrium(SETTINGS[name], toy(gamma, [factor]))
    assert scaled.exact.norm / base.exact.norm == pytest.approx(factor**power, rel=1e-6)
    assert scaled.exact.rotation == pytest.approx(base.exact.rotation, rel=1e-6)


def test_adam_l2_norm_scales_as_a_cube_root_in_the_limit():
    gamma = np.random.default_rng(0).standard_normal(16)
    rule = AdamL2(lr=1e-6, weight_decay=1e-4)
    norms = [predict_equilibrium(rule, toy(gamma, [s])).exact.norm for s in (1.0, 8.0)]
    assert norms[1] / norms[0] == pytest.approx(2.0, rel=1e-4)


def test_spread_follows_gamma_squared_for_sgdm_and_not_at_all_for_adamw():
    gamma = np.linspace(0.5, 2.0, 512)
    ratio = {}
    for name in ("sgdm", "adam_l2", "adamw"):
        # Equilibrium ||gamma w||^2 / ||w||^2, read from E||g~||^2 = scale (sum gamma^2 - ...) / ratio.
        prediction = predict_equilibrium(SETTINGS[name], toy(gamma, [1.0]))
        scale = (1 / (128 * 32)) ** 2 * 32 * 30 / 29
        ratio[name] = scale * (gamma**2).sum() / prediction.unit_grad_norm_sq
    moments = {k: (np.abs(gamma) ** k).mean() for k in (1, 2, 3, 4)}
    assert ratio["sgdm"] == pytest.approx(moments[4] / moments[2], rel=1e-2)
    assert ratio["adam_l2"] == pytest.approx(moments[3] / moments[1], rel=1e-2)
    assert ratio["adamw"] == pytest.approx(moments[2], rel=1e-2)


def test_adam_l2_solves_its_own_equation():
    """At the fixed point v = E g^2 + lambda^2 E w^2, coordinate by coordinate, with SGDM's form at lr (1-b1)/sqrt(v)."""
    rule, law = AdamL2(lr=2e-2, weight_decay=5e-2), IdealWalk(8)
    exact = predict_equilibrium(rule, law).exact
    q = exact.norm_sq[0] / 8
    v = 1 + 0.05**2 * q
    step = 2e-2 * 0.1 / math.sqrt(v)
    sgdm = predict_equilibrium(SGDM(lr=step, weight_decay=0.05, momentum=0.9), law).exact
    assert exact.norm == pytest.approx(sgdm.norm, rel=1e-9)
    assert exact.rotation == pytest.approx(sgdm.rotation, rel=1e-9)


def test_arcsine_law_at_constant_length_against_simulated_gaussians():
    rule = Lion(lr=1e-3, weight_decay=1.0, betas=(0.5, 0.8))
    gamma, linear = sign_autocovariance(rule, IdealWalk(4))
    rng = np.random.default_rng(0)
    g = rng.standard_normal((300, 20_000))
    m, signs = np.zeros(20_000), []
    for row in g:
        signs.append(np.sign(0.5 * m + 0.5 * row))
        m = 0.8 * m + 0.2 * row
    for lag in (1, 2, 5):
        products = (signs[-1 - lag] * signs[-1]).mean()
        assert products == pytest.approx(gamma[lag - 1], abs=5 / math.sqrt(20_000))
    assert (gamma[:30] >= linear[:30]).all()  # arcsin x >= x: the paper's linear part is a lower bound


@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-3, 1.0), (0.1, 3.0), (1.0, 1.6)])
def test_angle_of_a_sign_is_that_of_its_two_moments(lr, weight_decay):
    """cos = E w w' / E w^2 from the printed sums of THEORY.md section 2, where these do not cancel."""
    rule, keep = Lion(lr=lr, weight_decay=weight_decay), 1 - lr * weight_decay
    gamma, _ = sign_autocovariance(rule, IdealWalk(8))
    sums = (keep ** np.arange(len(gamma))) @ gamma
    weight_sq = lr**2 * (1 + 2 * keep * sums) / (1 - keep**2)
    found = predict_equilibrium(rule, IdealWalk(8)).exact
    assert found.norm == pytest.approx(math.sqrt(8 * weight_sq), rel=1e-12)
    assert math.cos(found.rotation) == pytest.approx(keep + lr**2 * sums / weight_sq, rel=1e-9)


def test_angle_of_a_sign_holds_at_a_small_decay():
    """1 - cos of a tiny angle: no cancellation at lr times decay 1e-12."""
    found = [rwsim.predict("lion", lr=lr, weight_decay=1e-3, fan_in=8).exact.rotation / math.sqrt(lr) for lr in (1e-8, 1e-9)]
    assert found[1] == pytest.approx(found[0], rel=1e-8)


@pytest.mark.parametrize("batch", [4, 6, 10, 32, 512])
def test_length_quadrature_is_exact(batch):
    nodes, weights = toy(np.ones(4), [1.0], batch).length_squared()
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    scale = (batch - 2) / (batch - 3)  # mean of chi2_{B-2} / chi2_{B-1}
    a, b = (batch - 2) / 2, (batch - 1) / 2
    for bound in (0.5, 2.0):  # a smooth bounded function, as the arcsine is
        expected = stats.betaprime(a, b).expect(lambda x, c=bound: 1 / (1 + c * x / scale))
        assert (weights @ (1 / (1 + bound * nodes))) == pytest.approx(expected, rel=1e-6)


def test_random_length_moves_lion_by_what_theory_says():
    """27 % of norm^2 at the paper's own setting: the ideal walk and the toy system must differ."""
    rule = Lion(lr=5e-4, weight_decay=1.0, betas=(0.9, 0.999))
    ideal, system = (predict_equilibrium(rule, law).exact for law in (IdealWalk(128), toy(np.ones(128), [1.0])))
    assert (system.norm / ideal.norm) ** 2 == pytest.approx(1.083, abs=0.003)
    assert (system.norm / predict_equilibrium(rule, IdealWalk(128)).paper.norm) ** 2 == pytest.approx(0.732, abs=0.005)


def test_expectation_over_draws():
    gamma_in, gamma_out = gammas_over_draws(32)
    assert gamma_in.shape == (512, 32) and gamma_out.shape == (512, 1)
    assert abs(gamma_in.mean()) < 0.01 and gamma_in.std() == pytest.approx(1, abs=0.01)
    normal = rwsim.predict("sgdm", lr=0.5, weight_decay=1e-4, fan_in=32, batch=32, gamma="normal")
    uniform = rwsim.predict("sgdm", lr=0.5, weight_decay=1e-4, fan_in=32, batch=32)
    assert normal.exact.rotation == pytest.approx(uniform.exact.rotation) and normal.exact.norm != pytest.approx(uniform.exact.norm)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_equilibrium_is_said(name):
    rule = RULES[name]
    for hyper in ({"lr": 0.0, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}):
        with pytest.raises(NoEquilibrium, match="is 0"):
            predict_equilibrium(rule(**hyper), IdealWalk(8))
    if name != "adam_l2":  # its normalizer grows with the weights and keeps it stable
        with pytest.raises(NoEquilibrium, match="no stable equilibrium"):
            predict_equilibrium(rule(lr=10.0, weight_decay=1.0), IdealWalk(8))


def test_bad_input_to_predict():
    good = {"lr": 0.1, "weight_decay": 0.1, "fan_in": 8}
    for bad, message in (
        ({"fan_in": 1}, "`fan_in`"), ({"batch": 3}, "`batch` must be at least 4"), ({"batch": 8, "neurons": 0}, "`neurons`"),
        ({"batch": 8, "loss_scale": 0.0}, "`loss_scale`"), ({"batch": 8, "gamma": "odd"}, "`gamma`"),
        ({"batch": 8, "gamma": np.ones(7)}, "array of 8"), ({"batch": 8, "gamma": np.zeros(8)}, "non-zero"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            rwsim.predict("sgdm", **{**good, **bad})
    assert rwsim.predict("sgdm", **good, batch=8, gamma=np.arange(1.0, 9.0)).exact.norm > 0


def test_a_rule_without_table_has_no_paper_column():
    class Plain(SGDM):
        name = "plain"

    assert rwsim.predict(Plain, lr=0.1, weight_decay=0.1, fan_in=8).paper is None
    with pytest.raises(UnsupportedRule):
        sign_autocovariance(SGDM(lr=0.1, weight_decay=0.1), IdealWalk(8))
