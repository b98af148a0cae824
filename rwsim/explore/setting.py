"""What can be set on the page, from where to where, and the check of a setting that comes back from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rwsim.config import PAPER_CASES
from rwsim.errors import InvalidArgument
from rwsim.explore.formulas import NAMES
from rwsim.optimizers import RULES, UpdateRule
from rwsim.optimizers.rule import DOMAINS
from rwsim.theory.factors import SHAPES, warmed_up
from rwsim.theory.noise import Array

# K of the layer: with batch and loss scale it sets the size of the gradients.
NEURONS = 128
LABELS: Mapping[str, str] = {"sgdm": "SGDM", "adamw": "AdamW", "adam_l2": "Adam + l2", "lion": "Lion"}


@dataclass(frozen=True)
class Control:
    """A number on the page.

    Attributes:
        key: Its name in a link; a hyperparameter's own name, with ``_1``, ``_2`` for the entries of a pair.
        label: In words.
        symbol: In formulas.
        scale: ``log``; ``near_one``: even in log(1 - value), with 0 at the lower end; ``linear``.
        low, high: Ends of the slider.
        least, most: Ends of what may be typed.
        whole: Whether only whole numbers are taken.
        remedy: What to do instead of a value that is refused.
        hint: Beside the label.
    """

    key: str
    label: str
    symbol: str
    scale: str
    low: float | int
    high: float | int
    least: float | int
    most: float | int
    whole: bool = False
    remedy: str = ""
    hint: str = ""


# Sliders of hyperparameters: label, symbol, scale, ends. What may be typed are the rule's own `DOMAINS`.
_HYPER: Mapping[str, tuple[str, str, str, float, float]] = {
    "lr": ("Learning rate", "η", "log", 1e-6, 10.0),
    "weight_decay": ("Weight decay", "λ", "log", 1e-6, 10.0),
    "momentum": ("Momentum", "\N{GREEK SMALL LETTER ALPHA}", "near_one", 0.0, 0.999),
    "betas_1": ("Beta 1", "β₁", "near_one", 0.0, 0.999),
    "betas_2": ("Beta 2", "β₂", "near_one", 0.0, 0.9999),
}
# Averages over more steps are sums over more lags than a page should take.
_LONGEST_AVERAGE = 0.99999
LAW = (
    Control("fan_in", "Fan-in", "C", "log", 2, 16384, 2, 1 << 20, whole=True),
    Control(
        "batch", "Batch", "B", "log", 4, 4096, 4, 1 << 20, whole=True,
        remedy="the gradient's second moment is infinite below 4",
    ),
    Control("loss_scale", "Loss scale", "s", "log", 1e-3, 1e3, 1e-12, 1e12),
)  # fmt: skip
RUN = (
    Control("steps", "Steps", "T", "log", 100, 100_000, 1, 200_000, whole=True),
    Control("init_norm", "Initial norm", "‖ω₀‖", "log", 1e-2, 1e2, 1e-12, 1e12),
    Control("warmup", "Warmup", "", "linear", 0, 50, 0, 99, hint="% of the run"),
)
DEFAULTS: Mapping[str, Any] = {"fan_in": 128, "batch": 32, "steps": 15_000, "init_norm": 0.577, "warmup": 0, "schedule": "constant"}


def keys(rule: type[UpdateRule]) -> list[str]:
    """Names of a rule's hyperparameters on the page: flat, in its own order, without eps (0, as in the analysis)."""
    return [
        f"{name}_{i + 1}" if isinstance(default, tuple) else name
        for name, default in rule.hyper.items()
        if name != "eps"
        for i in range(len(default) if isinstance(default, tuple) else 1)
    ]


def hyper_controls() -> list[Control]:
    """The sliders of all rules' hyperparameters."""
    found = []
    for key, (label, symbol, scale, low, high) in _HYPER.items():
        domain = DOMAINS[key.rstrip("_12")]
        most = _LONGEST_AVERAGE if domain.high == 1 else 1e12
        found.append(Control(key, label, symbol, scale, low, high, domain.low, most, remedy=domain.remedy))
    return found


