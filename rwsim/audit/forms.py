"""Forms: the family of update rules that the audit can name, one choice from each of a few lists.

A law is identified by the same search as an optimizer (`rwsim.audit.identify`), so that nothing here knows the name of a
rule. Each choice has a phrase; the differences of two forms, in phrases, are the diagnosis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

# Each list: choice -> phrase. The first choices are the commonest; a search prefers them.
DIRECTION = {
    "linear": "the step is proportional to the gradient",
    "normalized": "the step is divided by the root of the second moment",
    "sign": "the step is the sign of the momentum",
}
MOMENTUM = {
    "none": "no momentum: its buffer is unused, or reset at every step",
    "sum": "momentum that sums gradients",
    "average": "momentum that averages gradients",
    "nesterov": "Nesterov momentum",
    "nesterov average": "Nesterov momentum over an averaged buffer",
    "nadam": "Nesterov momentum as in NAdam",
    "lion": "interpolation with the first beta, momentum kept with the second (Lion)",
    "momentum first": "Lion with the momentum updated before the sign",
    "dampened": "momentum with dampening",
    "dampened after the first step": "momentum with dampening, left out of the first step",
    "dampened buffer, whole gradient": "momentum with dampening and Nesterov",
    "mixture": "quasi-hyperbolic momentum",
    "two averages": "a fast and a slow momentum (AdEMAMix)",
    "reset": "momentum buffer reset at every step",
    "reset average": "averaged momentum buffer reset at every step",
    "stale": "momentum of the last step: the step uses the buffer before this gradient",
    "stale average": "averaged momentum of the last step: the step uses the buffer before this gradient",
    "overwritten": "Nesterov momentum whose buffer is overwritten by the look-ahead",
    "holds lr": "momentum that holds updates already multiplied by lr",
    "average holds lr": "averaged momentum that holds updates already multiplied by lr",
    "started": "averaged momentum that starts at the first gradient",
    "heavy average": "momentum that weights the gradient by beta and the buffer by 1 - beta",
    "normalized first": "momentum of gradients that were already divided by the root of the second moment",
    "minus": "momentum buffer subtracted instead of added",
}
BETAS = {
    "given": "both averages with the betas given for them",
    "swapped": "betas swapped",
    "both first": "the first beta used for both averages",
    "both second": "the second beta used for both averages",
}
SQUARE = {
    "gradient": "second moment of the gradient",
    "momentum": "second moment of the momentum instead of the gradient",
    "deviation": "second moment of the gradient's deviation from its momentum (AdaBelief)",
    "maximum": "running maximum of the second moment (AMSGrad)",
    "sum": "second moments summed instead of averaged",
    "stale": "second moment of the last steps only, without this gradient",
    "row": "one second moment for a row instead of one for each weight",
    "started": "second moment that starts at the first squared gradient",
}
CORRECTION = {
    "both": "bias correction of both averages",
    "none": "bias correction missing",
    "momentum": "bias correction of the second moment missing",
    "square": "bias correction of the momentum missing",
    "late": "bias correction one step late (it counts one step too many)",
    "late momentum": "bias correction of the momentum one step late (it counts one step too many)",
    "late square": "bias correction of the second moment one step late (it counts one step too many)",
    "early": "bias correction whose step count starts at zero",
    "rootless": "bias correction of the second moment applied outside its root",
}
EPS = {
    "outside": "eps added to the root after bias correction",
    "hat": "eps added to the root before bias correction (eps is scaled by it)",
    "under": "eps under the root",
    "under squared": "eps squared under the root",
    "floor": "eps as a floor of the root",
    "floor under": "eps as a floor under the root",
    "absent": "eps unused",
    "square after": "eps added to the second moment at every step",
}
ROOT = {"root": "root of the second moment", "square": "root missing: the step is divided by the second moment itself"}
MASK = {
    "none": "no mask",
    "cautious": "cautious mask without rescaling: only components that agree with the gradient move",
    "cautious rescaled": "cautious mask with rescaling: only components that agree with the gradient move",
    "clip": "update clipped at one",
    "clip gradient": "gradient clipped at one, each component by itself",
    "clip norm": "gradient clipped to norm one",
}
SIGN = {"down": "steps down the gradient", "up": "steps up the gradient: its sign is wrong"}
DECAY = {
    "none": "no weight decay: it is stored and never used",
    "gradient": "weight decay coupled into the gradient (l2)",
    "decoupled": "decoupled weight decay, from the weight before the step",
    "after": "decoupled weight decay applied after the update, to the weight it has moved",
    "momentum only": "weight decay coupled into the momentum, not into the second moment",
    "normalized": "weight decay outside the momentum, divided by the root of the second moment",
    "under the sign": "weight decay coupled under the sign, not into the momentum",
    "square only": "weight decay coupled into the second moment only",
    "sign": "weight decay of the sign of the weight (l1)",
    "scalar": "weight decay subtracts lr times weight_decay itself, not times the weight",
    "cautious": "cautious weight decay: only where it agrees with the step",
    "twice": "weight decay applied twice, once after the other",
    "both": "weight decay both coupled into the gradient and decoupled",
    "update": "weight decay of the update's size instead of the weight's",
    "wrong sign": "weight decay with the wrong sign: weights grow",
}
RATE = {
    "lr": "decay multiplied by lr",
    "alone": "decay not multiplied by lr (independent decay)",
    "max lr": "decay multiplied by lr^2 over the largest lr (corrected decay, AdamC)",
    "over max lr": "decay by weight_decay times lr over the largest lr (fully decoupled: it follows the schedule only)",
    "first lr": "decay by the constructor's lr: it does not follow the group's",
    "over first lr": "decay divided by the constructor's lr: lr-independent only at that lr",
    "lr squared": "decay multiplied by lr twice",
    "unlearned": "coupled decay multiplied by lr as well",
    "corrected": "decay multiplied by lr and by the bias correction of the momentum",
}
LISTS: Mapping[str, Mapping[str, str]] = {
    "direction": DIRECTION, "momentum": MOMENTUM, "betas": BETAS, "square": SQUARE, "correction": CORRECTION, "eps": EPS,
    "root": ROOT, "mask": MASK, "sign": SIGN, "decay": DECAY, "rate": RATE,
}  # fmt: skip
# What a form without weight decay leaves open, and what a direction does not have.
DECAY_FIELDS = ("decay", "rate", "factor")
_ONLY_NORMALIZED = ("square", "correction", "eps", "root")
_BUFFERED = ("gradient", "momentum only", "square only", "both")


@dataclass(frozen=True)
class Form:
    """One member of the family. `factor` multiplies the decay, `scale` the whole step."""

    direction: str = "linear"
    momentum: str = "none"
    betas: str = "given"
    square: str = "gradient"
    correction: str = "both"
    eps: str = "outside"
    root: str = "root"
    mask: str = "none"
    sign: str = "down"
    scale: float = 1.0
    decay: str = "none"
    rate: str = "lr"
    factor: float = 1.0

    def differences(self, other: "Form") -> list[str]:
        """Fields in which this form and the other differ, except those that mean nothing for it."""
        void = set() if self.direction == "normalized" else set(_ONLY_NORMALIZED)
        if self.decay == "none":
            void |= {"rate", "factor"}
        return [f.name for f in fields(self) if f.name not in void and getattr(self, f.name) != getattr(other, f.name)]

    def changed(self, **changes: Any) -> "Form":
        return replace(self, **changes)


def walk(form: Form, start: np.ndarray, grads: np.ndarray, lrs: np.ndarray, hyper: SimpleNamespace) -> np.ndarray:
    """Where a form goes.

    Args:
        form: The form.
        start: Initial weights, of any shape.
        grads: Shape (step, *shape).
        lrs: Learning rates, shape (step, 1, ...).
        hyper: Arrays that broadcast against `start`: weight_decay, momentum, beta1, beta2, beta3, eps, dampening, nu, mix;
            `max_lr` or None for the largest there is; `single`, the one average of a rule that has no two, or None.

    Returns:
        Shape (step, *shape).
    """
    w = start.copy()
    memory = SimpleNamespace(m=np.zeros_like(w), slow=np.zeros_like(w), v=np.zeros_like(w), top=np.zeros_like(w))
    path = np.empty_like(grads)
    top_lr = lrs.max(axis=0) if hyper.max_lr is None else hyper.max_lr
    with np.errstate(all="ignore"):
        for i, (g, lr) in enumerate(zip(grads, lrs, strict=True)):
            w = _step(form, w, g, lr, lrs[0], top_lr, memory, hyper, i + 1)
            path[i] = w
    return path


def _rate(form: Form, lr: np.ndarray, first: np.ndarray, top: np.ndarray, wd: Any, beta1: Any, t: int) -> Any:
    """What multiplies the weight in the decay: decoupled as it is, coupled over lr."""
    coupled = form.decay in (*_BUFFERED, "normalized", "under the sign")
    match form.rate:
        case "lr" | "unlearned":
            rate = wd * lr if form.rate == "unlearned" or not coupled else wd
        case "alone":
            rate = wd
        case "max lr":
            rate = wd * lr * lr / top
        case "over max lr":
            rate = wd * lr / top
        case "first lr":
            rate = wd * first
        case "over first lr":
            rate = wd * lr / first
        case "lr squared":
            rate = wd * lr * lr
        case _:
            rate = wd * lr / (1 - beta1**t)
    return rate * form.factor


def _step(form: Form, w: Any, g: Any, lr: Any, first: Any, top: Any, s: SimpleNamespace, h: SimpleNamespace, t: int) -> Any:
    normalized = form.direction == "normalized"
    one, two = {"given": (h.beta1, h.beta2), "swapped": (h.beta2, h.beta1), "both first": (h.beta1, h.beta1)}.get(
        form.betas, (h.beta2, h.beta2)
    )
    # SGD-like rules have one rate, `momentum`; so has Signum. Lion and Adam have two.
    alpha = h.single if h.single is not None else one
    rate = _rate(form, lr, first, top, h.weight_decay, one, t)
    shift = rate * w
    if form.mask == "clip gradient":
        g = np.clip(g, -1, 1)
    elif form.mask == "clip norm":
        g = g / np.maximum(np.sqrt((g**2).sum()), 1.0)
    for_momentum = g + shift if form.decay in ("gradient", "both", "momentum only") else g
    for_square = g + shift if form.decay in ("gradient", "both", "square only") else g
    # A momentum of normalized gradients needs the root before the momentum.
    early = normalized and form.momentum == "normalized first"
    if early:
        d = for_momentum
    else:
        d = _momentum(form, for_momentum, lr, s, h, alpha, one, two, t)
    if form.decay == "under the sign":
        d = d + (1 - one) * shift
    if normalized:
        root = _root(form, for_square, s, h, two, t)
        if early:
            s.m = alpha * s.m + (1 - alpha) * (d / root)
            d = s.m
        else:
            if form.decay == "normalized":
                d = d + shift * ((1 - one**t) if form.correction in ("both", "momentum") else 1.0)
            d = d / root
        if form.correction in ("both", "momentum", "rootless", "late square") and form.momentum not in ("nadam", "two averages"):
            d = d / (1 - one**t)
        elif form.correction in ("late", "late momentum"):
            d = d / (1 - one ** (t + 1))
        elif form.correction == "early":
            d = d / (1 - one ** (t - 1))
    elif form.direction == "sign":
        d = np.sign(d)
    elif form.decay == "normalized":
        d = d + shift
    d = d * form.scale
    if form.mask.startswith("cautious"):
        mask = (d * g > 0).astype(float)
        if form.mask == "cautious rescaled":
            mask = mask / np.maximum(mask.mean(), 1e-3)
        d = d * mask
    elif form.mask == "clip":
        d = np.clip(d, -1, 1)
    move = d if "holds lr" in form.momentum else lr * d
    if form.sign == "up":
        move = -move
    return _decayed(form, w, move, rate, shift)


def _decayed(form: Form, w: Any, move: Any, rate: Any, shift: Any) -> Any:
    match form.decay:
        case "decoupled" | "both":
            return w - move - shift
        case "twice":
            return w * (1 - rate) ** 2 - move
        case "after":
            return (w - move) * (1 - rate)
        case "sign":
            return w - move - rate * np.sign(w)
        case "scalar":
            return w - move - rate
        case "cautious":
            return w - move - shift * (move * w > 0)
        case "update":
            return w - move - rate * move
        case "wrong sign":
            return w - move + shift
        case _:
            return w - move


def _momentum(form: Form, g: Any, lr: Any, s: SimpleNamespace, h: SimpleNamespace, alpha: Any, one: Any, two: Any, t: int) -> Any:
    last = s.m
    match form.momentum:
        case "none":
            return g
        case "sum" | "nesterov" | "stale" | "overwritten":
            s.m = alpha * last + g
            if form.momentum == "stale":
                return last
            if form.momentum == "overwritten":
                s.m = g + alpha * s.m
                return s.m
            return g + alpha * s.m if form.momentum == "nesterov" else s.m
        case "average" | "nesterov average" | "stale average" | "nadam":
            s.m = alpha * last + (1 - alpha) * g
            if form.momentum == "stale average":
                return last
            if form.momentum == "nadam":
                if form.correction in ("none", "square"):
                    return alpha * s.m + (1 - alpha) * g
                return alpha * s.m / (1 - alpha ** (t + 1)) + (1 - alpha) * g / (1 - alpha**t)
            return (1 - alpha) * g + alpha * s.m if form.momentum == "nesterov average" else s.m
        case "lion":
            s.m = two * last + (1 - two) * g
            return one * last + (1 - one) * g
        case "momentum first":
            s.m = two * last + (1 - two) * g
            return one * s.m + (1 - one) * g
        case "dampened" | "dampened after the first step" | "dampened buffer, whole gradient":
            share = 1.0 if form.momentum != "dampened" and t == 1 else 1 - h.dampening
            s.m = alpha * last + share * g
            return g + alpha * s.m if form.momentum.startswith("dampened buffer") else s.m
        case "mixture":
            s.m = alpha * last + (1 - alpha) * g
            return (1 - h.nu) * g + h.nu * s.m
        case "two averages":
            s.m = one * last + (1 - one) * g
            s.slow = h.beta3 * s.slow + (1 - h.beta3) * g
            return s.m / (1 - one**t) + h.mix * s.slow
        case "reset" | "reset average":
            return g if form.momentum == "reset" else (1 - alpha) * g
        case "holds lr" | "average holds lr":
            s.m = alpha * last + lr * g * (1 if form.momentum == "holds lr" else 1 - alpha)
            return s.m
        case "started":
            s.m = g if t == 1 else alpha * last + (1 - alpha) * g
            return s.m
        case "heavy average":
            s.m = (1 - alpha) * last + alpha * g
            return s.m
        case _:
            s.m = g - alpha * last
            return s.m


def _root(form: Form, g: Any, s: SimpleNamespace, h: SimpleNamespace, two: Any, t: int) -> Any:
    last = s.v
    square = {"momentum": lambda: s.m**2, "deviation": lambda: (g - s.m) ** 2, "row": lambda: (g**2).mean(-1, keepdims=True)}
    new = square.get(form.square, lambda: g**2)()
    s.v = two * last + (new if form.square == "sum" else (1 - two) * new)
    if form.square == "started" and t == 1:
        s.v = new
    if form.eps == "square after":
        s.v = s.v + h.eps
    used = last if form.square == "stale" else s.v
    if form.square == "maximum":
        s.top = np.maximum(s.top, s.v)
        used = s.top
    at = {"late": t + 1, "late square": t + 1, "early": t - 1}.get(form.correction, t)
    bias = 1.0 if form.correction in ("none", "momentum", "rootless") else 1 - two**at
    outside = 1 - two**t if form.correction == "rootless" else 1.0
    power = (lambda x: x) if form.root == "square" else np.sqrt
    match form.eps:
        case "outside" | "square after":
            return power(used / bias) / outside + (h.eps if form.eps == "outside" else 0.0)
        case "hat":
            return (power(used) + h.eps) / power(bias)
        case "under":
            return power(used / bias + h.eps)
        case "under squared":
            return power(used / bias + h.eps**2)
        case "floor":
            return np.maximum(power(used / bias), h.eps)
        case "floor under":
            return power(np.maximum(used / bias, h.eps))
        case _:
            return power(used / bias)
