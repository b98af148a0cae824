"""P10: options that do nothing and relations that do not hold are caught; good optimizers pass. Snippets run."""

import contextlib
import io
import warnings
from functools import cache
from typing import Any

import lion_pytorch
import optimi
import pytest
import torch

from rwsim.audit.context import Context, Result
from rwsim.audit.keywords import EXEMPT, Keywords
from rwsim.audit.probes import metamorphic
from rwsim.audit.subject import Subject
from rwsim.optimizers import RULES


class Plain(torch.optim.Optimizer):
    """AdamW, right, with a flag for l2; the faulty ones below change one thing."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, maximize=False, **more):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_w_mode": adam_w_mode, "maximize": maximize}
        super().__init__(params, {**defaults, **more})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(group, param)

    def move(self, group, param):
        state, grad = self.state[param], self.gradient(group, param)
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] += 1
        one, two = self.betas(group)
        if self.decoupled(group):
            self.decay(group, param)
        else:
            grad = grad + self.strength(group) * param
        first = state["exp_avg"].lerp_(grad, 1 - one) / (1 - one ** state["step"])
        second = state["exp_avg_sq"].lerp_(grad * grad, 1 - two) / (1 - two ** state["step"])
        param.sub_(self.update(group, first, second), alpha=group["lr"])

    def gradient(self, group, param):
        return -param.grad if group["maximize"] else param.grad

    def betas(self, group):
        return group["betas"]

    def decoupled(self, group):
        return group["adam_w_mode"]

    def strength(self, group):
        return group["weight_decay"]

    def decay(self, group, param):
        param.mul_(1 - group["lr"] * self.strength(group))

    def update(self, group, first, second):
        return first / (second.sqrt() + group["eps"])


class ModeIgnored(Plain):
    def decoupled(self, group):
        return True


class DecayUnused(Plain):
    def strength(self, group):
        return 0.0


class OneBeta(Plain):
    def betas(self, group):
        return group["betas"][0], group["betas"][0]


class EpsUnused(Plain):
    def update(self, group, first, second):
        return first / (second.sqrt() + 1e-8)


class MaximizeIgnored(Plain):
    def gradient(self, group, param):
        return param.grad


class MaximizeDecay(Plain):
    """Turns the decay around as well."""

    def decay(self, group, param):
        param.mul_(1 - group["lr"] * self.strength(group) * (-1 if group["maximize"] else 1))


class ScalarDecay(Plain):
    """lr * wd subtracted, not lr * wd * w."""

    def decay(self, group, param):
        param.sub_(group["lr"] * self.strength(group))


class AbsoluteGradient(Plain):
    def gradient(self, group, param):
        return super().gradient(group, param) + 0.1


class FirstGroupOnly(Plain):
    """The first group's decay for all."""

    def strength(self, group):
        return self.param_groups[0]["weight_decay"]


class ConstructorDecay(Plain):
    """Decay divided by the constructor's lr."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode)
        self.first = lr

    def decay(self, group, param):
        param.mul_(1 - 0.1 * group["lr"] / self.first * self.strength(group))


class LastGradient(Plain):
    """A buffer that one parameter leaves for the next."""

    def gradient(self, group, param):
        grad = super().gradient(group, param)
        left = getattr(self, "left", 0.0)
        self.left = grad.mean()
        return grad + 0.1 * left


class Whole(Plain):
    """One second moment for a tensor."""

    def update(self, group, first, second):
        return first / (second.mean().sqrt() + group["eps"])


class Rows(Plain):
    def update(self, group, first, second):
        return first / (second.mean(-1, keepdim=True).sqrt() + group["eps"])


class Clipped(Plain):
    """Two options that matter only together."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip=False, bound=1.0, warmup=0):
        super().__init__(params, lr, betas, eps, weight_decay, clip=clip, bound=bound, warmup=warmup)

    def update(self, group, first, second):
        step = super().update(group, first, second)
        return step.clamp(-group["bound"], group["bound"]) if group["clip"] else step

    def move(self, group, param):
        rate = group["lr"]
        group["lr"] = rate / (1 + group["warmup"])
        super().move(group, param)
        group["lr"] = rate


class BoundUnused(Clipped):
    def update(self, group, first, second):
        return super().update({**group, "bound": 1.0}, first, second)


class WarmupUnused(Clipped):
    def move(self, group, param):
        super().move({**group, "warmup": 0}, param)


class NesterovStored(Plain):
    """Taken, stored, never read."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, nesterov=False):
        super().__init__(params, lr, betas, eps, weight_decay, nesterov=nesterov)


class NesterovDropped(Plain):
    """Taken because torch takes it, and nothing else."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, nesterov=False):
        super().__init__(params, lr, betas, eps, weight_decay)


class Remembers(Plain):
    """Something outlives the optimizer."""

    steps = 0

    def gradient(self, group, param):
        Remembers.steps += 1
        return param.grad * (1 + 1e-3 * Remembers.steps)


class Dithered(Plain):
    def gradient(self, group, param):
        return param.grad + 1e-3 * torch.randn_like(param.grad)


class Careless(Plain):
    """Takes whatever it is given."""


def audited(make: Any, law: str | None = None, seed: int = 0, **settings: Any) -> Result:
    subject = Subject(make, f"{make.__module__}:{make.__qualname__}", settings)
    return metamorphic.run(Context(subject, RULES[law] if law else None, seed))


