"""The command line as its users meet it: exit statuses, one-line errors, files, Ctrl-C."""

import json
import signal
import subprocess
import sys

import pytest

from rwsim.cli import FAILS, HOLDS, INTERNAL, USAGE, run
from rwsim.walk.measure import Recorder
from tests.forked import python
from tests.published import held

QUICK = ["--optimizer", "adamw", "--lr", "0.02", "--weight-decay", "2", "--betas", "0.9", "0.99", "--steps", "1500", "--neurons", "64"]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_validate_holds_and_writes_everything(tmp_path, capsys):
    assert run(["validate", *QUICK, "--json", "deep/records.json", "--out", "results"]) == HOLDS
    out = capsys.readouterr().out
    assert out.count("agrees") == 3 and "adamw lr=0.02 weight_decay=2 betas=0.9/0.99" in out and "nothing" not in out
    assert max(map(len, out.splitlines())) <= 80
    document = held("validate", tmp_path / "deep" / "records.json")
    assert document == json.loads((tmp_path / "results" / "validation.json").read_text()) and document["meta"]["passed"]
    assert (tmp_path / "results" / "walk.png").read_bytes()[:4] == b"\x89PNG"
    rows = (tmp_path / "results" / "walk.csv").read_text().splitlines()
    assert rows[0] == "optimizer,step,norm,rotation,rms_update" and len(rows) >= 16  # it walks on past its steps, as far as the margin asks


def test_quiet_says_nothing(capsys):
    assert run(["validate", *QUICK, "--quiet"]) == HOLDS
    assert capsys.readouterr() == ("", "")


def test_undecided_exits_one(capsys):
    assert run(["validate", "--steps", "300", "--neurons", "16", "--fan-in", "16"]) == FAILS
    out = " ".join(capsys.readouterr().out.split())
    assert "agrees" not in out.split("Verdict:")[0] and "undecided: not in equilibrium" in out


BAD_USAGE = {
    "--optimizer sgdm --lr -1": "`lr` must lie in [0, inf), got -1.0",
    "--optimizer sgdm --lr nan": "`lr` must lie in [0, inf), got nan",
    "--optimizer sgdm --weight-decay -1": "`weight_decay` must lie in",
    "--optimizer sgdm --lr 0": "`lr` is 0: sgdm then has no equilibrium",
    "--optimizer adamw --weight-decay 0": "`weight_decay` is 0",
    "--optimizer adamw --betas 0.9 1.0": "`betas[1]` must lie in [0, 1), got 1.0",
    "--optimizer sgdm --momentum 1": "`momentum` must lie in [0, 1)",
    "--optimizer adam": "must be one of sgdm, adamw, adam_l2, lion",
    "--lr 0.1": "`lr` needs exactly one optimizer",
    "--batch 3": "`batch`",
    "--fan-in 1": "`fan_in`",
    "--steps 0": "`steps`",
    "--steps 1.5": "must be a whole number",
    "--steps many": "--steps",
    "--steps 1e4": "must be a whole number, got '1e4'; write 10000.",
    "--steps 1e24": "must be a whole number, got '1e24'; for example 15000.",
    f"--steps {10**24}": "`steps` must be less than or equal to 1000000000",
    f"--neurons {10**24}": "`neurons` must be less than or equal to 10000000, got 1000000000000000000000000; the default is 128.",
    f"--fan-in {10**24}": "`fan_in` must be less than or equal to 10000000",
    "--json /proc/x.json": "`--json` must be writable (",
    "--out /proc/x": "`--out` must be writable (",
    f"--out {'x' * 300}": "`--out` must be writable (File name too long)",
    "--neurons 0": "`neurons`",
    "--layers 0": "`layers`",
    "--margin 0": "`margin`",
    "--seed -1": "`seed`",
    "--loss-scale nan": "`loss_scale`",
    "--engine fused": "`engine` fused does not carry device cpu; use engine reference or blocked",
    "--engine blocked --gradient faithful": "`engine` blocked does not carry the faithful gradient; use engine reference",
    "--gradient odd": "marginal",
    "--betas 0.9": "betas",
    "--bogus 3": "--bogus",
    "--out file": "`--out` must be a directory",
    "--out file/deep/er": "below the file",
    "--json file/x": "below the file",
    "--json folder": "`--json` must be a file",
}


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_two(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a user's machine: no interpreter
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert run(["validate", *arguments.split()]) == USAGE
    out, err = capsys.readouterr()
    assert err.startswith("rwsim: error: ") and err.count("\n") == 1 and BAD_USAGE[arguments] in err and out == ""
    # Nothing was created, nothing was lost.
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"} and (tmp_path / "file").read_text() == "mine"


def test_unknown_commands_and_help(capsys):
    assert run(["frobnicate"]) == USAGE
    assert "frobnicate" in capsys.readouterr().err
    assert run(["validate", "--help"]) == HOLDS
    assert "--weight-decay" in capsys.readouterr().out
    assert run(["--version"]) == HOLDS


def test_divergence_exits_one_and_keeps_what_was_measured(tmp_path, capsys):
    assert run(["validate", "--optimizer", "sgdm", "--lr", "1e30", "--steps", "300"]) == FAILS
    assert "NaN or Inf at step 1 in config 0, SGDM(lr=1e+30" in capsys.readouterr().err
    assert json.loads((tmp_path / "rwsim-validate" / "validation.json").read_text())["meta"]["status"] == "WalkDiverged"


def test_an_internal_error_is_no_verdict(monkeypatch, capsys):
    import rwsim.validate  # noqa: F401 - loads the module that is patched below

    monkeypatch.setattr(sys.modules["rwsim.validate"], "predict_equilibrium", lambda *_: 1 / 0)
    assert run(["validate", *QUICK]) == INTERNAL
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured_and_exits_three(tmp_path):
    """A real signal to a real process, when its first optimizer is done and others still walk."""
    command = [*python(), "-m", "rwsim.cli", "validate", "--steps", "4000", "--neurons", "16", "--fan-in", "16"]
    process = subprocess.Popen([*command, "--json", "records.json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:  # the first table is printed when its walk is done
        if "rms_update" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == INTERNAL and "interrupted" in err and "Traceback" not in err
    document = held("validate", tmp_path / "records.json")
    assert document["meta"]["status"] == "WalkInterrupted" and len(document["records"]) in (3, 6, 9, 12)


def test_an_interrupted_walk_is_written_too(tmp_path, monkeypatch, capsys):
    add = Recorder.add

    def interrupted(self, *sizes):
        if len(self.lengths) == 2 and self.filled == 50:
            raise KeyboardInterrupt
        add(self, *sizes)

    monkeypatch.setattr(Recorder, "add", interrupted)
    assert (
        run(["validate", "--optimizer", "lion", "--steps", "1000", "--neurons", "4", "--fan-in", "4", "--engine", "reference"]) == INTERNAL
    )
    assert "interrupted at step 251 of 1000" in capsys.readouterr().err
    rows = (tmp_path / "rwsim-validate" / "walk.csv").read_text().splitlines()
    assert all("(ended early)" in row for row in rows[1:])
    assert [row.split(",")[1] for row in rows[1:4]] == ["100", "200", "250"]
