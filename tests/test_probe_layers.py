"""Which tensors a probe watches, and which vectors of them; what it refuses."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from rwsim import DynamicsProbe
from rwsim.errors import InvalidArgument
from tests.probing import WALKS, Weight, close, data, learn, small
from tests.rotational import seeded


def vectors_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = DynamicsProbe(model, optimizer, every=1, **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    probe.close()
    return probe


def test_vectors_are_neurons():
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(5, 2))
    model = model.double()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    probe = vectors_of(model, layers="*.weight")

    def norms(name):
        return torch.from_numpy(probe.read(name).found["norm"][0])

    after = {name: param.detach() for name, param in model.named_parameters()}
    close(norms("0.weight"), after["0.weight"].flatten(1).norm(dim=1))
    close(norms("1.weight"), after["1.weight"].transpose(0, 1).flatten(1).norm(dim=1))
    grouped = after["2.weight"].view(2, 2, 3, 3, 3).transpose(1, 2).reshape(6, -1)
    close(norms("2.weight"), grouped.norm(dim=1))
    assert [layer.fan_in for layer in probe.layers] == [27, 54, 18, 5]
    whole = vectors_of(model, per_neuron=False, layers=["0.weight", "3.weight"])
    close(whole.read("0.weight").found["norm"], model[0].weight.detach().norm().view(1, 1))
    assert not torch.equal(before["0.weight"], after["0.weight"])


def test_special_layouts_and_strides():
    model = Weight(6, 4, 2)
    probe = vectors_of(model, special={"weight": {"neuron_dims": (0, 1)}})
    close(probe.read("weight").found["norm"][0], model.weight.detach().flatten(0, 1).norm(dim=1))
    probe = vectors_of(model, special={"weight": {"blocks": 3, "per_neuron": False}})
    close(probe.read("weight").found["norm"][0], model.weight.detach().reshape(3, -1).norm(dim=1))
    with torch.random.fork_rng(devices=[]):
        strided = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
    found = vectors_of(strided).read("weight").found["norm"][0]
    close(found, strided.weight.detach().flatten(1).norm(dim=1), rtol=1e-6, atol=0)


def test_subsampled_neurons_are_the_same_ones_each_time():
    model = Weight(50, 8)
    everything = vectors_of(model)
    some = [vectors_of(model, neurons=9) for _ in range(2)]
    rows = some[0].layers[0].rows
    assert len(set(rows.tolist())) == 9 and np.array_equal(rows, some[1].layers[0].rows)
    close(some[1].read("weight").found["norm"][0], model.weight.detach().norm(dim=1)[rows])
    assert vectors_of(model, neurons=60).read("weight").found["norm"].shape == everything.read("weight").found["norm"].shape


def test_large_layers_are_measured_in_parts(monkeypatch):
    import rwsim.probe.measure as measure

    def run():
        model = small(torch.float64)
        optimizer = WALKS["adam_l2"](list(model.parameters()))
        with DynamicsProbe(model, optimizer, every=1) as probe:
            learn(model, optimizer, data(3, torch.float64))
        return probe

    whole = run()
    monkeypatch.setattr(measure, "_CACHED", 70)
    parts = run()
    assert len(parts._bundles) > len(whole._bundles)
    for layer in whole.layers:
        for key, values in whole.read(layer.name).found.items():
            np.testing.assert_allclose(parts.read(layer.name).found[key], values, rtol=1e-12)


def test_alike_layers_are_measured_together(monkeypatch):
    """As on CUDA: vectors of one length in one bundle, whatever tensor they belong to; hyperparameters go by the tensor."""
    import rwsim.probe.measure as measure

    def run():
        model = Pair()
        groups = [{"params": [model.one], "eps": 1e-3}, {"params": [model.two], "betas": (0.8, 0.9)}, {"params": [model.three]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        with DynamicsProbe(model, optimizer, every=1) as probe:
            for step in range(3):
                for i, param in enumerate(model.parameters()):
                    param.grad = torch.randn(param.shape, generator=seeded(10 * step + i), dtype=torch.float64)
                model.three.grad = None if step == 1 else model.three.grad
                optimizer.step()
        return probe

    apart = run()
    monkeypatch.setattr(measure, "_in_cache", lambda param: False)
    together = run()
    assert len(apart._bundles) == 3 and len(together._bundles) == 1
    for layer in apart.layers:
        for key, values in apart.read(layer.name).found.items():
            np.testing.assert_allclose(together.read(layer.name).found[key], values, rtol=1e-12, err_msg=f"{layer.name} {key}")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (
            nn.Parameter(torch.randn(rows, 6, generator=seeded(rows), dtype=torch.float64)) for rows in (4, 5, 7)
        )


def test_layers_by_name_pattern_and_function():
    model = small()
    for layers in ("3.weight", ["3.*eight"], re.compile(r"^3\.w"), lambda name, param: param.shape == (5, 36)):
        assert [layer.name for layer in vectors_of(model, layers=layers).layers] == ["3.weight"]
    assert [layer.name for layer in vectors_of(model).layers] == ["0.weight", "3.weight", "5.weight"]
    # A vector is one vector.
    assert vectors_of(model, layers="3.bias").read("3.bias").found["norm"].shape == (1, 1)


WRONG = {
    "no match": ({"layers": ["3.weight", "9.*"]}, "`layers` must fit parameters that the optimizer trains, got '9.*'"),
    "no such layout": ({"special": {"9.*": {}}}, "`special` must fit parameters that the optimizer trains, got '9.*'"),
    "a kind": ({"layers": [3]}, "`layers` must be names, patterns"),
    "nothing": ({"layers": lambda name, param: False}, "`layers` must leave something to watch"),
    "every": ({"every": 0}, "`every` must be a number of steps of at least 1"),
    "intervals": ({"every": [(10, 1), (5, 2), (None, 3)]}, "`every` must be a number of steps of at least 1"),
    "an end": ({"every": [(10, 1)]}, "the last until None"),
    "neurons": ({"neurons": 0}, "`neurons` must be at least 1, got 0"),
    "flush": ({"flush": 0}, "`flush` must be at least 1, got 0"),
    "average": ({"average": 0.5}, "`average` must be at least 1, got 0.5"),
    "rule": ({"rule": "nonsense"}, "`optimizer` must be one of sgdm"),
    "one coordinate": ({"layers": "6.weight"}, "`layers` must"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects(case):
    options, message = WRONG[case]
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument) as caught:
        DynamicsProbe(model, optimizer, **options)
    assert message in str(caught.value)
    assert not optimizer._optimizer_step_pre_hooks


def test_rejects_an_optimizer_that_needs_a_closure():
    model = small()
    with pytest.raises(InvalidArgument, match="`optimizer` must take its step without a closure, got 'LBFGS'"):
        DynamicsProbe(model, torch.optim.LBFGS(model.parameters()))


def test_rejects_reading_what_is_not_watched():
    probe = vectors_of(small())
    with pytest.raises(InvalidArgument, match=r"`name` must be one of 0\.weight, 3\.weight, 5\.weight, got '4\.weight'"):
        probe.read("4.weight")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_cuda_records_what_a_cpu_does(name, how):
    """Layers in bundles, steps counted on the device, under a scaler that skips one step."""
    if name == "SGD" and "capturable" in how:
        pytest.skip("SGD has no such option")

    def run(device, how):
        model = small().to(device)
        hyper = {"lr": 1e-2, "weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
        optimizer = getattr(torch.optim, name)(model.parameters(), **hyper, **how)
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        with DynamicsProbe(model, optimizer, every=1, flush=3) as probe:
            for step, x in enumerate(data(8)):
                optimizer.zero_grad()
                loss = model(x.to(device)).square().mean() * (torch.inf if step == 4 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return probe

    cpu, cuda = run("cpu", {}), run("cuda", how)
    assert cuda.steps == cpu.steps == list(range(1, 8))
    for layer in cpu.layers:
        for key, values in cpu.read(layer.name).found.items():
            np.testing.assert_allclose(cuda.read(layer.name).found[key], values, rtol=2e-3, atol=1e-5, err_msg=f"{layer.name} {key}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_is_waited_for_on_cuda():
    """Between flushes, whatever is measured: torch raises where the host waits for the device."""
    model = small().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), weight_decay=0.1, fused=True)
    batches = [x.to("cuda") for x in data(6)]
    probe = DynamicsProbe(model, optimizer, every=1, flush=100)
    learn(model, optimizer, batches[:2])
    torch.cuda.set_sync_debug_mode("error")
    try:
        learn(model, optimizer, batches[2:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert probe.steps == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(probe.read("3.weight").every_hyper["lr"], 1e-2, rtol=1e-6)
