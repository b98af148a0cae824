"""The reference engine: any rule, any device, float32 or float64, in plain torch. The engine the others must match."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.errors import InvalidArgument, WalkDiverged, WalkInterrupted
from rwsim.optimizers.rule import UpdateRule
from rwsim.walk.job import Job, Noise
from rwsim.walk.measure import Recorder, Walk
from rwsim.walk.system import Gradient, Weight, marginal_gradient


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
        start: Initial weights; sets shape, device and dtype.
        hyper: The hyperparameters of every step, to look for decoupled decay; None always keeps separate buffers (for
            hyperparameters that change, and to test one against the other).
    """

    def __init__(self, rule: type[UpdateRule], start: Tensor, hyper: SimpleNamespace | None = None) -> None:
        self.rule = rule
        self.keep = None if hyper is None else self._probe(rule, hyper, start.device)
        self.state = SimpleNamespace(param=0.0)
        if self.keep is None:
            self.state = SimpleNamespace(param=0.0, **{name: torch.zeros_like(start) for name in rule.state})

    @staticmethod
    def _probe(rule: type[UpdateRule], hyper: SimpleNamespace, device: torch.device) -> float | None:
        """d w_{t+1} / d w_t if no buffer depends on w and w_{t+1} is affine in it, else None."""
        one = torch.ones(1, dtype=torch.float64, device=device)
        buffers = {name: 0.3 * one for name in rule.state}
        at = [rule.update(0.7 * one, SimpleNamespace(param=p * one, step=3, **buffers), hyper, torch) for p in (0.0, 1.0, 2.0)]
        if any(not torch.equal(at[0][name], at[i][name]) for name in rule.state for i in (1, 2)):
            return None
        first, second = at[1]["param"] - at[0]["param"], at[2]["param"] - at[1]["param"]
        return float(first) if torch.allclose(first, second, rtol=1e-9, atol=0.0) else None

    def __call__(self, grad: Tensor, step: int, old: Tensor, new: Tensor, tape: list[Tensor], hyper: SimpleNamespace) -> Tensor:
        if self.keep is not None:
            return new - self.keep * old
        self.state.step = step
        bare = SimpleNamespace(**{**vars(hyper), "weight_decay": 0.0})
        self.state = SimpleNamespace(**self.rule.update(grad, self.state, bare, _Replaying(tape)))
        part, self.state.param = self.state.param, 0.0
        return part


def seeded(key: int, device: torch.device, path: tuple[int, ...] = ()) -> torch.Generator:
    """A generator in which all 64 bits of `key` count: torch's own seeding on the CPU drops the upper 32.

    On the CPU each `path` makes another one.
    """
    generator = torch.Generator(device=device).manual_seed(key)
    if device.type == "cpu":
        state = generator.get_state()
        words = np.random.MT19937(np.random.SeedSequence(key, spawn_key=path)).state["state"]["key"]
        # Three words of seed and position, then the 624 words of the Mersenne twister, one in 64 bits.
        state.view(torch.int64)[3:627] = torch.from_numpy(words.astype(np.int64))
        generator.set_state(state)
    return generator


def _stubbed(job: Job, config: int, device: torch.device, noise: Noise) -> Gradient:
    """The gradient of one config's step after step, from given numbers."""
    if job.gradient == "faithful":
        raise InvalidArgument("noise", "must not be given for the faithful gradient", noise, "take marginal or gaussian")
    gamma_in, gamma_out = job.layer.scales(job.dtype, device, job.layers)
    steps = count(1)

    def gradient(weight: Tensor) -> Tensor:
        normals, lengths = (x.to(device, job.dtype) for x in noise(config, next(steps)))
        return normals if job.gradient == "gaussian" else marginal_gradient(weight, normals, lengths, gamma_in, gamma_out)

    return gradient


