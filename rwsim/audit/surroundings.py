"""State of the process that an optimizer has no business with: what it is, what changed, and back."""

import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rwsim.audit.finding import FAULT, NOTE, Finding


def _numpy_state() -> tuple[Any, ...]:
    # That the global one moved is what is asked.
    state: Any = np.random.get_state()  # noqa: NPY002
    return (state[0], state[1].tobytes(), *state[2:])


def _put_numpy(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def _stdout() -> tuple[Any, Any]:
    """The object, and the file behind descriptor 1."""
    try:
        status = os.fstat(1)
    except OSError:
        return sys.stdout, None
    return sys.stdout, (status.st_dev, status.st_ino)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _put_directory(path: str) -> None:
    with suppress(OSError):
        os.chdir(path)


def _put_stdout(value: tuple[Any, Any]) -> None:
    sys.stdout = value[0]


# Type checkers draw from Python's generator at any call, so there only seeding counts.
_RESEEDED: list[str] = []


def _counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*arguments: Any, **keywords: Any) -> Any:
        _RESEEDED.append(name)
        return original(*arguments, **keywords)

    return counting


# code -> what it is, how to read it, how to put it back
_PARTS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "default-dtype": ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    "default-device": ("the default device", torch.get_default_device, torch.set_default_device),
    "number-of-threads": ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    "grad-mode": ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic-algorithms": (
        "the use of deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
    ),
    "matmul-precision": (
        "the precision of float32 matrix products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision,
    ),
    "random-numbers": (
        "torch's global random numbers", lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "numpy-random-numbers": ("NumPy's global random numbers", _numpy_state, _put_numpy),
    "python-random-numbers": ("Python's global random numbers", lambda: len(_RESEEDED), lambda _: _RESEEDED.clear()),
    "working-directory": ("the working directory", _directory, _put_directory),
    "standard-output": ("the standard output of the process", _stdout, _put_stdout),
}  # fmt: skip


# Probes with bfloat16 weights, where stochastic rounding has a reason to draw.
_LOW_PRECISION = {"P7", "P9"}


@dataclass(frozen=True)
class Surroundings:
    """What was found at one time."""

    values: dict[str, Any]
    seed: int

    @classmethod
    def now(cls) -> "Surroundings":
        return cls({code: read() for code, (_, read, _) in _PARTS.items()}, torch.initial_seed())

    def changes(self, when: str, probes: tuple[str, ...]) -> list[Finding]:
        """A finding for each that is not any more what it was; what can be put back is."""
        found = []
        for code, (what, read, put) in _PARTS.items():
            if read() == self.values[code]:
                continue
            if code == "random-numbers" and torch.initial_seed() == self.seed and probes and set(probes) <= _LOW_PRECISION:
                text = f"Draws from {what} {when}: stochastic rounding of low-precision weights does."
                found.append(Finding("draws-random-numbers", NOTE, "low", text, probes))
            else:
                found.append(Finding(f"changes-{code}", FAULT, "medium", f"Changes {what} {when}.", probes))
            put(self.values[code])
        return found


def seed(value: int) -> None:
    """Seed every global generator of this process (a child), at numbers that nobody else chooses: reseeding then shows."""
    torch.manual_seed(value + 0x5EED_0F_A0D17)
    np.random.seed((value + 0x5EED) % 2**32)  # noqa: NPY002
    random.seed(value + 0x5EED_0F_A0D17)
    # torch.compile puts Python's state back with setstate.
    setattr(random, "seed", _counted("seed", random.seed))  # noqa: B010
