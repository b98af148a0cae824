"""What is to be walked: configs, layer, gradients, length. Every engine takes a `Job` and returns a `Walk`."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from rwsim.errors import InvalidArgument
from rwsim.optimizers.rule import DOMAINS, UpdateRule
from rwsim.walk.system import Layer

# (config, step) -> the normals of shape (neuron, dim) and the lengths of shape (neuron,) that a step's gradient is made of.
Noise = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """A walk, whatever engine takes it.

    Attributes:
        rules: One per config, all of one class.
        layer: The layer of the toy system.
        steps: At least 1.
        gradient: ``"marginal"``, ``"faithful"`` or ``"gaussian"``: see `Layer.gradient`.
        layers: Independent copies of the layer, one after the other along the neuron axis.
        radial: lambda_u of a scale-sensitive weight (paper, appendix H): lambda_u w is added to every gradient.
        schedule: Factors over the steps by hyperparameter, shape (steps,), or (steps, 2) for a pair such as `betas`;
            every config's value is multiplied by them.
        seed: Of weights and gradients.
        replicates: Number of each config; configs alike in everything walk alike unless their numbers differ.
        window: Steps per recorded window.
        dtype: float32 or float64.

    Raises:
        InvalidArgument: A value out of range, a schedule that leads a hyperparameter out of its range.
    """

    rules: tuple[UpdateRule, ...]
    layer: Layer
    steps: int
    gradient: str = "marginal"
    layers: int = 1
    radial: float = 0.0
    schedule: Mapping[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0
    replicates: tuple[int, ...] = ()
    window: int = 100
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("steps", "window", "layers"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, "must be at least 1", getattr(self, name), "give a larger one")
        self.layer.check_gradient(self.gradient)
        if not self.rules or any(type(rule) is not type(self.rules[0]) for rule in self.rules):
            raise InvalidArgument("rules", "must be one or more of one class, one per config", self.rules)
        if self.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument("dtype", "must be torch.float32 or torch.float64", self.dtype)
        if not math.isfinite(self.radial):
            raise InvalidArgument("radial", "must be finite", self.radial, "give lambda_u, 0 for scale-invariant weights")
        if self.replicates and len(self.replicates) != len(self.rules):
            raise InvalidArgument("replicates", f"must hold one number per config, {len(self.rules)}", self.replicates)
        for name, factors in self.schedule.items():
            self._check_schedule(name, factors)

    def _check_schedule(self, name: str, factors: np.ndarray) -> None:
        label = f"schedule[{name!r}]"
        if name not in self.rule.hyper:
            raise InvalidArgument(label, f"is not a hyperparameter of {self.rule.name}", name, f"it takes {', '.join(self.rule.hyper)}")
        base = np.array([getattr(rule.values, name) for rule in self.rules], dtype=np.float64)
        shape = (self.steps, *base.shape[1:])
        if np.shape(factors) != shape:
            raise InvalidArgument(
                label, f"must have shape {shape}: one factor per step", np.shape(factors), "repeat or cut it to the steps"
            )
        low, high = factors.min(0), factors.max(0)
        ends = np.concatenate([base * low, base * high])
        domain = DOMAINS.get(name)
        legal = np.isfinite(ends)
        if domain is not None:
            legal &= (ends >= domain.low) & (ends <= domain.high if domain.closed else ends < domain.high)
        if not (legal.all() and np.isfinite(factors).all()):
            raise InvalidArgument(
                label, f"must keep {name} in its range at every step", f"{low} to {high}", domain.remedy if domain else ""
            )

    @property
    def rule(self) -> type[UpdateRule]:
        return type(self.rules[0])

    @property
    def configs(self) -> int:
        return len(self.rules)

    @property
    def rows(self) -> int:
        """Neurons of one config, over all its layers."""
        return self.layers * self.layer.neurons

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weights: (config, neuron, dim)."""
        return self.configs, self.rows, self.layer.fan_in

    def check_start(self, start: torch.Tensor | None) -> None:
        """Refuse given weights of another shape."""
        if start is not None and start.shape != self.shape:
            raise InvalidArgument("start", f"must have shape {self.shape}", tuple(start.shape))

    def keys(self) -> tuple[int, ...]:
        """A 64-bit key per config: hash of the seed and of everything that makes the config what it is.

        Random numbers are keyed by it, so a config's walk does not depend on its company, and configs that differ
        in anything but length, window, layers and dtype are independent.
        """
        law = hashlib.sha256()
        for array in (self.layer.gamma_in, self.layer.gamma_out, *(self.schedule[name] for name in sorted(self.schedule))):
            law.update(f"{np.shape(array)}".encode())  # two layers of ones are told apart by their shapes only
            law.update(np.ascontiguousarray(array, dtype=np.float64).tobytes())
        # Of one type each: 1 and 1.0 are one loss scale.
        common = [int(self.seed), self.rule.name, self.gradient, int(self.layer.batch), float(self.layer.loss_scale), float(self.radial)]
        common += [sorted(self.schedule), law.hexdigest()]
        if self.layer.normalization != "batch":
            common.append(self.layer.normalization)
        numbers = self.replicates or (0,) * self.configs
        start = json.dumps(common)[:-1]
        texts = (f"{start}, {json.dumps(vars(rule.values))}, {int(number)}]" for rule, number in zip(self.rules, numbers, strict=True))
        return tuple(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") for text in texts)

    def hyper(self, config: int, step: int) -> SimpleNamespace:
        """Hyperparameters of a config at a step (1 at the first), plain floats."""
        values = dict(vars(self.rules[config].values))
        for name, factors in self.schedule.items():
            factor = factors[step - 1]
            values[name] = (
                tuple(v * float(f) for v, f in zip(values[name], factor, strict=True)) if factor.ndim else values[name] * float(factor)
            )
        return SimpleNamespace(**values)
