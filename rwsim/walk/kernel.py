"""The Triton kernel of the fused engine: N neurons a program, their weights and buffers in registers for a whole chunk of steps.

A neuron lies in L lanes, E elements in each: coordinate c = e L + l is element e of lane l, so that a sum over a neuron is
E - 1 additions in a lane and log2 L exchanges between lanes. Arrays have axes (E / 4, N L) and come in fours, because Philox
gives four numbers a call: quarter j holds the elements e = j E / 4 ... Triton's default layout then puts an array's first
axis into a thread's registers. What belongs to a neuron has axis (N L,), equal in its lanes. Only tl.* is used except for the
hardware's logarithm, sine and cosine, so the kernel also runs in Triton's interpreter. Importing this module imports Triton.
"""

import os

import triton
import triton.language as tl

# Streams of random numbers under one key.
ELEMENTS = tl.constexpr(0)
LENGTHS = tl.constexpr(1)
START = tl.constexpr(2)
INPUTS = tl.constexpr(3)
OUTPUTS = tl.constexpr(4)
# What is kept of a window: see `measure.Walk`.
SERIES = tl.constexpr(7)
# Neither inline assembly nor libdevice exists in the interpreter.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_SIZES = ["rows", "first_row", "per_config", "per_layer", "configs", "C", "first_step", "steps", "window", "plane"]


@triton.jit
def philox(key0, key1, c0, c1, c2, c3):
    """Philox4x32-7 (Salmon et al. 2011, where 7 rounds are the fewest that pass every test of BigCrush): four uint32."""
    for _ in tl.static_range(7):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ (c1 ^ key0)
        c2 = (p0 >> 32).to(tl.uint32) ^ (c3 ^ key1)
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        key0 = key0 + tl.full((), 0x9E3779B9, tl.uint32)
        key1 = key1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def hardware(x, NAME: tl.constexpr):
    """One special function of the hardware, absolute error about 5e-7; tl.log2, tl.sin and tl.cos cost ten times as much."""
    return tl.inline_asm_elementwise(NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def uniform(bits):
    """In (0, 1], from 32 bits."""
    return bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def normals(bits0, bits1):
    """Two standard normals (Box and Muller 1958), up to 6.7 standard deviations."""
    u = uniform(bits0)
    angle = bits1.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # in [-pi, pi)
    # sqrt(-2 ln u), -2 ln 2 in front of the binary logarithm, which is what the hardware has.
    if INTERPRETED:
        radius = tl.sqrt(-1.3862943611198906 * tl.log2(u))
        return radius * tl.cos(angle), radius * tl.sin(angle)
    radius = tl.sqrt(-1.3862943611198906 * hardware(u, "lg2"))
    return radius * hardware(angle, "cos"), radius * hardware(angle, "sin")


@triton.jit
def four_normals(key0, key1, c0, c1, c2, stream: tl.constexpr):
    b0, b1, b2, b3 = philox(key0, key1, c0, c1, c2, tl.full((), stream, tl.uint32))
    z0, z1 = normals(b0, b1)
    z2, z3 = normals(b2, b3)
    return z0, z1, z2, z3


@triton.jit
def arcsine(x):
    """asin on [0, 1], relative error below 3e-7: a polynomial to 1/2, the half-angle identity above."""
    far = x > 0.5
    z = tl.where(far, 0.5 - 0.5 * x, x * x)
    root = tl.where(far, tl.sqrt(z), x)
    p = ((((4.2163199048e-2 * z + 2.4181311049e-2) * z + 4.5470025998e-2) * z + 7.4953002686e-2) * z + 1.6666752422e-1) * z
    value = root + root * p
    return tl.where(far, 1.5707963267948966 - 2.0 * value, value)


@triton.jit
def over_neuron(x, N: tl.constexpr, L: tl.constexpr):
    """Sum over a neuron's coordinates, the same in all its lanes: (E / 4, N L) -> (N L,)."""
    lanes = tl.reshape(tl.sum(x, axis=0), (N, L))
    return tl.reshape(tl.broadcast_to(tl.sum(lanes, axis=1)[:, None], (N, L)), (N * L,))


@triton.jit
def square_over_neuron(x, N: tl.constexpr, L: tl.constexpr):
    return over_neuron(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3], N, L)


