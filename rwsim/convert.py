"""`rwsim.convert`: hyperparameters of another optimizer that keep what equilibrium does, and what they cannot keep.

Two numbers are kept, rotation and RMS update or the two diffusion rates, and two are solved for, lr and weight decay;
momentum and averages are given. Everything is read off the predictions of both rules under one gradient law.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import Equilibrium, predict_equilibrium
from rwsim.theory.forms import numeric
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import GradientLaw, ToySystem
from rwsim.theory.predict import gradient_law
from rwsim.theory.rates import memory
from rwsim.theory.signs import sign_autocovariance

# What each mode keeps.
MATCHES: Mapping[str, tuple[str, str]] = MappingProxyType({"rotation": ("rotation", "rms_update"), "diffusion": ("tau_r", "tau_g")})
# The two that are solved for.
_FREE = ("lr", "weight_decay")
# Relative error at which both matched quantities count as equal; where a prediction's own rounding is above that (averages
# of 10,000 steps in AdEMAMix), the best that it resolves, up to the second.
_EQUAL, _ROUNDING = 1e-11, 1e-8
# Relative difference at which two quantities are told apart in words.
_NOTABLE = 1e-3
# Newton's method starts where lr times decay is far too small to matter, so that its first step is the leading-order form.
_START = 1e-3
_STEPS, _HALVINGS = 60, 40
# |log lr| and |log decay| at most: exp(300) is 1e130, whose square is still a number.
_RANGE = 300.0
# Determinant of d log(kept) / d log(lr, decay), of order 1 where both can be chosen.
_SINGULAR = 1e-9
# Step of the central differences in log space: their error, its square, only slows Newton's method down.
_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Dynamics:
    """A rule's equilibrium, aggregated over the layer.

    Attributes:
        norm: sqrt of the mean of ||omega||^2 over neurons.
        rotation: eta_r, radians per step, mean over neurons.
        rms_update: eta_g, sqrt of the mean squared gradient part of an update.
        tau_r: Rotational diffusion rate tau_g / norm, radians per sqrt(step), mean over neurons.
        tau_g: Diffusion rate, sqrt of the long-run variance per step of the summed updates without decay.
    """

    norm: float
    rotation: float
    rms_update: float
    tau_r: float
    tau_g: float


@dataclass(frozen=True)
class Quantity:
    """One line of a conversion: before, after, and whether the solution was made to keep it."""

    name: str
    unit: str
    before: float
    after: float
    matched: bool


@dataclass(frozen=True)
class Conversion:
    """A rule, the rule it was converted to, and their equilibria under the same gradient law.

    Attributes:
        source: The rule that was given.
        target: The rule that was found; its hyperparameters in `.values`.
        match: ``"rotation"`` or ``"diffusion"``.
        quantities: Kept ones first.
        notes: What is not kept, in words.
        unit_grad_norm_sq: E||g~||^2 of the gradient law at `source`'s equilibrium, mean over neurons.
    """

    source: UpdateRule
    target: UpdateRule
    match: str
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...]
    unit_grad_norm_sq: float

    def to_json(self) -> dict[str, Any]:
        """Plain data: both rules, every quantity, the notes."""
        rules = {key: {"optimizer": rule.name, **vars(rule.values)} for key, rule in (("from", self.source), ("to", self.target))}
        quantities = [dataclasses.asdict(quantity) for quantity in self.quantities]
        return {
            **rules,
            "match": self.match,
            "quantities": quantities,
            "notes": list(self.notes),
            "unit_grad_norm_sq": self.unit_grad_norm_sq,
        }


def memory_of(rule: UpdateRule, law: GradientLaw) -> float:
    """tau_g^2 over the mean square of one step's gradient part: `rates.memory`, and under a sign its arcsine sum."""
    if linear_response(type(rule)).direction == "sign":
        return float(1 + 2 * sign_autocovariance(rule, law)[0].sum())
    return float(numeric(type(rule), (memory(type(rule)),), ())(*sym.flat(rule.values))[0])


