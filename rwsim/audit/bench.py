"""Checks that are programs: each is a plain function of `make`, and its own source is the snippet of its finding.

A check takes `make(params, **more)`, which builds the optimizer, a seed and a dtype, and returns how far the optimizer departs
from what is right, relative to how far it went: 0 where nothing is wrong. It uses torch and the helpers below, nothing else of
rwsim: what a maintainer gets to run is then the very code that found the fault, without the audit around it.
"""

import contextlib
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rwsim.audit.context import Context, Result
from rwsim.audit.finding import Finding, Kind, Severity
from rwsim.audit.subject import SubjectError

Make = Callable[..., Any]

# What a snippet imports, where its text uses it.
_MODULES = ("copy", "io", "math", "pickle")


def weights(seed, dtype, shapes=((2, 3), (4,))):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def feed(params, step, seed, scale=1.0):
    """Give each parameter the gradient of this step, which does not depend on the weights."""
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * (seed + 1) + 10 * step + i)
        param.grad = (scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)).to(param.dtype)


def drive(optimizer, params, steps, seed):
    for step in steps:
        feed(params, step, seed)
        optimizer.step()


def started(make, seed, dtype, steps):
    """Weights, and an optimizer that has moved them for some steps."""
    params = weights(seed, dtype)
    optimizer = make(params)
    drive(optimizer, params, range(steps), seed)
    return params, optimizer


def resumed_from(make, params, saved, seed, **more):
    """Where a fresh optimizer of copies of the weights goes in ten steps, from the state that five left."""
    after = [torch.nn.Parameter(value) for value in values(params)]
    fresh = make(after, **more)
    fresh.load_state_dict(saved)
    drive(fresh, after, range(5, 15), seed)
    return after


def values(params):
    return [param.detach().clone() for param in params]


def gap(found, right):
    """The largest difference relative to the largest weight; infinite where one is not a number."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, right, strict=True)]
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    size = max(1.0, *(float(b.abs().max()) for _, b in pairs))
    return worst / size if worst < float("inf") else float("inf")


def schedules():
    """Schedulers, and the factor of the learning rate that each has set before step t."""
    lr_scheduler = torch.optim.lr_scheduler
    return [
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t), lambda t: 0.5**t),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5), lambda t: 0.5**t),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8), lambda t: (1 + math.cos(math.pi * t / 8)) / 2),
    ]


def cut(make, seed, dtype, size, axis):
    """How far the halves of a matrix, cut along an axis, go from where they go whole."""
    (whole,) = weights(seed, dtype, [(4, 6)])
    parts = [torch.nn.Parameter(value) for value in values(whole.split(size, axis))]
    first, second = make([whole]), make(parts)
    for step in range(10):
        feed([whole], step, seed)
        for part, grad in zip(parts, whole.grad.split(size, axis), strict=True):
            part.grad = grad.clone()
        first.step()
        second.step()
    return gap(parts, whole.split(size, axis))


HELPERS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (weights, feed, drive, values, gap, schedules, started, resumed_from, cut)
}


@dataclass(frozen=True)
class Check:
    """One thing that an optimizer must do.

    Attributes:
        program: Takes (make, seed, dtype) and returns the departure.
        code: Of the finding if it departs.
        kind: Of that finding.
        severity: Of that finding.
        text: Its diagnosis.
        broken: Code of the finding if the program raises; empty: it then does not apply.
        unsupported: What that says, followed by the exception.
        broken_kind: Of that finding.
        exact: Whether any departure counts: a number of calls, not of a weight.
        twice: Whether it is held to other random numbers before it counts: a sign that rounding flips is no departure.
    """

    program: Callable[..., Any]
    code: str
    kind: Kind
    severity: Severity
    text: str
    broken: str = ""
    unsupported: str = ""
    broken_kind: Kind = "fault"
    exact: bool = False
    twice: bool = False


@contextlib.contextmanager
def quiet(seed: int) -> Iterator[None]:
    """Without warnings, which are not what is audited here, and with random numbers of the audit's own."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        yield