def paper_values(name: str) -> dict[str, float]:
    """The paper's settings of a rule, by key."""
    _, scale, hyper = next(case for case in PAPER_CASES if case[0] == name)
    values = RULES[name](**hyper).values
    flat = {f"{k}_{i + 1}": x for k, v in vars(values).items() if isinstance(v, tuple) for i, x in enumerate(v)}
    return {key: flat[key] if key in flat else getattr(values, key) for key in keys(RULES[name])} | {"loss_scale": scale}


@dataclass(frozen=True)
class Setting:
    """A checked setting.

    Attributes:
        rule: The optimizer.
        fan_in, batch, loss_scale: Of the toy system.
        steps: Length of the run.
        start_sq: E omega_c^2 at the start.
        factors: On lr, one per step; None for a constant.
    """

    rule: UpdateRule
    fan_in: int
    batch: int
    loss_scale: float
    steps: int
    start_sq: float
    factors: Array | None

    @property
    def schedule(self) -> dict[str, Array]:
        return {} if self.factors is None else {"lr": self.factors}


def number(control: Control, value: Any) -> float | int:
    """A value of a control.

    Raises:
        InvalidArgument: Not a number, not finite, not whole where it must be, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(control.key, "must be a number", value, "give one such as 0.1")
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) <= 1 << 60) or not control.least <= value <= control.most:
        raise InvalidArgument(control.key, f"must lie in [{control.least:g}, {control.most:g}]", value, control.remedy)
    if control.whole and value != int(value):
        raise InvalidArgument(control.key, "must be a whole number", value, "give one such as 100")
    return int(value) if control.whole else float(value)


def check(given: Any) -> Setting:
    """The setting that a page asks to be simulated: an object of the controls' keys, `optimizer` and `schedule`.

    Raises:
        InvalidArgument: Not such an object, or a value out of range.

    Example:
        >>> values = {"optimizer": "sgdm", "schedule": "cosine", "warmup": 10, "steps": 200, "init_norm": 1, **paper_values("sgdm")}
        >>> check({**values, "fan_in": 16, "batch": 32}).factors.shape
        (200,)
    """
    if not isinstance(given, dict):
        raise InvalidArgument("setting", "must be an object", type(given).__name__)
    name, shape = given.get("optimizer"), given.get("schedule")
    if not isinstance(name, str) or name not in NAMES:
        raise InvalidArgument("optimizer", f"must be one of {', '.join(NAMES)}", name)
    if not isinstance(shape, str) or shape not in SHAPES:
        raise InvalidArgument("schedule", f"must be one of {', '.join(SHAPES)}", shape)
    rule = RULES[name]
    wanted = keys(rule)
    controls = [*(c for c in hyper_controls() if c.key in wanted), *LAW, *RUN]
    known = {"optimizer", "schedule", *(c.key for c in controls)}
    if set(given) != known:
        odd = sorted(map(str, set(given) ^ known))[0]
        raise InvalidArgument("setting", f"must hold {', '.join(sorted(known))}", odd)
    values = {c.key: number(c, given[c.key]) for c in controls}
    hyper = {
        key: tuple(values[f"{key}_{i + 1}"] for i in range(len(default))) if isinstance(default, tuple) else values[key]
        for key, default in rule.hyper.items()
        if key != "eps"
    }
    steps = int(values["steps"])
    warm = warmup_steps(values["warmup"], steps)
    factors = None if shape == "constant" and not warm else warmed_up(shape, warm, steps)
    width, start = int(values["fan_in"]), float(values["init_norm"])
    return Setting(rule(**hyper), width, int(values["batch"]), float(values["loss_scale"]), steps, start**2 / width, factors)


def warmup_steps(percent: float | int, steps: int) -> int:
    """Steps of a warmup over that share of the run; the page rounds alike."""
    return min(steps - 1, math.floor(percent / 100 * steps + 0.5))
