"""Norm, rotation and update size along any schedule, step by step, without a sample.

The moment recurrence (see `recurrence`) is iterated from the walk's start with the hyperparameters of each step, the bias
corrections, the memory of the normalizer and the dependence of scale-invariant gradients on the norm. `plain_norm` stops
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
from types import SimpleNamespace
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.beginning import EXACT_STEPS, Beginning
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import Array, GradientLaw, ToySystem
from rwsim.theory.recurrence import Recurrence, recurrence
from rwsim.theory.spread import Spread

# Correlations below this are as good as linear under the arcsine (rho^2/6 < 0.05 %).
LINEAR = 0.05
# Equilibria are computed at this many hyperparameters at most and interpolated between them, log against log.
_EQUILIBRIA = 160
# Classes of coordinates are joined when the relative variance of the normalizer's square is below this: what the expansion
# to second order leaves is of the order of its square.
_JOIN, _JOIN_EVERY = 0.03, 10


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
    walker = _Walker(type(rule), _simplest(rule, law), start_sq, plain=False)
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


def plain_norm(rule: UpdateRule, law: GradientLaw, steps: int, start_sq: float) -> Array:
    """The norm of `expected_path` without what is of higher order than the closed forms of `equilibrium`, shape (time,)."""
    walker = _Walker(type(rule), _simplest(rule, law), start_sq, plain=True)
    with np.errstate(all="ignore"):
        return np.sqrt(_iterated(walker.take_plain, hyper_values(rule, {}, steps), 1)[0])


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
    walker = _Walker(type(rule), _simplest(rule, law), start_sq, plain=True)
    with np.errstate(all="ignore"):
        norm_sq, rotation = _iterated(walker.take_closed, hyper_values(rule, schedule, steps), 2)
        return np.sqrt(norm_sq), rotation


# Formulas of a step by themselves: numbers, arrays and symbols alike; `xp` is numpy, or the same functions of symbols.


def sign_gain(past: Any, own: Any, node: Any, xp: Any) -> Any:
    """Gain of the linear part of sign(n) at one squared length of the gradient: sqrt(2/pi)/sigma.

    Args:
        past: E of the squared buffer part of n.
        own: E of the squared part of the step's own gradient, at a length of 1.
        node: The gradient's squared length over its mean.
        xp: Supplies sqrt and pi.
    """
    return xp.sqrt(2 / xp.pi) / xp.sqrt(own * node + past)


def arcsine_beyond(rho: Any, xp: Any) -> Any:
    """What E[sign sign] of correlation rho has beyond its linear part."""
    return 2 / xp.pi * (xp.arcsin(rho) - rho)


def turned(old: Any, new: Any, across: Any, drift: Any, xp: Any) -> Any:
    """RMS angle of a step: E||w||^2 before and after it, E of the squared part of the step that is orthogonal to w, and E<w, step>."""
    return xp.arctan2(xp.sqrt(xp.maximum(across, 0.0) / new), (old + drift) / xp.sqrt(old * new))


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
        raise InvalidArgument("steps", "must be at least 1", steps)
    for name, factors in schedule.items():
        if name not in rule.hyper:
            known = f"it takes {', '.join(rule.hyper)}"
            raise InvalidArgument(f"schedule[{name!r}]", f"is not a hyperparameter of {rule.name}", name, known)
        shape = (steps, *np.shape(getattr(rule.values, name)))
        if np.shape(factors) != shape:
            raise InvalidArgument(f"schedule[{name!r}]", f"must have shape {shape}: one factor per step", np.shape(factors))
        values = np.asarray(factors, dtype=float) * np.asarray(getattr(rule.values, name))
        for end in (values.min(0), values.max(0)):
            type(rule)(**{**vars(rule.values), name: tuple(end.tolist()) if np.ndim(end) else float(end)})
    columns: list[Array] = []
    for name, value in vars(rule.values).items():
        whole = np.broadcast_to(np.asarray(value) * np.asarray(schedule.get(name, 1.0), dtype=float), (steps, *np.shape(value)))
        columns.extend(whole.reshape(steps, -1).T)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _namespace(rule: type[UpdateRule], flat: tuple[float, ...]) -> SimpleNamespace:
    """Flat hyperparameters by name again."""
    rest = iter(flat)
    return SimpleNamespace(
        **{name: tuple(next(rest) for _ in default) if isinstance(default, tuple) else next(rest) for name, default in rule.hyper.items()}
    )


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
            exact = predict_equilibrium(type(rule)(**vars(_namespace(type(rule), key))), law).exact
            known[key] = math.log(exact.norm), math.log(exact.rotation)
        except NoEquilibrium:
            known[key] = math.nan, math.nan
    for row, of in zip(found, np.array([known[values[live[mark]]] for mark in marks]).T, strict=True):
        row[live] = np.exp(np.interp(travelled, travelled[marks], of))
    return found[0], found[1]


def _flat_names(rule: UpdateRule) -> list[str]:
    return [name for name, value in vars(rule.values).items() for _ in np.atleast_1d(value)]


class _Walker:
    """The moments on their way.

    Arrays have shape (neuron, kind): a kind is a coordinate of its own gamma, in several classes after a `Beginning`; `share` is
    the number of coordinates that each stands for. One neuron of one kind goes on in plain numbers, thirty times as fast.
    """

    def __init__(self, rule: type[UpdateRule], law: GradientLaw, start_sq: float, plain: bool) -> None:
        self.rule, self.law, self.arrays, self.classes = rule, law, True, 1
        self.recurrence = recurrence(rule)
        n, size = self.recurrence.states, len(self.recurrence.order)
        self.nodes, self.weights = law.length_squared()
        self.fourth = float(self.weights @ self.nodes**2)  # E l^4 at E l^2 = 1
        gamma = np.abs(getattr(law, "gamma_in", np.ones((1, law.fan_in))))
        _, first, back, counts = np.unique(gamma, axis=1, return_index=True, return_inverse=True, return_counts=True)
        if len(first) == law.fan_in:  # all differ: in their own order
            first = back = np.arange(law.fan_in)
        self.first, self.back, self.share = first, back.ravel(), counts.astype(float)
        neurons = len(law.second_moment(np.full((1, law.fan_in), start_sq)))
        shape = (neurons, len(counts))
        self.p: list[Any] = [np.full(shape, start_sq if ij == (0, 0) else 0.0) for ij in self.recurrence.order]
        zeros: list[list[Any]] = [[np.zeros(shape) for _ in range(count)] for count in (n, size, size, size, 2)]
        self.mu, self.pg, self.k, self.kg, (self.v, self.v_var) = zeros
        self.spread = None if plain else Spread(self.recurrence, law, gamma[:, self.first], self.share, start_sq)
        self.signs = None if self.recurrence.argument is None else _Signs(self.recurrence, neurons)
        self.beginning: Beginning | None = None
        if self.recurrence.normalizer is not None and not plain:
            self.beginning = Beginning(rule, shape, law.length_squared(), start_sq)
        else:
            self._become_numbers()

    def _become_numbers(self) -> None:
        if self.p[0].size > 1:
            return
        self.arrays = False
        self.p, self.mu, self.pg, self.k, self.kg = (
            [float(np.ravel(x)[0]) for x in m] for m in (self.p, self.mu, self.pg, self.k, self.kg)
        )
        self.v, self.v_var = float(np.ravel(self.v)[0]), float(np.ravel(self.v_var)[0])
        # Of alike coordinates E g^2 is inverse to the spread, or does not depend on it.
        self.unit = float(self.law.second_moment(np.ones((1, self.law.fan_in))).flat[0])
        if self.spread is not None:
            self.spread.become_numbers()

    def total(self, x: Any) -> Any:
        """Sum over coordinates."""
        return x @ self.share if self.arrays and np.ndim(x) else x * self.law.fan_in

    def grad_sq(self) -> Any:
        """E g_c^2 of every kind."""
        boost = 1.0 if self.spread is None else self.spread.boost
        if not self.arrays:
            return self.unit / self.p[0] * boost if self.law.scale_invariant else self.unit
        spread = self.p[0]
        if self.classes > 1:
            spread = spread.reshape(len(spread), -1, self.classes).mean(-1)
        if len(self.first) == self.law.fan_in:
            grad = self.law.second_moment(spread)
        else:
            grad = np.broadcast_to(self.law.second_moment(spread[:, self.back]), (len(spread), self.law.fan_in))[:, self.first]
        grad = grad * np.reshape(boost, (-1, 1)) if self.spread is not None else grad
        return np.repeat(grad, self.classes, axis=1) if self.classes > 1 else grad

    def take(self, t: int, hyper: tuple[float, ...]) -> tuple[float, float, float]:
        """Take step t: E||w||^2, the mean angle and E||Delta_g w||^2, mean over neurons."""
        root: Any
        lagged: Any
        update: Any
        grad, before = self.grad_sq(), self.p
        if self.beginning is not None:
            self.p, lagged, update, root = self.beginning.take(t, _namespace(self.rule, hyper), grad)
            angle = self._angle(before, lagged, grad, (t, root, 0.0, 0.0), hyper, None)
            result = self._means(angle, update)
            if t == EXACT_STEPS:
                self._divide(self.beginning)
            return result
        r, arrays = self.recurrence, self.arrays
        n, size = r.states, len(r.order)
        root, e_sq, e_grad, gain, own = 1.0, 0.0, 0.0, 0.0, 0.0
        ge, pe, pge = [0.0] * n, [0.0] * size, [0.0] * size
        if r.normalizer is not None:
            kurt = 3 * self.fourth
            self.v, v_var, root, *rest = r.normalizer.of(arrays)(
                *hyper, t, grad, kurt, self.v, self.v_var, *self.mu, *self.p, *self.k, *self.kg
            )
            self.v_var, e_sq, e_grad = v_var, rest[0], rest[1]
            ge, pe, pge = rest[2 : 2 + n], rest[2 + n : 2 + n + size], rest[2 + n + size :]
        white = None
        if r.argument is not None:
            gain, own, past, k, h, drive = self._under_sign(hyper, grad)
            white = drive, 1 - gain**2 * past - own**2 * k**2 * grad
        new = r.step.of(arrays)(*hyper, t, root, grad, e_sq, e_grad, gain, own, *self.mu, *ge, *self.p, *pe, *self.pg, *pge)
        p, with_e, (lagged, update), rest = new[:size], new[size : 2 * size], new[2 * size : 2 * size + 2], new[2 * size + 2 :]
        if self.signs is not None and self.spread is not None:
            system = r.system.of(arrays)(*hyper, t, root, gain, own)
            curved = self.signs.beyond_linear(system, h, k, drive, past, grad, self.p)
            pulled = self.spread.sign_pull(self.total, h, k, self.p, grad, arrays)
            beyond = curved[:, None] + gain * np.reshape(pulled, (-1, 1)) if arrays else float(curved[0]) + gain * pulled
            p[0] = p[0] + 2 * system[0] * drive * beyond
            lagged = lagged + drive * beyond
        self.p = [np.broadcast_to(x, grad.shape) for x in p] if arrays else p
        angle = self._angle(before, lagged, grad, (t, root, gain, own), hyper, white)
        self.mu = rest[:n]
        if r.separate:
            self.pg = rest[n : n + size]
        if r.normalizer is not None:
            self.k = [x * self.v for x in with_e]
            self.kg = [x * self.v for x in rest[n + size :]] if r.separate else self.kg
        result = self._means(angle, update)
        if self.classes > 1 and t % _JOIN_EVERY == 0:
            self._join()
        return result

    def _under_sign(self, hyper: tuple[float, ...], grad: Any) -> tuple[Any, Any, Any, float, list, float]:
        """Gains for buffers and gradient; E of the squared buffer part of the argument, its row and coefficient; the sign's drive."""
        assert self.recurrence.argument is not None
        past, k, *h, drive = self.recurrence.argument.of(self.arrays)(*hyper, *self.p)
        part = self.weights * sign_gain(np.asarray(past)[..., None], np.asarray(k**2 * grad)[..., None], self.nodes, np)
        gain, own = part.sum(-1), part @ self.nodes
        return *((gain, own) if self.arrays else (float(gain), float(own))), past, k, h, drive

    def take_closed(self, t: int, hyper: tuple[float, ...]) -> tuple[float, float]:
        """Take step t by the closure alone: E||w||^2 and the RMS angle, mean over neurons."""
        r, arrays, grad, root, gain, own = self.recurrence, self.arrays, self.grad_sq(), 1.0, 0.0, 0.0
        weight = self.p[0]
        if r.plain_normalizer is not None:
            self.v, root = r.plain_normalizer.of(arrays)(*hyper, t, grad, self.v, *self.p)
        if r.argument is not None:
            gain, own, past, k, h, drive = self._under_sign(hyper, grad)
        before = (*hyper, t, root, grad, gain, own, *self.p)
        p, (across, drift, along) = r.plain.of(arrays)(*before), r.moved.of(arrays)(*before)
        if self.signs is not None:
            system = r.system.of(arrays)(*hyper, t, root, gain, own)
            curved = self.signs.beyond_linear(system, h, k, drive, past, grad, self.p)
            pull = drive * (curved[:, None] if arrays else float(curved[0]))
            p[0], drift, across = p[0] + 2 * system[0] * pull, drift + pull, across - pull * (2 * along + pull) / weight
        self.p = [np.broadcast_to(x, grad.shape) for x in p] if arrays else p
        old, new = self.total(weight), self.total(self.p[0])
        if arrays:  # coordinates that shrink at different rates turn the vector too
            across = across + weight * (drift / weight - (self.total(drift) / old)[:, None]) ** 2
        return float(np.mean(new)), float(np.mean(turned(old, new, self.total(across), self.total(drift), np)))

    def take_plain(self, t: int, hyper: tuple[float, ...]) -> tuple[float]:
        """Take step t without anything beyond the closed forms: E||w||^2."""
        r, arrays, grad, root, gain = self.recurrence, self.arrays, self.grad_sq(), 1.0, 0.0
        if r.plain_normalizer is not None:
            self.v, root = r.plain_normalizer.of(arrays)(*hyper, t, grad, self.v, *self.p)
        if r.argument is not None:
            past, k, *_ = r.argument.of(arrays)(*hyper, *self.p)
            gain = (2 / math.pi / (past + k**2 * grad)) ** 0.5
        self.p = r.plain.of(arrays)(*hyper, t, root, grad, gain, gain, *self.p)
        norm_sq = self.total(self.p[0])
        return (float(norm_sq.sum()) / norm_sq.size if arrays else norm_sq,)

    def _means(self, angle: Any, update: Any) -> tuple[float, float, float]:
        if not self.arrays:
            return self.p[0] * self.law.fan_in, angle, update * self.law.fan_in
        return float(np.mean(self.total(self.p[0]))), float(np.mean(angle)), float(np.mean(self.total(update)))

    def _angle(self, before: list, lagged: Any, grad: Any, at: tuple[Any, ...], hyper: tuple[float, ...], white: Any) -> Any:
        """Mean angle of each neuron from the part of the step that is orthogonal to the weights."""
        old, new, along = self.total(before[0]), self.total(self.p[0]), self.total(lagged)
        across = old + new - 2 * along - (along - old) ** 2 / old
        cosine, factor = along / (old * new) ** 0.5, 1.0
        if self.spread is not None:
            t, *levels = at
            if self.arrays:  # one system for all coordinates
                levels = [(self.total(x * x) / self.law.fan_in) ** 0.5 if np.ndim(x) else x for x in levels]
            system = self.recurrence.system.of(self.arrays)(*hyper, t, *levels)
            # A first gradient's length cancels against that of the normalizer, which holds little else.
            pull, factor = self.spread.follow(self.total, system, before, grad, white, self.beginning is None, self.arrays)
            across = across - pull * old
        if not self.arrays:
            return math.atan2(math.sqrt(max(across / new, 0.0)), cosine) * factor
        return np.arctan2(np.sqrt(np.maximum(across / new, 0)), cosine) * factor

    def _divide(self, begun: Beginning) -> None:
        """Go on from the exact beginning in classes of coordinates."""
        self.classes, self.beginning = begun.classes, None
        self.share = np.repeat(self.share / self.classes, self.classes)
        self.mu, self.p, self.v, self.v_var, self.k, self.pg, self.kg = begun.divided()
        if self.spread is not None:
            self.spread.scale = np.repeat(self.spread.scale, self.classes, axis=1)

    def _join(self) -> None:
        """Make one of the classes of each kind where their normalizers have become alike."""

        def mean(x: Any) -> Any:
            return np.broadcast_to(x, shape).reshape(shape[0], -1, self.classes).mean(-1)

        def off(x: Any) -> Any:
            return x - np.repeat(mean(x), self.classes, axis=1)

        shape = self.p[0].shape
        apart = off(self.v)
        v, v_var = mean(self.v), mean(self.v_var + apart**2)
        if np.max(v_var / v**2) > _JOIN:
            return
        self.k = [mean(k + p * apart) for k, p in zip(self.k, self.p, strict=True)]
        self.kg = [mean(k + p * apart) for k, p in zip(self.kg, self.pg, strict=True)]
        self.p, self.pg, self.mu = ([mean(x) for x in m] for m in (self.p, self.pg, self.mu))
        self.v, self.v_var, self.share = v, v_var, self.share[:: self.classes] * self.classes
        if self.spread is not None:
            self.spread.scale = self.spread.scale[:, :: self.classes]
        self.classes = 1
        self._become_numbers()


