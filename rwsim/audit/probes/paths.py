"""P7: the same steps on every path through the implementation.

An optimizer is often written several times: a loop over the parameters, batched (foreach), fused, differentiable, compiled.
Each writing is compared with the default one for 50 steps in a cast of parameters that real models hold: matrices and
vectors, a scalar, an empty tensor, views that are not contiguous, one frozen, one that never gets a gradient, one whose
gradient comes and goes. They must agree within rounding; a switch that the class refuses is not applicable.

On the default path the probe then asks what a maintainer takes for granted: a parameter goes where it would go alone; without
a gradient it stays; parameters of several dtypes share an optimizer; two groups are two optimizers; parameters may come from
a generator or with names; a complex parameter goes where its two real parts go (else a note: torch.optim does so, others not).

A difference counts only if a second draw of weights and gradients shows it too: the sign of a sum that happens to cancel may
turn on rounding, in two draws at once it practically never does.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from rwsim.audit.cast import REFUSALS, Actor, Form, play
from rwsim.audit.context import Context, Result
from rwsim.audit.crowd import Crowd
from rwsim.audit.finding import FAULT, NOTE, Finding, Kind
from rwsim.audit.script import BASE
from rwsim.audit.stage import Gap, Stage, options
from rwsim.audit.subject import Subject, SubjectError

TITLE = "path parity"

# Keywords that choose an implementation, and the values compared with the default. They change rounding, nothing else, in
# float32 and float64: P10 does not ask that they change the trajectory. `gradient_release` steps inside the backward pass,
# which no given gradient reaches.
SWITCHES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "foreach": (False, True), "fused": (False, True), "capturable": (True,), "differentiable": (True,),
        "multi_tensor": (False, True), "use_multi_tensor": (False, True), "single_tensor": (False, True), "triton": (False, True),
        "use_triton": (False, True), "is_paged": (True,), "paged": (True,), "kahan_sum": (False, True),
        "use_kahan_summation": (False, True), "stochastic_rounding": (True,), "bf16_stochastic_round": (True,),
        "use_stochastic_rounding": (True,), "compile_step": (False, True), "compile": (False, True), "compiled": (False, True),
        "torch_compile": (False, True), "gradient_release": (),
    }
)  # fmt: skip
# Those whose True compiles: only when asked for.
COMPILING = frozenset({"compile_step", "compile", "compiled", "torch_compile"})
_GPU = frozenset({"triton", "use_triton"})
# Those that may hold scalars, a step count or a bias correction, in float32 tensors whatever the parameters are (torch's do).
_SINGLE = COMPILING | {"capturable", "differentiable", "triton", "use_triton"}
# Options of the rule that an implementation may forget.
_FLAGS = ("nesterov", "amsgrad", "maximize")
_AS_TORCH = "; torch.optim's own does so too"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def run(context: Context) -> Result:
    stage = Stage("P7", context)
    crowd = Crowd(stage)
    crowd.together()
    crowd.silence()
    _switches(stage, crowd)
    _mixed(stage)
    _groups(stage)
    _forms(stage)
    _complex(stage)
    return stage.result


def _switches(stage: Stage, crowd: Crowd) -> None:
    compiled = stage.context.compiled
    for switch in SWITCHES:
        for value in SWITCHES[switch] if switch in stage.context.subject.keywords else ():
            if switch in _GPU and value:
                # Triton's interpreter would run it on the CPU, which says nothing about the GPU.
                stage.skip(f"{switch}={value}", "it needs a GPU, and the audit's parameters are on the CPU")
            elif switch in COMPILING and value and not compiled:
                stage.skip(f"{switch}={value}", "it compiles, and that was not asked for")
            else:
                _switch(stage, crowd, f"{switch}={value}", switch, {switch: value})
    if compiled:
        _switch(stage, crowd, "the compiled step", "compiled", {"compiled": True})


def _switch(stage: Stage, crowd: Crowd, name: str, code: str, how: dict[str, Any]) -> None:
    """One path, with all of the crowd that it takes."""
    if how.get("differentiable"):
        how = {**how, "leaves": False}
    taken = _taken(stage, crowd, name, code, how)
    if not taken:
        return
    found = stage.ask(partial(_parity, stage, crowd, name, code, taken, {}, how))
    if found and (excused := {actor for actor in taken if _torch_too(stage, crowd, actor, how)}):
        # What torch's own path does with these is worth a note; the others are looked at without them.
        stage.result.findings.pop()
        stage.ask(partial(_parity, stage, crowd, name, code, taken - excused, {}, how))
        stage.ask(partial(_parity, stage, crowd, name, code, excused, {}, how, kind=NOTE))
        return
    for flag in _FLAGS if not found else ():
        # An option of the rule may be forgotten on one path alone.
        if flag in stage.context.subject.keywords and flag not in stage.context.subject.settings:
            stage.ask(partial(_parity, stage, crowd, name, code, {"matrix"}, {flag: True}, how))


def _taken(stage: Stage, crowd: Crowd, name: str, code: str, how: dict[str, Any]) -> set[str]:
    """Names of those in the crowd that a path takes. Others it refuses, or breaks at."""
    plain, *others = crowd.cast(0)
    try:
        stage.play([plain, *others], **how)
        return {plain.name, *(actor.name for actor in others)}
    except SubjectError:
        pass
    taken = set()
    for actor in (plain, *others):
        label = name if actor is plain else f"{name}, {actor.name}"
        try:
            stage.play([plain] if actor is plain else [plain, actor], **how)
            taken.add(actor.name)
        except SubjectError as error:
            if isinstance(error.error, REFUSALS):
                stage.skip(label, error)
            else:
                kind: Kind = NOTE if _torch_too(stage, crowd, actor.name, how) else FAULT
                text = f"{label}, where the default path is fine: {error}{_AS_TORCH if kind == NOTE else ''}"
                snippet = stage.snippet([plain, actor], 6, "params(), grads", f"params(), grads{options(how)}")
                stage.say(f"{code}-crash", kind, "medium" if kind == FAULT else "low", text, snippet=snippet)
        if not taken:
            break
    return taken


def _torch_too(stage: Stage, crowd: Crowd, name: str, how: dict[str, Any]) -> bool:
    """Whether torch's own optimizers break or go elsewhere on this path with this actor."""
    cast = [crowd.cast(0)[0], next(actor for actor in crowd.cast(0) if actor.name == name)]
    for peer in (torch.optim.SGD, torch.optim.Adam):
        subject = Subject(peer, f"torch.optim:{peer.__name__}")
        if not how.keys() - {"leaves", "compiled"} <= subject.keywords.keys():
            continue
        default = play(subject, cast, BASE).paths
        try:
            paths = play(subject, cast, BASE, **how).paths
        except SubjectError as error:
            if not isinstance(error.error, REFUSALS):
                return True
            continue
        if stage.worst(cast[1:], paths[1:], default[1:], rounding=_rounding(how)) is not None:
            return True
    return False


