"""The blocked engine: exact beside the reference where noise is stubbed, bitwise the same in any company, loud where it breaks."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rwsim.errors import InvalidArgument, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, SGDM, AdamW
from rwsim.optimizers.rule import UpdateRule
from rwsim.walk import blocked, reference, worker
from rwsim.walk.blocked import lacks, walk
from rwsim.walk.job import Job
from rwsim.walk.measure import Walk, rotation_angle
from rwsim.walk.system import Layer

CPU = torch.device("cpu")
SERIES = [field.name for field in fields(Walk)][2:]


def strong(rule: type[UpdateRule], lr: float = 0.05, weight_decay: float = 0.1, **more: float) -> UpdateRule:
    """A rule whose momentum forgets within some steps: some averages are kept as scales, some are not."""
    betas = {"betas": (0.8, 0.95, 0.97)[: len(rule.hyper["betas"])]} if "betas" in rule.hyper else {}
    return rule(lr=lr, weight_decay=weight_decay, **betas, **more)


def numbers(job: Job, seed: int = 0):
    """Start and noise for both engines, gradients about as large as the weights."""
    generator = torch.Generator().manual_seed(seed)
    shape = (job.configs, job.rows, job.layer.fan_in)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    normals = torch.randn((job.steps, *shape), generator=generator, dtype=torch.float64)
    lengths = 0.5 + torch.rand((job.steps, *shape[:2]), generator=generator, dtype=torch.float64)
    return {"start": start, "noise": lambda config, step: (normals[step - 1, config], lengths[step - 1, config])}


def assert_close(found: Walk, expected: Walk, rtol: float, names: list[str] = SERIES) -> None:
    assert found.window == expected.window and found.lengths.tolist() == expected.lengths.tolist()
    for name in names:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=rtol, err_msg=name)


def assert_same(found: Walk, expected: Walk, config: slice | list[int] = slice(None)) -> None:
    """Bitwise, in the windows that both have."""
    count = min(len(found.lengths), len(expected.lengths))
    for name in SERIES:
        assert np.array_equal(getattr(found, name)[:count], getattr(expected, name)[:count, config]), name


def layer(fan_in: int = 7, neurons: int = 3, gamma: str = "normal", seed: int = 1) -> Layer:
    return Layer.draw(fan_in, neurons, 8, neurons * 8.0, gamma, seed)


def exact_jobs():
    for name, rule in RULES.items():
        pair = (strong(rule), strong(rule, 0.02, 0.4))
        yield f"{name}-marginal", Job(pair, layer(), 70, layers=2, window=30, dtype=torch.float64)
        yield f"{name}-gaussian", Job(pair, layer(), 70, "gaussian", radial=0.3, window=30, dtype=torch.float64)
        eps = {"eps": 1e-2} if "eps" in rule.hyper else {}
        factors: dict[str, np.ndarray] = {"lr": np.linspace(0.1, 1.0, 70), "weight_decay": np.linspace(1.0, 0.5, 70)}
        if "betas" in rule.hyper:
            factors["betas"] = np.linspace(1.0, 0.9, 70 * len(rule.hyper["betas"])).reshape(70, -1)
        free = Job(
            (strong(rule, **eps), strong(rule, 0.1, 0.0, **eps)), layer(gamma="uniform"), 70, radial=-0.1, schedule=factors, window=30,
            dtype=torch.float64,
        )  # fmt: skip
        yield f"{name}-schedule", free


@pytest.mark.parametrize(("label", "job"), list(exact_jobs()), ids=lambda x: x if isinstance(x, str) else "")
def test_engine_equals_the_reference(label, job):
    given = numbers(job)
    assert_close(walk(job, CPU, **given), reference.walk(job, CPU, **given), 1e-10)


@pytest.mark.parametrize("rule", [AdamW, SGDM])
def test_engine_equals_the_reference_over_chunks(rule):
    """Scales begin anew, bias corrections go on."""
    job = Job((rule(lr=0.02, weight_decay=0.2),), layer(4, 2), 2 * worker._CHUNK + 80, window=100, dtype=torch.float64)
    given = numbers(job)
    assert_close(walk(job, CPU, **given), reference.walk(job, CPU, **given), 1e-10)


class Made(UpdateRule):
    """A base of rules made up for the planner."""

    hyper = {"lr": ..., "weight_decay": ...}


class Swapping(Made):
    name, state = "swapping", ("a", "b")

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * (state.a + grad), "a": 0.9 * state.b + grad, "b": 0.5 * state.a}


class Differing(Made):
    """Reads a buffer before and after its update, and both in one product."""

    name, state = "differing", ("m",)

    @staticmethod
    def update(grad, state, hyper, xp):
        m = 0.95 * state.m + grad
        param = state.param - hyper.lr * (m - 0.5 * state.m) - 0.01 * hyper.lr * (m * state.m)
        return {"param": param - hyper.lr * hyper.weight_decay * state.param, "m": m}


class Averaging(Made):
    """A buffer made of the new parameter."""

    name, state = "averaging", ("slow", "copy")

    @staticmethod
    def update(grad, state, hyper, xp):
        param = state.param - hyper.lr * (grad + hyper.weight_decay * (state.param - state.slow))
        return {"param": param, "slow": 0.9 * state.slow + 0.1 * param, "copy": param}


class Forgetting(Made):
    """A decay far from 1; cubes, quotients, reciprocals, constants, roots of sums, signs of scaled arrays."""

    name, state = "forgetting", ("v", "count", "idle")

    @staticmethod
    def update(grad, state, hyper, xp):
        v = 0.95 * state.v + grad**4 + grad**2 + 0.1
        root = xp.sqrt(0.5 * v + 0.25 * grad**2 + 1e-3)
        shape = 1 / (1 + root) + (-2 * grad) / (root + 0.5) + 0.1 * xp.sign(-3 * grad) + grad**3 / xp.sqrt(4 * v)
        count = 0.5 * state.count + 1
        return {"param": 0.3 * state.param + hyper.lr * shape + 0.01 * count, "v": v, "count": count, "idle": state.idle}


class Plain(Made):
    """Nothing but the gradient; a buffer that only repeats it."""

    name, state = "plain", ("last", "ones")

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * grad, "last": grad, "ones": 0.0 * state.last}


@pytest.mark.parametrize("rule", [Swapping, Differing, Averaging, Forgetting, Plain])
def test_any_rule_that_traces_equals_the_reference(rule):
    job = Job((rule(lr=0.05, weight_decay=0.3), rule(lr=0.01, weight_decay=0.1)), layer(), 80, window=40, dtype=torch.float64)
    given = numbers(job)
    assert_close(walk(job, CPU, **given), reference.walk(job, CPU, **given), 1e-9)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_learning_rate_may_start_from_zero(rule):
    factors = np.concatenate([np.zeros(3), np.linspace(0.0, 1.0, 37)])
    job = Job((strong(rule),), layer(), 40, schedule={"lr": factors}, window=1, dtype=torch.float64)
    given = numbers(job)
    # No angle: where only decay moves a weight, its angle is what rounding leaves of zero.
    sizes = [name for name in SERIES if "angle" not in name]
    assert_close(walk(job, CPU, **given), reference.walk(job, CPU, **given), 1e-10, sizes)


@pytest.mark.parametrize(("name", "lr"), [("adamw", 1e-4), ("sgdm", 3e-4), ("lion", 1e-4)])
def test_single_precision_holds_small_steps(name, lr):
    """Distances to 1e-4 at relative updates of 1e-4; angles as well as norms in single precision allow."""
    alike = replace(layer(96, 5), gamma_out=np.ones(5))
    double = Job((RULES[name](lr=lr, weight_decay=0.1),), alike, 60, window=20, dtype=torch.float64)
    given = numbers(double)
    expected = walk(double, CPU, **given)
    assert 1e-5 < np.sqrt(expected.relative_sq).min() and np.sqrt(expected.relative_sq).max() < 1e-3
    found = walk(replace(double, dtype=torch.float32), CPU, **given)
    assert_close(found, expected, 1e-4, [name for name in SERIES if "angle" not in name])
    assert_close(found, expected, 1e-2, ["angle", "angle_sq"])


def test_angles_in_place_are_those_of_the_recorder():
    generator = torch.Generator().manual_seed(0)
    norms = 1 + 0.1 * torch.rand(9, 4, generator=generator, dtype=torch.float64)
    distance = 0.3 * torch.rand(8, 4, generator=generator, dtype=torch.float64)
    angle, square = np.empty((8, 4)), np.empty((8, 4))
    worker.rotation_angles(norms.numpy(), distance.square().numpy(), angle, square)
    np.testing.assert_allclose(angle, rotation_angle(norms[:-1], norms[1:], distance), rtol=1e-12)
    np.testing.assert_allclose(square, angle**2, rtol=1e-12)


RULE_PAIR = (AdamW(lr=1e-2, weight_decay=0.1), AdamW(lr=3e-3, weight_decay=1.0, betas=(0.8, 0.99)))


EVEN_PAIR = (RULE_PAIR[0], AdamW(lr=3e-3, weight_decay=1.0))


@pytest.mark.parametrize("pair", [RULE_PAIR, EVEN_PAIR], ids=["apart", "abreast"])
@pytest.mark.parametrize(
    ("gradient", "dtype"),
    [
        ("marginal", torch.float32),
        pytest.param("gaussian", torch.float32, marks=pytest.mark.slow),
        pytest.param("marginal", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_a_walk_depends_on_nothing_but_its_config(gradient, dtype, pair, monkeypatch):
    """Bitwise: company, order, number of processes and with it of rows in a group, length."""
    monkeypatch.setattr(worker, "_FEWEST", 1)
    wide = Layer.draw(100, 34, 8)
    job = Job(pair, wide, 650, gradient, layers=3, window=50, dtype=dtype)
    assert worker.groups(job, 1) == [worker.Group(0, 2, 0, 102)] and len(worker.groups(job, 4)) == 4
    together = walk(job, CPU, processes=0)
    for count in (1, 4):
        assert_same(walk(job, CPU, processes=count), together)
    assert_same(walk(replace(job, rules=pair[::-1]), CPU), together, [1, 0])
    for config in (0, 1):
        assert_same(walk(replace(job, rules=pair[config : config + 1]), CPU), together, [config])
    assert job.steps > worker._CHUNK and job.steps % job.window == 0
    assert_same(walk(replace(job, steps=150), CPU), together)
    assert_same(walk(replace(job, steps=3 * worker._CHUNK), CPU), together)
    again = walk(replace(job, replicates=(1, 0)), CPU)
    assert_same(again, walk(replace(job, replicates=(1, 0), rules=pair), CPU, processes=2))
    assert not np.array_equal(again.norm_sq[:, 0], together.norm_sq[:, 0]) and np.array_equal(again.norm_sq[:, 1], together.norm_sq[:, 1])
    halves = walk(replace(job, window=25), CPU).norm_sq
    np.testing.assert_allclose((halves[0] + halves[1]) / 2, together.norm_sq[0], rtol=1e-12)


def test_groups_are_not_cut_too_small():
    job = Job(RULE_PAIR[:1], Layer.draw(128, 128, 8), 3, layers=2)
    assert [group.rows for group in worker.groups(job, 1)] == [256] and [group.rows for group in worker.groups(job, 8)] == [128, 128]


def test_neurons_and_steps_have_their_own_numbers():
    job = Job(RULE_PAIR[:1], Layer(np.ones(128), np.ones(130), 8), 3, window=1)
    found = walk(job, CPU)
    for name in ("norm_sq", "unit_grad_sq"):
        assert len(np.unique(getattr(found, name))) > 3 * 130 - 5  # chance hits of single precision


def test_gradients_have_their_law():
    """E ||g~||^2 = (C - 1) B (B - 2) / (B - 3) gamma_out^2 / B^2 over K^2 for even inputs, as the theory has it."""
    even = Layer(np.ones(32), np.ones(256), 16)
    job = Job((AdamW(lr=0.0, weight_decay=0.0),), even, 400, window=400)
    sample = walk(job, CPU).unit_grad_sq[0, 0]
    expected = 31 * 16 * 14 / 13 / (256 * 16) ** 2
    assert abs(sample.mean() / expected - 1) < 6 * sample.std() / math.sqrt(256) / expected < 0.02


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_step_is_named_and_what_came_before_is_kept(poison, processes):
    normals = torch.randn(1000, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    normals[136, 1, 2, 0] = poison
    normals[140, 0] = poison
    rules = tuple(SGDM(lr=lr, weight_decay=0.01) for lr in (0.1, 0.2, 0.3))
    job = Job(rules, Layer.draw(4, 3), 1000, "gaussian", schedule={"lr": np.ones(1000)})
    given = {"start": torch.ones(3, 3, 4), "noise": lambda config, step: (normals[step - 1, config], torch.ones(3))}
    with pytest.raises(WalkDiverged, match=r"NaN or Inf at step 137 in config 1, SGDM\(lr=0.2") as caught:
        walk(job, CPU, processes=processes, **given)
    assert caught.value.step == 137 and caught.value.walk.lengths.tolist() == [100, 36]
    with pytest.raises(WalkDiverged) as expected:
        reference.walk(job, CPU, **given)
    assert_close(caught.value.walk, expected.value.walk, 1e-4)
    with pytest.raises(WalkDiverged) as whole:
        walk(replace(job, window=68), CPU, processes=processes, **given)
    assert whole.value.walk.lengths.tolist() == [68, 68]


def test_divergence_at_the_first_step_keeps_nothing():
    job = Job((SGDM(lr=1e30, weight_decay=0.1),), layer(), 20)
    with pytest.raises(WalkDiverged, match="at step 1 in config 0") as caught:
        walk(job, CPU, **numbers(job))
    assert caught.value.step == 1 and len(caught.value.walk.lengths) == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_progress_and_interruption(processes):
    job, seen = Job(RULE_PAIR, layer(), 5 * worker._CHUNK + 10, window=100), []
    whole = walk(job, CPU, progress=seen.append, processes=processes)
    assert seen == sorted(set(seen)) and seen[-1] == job.steps and all(step % 100 == 0 for step in seen[:-1])

    def stop(step):
        if step >= 1000:
            raise KeyboardInterrupt

    with pytest.raises(WalkInterrupted, match=r"interrupted at step \d*00 of 1000000") as caught:
        walk(replace(job, steps=10**6), CPU, progress=stop, processes=processes)
    assert caught.value.step == 100 * len(caught.value.walk.lengths) >= 1000
    assert_same(caught.value.walk, whole)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_walk_ends_where_it_is_enough(processes):
    """What comes back is the beginning of the whole walk, and no process goes on."""
    job = Job((AdamW(lr=0.02, weight_decay=0.5),), Layer.draw(64, 256, seed=3), 4000, window=50)
    whole, asked = walk(job, CPU, processes=0), []

    def enough(so_far: Walk) -> Walk | None:
        asked.append(so_far.steps)
        return so_far.until(620) if so_far.steps >= 620 else None

    found = walk(job, CPU, processes=processes, enough=enough)
    assert found.steps == 600 and all(np.array_equal(getattr(found, name), getattr(whole, name)[:12]) for name in SERIES)
    assert asked == sorted(set(asked)) and asked[-1] < 4000
    assert not multiprocessing.active_children()


def test_a_dead_process_is_an_error_and_leaves_none_behind():
    def noise(config, step):
        if step == 700:
            os._exit(3)
        return torch.full((3, 7), 0.1), torch.ones(3)

    job = Job(RULE_PAIR, layer(), 10_000, "gaussian")
    with pytest.raises(RuntimeError, match="a process of the walk ended with exit code 3"):
        walk(job, CPU, noise=noise, processes=2)


_INTERRUPTED = """
import sys, torch
from rwsim.errors import WalkInterrupted
from rwsim.optimizers import AdamW
from rwsim.walk.blocked import walk
from rwsim.walk.job import Job
from rwsim.walk.system import Layer
job = Job((AdamW(lr=1e-2, weight_decay=0.1),) * 2, Layer.draw(64, 64), 10**7)
try:
    walk(job, torch.device("cpu"), processes=2, progress=lambda step: print(step, flush=True))
