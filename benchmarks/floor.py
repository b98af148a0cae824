"""The floor: element-steps a second that no marginal walk of this arithmetic can exceed on this device.

On CUDA, counted in issue slots: one instruction of one lane. Per element-step of the fused marginal walk, float32:

- Philox4x32-10: 10 rounds of 2 wide multiplications and 2 three-input xors for 4 numbers: 10 slots. The key schedule is
  the same for all lanes and counts nothing.
- uniform: bits to float, scale and shift: 2 slots.
- Box-Muller, per pair: log, root, sine, cosine on the special unit and 5 multiplications: 4.5 slots.
- gradient: gamma_in w, its product with the noise, its square, projection, length, gamma_in: 6 slots. Nothing for
  ``gaussian``; ``faithful`` is given the marginal count, which is less than it needs.
- update: read off the rule's `update`: the larger of its additions and its multiplications (they can share a slot),
  plus roots and signs. A division by a root is a multiplication by its inverse.
- statistics: w' - w, and the squares of w', w' - w, Delta_g w and g: 5 slots. Delta_g w: 1 slot under decoupled decay;
  for rules whose buffers see the parameter the update once more, of gradients alone, roots and signs already there.

Not counted: sums across lanes, chi-square lengths (one a neuron), addresses, loops. A streaming multiprocessor issues 128
slots a clock, of which 16 may go to the special unit: the floor is the narrower of the two. Beside it, the bytes of one
launch per window: parameter and buffers read and written, seven sums a neuron; in numbers over the memory's rate where
torch reports that.

On the CPU: one normal number per element-step at the rate at which `torch.normal_` draws them in one thread, measured in
the same run, times the cores. Nothing else is counted.
"""

import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import single_threaded
from rwsim.optimizers.rule import UpdateRule
from rwsim.walk.job import Job
from rwsim.walk.reference import GradientPart

_LANES, _SPECIAL_LANES = 128, 16
_RANDOM = 10 + 2 + 4.5
_GRADIENT = {"marginal": 6, "faithful": 6, "gaussian": 0}
_STATISTICS = 5
_BOX_MULLER_SPECIAL = 2


@dataclass(frozen=True)
class Floor:
    """`rate` in element-steps a second; None where it is unknown. `text` says what it is made of."""

    rate: float | None
    text: str


class _Counted:
    """A number of the kernel; counts what is done to it. Arithmetic among plain floats is done once and counts nothing."""

    def __init__(self, tally: dict[str, int]) -> None:
        self.tally = tally

    def _one(self, kind: str) -> "_Counted":
        self.tally[kind] += 1
        return self

    def _add(self, other: Any) -> "_Counted":
        return self if isinstance(other, float) and other == 0 else self._one("add")

    def _multiply(self, other: Any) -> "_Counted":
        return self._one("multiply")

    __add__ = __radd__ = __sub__ = __rsub__ = _add
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _multiply


def update_slots(rule: UpdateRule, gradient_part: bool = False) -> tuple[int, int, int]:
    """(slots of additions and multiplications, roots, signs) of one update of one element; or of its gradient part alone.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> update_slots(AdamW(lr=1e-3, weight_decay=0.1))
        (9, 1, 0)
    """
    tally = dict.fromkeys(("add", "multiply", "root", "sign"), 0)
    number = _Counted(tally)
    xp = SimpleNamespace(sqrt=lambda x: x._one("root"), sign=lambda x: x._one("sign"))
    state = SimpleNamespace(param=0.0 if gradient_part else number, step=3, **dict.fromkeys(rule.state, number))
    hyper = SimpleNamespace(**{**vars(rule.values), "weight_decay": 0.0}) if gradient_part else rule.values
    rule.update(number, state, hyper, xp)
    return max(tally["add"], tally["multiply"]), tally["root"], tally["sign"]


def element_slots(rule: UpdateRule, gradient: str) -> tuple[float, int]:
    """(issue slots, special-unit operations) of one element-step, as the module's docstring counts them."""
    plain, roots, signs = update_slots(rule)
    decoupled = GradientPart(type(rule), rule.values, torch.zeros(1, 1, 2)).keep is not None
    part = 1 if decoupled else update_slots(rule, gradient_part=True)[0]
    return _RANDOM + _GRADIENT[gradient] + plain + roots + signs + _STATISTICS + part, _BOX_MULLER_SPECIAL + roots


def cuda_floor(job: Job, device: torch.device) -> Floor:
    properties = torch.cuda.get_device_properties(device)
    slots, special = element_slots(job.rules[0], job.gradient)
    clock = _clock(properties)
    moved = 8 * (1 + len(job.rule.state)) / job.window + 28 / (job.window * job.layer.fan_in)
    text = f"{slots:g} issue slots and {special} special operations an element-step, {moved:.2g} bytes"
    if clock is None:
        return Floor(None, f"{text}; the clock is unknown")
    rates = [properties.multi_processor_count * clock * min(_LANES / slots, _SPECIAL_LANES / special)]
    text += f"; {properties.multi_processor_count} multiprocessors at {clock / 1e6:.0f} MHz"
    if hasattr(properties, "memory_clock_rate") and hasattr(properties, "memory_bus_width"):
        bandwidth = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
        rates.append(bandwidth / moved)
        text += f", memory at {bandwidth:.3g} bytes/s"
    return Floor(min(rates), f"{text}: {min(rates):.3g} element-steps/s")


def _clock(properties: Any) -> float | None:
    """Highest clock of the multiprocessors, Hz: from torch where it tells, else from the driver's tool."""
    if hasattr(properties, "clock_rate"):
        return properties.clock_rate * 1e3
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "-i", f"GPU-{properties.uuid}"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout) * 1e6
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def cpu_floor(dtype: torch.dtype) -> Floor:
    """Measures `torch.normal_`: a tenth of a second."""
    numbers, generator = torch.empty(1 << 14, dtype=dtype), torch.Generator().manual_seed(0)
    taken: list[float] = []
    end = time.perf_counter() + 0.1
    with single_threaded():
        while not taken or time.perf_counter() < end:
            began = time.perf_counter()
            numbers.normal_(generator=generator)
            taken.append(time.perf_counter() - began)
    cost = statistics.median(taken) / numbers.numel()
    cores = cpu_cores()
    return Floor(cores / cost, f"torch.normal_ takes {cost * 1e9:.2f} ns a number, {cores} cores: {cores / cost:.3g} element-steps/s")


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
