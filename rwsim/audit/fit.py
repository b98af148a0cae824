"""Hyperparameters other than those given: what an optimizer uses in their place, fitted to its steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from rwsim.audit.finding import FAULT, Finding
from rwsim.audit.forms import Form, walk
from rwsim.audit.identify import Search


@dataclass(frozen=True)
class Fitted:
    """A form that fits once some hyperparameters are others than given.

    Attributes:
        form: The form.
        values: What the optimizer uses, rwsim's words.
        changes: Name -> (given, used), of those that differ.
    """

    form: Form
    values: Mapping[str, Any]
    changes: Mapping[str, tuple[float, float]]


_NAMES = {"momentum": "momentum", "beta1": "betas[0]", "beta2": "betas[1]", "scale": "scale of the step", "factor": "scale of the decay"}


def hyper(search: Search, form: Form) -> Fitted | None:
    """The averages and scales with which a form takes the optimizer's steps in every scene, or None.

    Averages are fitted as log(1 - beta) relative to those given, scales as logarithms, by the simplex method on the largest
    relative gaps; the fit counts only if every scene then agrees within rounding.
    """
    names = ["single" if search.scenes[0][3].single is not None else "beta1"]
    if form.direction != "linear" and names == ["beta1"]:
        names.append("beta2")
    names += ["scale"] if form.direction != "sign" else []
    names += ["factor"] if form.decay != "none" else []
    sizes = [max(float(np.abs(path - scene[0]).max()), 1e-300) for path, scene in zip(search.paths, search.scenes, strict=True)]

    def apply(x: np.ndarray, hyper: SimpleNamespace) -> tuple[Form, SimpleNamespace]:
        changed, values = form, SimpleNamespace(**vars(hyper))
        for name, value in zip(names, x, strict=True):
            if name in ("scale", "factor"):
                changed = changed.changed(**{name: getattr(form, name) * float(np.exp(value))})
            else:
                setattr(values, name, 1 - (1 - getattr(hyper, name)) * float(np.exp(value)))
        return changed, values

    def gap(x: np.ndarray) -> float:
        if np.abs(x).max() > 8:
            return 1e3
        total = 0.0
        for (start, grads, lrs, given), path, size in zip(search.scenes, search.paths, sizes, strict=True):
            changed, values = apply(x, given)
            off = np.abs(walk(changed, start, grads, lrs, values) - path).max() / size
            total += min(float(off), 1e3) ** 2 if np.isfinite(off) else 1e6
        return total

    x = np.zeros(len(names))
    for _ in range(2):
        x = minimize(
            gap, x, method="Nelder-Mead", options={"xatol": 1e-13, "fatol": 1e-30, "maxfev": 350, "initial_simplex": _simplex(x)}
        ).x
    for (start, grads, lrs, given), path, size in zip(search.scenes, search.paths, sizes, strict=True):
        changed, values = apply(x, given)
        # The simplex ends within about 1e-8 of the best: agreement to six digits leaves no other explanation.
        if not np.abs(walk(changed, start, grads, lrs, values) - path).max() <= 1e-6 * size:
            return None
    changed, values = apply(x, search.scenes[0][3])
    given = search.scenes[0][3]
    changes = {}
    for name, value in zip(names, x, strict=True):
        if abs(value) > 1e-5:
            if name in ("scale", "factor"):
                changes[name] = (1.0, float(np.exp(value)))
            else:
                label = "momentum" if name == "single" else name
                changes[label] = (getattr(given, name), getattr(values, name))
    return Fitted(form, {}, changes)


def _simplex(x: np.ndarray) -> np.ndarray:
    return np.vstack([x, *(x + 0.7 * row for row in np.eye(len(x)))])


def finding(name: str, value: tuple[float, float], probes: tuple[str, ...]) -> Finding:
    """The finding that a hyperparameter is another than given."""
    given, used = value
    label = _NAMES[name]
    text = f"Uses {label} = {used:.6g} where {given:.6g} was given."
    if name in ("scale", "factor"):
        text = f"The {label} is {used:.6g} times that of the law."
    return Finding(f"{name}-differs", FAULT, "high", text, probes, used / given - 1 if given else None, 1e-6)
