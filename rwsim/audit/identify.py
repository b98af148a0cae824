"""What an optimizer is: the rule, or else the form of the family, whose steps are the optimizer's own in every script."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.audit.forms import DECAY_FIELDS, LISTS, Form, walk
from rwsim.audit.script import Script, tolerance
from rwsim.optimizers import RULES, UpdateRule

# Small changes are tried before another kind of direction: few scenes may not tell them apart.
_CORE = [name for name in LISTS if name not in (*DECAY_FIELDS, "direction")] + ["direction"]
# Forms that few scenes leave are tried one by one with every decay: so many of them.
_MOST_CORES = 40
# Numbers of a scene beyond which it is tried last.
_LARGE = 5000
# Factors of the decay that a slip makes: applied twice, half, a factor of ten.
_FACTORS = (1.0, 2.0, 0.5, 10.0, 0.1)


@dataclass(frozen=True)
class Observed:
    """What an optimizer did in every script.

    Attributes:
        scripts: The scenes.
        paths: For each where it went, (step, row, dim).
        tolerances: For each the largest difference that rounding explains.
    """

    scripts: Sequence[Script]
    paths: Sequence[Tensor]
    tolerances: Sequence[float]

    @classmethod
    def of(cls, scripts: Sequence[Script], paths: Sequence[Tensor], dtype: torch.dtype) -> "Observed":
        return cls(scripts, paths, [tolerance(script, path, dtype) for script, path in zip(scripts, paths, strict=True)])

    def errors(self, paths: Iterable[Tensor]) -> list[float]:
        """For each script the largest difference from other paths over its tolerance; infinity where one is not finite."""
        found = []
        for mine, other, allowed in zip(self.paths, paths, self.tolerances, strict=True):
            gap = float((mine - other).abs().max())
            found.append(gap / allowed if np.isfinite(gap) else float("inf"))
        return found

    def only(self, indices: Sequence[int]) -> "Observed":
        """Some of the scenes."""
        return Observed([self.scripts[i] for i in indices], [self.paths[i] for i in indices], [self.tolerances[i] for i in indices])


def rule_paths(rule: type[UpdateRule], scripts: Sequence[Script], given: Mapping[str, Any]) -> list[Tensor]:
    """Where a law goes in every script."""
    return [script.law(rule, given) for script in scripts]


class Search:
    """Looks for the forms that fit what was observed."""

    def __init__(self, observed: Observed, given: Mapping[str, Any], single: bool) -> None:
        self.observed = observed
        self.scenes = [_arrays(script, given, single) for script in observed.scripts]
        self.paths = [path.numpy() for path in observed.paths]
        # The short scenes first: they reject most forms.
        self.order = sorted(range(len(self.scenes)), key=lambda i: (self.paths[i].size > _LARGE, len(self.paths[i])))

    def misses(self, form: Form, indices: Sequence[int], limit: int = 10**9) -> int:
        """In how many of these scripts the form goes elsewhere; counting stops beyond the limit."""
        missed = 0
        for i in indices:
            start, grads, lrs, hyper = self.scenes[i]
            gap = np.abs(walk(form, start, grads, lrs, hyper) - self.paths[i]).max()
            if not gap <= self.observed.tolerances[i]:
                missed += 1
                if missed > limit:
                    break
        return missed

    def exact(self, forms: Iterable[Form], indices: Sequence[int]) -> Form | None:
        """The first form that fits in all of these scripts."""
        return next((form for form in forms if not self.misses(form, indices, 0)), None)

    def best(self, forms: Iterable[Form], indices: Sequence[int]) -> tuple[Form, int]:
        """The first form of fewest misses."""
        best, fewest = Form(), 10**9
        for form in forms:
            missed = self.misses(form, indices, fewest - 1)
            if missed < fewest:
                best, fewest = form, missed
        return best, fewest

    def find(self, near: Form | None) -> tuple[Form, int]:
        """The form that fits in every script, or that which misses fewest, and in how many it misses.

        The part without weight decay is looked for first, in the scripts without one; then the decay.

        Args:
            near: Where to begin: the law's form. Of several forms that fit, that of fewest changes to it is found.
        """
        bare = [i for i in self.order if not self.observed.scripts[i].hyper["weight_decay"]]
        if not bare:
            form = self.exact(self._joint(near), self.order)
            return (form, 0) if form else self.best(_and_neighbours(near or Form()), self.order)
        first = None
        for core in islice(self._cores(near, bare), _MOST_CORES):
            first = first or core
            if (form := self.exact(self._decays(core, near), self.order)) is not None:
                return form, 0
        if first is None:
            first = self.best(_plain() if near is None else _and_neighbours(near), bare)[0]
        # What fits nowhere is only likened to something: the usual strengths do for that, and take a seventh of the time.
        return self.best(self._decays(first, near, (1.0,)), self.order)

    def _cores(self, near: Form | None, indices: Sequence[int]) -> Iterator[Form]:
        """Forms, their decay left aside, that fit in these scripts: those next to the law first, the commonest after them."""
        stages: list[Iterable[Form]] = [_plain(), (one for form in _plain() for one in _neighbours(form))]
        if near is not None:
            stages[:0] = [_and_neighbours(near), _second_neighbours(near)]
        seen = set()
        for forms in stages:
            for form in forms:
                if form not in seen and not self.misses(form, indices, 0):
                    seen.add(form)
                    yield form
            if seen:
                return

    def _decays(self, core: Form, near: Form | None, factors: Sequence[float] = ()) -> Iterator[Form]:
        if near is not None:
            yield core.changed(decay=near.decay, rate=near.rate, factor=near.factor)
        for factor in factors or (*_FACTORS, *self._measured(core)):
            for decay in LISTS["decay"]:
                for rate in LISTS["rate"] if decay != "none" else ("lr",):
                    yield core.changed(decay=decay, rate=rate, factor=factor)

    def _joint(self, near: Form | None) -> Iterator[Form]:
        """Where no scene is free of decay: every decay with the law's form, the usual strength of each with the forms next to it."""
        if near is None:
            for form in _plain():
                yield from self._decays(form, None, (1.0,))
            return
        yield from self._decays(near, near)
        for form in _neighbours(near):
            yield from self._decays(form, near, (1.0,))

    def _measured(self, core: Form) -> list[float]:
        """The factor of the decay that the first step without a gradient shows, over lr and over 1."""
        found = []
        for script, path in zip(self.observed.scripts, self.observed.paths, strict=True):
            wd = float(script.hyper["weight_decay"])
            if script.probe == "P2" and wd and bool((script.grads[0] == 0).all()):
                shrunk = 1 - float((path[0] / script.start).double().mean())
                found += [shrunk / (script.lrs[0] * wd), shrunk / wd]
                break
        return [factor for factor in found if np.isfinite(factor) and abs(factor) > 1e-9]


