"""Sweeps: what a grid is, that a sweep survives whatever happens to it, and that its numbers depend on nothing but the point."""

import collections
import contextlib
import hashlib
import importlib
import json
import math
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rwsim
from rwsim.cli import run as command
from rwsim.config import WalkSettings
from rwsim.errors import InvalidArgument, StorageError, Unavailable, UnsupportedRule, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, UpdateRule
from rwsim.stats.burnin import truncation
from rwsim.sweeps import result
from rwsim.sweeps import run as running
from rwsim.sweeps.grid import Axis, Grid, SweepConfig
from rwsim.sweeps.ledger import Ledger, identity_of
from rwsim.sweeps.log import read_log
from rwsim.sweeps.outcome import Outcome, reduce
from rwsim.sweeps.sweep import sweep
from rwsim.theory import equilibrium, transient
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import predict_equilibria
from rwsim.theory.factors import schedule_factors
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import IdealWalk
from tests.forked import python
from tests.published import held
from tests.statistics import Z

# The package's attribute of this name is the function.
sweeping = importlib.import_module("rwsim.sweeps.sweep")
xarray = pytest.importorskip("xarray", reason="the sweep extra is not installed")

SMALL = {
    "optimizer": ["adamw", "lion"], "axes": {"lr": "1e-3:1e-1:4:log", "weight_decay": [0.1, 1.0]}, "fan_in": 16, "neurons": 8,
    "steps": 400,
}  # fmt: skip


def config(**changed) -> SweepConfig:
    return SweepConfig.checked(**{**SMALL, **changed})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The small sweep, uninterrupted."""
    return sweep(config(), tmp_path_factory.mktemp("whole")).data


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Batches of one point."""
    plan = running.plan
    monkeypatch.setattr("rwsim.sweeps.sweep.plan", lambda *given: replace(plan(*given), batch=1))


def same(one, other) -> bool:
    """Every data variable, bit by bit."""
    return set(one.data_vars) == set(other.data_vars) and all(
        one[name].dtype == other[name].dtype and one[name].values.tobytes() == other[name].values.tobytes() for name in one.data_vars
    )


# Grids


def test_axes():
    assert Axis.parse("lr", "1e-4:1e-1:4:log").values == (1e-4, 1e-3, 1e-2, 1e-1)
    assert Axis.parse("lr", "0:1:3").values == (0.0, 0.5, 1.0)
    assert Axis.parse("batch", "8:128:5:log").values == (8, 16, 32, 64, 128)
    assert Axis.parse("schedule", "cosine,warmup0.1+linear").values == ("cosine", "warmup0.1+linear")
    ends = Axis.parse("lr", "3e-5:7e-2:20:log").values
    assert (ends[0], ends[-1]) == (3e-5, 7e-2) and np.allclose(np.diff(np.log(ends)), math.log(7e-2 / 3e-5) / 19)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": {"lr": "2:1:4"}}, "`axes.lr` must have LOW below HIGH"),
        ({"axes": {"lr": "0:1:4:log"}}, "`axes.lr` must lie above 0 on a log axis"),
        ({"axes": {"lr": "1:2:1"}}, "COUNT of 2 to"),
        ({"axes": {"lr": "1:2:1000000000000"}}, "COUNT of 2 to"),
        ({"axes": {"lr": "1:2"}}, "must be a range or a list"),
        ({"axes": {"lr": "1:x:3"}}, "must hold numbers, got 'x'"),
        ({"axes": {"lr": "1:inf:3"}}, "must hold finite numbers"),
        ({"axes": {"lr": []}}, "must not be empty"),
        ({"axes": {"lr": [1, 1.0]}}, "must hold distinct values"),
        ({"axes": {"batch": "8:10:5"}}, "fewer than 5 different values"),
        ({"axes": {"batch": [8.5]}}, "must hold whole numbers"),
        ({"axes": {"batch": [2]}, "hyper": {"lr": 1, "weight_decay": 1}}, "`batch` must be"),
        ({"axes": {"learning_rate": [1]}}, "is not a hyperparameter of adamw nor a setting.*known: lr, weight_decay, beta_1"),
        ({"axes": {"betas": [1]}}, "betas is a pair: sweep its entries"),
        ({"axes": {"lr": [0.1, -1]}, "hyper": {"weight_decay": 1}}, r"`lr` must lie in \[0, inf\), got -1.0"),
        ({"axes": {"lr": [0.1]}}, "`weight_decay` must be given for adamw"),
        ({"hyper": {"lr": 1}}, "`axes.lr` must not be fixed as well"),
        ({"hyper": {"momentum": 1}}, "`hyper.momentum` is not a hyperparameter of any optimizer here"),
        ({"axes": {"lr": "1:2:1000", "weight_decay": "1:2:1000", "eps": "1:2:1000"}}, "1,000,000 points at most, got '1,000,000,000'"),
        ({"optimizer": ["adamw", "adamw"]}, "must name each rule once"),
        ({"optimizer": ["adam"]}, "adam"),
        ({"optimizer": []}, "`optimizer`"),
        ({"axes": {}}, "`axes`"),
        ({"design": "latin"}, "`points` must be given for design latin"),
        ({"points": 3}, "`points` belongs to designs random and latin"),
        ({"axes": {"schedule": ["cosin"]}}, "`schedule` must be one of constant, linear, cosine"),
        ({"stepz": 3}, "`stepz`"),
        ({"steps": 0}, "`steps` must be greater than or equal to 1"),
    ],
)
def test_bad_grids_are_refused(changed, message):
    with pytest.raises(InvalidArgument, match=message):
        Grid.of(config(**{"optimizer": ["adamw"], **changed}))


