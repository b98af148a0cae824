"""Neurons that rotate slower or faster than the rest: the paper's experiment on imbalanced rotation (appendix J, Figure 11)."""

import torch

from rwsim.errors import InvalidArgument
from rwsim.rotational.optimizer import RotationalOptimizer, work_type
from rwsim.rotational.place import fitted
from rwsim.rotational.rotate import layout
from rwsim.rotational.wrapper import RotationalWrapper

KINDS = ("slower", "faster", "both")


def set_speeds(
    optimizer: RotationalOptimizer, share: float | int, factor: float | int, kind: str = "slower", generator: torch.Generator | None = None
) -> None:
    """Let a part of the vectors of each rotating tensor turn by another rate: eta_r / f, f eta_r, or half of them each.

    Args:
        optimizer: Whose vectors; the factors are part of its state.
        share: p in [0, 1], the share that keeps its rate.
        factor: f >= 1.
        kind: ``"slower"``, ``"faster"`` or ``"both"``: one half of the affected faster, the other slower.
        generator: Draws which (a CPU generator); None: torch's own. Of sharded parameters the draw of the mesh's first process counts.

    Raises:
        InvalidArgument: A value out of range; a `RotationalWrapper` that has not taken a step yet.

    Example:
        >>> layer = torch.nn.Linear(64, 8)
        >>> from rwsim.rotational.adamw import RotationalAdamW
        >>> optimizer = RotationalAdamW(layer.parameters())
        >>> set_speeds(optimizer, share=0.5, factor=10, kind="both", generator=torch.Generator().manual_seed(0))
        >>> optimizer.state[layer.weight]["speed"].flatten().sort().values
        tensor([ 0.1000,  0.1000,  1.0000,  1.0000,  1.0000,  1.0000, 10.0000, 10.0000])
    """
    if not 0 <= share <= 1:
        raise InvalidArgument("share", "must lie in [0, 1]", share, "for example 0.5")
    if not 1 <= factor < float("inf"):
        raise InvalidArgument("factor", "must lie in [1, inf)", factor, "for slower neurons use kind='slower'")
    if kind not in KINDS:
        raise InvalidArgument("kind", f"must be one of {', '.join(KINDS)}", kind)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.is_rotational(group, param):
                continue
            if isinstance(optimizer, RotationalWrapper) and "norm" not in optimizer.state.get(param, {}):
                raise InvalidArgument("optimizer", "must have taken a step", type(optimizer).__name__, "take one, then set the speeds")
            shape, along = layout(param.shape, group["per_neuron"], group["neuron_dims"], group["blocks"])
            kept = torch.Size([1 if d in along else size for d, size in enumerate(shape)])
            count = kept.numel()
            affected = round((1 - share) * count)
            slow = {"slower": affected, "faster": 0, "both": affected // 2}[kind]
            speeds = torch.ones(count, dtype=torch.float64)
            speeds[:slow], speeds[slow:affected] = 1 / factor, factor
            order = torch.randperm(count, generator=generator)
            speed = speeds[order].reshape(kept).to(param.device, work_type(param))
            optimizer.state[param]["speed"] = fitted(speed, param, shape, along)
