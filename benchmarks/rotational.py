"""What a step of the rotational optimizers costs, beside torch's own optimizers, in one interleaved run.

    python -m benchmarks.rotational --device cpu    # 10M parameters of three transformer blocks
    python -m benchmarks.rotational --device cuda   # GPT-2 124M's shapes

Every optimizer has parameters of its own; gradients are the same, fixed and shared. After a warm-up all take `--steps` steps
in turn, `--repeats` times, so that a machine that slows down slows all of them, each time from another one on. The table gives
the median time of a step, half of the range over the repeats, and the median over the repeats of the ratio to AdamW foreach of
the same repeat; the optimizer's state in bytes a parameter; on CUDA also the most memory of a step (parameters, gradients,
state and temporaries), and the time of a step over that of copying as many bytes as it reads and writes.
A row that this device or torch cannot run says why.
Exit 0 = measured, 2 = bad usage, 3 = interrupted or failed.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Parser, at_least, device_of, heading, write_csv
from benchmarks.timing import Timing, Walker
from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW, RotationalLion, RotationalSGDM, RotationalWrapper

NAME = "benchmarks.rotational"
Shape = tuple[int, ...]


def transformer(width: int, blocks: int, tokens: int, positions: int) -> list[Shape]:
    """Parameters of a GPT: embeddings, then of each block two norms, attention and MLP with biases; a norm at the end."""
    norm: list[Shape] = [(width,), (width,)]
    block = [*norm, *_linear(width, 3 * width), *_linear(width, width), *norm, *_linear(width, 4 * width), *_linear(4 * width, width)]
    return [(tokens, width), (positions, width), *block * blocks, *norm]


def _linear(fan_in: int, fan_out: int) -> list[Shape]:
    return [(fan_out, fan_in), (fan_out,)]


# Width, blocks, tokens and positions.
MODELS: dict[str, tuple[int, int, int, int]] = {
    "10m": (512, 3, 768, 256),
    "gpt2": (768, 12, 50257, 1024),
    "1b": (2048, 18, 50257, 1024),
    "tiny": (8, 1, 16, 4),
}

_ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
REFERENCE = "AdamW foreach"
OPTIMIZERS: dict[str, Callable[[list[dict]], Any]] = {
    REFERENCE: lambda groups: torch.optim.AdamW(groups, **_ADAMW, foreach=True),
    "AdamW for-loop": lambda groups: torch.optim.AdamW(groups, **_ADAMW, foreach=False, fused=False),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, **_ADAMW, fused=True),
    "SGD foreach": lambda groups: torch.optim.SGD(groups, **_SGD, foreach=True),
    "SGD fused": lambda groups: torch.optim.SGD(groups, **_SGD, fused=True),
    "RotationalAdamW": lambda groups: RotationalAdamW(groups, **_ADAMW),
    "RotationalSGDM": lambda groups: RotationalSGDM(groups, **_SGD),
    "RotationalLion": lambda groups: RotationalLion(groups, lr=1e-4),
    "RotationalLion graph": lambda groups: Captured(RotationalLion(groups, lr=1e-4, capturable=True)),
    "RotationalSGDM graph": lambda groups: Captured(RotationalSGDM(groups, **_SGD, capturable=True)),
    "RotationalAdamW foreach": lambda groups: RotationalAdamW(groups, **_ADAMW, fused=False, foreach=True),
    "RotationalAdamW plain": lambda groups: RotationalAdamW(groups, **_ADAMW, fused=False, foreach=False),
    "RotationalAdamW graph": lambda groups: Captured(RotationalAdamW(groups, **_ADAMW, capturable=True)),
    "RotationalWrapper(AdamW)": lambda groups: RotationalWrapper(torch.optim.AdamW(groups, **_ADAMW, foreach=True), rotation="adamw"),
}


class Captured:
    """An optimizer whose step is a replay of a CUDA graph; gradients stay where they are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def state(self) -> Any:
        return self.inner.state

    def step(self) -> None:
        if self.graph is None:
            if not torch.cuda.is_available():
                raise RuntimeError("CUDA graphs need CUDA")
            self.inner.step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.inner.step()
        self.graph.replay()


@dataclass(frozen=True)
class Row:
    """An optimizer, measured; or the reason why not.

    Attributes:
        timing: Of its repeats.
        ratio: To the reference, the median over repeats.
        state: Bytes of its state.
        peak: Bytes of parameters, gradients, state and temporaries at most; None but on CUDA.
        floor: Time of a step over that of moving its bytes at the bandwidth of a copy; None but on CUDA.
    """

    name: str
    timing: Timing | None = None
    ratio: float | None = None
    state: int = 0
    peak: int | None = None
    floor: float | None = None
    reason: str = ""


