"""Equilibrium norm, rotation and RMS update of a rule under a gradient law, from hyperparameters alone.

The second-moment closure of `moments` per coordinate, with the coordinate moments of `noise`: in the toy system the
gradient depends on the spread of the weights and the spread on the gradient, which the law settles. Nothing is fitted to
a run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from rwsim.errors import InvalidArgument, NoEquilibrium, RwsimError
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.forms import bends, forms_of, numeric, settled, square, stability, stable
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.signs import sign_autocovariance, sign_closure

if TYPE_CHECKING:
    from rwsim.theory.full import Full

# Equilibrium, spread E w_c^2, its gradient's E g_c^2, E||omega||^2 of the linearized recurrence, normalizer.
_Solution = tuple["Equilibrium", Array, Array, float, Array | None]
# Newton's method for the normalizer of one coordinate stops at this relative step; what is left is of the order of its square.
_ROOT_STEP = 1e-6
_ROOT_STEPS = 200
# Configs whose coordinates are held at a time: some arrays of 1 MiB at C = 128.
_TOGETHER = 1024
# What Table 1's columns hang on besides hyperparameters.
PAPER = (sym.C, paper.grad_norm_sq, paper.unit_grad_norm_sq, paper.unit_grad_l1)


@dataclass(frozen=True)
class Equilibrium:
    """Per-neuron equilibrium values, shape (..., neuron), and their aggregates over the layer: a float for one config, an
    array (config,) for many.

    Attributes:
        norm_sq: E||omega||^2.
        angle: Expected rotation, radians per step (an RMS angle: 2 arcsin(r/2) of the RMS relative update r).
        update_sq: E||Delta_g omega||^2 of the gradient part of the update.
    """

    norm_sq: Array
    angle: Array
    update_sq: Array

    @property
    def norm(self) -> Any:
        """sqrt of the mean of ||omega||^2 over neurons."""
        return _plain(np.sqrt(self.norm_sq.mean(-1)))

    @property
    def rotation(self) -> Any:
        """Mean over neurons of the RMS angle, radians per step."""
        return _plain(self.angle.mean(-1))

    @property
    def rms_update(self) -> Any:
        """sqrt of the mean of ||Delta_g omega||^2 over neurons."""
        return _plain(np.sqrt(self.update_sq.mean(-1)))


def _plain(value: Any) -> Any:
    return value if np.ndim(value) else float(value)


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
        of: Rule and law that it is a prediction of.
    """

    paper: Equilibrium | None
    exact: Equilibrium
    unit_grad_norm_sq: float
    linear_norm_sq: float
    normalizer: Array | None = None
    of: tuple[UpdateRule, GradientLaw] | None = None

    @cached_property
    def full(self) -> "Full":
        """The full prediction, worked out when first asked for (some tenths of a second): see `rwsim.theory.full`."""
        from rwsim.theory.full import predict_full  # built on this module

        if self.of is None:
            raise RwsimError("this prediction does not know its rule and gradients, which the full one needs.")
        return predict_full(*self.of)


@dataclass(frozen=True)
class Predictions:
    """What theory says of many configs of one rule; arrays of shape (config, neuron).

    Attributes:
        paper: As in `Prediction`.
        exact: As in `Prediction`.
        reasons: Why a config has no equilibrium (it is NaN in `paper` and `exact`), or nothing.
    """

    paper: Equilibrium | None
    exact: Equilibrium
    reasons: tuple[str, ...]


def predict_equilibria(rules: Sequence[UpdateRule], law: GradientLaw, heard: Callable[[], None] | None = None) -> Predictions:
    """Equilibria of many configs of one rule under `law`, each the same bits in any company.

    A config without an equilibrium is NaN, and says why in `reasons`. Memory does not grow but for the result.

    Args:
        rules: At least one, all of one class.
        law: Their common gradient law.
        heard: Called now and then; may raise.

    Raises:
        InvalidArgument: No rules, or rules of several classes.
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.theory.noise import IdealWalk
        >>> many = predict_equilibria([AdamW(lr=lr, weight_decay=0.1) for lr in (1e-3, 4e-3, 0.0)], IdealWalk(128))
        >>> many.paper.norm.round(4)
        array([0.8, 1.6, nan])
        >>> many.reasons
        ('', '', '`lr` is 0: without it there is no equilibrium to predict; give a positive value.')
    """
    if len({type(rule) for rule in rules}) != 1:
        raise InvalidArgument("rules", "must hold at least one rule, and all of one class", {type(rule).__name__ for rule in rules})
    shape = (len(rules), len(law.own_spread))
    exact, table = (Equilibrium(*np.full((3, *shape), math.nan)) for _ in range(2))
    reasons = [""] * len(rules)
    flat = [sym.flat(rule.values) for rule in rules]
    alike = _alike(type(rules[0]), flat)
    done = _at_once(rules, flat, alike, law, exact, table) if settled(type(rules[0])).square is not None else np.zeros(len(rules), bool)
    # Neighbours in this order share all but their first hyperparameters, lr and decay: what they share is computed once.
    for i in sorted(np.flatnonzero(~done).tolist(), key=lambda i: flat[i][::-1]):
        if heard is not None:
            heard()
        try:
            found = predict_equilibrium(rules[i], law.first if alike[i] else law)
        except NoEquilibrium as error:
            reasons[i] = str(error)
            continue
        for whole, part in ((exact, found.exact), (table, found.paper)):
            if part is not None:
                whole.norm_sq[i], whole.angle[i], whole.update_sq[i] = part.norm_sq, part.angle, part.update_sq
    return Predictions(table if type(rules[0]).name in paper.TABLE_1 else None, exact, tuple(reasons))


