"""Walking a sweep: batches, where they run, and what becomes of a batch that fails."""

import math
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch

from rwsim.errors import InvalidArgument, RwsimError, Unavailable, WalkDiverged, WalkInterrupted
from rwsim.optimizers import find_rule
from rwsim.sweeps.grid import Grid, Point, Setting, SweepConfig
from rwsim.sweeps.outcome import Outcome, diverged, reduce
from rwsim.theory.factors import schedule_factors
from rwsim.walk.job import Job
from rwsim.walk.measure import SERIES
from rwsim.walk.simulate import resolve_device, resolve_engine, single_threaded
from rwsim.walk.system import Layer

EXECUTORS = ("local", "processes", "dask")
# Element-steps a second of one core or card, for estimates: what `benchmarks` measured, rounded down.
_RATE = {"reference": 1.5e7, "blocked": 6e7, "fused": 2.5e11}
# Seconds that a batch should take, about: what a kill loses, against what a batch costs by itself.
_SECONDS = {"cpu": 6.0, "cuda": 0.25}
# Rows that fill a card, and a multiple of the configs that the blocked engine walks abreast.
_ROWS, _ABREAST = 32_768, 16
# A batch that took a worker down this often is not sent again.
_TRIES = 3


@runtime_checkable
class Submits(Protocol):
    """Any executor: `concurrent.futures`, a dask client's `get_executor()`, ..."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]: ...


@dataclass(frozen=True)
class Task:
    """Points that share a job, as they are sent to a worker: values and a name, since a class from a user's file cannot be."""

    config: SweepConfig
    optimizer: str
    setting: Setting
    hyper: tuple[dict[str, Any], ...]
    replicates: tuple[int, ...]
    engine: str
    device: str

    def job(self) -> Job:
        """What is to be walked."""
        config, setting, kind = self.config, self.setting, find_rule(self.optimizer)
        rules = tuple(kind.each(self.hyper))
        layer = Layer.draw(setting.fan_in, config.neurons, setting.batch, setting.loss_scale, config.gamma, config.seed)
        factors = schedule_factors(setting.schedule, config.steps)
        schedule = {} if factors is None else {"lr": factors}
        return Job(
            rules, layer, config.steps, config.gradient, config.layers, schedule=schedule, seed=config.seed,
            replicates=self.replicates, window=config.window_steps,
        )  # fmt: skip


def walk_task(task: Task, device: str = "", alone: bool = False, heard: Callable[[], None] | None = None) -> list[Outcome]:
    """Walk a task's points; one that diverges is taken out, the others are walked without it.

    Args:
        task: What to walk.
        device: Where, in torch's words; else the task's.
        alone: This process has the machine; else others share it, and the blocked engine forks no processes.
        heard: Called now and then; may raise.
    """
    job = task.job()
    target = torch.device(device or task.device)
    engine = resolve_engine(task.engine, job, torch.device(target.type))
    options: dict[str, Any] = {} if alone or not engine.ALONE else {"processes": 0}
    windows = -(-job.steps // job.window)
    outcomes: dict[int, Outcome] = {}
    left = list(range(job.configs))
    with nullcontext() if alone else single_threaded():
        while left:
            part = replace(job, rules=tuple(job.rules[i] for i in left), replicates=tuple(task.replicates[i] for i in left))
            try:
                walk = engine.walk(part, target, progress=None if heard is None else lambda step: heard(), **options)
            except WalkDiverged as error:
                for config in error.configs:
                    outcomes[left[config]] = diverged(error.walk, config, error.step, windows)
            else:
                outcomes |= dict(zip(left, reduce(walk), strict=True))
            left = [i for i in left if i not in outcomes]
    return [outcomes[i] for i in range(job.configs)]


@dataclass(frozen=True)
class Plan:
    """How a sweep is to be walked, and what it will take.

    Attributes:
        engine: Its name.
        batch: Most points of a task.
        points: How many are still to be walked.
        neuron_steps: Theirs.
        seconds: Estimate.
        bytes: Estimate of the memory of all tasks under way at once.
        devices: In torch's words.
    """

    engine: str
    batch: int
    points: int
    neuron_steps: float
    seconds: float
    bytes: float
    devices: tuple[str, ...]

    def __str__(self) -> str:
        time = timedelta(seconds=math.ceil(self.seconds))
        where = f"{self.engine} engine on {', '.join(self.devices)}"
        return (
            f"{self.points:,} points, {self.neuron_steps:.2g} neuron-steps: about {time} ({where}), "
            f"{self.bytes / 2**20:,.0f} MiB, {self.batch:,} points at a time"
        )


def devices(kind: str) -> tuple[str, ...]:
    """Every visible device of a kind."""
    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) if kind == "cuda" else ("cpu",)


