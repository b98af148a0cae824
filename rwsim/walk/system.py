"""The paper's toy system (appendix F) and the gradients it gives its weights.

f(X) = gamma_out * N(W (gamma_in * X)), N batch norm, X and the output gradients i.i.d. normal. Axes: (neuron, dim),
or (config, neuron, dim); the neurons of several layers lie one layer after the other along the neuron axis.

Neighbouring systems have another N: see `NORMALIZATIONS`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import fdtri, ndtr
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.theory.noise import GradientLaw, IdealWalk, ToySystem

Weight = Float[Tensor, "*config neuron dim"]
Gradient = Callable[[Tensor], Tensor]
# Largest normal that the fast engines draw, and the end of the interval of `length_polynomial`.
REACH = 6.8
GRADIENTS = ("marginal", "faithful", "gaussian")
# What makes weights scale-invariant: batch norm each neuron, layer norm the whole matrix (over the neurons of one input),
# weight standardization each neuron again (W's rows with mean 0 and variance 1; paper, appendix B), nothing none.
NORMALIZATIONS = ("batch", "layer", "weight", "none")


@dataclass(frozen=True)
class Layer:
    """A layer of the toy system: sizes and its realised gammas.

    Attributes:
        gamma_in: Input scales, shape (dim,).
        gamma_out: Output scales, shape (neuron,).
        batch: B >= 4 (the second moment of the gradient is infinite below).
        loss_scale: Factor on the output gradients, > 0.
        normalization: One of `NORMALIZATIONS`; but for ``"batch"`` with the faithful gradient only.

    Raises:
        InvalidArgument: A size or scale out of range, or a normalization that leaves no gradient at this size.

    Example:
        >>> Layer.draw(fan_in=16, neurons=4, batch=32, seed=0).gamma_in.shape
        (16,)
    """

    gamma_in: Float[np.ndarray, " dim"]
    gamma_out: Float[np.ndarray, " neuron"]
    batch: int = 32
    loss_scale: float = 1.0
    normalization: str = "batch"

    def __post_init__(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise InvalidArgument("normalization", f"must be one of {', '.join(NORMALIZATIONS)}", self.normalization)
        if self.normalization == "layer" and self.neurons < 3:
            raise InvalidArgument(
                "neurons",
                "must be at least 3 under layer normalization (two outputs are always 1 and -1)",
                self.neurons,
                "give more neurons",
            )
        if self.normalization == "weight" and self.fan_in < 3:
            raise InvalidArgument(
                "fan_in",
                "must be at least 3 under weight standardization (two weights are always 1 and -1)",
                self.fan_in,
                "give a larger fan-in",
            )
        if self.fan_in < 2:
            raise InvalidArgument("fan_in", "must be at least 2 (one coordinate cannot rotate)", self.fan_in, "give a larger fan-in")
        if self.neurons < 1:
            raise InvalidArgument("neurons", "must be at least 1", self.neurons, "the default is 128")
        if self.batch < 4:
            raise InvalidArgument(
                "batch", "must be at least 4 (the gradient's second moment is infinite below)", self.batch, "give a larger batch"
            )
        if not (0 < self.loss_scale < math.inf):
            raise InvalidArgument("loss_scale", "must lie in (0, inf)", self.loss_scale, "the default is 1")
        for name in ("gamma_in", "gamma_out"):
            if not (np.isfinite(getattr(self, name)).all() and (getattr(self, name) != 0).all()):
                raise InvalidArgument(name, "must be finite and without zeros", getattr(self, name), "draw it anew, or take gamma uniform")

    @classmethod
    def draw(
        cls, fan_in: int, neurons: int, batch: int = 32, loss_scale: float = 1.0, gamma: str = "normal", seed: int = 0,
        normalization: str = "batch",
    ) -> "Layer":  # fmt: skip
        """A layer whose gammas are standard normal draws of `seed` (the paper's), or all one (``"uniform"``)."""
        if gamma == "uniform":
            return cls(np.ones(max(fan_in, 0)), np.ones(max(neurons, 0)), batch, loss_scale, normalization)
        if gamma != "normal":
            raise InvalidArgument("gamma", "must be one of normal, uniform", gamma)
        rng = np.random.default_rng([seed, 0])
        return cls(rng.standard_normal(max(fan_in, 0)), rng.standard_normal(max(neurons, 0)), batch, loss_scale, normalization)

    @property
    def fan_in(self) -> int:
        return len(self.gamma_in)

    @property
    def neurons(self) -> int:
        return len(self.gamma_out)

    def law(self, gradient: str) -> GradientLaw:
        """What the theory needs to know of this layer's gradients.

        Raises:
            InvalidArgument: A normalization other than batch norm, whose law is not known.
        """
        if gradient == "gaussian":
            return IdealWalk(self.fan_in, self.neurons)
        if self.normalization != "batch":
            raise InvalidArgument("normalization", "must be batch for a prediction", self.normalization, "it can be simulated")
        return ToySystem(self.gamma_in[None, :], self.gamma_out[:, None], self.batch, self.loss_scale, self.neurons)

    def start(self, configs: int, layers: int, generator: torch.Generator, dtype: torch.dtype) -> Weight:
        """torch's default for a linear layer: uniform in [-1/sqrt(C), 1/sqrt(C)]."""
        shape = (configs, layers * self.neurons, self.fan_in)
        unit = torch.rand(shape, generator=generator, dtype=dtype, device=generator.device)
        return (2 * unit - 1) / math.sqrt(self.fan_in)

    @property
    def start_sq(self) -> float:
        """E w_c^2 of `start`."""
        return 1 / (3 * self.fan_in)

    def check_gradient(self, kind: str) -> None:
        """Refuse a gradient that does not exist, or not for this normalization."""
        if kind not in GRADIENTS:
            raise InvalidArgument("gradient", f"must be one of {', '.join(GRADIENTS)}", kind)
        if kind != "faithful" and self.normalization != "batch":
            raise InvalidArgument("normalization", f"must be batch with the {kind} gradient", self.normalization, "take the faithful one")

    def gradient(self, kind: str, generator: torch.Generator, dtype: torch.dtype = torch.float32, layers: int = 1) -> Gradient:
        """A function weight -> gradient that draws from `generator`, on the generator's device.

        Args:
            kind: ``"marginal"`` (the exact law of one neuron), ``"faithful"`` (inputs, batch norm and backpropagation;
                the neurons of a layer share their inputs) or ``"gaussian"`` (free i.i.d., unit variance).
            generator: Source of every random number.
            dtype: float32 or float64.
            layers: Number of layers along the neuron axis.
        """
        self.check_gradient(kind)
        if kind == "gaussian":
            return lambda weight: torch.randn(weight.shape, generator=generator, dtype=dtype, device=weight.device)
        gamma_in, gamma_out = self.scales(dtype, generator.device, layers)
        if kind == "marginal":
            return _Marginal(gamma_in, gamma_out, self.batch, generator)
        return lambda weight: faithful_gradient(weight, gamma_in, gamma_out, self.batch, layers, generator, self.normalization)

    def scales(self, dtype: torch.dtype, device: torch.device, layers: int = 1) -> tuple[Float[Tensor, " dim"], Float[Tensor, " neuron"]]:
        """gamma_in; and gamma_out times the deviation of the output gradients, for each neuron of all layers."""
        scale = self.gamma_out * self.loss_scale / (self.neurons * self.batch)
        gamma_in = torch.as_tensor(self.gamma_in, dtype=dtype, device=device)
        return gamma_in, torch.as_tensor(np.tile(scale, layers), dtype=dtype, device=device)


def faithful_gradient(
    weight: Weight,
    gamma_in: Float[Tensor, " dim"],
    gamma_out: Float[Tensor, " neuron"],
    batch: int,
    layers: int,
    generator: torch.Generator,
    normalization: str = "batch",
) -> Weight:
    """Backpropagation through W (gamma_in * X) and its normalization (eps = 0), fresh X and output gradients each call.

    Args:
        weight: Rows of all layers, shape (layers * K, dim), or more of them along axes before.
        gamma_in: Input scales.
        gamma_out: gamma_out times the deviation of the output gradients, per neuron.
        batch: B, number of inputs.
        layers: Neurons of one layer share X.
        generator: On the device of `weight`.
        normalization: One of `NORMALIZATIONS`.

    Returns:
        dL/dW of every row.
    """
    *more, rows, dim = weight.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)

    inputs = gamma_in[:, None] * normal(*more, layers, dim, batch)
    out_grad = gamma_out.view(layers, -1, 1) * normal(*more, layers, rows // layers, batch)
    rows_of = weight.view(*more, layers, -1, dim)
    if normalization == "weight":
        gradient = through_normalization(rows_of, out_grad @ inputs.mT, -1)
    elif normalization == "none":
        gradient = out_grad @ inputs.mT
    else:
        gradient = through_normalization(rows_of @ inputs, out_grad, -1 if normalization == "batch" else -2) @ inputs.mT
    return gradient.reshape(weight.shape)


def through_normalization(x: Tensor, out_grad: Tensor, axis: int) -> Tensor:
    """The gradient at x of (x - mean) / deviation along `axis`, given that at the output (eps = 0; derivation T5)."""
    centered = x - x.mean(axis, keepdim=True)
    deviation = centered.square().mean(axis, keepdim=True).sqrt()
    unit = centered / deviation
    return (out_grad - out_grad.mean(axis, keepdim=True) - unit * (out_grad * unit).mean(axis, keepdim=True)) / deviation


def marginal_gradient(
    weight: Weight,
    normals: Weight,
    lengths: Float[Tensor, "*config neuron"],
    gamma_in: Float[Tensor, " dim"] | None,
    gamma_out: Float[Tensor, " neuron"],
) -> Weight:
    """The exact law of one neuron's gradient (THEORY.md section 3), neurons drawn independently.

    Given the pre-activations, the inputs orthogonal to w~ are still free, and centering and projecting leaves B - 2
    dimensions of the output gradient: C normals and two chi-squares replace two C x B products.

    Args:
        weight: Rows of all layers.
        normals: Independent standard normals.
        lengths: Independent draws of sqrt(B chi2_{B-2} / chi2_{B-1}): see `marginal_lengths`.
        gamma_in: Input scales; None stands for ones.
        gamma_out: gamma_out times the deviation of the output gradients, per neuron: see `Layer.scales`.
    """
    scaled = weight if gamma_in is None else gamma_in * weight
    along = torch.linalg.vecdot(scaled, normals).unsqueeze(-1)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    free = torch.addcmul(normals, scaled, along / norm.square(), value=-1)
    gradient = free * ((gamma_out * lengths).unsqueeze(-1) / norm)
    return gradient if gamma_in is None else gamma_in * gradient


def marginal_lengths(shape: tuple[int, ...], batch: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Independent sqrt(B chi2_{B-2} / chi2_{B-1})."""
    half = torch.ones(shape, dtype=torch.float64, device=generator.device)
    # chi2_k = 2 Gamma(k/2); torch.distributions would draw from the global generator.
    top = torch._standard_gamma(half * (batch - 2) / 2, generator=generator)
    bottom = torch._standard_gamma(half * (batch - 1) / 2, generator=generator)
    return (batch * top / bottom).sqrt().to(dtype)


@cache
def length_polynomial(batch: int) -> tuple[float, ...]:
    """Coefficients (lowest first) of P with exp P(z) distributed as sqrt(B chi2_{B-2} / chi2_{B-1}) for a standard normal z.

    exp P is the quantile function at Phi(z): no rejection, one normal a draw. The degree is as high as an error of the
    mean square below 1e-6 needs (at B = 4 .. 7: 4e-6).

    Example:
        >>> len(length_polynomial(32)) - 1
        8
    """

    def target(z: np.ndarray) -> np.ndarray:
        return 0.5 * np.log(batch * (batch - 2) / (batch - 1) * fdtri(batch - 2, batch - 1, ndtr(z)))

    degree = 20 if batch < 8 else 16 if batch < 12 else 12 if batch < 24 else 8
    chebyshev = np.polynomial.Chebyshev.interpolate(target, degree, domain=[-REACH, REACH])
    return tuple(chebyshev.convert(kind=np.polynomial.Polynomial).coef)


class _Marginal:
    """`marginal_gradient` with numbers drawn from a generator."""

    # Lengths are drawn for this many steps at a time: one call costs as much as drawing a few hundred.
    _AHEAD = 64

    def __init__(self, gamma_in: Tensor, gamma_out: Tensor, batch: int, generator: torch.Generator) -> None:
        self.gamma_in = None if (gamma_in == 1).all() else gamma_in
        self.gamma_out, self.batch, self.generator = gamma_out, batch, generator
        self.lengths: list[Tensor] = []

    def __call__(self, weight: Tensor) -> Tensor:
        if not self.lengths:
            ahead = marginal_lengths((self._AHEAD, *weight.shape[:-1]), self.batch, self.generator, weight.dtype)
            self.lengths = list(ahead.unbind(0))[::-1]
        normals = torch.randn(weight.shape, generator=self.generator, dtype=weight.dtype, device=weight.device)
        return marginal_gradient(weight, normals, self.lengths.pop(), self.gamma_in, self.gamma_out)
