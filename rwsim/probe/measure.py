"""What a probe takes of a step: sums along the vectors of several tensors at once, on their device, nothing of it waited for.

Sums add up over shards where norms do not, and all that is shown is worked out of them on the host, in float64. A bundle holds layers
whose vectors are alike: on CUDA they are put together, so that a step costs launches by the bundle, not by the tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rwsim.probe.layers import Layer
from rwsim.rotational.optimizer import work_type

# Of one vector: w and g before the step, m before it, d = w' - w, D = sqrt(v^) + eps and q = g / D after it, n the sign's argument.
COLUMNS = ("ww", "wg", "gg", "dd", "wd", "mg", "mm", "qq", "wq", "roots", "wwq", "sign_l1", "sign_sq", "sign_m")
# Elements of a bundle on CUDA, of which a measured step holds some copies.
_TOGETHER = 1 << 24
# Names of the first and second moment in an optimizer's state.
_MOMENTUM = ("exp_avg", "momentum_buffer")
_SQUARES = ("max_exp_avg_sq", "exp_avg_sq")
# Coefficients of buffer and gradient in a sign's argument, and beta of the buffer's new gradient; of a group.
Argument = Callable[[Mapping[str, Any]], tuple[float, float, float, float]]


class Bundle:
    """Layers that are measured together.

    Args:
        layers: Alike in dtype, device, dimension of their vectors and sharding.
        optimizer: That takes the steps.
        argument: Of a rule that takes a sign; else None.
    """

    def __init__(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer, argument: Argument | None) -> None:
        self.layers, self.optimizer, self.argument = layers, optimizer, argument
        self.dtype = work_type(layers[0].param)
        with torch.no_grad():
            self.counts = [len(layer.view(layer.param)) for layer in layers]
        device = layers[0].param.device
        self.layer_of_row = torch.repeat_interleave(torch.arange(len(layers)), torch.tensor(self.counts)).to(device)
        first = [sum(len(layer.rows) for layer in layers[:i]) for i in range(len(layers))]
        places = [layer.put + start for layer, start in zip(layers, first, strict=True) if layer.put is not None]
        self.place = torch.cat(places) if places else None
        self.columns: dict[str, Tensor] = {}

    @property
    def vectors(self) -> int:
        return sum(len(layer.rows) for layer in self.layers)

    def before(self, scale: Tensor | None, closure: bool) -> None:
        """Keep the weights and take sums of what the step will change. A closure has no gradients yet."""
        self.weights = self._rows([layer.param for layer in self.layers], copy=True)
        states = [self.optimizer.state.get(layer.param, {}) for layer in self.layers]
        momentum = [_first(layer, state, _MOMENTUM) for layer, state in zip(self.layers, states, strict=True)]
        self.momentum = None if all(one is None for one in momentum) else self._rows(momentum, copy=closure)
        self.columns = {"ww": _square(self.weights)}
        if not closure:
            self._gradients(scale)

    def after(self, scale: Tensor | None, closure: bool) -> Tensor:
        """All sums of the step, shape (column, neuron): the same on every process; NaN where there is nothing to sum."""
        if closure:
            self._gradients(scale)
        columns, weights = self.columns, self.weights
        change = self._rows([layer.param for layer in self.layers], copy=False) - weights
        columns["dd"], columns["wd"] = _square(change), _dot(weights, change)
        del change
        states = [self.optimizer.state.get(layer.param, {}) for layer in self.layers]
        squares = [_first(layer, state, _SQUARES) for layer, state in zip(self.layers, states, strict=True)]
        if any(one is not None for one in squares):
            root = self._roots(squares, states)
            columns["roots"] = root.sum(1)
            scaled = self.grads / root
            columns["qq"], columns["wq"] = _square(scaled), _dot(weights, scaled)
            columns["wwq"] = _dot(weights, torch.div(weights, root, out=scaled))
        nothing = torch.full_like(columns["ww"], torch.nan)
        sums = torch.stack([columns.get(name, nothing) for name in COLUMNS])
        start = 0
        for layer, count in zip(self.layers, self.counts, strict=True):
            if layer.param.grad is None:
                sums[1:, start : start + count] = torch.nan
            start += count
        self.columns, self.momentum = {}, None
        del self.weights, self.grads
        shards = self.layers[0].shards
        if shards is None or self.place is None:
            return sums
        every = sums.new_zeros(len(COLUMNS), self.vectors)
        every[:, self.place] = sums
        return shards.join(every)

    def _gradients(self, scale: Tensor | None) -> None:
        grads = self._rows([layer.param.grad for layer in self.layers], copy=False)
        if scale is not None:
            grads = grads / scale.to(grads)
        self.grads = grads
        columns, momentum = self.columns, self.momentum
        columns["wg"], columns["gg"] = _dot(self.weights, grads), _square(grads)
        if momentum is not None:
            columns["mg"], columns["mm"] = _dot(momentum, grads), _square(momentum)
        if self.argument is not None:
            of_buffer, of_grad, kept, fresh = self.argument(self.optimizer.param_groups[self.layers[0].group])
            argument = grads * of_grad if momentum is None else torch.add(grads * of_grad, momentum, alpha=of_buffer)
            columns["sign_l1"], columns["sign_sq"] = argument.abs().sum(1), _square(argument)
            with_buffer = 0.0 if momentum is None else kept * _dot(argument, momentum)
            columns["sign_m"] = fresh * _dot(argument, grads) + with_buffer

    def _rows(self, tensors: Sequence[Tensor | None], copy: bool) -> Tensor:
        """Their vectors one below the other, zeros for what is not there."""
        rows = []
        for layer, tensor in zip(self.layers, tensors, strict=True):
            if tensor is None:
                rows.append(torch.zeros_like(layer.view(layer.param), dtype=self.dtype))
            else:
                rows.append(layer.view(tensor.detach()).to(self.dtype))
        if len(rows) > 1:
            return torch.cat(rows)
        return rows[0].clone() if copy else rows[0]

    def _roots(self, squares: Sequence[Tensor | None], states: Sequence[Mapping[str, Any]]) -> Tensor:
        """sqrt(v^) + eps: v over its bias correction 1 - beta_2^t."""
        groups = [self.optimizer.param_groups[layer.group] for layer in self.layers]
        steps = [state.get("step", group.get("step")) for state, group in zip(states, groups, strict=True)]
        corrections: Any
        if any(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps):
            # Counted on the device: not to be waited for.
            device = self.layer_of_row.device
            counted = torch.stack([torch.as_tensor(torch.inf if step is None else step, device=device).double() for step in steps])
            rates = torch.tensor([_rate(group) for group in groups], dtype=torch.float64).to(device, non_blocking=True)
            corrections = (1 - rates**counted).to(self.dtype)[self.layer_of_row, None]
        else:
            corrections = self._by_row(
                [1.0 if step is None else 1 - _rate(group) ** float(step) for group, step in zip(groups, steps, strict=True)]
            )
        eps = self._by_row([float(group.get("eps", 0.0)) for group in groups])
        return torch.div(self._rows(squares, copy=False), corrections).sqrt_().add_(eps)

    def _by_row(self, values: Sequence[float]) -> Any:
        """A number of every layer, as one number where they agree."""
        if len(set(values)) == 1:
            return values[0]
        device = self.layer_of_row.device
        return torch.tensor(values, dtype=self.dtype).to(device, non_blocking=True)[self.layer_of_row, None]


def bundled(layers: Iterable[Layer], optimizer: torch.optim.Optimizer, arguments: Mapping[int, Argument]) -> list[Bundle]:
    """Layers in bundles: of the same kind on CUDA, each by itself on a CPU, whose cache holds little more than one.

    Args:
        layers: In order.
        optimizer: That takes the steps.
        arguments: Of groups whose rule takes a sign.
    """
    sizes: dict[Any, int] = {}
    together: dict[Any, list[Layer]] = {}
    for i, layer in enumerate(layers):
        shards = layer.shards
        where = None if shards is None else (shards.mesh, shards.kept, tuple(shards.sharding), tuple(layer.shape[d] for d in layer.dims))
        signs = layer.group if layer.group in arguments else None
        alone = i if layer.param.device.type == "cpu" else None
        key = (work_type(layer.param), layer.param.device, layer.fan_in, where, signs, alone)
        size = len(layer.rows) * layer.fan_in
        if sizes.get(key, 0) + size > _TOGETHER and key in together:
            together[(key, i)] = together.pop(key)
            sizes[key] = 0
        together.setdefault(key, []).append(layer)
        sizes[key] = sizes.get(key, 0) + size
    return [Bundle(members, optimizer, arguments.get(members[0].group)) for members in together.values()]


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
