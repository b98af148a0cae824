"""What a probe takes of a step: sums along the vectors of several tensors at once, on their device, nothing of it waited for.

Sums add up over shards where norms do not, and all that is shown is worked out of them on the host, in float64. A bundle holds layers
whose vectors are alike: on CUDA they are put together, so that a step costs launches by the bundle, not by the tensor.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwsim.probe.layers import Layer
from rwsim.rotational.optimizer import work_type

# Of one vector: w and g before the step, m before it, d = w' - w, D = sqrt(v^) + eps and q = g / D after it, s the sign of g, n the
# argument of an update's sign, m' its buffer after it, and where their signs agree, less where they do not.
COLUMNS = ("ww", "wg", "gg", "dd", "wd", "mg", "mm", "qq", "wq", "roots", "wwq", "ws", "sign_sq", "buffer_sq", "agree")
# Elements of a bundle: on CUDA, where a measured step holds some copies of them, and on a CPU, where they stay in the cache.
_TOGETHER, _CACHED = 1 << 24, 1 << 17
# Names of the first and second moment in an optimizer's state.
_MOMENTUM = ("exp_avg", "momentum_buffer")
_SQUARES = ("max_exp_avg_sq", "exp_avg_sq")
# Coefficients of buffer and gradient in a sign's argument, and beta of the buffer's new gradient; of a group.
Argument = Callable[[Mapping[str, Any]], tuple[float, float, float, float]]


class Piece(NamedTuple):
    """Rows `first` to `last` of what this process measures of a layer; of `rows` of the layer if it has all of them."""

    layer: Layer
    first: int
    last: int

    def view(self, tensor: Tensor) -> Tensor:
        return self.layer.view(tensor, self.first, self.last)


class Bundle:
    """Pieces that are measured together.

    Args:
        pieces: Of layers that are alike in dtype, device, dimension of their vectors and sharding; of sharded ones all.
        optimizer: That takes the steps.
        argument: Of a rule that takes a sign; else None.
        coupled: Whether the rule divides its decay by the root of the second moment.

    Attributes:
        spans: Which vectors of which layers its sums are of: layer, first and last in its `rows`.
    """

    def __init__(self, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, argument: Argument | None, coupled: bool) -> None:
        self.pieces, self.optimizer, self.argument, self.coupled = pieces, optimizer, argument, coupled
        layer = pieces[0].layer
        self.dtype, self.shards = work_type(layer.param), layer.shards
        counts = torch.tensor([piece.last - piece.first for piece in pieces])
        self.piece_of_row = torch.repeat_interleave(torch.arange(len(pieces)), counts).to(layer.param.device)
        self.spans = [(one.layer, 0, len(one.layer.rows)) if self.shards else (one.layer, one.first, one.last) for one in pieces]
        # Whether there is nothing to do but to put them together: on a GPU the host's calls are what a measured step costs.
        self.plain = len(pieces) > 1 and all(one.layer.plain and one.last - one.first == one.layer.vectors for one in pieces)
        self.place: Tensor | None = None
        if self.shards is not None:
            starts = [0, *accumulate(len(piece.layer.rows) for piece in pieces)]
            places = [piece.layer.put + start for piece, start in zip(pieces, starts, strict=False) if piece.layer.put is not None]
            self.place = torch.cat(places)
        self.columns: dict[str, Tensor] = {}

    def before(self, scale: Tensor | None, closure: bool) -> None:
        """Keep the weights and take sums of what the step will change. A closure has no gradients yet."""
        self.weights = self._rows([piece.layer.param for piece in self.pieces], copy=True)
        states = [self.optimizer.state.get(piece.layer.param, {}) for piece in self.pieces]
        momentum = [_first(piece.layer, state, _MOMENTUM) for piece, state in zip(self.pieces, states, strict=True)]
        self.momentum = None if all(one is None for one in momentum) else self._rows(momentum, copy=closure)
        self.columns = {"ww": _square(self.weights)}
        if not closure:
            self._gradients(scale)

    def after(self, scale: Tensor | None, closure: bool) -> Tensor:
        """All sums of the step, shape (column, neuron): the same on every process; NaN where there is nothing to sum."""
        if closure:
            self._gradients(scale)
        columns, weights = self.columns, self.weights
        change = self._rows([piece.layer.param for piece in self.pieces], copy=False) - weights
        columns["dd"], columns["wd"] = _square(change), _dot(weights, change)
        del change
        states = [self.optimizer.state.get(piece.layer.param, {}) for piece in self.pieces]
        squares = [_first(piece.layer, state, _SQUARES) for piece, state in zip(self.pieces, states, strict=True)]
        if any(one is not None for one in squares):
            root = self._roots(squares, states)
            scaled = self.grads / root
            columns["qq"], columns["wq"] = _square(scaled), _dot(weights, scaled)
            if self.coupled:
                columns["roots"], columns["wwq"] = root.sum(1), _dot(weights, torch.div(weights, root, out=scaled))
        nothing = torch.full_like(columns["ww"], torch.nan)
        sums = torch.stack([columns.get(name, nothing) for name in COLUMNS])
        start = 0
        for piece, grad in zip(self.pieces, self.given, strict=True):
            end = start + piece.last - piece.first
            if grad is None:
                sums[1:, start:end] = torch.nan
            start = end
        self.columns, self.momentum = {}, None
        del self.weights, self.grads, self.given
        if self.shards is None or self.place is None:
            return sums
        every = sums.new_zeros(len(COLUMNS), sum(end - start for _, start, end in self.spans))
        every[:, self.place] = sums
        return self.shards.join(every)

    def _gradients(self, scale: Tensor | None) -> None:
        self.given = [piece.layer.param.grad for piece in self.pieces]
        grads = self._rows(self.given, copy=False)
        if scale is not None:
            grads = grads / scale.to(grads)
        self.grads = grads
        columns, momentum = self.columns, self.momentum
        columns["wg"], columns["gg"] = _dot(self.weights, grads), _square(grads)
        if momentum is not None:
            columns["mg"], columns["mm"] = _dot(momentum, grads), _square(momentum)
        if self.argument is not None:
            of_buffer, of_grad, kept, fresh = self.argument(self.optimizer.param_groups[self.pieces[0].layer.group])
            argument = grads * of_grad if momentum is None else torch.add(grads * of_grad, momentum, alpha=of_buffer)
            columns["ws"], columns["sign_sq"] = _dot(self.weights, grads.sign()), _square(argument)
            buffer = grads * fresh if momentum is None else torch.add(grads * fresh, momentum, alpha=kept)
            columns["buffer_sq"] = _square(buffer)
            columns["agree"] = _dot(argument.sign_(), buffer.sign_())

    def _rows(self, tensors: Sequence[Tensor | None], copy: bool) -> Tensor:
        """Their vectors one below the other, zeros for what is not there."""
        if self.plain and all(tensor is not None and tensor.dtype == self.dtype and tensor.layout == torch.strided for tensor in tensors):
            return torch.cat(tensors)  # type: ignore[arg-type]  # none is None
        rows = []
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            if tensor is None:
                rows.append(torch.zeros_like(piece.view(piece.layer.param), dtype=self.dtype))
            else:
                rows.append(piece.view(tensor).to(self.dtype))
        if len(rows) > 1:
            return torch.cat(rows)
        return rows[0].clone() if copy else rows[0]

    def _roots(self, squares: Sequence[Tensor | None], states: Sequence[Mapping[str, Any]]) -> Tensor:
        """sqrt(v^) + eps: v over its bias correction 1 - beta_2^t."""
        groups = [self.optimizer.param_groups[piece.layer.group] for piece in self.pieces]
        steps = [state.get("step", group.get("step")) for state, group in zip(states, groups, strict=True)]
        corrections: Any
        if any(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps):
            # Counted on the device: not to be waited for.
            device = self.piece_of_row.device
            counted = torch.stack([torch.as_tensor(torch.inf if step is None else step, device=device).double() for step in steps])
            rates = torch.tensor([_rate(group) for group in groups], dtype=torch.float64).to(device, non_blocking=True)
            corrections = (1 - rates**counted).to(self.dtype)[self.piece_of_row, None]
        else:
            corrections = self._by_row(
                [1.0 if step is None else 1 - _rate(group) ** float(step) for group, step in zip(groups, steps, strict=True)]
            )
        eps = self._by_row([float(group.get("eps", 0.0)) for group in groups])
        return torch.div(self._rows(squares, copy=False), corrections).sqrt_().add_(eps)

    def _by_row(self, values: Sequence[float]) -> Any:
        """A number of every piece, as one number where they agree."""
        if len(set(values)) == 1:
            return values[0]
        device = self.piece_of_row.device
        return torch.tensor(values, dtype=self.dtype).to(device, non_blocking=True)[self.piece_of_row, None]


def bundled(
    layers: Iterable[Layer], optimizer: torch.optim.Optimizer, arguments: Mapping[int, Argument], coupled: Container[int]
) -> list[Bundle]:  # fmt: skip
    """Layers of the same kind together on CUDA, and in pieces that fit into the cache on a CPU.

    Args:
        layers: In order.
        optimizer: That takes the steps.
        arguments: Of groups whose rule takes a sign.
        coupled: Groups whose rule divides its decay by the root of the second moment.
    """
    together: dict[Any, list[list[Piece]]] = {}
    sizes: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        cpu, shards = _in_cache(layer.param), layer.shards
        # What processes add up together must be the same on all of them, whatever they have of it.
        where = None if shards is None else (shards.mesh, shards.kept, tuple(shards.sharding), tuple(layer.shape[d] for d in layer.dims))
        signs = layer.group if layer.group in arguments else None
        key = (work_type(layer.param), layer.param.device, layer.fan_in, where, signs, layer.group in coupled, i if cpu else None)
        size = len(layer.rows) * layer.fan_in
        rows = max(1, _CACHED // layer.fan_in) if cpu and layer.splits else max(1, layer.own)
        for first in range(0, max(1, layer.own), rows):
            if key not in together or cpu or sizes[key] + size > _TOGETHER:
                together.setdefault(key, []).append([])
                sizes[key] = 0
            together[key][-1].append(Piece(layer, first, min(first + rows, layer.own)))
            sizes[key] += size
    return [
        Bundle(pieces, optimizer, arguments.get(pieces[0].layer.group), pieces[0].layer.group in coupled)
        for members in together.values() for pieces in members
    ]  # fmt: skip


def _in_cache(param: Tensor) -> bool:
    """Whether its device is quicker by small pieces than by few calls."""
    return param.device.type == "cpu"


def _first(layer: Layer, state: Mapping[str, Any], names: Iterable[str]) -> Tensor | None:
    """The first of these that an optimizer keeps for every element: some keep less."""
    kept = (state.get(name) for name in names)
    return next((one for one in kept if isinstance(one, Tensor) and one.shape == layer.param.shape), None)


def _rate(group: Mapping[str, Any]) -> float:
    """beta_2, or 0 where there is none: no correction then."""
    betas = group.get("betas", ())
    return float(betas[1]) if len(betas) > 1 else 0.0


def _square(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1).square_()


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)
