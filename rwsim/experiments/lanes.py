"""Several trainings at once: what a study asks of each, and what it came to."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rwsim.errors import InvalidArgument
from rwsim.experiments.data import Data
from rwsim.experiments.lot import Run, go
from rwsim.experiments.records import Layer
from rwsim.experiments.train import Recipe, evaluate
from rwsim.theory.noise import Array

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
        norm: Root mean square over neurons of ||w|| after the step (as the probe's), shape (time2, layer).
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
    found: list[Outcome] = []
    for lot in lots:
        runs = [Run(lane.recipe, lane.seed, splits[lane.recipe.validation], device) for lane in lot]
        for done in go(runs, graph and device.type == "cuda"):
            if heard is not None:
                heard(len(found) * lanes[0].recipe.steps + done)
        found += [_outcome(run, lane) for run, lane in zip(runs, lot, strict=True)]
    seconds = (time.monotonic() - began) / max(1, len(lanes))
    return [replace(outcome, seconds=seconds) for outcome in found]


def _outcome(run: Run, lane: Lane) -> Outcome:
    """What a run came to, but for the seconds."""
    steps = lane.recipe.steps
    diverged = run.diverged(steps)
    unknown = (math.nan, math.nan)
    own = evaluate(run.model, run.data.evaluation(validation=True)) if run.data.validation is not None else unknown
    test = evaluate(run.model, run.data.evaluation()) if lane.final else unknown
    if diverged is None and not (_fine(own, run.data.validation is not None) and _fine(test, lane.final)):
        diverged = steps
    if diverged is not None:
        own = test = unknown
    parts = np.array_split(run.losses.double().cpu().numpy(), min(_WINDOWS, steps))
    losses = np.array([part.mean() for part in parts])
    norm, rotation, spread, last = run.gauge.found(diverged)
    return Outcome(*own, *test, diverged, math.nan, losses, run.gauge.step, norm, rotation, spread, last, run.gauge.layers)


def _fine(metrics: tuple[float, float], asked: bool) -> bool:
    return not asked or math.isfinite(metrics[0])
