"""rwsim sweep as its users meet it, and logs of their own runs."""

import math
import shutil

import numpy as np
import pytest

import rwsim
from rwsim.cli import run as command
from rwsim.errors import InvalidArgument
from rwsim.sweeps.log import read_log
from tests.published import held
from tests.sweeping import config, same

xarray = pytest.importorskip("xarray", reason="the sweep extra is not installed")


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
