"""What a process of the blocked engine does: it takes groups of rows through chunks of steps, on arrays that all processes share.

Here rows are cut into blocks and groups, and steps into chunks. Any process may take the next chunk of a group: where the group
stopped, random numbers included, is in the shared arrays. How many processes there are and how they end is up to `blocked`.
"""

import mmap
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwsim.walk.calls import Array, Pool, Uneven
from rwsim.walk.forms import PERIOD
from rwsim.walk.inplace import GRAD, NORM, Plan
from rwsim.walk.job import Job, Noise
from rwsim.walk.measure import SERIES, Walk
from rwsim.walk.program import Program, programs
from rwsim.walk.reference import seeded
from rwsim.walk.system import length_polynomial

# Steps of a chunk, which is planned anew: that costs as much as a few steps.
_CHUNK = 4 * PERIOD
# Steps whose statistics are worked out together; fixed, since it sets the order of summation.
_PIECE = 32
# Coordinates of a block, about, and blocks of a group at most. Where an array has left the second cache, calls on it are slower by
# less than the number of calls saves.
_BLOCK, _BLOCKS = 8192, 8
# And at least, where there are as many: what calls cost beside their work makes one block take as long as two.
_FEWEST = 2
_CPU = torch.device("cpu")


class Group(NamedTuple):
    """Rows that are walked together: some blocks of one config, or all of several configs that share a program."""

    config: int
    configs: int
    first: int
    rows: int  # of each config


