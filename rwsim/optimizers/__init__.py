"""One optimizer, one room. `RULES` maps each name to its `UpdateRule`; tests, theory and command line loop over it."""

from rwsim.errors import InvalidArgument
from rwsim.optimizers.adam_l2 import AdamL2
from rwsim.optimizers.adamw import AdamW
from rwsim.optimizers.lion import Lion
from rwsim.optimizers.rule import UpdateRule, registry
from rwsim.optimizers.sgdm import SGDM

RULES = registry([SGDM, AdamW, AdamL2, Lion])


def find_rule(rule: str | type[UpdateRule]) -> type[UpdateRule]:
    """The rule of that name; a class is returned as it is.

    Raises:
        InvalidArgument: An unknown name; the message lists the known ones.
    """
    if isinstance(rule, type) and issubclass(rule, UpdateRule):
        return rule
    if rule not in RULES:
        raise InvalidArgument("optimizer", f"must be one of {', '.join(RULES)}", rule)
    return RULES[rule]


__all__ = ["RULES", "SGDM", "AdamL2", "AdamW", "Lion", "UpdateRule", "find_rule"]
