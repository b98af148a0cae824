"""`warmup`: with and without learning rate warmup, baseline and rotational variant (the paper's Figure 5).

Claim: the baseline needs warmup, since its first steps turn too fast; a variant, which turns as intended from the first step on, hardly
does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rwsim.experiments.compare import Claim, better, par
from rwsim.experiments.study import SCHEDULE, Arm, Scale, Study, Trained, arm, rounded, unit
from rwsim.experiments.train import Recipe

# Network, optimizer, learning rates searched, the one at which the sum of lr times decay is `_TOTAL`, gains for the variant.
TASKS = {
    "text, AdamW": ("gpt", "adamw", (2.5e-4, 3.2e-2), 5e-3, "gain"),
    "images, SGDM, large batch": ("resnet", "sgdm", (0.05, 12.8), 1.6, False),
}
_TOTAL = 5.0
# How much larger a large batch is, and how much shorter its run.
_LARGE, _SHORTER = 8, 4
SCHEDULES = {"warmup": SCHEDULE, "no warmup": "cosine"}


def _recipe(scale: Scale, task: str, lr: float, **rest: Any) -> Recipe:
    network, optimizer, _, middle, _ = TASKS[task]
    if network == "gpt":
        return scale.recipe(network, optimizer, lr, scale.decay(middle, _TOTAL, network), **rest)
    steps = max(2, scale.steps // _SHORTER)
    large = replace(scale, steps=steps, batch=_LARGE * scale.batch, every=max(1, scale.every // _SHORTER))
    return large.recipe(network, optimizer, lr, large.decay(middle, _TOTAL, network, optimizer), **rest)


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    for task, (_network, _optimizer, lrs, _middle, gain) in TASKS.items():
        for kind, variant in (("baseline", {}), ("RV", {"rotational": {}, "standardized": gain})):
            for start, schedule in SCHEDULES.items():
                for lr in scale.spaced(*lrs, more=3):
                    yield arm(_recipe(scale, task, lr, schedule=schedule, **variant), 1, False, task=task, kind=kind, start=start, lr=lr)


def _best(scale: Scale, found: Trained) -> Iterator[Arm]:
    for task in TASKS:
        for kind in ("baseline", "RV"):
            for start in SCHEDULES:
                best = found.best(found.select(task=task, kind=kind, start=start))
                yield arm(best.recipe, scale.seeds, True, task=task, kind=kind, start=start, lr=rounded(best.recipe.hyper["lr"]))


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    claims = []
    for task in TASKS:
        arms = {
            (kind, start): found.one(final=True, task=task, kind=kind, start=start) for kind in ("baseline", "RV") for start in SCHEDULES
        }
        score = {key: found.scores(one) for key, one in arms.items()}
        gain = {kind: score[kind, "warmup"] - score[kind, "no warmup"] for kind in ("baseline", "RV")}
        of = unit(arms["baseline", "warmup"])
        rates = {kind: "lr " + " and ".join(f"{arms[kind, start].facts['lr']:g}" for start in SCHEDULES) for kind in ("baseline", "RV")}
        claims += [
            better(task, "warmup helps the baseline", score["baseline", "warmup"], score["baseline", "no warmup"], of, rates["baseline"]),
            par(task, "the RV without warmup like with it", score["RV", "no warmup"], score["RV", "warmup"], of, rates["RV"]),
            better(task, "warmup helps the baseline more than the RV", gain["baseline"], gain["RV"], of),
        ]
    return claims


WARMUP = Study(
    "warmup",
    "with and without warmup over learning rates: GPT with AdamW, a ResNet with SGDM and large batches; baseline and rotational variant",
    "the baseline needs learning rate warmup and the rotational variant hardly does",
    "GPT2-124M on OpenWebText for 5,000 steps with AdamW and ResNet-50 on ImageNet for 10 epochs of batches of 8,192 with SGDM",
    "here a small GPT on bytes of a text trains briefly and a ResNet-20 on Fashion-MNIST for a quarter of that with batches "
    "of 1,024 or fewer; each of the four is compared at its own best learning rate",
    (_search, _best),
    _judge,
)
