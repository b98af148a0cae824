"""Running an experiment: every case with every seed, kept as it comes, judged when all is there."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import rwsim
from rwsim.errors import InvalidArgument, StorageError, Unavailable
from rwsim.experiments.case import Case, Experiment
from rwsim.experiments.data import Data, fingerprint, load_images, load_text
from rwsim.experiments.findings import Findings
from rwsim.experiments.measure import Watch
from rwsim.experiments.records import NAME, Layer, Records, Series, layer_facts, read_records, write_records
from rwsim.experiments.says import verdict
from rwsim.experiments.train import Recipe, TrainingDiverged, train, write

if TYPE_CHECKING:
    from rwsim.experiments.verdicts import Verdicts

# The batches of a run are drawn from this many times the seed, in 64 bits.
_SEEDS = 1 << 40
SETTINGS, RUNS = "settings.json", "runs"
# One thread a process on the CPU: networks this small gain nothing from a second.
_THREADS = 1


@dataclass(frozen=True)
class Settings:
    """How an experiment is run; what it is comes from its `Config`.

    Attributes:
        config: Its size.
        device: ``cpu`` or ``cuda``.
        seed: Of the first run of each case.
        data, text: Where to look.
        workers: Processes; 1: this one.
        save_seconds: Between checkpoints.
    """

    config: str
    device: str
    seed: int = 0
    data: Path | None = None
    text: Path | None = None
    workers: int = 1
    save_seconds: float = 30.0

    @classmethod
    def chosen(
        cls, config: str | None, device: str, seed: int, data: Path | None, text: Path | None, workers: int | None, save_seconds: float,
    ) -> "Settings":  # fmt: skip
        """With what was left open filled in.

        Raises:
            Unavailable: No such device.
            InvalidArgument: A value out of range.
        """
        if not 0 <= seed < _SEEDS:
            raise InvalidArgument("seed", f"must be at least 0 and below {_SEEDS:,}", seed)
        if not save_seconds >= 0:
            raise InvalidArgument("save_every", "must be at least 0", save_seconds)
        if device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("the device cuda was asked for and is not here; this machine has cpu.")
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        config = ("gpu" if device == "cuda" else "cpu") if config is None else config
        return cls(config, device, seed, data, text, workers or _workers(config, device), save_seconds)


def _workers(config: str, device: str) -> int:
    return 1 if device == "cuda" or config == "smoke" else os.cpu_count() or 1


@dataclass(frozen=True)
class Found:
    """What was found with which settings.

    Attributes:
        name: Of the experiment or study.
    """

    name: str
    settings: Mapping[str, Any]
    findings: "Findings | Verdicts"

    def write(self, out: Path) -> None:
        """table.csv and summary.md to a directory that holds the rest."""
        write_text(out / "table.csv", self.findings.table())
        write_text(out / "summary.md", self.findings.markdown(self.name, self.settings))

    def to_json(self) -> dict[str, Any]:
        """{"meta": {...}, "says": [...]} and rows or claims; null where there is no number."""
        meta = {key: self.settings[key] for key in ("rwsim", "experiment", "config", "device", "seed", "date")}
        return {"meta": meta, **self.findings.to_json()}


@dataclass(frozen=True)
class Result(Found):
    """What an experiment measured and what it says."""

    findings: "Findings"
    records: Records


def run(
    experiment: Experiment, settings: Settings, out: Path, resume: bool = False, heard: Callable[[str, int, int], None] | None = None,
) -> Result:  # fmt: skip
    """Train every case with every seed and judge what was measured.

    Args:
        experiment: Which.
        settings: How.
        out: Directory of the results. While a run is trained its checkpoint is in ``runs``; that folder is gone at the end.
        resume: Go on with what `out` holds.
        heard: Called with a run's name, its steps so far and its steps in all; may raise.

    Raises:
        InvalidArgument: Data that are missing or damaged; results in `out`, or ones of other settings to resume.
        KeyboardInterrupt: With all that was trained kept.
    """
    config = experiment.configs[settings.config]
    data = fingerprints([case.recipe for case in config.cases], settings)
    cases = {case.name: {"recipe": plain(case.recipe)} for case in config.cases}
    facts = {**described(experiment.name, settings), "data": data, "cases": cases}
    take_up(out, facts, resume)
    seeds = range(settings.seed, settings.seed + config.seeds)
    left = [(case, seed) for case in config.cases for seed in seeds if _kept_run(out, case, seed) is None]

    def told(job: tuple[Case, int], done: int | None = None) -> None:
        case, seed = job
        if heard is not None:
            heard(f"{case.name}, seed {seed}", case.recipe.steps if done is None else done, case.recipe.steps)

    in_processes(left, partial(_train_one, settings, out), settings.workers, told)
    records = {case.name: _joined([_kept_run(out, case, seed) for seed in seeds], seeds) for case in config.cases}
    for name, series in records.items():
        facts["cases"][name] |= {"layers": layer_facts(series.layers), "seeds": list(series.seeds), "runs": list(series.runs)}
    facts["seconds"] = round(sum(one["seconds"] for series in records.values() for one in series.runs), 1)
    write_records(records, out / NAME)
    finish(out, facts)
    return kept(experiment, out)


def kept(experiment: Experiment, out: Path) -> Result:
    """The result that a directory holds, judged anew.

    Raises:
        InvalidArgument: No whole result of this experiment is there.
    """
    facts = finished(experiment.name, out, experiment.configs)
    records, config = read_records(out / NAME, facts["cases"]), experiment.configs[facts["config"]]
    found = experiment.analyse(config, records)
    return Result(experiment.name, facts, Findings(found.rows, (verdict(experiment, config, found.rows), *found.says)), records)


def plain(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON holds it."""
    return json.loads(json.dumps(asdict(recipe)))


