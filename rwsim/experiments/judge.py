"""Measured against predicted, layer by layer, with error bars from seeds and from time."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t

from rwsim.experiments.findings import INSIDE, OUTSIDE, UNDECIDED
from rwsim.stats.mcse import estimate
from rwsim.stats.verdict import AGREES, DIFFERS, judge
from rwsim.theory.noise import Array

# Largest relative errors: of the rotation, of the norm, on the way to equilibrium.
ROTATION, NORM, TRANSIENT = 0.03, 0.05, 0.10
# Two-sided level of every interval.
_LEVEL = 0.05
_SAID = {AGREES: INSIDE, DIFFERS: OUTSIDE}


@dataclass(frozen=True)
class Judgement:
    """A mean, its relative error and 95 % interval, and what that says of a band."""

    measured: float
    error: float
    interval: float
    verdict: str


def judged(values: Array, predicted: float, band: float) -> Judgement:
    """The mean over seeds and time against a prediction.

    The interval is the larger of two: Student's over the seeds' means, and the Monte Carlo error of correlated windows.

    Args:
        values: Shape (seed, time).
        predicted: Of the mean.
        band: Largest relative error.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> judged(1.01 + 0.01 * rng.standard_normal((3, 50)), 1.0, 0.03).verdict
        'inside'
    """
    if not np.isfinite(values).all() or not values.size:
        return Judgement(math.nan, math.nan, math.nan, UNDECIDED)
    measured = float(values.mean())
    error, interval = measured / predicted - 1, _interval(values) / predicted
    return Judgement(measured, error, interval, _verdict(error, interval, band))


def _interval(values: Array) -> float:
    means = values.mean(1)
    over_seeds = math.inf
    if len(means) > 1:
        over_seeds = float(means.std(ddof=1) / math.sqrt(len(means)) * student_t.isf(_LEVEL / 2, len(means) - 1))
    within = estimate(values.T)
    over_time = within.within * float(student_t.isf(_LEVEL / 2, within.freedom)) if values.shape[1] > 1 else math.inf
    return max(over_seeds, over_time) if math.isfinite(over_time) else over_seeds


def judged_path(values: Array, predicted: Array, band: float) -> Judgement:
    """A path against its prediction: where the mean over seeds is furthest off decides.

    Inside if it is so at every time, with its interval over the seeds; outside if it is so at one.

    Args:
        values: Shape (seed, time).
        predicted: Shape (time,).
        band: Largest relative error.
    """
    ratio = values / predicted - 1
    if not np.isfinite(ratio).all() or not ratio.size:
        return Judgement(math.nan, math.nan, math.nan, UNDECIDED)
    mean = ratio.mean(0)
    half = np.full(len(mean), math.inf)
    if len(values) > 1:
        half = ratio.std(0, ddof=1) / math.sqrt(len(values)) * student_t.isf(_LEVEL / 2, len(values) - 1)
    said = {_verdict(float(e), float(h), band) for e, h in zip(mean, half, strict=True)}
    worst = int(np.abs(mean).argmax())
    verdict = OUTSIDE if OUTSIDE in said else UNDECIDED if UNDECIDED in said else INSIDE
    return Judgement(math.nan, float(mean[worst]), float(half[worst]), verdict)


def _verdict(error: float, interval: float, band: float) -> str:
    return _SAID.get(judge(error, interval, band, 1.0).verdict, UNDECIDED)
