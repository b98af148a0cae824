"""The maintainer's path: a package with one optimizer and one test file; pytest is green, and red once it is broken."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rwsim
from tests.forked import python

OPTIMIZER = """\
import torch

class MyAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (one, two), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].mul_(one).add_(p.grad, alpha=1 - one)
                s["v"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                root = (s["v"] / (1 - two ** s["t"])).sqrt() + group["eps"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * s["m"] / (1 - one ** s["t"]) / root)
        return loss
"""
THREE_LINES = """\
from mine import MyAdamW

def test_my_adamw(rwsim_audit):
    rwsim_audit(MyAdamW, law="adamw", probes=["P1", "P2"])
"""
MORE = """\
import pytest
from mine import MyAdamW

@pytest.mark.rwsim(law="adamw", probes=["P1"])
def test_marked():
    return MyAdamW

@pytest.mark.rwsim("adamw", probes=["P1"], eps=1e-3)
@pytest.mark.parametrize("cls", [MyAdamW])
def test_parametrized(cls):
    return cls

@pytest.mark.rwsim(law="adamw", probes=["P1"])
class TestHolder:
    optimizer = MyAdamW

    def test_law(self):
        pass

@pytest.mark.rwsim(probes=["P1"])
def test_bare():
    pass

@pytest.mark.rwsim(law="nonsense")
def test_bad_law():
    return MyAdamW

def test_report(rwsim_audit):
    assert rwsim_audit(MyAdamW, probes=["P2"], settings={"lr": 0.1}, weight_decay=0.5).identity.startswith("adamw")
"""


def suite(directory: Path, *arguments: str) -> tuple[int, str]:
    """pytest as a user has it, with the plugin, strict markers and warnings as errors."""
    env = {**os.environ, "PYTHONPATH": f"{Path(rwsim.__file__).parent.parent}{os.pathsep}{directory}"}
    env.pop("PYTEST_ADDOPTS", None)
    # The installation under test may be older than the entry point; naming the plugin twice is an error.
    plugin = [] if any(entry.value == "rwsim.audit.plugin" for entry in entry_points(group="pytest11")) else ["-p", "rwsim.audit.plugin"]
    command = [*python(), "-m", "pytest", *plugin, "-W", "error", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:jaxtyping"]
    done = subprocess.run([*command, *arguments], cwd=directory, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_green_then_red_with_the_diagnosis(tmp_path):
    (tmp_path / "mine.py").write_text(OPTIMIZER)
    (tmp_path / "test_mine.py").write_text(THREE_LINES)
    status, out = suite(tmp_path)
    assert status == 0 and "1 passed" in out, out
    (tmp_path / "mine.py").write_text(OPTIMIZER.replace('1 - lr * group["weight_decay"]', '1 - 2 * lr * group["weight_decay"]'))
    status, out = suite(tmp_path)
    assert status == 1 and "1 failed" in out, out
    assert (
        "mine:MyAdamW: departs from the law adamw" in out
        and "fault, high: Decay applied twice" in out
        and "from mine import MyAdamW" in out
    )
    assert "rwsim/audit" not in out  # the message, not our traceback


def test_marker_fixture_and_what_they_refuse(tmp_path):
    (tmp_path / "mine.py").write_text(OPTIMIZER)
    (tmp_path / "test_more.py").write_text(MORE)
    status, out = suite(tmp_path, "-v")
    assert status == 1 and "4 passed" in out and "2 failed" in out, out
    assert "a test marked `rwsim` must return the optimizer class" in out
    assert "rwsim cannot audit this: `optimizer` must be one of sgdm, adamw" in out or "must be one of sgdm, adamw" in out


def test_the_marker_is_registered_and_the_plugin_is_light(tmp_path):
    status, out = suite(tmp_path, "--markers")
    assert status == 0 and "@pytest.mark.rwsim(law=None" in out
    code = "import rwsim.audit.plugin, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "sympy", "numpy", "scipy", "rwsim.audit.audit", "rwsim.audit.finding"} & set(loaded)


def test_our_own_suite_leaves_it_out(pytestconfig):
    """It would import rwsim before jaxtyping's hook can check it, which jaxtyping refuses."""
    assert not pytestconfig.pluginmanager.has_plugin("rwsim")
    if not pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("run without jaxtyping")
