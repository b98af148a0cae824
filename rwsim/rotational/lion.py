"""RotationalLion: Lion at its equilibrium rotation."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rwsim.optimizers.lion import Lion
from rwsim.rotational.optimizer import Number, RotationalOptimizer


class RotationalLion(RotationalOptimizer):
    """Lion's sign, turning by eta_r = sqrt(pi eta lambda) sqrt((1 - beta_1)^2 + beta_1^2 (1 - beta_2)/(1 + beta_2)) (paper, Table 1).

    Args:
        params: Parameters or groups, as of any torch optimizer.
        lr: eta >= 0.
        betas: beta_1 (of the sign's argument) and beta_2 (of the momentum) in [0, 1).
        weight_decay: lambda >= 0. Sets the rotation of what rotates; decays what does not.
        **options: See `RotationalOptimizer`.

    Raises:
        InvalidArgument: A value out of range.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 8)
        >>> optimizer = RotationalLion(layer.parameters(), lr=1e-4, weight_decay=1.0)
        >>> round(optimizer.rotation(optimizer.param_groups[0]), 6)
        0.002102
    """

    rule = Lion

    def __init__(
        self, params: Any, lr: Number = 1e-4, betas: tuple[Number, Number] = (0.9, 0.99), weight_decay: Number = 0.0, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, options)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        beta1, beta2 = group["betas"]
        momentum = state["exp_avg"]
        sign = momentum.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
        return sign
