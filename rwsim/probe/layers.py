"""Which tensors of a model a probe watches, and how their vectors lie in them."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from re import Pattern
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rwsim.errors import InvalidArgument
from rwsim.rotational.groups import named_layouts
from rwsim.rotational.place import shards_of
from rwsim.rotational.rotate import layout

if TYPE_CHECKING:
    from rwsim.rotational.sharded import Shards

_WRAPPED = ("module.", "_orig_mod.")


@dataclass(frozen=True, eq=False)
class Layer:
    """One watched tensor.

    Attributes:
        name: Of the parameter.
        param: The tensor; never written.
        group: Index of its group in the optimizer.
        shape: That it is viewed in.
        dims: Dimensions of `shape` along a vector.
        rows: Indices of the vectors that are measured, in order of the neurons; shape (neuron,).
        vectors: How many it has.
        fan_in: C, coordinates of a vector.
        take: Which of this process's vectors those are; None: all.
        put: Where they belong in `rows`; None: this process has all.
        shards: How it lies on several processes; None: whole.
    """

    name: str
    param: Tensor
    group: int
    shape: torch.Size
    dims: tuple[int, ...]
    rows: np.ndarray
    vectors: int
    fan_in: int
    take: Tensor | None
    put: Tensor | None
    shards: "Shards | None"

    def view(self, tensor: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """The measured vectors of the parameter, its gradient or a buffer, as rows: this process's, or some of them."""
        if self.plain and tensor.layout == torch.strided:
            # Launches are cheap beside many views.
            return tensor if last is None or (first == 0 and last == len(tensor)) else tensor[first:last]
        own = tensor if self.shards is None else self.shards.local(tensor)
        if own.layout != torch.strided:
            own = own.to_dense()
        if self.shape != self.param.shape:
            own = own.unflatten(0, self.shape[:2])
        kept = [d for d in range(own.dim()) if d not in self.dims]
        own = own.permute(kept + list(self.dims))
        # Of a process that has none the number of rows cannot be inferred.
        count = math.prod(own.shape[: len(kept)])
        rows = own.reshape(count, math.prod(own.shape[len(kept) :]))
        return rows[first:last] if self.take is None else rows.index_select(0, self.take[first:last])

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is its rows."""
        return self.shards is None and self.take is None and self.dims == (1,) and len(self.shape) == 2

    @property
    def own(self) -> int:
        """How many of the measured vectors this process has a part of."""
        return len(self.rows) if self.put is None else len(self.put)

    @property
    def splits(self) -> bool:
        """Whether some rows can be had without the others, and without other processes."""
        return self.shards is None and self.dims == tuple(range(1, len(self.shape))) and self.param.is_contiguous()


def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, layers: Any, neurons: int | None, per_neuron: bool,
    special: Mapping[str, Mapping[str, Any]],
) -> list[Layer]:  # fmt: skip
    """The layers of a model that an optimizer trains: by default its tensors of two or more dimensions.

    Args:
        layers: Names, patterns of names (as of files, or compiled regular expressions), or a function of name and parameter.
        neurons, per_neuron, special: See `rwsim.DynamicsProbe`.

    Raises:
        InvalidArgument: Nothing to watch; a name or pattern that fits nothing; no such dimensions.
    """
    group_of = {id(param): (i, group) for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    found, unused = [], set(special)
    chosen, missed = _chooser(layers)
    for full, param, own in named_layouts(model):
        name = full
        while name.startswith(_WRAPPED):
            name = name.partition(".")[2]
        if id(param) not in group_of or not chosen(name, param):
            continue
        index, group = group_of[id(param)]
        told = {key: group[key] for key in ("neuron_dims", "blocks", "per_neuron") if key in group}
        options: dict[str, Any] = {"neuron_dims": (0,), "blocks": 1} | own | told
        options["per_neuron"] = per_neuron and told.get("per_neuron", True)
        for pattern, more in special.items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                options |= more
        layer = _layer(name, param, index, options, neurons)
        if layer is not None:
            found.append(layer)
        elif layers is not None:
            raise InvalidArgument("layers", "must name tensors whose vectors have two or more coordinates", name)
    names = ", ".join([name for name, _ in model.named_parameters()][:8])
    for argument, patterns in (("special", sorted(unused)), ("layers", missed())):
        if patterns:
            raise InvalidArgument(argument, "must fit parameters that the optimizer trains", patterns[0], f"the model has {names}, ...")
    if not found:
        remedy = f"the model has {names}, ..." if names else ""
        raise InvalidArgument("layers", "must leave something to watch: a tensor that the optimizer trains", layers, remedy)
    return found


def _chooser(layers: Any) -> tuple[Callable[[str, Tensor], bool], Callable[[], list[str]]]:
    """Whether a parameter is wanted; and which of the patterns have fitted none."""
    if layers is None:
        return lambda name, param: param.dim() > 1, list
    if callable(layers):
        return layers, list
    patterns = [layers] if isinstance(layers, (str, Pattern)) else list(layers) if isinstance(layers, Iterable) else [layers]
    if not all(isinstance(one, (str, Pattern)) for one in patterns):
        raise InvalidArgument("layers", "must be names, patterns, or a function of name and parameter", layers)
    missed = set(range(len(patterns)))

    def fits(name: str, param: Tensor) -> bool:
        hits = [i for i, one in enumerate(patterns) if (fnmatchcase(name, one) if isinstance(one, str) else one.search(name))]
        for i in hits:
            missed.discard(i)
        return bool(hits)

    return fits, lambda: [one if isinstance(one, str) else one.pattern for i, one in enumerate(patterns) if i in missed]


def _layer(name: str, param: Tensor, group: int, options: Mapping[str, Any], neurons: int | None) -> Layer | None:
    dims, blocks = tuple(options["neuron_dims"]), options["blocks"]
    if param.dim() == 0 or param.is_complex() or param.shape[0] % blocks or not all(-param.dim() <= d < param.dim() for d in dims):
        return None
    # A tensor of one dimension is one vector.
    shape, along = layout(param.shape, options["per_neuron"] and param.dim() > 1, dims, blocks)
    fan_in = math.prod(shape[d] for d in along)
    if fan_in < 2 or not param.numel():
        return None
    vectors = param.numel() // fan_in
    rows = np.arange(vectors)
    if neurons is not None and neurons < vectors:
        # Of its own generator: the same in every run and on every process.
        rows = np.sort(np.random.default_rng(zlib.crc32(name.encode())).choice(vectors, neurons, replace=False))
    shards = shards_of(param, shape, along)
    take = put = None
    if shards is not None:
        own = shards.indices()
        mine = np.flatnonzero(np.isin(own, rows))
        take, put = (torch.from_numpy(x).to(param.device) for x in (mine, np.searchsorted(rows, own[mine])))
    elif len(rows) < vectors:
        take = torch.from_numpy(rows).to(param.device)
    return Layer(name, param, group, shape, along, rows, vectors, fan_in, take, put, shards)
