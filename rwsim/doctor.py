"""What is installed here, what it runs on, and whether rwsim can do its main job: walk an optimizer and predict its equilibrium."""

import importlib.metadata
import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import rwsim

_REINSTALL = "install rwsim again: pip install --force-reinstall rwsim"


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its memory in bytes, its compute capability such as 9.0."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Trouble:
    """Something that is not as it should be, and what to do about it; `fatal`: rwsim cannot do its main job."""

    what: str
    remedy: str
    fatal: bool


@dataclass(frozen=True)
class Health:
    """What `rwsim doctor` finds.

    Attributes:
        rwsim: Its version.
        place: The folder it runs from.
        editable: Whether that is a checkout (pip install -e); None if it is not installed at all, but found on the path.
        python: Version of the interpreter.
        platform: Operating system and machine.
        packages: Version of each package that rwsim needs or can use; None: not here.
        cores: That this process may use.
        threads: That torch computes with.
        gpus: CUDA devices that torch sees.
        triton: ``compiles`` or ``fails`` on the first GPU, ``interprets`` on the CPU, is ``idle`` (no GPU) or ``absent``.
        extras: Optional extra -> the packages of it that are missing.
        places: Data and caches: a name -> the folder, None where it is not there.
        troubles: What is wrong.
        passed: Whether rwsim can do its main job.
    """

    rwsim: str
    place: str
    editable: bool | None
    python: str
    platform: str
    packages: dict[str, str | None]
    cores: int
    threads: int
    gpus: list[Gpu]
    triton: Literal["compiles", "fails", "interprets", "idle", "absent"]
    extras: dict[str, list[str]]
    places: dict[str, str | None]
    troubles: list[Trouble]
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine(out: Path = Path("rwsim-validate")) -> Health:
    """Look at everything, and walk an optimizer for some steps on the CPU, and on the first GPU if there is one.

    Args:
        out: Where the main job would write.

    Returns:
        What was found; nothing is written.
    """
    troubles: list[Trouble] = []
    needed, extras, editable = _requirements()
    packages = {name: _version(name) for name in [*needed, "triton"]}
    for name, least in needed.items():
        found = packages[name]
        if found is None or _numbers(found) < _numbers(least):
            wanted = f"{name}>={least}" if least else name
            troubles.append(Trouble(f"{wanted} is needed, {found or 'none'} is here", f"pip install '{wanted}'", True))
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not os.access(above, os.W_OK):
        troubles.append(Trouble(f"results cannot be written to {above}", "run it elsewhere, or give --out a place that can", True))
    if failure := _walk("cpu"):
        troubles.append(Trouble(f"a walk on the CPU fails: {failure}", _REINSTALL, True))
    gpus, threads, triton = _devices(packages["triton"], troubles)
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return Health(
        rwsim.__version__, str(Path(rwsim.__file__).parent), editable, platform.python_version(), platform.platform(), packages,
        len(affinity(0)) if affinity else os.cpu_count() or 1, threads, gpus, triton,
        {extra: [name for name in names if _version(name) is None] for extra, names in extras.items()}, _places(), troubles,
        passed=not any(trouble.fatal for trouble in troubles),
    )  # fmt: skip


def _requirements() -> tuple[dict[str, str], dict[str, list[str]], bool | None]:
    """What the installation asks for: package -> lowest version; extra -> packages; whether it is editable."""
    try:
        mine = importlib.metadata.distribution("rwsim")
    except importlib.metadata.PackageNotFoundError:
        return dict.fromkeys(("numpy", "scipy", "sympy", "torch"), ""), {}, None
    needed: dict[str, str] = {}
    extras: dict[str, list[str]] = {}
    for text in mine.requires or []:
        # Of a requirement we write only these: name, extras of it, a lowest version, an extra of ours.
        name, least, extra = re.fullmatch(
            r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"](\w+)['\"])?.*", text
        ).groups()  # type: ignore[union-attr]  # it matches any requirement
        if extra:
            extras.setdefault(extra, []).append(name)
        else:
            needed[name] = least or ""
    return needed, extras, bool(json.loads(mine.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _walk(device: str, engine: str = "auto") -> str:
    """Walk and predict; what went wrong, in a line."""
    try:
        setting: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "fan_in": 16, "batch": 8, "neurons": 4}
        norm = rwsim.predict("adamw", **setting).exact.norm
        walk = rwsim.simulate("adamw", steps=50, device=device, engine=engine, **setting).walk
        values = [norm, *walk.norm_sq.ravel()]
        return "" if all(math.isfinite(value) for value in values) else f"it gives {norm} and NaN or Inf"
    except Exception as error:  # whatever it is, it is what is asked
        return " ".join(f"{type(error).__name__}: {error}".split())


def _devices(
    triton: str | None, troubles: list[Trouble]
) -> tuple[list[Gpu], int, Literal["compiles", "fails", "interprets", "idle", "absent"]]:
    """GPUs, threads and how Triton works; a GPU that does not is no obstacle to the main job, which takes the CPU."""
    try:
        import torch
    except Exception as error:
        remedy = "install torch again, https://pytorch.org says how"
        troubles.append(Trouble(f"torch cannot be imported: {' '.join(str(error).split())}", remedy, True))
        return [], 0, "idle" if triton else "absent"
    gpus = []
    for i in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(i)
        gpus.append(Gpu(known.name, known.total_memory, f"{known.major}.{known.minor}"))
        try:
            torch.ones(2, device=f"cuda:{i}").sum().item()
        except Exception as error:
            reason = " ".join(str(error).split())
            troubles.append(
                Trouble(f"GPU {i} ({known.name}) does not compute: {reason}", "install a torch built for it and for its driver", False)
            )
    threads = torch.get_num_threads()
    if triton is None:
        if gpus:
            troubles.append(Trouble("no Triton beside a GPU: walks take the slow engine there", "pip install triton", False))
        return gpus, threads, "absent"
    if os.environ.get("TRITON_INTERPRET") == "1":
        if gpus:
            troubles.append(Trouble("Triton interprets its kernels: slow", "unset TRITON_INTERPRET", False))
        return gpus, threads, "interprets"
    if not gpus:
        return gpus, threads, "idle"
    if failure := _walk("cuda", "fused"):
        remedy = "install the triton that belongs to this torch, or take --engine reference on the GPU"
        troubles.append(Trouble(f"a walk in Triton fails: {failure}", remedy, False))
        return gpus, threads, "fails"
    return gpus, threads, "compiles"


def _places() -> dict[str, str | None]:
    from rwsim.experiments.idx import FOLDER

    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")
    known = {"fashion-mnist": FOLDER, "triton's cache": triton}
    return {name: str(folder) if folder.is_dir() else None for name, folder in known.items()}
