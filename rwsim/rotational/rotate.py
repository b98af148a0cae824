"""Algorithm 1 of the paper, on the vectors of one tensor: project an update, track its size, turn by eta_r, keep the norm.

A *vector* is what rotates as one: by default a neuron's incoming weights. A tensor holds one for each index of its index
dimensions; sums run over the others and keep them, so any strides will do. Where processes hold shards of a vector, `total` adds up
their sums; sums of one round travel together.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Machine epsilons, relative to a vector, that are rounding.
_ROUNDING = 8


def sqrt(x: Any) -> Any:
    """Of a number or a tensor."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def asin(x: Any) -> Any:
    """Of a number or a tensor."""
    return x.asin() if isinstance(x, Tensor) else math.asin(x)


def layout(shape: torch.Size, per_neuron: bool, neuron_dims: tuple[int, ...], blocks: int) -> tuple[torch.Size, tuple[int, ...]]:
    """The shape that a tensor is viewed in, and the dimensions of it that run along a vector.

    Args:
        shape: Of the parameter.
        per_neuron: One vector a neuron; else one a block.
        neuron_dims: Dimensions that index neurons.
        blocks: Into how many equal parts dimension 0 falls, each with vectors of its own.

    Example:
        >>> layout(torch.Size([8, 3, 5, 5]), True, (0,), 1)
        (torch.Size([8, 3, 5, 5]), (1, 2, 3))
        >>> layout(torch.Size([12, 4]), False, (0,), 3)
        (torch.Size([3, 4, 4]), (1, 2))
    """
    kept = {d % len(shape) for d in neuron_dims} if per_neuron else set()
    if blocks > 1:
        shape = torch.Size([blocks, shape[0] // blocks, *shape[1:]])
        kept = {0} | {d + 1 for d in kept}
    return shape, tuple(d for d in range(len(shape)) if d not in kept)


def norm_of(vectors: Tensor, dims: tuple[int, ...], total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    if total is not None:
        return total(_squares(vectors, dims)).sqrt_().to(vectors.dtype)
    return torch.linalg.vector_norm(vectors, dim=dims, keepdim=True)


def _squares(vectors: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Squared norms that add up over shards: norms do not. In float64 none overflows or vanishes that as a norm would not."""
    return norm_of(vectors, dims).double().square()


def _sums(vectors: Tensor, dims: tuple[int, ...]) -> Tensor:
    return vectors.sum(dims, keepdim=True).double()


def centre_(vectors: Tensor, dims: tuple[int, ...], total: Callable[[Tensor], Tensor] | None = None, count: int = 0) -> Tensor:
    """p <- n (p - mean p) / ||p - mean p||, n = ||p||, in place (Algorithm 1, line 4); returns n.

    A vector whose entries are all equal has nothing left without its mean: it stays as it is. For `total` and `count` see `project_`.
    """
    if total is None:
        norm, mean = norm_of(vectors, dims), vectors.mean(dims, keepdim=True)
    else:
        norm_sq, whole = total(torch.stack([_squares(vectors, dims), _sums(vectors, dims)]))
        norm, mean = norm_sq.sqrt().to(vectors.dtype), (whole / count).to(vectors.dtype)
    centred = vectors - mean
    left = norm_of(centred, dims, total)
    # Rounding leaves something of a constant vector.
    some = left > norm * (_ROUNDING * torch.finfo(vectors.dtype).eps)
    vectors.copy_(torch.where(some, centred.mul_(norm / left.where(some, 1.0)), vectors))
    return norm


def turn_(
    vectors: Tensor, update: Tensor, dims: tuple[int, ...], state: Mapping[str, Tensor], angle: Any, *, zero_mean: bool, decay: float,
    eps: float, fixed_angle: bool, norm: Any = None, floor: float = 0.0, grad: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None, count: Any = None,
) -> None:  # fmt: skip
    """Turn vectors against an update, in place (Algorithm 1, lines 13 to 17).

        u <- u - <u, p> / ||p||^2 p - mean u,    nu <- beta nu + (1 - beta) ||u||^2,
        p <- p - eta_r ||p|| u / (sqrt(nu / (1 - beta^t)) + eps),    p <- n p / ||p||

    The angle of a step is atan(eta_r ||u|| / sqrt(nu^)): while ||u|| is steady eta_r in the root mean square, a third of its cube aside.
    Over N steps in which nu grows by a factor q, the mean of (angle/eta_r)^2 is beta/(1 - beta) ln(q)/N larger.

    A vector whose projected update is zero, or what rounding leaves of an update along p and (1, ..., 1), or too large to be squared, stays
    as it is. nu and its count t take notice of steps with a gradient only, so that a row that has one rarely turns by eta_r then; in
    between old momentum may turn it on, by less and less.

    Args:
        vectors: p.
        update: What the inner optimizer would subtract, without its learning rate. Overwritten.
        dims: Dimensions along a vector.
        state: ``norm`` (n), ``update_norm_sq`` (nu) and ``hits`` (t), one a vector, changed in place; ``speed`` multiplies eta_r.
        angle: eta_r, radians.
        zero_mean: Whether the mean is projected out.
        decay: beta.
        eps: Added to the root.
        fixed_angle: Turn by exactly eta_r: p cos eta_r - n sin eta_r u / ||u||. nu is not used.
        norm: The new n; None keeps the old.
        floor: Size of the update's own rounding, in units of ||p||.
        grad: The gradients; None: every vector has one. Where one holds NaN the vector becomes NaN.
        total, count: See `project_`.
    """
    length, size, left, drive = project_(vectors, update, dims, zero_mean=zero_mean, floor=floor, grad=grad, total=total, count=count)
    scale, factor = settle(length, size, left, state, angle, decay=decay, eps=eps, fixed_angle=fixed_angle, norm=norm, drive=drive)
    vectors.mul_(scale)
    vectors.addcmul_(update, factor, value=-1)


def project_(
    vectors: Tensor, update: Tensor, dims: tuple[int, ...], *, zero_mean: bool, floor: float = 0.0, grad: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None, count: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """u <- u - <u, p> / ||p||^2 p - mean u, in place: what of `turn_` needs sums along vectors.

    Args:
        vectors, update, dims, zero_mean, floor, grad: As in `turn_`.
        total: Adds up sums of shards, in two rounds: takes a tensor of this process's and returns the sums of all, as it likes in the same
            memory. None: vectors are whole.
        count: Elements of a whole vector; needed with `total`, else None will do.

    Returns:
        One number a vector each: ||p||; ||u||; the ||u|| that rounding may have left; ||grad||, or None without.
    """
    kind = torch.finfo(vectors.dtype)
    drive = mean = own = None
    if count is None:
        count = math.prod([vectors.shape[d] for d in dims])
    if total is None:
        length = norm_of(vectors, dims)
        if grad is not None:
            drive = norm_of(grad, dims).to(vectors.dtype)
        dot = (update * vectors).sum(dims, keepdim=True)
        if zero_mean:
            mean, own = update.mean(dims, keepdim=True), vectors.mean(dims, keepdim=True)
    else:
        parts = [_squares(vectors, dims), _sums(update * vectors, dims)]
        parts += [_sums(update, dims) / count, _sums(vectors, dims) / count] if zero_mean else []
        parts += [_squares(grad, dims)] if grad is not None else []
        sums = total(torch.stack(parts))
        length, dot = sums[0].sqrt().to(vectors.dtype), sums[1].to(vectors.dtype)
        if grad is not None:
            drive = sums[-1].sqrt().to(vectors.dtype)
        if zero_mean:
            mean, own = sums[2:4].to(vectors.dtype)
    # A vector of zeros divides by this; nothing else is as small.
    inverse_sq = length.square().clamp_min_(kind.tiny).reciprocal_()
    # What rounding may leave of what is projected out.
    left = length * floor
    along = dot.mul_(inverse_sq)
    if mean is not None and own is not None:
        # Out of what is subtracted of p too: its mean, which is rounding, would else grow by the factor 1 + eta_r <u, p>/(||u|| ||p||) in
        # every step, and fill p within hundreds where decay in the direction is no smaller than the gradient.
        tilt = own * inverse_sq * count
        # What is left of p without its mean: nothing of a constant vector, which needs no more than the mean taken out.
        across = 1 - tilt * own
        along = along.addcmul_(tilt, mean, value=-1).div_(across).masked_fill_(across <= _ROUNDING * kind.eps, 0.0)
        left.add_(mean.abs().mul_(_ROUNDING * kind.eps * count**0.5))
        update.sub_(mean.addcmul_(along, own, value=-1))
    left.addcmul_(along.abs(), length, value=_ROUNDING * kind.eps)
    update.addcmul_(vectors, along, value=-1)
    return length, norm_of(update, dims, total), left, drive


def settle(
    length: Tensor, size: Tensor, left: Tensor, state: Mapping[str, Tensor], angle: Any, *, decay: float, eps: float, fixed_angle: bool,
    norm: Any = None, drive: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Track the size of updates and find the step of each vector: what of `turn_` is one number a vector, in tensors of any one shape.

    Args:
        length, size, left, drive: What `project_` returns; `size` is overwritten.
        state, angle, decay, eps, fixed_angle, norm: As in `turn_`.

    Returns:
        a and b of the step p <- a p - b u.
    """
    kind = torch.finfo(length.dtype)
    size_sq = size.square()
    hit = (size > left).logical_and_(size_sq < math.inf)
    counted = hit if drive is None else hit.logical_and(drive > 0)
    if not fixed_angle:
        state["hits"].add_(counted)
        hit = hit.logical_and(state["hits"] > 0)
    missed = hit.logical_not()
    size.masked_fill_(missed, 0.0)
    size_sq.masked_fill_(missed, 0.0)
    if "speed" in state:
        angle = angle * state["speed"]
    if fixed_angle:
        angle = torch.as_tensor(angle, dtype=length.dtype, device=length.device)
        kept, factor = torch.cos(angle), torch.sin(angle) * length / size
        after = length
    else:
        tracked, hits = state["update_norm_sq"], state["hits"]
        tracked.lerp_(size_sq, counted.to(size.dtype).mul_(1 - decay))
        root = (tracked / (1 - decay**hits)).sqrt_().add_(eps)
        kept, factor = None, length / root * angle
        # Orthogonal to p: Pythagoras gives the new length.
        after = torch.hypot(length, factor * size)
    target = state["norm"]
    if norm is None:
        scale = (target / after.clamp_min(kind.tiny)).masked_fill(missed, 1.0)
    else:
        scale = target.fill_(norm) / torch.where(missed, length, after).clamp_min_(kind.tiny)
    factor = factor.mul_(scale).masked_fill_(missed, 0.0)
    if drive is not None:
        # A sign hides it.
        factor.masked_fill_(drive.isnan(), math.nan)
    return scale if kept is None else torch.where(missed, scale, scale * kept), factor


def rounded_at_random(values: Tensor, first: int, step: Any) -> Tensor:
    """float32 values to bf16, up or down with a chance in proportion: right on average, where rounding to nearest loses small steps.

    The chance is a hash (murmur3's finalizer) of an element's place and the step: the same on every replica and every path.

    Args:
        values: Finite or not.
        first: Place of the first element.
        step: The step's number.

    Example:
        >>> x = torch.full((4096,), 1 + 2**-9)  # a quarter of the way from 1 to the next bf16
        >>> abs(float(rounded_at_random(x, 0, 1.0).double().mean()) - (1 + 2**-9)) < 2e-4
        True
    """
    places = torch.arange(first, first + values.numel(), device=values.device).view(values.shape)
    # In int64, 32 bits at a time; a product of two 32-bit numbers is right in its low 32 bits whatever overflows.
    seed = torch.as_tensor(step, device=values.device).to(torch.int64) * 2246822519
    x = (places * 2654435761 + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 2246822507) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 3266489909) & 0xFFFFFFFF
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    up = (bits + ((x ^ (x >> 16)) & 0xFFFF)) & 0xFFFF0000
    # inf and NaN have no neighbours to choose from.
    bits = torch.where((bits & 0x7F800000) != 0x7F800000, up, bits)
    return bits.to(torch.int32).view(torch.float32).to(torch.bfloat16)
