"""Learning rate schedules by name, as factors over the steps: one home for sweeps, plans and tests."""

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
    decay = {
        "constant": np.ones_like(rest),
        "linear": 1 - rest,
        "cosine": (1 + np.cos(np.pi * rest)) / 2,
        "wsd": np.minimum(1, (1 - rest) / _WSD_DECAY),
        "step": np.prod([np.where(rest >= drop, 0.1, 1.0) for drop in _STEP_DROPS], axis=0),
    }[shape]
    return np.concatenate([np.arange(1, warm + 1) / max(1, warm), decay])
