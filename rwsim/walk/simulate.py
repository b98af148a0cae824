"""`rwsim.simulate`: walk, and hand back what was measured."""

import csv
import importlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch

from rwsim.errors import InvalidArgument, Unavailable
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.walk.job import Job
from rwsim.walk.measure import QUANTITIES, Walk
from rwsim.walk.system import Layer

# Engine -> its module, loaded when needed, and the device on which `auto` tries it before the reference engine. Each has
# `walk(job, device, progress=None, enough=None)`; `lacks(job, device)`: what of the job it does not carry, or nothing; and ALONE:
# whether a walk keeps the whole machine busy, so that walks are better taken one after the other.
ENGINES = {
    "reference": ("rwsim.walk.reference", ""),
    "blocked": ("rwsim.walk.blocked", "cpu"),
    "fused": ("rwsim.walk.fused", "cuda"),
}
DEVICES = ("auto", "cpu", "cuda")
_UNITS = {"norm": "dimensionless", "rotation": "radians per step", "rms_update": "dimensionless"}


def resolve_device(device: str) -> torch.device:
    """``auto`` is the CPU: numbers should not depend on whether the machine has a GPU; ask for it by ``cuda``."""
    if device not in DEVICES:
        raise InvalidArgument("device", f"must be one of {', '.join(DEVICES)}", device)
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("`device` is cuda, but torch finds no CUDA device here; use --device cpu.")
    return torch.device("cuda" if device == "cuda" else "cpu")


def _load(engine: str) -> ModuleType:
    return importlib.import_module(ENGINES[engine][0])


def resolve_engine(engine: str, job: Job, device: torch.device) -> ModuleType:
    """The module of that engine; ``auto`` takes the fast engine of the device if it carries the job."""
    if engine not in ("auto", *ENGINES):
        raise InvalidArgument("engine", f"must be one of auto, {', '.join(ENGINES)}", engine)
    if engine == "auto":
        fast = [name for name, (_, kind) in ENGINES.items() if kind == device.type]
        return next(module for module in map(_load, (*fast, "reference")) if not module.lacks(job, device))
    module = _load(engine)
    if missing := module.lacks(job, device):
        others = [name for name in ENGINES if name != engine and not _load(name).lacks(job, device)]
        raise Unavailable(f"`engine` {engine} does not carry {missing}; use engine {' or '.join(others)}.")
    return module


