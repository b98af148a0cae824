"""The design behind the table of accuracies, and the program that judges it."""

import csv
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy import OPTIMIZERS, POINTS, QUANTITIES, design, measured, table

ROOT = Path(accuracy.__file__).parent.parent
FILES = {0: "accuracy.csv", 1: "accuracy-1.csv", 2: "accuracy-2.csv", 3: "accuracy-3.csv"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_design_is_fixed_and_within_its_ranges(optimizer):
    points = design(optimizer)
    assert points == design(optimizer) and len(points) == POINTS == len(set(points))
    assert points != design(optimizer, seed=1) and [p.number for p in design(optimizer, seed=1)] == list(range(1000, 1200))
    for p in points:
        assert 1e-4 <= p.rate <= 5e-2 and 0 <= p.beta_1 <= 0.99 and 16 <= p.fan_in <= 4096 and 8 <= p.batch <= 512
        assert 1e-3 <= p.loss_scale <= 1e3 and p.gamma in ("uniform", "normal") and p.weight_decay > 0
        assert p.beta_2 == 0 if optimizer == "sgdm" else 0.9 <= p.beta_2 <= 0.9999
        if optimizer != "adam_l2":
            assert p.lr * p.weight_decay == pytest.approx(p.rate)
        assert p.steps % p.window == 0 and p.steps >= p.burn_in + 4 * p.window
        assert p.burn_in >= 5 * p.relaxation and p.rule.values.lr == p.lr
    # A Latin hypercube: as many points in each tenth of a range, and as many gammas of either kind.
    tenths = np.floor(10 * (np.log10([p.rate for p in points]) + 4) / math.log10(500)).astype(int)
    assert (np.bincount(tenths) == POINTS // 10).all() and sum(p.gamma == "normal" for p in points) == POINTS // 2


@pytest.mark.parametrize("seed", FILES)
def test_measured_points_are_those_of_the_design(seed):
    rows = measured(ROOT / "benchmarks" / FILES[seed])
    assert len(rows) == POINTS * len(OPTIMIZERS)
    for optimizer in OPTIMIZERS:
        mine = sorted((p for p, _ in rows if p.optimizer == optimizer), key=lambda p: p.number)
        assert mine == design(optimizer, seed=seed)
    for _, found in rows:
        assert all(0 < found[q] < math.inf and 0 <= found[f"{q}_mcse"] < 0.01 for q in QUANTITIES)


@pytest.mark.slow
def test_program_prints_and_draws(tmp_path):
    figure = tmp_path / "x.png"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accuracy", "--limit", "1", "--figure", str(figure)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + 6 * (len(OPTIMIZERS) + 1) and all(line.count("|") == 12 for line in lines), done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")


def judged(**changes: float | bool | str) -> dict:
    row: dict = {"optimizer": "sgdm", "valid": True, "norm_error": 0.001, "rotation_error": 0.001}
    for quantity in QUANTITIES:
        row |= {f"{form}_{quantity}": 0.002 for form in accuracy.FORMS} | {f"{quantity}_mcse": 0.0}
    return row | changes


def test_table_says_what_is_off():
    """Three points: one within its estimate, one valid and over it, one in doubt."""
    rows = [judged(full_norm=-0.0005), judged(full_norm=0.004), judged(full_norm=-0.05, valid=False)]
    line = next(line for line in table(rows, ("sgdm",)).splitlines() if "norm | full" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3] == "0.400" and cells[5] == "5.00" and cells[6] == "67 %" and cells[8] == "0.40" and cells[9] == "33.3 %"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_walk_at_a_tiny_size(optimizer, monkeypatch, tmp_path):
    """Finite, near what the table holds, and read back as written."""
    monkeypatch.setattr(accuracy, "_ELEMENTS", 2**11)
    point, known = min(measured(ROOT / "benchmarks" / "accuracy.csv"), key=lambda case: (case[0].optimizer != optimizer, case[0].steps))
    found = accuracy.walk(point, "cpu")
    assert set(found) == set(known) and np.isfinite(list(found.values())).all()
    for quantity in QUANTITIES:
        assert found[quantity] == pytest.approx(known[quantity], rel=0.1)
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, accuracy._columns())
        writer.writeheader()
        writer.writerow(dataclasses.asdict(point) | found)
    assert measured(tmp_path / "x.csv") == [(point, found)]
