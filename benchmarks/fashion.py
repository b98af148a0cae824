"""Rotational optimizers on a small real run: a convolutional network with batch norm on Fashion-MNIST, beside their baselines.

    python -m benchmarks.fashion --search   # tunes the BASELINES on a validation split (minutes on an H200), prints SETTINGS
    python -m benchmarks.fashion            # every baseline and its rotational variant with the same settings (minutes)

The variant gets the baseline's hyperparameters as they are (zero-shot, as in section 5.1 of the paper), its initializations,
data order and augmentation. The search trains on all but the last 10,000 training images and judges on those; the runs train
on all of them, and see the test set once, at their end. All seeds of a configuration train side by side (`benchmarks.stacked`).

Verdict: with a standard error of sqrt(se_1^2 + se_2^2), `on par` if the mean difference is within two of them of zero,
`above` or `below` beyond. The paired standard error, that of the differences seed by seed, stands beside it.

`--out DIR` gets fashion.csv (fashion-search.csv): accuracies are shares, rotations radians per step (root mean square over the
neurons of the middle convolution in mid-training), seconds those of all seeds of a configuration together.
The first configuration of a process pays for the start of the device.
Exit 0 = measured, 2 = bad usage or data, 3 = interrupted or failed.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Parser, at_least, device_of, heading, write_csv
from benchmarks.stacked import CHANNELS, Networks, accuracy, angle_sq, train
from rwsim.errors import InvalidArgument
from rwsim.experiments.idx import FOLDER, Images, load
from rwsim.rotational import RotationalAdamW, RotationalLion, RotationalOptimizer, RotationalSGDM
from rwsim.rotational.rate import rotation_rate

NAME = "benchmarks.fashion"


@dataclass(frozen=True)
class Setting:
    """What the search chooses."""

    lr: float
    weight_decay: float


# Of baseline and variant alike, found by --search for the baselines (NVIDIA H200, 2026-11-28). The best lie at an edge of the grid; beyond
# lr 0.02, 0.5 and 0.002 validation accuracy gains 0.14 points at most.
SETTINGS: dict[str, Setting] = {
    "adamw": Setting(lr=0.04, weight_decay=0.015),
    "sgdm": Setting(lr=1.0, weight_decay=5e-5),
    "lion": Setting(lr=0.004, weight_decay=1.0),
}


@dataclass(frozen=True)
class Contest:
    """A baseline, its rotational variant, what both are given beside a setting, and the grid of the search."""

    baseline: Callable[..., torch.optim.Optimizer]
    variant: type[RotationalOptimizer]
    lrs: tuple[float, ...]
    decays: tuple[float, ...]
    hyper: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> list[Setting]:
        return [Setting(lr, decay) for lr, decay in itertools.product(self.lrs, self.decays)]


CONTESTS: dict[str, Contest] = {
    "adamw": Contest(torch.optim.AdamW, RotationalAdamW, (5e-3, 1e-2, 2e-2, 4e-2), (0.015, 0.05, 0.15)),
    "sgdm": Contest(torch.optim.SGD, RotationalSGDM, (0.1, 0.2, 0.5, 1.0), (5e-5, 1.5e-4, 5e-4), {"momentum": 0.9}),
    "lion": Contest(partial(RotationalLion, rotational=False), RotationalLion, (5e-4, 1e-3, 2e-3, 4e-3), (0.3, 1.0, 3.0)),
}
# The last: Algorithm 1 with a learned gain on each neuron of the head, as section 4 of the paper offers for scale-sensitive weights.
BASELINE, VARIANT, GAINED = "baseline", "rotational", "head gain"
# End of the name of a variant whose layers turn, step by step, as those of the baseline were measured to.
REPLAYED = ", replayed"
_PLAIN, _UNCENTRED = {"rotational": False}, {"zero_mean": False}
# What a variant changes: options of the first convolution, of the other convolutions, of the head. The first is Algorithm 1 as it stands;
# the others take parts of it back, to see which costs what.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    VARIANT: {},
    GAINED: {},
    "head plain": {"head": _PLAIN},
    "head uncentred": {"head": _UNCENTRED},
    "first uncentred": {"first": _UNCENTRED},
    "first plain": {"first": _PLAIN},
    "uncentred": {"first": _UNCENTRED, "middle": _UNCENTRED, "head": _UNCENTRED},
    "uncentred, head plain": {"first": _UNCENTRED, "middle": _UNCENTRED, "head": _PLAIN},
    "first uncentred, head plain": {"first": _UNCENTRED, "head": _PLAIN},
    "only first": {"middle": _PLAIN, "head": _PLAIN},
    "head plain, replayed": {"head": _PLAIN},
    "uncentred, head plain, replayed": {"first": _UNCENTRED, "middle": _UNCENTRED, "head": _PLAIN},
}
# The validation split is this share of the training images: 10,000 of 60,000. Its seeds are not those of the runs.
_VALIDATION = 6
_SEARCH_SEEDS = (1000, 1001)


def _parser() -> Parser:
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--data", type=Path, default=FOLDER, metavar="DIR", help=f"of the four IDX files; default {FOLDER}")
    add("--out", type=Path, metavar="DIR", help="write the CSV there; made if it is missing")
    add("--seeds", type=int, default=8, help="runs of each configuration, at least 2; default 8")
    add("--epochs", type=int, default=10)
    add("--batch", type=int, default=128)
    add("--optimizers", nargs="+", choices=CONTESTS, default=list(CONTESTS), metavar="NAME", help=f"of {', '.join(CONTESTS)}; default all")
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[VARIANT, GAINED],
        metavar="NAME",
        help=f"of {'; '.join(VARIANTS)}; default the first two",
    )
    add("--search", action="store_true", help="instead: tune the baselines on the validation split")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Train, print, write; the exit status."""
    return _parser().run(lambda options: _measure(options, arguments), arguments)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    at_least(options, seeds=2, epochs=1, batch=2)
    training, test = load(options.data)
    held = len(training) // _VALIDATION
    if (fewest := len(training) - held) < options.batch:
        raise InvalidArgument("--batch", f"must be at most {fewest}, the training images", options.batch, "take a smaller batch")
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument("--out", "must be a directory that can be written", str(options.out), error.strerror or "") from None
    device = device_of(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    print(heading(NAME, device, arguments))
    names = list(dict.fromkeys(options.optimizers))
    if options.search:
        print(f"search: {len(training) - held} training images, {held} of validation, {options.epochs} epochs\n", flush=True)
        split = training.part(0, len(training) - held), training.part(len(training) - held, len(training))
        rows = _search(names, split[0].to(device), split[1].to(device), options)
    else:
        print(f"{len(training)} training images, {len(test)} of the test, {options.epochs} epochs, {options.seeds} seeds\n", flush=True)
        rows = _runs(names, training.to(device), test.to(device), options)
    if options.out is not None:
        file = options.out / ("fashion-search.csv" if options.search else "fashion.csv")
        write_csv(file, rows)
        print(f"\nwritten: {file}")


def _runs(names: Sequence[str], training: Images, test: Images, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every configuration: a row a seed, a line of the table an optimizer."""
    rows: list[dict[str, Any]] = []
    print(_line("", BASELINE, VARIANT, "difference", "paired s.e.", "s.e.", "verdict"), flush=True)
    turns = []
    for name in names:
        turned = Turned() if any(variant.endswith(REPLAYED) for variant in options.variants) else None
        found = {BASELINE: run(name, BASELINE, training, test, options, turned)}
        for variant in options.variants:
            found[variant] = run(name, variant, training, test, options, turned)
            accuracies = ([row["test_accuracy"] for row in found[v]] for v in (BASELINE, variant))
            print(compared(name, *accuracies) + ("" if variant == VARIANT else f" ({variant})"), flush=True)
        rows += [row for each in found.values() for row in each]
        turns += [_turning(name, variant, found[variant]) for variant in found]
    print("\nTest accuracy in percent, mean ± standard error over seeds; verdict: beyond two s.e. of zero, or not.")
    print("\nRotation of the middle convolution in mid-training, RMS over neurons, radians per step:", *turns, sep="\n")
    return rows


class Turned:
    """How a run's layers turned, step by step: RMS over the neurons of all networks, one list a parameter group of one tensor."""

    def __init__(self) -> None:
        self.angles: list[list[Tensor]] = []

    def record(self, optimizer: torch.optim.Optimizer) -> None:
        """Listen to an optimizer."""
        layers = [group["params"][0] for group in optimizer.param_groups if len(group["params"]) == 1]
        self.angles = [[] for _ in layers]
        before: list[Tensor] = []

        def keep(*_: Any) -> None:
            before[:] = [param.detach().clone() for param in layers]

        def note(*_: Any) -> None:
            for angles, old, param in zip(self.angles, before, layers, strict=True):
                # The head is (network, class, feature).
                old, new = (x.flatten(0, -2) if x.dim() == 3 else x for x in (old, param.detach()))
                angles.append(angle_sq(old, new, 1).sqrt())

        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(note)

    def replay(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the same groups turn so."""
        layers = [group for group in optimizer.param_groups if len(group["params"]) == 1]
        steps = zip(*self.angles, strict=True)

        def set_next(*_: Any) -> None:
            for group, angle in zip(layers, next(steps), strict=True):
                group["rotation"] = angle.view(())

        optimizer.register_step_pre_hook(set_next)


def run(
    name: str, variant: str, training: Images, test: Images, options: argparse.Namespace, turned: Turned | None = None
) -> list[dict[str, Any]]:
    """One configuration, all its seeds. The baseline is recorded in `turned`; a variant of that name replays it."""
    contest, setting = CONTESTS[name], SETTINGS[name]
    seeds = range(options.seeds)
    networks = Networks(seeds, channels=CHANNELS, device=training.pixels.device, gained=variant == GAINED)
    make = contest.baseline if variant == BASELINE else contest.variant
    optimizer = make(networks.groups([(setting.lr, setting.weight_decay)], **VARIANTS.get(variant, {})), **contest.hyper)
    rate = rotation_rate(contest.variant.rule)
    if isinstance(optimizer, RotationalOptimizer):
        optimizer.centre()
    if turned is not None and variant == BASELINE:
        turned.record(optimizer)
    elif turned is not None and variant.endswith(REPLAYED):
        turned.replay(optimizer)
    found = train(networks, optimizer, training, options.epochs, options.batch, rate)
    return [
        {
            "optimizer": name, "variant": variant, "seed": seed, "test_accuracy": right, "train_loss": loss, "seconds": found.seconds,
            "rotation": rotation, "predicted_rotation": found.predicted, "lr": setting.lr, "weight_decay": setting.weight_decay,
            "epochs": options.epochs, "batch": options.batch,
        }
        for seed, right, loss, rotation in zip(seeds, accuracy(networks, test), found.loss, found.rotation, strict=True)
    ]  # fmt: skip


def compared(name: str, baseline: Sequence[float], variant: Sequence[float]) -> str:
    """A line of the table, from accuracies of the same seeds."""
    (low, low_error), (high, high_error) = (_mean(100 * x for x in accuracies) for accuracies in (baseline, variant))
    difference, paired = _mean(100 * (b - a) for a, b in zip(baseline, variant, strict=True))
    error = math.hypot(low_error, high_error)
    said = "on par" if abs(difference) <= 2 * error else "above" if difference > 0 else "below"
    cells = f"{low:.2f} ± {low_error:.2f}", f"{high:.2f} ± {high_error:.2f}", f"{difference:+.3f}", f"{paired:.3f}", f"{error:.3f}"
    return _line(name, *cells, said)


def _mean(values: Any) -> tuple[float, float]:
    """Mean and its standard error."""
    found = list(values)
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))


def _line(*cells: str) -> str:
    widths = (9, 14, 14, 10, 11, 7, 0)
    return "  ".join(f"{cell:<{w}}" if i in (0, 6) else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))


def _turning(name: str, variant: str, rows: Sequence[Mapping[str, Any]]) -> str:
    measured = _rotation(rows)
    predicted = rows[0]["predicted_rotation"]
    return f"  {name:<6} {variant:<27} {measured:.5f}, predicted {predicted:.5f}: {measured / predicted:.3f} x ({rows[0]['seconds']:.0f} s)"


def _rotation(rows: Sequence[Mapping[str, Any]]) -> float:
    return math.sqrt(statistics.fmean(row["rotation"] ** 2 for row in rows))


def _search(names: Sequence[str], training: Images, validation: Images, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Baselines over their grids, a grid side by side: a row a setting and seed; prints the lines of `SETTINGS`."""
    rows: list[dict[str, Any]] = []
    for name in names:
        contest = CONTESTS[name]
        grid = contest.grid
        networks = Networks(_SEARCH_SEEDS, len(grid), CHANNELS, training.pixels.device)
        optimizer = contest.baseline(networks.groups([(one.lr, one.weight_decay) for one in grid]), **contest.hyper)
        found = train(networks, optimizer, training, options.epochs, options.batch, strict=False)
        rights, losses, count = accuracy(networks, validation), found.loss, len(_SEARCH_SEEDS)
        means = [statistics.fmean(rights[at : at + count]) for at in range(0, len(rights), count)]
        for place, one in enumerate(grid):
            print(f"{name:<6} lr {one.lr:<7g} weight_decay {one.weight_decay:<7g} validation accuracy {100 * means[place]:.2f} %")
            rows += [
                {
                    "optimizer": name, "lr": one.lr, "weight_decay": one.weight_decay, "seed": seed, "validation_accuracy": rights[at],
                    "train_loss": losses[at], "seconds": found.seconds, "epochs": options.epochs, "batch": options.batch,
                }
                for at, seed in enumerate(_SEARCH_SEEDS, place * count)
            ]  # fmt: skip
        best = grid[means.index(max(means))]
        ends = (("lr", contest.lrs), ("weight_decay", contest.decays))
        edges = [key for key, values in ends if getattr(best, key) in (values[0], values[-1])]
        note = f"  # {' and '.join(edges)} at the edge of the grid" if edges else ""
        print(f"paste into SETTINGS ({found.seconds:.0f} s):")
        print(f'    "{name}": Setting(lr={best.lr:g}, weight_decay={best.weight_decay:g}),{note}\n', flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
