"""The floor: element-steps a second that no marginal walk of this arithmetic can exceed on this device.

On CUDA, counted in issue slots: one instruction of one lane. Per element-step of the fused marginal walk, float32:

- Philox4x32-7, as the kernel has it: 7 rounds of 2 wide multiplications and 2 three-input xors for 4 numbers: 7 slots. The
  key schedule is the same for all lanes and counts nothing.
- uniform: conversion to float, scale and shift: 2 slots.
- Box-Muller, per pair: log, root, sine, cosine on the special unit and 5 multiplications: 4.5 slots.
- gradient: gamma_in w, its product with the noise, its square, projection (2), gamma_in: 6 slots. Nothing for ``gaussian``;
  ``faithful`` is given the marginal count too: its inputs and two matrix products are not counted.
- update and Delta_g w: the rule's program (`rwsim.walk.program`): the larger of its additions and its multiplications,
  which can share a slot, plus roots and signs.
- statistics: w' - w, and the squares of w', w' - w, Delta_g w and g: 5 slots.

Not counted: sums across lanes, chi-square lengths (one a neuron), addresses, loops. A streaming multiprocessor issues 128
slots a clock, of which 16 may go to the special unit: the floor is the narrower of the two. Beside it, the bytes of one
launch per window (the kernel takes longer ones): parameter and buffers read and written, seven means a neuron; over the
memory's rate where torch reports that.

On the CPU: one normal number per element-step at the rate at which `rwsim.walk.normals` draws them in one thread, measured in
the same run, times the cores. Nothing else is counted.
"""

import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from rwsim.walk.job import Job
from rwsim.walk.normals import Normals
from rwsim.walk.program import programs
from rwsim.walk.simulate import single_threaded

_LANES, _SPECIAL_LANES = 128, 16
_RANDOM = 7 + 2 + 4.5
_RANDOM_SPECIAL = 2
_GRADIENT = {"marginal": 6, "faithful": 6, "gaussian": 0}
_STATISTICS = 5


@dataclass(frozen=True)
class Floor:
    """`rate` in element-steps a second; None where it is unknown. `text` says what it is made of."""

    rate: float | None
    text: str


def element_slots(job: Job) -> tuple[float, int]:
    """(issue slots, operations of the special unit) of one element-step of the first config, counted as said above.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.walk.system import Layer
        >>> element_slots(Job((AdamW(lr=1e-3, weight_decay=0.1),), Layer.draw(fan_in=128, neurons=128), steps=1))
        (34.5, 3)
    """
    program, _ = programs(job)[0]
    count = Counter(line.op for line in program.body)
    roots = count["sqrt"] + count["rsqrt"]
    arithmetic = max(count["add"] + count["sub"], count["mul"] + count["div"])
    return _RANDOM + _GRADIENT[job.gradient] + arithmetic + roots + count["sign"] + _STATISTICS, _RANDOM_SPECIAL + roots


def cuda_floor(job: Job, device: torch.device) -> Floor:
    properties = torch.cuda.get_device_properties(device)
    slots, special = element_slots(job)
    clock = _clock(properties)
    moved = 8 * (1 + len(programs(job)[0][0].buffers)) / job.window + 28 / (job.window * job.layer.fan_in)
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
    """Measures `Normals.fill`: the best of a tenth of a second, since other work on the machine only slows it."""
    numbers, stream = torch.empty(1 << 13, dtype=dtype).numpy(), Normals(Normals.begin(0, ()), dtype)
    taken: list[float] = []
    end = time.perf_counter() + 0.1
    with single_threaded():
        while not taken or time.perf_counter() < end:
            began = time.perf_counter()
            stream.fill(numbers)
            taken.append(time.perf_counter() - began)
    cost = min(taken) / numbers.size
    cores = cpu_cores()
    return Floor(cores / cost, f"a normal takes {cost * 1e9:.2f} ns, {cores} cores: {cores / cost:.3g} element-steps/s")


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
