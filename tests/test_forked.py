"""Forked processes are processes of their own: status, directory, environment, streams, modules, signals; and they end with who asked."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import rwsim
from tests.forked import python, together

ENV = {**os.environ, "PYTHONPATH": str(Path(rwsim.__file__).parent.parent), "MINE": "1"}


def run(*arguments: str, **options) -> tuple[int, str, str]:
    done = subprocess.run([*python(), *arguments], env=ENV, capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", 128 + 6, ""),
        ("import atexit; atexit.register(print, 'end', flush=True)", 0, ""),
    ],
)
def test_status_and_streams_are_those_of_a_process(code, status, error, tmp_path):
    found = run("-c", code)
    assert found[0] == status and found[2].endswith(error) and found[1] == ("end\n" if "atexit" in code else "")


def test_a_process_has_its_own_place_and_modules(tmp_path):
    (tmp_path / "mine.py").write_text("import os, sys; print(os.environ['MINE'], *sys.argv[1:], sys.stdin.read(), file=sys.stderr)")
    assert run("-m", "mine", "a", "b", cwd=tmp_path, input="in") == (0, "", "1 a b in\n")
    (tmp_path / "mine.py").write_text("where = __file__")
    code = "import sys; before = [m for m in sys.modules if 'rwsim' in m]; import mine, rwsim; print(before, mine.where, rwsim.__file__)"
    assert run("-c", code, cwd=tmp_path)[1].split() == ["[]", str(tmp_path / "mine.py"), rwsim.__file__]


def test_ctrl_c_reaches_the_process():
    code = "import time\ntry:\n  print('up', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n  raise SystemExit(7)"
    with subprocess.Popen([*python(), "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stdout.readline() == "up\n"
        client.send_signal(signal.SIGINT)
        assert client.wait(30) == 7


def test_side_by_side_each_says_what_it_says_and_all_end():
    assert together(["import sys; sys.stderr.write('a')", "print(1)"], 30) == ["a", ""]
    began = time.monotonic()
    assert [one[:6] for one in together(["import time; time.sleep(60)"] * 2, 1)] == ["killed"] * 2
    assert time.monotonic() - began < 30


def test_a_process_ends_with_who_asked_for_it(tmp_path):
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(f'{os.getpid()} '); time.sleep(60)"
    client, pid = subprocess.Popen([*python(), "-c", code], cwd=tmp_path), tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = Path("/proc") / pid.read_text().strip()
    assert worker.exists()
    client.kill()
    client.wait()
    while worker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.exists()
