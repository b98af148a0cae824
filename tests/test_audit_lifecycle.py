"""P8: small faulty optimizers, each broken in one way, are caught by the right code; good ones pass. Snippets run."""

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
from rwsim.audit.probes import lifecycle
from rwsim.audit.subject import Subject
from rwsim.optimizers import RULES


class Plain(torch.optim.Optimizer):
    """SGD with momentum, right; the faulty ones below change one thing."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = self.call(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.move(group, param, self.gradient(group, param))
        return loss

    def call(self, closure):
        with torch.enable_grad():
            return closure()

    def gradient(self, group, param):
        return param.grad.add(param, alpha=group["weight_decay"])

    def buffer(self, group, param):
        return self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))

    def move(self, group, param, grad):
        param.sub_(self.buffer(group, param).mul_(group["momentum"]).add_(grad), alpha=self.rate(group))

    def rate(self, group):
        return group["lr"]


class KeyedById(Plain):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        self.buffers = {}

    def buffer(self, group, param):
        return self.buffers.setdefault(id(param), torch.zeros_like(param))


class ClassBuffer(Plain):
    shared: dict[tuple[int, ...], torch.Tensor] = {}

    def buffer(self, group, param):
        return self.shared.setdefault(tuple(param.shape), torch.zeros_like(param))


class ClassRate(Plain):
    """The last constructor's learning rate is everybody's."""

    now = 0.0

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        ClassRate.now = lr

    def rate(self, group):
        return ClassRate.now


class CachedRate(Plain):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        self.lr = lr

    def rate(self, group):
        return self.lr


class ForgetsState(Plain):
    def state_dict(self):
        saved = super().state_dict()
        return {**saved, "state": {}}


class Unsaveable(Plain):
    def state_dict(self):
        return {**super().state_dict(), "schedule": lambda step: step}


class CastsOnLoad(Plain):
    """State in float32, and a load of its own that casts it."""

    def buffer(self, group, param):
        return self.state[param].setdefault("momentum_buffer", torch.zeros_like(param, dtype=torch.float32))

    def move(self, group, param, grad):
        buffer = self.buffer(group, param).mul_(group["momentum"]).add_(grad)
        param.sub_((self.rate(group) * buffer).to(param.dtype))

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            self.state[param] = {key: value.to(param.dtype) for key, value in state.items()}


class InheritsCast(CastsOnLoad):
    load_state_dict = torch.optim.Optimizer.load_state_dict


class SharesWeights(Plain):
    """A slow copy of the weights that is the weights themselves: loading it ties two models together."""

    def move(self, group, param, grad):
        slow = self.state[param].setdefault("slow", param.data)
        super().move(group, param, grad)
        slow.copy_(param)


class TensorInitial(Plain):
    """Sets initial_lr itself: a tensor is then shared with lr, and torch's schedulers start from what they change."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]


class OwnDecay(Plain):
    """A schedule of its own that writes into the group."""

    def rate(self, group):
        group["lr"] = group["lr"] * 0.99
        return group["lr"]


class ScaledGradient(Plain):
    def gradient(self, group, param):
        return param.grad.mul_(0.5)


class ClippedGradient(Plain):
    def gradient(self, group, param):
        return param.grad.clamp_(-0.5, 0.5)


class DecayInGradient(Plain):
    def gradient(self, group, param):
        return param.grad.add_(param, alpha=group["weight_decay"])


class EatsGradient(Plain):
    def gradient(self, group, param):
        grad, param.grad = param.grad, None
        return grad


class Normalizes(Plain):
    """Weights are normalized at construction."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.div_(param.data.norm())


class Thaws(Plain):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        for group in self.param_groups:
            for param in group["params"]:
                param.requires_grad_(True)


class IgnoresOverflow(Plain):
    """Says that it handles loss scaling, and does not look whether an overflow was found."""

    _step_supports_amp_scaling = True

    def gradient(self, group, param):
        scale = getattr(self, "grad_scale", None)
        return param.grad if scale is None else param.grad / scale

    def move(self, group, param, grad):
        super().move(group, param, torch.nan_to_num(grad, posinf=0.0))


class NoGradClosure(Plain):
    def call(self, closure):
        with torch.no_grad():
            return closure()


class TwoClosures(Plain):
    def call(self, closure):
        closure()
        return closure()


class LosesLoss(Plain):
    def call(self, closure):
        closure()


class NoClosure(Plain):
    def step(self):
        super().step()


class StateAtBirth(Plain):
    """State is made by the constructor, for the parameters of then."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def buffer(self, group, param):
        return self.state[param]["momentum_buffer"]


