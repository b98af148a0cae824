"""The ways to take a step agree: fused (Triton; its interpreter on a CPU), plain, capturable, compiled and captured."""

import copy
import gc
import math
import subprocess
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalOptimizer, RotationalSGDM, fused, rotational_of
from rwsim.rotational.rotate import rounded_at_random
from tests.forked import python
from tests.rotational import seeded

pytest.importorskip("triton")
CUDA = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NADAMW: Any = rotational_of("nadamw")
STEPS = 100 if DEVICE == "cuda" else 6
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (RotationalAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (RotationalAdam, {"lr": 1e-2, "weight_decay": 3.0, "rotation": "adamw"}),
    "lion": (RotationalLion, {"lr": 1e-3, "weight_decay": 1.0}),
    "sgd": (RotationalSGDM, {"lr": 0.1, "weight_decay": 1e-2, "maximize": True}),
    "momentum": (RotationalSGDM, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "nesterov": (RotationalSGDM, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
}
# Odd sizes, several rows a program, a vector, 4-D, one column, one row, no rows, a scalar, a row in two programs of a plain parameter.
SHAPES = [(7, 35), (12, 64), (5,), (3, 4, 3, 3), (40, 1), (1, 37), (0, 4), (), (1100,)]


@pytest.fixture
def short(monkeypatch):
    """Rows of more than 32 are long, in parts of 32: what rows of thousands would be."""
    monkeypatch.setattr(fused, "_LONGEST", 32)
    monkeypatch.setattr(fused, "_PART", 32)


def weights(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    draws = seeded()
    found = [nn.Parameter((0.1 * torch.randn(shape, generator=draws)).to(DEVICE, dtype)) for shape in shapes]
    # Not contiguous: rows that are columns in memory, and channels that come last.
    found.append(nn.Parameter((0.1 * torch.randn(33, 9, generator=draws)).to(DEVICE, dtype).t()))
    last = (0.1 * torch.randn(4, 3, 3, 3, generator=draws)).to(DEVICE, dtype)
    return [*found, nn.Parameter(last.to(memory_format=torch.channels_last))]


def walk(optimizer: RotationalOptimizer, params: list[nn.Parameter], steps: int = STEPS, step: Any = None, first: int = 0) -> None:
    """Steps under gradients of a seed; a row without gradient in one of them, a parameter without in another."""
    for number in range(first, first + steps):
        draws = seeded(number + 1)
        for param in params:
            grad = 1e-2 * torch.randn(param.shape, generator=draws)
            # In the order of the weights, as autograd gives it; in place where there is one, for what was captured or compiled.
            new = torch.empty_like(param).copy_(grad)
            param.grad = new if param.grad is None or step is None else param.grad.copy_(new)
        if number == 3:
            params[1].grad[2] = 0  # type: ignore[index]  # every parameter has one
        if number == 4 and step is None:
            params[0].grad = None
        (step or optimizer.step)()


def apart(one: Tensor, other: Tensor) -> float:
    """Relative distance."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / one.norm()) if one.numel() else 0.0


def taken(optimizer: RotationalOptimizer) -> int:
    """How many parameters the kernels step."""
    return sum(len(plan.params) for plan in fused._plans.get(optimizer, {}).values())


def assert_alike(one: RotationalOptimizer, other: RotationalOptimizer, within: float) -> None:
    """Weights and state of optimizers of equal parameters."""
    every = ([param for group in optimizer.param_groups for param in group["params"]] for optimizer in (one, other))
    for mine, yours in zip(*every, strict=True):
        # Weights begin at 0.1; one that comes by 0 has no relative distance.
        assert apart(mine, yours) * float(mine.detach().norm()) <= within * max(float(mine.detach().norm()), 0.1), tuple(mine.shape)
        assert one.state[mine].keys() == other.state[yours].keys()
        for name, held in one.state[mine].items():
            assert apart(held, other.state[yours][name]) <= within, (tuple(mine.shape), name)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), *((kind, {name: False}) for kind in ("adamw", "lion") for name in ("per_neuron", "zero_mean"))],
)
def test_fused_steps_are_plain_ones(kind, options):
    cls, hyper = KINDS[kind]
    plain, made = weights(), weights()
    one = cls([{"params": plain[:5]}, {"params": plain[5:]}], **hyper, **options, fused=False)
    other = cls([{"params": made[:5]}, {"params": made[5:]}], **hyper, **options)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            # As on a GPU: what the kernels carry goes to them, the rest is stepped plainly.
            patch.setattr("rwsim.rotational.paths._prefers", lambda group, params: group["fused"] is not False)
        walk(one, plain)
        walk(other, made)
        # All but the empty one and the one whose rows are columns in memory; channels that come last are taken.
        assert taken(other) == len(SHAPES) and taken(one) == 0
    assert_alike(one, other, 1e-5)


@pytest.mark.parametrize(
    "kind", ["adamw", "adam", pytest.param("lion", marks=pytest.mark.slow), pytest.param("nesterov", marks=pytest.mark.slow)]
)
def test_long_vectors_are_stepped_in_two_passes(kind, short):
    cls, hyper = KINDS[kind]
    shapes = [(3, 70), (5, 32), (4,)]
    for options in ({}, {"per_neuron": False}):
        plain, made = weights(shapes=shapes)[:3], weights(shapes=shapes)[:3]
        one, other = cls(plain, **hyper, **options, fused=False), cls(made, **hyper, **options, fused=True)
        walk(one, plain)
        walk(other, made)
        assert "parts" in [bucket.what for bucket in fused._plans[other][0].buckets]
        assert_alike(one, other, 1e-5)


@pytest.mark.parametrize("kind", ["adamw", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lion", "momentum"))])
@pytest.mark.parametrize(("dtype", "stochastic"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_two_bytes_are_within_a_unit_in_the_last_place(kind, dtype, stochastic):
    cls, hyper = KINDS[kind]
    shapes = [(40, 64), (30, 33), (100,)]
    both = []
    for chosen in (False, True):
        params = weights(dtype, shapes)[:3]
        optimizer = cls(params, **hyper, fused=chosen, stochastic_rounding=stochastic)
        # Where a last digit of float32 decides a rounding, trajectories part for good: a few steps only.
        walk(optimizer, params, steps=6 if stochastic else STEPS)
        assert ("residual" in optimizer.state[params[0]]) is not stochastic
        both.append(torch.cat([param.detach().flatten() for param in params]))
    # Of one sign neighbours are neighbours as whole numbers; a sign that differs is far away.
    units = (both[0].view(torch.int16).int() - both[1].view(torch.int16).int()).abs()
    # fp16 is finer than float32's rounding of a row, where an entry of it comes by 0: further than bf16 ever is from its neighbours.
    near = units <= 1 if dtype == torch.bfloat16 else (units <= 1) | ((both[0].float() - both[1].float()).abs() < 2e-7)
    assert float(near.float().mean()) >= 0.999 and float((units == 0).float().mean()) >= 0.9


def test_stochastic_rounding_is_right_on_average():
    """Every value between two neighbours, by the chance of its place between them; what bf16 holds stays."""
    low, high = 1.0, 1.0 + 2.0**-7
    for share in (0.0, 0.1, 0.5, 0.9):
        x = torch.full((50_000,), low + share * (high - low))
        found = rounded_at_random(x, 7, 3.0).float()
        assert set(found.tolist()) <= {low, high}
        error = math.sqrt(share * (1 - share) / len(x))
        assert abs(float((found == high).double().mean()) - share) <= 4.5 * error
    kept = torch.tensor([0.0, -1.0, math.inf, -math.inf, math.nan, 3e38])
    torch.testing.assert_close(rounded_at_random(kept, 0, 1.0).float(), kept.bfloat16().float(), equal_nan=True, rtol=0.01, atol=0)
    # Other places and steps, other chances; the same ones, the same.
    x = torch.full((1000,), low + 0.5 * (high - low))
    draws = [rounded_at_random(x, first, step) for first, step in ((0, 1.0), (0, 1.0), (0, 2.0), (1000, 1.0))]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])


def test_small_steps_add_up_under_stochastic_rounding():
    """Turns below half of a unit in the last place: to nearest, without a residual, nothing would move."""
    param = nn.Parameter(torch.ones(64, 64).bfloat16() + torch.randn(64, 64, generator=seeded()).bfloat16() * 0.1)
    optimizer = RotationalAdamW([param], rotation=1e-4, stochastic_rounding=True, zero_mean=False)
    before = param.detach().float()
    direction = torch.randn(64, 64, generator=seeded(1)).bfloat16()
    for _ in range(100):
        param.grad = direction.clone()
        optimizer.step()
    cosine = torch.nn.functional.cosine_similarity(before, param.detach().float())
    angle = cosine.clamp(max=1).acos().square().mean().sqrt()
    # 100 steps of 1e-4 in one direction, and the noise of rounding.
    assert 0.008 <= float(angle) <= 0.016


@pytest.mark.parametrize("kind", KINDS)
def test_capturable_steps_are_plain_ones(kind):
    cls, hyper = KINDS[kind]
    one, other = weights(), weights()
    plain, made = cls(one, **hyper, fused=False), cls(other, **hyper, fused=False, capturable=True)
    walk(plain, one, steps=30)
    walk(made, other, steps=30)
    assert made.state[other[0]]["step"].device == other[0].device
    assert_alike(plain, made, 1e-6)


_COMPILED = """
import torch
from torch._dynamo.utils import counters
from tests.test_rotational_fused import DEVICE, KINDS, assert_alike, walk, weights

for kind in ("adamw", "nesterov"):
    cls, hyper = KINDS[kind]
    torch._dynamo.reset()
    counters.clear()
    results = []
    for compiled in (False, True):
        params = weights(shapes=[(7, 35), (5,), (3, 4, 3, 3)])[:3]
        lr = torch.tensor(hyper["lr"], device=DEVICE)
        optimizer = cls(params, **{**hyper, "lr": lr}, fused=False)
        step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if compiled else optimizer.step
        for number in range(8):
            lr.fill_(hyper["lr"] * (1 + number) / 8)
            walk(optimizer, params, steps=1, step=step, first=number)
        results.append(optimizer)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    assert_alike(*results, 1e-5)
print("alike")
"""


def test_compiled_steps_are_plain_ones():
    """One graph from the first step on, also under a schedule of a tensor lr.

    `aot_eager` needs no compiler; a process of its own has functions that nothing wraps to check types, which torch.compile cannot read.
    """
    done = subprocess.run([*python(), "-c", _COMPILED], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.endswith("alike\n"), done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_an_overflow_leaves_everything(kind):
    """In the first step too, before there is any state; scaled gradients otherwise give the plain step, and are not written."""
    cls, hyper = KINDS[kind]
    plain, made = weights(shapes=SHAPES[:5])[:5], weights(shapes=SHAPES[:5])[:5]
    one, other = cls(plain, **hyper, fused=False), cls(made, **hyper, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1000)
    for number in range(6):
        draws = seeded(number)
        grads = [1e-2 * torch.randn(param.shape, generator=draws).to(DEVICE) for param in plain]
        scaler.scale(torch.zeros((), device=DEVICE))
        factor = scaler.get_scale()
        for mine, yours, grad in zip(plain, made, grads, strict=True):
            mine.grad, yours.grad = grad, grad * factor
        if number in (0, 3):
            made[1].grad[2, 2] = math.inf
            before = copy.deepcopy((made, other.state_dict()["state"]))
            scaler.step(other)
            torch.testing.assert_close((made, other.state_dict()["state"]), before, rtol=0, atol=0)
        else:
            scaler.step(other)
            one.step()
            assert torch.equal(made[0].grad, grads[0] * factor)
        scaler.update()
    assert scaler.get_scale() == 256 and float(other.state[made[0]]["step"]) == 4
    assert_alike(one, other, 1e-5)


def test_gradients_are_unscaled_beforehand_where_one_goes_another_way(monkeypatch):
    """One float64 parameter in the group: GradScaler unscales and looks for overflows itself, in every step."""
    monkeypatch.setattr("rwsim.rotational.paths._prefers", lambda group, params: group["fused"] is not False)
    both = [[*weights(shapes=[(7, 35)])[:1], *weights(torch.float64, shapes=[(5, 8)])[:1]] for _ in range(2)]
    one, other = (
        RotationalAdamW(params, lr=1e-2, weight_decay=0.1, fused=chosen) for params, chosen in zip(both, (False, None), strict=True)
    )
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=1000)
    for number in range(4):
        scaler.scale(torch.zeros((), device=DEVICE))
        walk(one, both[0], steps=1, step=lambda: None, first=number)
        walk(other, both[1], steps=1, step=lambda: None, first=number)
        for param in both[1]:
            param.grad.mul_(scaler.get_scale())
        assert not other._step_supports_amp_scaling
        one.step()
        scaler.step(other)
        scaler.update()
    assert taken(other) == 1
    assert_alike(one, other, 1e-5)


@pytest.mark.parametrize("length", [1, 3, 16, 17, 35, 48, 64, 65, 96, 768, 1000, 1025, 1600, 3072, 6000, 8192])
def test_blocks_hold_a_vector(length):
    block, tail = fused._two_blocks(length)
    assert all(size & (size - 1) == 0 for size in (block, tail)) and tail < block
    # At most a third is left over, but for what is below the smallest block.
    assert length <= block + tail <= max(32, 1.5 * length) and (tail == 0 or block < length)
    for kind in (fused._warps(block + tail), fused._warps(block)):
        assert 1 <= kind <= 16 and kind & (kind - 1) == 0
    assert {768: (512, 256), 1000: (1024, 0), 3072: (2048, 1024), 1600: (2048, 0)}.get(length, (block, tail)) == (block, tail)


def test_memory_that_is_not_aligned_is_read_singly():
    """Gradients in a bucket, one number on: the same step."""
    params = [weights(shapes=[(4, 32)])[:1] for _ in range(2)]
    one, other = (RotationalAdamW(mine, lr=1e-2, weight_decay=0.1, fused=True) for mine in params)
    grad = torch.randn(4, 32, generator=seeded()).to(DEVICE)
    params[0][0].grad, params[1][0].grad = grad, torch.cat([torch.zeros(1, device=DEVICE), grad.flatten()])[1:].view(4, 32)
    one.step()
    other.step()
    assert fused._plans[one][0].aligned and not fused._plans[other][0].aligned
    # On a GPU numbers lie otherwise on its lanes: sums in another order.
    assert_alike(one, other, 4e-7 if DEVICE == "cuda" else 0.0)


def test_loading_does_not_hold_on_to_the_old_state():
    params = weights(shapes=[(4, 32)])[:1]
    optimizer = RotationalAdamW(params, lr=1e-2, weight_decay=0.1, fused=True)
    walk(optimizer, [*params, *params], steps=1)
    old = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert old() is None


def test_what_changes_between_steps_is_seen():
    """Another state, other storage, other options, fewer gradients, another group: each as the plain path has it."""
    cls, hyper = KINDS["adamw"]
    shapes = [(7, 35), (12, 64), (5,)]
    both = [(params := weights(shapes=shapes)[:3], cls(params[:2], **hyper, fused=chosen)) for chosen in (False, True)]
    rebuilt = []
    for params, optimizer in both:
        walk(optimizer, params, steps=2)
        params[0].data = params[0].data.clone()
        walk(optimizer, params, steps=1, first=2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        walk(optimizer, params, steps=1, first=3)
        optimizer.state[params[1]]["exp_avg"] = 2 * optimizer.state[params[1]]["exp_avg"]
        walk(optimizer, params, steps=1, first=4)
        optimizer.param_groups[0]["per_neuron"] = False
        walk(optimizer, params, steps=1, first=5)
        optimizer.param_groups[0]["rotational"] = False
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        walk(optimizer, params, steps=1, first=6)
        optimizer.add_param_group({"params": [params[2]], "weight_decay": 0.0})
        optimizer.param_groups[0]["rotational"] = None
        walk(optimizer, params, steps=2, first=7)
        rebuilt.append(optimizer)
    assert_alike(rebuilt[0], rebuilt[1], 1e-5)


def test_speeds_are_carried():
    params = [weights(shapes=[(7, 35)])[:1] for _ in range(2)]
    make: Any = RotationalAdamW
    both = [make(one, lr=1e-2, weight_decay=0.1, fused=chosen) for one, chosen in zip(params, (False, True), strict=True)]
    for one, optimizer in zip(params, both, strict=True):
        walk(optimizer, [*one, *one], steps=1)
        optimizer.state[one[0]]["speed"] = torch.linspace(0, 2, 7, device=DEVICE).view(7, 1)
        before = one[0].detach().clone()
        walk(optimizer, [*one, *one], steps=2, first=1)
        # At its norm, which is a sum.
        assert apart(before[0], one[0][0]) < 4e-7 and apart(before[1], one[0][1]) > 1e-3
    assert_alike(*both, 1e-5)


def test_a_nan_reaches_its_row_alone():
    both = []
    for chosen in (False, True):
        params = weights(shapes=[(7, 35)])[:1]
        optimizer = RotationalLion(params, lr=1e-3, weight_decay=1.0, fused=chosen)
        walk(optimizer, [*params, *params], steps=1)
        params[0].grad[2, 3] = math.nan
        optimizer.step()
        both.append(params[0].detach().isnan())
    assert torch.equal(*both) and both[0][2].all() and not both[0][:2].any() and not both[0][3:].any()


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda p: NADAMW([p], lr=1e-3, weight_decay=0.1, fused=True), "direction"),
        (lambda p: RotationalAdamW([p], fixed_angle=True, fused=True), "fixed_angle"),
        (lambda p: RotationalAdamW([p], neuron_dims=(1,), fused=True), "contiguous"),
        (lambda p: RotationalAdamW([nn.Parameter(p.detach().double())], fused=True), "float64"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_carry_is_said(make, word):
    with pytest.raises(InvalidArgument, match=f"fused.*{word}"):
        make(nn.Parameter(torch.randn(5, 8, generator=seeded()).to(DEVICE)))


def test_a_machine_without_them_steps_plainly(monkeypatch):
    """Neither Triton nor its interpreter: fused=None is silent, fused=True says what is missing."""
    params = weights(shapes=[(7, 35)])[:1]
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    monkeypatch.setattr("rwsim.rotational.paths._prefers", lambda group, params: group["fused"] is not False)
    optimizer = RotationalAdamW(params, lr=1e-2, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(optimizer, [*params, *params], steps=1)
    assert taken(optimizer) == 0
    with pytest.raises(InvalidArgument, match="Triton"):
        RotationalAdamW(params, fused=True)


@CUDA
@pytest.mark.parametrize("path", [None, False], ids=["fused", "plain"])
@pytest.mark.parametrize("kind", ["adamw", "nesterov", "lion"])
def test_captured_steps_are_plain_ones(kind, path):
    """A CUDA graph of a step, replayed under other gradients and another lr."""
    cls, hyper = KINDS[kind]
    one, other = weights(), weights()
    plain = cls(one, **hyper, fused=False)
    lr = torch.tensor(hyper["lr"], device=DEVICE)
    made = cls(other, **{**hyper, "lr": lr}, fused=path, capturable=True)
    # Gradients that stay where they are.
    walk(plain, one, steps=1, step=plain.step)
    walk(made, other, steps=1, step=made.step)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made.step()
    for number in range(1, STEPS):
        now = hyper["lr"] * (1 + number % 7)
        plain.param_groups[0]["lr"] = now
        lr.fill_(now)
        walk(plain, one, steps=1, step=plain.step, first=number)
        walk(made, other, steps=1, step=graph.replay, first=number)
    assert_alike(plain, made, 1e-5)


@CUDA
def test_a_gpu_is_used_without_being_asked():
    params = weights()[: len(SHAPES)]
    optimizer = RotationalAdamW(params, lr=1e-2, weight_decay=0.1)
    walk(optimizer, params, steps=1)
    assert taken(optimizer) > 0 and optimizer._step_supports_amp_scaling
