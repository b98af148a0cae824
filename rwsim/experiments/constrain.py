"""`constrain`: rotational variants in place of weight decay (the paper's Table 3 and appendix J).

Claim: decay helps, and a variant that sets the rotation instead does as well, with the baseline's hyperparameters (zero-shot) or with the
decay whose rate turns as much over the run as the baseline was seen to (few-shot): the paper reads that off Table 1 and measurements.
Detail D-3: where the baseline turns less at the end, as it falls out of equilibrium, lr follows cos^2 in the variant's rate, which is a
root: the rotation follows lr's own cosine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from rwsim.experiments.compare import Claim, better, no_worse, par
from rwsim.experiments.study import SCHEDULE, Arm, Scale, Study, Trained, arm, rounded, unit
from rwsim.experiments.train import Recipe
from rwsim.optimizers import find_rule
from rwsim.rotational.rate import rotation_rate
from rwsim.theory.factors import schedule_factors
from rwsim.theory.noise import Array

# Network, optimizer, learning rates searched, gains for the variant: layers that are not scale-invariant may need a norm.
TASKS: Mapping[str, tuple[str, str, tuple[float, float], Any]] = {
    "images, AdamW": ("resnet", "adamw", (3e-3, 3e-2), False),
    "images, SGDM": ("resnet", "sgdm", (0.1, 1.0), False),
    "images, Lion": ("resnet", "lion", (5e-4, 5e-3), False),
    "text, AdamW": ("gpt", "adamw", (1e-3, 4e-3), "gain"),
}
# Sums of lr times decay over a run that are searched (at the peak; see `Scale.decay`): the paper's images had 39, its texts 3 to 40.
_TOTALS = (1.0, 4.0, 12.0)


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    for task, (network, optimizer, (low, high), _gain) in TASKS.items():
        for lr in np.geomspace(low, high, min(3, scale.points)):
            for total in _TOTALS:
                decay = scale.decay(lr, total, network, optimizer)
                recipe = scale.recipe(network, optimizer, rounded(lr), decay)
                yield arm(recipe, 1, False, task=task, kind="baseline", lr=rounded(lr), decay=decay)
            recipe = scale.recipe(network, optimizer, rounded(lr), 0.0)
            yield arm(recipe, 1, False, task=task, kind="no decay", lr=rounded(lr))


def _compared(scale: Scale, found: Trained) -> Iterator[Arm]:
    for task, (_network, _optimizer, _lrs, gain) in TASKS.items():
        best, none = (found.best(found.select(task=task, kind=kind)).recipe for kind in ("baseline", "no decay"))
        for name, recipe in (
            ("baseline", best),
            ("no decay", none),
            ("RV zero-shot", replace(best, rotational={}, standardized=gain)),
        ):
            yield arm(recipe, scale.seeds, True, task=task, kind=name, lr=recipe.hyper["lr"], decay=recipe.hyper["weight_decay"])


def _matched(scale: Scale, found: Trained) -> Iterator[Arm]:
    for task in TASKS:
        zero = found.one(task=task, kind="RV zero-shot").recipe
        target = float(np.nanmean(found.turned(found.one(final=True, task=task, kind="baseline"))))
        schedules = {"RV few-shot": "", **({"RV few-shot, cos^2": SCHEDULE} if zero.optimizer == "adamw" else {})}
        for name, schedule in schedules.items():
            recipe = matched(replace(zero, rotation_schedule=schedule), target)
            yield arm(recipe, scale.seeds, True, task=task, kind=name, lr=zero.hyper["lr"], decay=recipe.hyper["weight_decay"])


def matched(recipe: Recipe, rotation: float) -> Recipe:
    """With the decay at which the rate of its rule is `rotation` radians per step, mean over the run.

    Example:
        >>> from rwsim.experiments.study import SCALES
        >>> one = SCALES["gpu"].recipe("resnet", "adamw", lr=0.01, decay=1.0)
        >>> matched(replace(one, schedule="constant"), 0.0324).hyper["weight_decay"]
        0.997
    """
    if not rotation > 0:
        return recipe  # a baseline that diverged has none
    rate = rotation_rate(find_rule(recipe.optimizer))
    lrs = recipe.hyper["lr"] * torch.from_numpy(_factors(recipe.schedule, recipe.steps))
    follows = _factors(recipe.rotation_schedule, recipe.steps).mean() if recipe.rotation_schedule else None

    def turned(log_decay: float) -> float:
        group = {**recipe.hyper, "weight_decay": float(np.exp(log_decay))}
        return float(rate({**group, "lr": lrs}).mean()) if follows is None else float(rate(group) * follows)

    decay = float(np.exp(brentq(lambda x: np.log(turned(x) / rotation), -40.0, 40.0)))
    return replace(recipe, hyper={**recipe.hyper, "weight_decay": rounded(decay)})


def _factors(schedule: str, steps: int) -> Array:
    found = schedule_factors(schedule, steps)
    return np.ones(steps) if found is None else found


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    claims = []
    for task in TASKS:
        arms = {one.facts["kind"]: one for one in found.select(final=True, task=task)}
        score = {name: found.scores(one) for name, one in arms.items()}
        base, few, of = score["baseline"], arms["RV few-shot"], unit(arms["baseline"])
        rates = "lr " + " and ".join(f"{arms[kind].facts['lr']:g}" for kind in ("baseline", "no decay"))
        # That it turns as much is how its decay was chosen: what holds by construction is no claim.
        turned = (found.turned(few) / found.turned(arms["baseline"])).mean()
        decays = f"decay {few.facts['decay']:g} from {arms['baseline'].facts['decay']:g}, turns {turned:.3g} times as much"
        claims += [
            better(task, "decay helps: the baseline above no decay, each at its best lr", base, score["no decay"], of, rates),
            par(task, "the RV zero-shot like the baseline", score["RV zero-shot"], base, of),
            no_worse(task, "the RV few-shot recovers the baseline", score["RV few-shot"], base, of, decays),
        ]
        if "RV few-shot, cos^2" in arms:
            cos2 = arms["RV few-shot, cos^2"]
            near_cos2, near_few = (-_distance(found.path(one), found.path(arms["baseline"])) for one in (cos2, few))
            claims += [
                no_worse(task, "the RV few-shot under cos^2 recovers the baseline", score["RV few-shot, cos^2"], base, of),
                better(
                    task, "cos^2 follows the baseline's rotation more closely (RMS distance over its mean, negative)", near_cos2, near_few
                ),
            ]
    return claims


def _distance(path: Array, other: Array) -> Array:
    """RMS over time of their difference over the mean of the other, shape (seed,)."""
    return np.sqrt(((path - other) ** 2).mean(1)) / other.mean(1)


CONSTRAIN = Study(
    "constrain",
    "rotational variants in place of decay, zero-shot and few-shot: AdamW, SGDM and Lion on images, AdamW on text",
    "weight decay helps and its benefit is recovered by setting the rotation instead",
    "ResNet-20 on CIFAR-10 for 200 epochs with AdamW, SGDM and Lion, ResNet-50 and DeiT on ImageNet, GPT2-124M on Wikitext and OpenWebText",
    "here a ResNet-20 on Fashion-MNIST and a small GPT on bytes of a text train briefly, so lr times decay is larger for "
    "an equilibrium to be reached; Lion's beta2 is 0.99, where Table 1 holds, not 0.999",
    (_search, _compared, _matched),
    _judge,
)
