"""The way to equilibrium: a layer's expected norm and rotation along the learning rates and decays that a run really had.

Rules whose updates have a size of their own take `rwsim.theory.schedule` as it is, from the measured norm at the start and nothing else.
SGD-like rules step the second moments with the measured E||g~||^2 of the time; Adam+l2 takes its mean over the run.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rwsim.errors import RwsimError
from rwsim.probe.predict import Theory
from rwsim.theory.noise import Array, ToySystem
from rwsim.theory.recurrence import recurrence
from rwsim.theory.schedule import expected_path

# Batch of the toy system whose gradients stand for a measured size: their length hardly varies.
_BATCH = 1024
# Starts that agree to as many digits share a path.
_DIGITS = 3

Track = tuple[Array, Array]


class Transients:
    """Expected paths of layers; what is alike is computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, Track] = {}

    def track(self, theory: Theory, hyper: Mapping[str, Any], decay: Array, fan_in: int, start_sq: float, unit_grad_sq: Array) -> Track:
        """Norm and rotation (radians per step) after each step, shape (time,); NaN where they cannot be told.

        Args:
            theory: Of the layer's rule.
            hyper: Name -> value of every step, (time,) or (time, 2).
            decay: lambda or lambda_e of every step.
            fan_in: C.
            start_sq: Mean of ||w||^2 over the layer's neurons before the first step.
            unit_grad_sq: E||g~||^2 of every step; used where the gradient's size matters.
        """
        steps = len(decay)
        nothing = np.full(steps, np.nan)
        if not steps or not 0 < start_sq < math.inf:
            return nothing, nothing
        start = float(f"{start_sq:.{_DIGITS}g}")
        needs = theory.kind in ("linear", "coupled")
        parts = [decay, *(np.asarray(hyper[name]) for name in sorted(hyper) if name in theory.rule.hyper)]
        key = (theory.rule, fan_in, start, *(part.tobytes() for part in parts), unit_grad_sq.tobytes() if needs else b"")
        if key not in self._known:
            try:
                with np.errstate(all="ignore"):
                    self._known[key] = (
                        _linear(theory, hyper, decay, start, unit_grad_sq)
                        if theory.kind == "linear"
                        else _path(theory, hyper, decay, fan_in, start, unit_grad_sq)
                    )
            except RwsimError:
                self._known[key] = nothing, nothing
        return self._known[key]


def _path(theory: Theory, hyper: Mapping[str, Any], decay: Array, fan_in: int, start_sq: float, unit_grad_sq: Array) -> Track:
    # Scale-invariant gradients, which grow as the weights shrink. `ToySystem` has E||g~||^2 = scale_sq (C - 1).
    law, size = ToySystem(np.ones((1, fan_in)), np.ones((1, 1)), _BATCH, 1.0, 1), 1.0
    if theory.kind == "coupled":
        size = float(np.nanmean(unit_grad_sq))
    law = replace(law, loss_scale=math.sqrt(size / (float(law.scale_sq[0, 0]) * (fan_in - 1))))
    given = {**hyper, "weight_decay": np.clip(np.nan_to_num(decay), 0, None)}
    base: dict[str, Any] = {}
    factors: dict[str, Any] = {}
    for name in theory.rule.hyper:
        if name not in given:
            continue
        table = np.asarray(given[name], dtype=float)
        peak = table.max(0)
        base[name] = tuple(peak.tolist()) if table.ndim > 1 else float(peak)
        if (table != peak).any():
            factors[name] = table / np.where(peak == 0, 1, peak)
    path = expected_path(theory.rule(**base), law, len(decay), factors, start_sq / fan_in)
    return path.norm, path.rotation


def _linear(theory: Theory, hyper: Mapping[str, Any], decay: Array, start_sq: float, unit_grad_sq: Array) -> Track:
    """Second moments of (w, buffers), summed over coordinates, under E||g||^2 = E||g~||^2 / E||w||^2 of the time."""
    rec = recurrence(theory.rule)
    step, system = rec.plain.of(False), rec.system.of(False)
    n = rec.states
    columns = np.concatenate(np.broadcast_arrays(*theory.flat(hyper, decay), np.zeros((len(decay), 1)))[:-1], axis=1)
    p: Any = [start_sq if pair == (0, 0) else 0.0 for pair in rec.order]
    norm_sq, cosine = np.empty((2, len(decay)))
    with_w = [rec.order.index((0, j)) for j in range(n)]
    for t, (values, size) in enumerate(zip(columns.tolist(), unit_grad_sq.tolist(), strict=True)):
        row = system(*values, t + 1, 1.0, 0.0, 0.0)[:n]
        lagged = sum(a * p[i] for a, i in zip(row, with_w, strict=True))
        new = step(*values, t + 1, 1.0, size / p[0], 0.0, 0.0, *p)
        norm_sq[t], cosine[t] = new[0], lagged / math.sqrt(p[0] * new[0]) if new[0] > 0 else math.nan
        p = new
    return np.sqrt(norm_sq), np.arccos(np.clip(cosine, -1, 1))
