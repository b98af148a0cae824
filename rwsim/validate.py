"""Theory against walk: the paper's random-walk experiment (its Figure 9) judged with error bars.

Each case is walked, measured after a burn-in that the theory's own recurrence chooses, and compared with Table 1 as
printed, with the exact second moments and with the full prediction. The verdict is that of the full form.
"""

import dataclasses
import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rwsim.config import Settings, choose_cases
from rwsim.errors import NoEquilibrium, WalkDiverged, WalkInterrupted, WalkStopped
from rwsim.optimizers import UpdateRule
from rwsim.stats.mcse import Estimate, estimate
from rwsim.stats.verdict import AGREES, FALSE_ALARM_RATE, UNDECIDED, critical_value, judge
from rwsim.theory.equilibrium import Equilibrium, Prediction, predict_equilibrium
from rwsim.theory.full import Full
from rwsim.theory.transient import Approach, approach
from rwsim.walk.job import Job
from rwsim.walk.measure import QUANTITIES, Walk
from rwsim.walk.simulate import resolve_device, resolve_engine, run, single_threaded
from rwsim.walk.system import Layer

# Share of the margin that the transient left in ||w||^2 may take up on average: a fifth of it in the norm.
_BURN_IN_SHARE = 0.4
# With fewer effective samples an error bar is itself too uncertain.
_MIN_EFFECTIVE = 16
# How many times its own length a walk goes on at most, in equilibrium, for a narrow margin.
_LONGEST = 16
# Shares of what it should need in equilibrium after which a walk is judged. Each look may give a wrong verdict, so each has a smaller share
# of the false-alarm rate; most walks are decided at the first.
_LOOKS = (0.4, 0.5, 0.65, 1.0, 1.6)
# What a narrow margin is to hold, so that chance seldom leaves it undecided: the interval and so many standard errors more, ...
_SLACK = 2.5
# ... which come out larger than fluctuations of first order say, ...
_NOISE = 1.1
# ... beside this share of the prediction's estimated error: the true one is about that large.
_LIKELY_ERROR = 0.4


@dataclass(frozen=True)
class Record:
    """One quantity of one case. `verdict` and `reason` follow the full form; `mcse` is in units of `measured`. Of the case: `steps` walked,
    and `looks` at which it might have been decided, which share the false-alarm rate."""

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
    steps: int
    looks: int
    layers: int


@dataclass(frozen=True)
class Case:
    """One optimizer before its walk: the layer, what theory says, and how much of the walk will count.

    Attributes:
        layers: Copies of the layer that are walked.
        looks: Steps after which it is judged, until it is decided. The last is its length: what was asked for, and more where burn-in and
            a narrow margin leave too few.
        burn_in: Steps to drop; None if the walk ends before equilibrium.
        obstacle: Why nothing can be decided, known beforehand (no stable equilibrium), or nothing.
    """

    rule: UpdateRule
    layer: Layer
    layers: int
    looks: tuple[int, ...]
    prediction: Prediction
    full: Full
    approach: Approach
    burn_in: int | None
    obstacle: str

    @property
    def steps(self) -> int:
        """Of the walk, at most."""
        return self.looks[-1]

    @property
    def label(self) -> str:
        values = {k: v for k, v in vars(self.rule.values).items() if k != "eps" or v}
        text = " ".join(f"{k}={'/'.join(f'{x:g}' for x in v) if isinstance(v, tuple) else f'{v:g}'}" for k, v in values.items())
        return f"{self.rule.name} {text} loss_scale={self.layer.loss_scale:g}"


@dataclass(frozen=True)
class CaseResult:
    """One optimizer after its walk. `unit_grad_norm_sq` holds E||g~||^2 as measured and as computed."""

    case: Case
    walk: Walk
    records: tuple[Record, ...]
    unit_grad_norm_sq: dict[str, float]


