"""Theory against walk: the paper's random-walk experiment (its Figure 9) judged with error bars.

Each case is walked, measured after a burn-in that the theory's own recurrence chooses, and compared with Table 1 as
printed and with the exact second moments. The verdict is that of the exact form.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rwsim.errors import InvalidArgument, NoEquilibrium, WalkInterrupted, WalkStopped
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.stats.mcse import Estimate, estimate
from rwsim.stats.verdict import AGREES, FALSE_ALARM_RATE, critical_value, judge
from rwsim.theory.equilibrium import Equilibrium, Prediction, predict_equilibrium
from rwsim.theory.noise import ToySystem
from rwsim.theory.transient import Approach, approach
from rwsim.walk.measure import QUANTITIES, Walk
from rwsim.walk.simulate import resolve_device, resolve_engine, run
from rwsim.walk.system import Layer

# The paper's settings: CIFAR-10 ResNet-20 for SGDM and Lion, ResNet-18 for AdamW and Adam+l2 (appendix F). Adam+l2 runs
# at loss scale 0.1: at 1 its slow coordinates have not settled after 15,000 steps.
PAPER_CASES: tuple[tuple[str, float, Mapping[str, Any]], ...] = (
    ("sgdm", 1.0, MappingProxyType({"lr": 0.5, "weight_decay": 1e-4, "momentum": 0.9})),
    ("adamw", 1.0, MappingProxyType({"lr": 1.25e-2, "weight_decay": 8e-2, "betas": (0.9, 0.999)})),
    ("adam_l2", 0.1, MappingProxyType({"lr": 7.813e-4, "weight_decay": 1.25e-4, "betas": (0.9, 0.999)})),
    ("lion", 1.0, MappingProxyType({"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.999)})),
    ("lion", 1.0, MappingProxyType({"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)})),
)

# Share of the margin that the transient left in ||w||^2 may take up on average: a tenth of it in the norm.
_BURN_IN_SHARE = 0.2
# With fewer effective samples an error bar is itself too uncertain.
_MIN_EFFECTIVE = 16
# Layers that stand for the burn-in's loss of steps; beyond this a longer walk is what is needed.
_MAX_LAYERS = 8
# Neurons that represent a layer in the transient: quantiles of |gamma_out|.
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)


class Settings(BaseModel):
    """Settings of a validation; the defaults are the paper's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(15_000, ge=1)
    neurons: int = Field(128, ge=1)
    fan_in: int = Field(128, ge=2)
    batch: int = Field(32, ge=4)
    gradient: Literal["marginal", "faithful", "gaussian"] = "marginal"
    layers: int | None = Field(None, ge=1)
    gamma: Literal["normal", "uniform"] = "normal"
    loss_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    margin: float = Field(0.02, gt=0, lt=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Literal["auto", "reference", "blocked", "fused"] = "auto"
    seed: int = Field(0, ge=0)
    window: int = Field(100, ge=1)

    @classmethod
    def checked(cls, **values: Any) -> "Settings":
        """Like the constructor, but the first problem is raised as an `InvalidArgument`."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            raise InvalidArgument(".".join(map(str, first["loc"])), f"must be {message}", first["input"]) from None


@dataclass(frozen=True)
class Record:
    """One quantity of one case. `verdict` and `reason` follow the exact form; `mcse` is in units of `measured`."""

    optimizer: str
    hyper: dict[str, Any]
    loss_scale: float
    gradient: str
    quantity: str
    measured: float
    mcse: float
    predicted: dict[str, float | None]
    relative_error: dict[str, float | None]
    verdict: str
    reason: str
    margin: float
    interval: float
    effective_samples: float
    burn_in: int | None
    layers: int


@dataclass(frozen=True)
class CaseResult:
    """One optimizer: its walk, what was predicted, and the records."""

    rule: UpdateRule
    layer: Layer
    layers: int
    walk: Walk
    prediction: Prediction
    approach: Approach
    burn_in: int | None
    records: tuple[Record, ...]
    unit_grad_norm_sq: dict[str, float]

    @property
    def label(self) -> str:
        values = {k: v for k, v in vars(self.rule.values).items() if k != "eps" or v}
        text = " ".join(f"{k}={'/'.join(f'{x:g}' for x in v) if isinstance(v, tuple) else f'{v:g}'}" for k, v in values.items())
        return f"{self.rule.name} {text} loss_scale={self.layer.loss_scale:g}"


@dataclass
class Validation:
    """Everything a run of `validate` found. `stopped` says why it ended early, if it did."""

    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    partial: Walk | None = None
    stopped: WalkStopped | None = None
    seconds: float = 0.0

    @property
    def records(self) -> list[Record]:
        return [record for case in self.cases for record in case.records]

    @property
    def passed(self) -> bool:
        """Every verdict on the exact form is `agrees`, and nothing was cut short."""
        return self.stopped is None and bool(self.cases) and all(record.verdict == AGREES for record in self.records)

    def to_json(self) -> dict[str, Any]:
        """The published form: {"meta": {...}, "records": [...]}; no NaN in it."""
        import torch

        from rwsim import __version__

        meta = {
            "rwsim": __version__,
            "torch": torch.__version__,
            **self.settings.model_dump(),
            "false_alarm_rate": FALSE_ALARM_RATE,
            "seconds": round(self.seconds, 2),
            "status": "complete" if self.stopped is None else type(self.stopped).__name__,
            "message": "" if self.stopped is None else str(self.stopped),
            "passed": self.passed,
            "unit_grad_norm_sq": [{"optimizer": c.label, **c.unit_grad_norm_sq} for c in self.cases],
        }
        return _without_nan({"meta": meta, "records": [dataclasses.asdict(record) for record in self.records]})


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cases(optimizers: Sequence[str | type[UpdateRule]], hyper: Mapping[str, Any]) -> list[tuple[UpdateRule, float]]:
    """(rule, loss scale) of every case; given hyperparameters replace the paper's, key by key."""
    if not optimizers and not hyper:
        return [(find_rule(name)(**values), scale) for name, scale, values in PAPER_CASES]
    if hyper and len(optimizers) != 1:
        name = next(iter(hyper))
        raise InvalidArgument(name, "needs exactly one optimizer", hyper[name], "name it with --optimizer")
    cases = []
    for rule in map(find_rule, optimizers):
        published = [(scale, values) for name, scale, values in PAPER_CASES if name == rule.name]
        if hyper or not published:
            scale, values = published[0] if published else (1.0, {})
            cases.append((rule(**{**values, **hyper}), scale))
        else:
            cases.extend((rule(**values), scale) for scale, values in published)
    return cases


def validate(
    optimizer: str | type[UpdateRule] | Sequence[str | type[UpdateRule]] = (),
    *,
    progress: Callable[[str, int, int], None] | None = None,
    done: Callable[[CaseResult], None] | None = None,
    **options: Any,
) -> Validation:
    """Walk, measure, compare: by default the paper's four optimizers at its settings, and Lion at its usual betas too.

    Args:
        optimizer: One or several names or classes; none for the paper's experiment.
        progress: Called with (label, steps done, steps in all).
        done: Called with each finished case.
        **options: Fields of `Settings`, and (with one optimizer) its hyperparameters lr, weight_decay, ...

    Returns:
        A `Validation`: `.records`, `.passed`, `.to_json()`. A walk that diverges or is interrupted ends the run: what
        was measured before is kept, `.stopped` holds the reason.

    Raises:
        InvalidArgument: A value out of range.
        NoEquilibrium: lr or weight decay 0, or unstable hyperparameters.

    Example:
        >>> v = validate("adamw", lr=1e-2, weight_decay=1.0, steps=300, neurons=8, fan_in=16)
        >>> {record.verdict for record in v.records}
        {'undecided'}
    """
    began = time.monotonic()
    chosen = [optimizer] if isinstance(optimizer, (str, type)) else list(optimizer)
    hyper = {key: options.pop(key) for key in list(options) if key not in Settings.model_fields}
    settings = Settings.checked(**{k: v for k, v in options.items()})
    cases = _cases(chosen, hyper)
    resolve_device(settings.device)
    resolve_engine(settings.engine)
    for rule, _ in cases:  # refuse before the first walk, not after the third
        if rule.values.lr == 0 or rule.values.weight_decay == 0:
            name = "lr" if rule.values.lr == 0 else "weight_decay"
            raise NoEquilibrium(f"`{name}` is 0: {rule.name} then has no equilibrium to validate; give a positive value.")
    checks = len(cases) * len(QUANTITIES)
    result = Validation(settings)
    try:
        for rule, scale in cases:
            case = _run_case(rule, settings, settings.loss_scale or scale, checks, progress)
            result.cases.append(case)
            if done is not None:
                done(case)
    except WalkStopped as stopped:
        result.stopped, result.partial = stopped, stopped.walk
    except KeyboardInterrupt:
        result.stopped = WalkInterrupted("interrupted between two walks", 0, None)
    result.seconds = time.monotonic() - began
    return result


def _run_case(
    rule: UpdateRule, settings: Settings, scale: float, checks: int, progress: Callable[[str, int, int], None] | None
) -> CaseResult:
    layer = Layer.draw(settings.fan_in, settings.neurons, settings.batch, scale, settings.gamma, settings.seed)
    law = layer.law(settings.gradient)
    few = law
    if isinstance(law, ToySystem):
        few = dataclasses.replace(law, gamma_out=np.quantile(np.abs(law.gamma_out), _QUANTILES)[:, None])
    unstable = ""
    try:
        prediction = predict_equilibrium(rule, law)
        coming = approach(rule, few, layer.start_sq, settings.steps)
    except NoEquilibrium as error:
        # Walked all the same: a walk that blows up is to be seen doing so.
        unstable = str(error)
        nothing = np.full(settings.neurons, math.nan)
        prediction = Prediction(None, Equilibrium(nothing, nothing, nothing), math.nan, math.nan)
        coming = Approach(np.full(settings.steps, math.nan))
    burn_in = coming.burn_in(_BURN_IN_SHARE * settings.margin)
    layers = settings.layers
    if layers is None:
        # As many copies of the layer as make up for the steps that burn-in takes away.
        kept = settings.steps - (burn_in or 0)
        layers = min(_MAX_LAYERS, math.ceil(settings.steps / kept))
    walk = run(
        [rule], layer, steps=settings.steps, gradient=settings.gradient, layers=layers, seed=settings.seed, device=settings.device,
        engine=settings.engine, window=settings.window, label=repr(rule),
        progress=None if progress is None else lambda step: progress(repr(rule), step, settings.steps),
    )  # fmt: skip
    records = compare(rule, walk, prediction, settings, burn_in=burn_in, layers=layers, loss_scale=scale, checks=checks, obstacle=unstable)
    moments = {"measured": float(measured_part(walk, burn_in).unit_grad_sq.mean()), "computed": prediction.unit_grad_norm_sq}
    return CaseResult(rule, layer, layers, walk, prediction, coming, burn_in, records, moments)


def compare(
    rule: UpdateRule,
    walk: Walk,
    prediction: Prediction,
    settings: Settings,
    *,
    burn_in: int | None,
    layers: int = 1,
    loss_scale: float = 1.0,
    checks: int = len(QUANTITIES),
    obstacle: str = "",
) -> tuple[Record, ...]:
    """Judge one walk (its first config) against a prediction.

    Args:
        burn_in: Steps to drop; None if the walk ends before equilibrium (its second half is then reported).
        layers: Copies of the layer along the neuron axis.
        loss_scale: For the record.
        checks: Checks of the whole run, which share its false-alarm rate.
        obstacle: A reason, known beforehand, why nothing can be decided.
    """
    kept = measured_part(walk, burn_in)
    if not obstacle and burn_in is None:
        obstacle = f"not in equilibrium: theory asks for a burn-in longer than {walk.steps} steps"
    estimates = {q: _estimate(kept.statistic(q), q, prediction.exact, layers, settings.gradient) for q in QUANTITIES}
    obstacle = obstacle or _obstacle(kept, estimates, settings, checks)
    records = []
    for quantity, (found, _) in estimates.items():
        measured, mcse = found.mean, found.mcse
        if quantity != "rotation":  # a root of a mean square
            measured = math.sqrt(found.mean)
            mcse = found.mcse / (2 * measured) if measured else math.nan
        exact = getattr(prediction.exact, quantity)
        predicted = {"paper": None if prediction.paper is None else getattr(prediction.paper, quantity), "exact": exact}
        error = {name: None if value is None else measured / value - 1 for name, value in predicted.items()}
        ruling = judge(measured / exact - 1, mcse / exact, settings.margin, critical_value(checks, found.freedom), obstacle)
        records.append(
            Record(
                optimizer=rule.name,
                hyper=dict(vars(rule.values)),
                loss_scale=loss_scale,
                gradient=settings.gradient,
                quantity=quantity,
                measured=measured,
                mcse=mcse,
                predicted=predicted,
                relative_error=error,
                verdict=ruling.verdict,
                reason=ruling.reason,
                margin=settings.margin,
                interval=ruling.interval,
                effective_samples=found.effective,
                burn_in=burn_in,
                layers=layers,
            )
        )
    return tuple(records)


def measured_part(walk: Walk, burn_in: int | None) -> Walk:
    """The windows that count: after the burn-in; without one, or with nothing left, the second half; at least one."""
    for first in (walk.steps // 2 if burn_in is None else burn_in, walk.steps // 2):
        kept = walk.kept(first)
        if len(kept.lengths):
            return kept
    return walk


def _estimate(series: np.ndarray, quantity: str, exact: Equilibrium, layers: int, gradient: str) -> tuple[Estimate, np.ndarray]:
    """Mean and error of one config's series; neurons of one faithful layer share inputs, so there the layer is the unit."""
    chains = series[:, 0, :]
    neurons = chains.shape[1] // layers
    if gradient == "faithful":
        chains = chains.reshape(len(chains), layers, neurons).mean(-1)
        return estimate(chains), chains
    expected = {"norm": exact.norm_sq, "rotation": exact.angle, "rms_update": exact.update_sq}[quantity]
    return estimate(chains, np.tile(np.broadcast_to(expected, neurons), layers)), chains


def _obstacle(kept: Walk, estimates: Mapping[str, tuple[Estimate, np.ndarray]], settings: Settings, checks: int) -> str:
    """Why the measurement cannot be trusted, or nothing: too few effective samples, or a drift that theory did not see."""
    for quantity, (found, chains) in estimates.items():
        if not math.isfinite(found.effective):
            return f"too few effective samples: {len(chains)} windows of {kept.window} steps after burn-in"
        if found.effective < _MIN_EFFECTIVE:
            return f"too few effective samples: {found.effective:.0f} for {quantity}, {_MIN_EFFECTIVE} needed"
        half = len(chains) // 2
        drift = float(chains[half:].mean() / chains[:half].mean() - 1)
        # Halves have twice the variance of the whole each, so their difference has four times it.
        noise = 2 * found.mcse / found.mean if found.mean else math.inf
        allowed = settings.margin / 2 * (1 if quantity == "rotation" else 2)
        if abs(drift) > allowed and abs(drift) > critical_value(checks, found.freedom) * noise:
            return f"not in equilibrium: {quantity} drifts by {drift:+.1%} between the halves after burn-in"
    return ""
