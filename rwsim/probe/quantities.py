"""From sums along vectors to what is shown: names, units, formulas, averages over neurons and over time."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rwsim.probe.measure import COLUMNS
from rwsim.probe.predict import Moments, Theory
from rwsim.theory.noise import Array


class Quantity(NamedTuple):
    """How a quantity is averaged over a layer's neurons (``"rms"`` or ``"mean"``), its unit, and what it is."""

    average: str
    units: str
    long_name: str


QUANTITIES: Mapping[str, Quantity] = MappingProxyType(
    {
        "norm": Quantity("rms", "1", "weight norm after the step"),
        "rotation": Quantity("mean", "radian", "angle between the weights before and after the step"),
        "relative_update": Quantity("rms", "1", "size of the step over the norm before it"),
        "rms_update": Quantity("rms", "1", "size of the gradient part of the step"),
        "grad_norm": Quantity("rms", "1", "gradient norm"),
        "weight_grad_angle": Quantity("mean", "radian", "angle between the weights and their gradient"),
        "momentum_grad_angle": Quantity("mean", "radian", "angle between the momentum before the step and the gradient"),
        "scaled_grad": Quantity("rms", "1", "norm of the gradient over the root of the second moment, over sqrt(C)"),
        "lambda_u": Quantity("mean", "1", "weight decay that the radial part of the gradient amounts to"),
    }
)
# Averages that predictions need.
NEEDED = ("lambda_u", "drive_sq", "grad_sq", "unit_grad_sq", "unit_grad_l1", "agreement", "buffer_ratio")


def quantities(sums: Array, hyper: Mapping[str, Any], theory: Theory | None, fan_in: int, sign: float = 1.0) -> dict[str, Array]:
    """Everything of `QUANTITIES`, and what predictions need, shape (time, neuron); NaN where it does not apply.

    Args:
        sums: (time, column, neuron), see `COLUMNS`.
        hyper: Hyperparameters of these steps.
        theory: Of the layer's rule; without it neither the gradient's part of a step nor lambda_u is known.
        fan_in: C.
        sign: -1 where the optimizer maximizes.
    """
    of = dict(zip(COLUMNS, np.moveaxis(sums, 1, 0), strict=True))
    ww, dd, wd, gg, wg = of["ww"], of["dd"], of["wd"], of["gg"], sign * of["wg"]
    with np.errstate(all="ignore"):
        after = np.where(np.isnan(wd), ww, ww + 2 * wd + dd)
        across = np.sqrt(np.maximum(dd - wd**2 / ww, 0) * ww)
        found = {
            "norm": np.sqrt(np.maximum(after, 0)),
            "rotation": np.where(ww > 0, np.arctan2(across, ww + wd), np.nan),
            "relative_update": np.sqrt(dd / ww),
            "grad_norm": np.sqrt(gg),
            "weight_grad_angle": _angle(wg, ww, gg),
            "momentum_grad_angle": _angle(sign * of["mg"], of["mm"], gg),
            "scaled_grad": np.sqrt(of["qq"] / fan_in),
            "grad_sq": (grad_sq := np.maximum(gg - wg**2 / ww, 0)),
            "unit_grad_sq": grad_sq * ww,
            "unit_grad_l1": np.sqrt(ww) * of["roots"],
        }
        # Under a sign what has no gradient goes straight on.
        idle = (gg == 0) & (theory is None or theory.kind != "sign")
        found["ln_norm"], found["idle"] = np.log(found["norm"]), np.where(np.isnan(gg), np.nan, idle)
        found["agreement"], found["buffer_ratio"] = of["agree"] / fan_in, np.sqrt(of["buffer_sq"] / of["sign_sq"])
        found["rms_update"] = found["lambda_u"] = np.full_like(ww, np.nan)
        if theory is not None and len(sums):
            decay = theory.decay(hyper) * (of["wwq"] / ww if theory.scales_decay else 1)
            found["rms_update"] = np.sqrt(np.maximum(dd + 2 * decay * (wd - theory.carried(hyper) * dd) + decay**2 * ww, 0))
            radial = sign * (of["wq"] if theory.scales_grad else _by_sign(of, theory, hyper) if theory.kind == "sign" else of["wg"])
            found["lambda_u"] = theory.radial(hyper) * radial / (of["wwq"] if theory.scales_decay else ww)
        # In units of lr^2, so that averages hold along a schedule.
        found["drive_sq"] = (found["rms_update"] / hyper.get("lr", np.full(len(ww), np.nan))[:, None]) ** 2
    return found


def _by_sign(of: Mapping[str, Array], theory: Theory, hyper: Mapping[str, Any]) -> Array:
    """||g||/||n|| <w, sign(g)>, with ||n|| as it is whatever the sign of g: symmetric gradients have a mean of 0."""
    h, k, _, _ = theory.argument(hyper)
    return np.asarray(of["ws"] * np.sqrt(of["gg"] / (h**2 * np.nan_to_num(of["mm"]) + k**2 * of["gg"])))


def _angle(dot: Array, one_sq: Array, other_sq: Array) -> Array:
    return np.where((one_sq > 0) & (other_sq > 0), np.arccos(np.clip(dot / np.sqrt(one_sq * other_sq), -1, 1)), np.nan)


def over_neurons(values: Array, average: str) -> Array:
    """Mean, or root mean square, over the last axis, NaN aside: (time, neuron) -> (time,)."""
    known = np.isfinite(values)
    count = known.sum(-1)
    total = np.where(known, values**2 if average == "rms" else values, 0.0).sum(-1)
    mean = np.asarray(total / np.where(count > 0, count, np.nan))
    return np.sqrt(mean) if average == "rms" else mean


def running(values: Array, horizon: float | int, before: tuple[Array, Array] | None = None) -> tuple[Array, tuple[Array, Array]]:
    """Running average over the first axis, of the last `horizon` entries or so: each weighs 1 - 1/horizon of the next; NaN aside.

    Args:
        before: What came out as the second result for the entries before these.

    Returns:
        The averages, and what the entries to come need.

    Example:
        >>> running(np.array([1.0, np.nan, 3.0]), 2)[0].round(2)
        array([1.  , 1.  , 2.33])
    """
    keep = 1 - 1 / horizon
    known = np.isfinite(values)
    total, weight = before if before is not None else np.zeros((2, *values.shape[1:]))
    found = np.empty(values.shape)
    for t, (value, there) in enumerate(zip(np.where(known, values, 0.0), known, strict=True)):
        # What is missing does not age the rest.
        total, weight = np.where(there, keep * total + value, total), np.where(there, keep * weight + 1, weight)
        found[t] = total / np.where(weight > 0, weight, np.nan)
    return found, (np.asarray(total), np.asarray(weight))


def moments(averages: Mapping[str, Array]) -> Moments:
    return Moments(averages["grad_sq"], averages["unit_grad_sq"], averages["unit_grad_l1"])


def averaged(found: Mapping[str, Array]) -> dict[str, Array]:
    """What predictions need, over all of the time: (1, neuron)."""
    return {name: over_neurons(found[name].T, "mean")[None] for name in NEEDED}
