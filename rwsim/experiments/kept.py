"""What a study keeps: `runs.csv`, a line a run; `series.csv.gz`, what was measured of final arms; `settings.json` has all arms.

A line of the series holds the means of a quantity over windows of steps, in one column, by spaces: ``step`` (mean of the measured ones),
``norm``, ``rotation`` and ``spread`` of a layer; ``loss`` (training, over equal windows of the run); ``neurons``: rotation of a layer's
first 64 neurons over the last fifth of the run, of the first seed.
"""

import csv
import gzip
import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rwsim.errors import InvalidArgument
from rwsim.experiments.lanes import Outcome
from rwsim.experiments.records import Layer, layer_facts, windows
from rwsim.experiments.run import plain, write_text
from rwsim.experiments.study import Arm, Trained
from rwsim.experiments.train import Recipe
from rwsim.theory.noise import Array

RUNS_NAME, SERIES_NAME = "runs.csv", "series.csv.gz"
_NUMBERS = ("loss", "accuracy", "test_loss", "test_accuracy", "seconds")
_MEASURED = ("norm", "rotation", "spread")
# Numbers of a quantity in a study's series, at most: about 4 bytes each when compressed, and a file stays below 1 MB.
_MOST = 60_000
_WINDOWS = 100


def packed(outcome: Outcome) -> dict[str, Any]:
    """An outcome in what `torch.load` takes without running code."""
    found: dict[str, Any] = {one.name: getattr(outcome, one.name) for one in fields(Outcome)}
    found["layers"] = layer_facts(outcome.layers)
    # Copies: torch saves the whole array that a part of it is a view of.
    found["last"] = [torch.tensor(one) for one in outcome.last]
    return {key: torch.tensor(value) if isinstance(value, np.ndarray) else value for key, value in found.items()}


def unpacked(found: Mapping[str, Any]) -> Outcome:
    """The outcome that `packed` packed."""
    plain_ = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    return Outcome(**plain_ | {"layers": tuple(Layer(**one) for one in found["layers"]), "last": [one.numpy() for one in found["last"]]})


def write_trained(trained: Trained, seed: int, out: Path) -> dict[str, Any]:
    """Write both files; what `settings.json` must hold for them."""
    layers: list[list[dict[str, Any]]] = []
    arms: dict[str, dict[str, Any]] = {}
    for name, one in trained.arms.items():
        own = layer_facts(trained.runs[name][0].layers)
        if own not in layers:
            layers.append(own)
        arms[name] = {
            "facts": dict(one.facts), "final": one.final, "seeds": one.seeds, "layers": layers.index(own), "recipe": plain(one.recipe),
        }  # fmt: skip
    write_text(out / RUNS_NAME, _runs(trained, seed))
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(["arm", "seed", "quantity", "layer", "values"])
    table.writerows(_series(trained, seed))
    draft = out / f"{SERIES_NAME}.part"
    with gzip.GzipFile(draft, "wb", compresslevel=9, mtime=0) as file:
        file.write(lines.getvalue().encode())
    os.replace(draft, out / SERIES_NAME)
    return {"arms": arms, "layers": layers}


def read_trained(settings: Mapping[str, Any], out: Path) -> Trained:
    """What `write_trained` wrote, with the settings.

    Raises:
        InvalidArgument: A file is missing, damaged, or not what the settings say; the message names it.
    """
    at = RUNS_NAME
    try:
        with (out / at).open(newline="") as lines:
            told = {(row["arm"], row["seed"]): row for row in csv.DictReader(lines)}
        at = SERIES_NAME
        with gzip.open(out / at, "rt", newline="") as file:
            series = {
                (row[0], row[1], row[2], row[3]): np.array(row[4].split(), dtype=float) for row in csv.reader(file) if row[0] != "arm"
            }
        at = "settings.json"
        pairs = []
        for name, facts in settings["arms"].items():
            one = Arm(name, _recipe(facts["recipe"]), facts["seeds"], facts["final"], facts["facts"])
            layers = tuple(Layer(**layer) for layer in settings["layers"][facts["layers"]])
            at = RUNS_NAME
            rows = [told[name, str(settings["seed"] + k)] for k in range(one.seeds)]
            for row in rows:
                _checked(row)
            at = SERIES_NAME
            pairs.append((one, [_outcome(one, row, layers, series) for row in rows]))
            at = "settings.json"
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, KeyError, IndexError, TypeError) as error:
        remedy = f"{type(error).__name__}: take it from a copy, or train again"
        raise InvalidArgument("out", f"must hold a whole {at}", str(out), remedy) from None
    return Trained(pairs)


