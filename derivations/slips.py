"""Printed lines that do not follow from the line above, found by execution.

Each entry runs the printed form, which must fail, and the corrected form, which must hold. An entry that was suspected
and turned out right is listed as refuted: there the printed form must hold. Matters of convention are left out.
"""

from dataclasses import dataclass

import sympy as sp

from derivations import slip_lines
from derivations.core import Derivation, Step, for_rules
from rwsim.theory._cache import cached


@dataclass(frozen=True)
class Slip:
    """One printed line.

    Attributes:
        id: Short name.
        where: Section or appendix and what is printed there.
        rules: Rules it is about; empty for all.
        printed: (lhs, rhs) as printed.
        corrected: (lhs, rhs) that holds; None if the printed form does.
        reason: Why.
        changes: Whether a final result of the paper changes, and which.
        origin: ``candidate`` of THEORY.md, or ``new``.
        relation, small, towards: As in `Step`.
    """

    id: str
    where: str
    rules: tuple[str, ...]
    printed: tuple[sp.Expr, sp.Expr]
    corrected: tuple[sp.Expr, sp.Expr] | None
    reason: str
    changes: str = "no"
    origin: str = "candidate"
    relation: str = "="
    small: sp.Symbol | None = None
    towards: sp.Expr = sp.S.Zero

    @property
    def verdict(self) -> str:
        return "refuted" if self.corrected is None else "confirmed"

    def steps(self):
        """The printed line, then the corrected one."""
        how = {"relation": self.relation, "small": self.small, "towards": self.towards}
        note = f"{self.where}. {self.reason} A final result changes: {self.changes}."
        if self.corrected is None:
            yield Step(f"{self.id}: as printed, and right", *self.printed, note, **how)
            return
        yield Step(f"{self.id}: as printed", *self.printed, note, wrong=True, **how)
        yield Step(f"{self.id}: corrected", *self.corrected, "The line that does follow.", **how)


@cached
def slips() -> tuple[Slip, ...]:
    """Every entry; built when asked for, since the lines read the rules."""
    parts = (slip_lines.main_text(), slip_lines.appendix_c_d(), slip_lines.appendix_e_to_l())
    return tuple(Slip(**entry) for part in parts for entry in part)


def table() -> str:
    """The entries as a Markdown table."""
    cells = [(s.id, s.where, s.verdict, s.origin, s.reason, s.changes) for s in slips()]
    rows = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| slip | where | verdict | origin | reason | changes a result |", "|---|---|---|---|---|---|", *rows])


def steps(context):
    names = {rule.name for rule in context.rules}
    for slip in slips():
        if not slip.rules or names & set(slip.rules):
            yield from slip.steps()


DERIVATION = Derivation("slips", "Printed lines that do not follow", "throughout", for_rules("sgdm", "adamw", "adam_l2", "lion"), steps)
