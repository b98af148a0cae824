"""What is measured in a walk: norm, rotation and update size of every neuron, reduced over windows of steps."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Series = Float[np.ndarray, "time config neuron"]
QUANTITIES = ("norm", "rotation", "rms_update")


@dataclass(frozen=True)
class Walk:
    """A walk as means over windows of `window` steps (the last window may hold fewer: see `lengths`).

    Attributes:
        window: Steps per window.
        lengths: Steps in each window, shape (time,).
        norm_sq: ||w||^2.
        angle: Angle between w_t and w_{t+1}, radians per step.
        angle_sq: Its square.
        update_sq: ||Delta_g w||^2, squared size of the gradient part of the update.
        relative_sq: ||w_{t+1} - w_t||^2 / ||w_t||^2, squared total relative update.
        distance_sq: ||w_{t+1} - w_t||^2; at a steady norm E<w, w'> / E||w||^2 = 1 - E distance_sq / (2 E norm_sq).
        unit_grad_sq: ||g||^2 ||w||^2, whose mean is the paper's E||g~||^2.

    All but `lengths` have shape (time, config, neuron), float64.
    """

    window: int
    lengths: Int[np.ndarray, " time"]
    norm_sq: Series
    angle: Series
    angle_sq: Series
    update_sq: Series
    relative_sq: Series
    distance_sq: Series
    unit_grad_sq: Series

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    def statistic(self, quantity: str) -> Series:
        """The series whose mean over time and neurons gives `quantity` (its square for norm and rms_update)."""
        return {"norm": self.norm_sq, "rotation": self.angle, "rms_update": self.update_sq}[quantity]

    def trace(self, quantity: str) -> Series:
        """RMS over each window, as the paper's figure: norm, rotation (radians per step) or rms_update."""
        return np.sqrt({"norm": self.norm_sq, "rotation": self.angle_sq, "rms_update": self.update_sq}[quantity])

    def kept(self, burn_in: int) -> "Walk":
        """The full windows that begin at or after step `burn_in`."""
        first = -(-burn_in // self.window)
        last = len(self.lengths) - int(len(self.lengths) > 0 and self.lengths[-1] < self.window)
        return self._windows(first, last)

    def until(self, step: int) -> "Walk":
        """The windows that end at or before that step."""
        return self._windows(0, int(np.searchsorted(np.cumsum(self.lengths), step, side="right")))

    def _windows(self, first: int, last: int) -> "Walk":
        return Walk(self.window, *(getattr(self, f.name)[first:last] for f in fields(self)[1:]))


# Names of what is kept of a window, in the order in which the engines lay it out.
SERIES = tuple(field.name for field in fields(Walk))[2:]


def layer_mean(walk: Walk, quantity: str) -> np.ndarray:
    """Mean over neurons of the first config as the predictions take it: mean angle, root of mean squares else."""
    trace = walk.trace(quantity)[:, 0]
    return trace.mean(-1) if quantity == "rotation" else np.sqrt((trace**2).mean(-1))


class Recorder:
    """Collects sizes step by step, in the walk's own precision, and turns each window of them into means.

    Args:
        start: Initial weights, shape (config, neuron, dim).
        window: Steps per window.
    """

    def __init__(self, start: Tensor, window: int) -> None:
        self.window, self.counts = window, [0] * len(start)
        # ||w_{t+1}||, ||w_{t+1} - w_t||, ||Delta_g w||, ||g||
        self.sizes = torch.empty((window, 4, *start.shape[:2]), dtype=start.dtype, device=start.device)
        self.last_norm = torch.linalg.vector_norm(start, dim=-1)
        self.means: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.shape = start.shape[:2]

    @property
    def filled(self) -> int:
        """Steps of the open window that every config has taken."""
        return min(self.counts)

    @filled.setter
    def filled(self, count: int) -> None:
        self.counts = [count] * len(self.counts)

    def add(self, config: int, new: Tensor, difference: Tensor, gradient_part: Tensor, gradient: Tensor) -> None:
        """Record one step of one config, each vector of shape (neuron, dim)."""
        row = self.sizes[self.counts[config], :, config]
        for i, vector in enumerate((new, difference, gradient_part, gradient)):
            torch.linalg.vector_norm(vector, dim=-1, out=row[i])
        self.counts[config] += 1

    def first_bad(self) -> tuple[int, int] | None:
        """(step within the open window, config) of the first NaN or Inf; what follows it is dropped."""
        sizes = self.sizes[: self.filled]
        # Squares must be finite too: they are what the statistics are made of.
        bad = ~torch.isfinite(sizes.square()).all(-1).all(1)
        if not bad.any():
            return None
        step = int(bad.any(1).nonzero()[0])
        self.filled = step
        return step, int(bad[step].nonzero()[0])

    def close(self) -> None:
        """Reduce the open window to means."""
        if not self.filled:
            return
        # Config by config, in memory of its own: how a GPU sums depends on the shape, and a config must not see its company.
        configs = zip(self.sizes[: self.filled].unbind(2), self.last_norm, strict=True)
        self.means.append(torch.stack([self._reduce(sizes.double(), last.double()) for sizes, last in configs], 1).cpu().numpy())
        self.lengths.append(self.filled)
        self.last_norm, self.filled = self.sizes[self.filled - 1, 0].clone(), 0

    @staticmethod
    def _reduce(sizes: Tensor, last_norm: Tensor) -> Tensor:
        """Means of one config's window, (7, neuron), from its sizes (step, 4, neuron)."""
        norm, distance, update, grad = sizes.contiguous().unbind(1)
        old = torch.cat((last_norm[None], norm[:-1]))
        angle = rotation_angle(old, norm, distance)
        rows = (norm.square(), angle, angle.square(), update.square(), (distance / old).square(), distance.square(), (grad * old).square())
        return torch.stack([row.mean(0) for row in rows])

    def walk(self) -> Walk:
        """Everything recorded so far."""
        self.close()
        series = np.array(self.means, dtype=np.float64).reshape(len(self.means), 7, *self.shape)
        return Walk(self.window, np.array(self.lengths, dtype=np.int64), *series.swapaxes(0, 1))


def rotation_angle(old_norm: Tensor, new_norm: Tensor, distance: Tensor) -> Tensor:
    """Angle between two vectors, radians, from their norms and the length d of their difference.

    The chord between the unit vectors obeys c^2 = (d^2 - (||new|| - ||old||)^2) / (||new|| ||old||) and the angle is
    2 arcsin(c/2). A float32 cosine cannot resolve angles below 3e-4; this is as accurate as d where the norms are close, as
    they are from one step to the next.

    Example:
        >>> float(rotation_angle(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1e-5)))
        9.999999747378752e-06
    """
    chord_sq = (distance.square() - (new_norm - old_norm).square()) / (new_norm * old_norm)
    return 2 * (chord_sq.clamp(0, 4).sqrt() / 2).asin()
