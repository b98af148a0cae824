"""Networks of the experiments, and which of their weights are scale-invariant.

A neuron's weights are scale-invariant if the loss does not change when they are multiplied by a positive number:

| network | scale-invariant | not |
|---|---|---|
| `ResNet`, batch norm | every convolution: batch norm follows each (its eps leaves a little) | the head |
| `ResNet`, layer norm | none: all neurons of a convolution together are | all |
| `VGG` | none | all |
| `GPT` | none: layer norm stands before the linear layers, and over features | all |
| any of them, standardized | whatever is standardized | the gains; the embeddings of `GPT` |

Initial weights come from an explicit generator.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rwsim.experiments.data import VOCABULARY
from rwsim.experiments.idx import CLASSES, SIDE
from rwsim.rotational.layers import Standardization, standardize

# Deviation of GPT-2's initial weights.
_GPT_DEVIATION = 0.02
# Where a parametrized layer keeps what is trained.
_ORIGINAL = "parametrizations.weight.original"


# By name, for so many channels. Layer norm is over all channels and pixels of an image (paper, Benefit of Weight Standardization).
NORMS: Mapping[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "layer": partial(nn.GroupNorm, 1)}


class Block(nn.Module):
    """Two 3x3 convolutions with a norm around a shortcut, which is subsampled and padded with zeros where shapes differ."""

    def __init__(self, before: int, width: int, norm: str) -> None:
        super().__init__()
        self.stride, self.more = width // before, width - before
        self.conv1 = nn.Conv2d(before, width, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = NORMS[norm](width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = NORMS[norm](width)

    def forward(self, x: Tensor) -> Tensor:
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more)) if self.more else x
        return F.relu(short + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """ResNet of He et al. 2016 for small images: 20 layers at 3 blocks in each of 3 stages, 18 at 2 blocks in each of 4. Stages of
    `width`, 2 `width`, 4 `width`, ... channels, the mean over the image, a linear head.

    Args:
        width: Channels of the first stage.
        blocks: A stage.
        norm: ``"batch"`` or ``"layer"``.
        stages: How many.
    """

    def __init__(self, width: int = 16, blocks: int = 3, norm: str = "batch", stages: int = 3) -> None:
        super().__init__()
        self.kind = norm
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = NORMS[norm](width)
        widths = [width] + [width << stage for stage in range(stages) for _ in range(blocks)]
        self.blocks = nn.Sequential(*(Block(*pair, norm) for pair in pairwise(widths)))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images (image, 1, row, column) -> logits (image, class)."""
        x = self.conv(x)
        if x.is_cuda and self.kind == "batch":
            # cuDNN's batch norm of the other format keeps as many blocks busy as there are channels: a quarter of a step.
            x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.blocks(F.relu(self.norm(x))).mean((2, 3)))


class VGG(nn.Module):
    """VGG without normalization: three times two 3x3 convolutions with max pooling, then two linear layers, all with biases.

    All of one width, unlike the original: with one learning rate and decay, weights of one fan-in have equilibrium norms that agree.

    Args:
        width: Channels, and neurons of the hidden linear layer.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width if layer else 1, width, 3, padding=1) for layer in range(6))
        self.hidden = nn.Linear(width * (SIDE // 8) ** 2, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images (image, 1, row, column) -> logits (image, class)."""
        for layer, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if layer % 2:
                x = F.max_pool2d(x, 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


class Attention(nn.Module):
    """Causal self-attention. Queries, keys and values are layers of their own, so that each is measured for itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a two-layer network of four times the width, each behind a layer norm and around it a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 over bytes; the head is not tied to the embedding, and there is no dropout.

    Args:
        width: Features; a multiple of `heads`.
        depth: Layers.
        heads: Of each attention.
        context: Longest window.
    """

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (window, place) -> logits of the byte after each, (window, place, byte)."""
        return self.head(self.norm(self.layers(self.token(x) + self.place.weight[: x.shape[1]])))


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet": ResNet, "resnet18": partial(ResNet, blocks=2, stages=4), "vgg": VGG, "gpt": GPT,
}  # fmt: skip


def build(network: str, seed: int, standardized: bool | Literal["gain"] = False, **size: Any) -> nn.Module:
    """A network of `NETWORKS` on the CPU, its weights drawn from a generator of that seed.

    Convolutions and linear layers get normal weights of variance 2 / fan_in, the heads of image networks 1 / fan_in; GPT gets GPT-2's
    (deviation 0.02, over sqrt(2 depth) for what is added to the residual stream). Biases start at 0.

    Args:
        network: Its name.
        seed: Of the weights.
        standardized: Standardize every linear and convolutional layer, with gains (`rwsim.rotational.layers.standardize`);
            ``"gain"``: gains alone, with which norms that a rotational variant fixes need not matter (paper, section 4).
        **size: The constructor's.

    Example:
        >>> model = build("gpt", seed=0, standardized=True, width=8, depth=1, heads=2, context=4)
        >>> model(torch.zeros(1, 4, dtype=torch.long)).shape, len(scale_invariant(model))
        (torch.Size([1, 4, 256]), 7)
    """
    with torch.device("meta"):  # constructors would draw from the global generator
        model = NETWORKS[network](**size)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
            module.reset_parameters()
        elif isinstance(module, (nn.Conv2d, nn.Linear, nn.Embedding)):
            with torch.no_grad():
                module.weight.normal_(std=_deviation(model, name, module.weight), generator=generator)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()  # type: ignore[operator, union-attr]  # a bias is a parameter
    return standardize(model, standardize=standardized != "gain") if standardized else model


def _deviation(model: nn.Module, name: str, weight: Tensor) -> float:
    if isinstance(model, GPT):
        return _GPT_DEVIATION / (math.sqrt(2 * len(model.layers)) if name.endswith(("out", "down")) else 1)
    return math.sqrt((1 if name == "head" else 2) / weight[0].numel())


def weights(model: nn.Module) -> dict[str, str]:
    """Layer -> name of its weight among the parameters, for every convolution and linear layer; embeddings are not among them."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            found[name] = f"{name}.{_ORIGINAL if parametrize.is_parametrized(module, 'weight') else 'weight'}"
    return found


def scale_invariant(model: nn.Module) -> frozenset[str]:
    """The layers among `weights` whose neurons are scale-invariant.

    Example:
        >>> sorted(set(weights(model := build("resnet", seed=0, width=2, blocks=1))) - scale_invariant(model))
        ['head']
    """
    normalized: set[str] = set()
    if isinstance(model, ResNet) and model.kind == "batch":
        normalized = {"conv", *(f"blocks.{i}.conv{k}" for i in range(len(model.blocks)) for k in (1, 2))}
    return frozenset(name for name in weights(model) if name in normalized or _standardized(model.get_submodule(name)))


def _standardized(layer: nn.Module) -> bool:
    if not parametrize.is_parametrized(layer, "weight"):
        return False
    chain: Any = layer.parametrizations
    return any(isinstance(step, Standardization) for step in chain["weight"])
