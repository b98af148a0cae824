"""`tradeoff`: learning rate against weight decay at a constant product (the paper's Figure 4 and, for GPT, appendix J).

Claim: along such a line a rotational variant turns alike, so that the learning rate only sets how fast gains and biases move: at a small
one it does as well as with frozen gains and biases, at a large one worse than at its best. The baseline is changed by transients as well:
at a large learning rate it turns too fast at first, at a small one too slowly, and on text it hangs on the learning rate more than the
variant.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rwsim.experiments.compare import Claim, better, par
from rwsim.experiments.study import Arm, Scale, Study, Trained, arm, unit
from rwsim.theory.noise import Array

# Network, sum of lr times decay over a run at the peak, least and largest learning rate, gains for the variant.
TASKS = {"images": ("resnet", 10.0, (3e-4, 3e-1), False), "text": ("gpt", 5.0, (1e-4, 3e-2), "gain")}
# Where the start of a run is looked at: after the warmup.
_EARLY = (0.05, 0.15)


def _arms(scale: Scale, _: Trained) -> Iterator[Arm]:
    for task, (network, total, (low, high), gain) in TASKS.items():
        lrs = scale.spaced(low, high, more=2)
        for kind, some, more in (
            ("baseline", lrs, {}),
            ("RV", lrs, {"rotational": {}, "standardized": gain}),
            ("RV, frozen", lrs[len(lrs) // 2 : len(lrs) // 2 + 1], {"rotational": {}, "standardized": gain, "frozen": True}),
        ):
            for lr in some:
                decay = scale.decay(lr, total, network)
                parity = kind == "RV, frozen" or (kind == "RV" and lr == lrs[0])
                recipe = scale.recipe(network, "adamw", lr, decay, **more)
                yield arm(recipe, scale.seeds if parity else scale.few, True, task=task, kind=kind, lr=lr, decay=decay)


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    claims = []
    for task in TASKS:
        baseline, variant = (found.select(task=task, kind=kind) for kind in ("baseline", "RV"))
        frozen, best, of = found.one(task=task, kind="RV, frozen"), found.best(variant), unit(baseline[0])
        score = found.scores
        claims += [
            par(task, f"the RV at lr {_lr(variant[0])} does as with frozen gains and biases", score(variant[0]), score(frozen), of),
            better(task, f"the RV at its best, lr {_lr(best)}, above that at lr {_lr(variant[-1])}", score(best), score(variant[-1]), of),
        ]
        for lowest, highest, claim in (
            (variant[-1], baseline[-1], f"at lr {_lr(baseline[-1])} the baseline turns faster at first than the RV (log)"),
            (baseline[0], variant[0], f"at lr {_lr(baseline[0])} the baseline turns slower at first than the RV (log)"),
        ):
            claims.append(better(task, claim, _early(found, highest), _early(found, lowest)))
        if task == "text":
            lost = [_lost(found, arms) for arms in (variant, baseline)]
            claims.append(better(task, "the RV loses less than the baseline away from its best lr (mean over lrs)", -lost[0], -lost[1], of))
    return claims


def _lr(one: Arm) -> str:
    return f"{one.facts['lr']:g}"


def _early(found: Trained, one: Arm) -> Array:
    """Logarithm of the rotation soon after the warmup, shape (seed,)."""
    step = found.runs[one.name][0].step / one.recipe.steps
    at = (step > _EARLY[0]) & (step <= _EARLY[1])
    return np.log(found.path(one)[:, at if at.any() else slice(1)].mean(1))


def _lost(found: Trained, arms: Sequence[Arm]) -> Array:
    """Score at the best learning rate less the mean over all, shape (seed,)."""
    count = min(one.seeds for one in arms)
    scores = np.array([found.scores(one)[:count] for one in arms])
    return found.scores(found.best(arms))[:count] - scores.mean(0)


TRADEOFF = Study(
    "tradeoff",
    "learning rate against decay at a constant product: baseline, rotational variant, and with frozen gains and biases",
    "at a constant product the learning rate acts through gains, biases and transients, and the variant has no transients",
    "ResNet-20 on CIFAR-10 at lr times decay 5e-4 and GPT2-124M on Wikitext at 2.5e-3, AdamW, warmup and cosine",
    "here a ResNet-20 on Fashion-MNIST and a small GPT on bytes of a text train briefly, at larger products for the "
    "equilibrium to be reached",
    (_arms,),
    _judge,
)
