"""A rotation's factors on random walks: 1 where the assumptions hold, and the one that an assumption names departs where it is broken."""

import copy
import math

import numpy as np
import pytest
import torch

from rwsim.optimizers import Lion
from rwsim.probe.factors import FACTORS, Turned, factors, nodes
from rwsim.probe.predict import Theory
from rwsim.theory.equilibrium import autocorrelation, responses, sign_autocovariance, sign_closure
from rwsim.theory.noise import IdealWalk
from tests import probing
from tests.probing import FAN_IN, NEURONS, WALKS, walk
from tests.statistics import Z

STEPS, SETTLED = 1600, 800
MARGIN, GROUPS = 0.01, 8
# S lambda of `WALKS`.
TAKEN = {"sgdm": 0.1 * 0.02 / 0.1, "adamw": 1e-2 * 0.2, "lion": 1e-3 * 2.0}
RULES = tuple(TAKEN)


def found(probe, settled=SETTLED):
    """Factor -> (value, standard error over groups of neurons)."""
    reading = probe.read("weight")
    part = slice(int(np.searchsorted(reading.steps, settled)), None)
    whole, groups = reading.factors(part), []
    for some in np.arange(NEURONS).reshape(-1, GROUPS).T:
        one = copy.copy(reading)
        one.found = {name: values[:, some] for name, values in reading.found.items()}
        groups.append(one.factors(part))
    turned = reading.found["rotation"][part].mean() / reading.forecast(part)["predicted_rotation"].mean()
    assert math.isclose(math.prod(whole.values()), turned, rel_tol=1e-9)
    return {name: (value, np.std([one[name] for one in groups], ddof=1) / math.sqrt(GROUPS)) for name, value in whole.items()}


def departs(probe, margin=MARGIN, settled=SETTLED, **expected):
    """These factors are as expected, the others 1."""
    for name, (value, error) in found(probe, settled).items():
        wanted = expected.get(name, 1.0)
        assert abs(value / wanted - 1) <= margin + Z * error, (name, value, wanted, error)


@pytest.mark.parametrize("rule", RULES)
def test_all_are_one_where_the_assumptions_hold(rule):
    departs(walk(rule, STEPS))


@pytest.mark.parametrize("rule", ["sgdm", "adamw"])
def test_neurons_without_gradients(rule, monkeypatch):
    """A quarter of them: the mean of the others is that of three quarters, and so is the spread of neurons. (SGDM's decay must be slow
    beside its momentum, or weights alone decay faster than by S lambda.)"""
    monkeypatch.setitem(probing.WALKS, "sgdm", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.004))
    departs(walk(rule, STEPS, idle=NEURONS // 4), idle=math.sqrt(0.75), neurons=math.sqrt(0.75))


@pytest.mark.parametrize(("rule", "every"), [("sgdm", 10), ("adamw", 10), ("lion", 2)])
def test_a_radial_gradient(rule, every):
    mu = {"sgdm": 0.01, "adamw": 0.1 * 0.012, "lion": 0.6 * 0.004}[rule]
    probe = walk(rule, STEPS, radial=mu, every=every)
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
    departs(probe, margin=0.02, radial=expected)


@pytest.mark.parametrize(("rule", "melt", "share"), [("sgdm", 0.002, 0.5), ("adamw", 0.0004, 1.0)])
def test_a_norm_that_follows_a_falling_learning_rate(rule, melt, share):
    """Weights go as lr (AdamW), or as its root (SGDM, whose gradients go as 1/||w||), while lr times decay stays: ||w||^2 loses 2 melt, or
    melt, of itself a step, where decay takes 2 S lambda."""
    departs(walk(rule, STEPS, melt=melt), growth=math.sqrt(1 - share * melt / TAKEN[rule]))


@pytest.mark.parametrize("rule", ["sgdm", "adamw"])
def test_correlated_gradients_do_not_move_a_linear_rule(rule):
    """They move the norm by what the theory of AR(1) says, but the rotation by nothing."""
    probe = walk(rule, STEPS, drift=0.5)
    departs(probe)
    reading = probe.read("weight")
    part = slice(SETTLED // 10, None)
    moved = reading.measured["norm"][part].mean() / reading.forecast(part)["predicted_norm"].mean()
    common = 0.9 * 0.5 / (1 - 0.9 * 0.5)
    assert abs(moved / (1 + 2 * common) ** (0.25 if rule == "sgdm" else 0.5) - 1) < 0.03 and moved > 1.2


def test_correlated_gradients_slow_a_sign():
    """By the arcsine law of an AR(1): E n_t n_{t+k} is the kernel's autocorrelation convolved with 0.5^|k|."""
    kernel = responses(np.array([0.9]), np.array([[0.99]]), np.array([0.01]), 0.1, 3000)
    two_sided = autocorrelation(kernel)
    two_sided = np.concatenate([two_sided[:0:-1], two_sided])
    lags = 0.5 ** np.abs(np.arange(-60, 61))
    of_n = np.convolve(two_sided, lags, "same")
    middle = len(of_n) // 2
    gamma = 2 / math.pi * np.arcsin(of_n[middle + 1 :] / of_n[middle])
    plain = sign_autocovariance(Lion(lr=1e-3, weight_decay=2.0), IdealWalk(2))[0]
    slow, fast = (float(sign_closure(TAKEN["lion"], values)[1]) for values in (gamma, plain))
    expected = math.sqrt(slow / fast)
    assert expected < 0.9
    departs(walk("lion", 2 * STEPS, drift=0.5, every=4), margin=0.02, memory=expected)


def test_bursts_slow_a_sign():
    """Lengths of a lognormal: the factor is the theory's with nothing measured, and leaves nothing to the memory."""
    probe = walk("lion", 2 * STEPS, bursts=0.5, every=4)
    lengths = np.exp(np.random.default_rng(0).standard_normal((4000, 1)))
    hyper = {"lr": np.array([1e-3]), "weight_decay": np.array([2.0]), "betas": np.array([[0.9, 0.99]])}
    expected = Theory(Lion).bursts(hyper, nodes(lengths))
    assert expected < 0.96
    departs(probe, margin=0.02, bursts=expected)


def test_bursts_make_steps_of_sgdm_uneven_and_nothing_else():
    """With lengths L_j the step goes as sqrt(sum alpha^2j L_j^2): its mean over its root mean square, by drawing."""
    powers = 0.81 ** np.arange(60)
    lengths_sq = np.exp(2 * 0.5 * np.random.default_rng(0).standard_normal((20000, 60)))
    sizes_sq = lengths_sq @ powers
    expected = np.sqrt(sizes_sq).mean() / math.sqrt(sizes_sq.mean())
    assert expected < 0.97
    departs(walk("sgdm", 2 * STEPS, bursts=0.5), margin=0.015, steps=expected)


@pytest.mark.parametrize("rule", RULES)
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
    departs(walk(rule, STEPS), margin=0.03, memory=math.sqrt(2))


def test_the_product_is_whole_whatever_goes_in():
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, two, three = np.sort(rng.uniform(0.5, 1.5, 3))
        turned = Turned(one, two, three**2, rng.uniform(0, 0.9), rng.uniform(0, 2), rng.uniform(-1e-4, 1e-3), rng.uniform(0.5, 1))
        got = factors(turned, 1.3, 1e-3)
        assert list(got) == list(FACTORS) and math.isclose(math.prod(got.values()), one / 1.3, rel_tol=1e-12)
    assert math.isnan(factors(Turned(1, 1, 1, 0, -2, 0), 1.0, 1e-3)["radial"])