@dataclass
class Validation:
    """Everything a run of `validate` found. If it ended early, `stopped` says why and `partial` holds the open walks."""

    settings: Settings
    cases: list[CaseResult] = field(default_factory=list)
    partial: list[tuple[Case, Walk]] = field(default_factory=list)
    stopped: WalkStopped | None = None
    seconds: float = 0.0

    @property
    def records(self) -> list[Record]:
        return [record for case in self.cases for record in case.records]

    @property
    def passed(self) -> bool:
        """Every verdict on the full form is `agrees`, and nothing was cut short."""
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
            "unit_grad_norm_sq": [{"optimizer": c.case.label, **c.unit_grad_norm_sq} for c in self.cases],
        }
        return _without_nan({"meta": meta, "records": [dataclasses.asdict(record) for record in self.records]})


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    cases = choose_cases(chosen, hyper)
    device = resolve_device(settings.device)
    for rule, scale in cases:  # refuse before the first walk, not after the third
        if rule.values.lr == 0 or rule.values.weight_decay == 0:
            name = "lr" if rule.values.lr == 0 else "weight_decay"
            raise NoEquilibrium(f"`{name}` is 0: {rule.name} then has no equilibrium to validate; give a positive value.")
        resolve_engine(settings.engine, _job(rule, _layer(settings, settings.loss_scale or scale), 1, settings.steps, settings), device)
    result = Validation(settings)
    stop = threading.Event()

    def walk(case: Case) -> Walk:
        def watch(step: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            if progress is not None:
                progress(case.label, step, case.steps)

        job = _job(case.rule, case.layer, case.layers, case.steps, settings)
        looks = list(case.looks[:-1])
        enough = (lambda so_far: decided(case, so_far, looks)) if looks else None
        try:
            return run(job, device=settings.device, engine=settings.engine, progress=watch, enough=enough)
        except WalkDiverged as reason:
            # An engine that was not asked in time: what had been decided before stands, as in one that was.
            part = decided(case, reason.walk, list(case.looks[:-1]))
            if part is None:
                raise
            return part

    def decided(case: Case, walked: Walk, looks: list[int]) -> Walk | None:
        """The walk up to the first look at which everything is decided; takes those that it has had from the list."""
        while looks and walked.steps >= looks[0]:
            part = walked.until(looks.pop(0))
            if all(record.verdict != UNDECIDED for record in compare(case, part, settings, checks=checks)):
                return part
        return None

    def finish(case: Case, walked: Walk) -> None:
        walked = decided(case, walked, list(case.looks[:-1])) or walked
        if progress is not None:
            progress(case.label, case.steps, case.steps)
        records = compare(case, walked, settings, checks=checks)
        measured = float(measured_part(walked, case.burn_in).unit_grad_sq.mean())
        result.cases.append(CaseResult(case, walked, records, {"measured": measured, "computed": case.prediction.unit_grad_norm_sq}))
        if done is not None:
            done(result.cases[-1])

    running: list[tuple[Case, Future[Walk]]] = []
    # Cases that no walk has begun yet, the longest at the top: a long one begun last would leave the other cores idle.
    waiting: list[tuple[int, int, Case, Future[Walk]]] = []

    def walk_longest() -> None:
        *_, case, future = heapq.heappop(waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(walk(case))
            except BaseException as error:
                future.set_exception(error)

    checks = len(cases) * len(QUANTITIES)
    # One layer is a single group of the blocked engine: it keeps one core busy.
    with single_threaded(), ThreadPoolExecutor(min(os.cpu_count() or 1, len(cases))) as pool:
        try:
            # From the end: there the paper's experiment has its signs, whose prediction is the quickest, and the longest walk.
            for rule, scale in reversed(cases):
                case = prepare(rule, settings, settings.loss_scale or scale, checks=checks)
                running.insert(0, (case, Future()))
                heapq.heappush(waiting, (-case.steps, len(running), *running[0]))
                pool.submit(walk_longest)
            while running:
                finish(running[0][0], running[0][1].result())
                running.pop(0)
        except (WalkStopped, KeyboardInterrupt) as reason:
            result.stopped = reason if isinstance(reason, WalkStopped) else WalkInterrupted("interrupted", 0, None)
            stop.set()
            for case, future in [(case, future) for case, future in running if not future.cancel()]:
                with suppress(KeyboardInterrupt):  # a second Ctrl-C must not lose the rest
                    future.exception()
                try:
                    # Ends at its next window, or has ended before: then it counts as open, not as judged.
                    result.partial.append((case, future.result()))
                except WalkStopped as stopped:
                    result.partial.append((case, stopped.walk))
        finally:
            stop.set()  # on any other error too, so that the pool does not walk on to the end
    result.seconds = time.monotonic() - began
    return result


def _layer(settings: Settings, loss_scale: float) -> Layer:
    return Layer.draw(settings.fan_in, settings.neurons, settings.batch, loss_scale, settings.gamma, settings.seed)


def _job(rule: UpdateRule, layer: Layer, layers: int, steps: int, settings: Settings) -> Job:
    return Job((rule,), layer, steps, settings.gradient, layers, seed=settings.seed, window=settings.window)


def prepare(rule: UpdateRule, settings: Settings, loss_scale: float, *, checks: int = len(QUANTITIES)) -> Case:
    """Draw the layer, predict its equilibrium and the way there, and choose burn-in and length; `checks` as of `compare`."""
    layer = _layer(settings, loss_scale)
    law = layer.law(settings.gradient)
    obstacle = ""
    try:
        prediction = predict_equilibrium(rule, law)
        full = prediction.full
        coming = approach(rule, law, layer.start_sq, settings.steps)
    except NoEquilibrium as error:
        # Walked all the same: a walk that blows up is to be seen doing so.
        obstacle = str(error)
        nothing = np.full(settings.neurons, math.nan)
        prediction = Prediction(None, Equilibrium(nothing, nothing, nothing), math.nan, math.nan)
        full = Full(nothing, nothing, nothing, math.nan, math.nan, math.nan, (obstacle,))
        coming = Approach(*np.full((2, settings.steps), math.nan))
    burn_in = coming.burn_in(_BURN_IN_SHARE * settings.margin)
    if burn_in is None and not obstacle:
        obstacle = f"not in equilibrium: theory asks for a burn-in longer than {settings.steps} steps"
    looks: tuple[int, ...] = (settings.steps,)
    if settings.layers is None and burn_in is not None:
        # As many steps in equilibrium as what is left of the margin needs beside a likely error. To walk on is
        # cheaper than to walk another layer, which has to get there first.
        left = settings.margin - _LIKELY_ERROR * max(full.norm_error, full.rotation_error)
        # Neurons of a faithful layer share inputs: layers are the units there, and few.
        freedom = 8.0 if settings.gradient == "faithful" else math.inf
        bar = left / (critical_value(checks * len(_LOOKS), freedom) + _SLACK)
        wanted = _NOISE**2 * full.norm_noise / (4 * settings.neurons * bar**2) if left > 0 < full.norm_noise else settings.steps
        wanted = min(wanted, _LONGEST * settings.steps / _LOOKS[-1])
        ends = [settings.window * math.ceil((burn_in + share * wanted) / settings.window) for share in _LOOKS]
        least = settings.steps if ends[-1] <= settings.steps else settings.window * math.ceil(settings.steps / settings.window)
        looks = tuple(sorted({max(least, end) for end in ends}))
    return Case(rule, layer, settings.layers or 1, looks, prediction, full, coming, burn_in, obstacle)


def compare(case: Case, walk: Walk, settings: Settings, *, checks: int = len(QUANTITIES)) -> tuple[Record, ...]:
    """Judge a walk (its first config) against the case's prediction.

    `checks` are those of the whole run: they share its false-alarm rate, at every look again.
    """
    checks *= len(case.looks)
    kept = measured_part(walk, case.burn_in)
    forms = {"paper": case.prediction.paper, "exact": case.prediction.exact, "full": case.full}
    estimates = {q: _estimate(kept.statistic(q), q, case.full, case.layers, settings.gradient) for q in QUANTITIES}
    obstacle = case.obstacle or _obstacle(kept, estimates, settings, checks)
    records = []
    for quantity, (found, _) in estimates.items():
        measured, mcse = found.mean, found.mcse
        if quantity != "rotation":  # a root of a mean square
            measured = math.sqrt(found.mean)
            mcse = found.mcse / (2 * measured) if measured else math.nan
        predicted = {name: None if form is None else getattr(form, quantity) for name, form in forms.items()}
        error = {name: None if value is None else measured / value - 1 for name, value in predicted.items()}
        full = getattr(case.full, quantity)
        unsure = max(case.full.norm_error, case.full.rotation_error)
        ruling = judge(measured / full - 1, mcse / full, settings.margin, critical_value(checks, found.freedom), obstacle)
        records.append(
            Record(
                optimizer=case.rule.name,
                hyper=dict(vars(case.rule.values)),
                loss_scale=case.layer.loss_scale,
                gradient=settings.gradient,
                quantity=quantity,
                measured=measured,
                mcse=mcse,
                predicted=predicted,
                relative_error=error,
                verdict=ruling.verdict,
                reason=ruling.reason + (f"; the prediction is sure to {unsure:.1%} only" if unsure > settings.margin else ""),
                margin=settings.margin,
                interval=ruling.interval,
                effective_samples=found.effective,
                burn_in=case.burn_in,
                steps=walk.steps,
                looks=len(case.looks),
                layers=case.layers,
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


def _estimate(series: np.ndarray, quantity: str, form: Equilibrium, layers: int, gradient: str) -> tuple[Estimate, np.ndarray]:
    """Mean and error of one config's series; neurons of one faithful layer share inputs, so there the layer is the unit."""
    chains = series[:, 0, :]
    neurons = chains.shape[1] // layers
    if gradient == "faithful":
        chains = chains.reshape(len(chains), layers, neurons).mean(-1)
        return estimate(chains), chains
    expected = {"norm": form.norm_sq, "rotation": form.angle, "rms_update": form.update_sq}[quantity]
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
