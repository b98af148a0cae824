"""P9: low precision, and gradients of no usual size.

In bfloat16 and float16 the optimizer is compared with itself in float32, from the same weights under the same gradients. The
scene is one that rounding cannot tip (no sum cancels), so the largest deviation follows from the number of roundings; more
than that is a fault, for example a beta that rounds to one. Decay that is smaller than half a unit in the last place is lost
in bfloat16: torch.optim shows that, so it is a note; a class whose switch promises compensation must not show it.

Zero gradients, zero rows, tiny and denormal gradients must not give 0/0; a huge gradient must not give NaN (that it fills
Adam's second moment for good is torch's way too: a note); an infinite gradient must not reach another parameter.

A row that gets a gradient at one step in fifty is where a count of steps and a count of hits part. What the law does there is
right: to Adam a gradient of zero is a gradient. So the rows are compared with the law under the same gradients, and only a
departure of the rare rows is said here; where all rows depart, the other probes say why.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rwsim.audit.cast import Actor
from rwsim.audit.context import Context, Result
from rwsim.audit.finding import FAULT, NOTE, Finding, Kind
from rwsim.audit.script import Maker, tolerance
from rwsim.audit.stage import Gap, Stage, options
from rwsim.audit.subject import SubjectError
from rwsim.errors import InvalidArgument

TITLE = "low precision"

_LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Keywords that promise that small updates are not lost.
_COMPENSATION = ("kahan_sum", "use_kahan_summation", "kahan", "stochastic_rounding", "bf16_stochastic_round", "use_stochastic_rounding")
_STEPS = 8
# lr * weight_decay = 2^-10 is below half a unit of bfloat16, 2^-9: 1 - 2^-10 rounds to one. 200 steps then lose 18 %.
_SMALL = {"lr": 2.0**-6, "weight_decay": 2.0**-4}
_QUIET = 200
# 150 steps; the first row is hit always, the others at one step in fifty: one from the first step on, one from the fiftieth.
_LONG, _HITS = 150, ((0, 50, 100), (49, 99, 149))
_WIDE = "[torch.nn.Parameter(weight.float()) for weight in weights], [[grad.float() for grad in now] for now in grads]"


def run(context: Context) -> Result:
    stage = Stage("P9", context)
    for name in _LOW:
        _drift(stage, name)
    _stagnation(stage)
    _finite(stage)
    _huge(stage)
    _infinite(stage)
    _rare(stage)
    return stage.result


def _steady(stage: Stage, draw: int, dtype: torch.dtype) -> Actor:
    """Weights of 3 to 4 and gradients of 1 to 1.5 of the same sign: no sum of them cancels, and no weight crosses zero."""
    drawn = stage.actor("steady", draw, (4, 8), _STEPS, torch.float64)
    sign = torch.sign(drawn.start)
    grads = [sign * (1 + 0.5 * torch.sigmoid(grad)) for grad in drawn.grads if grad is not None]
    return Actor("steady", (sign * (3 + torch.sigmoid(drawn.start.abs()))).to(dtype), [grad.to(dtype) for grad in grads])


def _like(actor: Actor, dtype: torch.dtype) -> Actor:
    return Actor(actor.name, actor.start.to(dtype), [None if grad is None else grad.to(dtype) for grad in actor.grads], actor.layout)


def _allowed(start: Tensor, path: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest deviation that rounding explains, for every step and weight.

    A step writes the weight at most three times (decay, update, compensation), each within a unit in its last place, which
    covers stochastic rounding. After t steps the momentum carries three roundings of each, and so does the second moment,
    of which the root halves them; eight more make the update of them.
    """
    unit = torch.finfo(dtype).eps
    before = torch.cat([start[None], path[:-1]])
    count = torch.arange(1, len(path) + 1, dtype=torch.float64).reshape(-1, *[1] * start.ndim)
    update = (path - before).abs() * (4.5 * count + 8) / 2
    return unit * (3 * torch.maximum(path.abs(), before.abs()) + update).cumsum(0)


def _drift(stage: Stage, name: str) -> None:
    """Its float32 trajectory, followed within rounding."""
    hyper = stage.context.hyper
    if hyper.get("lr", 0.0) > 0.5 or hyper.get("lr", 0.0) * hyper.get("weight_decay", 0.0) > 0.5:
        stage.skip(f"{name} over float32", "at this lr weights cross zero, where rounding decides")
        return
    actor = _steady(stage, 0, _LOW[name])
    try:
        dtype = stage.play([actor], _own_betas(stage)).dtypes[0]
    except SubjectError as error:
        stage.skip(f"{name} over float32", error)
        return
    if dtype != _LOW[name]:
        text, snippet = f"step() changes the dtype of a {name} parameter to {dtype}", stage.snippet([actor], 1, "params(), grads")
        stage.say("dtype-changed", FAULT, "medium", text, snippet=snippet)
    stage.ask(lambda draw: _drifts(stage, draw, name))


