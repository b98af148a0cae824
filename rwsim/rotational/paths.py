"""Faster ways to take a step, where a machine has them. An exported file has none of them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rwsim.errors import InvalidArgument


def check_paths(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raise InvalidArgument where a group asks for a path that cannot be taken; a wrapper's group has no say in it."""
    if "fused" not in optimizer.options:
        return
    if group["foreach"] and (group["fused"] or group["capturable"]):
        other = "fused" if group["fused"] else "capturable"
        raise InvalidArgument("foreach", f"cannot be True with {other}=True", True, "leave one of them out")
    if not group["fused"]:
        return
    from rwsim.rotational import fused

    for param in group["params"]:
        _insist(group, param, fused.lacks(optimizer, group, param))


def _insist(group: Mapping[str, Any], param: Tensor, missing: str) -> None:
    from rwsim.rotational import fused

    # Of an empty parameter nothing is to be done.
    if missing and group["fused"] and fused.here(param):
        raise InvalidArgument("fused", f"cannot be True: the kernels do not carry {missing}", True, "leave it out")


def step_fast(optimizer: Any, place: int, group: Mapping[str, Any], params: Sequence[Tensor], angle: Any) -> Sequence[Tensor]:
    """Step what the fused kernels take of a group's parameters.

    Args:
        optimizer: A `RotationalOptimizer`.
        place: Of the group among its groups.
        group: Its hyperparameters and options.
        params: Those with a gradient.
        angle: eta_r.

    Returns:
        The parameters that are left.

    Raises:
        InvalidArgument: ``fused=True`` for what the kernels do not carry.
    """
    left = _step_fused(optimizer, place, group, params, angle) if params and _prefers(group, params) else params
    # A graph's step count lies on the device, where lots cannot be told by it.
    if left and not group["capturable"] and (group["foreach"] or (group["foreach"] is None and left[0].is_cuda)):
        from rwsim.rotational.foreach import step_many

        left = step_many(optimizer, group, left, angle)
    return left


def _step_fused(optimizer: Any, place: int, group: Mapping[str, Any], params: Sequence[Tensor], angle: Any) -> Sequence[Tensor]:
    from rwsim.rotational import fused

    grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    made = fused.planned(optimizer, place, group, params)
    if made is None:
        taken: list[Tensor] = []
        left: list[Tensor] = []
        for param in params:
            missing = fused.lacks(optimizer, group, param)
            _insist(group, param, missing)
            if taken and not missing and param.device != taken[0].device:
                missing = "another device than the group's first"
            (left if missing else taken).append(param)
        if not taken or (found_inf is not None and bool(found_inf)):
            return left
        made = fused.plan(optimizer, place, group, taken, left)
    fused.launch(made, group, angle, grad_scale, found_inf)
    return made.left


def takes_scale(optimizer: Any) -> bool:
    """Whether every parameter with a gradient goes through the kernels, which then unscale it and skip a step that overflowed."""
    for place, group in enumerate(optimizer.param_groups):
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            continue
        if not _prefers(group, params):
            return False
        from rwsim.rotational import fused

        if not fused.whole(optimizer, place, group, params):
            return False
    return True


def state_changes(optimizer: Any) -> None:
    """To be called before an optimizer's state is replaced: two of it may not fit into memory."""
    fused = sys.modules.get("rwsim.rotational.fused")
    if fused is not None:
        fused.drop(optimizer)


def _prefers(group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether to try the kernels: where they were asked for, or unasked on CUDA."""
    return bool(group["fused"] or (group["fused"] is None and params[0].is_cuda))
