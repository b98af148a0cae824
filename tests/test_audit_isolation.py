"""The audit outlives the class that it audits: each way to break the process is a finding, and the other probes still run."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rwsim
from rwsim.audit import PROBES, inside, isolation
from rwsim.audit.context import Result
from rwsim.errors import AuditInterrupted, InvalidArgument, Unavailable
from tests.forked import python

HEAD = """\
import ctypes, os, random, shutil, signal, subprocess, sys, time
import numpy as np
import torch

class Base(torch.optim.SGD):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

def hog():
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))

def spin():
    while True:
        pass
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """One short scene a probe is enough here, and a second probe that any optimizer holds."""
    monkeypatch.chdir(tmp_path)
    first = SimpleNamespace(TITLE="first", scenes=_armed)
    room = SimpleNamespace(TITLE="last", run=_last)
    monkeypatch.setattr(inside, "PROBES", {"P1": first, "P2": room})
    monkeypatch.setattr(importlib.import_module("rwsim.audit.audit"), "PROBES", {"P1": first, "P2": room})


def _armed(make):
    """P1, in which the faulty class misbehaves; when the audit tries what it takes it behaves."""
    os.environ["ARMED"] = "1"  # in the child
    return PROBES["P1"].scenes(make)


def _last(context):
    """Holds, and says which process it ran in."""
    os.environ.pop("ARMED", None)
    return Result(measured={"pid": os.getpid()})


def audited(step: str, *, before: str = "", start: str = "pass", seconds: float = 20.0, memory: float = 16.0, name: str = "opt.py"):
    """Audit a good SGD that also does `before` at import, `start` in its constructor, and `step` at each step of P1."""
    text = f"""{HEAD}
{before}

class Faulty(Base):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        {start}

    def step(self, closure=None):
        if "ARMED" in os.environ:
            self.misbehave()
        return super().step(closure)

    def misbehave(self):
        {step}
"""
    Path(name).write_text(text)
    began = time.monotonic()
    report = rwsim.audit(f"{name}:Faulty", law="sgdm", probes=["P1", "P2"], seconds=seconds, memory=memory)
    assert time.monotonic() - began < 30
    return report


