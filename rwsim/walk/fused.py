"""The fused engine: a Triton kernel that keeps weights and optimizer state in registers for the whole walk.

What a rule does is compiled from its traced program into the few functions that the kernel calls; everything else is one
kernel. Random numbers come from Philox, keyed by the config and counted by (coordinate, neuron, step), so a config's walk
is bitwise the same whatever shares its launch, its device or its chunk of steps. Triton is imported at the first use.
"""

import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from rwsim.errors import WalkDiverged, WalkInterrupted
from rwsim.walk.emit import compiled, source
from rwsim.walk.job import Job, Noise
from rwsim.walk.measure import SERIES, Walk
from rwsim.walk.program import Program, programs, untraceable
from rwsim.walk.system import length_polynomial

_LONGEST_WINDOW = 10_000
# Neuron-steps of a launch, about: some hundredths of a second, between which results are read and Ctrl-C is heard.
_LAUNCH = 1e8
# Numbers in the table of step-dependent coefficients of one launch.
_TABLE = 2e7
# Steps of the faithful system captured in one graph, at most.
_SPAN = 128
# Rows that keep one device busy.
_ROWS_A_DEVICE = 4096
# Compiling is not safe in several threads at once.
_launching = threading.Lock()
# Walks of the faithful system are taken one at a time: a graph is captured best while nobody else does.
_faithful = threading.Lock()


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# See `simulate.ENGINES`.
ALONE = False


