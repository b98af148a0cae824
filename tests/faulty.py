"""Optimizers for the audit's tests: any rule as a torch optimizer, and the faults of real ones rebuilt small."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from rwsim.optimizers import UpdateRule


def optimizer_of(rule: type[UpdateRule]) -> type[Optimizer]:
    """A torch optimizer that takes a rule's steps, in torch's manner: per-parameter state, groups, closures."""

    class RuleOptimizer(Optimizer):
        def __init__(self, params: Any, **hyper: Any) -> None:
            super().__init__(params, vars(rule(**hyper).values))

        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    if not state:
                        state["step"] = 0
                        state.update({name: torch.zeros_like(param) for name in rule.state})
                    state["step"] += 1
                    hyper = SimpleNamespace(**{key: group[key] for key in rule.hyper})
                    new = rule.update(param.grad, SimpleNamespace(param=param.clone(), **state), hyper, torch)
                    param.copy_(new.pop("param"))
                    state.update(new)
            return loss

    # The audit reads the names of hyperparameters off the signature.
    import inspect

    names = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    kind = inspect.Parameter.KEYWORD_ONLY
    names += [
        inspect.Parameter(key, kind) if value is ... else inspect.Parameter(key, kind, default=value) for key, value in rule.hyper.items()
    ]
    RuleOptimizer.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    RuleOptimizer.__name__ = RuleOptimizer.__qualname__ = f"{rule.__name__}Optimizer"
    return RuleOptimizer


class Plain(Optimizer):
    """torch's manner of an optimizer around `update(p, g, state, group)`; faults are written into subclasses."""

    buffers: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)
        return loss

    def one(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self.buffers:
                state[name] = torch.zeros_like(p)
        state["step"] += 1
        self.update(p, g, state, group)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        """AdamW, as right as can be."""
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * self.direction(g, state, group))

    def direction(self, g: Any, state: Any, group: Any) -> Any:
        m, v, one, two = self.moments(g, state, group)
        return m / one / ((v / two).sqrt() + group["eps"])

    def moments(self, g: Any, state: Any, group: Any) -> tuple[Any, Any, float, float]:
        """Both averages, and their bias corrections."""
        b1, b2 = group["betas"]
        t = float(state["step"])
        state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
        return state["exp_avg"], state["exp_avg_sq"], 1 - b1**t, 1 - b2**t


class Sgd(Plain):
    """SGD with momentum, as right as can be."""

    buffers = ("momentum_buffer",)

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0):
        Optimizer.__init__(self, params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(group["lr"] * self.summed(g + group["weight_decay"] * p, state, group))

    def summed(self, g: Any, state: Any, group: Any) -> Any:
        """The buffer, after the gradient is added."""
        return state["momentum_buffer"].mul_(group["momentum"]).add_(g)


class Lion(Plain):
    """Lion, as right as can be."""

    buffers = ("exp_avg",)

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        Optimizer.__init__(self, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * self.direction(g, state, group))

    def direction(self, g: Any, state: Any, group: Any) -> Any:
        b1, b2 = group["betas"]
        d = torch.sign(b1 * state["exp_avg"] + (1 - b1) * g)
        state["exp_avg"].mul_(b2).add_(g, alpha=1 - b2)
        return d
