"""The child's side of an audit: load the class, run the probes, say what each found and who is to blame for what broke."""

import contextlib
import inspect
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rwsim.audit import surroundings
from rwsim.audit.context import Context, Result
from rwsim.audit.diagnose import diagnose
from rwsim.audit.finding import CONVENTION, FAULT, NOTE, Finding, Kind, Outcome, Status
from rwsim.audit.isolation import Message, clean
from rwsim.audit.probes import PROBES
from rwsim.audit.probes.paths import SWITCHES
from rwsim.audit.subject import Subject, SubjectError, load
from rwsim.audit.surroundings import Surroundings
from rwsim.audit.transform import as_optimizer
from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, UpdateRule

# The probes that hold scenes are one task: one diagnosis is made of them.
SCENES = "scenes"
# How a constructor refuses what it is given. Anything else that it raises is its own doing.
_REFUSALS = (TypeError, ValueError, KeyError, NotImplementedError, AssertionError)


def has_scenes(probe: str) -> bool:
    return hasattr(PROBES[probe], "scenes")


def probes_of(task: str, chosen: Sequence[str]) -> tuple[str, ...]:
    """The probes of a task; without one, all."""
    if not task:
        return tuple(chosen)
    return tuple(probe for probe in chosen if has_scenes(probe)) if task == SCENES else (task,)


