"""Layers for rotational optimizers: standardized weights and learnable gains, added to a model and folded away again.

A neuron's weight vector (row) p may be standardized, so that only its direction matters, and multiplied by a gain g that
is trained, since a rotational optimizer keeps norms fixed (Kosson et al., section 4 and appendix I). Both are
parametrizations of `weight`: `parametrizations.weight.original` holds p, the module computes with the result.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rwsim.errors import InvalidArgument

Model = TypeVar("Model", bound=nn.Module)
SCALES = ("init", "fan_in")
_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Largest entry of a row, relative to that before centring, in machine epsilons, at which only rounding is left: that of the
# mean, a few epsilons, which scaling up would turn into a full-sized weight that is not even centred.
_ROUNDING = 16


class _PerNeuron(nn.Module):
    """Base of parametrizations that treat each neuron's weights alike, whichever axis of `weight` counts the neurons."""

    def __init__(self, weight: Tensor, groups: int | None) -> None:
        super().__init__()
        if weight.ndim < 2 or not weight.numel():
            raise InvalidArgument(
                "weight", "must have at least 2 axes and be initialized and not empty", tuple(weight.shape), "vectors have no neurons"
            )
        if not weight.is_floating_point():
            raise InvalidArgument("weight", "must hold real floating-point numbers", weight.dtype)
        if groups is not None and (groups < 1 or weight.shape[0] % groups):
            raise InvalidArgument("groups", f"must divide the first axis of weight, {weight.shape[0]}", groups, "the default is 1")
        self.groups = groups
        self.neurons = weight.shape[0] if groups is None else groups * weight.shape[1]

    def extra_repr(self) -> str:
        return f"neurons={self.neurons}" + (f", groups={self.groups}" if self.groups is not None else "")

    def _split(self, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """A view of `weight`, and the axes of it that run along a neuron's weights."""
        if self.groups is None:
            return weight, tuple(range(1, weight.ndim))
        return weight.unflatten(0, (self.groups, -1)), (1, *range(3, weight.ndim + 1))

    def _spread(self, values: Tensor, split: Tensor, along: tuple[int, ...]) -> Tensor:
        """One value per neuron, in a shape that broadcasts over such a view."""
        return values.view([1 if axis in along else size for axis, size in enumerate(split.shape)])


class Gain(_PerNeuron):
    r"""A factor per neuron that is trained (paper, section 4): w = g p.

    It starts at 1. In the state dict it is ``parametrizations.weight.<index>.gain``; it needs no weight decay.

    Args:
        weight: The weight that it will parametrize; dtype, device and whether the gain is trained are taken from it.
        groups: None for neurons along axis 0; for neurons along axis 1, as in transposed convolutions, the number of groups.

    Raises:
        InvalidArgument: `weight` is empty, not floating-point or has a single axis; `groups` does not divide its first axis.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> _ = parametrize.register_parametrization(layer, "weight", Gain(layer.weight))
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'parametrizations.weight.original', 'parametrizations.weight.0.gain']
    """

    def __init__(self, weight: Tensor, groups: int | None = None) -> None:
        super().__init__(weight, groups)
        self.gain = nn.Parameter(weight.new_ones(self.neurons), requires_grad=weight.requires_grad)

    def forward(self, weight: Float[Tensor, "*weight"]) -> Float[Tensor, "*weight"]:
        split, along = self._split(weight)
        return (split * self._spread(self.gain, split, along)).reshape_as(weight)


class Standardization(_PerNeuron):
    r"""Weight standardization: every neuron's weight vector centred, at a fixed norm n (paper, Algorithm 1 line 4, appendix B).

    w = n (p - mean(p)) / ||p - mean(p)||, so the gradient is orthogonal to p and to (1, ..., 1), and p's scale does not matter.

    No epsilon is added. A row with nothing left after centring but rounding (zero, constant or of a single weight) has no
    direction: it yields zeros, with gradient 0, and so stays. A row that holds NaN or Inf yields NaN.
    Half-precision weights are standardized in float32, then rounded.

    Args:
        weight: The weight that it will parametrize; dtype and device are taken from it.
        scale: ``"init"``: n is the norm of the row as given, not centred; ``"fan_in"``: n = 1, what a standard deviation
            of 1/sqrt(fan_in) gives.
        groups: None for neurons along axis 0; for neurons along axis 1, as in transposed convolutions, the number of groups.

    Raises:
        InvalidArgument: `scale` is unknown; `weight` is empty, not floating-point or has a single axis; `groups` does not
            divide its first axis.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [2.0, 2.0]])
        >>> Standardization(weight)(weight)
        tensor([[-3.5355,  3.5355],
                [ 0.0000,  0.0000]])
    """

    # In the state dict, so that a loaded model has the norms it was trained with, not those of its own beginning.
    norm: Tensor

    def __init__(self, weight: Tensor, scale: str = "init", groups: int | None = None) -> None:
        super().__init__(weight, groups)
        _check_scale(scale)
        split, along = self._split(weight.detach())
        norm = weight.new_ones(self.neurons) if scale == "fan_in" else torch.linalg.vector_norm(split, dim=along).flatten()
        self.register_buffer("norm", norm)

    def forward(self, weight: Float[Tensor, "*weight"]) -> Float[Tensor, "*weight"]:
        split, along = self._split(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        centred = split - split.mean(along, keepdim=True)
        # Rows are scaled before they are squared: decay shrinks those of dead neurons below the root of the smallest number.
        # The result does not depend on this scale, so neither do its derivatives.
        peak = centred.detach().abs().amax(along, keepdim=True)
        rounding = _ROUNDING * torch.finfo(split.dtype).eps * split.detach().abs().amax(along, keepdim=True)
        empty = peak <= rounding
        scaled = centred / peak.masked_fill(empty, 1)
        length = torch.linalg.vector_norm(scaled, dim=along, keepdim=True).masked_fill(empty, 1)
        # Zeros go into the factors, one per neuron: `masked_fill` on the weight would lose its memory format.
        factors = (self._spread(self.norm, split, along) / length).masked_fill(empty, 0)
        return (scaled * factors).reshape_as(weight).to(weight.dtype)


class StandardizedLinear(nn.Linear):
    """`torch.nn.Linear` with standardized weights and a gain per neuron.

    Initializing `weight` afterwards has no effect, as it is computed: initialize a plain layer and `standardize` it.

    Args:
        args, kwargs: Those of the torch class.
        gain: Whether to add a `Gain`; default True.
        standardize: Whether to add a `Standardization`; default True.
        scale: ``"init"`` or ``"fan_in"``, see `Standardization`.

    Raises:
        InvalidArgument: As `standardize`.

    Example:
        >>> layer = StandardizedLinear(64, 8, scale="fan_in")
        >>> layer.weight.norm(dim=1).allclose(torch.ones(8)), layer.weight.sum(1).abs().max().item() < 1e-5
        (True, True)
    """

    def __init__(self, *args: Any, gain: bool = True, standardize: bool = True, scale: str = "init", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _attach(self, _additions(self, type(self).__name__, gain, standardize, scale))


class StandardizedConv1d(nn.Conv1d):
    """`torch.nn.Conv1d` with standardized filters and a gain per filter; options as in `StandardizedLinear`.

    Example:
        >>> StandardizedConv1d(3, 8, kernel_size=5)(torch.zeros(1, 3, 9)).shape
        torch.Size([1, 8, 5])
    """

    def __init__(self, *args: Any, gain: bool = True, standardize: bool = True, scale: str = "init", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _attach(self, _additions(self, type(self).__name__, gain, standardize, scale))


class StandardizedConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` with standardized filters and a gain per filter; options as in `StandardizedLinear`.

    Example:
        >>> StandardizedConv2d(3, 8, 3, padding="same", bias=False)(torch.zeros(1, 3, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    def __init__(self, *args: Any, gain: bool = True, standardize: bool = True, scale: str = "init", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _attach(self, _additions(self, type(self).__name__, gain, standardize, scale))


_TORCH_CLASS: dict[type[nn.Module], Any] = {cls: cls.__base__ for cls in (StandardizedLinear, StandardizedConv1d, StandardizedConv2d)}


def standardize(model: Model, *, gain: bool = True, standardize: bool = True, scale: str = "init", skip: Collection[str] = ()) -> Model:
    r"""Adds standardization and a gain to every linear and convolutional layer of a model, in place.

    Each row p becomes w = g n (p - mean(p)) / ||p - mean(p)||, n = ||p|| at first, g = 1 (paper, Algorithm 1 line 4): with
    ``scale="init"`` a row keeps the norm that it has, mean included, and loses its mean. Without `standardize`, w = g p, and
    the outputs do not change. Parameters keep their identity and values; give optimizers the gains, which are new.

    Converts Linear, Conv and ConvTranspose layers, of 1 to 3 dimensions, and subclasses; other modules are left, such as
    attention's packed in-projection. Convert after initialization: `weight` is computed from then on, and writing into it has
    no effect. An error leaves the model as it was. A model and its deep copy must not share one `parametrize.cached` block.

    Args:
        model: The model, or a single layer.
        gain: Whether to add a `Gain`; default True.
        standardize: Whether to add a `Standardization`; default True.
        scale: ``"init"`` (default) or ``"fan_in"``, see `Standardization`.
        skip: Names of modules to leave, as in `named_modules`, with all that they contain.

    Returns:
        `model`.

    Raises:
        InvalidArgument: An unknown `scale` or name in `skip`; a layer that is converted or otherwise parametrized already, or
            uninitialized; one whose weight another module of the model holds too (tied): it would follow only one of them;
            one that no row could be standardized in (a fan-in of 1, zero initialization): it would be 0 for ever.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
        >>> model = standardize(model, skip=["3"])
        >>> [name for name, parameter in model.named_parameters() if parameter.ndim == 1]
        ['0.bias', '0.parametrizations.weight.1.gain', '3.bias']
        >>> [name for name, _ in fold(model).named_parameters()]
        ['0.weight', '0.bias', '3.weight', '3.bias']
    """
    _check_scale(scale)
    holders = _holders(model)
    planned = []
    for name, layer in _selected(model, skip):
        planned.append((layer, _additions(layer, _path(name), gain, standardize, scale)))
        _refuse_tied(name, holders[id(layer.weight)])
    for layer, additions in planned:
        _attach(layer, additions)
    return model


def fold(model: Model) -> Model:
    """Multiplies gains and standardization into plain weights, in place; outputs are the same to the bit.

    Layers are of their torch class again, with its state dict. Weights keep their identity, so an optimizer that holds them
    trains on, without gains and standardization and with its old state; their gradients, of the raw rows, are dropped.

    Args:
        model: A model that `standardize` converted or that contains `StandardizedLinear` and the like; others are left.

    Returns:
        `model`.

    Raises:
        InvalidArgument: A layer has a further parametrization on its weight, or shares its raw weight with another one.

    Example:
        >>> layer, x = StandardizedLinear(64, 8), torch.ones(2, 64)
        >>> before = layer(x)
        >>> type(fold(layer)).__name__, layer(x).equal(before), list(layer.state_dict())
        ('Linear', True, ['weight', 'bias'])
    """
    holders = _holders(model)
    layers = []
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight"):
            chain: Any = layer.parametrizations.weight
            kinds = [isinstance(step, _PerNeuron) for step in chain]
            if not any(kinds):
                continue
            if not all(kinds):
                got = [type(step).__name__ for step in chain]
                raise InvalidArgument(_path(name), "must have no other parametrization than ours on its weight", got, "remove it first")
            _refuse_tied(name, holders[id(chain.original)])
            layers.append(layer)
    for layer in layers:
        # A deep copy shares the class that torch made for the original, and removal edits the class.
        kind = type(layer)
        layer.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        layer.weight.grad = None
        # First again, as in the torch class: optimizers' state dicts number parameters.
        layer._parameters = {"weight": layer._parameters.pop("weight"), **layer._parameters}
    for layer in model.modules():
        # Not subclasses: what they add stays.
        if type(layer) in _TORCH_CLASS:
            layer.__class__ = _TORCH_CLASS[type(layer)]
    return model


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise InvalidArgument("scale", f"must be one of {', '.join(SCALES)}", scale)


def _path(name: str) -> str:
    return f"model.{name}" if name else "model"


def _selected(model: nn.Module, skip: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Layers of known type under their first name, unless one of their names, or of a module around them, is in `skip`."""
    if isinstance(skip, str):
        raise InvalidArgument("skip", "must be a collection of names", skip, f"give [{skip!r}]")
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    unknown = set(skip) - {name for known in names.values() for name in known}
    if unknown:
        raise InvalidArgument("skip", "must name modules of the model", sorted(unknown), "see `model.named_modules()`")
    for module, known in names.items():
        if isinstance(module, (*_DENSE, *_TRANSPOSED)) and not any(f"{name}.".startswith(f"{s}.") for name in known for s in skip):
            yield known[0], module


def _additions(layer: Any, path: str, gain: bool, standardize: bool, scale: str) -> list[_PerNeuron]:
    """What to register on a layer's weight, in this order."""
    _check_scale(scale)
    weight = layer._parameters.get("weight")
    if weight is None or torch.nn.parameter.is_lazy(weight):
        chain = layer.parametrizations.weight if parametrize.is_parametrized(layer, "weight") else [weight]
        got = [type(step).__name__ for step in chain]
        raise InvalidArgument(path, "must hold its weight as a plain, initialized parameter", got, "name it in `skip`, or `fold` it first")
    groups = layer.groups if isinstance(layer, _TRANSPOSED) else None
    additions: list[_PerNeuron] = []
    if standardize:
        additions.append(Standardization(weight, scale, groups))
        with torch.no_grad():
            if not weight.is_meta and not additions[0](weight).any():
                rule = "must have a row with something left after centring, or it would be 0 for ever"
                raise InvalidArgument(path, rule, f"weight of shape {tuple(weight.shape)}", "name it in `skip`, or initialize it")
    if gain:
        additions.append(Gain(weight, groups))
    return additions


def _attach(layer: nn.Module, additions: list[_PerNeuron]) -> None:
    for addition in additions:
        parametrize.register_parametrization(layer, "weight", addition)


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Names under which modules hold each parameter, by its id; a module of two names holds its parameters once."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            holders[id(parameter)].append(f"{name}.{key}" if name else key)
    return holders


def _refuse_tied(name: str, holders: list[str]) -> None:
    if len(holders) > 1:
        raise InvalidArgument(_path(name), "must not share its weight with another module", holders, "untie them, or name it in `skip`")