def _columns(flat: Sequence[Sequence[float]]) -> list[Array]:
    """Each hyperparameter of some configs, shape (config, 1)."""
    return list(np.array(flat, dtype=np.float64).T[..., None])


def _alike(kind: type[UpdateRule], flat: Sequence[Sequence[float]]) -> NDArray[np.bool_]:
    """Of which configs all neurons have one prediction: the gradient's size cancels, and Table 1 lacks it as well."""
    column, response = paper.TABLE_1.get(kind.name), settled(kind)
    if column is not None and any(form.has(*paper.GRADIENT) for form in (column.norm, column.rotation, column.rms_update)):
        return np.zeros(len(flat), bool)
    if response.square is None:
        return np.full(len(flat), response.direction == "sign")
    weight_part, slope = numeric(kind, (square(kind)[0], forms_of(kind).slope), (sym.normalizer,))(*_columns(flat), 1.0)
    return np.broadcast_to((np.asarray(weight_part) == 0) & (np.asarray(slope) == -2), (len(flat), 1))[:, 0]


def _at_once(
    rules: Sequence[UpdateRule], flat: Sequence[Sequence[float]], alike: NDArray[np.bool_], law: GradientLaw, exact: Equilibrium,
    table: Equilibrium,
) -> NDArray[np.bool_]:  # fmt: skip
    """Put the predictions of configs that are alike for all neurons into `exact` and `table`, and say which are done.

    What a weight's gradient sustains does not depend on the gradient's size there, so that `ToySystem.settle` needs no
    iteration, and configs take the place of neurons. One that is not plainly stable is left to `predict_equilibrium`, which
    knows the reason.
    """
    kind, first = type(rules[0]), law.first
    done = np.zeros(len(rules), bool)
    free = np.array([getattr(rule.values, "lr", 1) != 0 and getattr(rule.values, "weight_decay", 1) != 0 for rule in rules])
    members = np.flatnonzero(alike & free)
    if not len(members):
        return done
    forms, column = forms_of(kind), paper.TABLE_1.get(kind.name)
    scales = numeric(kind, (forms.weight[0], forms.turn[0], forms.update[0], square(kind)[1]), ())
    weight = numeric(kind, (forms.weight[1],), (sym.normalizer,))
    rest = numeric(kind, (forms.turn[1], forms.update[1]), (sym.normalizer,))
    conditions = numeric(kind, stability(kind), (sym.normalizer,))
    start = first.second_moment(first.own_spread)
    for begin in range(0, len(members), _TOGETHER):
        some = members[begin : begin + _TOGETHER]
        columns = _columns([flat[i] for i in some])
        with np.errstate(all="ignore"):
            weight_scale, turn_scale, update_scale, grad_part = scales(*columns)
            spread = weight_scale * (start * weight(*columns, np.sqrt(grad_part * start))[0])
            grad_sq = first.second_moment(spread)
            root = np.sqrt(grad_part * grad_sq)
            fine = ((spread > 0) & np.isfinite(spread) & stable(conditions(*columns, root))).all(-1)
            turn, update = rest(*columns, root)
            weight_sq = spread.sum(-1)
            relative_sq = np.minimum(2 * (spread * (turn_scale * turn)).sum(-1) / weight_sq, 4.0)
            found = weight_sq, 2 * np.arcsin(np.sqrt(relative_sq) / 2), (grad_sq * (update_scale * update)).sum(-1)
            printed: tuple[Array, ...] = ()
            if column is not None:  # without the gradient's moments, or the configs were not alike
                given = numeric(kind, (column.norm, column.rotation, column.rms_update), PAPER)(*columns, law.fan_in, *[math.nan] * 3)
                norm, angle, update_rms = (np.broadcast_to(np.asarray(x, dtype=float), (len(some), 1))[:, 0] for x in given)
                printed = norm**2, angle, update_rms**2
        for whole, parts in ((exact, found), (table, printed)):
            for array, part in zip((whole.norm_sq, whole.angle, whole.update_sq), parts, strict=False):
                array[some[fine]] = part[fine, None]
        done[some[fine]] = True
    return done


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
            raise no_equilibrium(name)
    solve = _sign if settled(type(rule)).direction == "sign" else _rational
    exact, spread, grad_sq, linearized, normalizer = solve(rule, law)
    unit_grad_norm_sq = float((grad_sq.sum(-1) * spread.sum(-1)).mean())
    return Prediction(_paper(rule, law, spread, grad_sq), exact, unit_grad_norm_sq, linearized, normalizer, (rule, law))


