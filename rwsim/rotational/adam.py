"""RotationalAdam: Adam+l2's direction at a rotation that is given."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rwsim.optimizers.adam_l2 import AdamL2
from rwsim.rotational.adamw import adam_direction
from rwsim.rotational.optimizer import Number, RotationalOptimizer


class RotationalAdam(RotationalOptimizer):
    """Adam with l2 regularization in its gradient, turning by a given rotation: its own equilibrium's depends on the gradients.

    With ``rotation="adamw"`` it is the special variant of the paper's appendix J (Balancing Adam+l2): the direction of Adam+l2, decay in
    the gradient included, at AdamW's rate. With a number or a function ``weight_decay`` may be 0.

    Args:
        params: Parameters or groups, as of any torch optimizer.
        lr: eta >= 0. Of rotating parameters only a rate that names a rule takes notice of it.
        betas: beta_1 and beta_2 in [0, 1).
        eps: Of the second moment's root, >= 0.
        weight_decay: lambda >= 0, added to every gradient.
        **options: See `RotationalOptimizer`; ``rotation`` must be given.

    Raises:
        InvalidArgument: A value out of range; no ``rotation``.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 8)
        >>> special = RotationalAdam(layer.parameters(), lr=1e-3, weight_decay=0.1, rotation="adamw")
        >>> round(special.rotation(special.param_groups[0]), 6)
        0.003244
    """

    rule = AdamL2
    decay_in_direction = True

    def __init__(
        self, params: Any, lr: Number = 1e-3, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, weight_decay: Number = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        return adam_direction(grad, state, group, step)
