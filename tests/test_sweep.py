"""Sweeps: numbers depend on nothing but the point, and what a large sweep costs beside its walks."""

import collections
import importlib
import json
import pickle
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import rwsim
from rwsim.config import WalkSettings
from rwsim.errors import InvalidArgument, StorageError, UnsupportedRule, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, UpdateRule
from rwsim.stats.burnin import truncation
from rwsim.sweeps import result
from rwsim.sweeps import run as running
from rwsim.sweeps.grid import Grid, SweepConfig
from rwsim.sweeps.ledger import Ledger
from rwsim.sweeps.outcome import reduce
from rwsim.sweeps.sweep import sweep
from rwsim.theory import equilibrium, transient
from rwsim.theory import symbols as sym
from rwsim.theory.equilibrium import predict_equilibria
from rwsim.theory.moments import linear_response
from rwsim.theory.noise import IdealWalk
from tests.statistics import Z
from tests.sweeping import config, same

# The package's attribute of this name is the function.
sweeping = importlib.import_module("rwsim.sweeps.sweep")
pytest.importorskip("xarray", reason="the sweep extra is not installed")


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
