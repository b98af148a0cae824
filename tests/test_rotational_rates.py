"""The rotation that a rotational optimizer takes on random gradients, against the rate asked for; and that rate against the theory."""

import itertools
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
from tests.rotational import CLASSES, angles, gradients, parameter, preset, seeded, warmup_cosine
from tests.statistics import SEEDS, Z, assert_agrees, mean_and_error

# After 100 steps what momentum of 0.9 and the tracker remember of the start, 2 (1 - beta) t 0.9^t of a size, is 5e-4 (after 60 it is 2 %).
# A mean of x/nu telescopes (see below): its error falls as 1/STEPS, but as the root of the rows only.
ROWS, STEPS, WARM = 64, 200, 100
# The smallest error of a rate worth catching.
CATCH = 0.01


def driven(make, fan_in, rows, seeds, **options):
    """A parameter with rows of each seed, its optimizer, and gradients: as if each seed had run alone."""
    param = nn.Parameter(torch.cat([torch.randn(rows, fan_in, generator=seeded(seed), dtype=torch.float64) for seed in seeds]))
    optimizer = make([param], **options)
    optimizer.centre()
    feeds = [gradients(rows, fan_in, seed=seed + 1000) for seed in seeds]
    return param, optimizer, map(torch.cat, zip(*feeds, strict=True))


def measured(make, fan_in, rate, steps=STEPS, warm=WARM, rows=ROWS, shrink=1.0, seeds=SEEDS, **options):
    """Mean squared angle over the rate from step `warm` on, of each seed and row: the rows are independent.

    `rate` may be a function of t; gradients shrink by a factor a step.
    """
    param, optimizer, feed = driven(make, fan_in, rows, seeds, **options)
    total = torch.zeros(len(param), dtype=torch.float64)
    for t in range(steps + warm):
        optimizer.param_groups[0]["rotation"] = now = rate(t) if callable(rate) else rate
        before = param.detach().clone()
        param.grad = next(feed) * shrink**t
        optimizer.step()
        if t >= warm:
            total += (angles(before, param.detach()) / now) ** 2 / steps
    return total.view(len(seeds), rows)


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


def spread(fan_in):
    """Range of E[angle^2]/rate^2 that the tracker's lag leaves when sizes are steady: below by fluctuating independently, above by not."""
    # The next order is v^2 times a number of order 1.
    third = (2 / (fan_in - 2)) ** 2 / 2
    return second_order(fan_in) - 1 - third, third


def settled(fan_in, rate):
    """RMS angle over the rate of updates of a steady size, and half its range: E[atan(rate r)^2] to r^6, 1 < E r^4 < 1 + v."""
    low, high = spread(fan_in)
    v = 2 / (fan_in - 2)
    low += 1 - 2 / 3 * rate**2 * (1 + v) + 23 / 45 * rate**4
    high += 1 - 2 / 3 * rate**2 + 23 / 45 * rate**4 * (1 + 3 * v)
    return math.sqrt((low + high) / 2), (high - low) / 4


def changing(rates, alpha, average=False, shrink=1.0, beta=0.9):
    """(angle/rate)^2 of each step of momentum alpha (a sum; or Adam's average, corrected) on white gradients, to leading order in 1/C.

    Of the momentum's squared length M and its component c along p, which each step turns by theta against u:

        c <- alpha (c cos theta - ||u|| sin theta),    M <- alpha^2 M + ||g||^2,    ||u||^2 = M - c^2

    A gradient's own component along p is 1/C of it. Fast turning shrinks u, to M/(1 + (alpha theta/(1 - alpha))^2) where theta is small.
    """
    along = length_sq = nu = size = theta = 0.0
    squares = []
    for t, rate in enumerate(rates, 1):
        along = alpha * (along * math.cos(theta) - size * math.sin(theta))
        length_sq = alpha**2 * length_sq + shrink ** (2 * (t - 1))
        size = math.sqrt(length_sq - along**2)
        update_sq = (size * ((1 - alpha) / (1 - alpha**t) if average else 1.0)) ** 2
        nu = beta * nu + (1 - beta) * update_sq
        theta = math.atan(rate * math.sqrt(update_sq * (1 - beta**t) / nu))
        squares.append((theta / rate) ** 2)
    return np.array(squares)


slow = pytest.mark.slow


