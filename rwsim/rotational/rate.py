"""The rotation rate of a rule as plain Python, written from the theory: the source that runs here is the source that `export` writes."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import sympy as sp

from rwsim.errors import InvalidArgument, UnsupportedRule
from rwsim.optimizers import UpdateRule
from rwsim.rotational.rotate import asin, sqrt
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached
from rwsim.theory.rotation import norm_of, norm_sq_form, relative_sq_form, rotation_of

# A parameter group -> a number, or a tensor where lr is one.
GroupFunction = Callable[[Mapping[str, Any]], Any]


@cached
def rotation_rate(rule: type[UpdateRule], form: str = "paper") -> GroupFunction:
    """eta_r, radians per step, as a function of a parameter group.

    Args:
        rule: Whose rate.
        form: ``"paper"`` or ``"exact"``; see `rwsim.theory.rotation`.

    Raises:
        InvalidArgument: No such form, or a rule whose rotation depends on its gradients.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> round(rotation_rate(AdamW)({"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}), 6)
        0.003244
    """
    if _closed(rule, form, "rotation"):
        return _compiled(rotation_source(rule, form), "rotation")
    number = lru_cache(maxsize=64)(lambda values: rotation_of(rule(**dict(values)), form))
    return lambda group: number(_values(rule, group))


@cached
def norm_rate(rule: type[UpdateRule], form: str = "paper") -> Callable[[Mapping[str, Any], int], Any]:
    """Equilibrium norm as a function of a parameter group and of how many coordinates a vector has.

    Raises:
        InvalidArgument: No such form, or a rule whose norm depends on its gradients.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> round(norm_rate(AdamW)({"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999)}, 128), 3)
        0.8
    """
    if _closed(rule, form, "norm"):
        return _compiled(norm_source(rule, form), "equilibrium_norm")
    number = lru_cache(maxsize=64)(lambda values, fan_in: norm_of(rule(**dict(values)), fan_in, form))
    return lambda group, fan_in: number(_values(rule, group), fan_in)


def rotation_source(rule: type[UpdateRule], form: str) -> str:
    """Python source of ``rotation(group)``; it needs `sqrt` and `asin` of `rwsim.rotational.rotate`."""
    relative_sq = _form(relative_sq_form, rule, form)
    named, text = _unpacked(rule, relative_sq)
    value = f"2 * asin(sqrt({text}) / 2)" if form == "exact" else f"sqrt({text})"
    return f'def rotation(group):\n    """eta_r of {rule.name} ({form}), radians per step."""\n{named}    return {value}\n'


def norm_source(rule: type[UpdateRule], form: str) -> str:
    """Python source of ``equilibrium_norm(group, fan_in)``."""
    named, text = _unpacked(rule, _form(norm_sq_form, rule, form).subs(sym.C, sp.Symbol("fan_in", positive=True)))
    said = f'"""Equilibrium norm of {rule.name} ({form}): root of the mean squared norm of `fan_in` coordinates."""'
    return f"def equilibrium_norm(group, fan_in):\n    {said}\n{named}    return sqrt({text})\n"


def _closed(rule: type[UpdateRule], form: str, what: str) -> bool:
    function = relative_sq_form if what == "rotation" else norm_sq_form
    try:
        return function(rule, form) is not None
    except UnsupportedRule as error:
        option, remedy = ("rotation", "give a number, a function of the group, or another rule's name such as 'adamw'")
        if what == "norm":
            option, remedy = "norm", "keep the norms with norm='initial'"
        raise InvalidArgument(option, f"cannot be that of {rule.name}: {error.missing}", rule.name, remedy) from None


def _form(function: Callable[..., Any], rule: type[UpdateRule], form: str) -> sp.Expr:
    found = function(rule, form)
    if found is None:
        raise UnsupportedRule(rule.name, f"its {form} rate is a sum without closed form")
    return found


def _unpacked(rule: type[UpdateRule], expression: sp.Expr) -> tuple[str, str]:
    """Lines that take an expression's hyperparameters out of a group, and the expression in their names."""
    lines = ""
    names: dict[sp.Symbol, sp.Symbol] = {}
    for key, symbol in vars(sym.hyper_symbols(rule)).items():
        default = rule.hyper[key]
        held = symbol if isinstance(symbol, tuple) else (symbol,)
        if not any(expression.has(one) for one in held):
            continue
        words = [f"{key.removesuffix('s')}{i}" for i in range(1, len(held) + 1)] if isinstance(symbol, tuple) else [key]
        names |= {one: sp.Symbol(word, positive=True) for one, word in zip(held, words, strict=True)}
        value = f"group[{key!r}]" if default is ... else f"group.get({key!r}, {default!r})"
        lines += f"    {', '.join(words)} = {value}\n"
    return lines, sp.pycode(expression.subs(names), fully_qualified_modules=False)


def _compiled(source: str, name: str) -> Any:
    scope: dict[str, Any] = {"sqrt": sqrt, "asin": asin, "pi": math.pi}
    exec(compile(source, f"<{name} of rwsim>", "exec"), scope)
    return scope[name]


def _values(rule: type[UpdateRule], group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A rule's hyperparameters in a group, as numbers."""
    found = []
    for key, default in rule.hyper.items():
        if key in group:
            value = group[key]
            found.append((key, tuple(map(float, value)) if isinstance(default, tuple) else float(value)))
    return tuple(found)
