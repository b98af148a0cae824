"""P10: what must change the trajectory, and what must not.

Every keyword that is accepted must matter: an option that is stored and never read, a mode flag that is ignored, one beta that is
used for both averages show as runs that are equal to the last bit (`rwsim.audit.keywords`). Implementation switches are exempt
(`EXEMPT`). One dead option is a note, not a fault: a word of torch's for a variant that is off by default (dampening, nesterov,
amsgrad), which the constructor takes so that calls written for torch work, keeps nowhere, and which the law does not know.

What must not matter: the order of parameters, whether two groups share one optimizer, the sign of weights and gradients together,
and for an element-wise rule how tensors are cut and how coordinates are ordered. Without a law a rule may be row-wise or
tensor-wise; that is a note then. A relation is broken if it is broken for two independent draws: rounding may flip one sign.
"""

from typing import Any

import torch

from rwsim.audit.bench import Bench, Check, cut, drive, feed, gap, imported, quiet, ready, weights
from rwsim.audit.context import Context, Result
from rwsim.audit.keywords import EXEMPT, Keywords, Part, scene
from rwsim.audit.subject import SubjectError

__all__ = ["EXEMPT", "TITLE", "run"]

TITLE = "metamorphic relations"

_VARIANTS = ("dampening", "nesterov", "amsgrad")


def repeated(make, seed, dtype):
    """The same run twice gives the same weights."""
    first, second = weights(seed, dtype), weights(seed, dtype)
    torch.manual_seed(1)
    drive(make(first), first, range(10), seed)
    torch.manual_seed(1)
    drive(make(second), second, range(10), seed)
    return gap(second, first)


def repeated_unseeded(make, seed, dtype):
    """The same run twice, with other random numbers, gives the same weights."""
    first, second = weights(seed, dtype), weights(seed, dtype)
    torch.manual_seed(1)
    drive(make(first), first, range(10), seed)
    torch.manual_seed(2)
    drive(make(second), second, range(10), seed)
    return gap(second, first)


def mirrored(make, seed, dtype):
    """maximize=True with gradients of the other sign is the run without it."""
    plain, params = weights(seed, dtype), weights(seed, dtype)
    down, up = make(plain), make(params, maximize=True)
    for step in range(10):
        feed(plain, step, seed)
        feed(params, step, seed, -1.0)
        down.step()
        up.step()
    return gap(params, plain)


def negated(make, seed, dtype):
    """With weights and gradients of the other sign everything happens with the other sign."""
    plain, params = weights(seed, dtype), weights(seed, dtype)
    for param in params:
        param.data.neg_()
    first, second = make(plain), make(params)
    for step in range(10):
        feed(plain, step, seed)
        feed(params, step, seed, -1.0)
        first.step()
        second.step()
    return gap([-param for param in params], plain)


def reordered(make, seed, dtype):
    """The order in which parameters are given does not matter."""
    plain, params = weights(seed, dtype), weights(seed, dtype)
    first, second = make(plain), make(params[::-1])
    for step in range(10):
        feed(plain, step, seed)
        feed(params, step, seed)
        first.step()
        second.step()
    return gap(params, plain)


def two_groups(make, seed, dtype):
    """Two groups with options of their own go where two optimizers go."""
    alone = weights(seed, dtype)
    first = make(alone[:1])
    own = {"lr": 0.05}
    if "weight_decay" in first.param_groups[0]:
        own["weight_decay"] = 0.15
    second = make(alone[1:], **own)

    params = weights(seed, dtype)
    both = make([{"params": params[:1]}, {"params": params[1:], **own}])
    for step in range(10):
        feed(alone, step, seed)
        feed(params, step, seed)
        first.step()
        second.step()
        both.step()
    return gap(params, alone)


def cut_between_rows(make, seed, dtype):
    """A matrix cut into two, between its rows, goes where it goes whole."""
    return cut(make, seed, dtype, 2, 0)


def cut_between_columns(make, seed, dtype):
    """A matrix cut into two, between its columns, goes where it goes whole."""
    return cut(make, seed, dtype, 3, 1)


def shuffled(make, seed, dtype):
    """The coordinates of a tensor in another order go where they go in the usual one."""
    (whole,) = weights(seed, dtype, [(4, 6)])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    other = torch.nn.Parameter(whole.detach().flatten()[order].reshape(4, 6))
    first, second = make([whole]), make([other])
    for step in range(10):
        feed([whole], step, seed)
        other.grad = whole.grad.flatten()[order].reshape(4, 6)
        first.step()
        second.step()
    return gap([other], [whole.detach().flatten()[order].reshape(4, 6)])


_RELATIONS = (
    Check(
        mirrored, "maximize-not-mirrored", "fault", "medium", "maximize=True is not the run with gradients of the other sign", twice=True,
    ),
    Check(
        negated, "not-odd", "fault", "high",
        "weights and gradients of the other sign do not go to the mirrored place: something is added that does not follow the sign",
        twice=True,
    ),
    Check(
        reordered, "order-matters", "fault", "high", "the order in which parameters are given changes where they go",
        "order-raises", "parameters in another order make it raise", twice=True,
    ),
    Check(
        two_groups, "cross-talk", "fault", "high",
        "two groups do not go where two optimizers go: options or state of one reach the other", "groups-raise",
        "two groups with options of their own raise", twice=True,
    ),
)  # fmt: skip
_CUTS = (cut_between_rows, cut_between_columns, shuffled)


def run(context: Context) -> Result:
    with quiet(context.seed):
        bench = ready(context, "P10")
        if _repeats(bench):
            for check in _RELATIONS:
                if check.program is not mirrored or "maximize" in context.subject.keywords:
                    bench.run(check)
            _granularity(bench)
            _dead_options(bench)
        _lenience(bench)
        return bench.result


