"""A step of the moment recurrence: what `schedule` iterates."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.beginning import EXACT_STEPS, Beginning
from rwsim.theory.noise import GradientLaw
from rwsim.theory.recurrence import recurrence
from rwsim.theory.signs import Signs, sign_gain
from rwsim.theory.spread import Spread

# Classes of coordinates are joined when the relative variance of the normalizer's square is below this: what the expansion
# to second order leaves is of the order of its square.
_JOIN, _JOIN_EVERY = 0.03, 10


def turned(old: Any, new: Any, across: Any, drift: Any, xp: Any) -> Any:
    """RMS angle of a step, of numbers, arrays and symbols alike.

    Args:
        old, new: E||w||^2 before and after it.
        across: E of its squared part that is orthogonal to w.
        drift: E<w, step>.
        xp: Supplies arctan2, maximum and sqrt.
    """
    return xp.arctan2(xp.sqrt(xp.maximum(across, 0.0) / new), (old + drift) / xp.sqrt(old * new))


def namespace(rule: type[UpdateRule], flat: tuple[float, ...]) -> SimpleNamespace:
    """Flat hyperparameters by name again."""
    rest = iter(flat)
    return SimpleNamespace(
        **{name: tuple(next(rest) for _ in default) if isinstance(default, tuple) else next(rest) for name, default in rule.hyper.items()}
    )


class Walker:
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
        _, first, counts = np.unique(gamma, axis=1, return_index=True, return_counts=True)
        self.share = counts.astype(float)
        self.moment = law.of_kinds(first, self.share)
        neurons = len(law.second_moment(np.full((1, law.fan_in), start_sq)))
        shape = (neurons, len(counts))
        self.p: list[Any] = [np.full(shape, start_sq if ij == (0, 0) else 0.0) for ij in self.recurrence.order]
        zeros: list[list[Any]] = [[np.zeros(shape) for _ in range(count)] for count in (n, size, size, size, 2)]
        self.mu, self.pg, self.k, self.kg, (self.v, self.v_var) = zeros
        self.spread = None if plain else Spread(self.recurrence, law, gamma[:, first], self.share, start_sq)
        self.signs = None if self.recurrence.argument is None else Signs(self.recurrence, neurons)
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
        grad = self.moment(spread)
        grad = grad * np.reshape(boost, (-1, 1)) if self.spread is not None else grad
        return np.repeat(grad, self.classes, axis=1) if self.classes > 1 else grad

    def take(self, t: int, hyper: tuple[float, ...]) -> tuple[float, float, float]:
        """Take step t: E||w||^2, the mean angle and E||Delta_g w||^2, mean over neurons."""
        root: Any
        lagged: Any
        update: Any
        grad, before = self.grad_sq(), self.p
        if self.beginning is not None:
            self.p, lagged, update, root = self.beginning.take(t, namespace(self.rule, hyper), grad)
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

    def take_plain(self, t: int, hyper: tuple[float, ...]) -> Any:
        """Take step t without anything beyond the closed forms: E||w||^2 of every neuron."""
        r, arrays, grad, root, gain = self.recurrence, self.arrays, self.grad_sq(), 1.0, 0.0
        if r.plain_normalizer is not None:
            self.v, root = r.plain_normalizer.of(arrays)(*hyper, t, grad, self.v, *self.p)
        if r.argument is not None:
            past, k, *_ = r.argument.of(arrays)(*hyper, *self.p)
            gain = (2 / math.pi / (past + k**2 * grad)) ** 0.5
        self.p = r.plain.of(arrays)(*hyper, t, root, grad, gain, gain, *self.p)
        return self.total(self.p[0])

    def stride(self, t: int, doublings: int, hyper: tuple[float, ...]) -> Any:
        """Take the 2^doublings (at least two) steps after step t as `take_plain` does, of arrays, at one E g^2 and one normalizer: E||w||^2
        of every neuron, shape (neuron,).

        Given those, a step is linear in the moments: P -> M P + c, and two are M^2 P + (M c + c). They are taken as at the beginning, then
        once more as between both ends; of E g^2 the geometric mean, from which an inverse dependence on the norm finds its fixed point.
        """
        r, count, begin, v, grad, root = self.recurrence, 2**doublings, self.p, self.v, self.grad_sq(), 1.0
        middle, size, held, between = t + (count + 1) / 2, len(begin), begin, grad
        nothing, units = [0.0] * size, np.eye(size).tolist()
        if r.plain_normalizer is not None:
            keep = r.plain_normalizer.of(False)(*hyper, middle, 0.0, 1.0, *nothing)[0]
            square, level = r.plain_normalizer.of(False)(*hyper, middle, 1.0, 1.0, *nothing)
        for _ in range(2):
            if r.plain_normalizer is not None:
                fresh = r.plain_normalizer.of(True)(*hyper, middle, between, 0.0, *held)[0]
                now, self.v = (v * keep**n + fresh * (1 - keep**n) / (1 - keep) for n in ((count + 1) / 2, count))
                root = level * (now / square) ** 0.5
            step = partial(r.plain.of(True), *hyper, middle, root)
            shift = np.array(np.broadcast_arrays(*step(between, 0.0, 0.0, *nothing), *begin)[:size])
            entries = np.broadcast_arrays(*(x for unit in units for x in step(0.0, 0.0, 0.0, *unit)))
            matrix = np.array(entries).reshape(size, size, *entries[0].shape).swapaxes(0, 1)
            for _ in range(doublings):
                shift = np.einsum("ij...,j...->i...", matrix, shift) + shift
                matrix = np.einsum("ij...,jk...->ik...", matrix, matrix)
            self.p = list(np.einsum("ij...,j...->i...", matrix, np.array(np.broadcast_arrays(*begin))) + shift)
            between, held = (grad * self.grad_sq()) ** 0.5, [(x + y) / 2 for x, y in zip(begin, self.p, strict=True)]
        return self.total(self.p[0])

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
