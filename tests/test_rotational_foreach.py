"""The foreach path is the plain one: the same operations, on lists of tensors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalOptimizer, RotationalSGDM, rotational_of
from rwsim.rotational.foreach import Many
from tests.rotational import CLASSES, seeded, wrapped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 100 if DEVICE == "cuda" else 8
NADAMW: Any = rotational_of("nadamw")
SIGNUM: Any = rotational_of("signum")
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (RotationalAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (RotationalAdam, {"lr": 1e-2, "weight_decay": 3.0, "rotation": "adamw"}),
    "lion": (RotationalLion, {"lr": 1e-3, "weight_decay": 1.0}),
    "sgd": (RotationalSGDM, {"lr": 0.1, "weight_decay": 1e-2, "maximize": True}),
    "nesterov": (RotationalSGDM, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "nadamw": (NADAMW, {"lr": 1e-2, "weight_decay": 0.1}),
    "signum": (SIGNUM, {"lr": 1e-2, "weight_decay": 0.1}),
}
SHAPES = [(7, 35), (12, 64), (5,), (3, 4, 3, 3), (40, 1), (1, 37), (0, 4), (), (6, 33)]
OPTIONS: list[dict[str, Any]] = [
    {}, {"per_neuron": False}, {"zero_mean": False}, {"norm": "equilibrium"}, {"fixed_angle": True}, {"neuron_dims": (-1,)},
]  # fmt: skip

CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3}


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = seeded()
    found = [nn.Parameter((0.1 * torch.randn(shape, generator=draws)).to(DEVICE, dtype)) for shape in SHAPES]
    return [*found, nn.Parameter((0.1 * torch.randn(33, 9, generator=draws)).to(DEVICE, dtype).t())]


def walk(optimizer: RotationalOptimizer, params: list[nn.Parameter], steps: int = STEPS, first: int = 0) -> None:
    """Steps under gradients of a seed: one with a row of zeros, one where a parameter has none and so falls a step behind."""
    for number in range(first, first + steps):
        draws = seeded(number + 1)
        for param in params:
            param.grad = torch.empty_like(param).copy_(1e-2 * torch.randn(param.shape, generator=draws))
        if number == 1:
            params[1].grad[2] = 0  # type: ignore[index]  # every parameter has one
        if number == 2:
            params[0].grad = None
        optimizer.step()


def assert_same(one: RotationalOptimizer, other: RotationalOptimizer) -> None:
    """But for the order of sums, which hangs on where tensors lie in memory; in bf16 a few roundings go the other way."""
    for mine, yours in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert one.state[mine].keys() == other.state[yours].keys()
        held = [(mine.detach(), yours.detach()), *((one.state[mine][name], other.state[yours][name]) for name in one.state[mine])]
        for x, y in held:
            x, y = x.double(), y.double()
            within = CLOSE[mine.dtype] * (1 if DEVICE == "cpu" else 10)
            assert not x.numel() or float((x - y).norm()) <= within * max(float(x.norm()), 1e-3), tuple(mine.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_foreach_steps_are_plain_ones(kind, dtype):
    cls, hyper = KINDS[kind]
    both = []
    for foreach in (False, True):
        params = weights(dtype)
        both.append(cls(params, **hyper, fused=False, foreach=foreach))
        walk(both[-1], params)
    assert_same(*both)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_options_are_carried(kind, options):
    cls, hyper = KINDS[kind]
    both = []
    for foreach in (False, True):
        params = [param for param in weights(torch.float64) if param.dim() != 1 or "neuron_dims" not in options]
        both.append(cls(params, **hyper, **options, fused=False, foreach=foreach))
        walk(both[-1], params, steps=3)
        both[-1].state[params[0]]["speed"] = torch.linspace(0, 2, both[-1].state[params[0]]["norm"].numel(), dtype=torch.float64).to(
            DEVICE
        ).view_as(both[-1].state[params[0]]["norm"])  # fmt: skip
        walk(both[-1], params, steps=3, first=3)
    assert_same(*both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["wrapped adamw", "wrapped sgd", "wrapped adam", "difference"])
def test_a_wrapper_turns_many_at_once(name, dtype):
    if (name, dtype) == ("wrapped sgd", torch.bfloat16):
        pytest.skip("torch's SGD rounds bf16 differently in foreach: its momentum by 0.4 %")
    make = wrapped(torch.optim.Rprop, 0.01, lr=1e-3) if name == "difference" else CLASSES[name]
    both = []
    for foreach in (False, True):
        params = [param for param in weights(dtype) if param.numel()]
        both.append(make([{"params": params[:4]}, {"params": params[4:]}], foreach=foreach))
        walk(both[-1], params, steps=4)
        for group in both[-1].param_groups:
            assert [both[-1].is_rotational(group, param) for param in group["params"]].count(True) > 1
    assert_same(*both)


def test_a_lot_is_one_launch_of_each_operation(monkeypatch):
    """What it is for: eight tensors cost as many elementwise launches as one."""
    calls: list[int] = []
    kept = torch._foreach_mul_

    def counted(tensors: Any, *args: Any) -> None:
        calls.append(len(tensors))
        kept(tensors, *args)

    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    found = []
    for count in (1, 8):
        params = [nn.Parameter(torch.randn(4, 5 + n, generator=seeded(n)).to(DEVICE)) for n in range(count)]
        optimizer = RotationalAdamW(params, lr=1e-2, weight_decay=0.1, fused=False, foreach=True)
        for param in params:
            param.grad = torch.ones_like(param)
        calls.clear()
        optimizer.step()
        assert set(calls) == {count}
        found.append(len(calls))
    assert found[0] == found[1] > 0


def test_a_nan_reaches_its_row_alone():
    params = weights(torch.float32)[:2]
    optimizer = RotationalLion(params, lr=1e-3, weight_decay=1.0, fused=False, foreach=True)
    walk(optimizer, params, steps=1)
    params[0].grad[2, 3] = math.nan
    optimizer.step()
    hurt = params[0].detach().isnan()
    assert hurt[2].all() and int(hurt.sum()) == 35 and not params[1].detach().isnan().any()


@pytest.mark.parametrize("other", ["capturable", "fused"])
def test_it_is_refused_beside_another_path(other):
    make: Any = RotationalAdamW
    with pytest.raises(InvalidArgument, match=f"`foreach` cannot be True with {other}=True"):
        make([nn.Parameter(torch.ones(2, 3))], foreach=True, **{other: True})


def test_many_does_what_torch_does():
    """Operators from both sides, functions, methods in and out of place, and numbers of vectors as arguments."""
    shapes, dims = [(2, 3), (4, 1, 2)], [(1,), (1, 2)]
    x, y = ([torch.rand(shape, generator=seeded(n)) + 0.5 for n, shape in enumerate(shapes, first)] for first in (0, 7))
    row = torch.rand(6, generator=seeded(3))
    rows = [row[:2].view(2, 1), row[2:].view(4, 1, 1)]
    cases: list[Any] = [
        lambda a, b, r: a + b, lambda a, b, r: 2 - a, lambda a, b, r: 2 / a, lambda a, b, r: a**2, lambda a, b, r: 2**a, lambda a, b, r: -a,
        lambda a, b, r: a * r, lambda a, b, r: a - r, lambda a, b, r: torch.sqrt(a), lambda a, b, r: torch.where(a > b, a, b),
        lambda a, b, r: torch.tensor(2.0) * a, lambda a, b, r: a.clone().addcmul_(b, r, value=-1), lambda a, b, r: a.double() / b,
        lambda a, b, r: torch.zeros_like(a).add_(b, alpha=3), lambda a, b, r: torch.maximum(a, b), lambda a, b, r: a.clone().copy_(b),
    ]  # fmt: skip
    for number, case in enumerate(cases):
        found = case(Many(x, dims), Many(y, dims), row)
        for mine, one, other, part in zip(found.tensors, x, y, rows, strict=True):
            torch.testing.assert_close(mine, case(one, other, part), rtol=0, atol=0, msg=str(number))
    sums: Tensor = torch.linalg.vector_norm(Many(x, dims), dim=(1,), keepdim=True)
    torch.testing.assert_close(sums, torch.cat([x[0].norm(dim=1), x[1].flatten(1).norm(dim=1)]))
