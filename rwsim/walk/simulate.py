"""`rwsim.simulate`: walk, and hand back what was measured."""

import csv
import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rwsim.errors import InvalidArgument, Unavailable
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.walk import reference
from rwsim.walk.measure import QUANTITIES, Walk
from rwsim.walk.system import Layer

ENGINES = ("auto", "reference", "blocked", "fused")
DEVICES = ("auto", "cpu", "cuda")
_UNITS = {"norm": "dimensionless", "rotation": "radians per step", "rms_update": "dimensionless"}


def resolve_device(device: str) -> torch.device:
    """``auto`` is the CPU: a layer of 128 neurons in plain torch is faster there than on a GPU."""
    if device not in DEVICES:
        raise InvalidArgument("device", f"must be one of {', '.join(DEVICES)}", device)
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("`device` is cuda, but torch finds no CUDA device here; use --device cpu.")
    return torch.device("cuda" if device == "cuda" else "cpu")


def resolve_engine(engine: str) -> Callable[..., Walk]:
    """The walk function of that engine."""
    if engine not in ENGINES:
        raise InvalidArgument("engine", f"must be one of {', '.join(ENGINES)}", engine)
    if engine in ("blocked", "fused"):
        raise Unavailable(f"`engine` {engine} is not there yet; use reference.")
    return reference.walk


def seeded(seed: int, label: str, device: torch.device) -> torch.Generator:
    """A generator for the walk of that label; walks of one seed and different labels are independent."""
    entropy = np.random.SeedSequence([seed, 1, zlib.crc32(label.encode())]).generate_state(2, np.uint32)
    return torch.Generator(device=device).manual_seed(int(entropy[0]) << 31 | int(entropy[1]) >> 1)


def run(
    rules: Sequence[UpdateRule],
    layer: Layer,
    *,
    steps: int,
    gradient: str = "marginal",
    layers: int = 1,
    seed: int = 0,
    device: str = "auto",
    engine: str = "auto",
    dtype: torch.dtype = torch.float32,
    window: int = 100,
    label: str = "",
    progress: Callable[[int], None] | None = None,
    normalizer: torch.Tensor | None = None,
) -> Walk:
    """Walk a layer of the toy system (`layers` independent copies of it, one after the other along the neuron axis).

    Arguments as in `simulate` and `reference.walk`; `label` tells walks of one seed apart.
    """
    if layers < 1:
        raise InvalidArgument("layers", "must be at least 1", layers)
    target = resolve_device(device)
    walk = resolve_engine(engine)
    generator = seeded(seed, label or rules[0].name, target)
    start = layer.start(len(rules), layers, generator, dtype)
    return walk(rules, layer.gradient(gradient, generator, dtype, layers), start, steps, window, progress, normalizer)


