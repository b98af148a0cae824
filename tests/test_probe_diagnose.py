"""What the diagnosis says of runs whose faults are known, and of one that has none."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rwsim import DynamicsProbe
from rwsim.errors import InvalidArgument
from rwsim.probe.diagnose import _trend
from rwsim.probe.transient import Transients
from tests.rotational import seeded

NEURONS, FAN_IN = 24, 48
STEPS = 900


class Layers(nn.Module):
    def __init__(self, names, size):
        super().__init__()
        generator = seeded(1)
        for name in names:
            self.register_parameter(name, nn.Parameter(size * torch.randn(NEURONS, FAN_IN, generator=generator)))


def walk(faults, steps=STEPS, **hyper):
    """Layers under scale-invariant random gradients through AdamW; a fault changes the gradient or the weights after each step.

    Args:
        faults: Layer -> function of (weight, gradient, noise, step), which returns another gradient or None.
    """
    hyper = {"lr": 1e-2, "weight_decay": 0.4, **hyper}
    model = Layers(faults, (hyper["lr"] / 2 / 0.4) ** 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), **hyper)
    generator = seeded(2)
    with DynamicsProbe(model, optimizer, every=3, flush=1000) as probe:
        for step in range(steps):
            for name, fault in faults.items():
                weight = getattr(model, name)
                noise = torch.randn(NEURONS, FAN_IN, generator=generator)
                w = weight.detach()
                across = (noise - (noise * w).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True) * w) / w.norm(dim=1, keepdim=True)
                weight.grad = across if fault is None else fault(w, across, step)
            optimizer.step()
    return probe


def doubled(weight, grad, step):
    """Gradients that shrink the neuron: lambda_u = 3 lambda, so that it turns twice as fast."""
    size = (grad.square().sum(1, keepdim=True) / FAN_IN).sqrt()
    return grad + 3 * 0.4 * size * weight


def uneven(weight, grad, step):
    """Half of the neurons are driven off their equilibrium."""
    size = (grad.square().sum(1, keepdim=True) / FAN_IN).sqrt()
    return grad + torch.where(torch.arange(NEURONS)[:, None] < NEURONS // 2, 3 * 0.4, 0.0) * size * weight


class Alternating:
    """Gradients that point against the ones before, orthogonal to the weights all the same."""

    def __init__(self):
        self.last = torch.zeros(NEURONS, FAN_IN)

    def __call__(self, weight, grad, step):
        self.last = grad - 0.6 * self.last
        self.last -= (self.last * weight).sum(1, keepdim=True) / (weight * weight).sum(1, keepdim=True) * weight
        return self.last.clone()


def bursts(weight, grad, step):
    """One gradient in forty is a hundred times the others."""
    return grad * (100.0 if step % 40 == 0 else 1.0)


FAULTS = {"good": None, "fast": doubled, "uneven": uneven, "alternating": Alternating(), "bursts": bursts}


@pytest.fixture(scope="module")
def found():
    return walk(FAULTS).diagnose()


def row(found, layer):
    return next(one for one in found.rows if one.layer == layer)


def lines(found, layer):
    return [line for line in found.text.splitlines() if line.startswith(f"{layer}:")]


def test_nothing_is_said_of_a_good_layer(found):
    good = row(found, "good")
    assert good.state == "equilibrium" and good.pace == "as predicted" and not good.fails and good.spread < 0.05
    assert not lines(found, "good")
    assert any("in equilibrium" in line and "good" in line for line in found.text.splitlines())


def test_a_layer_of_doubled_rotation_is_named(found):
    fast = row(found, "fast")
    assert fast.pace == "too fast" and 1.6 < fast.rotation / fast.predicted["predicted_rotation"] < 2.4
    assert abs(fast.rotation / fast.predicted["corrected_rotation"] - 1) < 0.05
    assert "orthogonal gradients" in fast.fails
    (line,) = lines(found, "fast")
    assert "rotates too fast" in line and "act as more decay" in line


def test_an_imbalanced_layer_is_named(found):
    assert row(found, "uneven").spread > 0.25
    assert "is imbalanced: the rotation of its neurons spreads by" in lines(found, "uneven")[0]


def test_correlated_gradients_are_named(found):
    alternating = row(found, "alternating")
    assert alternating.momentum_cosine < -0.1
    assert "the cosine of momentum and gradient is -0." in lines(found, "alternating")[0]
    # The rotation does not feel it.
    assert alternating.pace == "as predicted"


def test_uneven_steps_are_named(found):
    assert row(found, "bursts").fails.keys() >= {"even steps"}
    assert "steps vary in size" in lines(found, "bursts")[0]
    assert row(found, "good").rotation / row(found, "good").rotation_rms > 0.98


def test_a_run_that_ends_before_is_on_its_way():
    short = walk({"good": None}, steps=90, weight_decay=0.01)
    (only,) = short.diagnose().rows
    assert only.state == "transient" and only.settles is None
    assert "still on the way to equilibrium" in short.diagnose().text


def test_the_trend_of_a_series_and_its_error():
    """AR(1) around a line: the gain within its errors, which are those that repetitions show."""
    generator = np.random.default_rng(0)
    noise = generator.standard_normal((400, 1200))
    series = np.zeros_like(noise)
    for t in range(1, 400):
        series[t] = 0.8 * series[t - 1] + noise[t]
    series = series[100:] + np.linspace(0, 5, 300)[:, None]
    gains, errors = np.array([_trend(column[:, None]) for column in series.T]).T
    assert abs(gains.mean() - 5) < 5 * gains.std() / math.sqrt(1200)
    assert abs(np.sqrt((errors**2).mean()) / gains.std() - 1) < 0.15
    # Of 60 steps, a few autocorrelation times, only neurons beside each other can tell.
    slow = (series - np.linspace(0, 5, 300)[:, None])[:60].reshape(60, 50, 24)
    gains, errors = np.array([_trend(slow[:, i]) for i in range(50)]).T
    assert 0.8 < gains.std() / np.sqrt((errors**2).mean()) < 1.25


def test_a_layer_whose_norm_moves_on_is_not_in_equilibrium():
    """The prediction has settled, the weights have not: something else changes them."""
    model = Layers(["weight"], 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.4)
    generator = seeded(2)
    with DynamicsProbe(model, optimizer, every=3, flush=1000) as probe:
        for _ in range(STEPS):
            model.weight.grad = torch.randn(NEURONS, FAN_IN, generator=generator)
            optimizer.step()
            with torch.no_grad():
                model.weight.mul_(1.0065)
    (only,) = probe.diagnose().rows
    assert only.state == "drifting" and only.pace == "too slow"
    assert "their norms still move" in probe.diagnose().text


def test_after_a_given_step():
    probe = walk({"good": None}, steps=200)
    (only,) = probe.diagnose(after=100).rows
    assert only.first == 103 and only.last == 199
    with pytest.raises(InvalidArgument, match="`after` must leave at least 8 measured steps, got 190"):
        probe.diagnose(after=190)


def test_a_layer_without_prediction_says_why():
    model = Layers(["weight"], 0.1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        for _ in range(10):
            model.weight.grad = torch.randn(NEURONS, FAN_IN, generator=seeded(3))
            optimizer.step()
    text = probe.diagnose().text
    assert "1 of 1 layers without a prediction: weight." in text and "no prediction for RMSprop" in text
    assert str(probe.diagnose()) == text


def test_no_decay_has_no_equilibrium():
    probe = walk({"good": None}, steps=60, weight_decay=0.0)
    (only,) = probe.diagnose().rows
    assert only.state == "no prediction" and math.isnan(only.predicted["predicted_norm"])


def test_zero_weights_have_no_transient():
    model = Layers(["weight"], 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    reading = probe.read("weight")
    assert np.isnan(reading.found["rotation"]).all()
    assert np.isnan(reading.transient(Transients(), False)[0]).all()