def described(name: str, settings: Settings) -> dict[str, Any]:
    """What decides the numbers of an experiment, first, and with what it was run; `take_up` compares the former."""
    cuda = settings.device == "cuda"
    return {
        "rwsim": rwsim.__version__, "experiment": name, "config": settings.config, "seed": settings.seed, "device": settings.device,
        "card": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(), "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None, "tf32": bool(cuda), "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "command": " ".join(["rwsim", *sys.argv[1:]]),
    }  # fmt: skip


_IDENTITY = ("rwsim", "experiment", "config", "seed", "device")


def take_up(out: Path, facts: Mapping[str, Any], resume: bool) -> None:
    """Take a directory, or take it up again."""
    there = _read_settings(out)
    if there is not None and not resume:
        remedy = "give --resume to go on with it, --replot to draw it again, or another directory"
        raise InvalidArgument("out", "must not hold an experiment already", str(out), remedy)
    if there is not None:
        recipes = [{name: case["recipe"] for name, case in one.get("cases", {}).items()} for one in (there, facts)]
        changed = [key for key in (*_IDENTITY, "data") if there.get(key) != facts[key]] + (["cases"] if recipes[0] != recipes[1] else [])
        if changed:
            got = f"{changed[0]} {there.get(changed[0])}" if changed[0] != "cases" else "other cases"
            raise InvalidArgument(
                "out", f"must hold what is to be resumed, with the same {changed[0]}", got, "give the options it began with"
            )
        if not (out / RUNS).exists():
            raise InvalidArgument("resume", "needs an experiment that is not finished", str(out), "give --replot to draw it again")
    try:
        (out / RUNS).mkdir(parents=True, exist_ok=True)
        if there is None:
            write_text(out / SETTINGS, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}.") from None


