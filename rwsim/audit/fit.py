"""Hyperparameters other than those given: what an optimizer uses in their place, fitted to its steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
from scipy.optimize import least_squares

from rwsim.audit.finding import FAULT, Finding
from rwsim.audit.forms import Form, walk
from rwsim.audit.identify import Search

# Averages that constructors hard-code. A sign shows thresholds only: those are tried, not fitted.
_USUAL = (0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_LABELS = {
    "single": "momentum", "beta1": "betas[0]", "beta2": "betas[1]", "scale": "the whole step", "factor": "the weight decay",
}  # fmt: skip
# The fit ends within about 1e-9 of the best: agreement to seven digits in every scene leaves no other explanation.
_AGREEMENT = 1e-7


@dataclass(frozen=True)
class Fitted:
    """A form that takes the optimizer's steps once some hyperparameters are others than given.

    Attributes:
        form: The form.
        changes: Name -> (given, used), of those that differ.
    """

    form: Form
    changes: Mapping[str, tuple[float, float]]

    def words(self) -> list[str]:
        return [_words(name, *pair) for name, pair in self.changes.items()]

    def findings(self, probes: tuple[str, ...], snippet: str) -> list[Finding]:
        """A fault for each hyperparameter that is another than given."""
        found = []
        for name, (given, used) in self.changes.items():
            text = _words(name, given, used)
            effect = used / given - 1 if given else None
            found.append(Finding(f"{name}-differs", FAULT, "high", f"{text[0].upper()}{text[1:]}.", probes, effect, 1e-6, snippet))
        return found


def _words(name: str, given: float, used: float) -> str:
    if name in ("scale", "factor"):
        return f"{_LABELS[name]} is {used:.6g} times that of the law"
    return f"uses {_LABELS[name]} = {used:.6g} where {given:.6g} was given"


@dataclass(frozen=True)
class _Trial:
    """Values in place of those given, by the names of `_LABELS`; scales are factors."""

    form: Form
    values: Mapping[str, float]

    def path(self, scene: tuple[np.ndarray, np.ndarray, np.ndarray, SimpleNamespace]) -> np.ndarray:
        start, grads, lrs, given = scene
        scales = {name: getattr(self.form, name) * self.values[name] for name in ("scale", "factor") if name in self.values}
        others = {name: value for name, value in self.values.items() if name not in scales}
        return walk(self.form.changed(**scales), start, grads, lrs, SimpleNamespace(**{**vars(given), **others}))


def hyper(search: Search, form: Form) -> Fitted | None:
    """The averages and scales with which a form takes the optimizer's steps in every scene, or None.

    Averages are fitted as log(1 - beta), scales as logarithms, by least squares on three scenes with and without decay; the
    result counts only if every scene agrees.
    """
    given = search.scenes[0][3]
    averages = ["single"] if given.single is not None else ["beta1"]
    if form.direction != "linear" and given.single is None:
        averages.append("beta2")
    start = {name: getattr(given, name) for name in averages}
    trials = _usual(form, averages) if form.direction == "sign" else _fitted(search, form, start)
    for trial in trials:
        if all(_agrees(search, trial, i) for i in search.order):
            pairs = {name: (start.get(name, 1.0), value) for name, value in trial.values.items()}
            return Fitted(form, {name: pair for name, pair in pairs.items() if abs(pair[1] - pair[0]) > 1e-6 * abs(pair[0])})
    return None


def _agrees(search: Search, trial: _Trial, i: int) -> bool:
    gap = np.abs(trial.path(search.scenes[i]) - search.paths[i]).max()
    allowed = max(_AGREEMENT * float(np.abs(search.paths[i] - search.scenes[i][0]).max()), search.observed.tolerances[i])
    return bool(gap <= allowed)


def _usual(form: Form, averages: list[str]) -> Iterator[_Trial]:
    for values in product(_USUAL, repeat=len(averages)):
        yield _Trial(form, dict(zip(averages, values, strict=True)))


def _fitted(search: Search, form: Form, start: Mapping[str, float]) -> Iterator[_Trial]:
    names = [*start, "scale", *(["factor"] if form.decay != "none" else [])]
    scripts = search.observed.scripts
    with_decay = [i for i in reversed(search.order) if scripts[i].hyper["weight_decay"]][:1]
    chosen = [i for i in search.order if not scripts[i].hyper["weight_decay"] and len(scripts[i].grads) >= 10][:2] + with_decay
    if not chosen:
        return
    sizes = {i: max(float(np.abs(search.paths[i] - search.scenes[i][0]).max()), 1e-300) for i in chosen}

    def trial(x: np.ndarray) -> _Trial:
        values = {}
        for name, value in zip(names, np.clip(x, -9, 9), strict=True):
            values[name] = 1 - (1 - start[name]) * float(np.exp(value)) if name in start else float(np.exp(value))
        return _Trial(form, values)

    def residuals(x: np.ndarray) -> np.ndarray:
        now = trial(x)
        gaps = [((now.path(search.scenes[i]) - search.paths[i]) / sizes[i]).ravel() for i in chosen]
        return np.nan_to_num(np.concatenate(gaps), nan=1e3, posinf=1e3, neginf=-1e3)

    for first in (0.0, -2.0):
        x = np.array([first] * len(start) + [0.0] * (len(names) - len(start)))
        found = least_squares(residuals, x, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=40)
        yield trial(found.x)
