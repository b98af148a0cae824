"""`rwsim.audit`: probes in a child process, and one report of what they found."""

import importlib
import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rwsim import __version__
from rwsim.audit.finding import FAULT, Finding, Outcome, Report, ordered
from rwsim.audit.inside import SCENES, Work, has_scenes, probes_of
from rwsim.audit.isolation import Death, clean, run
from rwsim.audit.probes import PROBES
from rwsim.errors import AuditInterrupted, InvalidArgument
from rwsim.optimizers import UpdateRule, find_rule


def audit(
    optimizer: Any, law: str | type[UpdateRule] | None = None, *, settings: Mapping[str, Any] | None = None,
    probes: Sequence[str] = (), seed: int = 0, compiled: bool = False, seconds: float = 60.0, memory: float = 16.0,
    progress: Callable[[str], None] | None = None,
) -> Report:  # fmt: skip
    """Hold an optimizer against a law, or find out what it is.

    The optimizer runs in a child process with limits of time and memory: what it breaks there is a finding. Its code does run.

    Args:
        optimizer: A class, a function of parameters and keywords that returns an optimizer, a function of keywords that
            returns an optax-style pair of ``init`` and ``update``, or ``MODULE:CLASS`` or ``FILE.py:CLASS``.
        law: The rule that it claims to be: a name of `rwsim.RULES`, ``FILE.py:RULE`` or a rule. None identifies.
        settings: Keywords for its constructor, in its own words. Hyperparameters that are not set are chosen to show most.
        probes: Names of `PROBES`; none means all.
        seed: Of every random number, at least 0; the same seed gives the same report.
        compiled: Leave torch.compile on, and compare a compiled step too. Off, compiled parts run as plain Python.
        seconds: Time limit of one probe, above 0; the import may take twice as long.
        memory: What the child may take beside what the caller has, in GiB, above 0.
        progress: Called with the names of the probes that begin, e.g. ``"P1 P2"``.

    Returns:
        The report: ``.passed``, ``.findings``, ``.to_json()``.

    Raises:
        InvalidArgument: No such class, law, probe or keyword, or a constructor that needs what the audit cannot guess.
        Unavailable: A system without fork.
        AuditInterrupted: Ctrl-C; it holds the report of what was found by then.

    Example:
        >>> import torch
        >>> report = audit(torch.optim.AdamW, law="adamw", probes=["P1", "P2"])
        >>> report.passed, report.findings
        (True, ())
    """
    chosen = _chosen(probes)
    for argument, value in (("seconds", seconds), ("memory", memory)):
        if not 0 < value < float("inf"):
            raise InvalidArgument(argument, "must lie in (0, inf)", value, "leave it out for the default")
    if seed < 0:
        raise InvalidArgument("seed", "must be at least 0", seed, "the default is 0")
    try:
        rule = None if law is None else find_rule(law)
    except InvalidArgument as error:
        raise InvalidArgument("law", error.rule, error.got, error.remedy) from None
    given = dict(settings or {})
    name = optimizer if isinstance(optimizer, str) else _name(optimizer)
    tasks = [*([SCENES] if any(has_scenes(probe) for probe in chosen) else []), *(p for p in chosen if not has_scenes(p))]
    work = Work(optimizer, name, rule, given, seed, compiled, chosen)
    findings: list[Finding] = []
    outcomes: dict[str, Outcome] = {}
    identity = ""

    def report(otherwise: str) -> Report:
        for probe in chosen:
            outcomes.setdefault(probe, Outcome(probe, "unfinished", otherwise))
        meta = {
            "seed": seed, "settings": {key: clean(repr(value)) for key, value in given.items()}, "compiled": compiled,
            "rwsim": __version__, "torch": torch.__version__, "python": platform.python_version(),
        }  # fmt: skip
        named = None if rule is None else rule.name
        return Report(name, named, identity, ordered(_merged(findings)), tuple(outcomes[probe] for probe in chosen), meta)

    # torch's optimizers load it at their first step: seconds, that each child would spend anew.
    importlib.import_module("torch._dynamo")
    try:
        with closing(run(work, tasks, seconds=seconds, memory=int(memory * 2**30))) as messages:
            for message in messages:
                if isinstance(message, Death):
                    # After its last word on a task it belongs to that task still; before the first it ends all that are left.
                    found, ended = _death(message, chosen if message.task else [p for p in chosen if p not in outcomes])
                    findings += found
                    outcomes |= ended
                elif message.kind == "begun" and progress is not None:
                    progress(" ".join(probes_of(message.task, chosen)))
                elif message.kind == "refused":
                    raise InvalidArgument(*message.value)
                elif message.kind == "printed":
                    findings.append(_storm(*message.value))
                elif message.kind == "done":
                    found, ended, named = message.value
                    identity = named or identity
                    findings += [Finding(**{**each, "probes": tuple(each["probes"])}) for each in found]
                    outcomes |= {each["probe"]: Outcome(**each) for each in ended}
    except KeyboardInterrupt:
        raise AuditInterrupted(report("interrupted")) from None
    return report("the audit ended before it")


def _chosen(probes: Sequence[str]) -> tuple[str, ...]:
    for probe in probes:
        if probe not in PROBES:
            raise InvalidArgument("probe", f"must be one of {', '.join(PROBES)}", probe)
    return tuple(probe for probe in PROBES if not probes or probe in probes)


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
    """Findings of one code and text are one, with the probes of all; so are print storms, and changes of one thing."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        alike = finding.code == "print-storm" or finding.code.startswith("changes-")
        key = (finding.code, "" if alike else finding.text)
        if key in found:
            finding = replace(found[key], probes=tuple(p for p in PROBES if p in (*found[key].probes, *finding.probes)))
        found[key] = finding
    return list(found.values())


def _storm(size: int, text: str) -> Finding:
    shown = f"Prints without restraint ({size // 1000} kB in one process). The end of it: {clean(text[-120:])!r}."
    return Finding("print-storm", FAULT, "medium", shown)


def _death(death: Death, left: Sequence[str]) -> tuple[list[Finding], dict[str, Outcome]]:
    probes = probes_of(death.task, left)
    if death.code == "internal":
        return [], {probe: Outcome(probe, "unfinished", f"internal error of rwsim: {clean(death.how)}") for probe in probes}
    doing = f"during {', '.join(probes)}" if death.task else "while it was built" if death.loaded else "while it was imported"
    text = f"The optimizer {clean(death.how)} {doing}." + (f" It printed: {death.output!r}." if death.output else "")
    reason = f"the optimizer {clean(death.how)}{'' if death.task else f' {doing}'}"
    seen = probes if death.task else ()
    return [Finding(death.code, FAULT, "high", text, seen)], {probe: Outcome(probe, "departed", reason) for probe in probes}
