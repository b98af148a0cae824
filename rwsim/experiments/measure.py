"""The probe on an experiment's network, and what of it the records keep."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn, optim

from rwsim.experiments.gauge import NEURONS
from rwsim.experiments.models import scale_invariant, weights
from rwsim.experiments.records import Layer, windows
from rwsim.experiments.train import Recipe
from rwsim.probe import DynamicsProbe
from rwsim.probe.predict import Theory
from rwsim.probe.quantities import over_neurons
from rwsim.probe.transient import Track, Transients
from rwsim.theory.noise import Array

# Spacing of the squared norms that paths start from, in their logarithm.
_NEAR = 0.02
MEASURED = (
    "norm", "rotation", "rotation_sq", "rms_update", "grad_norm", "weight_grad_angle", "momentum_grad_angle", "scaled_grad",
    "ln_norm", "idle", "bursts", "neurons",
)  # fmt: skip
# Of the probe: equilibrium, and corrected for what was measured of the gradients.
PREDICTED = (
    "lr", "lambda_ratio", "predicted_norm", "predicted_rotation", "predicted_rms_update", "effective_norm", "effective_rotation",
    "corrected_norm", "corrected_rotation",
)  # fmt: skip
# Expected at the step, from the norm at the start on.
PATH = ("path_norm", "path_rotation")


class _Paths(Transients):
    """Paths of layers whose starts agree within one percent are one: a path takes a second, and forgets its start."""

    def track(self, theory: Theory, hyper: Mapping[str, Any], decay: Array, fan_in: int, start_sq: float, unit_grad_sq: Array) -> Track:
        near = math.exp(round(math.log(start_sq) / _NEAR) * _NEAR) if 0 < start_sq < math.inf else start_sq
        return super().track(theory, hyper, decay, fan_in, near, unit_grad_sq)


# Of all runs of a process.
_paths = _Paths()


class Watch:
    """A `DynamicsProbe` on the layers of a network."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self.names = weights(model)
        self.steps = recipe.steps
        self.probe = DynamicsProbe(model, optimizer, recipe.every, layers=list(self.names.values()), neurons=NEURONS)
        invariant = scale_invariant(model)
        found = {layer.name: layer for layer in self.probe.layers}
        self.layers = tuple(Layer(name, found[full].fan_in, found[full].vectors, name in invariant) for name, full in self.names.items())

    @property
    def due(self) -> bool:
        return self.probe.due

    def replayed(self) -> None:
        self.probe.replayed()

    def state_dict(self) -> dict[str, Any]:
        return self.probe.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.probe.load_state_dict(state)

    def records(self) -> tuple[NDArray[np.int64], dict[str, Array]]:
        """What was measured beside what was predicted, in windows: (last step, values (time, layer))."""
        columns: dict[str, list[Array]] = {name: [] for name in (*MEASURED, *PREDICTED, *PATH)}
        step = np.array(self.probe.steps, dtype=np.int64)
        for full in self.names.values():
            reading = self.probe.read(full)
            found, half = reading.found, slice(len(step) // 2, None)
            measured = {**reading.measured, **{name: over_neurons(found[name], "mean") for name in ("ln_norm", "idle")}}
            measured["rotation_sq"] = over_neurons(found["rotation"] ** 2, "mean")
            # Distributions over time, of the second half of the run; see `rwsim.probe.factors`.
            for name, value in (("bursts", reading.bursts(half)), ("neurons", reading.alike(half))):
                measured[name] = np.full(len(step), value)
            for name in MEASURED:
                columns[name].append(measured[name])
            for name in PREDICTED:
                columns[name].append(reading.predicted[name])
            for name, path in zip(PATH, reading.transient(_paths, effective=False), strict=True):
                columns[name].append(path[step - 1])
        return windows(step, {name: np.stack(values, 1) for name, values in columns.items()}, self.steps)