def _own_betas(stage: Stage) -> dict[str, Any]:
    """Hyperparameters with the class's own betas: 0.999 rounds to one in bfloat16, which must not matter."""
    return {word: value for word, value in stage.context.hyper.items() if word != "betas"}


def _drifts(stage: Stage, draw: int, name: str) -> Finding | None:
    actor = _steady(stage, draw, _LOW[name])
    hyper = _own_betas(stage)
    path, right = (stage.play([one], hyper).paths[0] for one in (actor, _like(actor, torch.float32)))
    allowed = _allowed(actor.start.double(), right, _LOW[name])
    share = ((path - right).abs() / allowed).nan_to_num(nan=float("inf"))
    largest = float(share.max())
    key = f"{name} over float32"
    stage.result.measured[key] = max(largest, stage.result.measured.get(key, 0.0)) if largest < float("inf") else "not finite"
    if largest <= 1:
        return None
    first = int((share > 1).flatten(1).any(1).nonzero()[0])
    row, dim = divmod(int(share[first].argmax()), share.shape[-1])
    one = Actor(actor.name, actor.start[row, dim : dim + 1], [g[row, dim : dim + 1] for g in actor.grads if g is not None])
    mine, theirs = path[:, row, dim : dim + 1], right[:, row, dim : dim + 1]
    gap = Gap(one, mine, theirs, float((mine - theirs).abs().max()), float(allowed[first, row, dim]))
    text = f"a {name} parameter leaves its own float32 trajectory by more than rounding explains{gap.words}"
    return stage.finding(f"{name}-drift", FAULT, "high", text, gap, stage.snippet([one], first + 1, "params(), grads", _WIDE, hyper=hyper))


def _stagnation(stage: Stage) -> None:
    """Small decay in bfloat16, and small updates with a switch that promises to keep them, as shares of what float32 shows."""
    context = stage.context
    small = {**context.hyper, **{word: value for word, value in _SMALL.items() if word in context.hyper}}
    if "weight_decay" in context.hyper:
        found = _lost(stage, "bfloat16 decay over float32", 0.0, small, {})
        if found is not None:
            share, effect = found
            text = f"bfloat16 weights lose small decay: {share:.2g} of it is left (lr * weight_decay is below half a unit, 2^-9)"
            text += "; torch.optim's do so too"
            stage.result.findings.append(Finding("bfloat16-stagnates", NOTE, "medium", text, ("P9",), **effect))
    # A thousandth: a quarter of half a unit between 1 and 2. Updates alone: a sum that is compensated need not hold the decay.
    tiny = {**small, "lr": 2.0**-10, **({"weight_decay": 0.0} if "weight_decay" in small else {})}
    for word in ("momentum", "betas"):  # the sums of a momentum would be larger
        if word in tiny:
            tiny[word] = 0.0 if word == "momentum" else (0.0, *tiny[word][1:])
    for key in _COMPENSATION:
        if key in context.subject.keywords and key not in context.subject.settings:
            found = _lost(stage, f"bfloat16 updates over float32, {key}=True", 1.0, tiny, {key: True})
            if found is not None:
                share, effect = found
                text = f"{key}=True does not keep small updates of bfloat16 weights: {share:.2g} of them is left"
                stage.result.findings.append(Finding("compensation-inert", FAULT, "medium", text, ("P9",), **effect))


def _lost(stage: Stage, label: str, grad: float, hyper: dict[str, Any], extra: dict[str, Any]) -> tuple[float, dict[str, Any]] | None:
    """How much of the way in float32 is left in bfloat16, where it is less than half; and what a finding says of it."""
    # Between 1 and 2 a unit in the last place is 2^-7.
    start = torch.linspace(1.3, 1.9, 32).to(torch.bfloat16)
    actor = Actor("weight", start, [torch.full_like(start, grad)] * _QUIET)
    try:
        low, wide = (stage.play([one], hyper, **extra).paths[0][-1] for one in (actor, _like(actor, torch.float32)))
    except SubjectError as error:
        stage.skip(label, error)
        return None
    way = float((wide - start.double()).sum())
    if not abs(way) > 0.02 * float(start.double().sum()):
        stage.skip(label, "its float32 weights hardly move")
        return None
    share = abs(float((low - start.double()).sum()) / way)
    stage.result.measured[label] = share
    if share >= 0.5:
        return None
    one = Actor("weight", start[:1], [torch.full_like(start[:1], grad)] * _QUIET)
    snippet = stage.snippet([one], _QUIET, f"params(), grads{options(extra)}", f"{_WIDE}{options(extra)}", hyper=hyper)
    # Each weight ends within half a unit of where it should be.
    return share, {"effect": share - 1, "error": 2.0**-8 * len(start) / abs(way), "snippet": snippet}


