"""The benchmark measures what it says: the loop is the toy system, the floor is what is counted, every row has its say."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import rows
from benchmarks.__main__ import main
from benchmarks.floor import cpu_floor, cuda_floor, element_slots
from benchmarks.peers import PEERS, Loop, captured, loop
from benchmarks.rows import ROWS, paper_job
from benchmarks.timing import REPEATS, Timing
from rwsim.errors import Unavailable
from rwsim.walk.measure import Walk
from rwsim.walk.system import faithful_gradient

CPU = torch.device("cpu")
SMALL = ["--neurons", "4", "--fan-in", "8", "--batch", "4", "--device", "cpu", "--seconds", "0.02"]


def small_job(optimizer, **sizes):
    sizes = {"neurons": 5, "fan_in": 8, "batch": 6, "configs": 1, "gradient": "faithful", "layers": 1, "seed": 3} | sizes
    return paper_job(optimizer, **sizes)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", PEERS)
def test_the_loop_is_the_toy_system_with_that_rule(optimizer, fused):
    """Same inputs and output gradients: gradient, weights and statistics of `faithful_gradient` and the rule's `update`."""
    job = replace(small_job(optimizer), dtype=torch.float64)
    layer, rule = job.layer, job.rules[0]
    peer = Loop(job, CPU, fused=fused)
    weight = peer.linear.weight.detach().clone()
    state = SimpleNamespace(param=weight, **{name: torch.zeros_like(weight) for name in rule.state})
    keep = 1 - rule.values.lr * rule.values.weight_decay if optimizer in ("adamw", "lion") else 1.0
    scale = layer.gamma_out * layer.loss_scale / (layer.neurons * layer.batch)
    gammas = torch.as_tensor(layer.gamma_in), torch.as_tensor(scale)
    expected = torch.zeros(3, layer.neurons, dtype=torch.float64)
    for step in range(1, 5):
        grad = faithful_gradient(state.param[None], *gammas, layer.batch, 1, torch.Generator().manual_seed(step))[0]
        draws = torch.Generator().manual_seed(step)
        inputs, out_grad = (torch.randn(n, layer.batch, generator=draws, dtype=torch.float64).T for n in (layer.fan_in, layer.neurons))
        peer.step(inputs, peer.scale * out_grad)
        assert peer.linear.weight.grad is not None
        torch.testing.assert_close(peer.linear.weight.grad, grad, rtol=1e-8, atol=1e-13)
        old, state.step = state.param, step
        state = SimpleNamespace(**rule.update(grad, state, rule.values, torch))
        torch.testing.assert_close(peer.linear.weight.detach(), state.param, rtol=1e-8, atol=1e-13)
        angle = torch.linalg.vecdot(old, state.param) / (old.norm(dim=-1) * state.param.norm(dim=-1))
        sizes = state.param.norm(dim=-1), angle.acos(), (state.param - keep * old).norm(dim=-1)
        expected += torch.stack(sizes).square()
    torch.testing.assert_close(peer.sums, expected, rtol=1e-5, atol=0.0)


def test_the_loop_draws_afresh_and_keeps_a_trace():
    job = replace(small_job("adamw"), window=4)
    peer = Loop(job, CPU, fused=True)
    (first, _), (second, _) = peer.draw(), peer.draw()
    assert first.shape == (6, 8) and not torch.equal(first, second)
    peer.walk(10)
    assert [tuple(t.shape) for t in peer.trace] == [(3, 5)] * 2 and peer.taken == 10
    assert all(torch.isfinite(t).all() and (t > 0).all() for t in peer.trace)