def no_equilibrium(name: str) -> NoEquilibrium:
    return NoEquilibrium(f"`{name}` is 0: without it there is no equilibrium to predict; give a positive value.")


def unstable(rule: UpdateRule) -> NoEquilibrium:
    return NoEquilibrium(f"{rule!r} has no stable equilibrium: lr times weight decay is too large.")


class Closure:
    """Linear and second-moment-normalized rules: rational closed forms per coordinate, proportional to E g_c^2.

    Attributes:
        normalized: Whether updates are divided by a root of a second-moment average.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, self._kind, self._hyper = rule, type(rule), sym.flat(rule.values)
        self.normalized = settled(self._kind).square is not None
        forms = forms_of(self._kind)
        self._weight_scale, self._turn_scale, self._update_scale = self._numbers(forms.weight[0], forms.turn[0], forms.update[0])
        self._weight = numeric(self._kind, (forms.weight[1], forms.slope), (sym.normalizer,))
        self._conditions = numeric(self._kind, stability(self._kind), (sym.normalizer,))
        self._rest = numeric(self._kind, (forms.turn[1], forms.update[1]), (sym.normalizer,))
        shares: list[Any] = self._numbers(*square(self._kind)) if self.normalized else [0.0, 0.0]
        self._weight_part, self._grad_part = shares
        self._of_weight = np.zeros(())
        if not (self.normalized and bends(self._kind)) and not stable(self._conditions(*self._hyper, 1.0)):
            raise unstable(rule)

    def _numbers(self, *expressions: sp.Expr) -> list[Any]:
        return numeric(self._kind, expressions, ())(*self._hyper)

    def normalizer(self, grad_sq: Array) -> Array:
        """The stationary D at E g_c^2; all one where there is none.

        Decay inside the square: D^2 = of_grad + weight_part G w(D), weight and normalizer set each other. w falls from a pole,
        left of which the recurrence is unstable: one root right of it, to which Newton's method comes down from any point right
        of it. From the left D^2 = of_grad + weight_part G w(D) leads there.
        """
        if not self.normalized:
            return np.ones(())
        of_grad = self._grad_part * grad_sq
        if self._weight_part == 0:
            return np.sqrt(of_grad)
        root, pull = np.sqrt(of_grad + self._of_weight), self._weight_part * self._weight_scale * grad_sq
        for _ in range(_ROOT_STEPS):
            shape, slope = self._weight(*self._hyper, root)
            square, weight = root * root, pull * shape
            own = square - of_grad
            move = (weight - own) / (2 * square - own * slope)
            if not (weight.min() > 0 and own.min() > 0):
                move = np.where((weight > 0) & (own > 0), move, np.where(weight > 0, np.sqrt(of_grad + weight) / root - 1, 1.0))
            root = root * (1 + move)
            if not np.abs(move).max() > _ROOT_STEP:
                self._of_weight = root * root - of_grad
                return root
        raise RwsimError(f"the normalizer of {self.rule!r} did not settle: last relative change {np.abs(move).max():.1e}.")

    def sustain(self, grad_sq: Array) -> tuple[Array, Array | float]:
        """E omega_c^2 that E g_c^2 sustains, and its elasticity."""
        root = self.normalizer(grad_sq)
        shape, slope = self._weight(*self._hyper, root)
        weight = self._weight_scale * (grad_sq * shape)
        if not self.normalized:
            return weight, 1.0
        half = 0.5 * slope
        if self._weight_part == 0:
            return weight, 1 + half
        whole = root * root
        of_grad = self._grad_part * grad_sq / whole
        # Near the pole the weight is better known from the normalizer than from its own form.
        weight = np.where(of_grad > 0.5, weight, (1 - of_grad) * whole / self._weight_part)
        return weight, (1 + half * of_grad) / (1 - half * (1 - of_grad))

    def spread(self, law: GradientLaw) -> Array:
        """E omega_c^2 of a law's own gradients, shape (neuron, dim)."""
        if self.normalized:
            found = law.settle(self.sustain, law.own_spread)
        else:
            # spread = scale G(spread), and G is inverse to the spread's size or independent of it.
            found = law.own_spread * self._weight_scale ** (1 / (1 + law.scale_invariant))
        if not np.isfinite(found).all():
            raise unstable(self.rule)
        # A rational form has a value where its recurrence is unstable too.
        if self.normalized and bends(self._kind):
            if not stable(self._conditions(*self._hyper, self.normalizer(law.second_moment(found)))).all():
                raise unstable(self.rule)
        return found

    def steps(self, root: Array) -> tuple[Array | float, Array | float]:
        """(E omega^2 - lag one) / E omega^2 and E of the squared update / E g_c^2, at a normalizer."""
        turn, update = self._rest(*self._hyper, root)
        return self._turn_scale * turn, self._update_scale * update


