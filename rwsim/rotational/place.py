"""Where optimizers ask how a parameter lies on several processes. An exported file takes whole parameters only.

Nothing of torch.distributed is imported before a parameter is a DTensor.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rwsim.rotational.sharded import Shards


def is_dtensor(tensor: Tensor) -> bool:
    kind = type(tensor)
    # One exists only where its module has been imported.
    module = None if kind is Tensor or kind is torch.nn.Parameter else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(param: Tensor, shape: torch.Size, dims: tuple[int, ...]) -> "Shards | None":
    """How a parameter that is viewed in a shape, with dimensions along its vectors, lies on a mesh of processes; None: each has all of it.

    Raises:
        InvalidArgument: It lies in a way in which it cannot rotate.
    """
    if not is_dtensor(param):
        return None
    from rwsim.rotational.sharded import Shards

    return Shards(param, shape, dims)


def fitted(value: Tensor, param: Any, shape: torch.Size, dims: tuple[int, ...]) -> Tensor:
    """A state tensor that was whole, or sharded in another way, as that of a parameter."""
    if not is_dtensor(param) and not is_dtensor(value):
        return value
    from rwsim.rotational.sharded import fit

    return fit(value, param, shape, dims)