def _small_gradients(stage: Stage) -> Iterator[tuple[str, str, Actor]]:
    """Scenes in which something is divided by almost nothing."""
    drawn = stage.actor("weights", 0, (3, 4), 4, torch.float32)
    start, grads = drawn.start, torch.stack([grad for grad in drawn.grads if grad is not None])
    row = torch.ones(3, 1)
    row[0] = 0
    yield "zero-gradient", "gradients of zero", Actor("weights", start, list(0 * grads))
    yield "zero-row", "a row whose weights and gradients are zero", Actor("weights", row * start, list(row * grads))
    yield "zero-gradient", "a row whose gradients are zero", Actor("weights", start, list(row * grads))
    yield "zero-weights", "weights of zero", Actor("weights", 0 * start, list(grads))
    for size in (1e-8, 1e-30, 1e-40):
        yield "tiny-gradient", f"gradients of {size:g}", Actor("weights", start, list((torch.sign(grads).double() * size).float()))


def _finite(stage: Stage) -> None:
    """No NaN and no infinity with the class's own eps, with weight decay and without."""
    hyper = {word: value for word, value in stage.context.hyper.items() if word != "eps"}
    plain = {**hyper, "weight_decay": 0.0}
    unsafe = stage.context.pinned.get("eps") == 0
    seen = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for code, label, actor in _small_gradients(stage):
            for given in (plain, hyper) if "weight_decay" in hyper else (hyper,):
                actor = _like(actor, dtype)
                try:
                    path = stage.play([actor], given).paths[0]
                except SubjectError as error:
                    if dtype == torch.float32:
                        raise
                    stage.skip(f"{code}, {dtype}", error)
                    continue
                if bool(path.isfinite().all()) or code in seen:
                    continue
                first = int((~path.isfinite()).flatten(1).any(1).nonzero()[0]) + 1
                half = dtype == torch.float16
                if half and f"half {code}" in seen:
                    continue
                seen.add(f"half {code}" if half else code)
                text = f"{label} ({str(dtype).removeprefix('torch.')}) give weights that are not finite after step {first}"
                text += "; eps was set to zero" if unsafe else "; eps underflows in float16, in torch.optim's as well" if half else ""
                snippet = stage.snippet([actor], first, "params(), grads", hyper=given)
                kind: Kind = NOTE if unsafe or half else FAULT
                stage.say(f"{'float16-' if half else ''}{code}-nan", kind, "high" if kind == FAULT else "low", text, snippet=snippet)


def _huge(stage: Stage) -> None:
    """One gradient of 1e20, whose square float32 does not hold, then usual ones."""
    hyper = {**stage.context.hyper, **({"weight_decay": 0.0} if "weight_decay" in stage.context.hyper else {})}
    drawn = stage.actor("weights", 0, (2, 3), 6, torch.float32)
    grads = [torch.sign(grad) * 1e20 if step == 1 else grad for step, grad in enumerate(drawn.grads) if grad is not None]
    actor = Actor("weights", drawn.start, grads)
    path = stage.play([actor], hyper).paths[0]
    if not bool(path.isfinite().all()):
        first = int((~path.isfinite()).flatten(1).any(1).nonzero()[0]) + 1
        text = f"a gradient of 1e20 at step 2 gives weights that are not finite after step {first}; torch.optim's stay finite"
        stage.say("huge-gradient-nan", FAULT, "medium", text, snippet=stage.snippet([actor], first, "params(), grads", hyper=hyper))
    elif bool((path[2:] == path[1]).all()) and float(path.abs().max()) < 1e6:
        text = "after one gradient of 1e20 the weights stand still for good: its second moment is infinite, as torch.optim.Adam's"
        calls = "params(), grads[:2]", "params(), grads"
        stage.say("huge-gradient-freezes", NOTE, "low", text, snippet=stage.snippet([actor], 6, *calls, hyper=hyper))