@cache
def found(make: Any, law: str | None = None) -> Result:
    return audited(make, law)


def faults(result: Result) -> dict[str, str]:
    return {finding.code: finding.text for finding in result.findings if finding.kind == "fault"}


DEAD = {
    ModeIgnored: "adam_w_mode",
    DecayUnused: "weight_decay",
    OneBeta: "betas[1]",
    EpsUnused: "eps",
    BoundUnused: "bound",
    WarmupUnused: "warmup",
    NesterovStored: "nesterov",
}
BROKEN = {
    MaximizeIgnored: "maximize-not-mirrored",
    MaximizeDecay: "maximize-not-mirrored",
    ScalarDecay: "not-odd",
    AbsoluteGradient: "not-odd",
    FirstGroupOnly: "cross-talk",
    ConstructorDecay: "cross-talk",
    LastGradient: "order-matters",
    Remembers: "not-repeatable",
}
GOOD = [
    (Plain, "adamw", {}),
    (Clipped, "adamw", {}),
    (torch.optim.SGD, "sgdm", {}),
    (torch.optim.SGD, "nesterov", {"nesterov": True}),
    (torch.optim.SGD, "sgd", {}),
    (torch.optim.Adam, "adam_l2", {"foreach": True}),
    (torch.optim.AdamW, "adamw", {"fused": True}),
    (optimi.SGD, None, {"triton": False}),
    (optimi.Adam, "adam_l2", {"triton": False}),
    (optimi.Lion, "lion", {"triton": False}),
    (lion_pytorch.Lion, "lion", {}),
]


@pytest.mark.parametrize("make", DEAD, ids=lambda make: make.__name__)
def test_catches_an_option_that_does_nothing(make):
    """That one, and no other; without any decay the flag that places it is dead as well."""
    dead = [f.text.split("`")[1] for f in found(make).findings if f.code == "dead-option"]
    assert dead == [DEAD[make], *(["adam_w_mode"] if make is DecayUnused else [])]


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_catches_a_broken_relation(make):
    assert BROKEN[make] in faults(found(make))


@pytest.mark.parametrize(("make", "law", "settings"), GOOD, ids=lambda value: getattr(value, "__module__", None))
def test_passes(make, law, settings):
    result = audited(make, law, seed=1, **settings)
    assert faults(result) == {}
    assert result.measured["granularity"] == "element-wise"


def test_an_option_that_matters_only_beside_another_is_not_dead():
    states = found(Clipped).measured["keywords"]
    assert states["bound"] == states["clip"] == states["warmup"] == "matters"


def test_a_word_of_torchs_that_is_kept_nowhere_is_a_note():
    (finding,) = [f for f in found(NesterovDropped).findings if "nesterov" in f.text]
    assert (finding.code, finding.kind) == ("option-not-supported", "note")


@pytest.mark.parametrize(("make", "form"), [(Whole, "tensor-wise"), (Rows, "row-wise")], ids=["tensor", "row"])
def test_granularity_is_a_note_without_a_law_and_a_fault_with_one(make, form):
    assert found(make).measured["granularity"] == form
    assert {f.code: f.kind for f in found(make).findings}[form] == "note"
    assert "not-element-wise" in faults(found(make, "adamw"))


def test_random_numbers_are_a_note():
    result = found(Dithered)
    assert faults(result) == {}
    assert {f.code: f.kind for f in result.findings}["draws-random-numbers"] == "note"


def test_carelessness_is_a_note():
    notes = {f.code: f.text for f in found(Careless).findings if f.kind == "note"}
    assert "lr=-0.1" in notes["accepts-out-of-range"]
    assert "swallows-keywords" in notes


@pytest.mark.parametrize("make", [ModeIgnored, OneBeta, ScalarDecay, FirstGroupOnly, Whole], ids=lambda make: make.__name__)
def test_snippet_of_a_finding_shows_it(make):
    findings = [f for f in found(make).findings if f.snippet]
    assert findings
    for finding in findings:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            exec(compile(finding.snippet, finding.code, "exec"), {"__name__": "snippet"})
        text = printed.getvalue().strip()
        if finding.code == "dead-option":
            assert "tensor(0." in text
        else:
            assert float(text) > 1e-6


class Bare:
    """No torch.optim.Optimizer at all: nothing is promised but a step."""

    def __init__(self, params, lr=0.1):
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self):
        for param in self.params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.lr)


def test_what_a_class_does_not_promise_does_not_apply():
    result = audited(Bare)
    assert faults(result) == {}
    assert str(result.measured["two_groups"]).startswith("not applicable")


def test_implementation_switches_are_exempt():
    keywords = Keywords(Context(Subject(torch.optim.AdamW, "torch.optim:AdamW"), None, 0))
    assert [part.keyword for part in keywords.parts] == ["lr", "betas", "betas", "eps", "weight_decay", "amsgrad"]
    assert set(keywords.rest) == {"maximize", "foreach", "capturable", "differentiable", "fused"}
    assert len(set(EXEMPT)) == len(EXEMPT)


def test_repeats_bit_for_bit():
    first, second = audited(optimi.AdamW, "adamw", seed=3, triton=False), audited(optimi.AdamW, "adamw", seed=3, triton=False)
    assert first.measured == second.measured
    assert first.findings == second.findings
