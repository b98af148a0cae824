"""One point of the page, walked: bounded in size, with error bars, and the full prediction beside it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rwsim.errors import InvalidArgument, NoEquilibrium, WalkDiverged
from rwsim.explore.setting import NEURONS, Setting
from rwsim.stats.mcse import estimate
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.schedule import expected_path
from rwsim.theory.transient import time_constants
from rwsim.walk import blocked
from rwsim.walk.job import Job
from rwsim.walk.measure import QUANTITIES
from rwsim.walk.simulate import single_threaded
from rwsim.walk.system import Layer

# Neurons times fan-in times steps: some ten seconds of one core. Fewer neurons than this have no error bars.
LARGEST, FEWEST = 400_000_000, 16
# Windows that are recorded, and points that are drawn.
_WINDOWS, _POINTS = 400, 28
# The walk counts as in equilibrium from where its expected norm stays this close to its end, if that changed by less than the second
# number in the last time constant, and is this close to the exact form (which lacks what fluctuates).
_NEAR, _STEADY, _SAME = 0.01, 0.005, 0.1
_MIN_WINDOWS = 16


def neurons_for(setting: Setting) -> int:
    """As many neurons as the bound on the size leaves, 128 at most.

    Raises:
        InvalidArgument: Fewer than 16.
    """
    size = setting.fan_in * setting.steps
    if FEWEST * size > LARGEST:
        told = f"{setting.fan_in:,} x {setting.steps:,}"
        raise InvalidArgument("steps", f"times fan_in must be at most {LARGEST // FEWEST:,} here", told, "ask for fewer steps")
    return min(NEURONS, LARGEST // size)


def simulate(setting: Setting, seed: int = 0, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Walk the toy system at a setting; gammas are one, as in the page's predictions.

    Args:
        setting: A checked one.
        seed: Of the walk.
        progress: Called now and then with the number of steps done; may raise.

    Returns:
        ``points``: step, norm, norm_error, rotation, rotation_error, over narrow windows, errors being standard errors over
        independent neurons; ``equilibrium``: per quantity the mean and its standard error, or None, and ``reason`` why;
        ``full``: step, norm, rotation as `rwsim.plan` expects them; ``neurons``, ``stopped``: a message if the walk diverged.

    Raises:
        InvalidArgument: A walk that is too large.
    """
    count = neurons_for(setting)
    # The page's K sets the gradients' size whatever the number of neurons that are walked.
    layer = Layer.draw(setting.fan_in, count, setting.batch, setting.loss_scale * count / NEURONS, "uniform")
    window = max(1, setting.steps // _WINDOWS)
    job = Job((setting.rule,), layer, setting.steps, schedule=setting.schedule, seed=seed, window=window)
    start = layer.start(1, 1, torch.Generator().manual_seed(seed), job.dtype) * math.sqrt(setting.start_sq / layer.start_sq)
    stopped = ""
    try:
        with single_threaded():
            # In this process: a server's threads must not be forked.
            walk = blocked.walk(job, torch.device("cpu"), start=start, processes=0, progress=progress)
    except WalkDiverged as error:
        walk, stopped = error.walk, f"the weights blow up at step {error.step:,}"
    law = layer.law("marginal").first
    path = expected_path(setting.rule, law, setting.steps, setting.schedule, setting.start_sq)
    ends = np.cumsum(walk.lengths)
    chosen = np.unique(np.geomspace(1, max(1, len(ends)), _POINTS).round().astype(int)) - 1 if len(ends) else np.zeros(0, int)
    # Half of the points even in time: those of a long run's late changes.
    even = np.linspace(0, len(ends) - 1, _POINTS // 2).round().astype(int) if len(ends) else np.zeros(0, int)
    chosen = np.union1d(chosen, even)
    norm_sq, angle = (x[:, 0][chosen] for x in (walk.norm_sq, walk.angle))
    norm = np.sqrt(norm_sq.mean(-1))
    points = {
        "step": ends[chosen] - (walk.lengths[chosen] - 1) / 2,
        "norm": norm,
        "norm_error": _error(norm_sq) / (2 * norm),
        "rotation": angle.mean(-1),
        "rotation_error": _error(angle),
    }
    at = np.unique(np.concatenate([np.linspace(0, setting.steps - 1, 200), np.geomspace(1, setting.steps, 100) - 1]).round().astype(int))
    full = {"step": at + 1, "norm": path.norm[at], "rotation": path.rotation[at]}
    found, reason = (None, stopped) if stopped else _equilibrium(setting, walk, path, law)
    return {
        "points": {name: _numbers(values) for name, values in points.items()},
        "full": {name: _numbers(values) for name, values in full.items()},
        "equilibrium": found, "reason": reason, "neurons": count, "window": window, "stopped": stopped,
    }  # fmt: skip


def _error(chains: Any) -> Any:
    """Standard error of the mean over neurons, window by window."""
    return chains.std(-1, ddof=1) / math.sqrt(chains.shape[-1])


def _numbers(values: Any) -> list[float | None]:
    return [float(x) if math.isfinite(x) else None for x in values]


def _equilibrium(setting: Setting, walk: Any, path: Any, law: Any) -> tuple[dict[str, list[float]] | None, str]:
    """Mean and standard error of each quantity where the walk is in equilibrium, or why it is not."""
    if setting.factors is not None and (setting.factors[-1] != 1 or (setting.factors[setting.steps // 2 :] != 1).any()):
        return None, "the schedule keeps the walk on its way"
    try:
        exact = predict_equilibrium(setting.rule, law).exact
    except NoEquilibrium as error:
        return None, str(error)
    end = path.norm[-1]
    before = setting.steps - 1 - time_constants(type(setting.rule), [setting.rule], exact)[0]
    off = np.flatnonzero(~(np.abs(path.norm / end - 1) < _NEAR))
    kept = walk.kept(int(off[-1]) + 1 if len(off) else 0)
    steady = before > 0 and abs(path.norm[int(before)] / end - 1) < _STEADY and abs(end / exact.norm - 1) < _SAME
    if not steady or len(kept.lengths) < _MIN_WINDOWS:
        return None, "the run is too short to reach equilibrium and stay there"
    found = {}
    for quantity in QUANTITIES:
        known = estimate(kept.statistic(quantity)[:, 0])
        mean, mcse = known.mean, known.mcse
        if quantity != "rotation":  # a root of a mean square
            mean = math.sqrt(mean)
            mcse = mcse / (2 * mean) if mean else math.nan
        if not (math.isfinite(mean) and math.isfinite(mcse)):
            return None, "too few windows for an error bar"
        found[quantity] = [mean, mcse]
    return found, ""
