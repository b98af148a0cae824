"""Statistical assertions under one suite-wide false-failure rate, each with its own power."""

import math

from scipy.stats import norm

# Chance that the suite fails anywhere although everything is right, split over its statistical assertions.
FALSE_FAIL_RATE = 1e-4
ASSERTIONS = 1000
Z = float(norm.isf(FALSE_FAIL_RATE / ASSERTIONS / 2))

# The seeds every statistical test must pass on. Recorded, never chosen.
SEEDS = (0, 1, 2)


def assert_agrees(measured: float, mcse: float, predicted: float, *, catch: float, bias: float = 0.0, what: str = "") -> None:
    """measured = predicted within Z MCSE plus a computed relative bias; and an error of `catch` would be seen."""
    relative, error = measured / predicted - 1, mcse / abs(predicted)
    assert Z * error + bias < catch, f"{what}: no power: {Z:.1f} x {error:.2e} + {bias:.2e} does not resolve {catch}"
    assert abs(relative) <= Z * error + bias, f"{what}: {measured:.6g} vs {predicted:.6g}: off by {relative:+.3%}, {error:.3%} expected"


def mean_and_error(values) -> tuple[float, float]:
    """Mean and standard error of independent values (a 1-d array or tensor)."""
    values = values.double() if hasattr(values, "double") else values
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
