"""Where the prediction stops: the toy system without batch norm, and weights that are not scale-invariant.

`python -m benchmarks.neighbours` prints the tables of docs/neighbouring-systems.md (5 to 10 minutes on one core).

The prediction is the exact form. It is compared twice: from hyperparameters alone, that is with the gradient law of batch
norm, and with each neuron's gradient of the size that was measured, E||g~||^2 = E ||g||^2 ||w||^2 (what the paper does).
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import sympy as sp

from rwsim.optimizers import SGDM, AdamL2, AdamW, Lion, UpdateRule
from rwsim.stats.mcse import estimate
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import Equilibrium, predict_equilibrium
from rwsim.theory.noise import IdealWalk, ToySystem
from rwsim.theory.response import argument_kernel, lag
from rwsim.walk.job import Job
from rwsim.walk.measure import Walk
from rwsim.walk.simulate import run, single_threaded
from rwsim.walk.system import NORMALIZATIONS, Layer

# Equilibria near the start weights (norm 0.6) with memories of about 200 steps.
RULES_AT: tuple[UpdateRule, ...] = (
    SGDM(lr=0.1, weight_decay=2.5e-3), AdamW(lr=5e-3, weight_decay=0.5),
    AdamL2(lr=3.6e-3, weight_decay=1.7e-3), Lion(lr=1e-3, weight_decay=4.0),
)  # fmt: skip
BURN_IN = 1500
# With a radial part of half the decay either way; Lion, whose sign multiplies it by 6.7, of a twentieth.
RADIAL_AT: tuple[tuple[UpdateRule, float], ...] = (
    (SGDM(lr=1e-3, weight_decay=1.0), 0.5), (AdamW(lr=1e-2, weight_decay=1.0), 0.5), (AdamL2(lr=1e-2, weight_decay=1.0), 0.5),
    (Lion(lr=3e-4, weight_decay=2.5), 0.125),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A measured value with its relative standard error, and the relative errors of its predictions, measured / predicted - 1."""

    value: float
    mcse: float
    errors: tuple[float, ...]


@dataclass(frozen=True)
class System:
    """One optimizer in one system.

    Attributes:
        neuron: Mean rotation of a neuron's weights, radians per step.
        matrix: RMS rotation of the whole matrix as one vector, radians per step.
        norm: RMS norm of a neuron; that of the matrix is sqrt(K) times it.
        uneven: RMS norm of the quarter of the neurons with the largest gamma_out over that of the quarter with the smallest.

    Each with the errors of both predictions.
    """

    normalization: str
    rule: UpdateRule
    neuron: Found
    matrix: Found
    norm: Found
    uneven: Found


def layer_of(normalization: str, size: int) -> Layer:
    """C = K = size, B = 32, uneven output scales. A standardized weight has deviation 1: its loss scale makes up for it."""
    scale = 1 / math.sqrt(size) if normalization == "weight" else 1.0
    return Layer(np.ones(size), np.geomspace(0.5, 2.0, size), 32, scale, normalization)


def predicted(rule: UpdateRule, layer: Layer, walk: Walk | None = None) -> Equilibrium:
    """Per neuron: with batch norm's gradients, and given a walk with those scaled to each neuron's measured E||g~||^2."""
    law = dataclasses.replace(layer, normalization="batch", loss_scale=1.0).law("faithful")
    found = predict_equilibrium(rule, law)
    if walk is None:
        return found.exact
    assert isinstance(law, ToySystem)
    measured = walk.unit_grad_sq[:, 0].mean(0).reshape(-1, layer.neurons).mean(0)
    # In batch norm's law with even gamma_in E||g~||^2 is C - 1 times scale_sq, whatever the weights.
    scale = np.sqrt(measured / (law.scale_sq[:, 0] * (law.fan_in - 1)))
    return predict_equilibrium(rule, dataclasses.replace(law, gamma_out=law.gamma_out * scale[:, None])).exact


def root(chains: np.ndarray) -> tuple[float, float]:
    """Root of a mean square and its relative standard error, from chains (time, layer)."""
    found = estimate(chains)
    return math.sqrt(found.mean), found.mcse / found.mean / 2


def measure(normalization: str, rule: UpdateRule, *, size: int, layers: int, steps: int, burn_in: int = BURN_IN, seed: int = 0) -> System:
    """Walk one system and compare."""
    layer = layer_of(normalization, size)
    with single_threaded():
        walk = run(Job((rule,), layer, steps, "faithful", layers, seed=seed), engine="reference").kept(burn_in)
    forms = (predicted(rule, layer), predicted(rule, layer, walk))

    def by_layer(series: np.ndarray) -> np.ndarray:
        return series[:, 0].reshape(len(series), layers, size)

    def found(value: float, mcse: float, prediction: Callable[[Equilibrium], float]) -> Found:
        return Found(value, mcse, tuple(value / prediction(form) - 1 for form in forms))

    angle = estimate(by_layer(walk.angle).mean(-1))
    norm_sq, distance_sq = by_layer(walk.norm_sq), by_layer(walk.distance_sq)
    # <W, W'> / ||W||^2 = 1 - E||W' - W||^2 / (2 E||W||^2) at a steady norm: of the matrix as one vector.
    parts = [series.sum(-1) / series.sum(-1).mean() for series in (distance_sq, norm_sq)]
    turn = math.sqrt(distance_sq.mean() / norm_sq.mean())
    turn_error = estimate(1 + parts[0] - parts[1]).mcse / 2  # of a ratio of means, to first order
    few = size // 4
    high, low = (estimate(norm_sq[:, :, part].mean(-1)) for part in (slice(-few, None), slice(few)))
    return System(
        normalization, rule,
        neuron=found(angle.mean, angle.mcse / angle.mean, lambda form: form.rotation),
        matrix=found(2 * math.asin(turn / 2), turn_error, _of_the_matrix),
        norm=found(*root(norm_sq.mean(-1)), lambda form: form.norm),
        uneven=found(
            math.sqrt(high.mean / low.mean), math.hypot(high.mcse / high.mean, low.mcse / low.mean) / 2,
            lambda form: math.sqrt(form.norm_sq[-few:].mean() / form.norm_sq[:few].mean()),
        ),
    )  # fmt: skip


