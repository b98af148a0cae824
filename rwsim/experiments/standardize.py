"""`standardize`: weight standardization on top of layer normalization (the paper's Figure 7).

Claim: layer normalization leaves single neurons scale-sensitive, so that they turn at different rates. Weight standardization balances
them, as a rotational variant does, and both do better than plain training.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rwsim.experiments.compare import Claim, better
from rwsim.experiments.study import Arm, Scale, Study, Trained, arm
from rwsim.theory.noise import Array

_LRS, _MIDDLE, _TOTAL = (0.03, 3.0), 0.3, 10.0
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "standardized": {"standardized": True}, "RV": {"rotational": {}}}
_LATE = 0.5


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    decay = scale.decay(_MIDDLE, _TOTAL, optimizer="sgdm")
    for kind, more in KINDS.items():
        for lr in scale.spaced(*_LRS):
            recipe = scale.recipe("resnet18", "sgdm", lr, decay, size={"norm": "layer"}, **more)
            yield arm(recipe, 2, False, kind=kind, lr=lr)


def _best(scale: Scale, found: Trained) -> Iterator[Arm]:
    for kind in KINDS:
        best = found.best(found.select(kind=kind))
        yield arm(best.recipe, scale.seeds, True, kind=kind, lr=best.facts["lr"])


def spread(found: Trained, one: Arm) -> Array:
    """Standard deviation over neurons of their log rotation in the second half, mean over convolutions, shape (seed,)."""
    convs = [k for k, layer in enumerate(found.runs[one.name][0].layers) if layer.name != "head"]
    return np.nanmean(found.mean(one, "spread", _LATE)[:, convs], axis=1)


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    plain, standardized, variant = (found.one(final=True, kind=kind) for kind in KINDS)
    score, name = found.scores, "ResNet-18, layer norm"
    said = "standard deviation over neurons of the log rotation"
    return [
        better(name, "standardized above plain", score(standardized), score(plain), "points"),
        better(name, "the RV above plain", score(variant), score(plain), "points"),
        better(
            name,
            "neurons turn less alike in plain training than standardized",
            spread(found, plain),
            spread(found, standardized),
            note=said,
        ),
        better(name, "neurons turn less alike in plain training than in the RV", spread(found, plain), spread(found, variant), note=said),
    ]


STANDARDIZE = Study(
    "standardize",
    "a layer-normalized ResNet-18, plain, with weight standardization, and as a rotational variant, over learning rates",
    "weight standardization and the rotational variant balance the neurons of a layer-normalized network and train it better",
    "a layer-normalized ResNet-18 on CIFAR-100 for 200 epochs, decay 5e-4, batches of 256, warmup and cosine",
    "here one of a quarter of the width on Fashion-MNIST trains briefly, with SGDM, a larger decay and batches of 128 or fewer",
    (_search, _best),
    _judge,
)