class FirstGroups(Plain):
    """Groups that come later are forgotten."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        self.count = len(self.param_groups)

    def gradient(self, group, param):
        known = any(param is p for g in self.param_groups[: self.count] for p in g["params"])
        return super().gradient(group, param) if known else torch.zeros_like(param)


class NeedsGradient(Plain):
    """None is read as a gradient of zero, so that weight decay acts."""

    def step(self, closure=None):
        loss = None if closure is None else self.call(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    grad = torch.zeros_like(param) if param.grad is None else param.grad
                    self.move(group, param, grad.add(param, alpha=group["weight_decay"]))
        return loss


class KeepsGradient(Plain):
    def zero_grad(self, set_to_none=True):
        pass


class HoldsStorage(Plain):
    """Moves the tensors that the parameters held at construction."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        self.held = {param: param.data for group in self.param_groups for param in group["params"]}

    def move(self, group, param, grad):
        held = self.held.setdefault(param, param.data)
        held.sub_(self.buffer(group, param).mul_(group["momentum"]).add_(grad), alpha=group["lr"])


class GlobalCount(Plain):
    """Bias correction by one count for all parameters, kept outside the state."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, lr, momentum, weight_decay)
        self.param_groups[0]["count"] = 0

    def step(self, closure=None):
        self.param_groups[0]["count"] += 1
        return super().step(closure)

    def rate(self, group):
        return group["lr"] / (1 - group["momentum"] ** self.param_groups[0]["count"])


class GroupCount(Plain):
    """The same by a count for each group."""

    def step(self, closure=None):
        loss = None if closure is None else self.call(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + any(param.grad is not None for param in group["params"])
        super().step()
        return loss

    def rate(self, group):
        return group["lr"] / (1 - group["momentum"] ** group["count"])


class Unregistered(Plain):
    """A count that state_dict does not hold."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def rate(self, group):
        return group["lr"] / (1 - group["momentum"] ** max(1, self.count))


class Dithered(Plain):
    def gradient(self, group, param):
        return param.grad + 1e-3 * torch.randn_like(param.grad)


class Bare:
    """No torch.optim.Optimizer at all: nothing is promised but a step."""

    def __init__(self, params, lr=0.1):
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self):
        for param in self.params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.lr)


def audited(make: Any, law: str | None = None, seed: int = 0, **settings: Any) -> Result:
    subject = Subject(make, f"{make.__module__}:{make.__qualname__}", settings)
    return lifecycle.run(Context(subject, RULES[law] if law else None, seed))


@cache
def codes(make: Any) -> dict[str, str]:
    return {finding.code: finding.kind for finding in audited(make).findings}


