"""Where a probe's records go: arrays, files, loggers, checkpoints."""

import csv
import io
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from rwsim import DynamicsProbe
from rwsim.errors import InvalidArgument, StorageError, Unavailable
from rwsim.probe import CSVWriter, TensorBoardWriter, WandbWriter
from rwsim.probe.quantities import QUANTITIES, over_neurons, running
from rwsim.probe.reading import PREDICTIONS, TRANSIENTS
from tests.forked import python
from tests.probing import WALKS, Weight, data, learn, small


def run(steps=12, every=2, **options):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with DynamicsProbe(model, optimizer, every=every, flush=2, **options) as probe:
        learn(model, optimizer, data(steps))
    return probe


@pytest.fixture(scope="module")
def probe():
    with torch.random.fork_rng(devices=[]):
        return run()


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Arrays.


def test_xarray(probe):
    found = probe.to_xarray()
    assert found.sizes == {"step": 6, "layer": 3, "neuron": 6 + 5 + 3}
    assert found["step"].values.tolist() == [1, 3, 5, 7, 9, 11]
    assert {*QUANTITIES, *PREDICTIONS, *TRANSIENTS, *(f"neuron_{name}" for name in QUANTITIES)} == set(found.data_vars)
    assert found["rotation"].attrs["units"] == "radian" and found["neuron_norm"].attrs["units"] == "1"
    assert all(variable.attrs["long_name"] for variable in found.data_vars.values())
    # One layer's neurons, of layers that differ in how many they have.
    name = found["layer"].values[int(found["neuron_layer"][-1])]
    assert name == "5.weight" and found["fan_in"].sel(layer=name) == 5
    own = found["neuron_norm"].values[:, found["neuron_layer"].values == 2]
    np.testing.assert_allclose(own, probe.read("5.weight").found["norm"], rtol=1e-6)
    np.testing.assert_allclose(found["norm"].sel(layer=name), np.sqrt((own.astype(float) ** 2).mean(1)), rtol=1e-6)
    np.testing.assert_allclose(found["rotation"].sel(layer=name), probe.read(name).found["rotation"].mean(1))
    assert found["rule"].values.tolist() == ["adamw"] * 3


def test_netcdf(probe, tmp_path):
    import xarray

    probe.to_netcdf(tmp_path / "records.nc")
    with xarray.open_dataset(tmp_path / "records.nc", engine="scipy") as found:
        xarray.testing.assert_equal(found.load(), probe.to_xarray())


def test_without_xarray(probe, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="to_xarray needs xarray"):
        probe.to_xarray()


def test_nothing_is_recorded_yet():
    model = small()
    probe = DynamicsProbe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert probe.steps == [] and probe.to_xarray().sizes["step"] == 0
    with pytest.raises(InvalidArgument, match="`probe` must have measured at least 8 steps, got 0"):
        probe.diagnose()


