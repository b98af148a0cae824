"""Lanes: what recipes make of optimizers, the validation split, what is measured, and trainings side by side."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rwsim.errors import InvalidArgument
from rwsim.experiments import train
from rwsim.experiments.data import Order, load_images, load_text
from rwsim.experiments.lanes import Lane, train_lanes
from rwsim.experiments.lot import Run, go
from rwsim.experiments.measure import Watch
from rwsim.experiments.models import NETWORKS, build
from rwsim.experiments.step import Graph
from rwsim.experiments.train import Recipe, TrainingDiverged, make_optimizer
from rwsim.theory.factors import schedule_factors
from tests.experiments import Tiny, make_data, nothing

CPU = torch.device("cpu")
HYPER = {
    "sgdm": {"lr": 0.1, "weight_decay": 1e-2, "momentum": 0.9},
    "adamw": {"lr": 1e-2, "weight_decay": 0.5, "betas": (0.9, 0.99)},
    "lion": {"lr": 2e-3, "weight_decay": 1.0},
    "adam_l2": {"lr": 1e-2, "weight_decay": 1e-2, "betas": (0.9, 0.99)},
}
VARIANTS = [(name, None) for name in HYPER] + [(name, {"rotation": "adamw"} if name == "adam_l2" else {}) for name in HYPER]
RESNET, GPT = {"width": 4, "blocks": 1}, {"width": 16, "depth": 1, "heads": 2, "context": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lanes") / "data")


@pytest.fixture(scope="module")
def images(folder):
    return load_images(folder)


@pytest.fixture(scope="module")
def text(folder):
    return load_text(folder, context=8)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)


def recipe_of(optimizer="adamw", rotational=None, network="tiny", steps=12, **changed):
    size = {"tiny": {}, "resnet": RESNET, "resnet18": {"width": 2}, "gpt": GPT}[network]
    made = Recipe(network, optimizer, HYPER[optimizer], steps, 16, size, every=3, rotational=rotational, validation=16)
    return replace(made, **changed)


def one(recipe, data, seed=0, **changed):
    return train_lanes([Lane(recipe, seed, **changed)], data, CPU)[0]


def same(a, b):
    fields = ("loss", "accuracy", "test_loss", "test_accuracy", "losses", "step", "norm", "rotation", "spread")
    assert all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in fields)
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a.last, b.last, strict=True)) and a.diverged == b.diverged


# The validation split.


def test_validation_images_are_of_the_training_images_alone(images):
    split = images.split(16)
    rows = {name: {bytes(row.numpy()) for row in getattr(split, name).pixels.flatten(1)} for name in ("training", "validation", "held_out")}
    every = {bytes(row.numpy()) for row in images.training.pixels.flatten(1)}
    assert len(every) == 96 and [len(rows[name]) for name in ("training", "validation")] == [80, 16]
    assert rows["training"] | rows["validation"] == every and not rows["training"] & rows["validation"]
    assert split.held_out is images.held_out and not rows["held_out"] & every
    assert torch.equal(images.split(16).validation.pixels, split.validation.pixels)
    label = {bytes(row.numpy()): int(y) for row, y in zip(images.training.pixels.flatten(1), images.training.labels, strict=True)}
    some = split.validation
    assert all(label[bytes(row.numpy())] == int(y) for row, y in zip(some.pixels.flatten(1), some.labels, strict=True))
    order = Order(split, 16, seed=0)
    labels = torch.cat([order.batch(step)[1] for step in range(5)])
    assert torch.equal(labels.sort().values, split.training.labels.sort().values)
    seen = torch.cat([y for _, y in split.evaluation(validation=True)])
    assert torch.equal(seen, split.validation.labels) and sum(len(y) for _, y in split.evaluation()) == 40


def test_validation_text_is_the_end_of_the_training_text(text):
    split = text.split(10)
    assert torch.equal(torch.cat([split.training, split.validation]), text.training) and split.held_out is text.held_out
    assert len(split.validation) == 10 * 8 + 1
    windows = torch.cat([x for x, _ in split.evaluation(validation=True)])
    assert torch.equal(windows.flatten(), split.validation[:-1].long())
    starts = torch.cat([Order(split, 50, seed).items(0).order for seed in range(40)])
    assert int(starts.max()) + text.context < len(split.training)


def test_no_validation_leaves_the_data_alone(images, text):
    assert images.split(0) is images and text.split(0) is text
    outcome = one(recipe_of(validation=0, steps=2), images)
    assert math.isnan(outcome.loss) and math.isnan(outcome.accuracy)


@pytest.mark.parametrize(("kind", "count"), [("images", 96), ("images", -1), ("text", 10**6)])
def test_rejects_a_split_that_leaves_nothing(images, text, kind, count):
    with pytest.raises(InvalidArgument, match="`validation` must leave something to train on"):
        (images if kind == "images" else text).split(count)


# What recipes make of optimizers.


@pytest.mark.parametrize(("optimizer", "rotational"), VARIANTS[len(HYPER) :])
def test_rotational_lanes_keep_norms_and_turn_as_predicted(images, text, optimizer, rotational):
    """The mean square angle of a layer, to 3 %.

    A step turns by eta_r ||u||/sqrt(nu), nu <- 0.9 nu + 0.1 ||u||^2: over N steps in which nu grows by q the mean square is
    eta_r^2 (1 + 9 ln(q)/N), to the first order in a step's change of nu and in eta_r^2. The square over neurons comes from their mean and
    their spread, to the third order of it. A rate without its factor 2, or without (1 - beta_1)/(1 + beta_1), is off by 100 % and more in
    the square. Lion's network is the GPT: behind a GELU or a ReLU all signs of a row's gradient may be equal, and without their mean
    nothing turns.
    """
    network, data = ("gpt", text) if optimizer == "lion" else ("tiny", images)
    run = Run(recipe_of(optimizer, rotational, network, 100, every=1), 0, data.split(16), CPU)
    steps = go([run], capture=False)
    next(steps)
    weight = next(param for name, param in run.model.named_parameters() if name in ("hidden.weight", "layers.0.attention.query.weight"))
    begun = run.optimizer.state[weight]["update_norm_sq"].clone()
    assert [*steps][-1] == 100
    grown = float((run.optimizer.state[weight]["update_norm_sq"] / begun).log().mean())
    norm, rotation, spread, _ = run.gauge.found()
    np.testing.assert_allclose(norm, np.broadcast_to(norm[0], norm.shape), rtol=1e-5)
    rate = float(run.optimizer.rotation(run.optimizer.param_groups[0]))
    square = np.mean(rotation[50:, 0] ** 2 * (1 + spread[50:, 0] ** 2))
    assert square == pytest.approx(rate**2 * (1 + 9 * grown / 50), rel=0.03)


def test_a_fixed_angle_is_that_of_the_step(text):
    """At the rate of the step's lr, for every optimizer and layer: eta_r goes as the root of lr."""
    factors = schedule_factors("warmup0.5+cosine", 20)
    for optimizer, rotational in VARIANTS[len(HYPER) :]:
        options = {**rotational, "fixed_angle": True}
        found = one(recipe_of(optimizer, options, "gpt", 20, every=1, schedule="warmup0.5+cosine"), text)
        kept = make_optimizer(recipe_of(optimizer, options), build("tiny", 0))
        expected = np.broadcast_to(kept.rotation(kept.param_groups[0]) * factors[:, None] ** 0.5, found.rotation.shape)
        np.testing.assert_allclose(found.rotation, expected, rtol=2e-3)


