"""The smallest program that shows a finding."""

from collections.abc import Mapping
from typing import Any

import torch

from rwsim.audit.bench import imported
from rwsim.audit.script import Script
from rwsim.audit.subject import Subject, SubjectError
from rwsim.optimizers.rule import UpdateRule


def _wrapping(subject: Subject) -> list[str]:
    """The lines that make an optimizer of an optax-style factory."""
    return ["from rwsim.audit import transform", "Optimizer = transform(Optimizer)"] if hasattr(subject.make, "factory") else []


def _numbers(values: Any) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def program(script: Script, subject: Subject, dtype: torch.dtype, expected: float, law: str) -> str:
    """A program of a scene of one coordinate, that prints where it ends."""
    keywords = {**subject.arguments(dict(script.hyper)), **subject.arguments({"lr": script.lrs[0]})}
    call = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
    moved = len(set(script.lrs)) > 1
    loop = "for g, lr in zip(grads, lrs):" if moved else "for g in grads:"
    axes = script.start.ndim
    value = f"{'[' * axes}{float(script.start):.6g}{']' * axes}"
    lines = [
        "import torch",
        imported(subject.name),
        *(_wrapping(subject)),
        f"w = torch.nn.Parameter(torch.tensor({value}, dtype={dtype}))",
        f"optimizer = Optimizer([w], {call})",
        f"grads = {_numbers(script.grads.flatten().tolist())}",
        *([f"lrs = {_numbers(script.lrs)}"] if moved else []),
        loop,
        *(["    optimizer.param_groups[0]['lr'] = lr"] if moved else []),
        "    w.grad = torch.full_like(w, g)",
        "    optimizer.step()",
        f"print(w.item())  # {law} gives {expected:.9g}",
    ]
    return "\n".join(lines) + "\n"


def smallest(script: Script, subject: Subject, dtype: torch.dtype, rule: type[UpdateRule], given: Mapping[str, Any], gap: float) -> str:
    """The first steps of one coordinate of a scene that show a difference of `gap` or a good part of it; empty if none does alone."""
    mine, theirs = script.subject(subject, dtype), script.law(rule, given)
    apart = (mine - theirs).abs()
    steps = int((apart.flatten(1).amax(1) > gap / 4).nonzero()[0]) + 1 if bool((apart > gap / 4).any()) else len(apart)
    one = script.cut(int(apart[steps - 1].argmax())).head(steps).rounded()
    try:
        shown = one.subject(subject, dtype)
    except SubjectError:
        return ""
    expected = one.law(rule, given)
    if not float((shown[-1] - expected[-1]).abs().max()) > gap / 8:
        return ""
    return program(one, subject, dtype, float(expected[-1]), rule.name)
