"""The full prediction: what the second-moment closure of `equilibrium` leaves out, computed from hyperparameters.

`exact` takes the sizes of gradients at their mean, averages of squares as slow, and an RMS angle for the mean angle. Here

* ``fluctuations``: ||w~||^2 and the shares of its coordinates fluctuate, and E[1/||w~||^2] is not 1/E||w~||^2 (`fluctuations`);
* ``normalizer``: a second-moment average of finite memory holds the squares that it divides, and eps adds to its root
  (`lengths.FiniteAverage`);
* ``orthogonality``: g is orthogonal to w, so that a coordinate's gradients shrink while it grows. Under a sign or a fast
  normalizer this skews what follows and pushes the weights outward, by a share of order 1/C;
* ``mean_angle``: the mean of the angle, the paper's eta_r, is below its RMS by the spread of lengths and norms, and what of a
  step lies along the weights does not turn them.

Nothing is fitted to a walk. The estimate of the error that is left takes the size of each first neglected term; its factors were
set on three designs of `benchmarks.accuracy`, whose table shows what each correction brings and how often the estimate holds.
"""

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import sympy as sp
from scipy.fft import irfft, next_fast_len, rfft
from scipy.interpolate import PchipInterpolator
from scipy.linalg.lapack import dtbtrs
from threadpoolctl import ThreadpoolController

from rwsim.errors import InvalidArgument, UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import equilibrium as eq
from rwsim.theory import forms, signs
from rwsim.theory import symbols as sym
from rwsim.theory.fluctuations import Fluctuations, Groups, fluctuations, mean_inverses
from rwsim.theory.lengths import FiniteAverage, Lengths, horizon, mean_root, mean_root_normal, mean_root_normalized, over_lags
from rwsim.theory.noise import Array, GradientLaw, ToySystem
from rwsim.theory.rates import total_decay

CORRECTIONS = ("fluctuations", "normalizer", "orthogonality", "mean_angle")
# Estimated errors above this are too large for the first neglected terms to be trusted.
_MOST_ERROR = 0.009
# Layers of different gamma_in that stand for all draws.
_DRAWS = 8
# Lags over which weights are followed, at most.
_LONGEST = 2_000_000
# The number of threads is the process's: of two at once the second would remember, and leave, the first one's.
_limiting = threading.RLock()
# Self-consistency of sizes and shares.
_SWEEPS, _STEPS, _SETTLED = 8, 500, 1e-12


@dataclass(frozen=True)
class Full(eq.Equilibrium):
    """Equilibrium values as `Equilibrium`, but `angle` is the mean angle (the paper's eta_r), and how sure they are.

    Attributes:
        norm_error: Estimated relative error of `norm`, about two standard errors of a good guess (it holds in 95 % of cases, all
            optimizers together).
        rotation_error: That of `rotation`.
        norm_noise: Of a walk: a neuron's mean of ||omega||^2 over n steps has the relative variance `norm_noise` / n, to first order;
            NaN without ``mean_angle``.
        doubts: Why the estimate should not be trusted, in words; none where the prediction is valid.
    """

    norm_error: float
    rotation_error: float
    norm_noise: float
    doubts: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """Whether the neglected terms are small enough for the prediction to be trusted to about its estimated error."""
        return not self.doubts


def predict_full(rule: UpdateRule, law: GradientLaw, corrections: Collection[str] = CORRECTIONS) -> Full:
    """The full prediction of a rule's equilibrium.

    Args:
        rule: The optimizer.
        law: Its gradients. In the ideal walk gradients do not depend on the weights; two of the corrections are then empty.
        corrections: Those to apply, of `CORRECTIONS`.

    Raises:
        InvalidArgument: An unknown correction.
        NoEquilibrium, UnsupportedRule: As `predict_equilibrium`.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import ToySystem
        >>> law = ToySystem(np.ones((1, 64)), np.ones((1, 1)), batch=16, loss_scale=1.0, neurons=1)
        >>> rule = AdamW(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.9))
        >>> round(predict_full(rule, law).norm, 4), round(predict_full(rule, law, ()).norm, 4)
        (0.5389, 0.5419)
    """
    unknown = [name for name in corrections if name not in CORRECTIONS]
    if unknown:
        raise InvalidArgument("corrections", f"must be among {', '.join(CORRECTIONS)}", unknown[0])
    for name in ("lr", "weight_decay"):
        if getattr(rule.values, name, None) == 0:
            raise eq.no_equilibrium(name)
    solve = _sign if forms.settled(type(rule)).direction == "sign" else _rational
    with _limiting, _libraries().limit(limits=1, user_api="blas"):
        if isinstance(law, ToySystem) and len(law.gamma_in) > 1:
            return _over_draws(rule, law, corrections)
        return solve(_System(rule, law, frozenset(corrections)))


