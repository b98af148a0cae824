"""The diagnosis: what the scenes of P1 to P5 say together.

Where every scene ends where the law ends, nothing is said. Elsewhere the form of the family is looked for that fits, and each
choice in which it differs from the law's form is a finding, in words.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.audit import fit
from rwsim.audit.context import Context
from rwsim.audit.finding import CONVENTION, FAULT, NOTE, Finding, Kind, Outcome, Severity, Status
from rwsim.audit.forms import LISTS, Form, walk
from rwsim.audit.identify import Observed, Search, defaults, law_form, nearest_rule, rule_paths
from rwsim.audit.probes.scale import SHAPES
from rwsim.audit.script import Maker, Script
from rwsim.audit.snippet import smallest
from rwsim.audit.subject import SubjectError
from rwsim.optimizers.rule import UpdateRule

# Constants that optimizers add to the root where their constructor has no word for it.
_HIDDEN_EPS = (0.0, 1e-8, 1e-6, 1e-7, 1e-10, 1e-12, 1e-15, 1e-16)
# Documented choices in which good implementations differ, and what torch.optim itself does; all other differences are faults.
_CONVENTIONS = {("decay", "decoupled"), ("decay", "gradient"), ("rate", "alone"), ("rate", "max lr"), ("rate", "over max lr"), *(
    ("eps", choice) for choice in ("outside", "hat", "under", "under squared", "floor under")
)}  # fmt: skip
# A floor of the root is eps added to it within a factor of two, and equal to it away from eps.
_NOTES = {("momentum", "dampened after the first step"), ("eps", "floor")}
# Option -> what it changes of a form, from what, to what (as torch.optim means them).
_OPTIONS = {"nesterov": ("momentum", "sum", "nesterov"), "amsgrad": ("square", "gradient", "maximum")}
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

    @property
    def takes_its_steps(self) -> bool:
        """Whether every step was the rule's."""
        return self.exact and all(finding.kind == NOTE for finding in self.findings)


def _observe(context: Context, scenes: Sequence[Script], **extra: Any) -> tuple[list[Script], list[Tensor], list[Finding], dict[str, str]]:
    """Run every scene. One that the constructor refuses is left out; one that breaks a step is a finding."""
    ran, paths, refused = [], [], {}
    broken: dict[str, list[Script]] = {}
    for scene in scenes:
        try:
            path = scene.subject(context.subject, context.dtype, **extra)
        except SubjectError as error:
            if error.doing != "step()":
                refused[scene.name] = str(error)
                continue
            broken.setdefault(str(error), []).append(scene)
            continue
        ran.append(scene)
        paths.append(path)
    findings = [
        Finding("step-raises", FAULT, "high", f"{error} ({', '.join(s.name for s in on)}).", tuple(dict.fromkeys(s.probe for s in on)))
        for error, on in broken.items()
    ]
    return ran, paths, findings, refused


def diagnose(context: Context, rooms: Mapping[str, Any], probes: Sequence[str]) -> Diagnosis:
    """Run the scenes of the probes and say what the optimizer is.

    Args:
        context: The optimizer and the law.
        rooms: Name -> room, of all probes that hold scenes: what departs in one is told apart by the others.
        probes: Those that were asked for: what departs in no scene of theirs is not looked into.
    """
    pinned = dict(context.pinned)
    if context.law is None and "weight_decay" not in context.words:
        pinned["weight_decay"] = 0.0  # without a law nobody says that it decays
    generator = torch.Generator().manual_seed(context.seed)
    scenes = [scene for name, room in rooms.items() for scene in room.scenes(Maker(name, context.words, pinned, generator))]
    ran, paths, findings, refused = _observe(context, scenes)
    findings = [finding for finding in findings if set(finding.probes) & set(probes)]
    observed = Observed.of(ran, paths, context.dtype)
    if not ran:
        outcomes = [
            Outcome(name, "not applicable" if not findings else "departed", "no scene could be run", measured=refused) for name in probes
        ]
        return Diagnosis(None, "", False, tuple(findings), tuple(outcomes))
    rule, given = _against(context, observed)
    errors = observed.errors(rule_paths(rule, ran, given))
    missed = [scene for scene, error in zip(ran, errors, strict=True) if error > 1 and scene.probe in probes]
    if context.dtype == torch.float32:
        text = "Computes in float32 whatever its parameters are: agreement is that of float32 rounding."
        findings.append(Finding("single-precision-inside", NOTE, "low", text, tuple(probes)))
    exact, identity = True, _named(rule)
    if missed:
        exact, identity, found = _explain(context, rule, given, observed, missed)
        findings += found
    else:
        findings += [finding for finding in _flags(context, rule, given, observed) if set(finding.probes) & set(probes)]
    outcomes = []
    for name in probes:
        mine = [(scene, error) for scene, error in zip(ran, errors, strict=True) if scene.probe == name]
        measured = {scene.name: "agrees" if error <= 1 else "departs" for scene, error in mine}
        measured |= {scene.name: f"refused: {refused[scene.name]}" for scene in scenes if scene.probe == name and scene.name in refused}
        departed = any(name in finding.probes for finding in findings if finding.kind != NOTE)
        status: Status = "departed" if departed else "held" if mine else "not applicable"
        outcomes.append(Outcome(name, status, "" if mine else "the constructor refuses every scene", measured=measured))
    return Diagnosis(rule, identity, exact, tuple(findings), tuple(outcomes))


