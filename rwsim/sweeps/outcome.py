"""One point after its walk, and its bytes in the ledger."""

import struct
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rwsim.stats.burnin import SHORTEST, truncation
from rwsim.walk.measure import QUANTITIES, Walk

# Relative change from the third to the last quarter of a walk that still counts as steady, where noise makes `truncation` drop half.
_DRIFT = 0.01
_HEAD = struct.Struct("<5q")


@dataclass(frozen=True)
class Outcome:
    """What is kept of a point.

    Attributes:
        burn_in: Steps that the means leave out.
        steady: Each quantity had settled by the middle of the walk (see `stats.burnin`), or moves by less than 1 % from there on.
        diverged: First step (of the window, in the fused engine) with NaN or Inf; 0 if there is none.
        means: Time means of norm^2, angle (radians per step) and squared RMS update of every neuron, past the burn-in.
        traces: The same, means over neurons, of every window; NaN from a divergence on.
    """

    burn_in: int
    steady: bool
    diverged: int
    means: Float[np.ndarray, "3 neuron"]
    traces: Float[np.ndarray, "3 time"]

    def to_bytes(self) -> bytes:
        """Little-endian: five 64-bit integers, then float64."""
        head = _HEAD.pack(self.burn_in, self.steady, self.diverged, self.means.shape[1], self.traces.shape[1])
        return head + self.means.astype("<f8").tobytes() + self.traces.astype("<f8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Outcome":
        """The reverse.

        Raises:
            ValueError: Not such bytes.
        """
        if len(data) < _HEAD.size:
            raise ValueError(f"{len(data)} bytes are no outcome")
        burn_in, steady, diverged, neurons, windows = _HEAD.unpack_from(data)
        values = np.frombuffer(data, "<f8", offset=_HEAD.size).astype(np.float64)
        if len(values) != 3 * (neurons + windows) or min(neurons, windows) < 0:
            raise ValueError(f"{len(data)} bytes are no outcome of {neurons} neurons and {windows} windows")
        means, traces = values[: 3 * neurons].reshape(3, neurons), values[3 * neurons :].reshape(3, windows)
        return cls(burn_in, bool(steady), diverged, means, traces)


def reduce(walk: Walk) -> list[Outcome]:
    """The outcome of every config of a walk. One config's does not depend on its company."""
    series = [walk.statistic(quantity) for quantity in QUANTITIES]
    traces = np.stack([x.mean(-1) for x in series])  # (quantity, time, config)
    # A last window that is cut short would weigh as much as the others.
    full = len(walk.lengths) - int(len(walk.lengths) > 1 and walk.lengths[-1] < walk.window)
    drop = truncation(traces[:, :full].swapaxes(0, 1))  # (quantity, config)
    third, last = (traces[:, a * full // 4 : b * full // 4].mean(1) for a, b in ((2, 3), (3, 4))) if full >= SHORTEST else (np.inf, 0.0)
    # Of squares, but for the rotation.
    drift = np.abs(last / third - 1) * np.where(np.array(QUANTITIES) == "rotation", 1.0, 0.5)[:, None]
    steady = ((drop < full // 2) | (drift < _DRIFT)).all(0)
    dropped = drop.max(0)
    means = np.empty((len(dropped), *drop.shape[:1], series[0].shape[-1]))
    for c, d in enumerate(dropped):
        for q, x in enumerate(series):
            np.add.reduce(x[d:full, c], 0, out=means[c, q])
    means /= (full - dropped)[:, None, None]
    apart = traces.transpose(2, 0, 1).copy()
    return [Outcome(int(d) * walk.window, bool(steady[c]), 0, means[c], apart[c]) for c, d in enumerate(dropped)]


def diverged(walk: Walk, config: int, step: int, windows: int) -> Outcome:
    """The outcome of a config that ended in NaN or Inf; `walk` is what came before."""
    traces = np.full((3, windows), np.nan)
    series = [walk.statistic(quantity)[:, config].mean(-1) for quantity in QUANTITIES]
    traces[:, : len(walk.lengths)] = series
    neurons = walk.norm_sq.shape[-1]
    return Outcome(0, False, step, np.full((3, neurons), np.nan), traces)
