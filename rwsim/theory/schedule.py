"""Norm, rotation and update size along any schedule, step by step, without a sample.

The moment recurrence (see `recurrence`) is iterated from the walk's start with the hyperparameters of each step, the bias
corrections, the memory of the normalizer and the dependence of scale-invariant gradients on the norm. `plain_norm_sq` stops
there: its fixed point is the closed form of `equilibrium`, under a sign of its linearization. What a path needs beyond that:

* The first steps of a normalizer, whose average holds few squares, are integrated as they are (`beginning`); later its
  fluctuations are carried along to second order.
* Gradients of random length l leave a sign's argument Gaussian only given l: its linear part has one gain for the
  buffers, sqrt(2/pi) E[1/sigma(l)], and another for the gradient of the step, sqrt(2/pi) E[l^2/sigma(l)]. What the arcsine law
  has beyond its linear part, (2/pi)(arcsin rho - rho), is summed over the lags where it counts.
* Neurons differ, at order 1/dim (`spread`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import Array, GradientLaw, ToySystem
from rwsim.theory.walker import Walker, namespace

# Equilibria are computed at this many hyperparameters at most and interpolated between them, log against log.
_EQUILIBRIA = 160
# A stride is no longer than 1/16 of the steps before it and 1/128 of all, nor should it change a moment by more than a tenth.
_AGE, _STRIDES, _CHANGE = 16, 128, 0.1


@dataclass(frozen=True)
class Path:
    """Expected walk along a schedule, mean over the law's neurons; arrays of shape (time,), steps 1 ... T.

    Attributes:
        norm: sqrt of E||omega_t||^2 after the step.
        rotation: Mean angle between omega_{t-1} and omega_t, radians per step.
        rms_update: sqrt of E||Delta_g omega||^2, the gradient part of the update.
        equilibrium_norm: The norm that the step's hyperparameters would lead to if they stayed; NaN where lr or decay is 0.
        equilibrium_rotation: The rotation there.

    A walk that blows up is infinite or NaN from there on.
    """

    norm: Array
    rotation: Array
    rms_update: Array
    equilibrium_norm: Array
    equilibrium_rotation: Array


def expected_path(rule: UpdateRule, law: GradientLaw, steps: int, schedule: Mapping[str, Any], start_sq: float) -> Path:
    """The walk to expect from uniform weights of second moment `start_sq` and empty buffers.

    Args:
        rule: The optimizer at factors of 1; lr and weight decay may be 0.
        law: Gradient law.
        steps: T >= 1.
        schedule: Factors over the steps by hyperparameter, shape (steps,), or (steps, 2) for a pair such as `betas`.
        start_sq: E omega_c^2 at the start, > 0.

    Raises:
        InvalidArgument: A value out of range, a factor array of another shape.
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> path = expected_path(AdamW(lr=1e-2, weight_decay=0.1), IdealWalk(128), 300, {"lr": np.linspace(1, 0, 300)}, 1 / 384)
        >>> path.norm[[0, 99, 299]].round(2), path.equilibrium_norm[[0, 99, 299]].round(2)
        (array([0.59, 1.11, 1.21]), array([2.52, 2.06,  nan]))
    """
    if not 0 < start_sq < math.inf:
        raise InvalidArgument("start_sq", "must lie in (0, inf)", start_sq, "give the mean square of the starting weights")
    values = hyper_values(rule, schedule, steps)
    walker = Walker(type(rule), _simplest(rule, law), start_sq, plain=False)
    with np.errstate(all="ignore"):
        found = _iterated(walker.take, values, 3)
        return Path(np.sqrt(found[0]), found[1], np.sqrt(found[2]), *equilibria(rule, law, values))


def _simplest(rule: UpdateRule, law: GradientLaw) -> GradientLaw:
    """One neuron of alike coordinates where that makes no difference: it is walked in plain numbers."""
    return replace(law.first, gamma_in=np.ones((1, law.fan_in))) if isinstance(law, ToySystem) and _scale_free(rule) else law


def _scale_free(rule: UpdateRule) -> bool:
    """Whether the size of a coordinate's gradients cancels, so that coordinates and neurons of any gamma are alike, but for what
    is of order 1/dim."""
    response = linear_response(type(rule))
    if response.square is None:
        return response.direction == "sign"
    return response.square[0].is_zero_matrix and getattr(rule.values, "eps", 0.0) == 0


def plain_norm_sq(rule: UpdateRule, law: GradientLaw, steps: int, start_sq: float) -> Array:
    """E||omega_t||^2 of every neuron without what is of higher order than the closed forms of `equilibrium`, shape (neuron, time);
    of one neuron where all are alike.

    Neurons that differ go step by step at first, then in strides (`Walker.stride`) as long as the walk is old and the moments are steady,
    between which the logarithm is interpolated. What single steps give is met within some 0.1 % as a rule, a few percent while momentum
    near 1 makes the norm swing, and 0.03 % at the end.

    Args:
        rule: The optimizer, at constant hyperparameters.
        law: Gradient law.
        steps: T >= 1.
        start_sq: E omega_c^2 at the start, > 0.

    Raises:
        InvalidArgument: No steps.
        UnsupportedRule: As `expected_path`.
    """
    values = hyper_values(rule, {}, steps)
    walker = Walker(type(rule), _simplest(rule, law), start_sq, plain=True)
    with np.errstate(all="ignore"):
        return _strided(walker, values[0], steps) if walker.arrays else _iterated(lambda *at: (walker.take_plain(*at),), values, 1)


def _strided(walker: Walker, hyper: tuple[float, ...], steps: int) -> Array:
    times, norms = [0], [np.log(walker.total(walker.p[0]))]
    doublings, pace, order = 0, math.inf, walker.recurrence.order
    while times[-1] < steps:
        t, before = times[-1], walker.p
        longest = min(t / _AGE, _CHANGE / pace if pace else math.inf, steps / _STRIDES, steps - t)
        doublings = min(int(math.log2(longest)), doublings + 1) if longest >= 2 else 0
        norm_sq = walker.stride(t, doublings, hyper) if doublings else walker.take_plain(t + 1, hyper)
        times.append(t + 2**doublings)
        norms.append(np.log(norm_sq))
        if not np.isfinite(norms[-1]).all():  # blown up
            times[-1], norms[-1] = steps, np.full_like(norms[-1], math.inf)
        size = {i: np.sqrt(p) for (i, j), p in zip(order, walker.p, strict=True) if i == j}
        moves = (np.abs(new - old) / (size[i] * size[j]) for (i, j), old, new in zip(order, before, walker.p, strict=True))
        pace = max(float(np.nan_to_num(move).max()) for move in moves) / 2**doublings  # a buffer may hold nothing
    every = np.arange(1, steps + 1)
    return np.exp([np.interp(every, times, one) for one in np.array(norms).T])


def closed_path(rule: UpdateRule, law: GradientLaw, steps: int, schedule: Mapping[str, Any], start_sq: float) -> tuple[Array, Array]:
    """Norm and rotation of the second-moment closure alone, each of shape (time,): where `predict`'s `exact` comes from, step by step.

    `expected_path` without what is integrated or expanded beyond the closure: the first steps of a normalizer, its fluctuations,
    the spread of neurons. A sign has both its gains and what the arcsine law adds. The rotation is an RMS angle.

    Args:
        rule: As of `expected_path`.
        law: As of `expected_path`.
        steps: As of `expected_path`.
        schedule: As of `expected_path`.
        start_sq: As of `expected_path`.

    Raises:
        InvalidArgument: As `expected_path`.
        UnsupportedRule: As `expected_path`.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> rule = AdamW(lr=1e-2, weight_decay=0.5)
        >>> norm, rotation = closed_path(rule, IdealWalk(128), 3000, {}, 1 / 384)
        >>> exact = predict_equilibrium(rule, IdealWalk(128)).exact
        >>> bool(abs(norm[-1] / exact.norm - 1) < 1e-3), bool(abs(rotation[-1] / exact.rotation - 1) < 1e-3)
        (True, True)
    """
    if not 0 < start_sq < math.inf:
        raise InvalidArgument("start_sq", "must lie in (0, inf)", start_sq, "give the mean square of the starting weights")
    walker = Walker(type(rule), _simplest(rule, law), start_sq, plain=True)
    with np.errstate(all="ignore"):
        norm_sq, rotation = _iterated(walker.take_closed, hyper_values(rule, schedule, steps), 2)
        return np.sqrt(norm_sq), rotation


def _iterated(take: Callable[[int, tuple[float, ...]], tuple[float, ...]], values: list[tuple[float, ...]], count: int) -> Array:
    found = np.full((count, len(values)), math.inf)
    for step, hyper in enumerate(values):
        try:
            found[:, step] = take(step + 1, hyper)
        except (ArithmeticError, ValueError):  # numbers raise where arrays go on with Inf and NaN
            break
    return found


def hyper_values(rule: UpdateRule, schedule: Mapping[str, Any], steps: int) -> list[tuple[float, ...]]:
    """Flat hyperparameters of every step.

    Raises:
        InvalidArgument: No steps, a name that the rule lacks, another shape, a value out of range.
    """
    if steps < 1:
        raise InvalidArgument("steps", "must be at least 1", steps, "give the steps of the run")
    for name, factors in schedule.items():
        if name not in rule.hyper:
            known = f"it takes {', '.join(rule.hyper)}"
            raise InvalidArgument(f"schedule[{name!r}]", f"is not a hyperparameter of {rule.name}", name, known)
        shape = (steps, *np.shape(getattr(rule.values, name)))
        if np.shape(factors) != shape:
            raise InvalidArgument(
                f"schedule[{name!r}]", f"must have shape {shape}: one factor per step", np.shape(factors), "repeat or cut it to the steps"
            )
        values = np.asarray(factors, dtype=float) * np.asarray(getattr(rule.values, name))
        for end in (values.min(0), values.max(0)):
            type(rule)(**{**vars(rule.values), name: tuple(end.tolist()) if np.ndim(end) else float(end)})
    columns: list[Array] = []
    for name, value in vars(rule.values).items():
        whole = np.broadcast_to(np.asarray(value) * np.asarray(schedule.get(name, 1.0), dtype=float), (steps, *np.shape(value)))
        columns.extend(whole.reshape(steps, -1).T)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def equilibria(rule: UpdateRule, law: GradientLaw, values: list[tuple[float, ...]]) -> tuple[Array, Array]:
    """Norm and rotation at the frozen hyperparameters of every step; NaN without an equilibrium.

    Computed along the way that the hyperparameters go, at even distances in their logarithms and wherever they turn or jump.
    """
    table = np.array(values)
    found = np.full((2, len(table)), math.nan)
    needed = [i for i, name in enumerate(_flat_names(rule)) if name in ("lr", "weight_decay")]
    live = np.flatnonzero((table[:, needed] > 0).all(1))
    if not len(live):
        return found[0], found[1]
    logs = np.log(np.where(table[live] > 0, table[live], 1.0))
    moves = np.diff(logs, axis=0, prepend=logs[:1])
    travelled = np.cumsum(np.abs(moves).sum(1))
    spacing = travelled[-1] / _EQUILIBRIA
    even = np.searchsorted(travelled, spacing * np.arange(_EQUILIBRIA))
    turns = np.flatnonzero((np.sign(moves[1:]) != np.sign(moves[:-1])).any(1))
    jumps = np.flatnonzero(np.diff(travelled) > spacing)
    marks = np.unique(np.concatenate([even, turns, jumps, jumps + 1, [0, len(live) - 1]]).clip(max=len(live) - 1))
    known: dict[tuple[float, ...], tuple[float, float]] = {}
    for key in {values[live[mark]] for mark in marks}:
        try:
            exact = predict_equilibrium(type(rule)(**vars(namespace(type(rule), key))), law).exact
            known[key] = math.log(exact.norm), math.log(exact.rotation)
        except NoEquilibrium:
            known[key] = math.nan, math.nan
    for row, of in zip(found, np.array([known[values[live[mark]]] for mark in marks]).T, strict=True):
        row[live] = np.exp(np.interp(travelled, travelled[marks], of))
    return found[0], found[1]


def _flat_names(rule: UpdateRule) -> list[str]:
    return [name for name, value in vars(rule.values).items() for _ in np.atleast_1d(value)]
