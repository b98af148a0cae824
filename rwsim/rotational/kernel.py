"""The Triton kernels of a fused step. Tensors come as a table of addresses, so that one launch serves any number of them.

A row of `table` describes a parameter by `FIELDS` numbers, in the order of `FIELD`; a row of `programs` tells a program its
parameter and its first vector (or element). Formulas are those of `rotate` and of the classes' directions.
"""

import triton
import triton.language as tl

FIELD = ("param", "grad", "first", "second", "residual", "norm", "update_norm_sq", "hits", "step", "speed", "rows", "length")
FIELDS = tl.constexpr(len(FIELD))
# Sums of a long vector's part: of u, p, u p, p^2, u^2 and |g|.
SUMS = tl.constexpr(6)
_TINY = tl.constexpr(1.1754943508222875e-38)
# What is rounding, relative to a float32 vector, as in `rotate`.
_ROUNDING = tl.constexpr(8 * 1.1920928955078125e-07)


@triton.jit
def _rest(log_beta, count):
    """1 - beta^count, from log beta: exact where beta^count is near 1."""
    return (1.0 - tl.exp(count.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _unless(found_inf, count):
    """Nothing of a step whose gradients overflowed."""
    return tl.where(tl.load(found_inf) == 0, count, 0)


@triton.jit
def _direction(g, first, second, beta1, beta2, rest1, rest2, correction1, correction2, eps, KIND: tl.constexpr):
    """What the inner optimizer would subtract, and its buffers afterwards."""
    if KIND == "adam":
        first = first * beta1 + g * rest1
        second = second * beta2 + g * g * rest2
        u = first / (tl.sqrt_rn(second) * (correction1 / correction2) + eps * correction1)
    elif KIND == "lion":
        mixed = first * beta1 + g * rest1
        u = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed))
        first = first * beta2 + g * rest2
    elif KIND == "momentum":
        first = first * beta1 + g
        u = first
    elif KIND == "nesterov":
        first = first * beta1 + g
        u = g + first * beta1
    else:
        u = g
    return u, first, second