class _Config:
    """One config under way."""

    def __init__(self, job: Job, config: int, start: Tensor, gradient: Gradient, normalizer: Tensor | None) -> None:
        self.job, self.config, self.gradient, self.normalizer = job, config, gradient, normalizer
        self.fixed = None if job.schedule else job.hyper(config, 1)
        self.part = GradientPart(job.rule, start, self.fixed)
        self.state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in job.rule.state})

    def take(self, step: int, recorder: Recorder) -> None:
        """Take one step and record it."""
        hyper = self.job.hyper(self.config, step) if self.fixed is None else self.fixed
        old = self.state.param
        grad = self.gradient(old)
        if self.job.radial:
            grad = torch.add(grad, old, alpha=self.job.radial)
        recording = _Recording(self.normalizer)
        self.state.step = step
        self.state = SimpleNamespace(**self.job.rule.update(grad, self.state, hyper, recording))
        new = self.state.param
        recorder.add(self.config, new, new - old, self.part(grad, step, old, new, recording.tape, hyper), grad)


# See `simulate.ENGINES`.
ALONE = False


def lacks(job: Job, device: torch.device) -> str:
    """What of a job this engine does not carry: nothing."""
    return ""


def walk(
    job: Job,
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
    start: Weight | None = None,
    noise: Noise | None = None,
    normalizer: Tensor | None = None,
    enough: Callable[[Walk], Walk | None] | None = None,
) -> Walk:
    """Walk every config of a job on its own, window by window in turn.

    Args:
        job: What to walk.
        device: Where.
        progress: Called after each window with the number of steps done.
        start: Initial weights, shape (config, neuron, dim), in place of drawn ones. Not changed.
        noise: Source of the numbers that a gradient is made of, in place of each config's generator; the Gaussian gradient
            takes the normals only.
        normalizer: Value of the update's square root, broadcast against (config, neuron, dim), in place of its own
            estimate: the walk in which the theory of second-moment-normalized rules is exact.
        enough: See `simulate.run`.

    Raises:
        InvalidArgument: `start` of another shape, `noise` with the faithful gradient.
        WalkDiverged: NaN or Inf, with the first step and config that show it, and the walk up to there.
        WalkInterrupted: Ctrl-C, with the walk so far.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> from rwsim.walk.system import Layer
        >>> job = Job((AdamW(lr=1e-2, weight_decay=0.1),), Layer.draw(fan_in=16, neurons=4), steps=250)
        >>> result = walk(job, torch.device("cpu"))
        >>> result.norm_sq.shape, result.lengths.tolist()
        ((3, 1, 4), [100, 100, 50])
    """
    job.check_start(start)
    roots = [None] * job.configs if normalizer is None else list(torch.broadcast_to(normalizer, job.shape))
    configs = []
    for config, key in enumerate(job.keys()):
        generator = seeded(key, device)
        drawn = job.layer.start(1, job.layers, generator, job.dtype)[0]
        weight = drawn if start is None else start[config].to(device, job.dtype)
        if noise is None:
            gradient = job.layer.gradient(job.gradient, generator, job.dtype, job.layers)
        else:
            gradient = _stubbed(job, config, device, noise)
        configs.append(_Config(job, config, weight, gradient, roots[config]))
    recorder = Recorder(torch.stack([c.state.param for c in configs]), job.window)
    step = 0
    try:
        for done in range(0, job.steps, job.window):
            end = min(done + job.window, job.steps)
            for each in configs:
                for step in range(done + 1, end + 1):
                    each.take(step, recorder)
            bad = recorder.first_bad()
            if bad is not None:
                at, which = done + bad[0] + 1, bad[1]
                raise WalkDiverged(f"NaN or Inf at step {at} in config {which}, {job.rules[which]!r}", at, recorder.walk(), (which,))
            recorder.close()
            if progress is not None:
                progress(end)
            if enough is not None and (found := enough(recorder.walk())) is not None:
                return found
    except KeyboardInterrupt:
        recorder.first_bad()
        raise WalkInterrupted(f"interrupted at step {step} of {job.steps}", step, recorder.walk()) from None
    return recorder.walk()