def test_points_and_their_order():
    grid = Grid.of(config(replicates=2, axes={"lr": [0.1, 0.2], "beta_2": [0.9, 0.99]}, hyper={"weight_decay": 0.5, "betas": [0.8, 0.9]}))
    assert grid.dims == {"optimizer": 2, "lr": 2, "beta_2": 2, "replicate": 2} and len(grid) == len(grid.points) == 16
    third = grid.points[3]
    assert (third.optimizer, third.rule.values.lr, third.rule.values.betas, third.replicate) == ("adamw", 0.1, (0.8, 0.99), 1)
    keys = grid.keys("blocked", "cpu")
    assert len(set(keys)) == 16
    one = Grid.of(config(optimizer=["adamw"], axes={"lr": [0.2], "beta_2": [0.99]}, hyper={"weight_decay": 0.5, "betas": [0.8, 0.9]}))
    assert one.keys("blocked", "cpu")[0] == keys[6] != one.keys("fused", "cuda")[0]


def test_the_hash_of_a_point_is_that_of_its_json(tmp_path):
    """Ledgers hold these hashes: they must not change with the code that makes them."""
    axes = {"lr": [1e-7, 0.1], "weight_decay": [0, 3], "beta_1": [0.5, 1 / 3], "schedule": "constant,cosine", "batch": [8, 16]}
    given = config(axes=axes, replicates=2, loss_scale=2, window=7)
    grid = Grid.of(given)
    common = {name: getattr(given, name) for name in ("steps", "neurons", "gradient", "layers", "gamma", "seed")}
    for key, point in zip(grid.keys("fused", "cuda"), grid.points, strict=True):
        own = [point.rule.name, "", vars(point.rule.values), vars(point.setting), point.replicate]
        text = json.dumps([common, 7, own, "fused", "cuda"], sort_keys=True)
        assert key == hashlib.sha256(text.encode()).hexdigest()
    plain = Grid.of(config(optimizer=["adamw"], axes={"lr": [0.1]}, hyper={"weight_decay": 0.5}))
    assert plain.keys("blocked", "cpu") == ("d5ef4f6b297c073d73dc88d1253a0445307d995448a3bf7041826965c5fd0b2c",)


def test_designs():
    axes = {"lr": "1e-4:1e-1:2:log", "weight_decay": "0:1:2", "batch": [8, 32]}
    latin = Grid.of(config(design="latin", points=40, axes=axes))
    assert latin.dims == {"optimizer": 2, "point": 40}
    lr, decay, batch = map(np.array, zip(*latin.rows, strict=True))
    # One point in each of 40 strata of every axis.
    assert sorted(np.floor(np.log10(lr / 1e-4) / 3 * 40)) == sorted(np.floor(decay * 40)) == list(range(40)) and (batch == 8).sum() == 20
    random = Grid.of(config(design="random", points=40, axes=axes))
    assert len(set(np.floor(np.array(random.rows)[:, 1] * 40))) < 40
    assert random.rows == Grid.of(config(design="random", points=40, axes=axes)).rows
    assert random.rows != Grid.of(config(design="random", points=40, axes=axes, seed=1)).rows


