"""`rwsim.export`: verify what a rotational optimizer carries, then write it as one file; `rwsim.verify`: do it again."""

import copy
import datetime
import importlib.util
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rwsim import __version__
from rwsim.audit.audit import audit
from rwsim.errors import ExportRefused, InvalidArgument
from rwsim.export.source import Subject, body, compose, digest, record_of, subject
from rwsim.optimizers import RULES, UpdateRule
from rwsim.rotational import rotational_of
from rwsim.rotational.rate import rotation_rate
from rwsim.stats.mcse import estimate
from rwsim.theory import symbols as sym
from rwsim.theory.forms import numeric
from rwsim.theory.predict import predict
from rwsim.theory.rates import total_decay
from rwsim.theory.rotation import rotation_form
from rwsim.validate import validate

# What is verified: decay of a vector per step, and the layer that walks.
_DECAY, _FAN_IN, _NEURONS, _BATCH, _STEPS = 4e-3, 64, 64, 32, 4000
# A gradient's size follows its scale with a power of at least a half: each round squares its distance from one away.
_ROUNDS = 8
# Decay at which a form that is right to leading order must be right.
_SMALL = 1e-9
# Largest relative error of a rate, of a norm or of a rotation that counts as none.
MARGIN = 0.01
_TRAJECTORY = 50


@dataclass(frozen=True)
class Check:
    """One thing that was verified, in words, with its figures."""

    name: str
    passed: bool
    text: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """What was found about a file."""

    file: Path
    subject: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data; null where there is no number."""
        checks = [{**vars(one), "figures": {k: x if math.isfinite(x) else None for k, x in one.figures.items()}} for one in self.checks]
        return {"file": self.file.name, "subject": self.subject, "passed": self.passed, "checks": checks}


def export(
    rule: str | type[UpdateRule], file: str | os.PathLike[str], *, rate: str = "paper", rotation: str | None = None, seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Verification:  # fmt: skip
    """Verify a rule's rotation rate and its rotational optimizer, then write that as one file which needs torch only.

    Verified are: the walk of the rule against its exact theory; the carried rate against that theory where both must agree; the
    file's inner optimizer, the file's behaviour under torch (audits); its trajectory against this package's; the rotation that it makes.

    Args:
        rule: A name of `rwsim.RULES`, ``FILE.py:RULE`` or a rule.
        file: Where to. A file that is there is replaced only if `export` wrote it.
        rate: Which form of the rate is the default: ``"paper"`` or ``"exact"``.
        rotation: Turn at the rate of another rule of `RULES`: needed where a rule has none of its own (adam_l2).
        seed: Of every random number.
        progress: Called with what begins.

    Raises:
        InvalidArgument: No such rule or rate; a file that is somebody else's.
        ExportRefused: Something does not hold. Nothing was written.
    """
    path = Path(file)
    if path.exists():
        record_of(path.read_text(errors="replace"), path)
    chosen = subject(rule, rate, rotation)
    hyper = _hyper(chosen)
    text = body(chosen)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.py"
        record = _record(chosen, hyper, seed, ())
        draft.write_text(compose(chosen, text, record))
        found: list[Check] = []
        for check in _checks(chosen, hyper, draft, seed, progress or (lambda _: None), same=True):
            found.append(check)
            if not check.passed:  # what comes after takes long, and would not change the answer
                raise ExportRefused(f"{chosen.rule.name} is not exported: {check.name}: {check.text}", tuple(found))
        checks = tuple(found)
    whole = compose(chosen, text, _record(chosen, hyper, seed, checks))
    with tempfile.NamedTemporaryFile("w", dir=path.absolute().parent, suffix=".tmp", delete=False) as out:
        out.write(whole)
    os.chmod(out.name, 0o644)
    os.replace(out.name, path)
    return Verification(path, chosen.name, checks)


def verify(file: str | os.PathLike[str], *, progress: Callable[[str], None] | None = None) -> Verification:
    """Hash an exported file again, and if it is as written repeat what was verified. Its code runs then.

    Raises:
        InvalidArgument: No such file, or one that `export` did not write.
    """
    path = Path(file)
    if not path.is_file():
        raise InvalidArgument("file", "must be there", str(path))
    text = path.read_text(errors="replace")
    record = record_of(text, path)
    found = digest(text)
    if found != record["sha256"]:
        said = "the file is not as it was written: its hash differs; nothing of it was run"
        return Verification(path, str(record["class"]), (Check("hash", False, said),))
    checks = [Check("hash", True, f"sha256 {found[:12]}... as recorded")]
    chosen = _subject_of(record, path)
    checks += _checks(chosen, record["hyper"], path, record["seed"], progress or (lambda _: None), same=record["rwsim"] == __version__)
    return Verification(path, chosen.name, tuple(checks))


def _subject_of(record: Mapping[str, Any], path: Path) -> Subject:
    if record["rule"] in RULES and not record["own_file"]:
        return subject(record["rule"], record["rate"], record["rotation"] if record["rotation"] != record["rule"] else None)
    theirs = next(
        value for value in vars(_loaded(path)).values() if getattr(value, "name", None) == record["rule"] and hasattr(value, "update")
    )
    parts = {name: getattr(theirs, name) for name in ("name", "hyper", "state", "reference")}
    # The file has an UpdateRule of its own; the theory reads rules of ours.
    rule = type(theirs.__name__, (UpdateRule,), {**parts, "update": staticmethod(theirs.update), "__module__": __name__})
    return Subject(rule, record["rotation"], record["rate"], rotational_of(rule), path)


def _hyper(chosen: Subject) -> dict[str, Any]:
    """Hyperparameters to verify at: the rule's own where it has some, and a decay that forgets in a few hundred steps."""
    usual: dict[str, Any] = {"lr": 1e-2, "max_lr": 1e-2, "momentum": 0.9, "betas": (0.9, 0.99), "weight_decay": 0.1}
    values = {
        key: (usual[key] if default is ... else default) for key, default in chosen.rule.hyper.items() if default is not ... or key in usual
    }
    # Averages over a hundred steps at most, so that a walk of a few thousand settles.
    values |= {"momentum": usual["momentum"]} if "momentum" in values else {}
    values |= {"betas": tuple(min(beta, 0.99) for beta in values["betas"])} if "betas" in values else {}
    values["weight_decay"] = _decayed(chosen.rule, values, _DECAY)
    return values


