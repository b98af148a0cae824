"""Sharded parameters: a network, how it lies on processes, and the cases of trajectories; `CASES` and `FOUR` are what processes run."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.rotational import CLASSES, seeded

STEPS = 20
# Of parameters of order one: hundreds of roundings in float64 (two are measured); what is asked for in float32.
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-6}


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
