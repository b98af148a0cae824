"""`nodecay`: rotation without weight decay (the paper's section 5.1 and appendix J).

Claim: without decay norms grow and the rotation falls, even at a constant learning rate. The paper says exponentially; its own recurrence
at a decay of 0 says as t^(-1/2), since the squared norm grows by the same amount in every step (THEORY.md, T12). Both are fitted, and the
expected path of `rwsim.theory.schedule` from the norm at the start is beside the measurement.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rwsim.experiments.compare import Claim, better, near
from rwsim.experiments.models import build, weights
from rwsim.experiments.study import SCHEDULE, Arm, Scale, Study, Trained, arm, invariant
from rwsim.experiments.train import Recipe
from rwsim.optimizers import find_rule
from rwsim.probe.predict import Theory
from rwsim.probe.transient import Transients
from rwsim.theory.factors import schedule_factors
from rwsim.theory.noise import Array

_LR, _TOTAL = 5e-2, 10.0
_SCHEDULES = ("constant", SCHEDULE)
# Relative error of the rotation that counts as agreement.
_BAND = 0.10
# Offsets t0 of (t + t0)^(-1/2) that are tried, over the length of the run.
_OFFSETS = np.geomspace(1e-4, 10, 101)
_paths = Transients()


def _arms(scale: Scale, _: Trained) -> Iterator[Arm]:
    decay = scale.decay(_LR, _TOTAL)
    for schedule in _SCHEDULES:
        for kind, value, rotational in (("no decay", 0.0, None), ("baseline", decay, None), ("RV", decay, {})):
            recipe = scale.recipe("resnet", "adamw", _LR, value, schedule=schedule, rotational=rotational)
            yield arm(recipe, scale.few, True, schedule=schedule, kind=kind, decay=value)


def expected(found: Trained, one: Arm) -> Array:
    """Rotation that theory expects of scale-invariant layers at each measured step, their mean, shape (time,)."""
    recipe, runs = one.recipe, found.runs[one.name]
    factors = schedule_factors(recipe.schedule, recipe.steps)
    over_time = np.ones(recipe.steps) if factors is None else factors
    hyper = {
        key: np.multiply.outer(over_time if key == "lr" else np.ones(recipe.steps), np.asarray(value))
        for key, value in recipe.hyper.items() if key != "weight_decay"
    }  # fmt: skip
    decay, unknown = np.full(recipe.steps, recipe.hyper["weight_decay"]), np.full(recipe.steps, np.nan)
    begun = start_sq(recipe)
    columns = []
    for k in invariant(runs[0]):
        # Starts that agree within some percent share a path: it takes seconds.
        start = float(f"{begun[runs[0].layers[k].name]:.1e}")
        columns.append(_paths.track(Theory(find_rule(recipe.optimizer)), hyper, decay, runs[0].layers[k].fan_in, start, unknown)[1])
    return np.mean(columns, 0)[runs[0].step - 1]


def start_sq(recipe: Recipe) -> dict[str, float]:
    """Mean of ||w||^2 over the neurons of each layer before the first step; of the weights of seed 0, from which others' differ little.

    Example:
        >>> from rwsim.experiments.study import SCALES
        >>> round(start_sq(SCALES["smoke"].recipe("resnet", "adamw", 0.01, 0.0))["conv"])
        2
    """
    model = build(recipe.network, 0, recipe.standardized, **recipe.size)
    named = dict(model.named_parameters())
    return {name: float(named[full].detach().flatten(1).square().sum(1).mean()) for name, full in weights(model).items()}


def fits(step: Array, path: Array) -> tuple[float, float]:
    """How far the logarithm of a falling rotation is from two laws, each with two numbers fitted: (RMS residual of an exponential, of a
    multiple of (t + t0)^(-1/2)).

    Example:
        >>> t = np.arange(1.0, 200)
        >>> fits(t, (t + 30) ** -0.5)[1] < 0.01, fits(t, np.exp(-t / 50))[0] < 1e-9
        (True, True)
    """
    log = np.log(path)
    straight = log - np.polyval(np.polyfit(step, log, 1), step)
    powers = [log + 0.5 * np.log(step + t0) for t0 in _OFFSETS * step[-1]]
    return float(straight.std()), min(float(one.std()) for one in powers)


def _judge(scale: Scale, found: Trained) -> Sequence[Claim]:
    claims = []
    for schedule in _SCHEDULES:
        none, base = (found.one(schedule=schedule, kind=kind) for kind in ("no decay", "baseline"))
        late = found.runs[none.name][0].step > 0.5 * none.recipe.steps
        paths = {one.name: found.path(one) for one in (none, base)}
        turned, kept = (np.log(paths[one.name][:, late].mean(1)) for one in (none, base))
        claims.append(better(schedule, "late in the run the baseline turns more than without decay (log)", kept, turned))
        for one, name in ((none, "without decay"), (base, "with decay")):
            path = np.full(len(paths[one.name]), expected(found, one)[late].mean())
            claims.append(near(schedule, f"{name} the late rotation is the expected path's", paths[one.name][:, late].mean(1), path, _BAND))
    none = found.one(schedule="constant", kind="no decay")
    step = found.runs[none.name][0].step
    # The start, before updates forget that averages were empty, is neither law's.
    rest = step > 0.05 * none.recipe.steps
    laws = np.array([fits(step[rest].astype(float), path[rest]) for path in found.path(none)])
    said = "the paper says exponentially; negative RMS residuals of the log rotation"
    claims += [
        better(
            "constant", "without decay rotation falls as (t + t0)^(-1/2) rather than exponentially", -laws[:, 1], -laws[:, 0], note=said
        ),
    ]
    return claims


NODECAY = Study(
    "nodecay",
    "rotation and norm of a ResNet without weight decay, with it, and of the rotational variant",
    "without decay the rotation falls, as the walk's recurrence says",
    "ResNet-20 on CIFAR-10 for 200 epochs under cosine, AdamW with lr 0.05 and decay 0.01 or 0",
    "here a ResNet-20 on Fashion-MNIST trains briefly, at a constant learning rate too, with a larger decay",
    (_arms,),
    _judge,
)