@cache
def _libraries() -> ThreadpoolController:
    """Those whose number of threads can be set. Matrices here have some hundred rows: threads of OpenBLAS, which spin while they wait, make
    their decompositions half as fast."""
    return ThreadpoolController()


def _over_draws(rule: UpdateRule, law: ToySystem, corrections: Collection[str]) -> Full:
    """Layers of different gamma_in: the exact values of all, with the mean correction of a few."""
    exact = eq.predict_equilibrium(rule, law).exact
    chosen = np.unique(np.linspace(0, len(law.gamma_in) - 1, _DRAWS).astype(int))
    found = []
    for i in chosen:
        one = replace(law, gamma_in=law.gamma_in[i : i + 1], gamma_out=law.gamma_out[i : i + 1])
        found.append(predict_full(rule, one, corrections))

    def corrected(values: Array, name: str) -> Array:
        return values * np.mean([getattr(part, name)[0] / values[i] for i, part in zip(chosen, found, strict=True)])

    def mean(name: str) -> float:
        return float(np.mean([getattr(part, name) for part in found]))

    return Full(
        corrected(exact.norm_sq, "norm_sq"), corrected(exact.angle, "angle"), corrected(exact.update_sq, "update_sq"),
        mean("norm_error"), mean("rotation_error"), mean("norm_noise"),
        tuple(sorted({doubt for part in found for doubt in part.doubts})),
    )  # fmt: skip


class _System:
    """A rule and its gradients in numbers: matrices, kernels, lengths, groups of coordinates."""

    def __init__(self, rule: UpdateRule, law: GradientLaw, corrections: frozenset[str]) -> None:
        self.rule, self.law, self.corrections = rule, law, corrections
        self.kind, self.hyper = type(rule), sym.flat(rule.values)
        self.response = forms.settled(self.kind)
        self.lengths = Lengths.of(law)
        self.free = not isinstance(law, ToySystem)
        self.gamma_sq = law.gamma_sq[0] if isinstance(law, ToySystem) else np.ones(law.fan_in)
        self.groups = Groups.by_size(self.gamma_sq)

    def wants(self, correction: str) -> bool:
        return correction in self.corrections

    def matrices(self, root: Array) -> tuple[Array, Array]:
        """A and b of the linearized rule at normalizers, (..., n, n) and (..., n)."""
        linear = self.response.linearized()
        n = linear.transition.rows
        entries = forms.numeric(self.kind, (*linear.transition, *linear.drive), (sym.normalizer,))(*self.hyper, root)
        stacked = np.stack([np.broadcast_to(np.asarray(x, dtype=float), root.shape) for x in entries], -1)
        return stacked[..., : n * n].reshape(*root.shape, n, n), stacked[..., n * n :]

    def update_kernel(self) -> Array:
        """Coefficients of the gradients 0, 1, ... steps ago in the gradient part of an update, at D = 1."""
        transition, drive = self.response.linearized().gradient_part()
        return self._kernel(transition[0, 1:], transition[1:, 1:], drive[0], drive[1:, 0])

    def sign_kernel(self) -> Array:
        """Their coefficients in the sign's argument."""
        if self.response.argument is None:
            raise UnsupportedRule(self.rule.name, "it has no sign")
        h, k = self.response.argument
        return self._kernel(h[0, 1:], self.response.transition[1:, 1:], k, self.response.drive[1:, 0])

    def _kernel(self, row: sp.Matrix, buffers: sp.Matrix, head: sp.Expr, into: sp.Matrix) -> Array:
        m = buffers.rows
        values = np.array(forms.numeric(self.kind, (*row, *buffers, *into, head), (sym.normalizer,))(*self.hyper, 1.0), dtype=float)
        if m == 0:
            return values
        weights, transition, state = values[:m], values[m : m + m * m].reshape(m, m), values[m + m * m : -1]
        kernel = signs.responses(weights, transition, state, values[-1], horizon(float(max(abs(np.linalg.eigvals(transition))))))
        return kernel[: int(np.flatnonzero(kernel)[-1]) + 1]  # a momentum of 0 has none

    def concentration(self, spread: Array) -> float:
        """Sum of the squared shares of ||w~||^2: 1/C where all coordinates are alike."""
        share = self.gamma_sq * spread
        return float((share**2).sum() / share.sum() ** 2)


