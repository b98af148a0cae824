"""Runs that train side by side. On CUDA each has a stream of its own within the graphs that all share: what one leaves idle, others use."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.experiments.data import Data, Order
from rwsim.experiments.gauge import Gauge
from rwsim.experiments.models import build
from rwsim.experiments.step import Graph, Pass
from rwsim.experiments.train import LOOK, Recipe, make_optimizer
from rwsim.rotational import RotationalOptimizer
from rwsim.theory.factors import schedule_factors
from rwsim.theory.noise import Array

# A group of an optimizer, the hyperparameter of it that is scheduled, its value at each step.
_Dial = tuple[dict[str, Any], str, Array]


class Run:
    """A training under way.

    Args:
        recipe: What.
        seed: Of weights, order, augmentation and imbalance.
        data: On `device`, split.
        device: Where.

    Attributes:
        losses: Of each step, NaN for those to come, shape (time,).
    """

    def __init__(self, recipe: Recipe, seed: int, data: Data, device: torch.device) -> None:
        self.recipe, self.data = recipe, data
        self.model = build(recipe.network, seed, recipe.standardized, **recipe.size).to(device).train()
        self.optimizer = make_optimizer(recipe, self.model, seed)
        self.gauge = Gauge(self.model, recipe.every, recipe.steps)
        self.gradients = Pass(self.model, Order(data, recipe.batch, seed), recipe.autocast)
        self.losses = torch.full((recipe.steps,), torch.nan, device=device)

    def diverged(self, done: int) -> int | None:
        """The first of the steps done whose loss is not finite, 1 for the first."""
        wrong = torch.nonzero(~torch.isfinite(self.losses[:done]))
        return int(wrong[0]) + 1 if len(wrong) else None

    def dials(self) -> Iterator[_Dial]:
        """What is scheduled: lr, and the rotation that has a schedule of its own."""
        for group in self.optimizer.param_groups:
            yield group, "lr", self._over_time(group["lr"], self.recipe.schedule)
            if self.recipe.rotation_schedule and group["weight_decay"]:
                assert isinstance(self.optimizer, RotationalOptimizer)  # make_optimizer refuses others
                yield group, "rotation", self._over_time(float(self.optimizer.rotation(group)), self.recipe.rotation_schedule)

    def _over_time(self, peak: float, schedule: str) -> Array:
        factors = schedule_factors(schedule, self.recipe.steps)
        return np.full(self.recipe.steps, peak) if factors is None else peak * factors


class _Dials:
    """Scheduled hyperparameters: numbers on the CPU; on CUDA, where a captured step reads them, parts of one tensor."""

    def __init__(self, dials: Sequence[_Dial], device: torch.device) -> None:
        self.dials = dials
        self._table: Tensor | None = None
        if device.type == "cuda":
            self._table = torch.from_numpy(np.stack([values for _, _, values in dials], 1)).to(device, torch.float32)
            self._now = self._table[0].clone()
            for (group, key, _), value in zip(dials, self._now, strict=True):
                group[key] = value

    def turn(self, step: int) -> None:
        """Set them for step 0, 1, ..."""
        if self._table is not None:
            self._now.copy_(self._table[step])
            return
        for group, key, values in self.dials:
            group[key] = float(values[step])


class _Watch:
    """The gauges of runs that are measured at the same steps."""

    def __init__(self, gauges: Sequence[Gauge], refused: bool) -> None:
        self.gauges, self.every = gauges, gauges[0].every
        self.before = Graph([gauge.before for gauge in gauges], refused)
        self.after = Graph([gauge.after for gauge in gauges], refused)

    def keep(self, step: int) -> None:
        for gauge in self.gauges:
            gauge.keep(step)


def go(runs: Sequence[Run], capture: bool) -> Iterator[int]:
    """Take all steps of runs of one length; gives the steps done, of all runs together, now and then.

    A run that has diverged goes on, since nothing of it reaches the others, until all have.

    Args:
        runs: On one device.
        capture: Whether to capture steps in CUDA graphs, where that works.
    """
    steps = runs[0].recipe.steps
    dials = _Dials([dial for run in runs for dial in run.dials()], runs[0].losses.device)
    gradients = Graph([run.gradients for run in runs], not capture)
    step = Graph([run.optimizer.step for run in runs], not capture)
    gauges = [run.gauge for run in runs]
    watches = [_Watch([gauge for gauge in gauges if gauge.every == every], not capture) for every in {gauge.every for gauge in gauges}]
    if capture:
        for run in runs:
            run.gradients.warm()
        gradients.capture()
    for now in range(steps):
        dials.turn(now)
        for run in runs:
            run.gradients.load(now)
        due = [watch for watch in watches if now % watch.every == 0]
        gradients()
        for watch in due:
            watch.before()
        step()
        for watch in due:
            watch.after()
            watch.keep(now)
        for run in runs:
            run.losses[now].copy_(run.gradients.loss)
        if now == 0 and gradients.captured:
            # Now optimizers have their state, and what works without a graph is loaded.
            for graph in (step, *(graph for watch in watches for graph in (watch.before, watch.after))):
                graph.capture()
        if (now + 1) % LOOK == 0 or now + 1 == steps:
            yield (now + 1) * len(runs)
            if all(run.diverged(now + 1) for run in runs):
                return
