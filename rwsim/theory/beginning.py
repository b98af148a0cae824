"""The first steps of a rule with a normalizer, whose average then holds few squares: the update itself, integrated over
gradients and starting weights by a low-discrepancy rule."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.special import ndtri

from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import Array
from rwsim.theory.recurrence import recurrence

# Steps that are taken so, points in all, and classes of coordinates that differ in what their normalizer remembers.
EXACT_STEPS, _POINTS, _CLASSES, _STARTS = 40, 2**15, 64, 8
# Points of one kind of coordinate at least, and of one class.
_FEWEST, _IN_CLASS = 256, 16


class _Tape:
    """An `xp` that remembers a root, or returns the remembered one."""

    def __init__(self) -> None:
        self.root: Any = None

    def sqrt(self, x: Array) -> Array:
        if self.root is None:
            self.root = np.sqrt(x)
        return self.root


@lru_cache(maxsize=2)
def _points(kinds: int, nodes: tuple[float, ...], weights: tuple[float, ...]) -> tuple[Array, Array]:
    """Gradients in units of their deviation, shape (step, 1, kind, point), and starting weights in (0, 1)."""
    from scipy.stats import qmc  # a second to load

    count = max(_FEWEST, _POINTS // kinds)
    unit = qmc.Sobol(2 * EXACT_STEPS + 1, scramble=True, rng=np.random.default_rng(0)).random(count * kinds)
    unit = np.clip(unit, 1e-12, 1 - 1e-12).reshape(count, kinds, -1).transpose(2, 1, 0)[:, None]
    places = np.minimum(np.searchsorted(np.cumsum(weights), unit[EXACT_STEPS:-1]), len(nodes) - 1)
    return ndtri(unit[:EXACT_STEPS]) * np.sqrt(nodes)[places], unit[-1]


class Beginning:
    """Coordinates of every kind on their way; a gradient is its deviation times a random length times a normal, starting
    weights are uniform as torch's.

    Args:
        rule: With a normalizer.
        shape: (neuron, kind).
        length_squared: Nodes and weights, as of a gradient law.
        start_sq: E w_c^2 at the start.
    """

    def __init__(self, rule: type[UpdateRule], shape: tuple[int, int], length_squared: tuple[Array, Array], start_sq: float) -> None:
        nodes, weights = length_squared
        self.noise, self.unit = _points(shape[1], tuple(nodes), tuple(weights))
        whole = (*shape, self.unit.shape[-1])
        response = linear_response(rule)
        self.rule, self.order = rule, recurrence(rule).order
        self.square = next(name for name in rule.state if name not in response.states)
        self.linear = response.states
        self.state = {"param": np.broadcast_to(np.sqrt(3 * start_sq) * self.unit, whole), **{name: np.zeros(whole) for name in rule.state}}
        self.bare = {name: np.zeros(whole) for name in rule.state}  # buffers that see gradients only
        self.classes = min(_CLASSES, whole[-1] // _IN_CLASS)
        # Where weights are part of the square, coordinates differ by where they started, for good.
        self.starts = _STARTS if response.square is not None and not response.square[0].is_zero_matrix else 1

    def take(self, t: int, hyper: SimpleNamespace, grad_sq: Array) -> tuple[list[Array], Array, Array, Array]:
        """Take step t: E[z z^T], E[w w'], E of the squared gradient part and the RMS normalizer, of every kind."""
        tape, grad, old = _Tape(), np.sqrt(grad_sq)[..., None] * self.noise[t - 1], self.state["param"]
        self.state = self.rule.update(grad, SimpleNamespace(**self.state, step=t), hyper, tape)
        bare = SimpleNamespace(**{**vars(hyper), "weight_decay": 0.0})
        self.bare = self.rule.update(grad, SimpleNamespace(**{**self.bare, "param": 0.0}, step=t), bare, tape)
        z = [self.state[name] for name in self.linear]
        moments = [(z[i] * z[j]).mean(-1) for i, j in self.order]
        update_sq = np.square(self.bare["param"]).mean(-1)
        return moments, (old * z[0]).mean(-1), update_sq, np.sqrt(np.square(tape.root).mean(-1))

    def divided(self) -> tuple[Any, ...]:
        """By classes of like normalizers, flat along the kinds: E z, E[z z^T], v, Var v, Cov(z z^T, v), and E[z_g z_g^T] and
        Cov(z_g z_g^T, v) of the gradient's own buffers."""
        # First by starting weight, then by what the normalizer remembers.
        square, more = self.state[self.square], self.state[self.square].shape[:2]
        by_start = np.broadcast_to(np.argsort(self.unit, axis=-1), square.shape).reshape(*more, self.starts, -1)
        inner = np.argsort(np.take_along_axis(square, by_start.reshape(square.shape), -1).reshape(by_start.shape), axis=-1)
        ranks = np.take_along_axis(by_start, inner, -1).reshape(square.shape)

        def grouped(x: Array) -> Array:
            return np.take_along_axis(x, ranks, -1).reshape(*more, self.classes, -1)

        def mean(x: Array) -> Array:
            return x.mean(-1).reshape(len(x), -1)

        v = grouped(self.state[self.square])
        off = v - v.mean(-1, keepdims=True)
        z = [grouped(self.state[name]) for name in self.linear]
        zg = [np.zeros_like(v), *(grouped(self.bare[name]) for name in self.linear[1:])]
        (second, with_v), (second_g, with_vg) = (
            ([mean(x[i] * x[j]) for i, j in self.order], [mean(x[i] * x[j] * off) for i, j in self.order]) for x in (z, zg)
        )
        return [mean(x) for x in z], second, mean(v), mean(off**2), with_v, second_g, with_vg
