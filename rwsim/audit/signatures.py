"""What known slips do to the equilibrium: for each what theory expects of it, over what it expects of the law.

Nothing is typed: a slip is a change of the law's hyperparameters, or another rule of `RULES` at the same ones. Where it settles
in time the full prediction says where, else `expected_path` how far it comes: a slip that never settles has a signature too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rwsim.audit.finding import CONVENTION, FAULT, Kind
from rwsim.errors import NoEquilibrium, RwsimError
from rwsim.optimizers import RULES, UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.forms import numeric, settled
from rwsim.theory.noise import GradientLaw
from rwsim.theory.rates import total_decay
from rwsim.theory.schedule import expected_path

# `expected_path` is within this of simulated ensembles (README: plan).
PATH_ERROR = 0.01
# Beside gradients of a tenth.
_NEGLIGIBLE_EPS = 1e-6
# What may be left of a start at the first step that counts, in ||w||^2, for a walk to be taken as settled.
_SETTLED = 0.1


@dataclass(frozen=True)
class Signature:
    """What a slip does to the equilibrium of a law.

    Attributes:
        words: "as if ...".
        kind: ``convention`` where the rules differ in nothing but weight decay: a documented choice.
        norm: Its norm over the law's, in the steps that count.
        rotation: The same of its rotation.
    """

    words: str
    kind: Kind
    norm: float
    rotation: float

    def distance(self, norm: float, rotation: float) -> float:
        """Largest difference in logarithms from measured ratios."""
        return max(abs(math.log(norm / self.norm)), abs(math.log(rotation / self.rotation)))


def signatures(rule: UpdateRule, law: GradientLaw, steps: int, burn_in: int, start_sq: float) -> list[Signature]:
    """Signatures of what may be mistaken for `rule`, measured from `burn_in` to `steps`, from weights of second moment `start_sq`."""

    def means(one: UpdateRule) -> tuple[float, float]:
        try:
            prediction = predict_equilibrium(one, law)
            root = 1.0 if prediction.normalizer is None else float(prediction.normalizer.mean())
            rate = -float(numeric(type(one), (total_decay(type(one)),), (sym.normalizer,))(*sym.flat(one.values), root)[0])
            # What has settled long before the steps that count needs no path.
            if math.exp(-2 * rate * burn_in) < _SETTLED:
                with np.errstate(all="ignore"):  # a decay of one a step leaves nothing
                    return prediction.full.norm, prediction.full.rotation
        except NoEquilibrium:
            pass
        path = expected_path(one, law, steps, {}, start_sq)
        return math.sqrt(float(np.mean(path.norm[burn_in:] ** 2))), float(path.rotation[burn_in:].mean())

    found = []
    # Without eps all coordinates are alike, and a path takes a fifth of the time.
    if 0 < getattr(rule.values, "eps", 0.0) < _NEGLIGIBLE_EPS:
        rule = type(rule)(**{**vars(rule.values), "eps": 0.0})
    try:
        norm, rotation = means(rule)
    except RwsimError:
        return []
    for words, kind, other in _slips(rule):
        try:
            its_norm, its_rotation = means(other)
        except RwsimError:  # a variant that the theory cannot carry has no signature
            continue
        if 0 < its_norm < math.inf and 0 < its_rotation < math.inf:
            found.append(Signature(words, kind, its_norm / norm, its_rotation / rotation))
    return found


def _slips(rule: UpdateRule) -> Iterator[tuple[str, Kind, UpdateRule]]:
    values: dict[str, Any] = dict(vars(rule.values))

    def changed(**changes: Any) -> UpdateRule:
        return type(rule)(**{**values, **changes})

    decays = ((0.0, "there were no weight decay"), (2.0, "weight decay were applied twice"),
              (10.0, "weight decay were ten times as large"), (0.1, "weight decay were ten times as small"))  # fmt: skip
    for factor, words in decays:
        yield words, FAULT, changed(weight_decay=factor * values["weight_decay"])
    if values.get("momentum"):
        yield "there were no momentum", FAULT, changed(momentum=0.0)
    if "betas" in values:
        one, two, *rest = values["betas"]
        yield "betas were swapped", FAULT, changed(betas=(two, one, *rest))
        yield "there were no momentum", FAULT, changed(betas=(0.0, two, *rest))
        if settled(type(rule)).direction == "sign":
            # beta_1 (beta_2 m + (1 - beta_2) g) + (1 - beta_1) g
            yield "momentum were updated before the sign", FAULT, changed(betas=(one * two, two, *rest))
    seen = [rule]
    for other in RULES.values():
        # Rules of other buffers are told apart by their first steps.
        if other.state != rule.state or not _alike(other, values):
            continue
        given = {key: values[key] for key in other.hyper if key in values}
        theirs = other(**({"max_lr": values["lr"], **given} if "max_lr" in other.hyper else given))
        if any(_same(one, theirs) for one in seen):
            continue  # AdamC at its largest lr is AdamW
        seen.append(theirs)
        yield f"it were {other.name}", CONVENTION if _same_without_decay(rule, theirs) else FAULT, theirs


def _alike(other: type[UpdateRule], values: Mapping[str, Any]) -> bool:
    """Whether another rule can run at these hyperparameters."""
    needed = [key for key, default in other.hyper.items() if default is ... or key in ("momentum", "betas")]
    if not all(key in values for key in needed):
        return False
    return all(np.shape(values[key]) == np.shape(default) for key, default in other.hyper.items() if key in values and default is not ...)


def _same_without_decay(one: UpdateRule, other: UpdateRule) -> bool:
    return _same(*(type(rule)(**{**vars(rule.values), "weight_decay": 0.0}) for rule in (one, other)))


def _same(one: UpdateRule, other: UpdateRule) -> bool:
    """Whether two rules take the same steps."""
    grads = torch.tensor([[0.7, -0.2], [-0.4, 0.9], [0.3, 0.5]], dtype=torch.float64)
    ends = []
    for rule in (one, other):
        start = torch.tensor([0.4, -0.6], dtype=torch.float64)
        state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in rule.state})
        for step, grad in enumerate(grads, 1):
            state.step = step
            state = SimpleNamespace(**rule.update(grad, state, rule.values, torch))
        ends.append(state.param)
    return torch.allclose(ends[0], ends[1], rtol=1e-9, atol=1e-12)