@contextmanager
def single_threaded() -> Iterator[None]:
    """torch works in the calling thread alone: where walks run side by side, its own would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    job: Job, *, device: str = "auto", engine: str = "auto", progress: Callable[[int], None] | None = None,
    enough: Callable[[Walk], Walk | None] | None = None,
) -> Walk:  # fmt: skip
    """Walk a job in the engine that is named, or in the one that suits it.

    Args:
        job: What to walk.
        device: ``"cpu"`` or ``"cuda"``; ``"auto"`` takes the CPU.
        engine: A name in `ENGINES`; ``"auto"`` takes the fastest that carries the job.
        progress: Called now and then with the number of steps done.
        enough: Given the whole windows so far, the walk that is enough, or None to go on. Engines ask now and then, and return it;
            the fused one does not ask, and walks to the end.

    Raises:
        InvalidArgument: An engine or device that does not exist.
        Unavailable: One that is not there, or does not carry the job.
        WalkDiverged: NaN or Inf, with step and config.
        WalkInterrupted: Ctrl-C, with the walk so far.
    """
    target = resolve_device(device)
    return resolve_engine(engine, job, target).walk(job, target, progress=progress, enough=enough)


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


def _configs(rule: type[UpdateRule], hyper: dict[str, Any], replicate: Any) -> tuple[tuple[UpdateRule, ...], tuple[int, ...]]:
    """Rule and number of each config: sequences zip, a single value is repeated."""
    sequences: dict[str, list[Any]] = {}
    for key, value in {**hyper, "replicate": replicate}.items():
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
        raise InvalidArgument(next(iter(sequences)), "must not be empty", [], "give one value, or leave it out")
    count = lengths.pop() if lengths else 1
    numbers = tuple(sequences.get("replicate", [replicate] * count))
    for number in numbers:
        if not isinstance(number, Integral):
            raise InvalidArgument("replicate", "must be a whole number", number, "number them 0, 1, ...")
    rules = (rule(**{key: sequences[key][i] if key in sequences else value for key, value in hyper.items()}) for i in range(count))
    return tuple(rules), tuple(map(int, numbers))


def _factors(schedule: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A schedule as arrays."""
    arrays = {}
    for name, factors in schedule.items():
        try:
            arrays[name] = np.asarray(factors, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidArgument(f"schedule[{name!r}]", "must be numbers, one factor per step", factors) from None
    return arrays


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
    normalization: str = "batch",
    layers: int = 1,
    seed: int = 0,
    device: str = "auto",
    engine: str = "auto",
    window: int = 100,
    schedule: Mapping[str, Any] = MappingProxyType({}),
    radial: float = 0.0,
    replicate: Any = 0,
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
        normalization: ``"batch"``, or with the faithful gradient ``"layer"``, ``"weight"`` (weight standardization), ``"none"``.
        layers: Independent copies of the layer.
        seed: Of gammas, weights and gradients.
        device: ``"cpu"`` or ``"cuda"``; ``"auto"`` takes the CPU.
        engine: A name in `ENGINES`; ``"auto"`` takes the fastest that carries the walk.
        window: Steps per recorded window.
        schedule: Factors over the steps by hyperparameter, e.g. ``{"lr": [...]}`` of length `steps`, or of shape
            (steps, 2) for a pair such as `betas`; every config's value is multiplied by them.
        radial: lambda_u of scale-sensitive weights (paper, appendix H): lambda_u w is added to every gradient.
        replicate: An integer per config, or one for all. A config's walk depends on nothing but what it is and `seed`:
            equal configs walk alike unless these numbers differ.
        **hyper: The rule's hyperparameters. Sequences, that of `replicate` too, zip to configs (grids belong to a sweep).

    Raises:
        InvalidArgument: A value out of range.
        Unavailable: An engine or device that is not there, or an engine that does not carry the walk.
        WalkDiverged: NaN or Inf, with step and config.

    Example:
        >>> s = simulate("lion", lr=[1e-3, 2e-3], weight_decay=1.0, fan_in=16, neurons=4, steps=200)
        >>> s.walk.norm_sq.shape
        (2, 2, 4)
        >>> s.to_csv().splitlines()[0]
        'step,config,neuron,lr,weight_decay,betas,norm,rotation,rms_update'
    """
    rules, replicates = _configs(find_rule(rule), hyper, replicate)
    if isinstance(gamma, str):
        layer = Layer.draw(fan_in, neurons, batch, loss_scale, gamma, seed, normalization)
    else:
        layer = Layer(np.asarray(gamma, dtype=np.float64), np.ones(neurons), batch, loss_scale, normalization)
        if layer.gamma_in.shape != (fan_in,):
            raise InvalidArgument("gamma", f"must hold fan_in = {fan_in} numbers", layer.gamma_in.shape)
    job = Job(rules, layer, steps, gradient, layers, radial, _factors(schedule), seed, replicates, window)
    walk = run(job, device=device, engine=engine)
    settings = {"optimizer": rules[0].name, "fan_in": fan_in, "neurons": neurons, "batch": batch, "gradient": gradient}
    settings |= {"loss_scale": loss_scale, "layers": layers, "seed": str(seed), "window": window, "steps": steps}
    settings |= {"normalization": normalization, "radial": radial, "schedule": " ".join(job.schedule), "replicate": replicates}
    return Simulation(rules, layer, walk, settings)
