"""What the probe measured, averaged over windows of steps: small enough to keep, enough to judge and draw again from."""

import csv
import gzip
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rwsim.errors import InvalidArgument
from rwsim.theory.noise import Array

NAME = "records.csv.gz"
# Windows of a run, at most.
WINDOWS = 120
_KEYS = ("case", "seed", "step", "layer")


@dataclass(frozen=True)
class Layer:
    """A layer's name, the fan-in of its neurons, how many there are, and whether they are scale-invariant."""

    name: str
    fan_in: int
    neurons: int
    invariant: bool


@dataclass(frozen=True)
class Series:
    """What was measured of a case.

    Attributes:
        layers: In the order of the axis `layer`.
        seeds: In the order of the axis `seed`.
        step: Last step of each window, shape (time,).
        values: By quantity, shape (seed, time, layer): the mean over a window's measured steps. NaN where a run had diverged.
        runs: By seed, what the training came to (held_out_loss, accuracy, seconds, or diverged with its step).
    """

    layers: tuple[Layer, ...]
    seeds: tuple[int, ...]
    step: NDArray[np.int64]
    values: Mapping[str, Array]
    runs: tuple[Mapping[str, Any], ...]


Records = Mapping[str, Series]


def windows(
    step: NDArray[np.int64], values: Mapping[str, Array], steps: int, most: int = WINDOWS
) -> tuple[NDArray[np.int64], dict[str, Array]]:
    """Means over equal windows of a run of `steps`, at most `most`, each with a measurement: (last step, values (time, layer)).

    Example:
        >>> last, found = windows(np.arange(1, 241), {"norm": np.arange(240.0)[:, None]}, 240)
        >>> last[:2].tolist(), found["norm"][:2, 0].tolist()
        ([2, 4], [0.5, 2.5])
    """
    count = min(most, len(step))
    edges = np.linspace(0, steps, count + 1).round().astype(int)
    at = np.searchsorted(edges, step, side="left") - 1
    full = [k for k in range(count) if (at == k).any()]
    return edges[1:][full], {name: np.stack([value[at == k].mean(0) for k in full]) for name, value in values.items()}


def counts(step: NDArray[np.int64], every: int) -> list[int]:
    """How many measurements each window has, of which `step` has the mean: they are `every` steps apart, the first at step 1.

    Example:
        >>> counts(np.array([11, 31, 46]), every=10)
        [3, 1, 2]
    """
    found: list[int] = []
    for middle in (step - 1) / every:
        found.append(round(2 * (middle - sum(found))) + 1)
    return found


def write_records(records: Records, path: Path) -> None:
    """One line a case, seed, window and layer; whole or not at all."""
    names = list(next(iter(records.values())).values)
    draft = path.with_name(f"{path.name}.part")
    with gzip.open(draft, "wt", newline="", compresslevel=6) as file:
        lines = csv.writer(file)
        lines.writerow([*_KEYS, *names])
        for case, series in records.items():
            for s, seed in enumerate(series.seeds):
                for t, step in enumerate(series.step):
                    for k, layer in enumerate(series.layers):
                        lines.writerow([case, seed, int(step), layer.name, *(f"{series.values[name][s, t, k]:.6g}" for name in names)])
    os.replace(draft, path)


def read_records(path: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Series]:
    """The records of a file, with what `settings.json` says of each case.

    Raises:
        InvalidArgument: No such file, or one that is cut off or does not hold what the settings say.
    """
    rows: dict[str, list[list[str]]] = {}
    try:
        with gzip.open(path, "rt", newline="") as file:
            lines = csv.reader(file)
            names = next(lines)[len(_KEYS) :]
            for row in lines:
                rows.setdefault(row[0], []).append(row)
        found = {}
        for case, told in facts.items():
            layers = tuple(Layer(**layer) for layer in told["layers"])
            seeds = tuple(told["seeds"])
            table = np.array([[float(value) for value in row[len(_KEYS) :]] for row in rows[case]])
            table = table.reshape(len(seeds), -1, len(layers), len(names))
            step = np.array([int(row[2]) for row in rows[case][: table.shape[1] * len(layers) : len(layers)]])
            values = {name: table[..., i] for i, name in enumerate(names)}
            found[case] = Series(layers, seeds, step, values, tuple(told["runs"]))
    except (OSError, EOFError, zlib.error, csv.Error, StopIteration, ValueError, KeyError, IndexError) as error:
        raise InvalidArgument("--out", f"must hold whole {path.name} and settings.json", str(path.parent), type(error).__name__) from None
    return found


def layer_facts(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """As `settings.json` holds them."""
    return [vars(layer) for layer in layers]
