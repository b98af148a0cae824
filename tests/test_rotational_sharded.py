"""Sharded parameters: two or four processes take the steps that one takes, whatever lies where; checkpoints move between shardings.

The cases run in processes of their own, all of one kind in one spawn; the tests here report them by name.
"""

import json
import math
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from copy import deepcopy
from datetime import timedelta
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rwsim
from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW
from rwsim.rotational.place import shards_of
from rwsim.rotational.rotate import centre_, turn_
from tests.forked import together
from tests.rotational import CLASSES, seeded

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

STEPS = 8
# Of parameters of order one: hundreds of roundings in float64 (two are measured); what is asked for in float32.
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-6}
# Of a whole spawn; a collective that waits for a process that has failed gives up before.
SPAWN, COLLECTIVE = 240, 30


class Net(nn.Module):
    """Matrices with biases, one of an odd number of rows and one of a single row, and a norm layer."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.gate = nn.Linear(6, 8), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(6, 1)
        generator = seeded(1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 2)
        self.to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x)))) * torch.tanh(self.gate(x))


def data(dtype: torch.dtype, device: str, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    x, y = (torch.randn(steps, 8, n, generator=seeded(2), dtype=torch.float64).to(device, dtype) for n in (6, 5))
    return list(zip(x, y, strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], split: bool = False) -> None:
    """Steps; `split`: each process sees its half of a batch."""
    for x, y in batches:
        if split:
            x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in (x, y))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def whole(value: Any) -> Tensor:
    """A copy of all of a tensor, on the CPU."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu().clone()


def apart(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((whole(one) - whole(another)).abs().max()) for one, another in pairs)


# How a model lies on the processes: layout -> (model, device) -> model, and whether processes see halves of a batch.


def ddp(model: Net, device: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(dim: int, model: Net, device: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = dist.init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.dim() > 1 else 0))


