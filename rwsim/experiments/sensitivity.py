"""`sensitivity`: what the options of a rotational variant matter (the paper's appendix J, Figure 12).

Claim: they hardly do: the decay factor beta of the tracked update size, taking the mean out of the weights, one rate a neuron or
one a layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rwsim.experiments.compare import Claim, par
from rwsim.experiments.study import Arm, Scale, Study, Trained, arm, unit

DEFAULT = "default"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "beta 0": {"update_norm_decay_factor": 0.0},
    "beta 0.5": {"update_norm_decay_factor": 0.5},
    "beta 0.99": {"update_norm_decay_factor": 0.99},
    "no centering": {"zero_mean": False},
    "one rate a layer": {"per_neuron": False},
}
# Network, optimizer, lr, sums of lr times decay over a run: tuned on images, as in the paper; gains.
TASKS = {"images, SGDM": ("resnet18", "sgdm", 0.5, (0.4, 1.3, 4.0), False), "text, AdamW": ("gpt", "adamw", 2e-3, (5.0,), "gain")}


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    for task, (network, optimizer, lr, totals, gain) in TASKS.items():
        for name, options in VARIANTS.items():
            for total in totals if len(totals) > 1 else ():
                decay = scale.decay(lr, total, network, optimizer)
                recipe = scale.recipe(network, optimizer, lr, decay, rotational=options, standardized=gain)
                yield arm(recipe, 1, False, task=task, kind=name, decay=decay)


def _best(scale: Scale, found: Trained) -> Iterator[Arm]:
    for task, (network, optimizer, lr, totals, gain) in TASKS.items():
        for name, options in VARIANTS.items():
            if len(totals) > 1:
                recipe = found.best(found.select(task=task, kind=name)).recipe
            else:
                decay = scale.decay(lr, totals[0], network, optimizer)
                recipe = scale.recipe(network, optimizer, lr, decay, rotational=options, standardized=gain)
            yield arm(recipe, scale.seeds, True, task=task, kind=name, decay=recipe.hyper["weight_decay"])


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    claims = []
    for task in TASKS:
        default = found.one(final=True, task=task, kind=DEFAULT)
        for name in VARIANTS:
            if name != DEFAULT:
                one = found.one(final=True, task=task, kind=name)
                claims.append(par(task, f"{name} like the default", found.scores(one), found.scores(default), unit(one)))
    return claims


SENSITIVITY = Study(
    "sensitivity",
    "options of the rotational variants: decay factor, centering, one rate a neuron or a layer; images and text",
    "the options of the rotational variants hardly matter",
    "ResNet-18 on CIFAR-10 with RV-SGDM, decay tuned for each option, and GPT2-124M on Wikitext with RV-AdamW",
    "here a ResNet-18 of a quarter of the width on Fashion-MNIST and a small GPT on bytes of a text train briefly; beta is "
    "0.9 by default (appendix I), 0.99 in the paper's runs",
    (_search, _best),
    _judge,
)
