"""What every probe gets: the optimizer, the law, and how to run the one beside the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rwsim.audit.finding import Finding, Kind
from rwsim.audit.script import BASE
from rwsim.audit.subject import ALIASES, Subject, SubjectError
from rwsim.errors import InvalidArgument
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
        rule: Without a law, the rule whose steps the scenes of P1 to P5 found it to take.
        known: Of what kind those differences from the law are that these scenes explain in full; None if there are none.
        searched: Whether the scenes were run, and known slips looked for in them.
    """

    subject: Subject
    law: type[UpdateRule] | None
    seed: int
    compiled: bool = False
    rule: type[UpdateRule] | None = None
    known: Kind | None = None
    searched: bool = False

    @cached_property
    def words(self) -> frozenset[str]:
        """Hyperparameters, rwsim's words, that the optimizer's constructor takes and the law knows."""
        known = _WORDS if self.law is None else tuple(self.law.hyper)
        return frozenset(word for word in known if self.subject.spelling(word) is not None)

    @cached_property
    def pinned(self) -> Mapping[str, Any]:
        """The user's own hyperparameters, rwsim's words."""
        found = {word: value for word in ALIASES if (value := self.subject.pinned(word)) is not None}
        if "betas" in found and not isinstance(found["betas"], tuple | list):
            raise InvalidArgument("set betas", "must hold numbers", found["betas"], "give them as betas=0.9,0.99")
        if self.law is not None:
            needed = {"lr": BASE["lr"], **({"weight_decay": 0.0} if "weight_decay" in self.law.hyper else {})}
            self.law(**{**needed, **{word: value for word, value in found.items() if word in self.law.hyper and word != "betas"}})
        return found

    @cached_property
    def own(self) -> Mapping[str, Any]:
        """The constructor's own values of hyperparameters that the law does not know."""
        found = {}
        for word in ("eps", "momentum", "betas", "dampening", "nu"):
            alias = self.subject.spelling(word)
            if word not in self.words and isinstance(alias, str):
                default = self.subject.keywords[alias].default
                if isinstance(default, (int, float, tuple)) and not isinstance(default, bool):
                    found[word] = default
        return found

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
        """Weights after each of a few steps; weights and gradients changed by these shares, each element by another, but for
        the last gradient."""
        generator = torch.Generator().manual_seed(1)
        start, *grads = (1 + torch.rand(4, 2, 6, generator=generator, dtype=torch.float64)).unbind()
        shares = torch.linspace(0.5, 1, 12, dtype=torch.float64).reshape(2, 6)
        changed = [[(grad * (1 + gradients * shares)).to(dtype)] for grad in grads[:-1]] + [[grads[-1].to(dtype)]]
        # Without decay only buffers bring what was changed in earlier gradients to the last step.
        hyper = {**self.hyper, **({"weight_decay": 0.0} if "weight_decay" in self.hyper else {})}
        return torch.stack(
            [params[0].double() for params in self.subject.walk([(start * (1 + weights * shares)).to(dtype)], changed, hyper)]
        )

    def _keeps_double(self, path: Tensor) -> bool:
        """Whether changes far below float32's resolution pass through weights, updates and buffers, where large ones do."""
        for weights, gradients in ((1.0, 0.0), (0.0, 1.0)):
            large, small = (self._path(torch.float64, share * weights, share * gradients) - path for share in (1.0, 1e-10))
            # The weights in the end, and the last step of them.
            for big, little in ((large[-1], small[-1]), (large[-1] - large[-2], small[-1] - small[-2])):
                # A sign does not feel small changes and hardly large ones: only what follows a large change must follow a small one.
                follows = big.abs() > 1e-3
                kept = (little.abs() > 1e-14) & (little.abs() < 1e-8)
                if bool(follows.any()) and not bool(kept[follows].float().mean() > 0.5):
                    return False
        return True
