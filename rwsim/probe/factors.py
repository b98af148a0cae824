"""What a measured rotation is off by, as a product of factors, each with the assumption of the random walk that it is about.

Let S lambda be what a step's decay takes off w in all (`rwsim.probe.predict`), r the angle of a step, and K the total effect of updates
over that of single ones, through what they have in common with later ones. Where ||w||^2 grows by gamma of itself a step, what updates add
balances what decay and radial gradients take (paper, section 3.1) as

    K E r^2 = 2 S (lambda + lambda_u) + gamma.

Of neurons without any gradient, a share f, r is 0 and gamma -2 S lambda: they fade away. Theory gives a root mean square of r, the mean is
what is shown. So, with averages over neurons and steps,

    measured/predicted = sqrt(1 - f)                                  idle
                       * sqrt(1 + lambda_u/lambda)                    radial     of the others
                       * sqrt(1 + gamma/(2 S (lambda + lambda_u)))    growth     of the others
                       * r(lengths of g)/r(one length)                bursts     of a sign; else 1
                       * mean of neurons' RMS / RMS of all            neurons
                       * mean / mean of neurons' RMS                  steps
                       * sqrt(K_predicted/K)                          memory

where memory is what is left. Of SGDM K = (1 + alpha)/(1 - alpha) whatever the gradients' correlation, since E<w, m> does not drift: memory
is then a check that can fail, not a remainder. Of Adam it tells of second moments that vary with the gradient, of a sign of gradients that
agree with earlier ones (below 1) or oppose them (above 1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rwsim.theory.noise import Array

# Factor -> the assumption of the random walk that fails where it is not 1.
FACTORS: Mapping[str, str] = MappingProxyType(
    {
        "idle": "every neuron has gradients",
        "radial": "gradients are orthogonal to the weights",
        "growth": "norms are in equilibrium, neuron by neuron",
        "bursts": "gradients of a neuron have one length",
        "memory": "updates agree with earlier ones as those of uncorrelated gradients do",
        "neurons": "neurons turn alike",
        "steps": "steps turn alike",
    }
)
# Quantiles that stand for a distribution of lengths.
_NODES = 24


@dataclass(frozen=True)
class Turned:
    """Averages over the neurons of a layer and some of its steps.

    Attributes:
        rotation: Mean of r, radians.
        rotation_sq: Mean of r^2.
        idle: Share without any gradient.
        lambda_ratio: lambda_u over lambda.
        growth: gamma, of ln ||w||^2 a step: the mean over neurons, so that those which fade away count like others.
        bursts: See `rwsim.probe.predict.Theory.bursts`.
        neurons: Mean over neurons of the root mean square of r, over the root mean square of all.
    """

    rotation: float
    rotation_sq: float
    idle: float
    lambda_ratio: float
    growth: float
    bursts: float = 1.0
    neurons: float = 1.0


def factors(of: Turned, predicted: float, taken: float, passed: float = 1.0) -> dict[str, float]:
    """Each of `FACTORS`: their product is `of.rotation` over `predicted`; NaN where there is no balance.

    Args:
        of: What was measured.
        predicted: RMS rotation, radians per step.
        taken: S lambda, what a step's decay takes off w in all.
        passed: Share of lambda_u that acts (`rwsim.probe.predict.Theory.passed`).

    Example:
        >>> half = Turned(rotation=0.005, rotation_sq=5e-5, idle=0.5, lambda_ratio=0.0, growth=-1e-4, neurons=0.5**0.5)
        >>> {name: round(value, 3) for name, value in factors(half, predicted=0.01, taken=1e-4).items() if abs(value - 1) > 1e-9}
        {'idle': 0.707, 'neurons': 0.707}
    """
    rms, live = math.sqrt(of.rotation_sq), 1 - of.idle
    with np.errstate(all="ignore"):
        radial = np.float64(1 + passed * of.lambda_ratio / np.float64(live))
        growth = 1 + (of.growth + 2 * taken * of.idle) / (2 * taken * live * radial)
        found = {
            "idle": np.sqrt(live), "radial": np.sqrt(radial), "growth": np.sqrt(growth), "bursts": np.float64(of.bursts),
            "neurons": np.float64(of.neurons), "steps": of.rotation / np.float64(rms) / of.neurons,
        }  # fmt: skip
        found["memory"] = of.rotation / predicted / np.prod(list(found.values()))
    return {name: float(found[name]) for name in FACTORS}


def nodes(lengths_sq: Array) -> Array:
    """Squared lengths (time, neuron) as a few numbers of mean 1, each as likely: over each neuron's own mean, idle ones aside."""
    known = lengths_sq[:, np.isfinite(lengths_sq).all(0)]
    known = known[:, known.mean(0) > 0] if len(known) else known
    if known.size < _NODES:
        return np.ones(1)
    found = np.array([part.mean() for part in np.array_split(np.sort((known / known.mean(0)).ravel()), _NODES)])
    return found / found.mean()
