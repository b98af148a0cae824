"""`rwsim.plan`: what lr, decay and schedule will do to norm and rotation, before training."""

import copy
import math
import warnings as python_warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.factors import schedule_factors, warmed_up
from rwsim.theory.noise import Array, GradientLaw
from rwsim.theory.predict import gradient_law
from rwsim.theory.schedule import Path, expected_path
from rwsim.theory.transient import time_constants

if TYPE_CHECKING:
    import torch

# In equilibrium: the norm within this of its equilibrium value, for this share of the run at least (a warmup passes through).
NEAR, LONG = 0.1, 0.02
# Steps with less than this share of the peak learning rate say nothing of what was intended.
LIVE = 0.01
# Rotation that is off by more than this is worth a warning.
_OFF = 0.2
# Where Table 1's norm or rotation at the peak is off by more, the paper's reading of the hyperparameters fails.
_FAR = 0.05
# Rule at its peak, factors over the steps, ids of its parameters or None for all.
_Group = tuple[UpdateRule, dict[str, Array], set[int] | None]
# Entries of a path in the published form.
_POINTS = 201
# Every step is kept: more do not fit into memory.
_MOST_STEPS = 10**8


@dataclass(frozen=True)
class LayerPlan:
    """What to expect of one layer (or of layers that are alike).

    Attributes:
        name: Names of its parameters, or ``layer``.
        rule: The optimizer at its peak.
        fan_in: C.
        start_norm: RMS norm of its neurons at the start.
        lr: Learning rate of every step, shape (time,).
        path: Expected norm and rotation beside equilibrium.
        time_constant: Steps in which the squared norm forgets its start at peak hyperparameters; infinite without decay.
        reached: First step in equilibrium, or None. There the norm is within 10 % of its equilibrium value.
        left: Last step in equilibrium if the run goes on without it for good, or None.
        share: Share of the run in equilibrium.
        transient: Largest or smallest rotation over the intended one before equilibrium, whichever is further off; 1 if none.
        lag: Rotation over the intended one where the learning rate has fallen to 1 % of its peak, or at the end.
        eta_r: Intended rotation at the peak, radians per step.
        eta_g: RMS update of a single gain or bias at the peak (its gradients taken to be as large as a weight's).
        table_off: Larger relative error of Table 1's norm and rotation at the peak, against the exact form; 0 without a column.
        highest_lr: Largest peak learning rate with a stable equilibrium; infinite if there is no limit, NaN without decay.
    """

    name: str
    rule: UpdateRule
    fan_in: int
    start_norm: float
    lr: Array
    path: Path
    time_constant: float
    reached: int | None
    left: int | None
    share: float
    transient: float
    lag: float
    eta_r: float
    eta_g: float
    table_off: float
    highest_lr: float

    @property
    def steps(self) -> int:
        return len(self.lr)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Steps at which the learning rate says what was intended."""
        return (self.lr >= LIVE * self.lr.max()) & (self.lr > 0)


@dataclass(frozen=True)
class Plan:
    """The plan of a run: `.layers`, `.warnings` in plain words, `.to_json()`."""

    layers: tuple[LayerPlan, ...]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """{"meta": {...}, "layers": [...], "warnings": [...]}; paths at 201 steps at most; null where there is no number."""
        from rwsim import __version__

        first = self.layers[0]
        meta = {"rwsim": __version__, "optimizer": first.rule.name, "steps": first.steps}
        return {"meta": meta, "layers": [_record(layer) for layer in self.layers], "warnings": self.warnings}


def _record(layer: LayerPlan) -> dict[str, Any]:
    at = np.unique(np.linspace(0, layer.steps - 1, _POINTS).round().astype(int))
    series = {"step": (at + 1).tolist(), "lr": layer.lr[at].tolist()}
    series |= {name: [_number(x) for x in value[at].tolist()] for name, value in vars(layer.path).items()}
    single = {
        key: _number(value) if isinstance(value, float) else value
        for key, value in vars(layer).items()
        if key not in ("rule", "lr", "path")
    }
    fraction = None if not math.isfinite(layer.time_constant) else layer.time_constant / layer.steps
    return {**single, "hyper": vars(layer.rule.values), "time_constant_share": fraction, "path": series}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def plan(
    optimizer: "str | type[UpdateRule] | torch.optim.Optimizer",
    scheduler: Any = None,
    *,
    steps: int,
    model: "torch.nn.Module | None" = None,
    schedule: str | Sequence[float] | Mapping[str, Any] = "constant",
    warmup: int = 0,
    fan_in: int = 128,
    init_norm: float | None = None,
    batch: int = 32,
    loss_scale: float = 1.0,
    gamma: str = "uniform",
    seed: int = 0,
    **hyper: Any,
) -> Plan:
    """What will happen to norm and rotation along a run.

    Args:
        optimizer: A name in `RULES`, an UpdateRule class, or a torch optimizer (SGD, Adam, AdamW, or one named as a rule).
        scheduler: A torch scheduler of that optimizer, stepped once a step. Neither is changed.
        steps: Length of the run.
        model: Its weights of two and more dimensions are the layers: fan-in and starting norms are read off them.
        schedule: A name (see `schedule_factors`), factors on lr over the steps, or factors by hyperparameter.
        warmup: Steps of linear warmup before a named schedule.
        fan_in: C of the one layer without a model.
        init_norm: RMS norm of its neurons at the start; default torch's for a linear layer, 1/sqrt(3).
        batch: B of the toy system whose gradients are assumed (THEORY, section 3).
        loss_scale: Factor on its output gradients. Matters where the gradient's size does: SGD-like rules, Adam+l2.
        gamma: Scales of its inputs, ``"uniform"`` or ``"normal"`` draws of `seed`.
        seed: Of the gammas.
        **hyper: The rule's hyperparameters at a schedule of 1; none with a torch optimizer.

    Raises:
        InvalidArgument: A value out of range, an optimizer or scheduler that is not known.
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> found = plan("adamw", lr=5e-4, weight_decay=1e-4, steps=2000, schedule="cosine")
        >>> found.layers[0].reached is None
        True
        >>> found.warnings[0]
        'layer: equilibrium is never reached: its norm takes 10,000,000 steps to forget its start, 5,000 times the run.'
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise InvalidArgument("steps", f"must lie in [1, {_MOST_STEPS:,}]", steps, "give the optimizer's steps, not samples or tokens")
    _law(fan_in, batch, loss_scale, gamma, seed)  # refuses what is out of range before any work
    if init_norm is not None and not 0 < init_norm < math.inf:
        raise InvalidArgument("init_norm", "must lie in (0, inf)", init_norm, "give the RMS norm of a neuron's weights")
    if not 0 <= warmup < steps:
        raise InvalidArgument("warmup", f"must lie in [0, {steps}), the steps of the run", warmup, "it is part of the run")
    if isinstance(optimizer, str) or (isinstance(optimizer, type) and issubclass(optimizer, UpdateRule)):
        groups: list[_Group] = [(find_rule(optimizer)(**hyper), _factors(schedule, warmup, steps), None)]
        if scheduler is not None:
            raise InvalidArgument("scheduler", "needs a torch optimizer", scheduler, "give factors by `schedule`")
    else:
        if hyper or schedule != "constant" or warmup:
            raise InvalidArgument("hyper", "belongs to a rule, not to a torch optimizer", hyper or schedule, "set it there")
        groups = _torch_groups(optimizer, scheduler, steps)
    layers, notes = [], []
    for rule, factors, parameters in groups:
        for name, width, norm in _layers(model, parameters, fan_in, init_norm):
            law = _law(width, batch, loss_scale, gamma, seed)
            layers.append(_layer_plan(name, rule, law, norm, factors, steps))
    if not layers:
        raise InvalidArgument(
            "model", "must hold a weight of two or more dimensions that the optimizer trains", model, "vectors have no neurons to rotate"
        )
    for layer in layers:
        notes += _warnings(layer)
    return Plan(tuple(layers), notes)


