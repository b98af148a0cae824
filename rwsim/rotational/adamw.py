"""RotationalAdamW: AdamW at its equilibrium rotation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rwsim.optimizers.adamw import AdamW
from rwsim.rotational.optimizer import Number, RotationalOptimizer


def adam_direction(grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
    """m^ / (sqrt(v^) + eps), the bias-corrected averages of g and g^2."""
    beta1, beta2 = group["betas"]
    # Not lerp_, which is slow on a CPU.
    exp_avg = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
    denom = exp_avg_sq.sqrt().mul_(correction1 / correction2).add_(group["eps"] * correction1)
    return torch.div(exp_avg, denom, out=denom)


class RotationalAdamW(RotationalOptimizer):
    """AdamW's direction, turning by eta_r = sqrt(2 eta lambda (1 - beta_1)/(1 + beta_1)) (paper, Table 1).

    Args:
        params: Parameters or groups, as of any torch optimizer.
        lr: eta >= 0.
        betas: beta_1 and beta_2 in [0, 1).
        eps: Of the second moment's root, >= 0.
        weight_decay: lambda >= 0. Sets the rotation of what rotates; decays what does not.
        **options: See `RotationalOptimizer`.

    Raises:
        InvalidArgument: A value out of range.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 8)
        >>> norm = layer.weight.norm(dim=1)
        >>> optimizer = RotationalAdamW(layer.parameters(), lr=1e-3, weight_decay=0.1)
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> bool(torch.allclose(layer.weight.norm(dim=1), norm))
        True
    """

    rule = AdamW

    def __init__(
        self, params: Any, lr: Number = 1e-3, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, weight_decay: Number = 1e-2,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        return adam_direction(grad, state, group, step)