@pytest.mark.slow
def test_the_command_measures_every_row(tmp_path, capsys, monkeypatch):
    def no_compiler(*_, **__):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", no_compiler)  # a minute
    file = tmp_path / "out.json"
    assert main([*SMALL, "--optimizer", "lion", "adamw", "--layers", "3", "--configs", "2", "--out", str(file)]) == 0
    out = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["meta"]["command"].startswith("python -m benchmarks --neurons 4") and document["meta"]["command"] in out
    assert {"device", "date", "torch", "triton", "python", "threads", "cores"} <= set(document["meta"])
    assert [(r["optimizer"], r["engine"]) for r in document["rows"]] == [(o, e) for o in ("lion", "adamw") for e in ROWS]
    found = {r["engine"]: r for r in document["rows"] if r["optimizer"] == "adamw"}
    assert found["captured"]["reason"] == "a CUDA graph needs a CUDA device"
    assert found["compiled"]["reason"] == "torch.compile failed: RuntimeError: no compiler here"
    for name, neurons in (("loop", 4), ("reference", 24)):
        row = found[name]
        rate = neurons * row["steps"] / np.median(row["seconds"])
        assert row["reason"] == "" and row["neurons"] == neurons and len(row["seconds"]) == REPEATS
        assert math.isclose(row["neuron_steps_per_second"], rate) and math.isclose(row["element_steps_per_second"], 8 * rate)
        assert math.isclose(row["ratio_to_loop"], rate / found["loop"]["neuron_steps_per_second"])
        assert math.isclose(row["ratio_to_floor"], 8 * rate / document["floors"][1]["rate"])
    for row in document["rows"]:
        assert any(line.startswith(f"{row['optimizer']:<9}  {row['engine']:<9}") for line in out.splitlines())
        assert bool(row["reason"]) == (row["steps"] is None) and row["reason"] in out


