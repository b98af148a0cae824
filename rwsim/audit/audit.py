"""`rwsim.audit`: probes in a child process, and one report of what they found."""

import inspect
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rwsim.audit.context import Context, Result
from rwsim.audit.diagnose import diagnose
from rwsim.audit.finding import FAULT, NOTE, Finding, Outcome, Report, Status, ordered
from rwsim.audit.isolation import Death, Message, run
from rwsim.audit.probes import PROBES
from rwsim.audit.subject import Subject, SubjectError, load
from rwsim.errors import InvalidArgument
from rwsim.optimizers import UpdateRule, find_rule

# The probes that hold scenes are one task: one diagnosis is made of them.
_SCENES = "scenes"


def audit(
    optimizer: Any, law: str | type[UpdateRule] | None = None, *, settings: Mapping[str, Any] | None = None,
    probes: Sequence[str] = (), seed: int = 0, compiled: bool = False, seconds: float = 60.0, memory: float = 16.0,
    progress: Callable[[str], None] | None = None,
) -> Report:  # fmt: skip
    """Hold an optimizer against a law, or find out what it is.

    The optimizer runs in a child process with limits of time and memory: what it breaks there is a finding. Its code does run.

    Args:
        optimizer: A class, a function of parameters and keywords that returns an optimizer, or ``MODULE:CLASS`` or
            ``FILE.py:CLASS``.
        law: The rule that it claims to be: a name of `rwsim.RULES`, ``FILE.py:RULE`` or a rule. None identifies.
        settings: Keywords for its constructor, in its own words. Hyperparameters that are not set are chosen to show most.
        probes: Names of `PROBES`; none means all.
        seed: Of every random number; the same seed gives the same report.
        compiled: Leave torch.compile on, and compare a compiled step too. Off, compiled parts run as plain Python.
        seconds: Time limit of one probe.
        memory: Address space of the child in GiB.
        progress: Called with the name of each probe that begins.

    Returns:
        The report: ``.passed``, ``.findings``, ``.to_json()``.

    Raises:
        InvalidArgument: No such class, law, probe or keyword, or a constructor that needs what the audit cannot guess.

    Example:
        >>> import torch
        >>> report = audit(torch.optim.AdamW, law="adamw", probes=["P1", "P2"])
        >>> report.passed, report.findings
        (True, ())
    """
    chosen = _chosen(probes)
    rule = None if law is None else find_rule(law)
    name = optimizer if isinstance(optimizer, str) else _name(optimizer)
    tasks = [*([_SCENES] if any(_has_scenes(p) for p in chosen) else []), *(p for p in chosen if not _has_scenes(p))]

    def work(mine: Sequence[str], send: Callable[[Message], None]) -> None:
        _work(optimizer, name, rule, dict(settings or {}), seed, compiled, chosen, mine, send)

    findings: list[Finding] = []
    outcomes: dict[str, Outcome] = {}
    identity = ""
    for message in run(work, tasks, seconds=seconds, memory=int(memory * 2**30)):
        if isinstance(message, Death):
            death = _death(message, chosen)
            findings.append(death[0])
            outcomes |= death[1]
        elif message.kind == "begun" and progress is not None:
            progress(message.task)
        elif message.kind == "refused":
            raise InvalidArgument(*message.value)
        elif message.kind == "printed":
            size, text = message.value
            shown = f"Prints {size} bytes in one audit, at the end: {text[-120:]!r}."
            findings.append(Finding("print-storm", FAULT, "medium", shown))
        elif message.kind == "done":
            found, ended, named = message.value
            identity = named or identity
            findings += [Finding(**{**each, "probes": tuple(each["probes"])}) for each in found]
            outcomes |= {each["probe"]: Outcome(**each) for each in ended}
    for probe in chosen:
        outcomes.setdefault(probe, Outcome(probe, "unfinished", "the audit ended before it"))
    meta = {
        "seed": seed, "settings": {key: repr(value) for key, value in (settings or {}).items()}, "torch": torch.__version__,
        "python": platform.python_version(), "compiled": compiled,
    }  # fmt: skip
    rule_name = None if rule is None else rule.name
    return Report(name, rule_name, identity, ordered(_merged(findings)), tuple(outcomes[p] for p in chosen), meta)


def _chosen(probes: Sequence[str]) -> tuple[str, ...]:
    for probe in probes:
        if probe not in PROBES:
            raise InvalidArgument("probe", f"must be one of {', '.join(PROBES)}", probe)
    return tuple(probe for probe in PROBES if not probes or probe in probes)


def _has_scenes(probe: str) -> bool:
    return hasattr(PROBES[probe], "scenes")


