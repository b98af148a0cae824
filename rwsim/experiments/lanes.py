"""Several trainings at once: what a study asks of each, and what it came to."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.experiments.data import Data, Order
from rwsim.experiments.gauge import Gauge
from rwsim.experiments.models import build
from rwsim.experiments.records import Layer
from rwsim.experiments.step import Graph, Pass
from rwsim.experiments.train import Recipe, evaluate, make_optimizer
from rwsim.rotational import RotationalOptimizer
from rwsim.theory.factors import schedule_factors
from rwsim.theory.noise import Array

# Steps between looks at the losses, which make a GPU wait.
_LOOK = 50
# Windows that the training loss is averaged over, at most.
_WINDOWS = 100


@dataclass(frozen=True)
class Lane:
    """One training.

    Attributes:
        recipe: What.
        seed: Of weights, order, augmentation and imbalance.
        final: Whether the test data are evaluated, once, at its end.
    """

    recipe: Recipe
    seed: int
    final: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a lane came to. Of a lane that diverged the four metrics are NaN, and so is what was measured from then on.

    Attributes:
        loss, accuracy: On the validation data; NaN without.
        test_loss, test_accuracy: NaN unless the lane was final.
        diverged: Step (1 for the first) whose loss is not finite, or that left weights whose loss is not; None: it did not.
        seconds: Of all lanes of the call together over their number.
        losses: Training loss, means over equal windows, at most 100, shape (time,).
        step: Measured steps, 1 for the first, shape (time2,).
        norm: Mean over neurons of ||w|| before the step, shape (time2, layer).
        rotation: Mean over neurons of the angle of the step, radians, shape (time2, layer).
        spread: Standard deviation over neurons of the logarithm of the angle, shape (time2, layer).
        last: For each layer the angle of at most 64 neurons, radians, mean over the last fifth of the measured steps, shape (neuron,).
        layers: In the order of the axis `layer`.
    """

    loss: float
    accuracy: float
    test_loss: float
    test_accuracy: float
    diverged: int | None
    seconds: float
    losses: Array
    step: NDArray[np.int64]
    norm: Array
    rotation: Array
    spread: Array
    last: list[Array]
    layers: tuple[Layer, ...]


def train_lanes(
    lanes: Sequence[Lane], data: Data, device: torch.device, heard: Callable[[int], None] | None = None, graph: bool = True
) -> list[Outcome]:
    """Train lanes and measure their rotation: one after the other on the CPU, side by side in CUDA graphs on a GPU.

    A lane gives what it would give alone, on the CPU to the bit.

    Args:
        lanes: Of recipes with one number of steps.
        data: On `device`, not split.
        device: Where.
        heard: Called with the number of steps done, of all lanes together, now and then; may raise.
        graph: Capture steps in CUDA graphs where that works.

    Raises:
        InvalidArgument: Different numbers of steps; a recipe that cannot be trained.
    """
    if len({lane.recipe.steps for lane in lanes}) > 1:
        raise InvalidArgument("lanes", "must have one number of steps", sorted({lane.recipe.steps for lane in lanes}))
    began = time.monotonic()
    splits = {count: data.split(count) for count in {lane.recipe.validation for lane in lanes}}
    lots = [lanes] if device.type == "cuda" else [[lane] for lane in lanes]
    runs: list[_Run] = []
    for lot in lots:
        some = [_Run(lane, splits[lane.recipe.validation], device) for lane in lot]
        before = len(runs) * lanes[0].recipe.steps
        _train(some, graph and device.type == "cuda", lambda done, before=before: heard(before + done) if heard else None)
        runs += some
    found = [run.outcome() for run in runs]
    seconds = (time.monotonic() - began) / max(1, len(lanes))
    return [replace(outcome, seconds=seconds) for outcome in found]