@triton.jit
def dot_over_neuron(x, y, N: tl.constexpr, L: tl.constexpr):
    return over_neuron(x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3], N, L)


@triton.jit
def times(x, y):
    return x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]


@triton.jit
def scale(x, factor):
    """Four quarters times a number of each neuron."""
    f = factor[None, :]
    return x[0] * f, x[1] * f, x[2] * f, x[3] * f


@triton.jit
def add(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


@triton.jit
def subtract(x, y):
    return x[0] - y[0], x[1] - y[1], x[2] - y[2], x[3] - y[3]


@triton.jit
def load(pointer, column, base, C, E: tl.constexpr, L: tl.constexpr):
    """Four quarters of rows that begin at `base`; 0 beyond the fan-in."""
    quarter: tl.constexpr = E // 4 * L
    x0 = tl.load(pointer + base[None, :] + column, mask=(column < C), other=0.0)
    x1 = tl.load(pointer + base[None, :] + (column + quarter), mask=(column + quarter < C), other=0.0)
    x2 = tl.load(pointer + base[None, :] + (column + 2 * quarter), mask=(column + 2 * quarter < C), other=0.0)
    x3 = tl.load(pointer + base[None, :] + (column + 3 * quarter), mask=(column + 3 * quarter < C), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def store(pointer, x, column, base, inside, C, E: tl.constexpr, L: tl.constexpr):
    quarter: tl.constexpr = E // 4 * L
    for j in tl.static_range(4):
        tl.store(pointer + base[None, :] + (column + j * quarter), x[j], mask=inside[None, :] & (column + j * quarter < C))


@triton.jit
def cut(x, column, C, E: tl.constexpr, L: tl.constexpr):
    """Zero beyond the fan-in."""
    quarter: tl.constexpr = E // 4 * L
    x0, x1 = tl.where(column < C, x[0], 0.0), tl.where(column + quarter < C, x[1], 0.0)
    return x0, x1, tl.where(column + 2 * quarter < C, x[2], 0.0), tl.where(column + 3 * quarter < C, x[3], 0.0)


@triton.jit(do_not_specialize=["rows", "first_row", "per_config", "C"])
def start_kernel(param, keys, rows, first_row, per_config, C, bound, E: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """Weights uniform in [-bound, bound]: torch's default for a linear layer."""
    slot = tl.arange(0, N * L)
    row = tl.program_id(0) * N + slot // L
    inside = row < rows
    row = tl.minimum(row, rows - 1)
    config = (row + first_row) // per_config
    neuron = ((row + first_row) % per_config).to(tl.uint32)
    key0 = tl.load(keys + 2 * config).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 2 * config + 1).to(tl.uint32, bitcast=True)
    group = (tl.arange(0, E // 4)[:, None] * L + (slot % L)[None, :]).to(tl.uint32)
    b0, b1, b2, b3 = philox(
        key0[None, :], key1[None, :], group, neuron[None, :], tl.full((), 0, tl.uint32), tl.full((), START, tl.uint32)
    )  # fmt: skip
    x = (uniform(b0) * 2 - 1) * bound, (uniform(b1) * 2 - 1) * bound, (uniform(b2) * 2 - 1) * bound, (uniform(b3) * 2 - 1) * bound
    column = tl.arange(0, E // 4)[:, None] * L + (slot % L)[None, :]
    store(param, x, column, row.to(tl.int64) * C, inside, C, E, L)


# An unknown C also keeps loads narrow: they happen once a launch, and a lane's elements must stay in its registers.
@triton.jit(do_not_specialize=_SIZES)
def walk_kernel(
    param, buffers, gamma_in, gamma_out, polynomial, keys, fixed, varying, out, stub, stub_length,
    rows, first_row, per_config, per_layer, configs, C, first_step, steps, window, radial, plane,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, DEGREE: tl.constexpr,
    MARGINAL: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, RADIAL: tl.constexpr, STUBBED: tl.constexpr,
    LOAD: tl.constexpr, READ: tl.constexpr, STORE: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Walk `steps` steps from `first_step` (0 at the first) and write the means of every window.

    Args:
        param: (rows, C). `buffers`: (buffer, rows, C). Both are read and written back.
        gamma_in: (C,). `gamma_out`: (per_layer,), times the deviation of the output gradients.
        polynomial: (DEGREE + 1,), see `system.length_polynomial`.
        keys: (configs, 2), int32 halves of the configs' keys.
        fixed: (F, configs) coefficients. `varying`: (V, steps, configs), `plane` its first stride.
        out: (windows, 7, rows).
        stub: (steps, rows, C) normals and `stub_length` (steps, rows) in place of random numbers, if STUBBED.
        rows: Neurons in this launch, the first of which is number `first_row` of all; `per_config` make up a config.
        RAGGED: Whether C < E L. LOAD, READ, STORE, UPDATE: The program of the rule: load coefficients and buffers, store them, one step.
    """
    slot = tl.arange(0, N * L)
    row = tl.program_id(0) * N + slot // L
    inside = row < rows
    row = tl.minimum(row, rows - 1)  # rows to spare repeat the last one and store nothing
    number = row + first_row
    config = number // per_config
    neuron = (number % per_config).to(tl.uint32)
    key0 = tl.load(keys + 2 * config).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 2 * config + 1).to(tl.uint32, bitcast=True)
    column = tl.arange(0, E // 4)[:, None] * L + (slot % L)[None, :]
    group = column.to(tl.uint32)
    base = row.to(tl.int64) * C
    w = load(param, column, base, C, E, L)
    # base % C is 0: a plain 0 would tell the compiler that addresses are aligned, and it would lay out for wide loads.
    gamma = load(gamma_in, column, base % C, C, E, L)
    size = tl.load(gamma_out + number % per_layer)
    state = READ(buffers, column, base, rows.to(tl.int64) * C, C, E, L)
    coefficients = LOAD(fixed + config, configs)
    norm_sq = square_over_neuron(w, N, L)
    if EVEN:
        scaled_sq = norm_sq
    else:
        scaled_sq = square_over_neuron(times(gamma, w), N, L)
    norm = tl.sqrt(norm_sq)
    l0 = tl.zeros((N * L,), tl.float32)
    l1, l2, l3 = l0, l0, l0
    window_index = tl.full((), 0, tl.int32)
    done = tl.full((), 0, tl.int32)
    while done < steps:
        count = tl.minimum(window, steps - done)
        s_norm = tl.zeros_like(norm)
        s_angle, s_angle_sq, s_update, s_relative, s_distance, s_grad = s_norm, s_norm, s_norm, s_norm, s_norm, s_norm
        for i in range(count):
            local = done + i
            step = first_step + local
            if STUBBED:
                z = load(stub + local.to(tl.int64) * rows * C, column, base, C, E, L)
            else:
                z = four_normals(key0[None, :], key1[None, :], group, neuron[None, :], step.to(tl.uint32), ELEMENTS)
            if MARGINAL:
                if STUBBED:
                    length = tl.load(stub_length + local.to(tl.int64) * rows + row)
                else:
                    # Four lengths a call: it serves steps 4k ... 4k + 3, wherever a chunk begins.
                    which = step % 4
                    if (which == 0) | (local == 0):
                        l0, l1, l2, l3 = four_normals(key0, key1, neuron, (step // 4).to(tl.uint32), tl.full((), 0, tl.uint32), LENGTHS)
                    x = tl.where(which < 2, tl.where(which == 0, l0, l1), tl.where(which == 2, l2, l3))
                    power = tl.load(polynomial + DEGREE) + tl.zeros_like(x)
                    for d in tl.static_range(DEGREE):
                        power = power * x + tl.load(polynomial + (DEGREE - 1 - d))
                    length = tl.exp(power)
                if EVEN:
                    scaled = w
                else:
                    scaled = times(gamma, w)
                along = dot_over_neuron(scaled, z, N, L) / scaled_sq
                factor = size * length / tl.sqrt(scaled_sq)
                # length gamma (z - along scaled)
                grad = subtract(scale(z, factor), scale(scaled, factor * along))
                if not EVEN:
                    grad = times(gamma, grad)
            else:
                grad = z
            if RAGGED and (EVEN or not MARGINAL):  # where there is a gamma it is 0 there
                grad = cut(grad, column, C, E, L)
            if RADIAL:
                grad = add(grad, scale(w, radial + tl.zeros_like(norm)))
            at = varying + (local * configs + config)
            new0, state0, part0 = UPDATE(grad[0], w[0], state[0], coefficients, at, plane)
            new1, state1, part1 = UPDATE(grad[1], w[1], state[1], coefficients, at, plane)
            new2, state2, part2 = UPDATE(grad[2], w[2], state[2], coefficients, at, plane)
            new3, state3, part3 = UPDATE(grad[3], w[3], state[3], coefficients, at, plane)
            new = (new0, new1, new2, new3)
            part = (part0, part1, part2, part3)
            if RAGGED:
                # Whatever a rule makes of zeros must not enter the sums.
                new = cut(new, column, C, E, L)
                part = cut(part, column, C, E, L)
            state = (state0, state1, state2, state3)
            distance_sq = square_over_neuron(subtract(new, w), N, L)
            update_sq = square_over_neuron(part, N, L)
            grad_sq = square_over_neuron(grad, N, L)
            new_sq = square_over_neuron(new, N, L)
            if EVEN:
                scaled_sq = new_sq
            else:
                scaled_sq = square_over_neuron(times(gamma, new), N, L)
            new_norm = tl.sqrt(new_sq)
            change = new_norm - norm
            chord_sq = (distance_sq - change * change) / (new_norm * norm)
            # A NaN must stay one: Triton's minimum and maximum would drop it.
            chord_sq = tl.where(chord_sq < 0.0, 0.0, tl.where(chord_sq > 4.0, 4.0, chord_sq))
            angle = 2.0 * arcsine(0.5 * tl.sqrt(chord_sq))
            s_norm += new_sq
            s_angle += angle
            s_angle_sq += angle * angle
            s_update += update_sq
            s_relative += distance_sq / norm_sq
            s_distance += distance_sq
            s_grad += grad_sq * norm_sq
            w = new
            norm = new_norm
            norm_sq = new_sq
        share = 1.0 / count.to(norm.dtype)
        place = out + (window_index.to(tl.int64) * SERIES * rows + row)
        first_lane = inside & (slot % L == 0)
        tl.store(place, s_norm * share, mask=first_lane)
        tl.store(place + rows, s_angle * share, mask=first_lane)
        tl.store(place + 2 * rows, s_angle_sq * share, mask=first_lane)
        tl.store(place + 3 * rows, s_update * share, mask=first_lane)
        tl.store(place + 4 * rows, s_relative * share, mask=first_lane)
        tl.store(place + 5 * rows, s_distance * share, mask=first_lane)
        tl.store(place + 6 * rows, s_grad * share, mask=first_lane)
        done += count
        window_index += 1
    store(param, w, column, base, inside, C, E, L)
    STORE(state, buffers, column, base, inside, rows.to(tl.int64) * C, C, E, L)


@triton.jit
def one_normal(key0, key1, c0, c1, c2, stream: tl.constexpr):
    bits0, bits1, _, _ = philox(key0, key1, c0, c1, c2, tl.full((), stream, tl.uint32))
    first, _ = normals(bits0, bits1)
    return first


@triton.jit
def inputs(key0, key1, gamma_in, stub, c, b, layer, at, step, C, B, STUBBED: tl.constexpr):
    """gamma_in X of one layer at some coordinates c and members b of the batch, 0 beyond either."""
    mask = (c < C)[:, None] & (b < B)[None, :]
    place = c[:, None] * B + b[None, :]
    if STUBBED:
        x = tl.load(stub + at.to(tl.int64) * C * B + place, mask=mask, other=0.0)
    else:
        x = one_normal(key0, key1, place.to(tl.uint32), layer, step, INPUTS)
    return tl.where(mask, tl.load(gamma_in + c, mask=c < C, other=0.0)[:, None] * x, 0.0)


@triton.jit(do_not_specialize=["local", "first_layer", "layers_per_config", "per_layer", "C", "B"])
def faithful_kernel(
    param, grad, gamma_in, gamma_out, keys, clock, stub_in, stub_out, local, first_layer, layers_per_config, per_layer, C, B,
    K_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, STUBBED: tl.constexpr,
):  # fmt: skip
    """Gradients of the toy system at step clock + local (0 at the first): inputs, batch norm (eps = 0) and backpropagation.

    A program has K_BLOCK neurons of one layer; all of a layer's draw the same inputs, which are drawn again for the second
    product. Arguments as in `walk_kernel`; stub_in (layers, C, B) and stub_out (rows, B) hold the raw normals.
    """
    here = tl.program_id(0)
    number = here + first_layer
    config = number // layers_per_config
    layer = (number % layers_per_config).to(tl.uint32)
    key0 = tl.load(keys + 2 * config).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 2 * config + 1).to(tl.uint32, bitcast=True)
    step = (tl.load(clock) + local).to(tl.uint32)
    k = tl.program_id(1) * K_BLOCK + tl.arange(0, K_BLOCK)
    b = tl.arange(0, B_BLOCK)
    known = (k < per_layer)[:, None]
    row = here * per_layer + k
    z = tl.zeros((K_BLOCK, B_BLOCK), tl.float32)
    for c0 in range(0, C, C_BLOCK):
        c = c0 + tl.arange(0, C_BLOCK)
        x = inputs(key0, key1, gamma_in, stub_in, c, b, layer, here, step, C, B, STUBBED)
        w = tl.load(param + row.to(tl.int64)[:, None] * C + c[None, :], mask=known & (c < C)[None, :], other=0.0)
        z += tl.dot(w, x, input_precision="ieee")
    member = known & (b < B)[None, :]
    z = tl.where(member, z - (tl.sum(z, axis=1) / B)[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(z * z, axis=1) / B)
    deviation = tl.where(k < per_layer, deviation, 1.0)[:, None]
    unit = z / deviation
    if STUBBED:
        out = tl.load(stub_out + row[:, None] * B + b[None, :], mask=member, other=0.0)
    else:
        neuron = (layer * per_layer + k).to(tl.uint32)
        out = one_normal(key0, key1, b.to(tl.uint32)[None, :], neuron[:, None], step, OUTPUTS)
    out = tl.where(member, out * tl.load(gamma_out + k, mask=k < per_layer, other=0.0)[:, None], 0.0)
    back = out - (tl.sum(out, axis=1) / B)[:, None] - unit * (tl.sum(out * unit, axis=1) / B)[:, None]
    back = tl.where(member, back / deviation, 0.0)
    for c0 in range(0, C, C_BLOCK):
        c = c0 + tl.arange(0, C_BLOCK)
        x = inputs(key0, key1, gamma_in, stub_in, c, b, layer, here, step, C, B, STUBBED)
        g = tl.dot(back, tl.trans(x), input_precision="ieee")
        tl.store(grad + row.to(tl.int64)[:, None] * C + c[None, :], g, mask=known & (c < C)[None, :])
