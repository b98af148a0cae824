"""Random gradient lengths: roots and ratios against closed forms, small 1 - beta_2 and brute force."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter
from scipy.special import gammaln
from scipy.stats import chi

from rwsim.theory.lengths import (
    FiniteAverage,
    Lengths,
    blocks,
    geometric,
    horizon,
    mean_root,
    mean_root_normal,
    mean_root_normalized,
    over_lags,
)
from rwsim.theory.noise import IdealWalk, ToySystem
from tests.statistics import SEEDS, assert_agrees, mean_and_error

# Roots are integrals over a finite range of s, which leaves 2e-7.
RANGE = 3e-7
# The transforms' own error.
FLOOR = 6e-6
CONSTANT = Lengths.of(IdealWalk(4))


def toy(batch: int) -> Lengths:
    return Lengths.of(ToySystem(np.ones((1, 4)), np.ones((1, 1)), batch, 1.0, 1))


def momentum_kernel(rate: float) -> np.ndarray:
    return (1 - rate) * rate ** np.arange(horizon(rate) + 1.0)


def draw(batch: int, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """l^2 = chi2_{B-2} / chi2_{B-1} (B-3)/(B-2) itself, not its quadrature."""
    share = rng.beta((batch - 2) / 2, (batch - 1) / 2, size)
    return share / (1 - share) * (batch - 3) / (batch - 2)


@pytest.mark.parametrize("batch", [8, 32, 512])
def test_mean_root_of_one_step(batch):
    """E l from Gamma functions; the law's 24 nodes are exact for polynomials only."""
    a, b = (batch - 2) / 2, (batch - 1) / 2
    expected = math.exp(gammaln(a + 0.5) - gammaln(a) + gammaln(b - 0.5) - gammaln(b)) * math.sqrt((b - 1) / a)
    law = toy(batch)
    assert mean_root(np.ones(1), law) == pytest.approx(law.weights @ np.sqrt(law.nodes), abs=1e-6)
    assert mean_root(np.ones(1), law) == pytest.approx(expected, abs=1e-4)
    assert expected < 0.9997  # one is told from a constant length


def test_mean_root_of_two_points():
    law = Lengths(np.array([0.5, 1.5]), np.array([0.5, 0.5]))
    # V = (l_0^2 + l_1^2) / 2 is 1/2, 1, 3/2 with probabilities 1/4, 1/2, 1/4.
    assert mean_root(np.array([3.0, -3.0]), law) == pytest.approx(0.5 + (math.sqrt(0.5) + math.sqrt(1.5)) / 4, abs=RANGE)
    assert mean_root(np.array([1.0, 0.0]), law) == pytest.approx((math.sqrt(0.5) + math.sqrt(1.5)) / 2, abs=RANGE)


def test_mean_root_of_long_kernels_is_one():
    """Var V falls as 1/length: 1 - variance/8 sum a^4 / (sum a^2)^2, and the next order falls as its square."""
    law = toy(16)
    found = np.array([mean_root(np.ones(n), law) - 1 + law.variance / (8 * n) for n in (64, 128, 256)])
    assert abs(found[2]) < 2e-6 and 3.5 < found[0] / found[1] < 4.5
    assert mean_root(np.ones(5), CONSTANT) == pytest.approx(1, abs=RANGE)


@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_mean_root_normal_is_the_chi_mean(dim):
    assert mean_root_normal(np.full(dim, 3.7)) == pytest.approx(chi.mean(dim) / math.sqrt(dim), abs=RANGE)


def test_mean_root_normal_of_uneven_variances():
    """One coordinate that carries all is |z|; two by an elliptic mean."""
    assert mean_root_normal(np.array([1.0, 0.0])) == pytest.approx(math.sqrt(2 / math.pi), abs=RANGE)
    angle = (np.arange(4000) + 0.5) * math.pi / 2000
    mean = np.sqrt(0.9 * np.cos(angle) ** 2 + 0.1 * np.sin(angle) ** 2).mean() * math.sqrt(math.pi / 2)
    assert mean_root_normal(np.array([9.0, 1.0])) == pytest.approx(mean, abs=RANGE)


laws = st.lists(st.tuples(st.floats(0.05, 20), st.floats(0.01, 1)), min_size=1, max_size=5).map(
    lambda pairs: (lambda x, p: Lengths(x / (p @ x / p.sum()), p / p.sum()))(*np.array(pairs).T)
)
kernels = st.lists(st.floats(0.01, 10), min_size=1, max_size=12).map(np.array)


