"""The reference engine: any rule, any device, float32 or float64, in plain torch. The engine the others must match."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rwsim.errors import InvalidArgument, WalkDiverged, WalkInterrupted
from rwsim.optimizers.rule import UpdateRule
from rwsim.walk.measure import Recorder, Walk
from rwsim.walk.system import Gradient, Weight


class _Recording:
    """An `xp` that remembers the roots and signs of an update. With a `normalizer` that is every root's value."""

    def __init__(self, normalizer: Tensor | None = None) -> None:
        self.tape: list[Tensor] = []
        self.normalizer = normalizer

    def sqrt(self, x: Tensor) -> Tensor:
        self.tape.append(torch.sqrt(x) if self.normalizer is None else self.normalizer)
        return self.tape[-1]

    def sign(self, x: Tensor) -> Tensor:
        self.tape.append(torch.sign(x))
        return self.tape[-1]


class _Replaying:
    """An `xp` that returns remembered roots and signs, in order, whatever it is asked of."""

    def __init__(self, tape: list[Tensor]) -> None:
        self.tape = iter(tape)

    def sqrt(self, x: Any) -> Tensor:
        return next(self.tape)

    sign = sqrt


class GradientPart:
    """The gradient's share of an update: what the same update does, with the same roots and signs, to a parameter at
    zero and buffers that have seen gradients only.

    Where no buffer sees the parameter (decoupled decay) those are the buffers themselves, and the share is
    w_{t+1} - keep w_t with keep the update's derivative by the parameter: `keep` is found by probing, once.

    Args:
        rule: The rule.
        hyper: Its hyperparameters, numbers or tensors.
        start: Initial weights; sets shape, device and dtype.
        probe: Look for decoupled decay; False always keeps separate buffers (to test one against the other).
    """

    def __init__(self, rule: type[UpdateRule], hyper: SimpleNamespace, start: Tensor, probe: bool = True) -> None:
        self.rule = rule
        self.hyper = SimpleNamespace(**{**vars(hyper), "weight_decay": 0.0})
        self.keep = self._probe(rule, hyper, start) if probe else None
        self.state = SimpleNamespace(param=0.0, **{name: torch.zeros_like(start) for name in rule.state})

    @staticmethod
    def _probe(rule: type[UpdateRule], hyper: SimpleNamespace, start: Tensor) -> Any:
        """d w_{t+1} / d w_t if no buffer depends on w and w_{t+1} is affine in it, else None."""
        one = torch.ones(len(start), 1, 1, dtype=torch.float64, device=start.device)
        buffers = {name: 0.3 * one for name in rule.state}
        at = [rule.update(0.7 * one, SimpleNamespace(param=p * one, step=3, **buffers), hyper, torch) for p in (0.0, 1.0, 2.0)]
        if any(not torch.equal(at[0][name], at[i][name]) for name in rule.state for i in (1, 2)):
            return None
        first, second = at[1]["param"] - at[0]["param"], at[2]["param"] - at[1]["param"]
        if not torch.allclose(first, second, rtol=1e-9, atol=0.0):
            return None
        return float(first[0]) if len(start) == 1 else first.to(start.dtype)

    def __call__(self, grad: Tensor, step: int, old: Tensor, new: Tensor, tape: list[Tensor]) -> Tensor:
        if self.keep is not None:
            return new - self.keep * old
        self.state.step = step
        self.state = SimpleNamespace(**self.rule.update(grad, self.state, self.hyper, _Replaying(tape)))
        part, self.state.param = self.state.param, 0.0
        return part


def batched_hyper(rules: Sequence[UpdateRule], start: Tensor) -> SimpleNamespace:
    """Hyperparameters of several configs as tensors (config, 1, 1); of one config as plain floats, rounded nowhere."""
    if len(rules) == 1:
        return rules[0].values

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=start.dtype, device=start.device)[:, None, None]

    stacked: dict[str, Any] = {}
    for key, first in vars(rules[0].values).items():
        every = [getattr(rule.values, key) for rule in rules]
        stacked[key] = tuple(column(x) for x in zip(*every, strict=True)) if isinstance(first, tuple) else column(every)
    return SimpleNamespace(**stacked)


def walk(
    rules: Sequence[UpdateRule],
    gradient: Gradient,
    start: Weight,
    steps: int,
    window: int = 100,
    progress: Callable[[int], None] | None = None,
    normalizer: Tensor | None = None,
) -> Walk:
    """Walk `steps` steps, every config with its own hyperparameters.

    Args:
        rules: One per config, all of one class.
        gradient: Called once a step with the weights; returns a tensor of their shape.
        start: Initial weights, shape (config, neuron, dim); sets device and dtype. Not changed.
        steps: At least 1.
        window: Steps per recorded window.
        progress: Called after each window with the number of steps done.
        normalizer: Value of the update's square root, broadcast against `start`, in place of its own estimate: the walk in
            which the theory of second-moment-normalized rules is exact.

    Raises:
        InvalidArgument: `steps` or `window` below 1, rules of several classes, a rule count other than configs.
        WalkDiverged: NaN or Inf, with the first step and config that show it, and the walk up to there.
        WalkInterrupted: Ctrl-C, with the walk so far.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.walk.system import Layer
        >>> layer, generator = Layer.draw(fan_in=16, neurons=4), torch.Generator().manual_seed(0)
        >>> start = layer.start(1, 1, generator, torch.float32)
        >>> result = walk([AdamW(lr=1e-2, weight_decay=0.1)], layer.gradient("marginal", generator), start, steps=250)
        >>> result.norm_sq.shape, result.lengths.tolist()
        ((3, 1, 4), [100, 100, 50])
    """
    for name, count in (("steps", steps), ("window", window)):
        if count < 1:
            raise InvalidArgument(name, "must be at least 1", count)
    rule = type(rules[0])
    if any(type(other) is not rule for other in rules) or len(rules) != len(start):
        raise InvalidArgument("rules", f"must be {len(start)} of one class, one per config", rules)
    hyper = batched_hyper(rules, start)
    gradient_part = GradientPart(rule, hyper, start)
    state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in rule.state})
    recorder = Recorder(start, window)
    step = 0
    try:
        for step in range(1, steps + 1):
            old = state.param
            grad = gradient(old)
            recording = _Recording(normalizer)
            state.step = step
            state = SimpleNamespace(**rule.update(grad, state, hyper, recording))
            part = gradient_part(grad, step, old, state.param, recording.tape)
            recorder.add(state.param, state.param - old, part, grad)
            if recorder.filled == window or step == steps:
                begin = step - recorder.filled
                bad = recorder.first_bad()
                if bad is not None:
                    at, config = begin + bad[0] + 1, bad[1]
                    raise WalkDiverged(f"NaN or Inf at step {at} in config {config}, {rules[config]!r}", at, recorder.walk())
                recorder.close()
                if progress is not None:
                    progress(step)
    except KeyboardInterrupt:
        recorder.first_bad()
        raise WalkInterrupted(f"interrupted at step {step} of {steps}", step, recorder.walk()) from None
    return recorder.walk()
