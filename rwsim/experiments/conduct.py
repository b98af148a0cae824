"""Conducting a study: its stages one after the other, their runs in lots, each lot kept as it comes; judged when all is there."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from rwsim.experiments.compare import MARGINS
from rwsim.experiments.kept import packed, read_trained, unpacked, write_trained
from rwsim.experiments.lanes import Lane, Outcome, train_lanes
from rwsim.experiments.run import (
    RUNS,
    Found,
    Settings,
    data_of,
    described,
    fingerprints,
    finish,
    finished,
    in_processes,
    load_run,
    plain,
    set_up,
    take_up,
)  # fmt: skip
from rwsim.experiments.study import SCALES, Arm, Study, Trained
from rwsim.experiments.train import write
from rwsim.experiments.verdicts import Verdicts

# Runs of a lot: on CUDA they are trained beside each other.
_LANES = {"cuda": 16, "cpu": 1}


@dataclass(frozen=True)
class StudyResult(Found):
    """What a study came to and what it says."""

    trained: Trained


@dataclass(frozen=True)
class _Run:
    """An arm with one seed."""

    arm: Arm
    seed: int

    def file(self, out: Path) -> Path:
        """Where it is kept: a recipe that has changed is another run."""
        told = json.dumps([plain(self.arm.recipe), self.arm.final], sort_keys=True)
        return out / RUNS / f"{self.arm.name}-{self.seed}.{hashlib.sha256(told.encode()).hexdigest()[:12]}.pt"

    def kept(self, out: Path) -> Outcome | None:
        found = load_run(self.file(out))
        return None if found is None else unpacked(found)


def conduct(
    study: Study, settings: Settings, out: Path, resume: bool = False, heard: Callable[[str, int, int], None] | None = None,
) -> StudyResult:  # fmt: skip
    """Train every arm of every stage with every seed and judge what they came to.

    Args:
        study: Which.
        settings: How; its ``config`` names the size.
        out: Directory of the results. While it is trained, finished runs are in ``runs``; that folder is gone at the end.
        resume: Go on with what `out` holds.
        heard: Called with a lot's name, its steps so far and its steps in all; may raise.

    Raises:
        InvalidArgument: Data that are missing or damaged; results in `out`, or ones of other settings to resume.
        KeyboardInterrupt: With all finished lots kept.
    """
    scale, trained = SCALES[settings.config], Trained()
    data = fingerprints([one.recipe for one in study.stages[0](scale, trained)], settings)
    facts = {**described(study.name, settings), "data": data}
    take_up(out, facts, resume)
    stages = []
    for stage in study.stages:
        arms = list(stage(scale, trained))
        _train(arms, settings, out, heard)
        runs = {one.name: [_Run(one, settings.seed + k).kept(out) for k in range(one.seeds)] for one in arms}
        trained = trained.added((one, [run for run in runs[one.name] if run is not None]) for one in arms)
        stages.append([one.name for one in arms])
    seconds = sum(run.seconds for runs in trained.runs.values() for run in runs)
    facts |= {"seconds": round(seconds, 1), "scale": json.loads(json.dumps(vars(scale))), "margins": dict(MARGINS), "stages": stages}
    facts |= write_trained(trained, settings.seed, out)
    finish(out, facts)
    return kept_study(study, out)


def kept_study(study: Study, out: Path) -> StudyResult:
    """The result that a directory holds, judged anew.

    Raises:
        InvalidArgument: No whole result of this study is there.
    """
    facts = finished(study.name, out, SCALES)
    trained = read_trained(facts, out)
    claims = study.judge(SCALES[facts["config"]], trained)
    return StudyResult(study.name, facts, Verdicts.of(study, trained, claims), trained)


def _train(arms: Sequence[Arm], settings: Settings, out: Path, heard: Callable[[str, int, int], None] | None) -> None:
    """Train what is not there yet."""
    left = [run for one in arms for k in range(one.seeds) if not (run := _Run(one, settings.seed + k)).file(out).exists()]

    def told(lot: list[_Run], done: int | None = None) -> None:
        if heard is not None:
            steps = sum(run.arm.recipe.steps for run in lot)
            more = f" and {len(lot) - 1} more" if len(lot) > 1 else ""
            heard(f"{lot[0].arm.name}, seed {lot[0].seed}{more}", steps if done is None else done, steps)

    in_processes(_lots(left, _LANES[settings.device]), partial(_train_lot, settings, out), settings.workers, told)


def _lots(runs: Sequence[_Run], most: int) -> list[list[_Run]]:
    """Runs that can be trained beside each other: of one kind of data, of one length."""

    def kind(run: _Run) -> tuple[Any, ...]:
        recipe = run.arm.recipe
        return recipe.text, recipe.steps, recipe.size.get("context", 0), recipe.validation

    found = []
    for _, alike in groupby(sorted(runs, key=kind), kind):
        own = list(alike)
        found += [own[i : i + most] for i in range(0, len(own), most)]
    return found


def _train_lot(settings: Settings, out: Path, lot: list[_Run], heard: Callable[[int], None] | None = None) -> None:
    """Train a lot and keep what each run came to."""
    device = torch.device(settings.device)
    set_up(device)
    lanes = [Lane(run.arm.recipe, run.seed, run.arm.final) for run in lot]
    for run, outcome in zip(lot, train_lanes(lanes, data_of(lanes[0].recipe, settings), device, heard), strict=True):
        write(run.file(out), packed(outcome))
