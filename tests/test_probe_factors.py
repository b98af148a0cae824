"""A rotation's factors on random walks: 1 where the assumptions hold, and the one that an assumption names departs where it is broken."""

import copy
import math

import numpy as np
import pytest
import torch

from rwsim.optimizers import Lion
from rwsim.probe.factors import FACTORS, Turned, factors, nodes
from rwsim.probe.predict import Theory
from tests import probing
from tests.probing import FAN_IN, NEURONS, WALKS, walk
from tests.statistics import Z

# In equilibrium after so many steps, of so many.
SETTLED = {"sgdm": 400, "adamw": 1600, "lion": 800}
STEPS = {"sgdm": 1200, "adamw": 2400, "lion": 2000}
MARGIN, GROUPS = 0.01, 8
# S lambda of `WALKS`.
TAKEN = {"sgdm": 0.1 * 0.02 / 0.1, "adamw": 1e-2 * 0.2, "lion": 1e-3 * 2.0}
SLOW = {rule: pytest.param(rule, marks=pytest.mark.slow) for rule in TAKEN}


def walked(rule, **broken):
    return rule, walk(rule, STEPS[rule], **broken)


def found(rule, probe):
    """Factor -> (value, standard error over groups of neurons)."""
    reading = probe.read("weight")
    part = slice(int(np.searchsorted(reading.steps, SETTLED[rule])), None)
    whole, groups = reading.factors(part), []
    for some in np.arange(NEURONS).reshape(-1, GROUPS).T:
        one = copy.copy(reading)
        one.found = {name: values[:, some] for name, values in reading.found.items()}
        groups.append(one.factors(part))
    turned = reading.found["rotation"][part].mean() / reading.forecast(part)["predicted_rotation"].mean()
    assert math.isclose(math.prod(whole.values()), turned, rel_tol=1e-9)
    return {name: (value, np.std([one[name] for one in groups], ddof=1) / math.sqrt(GROUPS)) for name, value in whole.items()}


def departs(taken, margin=MARGIN, **expected):
    """These factors are as expected, the others 1."""
    for name, (value, error) in found(*taken).items():
        wanted = expected.get(name, 1.0)
        assert abs(value / wanted - 1) <= margin + Z * error, (name, value, wanted, error)


@pytest.mark.parametrize("rule", list(TAKEN))
def test_all_are_one_where_the_assumptions_hold(rule):
    departs(walked(rule))