def _doubts(*errors: float) -> tuple[str, ...]:
    worst = max(errors)
    if not worst > _MOST_ERROR:
        return ()
    return (f"the terms left out come to {100 * worst:.1f} %: too few coordinates for averages that long or weights that fast",)


def _sign(s: _System) -> Full:
    """Sign rules: E ||omega||^2 of `equilibrium` and the push of orthogonality; the step's size is constant."""
    exact = eq.predict_equilibrium(s.rule, s.law).exact
    keep, step = forms.numeric(s.kind, (s.response.transition[0, 0], s.response.sign_drive[0]), ())(*s.hyper)
    dim, norm_sq, kernel = s.law.fan_in, float(exact.norm_sq[0]), s.sign_kernel()
    correlation = signs.autocorrelation(kernel)
    lag = float(np.abs(kernel) @ np.arange(1, len(kernel) + 1) / np.abs(kernel).sum())  # of an average gradient in the argument
    if s.wants("orthogonality") and not s.free:
        norm_sq += step**2 * _push(s, kernel, keep) / (1 - keep**2)
    # From a steady norm: (1 - keep^2) N = step^2 C + 2 keep step E<omega, s>.
    chord_sq, shift, noise = (dim * step**2 - norm_sq * (1 - keep) ** 2) / (keep * norm_sq), 1.0, math.nan
    if s.wants("mean_angle"):
        a, b = s.matrices(np.full(len(s.groups.count), math.sqrt(math.pi / 2 * correlation[0])))
        rest = np.zeros_like(b)
        rest[:, 0] = step * math.sqrt(1 - 2 / math.pi)  # what a sign has besides its linear part
        # A change of the gradient's size that is slow for the argument's energy does not change the sign.
        held = float(kernel**2 @ np.arange(1, len(kernel) + 1)) / correlation[0]
        answer = 2 * (1 - keep) / (2 * (1 - keep) + 1 / held)
        found = fluctuations(
            a, b, s.groups, np.full(len(s.groups.count), norm_sq / dim), answer=answer, lengths_variance=s.lengths.variance,
            rest=rest, free=s.free,
        )  # fmt: skip
        # A short gradient leaves the sign to the momentum, which the weights follow: all coordinates at once.
        follows = 1 / np.sqrt(correlation[0] + kernel[0] ** 2 * (s.lengths.nodes - 1))
        spread = float(s.lengths.weights @ follows**2) / float(s.lengths.weights @ follows) ** 2 - 1
        along = (norm_sq * (1 - keep**2) - dim * step**2) / (2 * keep)  # step E<omega, s>
        chord_sq -= found.radial + (along / norm_sq) ** 2 * spread
        shift, noise = math.exp(3 / 8 * found.norm), found.norm_long
    ones = np.ones_like(exact.norm_sq)
    # The push is right for weights that outlast the argument's memory, and acts on what correlations add to E ||omega||^2.
    fast = (1 - keep) * lag
    concentration, within = (0.0 if s.free else s.concentration(np.ones(dim))), _saturated(fast)
    correlated = max(1 - dim * step**2 / (norm_sq * (1 - keep**2)), 0.0)
    # Second order in 1/C, and what of it acts within the argument's memory.
    few, few_within = _second(concentration, 0.1), concentration**2 * within
    # What a length changes: older gradients' share of the argument beside it, and how evenly it is shared with the newest.
    older, newest = kernel[1:] ** 2 / correlation[0], kernel[0] ** 2 / correlation[0]
    random, shared = s.lengths.variance * float(older @ older), s.lengths.variance * newest * (1 - newest) * within
    outlasted = concentration * within * correlated
    norm_error = 5e-5 + 0.36 * outlasted + 0.18 * few + 14 * few_within + 0.12 * random + 0.094 * shared
    rotation_error = 5e-5 + 0.49 * outlasted + 0.19 * few + 2.8 * few_within + 0.1 * random + 0.022 * shared
    # What lengths that the argument remembers do where the weights forget meanwhile: a term found in the errors, not derived.
    rotation_error += 0.73 * s.lengths.variance * _saturated(fast * float(older @ older))
    angle = 2 * math.asin(math.sqrt(chord_sq) / 2) * shift
    return Full(norm_sq * ones, angle * ones, exact.update_sq, norm_error, rotation_error, noise, _doubts(norm_error, rotation_error))