def finish(out: Path, facts: Mapping[str, Any]) -> None:
    """Write the settings of a directory whose other files are there, and drop what only a run that goes on would need."""
    write_text(out / SETTINGS, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    # Gone at once: a kill in between must not leave some runs to be trained again.
    spent = (out / RUNS).rename(out / f"{RUNS}.spent")
    shutil.rmtree(spent)


def finished(name: str, out: Path, configs: Collection[str]) -> dict[str, Any]:
    """The settings of a directory that holds a whole result.

    Raises:
        InvalidArgument: It does not, or one of another experiment.
    """
    facts = _read_settings(out)
    if facts is None or (out / RUNS).exists():
        raise InvalidArgument("out", "must hold a finished experiment", str(out), "name its directory, or finish it with --resume")
    if facts["experiment"] != name:
        raise InvalidArgument("out", f"must hold results of {name}", str(out), f"it holds {facts['experiment']}")
    missing = [key for key in (*_IDENTITY, "card", "torch", "date", "command") if key not in facts]
    if missing or facts["config"] not in configs:
        got = f"no {missing[0]}" if missing else f"config {facts['config']}"
        raise InvalidArgument("out", f"must hold a whole {SETTINGS}", got, "take it from a copy, or train again")
    return facts


def _read_settings(out: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((out / SETTINGS).read_text())
        found["experiment"]  # must be there
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("out", f"holds a {SETTINGS} that cannot be read", str(out), type(error).__name__) from None


def write_text(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    os.replace(draft, path)


def _run_file(out: Path, case: Case, seed: int, kind: str) -> Path:
    return out / RUNS / f"{case.name}-{seed}.{kind}.pt"


def _kept_run(out: Path, case: Case, seed: int) -> dict[str, Any] | None:
    """What a finished run left, or None."""
    return load_run(_run_file(out, case, seed, "done"))


def load_run(path: Path) -> dict[str, Any] | None:
    """What `write` kept; None where there is no such file."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch say
        remedy = "remove it to train that run again"
        raise InvalidArgument("out", f"holds a damaged file, {path.name}", str(path.parent), f"{remedy} ({type(error).__name__})") from None


_loaded: dict[Any, Data] = {}


def fingerprints(recipes: Iterable[Recipe], settings: Settings) -> dict[str, str]:
    """Of the data by kind; what is missing or damaged is refused before any training, not after an hour of it."""
    found: dict[str, str] = {}
    for recipe in recipes:
        data = data_of(recipe, settings)
        if data.kind not in found:
            found[data.kind] = fingerprint(data)
    return found


def data_of(recipe: Recipe, settings: Settings) -> Data:
    """Loaded once a process."""
    context = recipe.size.get("context", 128) if recipe.text else 0
    key = (settings.text or settings.data, context, settings.device)
    if key not in _loaded:
        found = load_text(settings.text or settings.data, context) if recipe.text else load_images(settings.data)
        _loaded[key] = found.to(torch.device(settings.device))
    return _loaded[key]


def in_processes(jobs: Sequence[Any], work: Callable[..., None], workers: int, told: Callable[..., None]) -> None:
    """Do `work(job, heard)` for each job, in this process or, with `workers`, in several; each keeps what it came to.

    In this process `told(job, done)` is called for what `heard(done)` hears on the way, with several `told(job)` when one is done.
    """
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            work(job, partial(told, job))
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        waiting = {pool.submit(work, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                done.result()
                told(waiting[done])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def set_up(device: torch.device) -> None:
    """How this process computes."""
    torch.set_num_threads(_THREADS)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32


def _train_one(settings: Settings, out: Path, job: tuple[Case, int], heard: Callable[[int], None] | None = None) -> None:
    """Train one run and keep what it came to."""
    case, seed = job
    device = torch.device(settings.device)
    set_up(device)
    checkpoint = _run_file(out, case, seed, "checkpoint")
    watches: list[Watch] = []

    def attached(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Watch:
        watches.append(Watch(case.recipe, model, optimizer))
        return watches[0]

    told: dict[str, Any] = {}
    try:
        found = train(
            case.recipe,
            data_of(case.recipe, settings),
            seed,
            device,
            attached,
            checkpoint=checkpoint,
            save_seconds=settings.save_seconds,
            heard=heard,
        )
        told = {"held_out_loss": found.held_out_loss, "accuracy": found.accuracy, "seconds": round(found.seconds, 2), "graph": found.graph,
                "training_loss": float(found.losses[-100:].mean())}  # fmt: skip
    except TrainingDiverged as error:
        told = {"diverged": error.step, "seconds": 0.0}
    step, values = watches[0].records()
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    write(
        _run_file(out, case, seed, "done"),
        {"told": told, "layers": layer_facts(watches[0].layers), "step": torch.from_numpy(step), "values": tensors},
    )
    checkpoint.unlink(missing_ok=True)


def _joined(runs: list[Any], seeds: range) -> Series:
    """One series of a case's runs; a run that diverged is NaN from there on."""
    longest = max(runs, key=lambda one: len(one["step"]))
    values = {}
    for name in longest["values"]:
        rows = [one["values"][name].numpy() for one in runs]
        padded = [np.pad(row, ((0, len(longest["step"]) - len(row)), (0, 0)), constant_values=np.nan) for row in rows]
        values[name] = np.stack(padded)
    layers = tuple(Layer(**layer) for layer in longest["layers"])
    return Series(layers, tuple(seeds), longest["step"].numpy(), values, tuple(one["told"] for one in runs))