def _rounding(how: Mapping[str, Any]) -> torch.dtype | None:
    return torch.float32 if _SINGLE & how.keys() else None


def _parity(
    stage: Stage, crowd: Crowd, name: str, code: str, names: set[str], flags: dict[str, Any], how: dict[str, Any],
    draw: int, kind: Kind = FAULT,
) -> Finding | None:  # fmt: skip
    cast = [actor for actor in crowd.cast(draw) if actor.name in names]
    if flags:
        cast = [Actor(actor.name, actor.start, actor.grads[:12], actor.layout) for actor in cast]
    try:
        mine = stage.play(cast, **flags, **how).paths
        theirs = stage.play(cast, **flags).paths if flags else [found[1] for a in cast if (found := crowd.find(a.name, draw))]
    except SubjectError as error:
        stage.skip(f"{name}, {', '.join(flags) or 'whole cast'}", error)
        return None
    gap = stage.worst(cast, mine, theirs, name if kind == FAULT else "", _rounding(how))
    if gap is None:
        return None
    option = f" with {', '.join(flags)}" if flags else ""
    text = f"{name}{option} goes elsewhere than the default path ({gap.actor.name}){gap.words}"
    text += _AS_TORCH if kind == NOTE else _forgotten(stage, gap, flags)
    shown = {key: value for key, value in how.items() if key not in ("leaves", "compiled")}
    calls = f"params(), grads{options({**flags, **shown})}", f"params(), grads{options(flags)}"
    # A compiled or differentiable step needs more than a keyword.
    snippet = stage.snippet([gap.actor], gap.first, *calls) if shown == how else ""
    return stage.finding(f"{code}-differs", kind, "medium" if kind == FAULT else "low", text, gap, snippet)