def _factors(schedule: str | Sequence[float] | Mapping[str, Any], warmup: int, steps: int) -> dict[str, Array]:
    if isinstance(schedule, str):
        factors = schedule_factors(schedule, steps)
        if warmup:
            if schedule.startswith("warmup"):
                raise InvalidArgument("warmup", "must not be given twice", warmup, f"the schedule {schedule} has one")
            factors = warmed_up(schedule, warmup, steps)
        return {} if factors is None else {"lr": factors}
    if warmup:
        raise InvalidArgument("warmup", "belongs to a schedule's name", warmup, "a list holds its own")
    given = schedule if isinstance(schedule, Mapping) else {"lr": schedule}
    found = {}
    for name, values in given.items():
        try:
            found[name] = np.asarray(values, dtype=float)
        except (TypeError, ValueError):
            raise InvalidArgument("schedule", "must be numbers, one factor per step", values, "give as many as steps") from None
    return found


def _law(fan_in: int, batch: int, loss_scale: float, gamma: str, seed: int) -> GradientLaw:
    if gamma not in ("uniform", "normal"):
        raise InvalidArgument("gamma", "must be one of uniform, normal", gamma)
    drawn = "uniform" if gamma == "uniform" else np.random.default_rng([seed, 0]).standard_normal(max(fan_in, 0))
    return gradient_law(fan_in, batch, 128, drawn, loss_scale)


