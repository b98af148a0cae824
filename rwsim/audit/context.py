"""What every probe gets: the optimizer, the law, and how to run the one beside the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rwsim.audit.finding import Finding
from rwsim.audit.script import BASE
from rwsim.audit.subject import ALIASES, Subject, SubjectError
from rwsim.optimizers.rule import UpdateRule

# Without a law every hyperparameter of torch's names is set that the optimizer takes; dampening would make another rule of SGD.
_WORDS = ("lr", "weight_decay", "momentum", "betas", "eps", "nu", "max_lr")


@dataclass
class Result:
    """What a probe found. `reason` says why it does not apply; empty where it does."""

    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Context:
    """One optimizer under audit.

    Attributes:
        subject: The optimizer.
        law: The rule it is held against; None if it is to be identified.
        seed: Of every random number.
        compiled: Whether torch.compile is left on, and a compiled step is compared too.
    """

    subject: Subject
    law: type[UpdateRule] | None
    seed: int
    compiled: bool = False

    @cached_property
    def words(self) -> frozenset[str]:
        """Hyperparameters, rwsim's words, that the optimizer's constructor takes and the law knows."""
        known = _WORDS if self.law is None else tuple(self.law.hyper)
        return frozenset(word for word in known if self.subject.spelling(word) is not None)

    @cached_property
    def pinned(self) -> Mapping[str, Any]:
        """The user's own hyperparameters, rwsim's words."""
        return {word: value for word in ALIASES if (value := self.subject.pinned(word)) is not None}

    @cached_property
    def hyper(self) -> Mapping[str, Any]:
        """Hyperparameters for a few steps, rwsim's words: large enough that each one matters."""
        given = {**BASE, **self.pinned}
        return {word: given[word] for word in sorted(self.words) if word in given}

    @cached_property
    def dtype(self) -> torch.dtype:
        """float64 where the optimizer takes it, else float32.

        Raises:
            SubjectError: It takes neither.
        """
        start = torch.ones(2, 3, dtype=torch.float64)
        grads = [[torch.full_like(start, 0.5)], [torch.full_like(start, -0.25)]]
        try:
            if bool(self.subject.walk([start], grads, self.hyper)[-1][0].isfinite().all()):
                return torch.float64
        except SubjectError:
            pass
        self.subject.walk([start.float()], [[g.float() for g in grad] for grad in grads], self.hyper)
        return torch.float32
