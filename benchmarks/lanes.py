"""What a training costs among others: steps of several lanes side by side, in CUDA graphs that they share.

    python -m benchmarks.lanes --lanes 1 5 10 20 --network resnet gpt

Each row trains so many lanes of one recipe and different seeds on drawn data, measured every tenth step as in the studies. The table gives
the time of a step over the number of lanes, after the first 50 steps, which capture and warm up; and the ratio to one lane without graphs,
which is the first row of a network. On a CPU lanes would go one after the other: one is measured.

Exit 0 = measured, 2 = bad usage, 3 = interrupted or failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Parser, at_least, device_of, heading, write_csv
from rwsim.errors import InvalidArgument
from rwsim.experiments.data import VOCABULARY, Data, ImageData, TextData
from rwsim.experiments.idx import CLASSES, SIDE, Images
from rwsim.experiments.lot import Run, go
from rwsim.experiments.train import Recipe

NAME = "benchmarks.lanes"
# Batch and size of each network: as the studies train them on a GPU, and a tiny one.
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet": (128, {}), "resnet18": (128, {}), "vgg": (128, {}), "gpt": (32, {"width": 256, "depth": 4, "heads": 4, "context": 128}),
}  # fmt: skip
TINY: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet": (4, {"width": 2, "blocks": 1}), "resnet18": (4, {"width": 2, "blocks": 1}), "vgg": (4, {"width": 4}),
    "gpt": (4, {"width": 8, "depth": 1, "heads": 2, "context": 8}),
}  # fmt: skip
_HYPER = {"lr": 1e-3, "weight_decay": 0.1}


def _data(recipe: Recipe, device: torch.device) -> Data:
    draws = torch.Generator().manual_seed(0)
    if recipe.text:
        drawn = torch.randint(0, VOCABULARY, (100_000,), generator=draws, dtype=torch.uint8)
        return TextData(drawn, drawn[:10_000], recipe.size["context"]).to(device)
    count = 10_000
    pixels = torch.randint(0, 256, (count, SIDE, SIDE), generator=draws, dtype=torch.uint8)
    images = Images(pixels, torch.randint(0, CLASSES, (count,), generator=draws))
    return ImageData(images, images.part(0, 1000), 0.5, 0.29).to(device)


def milliseconds(recipe: Recipe, lanes: int, device: torch.device, capture: bool) -> float:
    """Of a step, over the number of lanes."""
    data = _data(recipe, device)
    runs = [Run(recipe, seed, data, device) for seed in range(lanes)]
    marks = [(done // lanes, time.perf_counter()) for done in go(runs, capture)]
    (first, began), (last, ended) = marks[0], marks[-1]
    return 1e3 * (ended - began) / (last - first) / lanes


def _parser() -> Parser:
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--lanes", type=int, nargs="+", help="on CUDA; default 1 5 10 20")
    add("--network", nargs="+", choices=NETWORKS, default=["resnet", "gpt"])
    add("--optimizer", choices=("sgdm", "adamw", "lion"), default="adamw")
    add("--rotational", action="store_true", help="its rotational variant")
    add("--autocast", action="store_true", help="compute in bf16")
    add("--steps", type=int, default=250, help="of a row, more than 50; default 250")
    add("--tiny", action="store_true", help="tiny networks")
    add("--out", type=Path, metavar="FILE.csv", help="write the table there too")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    return _parser().run(lambda options: _measure(options, arguments), arguments)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    at_least(options, steps=51)
    lanes_of_a_graph = options.lanes or [1, 5, 10, 20]
    if min(lanes_of_a_graph) < 1:
        raise InvalidArgument("--lanes", "must be at least 1", min(lanes_of_a_graph), "for example --lanes 1 5 10 20")
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InvalidArgument("--out", "must be a file in a directory that is there", str(options.out))
    device = device_of(options.device)
    if options.lanes and device.type != "cuda":
        remedy = "leave it out, or take --device cuda"
        raise InvalidArgument("--lanes", "cannot be given on a CPU, where lanes share no graphs and one is measured", options.lanes, remedy)
    title = heading(NAME, device, arguments)
    print(f"{title}\n\n{'network':<10}{'lanes':>6}{'graphs':>8}{'ms a step and lane':>20}{'x one plain lane':>18}")
    rows = []
    for name in options.network:
        batch, size = (TINY if options.tiny else NETWORKS)[name]
        hyper = _HYPER | ({"momentum": 0.9} if options.optimizer == "sgdm" else {})
        variant: dict[str, Any] | None = {} if options.rotational else None
        recipe = Recipe(name, options.optimizer, hyper, options.steps, batch, size, autocast=options.autocast, rotational=variant)
        plain = milliseconds(recipe, 1, device, capture=False)
        captured = [(lanes, milliseconds(recipe, lanes, device, True)) for lanes in lanes_of_a_graph] if device.type == "cuda" else []
        for graphs, lanes, taken in [(False, 1, plain), *((True, *one) for one in captured)]:
            print(f"{name:<10}{lanes:>6}{'yes' if graphs else 'no':>8}{taken:>20.3f}{taken / plain:>18.3f}", flush=True)
            rows.append({
                "network": name, "optimizer": options.optimizer, "rotational": options.rotational, "autocast": options.autocast,
                "batch": batch, "lanes": lanes, "graphs": graphs, "ms_per_step_and_lane": taken, "ratio": taken / plain,
                "run": " | ".join(title.splitlines()),
            })  # fmt: skip
    if options.out is not None:
        write_csv(options.out, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
