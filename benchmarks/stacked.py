"""Convolutional networks trained side by side, one for each seed: the same numbers as alone, in one network's launches.

Parameters of all networks are stacked along dimension 0, activations are (network, channel, image, row, column). A
convolution is one batched matrix product with the unfolded input, batch norm sees a channel of each network as a channel of
its own: nothing mixes networks, so the sum of their losses gives each its own gradient.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwsim.errors import RwsimError
from rwsim.experiments.idx import CLASSES, SIDE, Images

CHANNELS = (32, 64, 128)
NOTHING: Mapping[str, Any] = MappingProxyType({})
# Pixels that an image moves by at most, either way.
SHIFT = 2
WARMUP = 0.05
# Mean and deviation of the training pixels, in [0, 1].
_MEAN, _DEVIATION = 0.2860, 0.3530
# Steps in mid-training whose rotation is measured, at most, and at most this part of all; images of an evaluation's batch.
_WATCHED, _WATCHED_PART, _EVALUATED = 100, 5, 500
# Of the generator of a network's order and augmentation, over its seed.
_ORDER = 1_000_000


class Networks(nn.Module):
    """Three times a 3x3 convolution, batch norm, ReLU and max pooling (the last: the mean over the image), then a linear head.

    Args:
        seeds: Of the networks' initializations.
        parts: Copies of all of them, each with parameters of its own, for settings that are tried side by side. Network
            (part, seed) is number part * len(seeds) + seed.
        gained: Give each neuron of the head a learned factor.
        channels: Of the convolutions.
        dtype: Of parameters and activations.
    """

    def __init__(
        self, seeds: Sequence[int], parts: int = 1, channels: Sequence[int] = CHANNELS, device: torch.device | None = None,
        dtype: torch.dtype = torch.float32, gained: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.seeds, self.count, self.channels, self.dtype = tuple(seeds), parts * len(seeds), tuple(channels), dtype
        self.gained = gained
        drawn = [_initial(seed, self.channels) for seed in seeds]
        for one in drawn if gained else ():
            one["factor"] = torch.ones(1, CLASSES, 1)
        stacked = {name: torch.cat([one[name] for one in drawn]).to(device, dtype) for name in drawn[0]}
        self.parts = nn.ModuleList(nn.ParameterDict({name: x.clone() for name, x in stacked.items()}) for _ in range(parts))
        for layer, width in enumerate(self.channels):
            self.register_buffer(f"mean{layer}", torch.zeros(self.count * width, device=device, dtype=dtype))
            self.register_buffer(f"var{layer}", torch.ones(self.count * width, device=device, dtype=dtype))

    def groups(
        self, settings: Sequence[tuple[float, float]], first: Mapping[str, Any] = NOTHING, middle: Mapping[str, Any] = NOTHING,
        head: Mapping[str, Any] = NOTHING,
    ) -> list[dict]:  # fmt: skip
        """Parameter groups, given (lr, weight decay) of each part: matrices decay, biases and gains do not.

        The head, (network, class, feature), has its neurons in two dimensions; convolutions have theirs in dimension 0.
        torch's optimizers take no notice of what is said of rotation, nor of further options of the first convolution, of the others
        and of the head.
        """
        found: list[dict] = []
        for part, (lr, decay) in zip(self.parts, settings, strict=True):
            assert isinstance(part, nn.ParameterDict)
            convolutions = [param for name, param in part.items() if name.startswith("conv") and name != "conv0"]
            vectors = [param for name, param in part.items() if not name.startswith(("conv", "head"))]
            found += [
                {"params": [part["conv0"]], "lr": lr, "weight_decay": decay, **first},
                *({"params": [param], "lr": lr, "weight_decay": decay, **middle} for param in convolutions),
                {"params": [part["head"]], "lr": lr, "weight_decay": decay, "neuron_dims": (0, 1), **head},
                {"params": vectors, "lr": lr, "weight_decay": 0.0, "rotational": False},
            ]
        return found

    def stacked(self, name: str) -> Tensor:
        """A parameter of all networks."""
        every = [part[name] for part in self.parts]  # type: ignore[index]  # a ModuleList is typed as holding any module
        return every[0] if len(every) == 1 else torch.cat(every)

    def forward(self, x: Tensor) -> Tensor:
        """Images (network, 1, image, row, column) -> logits (network, class, image)."""
        for layer, width in enumerate(self.channels):
            x = self._convolved(x, self.stacked(f"conv{layer}"))
            gain, shift = self.stacked(f"gain{layer}"), self.stacked(f"shift{layer}")
            mean, var = self.get_buffer(f"mean{layer}"), self.get_buffer(f"var{layer}")
            flat = F.batch_norm(x.view(1, self.count * width, -1), mean, var, gain, shift, self.training)
            x = F.relu(flat).view(self.count * width, *x.shape[2:])
            if layer < len(self.channels) - 1:
                x = F.max_pool2d(x, 2)
            x = x.view(self.count, width, *x.shape[1:])
        head = self.stacked("head") * self.stacked("factor") if self.gained else self.stacked("head")
        return torch.baddbmm(self.stacked("bias")[:, :, None], head, x.mean((3, 4)))

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        fan_in = weight[0].numel()
        patches = F.pad(x, (1, 1, 1, 1)).unfold(3, 3, 1).unfold(4, 3, 1)
        patches = patches.permute(0, 1, 5, 6, 2, 3, 4).reshape(self.count, fan_in, -1)
        return (weight.view(self.count, -1, fan_in) @ patches).view(self.count, -1, *x.shape[2:])


def _initial(seed: int, channels: Sequence[int]) -> dict[str, Tensor]:
    """One network: normal weights of deviation sqrt(2 / fan_in), of the head 1 / sqrt(fan_in)."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    before = 1
    for layer, width in enumerate(channels):
        found[f"conv{layer}"] = torch.randn(width, before, 3, 3, generator=generator) * math.sqrt(2 / (9 * before))
        found[f"gain{layer}"], found[f"shift{layer}"] = torch.ones(width), torch.zeros(width)
        before = width
    found["head"] = torch.randn(1, CLASSES, before, generator=generator) / math.sqrt(before)
    found["bias"] = torch.zeros(1, CLASSES)
    return found