def _push(s: _System, kernel: Array, keep: float) -> float:
    """What orthogonality adds to the sum over lags of sign autocovariances of all coordinates: (1 - keep^2) E||omega||^2 / step^2.

    To first order in 1/C a gradient g_c = xi_c - w^_c sum_d w^_d xi_d, over ||w||, is scaled by its coordinate's own x = omega_c by
    1 - x_j^2 through its share and its part of the norm (E x^2 = 1/C); and the other coordinates' part of the norm does not feel
    sum_d w^_d xi_d, which the projector takes away. With F = omega_t^2, A(tau) = E[xi_j x_{j+tau}] and R the autocorrelation of omega,

        delta E F = -sum_j E[x_j^2 xi_j dF/dxi_j] + sum_{j<i} A(i-j) R(i-j) E[x_j xi_j xi_i dF/dxi_i].

    The derivative of a sign is sqrt(2/pi) at n = 0 (E n^2 = 1): given that, x, xi, omega_t are taken as Gaussian, and their
    products follow from pairs. Sums over two lags are convolutions. Of connected moments of the signs themselves only the first,
    rho / sqrt(1 - rho^2) for rho, is kept.
    """
    covariance = signs.sign_autocovariance(s.rule, s.law)[0]
    size = max(len(kernel), len(covariance) + 1, min(_LONGEST, math.ceil(30 / (1 - keep)))) + 2

    def padded(values: Array) -> Array:
        return np.concatenate([values, np.zeros(size - len(values))])

    def after(values: Array) -> Array:
        """sum_{i>=0} keep^i x_{n+i}"""
        return _decayed(values[::-1], keep)[::-1]

    def later(values: Array) -> Array:
        """sum_{i>=1} keep^(i-1) x_{n+i}"""
        return np.append(after(values)[1:], 0.0)

    energy = kernel @ kernel
    a, rho = padded(kernel / math.sqrt(energy)), padded(signs.autocorrelation(kernel) / energy)
    gamma = padded(np.append(1.0, covariance))
    whole = 1 - keep**2
    weight_sq = (1 + 2 * keep * later(gamma)[0]) / whole  # over step^2
    stays = _decayed(np.append(weight_sq, later(gamma)[:-1]), keep) / weight_sq  # R
    answers = np.append(0.0, _decayed(a, keep)[:-1])  # A over step sqrt(2/pi)
    steep = padded(rho[:1])
    steep[1:] = rho[1:] / np.sqrt(1 - np.minimum(rho[1:] ** 2, 1 - 1e-12))
    along, linear = later(steep), later(rho)  # Cov(x_j, n_{j+p}) over step sqrt(2/pi)
    of_end, end = after(answers), (1 + 2 * keep * linear[0]) / whole  # sums over t of E[xi omega_t] and of E[n omega_t]
    held = after(stays)

    own = 8 / math.pi * (a**2 * along) @ held - 8 / math.pi**2 / weight_sq * (a * linear**2) @ (3 * a * end - of_end)
    felt = answers * stays
    both, ends = (_convolved(x, felt) for x in (a**2, a * of_end))
    cross = 4 / math.pi * both @ (a * held)
    cross += 8 / math.pi**2 / weight_sq * (both @ (linear * (of_end - 3 * a * end)) + ends @ (linear * a))
    size_of = np.sqrt(s.gamma_sq)
    return float(whole * (own - cross * size_of.sum() * (size_of**3).sum() / s.gamma_sq.sum() ** 2))