def block_rows(fan_in: int) -> int:
    """Rows of a block, fixed by the fan-in: random numbers belong to blocks."""
    return max(1, _BLOCK // fan_in)


def groups(job: Job, processes: int) -> list[Group]:
    """Every row in one group; as large as suits the cache, but one for each process unless they become too small."""
    rows = block_rows(job.layer.fan_in)
    blocks = -(-job.rows // rows)
    shares = [(configs[0], len(configs)) for _, configs in programs(job) if configs == list(range(configs[0], configs[-1] + 1))]
    shares = shares if sum(count for _, count in shares) == job.configs else [(config, 1) for config in range(job.configs)]
    for together in range(max(1, _BLOCKS // blocks), 1, -1):
        found = [
            Group(first + at, min(together, count - at), 0, job.rows) for first, count in shares for at in range(0, count, together)
        ]  # fmt: skip
        if len(found) >= processes:
            return sorted(found)
    size = next((m for m in range(min(_BLOCKS, blocks), 1, -1) if job.configs * -(-blocks // m) >= processes), min(_FEWEST, blocks)) * rows
    return [Group(config, 1, first, min(size, job.rows - first)) for config in range(job.configs) for first in range(0, job.rows, size)]


def _shared(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that forked processes share."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)


class State:
    """Everything that the processes of a walk share."""

    def __init__(self, job: Job, noise: Noise | None, start: Tensor | None, keys: tuple[int, ...], processes: int) -> None:
        self.job, self.noise, self.keys, self.owner = job, noise, keys, os.getpid()
        self.groups = groups(job, processes)
        self.programs: dict[int, Program] = {config: program for program, configs in programs(job) for config in configs}
        kind = np.float32 if job.dtype == torch.float32 else np.float64
        self.param = _shared(job.shape, kind)
        for config, weight in enumerate(self.param):
            weight[:] = self._draw_start(config) if start is None else start[config].cpu().numpy()
        most = max(len(program.buffers) for program in self.programs.values())
        self.buffers = _shared((most, *job.shape), kind)
        windows = -(-job.steps // job.window)
        self.lengths = np.full(windows, job.window, dtype=np.int64)
        self.lengths[-1] = job.steps - job.window * (windows - 1)
        self.series = _shared((windows, len(SERIES), job.configs, job.rows), np.float64)
        blocks = -(-job.rows // block_rows(job.layer.fan_in)) if noise is None else 0
        self.states = _shared((job.configs, blocks, len(torch.Generator().get_state())), np.uint8)
        for config, block in np.ndindex(job.configs, blocks):
            self.suspend(config, block, seeded(keys[config], _CPU, (1, block)))
        # Chunks that each group has walked; the first bad step (1 at the first) of each config, or 0; next task; whether to stop.
        self.done, self.bad = _shared((len(self.groups),), np.int64), _shared((len(self.groups), job.configs), np.int64)
        self.next, self.stop = _shared((1,), np.int64), _shared((1,), np.int64)

    def _draw_start(self, config: int) -> np.ndarray:
        return self.job.layer.start(1, self.job.layers, seeded(self.keys[config], _CPU, (0,)), self.job.dtype)[0].numpy()

    def resume(self, config: int, block: int) -> torch.Generator:
        """A block's generator, where it stopped."""
        generator = torch.Generator()
        generator.set_state(torch.from_numpy(self.states[config, block]))
        return generator

    def suspend(self, config: int, block: int, generator: torch.Generator) -> None:
        self.states[config, block] = generator.get_state().numpy()

    @property
    def sound(self) -> int:
        """Steps before the first bad one that has been seen."""
        bad = self.bad[self.bad > 0]
        return int(bad.min()) - 1 if len(bad) else self.job.steps

    @property
    def windows(self) -> int:
        """Windows that are complete."""
        steps = min(int(self.done.min()) * _CHUNK, self.sound)
        return len(self.lengths) if steps == self.job.steps else steps // self.job.window

    @property
    def steps(self) -> int:
        return int(self.lengths[: self.windows].sum())

    def walk(self, windows: int) -> Walk:
        return Walk(self.job.window, self.lengths[:windows], *self.series[:windows].swapaxes(0, 1))


class Worker:
    """One process at work."""

    def __init__(self, state: State) -> None:
        self.state, self.job = state, state.job
        job = self.job
        gamma_in, gamma_out = job.layer.scales(torch.float64, _CPU, job.layers)
        self.marginal, self.even = job.gradient == "marginal", bool((gamma_in == 1).all())
        self.gamma_in, self.gamma_out = gamma_in.to(job.dtype), gamma_out.numpy()
        self.gamma_sq = self.gamma_in.square()
        self.block = block_rows(job.layer.fan_in)
        self.polynomial = [torch.tensor(c, dtype=job.dtype) for c in length_polynomial(job.layer.batch)] if self.marginal else []
        self.rooms: dict[int, _Room] = {}

    def run(self, lock: Any, after: Callable[[], object]) -> None:
        """Take tasks in order, all groups through one chunk before the next, until none is left."""
        state = self.state

        def ready(group: int, chunk: int) -> bool:
            with lock:
                return bool(state.done[group] >= chunk)

        with torch.inference_mode(), np.errstate(all="ignore"):
            while True:
                with lock:
                    task = int(state.next[0])
                    state.next[0] += 1
                chunk, group = divmod(task, len(state.groups))
                if chunk * _CHUNK >= state.sound:
                    return
                while not ready(group, chunk):
                    if state.stop[0] or state.sound <= chunk * _CHUNK:
                        return
                    time.sleep(1e-4)
                if state.stop[0] or state.owner not in (os.getpid(), os.getppid()):
                    return
                self.take(group, chunk)
                with lock:
                    state.done[group] = chunk + 1
                after()

    def take(self, group: int, chunk: int) -> None:
        """Walk a group through a chunk of steps."""
        whole = self.state.groups[group]
        try:
            self._walk(group, whole, chunk)
        except Uneven:
            for config in range(whole.config, whole.config + whole.configs):
                self._walk(group, whole._replace(config=config, configs=1), chunk)

    def _walk(self, group: int, part: Group, chunk: int) -> None:
        state, job = self.state, self.job
        config, configs, first, each = part
        rows, mine = configs * each, (slice(config, config + configs), slice(first, first + each))
        if rows not in self.rooms:
            self.rooms[rows] = _Room(job, rows)
        room, begin, program = self.rooms[rows], chunk * _CHUNK, state.programs[config]
        count = min(_CHUNK, job.steps - begin)
        # Views: a group holds either all rows of its configs or rows of one.
        param, *buffers = (
            Array.of(torch.from_numpy(array[mine].reshape(rows, -1))) for array in (state.param, *state.buffers[: len(program.buffers)])
        )
        # All of a chunk is planned even if the walk ends within: a longer walk begins alike.
        planned = count if job.schedule else _CHUNK
        plan = Plan(program, self._coefficients(part, begin, planned), planned, param, room.grad, buffers, room.pool, room.sizes)
        owners = []
        if state.noise is None:
            blocks = range(first // self.block, -(-(first + each) // self.block))
            owners = [(one, block) for one in range(config, config + configs) for block in blocks]
        generators = [state.resume(*owner) for owner in owners]
        gradient = self._gradient(part, chunk, room, param, plan.before, generators)
        norms = list(room.sizes[:, NORM].numpy())
        np.vecdot(param.numpy, param.numpy, norms[0])
        for t in range(count):
            gradient(t)
            for call in plan.calls:
                call(t)
            if t % PERIOD == PERIOD - 1:
                plan.restore(t)
            np.vecdot(param.numpy, param.numpy, norms[t + 1])
        self._record(group, part, begin, count, room, plan)
        for owner, generator in zip(owners, generators, strict=True):
            state.suspend(*owner, generator)

    def _coefficients(self, part: Group, begin: int, steps: int) -> list[Any]:
        """The program's coefficients in these steps, configs side by side where they differ."""
        program, step = self.state.programs[part.config], np.arange(begin + 1.0, begin + steps + 1)[:, None]
        own = [program.evaluate(self._hyper(config, begin, steps), step) for config in range(part.config, part.config + part.configs)]
        together = []
        for values in zip(*own, strict=True):
            same = all(np.array_equal(value, values[0]) for value in values[1:])
            together.append(values[0] if same else np.concatenate([np.broadcast_to(value, (steps, 1)) for value in values], 1))
        return together

    def _hyper(self, config: int, begin: int, steps: int) -> dict[str, Any]:
        hyper: dict[str, Any] = dict(vars(self.job.rules[config].values))
        for name, factors in self.job.schedule.items():
            part = np.asarray(factors[begin : begin + steps], dtype=np.float64).reshape(steps, -1)
            value = hyper[name]
            hyper[name] = tuple(v * part[:, i : i + 1] for i, v in enumerate(value)) if isinstance(value, tuple) else value * part
        return hyper

    def _gradient(
        self, part: Group, chunk: int, room: "_Room", param: Array, before: np.ndarray, generators: list[torch.Generator]
    ) -> Callable[[int], object]:
        """What writes the gradient of a step of the chunk to `room.grad`, and its length to the sizes.

        The weights are `before` times `param`.
        """
        (grad, numbers), (param_tensor, weight) = room.grad, param
        factor = np.repeat(before, len(weight) // before.shape[1], axis=1).astype(weight.dtype)
        # gamma_out L / factor, rows of steps.
        shares = np.empty_like(factor)
        draw = self._drawn(part, room, factor, shares, generators) if generators else self._given(part, chunk, room, factor, shares)
        sizes, (scaled, scaled_numbers) = room.sizes.numpy(), (scratch := room.pool.take())
        norms, grads = list(sizes[:, NORM]), list(sizes[:, GRAD])
        along, norm, share = room.rows
        along_column, share_column = (torch.from_numpy(row)[:, None] for row in (along, share))
        radial = (self.job.radial * torch.from_numpy(factor))[:, :, None].unbind(0) if self.job.radial else ()
        marginal, even, gamma, gamma_sq = self.marginal, self.even, self.gamma_in, self.gamma_sq
        vecdot, divide, negative, sqrt, multiply = np.vecdot, np.divide, np.negative, np.sqrt, torch.mul

        def gradient(t: int) -> None:
            draw(t)
            if marginal:
                # With a = gamma w: gamma (n - a <a, n> / |a|^2) L / |a|.
                if even:
                    direction, square = param_tensor, norms[t]
                else:
                    grad.mul_(gamma)
                    direction, square = multiply(param_tensor, gamma_sq, out=scaled), norm
                    vecdot(weight, scaled_numbers, norm)
                vecdot(weight, numbers, along)
                divide(along, square, along)
                negative(along, along)
                grad.addcmul_(direction, along_column)
                divide(shares[t], sqrt(square, share), share)
                grad.mul_(share_column)
            if radial:
                grad.addcmul_(param_tensor, radial[t])
            vecdot(numbers, numbers, grads[t])

        room.pool.give(scratch)
        return gradient

    def _drawn(
        self, part: Group, room: "_Room", factor: np.ndarray, shares: np.ndarray, generators: list[torch.Generator]
    ) -> Callable[[int], object]:
        """What draws the normals of a step; draws the lengths of the whole chunk."""
        spans = [
            (config * part.rows, low, min(low + self.block, part.rows))
            for config in range(part.configs)
            for low in range(0, part.rows, self.block)
        ]
        normals = [room.grad.tensor[offset + low : offset + high] for offset, low, high in spans]
        if self.marginal:
            scale = np.tile(self.gamma_out[part.first : part.first + part.rows], part.configs).astype(shares.dtype)
            self._draw_lengths([high - low for _, low, high in spans], generators, torch.from_numpy(shares))
            shares *= scale
            shares /= factor
        pairs = list(zip(normals, generators, strict=True))

        def draw(t: int) -> None:
            for block, generator in pairs:
                block.normal_(generator=generator)

        return draw

    def _draw_lengths(self, rows: list[int], generators: list[torch.Generator], out: Tensor) -> None:
        """sqrt(B chi2_{B-2} / chi2_{B-1}) of a chunk's steps, (steps, rows), each block from its own generator."""
        blocks = [torch.empty(_CHUNK, n, dtype=self.job.dtype).normal_(generator=g) for n, g in zip(rows, generators, strict=True)]
        *rest, second, last = self.polynomial
        # A few steps at a time, for the cache.
        for low in range(0, len(out), _PIECE):
            normals, value = torch.cat([block[low : low + _PIECE] for block in blocks], 1)[: len(out) - low], out[low : low + _PIECE]
            torch.add(second, normals, alpha=float(last), out=value)
            for coefficient in reversed(rest):
                torch.addcmul(coefficient, value, normals, out=value)
            value.exp_()

    def _given(self, part: Group, chunk: int, room: "_Room", factor: np.ndarray, shares: np.ndarray) -> Callable[[int], object]:
        """The same with given numbers."""
        noise, mine = self.state.noise, slice(part.first, part.first + part.rows)
        assert noise is not None

        def draw(t: int) -> None:
            given = [noise(part.config + i, chunk * _CHUNK + t + 1) for i in range(part.configs)]
            torch.cat([normals[mine] for normals, _ in given], out=room.grad.tensor)
            if self.marginal:
                shares[t] = np.concatenate([self.gamma_out[mine] * lengths[mine].cpu().numpy() for _, lengths in given]) / factor[t]

        return draw

    def _record(self, group: int, part: Group, begin: int, steps: int, room: "_Room", plan: Plan) -> None:
        """Add a chunk's steps to the means of their windows; note the first that is not finite in the walk's precision."""
        state, window = self.state, self.job.window
        config, configs, first, each = part
        norms, roots = room.norms
        at = 0
        while at < steps:
            # Some steps of one window at a time, few enough for the cache.
            index = (begin + at) // window
            count = min(_PIECE - at % _PIECE, steps - at, (index + 1) * window - begin - at)
            norm, root, values, sizes = (
                norms[: count + 1],
                roots[: count + 1],
                room.values[:, :count],
                room.sizes[at : at + count, GRAD].numpy(),
            )
            after, angle, angle_sq, share, relative, distance, grad = values
            plan.squares(at, norm, distance, share)
            after[:] = norm[1:]
            np.divide(distance, norm[:-1], out=relative)
            np.multiply(sizes, norm[:-1], out=grad)
            np.sqrt(norm, out=root)
            rotation_angles(root, distance, angle, angle_sq)
            sums = np.add.reduce(values, axis=1, dtype=np.float64)
            means = (sums / state.lengths[index]).reshape(len(SERIES), configs, each)
            state.series[index, :, config : config + configs, first : first + each] += means
            if not np.isfinite(sums).all():
                finite = np.isfinite(np.stack([after, distance, share, sizes])).all(0).reshape(count, configs, each).all(2)
                for i, fine in enumerate(finite.T):
                    if not (fine.all() or state.bad[group, config + i]):
                        state.bad[group, config + i] = begin + at + 1 + int(np.argmin(fine))
            at += count


class _Room:
    """A process's own arrays for groups of that many rows."""

    def __init__(self, job: Job, rows: int) -> None:
        shape = (rows, job.layer.fan_in)
        self.pool = Pool(shape, job.dtype)
        self.grad = Array.of(torch.empty(shape, dtype=job.dtype))
        self.rows = tuple(torch.empty(3, rows, dtype=job.dtype).numpy())
        self.sizes = torch.zeros(_CHUNK + 1, 5, rows, dtype=job.dtype)
        self.norms = torch.empty(2, _PIECE + 1, rows, dtype=job.dtype).numpy()
        self.values = torch.empty(len(SERIES), _PIECE, rows, dtype=job.dtype).numpy()


def rotation_angles(norms: np.ndarray, distance_sq: np.ndarray, angle: np.ndarray, angle_sq: np.ndarray) -> None:
    """`rotation_angle` in place, from norms before each step and after the last and ||w' - w||^2: the angles and their squares."""
    np.subtract(norms[1:], norms[:-1], out=angle)
    np.multiply(angle, angle, out=angle)
    np.subtract(distance_sq, angle, out=angle)
    np.multiply(norms[1:], norms[:-1], out=angle_sq)
    np.divide(angle, angle_sq, out=angle)
    np.multiply(angle, 0.25, out=angle)
    torch.from_numpy(angle).clamp_(0, 1).sqrt_().asin_()
    np.multiply(angle, 2.0, out=angle)
    np.multiply(angle, angle, out=angle_sq)
