"""The foreach path: the plain step of many parameters at once, for GPUs where the kernels do not carry them.

A plain step on a GPU costs its launches. `Many` stands for a list of tensors wherever a step's code has one, so that no formula is written
twice: elementwise operations become `torch._foreach_*`, and the numbers of all vectors lie one after the other in one tensor. So do their
sums over processes, which then travel together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rwsim.rotational.optimizer import PER_VECTOR
from rwsim.rotational.piece import Piece, layout_of, piece_of
from rwsim.rotational.place import shards_of

_SUMS = {"sum", "mean", "linalg_vector_norm"}
# Keywords of torch._foreach functions.
_KEYWORDS = {"alpha", "value"}


class Many(Tensor):
    """Tensors as one: what is done to it is done to each.

    Sums along vectors give one tensor of all vectors' numbers; as an argument, such a tensor is spread over the vectors again.

    Args:
        tensors: All of one dtype and device.
        dims: Of each the dimensions along its vectors, which sums run over, whatever dimensions they are asked for.

    Example:
        >>> many = Many([torch.ones(2, 3), torch.ones(1, 2)], [(1,), (1,)])
        >>> sums = (many * 2).sum(1)
        >>> sums
        tensor([6., 6., 4.])
        >>> many.mul_(sums).tensors[1]
        tensor([[4., 4.]])
    """

    tensors: list[Tensor]
    dims: Sequence[tuple[int, ...]]

    @staticmethod
    def __new__(cls, tensors: Sequence[Tensor], dims: Sequence[tuple[int, ...]]) -> "Many":
        made = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device).as_subclass(cls)
        made.tensors, made.dims = list(tensors), dims
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What torch's functions, methods and operators do with it."""
        kwargs = kwargs or {}
        if function.__name__ == "__get__":  # dtype, device
            return super().__torch_function__(function, types, args, kwargs)
        mine = next(one for one in (*args, *kwargs.values()) if isinstance(one, Many))
        return mine._each(function.__name__, function, args, kwargs)

    def _each(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in _SUMS:
            return torch.cat([function(one, dim=along).flatten() for one, along in zip(self.tensors, self.dims, strict=True)])
        given, named = [self._listed(one) for one in args], {key: self._listed(one) for key, one in kwargs.items()}
        launch = getattr(torch, f"_foreach_{name}", None)
        if launch is not None and isinstance(given[0], list) and named.keys() <= _KEYWORDS:
            found = launch(*given, **named)
        else:
            found = [
                function(*(_of(one, i) for one in given), **{key: _of(one, i) for key, one in named.items()})
                for i in range(len(self.tensors))
            ]  # fmt: skip
        return args[0] if name.endswith("_") and not name.startswith("_") else Many(found, self.dims)

    def _listed(self, value: Any) -> Any:
        """An argument for each tensor, where it has one."""
        if isinstance(value, Many):
            return value.tensors
        if not isinstance(value, Tensor) or not value.dim():
            return value
        kept = [[1 if d in along else size for d, size in enumerate(one.shape)] for one, along in zip(self.tensors, self.dims, strict=True)]
        parts = value.split(list(map(math.prod, kept)))
        return [part.view(shape) for part, shape in zip(parts, kept, strict=True)]


def _of(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, list) else value


def step_many(optimizer: Any, group: Mapping[str, Any], params: Sequence[Tensor], angle: Any) -> Sequence[Tensor]:
    """Step parameters in lots that have all but their shape in common.

    Args:
        optimizer, group, params, angle: As in `paths.step_fast`.

    Returns:
        The parameters that are left.
    """
    lots: dict[tuple[Any, ...], list[Tensor]] = {}
    left = []
    for param in params:
        if (group["stochastic_rounding"] and param.dtype == torch.bfloat16) or not param.numel():
            left.append(param)
            continue
        state, rotates = optimizer.prepare(param, group)
        shape, dims = layout_of(group, param, rotates)
        shards = shards_of(param, shape, dims)
        shared = None if shards is None else (id(shards.mesh), tuple(shards.along))
        norm = optimizer.set_norm(group, math.prod([shape[d] for d in dims])) if rotates else None
        grad: Any = param.grad
        alike = (rotates, param.dtype, grad.dtype, param.device, float(state["step"]), tuple(state), shared, norm)
        lots.setdefault(alike, []).append(param)
    for (rotates, *_, norm), lot in lots.items():
        _step_lot(optimizer, group, lot, rotates, angle, norm)
    return left


def _step_lot(optimizer: Any, group: Mapping[str, Any], lot: Sequence[Tensor], rotates: bool, angle: Any, norm: float | None) -> None:
    states = [optimizer.state[param] for param in lot]
    torch._foreach_add_([state["step"] for state in states], 1)
    names = [name for name in ("residual", *optimizer.buffers(group)) if name in states[0]]
    per_vector = [name for name in PER_VECTOR if rotates and name in states[0]]
    pieces = []
    for param, state in zip(lot, states, strict=True):
        tensors: Any = {"param": param, "grad": param.grad, **{name: state[name] for name in names}}
        pieces.append(piece_of(param, group, tensors, {name: state[name] for name in per_vector}, rotates))
    part, count, give_back = together(pieces)
    optimizer.step_part(part, group, float(states[0]["step"]), rotates, angle, (), norm, pieces[0].total, count)
    give_back()


def together(pieces: Sequence[Piece]) -> tuple[dict[str, Any], Tensor | None, Callable[[], None]]:
    """Pieces of parameters as one.

    Returns:
        Name -> `Many` of their tensors, or all their vectors' numbers; the length of every vector, if they have numbers; what to call when
        the numbers have been changed.
    """
    dims = [piece.dims for piece in pieces]
    part: dict[str, Any] = {name: Many([piece.tensors[name] for piece in pieces], dims) for name in pieces[0].tensors}
    numbers = {name: [piece.numbers[name] for piece in pieces] for name in pieces[0].numbers}
    part |= {name: torch.cat([value.flatten() for value in values]) for name, values in numbers.items()}
    count = None
    if numbers:
        sizes = [value.numel() for value in next(iter(numbers.values()))]
        flat = part[next(iter(numbers))]
        count = _lengths(tuple(piece.fan_in for piece in pieces), tuple(sizes), flat.dtype, flat.device)

    def give_back() -> None:
        for name, values in numbers.items():
            new = part[name].split([value.numel() for value in values])
            torch._foreach_copy_(values, [one.view(old.shape) for one, old in zip(new, values, strict=True)])

    return part, count, give_back


@lru_cache
def _lengths(lengths: tuple[int, ...], counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The length of every vector. Kept: a copy to a GPU would wait for it."""
    return torch.tensor(lengths, dtype=dtype).repeat_interleave(torch.tensor(counts)).to(device)
