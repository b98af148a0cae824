"""Where a measured series has settled, from the series alone."""

import numpy as np
from jaxtyping import Float, Int

# Fewer windows cannot be told from noise.
SHORTEST = 8


def truncation(series: Float[np.ndarray, " time *batch"]) -> Int[np.ndarray, " *batch"]:
    """How many of the first values to drop: the d <= T/2 that makes the squared standard error of the rest's mean least.

    That of uncorrelated values, sum_{t>=d} (x_t - mean)^2 / (T - d)^2 (White, "An effective truncation heuristic for bias
    reduction in simulation output", Simulation 1997): a transient counts as variance, dropping too much as lost length.

    Returns:
        d; T // 2, the largest, where the series has not settled by its middle, and of a series shorter than 8.

    Example:
        >>> noise = np.random.default_rng(0).standard_normal(40)
        >>> int(truncation(noise + 50 * np.exp(-np.arange(40) / 2.0)) > 5), int(truncation(noise + np.arange(40)))
        (1, 20)
    """
    length = len(series)
    half = length // 2
    if length < SHORTEST:
        return np.full(series.shape[1:], half)
    # Tail sums around the last half's mean, where cancellation does no harm.
    centered = series - series[half:].mean(0)
    counts = np.arange(length, length - half - 1, -1).reshape(-1, *[1] * (series.ndim - 1))
    sums, squares = (np.cumsum(x[::-1], 0)[::-1][: half + 1] for x in (centered, centered**2))
    return np.asarray(np.argmin((squares - sums**2 / counts) / counts**2, axis=0))