except WalkInterrupted as error:
    sys.exit(0 if len(error.walk.lengths) * 100 == error.step > 0 else 4)
sys.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_control_c_ends_every_process():
    """Sent, as a terminal does, to the whole group."""
    with subprocess.Popen([sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, start_new_session=True) as run:
        assert run.stdout is not None and int(run.stdout.readline()) > 0
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(run.pid, 0)


def test_a_walk_outlives_the_shell_that_started_it(monkeypatch):
    parents = iter(range(1, 100))
    monkeypatch.setattr(worker.os, "getppid", lambda: next(parents))
    job = Job(RULE_PAIR, layer(), 3 * worker._CHUNK)
    assert walk(job, CPU).steps == job.steps


def test_what_it_lacks(monkeypatch):
    class Rooted(Made):
        name = "rooted"

        @staticmethod
        def update(grad, state, hyper, xp):
            return {"param": state.param - hyper.lr * grad**0.3}

    job = Job((SGDM(lr=0.1, weight_decay=0.1),), layer(), 3)
    assert lacks(job, CPU) == "" and lacks(replace(job, gradient="gaussian", dtype=torch.float64), CPU) == ""
    assert lacks(replace(job, gradient="faithful"), CPU) == "the faithful gradient"
    assert lacks(job, torch.device("meta")) == "device meta"
    assert lacks(replace(job, rules=(Rooted(lr=0.1, weight_decay=0.1),)), CPU).startswith(
        "rule rooted: the update of rooted cannot be traced"
    )
    with pytest.raises(InvalidArgument, match=r"`start` must have shape \(1, 3, 7\), got \(3, 7\)"):
        walk(job, CPU, start=torch.ones(3, 7))


def test_a_walk_worth_it_is_forked(monkeypatch):
    job = Job(RULE_PAIR, layer(), 10)
    assert blocked._processes(job) == 0
    monkeypatch.setattr(blocked, "_SMALL", 1)
    assert blocked._processes(job) == (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0)
    monkeypatch.setattr(blocked.multiprocessing, "current_process", lambda: type("Daemon", (), {"daemon": True}))
    assert blocked._processes(job) == 0