# What is not the rate grows with it and with 1/fan_in: the rest is slow.
@pytest.mark.parametrize("rate", [pytest.param(0.003, marks=slow), pytest.param(0.05, marks=slow), 0.1])
@pytest.mark.parametrize(
    ("name", "fan_in", "rows"),
    [*((name, 32, ROWS) for name in CLASSES), *(pytest.param(name, 1024, 8, marks=slow) for name in ("sgdm", "adam"))],
)
def test_rms_angle_is_the_rate(name, fan_in, rows, rate):
    """Within 1 % of the rate, and within less of the computed value."""
    expected, bias = settled(fan_in, rate)
    for seed, squares in zip(SEEDS, measured(CLASSES[name], fan_in, rate, rows=rows), strict=True):
        value, error = mean_and_error(squares)
        assert_agrees(math.sqrt(value), error / 2, expected, catch=CATCH - (1 - expected), bias=bias, what=f"seed {seed}")


def test_rejects_a_rate_that_is_one_percent_off():
    expected, bias = settled(32, 0.1)
    value, error = mean_and_error(measured(CLASSES["adamw"], 32, 0.1, seeds=SEEDS[:1])[0])
    for wrong in (0.99, 1.01):
        with pytest.raises(AssertionError, match="off by"):
            assert_agrees(math.sqrt(value), error / 2, expected * wrong, catch=CATCH, bias=bias)


SCHEDULES = {
    "waves": lambda t: 0.01 * 10 ** math.cos(math.tau * t / 100), "warmup, cosine": lambda t: warmup_cosine(t + 1, 500, 0.1),
    "step": lambda t: 0.1 if t < WARM else 0.01,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("sgdm", schedule) for schedule in SCHEDULES), ("adam", "waves"), ("lion", "waves"),
        *(pytest.param(name, schedule, marks=slow) for name in ("adam", "lion") for schedule in SCHEDULES if schedule != "waves"),
    ],
)  # fmt: skip
def test_rms_angle_follows_a_schedule(name, schedule):
    """Within 1 % over 400 steps up to 0.1: the tracker does not see the rate, but for what turning takes from a momentum of 0.9.

    Decay in the direction and signs lose less of it: their range is up to no loss at all.
    """
    rates = [SCHEDULES[schedule](t) for t in range(WARM + 400)]
    ends = [float(changing(rates, alpha)[WARM:].mean()) for alpha in ((0.9,) if name == "sgdm" else (0.0, 0.9))]
    low, high = (of(ends) + end for of, end in zip((min, max), spread(64), strict=True))
    expected, bias = math.sqrt((low + high) / 2), (high - low) / 4
    for seed, squares in zip(SEEDS, measured(CLASSES[name], 64, SCHEDULES[schedule], steps=400, rows=32), strict=True):
        value, error = mean_and_error(squares)
        assert_agrees(math.sqrt(value), error / 2, expected, catch=CATCH - abs(expected - 1), bias=bias, what=f"seed {seed}")


# Where it is not the rate: while the size of the updates changes.


@pytest.mark.filterwarnings("ignore:No parameter of this")  # its rotation is given step by step
@pytest.mark.parametrize(
    ("name", "rate", "shrink", "warm", "off"),
    [
        ("sgdm", 0.01, 1.0, 0, 0.046), ("adamw", 0.05, 1.0, 0, -0.159),
        ("sgdm", SCHEDULES["step"], 1.0, WARM, 0.040), ("adamw", SCHEDULES["step"], 1.0, WARM, 0.039), ("sgd", 0.05, 0.98, WARM, -0.207),
    ],
)  # fmt: skip
def test_rms_angle_while_updates_change_is_as_computed(name, rate, shrink, warm, off):
    """Over 60 steps: momentum that fills, Adam's first steps (signs), a sudden end of fast turning, gradients that fall by 2 % a step.

    Algorithm 1 divides ||u|| by a root mean square of the last 1/(1 - beta) steps. Of x = ||u||^2, which is what nu gains,

        mean x/nu = mean(1 - beta nu_t-1/nu_t)/(1 - beta) = 1 + beta/(1 - beta) (mean d ln nu - mean(exp(-d ln nu) - 1 + d ln nu)):

    over N steps the squared angle is beta/(1 - beta)/N of nu's logarithmic growth too large.
    """
    make = preset(RotationalSGDM, lr=0.1) if name == "sgd" else CLASSES[name]
    rates = [rate(t) if callable(rate) else rate for t in range(warm + 60)]
    squares = changing(rates, 0.0 if name == "sgd" else 0.9, average=name == "adamw", shrink=shrink)
    expected = math.sqrt(squares[warm:].mean())
    assert expected - 1 == pytest.approx(off, abs=1e-3)
    for seed, found in zip(SEEDS, measured(make, 256, rate, steps=60, warm=warm, rows=48, shrink=shrink), strict=True):
        value, error = mean_and_error(found)
        # The next order is v = 2/(C - 2) in the square.
        assert_agrees(math.sqrt(value), error / 2, expected, catch=CATCH, bias=1 / 254, what=f"seed {seed}")


