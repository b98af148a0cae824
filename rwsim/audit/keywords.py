"""Whether every keyword of a constructor matters: each is changed in turn, and the trajectory must change.

The run is made so that options show: gradients fall from large to small with a spike between (running maxima, clipping), the
learning rate falls twice (what depends on the largest or the first one), weight decay and momentum are on. A keyword that
changes nothing there may need another to be on, as Nesterov's needs momentum: it is tried again beside each other keyword,
flipped or set, and beside pairs of flags, before it is called dead.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rwsim.audit.context import Context
from rwsim.audit.subject import ALIASES, SubjectError

# How a step is computed or stored, not what it is: those may change nothing, or only rounding. Each is the start of a word.
EXEMPT = (
    "foreach", "fused", "capturable", "differentiable", "compile", "triton", "multi_tensor", "use_triton", "promote",  # ways to compute
    "maximize",  # has a relation of its own: the mirrored run
    "kahan", "storage", "dtype", "ecc", "paged", "optim_bits", "bits", "min_8bit_size", "block_size", "blocksize", "percentile", "offload",
    "stochastic", "bf16", "state_precision", "precision", "memory",  # ways to store
    "gradient_release", "args", "orig_shapes", "named", "model", "device", "process_group", "world_size", "rank", "verbose", "debug",
)  # fmt: skip
_EXEMPT = re.compile("(^|_)(" + "|".join(EXEMPT) + ")")
# Learning rate of thirty steps, as factors.
_FACTORS = (1.0,) * 10 + (0.5,) * 10 + (0.25,) * 10


@dataclass(frozen=True)
class Part:
    """A keyword, or one element of a keyword that is a tuple."""

    keyword: str
    index: int | None = None

    def __str__(self) -> str:
        return self.keyword if self.index is None else f"{self.keyword}[{self.index}]"


@dataclass
class Keywords:
    """The keywords of one optimizer, and runs with them changed.

    Attributes:
        context: The audit's.
        rest: Keywords that are not examined, and why.
    """

    context: Context
    rest: dict[str, str] = field(default_factory=dict)
    _paths: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The value of each keyword in the base run."""
        subject = self.context.subject
        defaults = {name: p.default for name, p in subject.keywords.items() if p.default is not p.empty}
        return {**defaults, **subject.arguments(self.context.hyper)}

    @cached_property
    def parts(self) -> list[Part]:
        """What is examined."""
        found: list[Part] = []
        for name, parameter in self.context.subject.keywords.items():
            value = self.given.get(name)
            if _EXEMPT.search(name):
                self.rest[name] = "implementation"
            elif isinstance(value, tuple | list) and value and all(isinstance(v, float | int) for v in value):
                found += [Part(name, i) for i in range(len(value))]
            elif isinstance(value, bool | int | float) or parameter.annotation in (bool, "bool"):
                found.append(Part(name))
            else:
                self.rest[name] = f"not examined: its value is of type {type(value).__name__}"
        return found

    def others(self, part: Part, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The base with this part changed, in several ways."""
        value = base.get(part.keyword, self.given.get(part.keyword))
        inner = value if part.index is None else value[part.index]
        for other in _values(inner):
            changed = other if part.index is None else type(value)(other if i == part.index else v for i, v in enumerate(value))
            yield {**base, part.keyword: changed}

    def bases(self, part: Part) -> Iterator[dict[str, Any]]:
        """Runs to which a change is held: the usual one, then each with one other keyword changed, then with two flags flipped."""
        yield {}
        flags = []
        for other in self.parts:
            if other.keyword in (part.keyword, self.context.subject.spelling("lr")) or other.index is not None:
                continue
            value = self.given.get(other.keyword)
            if not isinstance(value, int | float) or isinstance(value, bool):
                flags.append({other.keyword: value is not True})
                yield flags[-1]
            else:
                yield from ({other.keyword: v} for v in ((0.1, 5) if value == 0 else (type(value)(0),)))
        for one, two in itertools.combinations(flags, 2):
            yield {**one, **two}

    def path(self, changed: Mapping[str, Any]) -> Tensor:
        """Where a run goes; the weights of all steps in one row.

        Raises:
            SubjectError: The optimizer does not take these values.
        """
        key = repr(sorted(changed.items(), key=lambda item: item[0]))
        if key not in self._paths:
            try:
                self._paths[key] = self._walk(changed)
            except SubjectError as error:
                self._paths[key] = error
        found = self._paths[key]
        if isinstance(found, SubjectError):
            raise found
        return found

    def _walk(self, changed: Mapping[str, Any]) -> Tensor:
        subject, dtype = self.context.subject, self.context.dtype
        starts, grads = scene(self.context.seed, dtype)
        spelled = subject.spelling("lr")
        lr = changed.get(spelled, self.given.get(spelled))
        lrs = [float(lr) * factor for factor in _FACTORS] if isinstance(lr, int | float) and self.grouped else None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.context.seed)
            path = subject.walk(starts, grads, self.context.hyper, lrs=lrs, **changed)
        return torch.cat([value.flatten() for values in path for value in values])

    @cached_property
    def grouped(self) -> bool:
        """Whether it has param_groups through which the learning rate can be changed."""
        starts, _ = scene(0, self.context.dtype)
        return hasattr(self.context.subject.build([torch.nn.Parameter(start) for start in starts], self.context.hyper), "param_groups")

    def dead(self, part: Part) -> bool | None:
        """Whether changing it changes nothing, whatever stands beside it; None where every change raises."""
        ran = False
        for base in self.bases(part):
            try:
                usual = self.path(base)
            except SubjectError:
                continue
            for changed in self.others(part, base):
                try:
                    path = self.path(changed)
                except SubjectError:
                    continue
                ran = True
                if not torch.equal(torch.nan_to_num(path), torch.nan_to_num(usual)):
                    return False
        return True if ran else None

    def stored(self, keyword: str) -> bool:
        """Whether the built optimizer keeps a value under this name."""
        starts, _ = scene(0, self.context.dtype)
        optimizer = self.context.subject.build([torch.nn.Parameter(start) for start in starts], self.context.hyper)
        places = [vars(optimizer), getattr(optimizer, "defaults", {}), *getattr(optimizer, "param_groups", [])]
        return any(keyword in place for place in places)

    def standard(self, keyword: str) -> bool:
        """Whether it is a hyperparameter of the law, or one of the usual ones where there is no law."""
        law = self.context.law
        known = ALIASES if law is None else law.hyper
        spellings = [self.context.subject.spelling(word) for word in known]
        return any(keyword == s or (isinstance(s, tuple) and keyword in s) for s in spellings)


def _values(value: Any) -> tuple[Any, ...]:
    """Other values to try for an option. Where small and large ones are alike, one that is neither may still show."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return (value is not True,)
    if isinstance(value, int) and value > 1:
        return (value + 1, max(1, value // 2), 2 * value, 0)
    if value == 0:
        return (0.1, 0.6, 5)
    near = (0.7 * value, 1 - (1 - value) / 2) if 0 < value < 1 else (0.5 * value, 2.0 * value)
    return (*near, 0.0, 0.01, 1e3 * value)


def scene(seed: int, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Two tensors and thirty gradients for each, of falling size with a spike."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3.0 * 0.85**step for step in range(len(_FACTORS))]
    sizes[13] = 10.0
    shapes = ((3, 4), (5,))
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    grads: list[list[Tensor | None]] = [
        [(size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes] for size in sizes
    ]
    return starts, grads