@dataclass(frozen=True)
class Simulation:
    """What `simulate` measured.

    Attributes:
        rules: The optimizer of each config.
        layer: The layer that was walked.
        walk: Series of shape (time, config, neuron): see `Walk`.
        attributes: The settings, for the record.
    """

    rules: tuple[UpdateRule, ...]
    layer: Layer
    walk: Walk
    attributes: dict[str, Any]

    @property
    def step(self) -> np.ndarray:
        """Last step of each window, shape (time,)."""
        return np.cumsum(self.walk.lengths)

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` with dimensions (time, config, neuron); needs the extra ``rwsim[sweep]``."""
        import xarray as xr

        dims = ("time", "config", "neuron")
        data = {name: (dims, self.walk.trace(name), {"units": _UNITS[name], "long_name": "RMS over the window"}) for name in QUANTITIES}
        coordinates: dict[str, Any] = {"time": ("time", self.step, {"units": "steps"})}
        for key, first in vars(self.rules[0].values).items():
            for i in range(len(first)) if isinstance(first, tuple) else (None,):
                name = key if i is None else f"{key}_{i + 1}"
                coordinates[name] = ("config", [getattr(r.values, key) if i is None else getattr(r.values, key)[i] for r in self.rules])
        return xr.Dataset(data, coordinates, self.attributes)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """One line per (window, config, neuron), RMS over the window; returned as text without `path`."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        names = list(vars(self.rules[0].values))
        writer.writerow(["step", "config", "neuron", *names, *QUANTITIES])
        traces = [self.walk.trace(q) for q in QUANTITIES]
        for time, config, neuron in np.ndindex(*traces[0].shape):
            hyper = [getattr(self.rules[config].values, name) for name in names]
            values = [" ".join(map(str, h)) if isinstance(h, tuple) else h for h in hyper]
            writer.writerow([self.step[time], config, neuron, *values, *(float(x[time, config, neuron]) for x in traces)])
        if path is None:
            return stream.getvalue()
        Path(path).write_text(stream.getvalue())
        return None


def _configs(rule: type[UpdateRule], hyper: dict[str, Any]) -> list[UpdateRule]:
    """Sequences of hyperparameters zip to configs; a single value is repeated."""
    sequences: dict[str, list[Any]] = {}
    for key, value in hyper.items():
        values = value if isinstance(value, (list, tuple, np.ndarray)) else None
        if values is not None and isinstance(rule.hyper.get(key), tuple) and len(values) and np.ndim(values[0]) == 0:
            values = None  # one pair, not a sequence of pairs
        if values is not None:
            sequences[key] = list(values)
    lengths = {len(values) for values in sequences.values()}
    if len(lengths) > 1:
        told = ", ".join(f"{key}: {len(values)}" for key, values in sequences.items())
        raise InvalidArgument(next(iter(sequences)), "must be as long as the other sequences", told, "sequences zip to configs")
    if lengths == {0}:
        raise InvalidArgument(next(iter(sequences)), "must not be empty", [])
    count = lengths.pop() if lengths else 1
    return [rule(**{key: sequences[key][i] if key in sequences else value for key, value in hyper.items()}) for i in range(count)]


def simulate(
    rule: str | type[UpdateRule],
    *,
    fan_in: int,
    steps: int,
    batch: int = 32,
    neurons: int = 128,
    gradient: str = "marginal",
    gamma: Any = "normal",
    loss_scale: float = 1.0,
    layers: int = 1,
    seed: int = 0,
    device: str = "auto",
    engine: str = "auto",
    window: int = 100,
    **hyper: Any,
) -> Simulation:
    """Walk the paper's toy system (appendix F) and measure norm, rotation and RMS update of every neuron.

    Args:
        rule: A name in `RULES` or an UpdateRule class.
        fan_in: C >= 2.
        steps: At least 1.
        batch: B >= 4.
        neurons: K per layer.
        gradient: ``"marginal"``, ``"faithful"`` or ``"gaussian"``: see `Layer.gradient`.
        gamma: ``"normal"`` (drawn from `seed`), ``"uniform"``, or an array gamma_in of length `fan_in` (gamma_out = 1).
        loss_scale: Factor on the output gradients.
        layers: Independent copies of the layer.
        seed: Of gammas, weights and gradients.
        device: ``"cpu"`` or ``"cuda"``; ``"auto"`` takes the CPU.
        engine: ``"reference"``; ``"auto"`` takes it.
        window: Steps per recorded window.
        **hyper: The rule's hyperparameters. Sequences zip to configs (grids belong to a sweep).

    Raises:
        InvalidArgument: A value out of range.
        WalkDiverged: NaN or Inf, with step and config.

    Example:
        >>> s = simulate("lion", lr=[1e-3, 2e-3], weight_decay=1.0, fan_in=16, neurons=4, steps=200)
        >>> s.walk.norm_sq.shape
        (2, 2, 4)
        >>> s.to_csv().splitlines()[0]
        'step,config,neuron,lr,weight_decay,betas,norm,rotation,rms_update'
    """
    rules = _configs(find_rule(rule), hyper)
    if isinstance(gamma, str):
        layer = Layer.draw(fan_in, neurons, batch, loss_scale, gamma, seed)
    else:
        layer = Layer(np.asarray(gamma, dtype=np.float64), np.ones(neurons), batch, loss_scale)
        if layer.gamma_in.shape != (fan_in,):
            raise InvalidArgument("gamma", f"must hold fan_in = {fan_in} numbers", layer.gamma_in.shape)
    walk = run(rules, layer, steps=steps, gradient=gradient, layers=layers, seed=seed, device=device, engine=engine, window=window)
    settings = {"optimizer": rules[0].name, "fan_in": fan_in, "neurons": neurons, "batch": batch, "gradient": gradient}
    settings |= {"loss_scale": loss_scale, "layers": layers, "seed": str(seed), "window": window, "steps": steps}
    return Simulation(tuple(rules), layer, walk, settings)
