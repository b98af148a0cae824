"""What is measured: a row per engine, the paper's whole figure, one GPU against all."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType, ModuleType

import numpy as np
import torch

from benchmarks import peers
from benchmarks.floor import Floor, cpu_cores
from benchmarks.timing import Timing, Walker, repeat_in_turn
from rwsim.config import PAPER_CASES
from rwsim.errors import Unavailable, WalkDiverged
from rwsim.optimizers import find_rule
from rwsim.walk import fused
from rwsim.walk.job import Job
from rwsim.walk.measure import QUANTITIES, Walk
from rwsim.walk.simulate import ENGINES, resolve_engine, single_threaded
from rwsim.walk.system import Layer

# Bytes that the statistics of one walk may take on the host.
_HOST = 1 << 28


def _engine(name: str, job: Job, device: torch.device) -> Walker:
    # Not `simulate.run`, which takes all GPUs: one device is measured here.
    walk = resolve_engine(name, job, device).walk
    return lambda steps: walk(replace(job, steps=steps), device)


_Make = Callable[[Job, torch.device], Walker]
_TODAY: Mapping[str, _Make] = {"loop": peers.loop, "captured": peers.captured, "compiled": peers.compiled}
ROWS: Mapping[str, _Make] = MappingProxyType({**_TODAY, **{name: partial(_engine, name) for name in ENGINES}})


@dataclass(frozen=True)
class Row:
    """One engine on one optimizer: either numbers or the reason why there are none.

    Attributes:
        spread: Half of the range over the repeats, relative to the median.
        first_call_seconds: Construction, compilation and 8 steps.
        ratio_to_loop: To the row `loop` of the same optimizer and run; None without one.
        ratio_to_floor: Share of the floor's rate; None where that is unknown.
    """

    optimizer: str
    engine: str
    reason: str = ""
    neurons: int | None = None
    steps: int | None = None
    seconds: tuple[float, ...] = ()
    spread: float | None = None
    first_call_seconds: float | None = None
    neuron_steps_per_second: float | None = None
    element_steps_per_second: float | None = None
    ratio_to_loop: float | None = None
    ratio_to_floor: float | None = None


def paper_job(optimizer: str, neurons: int, fan_in: int, batch: int, configs: int, gradient: str, layers: int, seed: int) -> Job:
    """The paper's setting of that optimizer; several configs differ in learning rate, from the paper's down to half of it."""
    _, scale, hyper = next(case for case in PAPER_CASES if case[0] == optimizer)
    rule, lrs = find_rule(optimizer), hyper["lr"] * np.geomspace(1, 0.5, configs)
    rules = tuple(rule(**{**hyper, "lr": float(lr)}) for lr in lrs)
    return Job(rules, Layer.draw(fan_in, neurons, batch, scale, "normal", seed), 1, gradient, layers, seed=seed)


def measure_rows(engines: Sequence[str], job: Job, device: torch.device, seconds: float, steps: int | None, floor: Floor) -> list[Row]:
    """A row per engine, repeated in turn; `floor` is what they are compared with."""
    timings: dict[str, Timing] = {}
    reasons: dict[str, str] = {}
    for engine in engines:
        try:
            timings[engine] = Timing(partial(ROWS[engine], job, device), device).prepare(seconds, _most(job), steps)
        except (Unavailable, WalkDiverged, torch.OutOfMemoryError) as error:
            reasons[engine] = " ".join(str(error).split())
    repeat_in_turn(timings.values())
    neurons = {engine: job.layer.neurons if engine in _TODAY else job.configs * job.rows for engine in engines}
    rates = {engine: neurons[engine] * timing.steps / timing.median for engine, timing in timings.items()}
    rows = []
    for engine in engines:
        if engine in reasons:
            rows.append(Row(job.rule.name, engine, reasons[engine]))
            continue
        timing, rate = timings[engine], rates[engine]
        elements = rate * job.layer.fan_in
        rows.append(
            Row(
                job.rule.name, engine, "", neurons[engine], timing.steps, tuple(timing.seconds), timing.spread, timing.first_call,
                rate, elements, rate / rates["loop"] if "loop" in rates else None, elements / floor.rate if floor.rate else None,
            )
        )  # fmt: skip
    return rows


def _most(job: Job) -> int:
    """Steps whose statistics fit."""
    return max(1, _HOST // (job.configs * job.rows * 8 * len(fields(Walk)))) * job.window


def paper_figure(device: torch.device, engine: str, steps: int, seed: int) -> tuple[list[str], Timing]:
    """(engine of each walk, timing) of the paper's Figure 9: its four optimizers, a thread each, statistics and traces too.

    The first call walks two windows, to compile.
    """
    jobs = [
        Job((find_rule(name)(**hyper),), Layer.draw(128, 128, 32, scale, "normal", seed), steps, seed=seed)
        for name, scale, hyper in PAPER_CASES[:4]
    ]

    engines = [resolve_engine(engine, job, device) for job in jobs]
    abreast = 1 if any(module.ALONE for module in engines) else min(cpu_cores(), len(jobs))

    def traced(module: ModuleType, job: Job) -> dict[str, np.ndarray]:
        walked = module.walk(job, device)
        return {quantity: walked.trace(quantity) for quantity in QUANTITIES}

    def figure(length: int) -> None:
        with ThreadPoolExecutor(abreast) as pool:
            list(pool.map(traced, engines, [replace(job, steps=length) for job in jobs]))

    with single_threaded():
        timing = Timing(lambda: figure, device, first=min(steps, 2 * jobs[0].window))
        timing.steps = steps
        repeat_in_turn([timing])
    return [module.__name__.rpartition(".")[2] for module in engines], timing


def compare_gpus(job: Job, seconds: float, steps: int | None) -> tuple[int, Timing, Timing, bool]:
    """(number of GPUs, timing on the first, timing on all, whether both walks are the same bit by bit)."""
    count = torch.cuda.device_count()
    if count < 2:
        raise Unavailable(f"--gpus needs two CUDA devices or more; torch finds {count}.")
    if missing := fused.lacks(job, torch.device("cuda")):
        raise Unavailable(f"--gpus needs the fused engine, which does not carry {missing}.")
    every = [torch.device("cuda", i) for i in range(count)]

    def walk(devices: Sequence[torch.device], length: int) -> Walk:
        return fused.walk(replace(job, steps=length), devices[0], devices=devices)

    one = Timing(lambda: partial(walk, every[:1]), every[0])
    both = Timing(lambda: partial(walk, every), every[0])
    one.prepare(seconds, _most(job), steps)
    both.prepare(seconds, _most(job), one.steps)  # equal work
    repeat_in_turn([one, both])
    first, second = walk(every[:1], one.steps), walk(every, one.steps)
    same = first.window == second.window and all(
        getattr(first, field.name).tobytes() == getattr(second, field.name).tobytes() for field in fields(Walk)[1:]
    )
    return count, one, both, same
