"""`rwsim audit` as its users meet it: exit statuses, one-line errors, tables, files, comparison with an older report."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rwsim.audit import Finding, Outcome, Report, baseline
from rwsim.audit.junit import junit
from rwsim.cli import FAILS, HOLDS, INTERNAL, USAGE, run
from rwsim.cli.audit import _settings
from rwsim.errors import InvalidArgument
from tests.forked import python
from tests.published import held

MINE = """\
import torch

class Good(torch.optim.AdamW):
    pass

class Twice(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=2 * weight_decay)

class Needs(torch.optim.SGD):
    def __init__(self, params, schedule, lr=0.1):
        super().__init__(params, lr=lr)

class Hangs(Good):
    built = 0
    def step(self, closure=None):
        Hangs.built += 1
        while Hangs.built > 2:
            print("waiting", flush=True)

class Nothing:
    pass

thing = 3
"""


@pytest.fixture(autouse=True)
def _in_a_directory_with_mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("broken.py").write_text("import nonsense_module\n")
    Path("folder").mkdir()
    Path("not.json").write_text("{")
    Path("other.json").write_text('{"format": 1, "a": 2}')
    Path("newer.json").write_text('{"format": 99}')


def test_holds_departs_and_identifies(capsys):
    assert (
        run(["audit", "torch.optim:AdamW", "--law", "adamw", "--probe", "P1", "P2", "--json", "deep/r.json", "--junit", "deep/r.xml"])
        == HOLDS
    )
    out = capsys.readouterr().out
    assert "torch.optim:AdamW: holds the law adamw" in out and "P1 first step" in out and out.count("held") == 2 and "nothing found" in out
    assert held("audit", Path("deep/r.json"))["passed"] and ElementTree.parse("deep/r.xml").getroot().get("failures") == "0"
    assert run(["audit", "mine.py:Twice", "--law", "adamw", "--probe", "P1,P2"]) == FAILS
    out = capsys.readouterr().out
    assert "mine.py:Twice: departs from the law adamw" in out and "Decay applied twice" in " ".join(out.split())
    assert "optimizer = Optimizer([w]" in out and "1 fault" in out and max(map(len, out.split("The smallest")[0].splitlines())) <= 80
    assert run(["audit", "torch.optim:SGD", "--probe", "P1", "P3"]) == HOLDS  # no law: says what it is
    assert "identified as sgd" in capsys.readouterr().out
    assert run(["audit", "mine.py:Twice", "--quiet", "--probe", "P2"]) == FAILS
    assert capsys.readouterr() == ("", "")


def test_settings_reach_the_constructor(capsys):
    arguments = ["audit", "torch.optim:AdamW", "--law", "adamw", "--probe", "P1", "--json", "r.json"]
    assert run([*arguments, "--set", "betas=0.9,0.99", "--set", "amsgrad=False", "--set", "foreach=None"]) == HOLDS
    assert json.loads(Path("r.json").read_text())["meta"]["settings"] == {"betas": "(0.9, 0.99)", "amsgrad": "False", "foreach": "None"}
    capsys.readouterr()
    texts = ["a=1e-3", "b=True", "c=None", "d=(1,2)", "e=[1]", "f='x y'", "g=word", "h=0.9,0.99", "i=torch.bfloat16", "j=-2"]
    values = {
        "a": 1e-3,
        "b": True,
        "c": None,
        "d": (1, 2),
        "e": [1],
        "f": "x y",
        "g": "word",
        "h": (0.9, 0.99),
        "i": "torch.bfloat16",
        "j": -2,
    }
    assert _settings(texts) == values


BAD_USAGE = {
    "torch.optim:Adamw --law adamw": "it holds ASGD, Adadelta",
    "no_such_module:X": "`optimizer` must name a module that can be imported, got 'no_such_module:X'; install it, or check the spelling.",
    "broken.py:X": "install nonsense_module, which it imports",
    "absent.py:X": "`optimizer` must name a file that is there",
    "torch.optim": "`optimizer` must be MODULE:CLASS or FILE.py:CLASS",
    "mine.py:Nothing": "`optimizer` must be an optimizer class",
    "mine.py:thing": "`optimizer` must be an optimizer class",
    "mine.py:Needs": "needs `schedule`, which the audit cannot guess, got 'mine.py:Needs'; pass --set schedule=VALUE.",
    "torch.optim:SGD --set bogus=1": "`set bogus` must be a keyword of torch.optim:SGD",
    "torch.optim:SGD --set lr": "`set` must be KEY=VALUE, got 'lr'",
    "torch.optim:SGD --set lr=": "`set lr` must be a Python literal or a word, got ''",
    "torch.optim:SGD --set lr=f(1)": "`set lr` must be a Python literal or a word, got 'f(1)'",
    "torch.optim:SGD --set lr=1 --set lr=2": "must be given once for each key",
    "torch.optim:SGD --set lr=-1": "ValueError: Invalid learning rate: -1",
    "torch.optim:LBFGS": "closure",
    "torch.optim:SGD --probe P99": "`probe` must be one of P1, P2",
    "torch.optim:SGD --probe ,": "`probe` must name probes",
    "torch.optim:SGD --law nonsense": "must be one of sgdm, adamw",
    "torch.optim:SGD --timeout 0": "`timeout` must lie in (0, inf)",
    "torch.optim:SGD --seed -1": "`seed` must be at least 0",
    "torch.optim:SGD --json folder": "`--json` must be a file",
    "torch.optim:SGD --junit mine.py/x": "below the file",
    "torch.optim:SGD --baseline absent.json": "`--baseline` must be a file that can be read",
    "torch.optim:SGD --baseline not.json": "`--baseline` must be JSON",
    "torch.optim:SGD --baseline other.json": "`--baseline` must be the report of an audit",
    "torch.optim:SGD --baseline newer.json": "`--baseline` must have a format up to 1, not 99",
    "torch.optim:SGD --bogus": "--bogus",
    "": "OPTIMIZER",
}


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_two(arguments, capsys):
    before = {str(path) for path in Path().rglob("*") if "__pycache__" not in str(path)}
    assert run(["audit", *arguments.split()]) == USAGE
    out, err = capsys.readouterr()
    assert err.startswith("rwsim: error: ") and err.count("\n") == 1 and BAD_USAGE[arguments].lower() in err.lower() and out == ""
    assert before == {str(path) for path in Path().rglob("*") if "__pycache__" not in str(path)}


def test_an_audit_that_cannot_finish_exits_three(monkeypatch, capsys):
    from rwsim.audit import inside

    monkeypatch.setattr(inside, "diagnose", lambda *_: 1 / 0)
    assert run(["audit", "mine.py:Twice", "--law", "adamw", "--probe", "P1", "--json", "r.json"]) == INTERNAL
    assert "could not finish (P1: internal error of rwsim: ZeroDivisionError" in capsys.readouterr().err
    assert not json.loads(Path("r.json").read_text())["finished"]


def test_ctrl_c_ends_the_child_and_exits_three(tmp_path):
    command = [*python(), "-m", "rwsim.cli", "audit", "mine.py:Hangs", "--probe", "P1", "--json", "r.json"]
    Path("mine.py").write_text(
        MINE.replace(
            'print("waiting", flush=True)', "Hangs.built += 1; Hangs.built == 4 and open('pid', 'w').write(str(__import__('os').getpid()))"
        )
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (Path("pid").exists() and Path("pid").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == INTERNAL and err == "rwsim: error: interrupted\n"
    assert json.loads(Path("r.json").read_text())["outcomes"][0]["reason"] == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def report(findings=(), statuses=("held", "held"), identity="adamw: a formula", law="adamw"):
    outcomes = tuple(Outcome(f"P{i}", status, "why" if status != "held" else "", 0.5) for i, status in enumerate(statuses, 1))
    return Report("m:C", law, identity, tuple(findings), outcomes, {"seed": 0})


TWICE = Finding("decay-twice", "fault", "high", "Decay applied twice.", ("P2",), 1.0, 0.01, "print(1)\n")
NOTE = Finding("single", "note", "low", "Computes in float32.", ("P1",))
CHANGES = {
    "nothing": (report([TWICE]), report([TWICE]), []),
    "new fault": (report(), report([TWICE], ("held", "departed")), [("fault decay-twice", "worse"), ("P2", "worse")]),
    "gone": (report([TWICE], ("held", "departed")), report(), [("fault decay-twice", "better"), ("P2", "better")]),
    "new note": (report(), report([NOTE]), [("note single", "different")]),
    "grown": (report([TWICE]), report([replace(TWICE, effect=1.1)]), [("fault decay-twice", "worse")]),
    "shrunk": (report([TWICE]), report([replace(TWICE, effect=0.5)]), [("fault decay-twice", "better")]),
    "within errors": (report([TWICE]), report([replace(TWICE, effect=1.015)]), []),
    "a fault that was a convention": (report([replace(TWICE, kind="convention")]), report([TWICE]), [("decay-twice", "worse")]),
    "other wording": (report([TWICE]), report([replace(TWICE, text="Twice.")]), []),
    "identity": (report(law=None), report(identity="adam_l2: another", law=None), [("identity", "worse")]),
    "not probed now": (
        report([TWICE], ("held", "departed")), report([], ("held",)), [("fault decay-twice", "different"), ("P2", "different")],
    ),
    "two of a code": (report([TWICE]), report([TWICE, replace(TWICE, text="Again.")]), [("fault decay-twice", "worse")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_since_a_baseline(name, tmp_path):
    old, new, expected = CHANGES[name]
    Path("old.json").write_text(old.to_json())
    assert [(change.what, change.direction) for change in baseline.compare(baseline.read(Path("old.json")), new)] == expected


def test_baseline_on_the_command_line(capsys):
    probes = ["--probe", "P2"]
    assert run(["audit", "mine.py:Good", *probes, "--json", "good.json"]) == HOLDS
    assert run(["audit", "mine.py:Good", *probes, "--baseline", "good.json"]) == HOLDS
    assert "Nothing changed since the baseline." in capsys.readouterr().out
    assert run(["audit", "mine.py:Twice", *probes, "--law", "adamw", "--baseline", "good.json", "--junit", "r.xml"]) == FAILS
    out = " ".join(capsys.readouterr().out.split())
    assert "worse" in out and "The baseline was asked otherwise: law: None, now adamw" in out
    assert [case.get("name") for case in ElementTree.parse("r.xml").getroot().iter("testcase")][-1] == "baseline"
    assert run(["audit", "torch.optim:SGD", *probes, "--baseline", "good.json"]) == FAILS  # no fault of its own, but another rule
    assert "identity" in capsys.readouterr().out


def test_junit_is_what_ci_systems_read():
    odd = replace(TWICE, code="odd", text="control \x1b[31m and \x00 and \ud800", snippet="print('<&>')\n")
    alone = Finding("print-storm", "fault", "medium", "Prints.")
    convention = Finding("eps-hat", "convention", "low", "eps.", ("P1",))
    found = report([TWICE, odd, alone, convention, NOTE], ("departed", "departed", "not applicable", "unfinished"))
    root = ElementTree.fromstring(junit(found).encode())
    assert root.tag == "testsuites" and [suite.tag for suite in root] == ["testsuite"]
    suite = root[0]
    assert {key: suite.get(key) for key in ("name", "tests", "failures", "errors", "skipped", "time")} == {
        "name": "m:C", "tests": "5", "failures": "3", "errors": "1", "skipped": "1", "time": "2.000",
    }  # fmt: skip
    cases = {case.get("name"): case for case in suite}
    assert [*cases] == ["P1 first step", "P2 zero gradient", "P3 impulse and flip sweep", "P4 scale sweep", "process"]
    for case in suite:
        assert set(case.attrib) == {"classname", "name", "time"} and len(case.findall("failure")) <= 1
    failure = cases["P2 zero gradient"].find("failure")
    assert failure.get("type") == "decay-twice" and failure.get("message") == "Decay applied twice."
    assert "print(1)" in failure.text and "print('<&>')" in failure.text and "\N{REPLACEMENT CHARACTER}" in failure.text
    assert "Computes in float32." in cases["P1 first step"].find("system-out").text
    assert cases["P4 scale sweep"].find("error").get("message") == "why" and cases["P3 impulse and flip sweep"].find("skipped") is not None
    # Without a law a convention is no failure.
    free = ElementTree.fromstring(junit(report([convention], law=None)))
    assert free.get("failures") == "0" and "eps." in next(free.iter("system-out")).text


def test_baseline_read_refuses_what_is_no_report():
    for text in ("[]", "3", '{"findings": [{"a": 1}], "outcomes": [], "subject": "", "law": null, "identity": "", "meta": {}}'):
        Path("x.json").write_text(text)
        with pytest.raises(InvalidArgument, match="must be the report of an audit"):
            baseline.read(Path("x.json"))