def _of_the_matrix(form: Equilibrium) -> float:
    """Its rotation: each neuron's 1 - cos, weighted by its squared norm."""
    return 2 * math.asin(math.sqrt((form.norm_sq * np.sin(form.angle / 2) ** 2).sum() / form.norm_sq.sum()))


def cells(found: Found) -> Iterator[str]:
    """Value with standard error, and the errors of its predictions."""
    yield f"{found.value:.4g} ± {found.mcse:.2%}"
    yield " / ".join(f"{error:+.1%}" for error in found.errors)


SYSTEM_HEAD = ("normalization", "optimizer", "rotation", "error", "of the matrix", "error", "norm", "error", "large / small", "error")
RADIAL_HEAD = ("optimizer", "λ", "λ_u", "norm", "error", "rotation", "error")


def head(names: tuple[str, ...]) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def row(first: tuple[str, ...], values: tuple[Found, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join((*first, *(cell for value in values for cell in cells(value))))} |"


def with_radial(rule: UpdateRule, radial: float) -> UpdateRule:
    """The rule with lambda_u w added to every gradient, as one rule: the theory reads it off like any other."""

    class Radial(type(rule)):  # type: ignore[misc]  # a class of a class that is known at run time only
        name = f"{rule.name}_radial"
        hyper = {**rule.hyper, "radial": ...}

        @staticmethod
        def update(grad, state, hyper, xp):
            plain = SimpleNamespace(**{key: value for key, value in vars(hyper).items() if key != "radial"})
            return rule.update(grad + hyper.radial * state.param, state, plain, xp)

    return Radial(**vars(rule.values), radial=radial)


def _decaying(rule: UpdateRule, more: float) -> UpdateRule:
    return type(rule)(**{**vars(rule.values), "weight_decay": rule.values.weight_decay + more})


def sign_gain(rule: UpdateRule) -> float:
    """What a small constant gradient moves a sign rule by, per unit of lr, beside random ones of unit variance: E sign(n) is
    sqrt(2/pi) times the mean of its argument n over its deviation."""
    kernel = argument_kernel(type(rule))
    values = {symbol: value for symbol, value in zip(sym.flat(sym.hyper_symbols(type(rule))), sym.flat(rule.values), strict=True)}
    tail = sp.lambdify(lag, kernel.tail.subs(values), "numpy")(np.arange(1.0, 5000.0))
    head = float(kernel.head.subs(values))
    return math.sqrt(2 / math.pi) * (head + tail.sum()) / math.sqrt(head**2 + (tail**2).sum())


@dataclass(frozen=True)
class Radial:
    """Norm and rotation of a scale-sensitive weight against three predictions: without the radial part, with decay
    lambda + lambda_u (T6 as printed), and with the radial part put through the update (under a sign through its linear part)."""

    rule: UpdateRule
    radial: float
    norm: Found
    rotation: Found


def measure_radial(rule: UpdateRule, radial: float, *, fan_in: int = 128, neurons: int = 512, steps: int = 4500, seed: int = 0) -> Radial:
    """Walk free Gaussian gradients of unit variance with lambda_u w added."""
    layer, law = Layer.draw(fan_in, neurons, gamma="uniform"), IdealWalk(fan_in)
    walk = run(Job((rule,), layer, steps, "gaussian", radial=radial, seed=seed)).kept(BURN_IN)
    through = _decaying(rule, radial * sign_gain(rule)) if rule.name == "lion" else with_radial(rule, radial)
    forms = [predict_equilibrium(each, law).exact for each in (rule, _decaying(rule, radial), through)]
    norm, error = root(walk.norm_sq[:, 0])
    angle = estimate(walk.angle[:, 0])
    return Radial(
        rule, radial, Found(norm, error, tuple(norm / form.norm - 1 for form in forms)),
        Found(angle.mean, angle.mcse / angle.mean, tuple(angle.mean / form.rotation - 1 for form in forms)),
    )  # fmt: skip


def main() -> None:
    """Print the tables of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", type=int, default=64, help="C = K; default 64")
    parser.add_argument("--layers", type=int, default=8, help="copies of the layer, the unit of the error bars; default 8")
    parser.add_argument("--steps", type=int, default=8000, help=f"of each walk, the first {BURN_IN} are dropped; default 8000")
    options = parser.parse_args()
    print(head(SYSTEM_HEAD))
    for normalization in NORMALIZATIONS:
        for rule in RULES_AT:
            system = measure(normalization, rule, size=options.size, layers=options.layers, steps=options.steps)
            print(row((normalization, rule.name), (system.neuron, system.matrix, system.norm, system.uneven)), flush=True)
    print("\n" + head(RADIAL_HEAD))
    for rule, radial in RADIAL_AT:
        for sign in (1, -1):
            found = measure_radial(rule, sign * radial, steps=options.steps)
            print(row((rule.name, f"{rule.values.weight_decay:g}", f"{found.radial:+g}"), (found.norm, found.rotation)), flush=True)


if __name__ == "__main__":
    main()