# `scipy.signal` has both of these, and takes as long to load as the rest of a prediction to work out.


def _decayed(values: Array, keep: float) -> Array:
    """y_n = x_n + keep y_{n-1}: a triangular system of two diagonals."""
    diagonals = np.stack([np.ones_like(values), np.full_like(values, -keep)])
    return dtbtrs(diagonals, values[:, None], uplo="L", diag="U")[0][:, 0]


def _convolved(x: Array, y: Array) -> Array:
    """sum_{i<=n} x_i y_{n-i}, for as many n as `x` has."""
    length = next_fast_len(2 * len(x), real=True)
    return irfft(rfft(x, length) * rfft(y, length), length)[: len(x)]


def _rational(s: _System) -> Full:
    """Linear and second-moment-normalized rules: the closed forms of `equilibrium` at corrected gradient moments."""
    closure = eq.Closure(s.rule)
    spread = closure.spread(s.law)
    grad_sq = s.law.second_moment(spread)
    root = np.broadcast_to(closure.normalizer(grad_sq), grad_sq.shape)
    # The neuron of median gradient stands for the layer where fluctuations are concerned.
    median = int(np.argsort(grad_sq.sum(-1))[len(grad_sq) // 2])
    decay = forms.numeric(s.kind, (total_decay(s.kind),), (sym.normalizer,))(*s.hyper, root[median])[0]
    keep = 1 + float(np.median(decay))
    rate = float(forms.numeric(s.kind, (s.response.average,), ())(*s.hyper)[0]) if closure.normalized else 0.0
    # A normalizer undoes changes that are slower than its memory.
    answer = 2 * (1 - keep) / (2 * (1 - keep) + 1 - rate) if closure.normalized else 1.0
    divided = total_decay(s.kind).has(sym.normalizer)

    kernel = s.update_kernel()
    now, sums, inverse, push = np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), 0.0
    if closure.normalized:
        # E omega^2 is a sum over lags of these.
        lags = keep ** np.arange(len(kernel)) * signs.autocorrelation(kernel)
        lags[1:] *= 2
        lags = lags[: int(np.flatnonzero(np.abs(lags) > 1e-9 * lags[0])[-1]) + 1] / lags.sum()
        if s.wants("normalizer"):
            now, sums, inverse = _finite(s, kernel, rate, root, lags, divided)
        if s.wants("orthogonality") and not s.free and len(lags) > 1:
            average = FiniteAverage(kernel, rate, 0.0, s.lengths)
            push = float(over_lags(lambda k: average.follows(k) if k else 0.0, len(lags) - 1) @ np.append(0.0, lags[1:]))

    groups, found = s.groups, None
    inverse_size, inverse_own, faster = 1.0, np.ones(len(groups.count)), np.zeros(len(groups.count))
    corrected = s.wants("fluctuations") and not s.free
    for _ in range(_SWEEPS if corrected else 1):
        before = inverse_size
        if corrected or s.wants("mean_angle"):
            a, b = s.matrices(groups.mean(root[median]))
            found = fluctuations(
                a, b, groups, groups.mean(spread[median]), answer=answer, lengths_variance=s.lengths.variance,
                inverse_size=inverse_size, free=s.free,
            )  # fmt: skip
        if found is not None and corrected:
            inverse_size, inverse_own = _inverses(groups, groups.mean(spread[median]), found)
            inverse_size, inverse_own = inverse_size**answer, inverse_own**answer
            if divided:
                # A normalizer that follows the gradient makes the decay of a large weight faster: E[omega^2/D] with 1/D as
                # sqrt(S / (1 - t)). Of E[t / sqrt(1 - t)] sqrt(1 - E t) / E t two orders: E t^2 = 3 (E t)^2 (1 - E t), since that decay
                # takes most from the large, and E t^3 = 15 (E t)^3.
                share = groups.gamma_sq * groups.mean(spread[median])
                share = share / (groups.count @ share)
                faster = (1 - answer) * (found.coordinate_size / 2 - found.size / 8 + share + 3.25 * share**2)
        spread, grad_sq, weight = _settle(s, closure, spread, inverse_size, inverse_own, sums / inverse, push, faster)
        if abs(inverse_size - before) < 1e-7:
            break

    norm_sq = spread.sum(-1)
    turn, update = closure.steps(closure.normalizer(grad_sq))
    update_sq = (update * grad_sq * now).sum(-1)
    if s.response.decoupled and closure.normalized:
        step_sq = (update_sq - norm_sq * (1 - keep) ** 2) / keep  # from a steady norm, as for signs
    else:
        step_sq = 2 * (turn * weight * now).sum(-1)
    chord_sq, shift = step_sq / norm_sq, 1.0
    energy = kernel**2 / (kernel @ kernel)
    if found is not None and s.wants("mean_angle"):
        sizes = np.broadcast_to(update * grad_sq, grad_sq.shape)[median]
        shift = mean_root_normalized(kernel, rate, s.lengths) if closure.normalized else mean_root(kernel, s.lengths)
        shift *= mean_root_normal(sizes)
        # The variance of ||Delta||^2 from lengths and directions is in these roots; what it has besides, and the norm's, to first order.
        taken = (1 + s.lengths.variance * (energy @ energy)) * (1 + 2 * (sizes @ sizes) / sizes.sum() ** 2) - 1
        shift *= math.exp(-(found.step - taken) / 8 + 3 / 8 * found.norm - found.step_norm / 4)
        chord_sq = chord_sq - found.radial
    angle = 2 * np.arcsin(np.sqrt(chord_sq) / 2) * shift

    concentration = 0.0 if s.free else s.concentration(spread[median])
    length = s.lengths.variance * float(energy @ energy)  # Var of ||u||^2 from lengths, at a slow normalizer
    # The weights' decay within the momentum's memory.
    slow = (1 - keep) * float(np.abs(kernel).sum() / np.abs(kernel).max())
    if not closure.normalized:
        size, swing = 0.0 if found is None or s.free else found.size, 0.0 if found is None else found.norm
        norm_error = 5e-5 + 0.058 * _second(size, 0.03)
        # Even coordinates are known to a higher order than uneven ones. Then E theta^3 of steps of random length, which the norm
        # after the step shares.
        uneven = _second(max(concentration - 1 / s.law.fan_in, 0.0), 0.3)
        rotation_error = 2e-5 + 0.055 * uneven + 0.26 * concentration**3 + 0.084 * swing**2
        rotation_error += 4.5e-5 * slow * concentration + 0.053 * length * float(np.median(chord_sq))
    else:
        # Second order in 1/C: Gaussian coordinates have it right, and a normalizer that makes up for sizes (1 - answer) does not.
        few = _second(concentration, 0.05)
        # What of v is renewed while the weights decay within the momentum's memory.
        mixed, pushed = (1 - rate) * slow, push * concentration
        # The newest gradient's length is in u and in v at once.
        both = s.lengths.variance * (1 - rate) * math.sqrt(float(energy[0]))
        decaying = s.lengths.variance * (1 - keep) * math.sqrt(float(energy @ energy))
        if divided:
            followed = 0.8 * (1 - answer) * concentration**2
            norm_error = 5e-5 + followed + 0.0085 * few + 0.044 * mixed + 0.01 * slow * concentration + 0.38 * both
            rotation_error = 4e-5 + followed + (0.005 + 0.03 * (1 - answer)) * few + 0.14 * mixed + 0.05 * slow * concentration
            rotation_error += 0.18 * both + 0.083 * decaying
        else:
            norm_error = 7e-5 + 0.00045 * slow + 6.2 * mixed * concentration + 0.1 * pushed
            rotation_error = 3e-5 + (0.0022 + 0.021 * (1 - answer)) * few + 4.3 * mixed * concentration + 0.065 * pushed
            rotation_error += 0.045 * both + 0.078 * decaying
        if s.free and found is not None:  # where 1/C is nowhere else
            rotation_error += 0.084 * found.norm**2
    noise = math.nan if found is None else found.norm_long
    return Full(norm_sq, angle, update_sq, norm_error, rotation_error, noise, _doubts(norm_error, rotation_error))


def _second(first: float, bend: float) -> float:
    """The size of a second-order term beside a first-order one: its square while small, as large as itself in the end."""
    return first**2 / (first + bend)


def _saturated(x: float) -> float:
    return x / (1 + x)


def _settle(
    s: _System,
    closure: eq.Closure,
    spread: Array,
    inverse_size: float,
    inverse_own: Array,
    factor: Array | float,
    push: float,
    faster: Array,
) -> tuple[Array, Array, Array]:
    """Spread and E g_c^2 that sustain each other under the corrections; and the spread before what the normalizer's memory makes of it."""
    own, pull = inverse_own[s.groups.of], 1 + faster[s.groups.of]
    grad_sq = s.law.second_moment(spread)
    for _ in range(_STEPS):
        share: Array | float = 0.0
        if isinstance(s.law, ToySystem):
            scaled = s.law.gamma_sq * spread
            size = scaled.sum(-1, keepdims=True)
            share = scaled / size
            grad_sq = s.law.scale_sq * s.law.gamma_sq * np.maximum(inverse_size - share * own, 1e-9) / size
        weight = closure.sustain(grad_sq)[0]
        ratio = weight * (factor + push * share) / pull / spread
        # The gradient falls as the weights grow: half the way is never too far.
        spread = spread * np.sqrt(ratio)
        if np.abs(ratio - 1).max() < _SETTLED:
            break
    return spread, grad_sq, weight


def _finite(s: _System, kernel: Array, rate: float, root: Array, lags: Array, divided: bool) -> tuple[Array, Array, Array]:
    """What the normalizer's memory and eps make of E u^2, of the sum over lags in E omega^2 and of the decay; by coordinate with eps."""
    joined = forms.square(s.kind)[0] != 0

    def at(eps: float) -> list[float]:
        average = FiniteAverage(kernel, rate, eps, s.lengths)
        values = over_lags(average.autocovariance, len(lags) - 1)
        return [values[0], float(lags @ values), average.joined if joined else average.inverse if divided else 1.0]

    relative = float(getattr(s.rule.values, "eps", 0.0)) / root
    low, high = max(float(relative.min()), 1e-7), float(relative.max())
    if high < 1e-6:
        now, sums, inverse = np.array(at(0.0))[:, None, None]
        return now, sums, inverse
    # Smooth in log eps: neurons and coordinates read theirs off a table.
    high = max(high, 1.01 * low)
    nodes = np.geomspace(low, high, 2 + math.ceil(3 * math.log10(high / low)))
    table = PchipInterpolator(np.log(nodes), np.array([at(x) for x in nodes]))(np.log(np.clip(relative, low, high)))
    return table[..., 0], table[..., 1], table[..., 2]


def _inverses(groups: Groups, spread: Array, found: Fluctuations) -> tuple[float, Array]:
    """E[1/S] E S, and E[w~_c^2/S^2] over E w~_c^2 / (E S)^2.

    Independent Gaussian coordinates give these exactly. The fluctuations say how much of that variance is there, for orthogonality
    holds the size together: that power of the first is right to first order, and to every order where coordinates are independent.
    """
    share = groups.gamma_sq * spread / ((groups.count * groups.gamma_sq) @ spread)
    independent = 2 * float(groups.count @ share**2)
    part = max(found.size, 0.0) / independent
    whole, own = mean_inverses(groups, spread)
    first = 3 * found.size - 2 * found.coordinate_size - part * (3 * independent - 4 * share)
    return whole**part, np.exp(part * np.log(own) + first)
