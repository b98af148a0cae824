"""Layers against the predicted path: on the way to equilibrium and in it. The analysis of `dynamics`."""

import math
from collections.abc import Iterable

import numpy as np

from rwsim.errors import UnsupportedRule
from rwsim.experiments.case import Case, Config
from rwsim.experiments.findings import INSIDE, OUTSIDE, SHOWN, UNDECIDED, Findings, Row, percent
from rwsim.experiments.judge import NORM, ROTATION, TRANSIENT, judged, judged_path
from rwsim.experiments.records import Records, Series
from rwsim.optimizers import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.noise import Array
from rwsim.theory.rotation import norm_of, norm_sq_form, rotation_of, relative_sq_form

# The predicted transient is over where norm and rotation are this close to where they end.
_REACHED = 0.01
# Windows in equilibrium that a mean needs.
_FEW = 10
# A departure from the random walk that is worth naming.
_WORTH = 0.02
BANDS = {"norm": NORM, "rotation": ROTATION}


def analyse_settled(config: Config, records: Records) -> Findings:
    """A row for norm and rotation of every layer, in equilibrium and before it, and what that comes to."""
    rows: list[Row] = []
    paths = {}
    for case in config.cases:
        series = records[case.name]
        ends = []
        for k, layer in enumerate(series.layers):
            ends.append(transient_end(series, k))
            rows += [*settled_rows(case, series, k, ends[-1]), *transient_rows(case, series, k, ends[-1])]
        paths[case.name, ""] = {"reached": float(series.step[min(max(ends), len(series.step) - 1)])}
    says = [_said(case, records[case.name], [row for row in rows if row.case == case.name]) for case in config.cases]
    return Findings(tuple(rows), tuple(says), paths)


def transient_end(series: Series, layer: int) -> int:
    """First window in which the predicted transient is over, for good; the number of windows where it is not."""
    found = 0
    for name in ("path_norm", "path_rotation"):
        path = series.values[name][:, :, layer].mean(0)
        if not np.isfinite(path).all():
            return len(path)
        # What is left of an exponential approach is not seen from its own end: half of the run has to be flat.
        off = np.abs(path / path[-1] - 1) > _REACHED
        found = max(found, int(np.flatnonzero(off)[-1]) + 1 if off.any() else 0)
    return found if found <= len(series.step) // 2 else len(series.step)


def table_1(rule: UpdateRule, fan_in: int) -> dict[str, float]:
    """Norm and rotation by the paper's Table 1; NaN where the norm depends on the gradients."""
    values = {symbol: value for symbol, value in zip(sym.flat(sym.hyper_symbols(type(rule))), sym.flat(rule.values), strict=True)} | {sym.C: fan_in}
    relative = relative_sq_form(type(rule))
    rotation = rotation_of(rule) if relative is None else math.sqrt(float(relative.subs(values)))
    try:
        norm_sq = norm_sq_form(type(rule))
        norm = norm_of(rule, fan_in) if norm_sq is None else math.sqrt(float(norm_sq.subs(values)))
    except UnsupportedRule:
        norm = math.nan
    return {"norm": norm, "rotation": rotation}


def settled_rows(case: Case, series: Series, k: int, start: int) -> Iterable[Row]:
    """Time-averaged norm and rotation of a layer after its predicted transient."""
    layer, paper = series.layers[k], table_1(case.recipe.rule(), series.layers[k].fan_in)
    for name, band in BANDS.items():
        values, path = (series.values[kind][:, start:, k] for kind in (name, f"path_{name}"))
        if values.shape[1] < _FEW:
            yield Row(case.name, layer.name, layer.fan_in, layer.invariant, name, *[math.nan] * 4, band, _verdict(layer.invariant, UNDECIDED),
                      note="no equilibrium within the run")  # fmt: skip
            continue
        predicted = float(path.mean())
        found = judged(values, predicted, band)
        verdict = _verdict(layer.invariant, found.verdict)
        # The corrected prediction is of the equilibrium; a mean angle is less than that by what the path knows of it.
        corrected = float((series.values[f"corrected_{name}"] / series.values[f"predicted_{name}"])[:, start:, k].mean()) * predicted
        note = "" if found.verdict == INSIDE else _note(series, k, start, found.measured / corrected - 1)
        yield Row(
            case.name, layer.name, layer.fan_in, layer.invariant, name, found.measured, predicted, found.error, found.interval, band, verdict,
            found.measured / paper[name] - 1, found.measured / corrected - 1, note,
        )  # fmt: skip


