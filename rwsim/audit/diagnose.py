"""The diagnosis: what the scenes of P1 to P5 say together.

Where every scene ends where the law ends, nothing is said. Elsewhere the form of the family is looked for that fits, and each
choice in which it differs from the law's form is a finding, in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.audit import fit
from rwsim.audit.context import Context
from rwsim.audit.finding import CONVENTION, FAULT, NOTE, Finding, Kind, Outcome, Severity
from rwsim.audit.forms import LISTS, Form, walk
from rwsim.audit.identify import Observed, Search, defaults, law_form, nearest_rule, rule_paths
from rwsim.audit.script import Maker, Script
from rwsim.audit.snippet import smallest
from rwsim.audit.subject import SubjectError
from rwsim.optimizers.rule import UpdateRule

# Constants that optimizers add to the root where their constructor has no word for it.
_HIDDEN_EPS = (0.0, 1e-8, 1e-6, 1e-7, 1e-10, 1e-12, 1e-15, 1e-16)
# Documented choices in which good implementations differ, and what torch.optim itself does; all other differences are faults.
_CONVENTIONS = {("decay", "decoupled"), ("decay", "gradient"), ("rate", "alone"), ("rate", "max lr"), ("rate", "over first lr"), *(
    ("eps", choice) for choice in ("outside", "hat", "under", "under squared", "floor under")
)}  # fmt: skip
# A floor of the root is eps added to it within a factor of two, and equal to it away from eps.
_NOTES = {("momentum", "dampened after the first step"), ("eps", "floor")}
_LOW = {
    ("decay", "after"),
    ("eps", "outside"),
    ("eps", "hat"),
    ("eps", "floor"),
    ("eps", "under squared"),
    ("momentum", "dampened after the first step"),
}
_MEDIUM = {"correction", "eps"}


@dataclass(frozen=True)
class Diagnosis:
    """What the scenes say.

    Attributes:
        rule: The rule that it is, or is held against.
        identity: What it is, in words.
        exact: Whether `identity` explains every scene.
        findings: One for each difference.
        outcomes: One for each of the probes P1 to P5 that ran.
    """

    rule: type[UpdateRule] | None
    identity: str
    exact: bool
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]


def _observe(context: Context, scenes: Sequence[Script]) -> tuple[list[Script], list[Tensor], list[Finding], dict[str, str]]:
    """Run every scene. One that the constructor refuses is left out; one that breaks a step, or is not finite, is a finding."""
    ran, paths, findings, refused = [], [], [], {}
    for scene in scenes:
        try:
            path = scene.subject(context.subject, context.dtype)
        except SubjectError as error:
            if error.doing != "step()":
                refused[scene.name] = str(error)
                continue
            findings.append(Finding("step-raises", FAULT, "high", f"{error} ({scene.name}).", (scene.probe,)))
            continue
        ran.append(scene)
        paths.append(path)
    return ran, paths, findings, refused


def diagnose(context: Context, probes: Mapping[str, Any]) -> Diagnosis:
    """Run the scenes of the probes and say what the optimizer is.

    Args:
        context: The optimizer and the law.
        probes: Name -> room, of those probes that hold scenes.
    """
    generator = torch.Generator().manual_seed(context.seed)
    scenes = [scene for name, room in probes.items() for scene in room.scenes(Maker(name, context.words, context.pinned, generator))]
    ran, paths, findings, refused = _observe(context, scenes)
    observed = Observed.of(ran, paths, context.dtype)
    rule, given, observed, notes = _against(context, observed)
    errors = observed.errors(rule_paths(rule, ran, given))
    missed = [scene for scene, error in zip(ran, errors, strict=True) if error > 1]
    findings += notes
    exact, identity = True, f"{rule.name}: {_first_line(rule)}"
    if missed:
        exact, identity, found = _explain(context, rule, given, observed, missed)
        findings += found
    outcomes = []
    for name in probes:
        mine = [(scene, error) for scene, error in zip(ran, errors, strict=True) if scene.probe == name]
        measured = {scene.name: "agrees" if error <= 1 else "departs" for scene, error in mine}
        measured |= {scene.name: f"refused: {refused[scene.name]}" for scene in scenes if scene.probe == name and scene.name in refused}
        departed = any(name in finding.probes for finding in findings if finding.kind != NOTE)
        status = "departed" if departed else "held" if mine else "not applicable"
        outcomes.append(Outcome(name, status, "" if mine else "the constructor refuses every scene", measured=measured))
    return Diagnosis(rule, identity, exact, tuple(findings), tuple(outcomes))


def _first_line(rule: type[UpdateRule]) -> str:
    return " ".join((rule.__doc__ or "").split("Example:")[0].split())[:160].rstrip()


def _against(context: Context, observed: Observed) -> tuple[type[UpdateRule], dict[str, Any], Observed, list[Finding]]:
    """The law (or the rule that misses least), what it takes where the optimizer has no word, and the precision that is at work."""
    single = Observed.of(observed.scripts, observed.paths, torch.float32)
    best: tuple[int, type[UpdateRule], dict[str, Any], Observed] | None = None
    hidden = (None,) if "eps" in context.words else _HIDDEN_EPS
    for level in (observed, single) if context.dtype == torch.float64 else (single,):
        for eps in hidden:
            given = {} if eps is None else {"eps": eps}
            if context.law is None:
                rule, missed = nearest_rule(level, given)
            else:
                rule = context.law
                missed = sum(error > 1 for error in level.errors(rule_paths(rule, level.scripts, given)))
            if best is None or missed < best[0]:
                best = (missed, rule, given, level)
            if not missed:
                break
        if best is not None and not best[0]:
            break
    assert best is not None
    _, rule, given, level = best
    notes = []
    if level is single and context.dtype == torch.float64:
        text = "Computes in float32 inside, although its parameters are float64: agreement is that of float32 rounding."
        notes.append(Finding("single-precision-inside", NOTE, "low", text, ("P1",)))
    return rule, given, level, notes


def _explain(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, missed: list[Script]
) -> tuple[bool, str, list[Finding]]:
    """Whether a form fits, what the optimizer is, and a finding for each difference from the law."""
    probes = tuple(dict.fromkeys(scene.probe for scene in missed))
    laws = law_form(rule, observed.scripts, given)
    mine = {**defaults(rule), **given}
    search = Search(observed, mine, single="betas" not in context.words and "betas" not in rule.hyper)
    form, left = search.find(laws)
    other = None if context.law is None else _other_rule(context, observed, given)
    if left and laws is not None and (fitted := fit.hyper(search, form if form.direction == laws.direction else laws)) is not None:
        form, left = fitted.form, 0
        mine = {**mine, **fitted.values}
    findings = []
    if laws is not None and (not left or left < len(missed)):
        changed = form.differences(laws)
        for name in changed:
            findings.append(_difference(context, rule, given, observed, laws, form, name, probes, other))
        for name, value in fitted.changes.items() if not left and "fitted" in locals() and fitted is not None else ():
            findings.append(fit.finding(name, value, probes))
    what = _words(form, laws)
    if left:
        findings.append(_unexplained(context, rule, given, observed, missed, form, left, what))
    elif not findings:
        findings.append(_unexplained(context, rule, given, observed, missed, form, left, what))
    name = f"{other.name}, not {rule.name}" if other is not None else f"a variant of {rule.name}"
    identity = f"{name}: {what}" if what else name
    if left:
        identity = f"not {rule.name}, nor any form of the family; nearest: {what or rule.name}"
    return not left, identity, findings


def _other_rule(context: Context, observed: Observed, given: dict[str, Any]) -> type[UpdateRule] | None:
    """Another rule of the registry whose steps these are, or None."""
    rule, missed = nearest_rule(observed, given)
    return None if missed or rule is context.law else rule


def _words(form: Form, laws: Form | None) -> str:
    names = form.differences(laws) if laws is not None else ("direction", "momentum", "decay")
    return "; ".join(_phrase(form, name) for name in names)


def _phrase(form: Form, name: str) -> str:
    if name == "factor":
        return _times(form.factor)
    if name == "scale":
        return f"steps {form.scale:.4g} times as long"
    return LISTS[name][str(getattr(form, name))]


def _times(factor: float) -> str:
    known = {2.0: "decay applied twice", 0.5: "decay applied half", 10.0: "decay ten times too strong", 0.1: "decay ten times too weak"}
    return known.get(factor, f"decay {factor:.6g} times that of the law")


def _code(form: Form, name: str) -> str:
    if name in ("factor", "scale"):
        return {"decay applied twice": "decay-twice"}.get(_phrase(form, name), "decay-scaled" if name == "factor" else "step-scaled")
    value = str(getattr(form, name))
    return f"{name}-{value}".replace(" ", "-").replace(",", "")


def _difference(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, laws: Form, form: Form, name: str,
    probes: tuple[str, ...], other: type[UpdateRule] | None,
) -> Finding:  # fmt: skip
    key = (name, str(getattr(form, name)))
    kind: Kind = NOTE if key in _NOTES else CONVENTION if key in _CONVENTIONS else FAULT
    severity: Severity = "low" if key in _LOW else "medium" if name in _MEDIUM else "high"
    alone = laws.changed(**{name: getattr(form, name)})
    search = Search(observed, {**defaults(rule), **given}, single="betas" not in context.words and "betas" not in rule.hyper)
    effect, rounding, where = 0.0, 0.0, observed.scripts[0]
    for scene, (start, grads, lrs, hyper), allowed in zip(observed.scripts, search.scenes, observed.tolerances, strict=True):
        theirs = walk(laws, start, grads, lrs, hyper)
        size = float(np.abs(theirs - start).max()) or 1.0
        gap = float(np.abs(walk(alone, start, grads, lrs, hyper) - theirs).max()) / size
        if np.isfinite(gap) and gap > effect:
            effect, rounding, where = gap, allowed / size, scene
    text = f"{_phrase(form, name)}; {rule.name} has {_phrase(laws, name)}."
    text = text[0].upper() + text[1:]
    if other is not None:
        text += f" This is {other.name}, not {rule.name}."
    shown = _shown(context, rule, given, observed, where)
    return Finding(_code(form, name), kind, severity, text, probes, effect, rounding, shown)


def _shown(context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, first: Script) -> str:
    """A program of the shortest scene that departs, or of `first`."""
    errors = observed.errors(rule_paths(rule, observed.scripts, given))
    apart = [(len(scene.grads), i) for i, (scene, error) in enumerate(zip(observed.scripts, errors, strict=True)) if error > 1]
    for _, i in sorted(apart):
        scene = observed.scripts[i]
        gap = float((observed.paths[i] - scene.law(rule, given)).abs().max())
        if text := smallest(scene, context.subject, context.dtype, rule, given, gap):
            return text
    return ""


def _unexplained(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, missed: list[Script], form: Form, left: int, what: str
) -> Finding:  # fmt: skip
    probes = tuple(dict.fromkeys(scene.probe for scene in missed))
    effect, name = 0.0, missed[0].name
    for scene, path in zip(observed.scripts, observed.paths, strict=True):
        theirs = scene.law(rule, given)
        gap = float((path - theirs).abs().max()) / (scene.scale(theirs) or 1.0)
        if gap > effect or not np.isfinite(gap):
            effect, name = gap if np.isfinite(gap) else 1.0, scene.name
    text = f"Does not take the steps of {rule.name} ({', '.join(scene.name for scene in missed)}; most in: {name})."
    if what and left < len(missed):
        text += f" Nearest in the family, but not equal: {what}."
    return Finding("departs", FAULT, "high", text, probes, effect, None, _shown(context, rule, given, observed, missed[0]))
