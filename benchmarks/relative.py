"""Relative optimizers: LARS, LAMB and Nero turn in proportion to lr, the others to its root, so that a schedule acts like its
square (paper, appendix A.5).

They scale each step to lr ||w||: with a direction of unit length orthogonal to w the relative update, and so the angle, is

    r = lr                  Nero, LAMB (momentum before the scaling)
    r = lr / sqrt(1 - a^2)  LARS (momentum a after it: the steps in the buffer are nearly orthogonal)

whatever the norm, from the first step. The others turn by Table 1 in equilibrium, r ~ (lr decay)^(1/2), Adam+l2 by
lr^(2/3): to turn like a relative optimizer under the schedule s(t) they need s^2, Adam+l2 s^(3/2), and time to follow it.

`python -m benchmarks.relative` measures both halves of the claim on the toy system (5 minutes on one core).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rwsim.convert import dynamics, exponents
from rwsim.optimizers import SGDM, AdamL2, AdamW, Lion, UpdateRule
from rwsim.walk.job import Job
from rwsim.walk.measure import rotation_angle
from rwsim.walk.simulate import run, single_threaded
from rwsim.walk.system import Layer

# (weight, gradient, lr, step, state) -> the new weight; norms are of rows, one neuron each.
Step = Callable[[Tensor, Tensor, float, int, dict[str, Tensor]], Tensor]
MOMENTUM, BETA_1, BETA_2, DECAY = 0.9, 0.9, 0.999, 1e-4
# Momentum is orthogonal to the weights of its past, not to today's: at lr = 0.02 the angles fall short by 2 % (LAMB) and 6 % (LARS).
LR = 0.005


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def lars(weight: Tensor, grad: Tensor, lr: float, step: int, state: dict[str, Tensor]) -> Tensor:
    """You, Gitman and Ginsburg 2017, arXiv:1708.03888: u = g + decay w, scaled to ||w||, then momentum (a sum)."""
    update = grad + DECAY * weight
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros(())) + lr * update * (_norm(weight) / _norm(update))
    return weight - state["momentum"]


def lamb(weight: Tensor, grad: Tensor, lr: float, step: int, state: dict[str, Tensor]) -> Tensor:
    """You et al. 2020, arXiv:1904.00962: Adam's direction plus decay w, scaled to ||w||."""
    state["m"] = BETA_1 * state.get("m", torch.zeros(())) + (1 - BETA_1) * grad
    state["v"] = BETA_2 * state.get("v", torch.zeros(())) + (1 - BETA_2) * grad**2
    update = state["m"] / (1 - BETA_1**step) / (state["v"] / (1 - BETA_2**step)).sqrt() + DECAY * weight
    return weight - lr * update * (_norm(weight) / _norm(update))


def nero(weight: Tensor, grad: Tensor, lr: float, step: int, state: dict[str, Tensor]) -> Tensor:
    """Liu et al. 2021, arXiv:2102.07227: the gradient over the root of its averaged squared length; rows of mean 0 and norm 1."""
    state["v"] = BETA_2 * state.get("v", torch.zeros(())) + (1 - BETA_2) * _norm(grad) ** 2
    weight = weight - lr * _norm(weight) * grad / (state["v"] / (1 - BETA_2**step)).sqrt()
    weight = weight - weight.mean(-1, keepdim=True)
    return weight / _norm(weight)


RELATIVE: dict[str, tuple[Step, float]] = {"lars": (lars, 1 / math.sqrt(1 - MOMENTUM**2)), "lamb": (lamb, 1.0), "nero": (nero, 1.0)}
# Equilibrium rotations of 0.01 to 0.03 and memories of 100 to 200 steps.
OTHERS: tuple[UpdateRule, ...] = (
    SGDM(lr=0.3, weight_decay=2e-3), AdamW(lr=5e-3, weight_decay=0.5), AdamL2(lr=5e-3, weight_decay=2e-3), Lion(lr=1e-3, weight_decay=4.0),
)  # fmt: skip


def cosine(steps: int) -> np.ndarray:
    """s from 1 to nearly 0, at the middle of each step."""
    return (1 + np.cos(math.pi * (np.arange(steps) + 0.5) / steps)) / 2


