"""One optimizer, one room. `RULES` maps each name to its `UpdateRule`; tests, theory and command line loop over it."""

import runpy
from pathlib import Path

from rwsim.errors import InvalidArgument
from rwsim.optimizers.adam_l2 import AdamL2
from rwsim.optimizers.adamc import AdamC
from rwsim.optimizers.adamw import AdamW
from rwsim.optimizers.adamw_independent import AdamWIndependent
from rwsim.optimizers.ademamix import AdEMAMix
from rwsim.optimizers.dampened import Dampened
from rwsim.optimizers.lion import Lion
from rwsim.optimizers.nadamw import NAdamW
from rwsim.optimizers.nesterov import Nesterov
from rwsim.optimizers.qhm import QHM
from rwsim.optimizers.rule import UpdateRule, registry
from rwsim.optimizers.sgd import SGD
from rwsim.optimizers.sgdm import SGDM
from rwsim.optimizers.sgdw import SGDW
from rwsim.optimizers.signum import Signum

# The paper's four first, then their neighbours.
RULES = registry([SGDM, AdamW, AdamL2, Lion, SGD, Nesterov, Dampened, SGDW, Signum, NAdamW, AdamC, AdamWIndependent, QHM, AdEMAMix])


def find_rule(rule: str | type[UpdateRule]) -> type[UpdateRule]:
    """The rule of that name in `RULES`, or ``FILE.py:RULE``; a class is returned as it is.

    Naming a file runs it.

    Raises:
        InvalidArgument: An unknown name (the known ones are listed), no such file, a file that fails, no such rule in it.
    """
    if isinstance(rule, type) and issubclass(rule, UpdateRule):
        return rule
    if rule in RULES:
        return RULES[rule]
    path, separator, name = str(rule).rpartition(":")
    if not separator or not path.endswith(".py"):
        raise InvalidArgument("optimizer", f"must be one of {', '.join(RULES)}, or FILE.py:RULE", rule)
    return _load(Path(path), name, str(rule))


def _load(path: Path, name: str, label: str) -> type[UpdateRule]:
    """The rule `name` (its class or its `name`) of a user's file."""
    if not path.is_file():
        raise InvalidArgument("optimizer", f"names a file, {path}, that is not there", label)
    try:
        found = runpy.run_path(str(path))
    except Exception as error:
        raise InvalidArgument("optimizer", f"names a file that fails with {type(error).__name__}: {error}", label) from error
    rules = [
        value for value in found.values() if isinstance(value, type) and issubclass(value, UpdateRule) and value.__module__ == "<run_path>"
    ]
    for rule in rules:
        if name in (rule.__name__, rule.name):
            return rule
    known = ", ".join(rule.__name__ for rule in rules) or "none"
    raise InvalidArgument(
        "optimizer", f"must name a rule of {path} (it defines: {known})", label, "subclass rwsim.optimizers.UpdateRule there"
    )


__all__ = ["RULES", "SGDM", "AdamL2", "AdamW", "Lion", "UpdateRule", "find_rule"]
