"""What a probe's records say, layer by layer, in plain words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rwsim.errors import InvalidArgument
from rwsim.probe.factors import FACTORS
from rwsim.probe.quantities import over_neurons
from rwsim.probe.reading import Reading
from rwsim.probe.transient import Transients
from rwsim.stats.burnin import SHORTEST, truncation
from rwsim.stats.mcse import estimate, integrated_time
from rwsim.theory.noise import Array

# The predicted path is in equilibrium where its norm is within this of its equilibrium's, and its rotation.
_NEAR = 0.05
# A layer's norm still moves if its trend gains more over the time, relative, and more than so many standard errors.
_MOVES, _SIGMAS = 0.02, 4.0
# Rotation that is off by more is called too fast or too slow.
_OFF = 0.05
# Neurons whose rotation spreads by more, relative and beyond the error of each, are imbalanced.
_SPREAD = 0.2
# A factor of its rotation that is off by more is named.
_FACTOR = 0.02
# An assumption fails where it is off by more: lambda_u over lambda, cosine of momentum and gradient, mean square of g/sqrt(v), mean over
# RMS rotation.
_RADIAL, _COSINE, _SCALED, _UNEVEN = 0.1, 0.05, 0.1, 0.03


@dataclass(frozen=True)
class Row:
    """What was found of one layer over the measured steps `first` to `last`.

    Attributes:
        layer: Its name.
        state: ``equilibrium``, ``transient`` (the prediction is still on its way), ``drifting`` (it is not, but the measured norm is), ``no
            prediction`` or ``too short``.
        settles: First step at which the predicted path is in equilibrium, or None.
        first, last: Steps that the averages are over.
        rotation, rotation_mcse: Mean over neurons and steps, radians per step; its standard error.
        rotation_rms: Root mean square likewise: what the theory predicts. Where steps vary in size the mean is smaller.
        norm, norm_mcse: Root mean square over neurons, mean over steps.
        predicted: Name -> mean over the steps, as of `rwsim.probe.reading.PREDICTIONS`, with averages over the same steps.
        pace: ``as predicted``, ``too fast``, ``too slow`` or ``undecided``, against the plain prediction.
        spread: Standard deviation over neurons of their mean rotation, relative, what their own errors explain taken out; NaN if unknown.
        fails: Assumption -> how it fails, in words.
        factors: What the rotation is off by; see `rwsim.probe.factors`. Empty without a prediction.
        lambda_ratio, momentum_cosine, scaled_grad_sq: Means of lambda_u/lambda, of the cosine of momentum and gradient, and of
            ||g/sqrt(v)||^2/C; NaN where they do not apply.
    """

    layer: str
    state: str
    settles: int | None
    first: int
    last: int
    rotation: float
    rotation_mcse: float
    rotation_rms: float
    norm: float
    norm_mcse: float
    predicted: Mapping[str, float]
    pace: str
    spread: float
    fails: Mapping[str, str]
    factors: Mapping[str, float]
    lambda_ratio: float
    momentum_cosine: float
    scaled_grad_sq: float


@dataclass(frozen=True)
class Diagnosis:
    """``.rows``, one a layer; ``.text``, the same in plain words."""

    rows: tuple[Row, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def diagnosis(readings: Sequence[Reading], transients: Transients, after: int | None, notes: Mapping[str, str]) -> Diagnosis:
    """Look at the measured steps beyond `after`; default: beyond where a layer's predicted path is in equilibrium.

    A layer is in equilibrium if its predicted path is, by then, within 5 % of equilibrium in norm and rotation, and the measured norm no
    longer moves: the line through it gains less than 2 %, or than 4 of its standard errors, from autocorrelation or between neurons.

    Raises:
        InvalidArgument: Fewer than 8 measured steps.
    """
    steps = readings[0].steps
    if len(steps) < SHORTEST:
        raise InvalidArgument("probe", f"must have measured at least {SHORTEST} steps", len(steps), "train on, or measure more often")
    if after is not None and int((steps > after).sum()) < SHORTEST:
        raise InvalidArgument("after", f"must leave at least {SHORTEST} measured steps", after, f"the last one is {steps[-1]}")
    rows = tuple(_row(reading, transients, after) for reading in readings)
    return Diagnosis(rows, "\n".join(_words(rows, notes)))


def _row(reading: Reading, transients: Transients, after: int | None) -> Row:
    steps, measured = reading.steps, reading.measured
    settles = _settles(reading, transients)
    if after is not None:
        first = int(np.searchsorted(steps, after, side="right"))
    else:
        first = int(np.searchsorted(steps, settles)) if settles is not None else 0
        # No more than leaves enough; what the series itself shows of a transient goes too.
        first = min(first, len(steps) - SHORTEST)
        first += int(truncation(measured["rotation"][first:])) if np.isfinite(measured["rotation"][first:]).all() else 0
        first = min(first, len(steps) - SHORTEST)
    part = slice(first, None)
    rotation, rotation_mcse = _mean(measured["rotation"][part])
    norm, norm_mcse = _mean(measured["norm"][part])
    predicted = {name: _finite_mean(values) for name, values in reading.forecast(part).items()}
    state = _state(reading.found["norm"][part], predicted, settles, int(steps[first]))
    turned = reading.found["rotation"][part]
    momentum = _finite_mean(np.cos(reading.found["momentum_grad_angle"][part]))
    scaled = _finite_mean(reading.found["scaled_grad"][part] ** 2)
    rms = float(np.sqrt(_finite_mean(turned**2)))
    ratio = predicted["lambda_ratio"]
    return Row(
        reading.layer.name, state, settles, int(steps[first]), int(steps[-1]), rotation, rotation_mcse, rms, norm, norm_mcse, predicted,
        _pace(rotation, rotation_mcse, predicted["predicted_rotation"]), _spread(turned),
        _fails(ratio, momentum, scaled, rotation / rms if rms else math.nan), reading.factors(part), ratio, momentum, scaled,
    )  # fmt: skip


def _settles(reading: Reading, transients: Transients) -> int | None:
    """The first step from which on the predicted path, as the run's hyperparameters went, stays near equilibrium at the measured steps."""
    norm, rotation = (x[reading.steps - 1] for x in reading.transient(transients, effective=True))
    wanted = reading.predicted
    with np.errstate(invalid="ignore"):
        off = np.maximum(np.abs(norm / wanted["effective_norm"] - 1), np.abs(rotation / wanted["effective_rotation"] - 1))
    # Without a number there is no equilibrium.
    far = np.flatnonzero(~(off <= _NEAR))
    at = int(far[-1]) + 1 if len(far) else 0
    return int(reading.steps[at]) if at < len(off) else None


