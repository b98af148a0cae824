"""Scripts: given gradients for a given start, on which an optimizer and a law are compared step by step.

All are in float64 and small. Together they pin an optimizer down (probes P1 to P5): each shows what the others cannot.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rwsim.audit.subject import Subject
from rwsim.optimizers.rule import UpdateRule

# Chosen to tell apart what can be told apart: no factor that a slip makes is the inverse of another of these.
BASE: Mapping[str, Any] = {
    "lr": 0.13, "weight_decay": 0.3, "momentum": 0.8, "betas": (0.8, 0.93), "eps": 1e-4, "dampening": 0.35, "nu": 0.7, "mix": 2.0,
    "max_lr": 0.75,
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One scene.

    Attributes:
        name: What it shows.
        probe: The probe that it belongs to.
        start: Initial weights, mostly (row, dim).
        grads: Gradients, shape (step, *shape).
        lrs: Learning rate of each step; the first is the constructor's.
        hyper: The other hyperparameters, rwsim's words.
    """

    name: str
    probe: str
    start: Tensor
    grads: Tensor
    lrs: tuple[float, ...]
    hyper: Mapping[str, Any]

    def head(self, steps: int) -> "Script":
        """Its first steps."""
        return replace(self, grads=self.grads[:steps], lrs=self.lrs[:steps])

    def cut(self, index: int) -> "Script":
        """One coordinate of it, in as many axes."""
        shape = [1] * self.start.ndim
        return replace(self, start=self.start.flatten()[index].reshape(shape), grads=self.grads.flatten(1)[:, index].reshape(-1, *shape))

    def rounded(self) -> "Script":
        """Its numbers as a short program writes them: six digits."""

        def six(values: Tensor) -> Tensor:
            return torch.tensor([float(f"{value:.6g}") for value in values.flatten().tolist()], dtype=values.dtype).reshape(values.shape)

        return replace(self, start=six(self.start), grads=six(self.grads), lrs=tuple(float(f"{lr:.6g}") for lr in self.lrs))

    def subject(self, subject: Subject, dtype: torch.dtype, **extra: Any) -> Tensor:
        """Where the optimizer goes: (step, *shape), float64."""
        start = self.start.to(dtype)
        grads = [[grad.to(dtype)] for grad in self.grads]
        path = subject.walk([start], grads, self.hyper, lrs=self.lrs, **extra)
        return torch.stack([params[0].double() for params in path])

    def law(self, rule: type[UpdateRule], given: Mapping[str, Any]) -> Tensor:
        """Where the law goes, with hyperparameters `given` where the script has none."""
        hyper = {"max_lr": max(self.lrs), **given, **self.hyper, "lr": self.lrs[0]}
        if "betas" in rule.hyper:  # a rule of three averages takes its own third
            hyper["betas"] = (*hyper["betas"], *rule.hyper["betas"][2:]) if "betas" in hyper else rule.hyper["betas"]
        values = rule(**{key: hyper[key] for key in rule.hyper if key in hyper}).values
        state = SimpleNamespace(param=self.start, **{name: torch.zeros_like(self.start) for name in rule.state})
        path = []
        for step, (grad, lr) in enumerate(zip(self.grads, self.lrs, strict=True), 1):
            state.step = step
            state = SimpleNamespace(**rule.update(grad, state, SimpleNamespace(**{**vars(values), "lr": lr}), torch))
            path.append(state.param)
        return torch.stack(path)

    def scale(self, path: Tensor) -> float:
        """The size of what happens in it: the largest distance from the start."""
        return float((path - self.start).abs().max())


@dataclass(frozen=True)
class Maker:
    """Makes the scenes of a probe, with the user's own hyperparameters where pinned.

    Attributes:
        probe: The probe.
        words: Hyperparameters that are set at all, rwsim's words; `lr` and `weight_decay` always are.
        pinned: Those that the user chose: they stay as they are in every scene.
        generator: Of the random numbers.
    """

    probe: str
    words: Collection[str]
    pinned: Mapping[str, Any]
    generator: torch.Generator

    def base(self, word: str) -> Any:
        """The usual value of a hyperparameter."""
        return self.pinned.get(word, BASE[word])

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def __call__(self, name: str, start: Tensor, grads: Tensor, lrs: Sequence[float] | None = None, **hyper: Any) -> Script:
        """A scene: `lrs` are factors of the usual learning rate, `hyper` replaces what is not pinned."""
        given = {word: BASE[word] for word in BASE if word in self.words or word == "weight_decay"}
        given |= {word: value for word, value in hyper.items() if word in self.words or word == "weight_decay"}
        given |= self.pinned
        lr = given.pop("lr", BASE["lr"]) if "lr" in self.pinned else hyper.get("lr", BASE["lr"])
        given.pop("lr", None)
        return Script(name, self.probe, start, grads, tuple(lr * f for f in lrs or (1.0,) * len(grads)), given)


def tolerance(script: Script, path: Tensor, dtype: torch.dtype) -> float:
    """Largest difference that rounding explains: each of T steps rounds the weight and an update that a few operations made."""
    unit = float(torch.finfo(dtype).eps)
    return unit * (len(script.grads) * float(path.abs().max()) + 200.0 * script.scale(path)) + math.ulp(0.0)