def _decayed(rule: type[UpdateRule], values: Mapping[str, Any], decay: float) -> float:
    """Weight decay at which a step takes that share of a weight."""
    one = rule(**{**values, "weight_decay": 1.0})
    form = numeric(rule, (total_decay(rule),), (sym.normalizer,))
    return float(f"{decay / -float(form(*sym.flat(one.values), 1.0)[0]):.6g}")


def _loss_scale(rule: type[UpdateRule], hyper: Mapping[str, Any]) -> float:
    """Scale of the gradients at which their coordinates are of size one in equilibrium, as `_decayed` takes them."""
    scale = 1.0
    for _ in range(_ROUNDS):
        found = predict(rule, fan_in=_FAN_IN, batch=_BATCH, neurons=_NEURONS, loss_scale=scale, **hyper)
        scale *= math.sqrt(_FAN_IN * found.exact.norm**2 / found.unit_grad_norm_sq)
    return float(f"{scale:.3g}")


def _record(chosen: Subject, hyper: Mapping[str, Any], seed: int, checks: tuple[Check, ...]) -> dict[str, Any]:
    return {
        "rule": chosen.rule.name, "class": chosen.name, "rate": chosen.form, "rotation": chosen.rotation,
        "own_file": chosen.file is not None, "rwsim": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(), "hyper": dict(hyper), "seed": seed,
        "checks": [{"name": check.name, "text": check.text, "figures": check.figures} for check in checks],
    }  # fmt: skip