def dynamics(rule: UpdateRule, law: GradientLaw, form: str = "exact") -> Dynamics:
    """Equilibrium and diffusion rates of a rule under a gradient law.

    Args:
        rule: The optimizer.
        law: Gradient law.
        form: ``"exact"`` or ``"paper"``: which form of the prediction.

    Raises:
        InvalidArgument: A form that the prediction of this rule lacks.
        NoEquilibrium, UnsupportedRule: As `predict_equilibrium`.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> found = dynamics(SGDM(lr=0.5, weight_decay=1e-3), gradient_law(128))
        >>> round(found.rotation, 5), round(found.tau_r, 5)
        (0.02294, 0.09999)
    """
    found: Equilibrium | None = getattr(predict_equilibrium(rule, law), form, None)
    if not isinstance(found, Equilibrium):
        raise InvalidArgument("form", f"must be one that the prediction of {rule.name} has", form, "take exact")
    diffusion_sq = memory_of(rule, law) * found.update_sq
    tau_r = float(np.sqrt(diffusion_sq / found.norm_sq).mean(-1))
    return Dynamics(found.norm, found.rotation, found.rms_update, tau_r, float(np.sqrt(diffusion_sq.mean(-1))))


def _logs(found: Dynamics, names: tuple[str, ...]) -> np.ndarray:
    return np.log([getattr(found, name) for name in names])


