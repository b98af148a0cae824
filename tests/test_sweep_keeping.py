"""That a sweep survives whatever happens to it: kills, full disks, damaged ledgers."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import rwsim
from rwsim.cli import run as command
from rwsim.errors import InvalidArgument, StorageError, WalkInterrupted
from rwsim.sweeps import result
from rwsim.sweeps.grid import SweepConfig
from rwsim.sweeps.ledger import Ledger, identity_of
from rwsim.sweeps.outcome import Outcome
from rwsim.sweeps.sweep import sweep
from tests.forked import python
from tests.sweeping import SMALL, config, same

xarray = pytest.importorskip("xarray", reason="the sweep extra is not installed")


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