def _state(norm: Array, predicted: Mapping[str, float], settles: int | None, first: int) -> str:
    if not np.isfinite(predicted["predicted_rotation"]):
        return "no prediction"
    if settles is None or settles > first:
        return "transient"
    if len(norm) < SHORTEST or not np.isfinite(norm).all():
        return "too short"
    moved, error = _trend(norm)
    return "equilibrium" if abs(moved) <= max(_MOVES * float(norm.mean()), _SIGMAS * error) else "drifting"


def _trend(series: Array) -> tuple[float, float]:
    """What the line through the mean of series (time, neuron) gains from its first to its last value, and its standard error.

    The larger of two errors. Within: with M the variance of the mean of what is left beside the lines, autocorrelation included, that of a
    gain is 12 M. Between neurons, which is right however slowly they fluctuate, unless they do so together.
    """
    length, neurons = series.shape
    at = np.arange(length) - (length - 1) / 2
    slopes = at @ series / (at @ at)
    rest = series - series.mean(0) - np.multiply.outer(at, slopes)
    within = math.sqrt(12 * integrated_time(rest)[1] / neurons)
    between = length * float(slopes.std(ddof=1)) / math.sqrt(neurons) if neurons >= SHORTEST else 0.0
    return length * float(slopes.mean()), max(within, between)


