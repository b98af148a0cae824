"""The approach to equilibrium, step by step, against simulated ensembles, and the burn-in read off it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.noise import IdealWalk
from rwsim.theory.schedule import hyper_values, plain_norm_sq
from rwsim.theory.transient import Approach, approach
from rwsim.theory.walker import Walker
from rwsim.walk.job import Job
from rwsim.walk.simulate import run
from rwsim.walk.system import Layer

CASES = [
    (SGDM(lr=0.5, weight_decay=1e-3), 0.03),
    (AdamW(lr=2e-2, weight_decay=0.2, betas=(0.9, 0.99)), 0.03),
    (AdamL2(lr=1e-2, weight_decay=1e-4, betas=(0.9, 0.99)), 0.03),
    # The sign is linearized and lengths are taken at their mean: percents, not more.
    (Lion(lr=2e-3, weight_decay=1.0, betas=(0.9, 0.99)), 0.06),
]


@pytest.mark.parametrize(("rule", "tolerance"), CASES, ids=lambda x: getattr(x, "name", None))
def test_expected_approach_follows_the_ensemble(rule, tolerance):
    layer = Layer.draw(64, 256, gamma="uniform")
    found = run(Job((rule,), layer, 1500, window=25))
    expected = approach(rule, layer.law("marginal"), layer.start_sq, 1500)
    limit = predict_equilibrium(rule, layer.law("marginal")).linear_norm_sq
    predicted = limit * (1 + expected.deviation.reshape(-1, 25).mean(-1))
    measured = found.norm_sq[:, 0].mean(-1)
    late = slice(4, None)
    if rule.name == "lion":  # compare shapes: the limit itself is the exact form's business
        measured = measured / measured[-10:].mean() * predicted[-10:].mean()
    assert np.abs(np.sqrt(measured[late] / predicted[late]) - 1).max() < tolerance


@pytest.mark.parametrize("name", RULES)
def test_recurrence_ends_where_the_closed_form_is(name):
    hyper = {"betas": (0.5, 0.99, 0.95)[: len(RULES[name].hyper["betas"])]} if "betas" in RULES[name].hyper else {}
    hyper |= {"momentum": 0.5} if "momentum" in RULES[name].hyper else {}
    hyper |= {"max_lr": 2e-2} if "max_lr" in RULES[name].hyper else {}
    deviation = approach(RULES[name](lr=2e-2, weight_decay=0.5, **hyper), IdealWalk(8), 0.1, 9000).deviation
    assert abs(deviation[-1]) < 1e-6


def test_adamw_relaxes_at_twice_the_log_of_rho():
    rule = AdamW(lr=1e-2, weight_decay=0.5, betas=(0.9, 0.99))
    deviation = approach(rule, IdealWalk(8), 1.0, 3000).deviation
    rate = -math.log(deviation[2000] / deviation[1900]) / 100
    assert rate == pytest.approx(-2 * math.log(1 - 5e-3), rel=1e-3)


def test_burn_in_rules():
    still = np.zeros(5000)
    decay = 0.5 * np.exp(-np.arange(5000) / 200)
    found = Approach(decay, still).burn_in(0.004)
    assert found is not None and np.abs(decay[found:]).max() <= 0.01 and np.abs(decay[found:]).mean() <= 0.004
    assert Approach(decay[:300], still[:300]).burn_in(0.004) is None
    # The norm's square may be off by twice as much as the rotation.
    assert Approach(still, decay / 2).burn_in(0.004) == found
    # An oscillation whose mean vanishes is not equilibrium.
    assert Approach(0.05 * np.sin(np.arange(5000) / 50), still).burn_in(0.004) is None
    assert Approach(np.full(10, math.nan), still[:10]).burn_in(0.004) is None
    assert Approach(still, still).burn_in(0.004) == 0


def test_neurons_of_small_gradients_turn_late():
    """The mean norm is in equilibrium long before they are, and each counts as much in the mean rotation as any other."""
    rule, layer = SGDM(lr=0.5, weight_decay=1e-3), Layer.draw(64, 256, gamma="uniform")
    gamma_out = layer.gamma_out.copy()
    gamma_out[:38] *= 1e-5  # whole groups
    layer = replace(layer, gamma_out=gamma_out)
    law = layer.law("marginal")
    found, expected = run(Job((rule,), layer, 3000, window=50)), approach(rule, law, layer.start_sq, 3000)
    measured = found.angle[:, 0].mean(-1) / predict_equilibrium(rule, law).full.rotation - 1
    turning = expected.turning.reshape(-1, 50).mean(-1)
    assert np.abs(expected.deviation[750:]).max() < 0.001 and turning[15] < -0.1
    assert np.abs(measured - turning)[10:].max() < 0.02
    burn_in = expected.burn_in(0.004)
    assert burn_in is not None and np.abs(measured[math.ceil(burn_in / 50) :].mean()) < 0.005


class Growing(AdamW):
    """AdamW whose second-moment average forgets at a rate of its own age, in place of a bias correction."""

    name = "growing"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        rate = beta2 * (1 - beta2 ** (state.step - 1)) / (1 - beta2**state.step)
        m = beta1 * state.exp_avg + (1 - beta1) * grad
        v = rate * state.exp_avg_sq + (1 - rate) * grad * grad
        step = hyper.lr / (1 - beta1**state.step) * m / (xp.sqrt(v) + hyper.eps)
        return {"param": (1 - hyper.lr * hyper.weight_decay) * state.param - step, "exp_avg": m, "exp_avg_sq": v}


@pytest.mark.parametrize(
    ("rule", "tolerance"),
    [
        (SGDM(lr=0.5, weight_decay=1e-3), 1e-3),
        (SGDM(lr=5.0, weight_decay=1e-3, momentum=0.98), 0.012),  # swings, in strides of a step or two
        (AdamW(lr=2e-2, weight_decay=0.2, betas=(0.9, 0.99), eps=1e-3), 1e-3),
        (AdamL2(lr=1e-2, weight_decay=1e-4, betas=(0.9, 0.99)), 1e-3),
        (RULES["nadamw"](lr=2e-2, weight_decay=0.2, betas=(0.8, 0.99), eps=1e-3), 1e-3),
        (Growing(lr=2e-2, weight_decay=0.2, betas=(0.9, 0.99), eps=1e-3), 2e-3),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_strides_lead_where_single_steps_do(rule, tolerance):
    """Strides taken only as at their beginning are up to 0.3 % off."""
    steps, layer = 3000, Layer.draw(32, 64)
    law = layer.law("marginal")
    law = replace(law, gamma_out=np.quantile(np.abs(law.gamma_out), (0.02, 0.5, 0.98))[:, None])
    found = plain_norm_sq(rule, law, steps, layer.start_sq)
    walker, hyper = Walker(type(rule), law, layer.start_sq, plain=True), hyper_values(rule, {}, steps)
    single = np.array([walker.take_plain(t + 1, hyper[t]) for t in range(steps)]).T
    assert walker.arrays and found.shape == single.shape
    assert np.abs(found / single - 1).max() < tolerance
    assert np.abs(found[:, -1] / single[:, -1] - 1).max() < 1e-4


def test_strides_end_where_the_walk_blows_up(monkeypatch):
    rule, layer, taken = SGDM(lr=50.0, weight_decay=0.1, momentum=0.5), Layer.draw(16, 4), []
    take = Walker.take_plain
    monkeypatch.setattr(Walker, "take_plain", lambda self, *at: (taken.append(at), take(self, *at))[1])
    monkeypatch.setattr(Walker, "stride", lambda self, t, doublings, hyper: pytest.fail("it is not steady"))
    found = plain_norm_sq(rule, layer.law("marginal"), 20000, layer.start_sq)
    assert 1 < len(taken) < 2000 and not np.isfinite(found[:, len(taken) :]).any()


def test_neurons_without_gradients_are_walked():
    law = Layer.draw(16, 4).law("marginal")
    law = replace(law, gamma_out=np.array([[0.0], [0.5], [1.0], [2.0]]))
    found = plain_norm_sq(AdamW(lr=1e-2, weight_decay=0.2, eps=1e-8), law, 2000, 1 / 48)
    assert np.isfinite(found).all() and (np.diff(found[0]) < 0).all()


@pytest.mark.parametrize(
    "rule", [SGDM(lr=0.5, weight_decay=1e-3), AdamL2(lr=1e-2, weight_decay=1e-4, betas=(0.9, 0.99))], ids=lambda rule: rule.name
)
def test_groups_give_the_burn_in_of_all(rule):
    layer = Layer.draw(48, 100)
    law, steps = layer.law("marginal"), 4000
    grouped, every = approach(rule, law, layer.start_sq, steps), plain_norm_sq(rule, law, steps, layer.start_sq)
    limit = predict_equilibrium(rule, law).exact.norm_sq[:, None]
    power = 1.0 if rule.name == "sgdm" else 0.5
    alone = Approach(every.mean(0) / limit.mean() - 1, ((limit / every) ** power).mean(0) - 1)
    found, expected = grouped.burn_in(0.004), alone.burn_in(0.004)
    assert found is not None and expected is not None and abs(found / expected - 1) < 0.05
