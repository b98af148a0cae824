"""What a process has of a parameter: the tensors that a step works on."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwsim.rotational.place import shards_of
from rwsim.rotational.rotate import layout


def layout_of(group: Mapping[str, Any], param: Tensor, rotates: bool = True) -> tuple[torch.Size, tuple[int, ...]]:
    """`rotate.layout` of a group's parameter; one that does not rotate has no vectors."""
    return layout(param.shape, group["per_neuron"], group["neuron_dims"], group["blocks"]) if rotates else (param.shape, ())


class Piece(NamedTuple):
    """What this process has of a parameter.

    Attributes:
        tensors: Its elements and whatever is of its shape, viewed so that `dims` run along vectors.
        numbers: One number a vector each.
        dims: Dimensions along vectors.
        fan_in: Elements of a whole vector.
        total: As in `rotate.project_`.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Tensor]
    dims: tuple[int, ...]
    fan_in: int
    total: Callable[[Tensor], Tensor] | None


def piece_of(
    param: Tensor, group: Mapping[str, Any], tensors: Mapping[str, Tensor], numbers: Mapping[str, Tensor], rotates: bool = True
) -> Piece:
    """A parameter's piece.

    Args:
        param: The parameter.
        group: Its group.
        tensors: Name -> itself, its gradient, or what else is of its shape and lies as it does.
        numbers: Name -> state of one number a vector.
        rotates: Whether it rotates.
    """
    shape, dims = layout_of(group, param, rotates)
    shards, total = shards_of(param, shape, dims), None
    mine, own = dict(tensors), dict(numbers)
    if shards is not None:
        mine = {name: shards.local(tensor) for name, tensor in mine.items()}
        own, total = {name: shards.local_state(value) for name, value in own.items()}, shards.total
    if shape != param.shape:
        mine = {name: tensor.unflatten(0, shape[:2]) for name, tensor in mine.items()}
    return Piece(mine, own, dims, math.prod([shape[d] for d in dims]), total)
