"""`python -m benchmarks`: every engine beside what a user would write today, in one run on one device.

The rows: `loop`, `captured`, `compiled` (see `benchmarks.peers`) and rwsim's engines. Each is compiled and warmed up, then
all are timed in turn, five times; the table gives the median and half of the range. neuron-steps/s counts every neuron of
every config; element-steps/s is that times the fan-in. Ratios are to the row `loop` of the same run and to the floor,
which `benchmarks.floor` counts. Exit 0 = measured, 2 = bad usage, 3 = interrupted or failed.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import report
from benchmarks.floor import Floor, cpu_floor, cuda_floor
from benchmarks.peers import PEERS
from benchmarks.rows import ROWS, Row, compare_gpus, measure_rows, paper_figure, paper_job
from rwsim.errors import InvalidArgument, RwsimError, Unavailable
from rwsim.walk.job import Job
from rwsim.walk.simulate import ENGINES, resolve_device
from rwsim.walk.system import GRADIENTS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"benchmarks: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=PEERS, default=["adamw"], metavar="RULE", help=f"of {', '.join(PEERS)}; default adamw")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}; default all")
    add("--neurons", type=int, default=128, help="K of a layer; default 128")
    add("--fan-in", type=int, default=128, help="C; default 128")
    add("--batch", type=int, default=32, help="B; default 32")
    add("--layers", type=int, default=1, help="copies of the layer that the engines walk (loop, captured, compiled walk one)")
    add("--configs", type=int, default=1, help="learning rates that the engines walk (the others walk the first)")
    add("--gradient", choices=GRADIENTS, default="marginal", help="of the engines (the others are faithful); default marginal")
    add("--steps", type=int, help="of a repeat; default: what fills --seconds; with --figure 15000")
    add("--seconds", type=float, default=2.0, help="for the repeats of a row, compilation aside; default 2")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA where there is one")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="FILE.json", help="write everything to this file too")
    add("--figure", action="store_true", help="instead: the paper's whole figure, four optimizers side by side")
    add("--engine", choices=("auto", *ENGINES), default="auto", help="of --figure")
    add("--gpus", action="store_true", help="instead: the fused engine on one GPU and on all visible ones, numbers compared")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        document = _measure(options, arguments)
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    except KeyboardInterrupt:
        return _refuse("interrupted", 3)
    except RwsimError as error:
        return _refuse(error, 2 if isinstance(error, (InvalidArgument, Unavailable)) else 3)
    return 0


def _refuse(error: object, status: int) -> int:
    print(f"benchmarks: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    if not 0 < options.seconds < math.inf:
        raise InvalidArgument("--seconds", "must be positive and finite", options.seconds, "for example 2")
    for name in ("configs", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InvalidArgument(f"--{name}", "must be at least 1", value, "leave it out for the default")
    if options.seed < 0:
        raise InvalidArgument("--seed", "must be at least 0", options.seed, "for example 0")
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InvalidArgument("--out", "must be a file in a directory that is there", str(options.out))
    # Not `resolve_device`'s auto, which is the CPU: what is measured here is the machine.
    wanted = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    device = resolve_device(wanted)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # without a number it stands for all of them
    jobs = [
        paper_job(name, options.neurons, options.fan_in, options.batch, options.configs, options.gradient, options.layers, options.seed)
        for name in dict.fromkeys(options.optimizer)
    ]
    meta = report.environment(device, arguments)
    print(report.heading(meta), end="\n\n")
    if options.figure or options.gpus:
        document: dict[str, Any] = {"meta": meta}
        if options.figure:
            document["figure"] = _figure(device, options)
        if options.gpus:
            document["gpus"] = [_gpus(job, options) for job in jobs]
        return document
    floors, rows = _table(jobs, device, options)
    return {
        "meta": meta,
        "settings": {name: getattr(options, name) for name in ("fan_in", "batch", "layers", "configs", "gradient", "seconds", "seed")},
        "floors": [{"optimizer": job.rule.name, **dataclasses.asdict(floor)} for job, floor in zip(jobs, floors, strict=True)],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _table(jobs: Sequence[Job], device: torch.device, options: argparse.Namespace) -> tuple[list[Floor], list[Row]]:
    """Every row of every job, printed job by job."""
    cpu = cpu_floor(jobs[0].dtype) if device.type == "cpu" else None
    floors = [cpu or cuda_floor(job, device) for job in jobs]
    rows: list[Row] = []
    print(report.table_head(), flush=True)
    for job, floor in zip(jobs, floors, strict=True):
        found = measure_rows([name for name in ROWS if name in options.rows], job, device, options.seconds, options.steps, floor)
        print(*map(report.table_line, found), sep="\n", flush=True)
        rows += found
    print("\nFloor:", *(f"{job.rule.name}: {floor.text}" for job, floor in zip(jobs, floors, strict=True)), sep="\n  ")
    print("±: half of the range over the repeats. first call: construction, compilation and 8 steps.")
    return floors, rows


def _figure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    try:
        engines, timing = paper_figure(device, options.engine, options.steps or 15_000, options.seed)
    except Unavailable as error:
        print(f"figure: {error}")
        return {"engines": [], "reason": str(error)}
    print(f"figure, engine {' or '.join(dict.fromkeys(engines))}: {report.timing_text(timing)}")
    return {"engines": engines, "reason": "", **report.timing_record(timing)}


def _gpus(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    name = job.rule.name
    try:
        count, one, both, same = compare_gpus(job, options.seconds, options.steps)
    except Unavailable as error:
        print(f"{name}: {error}")
        return {"optimizer": name, "reason": str(error)}
    ratio = one.median / both.median
    print(f"{name}: 1 GPU {report.timing_text(one)}")
    print(f"{name}: {count} GPUs {report.timing_text(both)}, {ratio:.3g} x; the numbers are {'the same bits' if same else 'NOT the same'}")
    timings = {"one": report.timing_record(one), "all": report.timing_record(both)}
    return {"optimizer": name, "reason": "", "gpus": count, **timings, "ratio": ratio, "same_bits": same}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
