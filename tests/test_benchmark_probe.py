"""What is timed: the same training whatever watches it, every row in turn."""

import csv
import math

import numpy as np
import pytest
import torch

from benchmarks import probe as benchmark
from benchmarks.probe import TRAININGS, Training, interval, main

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--model", "tiny", "--batch", "2", "--repeats", "2", "--steps", "10"]


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "probe.csv"
    assert main([*TINY, "--out", str(file)]) == 0
    text = capsys.readouterr().out
    with file.open() as lines:
        rows = {row["training"]: row for row in csv.DictReader(lines)}
    assert list(rows) == list(TRAININGS) and all(f"\n{name} " in text for name in rows)
    assert float(rows["no probe"]["ratio"]) == 1 and all(float(row["ms_per_step"]) > 0 for row in rows.values())
    assert all(float(row["low"]) <= float(row["ratio"]) <= float(row["high"]) for row in rows.values())


def test_only_some(capsys):
    assert main([*TINY, "--only", "every=10"]) == 0
    text = capsys.readouterr().out
    assert [name for name in TRAININGS if f"\n{name} " in text] == ["no probe", "every=10"]


def test_the_interval_holds_the_median_as_often_as_it_says():
    draws = np.sort(np.random.default_rng(0).standard_exponential((4000, 60)), axis=1)
    held = np.mean([low <= math.log(2) <= high for low, high in map(interval, draws.tolist())])
    # The exact coverage at 60 is 97.3 %.
    assert abs(held - 0.973) < 4 * math.sqrt(0.973 * 0.027 / 4000)


def test_trainings_differ_in_what_watches_them_alone():
    found = {}
    for name, options in TRAININGS.items():
        training = Training("tiny", 2, CPU, options)
        training(3)
        found[name] = [param.detach().clone() for param in training.model.parameters()]
        assert (training.probe is None) == (options is None)
    for params in found.values():
        assert all(torch.equal(one, other) for one, other in zip(params, found["no probe"], strict=True))


def test_every_repeat_measures(monkeypatch):
    training = Training("tiny", 2, CPU, TRAININGS["every=10"])
    training(1)
    for repeat in (1, 2):
        training(10)
        assert len(training.probe.steps) == 1 + repeat


def test_the_model_is_of_a_few_million_parameters():
    assert sum(param.numel() for param in Training("gpt", 1, CPU, None).model.parameters()) == 3_323_648
    loss = Training("tiny", 2, CPU, None)
    assert math.isfinite(sum(float(param.detach().square().sum()) for param in loss.model.parameters()))


@pytest.mark.parametrize("options", [["--steps", "7"], ["--repeats", "0"], ["--out", "/nowhere/x.csv"]])
def test_rejects(options, capsys):
    assert main(["--device", "cpu", "--model", "tiny", *options]) == 2
    assert capsys.readouterr().err.startswith(f"python -m {benchmark.NAME}: error:"[10:])
