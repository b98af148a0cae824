"""A cast: several parameters beside each other in one optimizer, of any shape, dtype and layout, and programs that show one scene.

`Subject.walk` takes plain parameters; the probes of paths and of precision need parameters that are views, frozen, without a
gradient at some steps, in groups of their own, or handed over by a generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rwsim.audit.script import Script, tolerance
from rwsim.audit.subject import Subject, SubjectError

Layout = Literal["contiguous", "transposed", "strided"]
Form = Literal["list", "generator", "named", "groups"]

# What a class raises to say "not in this way". Any other exception is a crash.
REFUSALS = (RuntimeError, ValueError, NotImplementedError, AssertionError, ImportError)


@dataclass(frozen=True)
class Actor:
    """One parameter of a scene.

    Attributes:
        name: What it stands for.
        start: Its initial value.
        grads: Its gradient at each step, or None.
        layout: How it lies in memory.
        trainable: Whether it requires a gradient.
        options: Of its own group, when the cast is handed over in groups.
    """

    name: str
    start: Tensor
    grads: Sequence[Tensor | None]
    layout: Layout = "contiguous"
    trainable: bool = True
    options: Mapping[str, Any] | None = None

    def laid(self, values: Tensor) -> Tensor:
        """A copy of the values in its layout."""
        if self.layout == "transposed":
            return values.t().contiguous().t()
        if self.layout == "strided":
            room = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
            room[..., ::2] = values
            return room[..., ::2]
        return values.clone()


class Played(NamedTuple):
    """Where a cast went: for each actor the parameter after each step, (step, ...), and its dtype at the end."""

    paths: list[Tensor]
    dtypes: list[torch.dtype]


def play(
    subject: Subject, cast: Sequence[Actor], hyper: Mapping[str, Any], *,
    form: Form = "list", leaves: bool = True, compiled: bool = False, **extra: Any,
) -> Played:  # fmt: skip
    """Run a cast.

    Args:
        subject: The optimizer.
        cast: The parameters; all have the same number of steps.
        hyper: Hyperparameters in rwsim's words.
        form: How the parameters are handed to the constructor.
        leaves: False: the parameters are results of an operation, as a differentiable step needs them.
        compiled: Compile the step.
        extra: Further keywords of the constructor.

    Raises:
        SubjectError: Its constructor or its step raised.
    """
    params: list[Tensor] = []
    for actor in cast:
        leaf = torch.nn.Parameter(actor.laid(actor.start), requires_grad=actor.trainable)
        params.append(leaf)
        if not leaves and actor.trainable:
            params[-1] = leaf.clone()
            params[-1].retain_grad()
    given: Any = params
    if form == "generator":
        given = (param for param in params)
    elif form == "named":
        given = [(actor.name.replace(" ", "_"), param) for actor, param in zip(cast, params, strict=True)]
    elif form == "groups":
        given = [{"params": [param], **(actor.options or {})} for actor, param in zip(cast, params, strict=True)]
    optimizer = subject.build(given, hyper, **extra)
    step = torch.compile(optimizer.step) if compiled else None
    path: list[list[Tensor]] = []
    for now in zip(*(actor.grads for actor in cast), strict=True):
        for actor, param, grad in zip(cast, params, now, strict=True):
            param.grad = None if grad is None else actor.laid(grad.to(param.dtype))
        if step is None:
            subject.step(optimizer)
        else:
            try:
                step()
            except Exception as error:
                raise SubjectError("the compiled step()", error) from error
        path.append([param.detach().to(torch.complex128 if param.is_complex() else torch.float64, copy=True) for param in params])
    return Played([torch.stack(list(each)) for each in zip(*path, strict=True)], [param.dtype for param in params])


def excess(actor: Actor, path: Tensor, other: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference of two paths of an actor, and the largest that rounding in a dtype explains.

    Where both paths are not finite at the same place they agree.
    """
    if not path.numel():
        return 0.0, 0.0
    gap = (path - other).abs()
    gap = torch.where(~path.isfinite() & ~other.isfinite(), torch.zeros_like(gap), gap).nan_to_num(nan=float("inf"))
    finite = torch.where(other.isfinite(), other, torch.zeros_like(other))
    script = Script(actor.name, "", actor.start.to(path.dtype), torch.zeros(len(path)), (), {})
    return float(gap.max()), tolerance(script, finite, dtype)


