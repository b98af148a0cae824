"""The rotation that a rotational optimizer takes on random gradients, against the rate asked for; and that rate against the theory."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES
from rwsim.rotational import RotationalAdamW, RotationalLion, RotationalSGDM, rotational_of
from rwsim.rotational.rate import norm_rate, rotation_rate
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.noise import IdealWalk
from tests.rotational import CLASSES, angles, gradients, parameter, seeded
from tests.statistics import SEEDS, Z, assert_agrees, mean_and_error

ROWS, STEPS, WARM = 64, 120, 60
# The smallest error of a rate worth catching.
CATCH = 0.01


def measured(make, fan_in, rate, seed, steps=STEPS, **options):
    """Mean squared angle over the rate of each row after the tracker has settled: the rows are independent."""
    param = nn.Parameter(torch.randn(ROWS, fan_in, generator=seeded(seed), dtype=torch.float64))
    optimizer = make([param], **options)
    optimizer.centre()
    feed = gradients(ROWS, fan_in, seed=seed + 1000)
    total = torch.zeros(ROWS, dtype=torch.float64)
    for t in range(steps + WARM):
        optimizer.param_groups[0]["rotation"] = now = rate(t) if callable(rate) else rate
        before = param.detach().clone()
        param.grad = next(feed)
        optimizer.step()
        if t >= WARM:
            total += (angles(before, param.detach()) / now) ** 2 / steps
    return total


def jensen(sizes, beta=0.9):
    """E[x/nu] by simulation, and its standard error: `sizes` is (chain, time), each of mean 1; nu its average with decay beta."""
    nu, total, steps = np.ones(len(sizes)), np.zeros(len(sizes)), 0
    for t, size in enumerate(sizes.T):
        nu = beta * nu + (1 - beta) * size
        if t >= 100:
            total += size / nu
            steps += 1
    return mean_and_error(torch.as_tensor(total / steps))


def sizes_of(fan_in, kernel, seed, chains=128, steps=300):
    """Squared lengths of a momentum's projected updates: a moving average of white noise in the dimensions across p and ones."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((chains, steps + len(kernel), fan_in - 2))
    # The average over the kernel, as a recursion would give it.
    moved = np.apply_along_axis(lambda x: np.convolve(x, kernel, mode="valid"), 1, noise)
    return (moved**2).sum(-1) / ((fan_in - 2) * (np.asarray(kernel) ** 2).sum())


def second_order(fan_in, alpha=0.0, beta=0.9):
    """E[x/nu] to second order in Var x = v = 2/(C-2), Corr(x_t, x_t+k) = alpha^2k: 1 - E[xy] + E[y^2], y the average of x - 1."""
    v, rho = 2 / (fan_in - 2), alpha**2
    cross = (1 - beta) / (1 - beta * rho)
    square = (1 - beta) / (1 + beta) * (1 + beta * rho) / (1 - beta * rho)
    return 1 - v * (cross - square)


def test_second_order_of_the_tracker():
    """White sizes: E[x/nu] = 1 - v beta (1 - beta)/(1 + beta)."""
    assert second_order(32) == pytest.approx(1 - 2 / 30 * 0.9 * 0.1 / 1.9)
    for alpha in (0.0, 0.9):
        kernel = [alpha**k for k in range(60)] if alpha else [1.0]
        value, error = jensen(sizes_of(32, kernel, 0, chains=128, steps=300))
        # The next order is v^2 times a number of order 1.
        assert_agrees(value, error, second_order(32, alpha), catch=0.01, bias=(2 / 30) ** 2 / 2, what=f"momentum {alpha}")


