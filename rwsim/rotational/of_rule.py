"""A rotational optimizer of any update rule, by evaluating its one `update` on tensors."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.rotational.optimizer import Number, RotationalOptimizer

_EPS = 1e-8


class RuleOptimizer(RotationalOptimizer):
    """Base of what `rotational_of` makes: its direction is the rule's update at lr 1, weight 0 and no decay."""

    @classmethod
    def hyper_shown(cls) -> Mapping[str, Any]:
        """The rule's; an eps of 0, with which an element that never had a gradient would be 0/0, becomes torch's 1e-8."""
        hyper = cls.rule.hyper if hasattr(cls, "rule") else {}
        return {key: _EPS if key == "eps" and default == 0 else default for key, default in hyper.items()}

    def __init__(self, params: Any, **options: Any) -> None:
        given = {key: options.pop(key) for key in list(options) if key in self.rule.hyper}
        values = {key: given.get(key, default) for key, default in self.hyper_shown().items()}
        if ... in values.values():
            self.rule(**given)  # says what must be given
        super().__init__(params, values, options)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        hyper = SimpleNamespace(**{**{key: group[key] for key in self.rule.hyper}, "lr": 1.0, "weight_decay": 0.0})
        return -self._updated(torch.zeros_like(grad), grad, state, hyper, step)

    def plain_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> None:
        param.copy_(self._updated(param, grad, state, SimpleNamespace(**{key: group[key] for key in self.rule.hyper}), step))

    def _updated(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: SimpleNamespace, step: Number) -> Tensor:
        """The new weights; buffers change in place."""
        held = {name: state[name] for name in self.rule.state}
        after = self.rule.update(grad, SimpleNamespace(param=param, step=step, **held), hyper, torch)
        for name, buffer in held.items():
            buffer.copy_(after[name])
        return after["param"]


def rotational_of(rule: str | type[UpdateRule]) -> type[RotationalOptimizer]:
    """The rotational optimizer of a rule: a class whose constructor takes parameters, the rule's hyperparameters and the options.

    Args:
        rule: A name of `rwsim.RULES`, ``FILE.py:RULE``, or a rule.

    Raises:
        UnsupportedRule: A rule whose step is not its lr times a direction, or without lr or weight decay.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 8)
        >>> optimizer = rotational_of("nadamw")(layer.parameters(), lr=1e-3, weight_decay=0.1)
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
    """
    from rwsim.optimizers import find_rule

    found = find_rule(rule)
    if found not in _MADE:
        _check_linear(found)
        about = {"rule": found, "__doc__": found.__doc__, "__module__": __name__}
        _MADE[found] = type("Rotational" + found.__name__, (RuleOptimizer,), about)
    return _MADE[found]


_MADE: dict[type[UpdateRule], type[RotationalOptimizer]] = {}


def __getattr__(name: str) -> Any:
    """The class of a rule of `rwsim.RULES` by name, so that its optimizers can be pickled."""
    from rwsim.optimizers import RULES

    for rule in RULES.values():
        if name == "Rotational" + rule.__name__:
            return rotational_of(rule)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_linear(rule: type[UpdateRule]) -> None:
    for name in ("lr", "weight_decay"):
        if name not in rule.hyper:
            raise UnsupportedRule(rule.name, f"it has no {name}, from which a rotation could come")
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    required = {"max_lr": 1.0, "weight_decay": 0.0}
    results = []
    for lr in (1.0, 0.25):
        given = {key: required[key] for key, default in rule.hyper.items() if default is ... and key in required}
        values = SimpleNamespace(**{**vars(rule(**{**given, "lr": lr}).values), "weight_decay": 0.0})
        state = SimpleNamespace(param=torch.zeros(4, dtype=torch.float64), **{n: torch.zeros(4, dtype=torch.float64) for n in rule.state})
        for step, grad in enumerate(grads, 1):
            state.step = step
            after = rule.update(grad, state, values, torch)
            state = SimpleNamespace(**{**after, "param": torch.zeros(4, dtype=torch.float64)})
        results.append([after["param"] / lr, *(after[name] for name in rule.state)])
    if not all(torch.allclose(one, other, rtol=1e-12, atol=0, equal_nan=True) for one, other in zip(*results, strict=True)):
        raise UnsupportedRule(rule.name, "its step is not its lr times a direction")
