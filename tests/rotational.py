"""What the tests of rotational optimizers share: each class as a factory, gradients from a seed, angles between rows."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rwsim.rotational import (
    RotationalAdam,
    RotationalAdamW,
    RotationalLion,
    RotationalOptimizer,
    RotationalSGDM,
    RotationalWrapper,
    rotational_of,
)

Factory = Callable[..., RotationalOptimizer]


def wrapped(inner: type[torch.optim.Optimizer], rotation: Any = None, **fixed: Any) -> Factory:
    """A factory of wrappers around a torch optimizer; the options of the wrapper are told from the inner optimizer's keywords."""
    from rwsim.rotational.optimizer import OPTIONS

    def make(params: Any, **given: Any) -> RotationalOptimizer:
        given = {**fixed, **given}
        options = {name: given.pop(name) for name in list(given) if name in OPTIONS}
        return RotationalWrapper(inner(params, **given), **{"rotation": rotation, **options})

    return make


def preset(cls: Factory, **fixed: Any) -> Factory:
    return lambda params, **given: cls(params, **{**fixed, **given})


# Every rotational class at a rotation of about 0.01 radians per step.
CLASSES: dict[str, Factory] = {
    "sgdm": preset(RotationalSGDM, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": preset(RotationalSGDM, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": preset(RotationalAdamW, lr=1e-2, weight_decay=0.1),
    "adam": preset(RotationalAdam, lr=1e-2, weight_decay=0.1, rotation="adamw"),
    "lion": preset(RotationalLion, lr=1e-2, weight_decay=0.1),
    "rule": preset(rotational_of("nadamw"), lr=1e-2, weight_decay=0.1, eps=1e-8),
    "wrapped adamw": wrapped(torch.optim.AdamW, "adamw", lr=1e-2, weight_decay=0.1),
    "wrapped sgd": wrapped(torch.optim.SGD, "sgdm", lr=0.1, momentum=0.9, weight_decay=1e-3),
    "wrapped adam": wrapped(torch.optim.Adam, "adamw", lr=1e-2, weight_decay=0.1),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype))


def gradients(*shape: int, seed: int = 100, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = seeded(seed)
    while True:
        yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def drive(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, seed: int = 100) -> None:
    """Steps under gradients that do not depend on the weights."""
    feeds = [gradients(*param.shape, seed=seed + i, dtype=param.dtype) for i, param in enumerate(params)]
    for _ in range(steps):
        for param, feed in zip(params, feeds, strict=True):
            param.grad = next(feed)
        optimizer.step()


def angles(before: Tensor, after: Tensor) -> Tensor:
    """Angle of each row, radians; by the half-angle form, which loses nothing when it is small."""
    a, b = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (before, after))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def warmup_cosine(t: int, steps: int, peak: float) -> float:
    """A schedule that changes in every step: t from 1."""
    warm = steps // 10
    return peak * (t / warm if t < warm else 0.55 + 0.45 * math.cos(math.pi * (t - warm) / (steps - warm)))