def _plain() -> list[Form]:
    """The commonest forms: each kind of direction with each momentum."""
    plain = [Form(direction, momentum) for direction in LISTS["direction"] for momentum in LISTS["momentum"]]
    return plain + [form.changed(correction="none") for form in plain if form.direction == "normalized"]


def _and_neighbours(form: Form) -> Iterator[Form]:
    yield form
    yield from _neighbours(form)


def _second_neighbours(form: Form) -> Iterator[Form]:
    """Forms that differ in two choices, each pair once."""
    for i, name in enumerate(_CORE):
        for one in _neighbours(form, [name]):
            yield from _neighbours(one, _CORE[:i])


def _neighbours(form: Form, names: Sequence[str] = tuple(_CORE)) -> Iterator[Form]:
    """Forms that differ in one choice, the decay left aside."""
    for name in names:
        if name in ("square", "correction", "eps", "root", "betas") and form.direction == "linear":
            continue
        for choice in LISTS[name]:
            if choice != getattr(form, name):
                yield form.changed(**{name: choice})


def _arrays(script: Script, given: Mapping[str, Any], single: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, SimpleNamespace]:
    hyper = {**given, **script.hyper}
    first = hyper.get("momentum", 0.9)
    beta1, beta2, beta3 = (*hyper.get("betas", (first, 0.99)), *given.get("betas", ())[2:], 0.9999)[:3]
    values = SimpleNamespace(
        weight_decay=hyper["weight_decay"], beta1=beta1, beta2=beta2, beta3=beta3,
        single=first if single else None, eps=hyper.get("eps", 0.0), dampening=hyper.get("dampening", 0.0),
        nu=hyper.get("nu", 1.0), mix=hyper.get("mix", 0.0), max_lr=hyper.get("max_lr"),
    )  # fmt: skip
    lrs = np.array(script.lrs).reshape(-1, *[1] * script.start.ndim)
    return script.start.numpy(), script.grads.numpy(), lrs, values


def law_form(rule: type[UpdateRule], scripts: Sequence[Script], given: Mapping[str, Any]) -> Form | None:
    """The form that takes a law's own steps, or None if the family does not hold it."""
    observed = Observed.of(scripts, rule_paths(rule, scripts, given), torch.float64)
    form, missed = Search(observed, {**defaults(rule), **given}, single="betas" not in rule.hyper).find(None)
    return None if missed else form


def defaults(rule: type[UpdateRule]) -> dict[str, Any]:
    """What a rule takes where nothing is given. The largest lr is that of the scene."""
    return {key: value for key, value in rule.hyper.items() if value is not ... and key != "max_lr"}


def nearest_rule(observed: Observed, given: Mapping[str, Any]) -> tuple[type[UpdateRule], int]:
    """The rule of `RULES` that misses the fewest scripts, and how many it misses."""
    best, fewest = None, 10**9
    for rule in RULES.values():
        missed = sum(error > 1 for error in observed.errors(rule_paths(rule, observed.scripts, given)))
        if missed < fewest:
            best, fewest = rule, missed
    assert best is not None
    return best, fewest