def test_the_special_variant_of_adam_turns_at_the_rate_of_adamw(images):
    hyper = HYPER["adamw"]
    rates = []
    for name, options in (("adamw", {}), ("adam_l2", {"rotation": "adamw"})):
        model = build("tiny", 0)
        optimizer = make_optimizer(recipe_of(name, options, hyper=hyper), model)
        rates.append(optimizer.rotation(optimizer.param_groups[0]))
    expected = math.sqrt(2 * hyper["lr"] * hyper["weight_decay"] * 0.1 / 1.9)
    assert rates == pytest.approx([expected, expected], rel=1e-6)


def test_the_rotation_follows_a_schedule_of_its_own(images):
    """Rotation over that of a lane whose rotation is not scheduled is the factor: the gradients differ, so to the spread alone."""
    plain = one(recipe_of(rotational={}, steps=60, every=1), images)
    changed = one(recipe_of(rotational={}, steps=60, every=1, rotation_schedule="cosine", schedule="linear"), images)
    factors = schedule_factors("cosine", 60)
    ratio = (changed.rotation / plain.rotation)[:, 0] / factors
    assert ratio[0] == pytest.approx(1, abs=1e-5) and np.abs(np.log(ratio[:50])).max() < 0.5 and abs(np.log(ratio[:50]).mean()) < 0.1


