"""Norm and rotation of every neuron of a run, measured on the device where it trains: no step waits for it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rwsim.experiments.models import scale_invariant, weights
from rwsim.experiments.records import Layer
from rwsim.theory.noise import Array
from rwsim.walk.measure import rotation_angle

# Neurons of a layer that are kept one by one, at most.
NEURONS = 64


class Gauge:
    """Weights before a step, compared with those after it.

    Args:
        model: Whose convolutions and linear layers are measured; a neuron is a row of their weights.
        every: Steps between measurements; the first step is measured.
        steps: Of the training.

    Attributes:
        layers: In the order of the axis `layer`.
        step: Of each measurement, 1 for the first step, shape (time,).

    Example:
        >>> layer = nn.Linear(3, 2, bias=False, device="meta").to_empty(device="cpu")
        >>> _ = nn.init.eye_(layer.weight)
        >>> gauge = Gauge(nn.Sequential(layer), every=1, steps=1)
        >>> gauge.before()
        >>> with torch.no_grad():
        ...     _ = layer.weight.add_(torch.tensor([[0.0, 0.0, 0.1], [0.2, 0.0, 0.0]]))
        >>> gauge.after()
        >>> gauge.keep(0)
        >>> norm, rotation, spread, last = gauge.found()
        >>> norm.round(4).tolist(), rotation.round(4).tolist(), last[0].round(4).tolist()
        ([[1.0124]], [[0.1485]], [0.0997, 0.1974])
    """

    def __init__(self, model: nn.Module, every: int, steps: int) -> None:
        names, params, invariant = weights(model), dict(model.named_parameters()), scale_invariant(model)
        self.every, self.step = every, np.arange(1, steps + 1, every)
        self._params = [params[full].detach() for full in names.values()]
        self._before = [param.clone() for param in self._params]
        self.layers = tuple(
            Layer(name, param[0].numel(), len(param), name in invariant) for name, param in zip(names, self._params, strict=True)
        )
        counts = np.array([layer.neurons for layer in self.layers])
        firsts = np.cumsum(counts) - counts
        rows = [first + np.linspace(0, count - 1, min(NEURONS, count)).round() for first, count in zip(firsts, counts, strict=True)]
        self._kept = [len(some) for some in rows]
        device = self._params[0].device
        self._layer_of = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
        self._counts = torch.from_numpy(counts).to(device)
        self._rows = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)
        self._now = torch.zeros(3 * len(counts) + len(self._rows), device=device)
        self._found = torch.full((len(self.step), len(self._now)), torch.nan, device=device)

    def before(self) -> None:
        """Keep the weights."""
        torch._foreach_copy_(self._before, self._params)

    def after(self) -> None:
        """Compare them: few launches, as layers share what they can."""
        old, new, between = (_norms(tensors) for tensors in (self._before, self._params, torch._foreach_sub(self._params, self._before)))
        rotation = rotation_angle(old, new, between)
        means = self._sum(new.square()), self._sum(rotation)
        norm, angle = (total / self._counts for total in means)
        torch.cat([norm.sqrt(), angle, self._spread(rotation), rotation[self._rows]], out=self._now)

    def keep(self, step: int) -> None:
        """Keep what was measured of step 0, 1, ..."""
        self._found[step // self.every].copy_(self._now)

    def found(self, diverged: int | None = None) -> tuple[Array, Array, Array, list[Array]]:
        """What was measured; NaN from the step on at which a run diverged.

        Returns:
            Root mean square over neurons of ||w|| after the step, mean of the angle of the step, standard deviation of its logarithm, each
            (time, layer); and for each layer the angle of some neurons, mean over the last fifth of the time, (neuron).
        """
        found = self._found.double().cpu().numpy()
        if diverged is not None:
            found[self.step >= diverged] = np.nan
        norm, rotation, spread, neurons = np.split(found, np.arange(1, 4) * len(self.layers), axis=1)
        late = neurons[-max(1, len(found) // 5) :].mean(0)
        return norm, rotation, spread, np.split(late, np.cumsum(self._kept)[:-1])

    def _sum(self, values: Tensor) -> Tensor:
        """Over the neurons of each layer."""
        return values.new_zeros(len(self.layers)).index_add_(0, self._layer_of, values)

    def _spread(self, rotation: Tensor) -> Tensor:
        """Neurons that stand still but for rounding are left out; NaN with fewer than two others."""
        moves = rotation > torch.finfo(rotation.dtype).eps
        count = self._sum(moves.to(rotation.dtype))
        logs = rotation.log().where(moves, 0.0)
        off = (logs - (self._sum(logs) / count)[self._layer_of]).where(moves, 0.0)
        return (self._sum(off.square()) / (count - 1).clamp(min=0)).sqrt()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.linalg.vector_norm(tensor.flatten(1), dim=1) for tensor in tensors])