def _repeats(bench: Bench) -> bool:
    """Whether a run can be repeated: else no two runs can be compared."""
    departure = float(bench.call(repeated))
    bench.result.measured["repeated"] = departure
    if departure > 0:
        bench.add(
            "not-repeatable", "fault", "medium", "the same run does not give the same weights again: something outlives the optimizer",
            repeated, effect=departure, error=0.0, said=f"this optimizer gives {departure:.6g}",
        )  # fmt: skip
        return False
    departure = float(bench.call(repeated_unseeded))
    bench.result.measured["repeated_unseeded"] = departure
    if departure > 0:
        bench.add(
            "draws-random-numbers", "note", "low", "steps draw from torch's random numbers: a run repeats only with the same seed, "
            "and runs that differ cannot be compared to the last bit",
            repeated_unseeded, effect=departure, error=0.0, said=f"this optimizer gives {departure:.6g}",
        )  # fmt: skip
        return False
    return True


def _granularity(bench: Bench) -> None:
    """Whether the rule is element-wise; a law of rwsim always is."""
    gaps = {}
    for program in _CUTS:
        try:
            first = float(bench.call(program))
            gaps[program] = first if first <= bench.tolerance else min(first, float(bench.call(program, later=1000)))
        except Exception as error:
            bench.result.measured["granularity"] = f"not applicable: {type(error).__name__}: {str(error)[:200]}"
            return
    rows, columns, _ = kept = [gaps[program] <= bench.tolerance for program in _CUTS]
    found = "element-wise" if all(kept) else "row-wise" if rows else "column-wise" if columns else "tensor-wise"
    bench.result.measured["granularity"] = found
    if not all(kept):
        program = max(_CUTS, key=lambda p: gaps[p])
        departure = gaps[program]
        law = bench.context.law is not None
        bench.add(
            "not-element-wise" if law else found, "fault" if law else "note", "high" if law else "low",
            f"the rule is {found}: weights of one tensor depend on each other's gradients", program,
            effect=departure if departure < float("inf") else None, error=bench.tolerance, said=f"this optimizer gives {departure:.6g}",
        )  # fmt: skip


def _dead_options(bench: Bench) -> None:
    keywords = Keywords(bench.context)
    states: dict[str, str] = {}
    for part in keywords.parts:
        dead = keywords.dead(part)
        states[str(part)] = "not examined: every other value raises" if dead is None else "dead" if dead else "matters"
        if not dead:
            continue
        standard = keywords.standard(part.keyword)
        # A word for a variant, off, in the signature only: calls written for torch are meant to work, and do as long as it is off.
        courtesy = part.keyword in _VARIANTS and not keywords.given[part.keyword] and not keywords.stored(part.keyword)
        known = bench.context.law is not None and part.keyword in bench.context.law.hyper
        note = courtesy and not known
        bench.add(
            "option-not-supported" if note else "dead-option", "note" if note else "fault",
            "medium" if note or not standard else "high",
            f"`{part}` is accepted and changes nothing"
            + (": it is not stored either, and setting it silently gives the rule without it" if note else ", whatever stands beside it"),
            effect=0.0, error=0.0, snippet=_snippet(bench, keywords, part), again=True,
        )  # fmt: skip
    bench.result.measured["keywords"] = {**states, **keywords.rest}


def _snippet(bench: Bench, keywords: Keywords, part: Part) -> str:
    """Two runs that differ in one option, and how far they part."""
    for changed in keywords.others(part, {}):
        try:
            keywords.path(changed)
        except SubjectError:
            continue
        break
    else:
        changed = next(keywords.others(part, {}))
    given = {**bench.context.subject.arguments(bench.context.hyper)}
    return f"""import torch
{imported(bench.context.subject.name)}

ends = []
for options in ({_call(given)}, {_call({**given, **changed})}):
    torch.manual_seed({bench.context.seed})
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype={bench.context.dtype}))
    optimizer = Optimizer([weight], **options)
    for step in range(30):
        weight.grad = 3 * 0.85**step * torch.randn_like(weight)
        optimizer.step()
    ends.append(weight.detach().clone())
print((ends[0] - ends[1]).abs().max())  # must not be 0: `{part}` differs
"""


def _call(options: dict[str, object]) -> str:
    return "dict(" + ", ".join(f"{key}={value!r}" for key, value in options.items()) + ")"


def _lenience(bench: Bench) -> None:
    """Values out of range, and keywords that do not exist, that the constructor takes without a word."""
    subject = bench.context.subject
    starts, _ = scene(0, bench.context.dtype)
    taken = []
    wrong: dict[str, Any] = {"lr": -0.1, "weight_decay": -0.1, "momentum": -0.5, "betas": (1.0, 1.2), "eps": -1.0}
    for word, value in wrong.items():
        spelled = subject.spelling(word)
        if spelled is None:
            continue
        pairs = dict(zip(spelled, value, strict=True)) if isinstance(spelled, tuple) else {spelled: value}
        try:
            bench.call(lambda make, seed, dtype, pairs=pairs: make([torch.nn.Parameter(s) for s in starts], **pairs))
        except Exception:
            continue
        taken += [f"{key}={v!r}" for key, v in pairs.items()]
    bench.result.measured["out_of_range_taken"] = taken
    if taken:
        bench.add("accepts-out-of-range", "note", "low", f"the constructor takes values out of range: {', '.join(taken)}")
    if subject.open_ended:
        try:
            bench.call(lambda make, seed, dtype: make([torch.nn.Parameter(s) for s in starts], rwsim_no_such_option=1))
        except Exception:
            return
        bench.add("swallows-keywords", "note", "low", "the constructor takes any keyword: a misspelt one changes nothing and says nothing")
