"""Where rotational optimizers get a rule's rates: from the theory, when the first is asked for. An exported file has its own."""

from collections.abc import Callable, Mapping
from typing import Any


def rate_of(rule: Any, form: str) -> Callable[[Mapping[str, Any]], Any]:
    """eta_r of a rule, or of a rule's name, as a function of a parameter group."""
    from rwsim.optimizers import find_rule
    from rwsim.rotational.rate import rotation_rate

    return rotation_rate(find_rule(rule), form)


def norm_rate_of(rule: Any, form: str) -> Callable[[Mapping[str, Any], int], Any]:
    """Equilibrium norm of a rule as a function of a group and of the length of a vector."""
    from rwsim.rotational.rate import norm_rate

    return norm_rate(rule, form)
