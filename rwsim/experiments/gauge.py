"""Norm and rotation of every neuron of a lane, measured on the device where it trains: no step waits for it."""

import numpy as np
import torch
from torch import Tensor, nn

from rwsim.experiments.models import scale_invariant, weights
from rwsim.experiments.records import Layer
from rwsim.theory.noise import Array
from rwsim.walk.measure import rotation_angle

# Neurons of a layer that are kept one by one, at most.
_NEURONS = 64
# Numbers of a layer at a step: its mean norm, mean rotation, spread of rotation.
_MEANS = 3


class Gauge:
    """Weights before a step, compared with those after it.

    Args:
        model: Whose convolutions and linear layers are measured; a neuron is a row of their weights.
        every: Steps between measurements; the first step is measured.
        steps: Of the training.

    Attributes:
        layers: In the order of the axis `layer`.
        step: Of each measurement, 1 for the first step, shape (time,).
    """

    def __init__(self, model: nn.Module, every: int, steps: int) -> None:
        names, params, invariant = weights(model), dict(model.named_parameters()), scale_invariant(model)
        self.every, self.step = every, np.arange(1, steps + 1, every)
        self._params = [params[full].detach() for full in names.values()]
        self._before = [param.clone() for param in self._params]
        self.layers = tuple(
            Layer(name, param[0].numel(), len(param), name in invariant) for name, param in zip(names, self._params, strict=True)
        )
        device = self._params[0].device
        self._rows = [
            torch.linspace(0, layer.neurons - 1, min(_NEURONS, layer.neurons), dtype=torch.float64).round().long().to(device)
            for layer in self.layers
        ]
        self._now = torch.zeros(sum(_MEANS + len(rows) for rows in self._rows), device=device)
        self._found = torch.full((len(self.step), len(self._now)), torch.nan, device=device)

    def before(self) -> None:
        """Keep the weights."""
        torch._foreach_copy_(self._before, self._params)

    def after(self) -> None:
        """Compare them."""
        numbers: list[Tensor] = []
        for old, new, rows in zip(self._before, self._params, self._rows, strict=True):
            norm, rotation = measured(old.flatten(1), new.flatten(1))
            numbers += [norm.mean().view(1), rotation.mean().view(1), spread_of(rotation).view(1), rotation[rows]]
        torch.cat(numbers, out=self._now)

    def keep(self, step: int) -> None:
        """Keep what was measured of step 0, 1, ..."""
        self._found[step // self.every].copy_(self._now)

    def found(self, diverged: int | None = None) -> tuple[Array, Array, Array, list[Array]]:
        """What was measured, NaN from the step on at which a run diverged.

        Returns:
            Mean over neurons of ||w|| before the step and of the angle of the step, spread of the angle, each (time, layer); and for each
            layer the angle of some neurons, mean over the last fifth of the time, (neuron).
        """
        found = self._found.double().cpu().numpy()
        if diverged is not None:
            found[self.step >= diverged] = np.nan
        starts = np.cumsum([0, *(_MEANS + len(rows) for rows in self._rows[:-1])])
        norm, rotation, spread = (found[:, starts + k] for k in range(_MEANS))
        late = found[-max(1, len(found) // 5) :].mean(0)
        return norm, rotation, spread, [late[start + _MEANS :][: len(rows)] for start, rows in zip(starts, self._rows, strict=True)]


def measured(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Norm before a step and angle to the weights after it, radians; of vectors (neuron, dim), each (neuron).

    Example:
        >>> norm, angle = measured(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]]) @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))
        >>> round(float(norm), 3), round(float(angle), 3)
        (5.0, 0.927)
    """
    before, after = torch.linalg.vector_norm(old, dim=1), torch.linalg.vector_norm(new, dim=1)
    return before, rotation_angle(before, after, torch.linalg.vector_norm(new - old, dim=1))


def spread_of(rotation: Tensor) -> Tensor:
    """Standard deviation over neurons of the logarithm of their rotation; those that stand still but for rounding are left out.

    Example:
        >>> round(float(spread_of(torch.tensor([1e-2, 1e-3, 0.0]))), 3)
        1.628
    """
    moves = rotation > torch.finfo(rotation.dtype).eps
    count, logs = moves.sum(), rotation.log().where(moves, 0.0)
    off = (logs - logs.sum() / count).where(moves, 0.0)
    # None left: 0/0. One: 0/0 as well, since a single neuron has no spread.
    return (off.square().sum() / (count - 1).clamp(min=0)).sqrt()
