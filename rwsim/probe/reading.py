"""A watched layer as it is read: measured quantities, and every prediction beside them."""

import math
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from rwsim.probe.factors import Turned, factors, nodes
from rwsim.probe.history import History
from rwsim.probe.layers import Layer
from rwsim.probe.predict import Theory
from rwsim.probe.quantities import NEEDED, QUANTITIES, averaged, moments, over_neurons, quantities, running
from rwsim.probe.transient import Transients
from rwsim.theory.noise import Array

# Name -> how it is averaged over neurons, unit, what it is.
PREDICTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "lr": ("1", "learning rate"),
        "weight_decay": ("1", "weight decay"),
        "effective_decay": ("1", "weight decay and the running average of lambda_u"),
        "lambda_ratio": ("1", "lambda_u over the weight decay"),
        "predicted_norm": ("1", "equilibrium norm at the step's hyperparameters"),
        "predicted_rotation": ("radian", "equilibrium rotation at the step's hyperparameters"),
        "predicted_rms_update": ("1", "RMS update of uncorrelated gradients at the step's hyperparameters"),
        "effective_norm": ("1", "equilibrium norm with the effective decay"),
        "effective_rotation": ("radian", "equilibrium rotation with the effective decay"),
        "corrected_norm": ("1", "equilibrium norm with the effective decay and the measured size and correlation of updates"),
        "corrected_rotation": ("radian", "equilibrium rotation with the effective decay and the measured correlation of updates"),
    }
)
TRANSIENTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        f"{kind}_{name}": (units, f"expected {name} on the way there, {what}")
        for kind, what in (("transient", "with the weight decay"), ("transient_effective", "with the effective decay"))
        for name, units in (("norm", "1"), ("rotation", "radian"))
    }
)


def _mean(values: Array) -> float:
    return float(over_neurons(np.ravel(values)[None], "mean")[0])


