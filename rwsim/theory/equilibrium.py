"""Equilibrium norm, rotation and RMS update of a rule under a gradient law, from hyperparameters alone.

The second-moment closure of `moments` per coordinate, with the coordinate moments of `noise`: in the toy system the
gradient depends on the spread of the weights and the spread on the gradient, a fixed point that is solved here. Nothing
is fitted to a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import sympy as sp
from scipy.optimize.elementwise import find_root

from rwsim.errors import NoEquilibrium, RwsimError, UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.moments import LinearResponse, linear_response, stationary_moments
from rwsim.theory.noise import Array, GradientLaw

_FIXED_POINT_TOLERANCE = 1e-12
_FIXED_POINT_ITERATIONS = 500
# Equilibrium, spread E w_c^2, E||omega||^2 of the linearized recurrence, normalizer.
_Solution = tuple["Equilibrium", Array, float, Array | None]
# Autocovariances are summed until the kernel has fallen by this factor; what is cut is below it in relative terms.
_KERNEL_TAIL = 1e-12


@dataclass(frozen=True)
class Equilibrium:
    """Per-neuron equilibrium values, shape (neuron,), and their aggregates over the layer.

    Attributes:
        norm_sq: E||omega||^2.
        angle: Expected rotation, radians per step (an RMS angle: 2 arcsin(r/2) of the RMS relative update r).
        update_sq: E||Delta_g omega||^2 of the gradient part of the update.
    """

    norm_sq: Array
    angle: Array
    update_sq: Array

    @property
    def norm(self) -> float:
        """sqrt of the mean of ||omega||^2 over neurons."""
        return math.sqrt(self.norm_sq.mean())

    @property
    def rotation(self) -> float:
        """Mean over neurons of the RMS angle, radians per step."""
        return float(self.angle.mean())

    @property
    def rms_update(self) -> float:
        """sqrt of the mean of ||Delta_g omega||^2 over neurons."""
        return math.sqrt(self.update_sq.mean())


@dataclass(frozen=True)
class Prediction:
    """What theory says before a step is taken.

    Attributes:
        paper: Table 1 as printed, with the gradient moments computed from the gradient law; None for a rule that the
            table lacks.
        exact: The exact second moments.
        unit_grad_norm_sq: Computed E||g~||^2 = E||g||^2 E||omega||^2, mean over neurons.
        linear_norm_sq: E||omega||^2 of the linearized recurrence, mean over neurons: the limit that `transient`
            approaches. Equal to that of `exact` except under a sign.
        normalizer: sqrt of the second-moment average at equilibrium, shape (neuron, dim); None for other rules.
    """

    paper: Equilibrium | None
    exact: Equilibrium
    unit_grad_norm_sq: float
    linear_norm_sq: float
    normalizer: Array | None = None


def predict_equilibrium(rule: UpdateRule, law: GradientLaw) -> Prediction:
    """Equilibrium of `rule` under `law`.

    Raises:
        NoEquilibrium: lr or weight decay is 0, or the recurrence is unstable.
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> p = predict_equilibrium(AdamW(lr=1e-3, weight_decay=0.1), IdealWalk(128))
        >>> round(p.paper.norm, 4), round(p.exact.norm, 4)
        (0.8, 0.7996)
    """
    values = rule.values
    for name in ("lr", "weight_decay"):
        if getattr(values, name, None) == 0:
            raise NoEquilibrium(f"`{name}` is 0: without it there is no equilibrium to predict; give a positive value.")
    response = linear_response(type(rule)).settled()
    solve = _sign if response.direction == "sign" else _rational
    exact, spread, linearized, normalizer = solve(rule, response, law)
    unit_grad_norm_sq = float(((law.second_moment(spread)).sum(-1) * spread.sum(-1)).mean())
    return Prediction(_paper(rule, law, spread), exact, unit_grad_norm_sq, linearized, normalizer)


@cached
def numeric(rule: type[UpdateRule], expressions: tuple[sp.Expr, ...], extra: tuple[sp.Symbol, ...]) -> Callable[..., list]:
    """numpy function of (hyperparameters in declaration order, *extra) for a tuple of expressions."""
    return sp.lambdify((*sym.flat(sym.hyper_symbols(rule)), *extra), list(expressions), modules="numpy", cse=True)


def fixed_point(step: Callable[[Array], Array], start: Array, what: str) -> Array:
    """Iterate x <- sqrt(x step(x)) until every entry is steady.

    Half a step in the logarithm: the maps here are powers of the layer's norm with exponents in [-1, 0]. A closed form
    is negative where its recurrence is unstable; such an entry is made to grow and ends in `NoEquilibrium`.
    """
    x = start
    for _ in range(_FIXED_POINT_ITERATIONS):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            new = step(x)
            move = np.where(new > 0, np.log(np.abs(new) / x), 3.0)
            x = x * np.exp(0.5 * move)
        if not np.isfinite(x).all():
            raise NoEquilibrium(f"{what} has no stable equilibrium: lr times weight decay is too large.")
        if np.abs(move).max() < _FIXED_POINT_TOLERANCE:
            return x
    raise RwsimError(f"the fixed point of {what} did not settle: last relative change {np.abs(move).max():.1e}.")


def _rational(rule: UpdateRule, response: LinearResponse, law: GradientLaw) -> _Solution:
    """Linear and second-moment-normalized rules: rational closed forms per coordinate."""
    moments = stationary_moments(type(rule))
    forms = numeric(type(rule), (moments.weight_sq, moments.lag_one, moments.update_sq), (sym.grad_sq, sym.normalizer))
    hyper = sym.flat(rule.values)
    start = np.ones(law.second_moment(np.ones((1, law.fan_in))).shape)

    def normalizer(grad_sq: Array, spread: Array) -> Array:
        return np.ones(grad_sq.shape)

    def spread_given(grad_sq: Array) -> Array:
        return forms(*hyper, grad_sq, normalizer(grad_sq, start))[0]

    if response.square is not None:
        form, of_grad = response.square
        if form != sp.diag(form[0, 0], *[0] * (form.rows - 1)):
            raise UnsupportedRule(rule.name, "the normalizer averages momentum")
        weight_part, grad_part = numeric(type(rule), (form[0, 0], of_grad), ())(*hyper)

        def normalizer(grad_sq: Array, spread: Array) -> Array:
            return np.sqrt(grad_part * grad_sq + weight_part * spread)

        if weight_part != 0:

            def spread_given(grad_sq: Array) -> Array:
                # Decay inside the square: weight and normalizer set each other. The weight's moment falls with the
                # normalizer and the normalizer grows with the weight, so there is one root per coordinate.
                def excess(log_spread: Array, grad_sq: Array) -> Array:
                    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                        new = forms(*hyper, grad_sq, normalizer(grad_sq, np.exp(log_spread)))[0]
                        return np.where(new > 0, log_spread - np.log(np.abs(new)), -1e3)

                bracket = (np.full(grad_sq.shape, -200.0), np.full(grad_sq.shape, 200.0))
                return np.exp(find_root(excess, bracket, args=(grad_sq,), tolerances={"xatol": 1e-13, "xrtol": 0.0}).x)

    spread = fixed_point(lambda q: spread_given(law.second_moment(q)), start, repr(rule))
    grad_sq = law.second_moment(spread)
    weight_sq, lag_one, update_sq = (x.sum(-1) for x in forms(*hyper, grad_sq, normalizer(grad_sq, spread)))
    # A rational form has a value where its recurrence is unstable too; the eigenvalues tell.
    entries = numeric(type(rule), tuple(response.transition), (sym.normalizer,))(*hyper, normalizer(grad_sq, spread))
    matrices = np.stack(np.broadcast_arrays(*entries, grad_sq)[:-1], -1).reshape(*grad_sq.shape, *response.transition.shape)
    if not (np.abs(np.linalg.eigvals(matrices)).max(-1) < 1).all():
        raise NoEquilibrium(f"{rule!r} has no stable equilibrium: lr times weight decay is too large.")
    relative_sq = 2 * (1 - lag_one / weight_sq)
    exact = Equilibrium(weight_sq, 2 * np.arcsin(np.sqrt(relative_sq) / 2), update_sq)
    return exact, spread, float(weight_sq.mean()), None if response.square is None else normalizer(grad_sq, spread)


def sign_autocovariance(rule: UpdateRule, law: GradientLaw) -> tuple[Array, Array]:
    """E[sign(n_t) sign(n_{t+k})] for k = 1, 2, ... until the kernel has died out, and its linearization.

    For a Gaussian n of correlation rho this is (2/pi) arcsin rho (the arcsine law). Gradient lengths vary from step to
    step, so n is Gaussian only given them: the law is averaged over the lengths of the two steps compared, with the
    conditional covariance over the product of the conditional deviations (THEORY.md section 4). Lengths of other
    steps enter through their mean. The linearization, (2/pi) rho at constant lengths, is the paper's model of the sign.
    """
    response = linear_response(type(rule)).settled()
    if response.argument is None:
        raise UnsupportedRule(rule.name, "it has no sign")
    h, k = response.argument
    buffers = response.transition[1:, 1:]
    entries = numeric(type(rule), (*buffers, *response.drive[1:, 0], *h[0, 1:], k), ())(*sym.flat(rule.values))
    n = buffers.rows
    transition = np.array(entries[: n * n], dtype=float).reshape(n, n)
    drive, row = np.array(entries[n * n : n * n + n], dtype=float), np.array(entries[n * n + n : n * n + 2 * n], dtype=float)
    radius = max(abs(np.linalg.eigvals(transition)))
    length = 2 if radius == 0 else max(2, math.ceil(math.log(_KERNEL_TAIL) / math.log(radius)))
    # kernel[j] is the weight of g_{t-j} in n_t.
    kernel = np.empty(length + 1)
    kernel[0] = entries[-1]
    state = drive
    for j in range(1, length + 1):
        kernel[j] = row @ state
        state = transition @ state
    spectrum = np.fft.rfft(kernel[1:], 2 * length)
    past = np.fft.irfft(np.abs(spectrum) ** 2, 2 * length)[: length + 1]  # sum_{j>=1} a_j a_{j+k} at k = 0, 1, ...
    past[length] = 0.0
    nodes, weights = law.length_squared()
    early, late = nodes[:, None, None], nodes[None, :, None]
    own, lagged = kernel[0], kernel[1:]
    covariance = own * lagged * early + past[1:]
    deviation = np.sqrt((own**2 * early + past[0]) * (own**2 * late + past[0] + lagged**2 * (early - 1)))
    arcsine = 2 / math.pi * np.arcsin(np.clip(covariance / deviation, -1.0, 1.0))
    linear = 2 / math.pi * (own * lagged + past[1:]) / (own**2 + past[0])
    return np.einsum("i,j,ijk->k", weights, weights, arcsine), linear


def _sign(rule: UpdateRule, response: LinearResponse, law: GradientLaw) -> _Solution:
    """Sign rules with decoupled decay: w' = rho w + b s, so E w^2 = b^2 (1 + 2 sum rho^k gamma_k) / (1 - rho^2)."""
    keep, step = numeric(type(rule), (response.transition[0, 0], response.sign_drive[0]), ())(*sym.flat(rule.values))
    if not -1 < keep < 1:
        raise NoEquilibrium(f"{rule!r} has no stable equilibrium: lr times weight decay must lie in (0, 2).")
    gamma, linear = sign_autocovariance(rule, law)
    powers = keep ** np.arange(len(gamma))
    weight_sq = step**2 * (1 + 2 * keep * (powers @ gamma)) / (1 - keep**2)
    lag_one = keep * weight_sq + step**2 * (powers @ gamma)
    linearized = step**2 * (1 + 2 * keep * (powers @ linear)) / (1 - keep**2)
    # Signs have unit size whatever the coordinate's gradient, so every coordinate and neuron is alike.
    neurons = law.second_moment(np.ones((1, law.fan_in))).shape[0]
    ones = np.ones(neurons)
    angle = 2 * math.asin(math.sqrt((1 - lag_one / weight_sq) / 2))
    spread = np.full((neurons, law.fan_in), weight_sq)
    exact = Equilibrium(law.fan_in * weight_sq * ones, angle * ones, law.fan_in * step**2 * ones)
    return exact, spread, float(law.fan_in * linearized), None