@pytest.mark.parametrize("rule", ["sgdm", SLOW["adamw"]])
def test_neurons_without_gradients(rule, monkeypatch):
    """A quarter of them: the mean of the others is that of three quarters, and so is the spread of neurons. (SGDM's decay must be slow
    beside its momentum, or weights alone decay faster than by S lambda.)"""
    monkeypatch.setitem(probing.WALKS, "sgdm", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.004))
    departs(walked(rule, idle=NEURONS // 4), idle=math.sqrt(0.75), neurons=math.sqrt(0.75))


@pytest.mark.parametrize(
    ("rule", "every"), [("sgdm", 10), pytest.param("adamw", 10, marks=pytest.mark.slow), pytest.param("lion", 2, marks=pytest.mark.slow)]
)
def test_a_radial_gradient(rule, every):
    mu = {"sgdm": 0.01, "adamw": 0.1 * 0.012, "lion": 0.6 * 0.004}[rule]
    rule, probe = walked(rule, radial=mu, every=every)
    reading = probe.read("weight")
    norm_sq = reading.found["norm"][-20:].mean() ** 2
    of_grad_sq = (1e-4 * (FAN_IN - 1) / norm_sq + mu**2 * norm_sq) / FAN_IN
    # lambda_u of mu w: mu, mu over sqrt(v), and mu times the slope of a sign of n, of which n = h m + k g has the variance.
    of_sign = math.sqrt(2 / math.pi / (0.9**2 * 0.01 / 1.99 + 0.1**2))
    effect = {"sgdm": 1.0, "adamw": 1 / math.sqrt(of_grad_sq), "lion": of_sign / math.sqrt(of_grad_sq)}[rule] * mu
    late = Theory(Lion).passed({"lr": np.array([1e-3]), "weight_decay": np.array([2.0]), "betas": np.array([[0.9, 0.99]])}).item()
    decay = WALKS[rule]([reading.layer.param]).param_groups[0]["weight_decay"]
    expected = math.sqrt(1 + (late if rule == "lion" else 1) * effect / decay)
    assert expected > 1.1
    departs((rule, probe), margin=0.02, radial=expected)


@pytest.mark.parametrize(("rule", "melt", "share"), [("sgdm", 0.002, 0.5), pytest.param("adamw", 0.0004, 1.0, marks=pytest.mark.slow)])
def test_a_norm_that_follows_a_falling_learning_rate(rule, melt, share):
    """Weights go as lr (AdamW), or as its root (SGDM, whose gradients go as 1/||w||), while lr times decay stays: ||w||^2 loses 2 melt, or
    melt, of itself a step, where decay takes 2 S lambda."""
    departs(walked(rule, melt=melt), growth=math.sqrt(1 - share * melt / TAKEN[rule]))


@pytest.mark.parametrize("rule", ["sgdm", SLOW["adamw"]])
def test_correlated_gradients_do_not_move_a_linear_rule(rule):
    """They move the norm by what the theory of AR(1) says, but the rotation by nothing."""
    rule, probe = walked(rule, drift=0.5)
    departs((rule, probe))
    reading = probe.read("weight")
    part = slice(SETTLED[rule] // 10, None)
    moved = reading.measured["norm"][part].mean() / reading.forecast(part)["predicted_norm"].mean()
    common = 0.9 * 0.5 / (1 - 0.9 * 0.5)
    assert abs(moved / (1 + 2 * common) ** (0.25 if rule == "sgdm" else 0.5) - 1) < 0.03 and moved > 1.2


def test_correlated_gradients_slow_a_sign():
    """By y, a sign's linear part in common with its buffer, of gradients with an autocorrelation of 0.5^|k|; see `rwsim.probe.predict`."""
    rho, powers = 1 - TAKEN["lion"], 0.99 ** np.arange(2000)
    of_buffer, of_sign = 0.01 * powers, np.concatenate([[0.1], 0.9 * 0.01 * powers[:-1]])

    def common(one, other, drift):
        lagged = (drift ** abs(k) * (one[max(0, -k) : 2000 - max(0, k)] @ other[max(0, k) : 2000 - max(0, -k)]) for k in range(-60, 61))
        return float(sum(lagged))

    def turn(drift):
        y = 2 / math.pi * common(of_sign, of_buffer, drift) / common(of_sign, of_sign, drift)
        later = 0.9 * y / (1 - rho * 0.99)
        return (1 - rho) - later * (1 - rho**2) / (1 + 2 * rho * later)

    expected = math.sqrt(turn(0.5) / turn(0.0))
    assert expected < 0.9
    departs(walked("lion", drift=0.5, every=5), margin=0.02, memory=expected)


def test_bursts_slow_a_sign():
    """Lengths of a lognormal: the factor is the theory's with nothing measured, and leaves nothing to the memory."""
    lengths = np.exp(np.random.default_rng(0).standard_normal((4000, 1)))
    hyper = {"lr": np.array([1e-3]), "weight_decay": np.array([2.0]), "betas": np.array([[0.9, 0.99]])}
    expected = Theory(Lion).bursts(hyper, nodes(lengths))
    assert expected < 0.96
    departs(walked("lion", bursts=0.5, every=5), margin=0.02, bursts=expected)


def test_bursts_make_steps_of_sgdm_uneven_and_nothing_else():
    """With lengths L_j the step goes as sqrt(sum alpha^2j L_j^2): its mean over its root mean square, by drawing."""
    powers = 0.81 ** np.arange(60)
    lengths_sq = np.exp(2 * 0.5 * np.random.default_rng(0).standard_normal((20000, 60)))
    sizes_sq = lengths_sq @ powers
    expected = np.sqrt(sizes_sq).mean() / math.sqrt(sizes_sq.mean())
    assert expected < 0.985
    departs(walked("sgdm", bursts=0.5), steps=expected)


@pytest.mark.parametrize("rule", ["sgdm", SLOW["adamw"], SLOW["lion"]])
def test_an_optimizer_that_decays_twice_is_not_explained(rule, monkeypatch):
    """Negative control: what no assumption accounts for is left over. sqrt(2) of a random walk."""

    @torch.no_grad()
    def once_more(optimizer, *_):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(1 - TAKEN[rule])

    def doubled(params):
        optimizer = make(params)
        optimizer.register_step_pre_hook(once_more)
        return optimizer

    make = WALKS[rule]
    monkeypatch.setitem(probing.WALKS, rule, doubled)
    departs(walked(rule), margin=0.03, memory=math.sqrt(2))


def test_the_product_is_whole_whatever_goes_in():
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, two = np.sort(rng.uniform(0.5, 1.5, 2))
        turned = Turned(one, two**2, rng.uniform(0, 0.9), rng.uniform(0, 2), rng.uniform(-1e-4, 1e-3), *rng.uniform(0.5, 1, 2))
        got = factors(turned, 1.3, 1e-3)
        assert list(got) == list(FACTORS) and math.isclose(math.prod(got.values()), one / 1.3, rel_tol=1e-12)
    assert math.isnan(factors(Turned(1, 1, 0, -2, 0), 1.0, 1e-3)["radial"])
