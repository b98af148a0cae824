"""The command `rwsim experiment` end to end, interrupted and resumed."""

import csv
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rwsim.cli import FAILS, HOLDS, INTERNAL, USAGE
from rwsim.cli import run as command
from rwsim.errors import InvalidArgument
from rwsim.experiments import EXPERIMENTS, STUDIES, measure, train
from rwsim.experiments.models import NETWORKS
from rwsim.experiments.run import Settings, run
from tests.experiments import Tiny, make_data, tiny_experiment
from tests.published import held

RESULTS = {"figure.png", "records.csv.gz", "settings.json", "summary.md", "table.csv"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("experiments") / "data")


@pytest.fixture(autouse=True)
def _few_paths(monkeypatch):
    """A path takes a tenth of a second: here layers of one fan-in share theirs."""
    monkeypatch.setattr(measure, "_NEAR", 0.5)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)


def outcome(out: Path):
    """All that a resumed run must have in common with one that was never stopped."""
    settings = json.loads((out / "settings.json").read_text())
    runs = [{key: value for key, value in one.items() if key != "seconds"} for case in settings["cases"].values() for one in case["runs"]]
    return runs, gzip.decompress((out / "records.csv.gz").read_bytes())


class Stop(Exception):
    pass


@pytest.mark.parametrize(("seed", "at", "how"), [(0, 20, "Ctrl-C"), (1, 30, "exception")])
def test_an_interrupted_run_resumes_to_the_same_bits(data, tmp_path, monkeypatch, seed, at, how):
    """Ctrl-C within a step is kept after it; after whatever else, the last checkpoint is there."""
    monkeypatch.setattr(train, "LOOK", 10)
    short = tiny_experiment(50)
    settings = Settings("smoke", "cpu", data=data, save_seconds=0.0 if how == "exception" else 1e9)
    run(short, settings, tmp_path / "whole")

    def stop(label: str, done: int, total: int) -> None:
        if label.endswith(f"seed {seed}") and done == at:
            if how == "exception":
                raise Stop
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stop if how == "exception" else KeyboardInterrupt):
        run(short, settings, tmp_path / "stopped", heard=stop)
    kept = {path.name for path in (tmp_path / "stopped" / "runs").iterdir()}
    assert kept == {"tiny-0.checkpoint.pt"} if seed == 0 else {"tiny-0.done.pt", "tiny-1.checkpoint.pt"}
    with pytest.raises(InvalidArgument, match="must not hold an experiment already"):
        run(short, settings, tmp_path / "stopped")
    with pytest.raises(InvalidArgument, match="with the same seed"):
        run(short, replace(settings, seed=7), tmp_path / "stopped", resume=True)
    heard = []
    run(short, settings, tmp_path / "stopped", resume=True, heard=lambda label, done, total: heard.append((label[-6:], done)))
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    # Nothing was trained twice, but for the steps since the last checkpoint.
    assert heard[0] == (f"seed {seed}", at + (10 if how == "Ctrl-C" else 0))
    assert not (tmp_path / "stopped" / "runs").exists()


def test_a_damaged_checkpoint_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LOOK", 10)
    short = tiny_experiment(50, seeds=1)

    def stop(*_):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(short, Settings("smoke", "cpu", data=data), tmp_path / "out", heard=stop)
    (tmp_path / "out" / "runs" / "tiny-0.checkpoint.pt").write_bytes(b"no")
    with pytest.raises(InvalidArgument, match=r"holds a checkpoint, tiny-0.checkpoint.pt, that cannot be read"):
        run(short, Settings("smoke", "cpu", data=data), tmp_path / "out", resume=True)


def test_list(capsys):
    assert command(["experiment", "--list"]) == HOLDS
    assert capsys.readouterr().out.splitlines() == [*EXPERIMENTS, *STUDIES]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_runs_end_to_end(name, data, tmp_path, monkeypatch, capsys):
    out, file = tmp_path / "out", tmp_path / "deep" / "found.json"
    arguments = ["experiment", name, "--config", "smoke", "--data", str(data), "--out", str(out)]
    assert command([*arguments, "--json", str(file), "--seed", "5"]) in (HOLDS, FAILS)
    said = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == RESULTS and (out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    config = EXPERIMENTS[name].configs["smoke"]
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert {row["case"] for row in rows} == {case.name for case in config.cases}
    settings = json.loads((out / "settings.json").read_text())
    assert settings["seed"] == 5 and settings["experiment"] == name and settings["torch"] == torch.__version__
    assert all(case["seeds"] == [5, 6] and len(case["runs"]) == 2 for case in settings["cases"].values())
    document = held("experiment", file)
    assert len(document["rows"]) == len(rows) and document["meta"]["config"] == "smoke"
    summary = (out / "summary.md").read_text()
    assert "What differs from the paper" in summary and all(case.name in summary for case in config.cases)
    assert document["says"][0] in " ".join(said.split("\n"))
    # Judged again from the records alone, where there is no matplotlib.
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "table.csv").unlink()
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else there(name))
    assert command(["experiment", name, "--out", str(out), "--replot"]) in (HOLDS, FAILS)
    assert "no matplotlib here" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert command([*arguments, "--quiet"]) == USAGE
    said = capsys.readouterr()
    assert not said.out and "must not hold an experiment already" in said.err


BAD_USAGE = {
    "nonsense": f"`name` must be one of {', '.join([*EXPERIMENTS, *STUDIES])}, got 'nonsense'",
    "": "`name` must be one of",
    "dynamics --seed -1": "`seed` must be at least 0",
    "dynamics --workers 0": "`workers` must be at least 1",
    "dynamics --config tiny": "--config",
    "dynamics --resume --replot": "`resume` cannot go with --replot",
    "dynamics --replot": "`out` must hold a finished experiment",
}


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert command(["experiment", *arguments.split()]) == USAGE
    assert BAD_USAGE[arguments] in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_goes_on(data, tmp_path, how):
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "rwsim.cli", "experiment", "transients", "--config", "smoke", "--data", str(data), "--workers", "1"]
    whole = [*arguments, "--out", str(tmp_path / "whole")]
    subprocess.run(whole, check=False, capture_output=True)
    process = subprocess.Popen(
        [*arguments, "--out", str(out), "--save-every", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(out.glob("runs/*.done.pt")):
        time.sleep(0.01)
        assert process.poll() is None
    os.kill(process.pid, how)
    said, _ = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == INTERNAL and "--resume goes on" in said
    subprocess.run([*arguments, "--out", str(out), "--resume"], check=False, capture_output=True)
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_workers_give_the_same(data, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_NEAR", 0.02)  # as it is in workers
    for count in ("1", "2"):
        command(
            [
                "experiment",
                "assumptions",
                "--config",
                "smoke",
                "--data",
                str(data),
                "--workers",
                count,
                "--out",
                str(tmp_path / count),
                "--quiet",
            ]
        )
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2")
