"""What a derivation is: narrated steps, each with a check that is really carried out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sympy as sp

from derivations.checks import CHECKS, StepFailed
from rwsim.optimizers.rule import UpdateRule


@dataclass(frozen=True)
class Step:
    """One line of a derivation: `lhs relation rhs`, why, and how it is checked.

    Attributes:
        name: A few words; a failure is reported by it.
        lhs: Left side; sums, limits and expectations stay unevaluated and are carried out by the check.
        rhs: Right side.
        reason: One or two sentences.
        relation: ``=``, ``~`` (the ratio tends to 1 as `small` goes to `towards`), ``!=``, ``>``, or ``≈`` (rounds to).
        small: The symbol of a ``~`` step.
        towards: 0 or infinity.
        symbolic: Also try to prove an ``=`` symbolically (the numeric check always runs).
        evaluate: For ``≈``: the number of the left side, where sympy would take too long.
        wrong: The line is a printed slip: the step holds if its own check fails.
    """

    name: str
    lhs: sp.Expr
    rhs: sp.Expr
    reason: str
    relation: str = "="
    small: sp.Symbol | None = None
    towards: sp.Expr = sp.S.Zero
    symbolic: bool = True
    evaluate: Callable[[], float] | None = None
    wrong: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lhs", sp.sympify(self.lhs))
        object.__setattr__(self, "rhs", sp.sympify(self.rhs))

    def verify(self) -> str:
        """How the step was checked.

        Raises:
            StepFailed: It does not hold.
        """
        if not self.wrong:
            return CHECKS[self.relation](self)
        try:
            CHECKS[self.relation](self)
        except StepFailed as failure:
            return f"fails, as it should: {failure}"
        raise StepFailed("the line is listed as a slip, but it holds")


@dataclass(frozen=True)
class Context:
    """What a derivation is run for: the rules, and the order in lr times weight decay to which expansions are shown."""

    rules: tuple[type[UpdateRule], ...]
    order: int = 1


@dataclass(frozen=True)
class Derivation:
    """One result of the paper.

    Attributes:
        id: ``T1`` ... ``T12``, or ``slips``.
        title: What is derived.
        where: Place in the paper.
        relevant: Whether the derivation says something about a rule.
        steps: Yields the steps for a `Context`; rules are read when it runs, not when it is imported.
    """

    id: str
    title: str
    where: str
    relevant: Callable[[type[UpdateRule]], bool]
    steps: Callable[[Context], Iterator[Step]]


@dataclass(frozen=True)
class Result:
    """A derivation that was run. `checked` pairs each step with how it was checked; `failure` is empty if all hold."""

    derivation: Derivation
    checked: list[tuple[Step, str]] = field(default_factory=list)
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure


def for_rules(*names: str) -> Callable[[type[UpdateRule]], bool]:
    """Relevant for the rules of these names; without a name, for every rule."""
    return lambda rule: not names or rule.name in names


def execute(derivation: Derivation, context: Context) -> Result:
    """Run every step in order and stop at the first that does not hold."""
    result, number, failure = Result(derivation), 0, ""
    try:
        for step in derivation.steps(context):
            number += 1
            try:
                result.checked.append((step, step.verify()))
            except StepFailed as error:
                result.checked.append((step, "DOES NOT HOLD"))
                failure = f"{derivation.id} ({derivation.title}), step {number} ({step.name}): {error}"
                break
    except Exception as error:  # a room that can no longer be read breaks the derivation that reads it
        failure = f"{derivation.id} ({derivation.title}), after step {number}: {type(error).__name__}: {error}"
    return Result(derivation, result.checked, failure)