class _Run:
    """A lane under way."""

    def __init__(self, lane: Lane, data: Data, device: torch.device) -> None:
        recipe = lane.recipe
        self.lane, self.data = lane, data
        self.model = build(recipe.network, lane.seed, recipe.standardized, **recipe.size).to(device).train()
        self.optimizer = make_optimizer(recipe, self.model, lane.seed)
        self.gauge = Gauge(self.model, recipe.every, recipe.steps)
        self.losses = torch.full((recipe.steps,), torch.nan, device=device)
        self.gradients = Pass(self.model, Order(data, recipe.batch, lane.seed), recipe.autocast)
        self.dials = list(_dials(recipe, self.optimizer))

    def diverged(self, done: int) -> int | None:
        """The first of the steps done whose loss is not finite, 1 for the first."""
        wrong = torch.nonzero(~torch.isfinite(self.losses[:done]))
        return int(wrong[0]) + 1 if len(wrong) else None

    def outcome(self) -> Outcome:
        """What it came to, but for the seconds."""
        diverged = self.diverged(self.lane.recipe.steps)
        own = test = (math.nan, math.nan)
        if diverged is None and self.data.validation is not None:
            own = evaluate(self.model, self.data.evaluation(validation=True))
        if diverged is None and self.lane.final:
            test = evaluate(self.model, self.data.evaluation())
        if math.inf in (own[0], test[0]) or not all(bool(param.isfinite().all()) for param in self.model.parameters()):
            diverged, own, test = diverged or self.lane.recipe.steps, (math.nan, math.nan), (math.nan, math.nan)
        norm, rotation, spread, last = self.gauge.found(diverged)
        parts = np.array_split(self.losses.double().cpu().numpy(), min(_WINDOWS, len(self.losses)))
        losses = np.array([part.mean() for part in parts])
        return Outcome(*own, *test, diverged, math.nan, losses, self.gauge.step, norm, rotation, spread, last, self.gauge.layers)


# A group of an optimizer, the hyperparameter of it that is scheduled, its value at each step.
_Dial = tuple[dict[str, Any], str, Array]


def _dials(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Iterator[_Dial]:
    def over_time(peak: float, schedule: str) -> Array:
        factors = schedule_factors(schedule, recipe.steps)
        return np.full(recipe.steps, peak) if factors is None else peak * factors

    for group in optimizer.param_groups:
        yield group, "lr", over_time(group["lr"], recipe.schedule)
        if recipe.rotation_schedule and group["weight_decay"]:
            assert isinstance(optimizer, RotationalOptimizer)  # make_optimizer refuses others
            yield group, "rotation", over_time(float(optimizer.rotation(group)), recipe.rotation_schedule)


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


def _train(runs: Sequence[_Run], capture: bool, heard: Callable[[int], None]) -> None:
    """All steps of runs that go side by side.

    A lane that has diverged goes on, since nothing of it reaches the others, until all have.
    """
    dials = _Dials([dial for run in runs for dial in run.dials], runs[0].losses.device)
    gradients = Graph([run.gradients for run in runs], not capture)
    step = Graph([run.optimizer.step for run in runs], not capture)
    gauges = {
        every: ([run.gauge for run in some], *(Graph([getattr(run.gauge, name) for run in some], not capture) for name in ("before", "after")))
        for every in {run.gauge.every for run in runs} if (some := [run for run in runs if run.gauge.every == every])
    }  # fmt: skip
    if capture:
        for run in runs:
            run.gradients.warm()
        gradients.capture()
    steps = runs[0].lane.recipe.steps
    for now in range(steps):
        dials.turn(now)
        for run in runs:
            run.gradients.load(now)
        gradients()
        due = [gauge for every, gauge in gauges.items() if now % every == 0]
        for _, before, _ in due:
            before()
        step()
        for some, _, after in due:
            after()
            for gauge in some:
                gauge.keep(now)
        for run in runs:
            run.losses[now].copy_(run.gradients.loss)
        if now == 0 and gradients.captured:
            # An optimizer has its state after its first step, and what was done once is loaded.
            for graph in (step, *(graph for _, *both in gauges.values() for graph in both)):
                graph.capture()
        if (now + 1) % _LOOK == 0 or now + 1 == steps:
            heard((now + 1) * len(runs))
            if all(run.diverged(now + 1) for run in runs):
                return