# Relative curvature of the arc tangent: E[atan(r)^2]/rate^2 = 1 - 2/3 rate^2 (1 + 2 v).
@pytest.mark.parametrize("rate", [pytest.param(0.003, marks=pytest.mark.slow), 0.02])
@pytest.mark.parametrize("name", CLASSES)
def test_rms_angle_is_the_rate(name, rate):
    for seed in SEEDS if rate == 0.02 else SEEDS[:1]:
        square = measured(CLASSES[name], 32, rate, seed)
        value, error = mean_and_error(square)
        # In angle, half of it in square. Momenta are between white (alpha 0) and 0.9; Lion's signs have nearly constant length.
        bias = (1 - second_order(32)) + 2 / 3 * rate**2 * 1.2 + (2 / 30) ** 2
        assert_agrees(math.sqrt(value), error / 2, 1.0, catch=CATCH, bias=bias / 2, what=f"{name} at {rate}, seed {seed}")


def test_rejects_a_rate_that_is_three_percent_off():
    square = measured(CLASSES["adamw"], 32, 0.05, 0)
    value, error = mean_and_error(square)
    bias = ((1 - second_order(32)) + 2 / 3 * 0.05**2 * 1.2 + (2 / 30) ** 2) / 2
    for wrong in (0.97, 1.03):
        with pytest.raises(AssertionError, match="off by"):
            assert_agrees(math.sqrt(value), error / 2, wrong, catch=CATCH, bias=bias)


@pytest.mark.parametrize("name", ["adamw", "sgdm", "lion"])
@pytest.mark.parametrize("fan_in", [64, 256])
def test_rms_angle_follows_a_schedule(name, fan_in):
    """Of the rate itself, by a factor of ten; the tracker does not see it."""
    bias = (1 - second_order(fan_in)) + 2 / 3 * 0.01**2 * 1.2 + (2 / (fan_in - 2)) ** 2
    square = measured(CLASSES[name], fan_in, lambda t: 0.001 * 10 ** math.cos(t / 20), 0)
    value, error = mean_and_error(square)
    assert_agrees(math.sqrt(value), error / 2, 1.0, catch=CATCH, bias=bias / 2, what=name)


@pytest.mark.parametrize("fan_in", [8, 16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_short_rows_turn_as_the_trackers_jensen_term_says(fan_in, momentum):
    rate = 0.003
    kernel = [momentum**k for k in range(80)] if momentum else [1.0]
    expected, spread = jensen(sizes_of(fan_in, kernel, 7))
    value, error = mean_and_error(measured(RotationalSGDM, fan_in, rate, 0, steps=500, momentum=momentum, rotation=rate))
    assert_agrees(math.sqrt(value), error / 2 + spread / 2, math.sqrt(expected), catch=CATCH, what=f"{fan_in}, {momentum}")
    if not momentum:  # the term itself is seen
        assert 1 - value > Z * error


@pytest.mark.parametrize("name", CLASSES)
def test_fixed_angle_is_exact(name):
    for rate in (1e-4, 0.05, 1.0):
        param = parameter(5, 24)
        optimizer = CLASSES[name]([param], rotation=rate, fixed_angle=True)
        optimizer.centre()
        feed = gradients(5, 24)
        for _ in range(10):
            before = param.detach().clone()
            param.grad = next(feed)
            optimizer.step()
            torch.testing.assert_close(angles(before, param.detach()), torch.full((5,), rate, dtype=torch.float64), rtol=1e-10, atol=0)


# Rates and norms of the theory.

THEORY = {
    "sgdm": (RotationalSGDM, {"lr": 0.3, "weight_decay": 0.02, "momentum": 0.8}),
    "nesterov": (RotationalSGDM, {"lr": 0.3, "weight_decay": 0.02, "momentum": 0.8, "nesterov": True}),
    "adamw": (RotationalAdamW, {"lr": 0.02, "weight_decay": 0.5, "betas": (0.8, 0.99)}),
    "lion": (RotationalLion, {"lr": 0.005, "weight_decay": 0.5, "betas": (0.8, 0.95)}),
}


def of_theory(name, hyper):
    known = {key: value for key, value in hyper.items() if key in RULES[name].hyper}
    return predict_equilibrium(RULES[name](**known), IdealWalk(64))


@pytest.mark.parametrize("name", THEORY)
def test_exact_rate_is_the_predicted_rotation(name):
    make, hyper = THEORY[name]
    optimizer = make([parameter(3, 64)], rate="exact", **hyper)
    assert optimizer.rotation(optimizer.param_groups[0]) == pytest.approx(of_theory(name, hyper).exact.rotation, rel=1e-9)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "lion"])
