"""A layer against prediction: in equilibrium, on the way there, and what its gradients have that a random walk's have not."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from rwsim.errors import UnsupportedRule
from rwsim.experiments.case import Case
from rwsim.experiments.findings import INSIDE, SHOWN, UNDECIDED, Row, percent
from rwsim.experiments.judge import NORM, ROTATION, TRANSIENT, judged, judged_path
from rwsim.experiments.records import Series
from rwsim.optimizers import UpdateRule
from rwsim.probe.predict import Theory
from rwsim.theory import symbols as sym
from rwsim.theory.noise import Array
from rwsim.theory.rotation import norm_of, norm_sq_form, relative_sq_form, rotation_of

# The predicted transient is over where norm and rotation are this close to their equilibrium, for so many windows.
_REACHED, _STAY = 0.02, 3
# It must be over in this share of the run: a mean needs the rest.
_LATEST = 0.75
# Windows that a path is judged by at a time: a single one holds few steps.
_POOLED = 5
LATE = "the predicted transient takes most of the run"
# A departure from the random walk that is worth naming.
_WORTH = 0.02
BANDS = {"norm": NORM, "rotation": ROTATION}
# Name, quantity of the records, what a random walk has.
DEPARTURES = (
    ("lambda_u/lambda", "lambda_ratio", 0.0),
    ("RMS update over that of uncorrelated gradients", "update_ratio", 1.0),
    ("||g/sqrt v||/sqrt C", "scaled_grad", 1.0),
    ("cos of momentum and gradient", "momentum_grad_cos", 0.0),
    ("mean rotation over its root mean square", "evenness", 1.0),
)


def transient_end(series: Series, k: int) -> int:
    """First window in which the predicted transient of a layer is over; the number of windows where it does not end in time.

    The path is compared with the equilibrium of the time as it is at the end: a mean angle ends a little below an RMS one. Later on SGDM's
    equilibrium moves with the size of the gradients, and its path follows: that is no transient.
    """
    count = len(series.step)
    found = 0
    for name in BANDS:
        ratio = (series.values[f"path_{name}"] / series.values[f"predicted_{name}"])[:, :, k].mean(0)
        if not np.isfinite(ratio).all():
            return count
        with np.errstate(all="ignore"):  # where nothing moves there is no equilibrium
            near = np.abs(ratio / np.median(ratio[-(count // 4) - 1 :]) - 1) <= _REACHED
        stays = np.flatnonzero(np.convolve(near, np.ones(_STAY), "valid") == _STAY)
        found = max(found, int(stays[0]) if len(stays) else count)
    return found if found <= _LATEST * count else count


def table_1(rule: UpdateRule, fan_in: int) -> dict[str, float]:
    """Norm and rotation by the paper's Table 1; NaN where they depend on the gradients.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> round(table_1(AdamW(lr=1e-2, weight_decay=0.1), 144)["norm"], 3)
        2.683
    """
    symbols = zip(sym.flat(sym.hyper_symbols(type(rule))), sym.flat(rule.values), strict=True)
    values = {symbol: value for symbol, value in symbols} | {sym.C: fan_in}
    relative = relative_sq_form(type(rule))
    rotation = rotation_of(rule) if relative is None else math.sqrt(float(relative.subs(values)))
    try:
        norm_sq = norm_sq_form(type(rule))
        norm = norm_of(rule, fan_in) if norm_sq is None else math.sqrt(float(norm_sq.subs(values)))
    except UnsupportedRule:
        norm = math.nan
    return {"norm": norm, "rotation": rotation}


def row(case: Case, series: Series, k: int, quantity: str, band: float, **rest: Any) -> Row:
    """A row of a layer with the fields that are given; others are empty."""
    layer = series.layers[k]
    return Row(case.name, layer.name, layer.fan_in, layer.invariant, quantity, **{"band": band, "verdict": SHOWN, **rest})


def settled_rows(case: Case, series: Series, k: int, start: int) -> Iterator[Row]:
    """Time-averaged norm and rotation of a layer after its predicted transient; judged where it is scale-invariant."""
    paper = table_1(case.recipe.rule(), series.layers[k].fan_in)
    growth = _growth(case, series, k, start)
    # Where an update's size goes as 1/||w||, norm^4 is what grows.
    exponents = {"rotation": 0.5, "norm": -0.25 if Theory(type(case.recipe.rule())).kind == "linear" else -0.5}
    for name, band in BANDS.items():
        values, path = (series.values[kind][:, start:, k] for kind in (name, f"path_{name}"))
        if not values.size:
            yield row(case, series, k, name, band, verdict=UNDECIDED if series.layers[k].invariant else SHOWN, note=LATE)
            continue
        predicted = float(path.mean())
        found = judged(values, predicted, band)
        corrected = float(series.values[f"corrected_{name}"][:, start:, k].mean()) * growth ** exponents[name]
        if name == "rotation":
            # Theory predicts a root mean square; where steps vary in size the mean is smaller.
            corrected *= float(departure(series, "evenness", k, start).mean())
        left = found.measured / corrected - 1
        yield row(
            case, series, k, name, band, measured=found.measured, predicted=predicted, error=found.error, interval=found.interval,
            verdict=found.verdict if series.layers[k].invariant else SHOWN, paper=found.measured / paper[name] - 1, corrected=left,
            note="" if found.verdict == INSIDE else _note(series, k, start, left, growth),
        )  # fmt: skip


def path_rows(case: Case, series: Series, k: int, windows: slice) -> Iterator[Row]:
    """Norm and rotation of a layer along its predicted path, a few windows at a time; judged where it is scale-invariant."""
    for name in BANDS:
        if not len(series.step[windows]):
            continue
        values, path = (_pooled(series.values[kind][:, windows, k]) for kind in (name, f"path_{name}"))
        found = judged_path(values, path.mean(0), TRANSIENT)
        off = np.abs(values.mean(0) / path.mean(0) - 1)
        until = series.step[windows][min(_POOLED * (int(off.argmax()) + 1), len(series.step[windows])) - 1]
        note = f"furthest off by step {until}; {percent(float(off.mean()), '')} on average"
        verdict = found.verdict if series.layers[k].invariant else SHOWN
        yield row(case, series, k, f"{name} path", TRANSIENT, error=found.error, interval=found.interval, verdict=verdict, note=note)


def _pooled(values: Array) -> Array:
    """Means over groups of windows, shape (seed, time)."""
    firsts = np.arange(0, values.shape[1], _POOLED)
    return np.add.reduceat(values, firsts, axis=1) / np.diff([*firsts, values.shape[1]])


def departure(series: Series, quantity: str, k: int, start: int) -> Array:
    """A quantity of `DEPARTURES`, shape (seed, time)."""
    values = series.values
    if quantity == "update_ratio":
        found = values["rms_update"] / values["predicted_rms_update"]
    elif quantity == "evenness":
        # Over all windows that are asked for: steps vary from one to the next, and slowly too.
        one, two = (values[name][:, start:, k].mean(1, keepdims=True) for name in ("rotation", "rotation_sq"))
        return one / np.sqrt(two)
    elif quantity == "momentum_grad_cos":
        found = np.cos(values["momentum_grad_angle"])
    else:
        found = values[quantity]
    return found[:, start:, k]


def _growth(case: Case, series: Series, k: int, start: int) -> float:
    """1 + g/(2 S lambda_e): the total effect of updates over what decay takes, where ||w||^2 grows by the factor 1 + g in a step.

    Norm and rotation in balance have ||U||^2/||w||^2 = 2 S lambda_e + g, with U an update's total effect and S that of a decay
    (paper, section 3.1): in equilibrium g is 0. At a constant learning rate; S as in `rwsim.probe.predict`.
    """
    norm = series.values["norm"][:, start:, k]
    if norm.shape[1] < 2 or not np.isfinite(norm).all():
        return 1.0
    g = float(np.polyfit(series.step[start:], 2 * np.log(norm).mean(0), 1)[0])
    hyper = {name: np.asarray(value, dtype=float)[None] for name, value in case.recipe.hyper.items()}
    radial = float(np.nan_to_num(departure(series, "lambda_ratio", k, start).mean()))
    taken = 2 * float(Theory(type(case.recipe.rule())).decay(hyper).item()) * (1 + radial)
    return max(1 + g / taken, 0.0) if taken > 0 else 1.0


def _note(series: Series, k: int, start: int, left: float, growth: float) -> str:
    """What departs from a random walk, and whether putting it in explains the gap."""
    named = [f"growth of norm^2 over what decay takes of it {growth - 1:+.3f}"] if abs(growth - 1) > _WORTH else []
    for name, quantity, expected in DEPARTURES:
        value = float(departure(series, quantity, k, start).mean())
        if math.isfinite(value) and abs(value - expected) > _WORTH:
            named.append(f"{name} {value:.3f}")
    said = (
        "explained within 3 %" if abs(left) <= ROTATION else "not explained" + (f" ({percent(left)} left)" if math.isfinite(left) else "")
    )
    return f"{said} by what departs from a random walk: {', '.join(named) or 'nothing by more than 0.02'}"
