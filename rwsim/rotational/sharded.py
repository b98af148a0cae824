"""Parameters that are sharded over a mesh of processes (DTensor): what each holds of them, and sums over whole vectors.

A step works on local tensors. Elements need nothing of other processes; sums along vectors are added up over those mesh dimensions that
shard the vectors, so that decisions are the same on all of them. Sharded rows of a Linear are whole vectors: nothing is communicated.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from rwsim.errors import InvalidArgument


class Shards:
    """How a parameter's vectors lie on its mesh.

    Args:
        param: The parameter.
        shape, dims: Its view and the dimensions along its vectors, of the whole of it, as `layout` gives them.

    Raises:
        InvalidArgument: A parameter of partial sums; blocks of a dimension that is sharded.
    """

    def __init__(self, param: Any, shape: torch.Size, dims: tuple[int, ...]) -> None:
        self.mesh, self.placements = param.device_mesh, tuple(param.placements)
        more = len(shape) - param.dim()
        self.kept_shape = torch.Size([1 if d in dims else size for d, size in enumerate(shape)])
        kept: list[Placement] = []
        self.along: list[int] = []  # mesh dimensions that shard vectors
        self.sharding: list[int] = []  # mesh dimensions that shard anything
        for i, placement in enumerate(self.placements):
            # Of Shard, and of what FSDP2 makes of it above tensor parallelism.
            sharded = getattr(placement, "dim", None)
            if sharded is None:
                if not placement.is_replicate():
                    raise InvalidArgument("params", "must not hold partial sums", placement, "redistribute it to Shard or Replicate")
                kept.append(placement)
                continue
            sharded %= param.dim()
            if self.mesh.size(i) > 1:
                self.sharding.append(i)
            if more and not sharded:
                remedy = "shard another dimension (shard_placement_fn of fully_shard), or make one parameter of each block"
                raise InvalidArgument("blocks", "must be 1 for a parameter whose dimension 0 is sharded", shape[0], remedy)
            if sharded + more in dims:
                kept.append(Replicate())
                if self.mesh.size(i) > 1:
                    self.along.append(i)
            else:
                kept.append(_moved(placement, sharded + more))
        self.kept = tuple(kept)

    @property
    def total(self) -> Callable[[Tensor], Tensor] | None:
        """Adds up the sums that processes have of their shards of vectors; None where vectors are whole."""
        return self.add_up if self.along else None

    def add_up(self, sums: Tensor) -> Tensor:
        # Processes that share vectors hold the same ones: if one has none, all have none.
        if not sums.numel():
            return sums
        # Offloaded parameters lie where the mesh's backend may not reach.
        sent = sums if sums.device.type == self.mesh.device_type else sums.to(self.mesh.device_type)
        for i in self.along:
            dist.all_reduce(sent, group=self.mesh.get_group(i))
        return sent.to(sums.device)

    def local(self, tensor: Any) -> Tensor:
        """What this process has of the parameter, its gradient, or a state tensor of its shape."""
        return _local(tensor, self.placements)

    def local_state(self, tensor: Any) -> Tensor:
        """What it has of a state tensor of one number a vector."""
        return _local(tensor, self.kept)

    def indices(self) -> np.ndarray:
        """Which of all vectors this process has shards of, in its own order."""
        every = torch.arange(self.kept_shape.numel()).view(self.kept_shape).to(self.mesh.device_type)
        own = distribute_tensor(every, self.mesh, self.kept, src_data_rank=None)
        return self.local_state(own).cpu().numpy().ravel()

    def join(self, own: Tensor) -> Tensor:
        """Adds up what processes have of the sums of all vectors, zeros elsewhere."""
        sent = own if own.device.type == self.mesh.device_type else own.to(self.mesh.device_type)
        for i in self.sharding:
            dist.all_reduce(sent, group=self.mesh.get_group(i))
        return sent.to(own.device)

    def per_vector(self, own: Tensor) -> Tensor:
        """One number for each of this process's vectors, as a state tensor of all."""
        stride = tuple(math.prod(self.kept_shape[d + 1 :]) for d in range(len(self.kept_shape)))
        return DTensor.from_local(own, self.mesh, self.kept, run_check=False, shape=self.kept_shape, stride=stride)


def _moved(placement: Any, dim: int) -> Placement:
    """A placement of the same kind in another dimension."""
    if placement.dim == dim:
        return placement
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def _local(tensor: Any, placements: tuple[Placement, ...]) -> Tensor:
    if tuple(tensor.placements) != placements:
        tensor = tensor.redistribute(placements=placements)
    own = tensor.to_local()
    # What a collective has not finished yet; in place it would be lost.
    return own.wait() if hasattr(own, "trigger_wait") else own


def fit(value: Tensor, param: Any, shape: torch.Size, dims: tuple[int, ...]) -> Tensor:
    """A state tensor, whole or sharded in any way, as `Shards` of the parameter has it; whole for a whole parameter."""
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    shards = Shards(param, shape, dims)
    placements = shards.placements
    if dims:
        # Of vectors that the parameter no longer has: the next step drops it.
        placements = shards.kept if value.shape == shards.kept_shape else (Replicate(),) * len(shards.kept)
    if isinstance(value, DTensor):
        if value.device_mesh == shards.mesh:
            return value.redistribute(placements=placements)
        value = value.full_tensor()
    return distribute_tensor(value, shards.mesh, placements)
