"""What every probe gets: the optimizer, the law, and how to run the one beside the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
        """float64 where the optimizer takes it and computes in it, else float32.

        Raises:
            SubjectError: It takes neither.
        """
        try:
            double = self._path(torch.float64)
            if bool(double.isfinite().all()) and self._keeps_double(double):
                return torch.float64
        except SubjectError:
            pass
        self._path(torch.float32)
        return torch.float32

    def _path(self, dtype: torch.dtype, weights: float = 0.0, gradients: float = 0.0) -> Tensor:
        """Where a few steps lead, with weights and gradients changed by these shares, each element by another."""
        generator = torch.Generator().manual_seed(1)
        start, *grads = (1 + torch.rand(4, 2, 6, generator=generator, dtype=torch.float64)).unbind()
        shares = torch.linspace(0.5, 1, 12, dtype=torch.float64).reshape(2, 6)
        changed = [[(grad * (1 + gradients * shares)).to(dtype)] for grad in grads]
        return self.subject.walk([(start * (1 + weights * shares)).to(dtype)], changed, self.hyper)[-1][0].double()

    def _keeps_double(self, path: Tensor) -> bool:
        """Whether a change far below float32's resolution passes through: of the weights, and of gradients that matter at all."""
        for weights, gradients in ((1.0, 0.0), (0.0, 1.0)):
            large = (self._path(torch.float64, weights, gradients) - path).abs()
            small = (self._path(torch.float64, 1e-10 * weights, 1e-10 * gradients) - path).abs()
            # A sign does not feel small changes and hardly large ones: only what follows a large change must follow a small one.
            follows = large > 1e-3
            if bool(follows.any()) and not bool(((small > 0) & (small < 1e-8))[follows].float().mean() > 0.5):
                return False
        return True
