"""Error bars on processes with a known answer, against arviz, and the verdicts built on them."""

import math

import numpy as np
import pytest
from arviz_stats.base import array_stats
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from rwsim.stats.mcse import estimate, integrated_time
from rwsim.stats.verdict import AGREES, DIFFERS, UNDECIDED, critical_value, judge
from tests.statistics import SEEDS


def ar1(a: float, time: int, units: int, seed: int) -> np.ndarray:
    """Stationary AR(1) chains of unit innovation variance: tau = (1 + a) / (1 - a)."""
    noise = np.random.default_rng(seed).standard_normal((time + 2000, units))
    return lfilter([1], [1, -a], noise, axis=0)[2000:]


def true_variance_of_mean(a: float, time: int) -> float:
    k = np.arange(1, time)
    return (1 + 2 * ((1 - k / time) * a**k).sum()) / time / (1 - a * a)


@pytest.mark.parametrize("a", [0.0, 0.5, 0.9, -0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_autocorrelation_time_of_ar1(a, seed):
    time, _, _ = integrated_time(ar1(a, 20_000, 8, seed))
    assert time == pytest.approx((1 + a) / (1 - a), rel=0.08)


@pytest.mark.parametrize(("a", "time", "units"), [(0.0, 500, 64), (0.9, 400, 128), (0.98, 300, 128), (0.9, 20_000, 4)])
@pytest.mark.parametrize("seed", SEEDS)
def test_mcse_of_ar1(a, time, units, seed):
    """From chains hundreds of autocorrelation times long to chains of three: the truth is met, never undercut by much."""
    found = estimate(ar1(a, time, units, seed))
    truth = math.sqrt(true_variance_of_mean(a, time) / units)
    assert 0.85 < found.mcse / truth < 1.35
    assert found.mcse == max(x for x in (found.within, found.between) if math.isfinite(x))


@pytest.mark.parametrize("time", [400, 1600])
def test_no_error_bar_is_wider_than_the_truth_on_average(time):
    """Of chains of 12 and 50 autocorrelation times: at 12 the error was a sixth too wide when lags were tapered twice."""
    a = 31 / 33
    within = np.mean([estimate(ar1(a, time, 128, seed)).within for seed in range(20)])
    assert 0.9 < within / math.sqrt(true_variance_of_mean(a, time) / 128) < 1.04


def test_intervals_cover_as_often_as_they_say():
    """200 experiments: 95 % intervals of correlated chains with units of different means."""
    share = np.linspace(0.5, 1.5, 32)
    misses = 0
    for seed in range(200):
        chains = share * (10 + ar1(0.9, 300, 32, seed))
        found = estimate(chains, share)
        misses += abs(found.mean - 10) > critical_value(1, found.freedom, 0.05) * found.mcse
    assert misses <= 20  # 10 expected; more than 20 has probability 0.1 %
    assert misses >= 1  # an interval that never misses is too wide


@pytest.mark.parametrize(("a", "time", "units"), [(0.9, 600, 1), (0.9, 1500, 1), (0.95, 400, 4), (0.9, 300, 8)])
def test_rare_errors_stay_rare_with_few_units(a, time, units):
    """2,000 experiments at a rate of 0.5 %: few units have few degrees of freedom, and the quantile must know it."""
    misses = 0
    for seed in range(2000):
        found = estimate(ar1(a, time, units, seed))
        misses += abs(found.mean) > critical_value(1, found.freedom, 0.005) * found.mcse
    assert misses <= 26  # 10 expected at most; four deviations


def test_known_differences_between_units_are_no_error():
    share = np.linspace(0.1, 3.0, 32)
    chains = share * (10 + np.random.default_rng(0).standard_normal((400, 32)))
    told, blind = estimate(chains, share), estimate(chains)
    assert told.mcse < 0.1 * blind.mcse
    # A wrong expectation can only widen the bar.
    assert estimate(chains, share**1.1).mcse > told.mcse


def test_agrees_with_arviz():
    chains = ar1(0.8, 5000, 4, 0)
    ours = estimate(chains)
    assert ours.within == pytest.approx(float(array_stats.mcse(chains.T, chain_axis=0, draw_axis=1, method="mean")), rel=0.1)
    assert ours.effective == pytest.approx(float(array_stats.ess(chains.T, chain_axis=0, draw_axis=1, method="mean")), rel=0.2)


def test_degenerate_chains():
    constant = estimate(np.full((50, 10), 3.0))
    assert constant.mcse == 0 and constant.mean == 3
    single = estimate(np.ones((1, 3)))
    assert math.isnan(single.mcse)
    assert math.isnan(estimate(np.random.default_rng(0).standard_normal((50, 3))).between)


@given(error=st.floats(-0.2, 0.2), mcse=st.floats(0, 0.05), margin=st.floats(0.001, 0.1))
def test_verdicts_are_exclusive_and_honest(error, mcse, margin):
    verdict = judge(error, mcse, margin, 4.0)
    low, high = error - 4 * mcse, error + 4 * mcse
    inside, outside = -margin <= low and high <= margin, low > margin or high < -margin
    assert verdict.verdict == (AGREES if inside else DIFFERS if outside else UNDECIDED)
    assert judge(error, mcse, margin, 4.0, obstacle="no").verdict == UNDECIDED


def test_nothing_finite_decides_nothing():
    assert judge(math.nan, 0.1, 0.02, 4.0).verdict == UNDECIDED
    assert judge(0.0, math.nan, 0.02, 4.0).verdict == UNDECIDED


def test_critical_value_splits_one_rate():
    assert critical_value(1, 1e9, 0.05) == pytest.approx(1.96, abs=0.001)
    assert critical_value(15, 1e9) > critical_value(3, 1e9) and critical_value(15, 7.0) > 2 * critical_value(15, 1e9)
