"""The rule of the studies: what runs of two arms say of a claim. Runs of equal seeds are paired: same initial weights, same batches.

| claim | held | did not hold | else |
|---|---|---|---|
| `better`: a above b | the interval of a - b is above 0 | it is below 0, or below the smallest difference of interest and around 0 | undecided |
| `no_worse`: a not below b by the margin | it is above -margin | it is below -margin | undecided |
| `par`: a like b | it lies within +-margin | it lies outside | undecided |
| `near`: measured like predicted | that of measured / predicted - 1 lies within +-band | it lies outside | undecided |

Intervals are of 95 %, Student's over the seeds. More seeds decide more; wider margins are not given.
"""  # noqa: E501 - a table's row is a line

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t

from rwsim.theory.noise import Array

HELD, FAILED, UNDECIDED, PARTLY = "held", "did not hold", "undecided", "held in part"
# Smallest differences of interest: points of accuracy, nats of loss.
MARGINS = {"points": 0.5, "nats": 0.02}
_LEVEL = 0.05


@dataclass(frozen=True)
class Claim:
    """A comparison and what it says.

    Attributes:
        subject: Of which training.
        claim: What is claimed, a clause.
        rule: A function of this module.
        verdict: held, did not hold or undecided.
        difference: Mean over seeds of a - b; of `near`: of measured / predicted - 1.
        interval: Half width of its 95 % interval.
        margin: Smallest difference of interest, or the band; 0 where there is none.
        unit: ``points`` of accuracy, ``nats`` of loss (a lower loss counts as higher), "" for others.
        a, a_spread, b, b_spread: Means and standard deviations over the seeds; of losses, as they are.
        seeds: Pairs.
        note: What must be known beside it.
    """

    subject: str
    claim: str
    rule: str
    verdict: str
    difference: float
    interval: float
    margin: float
    unit: str
    a: float
    a_spread: float
    b: float
    b_spread: float
    seeds: int
    note: str = ""

    def sentence(self) -> str:
        """Made from the numbers."""
        if self.rule == "near":
            said = f"off by {self.difference:+.1%} ± {self.interval:.1%}, band {self.margin:.0%}"
        else:
            unit = f" {self.unit}" if self.unit else ""
            said = f"{self.difference:+.3g} ± {self.interval:.2g}{unit}"
            if self.rule in ("par", "no_worse"):
                said += f", margin {self.margin:g}"
        means = f"{self.a:.4g} ± {self.a_spread:.2g} against {self.b:.4g} ± {self.b_spread:.2g}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.subject}: {self.claim}: **{self.verdict}**, {said} over {self.seeds} seeds ({means}){note}."


def better(subject: str, claim: str, a: Array, b: Array, unit: str = "", note: str = "") -> Claim:
    """a above b, paired by seed.

    Args:
        subject: Of which training.
        claim: A clause.
        a, b: Scores, higher is better, shape (seed,).
        unit: A key of `MARGINS`, or "": then every difference is of interest.
        note: What must be known beside it.

    Example:
        >>> better("x", "a above b", np.array([92.0, 92.4, 92.1]), np.array([90.0, 90.3, 90.2]), "points").verdict
        'held'
    """
    mean, half = interval(_paired(a, b))
    margin = MARGINS.get(unit, 0.0)
    if mean - half > 0:
        verdict = HELD
        if mean + half < margin:
            note = _joined(note, f"a difference below {margin:g} {unit}")
    elif mean + half < 0:
        verdict = FAILED
    elif mean + half < margin:
        verdict, note = FAILED, _joined(note, f"any gain is below {margin:g} {unit}")
    else:
        verdict = UNDECIDED
    return _claim(subject, claim, "better", verdict, a, b, mean, half, margin, unit, note)


def no_worse(subject: str, claim: str, a: Array, b: Array, unit: str, note: str = "") -> Claim:
    """a not below b by more than the margin of `unit`; see `better`."""
    mean, half = interval(_paired(a, b))
    margin = MARGINS[unit]
    verdict = HELD if mean - half > -margin else FAILED if mean + half < -margin else UNDECIDED
    return _claim(subject, claim, "no_worse", verdict, a, b, mean, half, margin, unit, note)


def par(subject: str, claim: str, a: Array, b: Array, unit: str, note: str = "") -> Claim:
    """a like b, within the margin of `unit` either way; see `better`.

    Example:
        >>> par("x", "a like b", np.array([92.0, 92.4, 92.1]), np.array([92.0, 92.4, 92.1]), "points").verdict
        'held'
    """
    mean, half = interval(_paired(a, b))
    margin = MARGINS[unit]
    verdict = _within(mean, half, margin)
    if verdict == FAILED:
        note = _joined(note, "better by more than the margin" if mean > 0 else "worse by more than the margin")
    return _claim(subject, claim, "par", verdict, a, b, mean, half, margin, unit, note)


def near(subject: str, claim: str, measured: Array, predicted: Array, band: float, note: str = "") -> Claim:
    """Measured like predicted, within a relative band.

    Args:
        subject: Of which training.
        claim: A clause.
        measured, predicted: Shape (seed,), positive.
        band: Largest relative error.
        note: What must be known beside it.
    """
    count = min(len(measured), len(predicted))
    mean, half = interval(measured[:count] / predicted[:count] - 1)
    return _claim(subject, claim, "near", _within(mean, half, band), measured, predicted, mean, half, band, "", note)


def interval(differences: Array) -> tuple[float, float]:
    """(mean, half width of its 95 % interval by Student's t); infinite for a single value, nan for values that are not finite."""
    if not len(differences) or not np.isfinite(differences).all():
        return math.nan, math.nan
    if len(differences) < 2:
        return float(differences.mean()), math.inf
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()), error * float(student_t.isf(_LEVEL / 2, len(differences) - 1))


def overall(verdicts: Iterable[str]) -> str:
    """Of many: held (all of them), held in part (some), did not hold (none, and one did not), undecided.

    Example:
        >>> overall([])
        'undecided'
    """
    said = set(verdicts)
    if said == {HELD}:
        return HELD
    return PARTLY if HELD in said else FAILED if FAILED in said else UNDECIDED


def _paired(a: Array, b: Array) -> Array:
    count = min(len(a), len(b))
    return a[:count] - b[:count]


def _within(mean: float, half: float, margin: float) -> str:
    if -margin <= mean - half and mean + half <= margin:
        return HELD
    return FAILED if mean - half > margin or mean + half < -margin else UNDECIDED


def _joined(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def _claim(
    subject: str, claim: str, rule: str, verdict: str, a: Array, b: Array, mean: float, half: float, margin: float, unit: str, note: str,
) -> Claim:  # fmt: skip
    count = min(len(a), len(b))
    spread = [float(x[:count].std(ddof=1)) if count > 1 else math.nan for x in (a, b)]
    sign = -1.0 if unit == "nats" else 1.0
    means = [sign * float(x[:count].mean()) if count else math.nan for x in (a, b)]
    return Claim(subject, claim, rule, verdict, mean, half, margin, unit, means[0], spread[0], means[1], spread[1], count, note)
