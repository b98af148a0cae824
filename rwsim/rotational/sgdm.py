"""RotationalSGDM: SGD with momentum at SGDM's equilibrium rotation."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rwsim.optimizers.nesterov import Nesterov
from rwsim.optimizers.sgdm import SGDM
from rwsim.rotational.optimizer import Number, RotationalOptimizer


class RotationalSGDM(RotationalOptimizer):
    """SGD with momentum (torch's, a sum), turning by eta_r = sqrt(2 eta lambda / (1 + alpha)) (paper, Table 1); Nesterov by its own.

    Args:
        params: Parameters or groups, as of any torch optimizer.
        lr: eta >= 0.
        momentum: alpha in [0, 1).
        weight_decay: lambda >= 0. Sets the rotation of what rotates; added to the gradient of what does not.
        nesterov: Look ahead by one step of momentum.
        **options: See `RotationalOptimizer`.

    Raises:
        InvalidArgument: A value out of range.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 8)
        >>> optimizer = RotationalSGDM(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        >>> round(optimizer.rotation(optimizer.param_groups[0]), 5)
        0.01026
    """

    rule = SGDM

    def __init__(
        self, params: Any, lr: Number = 1e-3, momentum: Number = 0.0, weight_decay: Number = 0.0, *, nesterov: bool = False, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}, options)

    def rule_of(self, group: Mapping[str, Any]) -> Any:
        return Nesterov if group["nesterov"] else SGDM

    def buffers(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        if not group["momentum"]:
            return grad.clone()
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        return grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer.clone()