@dataclass(frozen=True)
class Training:
    """What a training came to, one entry a network.

    Attributes:
        loss: Mean training loss of the last epoch.
        rotation: RMS over neurons and steps of the middle layer's rotation in mid-training, radians per step.
        predicted: RMS of the rate over those steps; nan where none was given.
        seconds: Of all networks together.
    """

    loss: list[float]
    rotation: list[float]
    predicted: float
    seconds: float


def factor(step: int, steps: int) -> float:
    """Of the learning rate: a linear warmup, then a cosine to zero."""
    warm = max(1, round(WARMUP * steps))
    return (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def train(
    networks: Networks, optimizer: torch.optim.Optimizer, data: Images, epochs: int, batch: int,
    rate: Callable[[dict], float] | None = None, strict: bool = True,
) -> Training:  # fmt: skip
    """Train all networks, each in an order and with an augmentation that its seed sets.

    Args:
        networks: Changed in place.
        optimizer: Of their `groups`.
        data: On the networks' device.
        epochs: Over whole batches; what is left of an order is dropped.
        batch: Images a step.
        rate: Predicted rotation of a parameter group, radians per step.
        strict: Raise when a network diverges; else its loss is nan.

    Raises:
        RwsimError: A loss that is not finite, with its step.
    """
    device, seeds = data.pixels.device, networks.seeds
    generators = [torch.Generator().manual_seed(_ORDER + seed) for seed in seeds]
    padded = F.pad(data.pixels, (SHIFT,) * 4)
    bases = [group["lr"] for group in optimizer.param_groups]
    an_epoch = len(data) // batch
    steps = epochs * an_epoch
    length = max(1, min(_WATCHED, steps // _WATCHED_PART))
    watched = range((steps - length) // 2, (steps - length) // 2 + length)
    middle = f"conv{len(networks.channels) // 2}"
    turned_sq = torch.zeros(networks.count, device=device, dtype=networks.dtype)
    predicted_sq = 0.0
    networks.train()
    _wait(device)
    began = time.perf_counter()
    for epoch in range(epochs):
        draws = _draws(generators, len(data), an_epoch * batch, device)
        total = torch.zeros(networks.count, device=device, dtype=networks.dtype)
        for at in range(an_epoch):
            step = epoch * an_epoch + at
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * factor(step, steps)
            order, shift, flip = (draw[:, at * batch : (at + 1) * batch] for draw in draws)
            pixels, labels = _augmented(padded, order, shift, flip), data.labels[order]
            repeats = networks.count // len(seeds)
            images = _normalized(pixels, networks.dtype).repeat(repeats, 1, 1, 1, 1)
            losses = F.cross_entropy(networks(images), labels.repeat(repeats, 1), reduction="none").mean(1)
            optimizer.zero_grad()
            losses.sum().backward()
            before = networks.stacked(middle).detach().clone() if step in watched else None
            optimizer.step()
            total += losses.detach()
            if before is not None:
                turned_sq += angle_sq(before, networks.stacked(middle).detach(), networks.count)
                predicted_sq += rate(optimizer.param_groups[0]) ** 2 if rate else math.nan
        loss = (total / an_epoch).tolist()
        if strict and not all(map(math.isfinite, loss)):
            some = [seeds[i % len(seeds)] for i, value in enumerate(loss) if not math.isfinite(value)]
            raise RwsimError(f"training diverged: the loss of seed {some[0]} is not finite by step {(epoch + 1) * an_epoch}.")
    _wait(device)
    rotation = (turned_sq / len(watched)).sqrt().tolist()
    return Training(loss, rotation, math.sqrt(predicted_sq / len(watched)), time.perf_counter() - began)


@torch.no_grad()
def accuracy(networks: Networks, data: Images) -> list[float]:
    """Share of the images that each network gets right, with its running statistics."""
    networks.eval()
    right = torch.zeros(networks.count, device=data.labels.device)
    for start in range(0, len(data), _EVALUATED):
        some = data.part(start, start + _EVALUATED)
        images = _normalized(some.pixels[None], networks.dtype).expand(networks.count, -1, -1, -1, -1)
        right += (networks(images).argmax(1) == some.labels).sum(1)
    return (right / len(data)).tolist()


def _draws(generators: Sequence[torch.Generator], count: int, used: int, device: torch.device) -> tuple[Tensor, ...]:
    """(order, shift, flip) of an epoch, (seed, image, ...), drawn on the CPU: the same on every device."""
    found = []
    for generator in generators:
        order = torch.randperm(count, generator=generator)[:used]
        shift = torch.randint(0, 2 * SHIFT + 1, (used, 2), generator=generator)
        found.append((order, shift, torch.rand(used, generator=generator) < 0.5))
    return tuple(torch.stack(part).to(device) for part in zip(*found, strict=True))


def _augmented(padded: Tensor, order: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Shifted and flipped images (seed, image, row, column)."""
    places = torch.arange(SIDE, device=padded.device)
    rows = shift[..., :1] + places
    columns = shift[..., 1:] + torch.where(flip[..., None], places.flip(0), places)
    return padded[order[..., None, None], rows[..., :, None], columns[..., None, :]]


def _normalized(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    return pixels.to(dtype).div_(255).sub_(_MEAN).div_(_DEVIATION).unsqueeze(1)


def angle_sq(before: Tensor, after: Tensor, count: int) -> Tensor:
    """Mean squared angle over the neurons of each network; by the chord, since a cosine loses small angles."""
    before, after = (F.normalize(x.flatten(1), dim=1, eps=0.0) for x in (before, after))
    chord = (after - before).norm(dim=1)
    return (2 * (chord / 2).clamp(max=1).asin()).square().view(count, -1).mean(1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