@dataclass(frozen=True)
class Work:
    """What a child has to do.

    Attributes:
        optimizer: The class, or where to find it.
        name: What to call it.
        rule: The law, if any.
        settings: Keywords for its constructor.
        seed: Of every random number.
        compiled: Whether torch.compile is left on.
        chosen: All probes of the audit.
    """

    optimizer: Any
    name: str
    rule: type[UpdateRule] | None
    settings: Mapping[str, Any]
    seed: int
    compiled: bool
    chosen: Sequence[str]

    def __call__(self, tasks: Sequence[str], send: Callable[[Message], None]) -> None:
        """Load the class, then do the tasks."""
        mine = tuple(probe for task in tasks for probe in probes_of(task, self.chosen))
        if not self.compiled:
            _leave_uncompiled()
        surroundings.seed(self.seed)
        before = Surroundings.now()
        try:
            make = load(self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
            send(Message("", "loaded"))
            subject = Subject(as_optimizer(make, self.settings, self.name), self.name, self.settings)
            context = Context(subject, self.rule, self.seed, self.compiled)
            _ = context.dtype
        except InvalidArgument as error:
            return send(Message("", "refused", (error.argument, error.rule, str(error.got), error.remedy)))
        except BaseException as error:
            if isinstance(error, SubjectError) and _refused(error):
                rule = f"must run with what the audit passes, but {error}"
                return send(Message("", "refused", ("optimizer", rule, self.name, "pass what it needs with --set key=value")))
            return send(Message("", "done", _plain((*_broken(error, mine, "import, construction or first steps", None), ""))))
        first = before.changes("when it is imported, built or takes its first steps", ())
        for task in tasks:
            send(Message(task, "begun"))
            probes = probes_of(task, self.chosen)
            begun, before, identity = time.perf_counter(), Surroundings.now(), ""
            found: Sequence[Finding]
            ended: Sequence[Outcome]
            try:
                if task == SCENES:
                    diagnosis = diagnose(context, {probe: PROBES[probe] for probe in PROBES if has_scenes(probe)}, probes)
                    found, ended, identity = diagnosis.findings, diagnosis.outcomes, diagnosis.identity
                    kinds = {finding.kind for finding in found}
                    known: Kind | None = None if not diagnosis.exact or kinds <= {NOTE} else FAULT if FAULT in kinds else CONVENTION
                    context = replace(context, rule=diagnosis.rule if diagnosis.takes_its_steps else None, known=known, searched=True)
                else:
                    found, ended = _probe(context, task)
            except BaseException as error:
                found, ended = _broken(error, probes, _listed(probes), subject)
            took = (time.perf_counter() - begun) / max(len(ended), 1)
            found = [*first, *found, *before.changes(f"in {_listed(probes)}", probes)]
            first = []
            send(Message(task, "done", _plain((found, [replace(outcome, seconds=took) for outcome in ended], identity))))


def _listed(probes: Sequence[str]) -> str:
    return probes[0] if len(probes) == 1 else f"{probes[0]} to {probes[-1]}"


def _refused(error: SubjectError) -> bool:
    """Whether the optimizer wants other arguments than it got, which the user can pass; else it is broken."""
    if error.doing.startswith("construction"):
        return isinstance(error.error, _REFUSALS)
    return error.doing == "step()" and isinstance(error.error, TypeError) and "required positional argument" in str(error.error)


def _probe(context: Context, probe: str) -> tuple[Sequence[Finding], Sequence[Outcome]]:
    result: Result = PROBES[probe].run(context)
    pinned = {switch: value for switch, value in context.subject.settings.items() if switch in SWITCHES}
    if pinned and any(finding.kind == FAULT for finding in result.findings):
        result.findings[:] = _as_torch(result.findings, probe, pinned, context)
    departed = any(finding.kind != NOTE for finding in result.findings)
    status: Status = "departed" if departed else "not applicable" if result.reason else "held"
    return result.findings, [Outcome(probe, status, result.reason, measured=result.measured)]


def _as_torch(findings: Sequence[Finding], probe: str, pinned: Mapping[str, Any], context: Context) -> list[Finding]:
    """Faults that torch.optim's own class shows under the same implementation switches are notes."""
    shown: set[str] = set()
    for peer, law in ((torch.optim.SGD, "sgdm"), (torch.optim.Adam, "adam_l2")):
        if all(switch in inspect.signature(peer).parameters for switch in pinned):
            own = Context(Subject(peer, f"torch.optim:{peer.__name__}", pinned), RULES[law], context.seed)
            with contextlib.suppress(SubjectError):
                shown |= {finding.code for finding in PROBES[probe].run(own).findings if finding.kind == FAULT}
    text = f" (torch.optim's own does so too with {', '.join(f'{key}={value}' for key, value in pinned.items())})"
    return [replace(f, kind=NOTE, text=f.text + text) if f.kind == FAULT and f.code in shown else f for f in findings]


def _broken(
    error: BaseException, probes: Sequence[str], during: str, subject: Subject | None
) -> tuple[Sequence[Finding], Sequence[Outcome]]:
    """What an exception says: a finding if the optimizer raised it; probes without an end if rwsim did."""
    code = text = ""
    said = clean(" ".join(str(error).split())[:300])
    if isinstance(error, SystemExit):
        code, text = "exits", f"Calls exit({error.code!r}) in {during}."
    elif isinstance(error, SubjectError):
        code, text = "raises", f"In {during}, {said}."
        if error.doing.startswith("import"):
            code, text = "raises-at-import", f"{said[0].upper()}{said[1:]}."
    elif not isinstance(error, Exception):
        code, text = "raises", f"Raises {type(error).__name__}{f' ({said})' if said else ''} in {during}."
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        code, text = "memory", f"Memory runs out in {during}."
    elif _its_own(error, subject):
        code, text = "raises", f"Raises {type(error).__name__} ({said}) in {during}."
    if code:
        reason = text.rstrip(".")
        return [Finding(code, FAULT, "high", text, tuple(probes))], [Outcome(probe, "departed", reason) for probe in probes]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    traceback.print_exception(error)
    reason = f"internal error of rwsim: {type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"
    return [], [Outcome(probe, "unfinished", reason) for probe in probes]


def _its_own(error: Exception, subject: Subject | None) -> bool:
    """Whether the innermost frame that is either rwsim's or the optimizer's is the optimizer's."""
    make: Any = getattr(subject.make, "factory", subject.make) if subject is not None else None
    classes = make.__mro__ if inspect.isclass(make) else (make,)
    theirs = set()
    for one in classes:
        if getattr(one, "__module__", "") != "torch.optim.optimizer":
            try:
                theirs.add(inspect.getfile(one))
            except (TypeError, OSError):
                pass
    own, mine = str(Path(__file__).parent), True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(own):
            mine = True
        elif frame.f_code.co_filename in theirs:
            mine = False
    return not mine


def _plain(value: Any) -> Any:
    """As JSON can say it: findings and outcomes as dicts, tensors as lists, no number that is not finite, no address."""
    if isinstance(value, Finding | Outcome):
        data = asdict(value)
        for key in ("effect", "error"):
            number = data.get(key)
            data |= {key: float(number) if number is not None and math.isfinite(number) else None} if key in data else {}
        return _plain(data)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    # Half of a surrogate pair cannot be written to a file.
    return clean(str(value)).encode(errors="backslashreplace").decode()


def _leave_uncompiled() -> None:
    """Compiled functions run as plain Python: what a class compiles at import or at its first step is not waited for."""
    torch.compile = _uncompiled
    if "torch._dynamo" in sys.modules:  # something was compiled before the fork
        torch.compiler.set_stance("force_eager")


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile, that leaves a function as it is."""
    return _uncompiled if model is None else model