def _rational(rule: UpdateRule, law: GradientLaw) -> _Solution:
    closure = Closure(rule)
    spread = closure.spread(law)
    grad_sq = law.second_moment(spread)
    root = closure.normalizer(grad_sq)
    turn, update = closure.steps(root)
    weight_sq = spread.sum(-1)
    # Half a turn at most, which rounding may exceed at the edge of stability.
    relative_sq = np.minimum(2 * (spread * turn).sum(-1) / weight_sq, 4.0)
    exact = Equilibrium(weight_sq, 2 * np.arcsin(np.sqrt(relative_sq) / 2), (grad_sq * update).sum(-1))
    return exact, spread, grad_sq, float(weight_sq.mean()), root if closure.normalized else None


def _sign(rule: UpdateRule, law: GradientLaw) -> _Solution:
    """Sign rules with decoupled decay: w' = rho w + b s."""
    response = settled(type(rule))
    # The decay by itself: 1 - keep would lose what is left of a small one.
    decay, step = numeric(type(rule), (sp.expand(1 - response.transition[0, 0]), response.sign_drive[0]), ())(*sym.flat(rule.values))
    if not 0 < decay < 2:
        raise NoEquilibrium(f"{rule!r} has no stable equilibrium: lr times weight decay must lie in (0, 2).")
    gamma, linear = sign_autocovariance(rule, law)
    relative, turn = (float(x) for x in sign_closure(decay, gamma))
    weight_sq = step**2 * relative
    linearized = step**2 * float(sign_closure(decay, linear)[0])
    # Signs have unit size whatever the coordinate's gradient, so every coordinate and neuron is alike.
    neurons = len(law.own_spread)
    ones = np.ones(neurons)
    angle = 2 * math.asin(math.sqrt(turn / 2))
    spread = np.full((neurons, law.fan_in), weight_sq)
    exact = Equilibrium(law.fan_in * weight_sq * ones, angle * ones, law.fan_in * step**2 * ones)
    return exact, spread, law.second_moment(spread), float(law.fan_in * linearized), None


def _paper(rule: UpdateRule, law: GradientLaw, spread: Array, moment: Array) -> Equilibrium | None:
    """Table 1 with the gradient moments of `law`.

    Its g~ = ||omega|| g presumes scale invariance; E g~^2 is evaluated at the equilibrium spread. Where gradients keep
    their scale instead (the ideal walk), ||omega|| is the paper's own norm: a cube root becomes a square root.
    """
    column = paper.TABLE_1.get(rule.name)
    if column is None:
        return None
    unit_moment = moment * spread.sum(-1, keepdims=True)
    forms = numeric(type(rule), (column.norm, column.rotation, column.rms_update), PAPER)

    def evaluate(unit_moment: Array) -> list[Array]:
        arguments = (law.fan_in, moment.sum(-1), unit_moment.sum(-1), np.sqrt(unit_moment).sum(-1))
        return [np.broadcast_to(np.asarray(x, dtype=float), moment.shape[:1]) for x in forms(*sym.flat(rule.values), *arguments)]

    if not law.scale_invariant:
        # n^2 = ||omega||^2 solves n = norm(n^2 E g^2), a power law: its exponent from two values.
        one, two = evaluate(moment)[0], evaluate(4 * moment)[0]
        unit_moment = moment * (one ** (2 / (1 - np.log2(two / one))))[:, None]
    norm, angle, update = evaluate(unit_moment)
    return Equilibrium(norm**2, angle, update**2)
