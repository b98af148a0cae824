"""What is timed: lanes as the studies train them."""

import csv

import pytest
import torch

from benchmarks import lanes as benchmark
from benchmarks.lanes import NETWORKS, TINY, main
from rwsim.experiments.models import build

OPTIONS = ["--device", "cpu", "--tiny", "--steps", "60"]


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "lanes.csv"
    assert main([*OPTIONS, "--network", "resnet", "gpt", "--out", str(file)]) == 0
    text = capsys.readouterr().out
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["network"] for row in rows] == ["resnet", "gpt"] and all(f"\n{row['network']} " in text for row in rows)
    assert all(float(row["ms_per_step_and_lane"]) > 0 and row["graphs"] == "False" and float(row["ratio"]) == 1 for row in rows)


def test_lanes_go_side_by_side_and_each_is_counted(monkeypatch):
    counted = []

    def go(runs, capture):
        counted.append((len(runs), capture))
        yield 50 * len(runs)
        yield 60 * len(runs)

    monkeypatch.setattr(benchmark, "go", go)
    monkeypatch.setattr(benchmark.time, "perf_counter", iter([1.0, 1.4]).__next__)
    batch, size = TINY["resnet"]
    recipe = benchmark.Recipe("resnet", "adamw", {"lr": 1e-3, "weight_decay": 0.1}, 60, batch, size)
    assert benchmark.milliseconds(recipe, 4, torch.device("cpu"), capture=True) == pytest.approx(10.0) and counted == [(4, True)]


def test_sizes_fit_their_networks():
    assert NETWORKS.keys() == TINY.keys()
    for name, (_, size) in NETWORKS.items():
        assert sum(param.numel() for param in build(name, 0, **size).parameters()) > 5e4


@pytest.mark.parametrize("options", [["--steps", "50"], ["--lanes", "0"], ["--lanes", "1", "3"], ["--out", "/nowhere/x.csv"]])
def test_rejects(options, capsys):
    assert main([*OPTIONS, *options]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.lanes: error:")