class _Signs:
    """What the arcsine law has beyond its linear part, summed over the lags where correlations are large, neuron by neuron
    for the mean coordinate."""

    def __init__(self, recurrence: Recurrence, neurons: int) -> None:
        self.recurrence, buffers = recurrence, recurrence.states - 1
        self.past = np.zeros((0, buffers, neurons))  # Cov(buffers, n_j) of earlier steps j
        self.sigma = np.zeros((0, neurons))
        self.weight = np.zeros(0)  # of s_j in w

    def beyond_linear(self, system: list, h: list, k: float, drive: float, past: Any, grad: Any, p: list) -> Array:
        """E[w s] of this step less its linear part, shape (neuron,)."""
        n, order, neurons = self.recurrence.states, self.recurrence.order, self.past.shape[-1]

        def mean(x: Any) -> Array:
            return x.mean(-1) if np.ndim(x) else np.array([x] * neurons)

        size, row = mean(grad), np.array(h[1:])
        sigma = np.sqrt(mean(past) + k**2 * size)
        found = np.zeros(neurons)
        if len(self.weight):
            rho = ((row @ self.past) / (self.sigma * sigma)).clip(-1, 1)
            found = self.weight @ arcsine_beyond(rho, np)
            alive = (np.abs(rho) > LINEAR).any(-1)
            if not alive.all():
                self.past, self.sigma, self.weight = self.past[alive], self.sigma[alive], self.weight[alive]
        buffers = np.array([[system[i * n + j] for j in range(1, n)] for i in range(1, n)])
        moments = np.zeros((n, n, neurons))
        for (i, j), x in zip(order, p, strict=True):
            moments[i, j] = moments[j, i] = mean(x)
        own = np.einsum("ij,jmn,m->in", buffers, moments[1:, 1:], row) + np.outer(system[n * n + 1 :], k * size)
        self.past = np.concatenate([buffers @ self.past, own[None]])
        self.sigma = np.concatenate([self.sigma, sigma[None]])
        self.weight = np.append(self.weight * system[0], drive)
        return found
