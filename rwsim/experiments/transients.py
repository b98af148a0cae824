"""`transients`: norm and rotation under warmup and cosine decay against the planned path (the paper's lr and decay of one product).

Claim: pairs of one product of lr and decay have one equilibrium rotation and norms in proportion to lr; how far from it they start decides
whether they rotate too fast or too slowly at first, and late in the schedule norms cannot follow. `rwsim.plan` says so beforehand: norm and
rotation follow the path that hyperparameters, schedule and the norm at the start give, within 10 %.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.findings import Findings, Row
from rwsim.experiments.records import Records, Series
from rwsim.experiments.says import analysed, counted
from rwsim.experiments.settled import path_rows
from rwsim.experiments.train import Recipe

_SCHEDULE = "warmup0.025+cosine"
# Below this share of the peak the learning rate moves hardly anything.
_LIVE = 0.01


def _cases(product: float, lrs: tuple[float, ...], steps: int, batch: int, **rest: Any) -> tuple[Case, ...]:
    found = []
    for lr in lrs:
        hyper = {"lr": lr, "weight_decay": float(f"{product / lr:.6g}")}
        found.append(Case(f"lr-{lr:g}", Recipe("resnet", "adamw", hyper, steps, batch, schedule=_SCHEDULE, **rest)))
    return tuple(found)


_GPU = Config(_cases(2e-3, (1e-3, 1e-2, 1e-1), steps=6000, batch=128), seeds=5)
_CPU = Config(_cases(1e-2, (2e-3, 2e-2, 2e-1), steps=600, batch=32, size={"width": 4, "blocks": 1}, every=4))
_SMOKE = Config(_cases(5e-2, (1e-2, 5e-2, 2e-1), steps=12, batch=8, size={"width": 2, "blocks": 1}, every=1), seeds=2)


def live(series: Series) -> slice:
    """Windows in which the learning rate says what is intended: from the first to the last at 1 % of its peak."""
    lr = series.values["lr"][0, :, 0]
    on = [i for i, value in enumerate(lr) if value >= _LIVE * lr.max()]
    return slice(on[0], on[-1] + 1)


def _rows(case: Case, series: Series, k: int) -> Iterable[Row]:
    return path_rows(case, series, k, live(series))


def _says(own: list[Row]) -> Iterator[str]:
    for quantity, claim in (
        ("rotation path", "rotation within 10 % of the plan throughout"),
        ("norm path", "norm within 10 % of the plan throughout"),
    ):
        yield counted([row for row in own if row.quantity == quantity and row.invariant], claim)


def _analyse(config: Config, records: Records) -> Findings:
    return analysed(config, records, _rows, _says)


TRANSIENTS = Experiment(
    "transients",
    "three pairs of learning rate and decay with one product, under warmup and cosine: a ResNet with AdamW against the planned path",
    "scale-invariant layers follow the planned norm and rotation along the schedule",
    "ResNet-20 on CIFAR-10 with AdamW, lr 1e-4, 8.3e-3 and 0.3 at lr times decay 5e-4, 200 epochs (78,000 steps) with 5 of warmup",
    {"gpu": _GPU, "cpu": _CPU, "smoke": _SMOKE},
    _analyse,
)