def _forgotten(stage: Stage, gap: Gap, flags: dict[str, Any]) -> str:
    """What a path forgets, in words: the default path goes there too without it."""
    trials: dict[str, dict[str, Any]] = {flag: {key: value for key, value in flags.items() if key != flag} for flag in flags}
    for word in ("momentum", "betas", "weight_decay"):
        key, value = stage.context.subject.spelling(word), stage.context.hyper.get(word)
        if isinstance(key, str) and value:
            trials[key if word != "betas" else "the first beta"] = {**flags, key: (0.0, *value[1:]) if word == "betas" else 0.0}
    for label, keywords in trials.items():
        try:
            path = stage.play([gap.actor], **keywords).paths
        except SubjectError:
            continue
        if stage.worst([gap.actor], [gap.mine], path) is None:
            return f"; it ignores {label}"
    return ""


def _mixed(stage: Stage) -> None:
    """Parameters of several dtypes in one optimizer, on every batched path; each goes where it goes alone."""
    batched = [switch for switch in ("foreach", "fused", "multi_tensor") if switch in stage.context.subject.keywords]
    paths_taken: list[tuple[str, dict[str, Any]]] = [("default path", {}), *((f"{switch}=True", {switch: True}) for switch in batched)]
    for name, how in paths_taken:
        cast, alone = [], []
        for label, dtype in _DTYPES.items():
            actor = stage.actor(label, 0, (3, 4), 8, dtype)
            try:
                alone.append(stage.play([actor], **how).paths[0])
                cast.append(actor)
            except SubjectError as error:
                stage.skip(f"{label}, {name}", error)
        if len(cast) < 2:
            continue
        calls = f"params(), grads{options(how)}", f"params()[-1:], [now[-1:] for now in grads]{options(how)}"
        try:
            paths, dtypes = stage.play(cast, **how)
        except SubjectError as error:
            if how and isinstance(error.error, REFUSALS):
                stage.skip(f"mixed dtypes, {name}", error)
                continue
            text = f"{', '.join(actor.name for actor in cast)} in one optimizer ({name}), each of which works alone: {error}"
            stage.say("mixed-dtypes-crash", FAULT, "medium", text, snippet=stage.snippet(cast, 2, calls[0]))
            continue
        for actor, dtype in zip(cast, dtypes, strict=True):
            if dtype != actor.start.dtype:
                stage.say("dtype-changed", FAULT, "medium", f"beside other dtypes ({name}) a {actor.name} parameter becomes {dtype}")
        # Beside float32 an optimizer may compute float64 in float32 as well.
        gaps = [
            stage.worst([actor], [path], [right], f"mixed dtypes, {name}", torch.float32 if actor.name == "float64" else None)
            for actor, path, right in zip(cast, paths, alone, strict=True)
        ]
        gap = next((gap for gap in gaps if gap is not None), None)
        if gap is not None:
            text = f"a {gap.actor.name} parameter goes elsewhere beside other dtypes than alone ({name}){gap.words}"
            snippet = stage.snippet([*(actor for actor in cast if actor is not gap.actor), gap.actor], gap.first, *calls)
            stage.say("mixed-dtypes-differ", FAULT, "medium", text, gap, snippet)


def _groups(stage: Stage) -> None:
    """Two groups are two optimizers, whatever hyperparameter tells them apart."""
    subject = stage.context.subject
    given = subject.arguments(stage.context.hyper)
    known = getattr(
        subject.build([torch.nn.Parameter(torch.ones(2, dtype=stage.context.dtype))], stage.context.hyper), "param_groups", None
    )
    if not isinstance(known, list):
        stage.skip("groups", "it has no param_groups")
        return
    for word in ("lr", "weight_decay", "momentum", "betas", "eps"):
        key = subject.spelling(word)
        if not isinstance(key, str) or key not in given:
            continue
        if key not in known[0]:
            stage.skip(f"groups, {key}", "not an option of a group")
            continue
        other = _other(word, given[key])
        try:
            stage.ask(partial(_group, stage, word, key, other))
        except SubjectError as error:
            if not isinstance(error.error, (*REFUSALS, TypeError)):
                raise
            stage.skip(f"groups, {key}", error)


def _other(word: str, value: Any) -> Any:
    """Another value of a hyperparameter, for the second group."""
    if word == "betas":
        return (0.5 * value[0], *(0.9 * beta for beta in value[1:]))
    return {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.5, "eps": 100.0}[word] * (value or BASE[word])