def test_schedules():
    assert schedule_factors("constant", 5) is None
    np.testing.assert_allclose(schedule_factors("linear", 4), [1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(schedule_factors("cosine", 4), [1, 0.5 + 8**-0.5, 0.5, 0.5 - 8**-0.5])
    np.testing.assert_allclose(schedule_factors("warmup0.5+constant", 4), [0.5, 1, 1, 1])
    assert all(len(schedule_factors(f"warmup{w}+cosine", n)) == n for w in (0.01, 0.5, 0.99) for n in (1, 2, 7, 100))


def test_the_file_is_the_configuration(tmp_path):
    given = config(hyper={"eps": 1e-8, "betas": [0.9, 0.99]}, window=7)
    path = tmp_path / "grid.toml"
    path.write_text(given.to_toml())
    assert SweepConfig.read(path) == given
    for text, message in (
        ("lr = [", "must be a TOML file"),
        ("speed = 1", "`optimizer`|`speed`"),
        ('axes = 3\noptimizer=["adamw"]', "axes"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=message):
            SweepConfig.read(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        SweepConfig.read(tmp_path / "none.toml")


def test_the_published_schema_is_the_code(capsys):
    assert command(["sweep", "--print-schema"]) == 0
    published = Path(__file__).parent.parent / "docs" / "sweep.schema.json"
    assert capsys.readouterr().out == published.read_text()
    assert command(["sweep", "--print-config"]) == 0
    assert 'optimizer = ["adamw"]' in capsys.readouterr().out


# What a point's numbers depend on


def test_results_are_labelled(whole):
    assert whole["norm"].dims == ("optimizer", "lr", "weight_decay") and whole.sizes == {"optimizer": 2, "lr": 4, "weight_decay": 2}
    assert whole["rotation"].attrs["units"] == "radian" and whole.attrs["steps"] == 400 and whole.attrs["engine"] == "blocked"
    for form in ("exact", "paper"):
        expected = rwsim.predict("lion", lr=0.1, weight_decay=1.0, fan_in=16, batch=32, neurons=8)
        found = whole[f"rotation_{form}"].sel(optimizer="lion", lr=0.1, weight_decay=1.0)
        assert float(found) == pytest.approx(getattr(expected, form).rotation, rel=1e-9)
    assert float(whole["time_constant"].sel(optimizer="adamw", lr=0.1, weight_decay=1.0)) == pytest.approx(5)


def test_batches_do_not_show(whole, tmp_path, one_at_a_time):
    assert same(sweep(config(), tmp_path).data, whole)


def test_other_points_do_not_show(whole, tmp_path):
    found = sweep(config(optimizer=["lion"], axes={"weight_decay": [1.0, 0.3], "lr": "1e-3:1e-1:4:log"}), tmp_path).data
    ours = found.sel(weight_decay=1.0, optimizer="lion")
    theirs = whole.sel(weight_decay=1.0, optimizer="lion")
    assert all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in whole.data_vars)


def test_measured_agrees_with_predicted_where_settled(tmp_path):
    """And an error of 4 % would be seen."""
    given = config(
        optimizer=["adamw"], axes={"lr": [0.03, 0.05], "weight_decay": [0.3, 0.5]}, hyper={"betas": [0.9, 0.99]}, fan_in=128, neurons=64,
        steps=4000,
    )  # fmt: skip
    found = sweep(given, tmp_path).data
    assert (found["settled"] == 1).all() and (found["burn_in"] < 1500).all()
    for name in ("norm", "rotation", "rms_update"):
        error = Z * found[f"{name}_mcse"] / found[f"{name}_exact"]
        off = np.abs(found[name] / found[f"{name}_exact"] - 1)
        assert float(error.max()) < 0.03, f"{name}: no power"
        # `exact` leaves out terms of order 1/C.
        assert (off <= error + 0.01).all(), f"{name}: {off.values}"
    constants = found["time_constant"].values
    np.testing.assert_allclose(constants[0], 1 / (2 * np.outer([0.03, 0.05], [0.3, 0.5])), rtol=1e-9)


def test_time_constants_of_every_rule(monkeypatch):
    """Those of the balance of diffusion and decay agree with the eigenvalue's where both are known."""
    law = IdealWalk(64)
    for name, rule in RULES.items():
        needed = {"max_lr": 1e-4} if "max_lr" in rule.hyper else {}
        rules = [rule(lr=1e-4, weight_decay=decay, **needed) for decay in (1e-3, 2e-3)]
        exact = predict_equilibria(rules, law).exact
        known = transient.time_constants(rule, rules, exact)
        assert known[0] / known[1] == pytest.approx(2, rel=1e-2), name
        if linear_response(rule).direction != "sign":
            with monkeypatch.context() as patch:
                patch.setattr(transient, "relaxation_rate", lambda kind: sym.normalizer)
                np.testing.assert_allclose(transient.time_constants(rule, rules, exact), known, rtol=0.02, err_msg=name)


def test_slow_points_are_not_called_settled(tmp_path):
    """A walk that hardly moves in 400 steps looks steady; its time constant says that it is not."""
    found = sweep(config(optimizer=["adamw"], axes={"lr": [1e-6, 0.1]}, hyper={"weight_decay": 1.0}), tmp_path).data
    assert found["settled"].values.tolist() == [[0, 1]]


def test_burn_in_is_where_the_series_settles():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((40, 500))
    decay = np.exp(-np.arange(40) / 3.0)[:, None]
    assert (truncation(noise) < 20).mean() > 0.9
    late = truncation(noise + 100 * decay)
    assert np.median(late) >= 8 and (late < 20).mean() > 0.9
    assert (truncation(noise + np.arange(40.0)[:, None]) == 20).mean() > 0.9
    assert truncation(np.zeros((40, 1))).tolist() == [0] and truncation(noise[:5]).tolist() == [2] * 500
    assert np.array_equal(truncation(noise)[::-1], truncation(noise[:, ::-1]))


def test_divergence_is_a_result(tmp_path):
    """Points beyond the bound of stability are marked; the others are what they are without them."""
    axes = {"lr": [0.05, 50.0, 70.0]}
    found = sweep(config(optimizer=["sgdm"], axes=axes, hyper={"weight_decay": 0.1}), tmp_path / "a").data
    alone = sweep(config(optimizer=["sgdm"], axes={"lr": [0.05]}, hyper={"weight_decay": 0.1}), tmp_path / "b").data
    assert (found["diverged"].values[0] > 0).tolist() == [False, True, True]
    assert np.isnan(found["norm"].values[0, 1:]).all() and np.isnan(found["norm_exact"].values[0, 1:]).all()
    assert same(found.isel(lr=[0]), alone)


def test_schedule_layer_and_replicate_axes(tmp_path):
    axes = {"schedule": ["constant", "cosine"], "batch": [8, 32], "fan_in": [8, 16]}
    found = sweep(config(optimizer=["adamw"], axes=axes, hyper={"lr": 0.05, "weight_decay": 1.0}, replicates=2), tmp_path)
    data = found.data
    assert data["norm"].shape == (1, 2, 2, 2, 2) and np.isfinite(data["norm"]).all()
    assert np.isnan(data["norm_exact"].sel(schedule="cosine")).all() and not data["settled"].sel(schedule="cosine").any()
    assert (data["norm"].sel(replicate=0) != data["norm"].sel(replicate=1)).all()
    falling = found.traces()["rotation"].sel(schedule="cosine").mean(("optimizer", "batch", "fan_in", "replicate"))
    assert falling[-1] < 0.1 * falling[5] and falling.sizes == {"time": 40}


@pytest.mark.slow
def test_faithful_gradients_and_a_rule_of_ones_own(tmp_path):
    own = tmp_path / "mine.py"
    text = (
        "from rwsim.optimizers import UpdateRule\n\n\nclass Mine(UpdateRule):\n"
        "    name, hyper = 'mine', {'lr': ..., 'weight_decay': ...}\n\n    @staticmethod\n"
        "    def update(grad, state, hyper, xp):\n"
        "        return {'param': (1 - hyper.lr * hyper.weight_decay) * state.param - hyper.lr * grad}\n"
    )
    own.write_text(text)
    given = config(optimizer=[f"{own}:Mine"], axes={"lr": [0.5, 1.0]}, hyper={"weight_decay": 0.02}, gradient="faithful")
    found = sweep(given, tmp_path / "out")
    assert np.isfinite(found.data["norm"]).all() and np.isfinite(found.data["norm_mcse"]).all()
    own.write_text(text.replace("- hyper.lr * grad", "- 2 * hyper.lr * grad"))
    other = Grid.of(given)
    assert other.keys("reference", "cpu")[0] not in found.keys


# Keeping


def test_the_ledger_keeps_every_bit(tmp_path):
    rng = np.random.default_rng(0)
    outcome = Outcome(30, True, 0, rng.standard_normal((3, 5)), np.where(rng.random((3, 7)) < 0.2, np.nan, rng.random((3, 7))))
    ledger = Ledger(tmp_path, {"a": 1}, resume=False)
    ledger.put([("k", outcome)])
    (found, missing) = ledger.get(["k", "z"])
    assert missing is None and found.to_bytes() == outcome.to_bytes() and ledger.keys() == {"k"}
    with pytest.raises(InvalidArgument, match="in use by another sweep"):
        Ledger(tmp_path, {"a": 1}, resume=True)
    ledger.close()
    for data in (b"", outcome.to_bytes()[:-8], outcome.to_bytes() + b"\0" * 8):
        with pytest.raises(ValueError, match="no outcome"):
            Outcome.from_bytes(data)


def test_resume_walks_what_is_missing(whole, tmp_path, one_at_a_time):
    """Stopped by Ctrl-C after five points."""
    done = []

    def stop(count: int) -> None:
        done.append(count)
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(WalkInterrupted, match=r"interrupted: \d+ of 16 points are kept in .*; go on with --resume"):
        sweep(config(), tmp_path, progress=stop)
    with pytest.raises(InvalidArgument, match=r"`out` must not hold a sweep already.*--resume"):
        sweep(config(), tmp_path)
    plans = []
    found = sweep(config(), tmp_path, resume=True, planned=lambda plan, kept: plans.append((plan.points, kept)))
    assert same(found.data, whole) and plans[0][1] >= 5 and sum(plans[0]) == 16
    again = sweep(config(), tmp_path, resume=True, planned=lambda plan, kept: pytest.fail("nothing is left to walk"))
    assert same(again.data, whole)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(("-shm", "-wal"))}


@pytest.mark.parametrize("harm", ["truncated", "foreign", "text", "newer", "damaged", "changed"])
def test_a_ledger_that_cannot_be_gone_on_with_is_left_alone(tmp_path, capsys, harm):
    sweep(config(), tmp_path)
    path, arguments = tmp_path / "ledger.sqlite", ["sweep", "--resume", "--out", str(tmp_path), "--quiet"]
    expected = "must hold a whole ledger"
    if harm == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif harm == "text":
        path.write_text("not a database, but long enough to be looked at\n" * 100)
    elif harm == "damaged":
        data = bytearray(path.read_bytes())
        data[4096:8192] = os.urandom(4096)
        path.write_bytes(data)
    elif harm == "changed":
        arguments += ["--steps", "500"]
        expected = "`steps` must be what it was to resume, 400, got 500"
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA application_id=7" if harm == "foreign" else "PRAGMA user_version=99")
        expected = "another program's" if harm == "foreign" else "a newer rwsim wrote it"
    before = bytes_of(tmp_path)
    assert command(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and error.startswith("rwsim: error:")
    assert bytes_of(tmp_path) == before


def test_a_changed_axis_is_named(tmp_path):
    sweep(config(), tmp_path)
    with pytest.raises(InvalidArgument, match="`axes` must be what it was to resume"):
        sweep(config(axes={"lr": [0.1], "weight_decay": [0.1]}), tmp_path, resume=True)
    assert identity_of(tmp_path / "ledger.sqlite")["axes"] == SMALL["axes"]


@pytest.mark.parametrize("place", ["file", "below a file", "no permission"])
def test_an_unwritable_place_is_refused_before_the_walk(tmp_path, capsys, place):
    (tmp_path / "file").write_text("mine")
    out = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "no permission": Path("/proc/rwsim")}[place]
    assert command(["sweep", "--optimizer", "adamw", "--axis", "lr=0.1,0.2", "--weight-decay", "1", "--out", str(out)]) in (2, 3)
    error = capsys.readouterr().err
    assert error.startswith("rwsim: error:") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


_SWEEP = """
import resource, signal, sys
from dataclasses import replace
from rwsim.cli import run
import rwsim.plots as plots
import rwsim.sweeps.run as running
import rwsim.sweeps.sweep as s
plan = running.plan
s.plan = lambda *given: replace(plan(*given), batch=5)
plots.save_sweep = lambda *given: []  # seconds, and other tests look at them
ready, largest, *arguments = sys.argv[1:]
if int(largest):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
open(ready, "w").close()
sys.exit(run(arguments))
"""


def started(out: Path, *arguments: str, largest_file: int = 0) -> subprocess.Popen:
    """`rwsim sweep` in a process of its own, in small batches; when it begins, there is a file `ready` beside `out`."""
    ready = out.parent / "ready"
    ready.unlink(missing_ok=True)
    return subprocess.Popen(
        [*python(), "-c", _SWEEP, str(ready), str(largest_file), "sweep", "--out", str(out), "--quiet", *arguments],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(rwsim.__file__).parent.parent)},
    )  # fmt: skip