def test_an_engine_that_cannot_leaves_its_reason(capsys, monkeypatch):
    def resolve(engine, job, device):
        raise Unavailable(f"`engine` {engine} does not carry\nthis job.")

    monkeypatch.setattr(rows, "resolve_engine", resolve)
    assert main([*SMALL, "--rows", "fused", "loop"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "adamw      fused      `engine` fused does not carry this job." in lines
    assert main([*SMALL, "--figure", "--engine", "fused"]) == 0
    assert "does not carry" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--optimizer", "sgdw"], "sgdw"),
        (["--batch", "3"], "batch"),
        (["--neurons", "1.5"], "1.5"),
        (["--neurons", "-1"], "neurons"),
        (["--layers", "0"], "layers"),
        (["--configs", "0"], "configs"),
        (["--steps", "0"], "steps"),
        (["--seconds", "nan"], "seconds"),
        (["--seed", "-1"], "seed"),
        (["--out", "/nowhere/at/all.json"], "out"),
        (["--rows", "eager"], "eager"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, word, capsys):
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and captured.err.count("\n") == 1 and word in captured.err


def test_ctrl_c_is_not_a_row(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(rows, "resolve_engine", lambda *_: SimpleNamespace(walk=interrupted))
    assert main([*SMALL, "--rows", "reference"]) == 3
    assert capsys.readouterr().err == "benchmarks: error: interrupted\n"


def test_figure(tmp_path, capsys):
    file = tmp_path / "figure.json"
    assert main(["--figure", "--steps", "20", "--device", "cpu", "--engine", "reference", "--out", str(file)]) == 0
    figure = json.loads(file.read_text())["figure"]
    assert figure["engines"] == ["reference"] * 4 and figure["steps"] == 20 and len(figure["seconds"]) == REPEATS
    assert "figure, engine reference" in capsys.readouterr().out


@pytest.mark.parametrize("same", [True, False])
def test_gpus_are_timed_and_compared(same, tmp_path, capsys, monkeypatch):
    """With a stand-in for the engine: what is asked of it, and that its numbers are compared."""
    asked = []

    def walk(job, device, devices):
        asked.append((device, *devices))
        series = np.ones((1, job.configs, job.rows)) * (1.0 if same else len(devices))
        return Walk(job.window, np.array([job.steps]), *[series] * 7)

    monkeypatch.setattr(rows, "fused", SimpleNamespace(walk=walk, lacks=lambda job, device: ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    file = tmp_path / "gpus.json"
    assert main([*SMALL, "--gpus", "--out", str(file)]) == 0
    (found,) = json.loads(file.read_text())["gpus"]
    assert found["gpus"] == 2 and found["same_bits"] is same and found["one"]["steps"] == found["all"]["steps"]
    assert {len(devices) - 1 for devices in asked} == {1, 2}
    assert ("the same bits" if same else "NOT the same") in capsys.readouterr().out


def test_gpus_say_why_not(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([*SMALL, "--gpus"]) == 0
    assert "needs two CUDA devices or more; torch finds 1" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rows, "fused", SimpleNamespace(lacks=lambda job, device: "Tuesdays"))
    assert main([*SMALL, "--gpus"]) == 0
    assert "does not carry Tuesdays" in capsys.readouterr().out


# By hand, of the documented count: 13.5 for a normal number, 6 gradient, 5 statistics; special 2 for a normal number.
@pytest.mark.parametrize(
    "optimizer, slots, special, buffers",
    [
        ("sgdm", 24.5 + 3 + 2, 2, 2),  # three multiply-adds; of gradients alone two
        ("adamw", 24.5 + 9 + 1, 3, 2),  # averages 2 and 3, their ratio 1, step, decay, Delta_g w; the root
        ("adam_l2", 24.5 + 12 + 1, 3, 3),  # the decay, averages 2 and 3, ratio, step; of gradients alone 2, 1 and 1; the root
        ("lion", 24.5 + 7 + 1, 2, 1),  # averages 2 and 2, step, decay, Delta_g w; the sign
    ],
)
def test_floor_is_the_hand_count(optimizer, slots, special, buffers, monkeypatch):
    job = small_job(optimizer, gradient="marginal")
    assert element_slots(job) == (slots, special)
    assert element_slots(replace(job, gradient="gaussian")) == (slots - 6, special)
    card = SimpleNamespace(multi_processor_count=132, clock_rate=1_980_000, uuid="none")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    rate = cuda_floor(job, torch.device("cuda")).rate
    assert rate is not None and math.isclose(rate, 132 * 1.98e9 * min(128 / slots, 16 / special))
    # Memory is told too, and so slow that it binds: parameter and buffers in and out once in 100 steps, seven means.
    slow = SimpleNamespace(**vars(card), memory_clock_rate=1, memory_bus_width=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: slow)
    moved = 8 * (1 + buffers) / 100 + 28 / 800
    rate = cuda_floor(job, torch.device("cuda")).rate
    assert rate is not None and math.isclose(rate, 2000 / moved)


def test_floor_without_a_clock_is_unknown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1, uuid="none"))
    monkeypatch.setenv("PATH", "")
    floor = cuda_floor(small_job("adamw"), torch.device("cuda"))
    assert floor.rate is None and "unknown" in floor.text


def test_cpu_floor_is_positive():
    floor = cpu_floor(torch.float32)
    assert floor.rate is not None and floor.rate > 1e6 and "ns a number" in floor.text


def test_timing_fills_its_time_with_steps():
    taken = []
    timing = Timing(lambda: taken.append, CPU).prepare(seconds=1e-9, most=10**6)
    assert taken[0] == 8 and timing.steps >= 1 and taken[-1] == timing.steps
    assert Timing(lambda: taken.append, CPU).prepare(seconds=10.0, most=50).steps == 50
    assert Timing(lambda: taken.append, CPU).prepare(seconds=10.0, most=50, steps=7).steps == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", PEERS)
def test_a_captured_step_is_the_step(optimizer):
    """By statistics; and a replay draws afresh: a graph with frozen numbers would walk straight on."""
    job = paper_job(optimizer, neurons=128, fan_in=32, batch=32, configs=1, gradient="faithful", layers=1, seed=0)
    means = []
    for make in (loop, captured):
        walk = make(job, torch.device("cuda"))
        walk(400)
        means.append(torch.stack(walk.__self__.trace[1:]).mean((0, 2)))
    torch.testing.assert_close(means[0], means[1], rtol=0.1, atol=0.0)


def test_phases_of_a_sweep(tmp_path):
    """They add up, the engines are as before, and the hashes tell sweeps apart."""
    pytest.importorskip("xarray", reason="the sweep extra is not installed")
    from benchmarks.sweep import PHASES, measure
    from rwsim.walk import blocked

    given = {"optimizer": ["adamw"], "axes": {"lr": [0.01, 0.1]}, "hyper": {"weight_decay": 0.5}, "fan_in": 8, "neurons": 2, "steps": 100}
    walk = blocked.walk
    one, two = measure(given, tmp_path / "a"), measure({**given, "seed": 1}, tmp_path / "b")
    assert blocked.walk is walk and one["batches"] == 1 and one["apart"] == 0
    assert one["total"] == pytest.approx(one["before"] + one["walking"] + one["tail"]) and min(one[phase] for phase in PHASES) >= 0
    assert one["bits"]["norm"] != two["bits"]["norm"] and one["bits"]["norm_exact"] != two["bits"]["norm_exact"]
