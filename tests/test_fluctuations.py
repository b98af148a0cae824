"""Fluctuations about equilibrium: against a brute-force walk, exact Gaussian values, and laws of scale."""

import math
from dataclasses import astuple

import numpy as np
import pytest

from rwsim.theory.fluctuations import Fluctuations, Groups, fluctuations, mean_inverses
from rwsim.theory.lengths import Lengths
from rwsim.theory.noise import ToySystem
from tests.statistics import SEEDS, Z, mean_and_error

DIM, BATCH = 64, 32


def sgdm(rate: float, alpha: float, groups: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A and b of w' = w - m', m' = alpha m + rate w + g."""
    a = np.array([[1 - rate, -alpha], [rate, alpha]])
    return np.tile(a, (groups, 1, 1)), np.tile([-1.0, 1.0], (groups, 1))


def values(found: Fluctuations) -> np.ndarray:
    return np.concatenate([np.atleast_1d(x) for x in astuple(found)])


def length_squared(size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    share = rng.beta((BATCH - 2) / 2, (BATCH - 1) / 2, size)
    return share / (1 - share) * (BATCH - 3) / (BATCH - 2)


def walk(rate: float, alpha: float, rows: int, burn_in: int, steps: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Moments of independent neurons by time means: SGDM under the exact gradient law, all gammas one, E||g||^2 ||w||^2 = C - 1."""
    norm_sq = math.sqrt((DIM - 1) / (rate * (1 - alpha) * (2 - rate / (1 + alpha))))
    w = rng.standard_normal((rows, DIM)) * math.sqrt(norm_sq / DIM)
    m = np.zeros_like(w)
    sums = {name: np.zeros(rows) for name in ("norm", "norm_sq", "step", "step_sq", "radial", "both")}
    for t in range(burn_in + steps):
        size = np.vecdot(w, w)
        g = rng.standard_normal((rows, DIM))
        g -= (np.vecdot(w, g) / size)[:, None] * w
        g *= np.sqrt(length_squared((rows,), rng) / size)[:, None]
        m = alpha * m + rate * w + g
        if t >= burn_in:
            step, radial = np.vecdot(m, m), np.vecdot(w, m)
            after = size - 2 * radial + step
            for name, x in zip(sums, (size, size**2, step, step**2, (after - size) ** 2 / 4, step * (size + after) / 2), strict=True):
                sums[name] += x / steps
        w = w - m
    return sums


@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_steps_have_one_direction_less_than_weights(alpha):
    """Without decay to speak of a step sums Gaussian vectors of C - 1 directions: Var ||Delta||^2 / (E ||Delta||^2)^2 = 2 / (C - 1)."""
    groups = Groups.by_size(np.ones(16))
    found = fluctuations(*sgdm(1e-7, alpha), groups, np.ones(1), lengths_variance=0.0, answer=1.0)
    assert found.step == pytest.approx(2 / 15, rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS[:1])
@pytest.mark.parametrize(("rate", "alpha"), [(1e-2, 0.5), (3e-3, 0.9)])
def test_fluctuations_of_a_walk(rate, alpha, seed):
    """What is linearized is of order 1/C: good to a tenth at C = 64, without a fitted number."""
    sums = walk(rate, alpha, 1000, 300, 500, np.random.default_rng(seed))
    mean = {name: x.mean() for name, x in sums.items()}
    groups = Groups.by_size(np.ones(DIM))
    lengths = Lengths.of(ToySystem(np.ones((1, DIM)), np.ones((1, 1)), BATCH, 1.0, 1))
    found = fluctuations(*sgdm(rate, alpha), groups, np.array([mean["norm"] / DIM]), lengths_variance=lengths.variance, answer=1.0)
    # Means over rows, and their error through the derivative of each ratio.
    measured = {
        "norm": (sums["norm_sq"] / mean["norm"] ** 2 - 2 * sums["norm"] * mean["norm_sq"] / mean["norm"] ** 3, found.norm, 1),
        "step": (sums["step_sq"] / mean["step"] ** 2 - 2 * sums["step"] * mean["step_sq"] / mean["step"] ** 3, found.step, 1),
        "radial": (sums["radial"] / mean["norm"] ** 2 - 2 * sums["norm"] * mean["radial"] / mean["norm"] ** 3, found.radial, 0),
    }
    moments = {
        "norm": mean["norm_sq"] / mean["norm"] ** 2,
        "step": mean["step_sq"] / mean["step"] ** 2,
        "radial": mean["radial"] / mean["norm"] ** 2,
    }
    for name, (linear, predicted, one) in measured.items():
        value, mcse = moments[name] - one, mean_and_error(linear)[1]
        assert Z * mcse < 0.1 * predicted, name
        assert abs(value / predicted - 1) < 0.1 + 2 * mcse / predicted, name
    assert found.norm == pytest.approx(found.size, rel=1e-9)


def independent(gamma: np.ndarray, spread: np.ndarray) -> Fluctuations:
    groups = Groups(gamma**2, np.ones(len(gamma)), np.arange(len(gamma)))
    return fluctuations(*sgdm(1e-2, 0.8, len(gamma)), groups, spread, lengths_variance=0.0, answer=1.0, free=True)


def test_free_gradients_make_independent_gaussian_coordinates():
    """Every square has twice its mean squared as its variance; a step is Gaussian too, and norms change as far as products forget."""
    rng = np.random.default_rng(0)
    gamma, spread = rng.uniform(0.2, 2, 12), rng.uniform(0.5, 3, 12)
    found = independent(gamma, spread)
    share, plain = gamma**2 * spread / (gamma**2 @ spread), spread / spread.sum()
    assert found.size == pytest.approx(2 * share @ share, rel=1e-9)
    assert found.norm == pytest.approx(2 * plain @ plain, rel=1e-9)
    assert found.step == pytest.approx(2 * plain @ plain, rel=1e-9)
    np.testing.assert_allclose(found.coordinate_size, 2 * share, rtol=1e-9)
    # r^2 = E d^2 / E w^2 = 2 rate / (1 + alpha), E w d = -E d^2 / 2.
    r_sq = 2 * 1e-2 / 1.8
    assert found.radial == pytest.approx((1 - (1 - r_sq / 2) ** 2) * plain @ plain, rel=1e-9)
    # Cov(d^2, w^2) = 2 (E w d)^2, before and after the step.
    assert found.step_norm == pytest.approx(2 * (r_sq / 2) ** 2 / r_sq * plain @ plain, rel=1e-9)


def uneven(dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """gammas and a spread like SGDM's."""
    gamma = np.abs(np.random.default_rng(seed).standard_normal(dim))
    return gamma, gamma**2


@pytest.mark.parametrize("free", [False, True])
def test_scales_cancel(free):
    gamma, spread = uneven(6)
    groups = Groups.by_size(gamma**2)
    a, b = sgdm(1e-2, 0.8, 6)
    options = {"lengths_variance": 0.2, "answer": 0.7, "inverse_size": 1.1, "free": free}
    whole = values(fluctuations(a, b, groups, groups.mean(spread), **options))
    # Weights; buffers, of each coordinate in units of its own; gammas. Whatever b is, the spread says.
    buffer = np.geomspace(1e-4, 1e3, 6)
    units = np.stack([np.full(6, 1e5), buffer], -1)
    others = (
        (a, 1e-3 * b, groups, 1e6 * groups.mean(spread)),
        (a * units[:, :, None] / units[:, None, :], b * units, groups, groups.mean(spread)),
        (a, b, Groups(1e-8 * groups.gamma_sq, groups.count, groups.of), groups.mean(spread)),
    )
    for other in others:
        np.testing.assert_allclose(values(fluctuations(*other, **options)), whole, rtol=1e-8)
    # And what they answer to does not.
    assert not np.allclose(
        values(fluctuations(a, b, groups, groups.mean(spread), **{**options, "lengths_variance": 0.3})), whole, rtol=1e-2
    )


def test_alike_coordinates_are_one_group():
    options = {"lengths_variance": 0.2, "answer": 1.0}
    one, many = Groups.by_size(np.ones(12)), Groups(np.ones(12), np.ones(12), np.arange(12))
    assert len(one.count) == 1
    whole = fluctuations(*sgdm(1e-2, 0.8), one, np.ones(1), **options)
    parts = fluctuations(*sgdm(1e-2, 0.8, 12), many, np.ones(12), **options)
    np.testing.assert_allclose(values(parts)[:6], values(whole)[:6], rtol=1e-9)


@pytest.mark.parametrize("dim", [41, 64])
def test_groups_stand_for_their_coordinates(dim):
    gamma, spread = uneven(dim)
    groups, own = Groups.by_size(gamma**2), Groups(gamma**2, np.ones(dim), np.arange(dim))
    assert len(groups.count) < dim and groups.count.sum() == dim and (groups.count[-8:] == 1).all()
    np.testing.assert_allclose(groups.count * groups.gamma_sq, np.bincount(groups.of, gamma**2))
    options = {"lengths_variance": 0.1, "answer": 1.0}
    few = fluctuations(*sgdm(1e-2, 0.8, len(groups.count)), groups, groups.mean(spread), **options)
    all_ = fluctuations(*sgdm(1e-2, 0.8, dim), own, spread, **options)
    np.testing.assert_allclose(astuple(few)[:5], astuple(all_)[:5], rtol=0.01)
    np.testing.assert_allclose(few.coordinate_size[-8:], all_.coordinate_size[np.argsort(gamma)[-8:]], rtol=0.02)


def test_up_to_forty_coordinates_are_their_own_groups():
    gamma, _ = uneven(40)
    groups = Groups.by_size(gamma**2)
    assert len(groups.count) == 40 and np.array_equal(groups.mean(gamma**2)[groups.of], gamma**2)


@pytest.mark.parametrize("dim", [3, 8, 64, 1000])
def test_mean_inverses_of_alike_coordinates(dim):
    """S is a chi-square: E[1/S] = 1/(C - 2), and E[w_c^2/S^2] = E[1/S]/C."""
    whole, own = mean_inverses(Groups.by_size(np.full(dim, 0.3)), np.array([7.0]))
    assert whole == pytest.approx(1 / (1 - 2 / dim), rel=1e-5)
    assert own == pytest.approx(1 / (1 - 2 / dim), rel=1e-5)


def test_mean_inverses_of_uneven_coordinates():
    """Those of S are shared out by the coordinates, and agree with draws."""
    gamma, spread = uneven(10)
    groups = Groups.by_size(gamma**2)
    whole, own = mean_inverses(groups, groups.mean(spread))
    share = groups.gamma_sq * groups.mean(spread)
    share /= share.sum()
    assert share @ own == pytest.approx(whole, rel=1e-9)
    squares = np.random.default_rng(0).standard_normal((200_000, 10)) ** 2 * share
    inverse, error = mean_and_error(1 / squares.sum(-1))
    assert Z * error < 0.02 * whole and abs(inverse - whole) < Z * error
    first, error = mean_and_error(squares[:, -1] / squares.sum(-1) ** 2 / share[-1])
    assert Z * error < 0.02 * own[-1] and abs(first - own[-1]) < Z * error
