"""`imbalance`: neurons that turn slower or faster than others (the paper's appendix J, Figure 11).

Claim: the larger the share of affected neurons, or the factor, the worse, though decay is tuned for each; half of the neurons at a
factor of 3 is about as bad as half the width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rwsim.experiments.compare import Claim, better, par
from rwsim.experiments.study import Arm, Scale, Study, Trained, arm

# Kinds of `rwsim.rotational.set_speeds`; (share that keeps its rate, factor); widths beside the full one. Judged ones first: a run of
# seconds takes no others.
KINDS = ("slower", "both")
SETTINGS = ((0.5, 10.0), (0.9, 10.0), (0.5, 3.0), (0.75, 10.0), (0.5, 2.0))
WIDTHS = (0.5, 0.75)
_JUDGED = (3, 1)
_LR, _TOTALS = 3e-2, (0.3, 30.0)
_WIDTH = 16


def _settings(scale: Scale) -> Iterator[dict[str, Any]]:
    """The facts of everything that is compared."""
    settings, widths = (SETTINGS, WIDTHS) if scale.points > 2 else (SETTINGS[: _JUDGED[0]], WIDTHS[: _JUDGED[1]])
    yield {"kind": "balanced", "share": 1.0, "factor": 1.0, "width": 1.0}
    for kind in KINDS:
        for share, factor in settings:
            yield {"kind": kind, "share": share, "factor": factor, "width": 1.0}
    for width in widths:
        yield {"kind": "narrow", "share": 1.0, "factor": 1.0, "width": width}


def _search(scale: Scale, _: Trained) -> Iterator[Arm]:
    for facts in _settings(scale):
        more: dict[str, Any] = {"rotational": {}, "size": {"width": max(1, round(facts["width"] * scale.resnet18.get("width", _WIDTH)))}}
        if facts["kind"] in KINDS:
            more["imbalance"] = {"share": facts["share"], "factor": facts["factor"], "kind": facts["kind"]}
        for decay in (scale.decay(_LR, total) for total in scale.spaced(*_TOTALS, more=-1)):
            yield arm(scale.recipe("resnet18", "adamw", _LR, decay, **more), 1, False, **facts, decay=decay)


def _best(scale: Scale, found: Trained) -> Iterator[Arm]:
    for facts in _settings(scale):
        best = found.best(found.select(final=False, **facts))
        parity = facts["kind"] == "balanced" or facts["width"] == 0.5 or (facts["share"], facts["factor"]) == (0.5, 3.0)
        yield arm(best.recipe, scale.seeds if parity else scale.few, True, **facts, decay=best.facts["decay"])


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    def score(**facts: Any) -> Any:
        return found.scores(found.one(final=True, **facts))

    even, half, name = score(kind="balanced"), score(kind="narrow", width=0.5), "ResNet-18"
    claims = [better(name, "full width above half the width", even, half, "points")]
    for kind in KINDS:
        most, few, three = (score(kind=kind, share=share, factor=factor) for share, factor in ((0.5, 10.0), (0.9, 10.0), (0.5, 3.0)))
        subject = f"{name}, {kind}"
        claims += [
            better(subject, "balanced above half of the neurons at a factor of 10", even, most, "points"),
            better(subject, "balanced above half of the neurons at a factor of 3", even, three, "points"),
            better(subject, "a tenth of the neurons affected above half (factor 10)", few, most, "points"),
            better(subject, "a factor of 3 above one of 10 (half of the neurons)", three, most, "points"),
            par(subject, "half of the neurons at a factor of 3 like half the width", three, half, "points"),
        ]
    return claims


IMBALANCE = Study(
    "imbalance",
    "a share of the neurons turns slower, or slower and faster, by a factor: RV-AdamW, decay tuned for each; against narrower networks",
    "the more imbalanced the rotation, the lower the accuracy, whatever the decay",
    "ResNet-18 on CIFAR-10 for 200 epochs, batches of 256, lr 0.1, decay tuned for each setting",
    "here one of a quarter of the width on Fashion-MNIST trains briefly, with batches of 128 or fewer and 4 decays or fewer for each",
    (_search, _best),
    _judge,
)