@triton.jit
def _address(table, field: tl.constexpr, dtype: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(table + field).to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def _loaded(
    table, at, mask, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
    KIND: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Weights, gradient, direction and buffers of some elements."""
    p = tl.load(_address(table, 0, DTYPE, ALIGN) + at, mask, 0.0).to(tl.float32)
    g = tl.load(_address(table, 1, GRAD, ALIGN) + at, mask, 0.0).to(tl.float32) * inverse_scale
    first, second = g, g
    if KIND != "plain":
        first = tl.load(_address(table, 2, tl.float32, ALIGN) + at, mask, 0.0)
    correction1, correction2 = 1.0, 1.0
    if KIND == "adam":
        second = tl.load(_address(table, 3, tl.float32, ALIGN) + at, mask, 0.0)
        step = tl.load(tl.load(table + 8).to(tl.pointer_type(tl.float32)))
        correction1, correction2 = _rest(log1, step), tl.sqrt(_rest(log2, step))
    if RESIDUAL:
        p += tl.load(_address(table, 4, DTYPE, ALIGN) + at, mask, 0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    seen = g
    if COUPLED:
        g += decay * p
    u, first, second = _direction(g, first, second, beta1, beta2, rest1, rest2, correction1, correction2, eps, KIND)
    return p, seen, u, first, second


@triton.jit
def _noise(at, seed):
    """16 bits for each element: a hash of its place and of the step (murmur3's finalizer)."""
    x = at.to(tl.uint32) * 2654435761 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 2246822507
    x = (x ^ (x >> 13)) * 3266489909
    return (x ^ (x >> 16)) & 0xFFFF


@triton.jit
def _store(
    table, at, mask, p, first, second, KIND: tl.constexpr, DTYPE: tl.constexpr, RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    rounded = p
    if DTYPE == tl.bfloat16:
        # By hand: the interpreter would cut off. To nearest, ties to even; or up by a chance in proportion.
        bits = p.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            seed = (tl.load(tl.load(table + 8).to(tl.pointer_type(tl.float32))).to(tl.int64) * 2246822519) & 0xFFFFFFFF
            up = bits + _noise(at, seed)
        else:
            up = bits + 0x7FFF + ((bits >> 16) & 1)
        # inf and NaN have no neighbours to choose from.
        rounded = tl.where((bits & 0x7F800000) != 0x7F800000, up & 0xFFFF0000, bits).to(tl.float32, bitcast=True)
    rounded = rounded.to(DTYPE)
    tl.store(_address(table, 0, DTYPE, ALIGN) + at, rounded, mask)
    if RESIDUAL:
        tl.store(_address(table, 4, DTYPE, ALIGN) + at, (p - rounded.to(tl.float32)).to(DTYPE), mask)
    if KIND != "plain":
        tl.store(_address(table, 2, tl.float32, ALIGN) + at, first, mask)
    if KIND == "adam":
        tl.store(_address(table, 3, tl.float32, ALIGN) + at, second, mask)


@triton.jit
def _projected(dot, length_sq, mean, own, n, ZERO_MEAN: tl.constexpr):
    """(shift, along): u - shift - along p is orthogonal to p, and to (1, ..., 1). `own` is the mean of p, `dot` <u, p>."""
    inverse_sq = 1.0 / tl.maximum(length_sq, _TINY)
    along = dot * inverse_sq
    shift = mean
    if ZERO_MEAN:
        tilt = own * inverse_sq * n
        across = 1.0 - tilt * own
        along = tl.where(across > _ROUNDING, (along - tilt * mean) / across, 0.0)
        shift = mean - along * own
    return shift, along


@triton.jit
def _scales(
    table, row, live, length_sq, mean, along, size_sq, drive, count, angle, tracking, log_tracking, added,
    ZERO_MEAN: tl.constexpr, SPEED: tl.constexpr,
):  # fmt: skip
    """By what weights and projected update are multiplied, one a vector; notes the vector's state (`rotate.turn_`)."""
    length, size = tl.sqrt_rn(length_sq), tl.sqrt_rn(size_sq)
    left = tl.abs(along) * length * _ROUNDING
    if ZERO_MEAN:
        left += tl.abs(mean) * _ROUNDING * tl.sqrt_rn(count.to(tl.float32))
    hit = (size > left) & (size_sq < float("inf"))
    counted = hit & (drive > 0)
    hits_at = tl.load(table + 7).to(tl.pointer_type(tl.float32)) + row
    tracked_at = tl.load(table + 6).to(tl.pointer_type(tl.float32)) + row
    hits = tl.load(hits_at, live, 0.0) + tl.where(counted, 1.0, 0.0)
    hit = hit & (hits > 0)
    size, size_sq = tl.where(hit, size, 0.0), tl.where(hit, size_sq, 0.0)
    if SPEED:
        angle = angle * tl.load(tl.load(table + 9).to(tl.pointer_type(tl.float32)) + row, live, 1.0)
    tracked = tl.load(tracked_at, live, 0.0)
    tracked = tl.where(counted, tracked + tracking * (size_sq - tracked), tracked)
    rest = tl.where(hit, _rest(log_tracking, hits), 1.0)
    root = tl.where(hit, tl.sqrt_rn(tracked / rest) + added, 1.0)
    factor = length / root * angle
    turned = factor * size
    after = tl.sqrt_rn(length * length + turned * turned)
    norm = tl.load(tl.load(table + 5).to(tl.pointer_type(tl.float32)) + row, live, 0.0)
    scale = tl.where(hit, norm / tl.maximum(after, _TINY), 1.0)
    factor = tl.where(hit, factor * scale, 0.0)
    # A sign hides a NaN.
    factor = tl.where(drive == drive, factor, float("nan"))
    tl.store(hits_at, hits, live)
    tl.store(tracked_at, tracked, live)
    return scale, factor


@triton.jit
def _sums(g, p, u, ZERO_MEAN: tl.constexpr):
    """Of each row: 1 where a gradient is not zero, 2 where one is NaN; sums of p^2, u p, and u and p where means are needed."""
    # Whole numbers: a warp finds their maximum in one instruction.
    seen = tl.max(tl.where(g != g, 2, tl.where(g != 0, 1, 0)), 1)
    length_sq, dot = tl.sum(p * p, 1), tl.sum(u * p, 1)
    mean, own = tl.zeros_like(dot), tl.zeros_like(dot)
    if ZERO_MEAN:
        mean, own = tl.sum(u, 1), tl.sum(p, 1)
    return seen, length_sq, dot, mean, own


@triton.jit
def turn_rows(
    table, programs, beta1, beta2, rest1, rest2, log1, log2, eps, decay, angle, tracking, log_tracking, added, hyper, grad_scale, found_inf,
    KIND: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, ZERO_MEAN: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
    RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr, SPEED: tl.constexpr, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Vectors that fit: each is read once, in a block and, where TAIL is not 0, a second one: of 768 and 3072 none is half empty."""
    program = tl.program_id(0)
    table += tl.load(programs + 2 * program) * FIELDS
    row = tl.load(programs + 2 * program + 1) + tl.arange(0, ROWS)
    count = tl.multiple_of(tl.load(table + 11), ALIGN)
    rows = tl.load(table + 10)
    inverse_scale = 1.0
    if SCALED:
        rows = _unless(found_inf, rows)
        inverse_scale = 1.0 / tl.load(grad_scale)
    live = row < rows
    if ON_DEVICE:
        angle, decay = tl.load(hyper + 1), tl.load(hyper + 2)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * count + column[None, :]
    mask = live[:, None] & (column < count)[None, :]
    p, g, u, first, second = _loaded(
        table, at, mask, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
        KIND, DTYPE, GRAD, COUPLED, MAXIMIZE, RESIDUAL, ALIGN,
    )  # fmt: skip
    u = tl.where(mask, u, 0.0)
    seen, length_sq, dot, mean, own = _sums(g, p, u, ZERO_MEAN)
    if TAIL:
        column2 = BLOCK + tl.arange(0, TAIL)
        at2 = row.to(tl.int64)[:, None] * count + column2[None, :]
        mask2 = live[:, None] & (column2 < count)[None, :]
        p2, g2, u2, first2, second2 = _loaded(
            table, at2, mask2, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
            KIND, DTYPE, GRAD, COUPLED, MAXIMIZE, RESIDUAL, ALIGN,
        )  # fmt: skip
        u2 = tl.where(mask2, u2, 0.0)
        seen2, length_sq2, dot2, mean2, own2 = _sums(g2, p2, u2, ZERO_MEAN)
        seen = tl.maximum(seen, seen2)
        length_sq, dot, mean, own = length_sq + length_sq2, dot + dot2, mean + mean2, own + own2
    n = count.to(tl.float32)
    mean, own = mean / n, own / n
    shift, along = _projected(dot, length_sq, mean, own, n, ZERO_MEAN)
    u = tl.where(mask, u - shift[:, None], 0.0) - along[:, None] * p
    size_sq = tl.sum(u * u, 1)
    if TAIL:
        u2 = tl.where(mask2, u2 - shift[:, None], 0.0) - along[:, None] * p2
        size_sq += tl.sum(u2 * u2, 1)
    drive = tl.where(seen == 2, float("nan"), seen.to(tl.float32))
    scale, factor = _scales(
        table, row, live, length_sq, mean, along, size_sq, drive, count, angle, tracking, log_tracking, added, ZERO_MEAN, SPEED
    )
    p = p * scale[:, None] - u * factor[:, None]
    _store(table, at, mask, p, first, second, KIND, DTYPE, RESIDUAL, STOCHASTIC, ALIGN)
    if TAIL:
        p2 = p2 * scale[:, None] - u2 * factor[:, None]
        _store(table, at2, mask2, p2, first2, second2, KIND, DTYPE, RESIDUAL, STOCHASTIC, ALIGN)


@triton.jit
def sum_parts(
    table, programs, sums, beta1, beta2, rest1, rest2, log1, log2, eps, decay, hyper, grad_scale, found_inf,
    KIND: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, RESIDUAL: tl.constexpr,
    ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First pass over long vectors: sums of each part, in float64, so that what is projected out may be large."""
    program = tl.program_id(0)
    table += tl.load(programs + 4 * program) * FIELDS
    row, start = tl.load(programs + 4 * program + 1), tl.load(programs + 4 * program + 2)
    count = tl.load(table + 11)
    inverse_scale = 1.0
    if SCALED:
        inverse_scale = 1.0 / tl.load(grad_scale)
    if ON_DEVICE:
        decay = tl.load(hyper + 2)
    column = start + tl.arange(0, BLOCK)
    mask = column < count
    p, g, u, _, _ = _loaded(
        table, row * count + column, mask, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
        KIND, DTYPE, GRAD, COUPLED, MAXIMIZE, RESIDUAL, 1,
    )  # fmt: skip
    u = tl.where(mask, u, 0.0).to(tl.float64)
    p = p.to(tl.float64)
    sums += program * SUMS
    tl.store(sums, tl.sum(u, 0))
    tl.store(sums + 1, tl.sum(p, 0))
    tl.store(sums + 2, tl.sum(u * p, 0))
    tl.store(sums + 3, tl.sum(p * p, 0))
    tl.store(sums + 4, tl.sum(u * u, 0))
    tl.store(sums + 5, tl.sum(tl.abs(g).to(tl.float64), 0))


@triton.jit
def settle_rows(
    table, vectors, sums, scales, angle, tracking, log_tracking, added, hyper, found_inf,
    ZERO_MEAN: tl.constexpr, SPEED: tl.constexpr, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Between the passes: a long vector's sums to its scales (shift, part along, scale, factor)."""
    program = tl.program_id(0)
    table += tl.load(vectors + 4 * program) * FIELDS
    row = tl.load(vectors + 4 * program + 1) + tl.arange(0, 1)
    begin, end = tl.load(vectors + 4 * program + 2), tl.load(vectors + 4 * program + 3)
    count = tl.load(table + 11)
    rows = tl.load(table + 10)
    if SCALED:
        rows = _unless(found_inf, rows)
    live = row < rows
    if ON_DEVICE:
        angle = tl.load(hyper + 1)
    part = tl.arange(0, BLOCK)
    s0, s1, s2 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    s3, s4, s5 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        at, mask = sums + (first + part) * SUMS, first + part < end
        s0 += tl.load(at, mask, 0.0)
        s1 += tl.load(at + 1, mask, 0.0)
        s2 += tl.load(at + 2, mask, 0.0)
        s3 += tl.load(at + 3, mask, 0.0)
        s4 += tl.load(at + 4, mask, 0.0)
        s5 += tl.load(at + 5, mask, 0.0)
    n = count.to(tl.float64)
    length_sq = tl.sum(s3, 0)
    total, sum_p, dot = tl.sum(s0, 0), tl.sum(s1, 0), tl.sum(s2, 0)
    mean, own = length_sq * 0.0, length_sq * 0.0
    if ZERO_MEAN:
        mean, own = total / n, sum_p / n
    shift, along = _projected(dot, length_sq, mean, own, n, ZERO_MEAN)
    size_sq = tl.sum(s4, 0) + shift * shift * n + along * along * length_sq
    size_sq = tl.maximum(size_sq - 2.0 * (shift * total + along * dot - shift * along * sum_p), 0.0)
    one = tl.full([1], 1.0, tl.float32)
    scale, factor = _scales(
        table, row, live, length_sq.to(tl.float32) * one, mean.to(tl.float32) * one, along.to(tl.float32) * one,
        size_sq.to(tl.float32) * one, tl.sum(s5, 0).to(tl.float32) * one, count, angle, tracking, log_tracking, added, ZERO_MEAN, SPEED,
    )  # fmt: skip
    scales += 4 * program + tl.arange(0, 1)
    tl.store(scales, shift.to(tl.float32) * one)
    tl.store(scales + 1, along.to(tl.float32) * one)
    tl.store(scales + 2, scale)
    tl.store(scales + 3, factor)


@triton.jit
def turn_parts(
    table, programs, scales, beta1, beta2, rest1, rest2, log1, log2, eps, decay, hyper, grad_scale, found_inf,
    KIND: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, RESIDUAL: tl.constexpr,
    STOCHASTIC: tl.constexpr, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Second pass over long vectors: turn, and store."""
    program = tl.program_id(0)
    table += tl.load(programs + 4 * program) * FIELDS
    row, start = tl.load(programs + 4 * program + 1), tl.load(programs + 4 * program + 2)
    scales += 4 * tl.load(programs + 4 * program + 3)
    count = tl.load(table + 11)
    inverse_scale = 1.0
    column = start + tl.arange(0, BLOCK)
    end = count
    if SCALED:
        end = _unless(found_inf, end)
        inverse_scale = 1.0 / tl.load(grad_scale)
    mask = column < end
    if ON_DEVICE:
        decay = tl.load(hyper + 2)
    at = row * count + column
    p, _, u, first, second = _loaded(
        table, at, mask, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
        KIND, DTYPE, GRAD, COUPLED, MAXIMIZE, RESIDUAL, 1,
    )  # fmt: skip
    shift, along, scale, factor = tl.load(scales), tl.load(scales + 1), tl.load(scales + 2), tl.load(scales + 3)
    p = p * scale - (u - shift - along * p) * factor
    _store(table, at, mask, p, first, second, KIND, DTYPE, RESIDUAL, STOCHASTIC, 1)


@triton.jit
def step_elements(
    table, programs, beta1, beta2, rest1, rest2, log1, log2, eps, decay, lr, hyper, grad_scale, found_inf,
    KIND: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, RESIDUAL: tl.constexpr,
    STOCHASTIC: tl.constexpr, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The inner optimizer's own step, of parameters that do not rotate: `rows` elements of length 1."""
    program = tl.program_id(0)
    table += tl.load(programs + 2 * program) * FIELDS
    at = tl.load(programs + 2 * program + 1).to(tl.int64) + tl.arange(0, BLOCK)
    end = tl.load(table + 10)
    inverse_scale = 1.0
    if SCALED:
        end = _unless(found_inf, end)
        inverse_scale = 1.0 / tl.load(grad_scale)
    mask = at < end
    if ON_DEVICE:
        lr, decay = tl.load(hyper), tl.load(hyper + 2)
    p, _, u, first, second = _loaded(
        table, at, mask, beta1, beta2, rest1, rest2, log1, log2, eps, decay, inverse_scale,
        KIND, DTYPE, GRAD, COUPLED, MAXIMIZE, RESIDUAL, 1,
    )  # fmt: skip
    if not COUPLED:
        p = p * (1 - lr * decay)
    p -= lr * u
    _store(table, at, mask, p, first, second, KIND, DTYPE, RESIDUAL, STOCHASTIC, 1)
