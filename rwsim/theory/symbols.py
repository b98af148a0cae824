"""The paper's Greek for torch's words: the one place where code names meet symbols."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import sympy as sp

from rwsim.optimizers.rule import UpdateRule

eta, lam = sp.symbols("eta lambda", positive=True)
alpha = sp.Symbol("alpha", nonnegative=True)
beta1, beta2 = sp.symbols("beta_1 beta_2", nonnegative=True)
epsilon = sp.Symbol("epsilon", nonnegative=True)
C = sp.Symbol("C", positive=True, integer=True)
t = sp.Symbol("t", positive=True, integer=True)

# Moments that the closed forms are functions of.
grad_sq = sp.Symbol("G", positive=True)  # E g_c^2 of one coordinate
normalizer = sp.Symbol("D", positive=True)  # sqrt(v^), or the deviation of a sign's argument times sqrt(pi/2)

GREEK: Mapping[str, Any] = MappingProxyType(
    {
        "lr": eta,
        "weight_decay": lam,
        "momentum": alpha,
        "betas": (beta1, beta2, sp.Symbol("beta_3", nonnegative=True)),
        "eps": epsilon,
        "dampening": sp.Symbol("tau", nonnegative=True),
        "nu": sp.Symbol("nu", nonnegative=True),
        "max_lr": sp.Symbol("eta_max", positive=True),
    }
)


class Hyperparameter(sp.Symbol):
    """A hyperparameter without Greek: real, and never the same symbol as a state or a variable of that name."""

    def __new__(cls, name: str) -> "Hyperparameter":
        return super().__new__(cls, name, real=True)


def hyper_symbols(rule: type[UpdateRule]) -> SimpleNamespace:
    """The rule's hyperparameters as symbols; a name without Greek keeps its own name."""
    symbols = {}
    for key, default in rule.hyper.items():
        if key in GREEK:
            symbols[key] = GREEK[key][: len(default)] if isinstance(default, tuple) else GREEK[key]
        elif isinstance(default, tuple):
            symbols[key] = tuple(Hyperparameter(f"{key}_{i + 1}") for i in range(len(default)))
        else:
            symbols[key] = Hyperparameter(key)
    return SimpleNamespace(**symbols)


def flat(namespace: SimpleNamespace) -> tuple[Any, ...]:
    """Hyperparameters in declaration order, pairs unrolled: the argument order of every lambdified form."""
    entries: list[Any] = []
    for value in vars(namespace).values():
        entries.extend(value if isinstance(value, tuple) else (value,))
    return tuple(entries)