def walk_relative(name: str, lr: float, schedule: np.ndarray, layer: Layer, *, seed: int = 0) -> np.ndarray:
    """Mean angle over neurons at each step, radians, shape (step,)."""
    step, _ = RELATIVE[name]
    generator = torch.Generator().manual_seed(seed)
    gradient = layer.gradient("marginal", generator, torch.float32)
    weight = layer.start(1, 1, generator, torch.float32)[0]
    state: dict[str, Tensor] = {}
    if name == "nero":  # which keeps rows of mean 0 and norm 1 from the start
        weight = weight - weight.mean(-1, keepdim=True)
        weight = weight / _norm(weight)
    angles = np.empty(len(schedule))
    for t, factor in enumerate(schedule):
        new = step(weight, gradient(weight), lr * float(factor), t + 1, state)
        angles[t] = float(rotation_angle(_norm(weight), _norm(new), _norm(new - weight)).mean())
        weight = new
    return angles


def walk_other(rule: UpdateRule, schedule: np.ndarray, layer: Layer, *, window: int, seed: int = 0) -> np.ndarray:
    """Mean angle over neurons in each window, shape (window,)."""
    return run(Job((rule,), layer, len(schedule), schedule={"lr": schedule}, window=window, seed=seed)).angle[:, 0].mean(-1)


@dataclass(frozen=True)
class Followed:
    """How the rotation follows the factor s of a cosine schedule, window by window.

    Attributes:
        name: Optimizer.
        power: Of s, in the schedule that was given.
        steps: Of the schedule.
        start: Rotation at s = 1 over the formula's, minus 1.
        off: Rotation over s times the rotation at s = 1, minus 1, shape (window,).
    """

    name: str
    power: float
    steps: int
    start: float
    off: np.ndarray

    @property
    def share(self) -> float:
        """Of the schedule that has passed when `off` first exceeds 5 %."""
        late = np.flatnonzero(np.abs(self.off) > 0.05)
        return float(late[0] / len(self.off)) if len(late) else 1.0

    def worst(self, floor: float) -> float:
        """The largest `off` while s is at least `floor`."""
        part = self.off[cosine(self.steps).reshape(len(self.off), -1).mean(-1) >= floor]
        return float(part[np.abs(part).argmax()])


def follow(optimizer: str | UpdateRule, power: float, steps: int, layer: Layer, *, settle: int = 3000, window: int = 100) -> Followed:
    """Rotation under the cosine schedule to the given power, after `settle` steps at its start, against the cosine itself."""
    s = cosine(steps)
    factors = np.concatenate([np.ones(settle), s**power])
    with single_threaded():
        if isinstance(optimizer, str):
            angles, label = walk_relative(optimizer, LR, factors, layer).reshape(-1, window).mean(-1), optimizer
            predicted = LR * RELATIVE[optimizer][1]
        else:
            angles, label = walk_other(optimizer, factors, layer, window=window), optimizer.name
            predicted = dynamics(optimizer, layer.law("marginal")).rotation
    before = settle // window
    start = float(angles[before // 2 : before].mean())
    return Followed(label, power, steps, start / predicted - 1, angles[before:] / (start * s.reshape(-1, window).mean(-1)) - 1)


def main() -> None:
    """Print the table of the page."""
    layer = Layer.draw(128, 128, gamma="uniform")
    head = "optimizer | rotation ~ lr^ | schedule | steps | time constants | at s = 1 | worst while s >= 1/2 | s >= 0.1 | 5 % passed after"
    print(f"| {head} |\n" + "|---" * 9 + "|")
    for name in RELATIVE:
        _row(follow(name, 1.0, 6000, layer), 1.0, None)
    for rule in OTHERS:
        found, exponent = dynamics(rule, layer.law("marginal")), exponents(rule, layer.law("marginal"), "lr")["rotation"]
        for power in sorted({2.0, 1.5 if abs(exponent - 2 / 3) < 0.02 else 2.0}):
            for steps in (6_000, 24_000, 96_000):
                _row(follow(rule, power, steps, layer), exponent, steps * found.tau_r**2)


def _row(found: Followed, exponent: float, memories: float | None) -> None:
    memory = "-" if memories is None else f"{memories:.0f}"
    off = (found.start, found.worst(0.5), found.worst(0.1))
    cells = (
        found.name,
        f"{exponent:.2f}",
        f"s^{found.power:g}",
        f"{found.steps:,}",
        memory,
        *(f"{x:+.1%}" for x in off),
        f"{found.share:.0%}",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