def _infinite(stage: Stage) -> None:
    """An infinite gradient of one weight must reach no other parameter, nor under a law that acts on each weight other weights."""
    struck, other = (stage.actor(name, 0, shape, 4) for name, shape in (("struck parameter", (3, 4)), ("other parameter", (5,))))
    grads = [grad.clone() for grad in struck.grads if grad is not None]
    grads[1][0, 0] = float("inf")
    cast = [Actor(struck.name, struck.start, grads), other]
    mine, theirs = stage.play(cast).paths, stage.play([struck, other]).paths
    calls = "params(), grads", "params(), [[grad.nan_to_num(posinf=1.0) for grad in now] for now in grads]"
    gap = stage.worst([other], mine[1:], theirs[1:], "infinity beside")
    if gap is not None:
        text = f"an infinite gradient of one parameter reaches another{gap.words}"
        stage.say("infinity-spreads", FAULT, "high", text, gap, stage.snippet(cast, gap.first, *calls))
    elif stage.context.law is not None:
        rest = Actor(struck.name, struck.start[1:], grads)
        gap = stage.worst([rest], [mine[0][:, 1:]], [theirs[0][:, 1:]], "infinity within")
        if gap is not None:
            text = f"an infinite gradient of one weight reaches other rows of its parameter{gap.words}"
            stage.say("infinity-spreads", FAULT, "medium", text, gap, stage.snippet([cast[1], cast[0]], gap.first, *calls))


def _rare(stage: Stage) -> None:
    """Rows that are hit rarely, beside the law."""
    if stage.context.law is None:
        stage.skip("rare rows", "there is no law to compare with")
    else:
        stage.ask(lambda draw: _rarely(stage, draw))


def _rarely(stage: Stage, draw: int) -> Finding | None:
    context = stage.context
    assert context.law is not None
    generator = torch.Generator().manual_seed(1000 * context.seed + 500 * draw)
    make = Maker("P9", context.words, context.pinned, generator)
    grads = make.randn(_LONG, 3, 4)
    for row, hits in enumerate(_HITS, 1):
        mask = torch.zeros(_LONG, 1, dtype=torch.float64)
        mask[list(hits)] = 1
        grads[:, row] *= mask
    # With eps out of the way: where it stands is the first probe's business.
    script = make("rare rows", make.randn(3, 4), grads, eps=1e-12)
    try:
        law = script.law(context.law, {"eps": 1e-8, **context.own})
    except InvalidArgument as error:
        stage.skip("rare rows", f"the law cannot be run with these hyperparameters: {error}")
        return None
    path = script.subject(context.subject, context.dtype)
    gaps = [float((path - law)[:, row].abs().nan_to_num(nan=float("inf")).max()) for row in range(3)]
    # A class may compute in float32 whatever its parameters are: the row that is always hit shows it.
    # or have an eps that cannot be set: then it is known to no better.
    known = "eps" in context.words or "eps" not in context.law.hyper
    rounding = context.dtype if known and gaps[0] <= tolerance(script, law, context.dtype) else torch.float32
    allowed = tolerance(script, law, rounding)
    shares = [gap / allowed for gap in gaps]
    stage.result.measured["rows hit always, from step 1 and from step 50 at one in 50, beside the law"] = [
        share if share < float("inf") else "not finite" for share in shares
    ]
    if shares[0] > 1 or max(shares[1:]) <= 1:
        return None
    row = 1 if shares[1] > 1 else 2
    moved, should = (
        torch.cat([script.start[None], where])[:, row].diff(dim=0)[list(_HITS[row - 1])].norm(dim=-1).sum() for where in (path, law)
    )
    ratio = float(moved / should) if float(should) else float("inf")
    hit = Actor("rows", script.start.to(context.dtype), [grad.to(context.dtype) for grad in grads])
    gap = Gap(hit, path[:, row], law[:, row], float((path - law)[:, row].abs().max()), allowed)
    text = (
        f"a row that gets a gradient at one step in 50 goes elsewhere than the law does under the same gradients, a row hit at"
        f" every step does not: at its hits it moves {ratio:.3g} times as far, and differs from step {gap.first} on. Steps and hits of a"
        f" row are counted apart (zero gradients skipped, or a bias correction for rows that counts what it should not)"
    )
    effect = {"effect": ratio - 1, "error": allowed / float(should)} if 0 < float(should) and ratio < float("inf") else {}
    one = Actor("row", hit.start[row : row + 1], [grad[row : row + 1].to(context.dtype) for grad in grads])
    keywords = {**script.hyper, "lr": script.lrs[0]}
    wanted = [f"{value:.6g}" for value in law[gap.first - 1, row].tolist()]
    snippet = stage.snippet([one], gap.first, "params(), grads", hyper=keywords) + f"# the law: {', '.join(wanted)}\n"
    return Finding("rare-rows", FAULT, "high", text, ("P9",), snippet=snippet, **effect)