def transient_rows(case: Case, series: Series, k: int, end: int) -> Iterable[Row]:
    """Norm and rotation of a layer on its way, window by window."""
    layer = series.layers[k]
    for name in BANDS:
        if not end:
            continue
        found = judged_path(series.values[name][:, :end, k], series.values[f"path_{name}"][:, :end, k].mean(0), TRANSIENT)
        verdict = _verdict(layer.invariant, found.verdict)
        yield Row(case.name, layer.name, layer.fan_in, layer.invariant, f"{name} transient", math.nan, math.nan, found.error, found.interval, TRANSIENT, verdict)


def _verdict(invariant: bool, verdict: str) -> str:
    return verdict if invariant else SHOWN


def departures(series: Series, k: int, start: int) -> dict[str, float]:
    """What a layer's gradients had in equilibrium that a random walk's have not, each 0 for a random walk."""

    def mean(name: str) -> float:
        return float(_finite(series.values[name][:, start:, k]).mean())

    found = {
        "lambda_u/lambda": mean("lambda_ratio"),
        "RMS update over that of uncorrelated gradients - 1": mean("rms_update") / mean("predicted_rms_update") - 1,
        "||g/sqrt v||/sqrt C - 1": mean("scaled_grad") - 1,
        "cos of momentum and gradient": float(np.mean(np.cos(_finite(series.values["momentum_grad_angle"][:, start:, k])))),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)] if np.isfinite(values).any() else np.array([math.nan])


def _note(series: Series, k: int, start: int, left: float) -> str:
    """What departs from a random walk, and whether putting it in explains the gap."""
    named = [f"{name} {value:+.3f}" for name, value in departures(series, k, start).items() if abs(value) > _WORTH]
    said = "corrected within 3 %" if abs(left) <= ROTATION else f"corrected by what was measured it is still {percent(left)} off"
    return f"{said}; departs: {', '.join(named) or 'nothing measured by more than 0.02'}"


def _said(case: Case, series: Series, rows: list[Row]) -> str:
    """A paragraph on a case."""
    recipe = case.recipe
    invariant = [layer for layer in series.layers if layer.invariant]
    parts = [f"**{case.name}** ({recipe.optimizer}, {', '.join(f'{k} {v}' for k, v in recipe.hyper.items())}; {recipe.steps:,} steps of {recipe.batch}, "
             f"{len(series.seeds)} seeds)."]  # fmt: skip
    diverged = [f"seed {seed} diverged at step {run['diverged']}" for seed, run in zip(series.seeds, series.runs, strict=True) if "diverged" in run]
    if diverged:
        parts.append(f"{'; '.join(diverged)}: nothing is decided.")
    for quantity, claim in (("rotation", "rotation within 3 %"), ("norm", "norm within 5 %"), ("rotation transient", "rotation on the way within 10 %"),
                            ("norm transient", "norm on the way within 10 %")):  # fmt: skip
        judged_rows = [row for row in rows if row.quantity == quantity and row.invariant]
        if not judged_rows:
            continue
        count = {verdict: sum(row.verdict == verdict for row in judged_rows) for verdict in (INSIDE, OUTSIDE, UNDECIDED)}
        known = [row for row in judged_rows if math.isfinite(row.error)]
        worst = max(known, key=lambda row: abs(row.error), default=None)
        text = f"Of {len(judged_rows)} scale-invariant layers {count[INSIDE]} have their {claim}, {count[OUTSIDE]} have not, {count[UNDECIDED]} are undecided"
        text += f"; the furthest off is {worst.layer}, {percent(worst.error)} ± {percent(worst.interval, '')}." if worst is not None else "."
        outside = [row for row in known if row.verdict != INSIDE and math.isfinite(row.corrected)]
        if outside:
            mended = sum(abs(row.corrected) <= ROTATION for row in outside)
            text += f" With what was measured of their gradients {mended} of the other {len(outside)} come within 3 %."
        parts.append(text)
    if not invariant:
        parts.append("No layer is scale-invariant: none is judged.")
    others = [row for row in rows if not row.invariant and row.quantity == "rotation" and math.isfinite(row.error)]
    if others:
        worst = max(others, key=lambda row: abs(row.error))
        near = sum(abs(row.error) <= ROTATION for row in others)
        mended = sum(abs(row.corrected) <= ROTATION for row in others)
        parts.append(f"Of {len(others)} layers that are not scale-invariant {near} rotate within 3 % of the prediction for those that are, {mended} within 3 % of the "
                     f"corrected one; the furthest off is {worst.layer}, {percent(worst.error)}.")  # fmt: skip
    losses = [f"{run['held_out_loss']:.3f}" for run in series.runs if "held_out_loss" in run]
    accuracies = [f"{run['accuracy']:.1%}" for run in series.runs if "accuracy" in run]
    if losses:
        parts.append(f"Held-out loss {', '.join(losses)}; accuracy {', '.join(accuracies)}.")
    return " ".join(parts)
