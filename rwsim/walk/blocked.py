"""The blocked engine: a walk on all cores of the CPU, in in-place numpy and torch calls on arrays that stay in the cache.

Rows are walked in groups small enough for the cache, each through a chunk of steps at a time; processes forked for the walk
take (chunk, group) after (chunk, group), which is `worker`. Threads would not do: a call takes some microseconds, and handing
the interpreter over between calls takes longer than that. Random numbers belong to a block of rows, whoever draws them and in
whatever company, so a config's walk is bitwise the same in any batch, order or number of processes.
"""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.errors import WalkDiverged, WalkInterrupted
from rwsim.walk.job import Job, Noise
from rwsim.walk.measure import Walk
from rwsim.walk.program import untraceable
from rwsim.walk.worker import State, Worker

# Element-steps below which starting processes costs more than it saves.
_SMALL = 3e7
# See `simulate.ENGINES`.
ALONE = True


class _Enough(Exception):
    """Somebody has seen what they wanted to see."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk


def lacks(job: Job, device: torch.device) -> str:
    """What this engine does not carry of a job, or nothing."""
    if device.type != "cpu":
        return f"device {device.type}"
    if job.gradient == "faithful":
        return "the faithful gradient"
    return untraceable(job.rule)


def _processes(job: Job) -> int:
    """How many processes to fork: none for a small walk, or where that is unsafe or forbidden."""
    if job.steps * job.configs * job.rows * job.layer.fan_in < _SMALL or sys.platform != "linux":
        return 0
    return 0 if multiprocessing.current_process().daemon else len(os.sched_getaffinity(0))


def _serve(state: State, lock: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then says stop
    torch.set_num_threads(1)
    status = 1
    try:
        Worker(state).run(lock, lambda: None)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Not through Python's own shutdown: forked from a pool's thread it would wait for that thread, which it is.
        os._exit(status)


def _run(state: State, processes: int, report: Callable[[], object]) -> None:
    """Walk in this process, or in forked ones while this one waits and reports."""
    if not processes:
        Worker(state).run(nullcontext(), report)
        return
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    workers = [context.Process(target=_serve, args=(state, lock), daemon=True) for _ in range(min(processes, len(state.groups)))]
    failed = 0
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads: these processes touch nothing that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for worker in workers:
                worker.start()
        running = workers
        while running and not failed:
            wait([worker.sentinel for worker in running], timeout=0.05)
            running = [worker for worker in workers if worker.is_alive()]
            failed = next((worker.exitcode for worker in workers if worker.exitcode), 0)
            report()
    finally:
        state.stop[0] = 1
        for worker in workers:
            if worker.pid is not None:
                if failed:  # it may have died with the lock in hand
                    worker.terminate()
                worker.join()
    if failed:
        raise RuntimeError(f"a process of the walk ended with exit code {failed}")


def walk(
    job: Job,
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
    start: Tensor | None = None,
    noise: Noise | None = None,
    processes: int | None = None,
    enough: Callable[[Walk], Walk | None] | None = None,
) -> Walk:
    """Walk a job.

    Args:
        job: What to walk.
        device: The CPU.
        progress: Called now and then, at ends of windows, with the number of steps done.
        start: Initial weights, shape (config, neuron, dim), in place of drawn ones. Not changed.
        noise: Stub (config, step) -> (normals of shape (rows, fan_in), lengths of shape (rows,)) in place of random numbers.
        processes: To fork; 0 walks in this one. By default one per core, none for a small walk.
        enough: See `simulate.run`.

    Raises:
        InvalidArgument: `start` of another shape.
        WalkDiverged: NaN or Inf, with the first step and config that show it, and the walk up to there.
        WalkInterrupted: Ctrl-C, with the whole windows walked so far.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.walk.system import Layer
        >>> job = Job((AdamW(lr=1e-2, weight_decay=0.1),), Layer.draw(fan_in=16, neurons=4), steps=250)
        >>> result = walk(job, torch.device("cpu"))
        >>> result.norm_sq.shape, result.lengths.tolist()
        ((3, 1, 4), [100, 100, 50])
    """
    job.check_start(start)
    processes = _processes(job) if processes is None else processes
    state = State(job, noise, start, job.keys(), processes)
    reported = 0

    def report() -> None:
        nonlocal reported
        steps = state.steps
        if steps == reported:
            return
        reported = steps
        if progress is not None:
            progress(steps)
        if enough is not None and (found := enough(state.walk(state.windows))) is not None:
            raise _Enough(found)

    try:
        _run(state, processes, report)
        sound, windows = state.sound, state.windows
        if sound == job.steps:
            return state.walk(windows)
        walked = state.walk(windows)
        if sound % job.window:
            # The window of the bad step is spoilt: walk again up to there, it is the same walk.
            schedule = {name: factors[:sound] for name, factors in job.schedule.items()}
            again = State(replace(job, steps=sound, schedule=schedule), noise, start, state.keys, processes)
            _run(again, processes, lambda: None)
            walked = again.walk(again.windows)
    except _Enough as stop:
        return stop.walk
    except KeyboardInterrupt:
        raise WalkInterrupted(f"interrupted at step {state.steps} of {job.steps}", state.steps, state.walk(state.windows)) from None
    configs = tuple(np.unique(np.argwhere(state.bad == sound + 1)[:, 1]).tolist())
    text = f"NaN or Inf at step {sound + 1} in config {configs[0]}, {job.rules[configs[0]]!r}"
    raise WalkDiverged(text, sound + 1, walked, configs)