def test_averages_over_neurons_and_time():
    values = np.array([[3.0, 4.0, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(over_neurons(values, "rms"), [math.sqrt(12.5), np.nan])
    np.testing.assert_allclose(over_neurons(values, "mean"), [3.5, np.nan])
    series = np.arange(200.0)[:, None]
    np.testing.assert_allclose(running(series, 10)[0][-1], 199 - 9, rtol=1e-6)
    # In two parts.
    first, carried = running(series[:70], 10)
    np.testing.assert_array_equal(np.concatenate([first, running(series[70:], 10, carried)[0]]), running(series, 10)[0])
    np.testing.assert_allclose(running(series, 1)[0][:, 0], series[:, 0])


# CSV.


def test_csv(tmp_path):
    path = tmp_path / "records.csv"
    probe = run(writers=CSVWriter(path))
    rows = table(path)
    assert len(rows) == 6 * 3 and [int(row["step"]) for row in rows[::3]] == [1, 3, 5, 7, 9, 11]
    found, last = probe.read("3.weight"), rows[-2]
    assert last["layer"] == "3.weight"
    for name in ("norm", "rotation", "lambda_u"):
        np.testing.assert_allclose(float(last[name]), found.measured[name][-1], rtol=1e-6)
        np.testing.assert_allclose(float(last[f"{name}_q50"]), np.median(found.found[name][-1]), rtol=1e-6)
    for name in PREDICTIONS:
        np.testing.assert_allclose(float(last[name]), found.predicted[name][-1], rtol=1e-6, err_msg=name)
    # Unknown is empty: a first step has no momentum.
    assert rows[0]["momentum_grad_angle"] == ""


def test_a_killed_run_leaves_a_readable_file(tmp_path):
    code = """
import os, sys
from tests.test_probe_records import *
class Dying(torch.optim.AdamW): pass
model = small()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
probe = DynamicsProbe(model, optimizer, every=1, flush=2, writers=CSVWriter(sys.argv[1]))
learn(model, optimizer, data(7))
os._exit(9)
"""
    path = tmp_path / "records.csv"
    done = subprocess.run([*python(), "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    rows = table(path)
    assert [int(row["step"]) for row in rows[::3]] == [1, 2, 3, 4, 5, 6]
    assert all(None not in row.values() and row["norm"] for row in rows)


def test_csv_refuses_what_would_be_lost(tmp_path):
    path = tmp_path / "records.csv"
    path.write_text("mine")
    with pytest.raises(InvalidArgument, match="must not be there yet"):
        CSVWriter(path)
    with pytest.raises(InvalidArgument, match="must be a file in a directory that is there"):
        CSVWriter(tmp_path / "no" / "records.csv")
    assert path.read_text() == "mine"


def test_a_full_disk_is_told(tmp_path):
    writer = CSVWriter("/dev/full", resume=True)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = DynamicsProbe(model, optimizer, every=1, writers=writer)
    learn(model, optimizer, data(1))
    with pytest.raises(StorageError, match="cannot write"):
        probe.flush()


# Loggers.


class Board:
    def __init__(self):
        self.scalars, self.flushed = {}, 0

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def flush(self):
        self.flushed += 1


def test_tensorboard():
    board = Board()
    probe = run(writers=[TensorBoardWriter(board)])
    assert board.flushed == 3
    np.testing.assert_allclose(board.scalars["3.weight/rotation", 5], probe.read("3.weight").measured["rotation"][2])
    assert ("3.weight/momentum_grad_angle", 1) not in board.scalars  # NaN is not logged


def test_wandb(monkeypatch):
    logged = []
    current = types.SimpleNamespace(log=logged.append)
    probe = run(writers=[WandbWriter(current)])
    assert [entry["probe/step"] for entry in logged] == [1, 3, 5, 7, 9, 11]
    np.testing.assert_allclose(logged[-1]["0.weight/predicted_rotation"], probe.read("0.weight").predicted["predicted_rotation"][-1])
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=current, __spec__=object()))
    assert WandbWriter().run is current


def test_loggers_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="needs the package tensorboard"):
        TensorBoardWriter(tmp_path)
    with pytest.raises(Unavailable, match="needs the package wandb"):
        WandbWriter()
    with pytest.raises(InvalidArgument, match="`target` must be a directory or a SummaryWriter"):
        TensorBoardWriter(3)
    with pytest.raises(InvalidArgument, match="`run` must be a W&B run"):
        WandbWriter("offline")


# Checkpoints.


@pytest.mark.parametrize("rule", ["adamw", "sgdm"])
def test_a_resumed_run_has_the_records_of_one_that_was_not_interrupted(rule, tmp_path):
    batches = data(11)

    def begin(path, resume=False):
        model = small()
        optimizer = WALKS[rule](list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return model, optimizer, scheduler, DynamicsProbe(model, optimizer, every=2, flush=2, writers=CSVWriter(path, resume=resume))

    def go(model, optimizer, scheduler, some):
        for x in some:
            learn(model, optimizer, [x])
            scheduler.step()

    whole, part = tmp_path / "whole.csv", tmp_path / "part.csv"
    *run, one = begin(whole)
    go(*run, batches)
    one.close()

    model, optimizer, scheduler, first = begin(part)
    go(model, optimizer, scheduler, batches[:6])
    kept = io.BytesIO()
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "probe": first}
    torch.save({name: held.state_dict() for name, held in states.items()}, kept)
    go(model, optimizer, scheduler, batches[6:9])  # lost: it goes on from the checkpoint
    first.close()
    with part.open("a") as file:
        file.write("11,0.wei")  # a line that was being written

    kept.seek(0)
    saved = torch.load(kept, weights_only=True)
    model, optimizer, scheduler, second = begin(part, resume=True)
    for name, held in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler), ("probe", second)):
        held.load_state_dict(saved[name])
    go(model, optimizer, scheduler, batches[6:])
    second.close()
    assert second.steps == one.steps == [1, 3, 5, 7, 9, 11]
    for layer in one.layers:
        np.testing.assert_array_equal(one._history.table(layer), second._history.table(layer))
    assert one.to_xarray().identical(second.to_xarray())
    assert part.read_text() == whole.read_text()


def test_an_empty_state():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = DynamicsProbe(model, optimizer).state_dict()
    with DynamicsProbe(model, optimizer, every=1) as probe:
        probe.load_state_dict(state)
        learn(model, optimizer, data(2))
    assert probe.steps == [1, 2]


def test_a_state_of_another_probe_is_refused():
    probe = run()
    other = Weight(3, 4)
    optimizer = torch.optim.SGD([other.weight], lr=0.1)
    with pytest.raises(InvalidArgument, match="`state` must hold 3 vectors of weight"):
        DynamicsProbe(other, optimizer).load_state_dict(probe.state_dict())
    with pytest.raises(InvalidArgument, match="`state` must be of this version of rwsim"):
        probe.load_state_dict({**probe.state_dict(), "columns": ["ww"]})