def test_paper_rate_is_table_1s(name):
    make, hyper = THEORY[name]
    optimizer = make([parameter(3, 64)], **hyper)
    assert optimizer.rotation(optimizer.param_groups[0]) == pytest.approx(of_theory(name, hyper).paper.rotation, rel=1e-12)


def test_nesterov_has_its_own_rate():
    """sqrt(1 + 2 a (1 - a^2)) of SGDM's: its updates correlate otherwise (THEORY.md)."""
    for momentum in (0.5, 0.9, 0.99):
        rates = []
        for nesterov in (False, True):
            optimizer = RotationalSGDM([parameter(3, 64)], lr=0.1, weight_decay=1e-3, momentum=momentum, nesterov=nesterov)
            rates.append(optimizer.rotation(optimizer.param_groups[0]))
        assert rates[1] / rates[0] == pytest.approx(math.sqrt(1 + 2 * momentum * (1 - momentum**2)), rel=1e-12)


@pytest.mark.parametrize("form", ["paper", "exact"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_equilibrium_norm_is_the_predicted_one_and_follows_a_schedule(name, form):
    make, hyper = THEORY[name]
    param = parameter(3, 64)
    optimizer = make([param], rate=form, norm="equilibrium", **hyper)
    feed = gradients(3, 64)
    for lr in (hyper["lr"], hyper["lr"], hyper["lr"] / 4):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = next(feed)
        optimizer.step()
        right = getattr(of_theory(name, {**hyper, "lr": lr}), form).norm
        torch.testing.assert_close(param.detach().norm(dim=1), torch.full((3,), right, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_rules_without_a_norm_of_their_own_refuse_it(form):
    with pytest.raises(InvalidArgument, match="`norm` cannot be that of sgdm"):
        RotationalSGDM([parameter(3, 8)], lr=0.1, weight_decay=0.1, momentum=0.9, norm="equilibrium", rate=form)
    with pytest.raises(InvalidArgument, match="`norm` cannot be that of adam_l2"):
        CLASSES["adam"]([parameter(3, 8)], norm="equilibrium", rate=form)


@pytest.mark.parametrize("form", ["paper", "exact"])
@pytest.mark.parametrize("name", ["sgdm", "nesterov", "adamw", "nadamw", "signum", "qhm", "adamw_independent"])
def test_rates_follow_tensors_and_agree_with_the_walk(name, form):
    """A rate takes a tensor where lr is one; to leading order in eta lambda both forms are one."""
    rule = RULES[name]
    hyper = {"lr": 1e-3, "weight_decay": 1e-3} if name != "adamw_independent" else {"lr": 0.1, "weight_decay": 1e-6}
    values = {**{key: value for key, value in rule.hyper.items() if value is not ...}, **hyper}
    rate = rotation_rate(rule, form)(values)
    lr = torch.tensor(hyper["lr"], dtype=torch.float64)
    assert float(rotation_rate(rule, form)({**values, "lr": lr})) == pytest.approx(rate, rel=1e-12)
    assert rate == pytest.approx(predict_equilibrium(rule(**hyper), IdealWalk(2)).exact.rotation, rel=1e-3)


def test_norm_rate_scales_with_the_root_of_fan_in():
    group = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    for name in ("adamw", "lion"):
        for form in ("paper", "exact"):
            norm = norm_rate(RULES[name], form)
            assert norm(group, 128) == pytest.approx(2 * norm(group, 32), rel=1e-12)


def test_rotational_of_takes_its_own_rules_rate():
    optimizer = rotational_of("signum")([parameter(3, 8)], lr=1e-3, weight_decay=0.1)
    assert optimizer.rotation(optimizer.param_groups[0]) == rotation_rate(RULES["signum"])({"lr": 1e-3, "weight_decay": 0.1})