def _name(optimizer: Any) -> str:
    """``MODULE:CLASS``, or ``FILE.py:CLASS`` of a class whose module has no name that another process could import."""
    module, attribute = getattr(optimizer, "__module__", ""), getattr(optimizer, "__qualname__", type(optimizer).__qualname__)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None and module:
        try:
            return f"{Path(inspect.getfile(optimizer)).name}:{attribute}"
        except (TypeError, OSError):
            return f"{module}:{attribute}"
    return f"{module}:{attribute}"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of one code and text are one, with the probes of all."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.text)
        if key in found:
            finding = replace(found[key], probes=tuple(sorted({*found[key].probes, *finding.probes})))
        found[key] = finding
    return list(found.values())


def _death(death: Death, chosen: Sequence[str]) -> tuple[Finding, dict[str, Outcome]]:
    probes = tuple(p for p in chosen if _has_scenes(p)) if death.task == _SCENES else (death.task,) if death.task else ()
    doing = f"during {', '.join(probes)}" if probes else "while it was imported and built"
    code = "hang" if "did not end" in death.how else "crash"
    text = f"The optimizer {death.how} {doing}." + (f" It printed: {death.output[-200:]!r}." if death.output else "")
    reason = f"the optimizer {death.how}"
    return Finding(code, FAULT, "high", text, probes), {p: Outcome(p, "departed", reason) for p in probes or chosen}


def _work(
    optimizer: Any, name: str, rule: type[UpdateRule] | None, settings: dict[str, Any], seed: int, compiled: bool,
    chosen: Sequence[str], tasks: Sequence[str], send: Callable[[Message], None],
) -> None:  # fmt: skip
    """In the child: load the class, then do the tasks."""
    if not compiled:
        torch.compile = _uncompiled
    torch.manual_seed(seed)
    before = _globals()
    try:
        subject = Subject(load(optimizer) if isinstance(optimizer, str) else optimizer, name, settings)
        context = Context(subject, rule, seed, compiled)
        _ = context.dtype
    except InvalidArgument as error:
        return send(Message("", "refused", (error.argument, error.rule, str(error.got), error.remedy)))
    except SubjectError as error:
        rule_broken = f"must run with what the audit passes, but {error}"
        return send(Message("", "refused", ("optimizer", rule_broken, name, "pass what it needs with --set key=value")))
    context_findings = _changed(before, "importing it or building it", ())
    for task in tasks:
        send(Message(task, "begun"))
        begun, before = time.perf_counter(), _globals()
        try:
            found, ended, identity = _scenes(context, chosen) if task == _SCENES else _probe(context, task)
        except SubjectError as error:
            text = f"The optimizer breaks off {task}: {error}."
            found, ended, identity = [Finding("raises", FAULT, "high", text, (task,))], [Outcome(task, "departed", str(error))], ""
        except SystemExit as error:
            text = f"Calls exit({error.code!r}) in {task}."
            found, ended, identity = [Finding("exits", FAULT, "high", text, (task,))], [Outcome(task, "departed", text)], ""
        took = time.perf_counter() - begun
        found = [*context_findings, *found, *_changed(before, f"in {task}", tuple(o.probe for o in ended))]
        context_findings = []
        timed = [asdict(replace(outcome, seconds=took / len(ended))) for outcome in ended]
        send(Message(task, "done", ([asdict(finding) for finding in found], timed, identity)))


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile, that leaves a function as it is: what a class compiles on import or at its first step is not waited for."""
    return _uncompiled if model is None else model


def _scenes(context: Context, chosen: Sequence[str]) -> tuple[list[Finding], list[Outcome], str]:
    diagnosis = diagnose(context, {p: PROBES[p] for p in chosen if _has_scenes(p)})
    return list(diagnosis.findings), list(diagnosis.outcomes), diagnosis.identity


def _probe(context: Context, probe: str) -> tuple[list[Finding], list[Outcome], str]:
    result: Result = PROBES[probe].run(context)
    departed = any(finding.kind != NOTE for finding in result.findings)
    status: Status = "not applicable" if result.reason else "departed" if departed else "held"
    return result.findings, [Outcome(probe, status, result.reason, measured=result.measured)], ""


def _globals() -> dict[str, Any]:
    """State of the process that an optimizer has no business with."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "the use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's global random numbers": torch.get_rng_state().sum().item(),
    }


def _changed(before: Mapping[str, Any], when: str, probes: tuple[str, ...]) -> list[Finding]:
    """A finding for each of `_globals` that is not what it was; they are put back."""
    now = _globals()
    found = []
    for what, value in before.items():
        if now[what] != value:
            code = f"changes-{what.removeprefix('the ').replace(' ', '-').replace(chr(39), '')}"
            found.append(Finding(code, FAULT, "medium", f"Changes {what} {when}.", probes))
    torch.set_default_dtype(before["the default dtype"])
    torch.set_num_threads(before["the number of threads"])
    torch.set_grad_enabled(before["grad mode"])
    torch.use_deterministic_algorithms(before["the use of deterministic algorithms"])
    return found
