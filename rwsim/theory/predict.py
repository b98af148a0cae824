"""`rwsim.predict`: equilibrium from hyperparameters alone."""

from typing import Any

import numpy as np

from rwsim.errors import InvalidArgument
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.theory.equilibrium import Prediction, predict_equilibrium
from rwsim.theory.noise import IdealWalk, ToySystem, gammas_over_draws

# More, as in rwsim.config, is a slip of the keyboard.
_MOST = 10**7


def predict(
    rule: str | type[UpdateRule],
    *,
    fan_in: int,
    batch: int | None = None,
    neurons: int = 128,
    gamma: Any = "uniform",
    loss_scale: float = 1.0,
    **hyper: Any,
) -> Prediction:
    """Equilibrium norm, rotation (radians per step) and RMS update of a rule, before a step is taken.

    Args:
        rule: A name in `RULES` or an UpdateRule class.
        fan_in: C >= 2.
        batch: None for the ideal walk (free i.i.d. gradients of unit second moment per coordinate); B >= 4 for the
            paper's toy system.
        neurons: K of the layer; with `batch` it scales the output gradients by 1/(K B).
        gamma: Toy system only. ``"uniform"`` (all one), ``"normal"`` (the expectation over standard normal draws of
            gamma_in and gamma_out), or an array: a layer's realised gamma_in, with gamma_out = 1.
        loss_scale: Factor on the output gradients.
        **hyper: The rule's hyperparameters in torch's words (lr, weight_decay, momentum or betas, eps); eps is 0.

    Returns:
        `.paper` (Table 1; None where the table has no such rule), `.exact` (exact second moments) and `.full` (what those leave
        out, worked out when asked for: see `rwsim.theory.full`), each with `.norm`, `.rotation`, `.rms_update`. The rotation of
        `.full` is the mean angle, of the others the RMS. `.full` says how sure it is: `.norm_error`, `.rotation_error`, `.valid`.

    Raises:
        InvalidArgument: A value out of range.
        NoEquilibrium: lr or weight decay 0, or unstable hyperparameters.
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> p = predict("adamw", lr=1e-2, weight_decay=1.0, betas=(0.9, 0.99), fan_in=128)
        >>> round(p.paper.norm, 4), round(p.exact.norm, 4), round(p.exact.rotation, 5)
        (0.8, 0.7664, 0.03252)
        >>> p = predict("adamw", lr=1e-2, weight_decay=1.0, betas=(0.9, 0.99), fan_in=128, batch=32)
        >>> round(p.full.norm, 4), round(p.full.rotation, 5), p.full.norm_error < 0.001, p.full.valid
        (0.7627, 0.03239, True, True)
    """
    return predict_equilibrium(find_rule(rule)(**hyper), gradient_law(fan_in, batch, neurons, gamma, loss_scale))


def gradient_law(
    fan_in: int, batch: int | None = None, neurons: int = 128, gamma: Any = "uniform", loss_scale: float = 1.0
) -> IdealWalk | ToySystem:
    """The gradient law that `predict` takes its arguments for.

    Raises:
        InvalidArgument: A value out of range.

    Example:
        >>> gradient_law(128), gradient_law(128, batch=32).batch
        (IdealWalk(fan_in=128, neurons=1), 32)
    """
    if fan_in < 2:
        raise InvalidArgument("fan_in", "must be at least 2 (one coordinate cannot rotate)", fan_in, "give a larger fan-in")
    if fan_in > _MOST:
        raise InvalidArgument("fan_in", f"must be at most {_MOST:,}", fan_in, "give the weights of one neuron")
    if batch is None:
        return IdealWalk(fan_in)
    if batch < 4:
        raise InvalidArgument("batch", "must be at least 4 (the gradient's second moment is infinite below)", batch, "give a larger batch")
    if neurons < 1:
        raise InvalidArgument("neurons", "must be at least 1", neurons, "the default is 128")
    if not 0 < loss_scale < np.inf:
        raise InvalidArgument("loss_scale", "must lie in (0, inf)", loss_scale, "the default is 1")
    if isinstance(gamma, str):
        if gamma not in ("uniform", "normal"):
            raise InvalidArgument("gamma", "must be uniform, normal or an array of fan_in numbers", gamma)
        gamma_in, gamma_out = (np.ones((1, fan_in)), np.ones((1, 1))) if gamma == "uniform" else gammas_over_draws(fan_in)
    else:
        gamma_in, gamma_out = np.asarray(gamma, dtype=np.float64)[None, ...], np.ones((1, 1))
        if gamma_in.shape != (1, fan_in) or not np.isfinite(gamma_in).all() or not gamma_in.all():
            raise InvalidArgument("gamma", f"must be uniform, normal or an array of {fan_in} finite non-zero numbers", gamma)
    return ToySystem(gamma_in, gamma_out, batch, loss_scale, neurons)
