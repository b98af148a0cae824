"""What the tests of the probe share: a module of one weight, random gradients orthogonal to its neurons, optimizers by rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rwsim import DynamicsProbe
from tests.rotational import seeded


class Lion(torch.optim.Optimizer):
    """As published (Chen et al. 2023): independent of rwsim's."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                sign = (beta1 * momentum + (1 - beta1) * param.grad).sign()
                param.sub_(group["lr"] * (sign + group["weight_decay"] * param))
                momentum.lerp_(param.grad, 1 - beta2)


class Weight(nn.Module):
    """A single parameter by the name of `weight`."""

    def __init__(self, *shape: int, size: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(size * torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype))


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A network of three layers, the same each time, that draws no random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def data(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(steps, 4, 2, 8, generator=seeded(7), dtype=torch.float64).to(dtype))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


# Rule -> a real optimizer that is in equilibrium, from `START`, within some hundred steps under `walk`.
WALKS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgdm": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.02),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.2),
    "adam_l2": lambda params: torch.optim.Adam(params, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.02),
    "lion": lambda params: Lion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=2.0),
}
START = {"sgdm": 0.4, "adamw": 0.8, "adam_l2": 0.2, "lion": 0.5}
NEURONS, FAN_IN = 128, 64


def walk(
    rule: str, steps: int, seed: int = 0, radial: float = 0.0, drift: float = 0.0, uneven: float = 0.0, bursts: float = 0.0,
    idle: int = 0, melt: float = 0.0, **options: Any,
) -> DynamicsProbe:  # fmt: skip
    """Random gradients orthogonal to each neuron and inverse to its norm (scale invariance), through a real optimizer.

    Args:
        radial: mu of a gradient mu w on top: what an l2 term of strength mu in the loss adds.
        drift: Correlation of a gradient with the one before it.
        uneven: Deviation of the logarithms of the coordinates' scales.
        bursts: Deviation of the logarithms of a neuron's gradient lengths from step to step.
        idle: Neurons that have no gradient.
        melt: What lr loses of itself, and the decay gains, a step: the product stays.
    """
    model = Weight(NEURONS, FAN_IN, size=START[rule] / FAN_IN**0.5, seed=seed, dtype=torch.float32)
    optimizer, generator = WALKS[rule]([model.weight]), seeded(100 + seed)
    scale = (uneven * torch.randn(FAN_IN, generator=generator)).exp()
    noise = torch.randn(NEURONS, FAN_IN, generator=generator)
    with DynamicsProbe(model, optimizer, **{"every": 10, "flush": 100, **options}) as probe:
        for _ in range(steps):
            noise = drift * noise + (1 - drift**2) ** 0.5 * torch.randn(NEURONS, FAN_IN, generator=generator)
            weight = model.weight.detach()
            norm_sq = (weight * weight).sum(1, keepdim=True)
            scaled = scale * noise
            across = scaled - (scaled * weight).sum(1, keepdim=True) / norm_sq * weight
            length = (bursts * torch.randn(NEURONS, 1, generator=generator)).exp() if bursts else torch.ones(NEURONS, 1)
            length[:idle] = 0
            model.weight.grad = 0.01 * length * across / norm_sq.sqrt() + radial * weight
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = group["lr"] * (1 - melt), group["weight_decay"] / (1 - melt)
    return probe


def close(one: Any, other: Any, **how: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64), **how)