@dataclass
class Bench:
    """An optimizer on the bench, and what the checks found.

    Attributes:
        context: The audit's.
        probe: Name of the probe.
        result: What was found.
    """

    context: Context
    probe: str
    result: Result = field(default_factory=Result)

    def make(self, params: Any, **more: Any) -> Any:
        """The optimizer with the audit's hyperparameters. A check that gives `lr` or keywords means them, whatever the user pinned."""
        subject = self.context.subject
        spelled = subject.spelling("lr")
        if "lr" in more:
            lr = more.pop("lr")
            more |= {spelled: lr} if spelled else {}
        return subject.make(params, **{**subject.arguments(self.context.hyper), **more})

    @cached_property
    def torch_like(self) -> bool:
        """Whether it is a torch.optim.Optimizer: it then promises what that does."""
        return isinstance(self.make(weights(0, self.context.dtype)), torch.optim.Optimizer)

    @cached_property
    def tolerance(self) -> float:
        """What rounding explains: each of at most 20 steps rounds the weight, and an update of a dozen operations.

        An optimizer that takes float64 weights and keeps its state in float32 rounds to that.
        """
        params = weights(0, self.context.dtype)
        optimizer = self.make(params)
        drive(optimizer, params, range(1), 0)
        kept = [tensor.dtype for tensor in _tensors(getattr(optimizer, "state", None)) if tensor.is_floating_point() and tensor.numel() > 1]
        return 300.0 * max(float(torch.finfo(dtype).eps) for dtype in (self.context.dtype, *kept))

    def call(self, program: Callable[..., Any], later: int = 0) -> Any:
        """The program's own result."""
        with quiet(self.context.seed + later):
            return program(self.make, self.context.seed + later, self.context.dtype)

    def run(self, check: Check) -> float | None:
        """Run one check and keep its finding. Returns the departure, or None where it raised."""
        name = check.program.__name__
        try:
            departure = float(self.call(check.program))
            if check.twice and not departure <= self.tolerance:
                departure = min(departure, float(self.call(check.program, later=1000)))
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            absent = not self.torch_like and isinstance(error, AttributeError | TypeError | NotImplementedError)
            self.result.measured[name] = f"{'not applicable' if absent or not check.broken else 'raises'}: {said}"
            if check.broken and not absent:
                text = f"{check.unsupported}: {said}"
                self.add(check.broken, check.broken_kind, check.severity, text, check.program, said=f"raises {said}")
            return None
        finite = departure < float("inf")
        self.result.measured[name] = departure if finite else "not finite"
        if not departure <= (0.0 if check.exact else self.tolerance):
            self.add(
                check.code, check.kind, check.severity, check.text, check.program, effect=departure if finite else None,
                error=0.0 if check.exact else self.tolerance, said=f"this optimizer gives {departure:.6g}",
            )  # fmt: skip
        return departure

    def add(
        self, code: str, kind: Kind, severity: Severity, text: str, program: Callable[..., Any] | None = None, *,
        effect: float | None = None, error: float | None = None, said: str = "", snippet: str = "", again: bool = False,
    ) -> None:  # fmt: skip
        """Keep a finding, the first of its code unless `again`; a program becomes its snippet."""
        if not again and any(finding.code == code for finding in self.result.findings):
            return
        shown = self.snippet(program, said) if program is not None else snippet
        self.result.findings.append(Finding(code, kind, severity, text, (self.probe,), effect, error, shown))

    def snippet(self, program: Callable[..., Any], said: str) -> str:
        """The program as a text that runs by itself."""
        source = textwrap.dedent(inspect.getsource(program))
        used: list[str] = []
        text = source
        for name, helper in reversed(tuple(HELPERS.items())):
            if f"{name}(" in text:
                used.insert(0, textwrap.dedent(inspect.getsource(helper)))
                text += used[0]
        body = "\n\n".join([*used, source])
        dtype, seed = self.context.dtype, self.context.seed
        imports = "".join(f"import {module}\n" for module in _MODULES if f"{module}." in body)
        head = f"{imports}import torch\n{imported(self.context.subject.name)}\n\n{self._maker()}"
        last = f"print({program.__name__}(make, {seed}, {dtype}))  # 0 is right; {said}\n"
        return f"{head}\n\n{body}\n\n{last}"

    def _maker(self) -> str:
        subject = self.context.subject
        shown = ", ".join(f"{key}={value!r}" for key, value in subject.arguments(self.context.hyper).items())
        spelled = subject.spelling("lr")
        renamed = "" if spelled == "lr" else f"    more = {{{spelled!r} if k == 'lr' else k: v for k, v in more.items()}}\n"
        return f"def make(params, **more):\n{renamed}    return Optimizer(params, **{{**dict({shown}), **more}})\n"


def _tensors(held: Any) -> list[torch.Tensor]:
    """All tensors in nested dictionaries, lists and tuples."""
    if isinstance(held, torch.Tensor):
        return [held]
    inside = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else ()
    return [tensor for value in inside for tensor in _tensors(value)]


def imported(name: str) -> str:
    """The line that brings the class of ``MODULE:CLASS`` or ``FILE.py:CLASS`` as `Optimizer`."""
    place, _, attribute = name.rpartition(":")
    if not place or "<" in attribute:
        return f"Optimizer = ...  # {name or 'the class under audit'}"
    if place.endswith(".py"):
        first, *rest = attribute.split(".")
        return f"import runpy\nOptimizer = runpy.run_path({place!r})[{first!r}]{''.join('.' + part for part in rest)}"
    first, *rest = attribute.split(".")
    if not rest:
        return f"from {place} import {first} as Optimizer"
    return f"from {place} import {first}\nOptimizer = {attribute}"


def ready(context: Context, probe: str) -> Bench:
    """A bench on which the optimizer has run.

    Raises:
        SubjectError: It does not even do two steps.
    """
    bench = Bench(context, probe)
    try:
        params = weights(context.seed, context.dtype)
        drive(bench.make(params), params, range(2), context.seed)
    except SubjectError:
        raise
    except Exception as error:
        raise SubjectError("two steps", error) from error
    return bench