def _layers(model: Any, parameters: set[int] | None, fan_in: int, init_norm: float | None) -> list[tuple[str, int, float]]:
    """(names, fan-in, RMS norm of the neurons) of every layer; layers that agree in both are one."""
    if model is None:
        return [("layer", fan_in, 1 / math.sqrt(3) if init_norm is None else init_norm)]
    found: dict[tuple[int, float], list[str]] = {}
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or weight[0].numel() < 2 or (parameters is not None and id(weight) not in parameters):
            continue
        norm = float(weight.detach().double().flatten(1).square().sum(1).mean().sqrt())
        if norm == 0:
            continue  # a zero-initialised layer has no direction yet
        found.setdefault((weight[0].numel(), float(f"{norm:.2g}")), []).append(name)
    return [(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it", *key) for key, names in found.items()]


def _torch_groups(optimizer: Any, scheduler: Any, steps: int) -> list[_Group]:
    """Rule, factors and parameters of every parameter group, the scheduler run ahead on a copy."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument("optimizer", "must be a rule's name, a rule, or a torch optimizer", type(optimizer).__name__)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidArgument("scheduler", "must not depend on the loss", type(scheduler).__name__, "give a schedule known beforehand")
    rules = [torch_rule(optimizer, group) for group in optimizer.param_groups]
    names = [[name for name in ("lr", "weight_decay", "momentum", "betas") if name in rule.hyper and name in group]
             for rule, group in zip(rules, optimizer.param_groups, strict=True)]  # fmt: skip
    history: list[list[list[Any]]] = [[[] for _ in group] for group in names]
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    ahead = None
    if scheduler is not None:
        # Parameters and their state are shared with the copy, hyperparameters are not.
        shared = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(optimizer.state): optimizer.state}
        ahead = copy.deepcopy(scheduler, shared)
        groups = ahead.optimizer.param_groups
    for _ in range(steps):
        for group, wanted, series in zip(groups, names, history, strict=True):
            for name, values in zip(wanted, series, strict=True):
                values.append(group[name] if isinstance(group[name], tuple) else float(group[name]))
        if ahead is not None:
            with python_warnings.catch_warnings():
                python_warnings.simplefilter("ignore")  # it misses the optimizer's steps
                ahead.step()
    found: list[_Group] = []
    for rule, group, wanted, series in zip(rules, optimizer.param_groups, names, history, strict=True):
        base = {name: group[name] for name in rule.hyper if name in group}
        factors: dict[str, Array] = {}
        for name, values in zip(wanted, series, strict=True):
            table = np.array(values)
            peak = table.max(0)
            base[name] = tuple(peak.tolist()) if table.ndim > 1 else float(peak)
            if (table != peak).any():
                factors[name] = table / np.where(peak == 0, 1, peak)
        found.append((rule(**base), factors, {id(p) for p in group["params"]}))
    return found


def torch_rule(optimizer: Any, group: Mapping[str, Any]) -> type[UpdateRule]:
    name = type(optimizer).__name__.lower()
    if group.get("amsgrad"):
        raise InvalidArgument("optimizer", "must not use amsgrad", name, "the theory does not carry it")
    if name == "sgd":
        name = "sgd" if not group["momentum"] else "nesterov" if group["nesterov"] else "dampened" if group["dampening"] else "sgdm"
    elif name == "adam":
        name = "adamw" if group.get("decoupled_weight_decay") else "adam_l2"
    return find_rule(name)


def _layer_plan(name: str, rule: UpdateRule, law: GradientLaw, norm: float, factors: Mapping[str, Any], steps: int) -> LayerPlan:
    path = expected_path(rule, law, steps, factors, norm**2 / law.fan_in)
    lr = np.broadcast_to(np.asarray(factors.get("lr", 1.0)) * rule.values.lr, steps)
    peak = int(np.argmax(lr))
    live = (lr >= LIVE * lr.max()) & (lr > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        near = np.abs(path.norm / path.equilibrium_norm - 1) <= NEAR
        ratio = path.rotation / path.equilibrium_rotation
    reached, left, share = _stay(near, live, max(1, math.ceil(LONG * steps)))
    before = live.copy()
    before[: min(10, steps - 1)] = False  # momentum fills up
    if reached is not None:
        before[reached - 1 :] = False
    off = ratio[before & np.isfinite(ratio)]
    transient = float(off[np.abs(np.log(np.maximum(off, 1e-300))).argmax()]) if len(off) else 1.0
    last = ratio[live & np.isfinite(ratio)]
    constant, eta_r, table_off, highest = math.inf, math.nan, 0.0, math.nan
    eta_g = float(path.rms_update[np.flatnonzero(lr == lr[peak])[-1]]) / math.sqrt(law.fan_in)
    try:
        prediction = predict_equilibrium(rule, law)
    except NoEquilibrium:
        if rule.values.lr > 0 and rule.values.weight_decay > 0:
            highest = _highest_lr(rule, law)
    else:
        exact, table = prediction.exact, prediction.paper
        if table is not None:
            table_off = max(abs(getattr(table, q) / getattr(exact, q) - 1) for q in ("norm", "rotation"))
        constant = float(time_constants(type(rule), [rule], exact)[0])
        eta_r, eta_g = float(path.equilibrium_rotation[peak]), exact.rms_update / math.sqrt(law.fan_in)
        highest = _highest_lr(rule, law)
    return LayerPlan(
        name, rule, law.fan_in, norm, lr, path, constant, reached, left, share, transient,
        float(last[-1]) if len(last) else math.nan, eta_r, eta_g, table_off, highest,
    )  # fmt: skip


def _stay(near: NDArray[np.bool_], live: NDArray[np.bool_], long: int) -> tuple[int | None, int | None, float]:
    """First step of the first stretch of at least `long` steps, last step of the last one or None where it holds to the end,
    and the share of such stretches in the run."""
    edges = np.diff(np.concatenate([[0], near.astype(int), [0]]))
    first, after = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    kept = after - first >= long
    if not kept.any():
        return None, None, 0.0
    end, alive = int(after[kept][-1]), int(np.flatnonzero(live)[-1]) + 1
    return int(first[kept][0]) + 1, end if end < alive else None, float((after - first)[kept].sum() / len(near))


def _highest_lr(rule: UpdateRule, law: GradientLaw) -> float:
    """Largest learning rate with a stable equilibrium at this decay, to three digits."""

    def stable(lr: float) -> bool:
        try:
            predict_equilibrium(type(rule)(**{**vars(rule.values), "lr": lr}), law)
        except NoEquilibrium:
            return False
        return True

    low, high = 1e-12, 1e12
    if stable(high) or not stable(low):
        return math.inf if stable(high) else math.nan
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return float(f"{low:.3g}")


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times"


def _warnings(layer: LayerPlan) -> list[str]:
    """What is worth knowing beforehand, in plain words."""
    found, path, values, steps = [], layer.path, layer.rule.values, layer.steps
    if not np.isfinite(path.norm).all():
        step = int(np.flatnonzero(~np.isfinite(path.norm))[0]) + 1
        found.append(f"the weights blow up by step {step:,}: lr times weight decay is too large (stable below lr {layer.highest_lr:g}).")
        return [f"{layer.name}: {text}" for text in found]
    if not (values.weight_decay > 0 and values.lr > 0):
        fall = path.rotation[-1] / path.rotation[min(len(path.rotation) - 1, 10)]
        found.append(
            f"without {'decay' if values.lr > 0 else 'a learning rate'} there is no equilibrium: the norm grows from {path.norm[0]:.3g} to "
            f"{path.norm[-1]:.3g} and the rotation ends at {fall:.2g} of where it began."
        )
        return [f"{layer.name}: {text}" for text in found]
    ratio = layer.start_norm / float(path.equilibrium_norm[int(np.argmax(layer.lr))])
    share = layer.time_constant / steps
    if layer.reached is None:
        length = f"{share:,.2g} times the run" if share < 10 else f"{share:,.0f} times the run"
        found.append(
            f"equilibrium is never reached: its norm takes {layer.time_constant:,.0f} steps to forget its start, {length}."
            if share > _OFF
            else "equilibrium is never reached: the schedule moves it faster than the norm can follow."
        )
    if abs(layer.transient - 1) > _OFF:
        side, pace = ("below", "fast") if layer.transient > 1 else ("above", "slowly")
        until = "throughout" if layer.reached is None else f"until step {layer.reached:,}"
        found.append(
            f"the weights start {side} equilibrium ({_times(ratio)} its norm at the peak) and rotate too {pace} {until}: up to "
            f"{_times(layer.transient)} the intended rotation."
        )
    if layer.left is not None:
        found.append(
            f"from step {layer.left:,} ({layer.left / steps:.0%} of the run on) the norm cannot decay as fast as the schedule asks: out of "
            "equilibrium to the end."
        )
    if layer.reached is not None and layer.lag < 1 - _OFF:
        found.append(f"at the end, with 1 % of the peak learning rate, the rotation is {layer.lag:.2g} of the intended one: it lags.")
    if layer.table_off > _FAR:
        found.append(
            f"lr times weight decay, {values.lr * values.weight_decay:.2g}, is large: Table 1 of the paper is off by {layer.table_off:.0%}."
        )
    if layer.rule.values.lr > layer.highest_lr / 2:
        found.append(f"the peak learning rate is close to where the recurrence loses its stability, {layer.highest_lr:g}.")
    return [f"{layer.name}: {text}" for text in found]
