"""`scale-sensitive`: a network without normalization, whose weights are not scale-invariant (the paper's appendix H, VGG-13).

Claim: the radial part of the gradients acts as a decay lambda_u of its own, and with lambda_e = lambda + lambda_u, measured, norm and
rotation in equilibrium are predicted as for scale-invariant weights, within 10 %. Beside it the same network with weight
standardization, where nothing is to be adjusted.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.findings import INSIDE, Findings, Row
from rwsim.experiments.judge import TRANSIENT, judged
from rwsim.experiments.records import Records, Series
from rwsim.experiments.says import analysed, counted
from rwsim.experiments.settled import LATE, row, settled_rows, transient_end
from rwsim.experiments.train import Recipe

_SGDM, _ADAMW = {"lr": 0.02, "momentum": 0.9}, {"lr": 2e-3}


def _config(product: float, steps: int, batch: int, seeds: int, **rest: Any) -> Config:
    """Cases at lr times decay of `product`, under SGDM a tenth of it: its updates last ten steps."""
    sgdm = {**_SGDM, "weight_decay": 0.1 * product / _SGDM["lr"]}
    adamw = {**_ADAMW, "weight_decay": product / _ADAMW["lr"]}
    return Config(
        (
            Case("unnormalized-sgdm", Recipe("vgg", "sgdm", sgdm, steps, batch, **rest)),
            Case("standardized-sgdm", Recipe("vgg", "sgdm", sgdm, steps, batch, standardized=True, **rest)),
            Case("unnormalized-adamw", Recipe("vgg", "adamw", adamw, steps, batch, **rest)),
        ),
        seeds,
    )


def _effective(case: Case, series: Series, k: int, start: int) -> list[Row]:
    """Norm and rotation of a layer that is not scale-invariant against those of the measured lambda_e."""
    found = []
    for name in ("rotation", "norm"):
        values, predicted = (series.values[kind][:, start:, k] for kind in (name, f"effective_{name}"))
        if not values.size:
            found.append(row(case, series, k, f"{name}, lambda_e", TRANSIENT, verdict="undecided", note=LATE))
            continue
        one = judged(values, float(predicted.mean()), TRANSIENT)
        ratio = float(np.nanmean(series.values["lambda_ratio"][:, start:, k]))
        plain = one.measured / float(series.values[f"predicted_{name}"][:, start:, k].mean()) - 1
        note = f"lambda_u/lambda {ratio:+.2f}; off from the unadjusted prediction by {plain:+.1%}"
        measured = {"measured": one.measured, "predicted": float(predicted.mean()), "error": one.error, "interval": one.interval}
        found.append(row(case, series, k, f"{name}, lambda_e", TRANSIENT, verdict=one.verdict, note=note, **measured))
    return found


def _rows(case: Case, series: Series, k: int) -> Iterable[Row]:
    start = transient_end(series, k)
    return settled_rows(case, series, k, start) if series.layers[k].invariant else _effective(case, series, k, start)


def _says(own: list[Row]) -> Iterator[str]:
    for name in dict.fromkeys(one.quantity for one in own):
        yield counted([one for one in own if one.quantity == name], f"{name} as predicted")
    adjusted = [one for one in own if "unadjusted" in one.note]
    if adjusted:
        yield f"Of these {sum(one.verdict == INSIDE for one in adjusted)} of {len(adjusted)} are inside with the measured lambda_e."


def _analyse(config: Config, records: Records) -> Findings:
    return analysed(config, records, _rows, _says)


SCALE_SENSITIVE = Experiment(
    "scale-sensitive",
    "a VGG without normalization, norm and rotation against the measured lambda_e, beside the weight-standardized one; SGDM and AdamW",
    "with the effective decay lambda_e norm and rotation of weights that are not scale-invariant are as predicted",
    "VGG-13 on CIFAR-10 with SGDM, with and without weight standardization, and looked at two weights in the middle of the run",
    {
        "gpu": _config(1e-2, 2000, 128, 3),
        "cpu": _config(1e-2, 600, 32, 3, size={"width": 8}, every=4),
        "smoke": _config(4e-2, 12, 8, 2, size={"width": 2}, every=1),
    },
    _analyse,
)
