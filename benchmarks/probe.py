"""What watching a training costs: steps of a small GPT with and without a probe, in one interleaved run.

    python -m benchmarks.probe --device cpu
    python -m benchmarks.probe --device cuda

Trainings of a byte-level GPT of 3.3M parameters under AdamW, each with a model and an optimizer of its own, the same weights and tokens.
After a warm-up all take `--steps` steps in turn, `--repeats` times, each time from another one on. The table gives the median time of
a step, half of the range over the repeats, and the median over the repeats of the ratio to the training without a probe in the same
repeat, with a 95 % interval of that median (order statistics: no law of the noise is assumed). A second training without a probe shows
what of that is noise. Exit 0 = measured, 2 = bad usage, 3 = interrupted or failed.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor, nn

from benchmarks.command import Parser, at_least, device_of, heading, write_csv
from benchmarks.timing import Timing
from rwsim import DynamicsProbe
from rwsim.errors import InvalidArgument

NAME = "benchmarks.probe"
# Width, blocks, heads, bytes, positions.
MODELS = {"gpt": (256, 4, 4, 256, 128), "tiny": (16, 1, 2, 16, 8)}
# Options of the probe; None: none.
TRAININGS: dict[str, dict[str, Any] | None] = {
    "no probe": None,
    "no probe, again": None,
    "every=10": {"every": 10},
    "every=10, 64 neurons": {"every": 10, "neurons": 64},
    "every=1": {"every": 1},
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, width: int, blocks: int, heads: int, tokens: int, positions: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.position.weight)))


class Training:
    """Takes steps; the same ones whatever is watched."""

    def __init__(self, model: str, batch: int, device: torch.device, options: dict[str, Any] | None) -> None:
        shape = MODELS[model]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = GPT(*shape).to(device)
        draws = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(shape[3], (batch, shape[4] + 1), generator=draws).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.probe = None if options is None else DynamicsProbe(self.model, self.optimizer, **options)

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            logits = self.model(self.tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
            self.optimizer.step()


def _parser() -> Parser:
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt")
    add("--batch", type=int, help="sequences; default 8 on the CPU, 32 on CUDA")
    add("--repeats", type=int, default=60)
    add("--steps", type=int, default=10, help="of a repeat, a multiple of 10; short ones in turn meet the same state of the machine")
    add("--only", nargs="+", choices=TRAININGS, metavar="TRAINING", help=f"of {', '.join(TRAININGS)}; no probe is always there")
    add("--out", type=Path, metavar="FILE.csv", help="write the table there too")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    return _parser().run(lambda options: _measure(options, arguments), arguments)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    device = device_of(options.device)
    cuda = device.type == "cuda"
    options.batch = options.batch if options.batch is not None else 32 if cuda else 8
    at_least(options, batch=1, repeats=1, steps=1)
    if options.steps % 10:
        raise InvalidArgument(
            "--steps", "must be a multiple of 10, so that every repeat measures as often", options.steps, "for example 100"
        )
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InvalidArgument("--out", "must be a file in a directory that is there", str(options.out))
    title = heading(NAME, device, arguments)
    count = sum(param.numel() for param in Training(options.model, 1, torch.device("cpu"), None).model.parameters())
    print(f"{title}\n{options.model}: {count:,} parameters, batch {options.batch}; {options.repeats} repeats of {options.steps} steps\n")
    only = {"no probe", *(options.only or TRAININGS)}
    timings = {name: _built(options, device, given) for name, given in TRAININGS.items() if name in only}
    going = list(timings.values())
    for turn in range(options.repeats):
        for number in range(len(going)):
            going[(turn + number) % len(going)].repeat()
    reference = timings["no probe"].seconds
    print(f"{'training':<22}  {'ms a step':>10}  {'±':>6}  {'x no probe':>10}  {'95 %':>16}")
    rows = []
    for name, timing in timings.items():
        ratios = sorted(mine / its for mine, its in zip(timing.seconds, reference, strict=True))
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        milliseconds = 1e3 * timing.median / timing.steps
        print(f"{name:<22}  {milliseconds:>10.3f}  {timing.spread:>6.1%}  {ratio:>10.4f}  {low:>7.4f}, {high:>7.4f}")
        rows.append({
            "training": name, "ms_per_step": milliseconds, "spread": timing.spread, "ratio": ratio, "low": low, "high": high,
            "model": options.model,
            "parameters": count, "batch": options.batch, "steps": options.steps, "repeats": options.repeats,
            "run": " | ".join(title.splitlines()),
        })  # fmt: skip
    print("\n±: half of the range over the repeats.")
    if options.out is not None:
        write_csv(options.out, rows)


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """At least 95 % for the median of what ascending values are drawn from; the whole range where there are fewer than six.

    Example:
        >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        (2.0, 8.0)
    """
    cut = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return ordered[cut], ordered[-1 - cut]


def _built(options: argparse.Namespace, device: torch.device, given: dict[str, Any] | None) -> Timing:
    def build() -> Training:
        return Training(options.model, options.batch, device, given)

    return Timing(build, device, first=1).prepare(0.0, options.steps, options.steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