def adam_sizes(weights, grads, decay, betas=(0.9, 0.999), eps=1e-8):
    """Squared lengths of Adam+l2's directions across the weights that it met and across ones, of each step and row."""
    first = second = torch.zeros_like(weights[0])
    sizes = []
    for t, (p, grad) in enumerate(zip(weights, grads, strict=True), 1):
        g = grad + decay * p
        first, second = betas[0] * first + (1 - betas[0]) * g, betas[1] * second + (1 - betas[1]) * g * g
        u = first / (1 - betas[0] ** t) / ((second / (1 - betas[1] ** t)).sqrt() + eps)
        u = u - (u * p).sum(1, keepdim=True) / (p * p).sum(1, keepdim=True) * p - u.mean(1, keepdim=True)
        sizes.append((u * u).sum(1))
    return torch.stack(sizes)


@pytest.mark.parametrize("name", ["adam", pytest.param("wrapped adam", marks=slow)])
def test_adam_with_decay_far_above_its_gradients_turns_short_while_its_updates_shrink(name):
    """The computed value where decay in the direction is 100 times the gradient: 3 % short over steps 100 to 500, then within 1 %.

    What decay adds to u is the weights' past, across those of now, over Adam's root: at a rate of 0.01 ||u||^2 falls to a tenth in
    these steps, and the tracker lags behind. At the decay of `CLASSES`, a tenth of the gradient, `test_rms_angle_is_the_rate` holds.
    """
    rate, scale, beta, rows = 0.01, 1e-3, 0.9, 32
    param, optimizer, feed = driven(CLASSES[name], 32, rows, SEEDS, rotation=rate)
    weights, grads = [param.detach().clone()], []
    for _ in range(1000):
        param.grad = next(feed) * scale
        grads.append(param.grad)
        optimizer.step()
        weights.append(param.detach().clone())
    turned = torch.stack([angles(*pair) for pair in itertools.pairwise(weights)])
    nu, growth, computed = torch.zeros(len(param), dtype=torch.float64), [], []
    for t, size in enumerate(adam_sizes(weights[:-1], grads, 0.1), 1):
        before, nu = nu, beta * nu + (1 - beta) * size
        growth.append((nu / before).log())
        computed.append(torch.atan(rate * (size * (1 - beta**t) / nu).sqrt()))
    torch.testing.assert_close(turned, torch.stack(computed), rtol=1e-6, atol=0)
    squares, lags = (turned / rate) ** 2, -beta / (1 - beta) * torch.stack(growth)
    for its in torch.arange(len(param)).view(len(SEEDS), rows):
        early, late = (mean_and_error(squares[steps][:, its].mean(0)) for steps in (slice(100, 500), slice(500, 1000)))
        short = 1 - early[0]
        assert short > 2 * CATCH + Z * early[1]
        assert 0.8 * short < float(lags[100:500, its].mean()) < short  # the rest is what the growth fluctuates by
        assert abs(math.sqrt(late[0]) - 1) + Z * late[1] / 2 < CATCH


@pytest.mark.parametrize("fan_in", [8, 16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_short_rows_turn_as_the_trackers_jensen_term_says(fan_in, momentum):
    rate = 0.003
    kernel = [momentum**k for k in range(80)] if momentum else [1.0]
    expected, spread = jensen(sizes_of(fan_in, kernel, 7))
    value, error = mean_and_error(
        measured(RotationalSGDM, fan_in, rate, steps=500, rows=64, seeds=SEEDS[:1], momentum=momentum, rotation=rate)[0]
    )
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
