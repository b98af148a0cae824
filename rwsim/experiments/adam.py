"""`adam`: AdamW against Adam with l2 regularization (the paper's Figure 6, and Balancing Adam+l2 in appendix J).

Claim: AdamW does better, each at its best, and its layers turn alike where those of Adam+l2 differ. A rotational variant with the
direction of Adam+l2 at AdamW's rate does as well as RV-AdamW, and better than Adam+l2: balance is what Adam+l2 lacks. The paper puts
AdamW's decay into that direction, where it is far stronger than Adam+l2 would have it; beside it stands the direction at Adam+l2's own
best decay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rwsim.experiments.compare import Claim, better, par
from rwsim.experiments.study import Arm, Scale, Study, Trained, arm
from rwsim.experiments.train import Recipe
from rwsim.theory.noise import Array

# Least and largest of learning rate and decay that are searched.
GRID = {"adamw": ((1e-3, 1e-1), (3e-2, 3.0)), "adam_l2": ((3e-4, 3e-2), (1e-6, 1e-2))}
_SCHEDULE = "cosine"
_LATE = 0.5


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    for optimizer, (lrs, decays) in GRID.items():
        for lr in scale.spaced(*lrs):
            for decay in scale.spaced(*decays):
                recipe = scale.recipe("resnet18", optimizer, lr, decay, schedule=_SCHEDULE)
                yield arm(recipe, 1, False, kind=optimizer, lr=lr, decay=decay)


def _best(scale: Scale, found: Trained) -> Iterator[Arm]:
    adamw, coupled = (found.best(found.select(kind=optimizer)).recipe for optimizer in GRID)
    for kind, recipe in (
        ("AdamW", adamw),
        ("Adam+l2", coupled),
        ("RV-AdamW", replace(adamw, rotational={})),
        ("RV of Adam+l2", replace(adamw, optimizer="adam_l2", rotational={"rotation": "adamw"})),
        ("RV of Adam+l2, own decay", _apart(adamw, coupled)),
    ):
        yield arm(recipe, scale.seeds, True, kind=kind, lr=recipe.hyper["lr"], decay=recipe.hyper["weight_decay"])


def _apart(adamw: Recipe, coupled: Recipe) -> Recipe:
    """RV of Adam+l2's direction at its own decay, AdamW's rate at AdamW's."""
    rate = {"rule": "adamw", "weight_decay": adamw.hyper["weight_decay"]}
    hyper = {**adamw.hyper, "weight_decay": coupled.hyper["weight_decay"]}
    return replace(adamw, optimizer="adam_l2", hyper=hyper, rotational={"rotation": rate})


def uneven(found: Trained, one: Arm) -> Array:
    """Logarithm of the largest over the least layer's rotation in the second half, shape (seed,)."""
    turned = np.log(found.mean(one, "rotation", _LATE))
    return turned.max(1) - turned.min(1)


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    adamw, coupled, variant, special, apart = found.select(final=True)
    score, strong = found.scores, f"decay {special.facts['decay']:g} in the direction"
    own = f"decay {apart.facts['decay']:g} in the direction"
    return [
        better("ResNet-18", "AdamW above Adam+l2", score(adamw), score(coupled), "points"),
        better(
            "ResNet-18", "layers turn less alike under Adam+l2 (log of largest over least)", uneven(found, coupled), uneven(found, adamw)
        ),
        par("ResNet-18", "the RV with Adam+l2's direction at AdamW's rate like RV-AdamW", score(special), score(variant), "points", strong),
        par("ResNet-18", "the same at Adam+l2's own decay like RV-AdamW", score(apart), score(variant), "points", own),
        better("ResNet-18", "the RV with Adam+l2's direction above Adam+l2", score(special), score(coupled), "points", strong),
        better("ResNet-18", "the same at Adam+l2's own decay above Adam+l2", score(apart), score(coupled), "points", own),
    ]


ADAM = Study(
    "adam",
    "AdamW against Adam+l2: a search over lr and decay, rotation of every layer, the RV of Adam+l2's direction at AdamW's rate",
    "AdamW does better than Adam+l2 because its layers turn alike",
    "ResNet-18 on CIFAR-10 for 200 epochs under cosine, over a grid of lr and decay",
    "here a ResNet-18 of a quarter of the width on Fashion-MNIST trains briefly, over a grid of 5 values each or fewer",
    (_search, _best),
    _judge,
)
