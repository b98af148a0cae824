"""Timing of something that takes steps: compile, choose a length, warm up, repeat in turn with others."""

import math
import statistics
import time
from collections.abc import Callable, Iterable

import torch

Walker = Callable[[int], object]
REPEATS = 5


class Timing:
    """A walker and how long it takes, device included.

    Several are repeated in turn, so that a machine that slows down slows all of them.

    Args:
        build: Makes the walker; part of the first call.
        device: Where it works.
        first: Steps of the first call.

    Attributes:
        first_call: Seconds of construction, compilation and the first steps.
        steps: Steps of a repeat.
        seconds: One entry per repeat.
    """

    def __init__(self, build: Callable[[], Walker], device: torch.device, first: int = 8) -> None:
        self.device, self.steps = device, first
        self.seconds: list[float] = []
        began = time.perf_counter()
        self.walker = build()
        self.take(first)
        self.first_call = time.perf_counter() - began

    def take(self, steps: int) -> float:
        """Seconds of so many steps."""
        self._wait()
        began = time.perf_counter()
        walked = self.walker(steps)
        self._wait()
        taken = time.perf_counter() - began
        del walked  # to free some hundred megabytes of the host takes as long as a tenth of a walk, and is no part of it
        return taken

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def prepare(self, seconds: float, most: int, steps: int | None = None) -> "Timing":
        """Choose the steps of a repeat, at most `most`, such that warm-up and repeats take `seconds`; warm up."""
        if steps is None:
            steps, share = min(self.steps, most), seconds / (REPEATS + 1)
            # A short walk tells too little of a long one (launches, a window's reduction), so the length grows in strides.
            while (taken := self.take(steps)) < share / 4 and steps < most:
                steps = min(most, steps * min(8, math.ceil(share / 3 / taken) + 1))
            steps = min(most, max(1, round(steps * share / taken)))
        self.steps = steps
        self.take(steps)
        return self

    def repeat(self) -> None:
        self.seconds.append(self.take(self.steps))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range over the repeats, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def repeat_in_turn(timings: Iterable[Timing]) -> None:
    every = list(timings)
    for _ in range(REPEATS):
        for timing in every:
            timing.repeat()
