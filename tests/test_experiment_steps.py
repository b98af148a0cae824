"""Steps that are replayed from CUDA graphs: what they compute (on a GPU), and what the probe hears of them."""

import numpy as np
import pytest
import torch
from torch import nn

from rwsim.experiments import train
from rwsim.experiments.data import load_images
from rwsim.experiments.measure import Watch
from rwsim.experiments.models import NETWORKS
from rwsim.experiments.step import Step
from rwsim.experiments.train import Recipe
from rwsim.probe import DynamicsProbe
from rwsim.theory.factors import schedule_factors
from tests.experiments import Tiny, make_data, nothing

HYPER = {
    "sgdm": {"lr": 0.5, "weight_decay": 1e-2, "momentum": 0.9},
    "adamw": {"lr": 2e-2, "weight_decay": 1.0, "betas": (0.9, 0.99)},
    "adam_l2": {"lr": 2e-2, "weight_decay": 1e-2, "betas": (0.9, 0.99)},
    "lion": {"lr": 4e-3, "weight_decay": 1.0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load_images(make_data(tmp_path_factory.mktemp("steps") / "data"))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)


def recipe_of(optimizer, steps=60, network="tiny", size=None):
    return Recipe(network, optimizer, HYPER[optimizer], steps, 16, size or {}, network == "tiny", "warmup0.1+cosine", every=7)


class Unheard(Step):
    """Replays by taking the step without its hooks, as a graph would."""

    @property
    def captured(self):
        return bool(self.optimizer.state)

    def replay(self, step):
        hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        kept = [dict(one) for one in hooks]
        [one.clear() for one in hooks]
        loss = self.take(step)
        [one.update(values) for one, values in zip(hooks, kept, strict=True)]
        return loss


def test_replayed_steps_leave_the_records_as_they_were(data, monkeypatch):
    recipe, watches = recipe_of("adamw"), []

    def attach(model, optimizer):
        watches.append(Watch(recipe, model, optimizer))
        return watches[-1]

    plain = train.train(recipe, data, 0, torch.device("cpu"), attach)
    monkeypatch.setattr(train, "Step", Unheard)
    replayed = train.train(recipe, data, 0, torch.device("cpu"), attach)
    assert torch.equal(plain.losses, replayed.losses) and replayed.graph and not plain.graph
    one, other = (watch.probe for watch in watches)
    assert one.steps == other.steps == list(range(1, 61, 7))
    for name in (layer.name for layer in one.layers):
        a, b = one.read(name), other.read(name)
        assert all(np.array_equal(a.found[key], b.found[key], equal_nan=True) for key in a.found)
        assert all(np.array_equal(a.predicted[key], b.predicted[key], equal_nan=True) for key in a.predicted)
    lr = other.read(one.layers[0].name).predicted["lr"]
    assert np.allclose(lr, HYPER["adamw"]["lr"] * schedule_factors("warmup0.1+cosine", 60)[::7])


def test_a_due_step_that_is_replayed_is_missing():
    model = nn.Linear(4, 2, bias=False, device="meta").to_empty(device="cpu")
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = DynamicsProbe(model, optimizer, every=3)
    due = []
    for step in range(9):
        due.append(probe.due)
        if step == 3:
            probe.replayed()
            continue
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert due == [True, False, False] * 3 and probe.steps == [1, 7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("network", ["tiny", "resnet"])
@pytest.mark.parametrize("optimizer", HYPER)
def test_graphs_train_as_the_plain_loop_does(data, optimizer, network, deterministic):
    recipe = recipe_of(optimizer, 40, network, {"width": 4, "blocks": 1} if network == "resnet" else None)
    cuda, watches = torch.device("cuda"), []

    def attach(model, optimizer):
        watches.append(Watch(recipe, model, optimizer))
        return watches[-1]

    found = [train.train(recipe, data.to(cuda), 0, cuda, attach, graph=graph) for graph in (True, False)]
    assert found[0].graph and not found[1].graph
    assert torch.equal(found[0].losses, found[1].losses)
    one, other = (watch.probe for watch in watches)
    assert one.steps == other.steps == list(range(1, 41, 7))
    for name in (layer.name for layer in one.layers):
        a, b = (probe.read(name) for probe in (one, other))
        assert np.allclose(a.measured["norm"], b.measured["norm"], rtol=2e-6)
        assert np.array_equal(a.predicted["lr"], b.predicted["lr"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_training_resumes(data, tmp_path):
    cuda, recipe = torch.device("cuda"), recipe_of("adamw", 100)
    whole = train.train(recipe, data.to(cuda), 0, cuda, nothing)

    def heard(done):
        if done == 100:
            raise KeyboardInterrupt

    place = tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        train.train(recipe, data.to(cuda), 0, cuda, nothing, checkpoint=place, save_seconds=0.0, heard=heard)
    assert torch.load(place, weights_only=True)["step"] == 50
    again = train.train(recipe, data.to(cuda), 0, cuda, nothing, checkpoint=place)
    torch.testing.assert_close(again.losses, whole.losses, rtol=1e-3, atol=1e-3)