def _free(kind: str) -> float:
    """Bytes that are free where the walk keeps its state."""
    if kind == "cuda":
        return float(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # not on every system
        return math.inf


def plan(grid: Grid, points: Sequence[Point], engine: str, kind: str, workers: int) -> Plan:
    """Batches that fit, and how long they will take.

    Raises:
        InvalidArgument: One point alone does not fit in memory.
    """
    config = grid.config
    rows = config.neurons * config.layers
    fan_in = max((point.setting.fan_in for point in points), default=config.fan_in)
    buffers = max((len(type(point.rule).state) for point in points[:: max(1, len(points) // 100)]), default=1)
    windows = -(-config.steps // config.window_steps)
    # Weights, buffers, the gradient and scratch; every window's means in float64, and once more on their way.
    state = rows * fan_in * 4.0 * (3 + buffers)
    if config.gradient == "faithful":
        state += config.layers * max((p.setting.batch for p in points), default=4) * (fan_in + config.neurons) * 4.0
    kept = rows * windows * len(SERIES) * 16.0
    places = devices(kind)
    abreast = 2 * len(places) if kind == "cuda" else max(1, workers)
    room = 0.5 * min(_free("cpu"), _free(kind)) / abreast
    if state + kept > room:
        raise InvalidArgument(
            "neurons", f"must let one point fit into memory: {(state + kept) / 2**30:.1f} GiB against {room / 2**30:.1f} GiB free",
            config.neurons, "take fewer neurons, layers or fan_in, or a longer window",
        )  # fmt: skip
    cores = len(places) if kind == "cuda" else os.cpu_count() or 1
    rate = _RATE[engine] / (20 if config.gradient == "faithful" else 1) * cores
    cost = config.steps * rows * fan_in
    share = _SECONDS[kind] * rate / (len(places) if kind == "cuda" else max(1, workers)) / cost
    wanted = max(share, _ROWS / rows if kind == "cuda" else 1)
    batch = max(1, int(min(wanted, room / (state + kept), 4096)))
    if _ABREAST < batch < len(points):
        batch -= batch % _ABREAST
    total = sum(config.steps * rows * point.setting.fan_in for point in points)
    work = float(config.steps * rows * len(points))
    return Plan(engine, batch, len(points), work, total / rate, min(batch, len(points)) * (state + kept) * abreast, places)


def tasks(
    grid: Grid, points: Sequence[Point], engine: str, kind: str, batch: int, abreast: int = 0
) -> Iterator[tuple[Task, list[int]]]:  # fmt: skip
    """Points in batches that one job can hold, in their order, with the places of each batch's in `points`.

    With `abreast`, the number of batches that are walked side by side, the last batches are smaller, down to a quarter, so that
    all end at about the same time.
    """
    groups: dict[tuple[str, Setting], list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault((point.optimizer, point.setting), []).append(i)
    left = len(points)
    for (optimizer, setting), members in groups.items():
        first = 0
        while first < len(members):
            size = batch if not abreast else min(batch, max(-(-batch // 4), left // (2 * abreast)))
            some = members[first : first + size]
            hyper = tuple(dict(vars(points[i].rule.values)) for i in some)
            yield Task(grid.config, optimizer, setting, hyper, tuple(points[i].replicate for i in some), engine, kind), some
            first += size
            left -= len(some)


def resolve(grid: Grid) -> tuple[str, str]:
    """Engine and device type of a sweep: one for all its points.

    Raises:
        Unavailable: An engine or device that is not there, or does not carry every point.
    """
    config = grid.config
    device = resolve_device(config.device)
    # What an engine carries hangs on the class and the setting, not on values.
    first = {(point.optimizer, point.setting): point for point in reversed(grid.points)}
    jobs = [task.job() for task, _ in tasks(grid, list(first.values()), config.engine, device.type, 1)]
    if config.engine != "auto":
        for job in jobs:
            resolve_engine(config.engine, job, device)
        return config.engine, device.type
    names = {resolve_engine("auto", job, device).__name__.rpartition(".")[2] for job in jobs}
    return names.pop() if len(names) == 1 else "reference", device.type


class _Local:
    """This process, in threads: two for each card, so that one reduces while the other walks."""

    def __init__(self, kind: str, workers: int, stop: threading.Event) -> None:
        self.places: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stop = stop
        names = devices(kind) * 2 if kind == "cuda" else devices(kind) * workers
        for name in names:
            self.places.put(name)
        self.pool = ThreadPoolExecutor(len(names))

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return self.pool.submit(self._run, fn, *args)

    def _run(self, fn: Callable[..., Any], *args: Any) -> Any:
        place = self.places.get()
        try:
            self._heard()
            return fn(*args, place, True, self._heard)
        finally:
            self.places.put(place)

    def _heard(self) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt

    def shutdown(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def _quiet_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: a worker ends its batch


@contextmanager
def executor(name: str, kind: str, workers: int, scheduler: str, stop: threading.Event) -> Iterator[tuple[Callable[[], Submits], int]]:
    """A function that makes an executor (again, when one broke), and how many tasks to hold in flight."""
    made: list[Any] = []
    closing: list[Callable[[], object]] = []

    def make() -> Submits:
        if name == "local":
            made.append(_Local(kind, workers, stop))
        elif name == "processes":
            import multiprocessing

            context = multiprocessing.get_context("spawn")
            made.append(ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet_worker))
        else:
            made.append(_dask(workers, scheduler, closing))
        return made[-1]

    try:
        yield make, 4 * len(devices(kind)) if name == "local" and kind == "cuda" else 2 * workers
    finally:
        for each in made:
            if isinstance(each, ProcessPoolExecutor):
                each.shutdown(cancel_futures=True)
            else:
                each.shutdown()
        for close in closing:
            close()


def _dask(workers: int, scheduler: str, closing: list[Callable[[], object]]) -> Any:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise Unavailable("`executor` dask needs dask.distributed, which is not here; pip install 'rwsim[cluster]'.") from None
    if scheduler:
        try:
            client = Client(scheduler, timeout="10s")
        except (OSError, ValueError) as error:
            raise InvalidArgument("scheduler", "must be the address of a dask scheduler", scheduler, str(error)) from None
    else:
        cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
        client = Client(cluster)
        closing.append(cluster.close)
    closing.insert(0, client.close)
    return client.get_executor(pure=False, retries=_TRIES)


class Interrupted(RwsimError):
    """Ctrl-C: everything finished is kept."""


def drive(
    work: Iterator[tuple[Task, list[int]]],
    make: Callable[[], Submits],
    flight: int,
    keep: Callable[[list[tuple[int, Outcome]]], None],
    stop: threading.Event,
) -> None:
    """Send every task, keep what comes back under its points' places, and send again what went down with a worker.

    Raises:
        Interrupted: Ctrl-C; tasks under way are waited for, or ended where they can hear it.
        RwsimError: A task failed, or took a worker down three times.
    """
    pool = make()
    flying: dict[Future[Any], tuple[Task, list[int], int]] = {}
    again: list[tuple[Task, list[int], int]] = []
    fresh = ((task, points, 0) for task, points in work)

    def collect(done: Sequence[Future[Any]]) -> bool:
        """Whether the executor is whole."""
        whole = True
        for future in done:
            task, points, tries = flying.pop(future)
            try:
                keep(list(zip(points, future.result(), strict=True)))
            except BrokenExecutor as error:
                whole = False
                if tries + 1 >= _TRIES:
                    raise RwsimError(f"a worker ended {_TRIES} times at {task.optimizer}, {task.hyper[0]}: {error}.") from error
                again.append((task, points, tries + 1))
        return whole

    try:
        while True:
            while len(flying) < flight and (item := again.pop() if again else next(fresh, None)):
                try:
                    flying[pool.submit(walk_task, item[0])] = item
                except BrokenExecutor:
                    again.append(item)
                    break
            if not flying and not again:
                return
            done = list(wait(flying, timeout=0.5, return_when=FIRST_COMPLETED).done)
            if not collect(done) or (again and not flying):
                # All that was in flight went down together.
                collect(list(wait(flying).done))
                pool = make()
    except (KeyboardInterrupt, WalkInterrupted):
        stop.set()
        for future in list(flying):
            if future.cancel():
                flying.pop(future)
        for future in list(flying):
            _, points, _ = flying.pop(future)
            try:
                keep(list(zip(points, future.result(), strict=True)))
            except (Exception, KeyboardInterrupt):
                continue  # it did not finish
        raise Interrupted("interrupted") from None
    finally:
        stop.set()