def _paper(rule: UpdateRule, law: GradientLaw, spread: Array) -> Equilibrium | None:
    """Table 1 with the gradient moments of `law`.

    Its g~ = ||omega|| g presumes scale invariance; E g~^2 is evaluated at the equilibrium spread. Where gradients keep
    their scale instead (the ideal walk), ||omega|| is the paper's own norm: a cube root becomes a square root.
    """
    column = paper.TABLE_1.get(rule.name)
    if column is None:
        return None
    moment = law.second_moment(spread)
    unit_moment = moment * spread.sum(-1, keepdims=True)
    forms = numeric(
        type(rule), (column.norm, column.rotation, column.rms_update),
        (sym.C, paper.grad_norm_sq, paper.unit_grad_norm_sq, paper.unit_grad_l1),
    )  # fmt: skip

    def evaluate(unit_moment: Array) -> list[Array]:
        arguments = (law.fan_in, moment.sum(-1), unit_moment.sum(-1), np.sqrt(unit_moment).sum(-1))
        return [np.broadcast_to(np.asarray(x, dtype=float), moment.shape[:1]) for x in forms(*sym.flat(rule.values), *arguments)]

    scale_invariant = not np.array_equal(moment, law.second_moment(4 * spread))
    if not scale_invariant:
        norm = fixed_point(lambda n: evaluate(moment * n[:, None] ** 2)[0], np.ones(moment.shape[:1]), repr(rule))
        unit_moment = moment * norm[:, None] ** 2
    norm, angle, update = evaluate(unit_moment)
    return Equilibrium(norm**2, angle, update**2)