def _checks(
    chosen: Subject, hyper: dict[str, Any], path: Path, seed: int, progress: Callable[[str], None], *, same: bool
) -> Iterator[Check]:
    hyper = {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
    progress("the rate against theory")
    yield from _rates(chosen, hyper)
    progress("the walk against theory")
    yield _walk(chosen, hyper, seed)
    made = getattr(_loaded(path), chosen.name)
    options = {"rotation": chosen.rotation} if chosen.rotation != chosen.rule.name else {}
    settings = {**hyper, **options, "rate": chosen.form}
    progress("the rotation that it makes")
    yield _rotation(chosen, made, settings, seed)
    if same:
        progress("its trajectory")
        yield _trajectory(chosen, made, settings, seed)
    progress("the inner optimizer")
    law = RULES.get(chosen.rule.name, chosen.rule)
    yield _audited("inner optimizer", f"{path}:{chosen.name}", {**options, "rotational": False}, law, ("P1", "P2", "P3", "P4", "P5"), seed)
    progress("its behaviour under torch")
    # At the file's own defaults where it has some: eps, above all.
    needed = {key: hyper[key] for key, default in chosen.rule.hyper.items() if default is ...}
    yield _audited(
        "torch",
        f"{path}:{chosen.name}",
        {**needed, **options, "weight_decay": 0.1, "rate": chosen.form},
        None,
        ("P7", "P8", "P9", "P10"),
        seed,
    )


def _rates(chosen: Subject, hyper: Mapping[str, Any]) -> Iterator[Check]:
    """The rate that the file carries, and the paper's other columns, against the exact theory where they must agree."""
    rule = chosen.rated
    values = {key: hyper[key] for key in rule.hyper if key in hyper}
    small = {**values, "weight_decay": _decayed(rule, values, _SMALL)}
    carried = rotation_form(rule, chosen.form)
    at = float(numeric(rule, (carried,), ())(*sym.flat(rule(**small).values))[0])
    exact = predict(rule, fan_in=_FAN_IN, **small)
    ratios = {"rotation": at / exact.exact.rotation}
    if exact.paper is not None and chosen.rotation == chosen.rule.name:
        ratios |= {name: float(getattr(exact.paper, name) / getattr(exact.exact, name)) for name in ("norm", "rms_update")}
    off = {name: ratio - 1 for name, ratio in ratios.items()}
    said = _percents(off)
    text = f"{chosen.form} forms over exact second moments, where eta lambda is small: {said}"
    yield Check("rate", all(abs(value) <= MARGIN for value in off.values()), text, off)


def _walk(chosen: Subject, hyper: dict[str, Any], seed: int) -> Check:
    """The rule's own random walk against its exact theory."""
    found = validate(
        chosen.rule, fan_in=_FAN_IN, neurons=_NEURONS, batch=_BATCH, gamma="uniform", loss_scale=_loss_scale(chosen.rule, hyper),
        steps=_STEPS, margin=MARGIN, seed=seed, **hyper,
    )  # fmt: skip
    errors = {r.quantity: float(r.relative_error["full"] or math.nan) for r in found.records}
    bars = {f"{r.quantity}_mcse": r.mcse / r.measured for r in found.records}
    bad = [f"{r.quantity} {r.verdict}: {r.reason}" for r in found.records if r.verdict != "agrees"]
    said = _percents(errors)
    return Check("walk", found.passed, f"simulated over predicted: {said}" + (f" ({'; '.join(bad)})" if bad else ""), errors | bars)


def _rotation(chosen: Subject, made: Any, settings: dict[str, Any], seed: int) -> Check:
    """The root mean square angle of a step on random gradients against the rate, and the norms."""
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(_NEURONS, _FAN_IN, generator=generator, dtype=torch.float64))
    optimizer = made([param], **settings)
    # The theory's own, not what the file says of itself.
    rate = float(rotation_rate(chosen.rated, chosen.form)(optimizer.param_groups[0]))
    if not rate > 0:
        return Check("rotation", False, f"the rate is {rate:g} at {settings}: nothing would turn")
    norm = param.detach().norm(dim=1)
    squares = []
    for _ in range(600):
        before = param.detach().clone()
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        half = (param.detach() / norm[:, None] - before / before.norm(dim=1, keepdim=True)).norm(dim=1) / 2
        squares.append((2 * half.clamp(max=1).asin()) ** 2)
    kept = torch.stack(squares[100:]).numpy()
    result = estimate(kept)
    measured, error = math.sqrt(result.mean), result.mcse / (2 * math.sqrt(result.mean))
    drift = float((param.detach().norm(dim=1) / norm - 1).abs().max())
    off = measured / rate - 1
    # A step turns by the arctangent, and the tracker follows the sizes that it divides by: both leave tenths of a percent.
    text = f"RMS angle {measured:.6f} rad a step for a rate of {rate:.6f} ({off:+.2%}, standard error {error / rate:.2%})"
    figures = {"rate": rate, "measured": measured, "mcse": error, "norm_drift": drift}
    return Check("rotation", abs(off) <= MARGIN and drift < 1e-9, f"{text}; norms within {drift:.0e}", figures)


def _trajectory(chosen: Subject, made: Any, settings: dict[str, Any], seed: int) -> Check:
    """The file's class beside this package's, bit by bit, while lr changes."""
    same = True
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(shape, generator=generator).to(dtype) for shape in ((12, 10), (10,), (4, 3, 3, 3))]
        ends = []
        for kind in (made, chosen.made):
            params = [torch.nn.Parameter(copy.deepcopy(one)) for one in start]
            optimizer = kind(params, **settings)
            draws = torch.Generator().manual_seed(seed + 1)
            for step in range(_TRAJECTORY):
                optimizer.param_groups[0]["lr"] = settings["lr"] * min(1, (step + 1) / 10)
                for param in params:
                    param.grad = torch.randn(param.shape, generator=draws).to(dtype)
                optimizer.step()
            ends.append(params)
        same = same and all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    text = f"{_TRAJECTORY} steps in float64, float32 and bfloat16 {'are' if same else 'are not'} those of rwsim's {chosen.name}, bit by bit"
    return Check("trajectory", same, text)


def _audited(name: str, where: str, settings: dict[str, Any], law: Any, probes: tuple[str, ...], seed: int) -> Check:
    report = audit(where, law, settings=settings, probes=probes, seed=seed)
    wrong = [finding.text for finding in report.findings if finding.kind != "note"]
    left = [f"{outcome.probe}: {outcome.reason}" for outcome in report.outcomes if outcome.status == "unfinished"]
    held = ", ".join(outcome.probe for outcome in report.outcomes if outcome.status == "held")
    if wrong or left:
        return Check(name, False, " ".join([*wrong, *left]))
    what = f"takes the steps of {law.name}" if law is not None else "no fault in parity, lifecycle, precision and keywords"
    return Check(name, report.passed, f"{what} (rwsim audit, {held})")


def _percents(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {round(value, 4) + 0.0:+.2%}" for name, value in values.items())


def _loaded(path: Path) -> ModuleType:
    """A file as a module. Its code runs."""
    name = f"rwsim_exported_{abs(hash(path.absolute()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument("file", "must be a Python file", str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
