"""What the probes of paths and of precision share: actors drawn from the seed, comparisons, and findings that were confirmed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rwsim.audit.cast import Actor, Played, excess, play, scene
from rwsim.audit.context import Context, Result
from rwsim.audit.finding import Finding, Kind, Severity
from rwsim.audit.subject import SubjectError

Check = Callable[[int], Finding | None]


@dataclass(frozen=True)
class Gap:
    """A difference beyond rounding.

    Attributes:
        actor: The parameter that goes elsewhere.
        mine: Where it goes, (step, ...).
        theirs: Where it should go.
        size: The largest difference.
        allowed: The largest that rounding explains.
    """

    actor: Actor
    mine: Tensor
    theirs: Tensor
    size: float
    allowed: float

    @property
    def first(self) -> int:
        """Number of steps after which it shows."""
        shows = ~((self.mine - self.theirs).abs() <= self.allowed).reshape(len(self.mine), -1).all(1)
        return int(shows.nonzero()[0]) + 1

    @property
    def effect(self) -> tuple[float, float] | tuple[None, None]:
        """The difference relative to how far the parameter should go, and what of it may be rounding."""
        start = self.actor.start.to(self.theirs.dtype)
        way = float((self.theirs - start).abs().max())
        if not 0 < way < float("inf") or not self.size < float("inf"):
            return None, None
        return self.size / way, self.allowed / way

    @property
    def words(self) -> str:
        if not self.size < float("inf"):
            return f": it is not finite after step {self.first}"
        effect, _ = self.effect
        return f": by {self.size:.3g}" + (f", {effect:.2g} of its way" if effect is not None else "") + f", from step {self.first} on"


@dataclass(frozen=True)
class Stage:
    """Where a probe plays its scenes; what it sees goes to `result`."""

    probe: str
    context: Context
    result: Result = field(default_factory=Result)

    def actor(self, name: str, draw: int, shape: Sequence[int], steps: int, dtype: torch.dtype | None = None, **how: Any) -> Actor:
        """A parameter whose weights and gradients follow from the seed, the draw and its name."""
        dtype = dtype or self.context.dtype
        generator = torch.Generator().manual_seed(1000 * self.context.seed + 500 * draw + sum(map(ord, name)) % 500)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(steps + 1, *shape, generator=generator, dtype=wide).to(dtype)
        return Actor(name, values[0], tuple(values[1:]), **how)

    def play(self, cast: Sequence[Actor], hyper: Mapping[str, Any] | None = None, **how: Any) -> Played:
        """Where a cast goes, with the context's hyperparameters unless others are given."""
        return play(self.context.subject, cast, self.context.hyper if hyper is None else hyper, **how)

    def ask(self, check: Check) -> bool:
        """Add the finding of a check if a second draw confirms it; whether it did."""
        found = check(0)
        if found is None or check(1) is None:
            return False
        self.result.findings.append(found)
        return True

    def say(self, code: str, kind: Kind, severity: Severity, text: str, gap: Gap | None = None, snippet: str = "") -> None:
        self.result.findings.append(self.finding(code, kind, severity, text, gap, snippet))

    def finding(self, code: str, kind: Kind, severity: Severity, text: str, gap: Gap | None = None, snippet: str = "") -> Finding:
        effect, error = gap.effect if gap is not None else (None, None)
        return Finding(code, kind, severity, text, (self.probe,), effect, error, snippet)

    def skip(self, what: str, error: SubjectError | str) -> None:
        self.result.measured[what] = f"not applicable: {error}"

    def worst(
        self, cast: Sequence[Actor], mine: Sequence[Tensor], theirs: Sequence[Tensor], what: str = "", rounding: torch.dtype | None = None
    ) -> Gap | None:
        """The largest difference beyond rounding, if any; its size in units of what rounding explains goes to `measured`.

        Rounding is that of the parameter's dtype unless another is named.
        """
        found, nearest = None, 0.0
        for actor, one, other in zip(cast, mine, theirs, strict=True):
            size, allowed = excess(actor, one, other, rounding or actor.start.dtype)
            share = size / allowed if allowed else 0.0
            if share > max(1.0, nearest):
                found = Gap(actor, one, other, size, allowed)
            nearest = max(nearest, share)
        if what:
            before = self.result.measured.get(what, 0.0)
            self.result.measured[what] = "not finite" if nearest == float("inf") or isinstance(before, str) else max(before, nearest)
        return found

    def snippet(self, cast: Sequence[Actor], steps: int, *calls: str, hyper: Mapping[str, Any] | None = None) -> str:
        """The program that shows it."""
        return scene(self.context.subject, cast, self.context.hyper if hyper is None else hyper, steps, *calls)


def options(given: Any) -> str:
    """Keywords as they stand in a call, a comma before each."""
    return "".join(f", {key}={value!r}" for key, value in given.items())
