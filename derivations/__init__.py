"""Every result of the paper, derived and checked by execution: T1 to T12, and the printed slips.

Example:
    >>> from derivations import run
    >>> run("T9")[0].ok
    True
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import sympy as sp

from derivations import (
    slips,
    t01_table_1,
    t02_contributions,
    t03_transient,
    t04_diffusion,
    t05_scale_invariance,
    t06_scale_sensitive,
    t07_error_factors,
    t08_cubic,
    t09_decoupled_decay,
    t10_wrapper,
    t11_rescaling,
    t12_no_decay,
)
from derivations.core import Context, Derivation, Result, Step, execute
from derivations.render import FORMATS, render
from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory.moments import linear_response

_MODULES = (
    t01_table_1, t02_contributions, t03_transient, t04_diffusion, t05_scale_invariance, t06_scale_sensitive,
    t07_error_factors, t08_cubic, t09_decoupled_decay, t10_wrapper, t11_rescaling, t12_no_decay, slips,
)  # fmt: skip
DERIVATIONS: Mapping[str, Derivation] = MappingProxyType({m.DERIVATION.id: m.DERIVATION for m in _MODULES})
# The rules of the paper; the derivations that hold for every rule are run for these unless a rule is named.
PAPER_RULES = tuple(RULES[name] for name in ("sgdm", "adamw", "adam_l2", "lion"))

# Each order takes longer than all before it.
_HIGHEST = 12


def run(what: str | type[UpdateRule] | Iterable[str] = "all", order: int = 1) -> list[Result]:
    """Run derivations.

    Args:
        what: ``"all"``; an id such as ``"T3"`` or ``"slips"``; a rule by name or class, which selects what is relevant
            for it and its part of that; or several ids.
        order: To which order in lr times weight decay (>= 1) the difference of exact and geometric norm is shown.

    Returns:
        One result per derivation, in order. `Result.ok` says whether every step holds.

    Raises:
        InvalidArgument: Neither an id nor a rule.
        UnsupportedRule: A rule that the theory cannot carry; the message names the missing property.
    """
    if not 1 <= order <= _HIGHEST:
        raise InvalidArgument("order", f"must lie in [1, {_HIGHEST}]", order, "the leading order is 1")
    if isinstance(what, type) and issubclass(what, UpdateRule):
        return _for_rule(what, order)
    if isinstance(what, str):
        if what in RULES:
            return _for_rule(RULES[what], order)
        what = list(DERIVATIONS) if what == "all" else [what]
    results = []
    for name in what:
        if name not in DERIVATIONS:
            raise InvalidArgument("derivation", f"must be `all`, one of {', '.join(DERIVATIONS)}, or a rule ({', '.join(RULES)})", name)
        derivation = DERIVATIONS[name]
        results.append(execute(derivation, Context(tuple(r for r in PAPER_RULES if derivation.relevant(r)), order)))
    return results


def _for_rule(rule: type[UpdateRule], order: int) -> list[Result]:
    linear_response(rule)  # raises for a rule that cannot be carried: one error, not one failure per derivation
    return [execute(d, Context((rule,), order)) for d in DERIVATIONS.values() if d.relevant(rule)]


def records(results: Iterable[Result]) -> list[dict[str, object]]:
    """Results as plain data: every step with its sides in LaTeX and how it was checked."""
    return [
        {
            "id": r.derivation.id,
            "title": r.derivation.title,
            "where": r.derivation.where,
            "ok": r.ok,
            "failure": r.failure,
            "steps": [
                {"name": s.name, "lhs": sp.latex(s.lhs), "relation": s.relation, "rhs": sp.latex(s.rhs), "reason": s.reason, "checked": how}
                for s, how in r.checked
            ],
        }
        for r in results
    ]


__all__ = ["DERIVATIONS", "FORMATS", "Context", "Derivation", "Result", "Step", "execute", "records", "render", "run"]