def program(subject: Subject, body: str) -> str:
    """A program text that imports the optimizer as ``Optimizer`` and runs the body."""
    place, _, attribute = subject.name.rpartition(":")
    if place.endswith(".py"):
        door = f"from rwsim.audit.subject import load\n\nOptimizer = load({subject.name!r})"
    elif place:
        door = f"from {place} import {attribute.split('.')[0]}\n\nOptimizer = {attribute}"
    else:
        door = f"# Optimizer is {subject.name}"
    return f"import torch\n{door}\n{body.rstrip()}\n"


def scene(subject: Subject, cast: Sequence[Actor], hyper: Mapping[str, Any], steps: int, *calls: str) -> str:
    """A program text that plays the first steps of a cast and prints where its last parameter goes, once for each call.

    Args:
        subject: The optimizer.
        cast: The parameters.
        hyper: Hyperparameters in rwsim's words.
        steps: How many steps.
        calls: Arguments of ``walk`` in the program, e.g. ``"params(), grads, foreach=True"``.
    """
    starts = "".join(f"\n    {_literal(actor.start)}," for actor in cast)
    now = [
        "".join(f"{_literal(grad) if grad is not None else None}, " for grad in each) for each in zip(*(a.grads for a in cast), strict=True)
    ]
    one = len(set(now[:steps])) == 1 and steps > 1
    grads = (
        f"[[{now[0].rstrip(', ')}]] * {steps}" if one else "[" + "".join(f"\n    [{each.rstrip(', ')}]," for each in now[:steps]) + "\n]"
    )
    laid = {
        "contiguous": "{}.clone()", "transposed": "{}.t().contiguous().t()", "strided": "torch.stack([{0}, {0}], -1).flatten(-2)[..., ::2]",
    }  # fmt: skip
    params = "".join(
        f"\n        torch.nn.Parameter({laid[actor.layout].format(f'weights[{i}]')}{'' if actor.trainable else ', requires_grad=False'}),"
        for i, actor in enumerate(cast)
    )
    keywords = ", ".join(f"{key!r}: {value!r}" for key, value in subject.arguments(hyper).items())
    dense = all(actor.layout == "contiguous" for actor in cast)
    copy = "grad.clone()" if dense else "torch.empty_strided(grad.shape, param.stride(), dtype=grad.dtype).copy_(grad)"
    prints = "\n".join(f"print(walk({call}))" for call in calls)
    return program(
        subject,
        f"""weights = [{starts}
]
grads = {grads}


def params():
    return [{params}
    ]


def walk(given, grads, **options):
    optimizer = Optimizer(given, **{{**{{{keywords}}}, **options}})
    held = [param for group in optimizer.param_groups for param in group["params"]]
    for now in grads:
        for param, grad in zip(held, now):
            param.grad = None if grad is None else {copy}
        optimizer.step()
    return held[-1].detach()


{prints}""",
    )


def _literal(values: Tensor) -> str:
    """The text of a tensor; what it rounds is far above what a finding is about."""
    shape = "" if values.numel() else f".reshape({tuple(values.shape)})"
    return f"torch.tensor({_rounded(values.tolist())}, dtype={values.dtype}){shape}"


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    # Written so that infinities can be read again.
    return float(f"{values:.4g}") if abs(values) < float("inf") else _Word(f'float("{values}")')


class _Word(str):
    """Text that stands for itself."""

    def __repr__(self) -> str:
        return str(self)