def _parser() -> Parser:
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, help="default 10m on the CPU, gpt2 on CUDA")
    add("--repeats", type=int, default=15)
    add("--steps", type=int, help="of a repeat; default 2 on the CPU, 100 on CUDA")
    add("--rows", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="ROW", help=f"of {', '.join(OPTIMIZERS)}; default all")
    add("--out", type=Path, metavar="FILE.csv", help="write the table there too")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    return _parser().run(lambda options: _measure(options, arguments), arguments)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    device = device_of(options.device)
    cuda = device.type == "cuda"
    options.steps = options.steps if options.steps is not None else 100 if cuda else 2
    at_least(options, repeats=1, steps=1)
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InvalidArgument("--out", "must be a file in a directory that is there", str(options.out))
    model = options.model or ("gpt2" if cuda else "10m")
    shapes = transformer(*MODELS[model])
    count = sum(map(math.prod, shapes))
    title = heading(NAME, device, arguments)
    size = f"{count:,} parameters in {len(shapes)} tensors, float32"
    print(f"{title}\n{model}: {size}; {options.repeats} repeats of {options.steps} steps\n", flush=True)
    rows = measure([name for name in OPTIMIZERS if name in options.rows], shapes, device, options.steps, options.repeats)
    print(f"{'optimizer':<24}  {'ms a step':>10}  {'±':>6}  {'x AdamW foreach':>15}  {'state bytes':>11}  {'peak MiB':>9}  {'x floor':>7}")
    print(*(_line(row, count) for row in rows), sep="\n")
    print("\n±: half of the range over the repeats. state bytes: a parameter. x floor: over the time to copy as many bytes.")
    if options.out is not None:
        write_csv(options.out, [_record(row, title, model, count, options) for row in rows])


def measure(names: Sequence[str], shapes: Sequence[Shape], device: torch.device, steps: int, repeats: int) -> list[Row]:
    """Build and warm up all, then repeat them in turn."""
    draws = torch.Generator(device).manual_seed(0)
    grads = [torch.randn(shape, generator=draws, device=device) * 1e-3 for shape in shapes]
    runs: dict[str, tuple[Timing, Stepper] | str] = {name: _built(name, grads, device, steps) for name in names}
    going = [run for run in runs.values() if not isinstance(run, str)]
    for turn in range(repeats):
        first = turn % max(1, len(going))
        for number in range(len(going)):
            going[(first + number) % len(going)][0].repeat()
    copying = _copying(device) if device.type == "cuda" else 0.0
    # `seconds` are in order of repeats, whoever began.
    reference = runs.get(REFERENCE)
    rows = []
    for name, run in runs.items():
        if isinstance(run, str):
            rows.append(Row(name, reason=run))
            continue
        timing, stepper = run
        ratio = None
        if reference is not None and not isinstance(reference, str):
            ratio = statistics.median(mine / its for mine, its in zip(timing.seconds, reference[0].seconds, strict=True))
        peak = floor = None
        if device.type == "cuda":
            peak = 2 * _bytes(grads) + stepper.state + stepper.temporary(device)
            # Weights and state are read and written, gradients read.
            floor = timing.median / timing.steps / ((3 * _bytes(grads) + 2 * stepper.state) * copying)
        rows.append(Row(name, timing, ratio, stepper.state, peak, floor))
    return rows


class Stepper:
    """An optimizer with parameters of its own under given gradients; matrices decay, vectors do not."""

    def __init__(self, name: str, grads: Sequence[Tensor]) -> None:
        draws = torch.Generator(grads[0].device).manual_seed(1)
        params = [torch.randn(grad.shape, generator=draws, device=grad.device).mul_(0.02).requires_grad_() for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        decay = 5e-4 if "SGD" in name else 1.0 if "Lion" in name else 0.1
        matrices, vectors = ([param for param in params if (param.dim() > 1) is kind] for kind in (True, False))
        self.optimizer = OPTIMIZERS[name]([{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}])

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step()

    @property
    def state(self) -> int:
        return _bytes(value for held in self.optimizer.state.values() for value in held.values() if isinstance(value, Tensor))

    def temporary(self, device: torch.device) -> int:
        """Bytes that a step allocates on top of what is there."""
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self(1)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


def _copying(device: torch.device) -> float:
    """Seconds a byte, read or written, of a copy on the device; the median of 20."""
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(25):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize(device)
        found.append(1e-3 * events[0].elapsed_time(events[1]))
    return statistics.median(found[5:]) / (2 * _bytes([source]))


def _built(name: str, grads: Sequence[Tensor], device: torch.device, steps: int) -> tuple[Timing, Stepper] | str:
    """Built and warmed up; or why it cannot be."""
    made: list[Stepper] = []

    def build() -> Walker:
        made.append(Stepper(name, grads))
        return made[0]

    try:
        return Timing(build, device, first=1).prepare(0.0, steps, steps), made[0]
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _line(row: Row, count: int) -> str:
    if row.timing is None:
        return f"{row.name:<24}  {row.reason}"
    peak = "-" if row.peak is None else f"{row.peak / 2**20:.0f}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    floor = "-" if row.floor is None else f"{row.floor:.2f}"
    milliseconds = 1e3 * row.timing.median / row.timing.steps
    return (
        f"{row.name:<24}  {milliseconds:>10.3f}  {row.timing.spread:>6.1%}  {ratio:>15}  {row.state / count:>11.2f}  {peak:>9}  {floor:>7}"
    )


def _record(row: Row, title: str, model: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    timing = row.timing
    found: dict[str, Any] = dict.fromkeys(("ms_per_step", "spread", "state_bytes_per_parameter"), "")
    if timing is not None:
        found = {"ms_per_step": 1e3 * timing.median / timing.steps, "spread": timing.spread, "state_bytes_per_parameter": row.state / count}
    ratio, peak, floor = ("" if value is None else value for value in (row.ratio, row.peak, row.floor))
    return {
        "optimizer": row.name, **found, "ratio_to_adamw_foreach": ratio, "peak_bytes": peak, "ratio_to_floor": floor,
        "reason": row.reason, "model": model, "parameters": count, "steps": options.steps, "repeats": options.repeats,
        "run": " | ".join(title.splitlines()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
