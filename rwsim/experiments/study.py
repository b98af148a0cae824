"""What a study is made of: arms that are trained in stages, each with several seeds, at one of three sizes, and a judgement of its claims.

An *arm* is a configuration of a training; an *outcome* is what one run of it came to. Searches look at validation data only: the test set
is evaluated for arms that are `final`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rwsim.experiments.compare import Claim
from rwsim.experiments.data import VOCABULARY
from rwsim.experiments.idx import CLASSES
from rwsim.experiments.lanes import Outcome
from rwsim.experiments.records import counts
from rwsim.experiments.train import Recipe
from rwsim.theory.noise import Array

# Runs of fewer steps get the decay of so many: lr times decay would otherwise be larger than 1.
_SHORT = 50


@dataclass(frozen=True)
class Scale:
    """A size of all studies.

    Attributes:
        name: On the command line.
        steps, gpt_steps: Of a training on images, on text.
        seeds: Of arms whose parity is claimed.
        few: Seeds of others.
        batch, gpt_batch: Items a step.
        resnet, resnet18, gpt: Sizes of networks.
        points: Per searched axis.
        validation: Items held back from training.
        every: Steps between measurements.
        autocast: Compute in bf16.
    """

    name: str
    steps: int
    gpt_steps: int
    seeds: int
    few: int
    batch: int
    gpt_batch: int
    points: int
    validation: int
    every: int
    autocast: bool = False
    resnet: Mapping[str, Any] = field(default_factory=dict)
    resnet18: Mapping[str, Any] = field(default_factory=dict)
    gpt: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, network: str, optimizer: str, lr: float, decay: float, **rest: Any) -> Recipe:
        """A training of `network` at this size, under a schedule of warmup and cosine.

        Args:
            network: A name in `NETWORKS`.
            optimizer: A name in `OPTIMIZERS`.
            lr, decay: At the schedule's peak.
            **rest: Other fields of a recipe; a ``size`` is put on top of this size's.
        """
        text = network == "gpt"
        given = {
            "hyper": {"lr": lr, "weight_decay": decay, **_HYPER[optimizer], **(_TEXT_HYPER if text else {})},
            "steps": self.gpt_steps if text else self.steps, "batch": self.gpt_batch if text else self.batch,
            "schedule": SCHEDULE, "every": self.every, "validation": self.validation, "autocast": self.autocast, **rest,
        }  # fmt: skip
        return Recipe(network, optimizer, **given | {"size": {**getattr(self, network), **rest.get("size", {})}})

    def decay(self, lr: float, total: float, network: str = "resnet", optimizer: str = "adamw") -> float:
        """The decay at which lr times decay, at the peak, sums to `total` over a run: half the time constants of AdamW's norm in it.

        A gradient acts on through a momentum of 0.9 ten times: there it is lr/(1 - momentum) that counts.

        Example:
            >>> SCALES["gpu"].decay(lr=0.01, total=10.0), SCALES["gpu"].decay(lr=0.1, total=10.0, optimizer="sgdm")
            (0.5, 0.005)
        """
        kept = 1 - _HYPER[optimizer].get("momentum", 0.0)
        return rounded(total * kept / max(self.gpt_steps if network == "gpt" else self.steps, _SHORT) / lr)

    def spaced(self, low: float, high: float, more: int = 0) -> tuple[float, ...]:
        """`points` and `more` numbers from `low` to `high`, evenly on a log scale."""
        count = max(2, self.points + more) if self.points > 2 else self.points
        return tuple(rounded(x) for x in np.geomspace(low, high, count))


SCHEDULE = "warmup0.05+cosine"
# Facts that searches go over.
SEARCHED = ("lr", "decay")
_HYPER: Mapping[str, Mapping[str, Any]] = {
    "sgdm": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.999)}, "adam_l2": {"betas": (0.9, 0.999)}, "lion": {"betas": (0.9, 0.99)},
}  # fmt: skip
_TEXT_HYPER = {"betas": (0.9, 0.95)}
_SMALL = {"width": 4, "blocks": 1}
_TINY = {"width": 2, "blocks": 1}
SCALES: Mapping[str, Scale] = {
    one.name: one
    for one in (
        Scale("gpu", 2000, 1500, seeds=5, few=3, batch=128, gpt_batch=32, points=5, validation=5000, every=10, autocast=True),
        Scale(
            "cpu", 300, 300, seeds=3, few=3, batch=32, gpt_batch=8, points=3, validation=2000, every=6,
            resnet=_SMALL, resnet18={"width": 4}, gpt={"width": 32, "depth": 2, "heads": 2, "context": 32},
        ),
        Scale(
            "smoke", 4, 4, seeds=2, few=2, batch=8, gpt_batch=4, points=2, validation=16, every=1,
            resnet=_TINY, resnet18=_TINY, gpt={"width": 8, "depth": 1, "heads": 2, "context": 8},
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """A configuration of a training.

    Attributes:
        name: Which files and tables bear.
        recipe: What is trained.
        seeds: How many, from the study's first on.
        final: Whether the test set is evaluated; such arms come out of no comparison with others on test data.
        facts: What tables and figures are keyed by.
    """

    name: str
    recipe: Recipe
    seeds: int
    final: bool
    facts: Mapping[str, float | int | str]


def arm(recipe: Recipe, seeds: int, final: bool, **facts: float | int | str) -> Arm:
    """An arm that is named by its facts.

    Example:
        >>> arm(SCALES["smoke"].recipe("resnet", "adamw", 0.01, 1.0), 1, False, kind="no decay", lr=0.01).name
        'search-no-decay-lr0.01'
    """
    words = [re.sub(r"[^\w^]+", "-", value) if isinstance(value, str) else f"{key}{value:g}" for key, value in facts.items()]
    return Arm("-".join([*([] if final else ["search"]), *words]), recipe, seeds, final, facts)


class Trained:
    """Arms, and what their runs came to, by seed.

    Args:
        pairs: Of both.
    """

    def __init__(self, pairs: Iterable[tuple[Arm, Sequence[Outcome]]] = ()) -> None:
        pairs = list(pairs)
        self.arms = {one.name: one for one, _ in pairs}
        self.runs = {one.name: tuple(runs) for one, runs in pairs}

    def added(self, pairs: Iterable[tuple[Arm, Sequence[Outcome]]]) -> "Trained":
        """With more arms."""
        return Trained([*((one, self.runs[name]) for name, one in self.arms.items()), *pairs])

    def select(self, final: bool | None = None, **facts: Any) -> list[Arm]:
        """The arms with these facts, in order."""
        return [
            one
            for one in self.arms.values()
            if final in (None, one.final) and all(key in one.facts and one.facts[key] == value for key, value in facts.items())
        ]

    def one(self, final: bool | None = None, **facts: Any) -> Arm:
        """The only arm with these facts."""
        (found,) = self.select(final, **facts)
        return found

    def scores(self, one: Arm, test: bool | None = None) -> Array:
        """Points of accuracy, or minus the loss of a text: higher is better; shape (seed,). A run that diverged counts as guessing.

        Args:
            one: Which arm.
            test: On test data; None: where the arm is final.
        """
        test = one.final if test is None else test
        found = []
        for run in self.runs[one.name]:
            loss, accuracy = (run.test_loss, run.test_accuracy) if test else (run.loss, run.accuracy)
            if one.recipe.text:
                found.append(-loss if math.isfinite(loss) else -math.log(VOCABULARY))
            else:
                found.append(100 * (accuracy if math.isfinite(loss) else 1 / CLASSES))
        return np.array(found)

    def best(self, arms: Iterable[Arm]) -> Arm:
        """The one with the highest mean score on validation data."""
        return max(arms, key=lambda one: self.scores(one, test=False).mean())

    def at_edge(self, one: Arm) -> list[str]:
        """Which of lr and decay of a final arm are the least or the largest that was searched for it, of more than one.

        What was searched for it are the arms that are not final and share its other facts.
        """
        others = {key: value for key, value in one.facts.items() if key not in SEARCHED}
        group = [arm for arm in self.select(final=False) if all(arm.facts.get(key) == value for key, value in others.items())]
        found = []
        for key in SEARCHED:
            values = sorted({float(arm.facts[key]) for arm in group if key in arm.facts})
            if len(values) > 1 and key in one.facts and float(one.facts[key]) in (values[0], values[-1]):
                found.append(f"{'lowest' if float(one.facts[key]) == values[0] else 'highest'} {key}")
        return found

    def path(self, one: Arm, quantity: str = "rotation") -> Array:
        """Mean of ``norm``, ``rotation`` or ``spread`` over scale-invariant layers (all, where none is), shape (seed, time)."""
        return np.stack([getattr(run, quantity)[:, invariant(run)].mean(1) for run in self.runs[one.name]])

    def turned(self, one: Arm) -> Array:
        """Mean of that of the rotation over the measurements of the run, shape (seed,)."""
        return np.average(self.path(one), 1, counts(self.runs[one.name][0].step, one.recipe.every))

    def mean(self, one: Arm, quantity: str, since: float = 0.0) -> Array:
        """Mean over time of ``norm``, ``rotation`` or ``spread`` after the share `since` of the run, shape (seed, layer)."""
        return np.stack([getattr(run, quantity)[run.step > since * one.recipe.steps].mean(0) for run in self.runs[one.name]])

    def diverged(self, one: Arm) -> int:
        """How many of its runs did."""
        return sum(run.diverged is not None for run in self.runs[one.name])


Stage = Callable[[Scale, Trained], Iterable[Arm]]


@dataclass(frozen=True)
class Study:
    """A training experiment of the paper.

    Attributes:
        name: On the command line.
        about: One line.
        claim: What is judged, as a clause.
        paper: What the paper trained, a clause.
        differs: What differs here, a clause.
        stages: Each gives arms, from the size and what the stages before it came to.
        judge: From size and outcomes to claims.
    """

    name: str
    about: str
    claim: str
    paper: str
    differs: str
    stages: tuple[Stage, ...]
    judge: Callable[[Scale, Trained], Sequence[Claim]]


def unit(one: Arm) -> str:
    """What differences of its scores are in."""
    return "nats" if one.recipe.text else "points"


def invariant(run: Outcome) -> list[int]:
    """Numbers of its scale-invariant layers; of all, where none is."""
    return [k for k, layer in enumerate(run.layers) if layer.invariant] or list(range(len(run.layers)))


def rounded(value: float) -> float:
    """To three digits: a setting, not a measurement."""
    return float(f"{value:.3g}")
