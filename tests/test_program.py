"""The traced program of a rule does what its `update` does, and takes as its gradient's share what the reference engine takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rwsim.errors import Unavailable
from rwsim.optimizers import RULES, AdamW, UpdateRule
from rwsim.walk.program import TWIN, Program, trace
from rwsim.walk.reference import GradientPart, _Recording

HYPER: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.3,
    "momentum": 0.8,
    "betas": (0.8, 0.95, 0.99),
    "eps": 1e-3,
    "dampening": 0.4,
    "nu": 0.6,
}
HYPER |= {"max_lr": 0.1, "mix": 2.0}


def values(rule: type[UpdateRule], **changed) -> SimpleNamespace:
    chosen = {k: (HYPER[k][: len(d)] if isinstance(d, tuple) else HYPER[k]) for k, d in rule.hyper.items()}
    return rule(**{**chosen, **changed}).values


def step(program: Program, coefficients, arrays: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One step by the program's own instructions."""
    known = dict(arrays)
    known |= {f"c{i}": value for i, value in enumerate(coefficients)}

    def get(name):
        return known[name] if isinstance(name, str) else name

    calls: dict[str, Any] = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
        "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sign": torch.sign,
    }  # fmt: skip
    for line in program.body:
        known[line.target] = calls[line.op](*map(get, line.args))
    return {"param": get(program.param), **{b: get(n) for b, n in zip(program.buffers, program.new, strict=True)}}, get(program.part)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("zeros", [(), ("eps",), ("momentum", "weight_decay")])
def test_program_is_the_update(name, zeros):
    rule = RULES[name]
    hyper = values(rule, **{z: 0.0 for z in zeros if z in rule.hyper})
    program = trace(rule, frozenset(z for z in zeros if z in rule.hyper))
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(1, 3, 8, dtype=torch.float64, generator=generator)
    state = SimpleNamespace(param=param, **{b: torch.zeros_like(param) for b in rule.state})
    arrays = {"param": param, **{b: torch.zeros_like(param) for b in program.buffers}}
    share = GradientPart(rule, param)
    for t in range(1, 6):
        grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        old, state.step, recording = state.param, t, _Recording()
        state = SimpleNamespace(**rule.update(grad, state, hyper, recording))
        part = share(grad, t, old, state.param, recording.tape, hyper)
        arrays, mine = step(program, program.evaluate(vars(hyper), t), {**arrays, "grad": grad})
        for key in ("param", *rule.state):
            torch.testing.assert_close(arrays[key], getattr(state, key), rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(mine + torch.zeros_like(param), part, rtol=1e-12, atol=1e-15)


def test_decoupled_rules_carry_nothing_twice():
    for name, rule in RULES.items():
        program = trace(rule)
        coupled = name in ("sgdm", "nesterov", "dampened", "qhm", "adam_l2")
        assert set(program.buffers) == {*rule.state} | ({rule.state[0] + TWIN} if coupled else set())


def test_what_varies():
    program = trace(AdamW, frozenset({"eps"}))
    hyper = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.99), "eps": 0.0}
    early, late = (program.evaluate(hyper, t) for t in (1, 7))
    assert [a != b for a, b in zip(early, late, strict=True)] == program.varies(())
    assert all(v or not w for v, w in zip(program.varies(("lr",)), program.varies(()), strict=True))


class _Branching(UpdateRule):
    name, hyper = "branching", {"lr": ..., "weight_decay": ...}

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - grad if (grad > 0).any() else state.param}


class _Rooting(_Branching):
    name = "rooting"

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * grad**0.5}


class _Clashing(_Branching):
    name, state = "clashing", ("c0",)

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * state.c0, "c0": grad}


@pytest.mark.parametrize("rule", [_Branching, _Rooting, _Clashing])
def test_what_cannot_be_traced_is_refused(rule):
    with pytest.raises(Unavailable, match=f"update of {rule.name} cannot be traced"):
        trace(rule)
