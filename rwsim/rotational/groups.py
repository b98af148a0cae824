"""Parameter groups of a model: which of its tensors rotate, and along which dimensions."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from rwsim.errors import InvalidArgument
from rwsim.rotational.optimizer import OPTIONS, PATHS

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_groups(
    model: nn.Module, weight_decay: float, special: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Groups for a rotational optimizer: matrices under weight decay, everything else without, each with its neurons where they are.

    A ConvTranspose has its neurons in dimension 1, in each of its groups. Tensors that belong to no module of torch are taken to hold
    neurons in dimension 0: say otherwise in `special`. A tied parameter goes where it is first found.

    Args:
        model: The model.
        weight_decay: Of matrices (tensors of two or more dimensions). Biases, gains and other vectors have none.
        special: Pattern of parameter names (as in a file name: ``"*.experts.*"``) -> options or hyperparameters of those, e.g.
            ``{"neuron_dims": (0, 1)}`` for stacked experts, ``{"rotational": False}``, ``{"blocks": 3, "per_neuron": False}`` for a fused
            q, k and v that turn as three. The last pattern that fits wins.
        **options: Options of every group; see `RotationalOptimizer`.

    Raises:
        InvalidArgument: A pattern that fits no parameter; no such option.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3))
        >>> [(len(group["params"]), group["weight_decay"], group["neuron_dims"]) for group in parameter_groups(model, 0.1)]
        [(1, 0.1, (0,)), (4, 0.0, (0,)), (1, 0.1, (1,))]
    """
    for name in options:
        if name not in (known := {**OPTIONS, **PATHS}):
            raise InvalidArgument(name, "is not an option of rotational optimizers", options[name], f"they take {', '.join(known)}")
    unused = set(special or {})
    groups: dict[str, dict[str, Any]] = {}
    for name, param, found in named_layouts(model):
        settings = {"weight_decay": weight_decay if param.dim() > 1 else 0.0, "neuron_dims": (0,), **options, **found}
        for pattern, more in (special or {}).items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                settings |= more
        groups.setdefault(repr(sorted(settings.items())), {"params": [], **settings})["params"].append(param)
    if unused:
        some = ", ".join([name for name, _ in model.named_parameters()][:8])
        raise InvalidArgument("special", "must name parameters of the model", sorted(unused)[0], f"it has {some}, ...")
    return list(groups.values())


def named_layouts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Name, parameter and what its module says about it; each parameter once."""
    seen: set[int] = set()
    modules = dict(model.named_modules())
    for name, param in model.named_parameters():
        if id(param) in seen:
            continue
        seen.add(id(param))
        # A parametrized weight is held by a list inside the module that it belongs to.
        owner = modules[name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]]
        if name.startswith("parametrizations."):
            owner = model
        transposed = isinstance(owner, _TRANSPOSED) and param.dim() > 1
        found: dict[str, Any] = {}
        if transposed:
            found = {"neuron_dims": (1,)} | ({"blocks": owner.groups} if owner.groups > 1 else {})
        yield name, param, found
