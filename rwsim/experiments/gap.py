"""What the rotation of a settled layer is off by, as a product of factors: which assumption of the random walk failed, and by how much."""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.stats import t as student_t

from rwsim.experiments.case import Case
from rwsim.experiments.findings import Row, percent
from rwsim.experiments.records import Series
from rwsim.experiments.settled import row
from rwsim.probe.factors import FACTORS, Turned, factors
from rwsim.probe.predict import Theory
from rwsim.theory.noise import Array

# A factor's quantity begins with this.
OF_ROTATION = "rotation x "
# Departures of the median that are worth naming.
_WORTH = 0.01
_NEEDED = ("ln_norm", "idle", "bursts", "neurons")


def gap_rows(case: Case, series: Series, k: int, start: int) -> Iterator[Row]:
    """A row for each of `FACTORS` of a scale-invariant layer from window `start` on: their product is measured over predicted.

    Records, or cases, of before these were measured have none, nor have Adam+l2 and layers that are not settled.
    """
    theory = Theory(type(case.recipe.rule()))
    values = {name: series.values[name][:, start:, k] for name in series.values}
    if not set(_NEEDED) <= values.keys() or theory.kind == "coupled" or not series.layers[k].invariant or len(series.step) - start < 2:
        return
    if np.isnan(values["ln_norm"]).all():
        return
    hyper = {name: np.asarray(value, dtype=float)[None] for name, value in case.recipe.hyper.items()}
    taken, passed = (float(value.item()) for value in (theory.decay(hyper), theory.passed(hyper)))
    span = float(series.step[-1] - series.step[start])

    def of(some: slice) -> dict[str, float]:
        means = {name: float(value[some].mean()) for name, value in values.items()}
        grown = values["ln_norm"][some].mean(0)
        turned = Turned(
            means["rotation"], means["rotation_sq"], means["idle"], means["lambda_ratio"], 2 * float(grown[-1] - grown[0]) / span,
            means["bursts"], means["neurons"],
        )  # fmt: skip
        found = factors(turned, means["predicted_rotation"], taken, passed)
        # The path itself may be off its equilibrium: that growth was predicted.
        return found | {"growth": found["growth"] * means["predicted_rotation"] / means["path_rotation"]}

    seeds = len(series.seeds)
    each = [of(slice(s, s + 1)) for s in range(seeds)]
    spread = student_t.isf(0.025, seeds - 1) / np.sqrt(seeds) if seeds > 1 else np.nan
    for name, value in of(slice(None)).items():
        interval = float(np.std([one[name] for one in each], ddof=1) * spread) if seeds > 1 else np.nan
        yield row(case, series, k, OF_ROTATION + name, np.nan, measured=value, predicted=1.0, error=value - 1, interval=interval,
                  note="" if abs(value - 1) <= _WORTH else FACTORS[name])  # fmt: skip


def gap_says(rows: Sequence[Row]) -> str:
    """Which assumptions make layers turn other than predicted, by the medians of their factors."""
    known = {name: _errors(rows, OF_ROTATION + name) for name in FACTORS}
    layers = sorted(set.intersection(*(set(errors) for errors in known.values())))
    if not layers:
        return ""
    turned = _errors(rows, "rotation")
    off = float(np.median([turned[layer] for layer in layers]))
    parts = [part for name in FACTORS if (part := _part(name, np.array([known[name][layer] for layer in layers])))]
    return (
        f"What rotations are off by, {percent(off)} in the median of {len(layers)} layers, is the product of factors; in the median "
        f"{'; '.join(parts) or 'none is off by more than 1 %, and nowhere by more than 3 %'}."
    )


def _errors(rows: Sequence[Row], quantity: str) -> dict[str, float]:
    return {one.layer: one.error for one in rows if one.quantity == quantity and one.invariant and np.isfinite(one.error)}


def _part(name: str, errors: Array) -> str:
    middle, worst = float(np.median(errors)), float(errors[np.abs(errors).argmax()])
    if abs(middle) <= _WORTH and abs(worst) <= 3 * _WORTH:
        return ""
    return f"{name} {percent(middle)} (at most {percent(worst)}): that {FACTORS[name]} does not hold"