class Reading:
    """One layer of a history.

    Args:
        history: Settled.
        layer: Which.
        theory: Of its rule, or None.
        turning: Whether the optimizer itself sets its rotation.
        horizon: Of running averages, in measured steps.
        sign: -1 where the optimizer maximizes.
        before: A reading of the measured steps before: this one goes on from there, and holds what is new.
    """

    def __init__(
        self, history: History, layer: Layer, theory: Theory | None, turning: bool, horizon: float, sign: float,
        before: "Reading | None" = None,
    ) -> None:  # fmt: skip
        self.layer, self.theory, self.turning, self.horizon = layer, theory, turning, horizon
        self.ends: int = 0 if before is None else before.ends
        self._carried: dict[str, Any] = {} if before is None else before._carried
        self.steps = np.array(history.steps[self.ends :], dtype=np.int64)
        self.every_hyper = history.hyper(layer.group)
        self.hyper = {name: values[self.steps - 1] for name, values in self.every_hyper.items()}
        known = None if turning else theory
        self.found = quantities(history.table(layer, self.ends), self.hyper, known, layer.fan_in, sign)
        self.ends += len(self.steps)
        # RMS norm before the first measured step and after it.
        self.start = self._norms(history.table(layer, 0, 1), layer)
        if len(self.steps):
            self._averages = {name: running(self.found[name], horizon, self._carried.get(name)) for name in NEEDED}
            self._carried = {name: carried for name, (_, carried) in self._averages.items()}

    @staticmethod
    def _norms(sums: Array, layer: Layer) -> tuple[float, float]:
        if not len(sums):
            return math.nan, math.nan
        after = quantities(sums, {}, None, layer.fan_in)["norm"]
        return math.sqrt(sums[0, 0].mean()), float(over_neurons(after, "rms")[0])

    @cached_property
    def measured(self) -> dict[str, Array]:
        """Of `QUANTITIES`, the layer's averages, shape (time,)."""
        return {name: over_neurons(self.found[name], quantity.average) for name, quantity in QUANTITIES.items()}

    @cached_property
    def predicted(self) -> dict[str, Array]:
        """Of `PREDICTIONS`, with averages that run along, shape (time,)."""
        return self._forecast(slice(None), {name: averages for name, (averages, _) in self._averages.items()})

    def forecast(self, part: slice) -> dict[str, Array]:
        """Of `PREDICTIONS` at some of the measured steps, with averages over them all."""
        return self._forecast(part, averaged({name: values[part] for name, values in self.found.items()}))

    def _forecast(self, part: slice, values: Mapping[str, Array]) -> dict[str, Array]:
        steps = self.steps[part]
        hyper = {name: values[part] for name, values in self.hyper.items()}
        nothing = np.full(len(steps), np.nan)
        found = dict.fromkeys(PREDICTIONS, nothing)
        for name in ("lr", "weight_decay"):
            found[name] = hyper.get(name, nothing)
        if self.turning:
            rotation = hyper.get("rotation", nothing)
            # It keeps the norms that its first step has left.
            norm = np.full(len(steps), self.start[1])
            for kind in ("predicted", "effective", "corrected"):
                found |= {f"{kind}_norm": norm, f"{kind}_rotation": rotation}
            return found
        theory = self.theory
        if theory is None or "lr" not in hyper:
            return found
        decay = hyper.get("weight_decay", np.zeros(len(steps)))
        radial = np.broadcast_to(over_neurons(values["lambda_u"], "mean"), decay.shape)
        effective_decay = decay + np.nan_to_num(radial)
        plain, effective = (theory.equilibrium(hyper, x, self.layer.fan_in, moments(values)) for x in (decay, effective_decay))
        if theory.kind == "sign":
            # The mean first: a sine of single neurons would be off by their spread.
            agreement, ratio = (over_neurons(values[name], "mean")[:, None] for name in ("agreement", "buffer_ratio"))
            memory = 2 / np.pi * np.sin(np.pi / 2 * agreement) * ratio
            norm, rotation = theory.corrected_sign(plain, hyper, np.nan_to_num(radial)[:, None], memory)
        else:
            with np.errstate(all="ignore"):
                drive_sq = np.broadcast_to((plain.rms_update / hyper["lr"][:, None]) ** 2, plain.norm.shape)
                factor = (over_neurons(values["drive_sq"], "mean") / over_neurons(drive_sq, "mean"))[:, None]
            norm, rotation = theory.corrected(effective, factor)
        with np.errstate(all="ignore"):
            ratio = radial / decay
        return found | {
            "effective_decay": effective_decay, "lambda_ratio": np.where(decay > 0, ratio, np.nan),
            "predicted_norm": over_neurons(plain.norm, "rms"), "predicted_rotation": over_neurons(plain.rotation, "mean"),
            "predicted_rms_update": over_neurons(plain.rms_update, "rms"),
            "effective_norm": over_neurons(effective.norm, "rms"), "effective_rotation": over_neurons(effective.rotation, "mean"),
            "corrected_norm": over_neurons(norm, "rms"), "corrected_rotation": over_neurons(rotation, "mean"),
        }  # fmt: skip

    def bursts(self, part: slice) -> float:
        """What gradients of varying length make of the rotation; see `Theory.bursts`."""
        if self.theory is None or self.turning or not len(self.steps[part]) or not {"lr", "weight_decay"} <= self.hyper.keys():
            return math.nan
        last = {name: values[part][-1:] for name, values in self.hyper.items()}
        return self.theory.bursts(last, nodes(self.found["grad_norm"][part] ** 2))

    def alike(self, part: slice) -> float:
        """Mean over neurons of the root mean square of their rotation, over that of all."""
        own = np.sqrt(over_neurons((self.found["rotation"][part] ** 2).T, "mean"))
        return float(over_neurons(own, "mean") / over_neurons(own, "rms"))

    def factors(self, part: slice) -> dict[str, float]:
        """What the rotation at some of the measured steps is off by; see `rwsim.probe.factors`. Empty without a prediction, and of Adam+l2,
        whose decay is another for every coordinate."""
        theory, steps = self.theory, self.steps[part]
        if theory is None or theory.kind == "coupled" or self.turning or len(steps) < 2 or "weight_decay" not in self.hyper:
            return {}
        hyper = {name: values[part] for name, values in self.hyper.items()}
        found = {name: values[part] for name, values in self.found.items()}
        ln_norm = over_neurons(found["ln_norm"], "mean")
        with np.errstate(all="ignore"):
            ratios = found["lambda_u"] / hyper["weight_decay"][:, None]
            turn, turn_sq, idle, ratio = (_mean(values) for values in (found["rotation"], found["rotation"] ** 2, found["idle"], ratios))
            growth = 2 * float(ln_norm[-1] - ln_norm[0]) / float(steps[-1] - steps[0])
        turned = Turned(turn, turn_sq, idle, ratio, growth, self.bursts(part), self.alike(part))
        predicted = _mean(self.forecast(part)["predicted_rotation"])
        return factors(turned, predicted, *(float(values.mean()) for values in (theory.decay(hyper), theory.passed(hyper))))

    def along(self, values: Array) -> Array:
        """A measured series at every step of the run: between measured steps on a line."""
        known = np.isfinite(values)
        if not known.any():
            return np.full(len(self.every_hyper["lr"]), np.nan)
        return np.interp(np.arange(1, len(self.every_hyper["lr"]) + 1), self.steps[known], values[known])

    def transient(self, transients: Transients, effective: bool) -> tuple[Array, Array]:
        """Expected norm and rotation after every step of the run, shape (time,)."""
        steps = len(next(iter(self.every_hyper.values()), []))
        nothing = np.full(steps, np.nan)
        if self.turning and len(self.steps):
            return np.full(steps, self.start[1]), self.every_hyper.get("rotation", nothing)
        if self.theory is None or not len(self.steps) or "lr" not in self.every_hyper:
            return nothing, nothing
        size = over_neurons(self._averages["unit_grad_sq"][0], "mean")
        decay = self.every_hyper.get("weight_decay", np.zeros(steps))
        if effective:
            decay = np.maximum(decay + self.along(self.predicted["effective_decay"] - self.predicted["weight_decay"]), 0)
        return transients.track(self.theory, self.every_hyper, decay, self.layer.fan_in, self.start[0] ** 2, self.along(size))