def _elasticity(at: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """The Jacobian d at / dx, one column for each entry of x."""
    moves = _DIFFERENCE * np.eye(len(x))
    return np.stack([(at(x + move) - at(x - move)) / (2 * _DIFFERENCE) for move in moves], axis=-1)


def _solve(made: Callable[[np.ndarray], UpdateRule], wanted: np.ndarray, look: Callable[[UpdateRule], np.ndarray]) -> UpdateRule | None:
    """The rule at whose (log lr, log decay) `look` gives `wanted`: Newton's method, a step halved until it is one forward."""

    def gap(x: np.ndarray) -> np.ndarray:
        if np.abs(x).max() > _RANGE:
            return np.full(2, math.nan)
        try:
            return look(made(x)) - wanted
        except NoEquilibrium:  # past the edge of stability
            return np.full(2, math.nan)

    x = np.log([_START, _START])
    off = gap(x)
    for _ in range(_STEPS):
        if np.abs(off).max() < _EQUAL:
            return made(x)
        jacobian = _elasticity(gap, x)
        if not np.isfinite(jacobian).all() or abs(np.linalg.det(jacobian)) < _SINGULAR:
            return None
        move = -np.linalg.solve(jacobian, off)
        for _ in range(_HALVINGS):
            new = gap(x + move)
            if np.abs(new).max() < np.abs(off).max():  # never for NaN
                break
            move = move / 2
        else:
            return made(x) if np.abs(off).max() < _ROUNDING else None
        x, off = x + move, new
    return None


def convert(
    rule: str | type[UpdateRule],
    to: str | type[UpdateRule],
    *,
    match: str = "rotation",
    to_hyper: Mapping[str, Any] = MappingProxyType({}),
    fan_in: int = 128,
    batch: int | None = 32,
    neurons: int = 128,
    gamma: Any = "uniform",
    loss_scale: float = 1.0,
    seed: int | None = None,
    form: str = "exact",
    **hyper: Any,
) -> Conversion:
    """Learning rate and weight decay at which another optimizer has the same rotation and RMS update, or the same diffusion.

    ``"rotation"`` keeps eta_r (rotation per step) and eta_g (RMS update per step); ``"diffusion"`` keeps tau_r and tau_g
    (paper, appendix L: the same over many steps, whatever the momentum). The equilibrium norm follows from either pair, and
    the time to equilibrium, 1/tau_r^2 steps, from the second. Solved on the predictions to a relative 1e-11, or
    to their rounding where that is larger.

    Updates of SGD-like rules follow the size of the gradient, those of AdamW and Lion do not: a conversion between them
    holds for one gradient scale. It is that of the paper's toy system with these `fan_in`, `batch`, `neurons`, `gamma`,
    `loss_scale`; to take it from a network, choose `loss_scale` so that `unit_grad_norm_sq`, which follows its square, is
    the network's mean of ||g||^2 ||w||^2 over a layer's neurons.

    Args:
        rule: Rule to convert: a name in `RULES`, FILE.py:RULE or a class.
        to: Rule to convert to.
        match: ``"rotation"`` or ``"diffusion"``.
        to_hyper: The target's other hyperparameters (momentum, betas, eps ...). Default: `rule`'s, where both have one of the
            same name and default; else the target's own defaults.
        fan_in: C >= 2.
        batch: B >= 4; None for free gradients of unit variance per coordinate, whatever the norm.
        neurons: K.
        gamma: As in `predict`.
        loss_scale: Factor on the output gradients.
        seed: With ``gamma="normal"``: the layer that `simulate` and `validate` draw of this seed; None for the expectation.
        form: ``"exact"`` or ``"paper"``: which form of the prediction is matched.
        **hyper: `rule`'s hyperparameters in torch's words.

    Raises:
        InvalidArgument: A value out of range, or a rule without lr or weight decay.
        NoEquilibrium: `rule` has no equilibrium, or no lr and weight decay bring the target to it.
        UnsupportedRule: The theory cannot carry one of the rules.

    Example:
        >>> found = convert("adamw", "adamw_independent", lr=1e-3, weight_decay=0.1)
        >>> round(found.target.values.lr, 10), round(found.target.values.weight_decay, 10)
        (0.001, 0.0001)
        >>> convert("adamw", "lion", lr=1e-3, weight_decay=0.1, match="diffusion").quantities[0].name
        'tau_r'
    """
    source, kind = find_rule(rule)(**hyper), find_rule(to)
    if match not in MATCHES:
        raise InvalidArgument("match", f"must be one of {', '.join(MATCHES)}", match)
    for each, argument in ((type(source), "from"), (kind, "to")):
        if missing := [name for name in _FREE if name not in each.hyper]:
            raise InvalidArgument(argument, f"must be a rule with {' and '.join(_FREE)}", each.name, f"{each.name} lacks {missing[0]}")
    if given := [name for name in _FREE if name in to_hyper]:
        raise InvalidArgument(f"to_hyper[{given[0]!r}]", "must not be given: it is what is solved for", to_hyper[given[0]])
    alike = (name for name, default in kind.hyper.items() if name not in _FREE and source.hyper.get(name) == default)
    fixed = {**{name: getattr(source.values, name) for name in alike}, **to_hyper}
    law = gradient_law(fan_in, batch, neurons, gamma, loss_scale)
    if seed is not None and isinstance(law, ToySystem) and isinstance(gamma, str):
        from rwsim.walk.system import Layer  # brings torch

        law = Layer.draw(fan_in, neurons, law.batch, loss_scale, gamma, seed).law("marginal")
    kind(**fixed, **dict.fromkeys(_FREE, 1.0))  # refuses what is out of range by name

    kept = MATCHES[match]
    before = dynamics(source, law, form)
    target = _solve(
        lambda x: kind(**fixed, **dict(zip(_FREE, map(float, np.exp(x)), strict=True))),
        _logs(before, kept), lambda candidate: _logs(dynamics(candidate, law, form), kept),
    )  # fmt: skip
    if target is None:
        values = " and ".join(f"{name} {getattr(before, name):.4g}" for name in kept)
        raise NoEquilibrium(f"no lr and weight_decay were found at which {kind.name} has {source.name}'s {values}; match another pair "
                            "with `match`, other momenta, or a smaller lr times weight_decay.")  # fmt: skip
    quantities = _quantities(source, target, law, form, kept)
    return Conversion(
        source, target, match, quantities, _notes(source, target, quantities), predict_equilibrium(source, law).unit_grad_norm_sq
    )


def _quantities(source: UpdateRule, target: UpdateRule, law: GradientLaw, form: str, kept: tuple[str, str]) -> tuple[Quantity, ...]:
    """Every quantity of both equilibria, the kept ones first."""
    units = {"rotation": "radians per step", "rms_update": "", "tau_r": "radians per sqrt(step)", "tau_g": "per sqrt(step)", "norm": ""}
    at = [dynamics(rule, law, form) for rule in (source, target)]
    lines = [
        Quantity(name, units[name], getattr(at[0], name), getattr(at[1], name), name in kept)
        for name in sorted(units, key=lambda name: name not in kept)
    ]
    by_lr, by_scale = ([exponents(rule, law, cause, form) for rule in (source, target)] for cause in ("lr", "loss_scale"))
    before, after = (time_constant(found, exponent["norm"]) for found, exponent in zip(at, by_scale, strict=True))
    lines.append(Quantity("time_constant", "steps", before, after, False))
    for cause, (one, two) in (("lr", by_lr), *([("loss_scale", by_scale)] if isinstance(law, ToySystem) else [])):
        lines.extend(Quantity(f"{name} ~ {cause}^", "exponent", one[name], two[name], False) for name in MATCHES["rotation"])
    return tuple(lines)


def exponents(rule: UpdateRule, law: GradientLaw, cause: str, form: str = "exact") -> dict[str, float]:
    """d log q / d log `cause` of norm, rotation and RMS update q, all else fixed; `cause` is lr or loss_scale.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> {k: round(v, 2) for k, v in exponents(SGDM(lr=0.5, weight_decay=1e-4), gradient_law(64, batch=32), "lr").items()}
        {'norm': 0.25, 'rotation': 0.5, 'rms_update': 0.75}
    """
    names = ("norm", *MATCHES["rotation"])

    def at(x: np.ndarray) -> np.ndarray:
        changed, under, factor = rule, law, float(np.exp(x[0]))
        if cause == "lr":
            changed = type(rule)(**{**vars(rule.values), "lr": rule.values.lr * factor})
        elif isinstance(law, ToySystem):
            under = dataclasses.replace(law, loss_scale=law.loss_scale * factor)
        return _logs(dynamics(changed, under, form), names)

    # Rounded to what the differences resolve: 0 is 0.
    return dict(zip(names, (float(x) + 0.0 for x in _elasticity(at, np.zeros(1))[:, 0].round(7)), strict=True))


def time_constant(found: Dynamics, scale_exponent: float) -> float:
    """Steps in which ||omega||^2 forgets a small deviation, to leading order in lr times decay.

    In equilibrium diffusion makes up for decay, so under gradients of fixed size the rate is tau_r^2. Let E||omega||^2 ~ G^q
    there, G = E||g||^2. With G ~ loss_scale^2 / ||omega||^2 the rate is (1 + q) tau_r^2, and the norm ~ loss_scale^(q / (1 + q)).

    Args:
        found: The equilibrium.
        scale_exponent: d log norm / d log loss_scale: 0 for AdamW and Lion, 1/2 for scale-invariant SGD, 1/3 for Adam+l2.
    """
    return (1 - scale_exponent) / found.tau_r**2


def _notes(source: UpdateRule, target: UpdateRule, quantities: tuple[Quantity, ...]) -> tuple[str, ...]:
    """What is not kept, in words."""
    a, b = source.name, target.name
    found = {quantity.name: quantity for quantity in quantities}

    def differ(name: str, by: float) -> bool:
        return name in found and not found[name].matched and abs(found[name].before - found[name].after) > by * abs(found[name].before)

    def told() -> Iterator[str]:
        if differ("norm", _NOTABLE):
            norm = found["norm"]
            yield (
                f"norm: {norm.after / norm.before - 1:+.1%}. It follows from the matched pair (rms_update = rotation x norm in each "
                "neuron, to leading order) and cannot be chosen besides; a run that is converted midway has to find it."
            )
        if differ("time_constant", _NOTABLE):
            steady = found["time_constant"]
            yield (
                f"time to equilibrium: {a} forgets its start in {steady.before:.4g} steps, {b} in {steady.after:.4g}. It is 1/tau_r^2, and "
                "less where gradients shrink as the norm grows and the update with them."
            )
        if differ("rotation", _NOTABLE):
            turn = found["rotation"]
            yield f"single steps: they turn by {turn.before:.4g} and {turn.after:.4g} radians; over many steps they add up to the same."
        for name in MATCHES["rotation"]:
            if abs(found[key := f"{name} ~ lr^"].before - found[key].after) > 0.01:
                yield (
                    f"schedules: in equilibrium {name} follows lr^{found[key].before:.2f} in {a} and lr^{found[key].after:.2f} in {b}; "
                    "under a schedule each step needs its own conversion."
                )
        scales = [f"{name} ~ loss_scale^" for name in MATCHES["rotation"]]
        if any(key in found and max(abs(found[key].before), abs(found[key].after)) > 0.01 for key in scales):
            yield (
                "gradient scale: holds for the gradients given (fan_in, batch, neurons, gamma, loss_scale) only, since an update here "
                "follows the gradient's size; layers with other gradients need other values, and one pair cannot match them all."
            )
        if any(key in found and abs(found[key].before - found[key].after) > 0.01 for key in scales):
            yield (
                "the way there: out of equilibrium, and after a change of the gradient's size, the updates of the two follow that size "
                "differently; transients are not matched."
            )

    return tuple(told())
