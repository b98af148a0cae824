"""The probes of paths (P7) and of low precision (P9): each kind of fault is caught by name, good optimizers pass."""

import contextlib
import io

import lion_pytorch
import optimi
import pytest
import torch

from rwsim.audit.context import Context, Result
from rwsim.audit.probes import paths, precision
from rwsim.audit.subject import Subject
from rwsim.optimizers import RULES


class Plain(torch.optim.Optimizer):
    """SGD with summed momentum and coupled decay, or AdamW; a faulty optimizer changes one method."""

    adam = False

    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0):
        self.first_lr = lr
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)

    def update(self, param, grad, state, group):
        param.sub_(self.sum(grad + group["weight_decay"] * param, state, group["momentum"]), alpha=group["lr"])

    def sum(self, grad, state, momentum):
        state["sum"] = momentum * state["sum"] + grad if "sum" in state else grad.clone()
        return state["sum"]


class Adam(torch.optim.Optimizer):
    """AdamW, written out."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)

    def update(self, param, grad, state, group):
        beta1, beta2 = group["betas"]
        m, v = state.setdefault("m", torch.zeros_like(param)), state.setdefault("v", torch.zeros_like(param))
        state["t"] = state.get("t", 0) + 1
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(self.ratio(m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"]), group["eps"]), alpha=group["lr"])

    def ratio(self, m, v, eps):
        return m / (v.sqrt() + eps)


# Faults of paths.


class ForeachForgetsMomentum(Plain):
    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0, foreach=None):
        super().__init__(params, lr, weight_decay, momentum)
        self.foreach = foreach

    def sum(self, grad, state, momentum):
        return grad if self.foreach else super().sum(grad, state, momentum)


class FusedDecaysTwice(Plain):
    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0, fused=False):
        super().__init__(params, lr, weight_decay, momentum)
        self.fused = fused

    def update(self, param, grad, state, group):
        super().update(param, grad + self.fused * group["weight_decay"] * param, state, group)


class BatchedBreaks(Plain):
    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0, multi_tensor=False):
        super().__init__(params, lr, weight_decay, momentum)
        self.multi_tensor = multi_tensor

    def sum(self, grad, state, momentum):
        return super().sum(grad, state, momentum[0] if self.multi_tensor else momentum)


class ForeachForgetsNesterov(Plain):
    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0, nesterov=False, foreach=None):
        super().__init__(params, lr, weight_decay, momentum)
        self.nesterov = nesterov and not foreach

    def sum(self, grad, state, momentum):
        sum = super().sum(grad, state, momentum)
        return grad + momentum * sum if self.nesterov else sum


class GroupDecay(Plain):
    def update(self, param, grad, state, group):
        param.mul_(1 - group["lr"] * group["weight_decay"] / self.first_lr)
        super().update(param, grad, state, {**group, "weight_decay": 0.0})


class GroupMomentum(Plain):
    def sum(self, grad, state, momentum):
        return super().sum(grad, state, self.defaults["momentum"])


class FirstGroupLr(Plain):
    def update(self, param, grad, state, group):
        super().update(param, grad, state, {**group, "lr": self.param_groups[0]["lr"]})


class NoneIsZero(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is None):
            param.grad = torch.zeros_like(param)
        super().step()


class OldMomentum(Plain):
    """Without a gradient the momentum moves on."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None and "sum" in self.state[param]:
                    param.sub_(self.state[param]["sum"], alpha=group["lr"])


