"""What a reviewer broke: each stays mended."""

import math
import pickle

import pytest
import torch
from torch import nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW, RotationalLion, RotationalSGDM, RotationalWrapper, rotational_of

# Some of these optimizers have nothing that turns, which is what is tested; tests/test_rotational_keys.py holds the warning.
pytestmark = pytest.mark.filterwarnings("ignore:No parameter of this")

STEP: dict = {"lr": 0.1, "weight_decay": 0.1}


def param(rows=4, columns=64, dtype=torch.float32):
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=dtype))


def run(optimizer, one, steps, scale=lambda step: 1.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        one.grad = torch.randn(one.shape, generator=generator).to(one.dtype) * scale(step)
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", [3e18, 1e20, 1e30])
def test_a_large_gradient_leaves_no_nan(momentum, size):
    one = param()
    run(RotationalSGDM([one], momentum=momentum, **STEP), one, 120, lambda step: size if step == 1 else 1.0)
    assert bool(one.isfinite().all())


def test_elements_without_a_gradient_are_finite_at_the_defaults_of_every_rule():
    """eps 0 is the theory's; a class to train with has torch's."""
    one = nn.Parameter(torch.ones(4))
    optimizer = rotational_of("nadamw")([one], lr=1e-2, weight_decay=0.1)
    one.grad = torch.tensor([1.0, 0.0, 2.0, 0.0])
    optimizer.step()
    assert bool(one.isfinite().all()) and optimizer.defaults["eps"] == 1e-8


@pytest.mark.parametrize("decay", [0.1, torch.tensor(0.1), 0.0])
def test_equilibrium_norm_survives_lr_0(decay):
    one = param(4, 32)
    optimizer = RotationalAdamW([one], lr=1e-2, weight_decay=decay, norm="equilibrium", rotation=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    before = one.detach().norm(dim=1)
    for step in range(6):
        one.grad = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        schedule.step()
    right = torch.full((4,), math.sqrt(1e-2 * 32 / 0.2)) if decay else before
    torch.testing.assert_close(one.detach().norm(dim=1), right)


def test_wrappers_do_not_nest():
    inner = torch.optim.AdamW([param()], weight_decay=0.1)
    outer = RotationalWrapper(inner, "adamw")
    for again in (outer, inner, RotationalAdamW([param()])):
        with pytest.raises(InvalidArgument, match="wrap a plain torch optimizer, once"):
            RotationalWrapper(again, 0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: RotationalAdamW([one], weight_decay=0.1),
        pytest.param(lambda one: RotationalSGDM([one], momentum=0.9, **STEP), marks=pytest.mark.slow),
        pytest.param(lambda one: RotationalLion([one], weight_decay=1.0), marks=pytest.mark.slow),
        lambda one: RotationalWrapper(torch.optim.AdamW([one], weight_decay=0.1), "adamw"),
    ],
)  # fmt: skip
def test_case_30_with_momentum(make):
    """A row that has a gradient in 2 % of the steps turns by the rate when it has, and counts those steps only."""
    one = param(50, 64, torch.float64)
    optimizer = make(one)
    rate, squares, generator = optimizer.rotation(optimizer.param_groups[0]), [], torch.Generator().manual_seed(3)
    for step in range(1500):
        row = step % 50
        one.grad = torch.zeros_like(one)
        one.grad[row] = torch.randn(64, generator=generator, dtype=torch.float64)
        before = one.detach()[row].clone()
        optimizer.step()
        if step >= 500:
            half = (one.detach()[row] / one.detach()[row].norm() - before / before.norm()).norm() / 2
            squares.append(float(2 * half.asin()) ** 2)
    assert set(optimizer.state[one]["hits"].flatten().tolist()) == {30.0}
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(rate, rel=0.05)


def test_other_vectors_mid_run_begin_anew():
    one = param()
    norm = one.detach().norm()
    optimizer = RotationalAdamW([one], weight_decay=0.1, zero_mean=False)
    run(optimizer, one, 3)
    optimizer.param_groups[0]["per_neuron"] = False
    run(optimizer, one, 3)
    torch.testing.assert_close(one.detach().norm(), norm)
    assert optimizer.state[one]["norm"].shape == (1, 1)


def test_a_pause_in_rotation_ends_with_the_norm_of_then():
    one = param()
    optimizer = RotationalAdamW([one], lr=0.1, weight_decay=0.5)
    run(optimizer, one, 3)
    optimizer.param_groups[0]["rotational"] = False
    run(optimizer, one, 20)
    norm = one.detach().norm(dim=1)
    optimizer.param_groups[0]["rotational"] = None
    run(optimizer, one, 3)
    torch.testing.assert_close(one.detach().norm(dim=1), norm)
    assert float(one.detach().mean(1).abs().max()) < 1e-6


def test_a_rotation_out_of_range_changes_nothing():
    one, other = param(), param()
    optimizer = RotationalAdamW([{"params": [one]}, {"params": [other]}], weight_decay=0.1)
    run(optimizer, one, 2)
    optimizer.param_groups[1]["rotation"] = -1.0
    before = one.detach().clone(), float(optimizer.state[one]["step"])
    one.grad = other.grad = torch.ones(4, 64)
    with pytest.raises(InvalidArgument, match=r"`rotation` must lie in \[0, inf\)"):
        optimizer.step()
    assert torch.equal(one.detach(), before[0]) and float(optimizer.state[one]["step"]) == before[1]


@pytest.mark.parametrize("wrap", [False, True])
def test_a_state_of_torchs_own_loads(wrap):
    one, twin = param(), param()
    plain = torch.optim.AdamW([one], weight_decay=0.1)
    run(plain, one, 3)
    made = torch.optim.AdamW([twin], weight_decay=0.1)
    optimizer = RotationalWrapper(made, "adamw") if wrap else RotationalAdamW([twin], weight_decay=0.1)
    optimizer.load_state_dict(plain.state_dict())
    run(optimizer, twin, 1)
    assert float(optimizer.state[twin]["step"]) == 4 and optimizer.param_groups[0]["zero_mean"] is True


def test_wrapper_among_torchs_tools():
    one = param()
    inner = torch.optim.SGD([one], lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = RotationalWrapper(inner, "sgdm")
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    other = param()
    inner.add_param_group({"params": [other]})
    run(optimizer, other, 2)
    assert "norm" in optimizer.state[other]


def test_an_average_of_weights_sees_weights():
    one = param()
    optimizer = RotationalWrapper(torch.optim.ASGD([one], lr=0.1, weight_decay=0.1), 0.01)
    run(optimizer, one, 5)
    assert float(optimizer.state[one]["ax"].norm() / one.detach().norm()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "lion", "nadamw"])
def test_nan_is_not_hidden(name):
    one = param()
    optimizer = rotational_of(name)([one], **STEP)
    one.grad = torch.full_like(one, math.nan)
    optimizer.step()
    assert bool(one.isnan().all())
    lion = param()
    optimizer = RotationalLion([lion], lr=1e-3, weight_decay=0.1)
    lion.grad = torch.ones_like(lion)
    lion.grad[1] = math.nan
    optimizer.step()
    assert lion.isnan().any(1).tolist() == [False, True, False, False]


def test_made_classes_pickle_and_frozen_weights_are_not_centred():
    optimizer = pickle.loads(pickle.dumps(rotational_of("nadamw")([param()], **STEP)))
    assert type(optimizer) is rotational_of("nadamw")
    one = param()
    one.requires_grad_(False)
    before = one.clone()
    RotationalAdamW([one], weight_decay=0.1).centre()
    assert torch.equal(one, before)


def test_unknown_rates_are_refused_by_the_name_of_the_option():
    with pytest.raises(InvalidArgument, match="`rotation` must be one of sgdm"):
        RotationalAdamW([param()], rotation="adamq")