def _flags(context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed) -> list[Finding]:
    """What is wrong behind options of torch's names that are off: they must do what they say, and nothing else."""
    offered = {
        flag: change for flag, change in _OPTIONS.items() if context.subject.keywords.get(flag) and flag not in context.subject.settings
    }
    laws = law_form(rule, observed.scripts, given) if offered else None
    found = []
    for flag, (name, plain, choice) in offered.items():
        if laws is None or getattr(laws, name) != plain:
            continue
        ran, paths, broken, _ = _observe(context, observed.scripts, **{flag: True})
        seen = Observed.of(ran, paths, context.dtype)
        if broken or len(ran) < len(observed.scripts):
            continue
        # An option without any effect is P10's business.
        if all(error <= 1 for error in seen.errors(observed.paths)):
            continue
        search, right = _search(context, rule, given, seen), laws.changed(**{name: choice})
        form, left = (right, 0) if not search.misses(right, search.order, 0) else search.find(right)
        if form == right and not left:
            continue
        said = "; ".join(_words(form, right)) if not left else "no form of the family fits"
        missed = [s for i, s in enumerate(seen.scripts) if search.misses(right, [i], 0)]
        text = f"With {flag}=True it is not {rule.name} with {_phrase(right, name)}: {said}."
        probes = tuple(dict.fromkeys(scene.probe for scene in missed))
        found.append(Finding(f"{flag}-wrong", FAULT, "medium", text, probes))
    return found


def _named(rule: type[UpdateRule]) -> str:
    """A rule's name and what its room says of it first."""
    said = (getattr(sys.modules.get(rule.__module__), "__doc__", None) or "").strip().split("\n")[0]
    return f"{rule.name}: {said.partition(': ')[2] or said}" if said else rule.name


def _against(context: Context, observed: Observed) -> tuple[type[UpdateRule], dict[str, Any]]:
    """The law (or the rule that misses least), and what it takes where the optimizer has no word."""
    best: tuple[int, type[UpdateRule], dict[str, Any]] | None = None
    known = "eps" in context.words or "eps" in context.own
    for eps in (None,) if known else _HIDDEN_EPS:
        given = {**context.own, **({} if eps is None else {"eps": eps})}
        if context.law is None:
            rule, missed = nearest_rule(observed, given)
        else:
            rule = context.law
            missed = sum(error > 1 for error in observed.errors(rule_paths(rule, observed.scripts, given)))
        if best is None or missed < best[0]:
            best = (missed, rule, given)
        if not missed:
            break
    assert best is not None
    return best[1:]


def _explain(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, missed: list[Script]
) -> tuple[bool, str, list[Finding]]:
    """Whether something explains every scene, what the optimizer is, and a finding for each difference from the law."""
    probes = tuple(dict.fromkeys(scene.probe for scene in missed))
    laws = law_form(rule, observed.scripts, given)
    if laws is not None and all(scene.name in SHAPES for scene in missed):
        return _by_shape(context, rule, given, observed, laws, missed)
    search = _search(context, rule, given, observed)
    form, left = search.find(laws)
    fitted = None
    if left and laws is not None:
        tries = [laws] if form == laws or form.direction != laws.direction else [laws, form]
        fitted = next((found for one in tries if (found := fit.hyper(search, one)) is not None), None)
        form, left = (form, left) if fitted is None else (fitted.form, 0)
    harmless = laws is not None and not left and all((n, str(getattr(form, n))) in _NOTES for n in form.differences(laws))
    other = None if context.law is None or harmless else _other_rule(context, observed, given)
    findings = []
    if laws is not None and not left:
        findings += [_difference(context, rule, given, observed, laws, form, name, probes, other) for name in form.differences(laws)]
    what = _words(form, laws)
    if fitted is not None:
        findings += fitted.findings(probes, _shown(context, rule, given, observed))
        what += fitted.words()
    if left or not findings:
        findings.append(_unexplained(context, rule, given, observed, missed, left, what))
    said = "; ".join(what)
    if left:
        return False, f"not {rule.name}, nor any form of the family; nearest: {said or rule.name}", findings
    name = f"{other.name}, not {rule.name}" if other is not None else f"a variant of {rule.name}"
    return True, f"{name}: {said}" if said else name, findings