def _pair(
    stage: Stage, draw: int, key: str, other: Any, quiet: bool = False, without: str = ""
) -> tuple[list[Actor], list[torch.Tensor], list[torch.Tensor]]:
    """Two groups of which the second has another value; where they go, and where two optimizers go. `without` is set to zero."""
    extra: dict[str, Any] = {without: 0.0} if without else {}
    cast = [stage.actor(name, draw, (2, 3), 20) for name in ("first group", "second group")]
    grads = [[torch.zeros_like(actor.start)] * 20 if quiet else actor.grads for actor in cast]
    cast = [Actor(cast[0].name, cast[0].start, grads[0]), Actor(cast[1].name, cast[1].start, grads[1], options={key: other})]
    alone = [*stage.play(cast[:1], **extra).paths, *stage.play(cast[1:], **{**extra, key: other}).paths]
    return cast, stage.play(cast, form="groups", **extra).paths, alone


def _group(stage: Stage, word: str, key: str, other: Any, draw: int) -> Finding | None:
    cast, together, alone = _pair(stage, draw, key, other)
    gap = stage.worst(cast, together, alone, f"groups, {key}")
    if gap is None:
        return None
    code, more = f"group-{word.replace('_', '-')}", ""
    second = gap.actor is cast[1]
    if second and stage.worst(cast[1:], [gap.mine], stage.play(cast[1:]).paths) is None:
        more = f"; it is stepped with the constructor's {key}"
    elif second and word == "lr" and isinstance(decay := stage.context.subject.spelling("weight_decay"), str):
        if stage.worst(*_pair(stage, draw, key, other, without=decay)) is None:
            quiet, mine, theirs = _pair(stage, draw, key, other, quiet=True)
            start = quiet[1].start.double()
            ratio = float((start - mine[1][0]).abs().sum() / (start - theirs[1][0]).abs().sum())
            code, more = (
                "group-decay",
                f"; only its decay does, {ratio:.3g} times as strong: it goes by the constructor's lr, not the group's",
            )
    text = f"two groups that differ in {key} are not two optimizers: the {gap.actor.name} goes elsewhere{gap.words}{more}"
    shown = [*(actor for actor in cast if actor is not gap.actor), gap.actor]
    first, last = (f"{{'params': params()[{i}]{f', {key!r}: {other!r}' if (i == 1) == second else ''}}}" for i in (0, 1))
    values = f"[{first}, {last}], grads", f"params()[-1:], [now[-1:] for now in grads]{options({key: other} if second else {})}"
    return stage.finding(code, FAULT, "high", text, gap, stage.snippet(shown, gap.first, *values))


def _forms(stage: Stage) -> None:
    """Parameters handed over by a generator, or with their names."""
    cast = [stage.actor(name, 0, (2, 3), 6) for name in ("first", "second")]
    whole = stage.play(cast).paths
    forms: tuple[tuple[Form, str, str], ...] = (
        ("generator", "parameters from a generator", "iter(params()), grads"),
        ("named", "parameters with names", "[(f'p{i}', param) for i, param in enumerate(params())], grads"),
    )
    for form, label, call in forms:
        try:
            paths = stage.play(cast, form=form).paths
        except SubjectError as error:
            stage.skip(label, error)
            continue
        gap = stage.worst(cast, paths, whole, label)
        if gap is not None:
            still = "; they do not move" if bool((gap.mine == gap.actor.start.double()).all()) else ""
            text = f"{label} go elsewhere than the same in a list{gap.words}{still}"
            stage.say(f"{form}-differs", FAULT, "medium", text, gap, stage.snippet(cast, gap.first, call, "params(), grads"))


def _complex(stage: Stage) -> None:
    """A complex parameter beside its two real parts."""
    wide = torch.complex128 if stage.context.dtype == torch.float64 else torch.complex64
    whole = stage.actor("complex parameter", 0, (3, 2), 20, wide)
    parts = Actor(whole.name, torch.view_as_real(whole.start), [torch.view_as_real(grad) for grad in whole.grads if grad is not None])
    try:
        path = torch.view_as_real(stage.play([whole]).paths[0])
    except SubjectError as error:
        stage.skip("complex parameter", error)
        return
    gap = stage.worst([parts], [path], stage.play([parts]).paths, "complex parameter")
    if gap is not None:
        text = f"a complex parameter is taken and goes elsewhere than its two real parts, unlike torch's{gap.words}"
        stage.say("complex-differs", NOTE, "low", text, gap)