@pytest.mark.parametrize("rotational", [None, {}])
def test_frozen_vectors_do_not_move(text, rotational):
    recipe = recipe_of("adamw", rotational, "gpt", standardized="gain", steps=5)
    for frozen in (False, True):
        run = Run(replace(recipe, frozen=frozen), 0, text.split(16), CPU)
        before = {name: param.detach().clone() for name, param in run.model.named_parameters()}
        [*go([run], capture=False)]
        moved = {name for name, param in run.model.named_parameters() if not torch.equal(param, before[name])}
        vectors = {name for name, param in before.items() if param.ndim == 1}
        assert any(name.endswith("gain") for name in vectors) and any(name.endswith("bias") for name in vectors)
        # The bias of the keys has no gradient: softmax does not see it. Adam moves it by rounding, or not.
        seen = {name for name in vectors if "key" not in name}
        assert moved >= (before.keys() - vectors) and (not moved & vectors if frozen else moved >= seen)


@pytest.mark.parametrize(("kind", "ratio"), [("slower", 1 / 4), ("faster", 4)])
def test_imbalance_turns_the_affected_by_its_factor(images, kind, ratio):
    """Of angles that are fixed, to the rounding."""
    imbalance = {"share": 0.5, "factor": 4, "kind": kind}
    recipe = recipe_of(rotational={"fixed_angle": True}, steps=10, every=1, imbalance=imbalance)
    run = Run(recipe, 3, images.split(16), CPU)
    [*go([run], capture=False)]
    *_, last = run.gauge.found()
    speed = run.optimizer.state[run.model.hidden.weight]["speed"].flatten().numpy()
    assert sorted({*speed.tolist()}) == sorted([1.0, ratio]) and (speed == 1).sum() == 8
    np.testing.assert_allclose(last[0], speed * run.optimizer.rotation(run.optimizer.param_groups[0]), rtol=2e-3)
    again, other = (make_optimizer(recipe, run.model, seed).state[run.model.hidden.weight]["speed"].flatten() for seed in (3, 4))
    assert np.array_equal(again, speed) and not np.array_equal(other, speed)


@pytest.mark.parametrize("field", [{"rotation_schedule": "cosine"}, {"imbalance": {"share": 0.5, "factor": 2}}])
def test_rejects_what_only_a_variant_has(images, field):
    with pytest.raises(InvalidArgument, match=f"`{next(iter(field))}` needs a rotational variant"):
        one(recipe_of(**field), images)


# What is measured.


