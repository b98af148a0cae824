"""`dynamics`: norm and rotation at constant learning rate against prediction (the paper's ResNet-50 and GPT2-124M).

Claim: after the predicted transient every scale-invariant layer rotates at the predicted rate, whatever its gradients, and has the
predicted norm; on the way there it follows the predicted path. Layers that are not scale-invariant stand beside them and are not judged.
"""

from collections.abc import Iterator

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.findings import Findings, Row
from rwsim.experiments.gap import gap_rows, gap_says
from rwsim.experiments.records import Records, Series
from rwsim.experiments.says import analysed, counted, shown
from rwsim.experiments.settled import path_rows, settled_rows, transient_end
from rwsim.experiments.train import Recipe

# lr times decay is such that the predicted transient is a small part of the run.
# SGDM's are the paper's of CIFAR-10, and so is the product of the others.
_GPU = Config(
    (
        Case("resnet-sgdm", Recipe("resnet", "sgdm", {"lr": 0.5, "weight_decay": 1e-4, "momentum": 0.9}, 6000, 128)),
        Case("resnet-adamw", Recipe("resnet", "adamw", {"lr": 5e-3, "weight_decay": 0.1}, 6000, 128)),
        Case("resnet-lion", Recipe("resnet", "lion", {"lr": 1e-3, "weight_decay": 0.5}, 6000, 128)),
        Case("gpt-adamw", Recipe("gpt", "adamw", {"lr": 1e-3, "weight_decay": 0.5}, 6000, 32)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", {"lr": 1e-3, "weight_decay": 0.5}, 6000, 32, standardized=True)),
    ),
    seeds=5,
)
_RESNET, _GPT = {"width": 4, "blocks": 1}, {"width": 32, "depth": 2, "heads": 2, "context": 32}
_WIDE, _NARROW = ({"lr": lr, "weight_decay": decay, "betas": (0.9, 0.99)} for lr, decay in ((2e-2, 0.25), (5e-3, 1.0)))
_CPU = Config(
    (
        Case("resnet-sgdm", Recipe("resnet", "sgdm", {"lr": 0.5, "weight_decay": 5e-4, "momentum": 0.9}, 600, 32, _RESNET, every=4)),
        Case("resnet-adamw", Recipe("resnet", "adamw", _WIDE, 600, 32, _RESNET, every=4)),
        Case("resnet-lion", Recipe("resnet", "lion", {"lr": 4e-3, "weight_decay": 1.25}, 600, 32, _RESNET, every=4)),
        Case("gpt-adamw", Recipe("gpt", "adamw", _NARROW, 600, 8, _GPT, every=4)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", _NARROW, 600, 8, _GPT, standardized=True, every=4)),
    )
)
_TINY_RESNET, _TINY_GPT = {"width": 2, "blocks": 1}, {"width": 8, "depth": 1, "heads": 2, "context": 8}
_SMOKE = Config(
    (
        Case("resnet-adamw", Recipe("resnet", "adamw", {"lr": 5e-2, "weight_decay": 1.0}, 12, 8, _TINY_RESNET, every=1)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", {"lr": 2e-2, "weight_decay": 1.0}, 12, 4, _TINY_GPT, standardized=True, every=1)),
    ),
    seeds=2,
)


def _rows(case: Case, series: Series, k: int) -> list[Row]:
    end = transient_end(series, k)
    return [*settled_rows(case, series, k, end), *gap_rows(case, series, k, end), *path_rows(case, series, k, slice(end))]


def _says(own: list[Row]) -> Iterator[str]:
    for quantity, claim in (
        ("rotation", "rotation in equilibrium within 3 %"), ("norm", "norm in equilibrium within 5 %"),
        ("rotation path", "rotation on the way within 10 %"), ("norm path", "norm on the way within 10 %"),
    ):  # fmt: skip
        yield counted([row for row in own if row.quantity == quantity and row.invariant], claim)
    yield gap_says(own)
    yield shown([row for row in own if row.quantity == "rotation" and not row.invariant])


def _analyse(config: Config, records: Records) -> Findings:
    return analysed(config, records, _rows, _says)


DYNAMICS = Experiment(
    "dynamics",
    "norm and rotation at constant learning rate: a ResNet with SGDM, AdamW and Lion, a GPT with and without weight standardization",
    "scale-invariant layers rotate at the predicted rate and have the predicted norm, in equilibrium and on the way there",
    "ResNet-50 on ImageNet-1k and GPT2-124M on OpenWebText, 100,000 steps; lr times decay 1e-5 (SGDM) and 6e-5 (AdamW)",
    {"gpu": _GPU, "cpu": _CPU, "smoke": _SMOKE},
    _analyse,
)