FAULTY = {
    KeyedById: "state-dict-incomplete",
    ForgetsState: "state-dict-incomplete",
    Unregistered: "state-dict-incomplete",
    Unsaveable: "state-dict-not-saveable",
    ClassBuffer: "instances-share-state",
    ClassRate: "instances-share-state",
    CachedRate: "scheduler-ignored",
    CastsOnLoad: "load-casts-state",
    SharesWeights: "load-shares-weights",
    TensorInitial: "tensor-lr-compounds",
    OwnDecay: "scheduled-lr-changed",
    ScaledGradient: "gradient-mutated",
    ClippedGradient: "gradient-mutated",
    Normalizes: "construction-changes-weights",
    Thaws: "construction-changes-parameters",
    IgnoresOverflow: "overflow-advances-state",
    NoGradClosure: "closure-without-grad",
    TwoClosures: "closure-calls",
    LosesLoss: "closure-loss-lost",
    NoClosure: "closure-raises",
    StateAtBirth: "late-group-raises",
    FirstGroups: "late-group-wrong",
    NeedsGradient: "moves-without-gradient",
    KeepsGradient: "zero-grad-incomplete",
    HoldsStorage: "replaced-weights-ignored",
    GlobalCount: "step-count-shared",
}
# What torch.optim does itself, or good libraries do: worth a word, no fault.
NOTED = {
    InheritsCast: "load-casts-state",
    Plain: "load-aliases-state",
    DecayInGradient: "gradient-mutated",
    EatsGradient: "gradient-consumed",
    GroupCount: "step-count-shared",
}
GOOD = [
    (torch.optim.SGD, "sgdm", {}),
    (torch.optim.Adam, "adam_l2", {"foreach": True}),
    (torch.optim.AdamW, "adamw", {}),
    (torch.optim.SGD, "sgdm", {"fused": True}),
    (torch.optim.AdamW, "adamw", {"capturable": False, "foreach": False}),
    (optimi.SGD, "sgdm", {"triton": False}),
    (optimi.AdamW, "adamw", {"triton": False}),
    (optimi.Lion, "lion", {"triton": False}),
    (lion_pytorch.Lion, "lion", {}),
]


@pytest.mark.parametrize("make", FAULTY, ids=lambda make: make.__name__)
def test_catches(make):
    assert codes(make).get(FAULTY[make]) == "fault", codes(make)


@pytest.mark.parametrize("make", NOTED, ids=lambda make: make.__name__)
def test_notes_what_torch_or_good_libraries_do(make):
    assert codes(make).get(NOTED[make]) == "note"
    assert set(codes(make).values()) == {"note"}


@pytest.mark.parametrize(("make", "law", "settings"), GOOD, ids=lambda value: getattr(value, "__module__", None))
def test_passes(make, law, settings):
    result = audited(make, law, seed=1, **settings)
    assert [f.code for f in result.findings if f.kind != "note"] == []


@pytest.mark.parametrize("make", [CachedRate, ScaledGradient, NoClosure, StateAtBirth, CastsOnLoad], ids=lambda make: make.__name__)
def test_snippet_of_a_finding_shows_it(make):
    """The snippet is the program that found it: it runs by itself, prints the departure, or raises as it says."""
    for finding in audited(make).findings:
        said = finding.snippet.splitlines()[-1]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(finding.snippet, finding.code, "exec"), {"__name__": "snippet"})
            except Exception as error:
                assert f"raises {type(error).__name__}" in said
                continue
        if finding.effect is not None:
            assert float(printed.getvalue()) == pytest.approx(finding.effect)
        assert "raises" not in said


def test_same_snippet_is_silent_on_a_good_optimizer():
    (finding,) = [f for f in audited(CachedRate).findings if f.code == "scheduler-ignored"]
    text = finding.snippet.replace(f"from {__name__} import CachedRate", "from torch.optim import SGD")
    assert text != finding.snippet
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, {"__name__": "snippet"})
    assert printed.getvalue().strip() == "0"


def test_what_a_class_does_not_promise_does_not_apply():
    result = audited(Bare)
    assert result.findings == []
    assert str(result.measured["resumed"]).startswith("not applicable")
    assert str(result.measured["closure_calls"]).startswith("not applicable")


def test_runs_with_random_numbers_are_not_compared():
    result = audited(Dithered)
    assert "random" in result.measured
    assert [f for f in result.findings if f.kind == "fault"] == []


def test_tells_nothing_else_of_a_single_fault():
    """One root, one finding, where the checks can know it."""
    assert [code for code, kind in codes(KeyedById).items() if kind == "fault"] == ["state-dict-incomplete"]
    assert [code for code, kind in codes(ScaledGradient).items() if kind == "fault"] == ["gradient-mutated"]


def test_repeats_bit_for_bit():
    first, second = audited(torch.optim.AdamW, "adamw", seed=3), audited(torch.optim.AdamW, "adamw", seed=3)
    assert first.measured == second.measured
    assert first.findings == second.findings