# What breaks -> code of the finding, a part of its text.
STEPS = {
    "os.kill(os.getpid(), signal.SIGSEGV)": ("crash", "was killed by SIGSEGV at line"),
    "ctypes.string_at(0)": ("crash", "of opt.py, in misbehave"),
    "os.abort()": ("crash", "was killed by SIGABRT"),
    "os.kill(os.getpid(), signal.SIGKILL)": ("crash", "was killed by SIGKILL"),
    "os._exit(0)": ("exits", "ended the process with exit status 0 during P1"),
    "os._exit(1)": ("exits", "ended the process with exit status 1 during P1"),
    "exit()": ("exits", "Calls exit(None) in P1."),
    "sys.exit(3)": ("exits", "Calls exit(3) in P1."),
    "raise KeyboardInterrupt": ("raises", "Raises KeyboardInterrupt in P1."),
    "raise BaseException('deep')": ("raises", "Raises BaseException (deep) in P1."),
    "raise RuntimeError(f'{self!r} at {object()!r}')": ("step-raises", "RuntimeError"),
    "raise MemoryError": ("step-raises", "MemoryError"),
    "torch.set_default_dtype(torch.float16)": ("changes-default-dtype", "Changes the default dtype in P1."),
    "torch.set_num_threads(3)": ("changes-number-of-threads", "Changes the number of threads in P1."),
    "torch.set_grad_enabled(False)": ("changes-grad-mode", "Changes grad mode in P1."),
    "torch.manual_seed(0)": ("changes-random-numbers", "Changes torch's global random numbers in P1."),
    "torch.rand(1)": ("changes-random-numbers", "Changes torch's global random numbers in P1."),
    "np.random.seed(0)": ("changes-numpy-random-numbers", "Changes NumPy's"),
    "random.seed(0)": ("changes-python-random-numbers", "Changes Python's"),
    "torch.use_deterministic_algorithms(True)": ("changes-deterministic-algorithms", "deterministic"),
    "torch.set_float32_matmul_precision('medium')": ("changes-matmul-precision", "precision"),
    "sys.stdout = open(os.devnull, 'w')": ("changes-standard-output", "Changes the standard output"),
    "os.close(1)": ("changes-standard-output", "Changes the standard output"),
    "os.chdir('/')": ("changes-working-directory", "Changes the working directory in P1."),
    "shutil.rmtree(os.getcwd())": ("changes-working-directory", "Changes the working directory in P1."),
    "print('x' * 99_999)": ("print-storm", "Prints without restraint"),
    "os.write(2, bytes(range(256)) * 1000)": ("print-storm", "Prints without restraint"),
    "[print('y' * 10**6) for _ in range(10**6)]": ("print-storm", "printed more than 32 MiB during P1"),
    "os.closerange(3, 4096); spin()": ("hang", "did not end within"),
    "os.closerange(3, 4096)": ("crash", "closed files that are not its own"),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_breaks_is_a_finding_and_the_next_probe_runs(step):
    code, words = STEPS[step]
    report = audited(step, seconds=3.0 if "spin" in step else 20.0)
    found = {finding.code: finding for finding in report.findings}
    assert code in found, report.to_json()
    assert words in found[code].text and found[code].kind == "fault"
    assert report.finished and not report.passed
    assert [outcome.status for outcome in report.outcomes][1] == "held"
    if code not in ("print-storm",) and not code.startswith("changes"):
        assert report.outcomes[0].status == "departed" and "P1" in found[code].probes
    assert "0x7" not in report.to_json()


@pytest.mark.parametrize(
    "step", ["spin()", "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; spin()", "os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_a_hang_is_ended_and_located(step):
    report = audited(step, seconds=2.0)
    (finding,) = report.findings
    assert finding.code == "hang" and "did not end within 2 s" in finding.text
    assert ("in step of opt.py" in finding.text) == ("SIGSTOP" not in step)
    assert [outcome.status for outcome in report.outcomes] == ["departed", "held"]


@pytest.mark.parametrize("memory", [0.5])
def test_a_memory_hog_meets_its_limit(memory):
    report = audited("hog()", memory=memory)
    assert {finding.code for finding in report.findings} <= {"step-raises", "memory"} and report.findings and report.finished
    assert report.outcomes[0].status == "departed"


IMPORTS = {
    "exit()": ("exits", "import"),
    "os._exit(0)": ("exits", "while it was imported"),
    "spin()": ("hang", "did not end within 3 s in <module> of opt.py while it was imported"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("crash", "while it was imported"),
    "1 / 0": ("raises-at-import", "ZeroDivisionError"),
    "raise KeyboardInterrupt": ("raises", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("before", IMPORTS)
def test_what_an_import_breaks_departs_every_probe(before):
    code, words = IMPORTS[before]
    report = audited("pass", before=before, seconds=1.5)
    (finding,) = report.findings
    assert finding.code == code and words in finding.text
    assert report.finished and not report.passed and {outcome.status for outcome in report.outcomes} == {"departed"}


def test_what_an_import_changes_or_prints_is_found():
    report = audited("pass", before="print('z' * 99_999)\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)")
    assert {f.code for f in report.findings} == {"print-storm", "changes-default-dtype", "changes-random-numbers"}
    assert all(outcome.status == "held" for outcome in report.outcomes)


def test_a_constructor_that_breaks_is_no_bad_usage_and_one_that_refuses_is():
    report = audited("pass", start="raise RuntimeError('boom')")
    assert [f.code for f in report.findings] == ["raises"] and "boom" in report.findings[0].text and not report.passed
    with pytest.raises(InvalidArgument, match=r"ValueError: give me a closure, got .*; pass what it needs with --set"):
        audited("pass", start="raise ValueError('give me a closure')")


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found in /proc")
@pytest.mark.parametrize("new_session", [False, True])
def test_no_orphan_is_left(new_session):
    start = f"open('pids', 'a').write(f'{{subprocess.Popen([\"sleep\", \"60\"], start_new_session={new_session}).pid}} ')"
    audited(start)
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    assert pids
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="a child is told of its parent's death")
def test_the_child_dies_with_the_audit():
    Path("opt.py").write_text(f"{HEAD}\nopen('pid', 'w').write(str(os.getpid()))\nspin()\n")
    code = "import rwsim; rwsim.audit('opt.py:Faulty')"
    parent = subprocess.Popen([*python(), "-c", code])
    pid = _written("pid")
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _written(name: str) -> int:
    until = time.monotonic() + 60
    while not (Path(name).exists() and Path(name).read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    return int(Path(name).read_text())


def test_rwsims_own_error_is_no_fault_of_the_optimizer(monkeypatch):
    monkeypatch.setattr(inside.PROBES["P2"], "run", lambda context: [1][2])
    report = rwsim.audit(torch.optim.SGD, probes=["P1", "P2"])
    assert report.findings == () and not report.finished and not report.passed
    assert [outcome.status for outcome in report.outcomes] == ["held", "unfinished"]
    assert report.outcomes[1].reason.startswith("internal error of rwsim: IndexError: list index out of range (test_audit_isolation.py:")
    monkeypatch.setattr(inside, "_plain", lambda value: 1 / 0)
    report = rwsim.audit(torch.optim.SGD, probes=["P1", "P2"])
    assert report.findings == () and {outcome.status for outcome in report.outcomes} == {"unfinished"}


def test_an_exception_of_the_optimizer_that_a_probe_lets_through_is_its_own(monkeypatch):
    class Odd(torch.optim.SGD):
        def state_dict(self):
            raise RuntimeError("no state")

    monkeypatch.setattr(inside.PROBES["P2"], "run", lambda context: context.subject.build([torch.zeros(1)], {}).state_dict())
    report = rwsim.audit(Odd, probes=["P1", "P2"])
    assert [f.code for f in report.findings] == ["raises"] and "no state" in report.findings[0].text and report.finished


@pytest.mark.slow
def test_a_local_class_and_one_of_main_are_audited_and_the_same_seed_gives_the_same_text():
    class Local(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError(f"{object()!r}")

    first, again = (rwsim.audit(Local, law="sgdm", probes=["P1"], settings={"lr": 0.1}).to_json() for _ in range(2))
    assert first == again and "0x..." in first
    Path("main.py").write_text(
        "import rwsim, torch\nclass Mine(torch.optim.SGD):\n    pass\nprint('once', end=' ')  # is buffered when the child is forked\n"
        "report = rwsim.audit(Mine, law='sgdm', probes=['P1'])\nprint(report.passed, report.subject)\n"
    )
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("once True main.py:Mine\n", "")


def test_an_interrupted_audit_holds_what_was_found(monkeypatch):
    def progress(probe):
        if probe == "P2":
            raise KeyboardInterrupt

    with pytest.raises(AuditInterrupted) as caught:
        rwsim.audit("torch.optim:SGD", probes=["P1", "P2"], progress=progress)
    assert [(o.status, o.reason) for o in caught.value.report.outcomes] == [("held", ""), ("unfinished", "interrupted")]


def test_a_system_without_fork_is_refused(monkeypatch):
    monkeypatch.delattr(isolation.os, "fork")
    with pytest.raises(Unavailable, match="no fork"):
        rwsim.audit("torch.optim:SGD", probes=["P1"])


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"memory": float("inf")}, {"seed": -1}, {"probes": ["P0"]}])
def test_bad_arguments_are_refused(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad)).removesuffix("s")):
        rwsim.audit("torch.optim:SGD", **bad)
