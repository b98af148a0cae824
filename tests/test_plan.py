"""Plans: the paper's facts, torch's optimizers and schedulers, the command."""

import json
import math
import warnings

import numpy as np
import pytest
import torch

import rwsim
from rwsim.cli import HOLDS, USAGE, run
from rwsim.errors import InvalidArgument
from rwsim.optimizers import AdamW
from rwsim.plan import plan
from rwsim.plots import plan_figure
from rwsim.walk.job import Job
from rwsim.walk.simulate import run as walk
from rwsim.walk.system import Layer
from tests.published import held

# ResNet-20 on CIFAR-10: 200 epochs, five of them warmup, at batch sizes 2048 and 128.
LARGE, SMALL = (200 * 25, 5 * 25), (200 * 391, 5 * 391)


def drawn(make):
    """What a constructor makes, without touching torch's global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def only(found):
    (layer,) = found.layers
    return layer


def test_iwslt_never_reaches_equilibrium():
    """Appendix: AdamW, lr 5e-4, decay 1e-4, beta_2 0.98, cosine, 22,021 steps, 4,000 of them warmup."""
    found = plan("adamw", lr=5e-4, weight_decay=1e-4, betas=(0.9, 0.98), steps=22_021, schedule="cosine", warmup=4000, fan_in=512)
    layer = only(found)
    assert layer.reached is None and layer.share == 0 and layer.time_constant > 400 * layer.steps
    assert "never reached" in found.warnings[0]


@pytest.mark.slow
def test_iwslt_at_the_papers_larger_decay_reaches_equilibrium():
    tuned = only(plan("adamw", lr=5e-4, weight_decay=0.4, betas=(0.9, 0.98), steps=22_021, schedule="cosine", warmup=4000, fan_in=512))
    assert tuned.reached is not None and tuned.reached < tuned.steps / 2


@pytest.mark.parametrize(("run_length", "lr"), [(LARGE, 0.16), (SMALL, 5e-2)])
@pytest.mark.slow
def test_cosine_falls_out_of_equilibrium_at_the_end(run_length, lr):
    """CIFAR-10 with AdamW at decay 1e-2: the norm stays behind the falling equilibrium, rotation with it."""
    steps, warmup = run_length
    found = plan("adamw", lr=lr, weight_decay=1e-2, steps=steps, schedule="cosine", warmup=warmup, fan_in=288)
    layer = only(found)
    assert layer.reached is not None and layer.left is not None and layer.reached < layer.left < layer.steps
    end = layer.live & (np.arange(layer.steps) >= layer.left + layer.steps // 50)
    assert (layer.path.norm > layer.path.equilibrium_norm)[end].all() and (layer.path.rotation < layer.path.equilibrium_rotation)[end].all()
    assert layer.lag < 0.5 and any("cannot decay as fast" in text for text in found.warnings)
    # At a constant learning rate it stays, once v has forgotten the gradients of the short weights at the start.
    steady = only(plan("adamw", lr=lr, weight_decay=1e-2, steps=12_000, fan_in=288))
    assert steady.reached is not None and steady.left is None and steady.lag == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("run_length", [(2000, 50), pytest.param(SMALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("lr", "above"), [(1e-4, True), (8.3e-3, False), (3e-1, False)])
def test_trade_off_of_lr_and_decay(lr, above, run_length):
    """Figure 5: at lr times decay 5e-4 a low rate starts above its equilibrium and turns too slowly, a high one below and too fast."""
    steps, warmup = run_length
    found = plan("adamw", lr=lr, weight_decay=5e-4 / lr, steps=steps, schedule="cosine", warmup=warmup, fan_in=288)
    layer = only(found)
    peak = int(np.argmax(layer.lr))
    assert (layer.start_norm > layer.path.equilibrium_norm[peak]) == above
    assert layer.transient < 0.5 if above else layer.transient > 2
    text = " ".join(found.warnings)
    assert ("start above" in text and "too slowly" in text) == above and ("start below" in text and "too fast" in text) != above


def test_trade_off_orders_norms_and_bias_updates():
    layers = [only(plan("adamw", lr=lr, weight_decay=5e-4 / lr, steps=300, fan_in=64)) for lr in (1e-4, 8.3e-3, 3e-1)]
    norms, etas = [x.path.equilibrium_norm[-1] for x in layers], [x.eta_g for x in layers]
    assert norms == sorted(norms) and etas == sorted(etas)
    assert [x.eta_r for x in layers] == pytest.approx([layers[0].eta_r] * 3)
    assert norms[2] / norms[0] == pytest.approx(3e3) and etas[2] / etas[0] == pytest.approx(3e3)


def test_time_to_equilibrium_is_that_of_a_walk():
    layer = only(plan("adamw", lr=1e-2, weight_decay=0.3, betas=(0.9, 0.99), steps=1500, fan_in=128))
    toy = Layer.draw(128, 256, gamma="uniform")
    found = walk(Job((AdamW(lr=1e-2, weight_decay=0.3, betas=(0.9, 0.99)),), toy, 1500, window=10))
    norm = np.sqrt(found.norm_sq[:, 0].mean(-1))
    reached = 10 * int(np.flatnonzero(norm > 0.9 * layer.path.equilibrium_norm[-1])[0])
    assert layer.reached == pytest.approx(reached, abs=25)


def test_without_decay():
    found = plan("adamw", lr=1e-2, weight_decay=0.0, steps=3000, fan_in=32)
    layer = only(found)
    assert layer.reached is None and math.isinf(layer.time_constant) and math.isnan(layer.highest_lr)
    assert "without decay there is no equilibrium" in found.warnings[0]
    assert layer.path.rotation[-1] < 0.2 * layer.path.rotation[20]


def test_stable_range():
    assert only(plan("sgdm", lr=0.1, weight_decay=1e-2, steps=50)).highest_lr == pytest.approx(2 * 1.9 / 1e-2, rel=2e-3)
    blown = plan("adamw", lr=3.0, weight_decay=1.0, steps=3000, fan_in=8)
    assert "blow up" in blown.warnings[0] and "stable below lr 2" in blown.warnings[0]


def test_torch_optimizer_and_scheduler():
    model = drawn(lambda: torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Conv2d(3, 5, 3), torch.nn.LayerNorm(7)))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=201)
    before = json.dumps([scheduler.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]])
    found = plan(optimizer, scheduler, steps=200, model=model)
    after = json.dumps([scheduler.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]])
    assert before == after
    assert [(layer.name, layer.fan_in) for layer in found.layers] == [("0.weight", 32), ("2.weight", 27)]
    assert found.layers[0].start_norm == pytest.approx(model[0].weight.square().sum(1).mean().sqrt().item(), rel=0.05)
    expected, betas = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            expected.append(optimizer.param_groups[0]["lr"])
            betas.append(optimizer.param_groups[0]["betas"][0])
            scheduler.step()
    assert found.layers[0].lr == pytest.approx(expected) and min(betas) < max(betas)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3), "sgdm"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3), "nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3), "sgd"),
        (lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-3), "adam_l2"),
        (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-3), "adamw"),
    ],
)
def test_rule_of_a_torch_optimizer(make, name):
    model = drawn(lambda: torch.nn.Linear(8, 4))
    assert only(plan(make(model.parameters()), steps=30, model=model)).rule.name == name


def test_refuses():
    model = drawn(lambda: torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for arguments, options, text in [
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "schedule": "cosin"}, "`schedule` must be one of"),
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "schedule": [1.0]}, "must have shape"),
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "warmup": 10}, "`warmup` must lie in"),
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "schedule": "warmup0.1+cosine", "warmup": 3}, "given twice"),
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "fan_in": 1}, "`fan_in` must be at least 2"),
        (("adamw",), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10, "init_norm": 0.0}, "`init_norm` must lie in"),
        (("adamw", object()), {"lr": 1e-3, "weight_decay": 0.1, "steps": 10}, "needs a torch optimizer"),
        ((optimizer,), {"steps": 10, "lr": 1e-3}, "belongs to a rule"),
        ((3,), {"steps": 10}, "must be a rule's name"),
        ((torch.optim.Adagrad(model.parameters()),), {"steps": 10, "model": model}, "must be one of"),
        ((optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)), {"steps": 10}, "must not depend on the loss"),
        ((optimizer,), {"steps": 10, "model": torch.nn.LayerNorm(3)}, "must hold a weight"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            plan(*arguments, **options)


COMMAND = ["plan", "--optimizer", "adamw", "--lr", "1e-2", "--weight-decay", "0.5", "--steps", "400"]


def test_command(tmp_path, capsys):
    status = run([*COMMAND, "--schedule", "cosine", "--warmup", "40", "--out", str(tmp_path / "p"), "--json", str(tmp_path / "q.json")])
    assert status == HOLDS
    out = capsys.readouterr().out
    assert "time constant" in out and "warning: layer:" in out
    record = held("plan", tmp_path / "q.json")
    assert record == json.loads((tmp_path / "p" / "plan.json").read_text())
    assert record["meta"]["steps"] == 400 and len(record["layers"][0]["path"]["norm"]) == 201
    assert record["layers"][0]["path"]["lr"][20] == pytest.approx(1e-2, rel=0.05)
    assert (tmp_path / "p" / "plan.png").stat().st_size > 10_000


def test_command_reads_toml_and_files(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('optimizer = "lion"\nlr = 1e-3\nweight_decay = 1\nbetas = [0.9, 0.98]\nsteps = 300\n')
    (tmp_path / "factors.txt").write_text("\n".join(["0.5"] * 200))
    assert (
        run(["plan", str(tmp_path / "run.toml"), "--steps", "200", "--schedule", str(tmp_path / "factors.txt"), "--fan-in", "16"]) == HOLDS
    )
    out = capsys.readouterr().out
    assert "Lion(lr=0.001" in out and "(0.9, 0.98)" in out and "200 steps" in out
    assert run([*COMMAND, "--quiet"]) == HOLDS and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan"], "`optimizer` must be given"),
        (["plan", "--optimizer", "adamw", "--steps", "9"], "`lr` must be given for adamw"),
        ([*COMMAND, "--momentum", "0.9"], "is not a hyperparameter of adamw"),
        ([*COMMAND[:-1], "1.5"], "`steps` must be a whole number"),
        ([*COMMAND[:4], "-1", *COMMAND[5:]], "`lr` must lie in"),
        ([*COMMAND, "--schedule", "sine"], "`schedule` must be one of"),
        (["plan", "nothing.toml"], "must be a TOML file"),
        (["plan", "{tmp}/bad.toml"], "is not a key of bad.toml"),
        (["plan", "{tmp}/worse.toml"], "`steps` must be int"),
        ([*COMMAND, "--out", "{tmp}/bad.toml"], "must be a directory"),
    ],
)
def test_bad_usage_is_one_line(arguments, text, tmp_path, capsys):
    (tmp_path / "bad.toml").write_text("speed = 3\n")
    (tmp_path / "worse.toml").write_text('optimizer = "adamw"\nsteps = "many"\n')
    assert run([a.replace("{tmp}", str(tmp_path)) for a in arguments]) == USAGE
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_picture_tells_phases_and_layers_apart():
    one = rwsim.plan("adamw", lr=1e-2, weight_decay=0.5, steps=3000, schedule="cosine", fan_in=16)
    figure = plan_figure(one)
    norm = next(line for line in figure.axes[1].lines if line.get_label() == "expected")
    np.testing.assert_allclose(norm.get_ydata(), one.layers[0].path.norm[norm.get_xdata() - 1])
    assert len(figure.axes[0].patches) == 2  # before and after
    model = drawn(lambda: torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(64, 8)))
    figure = plan_figure(plan("adamw", lr=1e-2, weight_decay=0.5, steps=100, model=model))
    assert len(figure.axes[0].patches) == 0 and len({line.get_color() for line in figure.axes[0].lines}) == 2
