"""Fused steps: which parameters the Triton kernels take, and their launches.

What does not change between steps (which tensors, their shapes, which program works on what) is kept in a `_Plan` for each
parameter group. A step then compares addresses, and launches.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter, is_
from os import environ
from typing import Any

import torch
from torch import Tensor

from rwsim.rotational.optimizer import PER_VECTOR
from rwsim.rotational.piece import layout_of
from rwsim.rotational.place import is_dtensor, shards_of

# Elements of the longest vector that one program holds.
_LONGEST = 8192
# Elements of a program, about: of short vectors several share one.
_PROGRAM = 1024
# Elements of a warp at most: what registers hold, since sums within one warp are the fastest. Measured on an H200, GPT-2's shapes.
_A_WARP = 768
# Elements of a part of a longer one.
_PART = 4096
# Not a function of our own: called for hundreds of parameters a step.
_grad = attrgetter("grad")
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Options that decide what is launched; hyperparameters are arguments of the launch.
_DECIDING = (
    "rotational", "per_neuron", "neuron_dims", "blocks", "zero_mean", "norm", "fixed_angle", "maximize", "fused", "stochastic_rounding",
)  # fmt: skip


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return environ.get("TRITON_INTERPRET") == "1"


def lacks(optimizer: Any, group: Mapping[str, Any], param: Tensor) -> str:
    """What the kernels do not carry of a parameter, or nothing."""
    if kind_of(optimizer, group) is None:
        return f"the direction of {type(optimizer).__name__}"
    if find_spec("triton") is None:
        return "a machine without Triton"
    if param.device.type != "cuda" and not interpreted():
        return f"device {param.device.type}"
    if param.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(param.device) < (7, 0)):
        return "this GPU (NVIDIA's from Volta on are taken)"
    if param.dtype not in _DTYPES:
        return str(param.dtype)
    dims: tuple[int, ...]
    shape, dims = param.shape, ()
    if optimizer.is_rotational(group, param):
        if group["norm"] != "initial" or group["fixed_angle"]:
            return "norm='equilibrium' and fixed_angle"
        shape, dims = layout_of(group, param)
        # Vectors one after the other: what indexes them comes first.
        if dims != tuple(range(len(shape) - len(dims), len(shape))):
            return "vectors that are not contiguous"
    grad: Any = param.grad
    if is_dtensor(param):
        shards = shards_of(param, shape, dims)
        if shards is not None and shards.total is not None:
            return "vectors that several processes share"
        if grad is not None and grad.placements != param.placements:  # type: ignore[attr-defined]  # DTensor's
            return "gradients in another place than the weights"
    elif type(param) not in (Tensor, torch.nn.Parameter):
        return f"a {type(param).__name__}"
    own = _own(param)
    if not own.numel():
        return "nothing on this process"
    if not _dense(own, own) or (grad is not None and not _dense(_own(grad), own)):
        return "weights with gaps, or gradients in another order than the weights"
    if dims and not own.is_contiguous() and len(shape) - len(dims) > 1:
        return "vectors that are not contiguous"
    return ""


def kind_of(optimizer: Any, group: Mapping[str, Any]) -> str | None:
    """The kernels' name of an optimizer's direction; None if they have none."""
    from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalSGDM

    direction, plain = type(optimizer).direction, type(optimizer).plain_
    if plain is not RotationalAdamW.plain_:
        return None
    if direction in (RotationalAdam.direction, RotationalAdamW.direction):
        return "adam"
    if direction is RotationalLion.direction:
        return "lion"
    if direction is RotationalSGDM.direction:
        return "plain" if not group["momentum"] else "nesterov" if group["nesterov"] else "momentum"
    return None


def here(param: Tensor) -> bool:
    """Whether this process has any of a parameter."""
    return _own(param).numel() > 0


def _own(tensor: Any) -> Tensor:
    """What this process has of a tensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def _dense(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, in the order of another's."""
    if like.is_contiguous():
        return tensor.is_contiguous()
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return last and tensor.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one launch.

    Attributes:
        what: ``rows``, ``parts`` or ``elements``.
        constants: The kernel's constexprs.
        warps: Of a program.
        programs: A row for each program: place of its parameter in the table, then its first vector or element; of a part of a long
            vector its vector, first element and place among `vectors`.
        vectors: A row for each long vector: place, vector, its first part and the one after its last.
    """

    what: str
    constants: dict[str, Any]
    warps: int
    programs: Tensor
    vectors: Tensor | None = None


class _Plan:
    """The launches of one parameter group.

    Args:
        entries: (param, state, buffers, rotates) of each parameter.
        left: Parameters with a gradient that the kernels do not carry.
    """

    def __init__(
        self, optimizer: Any, group: Mapping[str, Any], entries: Sequence[tuple[Tensor, dict[str, Any], tuple[str, ...], bool]],
        left: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.options, self.left = _deciding(group), list(left)
        self.entries, self.kind = list(entries), kind_of(optimizer, group)
        self.params = [param for param, _, _, _ in entries]
        self.device = self.params[0].device
        # One tensor, of which every parameter's step is a part: counting is one launch.
        self.steps = torch.stack([state["step"].to(self.device) for _, state, _, _ in entries])
        for (_, state, _, _), step in zip(entries, self.steps.unbind(), strict=True):
            state["step"] = step
        self.sharded = any(map(is_dtensor, self.params))
        self.contiguous = all(_own(param).is_contiguous() for param in self.params)
        # Found again by their places: hashing hundreds of tensors takes as long as a step.
        self.states = [state for _, state, _, _ in entries]
        places = {id(state): place for place, state in enumerate(optimizer.state.values())}
        self.places = [places[id(state)] for state in self.states]
        self.held = list(chain.from_iterable(map(dict.values, self.states)))
        self.addresses: list[int] = []
        self.table, self.aligned = torch.empty(0), False
        # Pinned memory cannot be asked for while capturing: one is kept ready, and those that were captured stay.
        self.spare: Tensor | None = None
        self.kept: list[Tensor] = []
        self.buckets = list(self._buckets(optimizer, group))

    def fits(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the plan is of these parameters, with gradients in their order, and of the state that they have now."""
        if len(params) != len(self.params) + len(self.left):
            return False
        if self.left:
            left = set(map(id, self.left))
            params = [param for param in params if id(param) not in left]
        if not all(map(is_, params, self.params)):
            return False
        grads = self.own(list(map(_grad, params)))
        dense = all(map(Tensor.is_contiguous, grads)) if self.contiguous else all(map(_dense, grads, self.own(params)))
        every = list(state.values())
        if not dense or len(every) <= max(self.places) or not all(map(is_, map(every.__getitem__, self.places), self.states)):
            return False
        held = list(chain.from_iterable(map(dict.values, self.states)))
        return len(held) == len(self.held) and all(map(is_, held, self.held))

    def own(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this process has of them."""
        return list(map(_own, tensors)) if self.sharded else tensors

    def _buckets(self, optimizer: Any, group: Mapping[str, Any]) -> Iterator[_Bucket]:
        programs: dict[tuple, list[Tensor]] = {}
        vectors: dict[tuple, list[Tensor]] = {}
        found: dict[tuple, tuple[str, dict[str, Any], int]] = {}
        self.shapes: list[tuple[int, int]] = []
        for place, (param, state, _, rotates) in enumerate(self.entries):
            elements = _own(param).numel()
            count = _own(state["norm"]).numel() if rotates else elements
            length = elements // count
            self.shapes.append((count, length))
            coupled = optimizer.decay_in_direction if rotates else optimizer.decays_through_gradient(group)
            constants = {
                "DTYPE": _triton(param.dtype), "GRAD": _triton(_grad(param).dtype), "MAXIMIZE": bool(group["maximize"]), "COUPLED": coupled,
                "RESIDUAL": "residual" in state, "STOCHASTIC": bool(group["stochastic_rounding"]) and param.dtype == torch.bfloat16,
            }  # fmt: skip
            if rotates:
                constants |= {"ZERO_MEAN": bool(group["zero_mean"]), "SPEED": "speed" in state}
            if not rotates:
                what, block, a_program = "elements", _PROGRAM, _PROGRAM
            elif length > _LONGEST:
                what, block, a_program = "parts", _PART, 1
            else:
                what, (block, tail) = "rows", _two_blocks(length)
                # A power of 2.
                a_program = 1 << max(0, (_PROGRAM // (block + tail)).bit_length() - 1)
                constants |= {"ALIGN": 16 if length % 16 == 0 else 1, "ROWS": a_program, "TAIL": tail}
            constants["BLOCK"] = block
            key = (what, *constants.values())
            mine, longs = programs.setdefault(key, []), vectors.setdefault(key, [])
            found[key] = what, constants, (block + tail) * a_program if what == "rows" else block
            firsts = torch.arange(0, count, a_program, dtype=torch.int32)
            if what != "parts":
                mine.append(torch.stack([torch.full_like(firsts, place), firsts], 1))
                continue
            starts = torch.arange(0, length, _PART, dtype=torch.int32)
            begin, known = sum(map(len, mine)), sum(map(len, longs))
            rows = firsts.repeat_interleave(len(starts))
            mine.append(torch.stack([torch.full_like(rows, place), rows, starts.repeat(count), known + rows], 1))
            begins = begin + len(starts) * firsts
            longs.append(torch.stack([torch.full_like(firsts, place), firsts, begins, begins + len(starts)], 1))
        for key, (what, constants, elements) in found.items():
            on_device = (torch.cat(lines[key]) for lines in (programs, vectors) if lines[key])
            yield _Bucket(what, constants, _warps(elements), *(rows.to(self.device) for rows in on_device))

    def address(self) -> None:
        """Bring the table up to date: gradients move, and weights may be given other storage."""
        from rwsim.rotational.kernel import FIELD

        weights, grads = self.own(self.params), self.own(list(map(_grad, self.params)))
        now = list(map(Tensor.data_ptr, [*weights, *grads, *self.own(self.held)]))
        if now == self.addresses:
            return
        if any(tensor.device != self.device for tensor in self.held):
            raise RuntimeError(f"state that was moved away from {self.device} must be moved back before a step")
        lines = []
        pairs = zip(now, now[len(grads) :], strict=False)
        for (_, state, buffers, rotates), (at, grad), (count, length) in zip(self.entries, pairs, self.shapes, strict=False):
            named = dict(zip(("first", "second"), (_pointer(state, name) for name in buffers), strict=False))
            named |= {"param": at, "grad": grad, "rows": count, "length": length}
            for name in ("residual", "step", *(PER_VECTOR if rotates else ())):
                named[name] = _pointer(state, name)
            lines.append([named.get(name, 0) for name in FIELD])
        host = torch.tensor(lines, dtype=torch.int64)
        # Gradients may be views into a bucket of DDP's: 16 bytes at a time are read from where all begin at a multiple of them.
        self.aligned = not bool((host[:, : FIELD.index("norm")] & 15).any())
        self.addresses = now
        if self.device.type != "cuda":
            self.table = host
            return
        # A copy from pageable memory waits, and cannot be captured; what is captured reads its source at every replay.
        capturing = torch.cuda.is_current_stream_capturing()
        pinned = self.spare if capturing and self.spare is not None else torch.empty_like(host).pin_memory()
        self.spare = None if capturing else torch.empty_like(host).pin_memory() if self.spare is None else self.spare
        pinned.copy_(host)
        self.kept = [*self.kept, pinned] if capturing else self.kept
        self.table = pinned.to(self.device, non_blocking=True)
        if capturing:
            # This table is filled when the graph is replayed: not before a step outside of it.
            self.addresses = []


def _warps(elements: int) -> int:
    """Of a program: a power of 2."""
    return min(16, 1 << (-(-elements // _A_WARP) - 1).bit_length())


def _two_blocks(length: int) -> tuple[int, int]:
    """Powers of 2 that hold a vector between them with the least left over; the second may be 0."""
    block = max(16, 1 << (length.bit_length() - 1))
    if block >= length:
        return block, 0
    tail = max(16, 1 << (length - block - 1).bit_length())
    return (block, tail) if tail < block else (2 * block, 0)


def _pointer(state: Mapping[str, Any], name: str) -> int:
    return _own(state[name]).data_ptr() if name in state else 0


def _triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


_plans: "weakref.WeakKeyDictionary[Any, dict[int, _Plan]]" = weakref.WeakKeyDictionary()


def _deciding(group: Mapping[str, Any]) -> tuple[Any, ...]:
    # Of tensors only the identity: their values are read on the device.
    found = [group[name] for name in _DECIDING]
    decays = group["weight_decay"]
    given = group["rotation"] is not None and not isinstance(group["rotation"], str)
    return (*found, given, isinstance(decays, Tensor) or decays != 0, bool(group.get("momentum", 0)), group.get("nesterov"))


def planned(optimizer: Any, place: int, group: Mapping[str, Any], params: Sequence[Tensor]) -> _Plan | None:
    """The plan of a group's last step, if it still holds for these parameters."""
    known = _plans.get(optimizer, {}).get(place)
    return known if known is not None and known.options == _deciding(group) and known.fits(params, optimizer.state) else None


def plan(optimizer: Any, place: int, group: Mapping[str, Any], taken: Sequence[Tensor], left: Sequence[Tensor]) -> _Plan:
    """Make a group's plan, and keep it."""
    entries = []
    for param in taken:
        state, rotates = optimizer.prepare(param, group)
        entries.append((param, state, optimizer.buffers(group), rotates))
    made = _Plan(optimizer, group, entries, left)
    _plans.setdefault(optimizer, {})[place] = made
    return made


def drop(optimizer: Any) -> None:
    """Forget an optimizer's plans, which hold on to its state."""
    _plans.pop(optimizer, None)


def whole(optimizer: Any, place: int, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether the kernels carry all of a group's parameters with a gradient."""
    made = planned(optimizer, place, group, params)
    if made is not None:
        return not any(map(here, made.left))
    one_device = len({param.device for param in params}) == 1
    return one_device and not any(lacks(optimizer, group, param) for param in params if here(param))


def launch(made: _Plan, group: Mapping[str, Any], angle: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """One step of a plan's parameters."""
    # Kernels are launched on the current device.
    with torch.cuda.device(made.device) if made.device.type == "cuda" else nullcontext():
        _launch(made, group, angle, grad_scale, found_inf)


def _launch(made: _Plan, group: Mapping[str, Any], angle: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    from rwsim.rotational import kernel

    made.address()
    scaled = grad_scale is not None or found_inf is not None
    device = made.device
    # A table of nothing where there is nothing to read.
    scale = grad_scale.to(device) if grad_scale is not None else torch.ones(1, device=device) if scaled else made.table
    found = found_inf.to(device) if found_inf is not None else torch.zeros(1, device=device) if scaled else made.table
    made.steps.add_(1.0 - found if scaled else 1.0)
    lr, decay = group["lr"], group["weight_decay"]
    angle = 0.0 if angle is None else angle
    on_device = any(isinstance(value, Tensor) for value in (lr, angle, decay))
    hyper = made.table
    if on_device:
        hyper = torch.stack([_on(device, value) for value in (lr, angle, decay)])
        lr, angle, decay = 0.0, 0.0, 0.0
    beta1, beta2 = (float(beta) for beta in group["betas"]) if "betas" in group else (float(group["momentum"]), 0.0)
    betas = (beta1, beta2, 1 - beta1, 1 - beta2, _log(beta1), _log(beta2), group.get("eps", 0.0))
    tracking = group["update_norm_decay_factor"]
    tracks = (1 - tracking, _log(tracking), group["rotational_eps"])
    flags = {"KIND": made.kind, "ON_DEVICE": on_device, "SCALED": scaled}
    last = (hyper, scale, found)
    for bucket in made.buckets:
        programs, warps, constants = bucket.programs, bucket.warps, bucket.constants | flags
        inner = (*betas, decay)
        if bucket.what == "rows":
            constants["ALIGN"] = constants["ALIGN"] if made.aligned else 1
            _run(kernel.turn_rows, warps, programs, made.table, programs, *inner, angle, *tracks, *last, **constants)
        elif bucket.what == "elements":
            _run(kernel.step_elements, warps, programs, made.table, programs, *inner, lr, *last, **constants)
        else:
            vectors = bucket.vectors
            assert vectors is not None  # parts are of vectors
            sums = torch.empty(len(programs), kernel.SUMS.value, dtype=torch.float64, device=device)
            scales = torch.empty(len(vectors), 4, device=device)
            passes = {name: value for name, value in constants.items() if name not in ("ZERO_MEAN", "SPEED")}
            first = {name: value for name, value in passes.items() if name != "STOCHASTIC"}
            between = {name: constants[name] for name in ("ZERO_MEAN", "SPEED", "ON_DEVICE", "SCALED")} | {"BLOCK": 256}
            _run(kernel.sum_parts, warps, programs, made.table, programs, sums, *inner, *last, **first)
            _run(kernel.settle_rows, warps, vectors, made.table, vectors, sums, scales, angle, *tracks, hyper, found, **between)
            _run(kernel.turn_parts, warps, programs, made.table, programs, scales, *inner, *last, **passes)


def _on(device: torch.device, value: Any) -> Tensor:
    """A number on a device. What is captured may not copy from the host."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).view(())
    return torch.full((), value, dtype=torch.float32, device=device)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _run(kernel: Callable[..., Any], warps: int, rows: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with one program for each row of a table."""
    kernel[(len(rows),)](*arguments, **constants, num_warps=warps)  # type: ignore[index]  # a jit function takes its grid so
