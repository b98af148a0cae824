"""The second-moment recurrence step by step: norm, rotation and update size along any schedule, without a sample.

The same linear response as `equilibrium`, z' = A z + b g, iterated from the walk's start with the hyperparameters of each
step, the bias corrections, the memory of the normalizer and the dependence of scale-invariant gradients on the norm:

    P' = A P A^T + G b b^T,        P = E[z z^T] of one coordinate, G = E g_c^2.

What a path needs beyond that (`plain=True` leaves it out):

* The normalizer fluctuates. With v' = E v' (1 + e) and A, b expanded to second order in e, the moments close once
  K = Cov(z z^T, v) and Var v are carried along. The expansion is exact for E[m^2/v] of equal weights from the first step on.
* Gradients of random length l_t leave a sign's argument Gaussian only given its own l_t: the sign's linear part has one
  gain for the buffers, sqrt(2/pi) E[1/sigma(l)], and another for the gradient of its step, sqrt(2/pi) E[l^2/sigma(l)].
  What the arcsine has beyond its linear part, (2/pi)(arcsin rho - rho), is summed over the lags where it counts.
* ||w||^2 differs between neurons of one kind. The covariance of the Gram matrix of (w, buffers) follows the same
  recurrence; it gives E[1/||w||^2] = (1 + cv^2)/E||w||^2 of a scale-invariant gradient, and the mean of the angle.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import sympy as sp
from scipy.stats import norm, qmc

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.equilibrium import numeric, predict_equilibrium
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import Array, GradientLaw

# Correlations below this are as good as linear under the arcsine (rho^2/6 < 0.05 %).
_LINEAR = 0.05
# E w^4 / (E w^2)^2 of starting weights, uniform as torch's.
_START_FOURTH = 9 / 5
# Equilibria are computed at this many steps of a schedule and interpolated, log against log, between them.
_EQUILIBRIA = 200


@dataclass(frozen=True)
class Path:
    """Expected walk along a schedule, mean over the law's neurons; arrays of shape (time,), steps 1 ... T.

    Attributes:
        norm: sqrt of E||omega_t||^2 after the step.
        rotation: Mean angle between omega_{t-1} and omega_t, radians per step.
        rms_update: sqrt of E||Delta_g omega||^2, the gradient part of the update.
        equilibrium_norm: Where the norm would go if the step's hyperparameters stayed; NaN where there is no equilibrium.
        equilibrium_rotation: The rotation there.
    """

    norm: Array
    rotation: Array
    rms_update: Array
    equilibrium_norm: Array
    equilibrium_rotation: Array


@dataclass(frozen=True)
class _Recurrence:
    """One step of a rule's moments, compiled. `order` lists the entries of a symmetric matrix over z.

    Attributes:
        normalizer: (hyper, t, G, kurt, v, Var v, P, K, P_g, K_g) -> v', Var v', D, E e^2, E[e g^2]/G, E[z z^T e], E[z_g z_g^T e].
        step: (hyper, t, D, G, E e^2, E[e g^2]/G, gain, own gain, P, E[z z^T e], P_g, E[z_g z_g^T e])
            -> P', Cov(z' z'^T, v')/v', E[w w'], E of the squared gradient part, P_g', Cov(z_g' z_g'^T, v')/v'.
        argument: (hyper, P) -> E of the squared buffer part of the sign's argument, its coefficient of g; h and the sign's drive.
        system: (hyper, t, D, gain, own gain) -> A and b with a sign replaced by its linear part.
        separate: Whether the gradient part needs buffers of its own, z_g, which have seen gradients only.
    """

    states: int
    order: tuple[tuple[int, int], ...]
    normalizer: Callable[..., list] | None
    step: Callable[..., list]
    argument: Callable[..., list] | None
    system: Callable[..., list]
    separate: bool


_gain, _own_gain = sp.symbols("gain own_gain", positive=True)
_e_sq, _e_grad = sp.symbols("e_sq e_grad", nonnegative=True)


def _symmetric(name: str, n: int) -> sp.Matrix:
    return sp.Matrix(n, n, lambda i, j: sp.Symbol(f"{name}_{min(i, j)}{max(i, j)}"))


def _moments(a: sp.Matrix, b: sp.Matrix, p: sp.Matrix, pe: sp.Matrix, ge: sp.Matrix) -> tuple[sp.Matrix, sp.Matrix]:
    """E[z' z'^T] and E[z' z'^T e] to second order in e, from p = E[z z^T], pe = E[z z^T e] and ge = E[z g e]; D scales with
    sqrt(1 + e)."""

    def expanded(m: sp.Matrix) -> tuple[sp.Matrix, sp.Matrix, sp.Matrix]:
        root = sym.normalizer
        first = m.diff(root) * root / 2
        return m, first, first.diff(root) * root / 2 - first / 2  # d^2/de^2 = (D/2 d/dD)^2 - (D/2 d/dD)

    (a0, a1, a2), (b0, b1, b2) = expanded(a), expanded(b)

    def pair(x: sp.Matrix, m: sp.Matrix, y: sp.Matrix) -> sp.Matrix:
        half = x * m * y.T
        return half + half.T

    one = sp.eye(1)
    plain = a0 * p * a0.T + sym.grad_sq * b0 * b0.T
    second = a1 * p * a1.T + pair(a2, p, a0) / 2 + sym.grad_sq * (b1 * b1.T + pair(b2, one, b0) / 2)
    new = plain + pair(a1, pe, a0) + _e_sq * second + sym.grad_sq * _e_grad * pair(b1, one, b0) + pair(a1, ge, b0) + pair(a0, ge, b1)
    with_e = a0 * pe * a0.T + pair(a0, ge, b0) + sym.grad_sq * _e_grad * b0 * b0.T + _e_sq * (pair(a1, p, a0) + sym.grad_sq * pair(b1, one, b0))
    return new, with_e


@cached
def _recurrence(rule: type[UpdateRule]) -> _Recurrence:
    response = linear_response(rule)
    n = len(response.states)
    order = tuple((i, j) for i in range(n) for j in range(i, n))
    hyper, t, root, grad = sym.flat(sym.hyper_symbols(rule)), sym.t, sym.normalizer, sym.grad_sq
    p, pe, pg, pge = (_symmetric(name, n) for name in ("P", "E", "Q", "F"))
    mu = sp.Matrix(sp.symbols(f"mu_:{n}"))
    listed = lambda m: [m[ij] for ij in order]  # noqa: E731
    a, b, white = response.transition, response.drive, sp.zeros(n, n)
    argument = None
    if response.argument is not None:
        (h, k), drive = response.argument, response.sign_drive
        a, b = a + drive * h * _gain, b + drive * k * _own_gain
        past = (h * p * h.T)[0]
        white = drive * drive.T * (1 - _gain**2 * past - _own_gain**2 * k**2 * grad)
        argument = sp.lambdify((*hyper, *listed(p)), [past, k, *h, drive[0]], "numpy", cse=True)
    normalizer = None
    v, v_var, kurt = sp.symbols("v v_var kurt", positive=True)
    if response.square is not None:
        q, c = response.square
        rate, fresh = response.average, 1 - response.average
        kv, kgv = _symmetric("K", n), _symmetric("L", n)
        square = (q * p).trace() + c * grad
        # Isserlis' theorem for z of mean mu: Cov(z_i z_j, z_k z_l) = P_ik P_jl + P_il P_jk - 2 mu_i mu_j mu_k mu_l.
        still = (mu.T * q * mu)[0]
        square_var = 2 * square**2 + (kurt - 3) * c**2 * grad**2 - 2 * still**2
        new_v = rate * v + fresh * square
        new_var = rate**2 * v_var + fresh**2 * square_var + 2 * rate * fresh * (q * kv).trace()
        shared = (rate * kv + fresh * 2 * (p * q * p - still * mu * mu.T)) / new_v
        outputs = [new_v, new_var, sp.sqrt(new_v * response.correction), new_var / new_v**2, fresh * c * (kurt - 1) * grad / new_v]
        # The square is that of sqrt(c) g + sqrt(q) z: it holds their product too.
        both = 2 * fresh * grad * p * q.applyfunc(lambda x: sp.sqrt(x * c)) * sp.ones(n, 1) / new_v
        outputs += [*both, *listed(shared), *listed(rate * kgv / new_v)]
        normalizer = sp.lambdify((*hyper, t, grad, kurt, v, v_var, *mu, *listed(p), *listed(kv), *listed(kgv)), outputs, "numpy", cse=True)
    ge, none = sp.Matrix(sp.symbols(f"ge_:{n}")), sp.zeros(n, 1)
    new, with_e = _moments(a, b, p, pe, ge)
    lagged = (a * p + a.diff(root) * root / 2 * pe)[0, 0]
    second = (a.diff(root) * root / 2)
    second = second.diff(root) * root / 2 - second / 2
    lagged += (second * p)[0, 0] * _e_sq / 2 + b.diff(root)[0] * root / 2 * ge[0]
    ag, bg = (m.subs(sym.lam, 0) for m in (a, b))
    ag[:, 0] = sp.zeros(n, 1)
    separate = not response.decoupled
    of_gradient = (pg, pge) if separate else (p, pe)
    new_g, with_eg = _moments(ag, bg, *of_gradient, none if separate else ge)
    update_sq = response.sign_drive[0] ** 2 if response.argument is not None else new_g[0, 0]
    outputs = [*listed(new + white), *listed(with_e), lagged, update_sq, *((a + second * _e_sq / 2) * mu)]
    if separate:
        outputs += [*listed(new_g), *listed(with_eg)]
    known = (*hyper, t, root, grad, _e_sq, _e_grad, _gain, _own_gain)
    step = sp.lambdify((*known, *mu, *ge, *listed(p), *listed(pe), *listed(pg), *listed(pge)), outputs, "numpy", cse=True)
    system = sp.lambdify((*hyper, t, root, _gain, _own_gain), [*a, *b], "numpy", cse=True)
    return _Recurrence(n, order, normalizer, step, argument, system, separate)


def expected_path(
    rule: UpdateRule,
    law: GradientLaw,
    steps: int,
    schedule: Mapping[str, np.ndarray],
    start_sq: float,
    *,
    plain: bool = False,
) -> Path:
    """Norm, rotation and update size expected at every step, from weights of second moment `start_sq` and empty buffers."""
    values = hyper_values(rule, schedule, steps)
    walker = _Walker(type(rule), law, start_sq, plain)
    norm_sq, rotation, update_sq = np.empty((3, steps))
    with np.errstate(all="ignore"):
        for step in range(steps):
            norm_sq[step], rotation[step], update_sq[step] = walker.take(step + 1, values[step])
    norm, angle = equilibria(rule, law, values)
    return Path(np.sqrt(norm_sq), rotation, np.sqrt(update_sq), norm, angle)


def hyper_values(rule: UpdateRule, schedule: Mapping[str, np.ndarray], steps: int) -> list[tuple[float, ...]]:
    """The flat hyperparameters of every step."""
    columns = []
    for name, value in vars(rule.values).items():
        factors = np.asarray(schedule.get(name, 1.0), dtype=float)
        entries = value if isinstance(value, tuple) else (value,)
        for i, entry in enumerate(entries):
            columns.append(np.broadcast_to(entry * (factors[..., i] if isinstance(value, tuple) and factors.ndim else factors), steps))
    return list(zip(*(column.tolist() for column in columns), strict=True))


class _Walker:
    """The moments on their way.

    Arrays have shape (neuron, kind): a kind is a coordinate of its own gamma, in several classes where a normalizer's first
    gradients make coordinates different (see `_Beginning`). `share` is the number of coordinates that each stands for.
    """

    def __init__(self, rule: type[UpdateRule], law: GradientLaw, start_sq: float, plain: bool) -> None:
        self.rule, self.law, self.plain, self.start_sq = rule, law, plain, start_sq
        self.recurrence = _recurrence(rule)
        n, size = self.recurrence.states, len(self.recurrence.order)
        self.nodes, self.weights = (np.ones(1), np.ones(1)) if plain else law.length_squared()
        self.fourth = float(self.weights @ self.nodes**2)  # E l^4 at E l^2 = 1
        gamma = np.abs(getattr(law, "gamma_in", np.ones((1, law.fan_in))))
        neurons = len(law.second_moment(np.full((1, law.fan_in), start_sq)))
        _, self.first, self.back, counts = np.unique(gamma, axis=1, return_index=True, return_inverse=True, return_counts=True)
        self.back = self.back.ravel()
        self.classes, self.share = 1, counts.astype(float)
        shape = (neurons, len(counts))
        self.p = [np.full(shape, start_sq if ij == (0, 0) else 0.0) for ij in self.recurrence.order]
        self.mu = [np.zeros(shape) for _ in range(n)]
        self.pg, self.k, self.kg = ([np.zeros(shape) for _ in range(size)] for _ in range(3))
        self.v, self.v_var = np.zeros(shape), np.zeros(shape)
        self.spread = None if plain else _Spread(self.recurrence, law, gamma[:, self.first], self.share, start_sq)
        self.signs = None if plain or self.recurrence.argument is None else _Signs(n - 1, neurons)
        self.beginning = None
        if self.recurrence.normalizer is not None and not plain:
            self.beginning = _Beginning(rule, shape, law.length_squared(), start_sq)

    def grad_sq(self) -> Array:
        """E g_c^2 of every kind."""
        spread = self.p[0]
        if self.classes > 1:
            spread = spread.reshape(len(spread), -1, self.classes).mean(-1)
        grad = np.broadcast_to(self.law.second_moment(spread[:, self.back]), (len(spread), self.law.fan_in))[:, self.first]
        if self.spread is not None:
            grad = grad * self.spread.boost[:, None]
        return np.repeat(grad, self.classes, axis=1) if self.classes > 1 else grad

    def take(self, t: int, hyper: tuple[float, ...]) -> tuple[float, float, float]:
        """Take step t; E||w||^2, the mean angle and E||Delta_g w||^2, averaged over neurons."""
        grad, before = self.grad_sq(), self.p
        if self.beginning is not None:
            lagged, update, root = self.beginning.take(t, hyper, grad)
            self.p = self.beginning.moments(self.recurrence.order)
            angle = self._angle(before, lagged, grad, root, 0.0, 0.0, hyper, t)
            result = self._means(angle, update)
            if t == _EXACT:
                self._divide()
            return result
        r = self.recurrence
        size, n = len(r.order), r.states
        root, e_sq, e_grad, gain, own = 1.0, 0.0, 0.0, 0.0, 0.0
        pe = pge = [0.0] * size
        ge = [0.0] * n
        if r.normalizer is not None:
            self.v, v_var, root, *rest = r.normalizer(
                *hyper, t, grad, 3 * self.fourth, self.v, self.v_var, *self.mu, *self.p, *self.k, *self.kg
            )
            if not self.plain:
                self.v_var, e_sq, e_grad, ge, pe, pge = v_var, rest[0], rest[1], rest[2 : 2 + n], rest[2 + n : 2 + n + size], rest[2 + n + size :]
        if r.argument is not None:
            past, k, *h, drive = r.argument(*hyper, *self.p)
            total = np.sqrt(np.multiply.outer(k**2 * grad, self.nodes) + np.asarray(past)[..., None])
            part = math.sqrt(2 / math.pi) * self.weights / total
            gain, own = part.sum(-1), part @ self.nodes
        new = r.step(*hyper, t, root, grad, e_sq, e_grad, gain, own, *self.mu, *ge, *self.p, *pe, *self.pg, *pge)
        p, with_e, (lagged, update), mu, of_grad = new[:size], new[size : 2 * size], new[2 * size : 2 * size + 2], new[2 * size + 2 : 2 * size + 2 + n], new[2 * size + 2 + n :]
        if self.signs is not None:
            system = r.system(*hyper, t, root, gain, own)
            extra = self.signs.beyond_linear(system, h, k, drive, past, grad, self.p, r)[:, None]
            extra = extra + self.spread.sign_pull(h, k, grad, self.p, self.share, gain, r)
            p[0] = p[0] + 2 * system[0] * drive * extra
            lagged = lagged + drive * extra
        self.p = [np.broadcast_to(x, grad.shape) for x in p]
        angle = self._angle(before, lagged, grad, root, gain, own, hyper, t)
        self.mu = mu
        if r.separate:
            self.pg = list(of_grad[:size])
        if r.normalizer is not None and not self.plain:
            self.k = [x * self.v for x in with_e]
            if r.separate:
                self.kg = [x * self.v for x in of_grad[size:]]
        return self._means(angle, update)

    def _means(self, angle: Array, update: Any) -> tuple[float, float, float]:
        update = np.broadcast_to(update, self.p[0].shape)
        return float((self.p[0] @ self.share).mean()), float(angle.mean()), float((update @ self.share).mean())

    def _divide(self) -> None:
        """Go on from the exact beginning: classes of coordinates with their own normalizer."""
        begun = self.beginning
        assert begun is not None
        self.classes = begun.classes
        self.share = np.repeat(self.share / self.classes, self.classes)
        self.mu, self.p, self.v, self.v_var, self.k, self.pg, self.kg = begun.divided(self.recurrence.order)
        if self.spread is not None:
            self.spread.scale = np.repeat(self.spread.scale, self.classes, axis=1)
        self.beginning = None

    def _angle(self, before: list[Array], lagged: Array, grad: Array, root: Any, gain: Any, own: Any, hyper: tuple[float, ...], t: int) -> Array:
        """Mean angle of each neuron from the part of the step that is orthogonal to the weights."""
        r, n = self.recurrence, self.recurrence.states
        old, new, along = before[0] @ self.share, self.p[0] @ self.share, np.broadcast_to(lagged, before[0].shape) @ self.share
        pull = along - old
        across = old + new - 2 * along - pull**2 / old
        cosine = along / np.sqrt(old * new)
        if self.spread is None:
            return np.arctan2(np.sqrt(np.maximum(across / new, 0)), cosine)
        system = r.system(*hyper, t, root, gain, own)
        white = None
        if r.argument is not None:
            past, k, *h, drive = r.argument(*hyper, *before)
            white = drive, 1 - gain**2 * past - own**2 * k**2 * grad
        pulls, factor = self.spread.follow(r, system, hyper, t, before, self.share, grad, root, gain, own, white, self.beginning is None)
        # (w . step)^2 is more than the square of its mean.
        across = across - pulls * old
        return np.arctan2(np.sqrt(np.maximum(across / new, 0)), cosine) * factor


# Steps at the beginning that are taken exactly, with this many points in all and classes of coordinates.
_EXACT, _POINTS, _CLASSES = 40, 2**15, 32


class _Tape:
    """An `xp` that remembers roots, or returns remembered ones."""

    def __init__(self) -> None:
        self.root: Any = None
        self.replay = False

    def sqrt(self, x: Array) -> Array:
        if not self.replay:
            self.root = np.sqrt(x)
        return self.root


class _Beginning:
    """The first steps of a rule with a normalizer, whose average then holds few squares: the update itself, integrated over
    gradients and starting weights by a low-discrepancy rule.

    Each gradient is its deviation times a random length times a normal; starting weights are uniform, as torch's. Coordinates
    then differ in what their normalizer remembers: they go on in classes of like normalizers.
    """

    def __init__(self, rule: type[UpdateRule], shape: tuple[int, int], length_squared: tuple[Array, Array], start_sq: float) -> None:
        neurons, kinds = shape
        points = max(256, _POINTS // kinds)
        self.rule, self.classes = rule, min(_CLASSES, points // 32)
        unit = qmc.Sobol(2 * _EXACT + 1, scramble=True, rng=np.random.default_rng(0)).random(points * kinds)
        unit = np.clip(unit, 1e-12, 1 - 1e-12).reshape(points, kinds, -1).transpose(2, 1, 0)[:, None]
        nodes, weights = length_squared
        lengths = np.sqrt(nodes)[np.minimum(np.searchsorted(np.cumsum(weights), unit[_EXACT:-1]), len(nodes) - 1)]
        self.noise = norm.ppf(unit[:_EXACT]) * lengths
        whole = (neurons, kinds, points)
        start = np.broadcast_to(math.sqrt(3 * start_sq) * unit[-1], whole)
        self.state = {"param": start, **{name: np.zeros(whole) for name in rule.state}}
        self.bare = {name: np.zeros(whole) for name in rule.state}
        self.squares = [name for name in rule.state if name not in linear_response(rule).states]

    def take(self, t: int, hyper: tuple[float, ...], grad_sq: Array) -> tuple[Array, Array, Array]:
        """E[w w'], E of the squared gradient part, and the RMS normalizer, of every kind."""
        values, tape = _namespace(self.rule, hyper), _Tape()
        grad = np.sqrt(grad_sq)[..., None] * self.noise[t - 1]
        old = self.state["param"]
        self.state = self.rule.update(grad, SimpleNamespace(**self.state, step=t), values, tape)
        tape.replay = True
        values.weight_decay = 0.0
        part = self.rule.update(grad, SimpleNamespace(param=0.0, **self.bare, step=t), values, tape)
        self.bare = {name: part[name] for name in self.bare}
        self.part = part["param"]
        return (old * self.state["param"]).mean(-1), np.square(self.part).mean(-1), np.sqrt(np.square(tape.root).mean(-1))

    def moments(self, order: tuple[tuple[int, int], ...]) -> list[Array]:
        z = [self.state[name] for name in self.state if name not in self.squares]
        return [(z[i] * z[j]).mean(-1) for i, j in order]

    def divided(self, order: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
        """Mean and second moments of z, mean and variance of v, Cov(z z^T, v), and those of the gradient's own buffers."""
        (square,) = self.squares
        ranks = np.argsort(self.state[square], axis=-1)

        def grouped(x: Array) -> Array:
            return np.take_along_axis(x, ranks, -1).reshape(*x.shape[:2], self.classes, -1)

        def flat(x: Array) -> Array:
            return x.mean(-1).reshape(len(x), -1)

        v = grouped(self.state[square])
        off = v - v.mean(-1, keepdims=True)
        z = [grouped(self.state[name]) for name in self.state if name not in self.squares]
        zg = [np.zeros_like(v), *(grouped(self.bare[name]) for name in self.bare if name not in self.squares)]
        second, second_g = ([flat(x[i] * x[j]) for i, j in order] for x in (z, zg))
        with_v, with_vg = ([flat(x[i] * x[j] * off) for i, j in order] for x in (z, zg))
        return [flat(x) for x in z], second, flat(v), flat(off**2), with_v, second_g, with_vg


def _namespace(rule: type[UpdateRule], flat: tuple[float, ...]) -> SimpleNamespace:
    """Flat hyperparameters by name again."""
    values, rest = {}, list(flat)
    for name, default in rule.hyper.items():
        values[name] = tuple(rest.pop(0) for _ in default) if isinstance(default, tuple) else rest.pop(0)
    return SimpleNamespace(**values)


class _Signs:
    """What the arcsine law has beyond its linear part, over the lags where correlations are large."""

    def __init__(self, buffers: int, neurons: int) -> None:
        self.past = np.zeros((0, buffers, neurons))  # Cov(buffers, n_j), later steps first to last
        self.sigma = np.zeros((0, neurons))
        self.weight = np.zeros(0)

    def beyond_linear(self, system, h, k, drive, past, grad, p, r):
        """E[w s] of this step less its linear part, shape (neuron,)."""
        n = r.states
        index = {ij: i for i, ij in enumerate(r.order)}
        mean = lambda x: np.broadcast_to(x, grad.shape).mean(-1)  # noqa: E731
        size = grad.mean(-1)
        sigma = np.sqrt(mean(past) + k**2 * size)
        row = np.array(h[1:])
        found = np.zeros(len(grad))
        if len(self.weight):
            rho = np.clip(np.einsum("b,lbn->ln", row, self.past) / (self.sigma * sigma), -1, 1)
            found = 2 / math.pi * (self.weight @ (np.arcsin(rho) - rho))
            alive = np.abs(rho).max(-1) > _LINEAR
            if not alive.all():
                self.past, self.sigma, self.weight = self.past[alive], self.sigma[alive], self.weight[alive]
        buffers = np.array(system[: n * n], dtype=object).reshape(n, n)[1:, 1:].astype(float)
        drives = np.array(system[n * n + 1 :], dtype=float)
        own = np.array([sum(buffers[i, j] * sum(row[m] * mean(p[index[min(j, m) + 1, max(j, m) + 1]]) for m in range(n - 1)) for j in range(n - 1)) + drives[i] * k * size for i in range(n - 1)])
        self.past = np.concatenate([np.einsum("ij,ljn->lin", buffers, self.past), own[None]])
        self.sigma = np.concatenate([self.sigma, sigma[None]])
        self.weight = np.append(self.weight * system[0], drive)
        return found


class _Spread:
    """Covariance of the Gram matrix of (w, buffers) of each neuron, and what it does to means."""

    def __init__(self, recurrence: _Recurrence, law: GradientLaw, gamma: Array, share: Array, start_sq: float) -> None:
        n = recurrence.states
        self.feedback = law.scale_invariant and recurrence.normalizer is None
        self.scale = gamma**2 if self.feedback else np.ones_like(gamma)
        nodes, weights = law.length_squared()
        self.fourth = float(weights @ nodes**2)
        neurons = len(law.second_moment(np.ones((1, law.fan_in))))
        self.cov = np.zeros((neurons, n * n, n * n))
        # Starting weights are uniform, as torch's: E w^4 = (9/5) (E w^2)^2.
        self.cov[:, 0, 0] = (_START_FOURTH - 1) * start_sq**2 * (self.scale**2 @ share)
        self.boost = 1 + self.feedback * (_START_FOURTH - 1) * (self.scale**2 @ share) / (self.scale @ share) ** 2 * np.ones(neurons)

    def follow(self, r, system, hyper, t, p, share_of, grad, root, gain, own, white, sized):
        sign = white is not None
        n, m, K = r.states, r.states + 1, len(grad)
        mean = lambda x: (np.broadcast_to(x, grad.shape) * self.scale) @ share_of  # noqa: E731
        if r.normalizer is not None or sign:
            level = lambda x: np.sqrt(np.square(np.broadcast_to(x, grad.shape)) @ share_of / share_of.sum())  # noqa: E731
            system = r.system(*hyper, t, level(root), level(gain), level(own))
        ab = np.empty((K, m, n + 1))
        for i in range(n):
            for j in range(n):
                ab[:, i, j] = system[i * n + j]
            ab[:, i, n] = system[n * n + i]
        ab[:, n] = ab[:, 0]
        gram = np.empty((K, n, n))
        for (i, j), x in zip(r.order, p, strict=True):
            gram[:, i, j] = gram[:, j, i] = mean(x)
        # The last row is the step less its part along w.
        ab[:, n, 0] -= np.einsum("ki,ki->k", ab[:, 0, :n], gram[:, 0]) / gram[:, 0, 0]
        a, b = ab[:, :, :n], ab[:, :, n]
        size = mean(grad)
        free = gram - gram[:, :, :1] * gram[:, :1, :] / gram[:, :1, :1]
        each = np.square(grad * self.scale) @ share_of / size
        share = each / size
        h = each[:, None, None] * (a @ free @ a.swapaxes(1, 2))
        big = (a[:, :, None, :, None] * a[:, None, :, None, :]).reshape(K, m * m, n * n)
        sized_b = b.copy()
        if sign:
            sized_b[:, [0, n]] = 0.0  # a sign has one size
        bb = (sized_b[:, :, None] * sized_b[:, None, :]).reshape(K, m * m)
        if self.feedback:
            big[:, :, 0] -= (size / gram[:, 0, 0])[:, None] * bb
        cov = big @ self.cov @ big.swapaxes(1, 2)
        row = a[:, n]
        pulls = np.einsum("ki,kij,kj->k", row, self.cov[:, :n, :n], row) / gram[:, 0, 0] ** 2
        noise = self._crossed(h, b).reshape(K, m * m, m * m)
        # A first gradient's length cancels against that of the normalizer, which holds little else.
        noise = noise + sized * (size**2 * (self.fourth - 1 + 2 * self.fourth * share))[:, None, None] * bb[:, :, None] * bb[:, None, :]
        cov = cov + noise
        if white is not None:
            # e of the sign is white, orthogonal to nothing, and of such a size that the sign's is fixed.
            drive, level = white
            e = np.zeros((K, m))
            e[:, 0] = e[:, n] = drive
            pulls = pulls + drive**2 * mean(level * np.ones_like(grad)) / share_of.sum() / gram[:, 0, 0]
            he = (mean(level * np.ones_like(grad)) / share_of.sum())[:, None, None] * (a @ gram @ a.swapaxes(1, 2))
            cov = cov + self._crossed(he, e).reshape(K, m * m, m * m)
        new = a @ gram @ a.swapaxes(1, 2) + size[:, None, None] * (b[:, :, None] * b[:, None, :])
        w, u = new[:, 0, 0], new[:, n, n]
        ww, uu, wu = cov[:, 0, 0] / w**2, cov[:, -1, -1] / u**2, cov[:, 0, -1] / (w * u)
        keep = np.add.outer(np.arange(n) * m, np.arange(n)).ravel()
        self.cov = cov[:, keep[:, None], keep[None, :]]
        if self.feedback:
            self.boost = 1 + ww
        if sign:
            uu = wu = 0.0
        self.ww, self.uu, self.wu, self.pulls = ww, uu, wu, pulls
        return pulls, np.exp(-uu / 8 + 3 * ww / 8 - wu / 4)

    def sign_pull(self, h, k, grad, p, share_of, gain, r):
        """E[w s] beyond gain E[w n], of second order in 1/dim, shape (neuron, 1)."""
        n = r.states
        gram = np.empty((len(grad), n, n))
        for (i, j), x in zip(r.order, p, strict=True):
            gram[:, i, j] = gram[:, j, i] = (x * self.scale) @ share_of
        row = np.array(h, dtype=float)
        q, y, w = gram[:, 0] @ row, row @ gram @ row, gram[:, 0, 0]
        own = k**2 * ((grad * self.scale) @ share_of)
        share = y / (y + own)
        cov = self.cov.reshape(-1, n, n, n, n)
        yy = np.einsum("i,j,k,l,nijkl->n", row, row, row, row, cov) / y**2
        wy = np.einsum("k,l,nkl->n", row, row, cov[:, 0, 0]) / (w * y)
        qw = np.einsum("l,nl->n", row, cov[:, 0, 0, 0]) / (w * q)
        qy = np.einsum("j,k,l,njkl->n", row, row, row, cov[:, 0]) / (q * y)
        ww = cov[:, 0, 0, 0, 0] / w**2
        rest = 1 - share
        jensen = -(share * qy - rest * qw) / 2 + 3 / 8 * (share**2 * yy - 2 * share * rest * wy + rest**2 * ww)
        jensen = np.where(np.isfinite(jensen), jensen, 0.0)
        dim = share_of.sum()
        pulled = gain * sum(h[i] * p[[ij for ij in r.order].index((0, i))] for i in range(1, n))
        return pulled * (jensen + (dim - 1) / (dim + 2) / dim)[:, None] * self.feedback

    @staticmethod
    def _crossed(h, b):
        """Covariance of p b^T + b p^T for p of covariance h, indices (i, j, k, l)."""
        half = h[:, :, None, :, None] * b[:, None, :, None, None] * b[:, None, None, None, :]
        half = half + half.swapaxes(1, 2)
        return half + half.swapaxes(3, 4)


def equilibria(rule: UpdateRule, law: GradientLaw, values: list[tuple[float, ...]]) -> tuple[Array, Array]:
    """Norm and rotation at the frozen hyperparameters of each step; NaN without an equilibrium."""
    return np.full((2, len(values)), np.nan)