@pytest.mark.parametrize("network", ["tiny", "resnet", "resnet18", "gpt"])
def test_measures_what_the_probe_measures(images, text, network):
    """Norm and rotation of the layers of the same training, by the probe's own code, which reads gradients and hooks."""
    data = text if network == "gpt" else images
    recipe = recipe_of("adamw", None, network, validation=0, standardized=network == "gpt", schedule="warmup0.5+cosine")
    watches = []

    def attach(model, optimizer):
        watches.append(Watch(recipe, model, optimizer))
        return watches[-1]

    trained, lane = train.train(recipe, data, 1, CPU, attach), one(recipe, data, 1, final=True)
    assert np.array_equal(lane.losses, trained.losses.double())
    assert (lane.test_loss, lane.test_accuracy) == (trained.held_out_loss, trained.accuracy)
    probe = watches[0].probe
    assert lane.step.tolist() == probe.steps and lane.layers == watches[0].layers
    for k, full in enumerate(watches[0].names.values()):
        if lane.layers[k].neurons > 64:
            continue  # of these the probe watches 64
        reading = probe.read(full)
        np.testing.assert_allclose(lane.norm[:, k], reading.measured["norm"], rtol=1e-5)
        np.testing.assert_allclose(lane.rotation[:, k], reading.measured["rotation"], rtol=1e-3)
        found = reading.found["rotation"]
        np.testing.assert_allclose(lane.last[k], found[-max(1, len(found) // 5) :].mean(0), rtol=1e-3)
        moving = [row[row > 1e-6] for row in found]
        spread = [np.log(row).std(ddof=1) if len(row) > 1 else np.nan for row in moving]
        np.testing.assert_allclose(lane.spread[:, k], spread, rtol=1e-2, atol=1e-4)


def test_nothing_is_measured_of_what_has_diverged(images):
    run = Run(recipe_of(steps=20), 0, images.split(16), CPU)
    [*go([run], capture=False)]
    for whole, cut in zip(run.gauge.found()[:3], run.gauge.found(diverged=10)[:3], strict=True):
        assert np.array_equal(whole[:3], cut[:3], equal_nan=True) and np.isfinite(whole).all() and np.isnan(cut[3:]).all()
    assert run.gauge.step.tolist() == [1, 4, 7, 10, 13, 16, 19] and all(np.isnan(one).all() for one in run.gauge.found(diverged=10)[3])


def test_losses_are_means_over_windows(images):
    long = one(recipe_of(steps=130), images).losses
    run = Run(recipe_of(steps=130), 0, images.split(16), CPU)
    [*go([run], capture=False)]
    windows = run.losses[:60].view(30, 2).mean(1), run.losses[60:]
    np.testing.assert_allclose(long, torch.cat(windows), rtol=1e-6)


# Side by side.


def test_company_changes_nothing(images):
    """Alone and among others, one of which diverges: the same bits; the seeds and the recipes differ."""
    lanes = [Lane(recipe_of(name, variant, every=2 + k % 2), seed=k % 3, final=k % 2 == 0) for k, (name, variant) in enumerate(VARIANTS)]
    broken = Lane(recipe_of("sgdm", hyper={"lr": 1e25, "weight_decay": 0.0, "momentum": 0.9}), seed=0, final=True)
    together = train_lanes([*lanes[:3], broken, *lanes[3:]], images, CPU)
    outcome = together.pop(3)
    for lane, found in zip(lanes, together, strict=True):
        same(found, train_lanes([lane], images, CPU)[0])
        assert found.diverged is None and np.isfinite([found.loss, found.accuracy]).all() and math.isnan(found.test_loss) != lane.final
    with pytest.raises(TrainingDiverged) as caught:
        train.train(broken.recipe, images.split(16), 0, CPU, nothing)
    assert outcome.diverged == caught.value.step and 1 < outcome.diverged < 12
    assert all(math.isnan(value) for value in (outcome.loss, outcome.accuracy, outcome.test_loss, outcome.test_accuracy))
    late = outcome.step >= outcome.diverged
    assert np.isnan(outcome.norm[late]).all() and not np.isnan(outcome.norm[~late]).any()


def test_a_lane_that_breaks_in_its_last_step_has_diverged(images):
    lane = one(recipe_of("sgdm", steps=1, hyper={"lr": 1e38, "weight_decay": 0.0, "momentum": 0.9}), images)
    assert lane.diverged == 1 and math.isnan(lane.loss) and math.isnan(lane.accuracy)


def test_says_how_far_it_is_and_can_be_stopped(images):
    said = []
    train_lanes([Lane(recipe_of(steps=60), 0), Lane(recipe_of(steps=60), 1)], images, CPU, said.append)
    assert said == [50, 60, 110, 120]

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_lanes([Lane(recipe_of(steps=60), 0)], images, CPU, stop)


def test_rejects_lanes_of_different_lengths(images):
    with pytest.raises(InvalidArgument, match="`lanes` must have one number of steps"):
        train_lanes([Lane(recipe_of(steps=2), 0), Lane(recipe_of(steps=3), 0)], images, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device captures")
def test_what_cannot_be_captured_is_done_as_it_is_written():
    done = []
    graph = Graph([lambda: done.append(1), lambda: done.append(2)])
    assert not graph.capture() and graph.refused and not graph.captured
    graph()
    assert done == [1, 2]


# On a GPU.

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture
def captures(monkeypatch):
    """Whether each of the graphs that were asked for was captured."""
    found, capture = [], Graph.capture

    def noted(graph):
        found.append(capture(graph))
        return found[-1]

    monkeypatch.setattr(Graph, "capture", noted)
    return found


def close(one, other):
    """Trained to the bit alike; what is measured of them is summed in whatever order."""
    assert np.array_equal(one.losses, other.losses) and one.loss == other.loss
    assert np.array_equal(one.step, other.step)
    np.testing.assert_allclose(one.norm, other.norm, rtol=2e-6)
    np.testing.assert_allclose(one.rotation, other.rotation, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("network", [pytest.param(name, marks=GPU) for name in ("tiny", "resnet", "resnet18", "gpt")])
@pytest.mark.parametrize(("optimizer", "rotational"), VARIANTS)
def test_captured_lanes_train_as_plain_ones(images, text, captures, network, optimizer, rotational, deterministic):
    data = (text if network == "gpt" else images).to(CUDA)
    scheduled = {} if rotational is None else {"rotation_schedule": "warmup0.2+linear"}
    recipe = recipe_of(optimizer, rotational, network, 30, schedule="warmup0.2+cosine", **scheduled)
    captured = train_lanes([Lane(recipe, 0, final=True)], data, CUDA)[0]
    assert captures == [True] * 4
    plain = train_lanes([Lane(recipe, 0, final=True)], data, CUDA, graph=False)[0]
    assert len(captures) == 4
    close(captured, plain)
    assert captured.test_loss == plain.test_loss


@pytest.mark.parametrize("network", [pytest.param(name, marks=GPU) for name in ("tiny", "resnet", "gpt")])
def test_lanes_of_one_graph_give_what_each_gives_alone(images, text, captures, network, deterministic):
    data = (text if network == "gpt" else images).to(CUDA)
    gain = {"standardized": "gain"} if network == "gpt" else {"imbalance": {"share": 0.5, "factor": 4}}
    recipes = [recipe_of(*variant, network, 30, every=2 + k % 2) for k, variant in enumerate(VARIANTS)]
    recipes += [recipe_of("adamw", {}, network, 30, **gain), recipe_of("sgdm", None, network, 30, frozen=True)]
    lanes = [Lane(recipe, seed) for seed, recipe in enumerate(recipes)]
    broken = Lane(recipe_of("sgdm", network=network, steps=30, hyper={"lr": 1e25, "weight_decay": 0.0, "momentum": 0.9}), 0)
    together = train_lanes([broken, *lanes], data, CUDA)
    assert captures == [True] * 6
    assert together[0].diverged is not None
    for lane, found in zip(lanes, together[1:], strict=True):
        assert found.diverged is None
        close(found, train_lanes([lane], data, CUDA)[0])


@pytest.mark.parametrize("network", [pytest.param(name, marks=GPU) for name in ("resnet", "gpt")])
def test_captured_lanes_compute_in_bf16(images, text, captures, network):
    data = (text if network == "gpt" else images).to(CUDA)
    recipe = recipe_of("adamw", {}, network, 30)
    half, whole = train_lanes([Lane(replace(recipe, autocast=True), 0), Lane(recipe, 0)], data, CUDA)
    assert captures == [True] * 4 and not np.array_equal(half.losses, whole.losses)
    np.testing.assert_allclose(half.losses[:5], whole.losses[:5], rtol=0.05)
