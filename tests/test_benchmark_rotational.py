"""The cost of a step: every row has its say, all take the same steps, ratios are those of the same repeat."""

import csv
import math

import pytest
import torch

from benchmarks import rotational
from benchmarks.rotational import MODELS, OPTIMIZERS, REFERENCE, Stepper, main, measure, transformer

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--model", "tiny", "--repeats", "3", "--steps", "2"]


@pytest.mark.parametrize("model, count", [("gpt2", 124_439_808), ("10m", 9_982_464)])
def test_shapes(model, count):
    assert sum(map(math.prod, transformer(*MODELS[model]))) == count


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "steps.csv"
    assert main([*TINY, "--out", str(file)]) == 0
    text = capsys.readouterr().out
    with file.open() as lines:
        rows = {row["optimizer"]: row for row in csv.DictReader(lines)}
    assert list(rows) == list(OPTIMIZERS) and all(f"\n{name} " in text for name in rows)
    graphs = [name for name in rows if name.endswith("graph")]
    assert [rows.pop(name)["reason"] for name in graphs] == ["CUDA graphs need CUDA"] * 3
    for row in rows.values():
        assert row["reason"] == "" and float(row["ms_per_step"]) > 0 and row["peak_bytes"] == ""
    assert float(rows[REFERENCE]["ratio_to_adamw_foreach"]) == 1 and "torch " in rows[REFERENCE]["run"]
    # Two buffers of Adam, one of the others; norms and counters of vectors come on top.
    assert 8 < float(rows[REFERENCE]["state_bytes_per_parameter"]) < float(rows["RotationalAdamW"]["state_bytes_per_parameter"])
    assert float(rows["SGD foreach"]["state_bytes_per_parameter"]) == 4


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("Rotational") and "graph" not in name])
def test_what_is_timed_rotates(name):
    grads = [torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(4)]
    stepper = Stepper(name, grads)
    stepper(1)
    weight = stepper.optimizer.param_groups[0]["params"][0]
    norm = weight.norm(dim=1)
    old = weight.detach().clone()
    stepper(3)
    torch.testing.assert_close(weight.norm(dim=1), norm)
    assert not torch.equal(old, weight)


def test_repeats_are_interleaved(monkeypatch):
    """Each repeat begins with another row, and a row's n-th time is of the n-th repeat."""
    taken = []
    monkeypatch.setattr(rotational.Timing, "repeat", lambda self: (taken.append(self), self.seconds.append(float(len(taken)))))
    rows = measure([REFERENCE, "SGD foreach", "RotationalSGDM"], [(4, 6)], CPU, 1, 3)
    names = {id(row.timing): row.name for row in rows}
    order = [names[id(timing)] for timing in taken]
    a, b, c = names.values()
    assert order == [a, b, c, b, c, a, c, a, b]
    assert rows[1].ratio == sorted([2 / 1, 4 / 6, 9 / 8])[1]


def test_what_cannot_be_built_says_why(monkeypatch, capsys):
    def refused(groups):
        raise RuntimeError("`fused=True` needs\nanother device")

    monkeypatch.setitem(OPTIMIZERS, REFERENCE, refused)
    assert main([*TINY, "--rows", REFERENCE, "RotationalLion"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{REFERENCE:<24}  `fused=True` needs another device" in lines
    assert any(line.startswith("RotationalLion") and f"{'-':>15}" in line for line in lines)


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--repeats", "0"], "repeats"),
        (["--steps", "0"], "steps"),
        (["--rows", "Adam"], "Adam"),
        (["--model", "gpt5"], "gpt5"),
        (["--out", "/nowhere/at/all.csv"], "out"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, word, capsys):
    try:
        status = main([*TINY, *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and captured.err.count("\n") == 1 and word in captured.err
