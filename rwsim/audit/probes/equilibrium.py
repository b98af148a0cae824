"""P6: a random walk to equilibrium, with the law beside it.

The optimizer walks rwsim's toy system: 64 neurons of scale-invariant weights, each given gradients of the exact marginal law, from
the norm that the law's full prediction says. Two things are looked at.

*Every step*: the law gets the same gradients at the same weights (`rwsim.audit.shadow`). The two must agree to rounding for
thousands of steps, where P1 to P5 take two dozen: buffers that are dropped later, a warmup or a cut of the decay hidden in the class, a
bias correction that overflows are seen at the step at which they happen. Nothing here is left to chance.

*The equilibrium*: norm (root of the mean ||w||^2), rotation (mean angle between successive weights, radians per step) and RMS
update (root of the mean squared gradient part of the update) after a burn-in that theory chooses, against the full prediction, with
Monte Carlo standard errors over independent neurons. These three numbers are what training feels; they say how much a departure
matters. Where P6 is run without P1 to P5 they also say what it looks like: decay applied twice, Nesterov, swapped betas have
signatures that theory computes.

The gradient part of an unknown update is what is left when the law's weight decay, at the same weights and gradients, is subtracted.
Where the optimizer decays otherwise than the law the rest of its decay counts as gradient part.

The gradients are not of size one, where coupled and decoupled decay look alike under Adam, and no power of ten, where they would
look like a decay of ten times the size.

A quantity departs if it is off by more than MARGIN, the prediction's own error and z standard errors together; z is
Student's at a false-alarm rate of 1e-4 over the three of them. If not one step departs, then the optimizer is the law and a difference
in equilibrium is chance or the prediction's: a note. A false alarm takes both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rwsim.audit.context import Context, Result
from rwsim.audit.finding import FAULT, NOTE, Finding, Kind, Severity
from rwsim.audit.shadow import Departure, Shadow
from rwsim.audit.signatures import PATH_ERROR, Signature, signatures
from rwsim.audit.subject import SubjectError
from rwsim.errors import InvalidArgument, NoEquilibrium, UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.stats.mcse import estimate
from rwsim.stats.verdict import critical_value
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import Prediction, predict_equilibrium
from rwsim.theory.forms import numeric
from rwsim.theory.full import Full
from rwsim.theory.noise import GradientLaw
from rwsim.theory.predict import gradient_law
from rwsim.theory.rates import total_decay
from rwsim.theory.transient import approach
from rwsim.walk.measure import QUANTITIES, Recorder, Walk
from rwsim.walk.reference import seeded
from rwsim.walk.system import Layer

TITLE = "equilibrium"

NEURONS, FAN_IN, BATCH = 64, 128, 32
STEPS, WINDOW = 2048, 16
# Chance that a run says anywhere that an equilibrium differs although it does not.
FALSE_ALARM_RATE = 1e-4
# Largest relative difference from the prediction that counts as none, besides the errors of both.
MARGIN = 0.01
# What the transient may leave of the margin: two fifths of it in ||w||^2 (as `rwsim validate`).
_BURN_IN = 0.4 * MARGIN
# The norm's memory of its start must have faded this far: e^-3 of it is left, in ||w||^2.
_RELAXATIONS = 3.0
# P1 to P5 follow an optimizer so far: what begins later only this probe can see.
SCRIPTED = 24

# For what the user did not choose. The walk then forgets its norm in 50 steps and its gradients in 33.
_LR, _DECAY = 1e-2, 1e-2
_USUAL: Mapping[str, Any] = {"lr": _LR, "momentum": 0.9, "betas": (0.9, 0.97), "eps": 1e-12}
# At the first step Adam's root is |g|, of which some coordinate is a ten-thousandth of the usual one: with an eps of 1e-8 a floor and a
# summand (good implementations have either) differ there by more than rounding. Where eps cannot be set it is most likely this.
_BUILT_IN: Mapping[str, Any] = {"eps": 1e-8}
# RMS of a gradient's coordinate at equilibrium.
_GRADIENT = 0.16
_ROUNDS = 20
# A sign's step has a size without spread: float32 sums are no better than this.
_FLOAT = 1e-5


@dataclass(frozen=True)
class Setting:
    """What is walked.

    Attributes:
        rule: The law at its hyperparameters.
        given: Those that the optimizer's constructor takes, rwsim's words.
        gradients: Law of the gradients, of one neuron.
        loss_scale: Their scale.
        prediction: Of the equilibrium; None where there is none.
        reason: Why there is none.
    """

    rule: UpdateRule
    given: Mapping[str, Any]
    gradients: GradientLaw
    loss_scale: float
    prediction: Prediction | None
    reason: str


@dataclass(frozen=True)
class Walked:
    """How a walk went. `broken` is the fault that ended it."""

    walk: Walk
    shadow: Shadow
    broken: Finding | None


def run(context: Context) -> Result:
    """The probe; see the module."""
    law = context.law or context.rule
    if law is None:
        return Result(reason="no law to hold it against")
    if "lr" not in context.words:
        return Result(reason="its constructor takes no learning rate")
    try:
        setting = choose(context, law)
    except InvalidArgument as error:
        return Result(reason=f"the law cannot run at these hyperparameters: {error}")
    start_sq = setting.prediction.full.norm_sq.mean() / FAN_IN if setting.prediction else 1 / FAN_IN
    walked = walk(context, setting, float(start_sq))
    shadow, measured = walked.shadow, _steps_of(walked.shadow, setting)
    if walked.broken is not None:
        return Result([walked.broken], measured)
    findings = []
    if shadow.undampened:
        text = "Its first step leaves dampening out, as torch.optim.SGD's does."
        findings.append(Finding("dampening-starts-late", NOTE, "low", text, ("P6",)))
    burn_in, reason = _burn_in(setting, float(start_sq))
    if setting.prediction is None or reason:
        measured["equilibrium"] = reason or setting.reason
        if shadow.first is not None:
            findings.append(_departed(law, shadow.first, shadow, ""))
        # A walk without an equilibrium still says whether every step was the law's.
        return Result(findings, measured, "" if findings else f"every step is the law's, but {reason or setting.reason}")
    found = compare(walked.walk, setting.prediction.full, burn_in)
    measured |= {"burn_in": burn_in, "quantities": found, "smallest_effect": max(q["smallest_effect"] for q in found.values())}
    off = {name: q for name, q in found.items() if not abs(q["ratio"] - 1) <= q["smallest_effect"]}
    said = ", ".join(f"{name.replace('_', ' ')} {q['ratio']:.3g} times" for name, q in found.items())
    if shadow.first is None:
        if off:
            text = f"Every step is the law's, yet the walk differs from the prediction ({said}): chance, or an error of the prediction."
            findings.append(Finding("equilibrium-unexplained", NOTE, "low", text, ("P6",)))
        return Result(findings, measured)
    if not off:
        limit = measured["smallest_effect"]
        findings.append(_departed(law, shadow.first, shadow, f" In equilibrium nothing of it is seen beyond {limit:.1%}."))
        return Result(findings, measured)
    likeness = ""
    kind: Kind = context.known or FAULT
    # The scenes of P1 to P5 name these slips from single steps: where they were run, a likeness in equilibrium says nothing more.
    if shadow.first.step <= SCRIPTED and not context.searched:
        known = signatures(setting.rule, setting.gradients, STEPS, burn_in, float(start_sq))
        likeness, kind, measured["resembles"] = _likeness(found, known)
    said = f"its {said} what {law.name} predicts{likeness}."
    name, worst = max(off.items(), key=lambda item: abs(math.log(item[1]["ratio"])))
    effect, unsure = worst["ratio"] - 1, worst["smallest_effect"]
    measured["largest"] = name
    if shadow.first.step > SCRIPTED:
        findings.append(_departed(law, shadow.first, shadow, f" Over the walk {said}", effect, unsure))
    else:
        text = f"In equilibrium {said} It departs at step {shadow.first.step}{_because(shadow.first)}."
        findings.append(Finding("equilibrium-differs", kind, "high", text, ("P6",), effect, unsure))
    return Result(findings, measured)


def choose(context: Context, law: type[UpdateRule]) -> Setting:
    """Hyperparameters that show most, the user's own where pinned, and gradients to go with them.

    Weight decay is chosen for a decay of one percent a step as the rule's linear response has it, wherever the decay goes in.

    Raises:
        InvalidArgument: The law cannot run at what the user pinned.
    """
    pinned = {word: value for word, value in context.pinned.items() if word in law.hyper and word in context.words}
    values: dict[str, Any] = {}
    for key, default in law.hyper.items():
        usual = _USUAL.get(key, default)
        if isinstance(default, tuple) and key in _USUAL:
            usual = (*usual, *default[len(usual) :])
        # What the constructor does not take it has of its own: most likely what the law has.
        values[key] = pinned.get(key, usual if key in context.words else _BUILT_IN.get(key, default))
    if "max_lr" in law.hyper and "max_lr" not in pinned:
        values["max_lr"] = values["lr"] if "lr" in pinned else _LR
    free = "weight_decay" in context.words and "weight_decay" not in pinned
    if "weight_decay" in law.hyper:
        values["weight_decay"] = pinned.get("weight_decay", _DECAY / float(values["lr"]) if free and values["lr"] else 0.0)
    scale, prediction, reason = _GRADIENT * BATCH, None, "the law has no weight decay"
    if values.get("weight_decay"):
        for _ in range(_ROUNDS):
            try:
                prediction, reason = predict_equilibrium(law(**values), _gradients(scale)), ""
            except NoEquilibrium as error:
                prediction, reason = None, f"the law has no equilibrium here: {error}"
                if not free:
                    break
                values["weight_decay"] = _rounded(values["weight_decay"] / 4)
                continue
            except UnsupportedRule as error:
                reason = f"theory does not carry the law: {error}"
                break
            size = math.sqrt(prediction.unit_grad_norm_sq / FAN_IN) / prediction.exact.norm
            before = values["weight_decay"], scale
            scale = _rounded(scale * min(max(_GRADIENT / size, 0.1), 10.0))
            if free:
                root = 1.0 if prediction.normalizer is None else float(prediction.normalizer.mean())
                decay = -float(numeric(law, (total_decay(law),), (sym.normalizer,))(*sym.flat(law(**values).values), root)[0])
                values["weight_decay"] = _rounded(values["weight_decay"] * min(max(_DECAY / decay, 0.1), 10.0))
            if all(abs(old / new - 1) < 0.02 for old, new in zip(before, (values["weight_decay"], scale), strict=True)):
                values["weight_decay"], scale = before
                break
        else:
            if prediction is not None:
                prediction = predict_equilibrium(law(**values), _gradients(scale))
    elif "weight_decay" in law.hyper:
        reason = "without weight decay or learning rate the law has no equilibrium"
    given = {word: values[word] for word in law.hyper if word in context.words}
    return Setting(law(**values), given, _gradients(scale), scale, prediction, reason)


def _gradients(scale: float) -> GradientLaw:
    return gradient_law(FAN_IN, BATCH, 1, "uniform", scale)


def _rounded(value: float) -> float:
    """Three digits, to be read and repeated."""
    return float(f"{value:.3g}")


def walk(context: Context, setting: Setting, start_sq: float) -> Walked:
    """Walk the optimizer and its shadow from rows of second moment `start_sq` a coordinate.

    float32, in which optimizers are used; float64 only for one that takes nothing else.
    """
    generator = seeded(context.seed, torch.device("cpu"), (6,))
    # One neuron's share of a layer of one: its output gradients have deviation loss_scale / batch.
    layer = Layer(np.ones(FAN_IN), np.ones(1), BATCH, setting.loss_scale)
    start = torch.randn(NEURONS, FAN_IN, generator=generator)
    start *= math.sqrt(FAN_IN * start_sq) / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
    gradient = layer.gradient("marginal", generator, torch.float32, NEURONS)
    shadow, recorder = Shadow(setting.rule, start, STEPS), Recorder(start[None], WINDOW)
    param = torch.nn.Parameter(start.clone())
    optimizer = context.subject.build([param], setting.given)

    def broken(code: str, step: int, text: str) -> Walked:
        whole = f"{text} at step {step} of a walk of {FAN_IN} x {NEURONS} weights with {_shown(setting.given)}."
        return Walked(recorder.walk(), shadow, Finding(code, FAULT, "high", whole, ("P6",)))

    for step in range(1, STEPS + 1):
        old = param.detach().clone()
        grad = gradient(old)
        # A copy: what the optimizer does to it must not reach the law.
        param.grad = grad.clone()
        try:
            context.subject.step(optimizer)
        except SubjectError as error:
            return broken("raises-in-walk", step, str(error))
        new = param.detach()
        part = shadow.step(step, grad, old, new) if new.shape == old.shape else None
        if part is None:
            return broken("not-finite-in-walk", step, "Its weights are NaN or infinite")
        recorder.add(0, new, new - old, part.float(), grad)
        if step % WINDOW == 0:
            recorder.close()
    return Walked(recorder.walk(), shadow, None)


def _burn_in(setting: Setting, start_sq: float) -> tuple[int, str]:
    """Steps to drop, and why the equilibrium cannot be judged, or nothing."""
    if setting.prediction is None:
        return 0, setting.reason
    full = setting.prediction.full
    if not full.valid:
        return 0, f"the prediction does not trust itself at these hyperparameters: {'; '.join(full.doubts)}"
    slow = f"at {_shown(setting.given)} equilibrium takes longer than {STEPS // 2} steps"
    rule, root = setting.rule, setting.prediction.normalizer
    flat = sym.flat(rule.values)
    decay = numeric(type(rule), (total_decay(type(rule)),), (sym.normalizer,))(*flat, 1.0 if root is None else float(root.mean()))[0]
    coming = approach(rule, setting.gradients, start_sq, STEPS).burn_in(_BURN_IN)
    steps = max(coming if coming is not None else STEPS, math.ceil(_RELAXATIONS / (2 * abs(float(decay)))))
    return (0, slow) if steps > STEPS // 2 else (steps, "")


def compare(walk: Walk, full: Full, burn_in: int) -> dict[str, dict[str, float]]:
    """For each quantity what was measured, what was predicted, and the smallest relative difference that counts."""
    kept = walk.kept(burn_in)
    unsure = max(full.norm_error, full.rotation_error)
    found = {}
    for name in QUANTITIES:
        result = estimate(kept.statistic(name)[:, 0])
        value, mcse = result.mean, result.mcse
        if name != "rotation":  # a root of a mean square
            value = math.sqrt(result.mean)
            mcse = result.mcse / (2 * value) if value else math.inf
        predicted = float(getattr(full, name))
        ratio, error = value / predicted, mcse / predicted
        smallest = MARGIN + unsure + critical_value(len(QUANTITIES), result.freedom, FALSE_ALARM_RATE) * error
        found[name] = {
            "measured": value, "mcse": mcse, "predicted": predicted, "ratio": ratio,
            "z": (ratio - 1) / max(error, _FLOAT), "smallest_effect": smallest,
        }  # fmt: skip
    return found


def _likeness(found: Mapping[str, Mapping[str, float]], known: list[Signature]) -> tuple[str, Kind, str]:
    """Which slip it looks like, in words; of what kind; and the nearest by name."""
    norm, rotation = (found[name]["ratio"] for name in ("norm", "rotation"))
    if not known or not (norm > 0 and rotation > 0):
        return "", FAULT, ""
    # The ratios share the measurement's error; the signature's path has its own.
    allowed = max(found[name]["smallest_effect"] / min(found[name]["ratio"], 1.0) for name in ("norm", "rotation")) + PATH_ERROR
    near = sorted(known, key=lambda signature: signature.distance(norm, rotation))
    best = near[0]
    expected = f"norm {best.norm:.3g}, rotation {best.rotation:.3g}"
    if best.distance(norm, rotation) > allowed:
        return f", like no slip that is known (nearest, as if {best.words}: {expected})", FAULT, ""
    others = [s.words for s in near[1:3] if s.distance(norm, rotation) <= allowed]
    also = f"; it might also be as if {' or '.join(others)}" if others else ""
    return f", as if {best.words} ({expected}{also})", best.kind, best.words


def _because(departure: Departure) -> str:
    return f": {departure.cause}" if departure.cause else f", by {departure.size:.2g} of the largest update"


def _departed(
    law: type[UpdateRule], first: Departure, shadow: Shadow, more: str, effect: float | None = None, error: float | None = None
) -> Finding:
    late = first.step > SCRIPTED
    text = f"It takes the steps of {law.name} until step {first.step - 1}" if late else f"Its steps are not those of {law.name}"
    often = f"{shadow.count} of {STEPS} steps depart, the last at {shadow.last}"
    text = f"{text}. At step {first.step} it departs{_because(first)}; {often}.{more}"
    small = effect is None and first.size < MARGIN
    severity: Severity = "high" if effect is not None else "low" if small else "medium"
    code = "steps-depart-later" if late else "steps-depart"
    return Finding(code, FAULT, severity, text, ("P6",), first.size if effect is None else effect, error)


def _steps_of(shadow: Shadow, setting: Setting) -> dict[str, Any]:
    first = shadow.first
    return {
        "hyper": dict(vars(setting.rule.values)), "loss_scale": setting.loss_scale, "steps": STEPS, "neurons": NEURONS, "fan_in": FAN_IN,
        "steps_departing": shadow.count, "first_departure": first.step if first else None, "last_departure": shadow.last or None,
        "rounding_share": shadow.largest, "signs_near_zero": shadow.near, "signs_flipped": shadow.flips,
        "false_alarm_rate": FALSE_ALARM_RATE, "margin": MARGIN,
    }  # fmt: skip


def _shown(hyper: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in hyper.items())
