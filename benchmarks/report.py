"""The run as text and as JSON: where it ran, what it found."""

import datetime
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.floor import cpu_cores
from benchmarks.rows import Row
from benchmarks.timing import Timing
from rwsim import __version__

_COLUMNS = (
    ("optimizer", 9), ("engine", 9), ("neurons", 9), ("steps", 9), ("neuron-steps/s", 14), ("±", 6), ("element-steps/s", 15),
    ("x loop", 8), ("of floor", 8), ("first call", 10),
)  # fmt: skip


def environment(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Device, versions, date and command."""
    cuda = device.type == "cuda"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "gpus": torch.cuda.device_count() if cuda else 0,
        "cores": cpu_cores(),
        "threads": torch.get_num_threads(),
        "rwsim": __version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name; Linux alone tells it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def heading(meta: dict[str, Any]) -> str:
    """Two lines above the table."""
    versions = ", ".join(f"{name} {meta[name]}" for name in ("rwsim", "torch", "triton", "python"))
    return f"{meta['command']}\n{meta['device']}, {meta['cores']} cores, {meta['threads']} torch threads; {versions}; {meta['date']}"


def table_head() -> str:
    return "  ".join(f"{name:<{width}}" if i < 2 else f"{name:>{width}}" for i, (name, width) in enumerate(_COLUMNS))


def table_line(row: Row) -> str:
    """A row of the table, or its reason."""
    start = f"{row.optimizer:<{_COLUMNS[0][1]}}  {row.engine:<{_COLUMNS[1][1]}}"
    if row.reason:
        return f"{start}  {row.reason}"
    texts = (
        str(row.neurons), str(row.steps), _number(row.neuron_steps_per_second, ".3g"), _number(row.spread, ".1%"),
        _number(row.element_steps_per_second, ".3g"), _number(row.ratio_to_loop, ".4g"), _number(row.ratio_to_floor, ".1%"),
        _number(row.first_call_seconds, ".2f") + " s",
    )  # fmt: skip
    return start + "".join(f"  {text:>{width}}" for text, (_, width) in zip(texts, _COLUMNS[2:], strict=True))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def timing_text(timing: Timing) -> str:
    """Median, spread, first call."""
    return f"{timing.median:.4g} s ± {timing.spread:.1%} for {timing.steps} steps (first call {timing.first_call:.2f} s)"


def timing_record(timing: Timing) -> dict[str, Any]:
    return {
        "steps": timing.steps, "seconds": list(timing.seconds), "median_seconds": timing.median, "spread": timing.spread,
        "first_call_seconds": timing.first_call,
    }  # fmt: skip