class NoneBreaks(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        torch.stack([param.grad.sum() for group in self.param_groups for param in group["params"]])
        super().step()


class ZeroSizeBreaks(Plain):
    def update(self, param, grad, state, group):
        grad.flatten()[0]
        super().update(param, grad, state, group)


class ScalarBreaks(Plain):
    def update(self, param, grad, state, group):
        grad.norm(dim=1 if grad.ndim > 1 else 0), grad.shape[0]
        super().update(param, grad, state, group)


class ViewsByMemory(Plain):
    """Reads a gradient as it lies in memory."""

    def update(self, param, grad, state, group):
        super().update(param, grad.as_strided(grad.shape, param.contiguous().stride()), state, group)


class Shared(Plain):
    """One momentum for parameters of one shape."""

    def sum(self, grad, state, momentum):
        return super().sum(grad, self.state.setdefault(grad.shape, {}), momentum)


class NormOfAll(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.sqrt(sum((grad.double() ** 2).sum() for grad in grads)) if grads else 1.0
        for grad in grads:
            grad.div_(norm)
        super().step()


class OneDtype(Plain):
    """Stacks what it holds."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if len({param.dtype for param in params}) > 1:
            raise RuntimeError("expected one dtype")
        super().step()


class FirstDtype(Plain):
    """Rounds every update to the dtype of the first parameter."""

    def sum(self, grad, state, momentum):
        low = min((param.dtype for group in self.param_groups for param in group["params"]), key=lambda dtype: torch.finfo(dtype).bits)
        return super().sum(grad, state, momentum).to(low).to(grad.dtype)


class TwiceThroughTheGenerator(Plain):
    """Looks through the parameters before it keeps them."""

    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0):
        given = params if isinstance(params, list) else [torch.nn.Parameter(param.detach().clone()) for param in params]
        super().__init__(given, lr, weight_decay, momentum)
        self.param_groups = self.param_groups if isinstance(params, list) else [{**self.param_groups[0], "params": []}]


# Faults of precision.


class NoEps(Adam):
    def ratio(self, m, v, eps):
        return m / v.sqrt()


class RowNorm(Plain):
    """Divides each row by its norm."""

    def sum(self, grad, state, momentum):
        sum = super().sum(grad, state, momentum)
        return sum / sum.norm(dim=-1, keepdim=True) if sum.ndim else sum


class Trust(Plain):
    """A trust ratio that is 0/0 where weights are zero."""

    def sum(self, grad, state, momentum):
        return super().sum(grad, state, momentum) * (self.size / self.size)

    def update(self, param, grad, state, group):
        self.size = param.norm()
        super().update(param, grad, state, group)


class TinyNorm(Adam):
    """Its square underflows, its own eps is far below."""

    def ratio(self, m, v, eps):
        return m / torch.where(m == 0, torch.ones_like(v), v.sqrt())


class BetaRounds(Adam):
    """The second moment's beta is kept in the parameter's dtype, where 0.999 may be one; its correction is not."""

    def update(self, param, grad, state, group):
        beta = float(torch.tensor(group["betas"][1], dtype=param.dtype))
        state.setdefault("v", torch.zeros_like(param)).mul_(beta).addcmul_(grad, grad, value=1 - beta)
        kept = state["v"].clone()
        self.kept = kept
        super().update(param, grad, state, group)
        state["v"].copy_(kept)

    def ratio(self, m, v, eps):
        return super().ratio(m, v * 0 + self.kept, eps)


class ClippedState(Plain):
    """Holds low-precision momentum in a type of small range."""

    def sum(self, grad, state, momentum):
        sum = super().sum(grad, state, momentum)
        if grad.itemsize < 4:
            sum = state["sum"] = sum.clamp(-2, 2)
        return sum


class Widens(Plain):
    def update(self, param, grad, state, group):
        super().update(param, grad, state, group)
        if param.dtype == torch.bfloat16:
            param.data = param.data.float()


class KahanForgotten(Plain):
    def __init__(self, params, lr=0.1, weight_decay=0.0, momentum=0.0, kahan_sum=False):
        super().__init__(params, lr, weight_decay, momentum)


class Squares(Plain):
    """Normalizes by a norm that overflows."""

    def sum(self, grad, state, momentum):
        sum = super().sum(grad, state, momentum)
        return sum * (1 / (1 + (grad**2).sum())) * (1 + (grad**2).sum())


class LazyRows(Adam):
    """Rows without a gradient are left out, but the correction counts every step."""

    def update(self, param, grad, state, group):
        rows = (grad != 0).reshape(len(grad), -1).any(1) if grad.ndim else None
        kept = {name: state[name].clone() for name in ("m", "v") if name in state}
        before = param.clone()
        super().update(param, grad, state, group)
        if rows is not None and kept:
            decayed = before * (1 - group["lr"] * group["weight_decay"])
            param[~rows] = decayed[~rows]
            for name, value in kept.items():
                state[name][~rows] = value[~rows]


class RowCounts(Adam):
    """Bias correction by the number of hits of a row."""

    def update(self, param, grad, state, group):
        if not grad.ndim:
            return super().update(param, grad, state, group)
        beta1, beta2 = group["betas"]
        hits = state.setdefault("hits", torch.zeros(len(grad), *[1] * (grad.ndim - 1), dtype=grad.dtype))
        hits += (grad != 0).reshape(len(grad), -1).any(1).reshape(hits.shape).to(grad.dtype)
        m, v = state.setdefault("m", torch.zeros_like(param)), state.setdefault("v", torch.zeros_like(param))
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        count = hits.clamp(min=1)
        param.sub_(self.ratio(m / (1 - beta1**count), v / (1 - beta2**count), group["eps"]), alpha=group["lr"])


def audit(probe, make, law, seed=0, **settings) -> Result:
    return probe.run(Context(Subject(make, f"{make.__module__}:{make.__name__}", settings), RULES[law] if law else None, seed))


def faults(result: Result) -> set[str]:
    return {finding.code for finding in result.findings if finding.kind != "note"}


def output(snippet: str) -> list[str]:
    """What a snippet prints, one entry for each print; an exception is the last."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            exec(compile(snippet, "snippet", "exec"), {})  # the program text is what is tested
        except Exception as error:
            print(f"tensor(raised {type(error).__name__}")
    return shown.getvalue().split("tensor(")[1:]


PATHS = [
    (ForeachForgetsMomentum, "sgdm", {"foreach-differs"}), (FusedDecaysTwice, "sgdm", {"fused-differs"}),
    (BatchedBreaks, "sgdm", {"multi_tensor-crash"}), (ForeachForgetsNesterov, "sgdm", {"foreach-differs"}),
    (GroupDecay, "sgdw", {"group-decay"}), (GroupMomentum, "sgdm", {"group-momentum"}), (FirstGroupLr, "sgdm", {"group-lr"}),
    (NoneIsZero, "sgdm", {"none-grad-moves"}), (OldMomentum, "sgdm", {"none-grad-moves"}),
    (NoneBreaks, "sgdm", {"crash-parameter-without-gradient", "crash-frozen-parameter", "crash-paused-parameter", "crash-no-gradient"}),
    (ZeroSizeBreaks, "sgdm", {"crash-zero-size-tensor"}), (ScalarBreaks, "sgdm", {"crash-0-d-tensor"}),
    (ViewsByMemory, "sgdm", {"transposed-view-differs"}), (Shared, "sgdm", {"group-momentum"}),
    (NormOfAll, "sgdm", {"parameters-interact"}),
    (OneDtype, "sgdm", {"mixed-dtypes-crash"}), (FirstDtype, "sgdm", {"mixed-dtypes-differ"}),
    (TwiceThroughTheGenerator, "sgdm", {"generator-differs"}),
]  # fmt: skip
PRECISION = [
    (NoEps, "adamw", {"zero-gradient-nan", "zero-row-nan", "tiny-gradient-nan"}), (RowNorm, "sgdm", {"zero-row-nan", "zero-gradient-nan"}),
    (Trust, "sgdm", {"zero-weights-nan"}), (TinyNorm, "adamw", {"tiny-gradient-nan"}), (BetaRounds, "adamw", {"bfloat16-drift"}),
    (ClippedState, "sgdm", {"bfloat16-drift", "float16-drift"}), (Widens, "sgdm", {"dtype-changed"}),
    (KahanForgotten, "sgdm", {"compensation-inert"}), (Squares, "sgdm", {"huge-gradient-nan"}),
    (NormOfAll, "sgdm", {"infinity-spreads"}), (LazyRows, "adamw", {"rare-rows"}), (RowCounts, "adamw", {"rare-rows"}),
]  # fmt: skip
GOOD = [
    (torch.optim.SGD, "sgdm"), (torch.optim.Adam, "adam_l2"), (torch.optim.AdamW, "adamw"), (optimi.AdamW, "adamw"),
    (optimi.SGD, "sgdm"), (optimi.Lion, "lion"), (lion_pytorch.Lion, "lion"), (Plain, "sgdm"), (Adam, "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("probe", "make", "law", "codes"), [*((paths, *c) for c in PATHS), *((precision, *c) for c in PRECISION)])
@pytest.mark.filterwarnings("ignore")  # of the optimizers
def test_catches(probe, make, law, codes):
    result = audit(probe, make, law)
    found = faults(result)
    assert codes <= found, (found, result.measured)
    for finding in result.findings:
        if finding.code in codes and finding.snippet:
            shown = output(finding.snippet)
            last = shown[-1]
            assert "raised" in last or "raised" in shown[0] or len(set(shown)) > 1 or "nan" in last or "inf" in last or len(shown) == 1, (
                shown
            )
            # From a generator nothing may be held that could be printed.
            assert "raised" not in last or "crash" in finding.code or finding.code == "generator-differs", (finding, shown)


@pytest.mark.parametrize("probe", [paths, precision])
@pytest.mark.parametrize(
    ("make", "law"), GOOD, ids=lambda value: f"{value.__module__}.{value.__name__}" if isinstance(value, type) else value
)
@pytest.mark.filterwarnings("ignore")
def test_passes(probe, make, law):
    assert not faults(audit(probe, make, law))