def _runs(trained: Trained, seed: int) -> str:
    keys = list(dict.fromkeys(key for one in trained.arms.values() for key in one.facts))
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(["arm", "seed", "final", "diverged", *_NUMBERS, *keys])
    for name, one in trained.arms.items():
        for k, run in enumerate(trained.runs[name]):
            numbers = [_number(getattr(run, key), 8) for key in _NUMBERS]
            facts = [one.facts.get(key, "") for key in keys]
            table.writerow([name, seed + k, one.final, "" if run.diverged is None else run.diverged, *numbers, *facts])
    return lines.getvalue()


def _series(trained: Trained, seed: int) -> Iterator[list[Any]]:
    shown = [(one, trained.runs[name]) for name, one in trained.arms.items() if one.final]
    count = sum(len(runs) * len(runs[0].layers) for _, runs in shown)
    most = max(10, min(_WINDOWS, _MOST // max(count, 1)))
    for one, runs in shown:
        for k, run in enumerate(runs):
            key = [one.name, seed + k]
            yield [*key, "loss", "", _joined(run.losses)]
            if not len(run.step):
                continue
            measured = {"step": run.step.astype(float), **{name: getattr(run, name) for name in _MEASURED}}
            _, values = windows(run.step, measured, one.recipe.steps, most)
            yield [*key, "step", "", " ".join(map(str, values["step"].round().astype(int)))]
            for number, layer in enumerate(run.layers):
                for name in _MEASURED:
                    yield [*key, name, layer.name, _joined(values[name][:, number])]
                if k == 0:
                    yield [*key, "neurons", layer.name, _joined(run.last[number])]


def _checked(row: Mapping[str, str]) -> None:
    """Numbers are there, but for a run that diverged."""
    for key in _NUMBERS:
        if row[key]:
            float(row[key])
    if not row["diverged"] and not row["loss"]:
        raise ValueError("a run with neither a loss nor the step where it diverged")


def _outcome(one: Arm, row: Mapping[str, str], layers: Sequence[Layer], series: Mapping[tuple[str, str, str, str], Array]) -> Outcome:
    def of(quantity: str, layer: str = "") -> Array:
        return series.get((one.name, row["seed"], quantity, layer), np.zeros(0))

    step = of("step")
    if one.final:
        series[one.name, row["seed"], "loss", ""]  # must be there
    loss, accuracy, test_loss, test_accuracy, seconds = (float(row[key]) if row[key] else math.nan for key in _NUMBERS)
    norm, rotation, spread = (
        np.stack([of(name, layer.name) for layer in layers], 1) if len(step) else np.zeros((0, len(layers))) for name in _MEASURED
    )
    return Outcome(
        loss, accuracy, test_loss, test_accuracy, int(row["diverged"]) if row["diverged"] else None, seconds, of("loss"),
        step.astype(np.int64), norm, rotation, spread, [of("neurons", layer.name) for layer in layers], tuple(layers),
    )  # fmt: skip


def _recipe(told: Mapping[str, Any]) -> Recipe:
    hyper = {key: tuple(value) if isinstance(value, list) else value for key, value in told["hyper"].items()}
    return Recipe(**{**told, "hyper": hyper})


def _joined(values: Array) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else ""
