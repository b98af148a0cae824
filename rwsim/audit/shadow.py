"""A law beside an optimizer: the same gradients, the same weights before each step, and what the two make of them.

The law's buffers are its own, in float64; its weight is set to the optimizer's before every step. What is left of the difference
after one step is rounding, however long the walk, or else the optimizer has departed from the law at that step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.errors import RwsimError
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.forms import numeric, settled
from rwsim.walk.reference import GradientPart

# Roundings of one step: of the weight (decay and update are two assignments, each of two or three operations), and of a buffer and
# the update made of it (the longest, Adam's numerator over its root with both corrections, takes a dozen).
_OF_WEIGHT, _OF_UPDATE = 4, 16
# A departure's cause is named if it leaves no more than this many tolerances: its own arithmetic rounds as well.
_EXPLAINED = 2.0


class _Tape:
    """An `xp` that keeps the roots and signs of an update in order, and what the signs were taken of."""

    def __init__(self) -> None:
        self.tape: list[Tensor] = []
        self.arguments: list[Tensor] = []

    def sqrt(self, x: Tensor) -> Tensor:
        self.tape.append(torch.sqrt(x))
        return self.tape[-1]

    def sign(self, x: Tensor) -> Tensor:
        self.arguments.append(x)
        self.tape.append(torch.sign(x))
        return self.tape[-1]


def memory(rule: UpdateRule, longest: int) -> float:
    """Over how many steps the buffers of a rule add up their rounding: 1 / (1 - r), r the slowest of their averages.

    Args:
        rule: The rule.
        longest: The answer where the theory cannot carry the rule: the length of the walk, over which nothing more can add up.
    """
    try:
        response = settled(type(rule))
        n = len(response.states)
        entries = [*response.transition[1:, 1:], response.average if response.average is not None else 0]
        *buffers, average = (float(x) for x in numeric(type(rule), tuple(entries), (sym.normalizer,))(*sym.flat(rule.values), 1.0))
        matrix = np.array(buffers).reshape(n - 1, n - 1)
        slowest = max(average, *np.abs(np.linalg.eigvals(matrix))) if n > 1 else average
    except RwsimError:
        return float(longest)
    return min(1 / (1 - min(float(slowest), 1 - 1e-12)), float(longest))


@dataclass(frozen=True)
class Departure:
    """A step at which the optimizer is not the law.

    Attributes:
        step: Which, from 1.
        size: Largest difference over the largest update so far.
        cause: What the optimizer did instead, in words; empty where no simple change of the law's step explains it.
    """

    step: int
    size: float
    cause: str


class Shadow:
    """A law that is given an optimizer's weights and gradients step by step.

    Args:
        rule: The law.
        start: The optimizer's initial weights.
        steps: Length of the walk.

    Attributes:
        first: The first departure, or None.
        last: The last step that departed.
        count: How many did.
        largest: Largest difference over tolerance in the steps that did not depart.
        flips: Signs that differ where the sign's argument is within rounding of zero.
        near: How many arguments were.
        undampened: Whether the first step left dampening out, as torch's does.
        drift: Largest update so far.
    """

    def __init__(self, rule: UpdateRule, start: Tensor, steps: int) -> None:
        self.rule, self.values = type(rule), rule.values
        self.unit = float(torch.finfo(start.dtype).eps)
        # Rounding of a buffer or of one of its coefficients (1 - beta in float32) adds up over what the buffer remembers.
        self.rounding = self.unit * _OF_UPDATE * memory(rule, steps)
        begin = start.double()
        self.part = GradientPart(self.rule, begin, self.values)
        self.state = SimpleNamespace(param=begin, **{name: torch.zeros_like(begin) for name in self.rule.state})
        self.first: Departure | None = None
        self.last = self.count = self.flips = self.near = 0
        self.largest = self.drift = self.widest = 0.0
        self.undampened = False

    def step(self, step: int, grad: Tensor, old: Tensor, new: Tensor) -> Tensor | None:
        """Compare one step.

        Args:
            step: Which, from 1.
            grad: The gradient that the optimizer was given.
            old: Its weights before.
            new: Its weights after.

        Returns:
            The gradient part of the optimizer's update: all of it but what the law's weight decay does to these weights. None if
            `new` is not finite.
        """
        grad, old, new = grad.double(), old.double(), new.double()
        before = SimpleNamespace(**{**vars(self.state), "param": old, "step": step})
        tape, hyper = _Tape(), self.values
        after = self.rule.update(grad, before, hyper, tape)
        if step == 1 and getattr(hyper, "dampening", False):
            bare = SimpleNamespace(**{**vars(hyper), "dampening": 0.0})
            other = self.rule.update(grad, before, bare, tape)
            if float((new - other["param"]).abs().max()) < float((new - after["param"]).abs().max()):
                after, hyper, self.undampened = other, bare, True
        part = self.part(grad, step, old, after["param"], tape.tape, hyper)
        self.state = SimpleNamespace(**after)

        error = new - after["param"]
        distance = error.abs()
        worst = float(distance.max())
        if not math.isfinite(worst):
            return None
        self.drift = max(self.drift, float((after["param"] - old).abs().max()))
        allowed = self.unit * _OF_WEIGHT * float(torch.maximum(old.abs(), new.abs()).max()) + self.rounding * self.drift
        near = self._near_zero(tape.arguments)
        if worst > allowed and near is not None:
            self.flips += int((near & (distance > allowed)).sum())
            worst = float(distance.masked_fill(near, 0.0).max())
        if worst <= allowed:
            self.largest = max(self.largest, worst / allowed)
        else:
            self.last, self.count = step, self.count + 1
            if self.first is None:
                cause = self._cause(grad, before, new, after["param"], part, allowed, near)
                self.first = Departure(step, worst / self.drift, cause)
        return part + error

    def _near_zero(self, arguments: list[Tensor]) -> Tensor | None:
        """Where a sign's argument is so small that rounding decides its sign."""
        found = None
        for argument in arguments:
            size = argument.abs()
            self.widest = max(self.widest, float(size.max()))
            here = size <= self.rounding * self.widest
            found = here if found is None else found | here
        if found is not None:
            self.near += int(found.sum())
        return found

    def _cause(
        self, grad: Tensor, before: SimpleNamespace, new: Tensor, law: Tensor, part: Tensor, allowed: float, near: Tensor | None
    ) -> str:
        """What was done instead of the law's step, in words."""
        old = before.param

        def fits(path: Tensor, share: float = 1.0) -> bool:
            distance = (new - path).abs()
            distance = distance if near is None else distance.masked_fill(near, 0.0)
            return bool(float(distance.max()) <= _EXPLAINED * max(1.0, share) * allowed)

        if fits(old):
            return "it takes no step at all"
        for words, changed_grad, state, hyper in self._variants(grad, before):
            if fits(self.rule.update(changed_grad, state, hyper, _Tape())["param"]):
                return words
        decay = law - old - part
        columns = torch.stack([part.flatten(), decay.flatten()], 1) if bool(decay.any()) else part.flatten()[:, None]
        factors = torch.linalg.lstsq(columns, (new - old).flatten()[:, None]).solution[:, 0].tolist()
        of_part, of_decay = (*factors, factors[0])[:2]
        if not fits(old + of_part * part + of_decay * decay, max(abs(of_part), abs(of_decay))):
            return ""
        if math.isclose(of_part, of_decay, rel_tol=1e-2):
            return f"the whole step is multiplied by {of_part:.3g}"
        changes = [("the gradient's part of the step", of_part), ("weight decay", of_decay)]
        return " and ".join(f"{name} is multiplied by {x:.3g}" for name, x in changes if not math.isclose(x, 1.0, rel_tol=1e-2))

    def _variants(self, grad: Tensor, before: SimpleNamespace) -> Iterator[tuple[str, Tensor, SimpleNamespace, SimpleNamespace]]:
        """Steps that a slip makes of the law's: words, gradient, state, hyperparameters."""
        values = vars(self.values)

        def hyper(**changes: Any) -> SimpleNamespace:
            return SimpleNamespace(**{**values, **changes})

        def state(**changes: Any) -> SimpleNamespace:
            return SimpleNamespace(**{**vars(before), **changes})

        if values.get("weight_decay"):
            for factor, words in ((0.0, "weight decay is left out"), (2.0, "weight decay is applied twice")):
                yield words, grad, before, hyper(weight_decay=factor * values["weight_decay"])
        yield "the gradient is ignored", torch.zeros_like(grad), before, self.values
        names, zeros = self.rule.state, torch.zeros_like(grad)
        for count in range(1, len(names) + 1):
            for chosen in combinations(names, count):
                dropped = dict.fromkeys(chosen, zeros)
                words = f"{' and '.join(chosen)} {'is' if count == 1 else 'are'} reset to zero"
                yield words, grad, state(**dropped), self.values
                yield f"{words}, and the step count starts again", grad, state(**dropped, step=1), self.values
        yield "the step count of the bias correction starts again", grad, state(step=1), self.values
        # So late a step has no correction left.
        yield "bias correction is left out", grad, state(step=10**9), self.values