def _by_shape(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, laws: Form, missed: list[Script]
) -> tuple[bool, str, list[Finding]]:
    """Parameters of some shapes have a rule of their own."""
    names = ", ".join(scene.name for scene in missed)
    theirs = observed.only([i for i, scene in enumerate(observed.scripts) if any(scene is one for one in missed)])
    form, left = _search(context, rule, given, theirs).find(laws)
    said = "no form of the family fits" if left else "; ".join(_words(form, laws))
    text = f"Parameters of some shapes have another rule ({names}): {said}. Small matrices take the steps of {rule.name}."
    right = rule_paths(rule, theirs.scripts, given)
    sizes = [scene.scale(path) or 1.0 for scene, path in zip(theirs.scripts, right, strict=True)]
    gap = max(float((path - law).abs().max()) / size for path, law, size in zip(theirs.paths, right, sizes, strict=True))
    error = max(allowed / size for allowed, size in zip(theirs.tolerances, sizes, strict=True))
    shown = _shown(context, rule, given, theirs)
    probes = tuple(dict.fromkeys(scene.probe for scene in missed))
    finding = Finding("depends-on-shape", FAULT, "high", text, probes, gap, error, shown)
    return not left, f"{rule.name}, but for {names}: {said}", [finding]


def _search(context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed) -> Search:
    return Search(observed, {**defaults(rule), **given}, single="betas" not in context.words and "betas" not in rule.hyper)


def _other_rule(context: Context, observed: Observed, given: dict[str, Any]) -> type[UpdateRule] | None:
    """Another rule of the registry whose steps these are, or None."""
    rule, missed = nearest_rule(observed, given)
    return None if missed or rule is context.law else rule


def _words(form: Form, laws: Form | None) -> list[str]:
    names = form.differences(laws) if laws is not None else ["direction", "momentum", "decay"]
    return [_phrase(form, name) for name in names]


def _phrase(form: Form, name: str) -> str:
    if name == "factor":
        return _times(form.factor)
    return LISTS[name][str(getattr(form, name))]


def _times(factor: float) -> str:
    known = {
        1.0: "decay applied once",
        2.0: "decay applied twice",
        0.5: "decay applied half",
        10.0: "decay ten times too strong",
        0.1: "decay ten times too weak",
    }
    return known.get(factor, f"decay {factor:.6g} times that of the law")


def _code(form: Form, name: str) -> str:
    if name == "factor":
        return "decay-twice" if form.factor == 2 else "decay-scaled"
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
    search = _search(context, rule, given, observed)
    effect, rounding = 0.0, 0.0
    for (start, grads, lrs, hyper), allowed in zip(search.scenes, observed.tolerances, strict=True):
        theirs = walk(laws, start, grads, lrs, hyper)
        size = float(np.abs(theirs - start).max()) or 1.0
        gap = float(np.abs(walk(alone, start, grads, lrs, hyper) - theirs).max()) / size
        if np.isfinite(gap) and gap > effect:
            effect, rounding = gap, allowed / size
    text = f"{_phrase(form, name)}; {rule.name} has {_phrase(laws, name)}."
    if name == "decay" and form.decay == "none" and context.subject.spelling("weight_decay") is None:
        text = f"its constructor takes no weight decay; {rule.name} has {_phrase(laws, name)}."
    text = text[0].upper() + text[1:]
    if other is not None:
        text += f" This is {other.name}, not {rule.name}."
    return Finding(_code(form, name), kind, severity, text, probes, effect, rounding, _shown(context, rule, given, observed))


def _shown(context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed) -> str:
    """A program of the shortest scene that departs by a good part of the largest departure."""
    gaps = []
    for scene, path in zip(observed.scripts, observed.paths, strict=True):
        theirs = scene.law(rule, given)
        gap = float((path - theirs).abs().max())
        gaps.append((gap / (scene.scale(theirs) or 1.0), gap) if np.isfinite(gap) else (0.0, 0.0))
    largest = max(relative for relative, _ in gaps)
    apart = sorted((len(scene.grads), i) for i, scene in enumerate(observed.scripts) if gaps[i][0] > largest / 10)
    programs = (smallest(observed.scripts[i], context.subject, context.dtype, rule, given, gaps[i][1]) for _, i in apart)
    return next((text for text in programs if text), "")


def _unexplained(
    context: Context, rule: type[UpdateRule], given: dict[str, Any], observed: Observed, missed: list[Script], left: int, what: list[str]
) -> Finding:  # fmt: skip
    effect, name = 0.0, missed[0].name
    for scene, path in zip(observed.scripts, observed.paths, strict=True):
        theirs = scene.law(rule, given)
        gap = float((path - theirs).abs().max()) / (scene.scale(theirs) or 1.0)
        if not gap <= effect:
            effect, name = gap if np.isfinite(gap) else 1.0, scene.name
    where = "every scene" if len(missed) == len(observed.scripts) else ", ".join(scene.name for scene in missed)
    text = f"Does not take the steps of {rule.name} ({where}; most in: {name})."
    if what and left < len(missed):
        text += f" Nearest in the family, but not equal: {'; '.join(what)}."
    probes = tuple(dict.fromkeys(scene.probe for scene in missed))
    return Finding("departs", FAULT, "high", text, probes, effect, None, _shown(context, rule, given, observed))