def lacks(job: Job, device: torch.device) -> str:
    """What this engine does not carry of a job, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "a machine without Triton"
    if device.type != "cuda" and not interpreted():
        return f"device {device.type}"
    if job.gradient == "faithful" and (job.dtype != torch.float32 or job.layer.batch > 256):
        return "the faithful gradient in float64 or with batches over 256"
    if job.layer.normalization != "batch":
        return f"{job.layer.normalization} normalization"
    if job.layer.fan_in > 16384:
        return f"a fan-in of {job.layer.fan_in} (16384 at most)"
    if min(job.window, job.steps) > _LONGEST_WINDOW:
        return f"windows of more than {_LONGEST_WINDOW} steps"
    return untraceable(job.rule)


@dataclass(frozen=True)
class Shape:
    """How a neuron lies in a program: E elements in each of L lanes, N neurons; and how it is compiled."""

    E: int
    N: int
    L: int

    @classmethod
    def of(cls, fan_in: int) -> "Shape":
        """Fixed by the fan-in alone: it sets the order of summation, so it must not follow the batch."""
        padded = max(32, 1 << (fan_in - 1).bit_length())
        elements = 4 if padded == 32 else 8 if padded == 64 else 16 if padded <= 512 else 32
        lanes = padded // elements
        return cls(elements, max(1, 64 // lanes) if elements < 32 else 1, lanes)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch. FP fusion is named since its default is about to change; results must not follow it."""
        options = {"num_warps": max(1, self.N * self.L // 32), "enable_fp_fusion": True}
        # Three programs of two warps a scheduler hide more latency than two with all the registers they ask for.
        return options | ({"maxnreg": 168} if self.E == 16 else {})


def _span(window: int) -> int:
    """Steps of a captured graph: about a hundred; whole windows, or a divisor of one."""
    if window <= _SPAN:
        return _SPAN // window * window
    return max(n for n in range(1, _SPAN + 1) if window % n == 0)


@lru_cache
def _streams(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A few streams in turn: memory is cached stream by stream, and a new one would have to ask the driver for all of it."""
    return itertools.cycle([torch.cuda.Stream(device) for _ in range(4)])


@lru_cache
def _side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _next_stream(device: torch.device) -> torch.cuda.Stream:
    with _launching:
        return next(_streams(device))


class _Size(TypedDict):
    dtype: torch.dtype
    device: torch.device


class _Part:
    """Some rows of the configs that share a program, on one device.

    Rows are numbered config by config; `first` is the number of the first. All work is queued on one of a few streams, so that
    parts, and walks in other threads, run side by side.
    """

    def __init__(
        self, job: Job, program: Program, configs: Sequence[int], first: int, rows: int, device: torch.device, start: Tensor | None
    ) -> None:
        self.job, self.program, self.configs, self.first, self.rows, self.device = job, program, configs, first, rows, device
        self.shape = Shape.of(job.layer.fan_in)
        self.grid = (-(-rows // self.shape.N),)
        self.varies = program.varies(job.schedule)
        self.functions = compiled(source(program, self.varies))
        self.stream = _next_stream(device) if device.type == "cuda" else None
        layer, size = job.layer, _Size(dtype=job.dtype, device=device)
        keys = job.keys()
        with self._current():
            self.gamma_in, self.gamma_out = layer.scales(job.dtype, device)
            self.polynomial = torch.tensor(length_polynomial(layer.batch), dtype=torch.float32, device=device)
            words = np.array([keys[c] for c in configs], dtype=np.uint64).view(np.int32).reshape(-1, 2)
            self.keys = torch.as_tensor(words, device=device)
            self.param = torch.empty(rows, layer.fan_in, **size)
            self.buffers = torch.zeros(max(1, len(program.buffers)), rows, layer.fan_in, **size)
            self.base = self._base()
            self.fixed = self._coefficients(1, 1, moving=False)
            self._start(start)
            if job.gradient == "faithful":
                self.grad = torch.empty_like(self.param)
                self.clock = torch.zeros(1, dtype=torch.int32, device=device)
        self.span = _span(job.window)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def _start(self, given: Tensor | None) -> None:
        from rwsim.walk.kernel import start_kernel

        job, s = self.job, self.shape
        if given is not None:
            self.param.copy_(given[list(self.configs)].reshape(-1, job.layer.fan_in)[self.first : self.first + self.rows])
            return
        with _launching:
            start_kernel[self.grid](
                self.param, self.keys, self.rows, self.first, job.rows, job.layer.fan_in, job.layer.fan_in**-0.5,
                s.E, s.N, s.L, num_warps=s.options["num_warps"],
            )  # fmt: skip

    def _coefficients(self, first: int, steps: int, moving: bool) -> Tensor:
        """(coefficient, steps, configs) of those that move from step to step, or of the others; `first` is 1 at the first step."""
        step = torch.arange(first, first + steps, dtype=torch.float64, device=self.device)[:, None]
        every = self.program.evaluate(self._hyper(first, steps), step)
        shape = (steps, len(self.configs))
        planes = [
            torch.as_tensor(value, dtype=torch.float64, device=self.device).expand(shape)
            for value, moves in zip(every, self.varies, strict=True)
            if moves is moving
        ]
        # Without any the kernel still wants a table to point at.
        table = torch.stack(planes) if planes else torch.zeros((1, *shape), dtype=torch.float64, device=self.device)
        return table.to(self.job.dtype)

    def _base(self) -> dict[str, list[Tensor]]:
        """Each hyperparameter, as a list of one or of a pair's entries, of every config: shape (1, configs), float64."""
        base = {}
        for name in vars(self.job.rules[0].values):
            values = np.array([getattr(self.job.rules[c].values, name) for c in self.configs], dtype=np.float64)
            base[name] = list(torch.as_tensor(values, device=self.device).reshape(1, len(self.configs), -1).unbind(-1))
        return base

    def _hyper(self, first: int, steps: int) -> dict[str, Any]:
        """Hyperparameters as (steps or 1, configs) in float64, schedules applied."""
        hyper: dict[str, Any] = {}
        for name, columns in self.base.items():
            if name in self.job.schedule:
                factors = self.job.schedule[name][first - 1 : first - 1 + steps].reshape(steps, -1)
                columns = [x * torch.as_tensor(factors[:, i : i + 1], device=self.device) for i, x in enumerate(columns)]
            hyper[name] = tuple(columns) if isinstance(self.job.rule.hyper[name], tuple) else columns[0]
        return hyper

    @property
    def table_width(self) -> int:
        """Numbers that one step adds to the table of coefficients."""
        return len(self.configs) * max(1, sum(self.varies))

    def launch(self, first: int, steps: int, noise: Noise | None) -> "Launch":
        """Walk steps first ... first + steps - 1 (0 is the first); does not wait."""
        with self._current():
            varying = self._coefficients(first + 1, steps, moving=True)
            if self.job.gradient == "faithful":
                means = self._faithful(first, steps, varying, noise)
            else:
                means = torch.empty(-(-steps // self.job.window), len(SERIES), self.rows, dtype=self.job.dtype, device=self.device)
                stub = None if noise is None else self._stub(noise, first, steps)
                self._walk(first, steps, varying, means, stub, self.job.gradient == "marginal")
            return Launch(self, means, None if self.stream is None else self.stream.record_event())

    def _walk(self, first: int, steps: int, varying: Tensor, out: Tensor, stub: tuple[Tensor, Tensor] | None, marginal: bool) -> None:
        from rwsim.walk.kernel import walk_kernel

        job, s, configs = self.job, self.shape, len(self.configs)
        normals, lengths = (self.param, self.param) if stub is None else stub
        # The stride of a view's first axis: a faithful step reads one row of a longer table.
        plane = varying.stride(0)
        with _launching:
            walk_kernel[self.grid](
                self.param, self.buffers, self.gamma_in, self.gamma_out, self.polynomial, self.keys, self.fixed, varying, out,
                normals, lengths, self.rows, self.first, job.rows, job.layer.neurons, configs, job.layer.fan_in, first, steps,
                job.window, job.radial, plane, s.E, s.N, s.L, len(self.polynomial) - 1, marginal,
                bool((job.layer.gamma_in == 1).all()), s.E * s.L > job.layer.fan_in, job.radial != 0, stub is not None,
                self.functions.LOAD, self.functions.READ, self.functions.STORE, self.functions.UPDATE, **s.options,
            )  # fmt: skip

    def _faithful(self, first: int, steps: int, varying: Tensor, noise: Noise | None) -> Tensor:
        """Two kernels a step, gradients and update, many steps captured in a CUDA graph and replayed."""
        job, window = self.job, self.job.window
        windows = -(-steps // window)
        out = torch.zeros(windows, len(SERIES), self.rows, dtype=job.dtype, device=self.device)
        done = 0
        while done < steps:
            count = min(self.span, steps - done)
            if self.graph is None and count == self.span and self.warm and self.stream is not None and noise is None:
                self._capture(varying)
            if self.graph is not None and count == self.span and noise is None:
                self.clock.fill_(first + done)
                self.table.copy_(varying[:, done : done + count])
                self.graph.replay()
                each = self.each
            else:
                self.clock.fill_(first + done)
                each = self._faithful_steps(count, varying[:, done : done + count], noise, first + done)
                self.warm = True
            # A span holds whole windows or is part of one.
            for begin in range(0, count, window):
                part = each[begin : begin + window]
                total = min(window, steps - (done + begin) // window * window)
                out[(done + begin) // window] += part.sum(0) / total
            done += count
        return out

    def _capture(self, varying: Tensor) -> None:
        self.table = torch.empty_like(varying[:, : self.span], memory_format=torch.contiguous_format)
        graph = torch.cuda.CUDAGraph()
        # On a stream that nobody else queues to; other threads may go on with theirs.
        with torch.cuda.graph(graph, stream=_side_stream(self.device, "capture"), capture_error_mode="thread_local"):
            self.each = self._faithful_steps(self.span, self.table, None, 0)
        self.graph = graph

    def _faithful_steps(self, steps: int, varying: Tensor, noise: Noise | None, first: int) -> Tensor:
        """Sizes of each of some steps from the clock's, (steps, 7, rows)."""
        from rwsim.walk.kernel import faithful_kernel

        job, layer = self.job, self.job.layer
        each = torch.empty(steps, len(SERIES), self.rows, dtype=job.dtype, device=self.device)
        layers = self.rows // layer.neurons
        block = min(64, max(16, 1 << (layer.neurons - 1).bit_length()))
        columns = min(64, max(16, 1 << (layer.fan_in - 1).bit_length()))
        members = max(16, 1 << (layer.batch - 1).bit_length())
        for t in range(steps):
            stub = (self.param, self.param) if noise is None else self._faithful_stub(noise, first + t)
            with _launching:
                faithful_kernel[(layers, -(-layer.neurons // block))](
                    self.param, self.grad, self.gamma_in, self.gamma_out, self.keys, self.clock, *stub, t, self.first // layer.neurons,
                    job.layers, layer.neurons, layer.fan_in, layer.batch, block, columns, members, noise is not None,
                    num_warps=8, enable_fp_fusion=True,
                )  # fmt: skip
            self._walk(0, 1, varying[:, t : t + 1], each[t : t + 1], (self.grad, self.grad), False)
        return each

    def _faithful_stub(self, noise: Noise, step: int) -> tuple[Tensor, Tensor]:
        """Given inputs (layers, C, B) and output normals (rows, B) of a step (0 is the first)."""
        drawn = [noise(config, step + 1) for config in self.configs]
        layers = slice(self.first // self.job.layer.neurons, (self.first + self.rows) // self.job.layer.neurons)
        inputs = torch.cat([pair[0] for pair in drawn])[layers]
        outputs = torch.cat([pair[1] for pair in drawn])[self.first : self.first + self.rows]
        return inputs.to(self.device, self.job.dtype).contiguous(), outputs.to(self.device, self.job.dtype).contiguous()

    def _stub(self, noise: Noise, first: int, steps: int) -> tuple[Tensor, Tensor]:
        """Given noise of these steps as the kernel reads it: (steps, rows, C) and (steps, rows)."""
        job, mine = self.job, slice(self.first, self.first + self.rows)
        drawn = [[noise(config, first + 1 + t) for config in self.configs] for t in range(steps)]
        normals = torch.stack([torch.cat([pair[0] for pair in row])[mine] for row in drawn])
        lengths = torch.stack([torch.cat([pair[1] for pair in row])[mine] for row in drawn])
        return normals.to(self.device, job.dtype).contiguous(), lengths.to(self.device, job.dtype).contiguous()


@dataclass(frozen=True)
class Launch:
    """Steps of a part under way: `means` of their windows, (windows, 7, rows), on the device, complete at the event."""

    part: _Part
    means: Tensor
    event: torch.cuda.Event | None

    def read(self, series: Tensor) -> bool:
        """Wait, put the means into (windows, 7, config, row) on the host, and say whether all are finite."""
        part = self.part
        if self.event is None:
            finite, means = torch.isfinite(self.means).all(), self.means
        else:  # past the next launch, which is queued already
            stream = _side_stream(part.device, "read")
            means = torch.empty(self.means.shape, dtype=self.means.dtype, pin_memory=True)  # pageable memory comes at a tenth of the speed
            with torch.cuda.device(part.device), torch.cuda.stream(stream):
                stream.wait_event(self.event)
                finite = torch.isfinite(self.means).all()
                means.copy_(self.means, non_blocking=True)
                stream.synchronize()
        # Torch copies and widens on all cores.
        rows, configs = part.job.rows, part.configs
        if list(configs) == list(range(configs[0], configs[0] + len(configs))):
            series[:, :, configs[0] : configs[0] + len(configs)].flatten(2)[:, :, part.first : part.first + part.rows].copy_(means)
            return bool(finite)
        for position, config in enumerate(configs):
            low, high = max(position * rows, part.first), min((position + 1) * rows, part.first + part.rows)
            if low < high:
                chosen = means[:, :, low - part.first : high - part.first]
                series[:, :, config, low - position * rows : high - position * rows].copy_(chosen)
        return bool(finite)


def visible(device: torch.device) -> list[torch.device]:
    """The devices that a walk on `device` spreads over: all of the host's unless it names one."""
    if device.type != "cuda" or device.index is not None:
        return [device]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _parts(job: Job, devices: Sequence[torch.device], start: Tensor | None) -> list[_Part]:
    """Rows in even shares to the devices, as many of these as have something to do."""
    parts = []
    for program, configs in programs(job):
        rows = len(configs) * job.rows
        used = devices[: max(1, min(len(devices), rows // _ROWS_A_DEVICE))]
        unit = job.layer.neurons if job.gradient == "faithful" else 1  # neurons of a layer share their inputs
        ends = [rows // unit * i // len(used) * unit for i in range(len(used) + 1)]
        parts += [_Part(job, program, configs, a, b - a, d, start) for a, b, d in zip(ends, ends[1:], used, strict=False)]
    return parts


def walk(
    job: Job,
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
    noise: Noise | None = None,
    start: Tensor | None = None,
    devices: Sequence[torch.device] | None = None,
    enough: Callable[[Walk], Walk | None] | None = None,
) -> Walk:
    """Walk a job.

    Args:
        job: What to walk.
        device: ``cuda`` spreads rows over all visible GPUs, ``cuda:1`` takes that one; ``cpu`` in Triton's interpreter only.
        progress: Called with the number of steps done, after every launch (some hundredths of a second of work).
        enough: Not asked: launches are many windows long, and a whole walk takes seconds.
        noise: Stub (config, step) -> (normals of shape (rows, fan_in), lengths of shape (rows,)) in place of random numbers;
            for the faithful gradient (inputs of shape (layers, fan_in, batch), output normals of shape (rows, batch)).
        start: Initial weights, shape (config, rows, fan_in); else drawn.
        devices: In place of those that `device` stands for.

    Raises:
        InvalidArgument: `start` of another shape.
        WalkDiverged: NaN or Inf; the step is the first of the window that shows it, the walk ends before that window.
        WalkInterrupted: Ctrl-C, with the walk so far.
    """
    job.check_start(start)
    if job.gradient == "faithful":
        with _faithful:
            return _walk(job, devices or visible(device), progress, noise, start)
    return _walk(job, devices or visible(device), progress, noise, start)


def _walk(
    job: Job, devices: Sequence[torch.device], progress: Callable[[int], None] | None, noise: Noise | None, start: Tensor | None
) -> Walk:
    parts = _parts(job, devices, start)
    launch_steps = _LAUNCH / max(part.rows for part in parts) / (job.layer.fan_in / 128)
    launch_steps = min(launch_steps, _TABLE / max(1, *(part.table_width for part in parts)))
    if job.gradient == "faithful":
        launch_steps /= 16
    if noise is not None:
        launch_steps = min(launch_steps, 1000)
    launch_steps = max(1, int(launch_steps) // job.window) * job.window
    windows = -(-job.steps // job.window)
    series = torch.empty((windows, len(SERIES), job.configs, job.rows), dtype=torch.float64)
    lengths = np.full(windows, job.window, dtype=np.int64)
    lengths[-1] = job.steps - job.window * (windows - 1)

    def result(done: int) -> Walk:
        return Walk(job.window, lengths[:done], *series[:done].numpy().swapaxes(0, 1))

    read = 0  # windows that have reached the host
    waiting: list[Launch] = []
    pool = ThreadPoolExecutor(len(parts))
    try:
        for first in [*range(0, job.steps, launch_steps), None]:
            launched = [] if first is None else [part.launch(first, min(launch_steps, job.steps - first), noise) for part in parts]
            # The launch before is read while this one runs.
            if waiting:
                count = len(waiting[0].means)
                finite = list(pool.map(Launch.read, waiting, itertools.repeat(series[read : read + count])))
                if not all(finite):
                    bad = np.argwhere(~np.isfinite(series[read : read + count].numpy()).all((1, 3)))
                    window, config = bad[0]
                    begin = (read + int(window)) * job.window
                    end = begin + lengths[read + window]
                    text = f"NaN or Inf within steps {begin + 1} to {end} in config {config}, {job.rules[config]!r}"
                    raise WalkDiverged(text, begin + 1, result(read + int(window)), tuple(bad[bad[:, 0] == window, 1].tolist()))
                read += count
                if progress is not None:
                    progress(min(job.steps, read * job.window))
            waiting = launched
    except KeyboardInterrupt:
        step = min(job.steps, read * job.window)
        raise WalkInterrupted(f"interrupted at step {step} of {job.steps}", step, result(read)) from None
    finally:
        pool.shutdown()
    return result(windows)
