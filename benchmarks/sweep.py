"""`python -m benchmarks.sweep`: a whole sweep, where its time goes, and whether more GPUs make it faster and change a bit.

Every run is a process of its own, on one GPU and on all in turn, that sweeps twice: the first time loads and compiles. Phases:
until the first walk begins, until the last walk ends, until results are on disk. `apart`: the time between the last walks of
the devices. Without CUDA the CPU is measured, by itself. Exit 0 = measured and bitwise equal, 1 = not equal.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rwsim.sweeps import result
from rwsim.sweeps.sweep import sweep
from rwsim.walk.simulate import ENGINES, _load

PHASES = ("total", "before", "walking", "tail", "apart")


def measure(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Phases of a sweep in seconds, and a hash of every data variable."""
    walks: list[tuple[str, float, float]] = []
    lock = threading.Lock()
    modules = {name: _load(name) for name in ENGINES}
    engines = {name: module.walk for name, module in modules.items()}

    def timed(walk: Any) -> Any:
        def call(job: Any, device: torch.device, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return walk(job, device, **options)
            finally:
                with lock:
                    walks.append((str(device), began, time.perf_counter()))

        return call

    for name, walk in engines.items():
        modules[name].walk = timed(walk)  # type: ignore[attr-defined]  # a module is typed without its functions
    try:
        began = time.perf_counter()
        found = sweep(config, folder)
        ended = time.perf_counter()
    finally:
        for name, walk in engines.items():
            modules[name].walk = walk  # type: ignore[attr-defined]  # a module is typed without its functions
    first, last = min(w[1] for w in walks), max(w[2] for w in walks)
    ends = [max(w[2] for w in walks if w[0] == device) for device in {w[0] for w in walks}]
    bits = {str(name): hashlib.sha256(array.values.tobytes()).hexdigest() for name, array in found.data.data_vars.items()}
    phases = (ended - began, first - began, last - first, ended - last, max(ends) - min(ends))
    return {**dict(zip(PHASES, phases, strict=True)), "batches": len(walks), "devices": len(ends), "bits": bits}


def _run(options: argparse.Namespace, gpus: int) -> list[dict[str, Any]]:
    """The phases of both sweeps of a process that sees so many GPUs."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))} if gpus else {}
    settings = [f"--{name}={getattr(options, name)}" for name in ("points", "neurons", "steps", "optimizer", "device")]
    command = [sys.executable, "-m", "benchmarks.sweep", "--one", *settings]
    done = subprocess.run(command, env={**os.environ, **visible}, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(arguments: Sequence[str]) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    add = parser.add_argument
    add("--points", type=int, default=100, help="along each of lr and weight decay; default 100")
    add("--neurons", type=int, default=128)
    add("--steps", type=int, default=15_000)
    add("--optimizer", default="adamw")
    add("--repeats", type=int, default=3)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        axes = {"lr": f"1e-4:1e-1:{options.points}:log", "weight_decay": f"1e-2:10:{options.points}:log"}
        config = {
            "optimizer": [options.optimizer],
            "axes": axes,
            "neurons": options.neurons,
            "steps": options.steps,
            "device": options.device,
        }
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measure(config, Path(folder) / "out")), flush=True)
        return 0
    result.need_xarray()
    counts = sorted({1, torch.cuda.device_count()}) if options.device == "cuda" else [0]
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    bits = []
    print(f"{options.optimizer}, {options.points} x {options.points} points, {options.neurons} neurons, {options.steps} steps")
    for _ in range(options.repeats):
        for count in counts:
            for name, run in zip(("first", "again"), _run(options, count), strict=True):
                bits.append(run.pop("bits"))
                print(
                    f"{count} GPUs, {name}: " + ", ".join(f"{phase} {run[phase]:.2f}" for phase in PHASES), f"s, {run['batches']} batches"
                )
            runs[count].append(run)
    for count in counts:
        print(
            f"{count} GPUs, again, median of {options.repeats}:",
            *(f"{p} {statistics.median(r[p] for r in runs[count]):.2f}" for p in PHASES),
        )
    if len(counts) > 1:
        one, every = (statistics.median(run["total"] for run in runs[count]) for count in counts)
        print(f"{counts[1]} GPUs are {one / every:.2f} x as fast as one")
    same = all(each == bits[0] for each in bits)
    print(f"all {len(bits[0])} data variables of all {len(bits)} sweeps are {'bitwise equal' if same else 'NOT equal'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
