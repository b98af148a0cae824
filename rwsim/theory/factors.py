"""Learning rate schedules by name, as factors over the steps: one home for sweeps, plans and tests."""

import math
from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument
from rwsim.theory.noise import Array

# Share of the run that `wsd` decays over, and the drops of `step`: a tenth each, after these shares of the run.
_WSD_DECAY, _STEP_DROPS = 0.2, (0.5, 0.75)
SHAPES = ("constant", "linear", "cosine", "wsd", "step")


def schedule_factors(name: str, steps: int) -> Array | None:
    """Factors on lr of a named schedule, shape (steps,); None for ``constant``.

    At t = 0 ... T-1: ``constant``; ``linear``, 1 - t/T; ``cosine``, (1 + cos(pi t/T))/2; ``wsd`` (warmup, stable, decay),
    constant and then linear to zero over the last fifth; ``step``, a tenth after half and again after three quarters. Each
    optionally behind a linear warmup over a share of the walk, ``warmup0.1+cosine``, T then counts what is left; ``warmup0.1``
    alone stays at 1.

    Raises:
        InvalidArgument: Another name.

    Example:
        >>> schedule_factors("warmup0.5+linear", 4).tolist()
        [0.5, 1.0, 1.0, 0.5]
    """
    *before, shape = name.split("+")
    if shape.startswith("warmup") and not before:
        before, shape = [shape], "constant"
    warm = 0
    try:
        if len(before) > 1 or shape not in SHAPES:
            raise ValueError
        if before:
            share = float(before[0].removeprefix("warmup"))
            if not before[0].startswith("warmup") or not 0 < share < 1:
                raise ValueError
            warm = max(1, round(share * steps))
    except ValueError:
        raise InvalidArgument("schedule", f"must be one of {', '.join(SHAPES)}, or warmup0.1+one of them", name) from None
    if shape == "constant" and not warm:
        return None
    return warmed_up(shape, warm, steps)


def warmed_up(shape: str, warm: int, steps: int) -> Array:
    """A shape of `SHAPES` behind a linear warmup of `warm` < steps steps."""
    rest = np.arange(steps - warm) / max(1, steps - warm)
    return np.concatenate([ramp(np.arange(warm), max(1, warm)), np.broadcast_to(factor(shape, rest, np), rest.shape)])


def ramp(step: Any, warm: Any) -> Any:
    """Factor of a linear warmup at its steps 0 ... warm - 1; numbers, arrays and symbols alike."""
    return (step + 1) / warm


def factor(shape: str, rest: Any, xp: Any) -> Any:
    """A shape of `SHAPES` where the share `rest` of the run is over.

    Args:
        shape: Its name.
        rest: In [0, 1); a number, an array or a symbol.
        xp: Supplies cos, pi, minimum and where: numpy, or the same on symbols.
    """
    if shape == "constant":
        return 1.0
    if shape == "linear":
        return 1 - rest
    if shape == "cosine":
        return (1 + xp.cos(xp.pi * rest)) / 2
    if shape == "wsd":
        return xp.minimum(1, (1 - rest) / _WSD_DECAY)
    return math.prod(xp.where(rest >= drop, 0.1, 1.0) for drop in _STEP_DROPS)
