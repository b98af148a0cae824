"""`assumptions`: what of the random walk holds in real networks under AdamW (the paper's appendix G).

The analysis takes gradients that are orthogonal to the weights, uncorrelated with earlier ones, and as large as the second moment says. An
assumption holds for a layer if what it gets wrong moves the prediction by no more than the prediction's own band: 3 % of the rotation for a
radial gradient (sqrt(lambda_e/lambda)), 5 % of the norm for the size of an update and of a scaled gradient. Beside them stand norm and
rotation, judged where the layer is scale-invariant, and what is left of their error once the departures are put in.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.findings import Findings, Row
from rwsim.experiments.judge import NORM, ROTATION, judged
from rwsim.experiments.records import Records, Series
from rwsim.experiments.says import analysed, counted, shown
from rwsim.experiments.settled import LATE, departure, row, settled_rows, transient_end
from rwsim.experiments.train import Recipe

_GPU = Config(
    (
        Case("normalized", Recipe("resnet", "adamw", {"lr": 5e-3, "weight_decay": 0.1}, 4000, 128)),
        Case("unnormalized", Recipe("vgg", "adamw", {"lr": 2e-3, "weight_decay": 0.25}, 4000, 128)),
        Case("transformer", Recipe("gpt", "adamw", {"lr": 1e-3, "weight_decay": 0.5}, 4000, 32)),
    ),
    seeds=5,
)


def _small(steps: int, batches: tuple[int, int], product: float, sizes: tuple[Mapping[str, int], ...], every: int) -> tuple[Case, ...]:
    """Networks of these sizes, images and text in batches of their own, at one product of lr and decay."""
    normalized, unnormalized, transformer = (
        {"lr": lr, "weight_decay": float(f"{product / lr:.4g}"), "betas": (0.9, 0.99)} for lr in (2e-2, 1.2e-2, 5e-3)
    )
    images, text = batches
    return (
        Case("normalized", Recipe("resnet", "adamw", normalized, steps, images, sizes[0], every=every)),
        Case("unnormalized", Recipe("vgg", "adamw", unnormalized, steps, images, sizes[1], every=every)),
        Case("transformer", Recipe("gpt", "adamw", transformer, steps, text, sizes[2], every=every)),
    )


_CPU_SIZES = ({"width": 4, "blocks": 1}, {"width": 8}, {"width": 32, "depth": 2, "heads": 2, "context": 32})
_SMOKE_SIZES = ({"width": 2, "blocks": 1}, {"width": 2}, {"width": 8, "depth": 1, "heads": 2, "context": 8})
_CPU = Config(_small(600, (32, 8), 5e-3, _CPU_SIZES, every=4))
_SMOKE = Config(_small(12, (8, 4), 4e-2, _SMOKE_SIZES, every=1), seeds=2)
# Assumption -> quantity of the records, band, what it does to the prediction as a factor.
_ASSUMED = {
    "orthogonal gradients": ("lambda_ratio", ROTATION, lambda x: np.sqrt(np.maximum(1 + x, 0))),
    "uncorrelated gradients": ("update_ratio", NORM, lambda x: x),
    "scaled gradient": ("scaled_grad", NORM, lambda x: x),
}


def _assumed(case: Case, series: Series, k: int, start: int) -> list[Row]:
    found = []
    for name, (quantity, band, effect) in _ASSUMED.items():
        values = departure(series, quantity, k, start)
        one = judged(effect(values), 1.0, band)
        note = f"{quantity} {values.mean():.4g}" if values.size else LATE
        measured = {"measured": one.measured, "predicted": 1.0, "error": one.error, "interval": one.interval}
        found.append(row(case, series, k, name, band, verdict=one.verdict, note=note, **measured))
    return found


def _rows(case: Case, series: Series, k: int) -> list[Row]:
    start = transient_end(series, k)
    return [*_assumed(case, series, k, start), *settled_rows(case, series, k, start)]


def _says(own: list[Row]) -> Iterator[str]:
    for quantity, claim in (
        ("orthogonal gradients", "gradients orthogonal to the weights (3 % of the rotation)"),
        ("uncorrelated gradients", "updates of the size of uncorrelated gradients' (5 % of the norm)"),
        ("scaled gradient", "scaled gradients of norm sqrt(C) (5 %)"),
    ):  # fmt: skip
        yield counted([one for one in own if one.quantity == quantity], claim)
    for quantity, claim in (("rotation", "rotation within 3 %"), ("norm", "norm within 5 %")):
        yield counted([one for one in own if one.quantity == quantity and one.invariant], claim)
    yield shown([one for one in own if one.quantity == "rotation" and not one.invariant])


def _analyse(config: Config, records: Records) -> Findings:
    return analysed(config, records, _rows, _says)


ASSUMPTIONS = Experiment(
    "assumptions",
    "what of the random walk holds: angles of gradient, weights and momentum, scaled gradients and radial parts in three kinds of network",
    "gradients are orthogonal to the weights, uncorrelated in time and as large as their second moment, as far as norm and rotation tell",
    "ResNet-20 on CIFAR-10, with and without batch norm (lr 0.01 and 0.002, decay 0.01), and GPT2-124M on Wikitext (lr 5e-4, decay 0.5)",
    {"gpu": _GPU, "cpu": _CPU, "smoke": _SMOKE},
    _analyse,
)