@given(law=laws, kernel=kernels, factor=st.floats(1e-3, 1e3), shuffle=st.randoms(use_true_random=False))
def test_mean_root_is_a_mean_over_an_rms(law, kernel, factor, shuffle):
    found = mean_root(kernel, law)
    assert 0 < found <= 1 + RANGE
    order = shuffle.sample(range(len(kernel)), len(kernel))
    assert mean_root(factor * kernel[order], law) == pytest.approx(found, abs=1e-9)
    assert 0 < mean_root_normal(kernel) <= 1
    assert mean_root_normal(factor * kernel[order]) == pytest.approx(mean_root_normal(kernel), abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta_2", [0.9, 0.99])
@pytest.mark.parametrize("beta_1", [0.0, 0.9])
def test_mean_root_normalized_against_brute_force(beta_1, beta_2, seed):
    """Its distance from 1, to a twentieth."""
    kernel, law = momentum_kernel(beta_1), toy(8)
    lengths = draw(8, (2000, 1600), np.random.default_rng(seed))
    # a_j^2 ~ beta_1^{2j}: V, and W's part that takes a coordinate's own square.
    e_0 = kernel[0] ** 2 / (kernel @ kernel)
    top = lfilter([e_0], [1, -(beta_1**2)], lengths)
    bottom = (1 - beta_2) * (lfilter([1], [1, -beta_2], lengths) + 2 * e_0 * lfilter([1], [1, -(beta_1**2) * beta_2], lengths))
    ratio = (top / bottom)[:, 1000:]
    root, square = np.sqrt(ratio).mean(-1), ratio.mean(-1)
    measured = root.mean() / math.sqrt(square.mean())
    _, mcse = mean_and_error(root / root.mean() - square / (2 * square.mean()))
    assert_agrees(1 - measured, mcse, 1 - mean_root_normalized(kernel, beta_2, law), catch=0.05, what=f"{beta_1} {beta_2}")


LAGS = (0, 1, 4)
BETA_2 = 0.9


@cache
def simulated(beta_1: float, batch: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Squares as two momenta pair them, momentum, v and the parts of v that the last `LAGS` steps make up; burnt in."""
    rng = np.random.default_rng(seed)
    size = (25_000, 190)
    g = rng.standard_normal(size) * np.sqrt(draw(batch, size, rng))
    momentum = lfilter([1 - beta_1], [1, -beta_1], g)
    v = lfilter([1 - BETA_2], [1, -BETA_2], g**2)
    recent = np.stack([v - BETA_2**k * np.pad(v, ((0, 0), (k, 0)))[:, : size[1]] for k in LAGS])
    # sum_j a_j a_{j+k} g_{t-j}^2 over sum_j a_j a_{j+k}, the same at all k.
    paired = lfilter([1 - beta_1**2], [1, -(beta_1**2)], g**2)
    return paired[:, 150:], momentum[:, 150:], v[:, 150:], recent[:, :, 150:]


@pytest.mark.parametrize("seed", SEEDS[:1])
@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize("beta_1", [0.5, 0.9])
def test_finite_average_against_brute_force(beta_1, batch, seed):
    paired, momentum, v, recent = simulated(beta_1, batch, seed)
    kernel = momentum_kernel(beta_1)
    for eps in (0.0, 0.5):
        average = FiniteAverage(kernel, BETA_2, eps, toy(batch))
        u = momentum / (np.sqrt(v) + eps)
        for i, k in enumerate(LAGS):
            plain = kernel[: len(kernel) - k] @ kernel[k:]
            then, now = slice(0, u.shape[1] - k), slice(k, None)
            if k == 0 or beta_1 == 0.9:
                found, mcse = mean_and_error((u[:, then] * u[:, now]).mean(-1) * (1 + eps) ** 2 / plain)
                assert_agrees(found, mcse, average.autocovariance(k), catch=0.04, what=f"autocovariance {k}, eps {eps}")
            # The same with the mean over all signs of the gradients taken, which changes no v.
            products = paired[:, then] / ((np.sqrt(v) + eps)[:, then] * (np.sqrt(v) + eps)[:, now])
            found, mcse = mean_and_error(products.mean(-1) * (1 + eps) ** 2)
            assert_agrees(found, mcse, average.autocovariance(k), catch=0.015, what=f"autocovariance {k} over signs, eps {eps}")
            if k and eps == 0.0:
                found, mcse = mean_and_error((products * (recent[i] / v)[:, now]).mean(-1))
                assert_agrees(found, mcse, average.follows(k), catch=0.02, what=f"follows {k}")
        found, mcse = mean_and_error((1 / (np.sqrt(v) + eps)).mean(-1) * (1 + eps))
        assert_agrees(found, mcse, average.inverse, catch=0.01, what=f"inverse, eps {eps}")


@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9])
def test_a_constant_beside_the_gradients(beta_1):
    """`joined` as the slope of the mean update in a constant that joins all gradients, by a central difference."""
    rng = np.random.default_rng(0)
    size = (40_000, 170)
    g = rng.standard_normal(size) * np.sqrt(draw(64, size, rng))
    weights = (1 - beta_1) * beta_1 ** np.arange(size[1])[::-1], (1 - BETA_2) * BETA_2 ** np.arange(size[1])[::-1]
    up, down = ((g + c) @ weights[0] / np.sqrt((g + c) ** 2 @ weights[1]) for c in (0.01, -0.01))
    found, mcse = mean_and_error((up - down) / 0.02)
    average = FiniteAverage(momentum_kernel(beta_1), BETA_2, 0.0, toy(64))
    assert_agrees(found, mcse, average.joined, catch=0.02)
    assert abs(average.joined / average.inverse - 1) > 0.03  # not without its second term


@pytest.mark.parametrize("beta_1", [0.5, 0.9])
def test_finite_average_to_first_order(beta_1):
    """THEORY.md section 4: what is left is of second order in 1 - beta_2."""
    law, kernel = toy(16), momentum_kernel(beta_1)
    kurt = 3 * (1 + law.variance)
    rest = []
    for gap in (5e-3, 2.5e-3):
        rate, average = 1 - gap, FiniteAverage(kernel, 1 - gap, 0.0, law)
        var = (kurt - 1) * gap / (1 + rate)
        own = gap * (1 - beta_1) / (1 - beta_1 * rate)
        # Their second orders are as small as the transforms' own error.
        assert average.inverse == pytest.approx(1 + 3 / 8 * var, abs=2 * gap**2 + FLOOR)
        assert average.joined == pytest.approx(1 + 3 / 8 * var - own, abs=2 * gap**2 + FLOOR)
        left = []
        for k in (0, 1, 10):
            fresh = (1 + rate**k) / 2 * (1 - beta_1**2) / (1 - beta_1**2 * rate) - (3 / 4 + rate**k / 4) / (1 + rate)
            left.append(average.autocovariance(k) - (1 - gap * (kurt - 1) * fresh))
            if k:
                left.append(average.follows(k) - (1 - rate**k))
        rest.append(left)
    coarse, fine = np.array(rest)
    assert np.abs(fine).min() > 5 * FLOOR
    np.testing.assert_allclose(coarse / fine, 4.0, rtol=0.2)


def test_a_constant_normalizer():
    """Under an eps far above the gradient, to 1/eps; and a long memory."""
    for average, error in (
        (FiniteAverage(momentum_kernel(0.9), 0.9, 300.0, toy(8)), 2 / 300),
        (FiniteAverage(momentum_kernel(0.9), 1 - 1e-6, 0.0, toy(64)), FLOOR),
    ):
        for found in (average.autocovariance(0), average.autocovariance(3), average.inverse):
            assert found == pytest.approx(1, abs=error)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.99, 0.99999])
@pytest.mark.parametrize("count", [1, 48, 49, 700, 20_000])
def test_blocks_cover_the_lags(count, rate):
    share = 0.04
    first, size = blocks(count, rate, share)
    assert size.sum() == count and np.array_equal(first, np.cumsum(size) - size) and size.min() > 0
    if rate:
        assert (size[size > 1] * -math.log(rate) <= share).all()
        assert geometric(rate, first, size) @ size == pytest.approx(1 - rate**count, rel=1e-9)


def test_over_lags_interpolates():
    assert np.array_equal(over_lags(lambda k: 1.0 + k, 3), [1, 2, 3, 4])
    lags = np.arange(2001)
    np.testing.assert_allclose(over_lags(lambda k: 1 + 0.1 * 0.99**k, 2000), 1 + 0.1 * 0.99**lags, atol=2e-4)