def _pace(rotation: float, error: float, predicted: float) -> str:
    if not (math.isfinite(predicted) and predicted > 0 and math.isfinite(rotation)):
        return "undecided"
    off, half = rotation / predicted - 1, _SIGMAS * error / predicted
    if abs(off) <= _OFF:
        return "as predicted"
    return "undecided" if abs(off) - half <= _OFF else "too fast" if off > 0 else "too slow"


def _spread(turned: Array) -> float:
    """Relative standard deviation of neurons' mean rotation beyond their errors."""
    turned = turned[:, np.isfinite(turned).all(0)]
    neurons = turned.shape[1]
    if neurons < 2 or len(turned) < SHORTEST:
        return math.nan
    means = turned.mean(0)
    if not means.mean() > 0:
        return math.nan
    own = estimate(turned).within ** 2 * neurons
    return math.sqrt(max(float(means.var(ddof=1)) - own, 0.0)) / float(means.mean())


def _fails(ratio: float, cosine: float, scaled: float, uneven: float) -> dict[str, str]:
    found = {}
    if abs(ratio) > _RADIAL:
        side = "along the weights and act as more decay" if ratio > 0 else "against the weights and take decay away"
        found["orthogonal gradients"] = f"gradients point {side}: lambda_u is {ratio:+.2f} of the weight decay"
    if abs(cosine) > _COSINE:
        found["uncorrelated gradients"] = f"the cosine of momentum and gradient is {cosine:+.3f}, not 0"
    if abs(scaled - 1) > _SCALED:
        found["normalized gradients"] = f"||g/sqrt(v)||^2 is {scaled:.2f} C"
    if 1 - uneven > _UNEVEN:
        found["even steps"] = f"steps vary in size: the mean rotation is {uneven:.2f} of its root mean square, which theory predicts"
    return found


def _mean(series: Array) -> tuple[float, float]:
    known = series[np.isfinite(series)]
    if not len(known):
        return math.nan, math.nan
    found = estimate(known[:, None])
    return found.mean, found.mcse


def _finite_mean(values: Array) -> float:
    return float(over_neurons(np.ravel(values)[None], "mean")[0])


def _words(rows: Sequence[Row], notes: Mapping[str, str]) -> list[str]:
    lines = []
    for state, said in (
        ("equilibrium", "in equilibrium"), ("transient", "still on the way to equilibrium, as predicted of the schedule"),
        ("drifting", "past the predicted transient, but their norms still move"), ("no prediction", "without a prediction"),
        ("too short", "measured too rarely to tell"),
    ):  # fmt: skip
        members = [row.layer for row in rows if row.state == state]
        if members:
            lines.append(f"{len(members)} of {len(rows)} layers {said}: {_listed(members)}.")
    for row in rows:
        found = []
        if row.pace in ("too fast", "too slow"):
            plain, effective = (row.predicted[f"{kind}_rotation"] for kind in ("predicted", "corrected"))
            text = f"rotates {row.pace}: {row.rotation:.3g} radians a step, {row.rotation / plain:.2f} times the prediction"
            if math.isfinite(effective):
                text += f" ({row.rotation_rms / effective:.2f} times, root mean square, with the measured radial gradients and correlation)"
            named = [f"{FACTORS[name]} ({name} {x:.2f})" for name, x in row.factors.items() if abs(x - 1) > _FACTOR]
            found.append(f"{text}, as it does not hold that {', '.join(named)}" if named else text)
        if row.spread > _SPREAD:
            found.append(f"is imbalanced: the rotation of its neurons spreads by {row.spread:.0%}")
        found += row.fails.values()
        if found:
            lines.append(f"{row.layer}: {'; '.join(found)}.")
    reasons: dict[str, list[str]] = {}
    for name, reason in notes.items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"{_listed(names)}: {reason}" for reason, names in reasons.items()]
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"