def tensor_parallel(model: Net, device: str) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def two_dimensional(model: Net, device: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(device.partition(":")[0], (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


Layout = tuple[Callable[[Net, str], nn.Module], bool]
LAYOUTS: dict[str, Layout] = {
    "ddp": (ddp, True), "fsdp rows": (partial(fsdp, 0), True), "fsdp columns": (partial(fsdp, 1), True),
    "tensor parallel": (tensor_parallel, False),
}  # fmt: skip
OPTIMIZERS = ["sgdm", "nesterov", "adamw", "adam", "lion"]
WRAPPED = ["wrapped adamw", "wrapped adam"]
# Case -> what runs it on every process, with the device.
CASES: dict[str, Callable[[str], None]] = {}
FOUR: dict[str, Callable[[str], None]] = {}


@lru_cache
def single(name: str, dtype: torch.dtype, device: str, **options: Any) -> Net:
    """A model that a single process has trained for `STEPS`."""
    model = Net(dtype, device)
    train(model, CLASSES[name](model.parameters(), **options), data(dtype, device))
    return model


def trajectory(layout: Layout, name: str, dtype: torch.dtype, device: str, **options: Any) -> float:
    """Difference of a sharded model to one that a single process trains, after `STEPS`."""
    place, split = layout
    model = place(Net(dtype, device), device)
    train(model, CLASSES[name](model.parameters(), **options), data(dtype, device), split)
    return apart(model, single(name, dtype, device, **options))


def follows(layout: Layout, name: str, dtype: torch.dtype, device: str, **options: Any) -> None:
    found = trajectory(layout, name, dtype, device, **options)
    assert found <= CLOSE[dtype], found


for where, name in product(LAYOUTS, OPTIMIZERS):
    CASES[f"{where}, {name}"] = partial(follows, LAYOUTS[where], name, torch.float64)
for where in ("fsdp rows", "fsdp columns", "tensor parallel"):
    CASES[f"{where}, float32"] = partial(follows, LAYOUTS[where], "adamw", torch.float32)
    CASES[f"{where}, whole tensors"] = partial(follows, LAYOUTS[where], "adamw", torch.float64, per_neuron=False)
for where, name in product(["fsdp rows", "fsdp columns", "tensor parallel"], ["adamw", "lion"]):
    CASES[f"{where}, foreach, {name}"] = partial(follows, LAYOUTS[where], name, torch.float64, foreach=True)
for where, name in product(["fsdp columns", "tensor parallel"], WRAPPED):
    # torch's foreach, its default on CUDA, does not take plain and sharded parameters together.
    CASES[f"{where}, {name}"] = partial(follows, LAYOUTS[where], name, torch.float64, foreach=False)
FOUR["fsdp rows and tensor parallel"] = partial(follows, (two_dimensional, False), "adamw", torch.float64)


def broken(device: str) -> None:
    """The negative control: local sums taken for sums make another trajectory."""
    from rwsim.rotational.sharded import Shards

    kept = Shards.add_up
    Shards.add_up = lambda self, sums: sums  # type: ignore[method-assign]
    try:
        found = trajectory(LAYOUTS["fsdp columns"], "adamw", torch.float64, device)
    finally:
        Shards.add_up = kept  # type: ignore[method-assign]
    assert found > 1e-3, found


CASES["rejects sums of one shard"] = broken


# Single tensors under given gradients: any placement, without a model that could compute with it.


def pair(shape: tuple[int, ...], dtype: torch.dtype, device: str, placements: Any, mesh_shape: tuple[int, ...] | None = None) -> Any:
    """A parameter, whole and sharded."""
    from torch.distributed.tensor import distribute_tensor

    values = torch.randn(shape, generator=seeded(3), dtype=torch.float64).to(device, dtype)
    mesh = dist.init_device_mesh(device.partition(":")[0], mesh_shape or (dist.get_world_size(),))
    return nn.Parameter(values.clone()), nn.Parameter(distribute_tensor(values, mesh, placements))


def feed(shape: tuple[int, ...], dtype: torch.dtype, steps: int = STEPS) -> list[Tensor]:
    """Gradients; in two of three steps none for the last row, in the others one of a single element for the first."""
    grads = torch.randn(steps, *shape, generator=seeded(4), dtype=torch.float64)
    for step in range(2, steps):
        if step % 3:
            grads[step, -1] = 0
        else:
            grads[step, 0].view(-1)[1:] = 0
    return list(grads.to(dtype))


def walk(alone: Any, sharded: Any, optimizers: Any, grads: Iterable[Tensor], grad_placements: Any = None) -> None:
    from torch.distributed.tensor import distribute_tensor

    for grad in grads:
        alone.grad = grad.to(alone.device)
        sharded.grad = distribute_tensor(alone.grad, sharded.device_mesh, grad_placements or sharded.placements)
        for optimizer in optimizers:
            optimizer.step()


def tensor(
    name: str, shape: tuple[int, ...], placements: Any, device: str, *, dtype: torch.dtype = torch.float64, tolerance: float | None = None,
    mesh_shape: tuple[int, ...] | None = None, grad_placements: Any = None, change: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Parameter, residual and one number a vector are those of a whole parameter."""
    alone, sharded = pair(shape, dtype, device, placements, mesh_shape)
    optimizers = [CLASSES[name]([param], **options) for param in (alone, sharded)]
    assert all(one.is_rotational(one.param_groups[0], one.param_groups[0]["params"][0]) for one in optimizers)
    for optimizer in optimizers:
        if change is not None:
            change(optimizer)
    walk(alone, sharded, optimizers, feed(shape, dtype), grad_placements)
    mine, theirs = optimizers[0].state[alone], optimizers[1].state[sharded]
    assert mine.keys() == theirs.keys()
    close = CLOSE[dtype] if tolerance is None else tolerance
    held = [(whole(alone), whole(sharded)), *((whole(mine[key]), whole(theirs[key])) for key in mine)]
    if "residual" in mine:
        # What parameter and residual are together.
        whole_values = [whole(param).float() + whole(state["residual"]).float() for param, state in ((alone, mine), (sharded, theirs))]
        held = [(whole_values[0], whole_values[1]), *((whole(mine[key]), whole(theirs[key])) for key in ("norm", "update_norm_sq", "hits"))]
    for one, other in held:
        assert one.shape == other.shape and one.dtype == other.dtype
        assert float((one - other).abs().max()) <= close * max(1.0, float(one.abs().max())), (one, other)
    assert math.isclose(float(whole(sharded).double().norm()), float(whole(alone).double().norm()), rel_tol=1e-3)


def speeds(optimizer: Any) -> None:
    from rwsim.rotational import set_speeds

    set_speeds(optimizer, 0.5, 3.0, "both", seeded(5))


def tensors(shard: Any, replicate: Any, partial_sum: Any) -> None:
    """Fill CASES. Placements are arguments, so that a build without torch.distributed can still read this file."""
    single: list[tuple[str, tuple[int, ...], Any, dict[str, Any]]] = [
        ("five rows", (5, 4), shard(0), {}),
        ("one row for two", (1, 6), shard(0), {}),
        ("five columns", (4, 5), shard(1), {}),
        ("one column for two", (3, 1, 3, 3), shard(1), {}),
        ("kernels", (4, 3, 3, 2), shard(2), {}),
        ("whole tensor by rows", (5, 4), shard(0), {"per_neuron": False}),
        ("whole tensor of one row", (1, 6), shard(0), {"per_neuron": False}),
        ("whole tensor by columns", (5, 4), shard(1), {"per_neuron": False}),
        ("neurons in columns", (5, 4), shard(0), {"neuron_dims": (1,)}),
        ("neurons in columns, by columns", (5, 3), shard(-1), {"neuron_dims": (-1,)}),
        ("experts", (3, 4, 5), shard(0), {"neuron_dims": (0, 1)}),
        ("blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False}),
        ("blocks of neurons in columns", (9, 5), shard(1), {"blocks": 3, "neuron_dims": (1,)}),
        ("replicated", (5, 4), replicate(), {}),
        ("uncentred", (4, 5), shard(1), {"zero_mean": False}),
        ("fixed angle", (4, 5), shard(1), {"fixed_angle": True}),
        ("speeds by columns", (4, 5), shard(1), {"change": speeds}),
        ("speeds by rows", (5, 4), shard(0), {"change": speeds}),
        ("gradient whole", (4, 5), shard(1), {"grad_placements": [replicate()]}),
        ("gradient partial", (5, 4), shard(0), {"grad_placements": [partial_sum()]}),
        ("gradient by rows", (4, 5), shard(1), {"grad_placements": [shard(0)]}),
        ("float32", (4, 5), shard(1), {"dtype": torch.float32}),
        ("foreach by columns", (4, 5), shard(1), {"foreach": True}),
        ("foreach, one column for two", (3, 1, 3, 3), shard(1), {"foreach": True}),
        ("foreach, one row for two", (1, 6), shard(0), {"foreach": True}),
        ("foreach, blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False, "foreach": True}),
        ("foreach, speeds", (4, 5), shard(1), {"change": speeds, "foreach": True}),
        ("foreach, bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4, "foreach": True}),
        ("fused by rows", (5, 8), shard(0), {"dtype": torch.float32, "fused": True, "tolerance": 0.0}),
        ("fused, one row for two", (1, 8), shard(0), {"dtype": torch.float32, "fused": True, "tolerance": 0.0}),
        # Residuals are of bf16 as well: to 2^-16 of the weights.
        ("bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4}),
        ("bf16 by rows", (5, 4), shard(0), {"dtype": torch.bfloat16, "tolerance": 0.0, "fused": False}),
    ]
    for what, shape, placement, options in single:
        CASES[f"{what}, adamw"] = partial(tensor, "adamw", shape, [placement], **options)
    every: list[tuple[str, tuple[int, ...], Any, dict[str, Any]]] = [
        ("columns", (4, 5), shard(1), {}),
        ("whole tensor by rows", (5, 4), shard(0), {"per_neuron": False}),
        ("blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False}),
        ("bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4}),
    ]
    for name, (what, shape, placement, options) in product(["adam", "rule", *WRAPPED], every):
        # Decay in the gradient is rounded to bf16 inside a wrapped Adam.
        if (name, what) != ("wrapped adam", "bf16"):
            more: dict[str, Any] = {"rotation": 0.01} if name == "rule" else {}  # a rate of its own takes seconds to derive
            CASES[f"{what}, {name}"] = partial(tensor, name, shape, [placement], **options, **more)
    CASES["equilibrium norm, lion"] = partial(tensor, "lion", (4, 5), [shard(1)], norm="equilibrium")
    CASES["sgdm without momentum, sgdm"] = partial(tensor, "sgdm", (4, 5), [shard(1)], momentum=0.0)
    for what, placement in [("rows and columns", [shard(0), shard(1)]), ("columns twice", [shard(1), shard(1)]),
                            ("replicated columns", [replicate(), shard(1)])]:  # fmt: skip
        for own in (True, False):
            FOUR[f"{what}, {'neurons' if own else 'whole tensor'}"] = partial(
                tensor, "adamw", (3, 7), placement, mesh_shape=(2, 2), per_neuron=own
            )
    FOUR["case 27: four shards of one row have the norm of the whole row"] = case_27


def case_27(device: str) -> None:
    """Audit case 27: norms of sharded parameters are local; 4 shards of one row: full-row norm."""
    from torch.distributed.tensor import Shard

    alone, sharded = pair((1, 10), torch.float64, device, [Shard(1)])
    norm = float(alone.detach().norm())
    optimizers = [RotationalAdamW([param], lr=1e-2, weight_decay=0.1) for param in (alone, sharded)]
    walk(alone, sharded, optimizers, feed((1, 10), torch.float64))
    state = optimizers[1].state[sharded]
    assert state["norm"].to_local().shape == (1, 1)
    assert math.isclose(float(state["norm"].to_local()), norm, rel_tol=1e-14), "a shard's own norm"
    assert math.isclose(float(whole(sharded).norm()), norm, rel_tol=1e-14)
    assert float((whole(sharded) - whole(alone)).abs().max()) < CLOSE[torch.float64]


def nan(device: str) -> None:
    """A NaN in one process's shard reaches the whole row, and no other."""
    from torch.distributed.tensor import Shard

    alone, sharded = pair((3, 4), torch.float64, device, [Shard(1)])
    grad = torch.ones(3, 4, dtype=torch.float64)
    grad[1, 0] = math.nan
    walk(alone, sharded, [CLASSES["lion"]([param]) for param in (alone, sharded)], [grad])
    assert whole(sharded).isnan().any(1).tolist() == [False, True, False]
    assert torch.equal(whole(sharded).isnan(), whole(alone).isnan())


def refused(device: str) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    _, sharded = pair((6, 4), torch.float64, device, [Shard(0)])
    refusals: list[dict[str, Any]] = [{"blocks": 3}, {"blocks": 3, "per_neuron": False}]
    for given in refusals:
        with pytest.raises(InvalidArgument, match=r"`blocks` must be 1 .* dimension 0 is sharded, got 3; shard another dimension"):
            RotationalAdamW([sharded], weight_decay=0.1, **given)
    summed = nn.Parameter(DTensor.from_local(sharded.to_local().detach(), sharded.device_mesh, [Partial()]))
    with pytest.raises(InvalidArgument, match="`params` must not hold partial sums"):
        RotationalAdamW([summed], weight_decay=0.1)


def small_blocks(device: str) -> None:
    """A CPU works in blocks of rows: where processes add up, all take as many, whatever their own share of a row."""
    from torch.distributed.tensor import Shard

    import rwsim.rotational.optimizer as module

    kept, module._BLOCK = module._BLOCK, 4
    try:
        for dim in (0, 1):
            tensor("adamw", (5, 3), [Shard(dim)], device)
    finally:
        module._BLOCK = kept


def communicates(device: str) -> None:
    """What docs/rotational.md says of bytes: none where rows are whole; 40 and 8 a vector in two rounds, of a tensor or of a lot."""
    import rwsim.rotational.sharded as module

    kept, sent = module.dist.all_reduce, []

    def counted(sums: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(sums.numel() * sums.element_size())
        return kept(sums, *args, **kwargs)

    module.dist.all_reduce = counted  # type: ignore[assignment]
    try:
        for where, foreach, expected in (
            ("fsdp rows", False, []),
            ("fsdp columns", False, [40 * 8, 8 * 8, 40 * 5, 8 * 5, 40, 8]),
            ("fsdp columns", True, [40 * 14, 8 * 14]),
            ("tensor parallel", False, [40 * 5, 8 * 5]),
        ):
            place, split = LAYOUTS[where]
            model = place(Net(torch.float32, device), device)
            optimizer = CLASSES["adamw"](model.parameters(), foreach=foreach)
            optimizer.centre()
            batches = data(torch.float32, device, 2)
            train(model, optimizer, batches[:1], split)
            (model(batches[1][0]) - batches[1][1]).square().mean().backward()
            sent.clear()
            optimizer.step()
            assert sent == expected, (where, sent)
    finally:
        module.dist.all_reduce = kept


CASES |= {"nan": nan, "refused": refused, "communicates": communicates, "small blocks": small_blocks}


# Checkpoints: half of the steps under one layout, the rest under another.


def begin(layout: Layout | None, dtype: torch.dtype, device: str, name: str = "adamw", **options: Any) -> Any:
    """Model, optimizer, whether a batch is split; None: one process's own."""
    model: Any = Net(dtype, device)
    if layout is not None:
        model = layout[0](model, device)
    return model, CLASSES[name](model.parameters(), **options), bool(layout and layout[1])


def ended(model: nn.Module, optimizer: Any, split: bool, dtype: torch.dtype, device: str, name: str, **options: Any) -> None:
    """The other half of the steps ends where all of one process do."""
    train(model, optimizer, data(dtype, device)[STEPS // 2 :], split)
    assert apart(model, single(name, dtype, device, **options)) <= CLOSE[dtype]


def own_state(layout: Layout, device: str, name: str, **options: Any) -> None:
    """state_dict and load_state_dict, under the same layout."""
    dtype = torch.float64
    model, optimizer, split = begin(layout, dtype, device, name, **options)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    saved = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    model, optimizer, split = begin(layout, dtype, device, name, **options)
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    ended(model, optimizer, split, dtype, device, name, **options)


def whole_state(source: Layout, target: Layout | None, device: str, name: str) -> None:
    """Full state dicts: every process holds all of it, also for the optimizer's own load_state_dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    dtype = torch.float64
    model, optimizer, split = begin(source, dtype, device, name)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    full = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=full)
    entries: Any = state["state"]
    assert not any(hasattr(value, "full_tensor") for entry in entries.values() for value in entry.values())
    plain, other, _ = begin(None, dtype, device, name)
    train(plain, other, data(dtype, device)[: STEPS // 2])
    expected = other.state_dict()
    for own in (False, True):
        model, optimizer, split = begin(target, dtype, device, name)
        if own:
            # One process's own state dict, loaded into shards.
            set_state_dict(model, [], model_state_dict=weights, optim_state_dict={}, options=full)
            optimizer.load_state_dict(deepcopy(expected))
        else:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=deepcopy(state), options=full)
        ended(model, optimizer, split, dtype, device, name)


def saved_state(source: Layout | None, target: Layout | None, device: str, name: str) -> None:
    """torch.distributed.checkpoint, through files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dtype = torch.float64
    model, optimizer, split = begin(source, dtype, device, name)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    folder = [tempfile.mkdtemp() if not dist.get_rank() else None]
    dist.broadcast_object_list(folder)
    weights, state = get_state_dict(model, optimizer)
    alone = source is None
    if not alone or not dist.get_rank():
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0], no_dist=alone)
    dist.barrier()
    model, optimizer, split = begin(target, dtype, device, name)
    weights, state = get_state_dict(model, optimizer)
    both: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder[0], no_dist=target is None)
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(str(folder[0]))
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    ended(model, optimizer, split, dtype, device, name)


ROWS, COLUMNS, TENSOR = (LAYOUTS[name] for name in ("fsdp rows", "fsdp columns", "tensor parallel"))
for said, found in (("rows", ROWS), ("columns", COLUMNS), ("tensor parallel", TENSOR)):
    CASES[f"own state, {said}"] = partial(own_state, found, name="adamw")
CASES["own state, whole tensors by rows"] = partial(own_state, ROWS, name="sgdm", per_neuron=False)
CASES["own state, wrapped"] = partial(own_state, COLUMNS, name="wrapped adamw")
for said, source, target in (
    ("rows to columns", ROWS, COLUMNS), ("columns to one process", COLUMNS, None), ("columns to tensor parallel", COLUMNS, TENSOR),
):  # fmt: skip
    CASES[f"full state, {said}"] = partial(whole_state, source, target, name="adamw")
for said, first, second, name in (
    ("rows to columns", ROWS, COLUMNS, "adamw"), ("columns to rows", COLUMNS, ROWS, "sgdm"), ("rows to one process", ROWS, None, "adam"),
    ("one process to rows", None, ROWS, "lion"), ("one process to columns", None, COLUMNS, "adamw"),
    ("tensor parallel to rows", TENSOR, ROWS, "lion"),
):  # fmt: skip
    CASES[f"checkpoint, {said}, {name}"] = partial(saved_state, first, second, name=name)

if dist.is_available():
    from torch.distributed.tensor import Partial, Replicate, Shard

    tensors(Shard, Replicate, Partial)


# Processes.


def worker(rank: int, world: int, port: int, backend: str, folder: str) -> None:
    """All cases of a world in turn; what each came to goes to a file of this process."""
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    outcomes: dict[str, str] = {}
    more: dict[str, Any] = {"device_id": torch.device(device)} if backend == "nccl" else {}
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE), **more)
    for name, case in (CASES if world == 2 else FOUR).items():
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            case(device)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
        outcomes[name + " (seconds)"] = f"{time.perf_counter() - began:.2f}"
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
        # A process that failed alone has left the others waiting: with them out of step nothing more can be said.
        failed: list[Any] = [None] * world
        dist.all_gather_object(failed, bool(outcomes[name]))
        if len(set(failed)) > 1:
            break
    dist.destroy_process_group()


def outcomes(world: int, backend: str, folder: Path) -> dict[str, list[str]]:
    """Case -> what each process said of it: empty if it holds."""
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"torch without {backend}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = together([f"from {__name__} import worker; worker{(rank, world, port, backend, str(folder))}" for rank in range(world)], SPAWN)
    found: list[dict[str, str]] = []
    for rank in range(world):
        path = folder / f"{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    names = CASES if world == 2 else FOUR
    return {name: [one.get(name, f"not run: {words}") for one, words in zip(found, said, strict=True)] for name in names}


def once(world: int, backend: str, folders: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Outcomes of one spawn for all of pytest-xdist's workers, among which the cases may be spread."""
    base = folders.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"sharded-{backend}-{world}"
    folder.mkdir(exist_ok=True)
    kept = folder / "outcomes.json"
    with open(folder / "lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(outcomes(world, backend, folder)))
        return json.loads(kept.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return once(2, "gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return once(4, "gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    return once(2, "nccl", tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, two):
    assert not any(two[case]), "\n".join(two[case])


@pytest.mark.parametrize("case", FOUR)
def test_four_processes(case, four):
    assert not any(four[case]), "\n".join(four[case])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("case", CASES)
def test_two_gpus(case, two_gpus):
    assert not any(two_gpus[case]), "\n".join(two_gpus[case])


# Without processes.


class Four:
    """Adds up what four threads bring, in turn."""

    def __init__(self) -> None:
        self.barrier, self.parts = threading.Barrier(4, timeout=30), [torch.empty(0)] * 4

    def total(self, i: int, sums: Tensor) -> Tensor:
        self.parts[i] = sums
        self.barrier.wait()
        added = torch.stack(self.parts).sum(0)
        self.barrier.wait()
        return added


@pytest.mark.parametrize("zero_mean", [True, False])
def test_case_27_four_shards_of_one_row(zero_mean):
    """Of Algorithm 1 alone: four shards of uneven length turn as the row does, and their norm is the row's."""
    generator = seeded(6)
    row, update, grad = (torch.randn(1, 11, generator=generator, dtype=torch.float64) for _ in range(3))
    given = {"zero_mean": zero_mean, "decay": 0.9, "eps": 1e-8, "fixed_angle": False}

    def state(norm: Tensor) -> dict[str, Tensor]:
        return {"norm": norm, "update_norm_sq": torch.zeros_like(norm), "hits": torch.zeros_like(norm)}

    shards, four = [part.clone() for part in row.tensor_split(4, 1)], Four()
    norm = row.norm(dim=1, keepdim=True)
    centre_(row, (1,))
    turn_(row, update.clone(), (1,), state(norm), 0.1, grad=grad, **given)
    norms = [torch.empty(0)] * 4

    def run(i: int, part: Tensor) -> None:
        total = partial(four.total, i)
        norms[i] = centre_(part, (1,), total, 11)
        pieces = (x.tensor_split(4, 1)[i].clone() for x in (update, grad))
        turn_(part, next(pieces), (1,), state(norms[i]), 0.1, grad=next(pieces), total=total, count=11, **given)

    threads = [threading.Thread(target=run, args=(i, part)) for i, part in enumerate(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(torch.cat(shards, 1), row, rtol=0, atol=1e-14)
    assert all(math.isclose(float(one), float(norm), rel_tol=1e-14) for one in norms)


def test_an_exported_file_has_no_distributed_code_and_refuses_shards():
    from rwsim.export.source import body, subject  # not in every process

    text = body(subject("adamw", "paper", None))
    assert "distributed" not in text
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported", "exec"), scope)
    param = nn.Parameter(torch.ones(4, 4))
    param.device_mesh = None  # what a DTensor is known by
    with pytest.raises(ValueError, match="`params` must be whole on every process"):
        scope["RotationalAdamW"]([param], weight_decay=0.1)


def test_whole_parameters_need_no_distributed_code():
    """One module imports it, and only functions that have found a DTensor import that module."""
    root = Path(rwsim.__file__).parent
    found = [path.name for path in root.rglob("*.py") if re.search(r"^(import|from) torch\.distributed", path.read_text(), re.M)]
    assert found == ["sharded.py"]
    users = [path.name for path in root.rglob("*.py") if re.search(r"^(import|from) rwsim\.rotational\.sharded", path.read_text(), re.M)]
    assert not users
    assert shards_of(nn.Parameter(torch.ones(2, 2)), torch.Size([2, 2]), (1,)) is None
