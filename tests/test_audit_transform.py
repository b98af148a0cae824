"""Optax-style gradient transformations are audited like torch's optimizers."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import rwsim
from rwsim.audit import transform
from rwsim.audit.transform import as_optimizer
from rwsim.errors import InvalidArgument

SCENES = ["P1", "P2", "P3", "P4", "P5"]


class Moments(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class Transformation(NamedTuple):
    init: Any
    update: Any


def adamw(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4, *, decays=1):
    """As optax writes it."""

    def init(params):
        return Moments(np.zeros((), np.int32), np.zeros_like(params), np.zeros_like(params))

    def update(grads, state, params=None):
        count = state.count + 1
        mu, nu = b1 * state.mu + (1 - b1) * grads, b2 * state.nu + (1 - b2) * grads**2
        direction = mu / (1 - b1**count) / (np.sqrt(nu / (1 - b2**count)) + eps)
        return -learning_rate * (direction + decays * weight_decay * params), Moments(count, mu, nu)

    return Transformation(init, update)


def twice(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4):
    return adamw(learning_rate, b1, b2, eps, weight_decay, decays=2)


def sgd(learning_rate, momentum=0.0, weight_decay=0.0):
    """A pair of functions, the state a dict."""

    def update(grads, state, params=None):
        trace = momentum * state["trace"] + grads + weight_decay * params
        return -learning_rate * trace, {"trace": trace}

    return (lambda params: {"trace": np.zeros_like(params)}), update


def in_place(learning_rate, momentum=0.0, weight_decay=0.0):
    def update(grads, state, params=None):
        grads += weight_decay * params
        return -learning_rate * grads, state

    return (lambda params: ()), update


def test_right_ones_hold_their_laws():
    for factory, law in ((adamw, "adamw"), (sgd, "sgdm")):
        report = rwsim.audit(factory, law=law, probes=SCENES)
        assert report.passed and report.findings == () and {o.status for o in report.outcomes} == {"held"}, report.to_json()


def test_a_faulty_one_is_named_with_a_program_that_runs(tmp_path, monkeypatch, capsys):
    report = rwsim.audit(twice, law="adamw", probes=["P1", "P2"])
    finding = report.findings[0]
    assert finding.code == "decay-twice" and finding.kind == "fault" and "transform(Optimizer)" in finding.snippet
    program = finding.snippet.replace("from tests.test_audit_transform import twice as Optimizer", "")
    exec(program, {"Optimizer": twice})  # a program of our own making
    expected = float(program.rpartition("gives ")[2])
    assert abs(float(capsys.readouterr().out) - expected) > 1e-3


def test_writing_into_an_array_is_found():
    report = rwsim.audit(in_place, law="sgdm", probes=["P1"])
    assert not report.passed and report.finished and "read-only" in report.findings[0].text


def test_by_file_and_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("opt.py").write_text(
        "from tests.test_audit_transform import sgd as base\n"
        "def sgd(learning_rate, momentum, wd=0.0):\n    return base(learning_rate, momentum, wd)\n"
    )
    assert rwsim.audit("opt.py:sgd", probes=["P1", "P3"]).passed


def test_the_class_is_an_optimizer_of_torchs_kind():
    generator = torch.Generator().manual_seed(1)
    start, grads = torch.randn(3, generator=generator), torch.randn(6, 3, generator=generator)
    kind = transform(adamw)
    assert issubclass(kind, torch.optim.Optimizer) and kind.__name__ == "adamw" and kind.__module__ == __name__

    def fresh(cls, **keywords):
        param = torch.nn.Parameter(start.clone())
        return param, cls([param], **keywords)

    mine, optimizer = fresh(kind, learning_rate=0.1, weight_decay=0.1)
    theirs, reference = fresh(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    for step, grad in enumerate(grads):
        for param, each in ((mine, optimizer), (theirs, reference)):
            param.grad = grad.clone()
            each.param_groups[0]["lr"] = 0.1 / (step + 1)  # as a scheduler does
            each.step()
        if step == 2:  # a round trip in the middle
            saved = optimizer.state_dict()
            with torch.no_grad():
                copied, again = fresh(kind, learning_rate=0.1, weight_decay=0.1)
                copied.copy_(mine)
            again.load_state_dict(saved)
            mine, optimizer = copied, again
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert optimizer.state[mine]["leaf 0"].dtype == torch.int32  # a count stays one
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    optimizer.zero_grad()
    before = mine.detach().clone()
    optimizer.step()
    assert torch.equal(before, mine)  # no gradient, no step
    assert float(optimizer.step(lambda: torch.tensor(3.0))) == 3.0


def test_what_is_no_factory_is_left_alone_or_refused():
    assert as_optimizer(torch.optim.SGD, {}, "") is torch.optim.SGD

    def build(params, lr=0.1):
        return torch.optim.SGD(params, lr=lr)

    assert as_optimizer(build, {}, "") is build
    with pytest.raises(InvalidArgument, match="must be a function that returns a transformation, not one itself"):
        rwsim.audit(adamw(0.1), probes=["P1"])
    with pytest.raises(InvalidArgument, match="needs `schedule`, which the audit cannot guess"):
        rwsim.audit(needing, probes=["P1"])
    assert rwsim.audit(needing, settings={"schedule": 1.0}, probes=["P1"]).finished


def needing(learning_rate, schedule):
    return sgd(learning_rate * schedule)