SIZE = ("--fan-in", "16", "--neurons", "8", "--steps", "600")


def long(count: int) -> tuple[str, ...]:
    """A sweep of 20 times `count` points."""
    return ("--optimizer", "adamw", "--axis", "lr=1e-3:1e-1:20:log", "--axis", f"weight_decay=0.1:1:{count}:log", *SIZE)


def survive(tmp_path: Path, count: int, kills: int, signals: tuple[int, ...]) -> None:
    """Kill a sweep of 20 times `count` points at random moments, resume it each time, and compare with one that was left alone."""
    whole = sweep(
        SweepConfig.checked(
            optimizer=["adamw"], axes={"lr": "1e-3:1e-1:20:log", "weight_decay": f"0.1:1:{count}:log"}, fan_in=16, neurons=8, steps=600
        ),
        tmp_path / "whole",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    out, kept, ended = tmp_path / "out", 0, 0
    for attempt in range(kills):
        process = started(out, *(("--resume",) if (out / "ledger.sqlite").exists() else ()), *long(count))
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(2 * float(rng.random()))
        number = signals[attempt % len(signals)]
        process.send_signal(number)
        error = process.communicate(timeout=120)[1]
        if process.returncode not in (0, -signal.SIGKILL):
            assert number == signal.SIGINT and process.returncode == 3 and error.startswith("rwsim: error: interrupted"), error
        ended += process.returncode == 0
        if not (out / "ledger.sqlite").exists():
            continue
        ledger = Ledger(out, identity_of(out / "ledger.sqlite") or {}, resume=True)
        now = len(ledger.keys())
        ledger.close()
        assert now >= kept
        kept = now
    assert ended < kills, "every run was over before it was killed"
    process = started(out, "--resume", *long(count))
    assert process.communicate(timeout=200)[1] == "" and process.returncode == 0
    with xarray.open_dataset(out / "sweep.nc") as found:
        assert same(found.load(), xarray.open_dataset(tmp_path / "whole" / "sweep.nc").load())
    assert whole.data.sizes["lr"] == 20


def test_a_killed_sweep_goes_on(tmp_path):
    survive(tmp_path, 4, 2, (signal.SIGKILL, signal.SIGINT))


@pytest.mark.slow
def test_a_sweep_survives_ten_kills(tmp_path):
    survive(tmp_path, 10, 10, (signal.SIGKILL,))


def test_a_full_disk_ends_the_sweep_and_spares_the_ledger(tmp_path):
    """The kernel refuses files beyond 40 kB, as a full disk would."""

    process = started(tmp_path / "out", *long(4), largest_file=40_000)
    error = process.communicate(timeout=200)[1]
    assert process.returncode == 3 and "cannot keep results in" in error and error.count("\n") == 1, error
    process = started(tmp_path / "out", "--resume", *long(4))
    assert process.communicate(timeout=200)[1] == "" and process.returncode == 0


def test_a_small_tmpfs(tmp_path):
    place = tmp_path / "full"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with pytest.raises(StorageError, match=r"cannot keep results in .*full.*--resume"):
            sweep(config(neurons=64, axes={"lr": "1e-3:1e-1:40:log", "weight_decay": [0.1, 1.0]}), place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_results_replace_the_old_ones_only_when_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), result.whole(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    with pytest.raises(StorageError, match=r"cannot write .*x\.csv: No space left"), result.whole(path) as draft:
        draft.write_text("half")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# Executors


class _Pool:
    """Anything with `submit` will do."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.submit = self.pool.submit


def test_any_executor(whole, tmp_path):
    pool = _Pool()
    assert same(sweep(config(), tmp_path / "a", executor=pool, workers=2).data, whole)
    pool.pool.shutdown()
    for chosen, message in (("thread", "must be one of local, processes, dask"), (3, "must have a method submit")):
        with pytest.raises(InvalidArgument, match=message):
            sweep(config(), tmp_path / f"b{chosen}", executor=chosen)
    with pytest.raises(InvalidArgument, match="`workers` must be at least 1"):
        sweep(config(), tmp_path / "c", executor="processes", workers=0)


_KILLER = """
import os, signal
from rwsim.sweeps.run import walk_task

def fatal(task):
    flag = os.environ["RWSIM_TEST_FLAG"]
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return walk_task(task)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_survive_the_death_of_one(whole, tmp_path, one_at_a_time, monkeypatch):
    """The worker is killed by its first task; this batch, and the one that waited and went down with it, are walked by another.

    One worker: each takes as long to begin as all of the walk.
    """
    (tmp_path / "killer.py").write_text(_KILLER)
    monkeypatch.setenv("RWSIM_TEST_FLAG", str(tmp_path / "killed"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(rwsim.__file__).parent.parent}")
    monkeypatch.syspath_prepend(str(tmp_path))
    import killer  # type: ignore[import-not-found]

    monkeypatch.setattr(running, "walk_task", killer.fatal)
    found = sweep(config(), tmp_path / "out", executor="processes", workers=1)
    assert (tmp_path / "killed").exists() and same(found.data, whole)


@pytest.mark.slow
def test_dask_survives_the_death_of_a_worker(whole, tmp_path, one_at_a_time):
    distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        victims = list(client.run(os.getpid).values())

        def kill(done: int) -> None:
            if victims and done == 3:
                os.kill(victims.pop(), signal.SIGKILL)

        found = sweep(config(), tmp_path, executor="dask", scheduler=cluster.scheduler_address, workers=2, progress=kill)
    assert len(victims) == 1 and same(found.data, whole)


def test_a_task_that_keeps_killing_is_given_up(tmp_path):
    from concurrent.futures import BrokenExecutor, Future

    class Dying:
        def submit(self, *_):
            future: Future = Future()
            future.set_exception(BrokenExecutor("dead"))
            return future

    with pytest.raises(rwsim.errors.RwsimError, match="a worker ended 3 times at "):
        sweep(config(), tmp_path, executor=Dying())


def test_a_plan_tells_what_it_takes(tmp_path, monkeypatch):
    plans = []
    sweep(config(), tmp_path / "a", planned=lambda plan, kept: plans.append(plan))
    assert "16 points, 5.1e+04 neuron-steps: about 0:00:01 (blocked engine on cpu)" in str(plans[0])
    monkeypatch.setattr(running, "_free", lambda kind: 1e5)
    sweep(config(), tmp_path / "b", planned=lambda plan, kept: plans.append(plan))
    assert plans[1].batch < plans[0].batch
    monkeypatch.setattr(running, "_free", lambda kind: 1e3)
    with pytest.raises(InvalidArgument, match=r"must let one point fit into memory: .* take fewer neurons"):
        sweep(config(), tmp_path / "c")


def test_an_engine_that_does_not_carry_the_sweep_is_named(tmp_path):
    with pytest.raises(Unavailable, match="`engine` blocked does not carry"):
        sweep(config(engine="blocked", gradient="faithful"), tmp_path)


def test_xarray_is_missed_before_the_walk(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(Unavailable, match=r"pip install 'rwsim\[sweep\]'"):
        sweep(config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Command line and logs


def test_the_command_writes_what_it_says(tmp_path, capsys):
    out, table = tmp_path / "out", tmp_path / "points.json"
    arguments = ["sweep", "--optimizer", "adamw", "--axis", "lr=0.01,0.1", "--axis", "weight_decay=0.1:1:2:log", "--fan-in", "16"]
    arguments += ["--neurons", "8", "--steps", "400", "--out", str(out), "--csv", "--traces", "--json", str(table)]
    assert command(arguments) == 0
    told = capsys.readouterr().out
    assert "4 points" in told and "median" in told
    for name in ("ledger.sqlite", "sweep.nc", "sweep.csv", "traces.nc", "sweep_adamw.png"):
        assert name in told and (out / name).stat().st_size > 0
    rows = held("sweep", table)
    assert rows["meta"]["steps"] == 400 and len(rows["points"]) == 4 and rows["points"][1]["weight_decay"] == 1.0
    lines = (out / "sweep.csv").read_text().splitlines()
    assert lines[0].startswith("optimizer,lr,weight_decay,norm,rotation,rms_update,norm_mcse") and len(lines) == 5
    with xarray.open_dataset(out / "traces.nc") as traces:
        assert traces["norm"].sizes == {"optimizer": 1, "lr": 2, "weight_decay": 2, "time": 40}
    shutil.copy(out / "sweep.nc", tmp_path / "first.nc")
    assert command(["sweep", "--resume", "--out", str(out), "--quiet"]) == 0
    assert same(xarray.open_dataset(tmp_path / "first.nc").load(), xarray.open_dataset(out / "sweep.nc").load())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "lr=1,2"], "`optimizer` must be given"),
        (["--optimizer", "adamw"], "`axis` must be given"),
        (["--optimizer", "adamw", "--axis", "lr"], "`axis` must be NAME=LOW:HIGH:COUNT"),
        (["--optimizer", "adamw", "--axis", "lr=1,2", "--axis", "lr=3,4"], "`axis` must be given once for each name"),
        (["--resume"], "must hold a sweep to resume"),
        (["nothing.toml"], "must be a TOML file"),
        (["--optimizer", "adamw", "--axis", "lr=1:2:1e12"], "must be a range or a list"),
    ],
)
def test_bad_usage(tmp_path, capsys, arguments, message):
    assert command(["sweep", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_log_is_laid_over_the_predictions(tmp_path, capsys):
    log = tmp_path / "runs.csv"
    log.write_text("run,lr,weight_decay,angle_deg,norm\na,0.01,0.1,2.5,1.5\nb,0.02,0.1,,2.0\n")
    data = read_log(log, config(optimizer=["adamw"], hyper={"betas": [0.9, 0.99]}, axes={"lr": [1]}, gamma="uniform"))
    assert data["norm"].sizes == {"optimizer": 1, "point": 2} and "settled" not in data and "rms_update" not in data
    assert float(data["rotation"][0, 0]) == pytest.approx(math.radians(2.5)) and np.isnan(data["rotation"][0, 1])
    expected = rwsim.predict("adamw", lr=0.02, weight_decay=0.1, betas=(0.9, 0.99), fan_in=16, batch=32, neurons=8)
    assert float(data["norm_exact"][0, 1]) == pytest.approx(expected.exact.norm)
    out = tmp_path / "out"
    assert command(["sweep", "--optimizer", "adamw", "--log", str(log), "--out", str(out), "--csv"]) == 0
    assert "norm: median" in capsys.readouterr().out and (out / "sweep_adamw.png").exists() and len((out / "sweep.csv").read_text()) > 0
    for text, message in (
        ("lr,weight_decay,norm\n0.1,0.1,x\n", "`log, line 2, norm` must be a number, got 'x'"),
        ("lr,weight_decay,norm\n,0.1,1\n", "`log, line 2, lr` must be a finite number"),
        ("lr,norm\n0.1,1\n", "`weight_decay` must be given"),
        ("lr,weight_decay\n0.1,0.1\n", "must hold measurements"),
        ("lr,weight_decay,angle,rotation\n0.1,0.1,1,1\n", "must give a quantity once"),
        ("", "must hold measurements"),
    ):
        log.write_text(text)
        with pytest.raises(InvalidArgument, match=message):
            read_log(log, config(optimizer=["adamw"], axes={"lr": [1]}))


def test_reduction_does_not_see_its_company():
    from rwsim.walk.simulate import simulate

    walk = simulate("adamw", lr=[0.01, 0.02, 0.05], weight_decay=0.5, fan_in=16, neurons=4, steps=405, window=10).walk
    one = simulate("adamw", lr=[0.02], weight_decay=0.5, fan_in=16, neurons=4, steps=405, window=10).walk
    assert reduce(walk)[1].to_bytes() == reduce(one)[0].to_bytes()


# What a large sweep costs beside its walks


def test_ten_thousand_points_cost_the_host_little(monkeypatch):
    """What a GPU would wait for is done once for each value, rule or setting, not for each point."""
    counts: collections.Counter = collections.Counter()

    def counted(owner, name):
        inner = getattr(owner, name)

        def call(*given, **options):
            counts[name] += 1
            return inner(*given, **options)

        monkeypatch.setattr(owner, name, staticmethod(call) if isinstance(owner, type) else call)

    counted(UpdateRule, "_validated")
    counted(json, "dumps")
    counted(equilibrium, "predict_equilibrium")
    counted(WalkSettings, "checked")
    axes = {"lr": "1e-4:1e-1:100:log", "weight_decay": "1e-2:10:100:log"}
    grid = Grid.of(SweepConfig(optimizer=["adamw"], axes=axes, fan_in=16, neurons=2, steps=100))
    assert len(set(grid.keys("fused", "cuda"))) == len(grid) == 10_000
    assert np.isfinite(result.Predicted(grid).values["norm_exact"]).all()
    (task, _), *_ = running.tasks(grid, grid.points, "fused", "cuda", 256)
    before = counts["_validated"]
    assert before <= 220
    job = task.job()
    assert len(set(job.keys())) == 256 and counts["_validated"] - before <= 110
    assert counts["dumps"] <= 20 + 257 and counts["predict_equilibrium"] == 0 and counts["checked"] <= 2


def test_outcomes_are_not_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "get", lambda *_: pytest.fail("read back"))
    assert np.isfinite(sweep(config(), tmp_path).data["norm"]).all()


def test_the_last_batches_are_smaller():
    grid = Grid.of(config(optimizer=["adamw", "lion"], axes={"lr": "1e-3:1e-1:50:log", "weight_decay": "0.1:1:20:log"}))
    work = list(running.tasks(grid, grid.points, "fused", "cuda", 64, 4))
    sizes = [len(some) for _, some in work]
    assert [i for _, some in work for i in some] == list(range(2000))
    assert sizes[0] == 64 and sizes[-2] == 16 and max(sizes[-5:]) <= 24 and len(sizes) < 45
    assert all(task.hyper[0]["lr"] == grid.points[some[0]].rule.values.lr for task, some in work)
    assert [len(some) for _, some in running.tasks(grid, grid.points, "fused", "cuda", 64)] == [*[64] * 15, 40] * 2


def test_ctrl_c_does_not_wait_for_predictions(monkeypatch):
    class Endless:
        def __init__(self, grid, heard):
            while True:
                heard()
                time.sleep(0.001)

    monkeypatch.setattr(result, "Predicted", Endless)
    interval, began = sys.getswitchinterval(), time.monotonic()
    with pytest.raises(KeyboardInterrupt), sweeping._aside(Grid.of(config())):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 10 and sys.getswitchinterval() == interval


def test_errors_come_back_from_worker_processes():
    """With what they hold."""
    for error in (
        InvalidArgument("lr", "must lie in [0, inf)", -1.0, "give one"), UnsupportedRule("mine", "a sign"), StorageError("full"),
        WalkDiverged("NaN", 3, None, (1,)), WalkInterrupted("interrupted", 7, None),
    ):  # fmt: skip
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cards_and_batches_do_not_show(tmp_path, monkeypatch):
    """On all visible GPUs, and on one in batches of three, with points that diverge."""
    given = config(device="cuda", axes={"lr": [0.05, 0.1, 80.0, 90.0], "weight_decay": [0.1, 1.0]}, optimizer=["sgdm", "adamw"])
    whole = sweep(given, tmp_path / "all").data
    plan = running.plan
    monkeypatch.setattr("rwsim.sweeps.sweep.plan", lambda *given: replace(plan(*given), batch=3))
    monkeypatch.setattr(running, "devices", lambda kind: ("cuda:0",))
    assert same(sweep(given, tmp_path / "one").data, whole)
    assert whole.attrs["engine"] == "fused" and (whole["diverged"].sel(optimizer="sgdm") > 0).any()
