"""What every fast engine owes: the reference engine's numbers where the noise is given, its law where it is not, and a walk
that does not depend on its company. The fused engine runs on a GPU where there is one, else in Triton's interpreter."""

import importlib
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rwsim.errors import InvalidArgument, Unavailable, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, AdamW, UpdateRule
from rwsim.optimizers.sgdm import SGDM
from rwsim.walk import blocked, fused, reference
from rwsim.walk.job import Job
from rwsim.walk.measure import Walk
from rwsim.walk.simulate import resolve_engine
from rwsim.walk.system import Layer
from tests.statistics import Z

GPU = torch.cuda.is_available()
SERIES = ("norm_sq", "angle", "angle_sq", "update_sq", "relative_sq", "distance_sq", "unit_grad_sq")
HYPER: dict[str, Any] = {
    "weight_decay": 0.3,
    "momentum": 0.8,
    "betas": (0.8, 0.95, 0.99),
    "dampening": 0.4,
    "nu": 0.6,
    "max_lr": 0.1,
    "mix": 2.0,
}


def device_of(engine: ModuleType) -> torch.device:
    return torch.device("cuda" if GPU and engine is fused else "cpu")


@pytest.fixture(params=["blocked", "fused"])
def engine(request) -> ModuleType:
    return importlib.import_module(f"rwsim.walk.{request.param}")


def make(rule: type[UpdateRule], lr: float = 0.02, **changed) -> UpdateRule:
    values = {k: (HYPER[k][: len(d)] if isinstance(d, tuple) else HYPER[k]) for k, d in rule.hyper.items() if k in HYPER}
    return rule(**{**values, "lr": lr, **changed})


def stub(job: Job, seed: int = 0):
    """Noise of every config and step, and a start."""
    generator = torch.Generator().manual_seed(seed)
    shape = (job.configs, job.steps, job.rows)
    normals = torch.randn(*shape, job.layer.fan_in, generator=generator, dtype=torch.float64)
    lengths = 5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    start = torch.randn(job.configs, job.rows, job.layer.fan_in, generator=generator, dtype=torch.float64)
    return {"noise": lambda config, step: (normals[config, step - 1], lengths[config, step - 1]), "start": start}


def both(engine: ModuleType, job: Job) -> tuple[Walk, Walk]:
    given = stub(job)
    return engine.walk(job, device_of(engine), **given), reference.walk(job, torch.device("cpu"), **given)


def assert_same(walk: Walk, expected: Walk, rtol: float) -> None:
    assert walk.lengths.tolist() == expected.lengths.tolist()
    for name in SERIES:
        np.testing.assert_allclose(getattr(walk, name), getattr(expected, name), rtol=rtol, err_msg=name)


@pytest.mark.parametrize("gradient", ["marginal", "gaussian"])
@pytest.mark.parametrize("name", RULES)
def test_given_the_noise_the_numbers_are_the_reference(engine, name, gradient):
    """Two configs, one of them without eps, momentum or decay: programs of their own."""
    rule = RULES[name]
    eps = {"eps": 1e-3} if "eps" in rule.hyper else {}
    zero = {key: 0.0 for key in ("eps", "momentum", "weight_decay") if key in rule.hyper}
    job = Job((make(rule, **eps), make(rule, 0.03, **zero)), Layer.draw(20, 3), 6, gradient, layers=2, window=4, dtype=torch.float64)
    assert_same(*both(engine, job), rtol=2e-7)


@pytest.mark.parametrize("fan_in", [2, 33, 64, 257, 1024])
def test_any_fan_in(engine, fan_in):
    job = Job((make(AdamW, eps=0.0),), Layer.draw(fan_in, 2), 3, window=2, dtype=torch.float64)
    assert_same(*both(engine, job), rtol=2e-7)


def test_even_gammas_float32_radial_and_schedules(engine):
    even = Job((make(AdamW, eps=1e-8),), Layer.draw(24, 3, gamma="uniform"), 12, window=5)
    assert_same(*both(engine, even), rtol=2e-4)
    rising, falling = np.linspace(0, 1, 12), np.stack([np.ones(12), np.linspace(1, 0.5, 12)], 1)
    job = Job(
        (make(AdamW, eps=0.0), make(AdamW, 0.05, eps=0.0)), Layer.draw(24, 3), 12, radial=0.2, window=5, dtype=torch.float64,
        schedule={"lr": rising + 0.1, "weight_decay": rising[::-1].copy(), "betas": falling},
    )  # fmt: skip
    assert_same(*both(engine, job), rtol=2e-7)
    coupled = Job((make(SGDM, 2.0),), Layer.draw(24, 3), 12, radial=0.2, window=5, dtype=torch.float64, schedule={"lr": rising + 0.1})
    assert_same(*both(engine, coupled), rtol=2e-7)


def equal(one: Walk, other: Walk, mine=slice(None), theirs=slice(None)) -> bool:
    return all(np.array_equal(getattr(one, name)[:, mine], getattr(other, name)[:, theirs]) for name in SERIES)


def test_a_walk_does_not_depend_on_its_company(engine, monkeypatch):
    layer, device = Layer.draw(20, 3), device_of(engine)
    rules = tuple(make(AdamW, lr, eps=eps) for lr, eps in ((0.01, 0.0), (0.02, 1e-8), (0.03, 0.0)))

    def walk(rules, steps=9, **options):
        return engine.walk(Job(rules, layer, steps, window=3, layers=2, **options), device)

    whole = walk(rules)
    assert equal(whole, walk(rules[::-1]), theirs=slice(None, None, -1))
    assert equal(whole, walk(rules[1:2]), mine=slice(1, 2))
    longer = walk(rules[:1], steps=13)
    assert np.array_equal(longer.angle[:3, 0], whole.angle[:, 0])
    twins = walk((rules[0], rules[0], rules[0]), replicates=(0, 0, 1))
    assert equal(twins, whole, mine=slice(0, 1), theirs=slice(0, 1)) and equal(twins, twins, slice(0, 1), slice(1, 2))
    assert not np.isclose(twins.angle[:, 2], twins.angle[:, 0], rtol=1e-3).any()
    assert not np.isclose(walk(rules[:1], seed=1).angle[:, 0], whole.angle[:, 0], rtol=1e-3).any()
    if engine is fused:
        monkeypatch.setattr(fused, "_LAUNCH", 1)
        monkeypatch.setattr(fused, "_ROWS_A_DEVICE", 4)
        split = fused.walk(Job(rules, layer, 9, window=3, layers=2), device, devices=[torch.device(device.type, 0 if GPU else None)] * 3)
        assert equal(whole, split)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in numpy
def test_divergence_is_named_and_what_came_before_is_kept(engine):
    rules = (make(SGDM, 0.1, momentum=0.0, weight_decay=1e-3), SGDM(lr=1e3, weight_decay=1.0, momentum=0.0))
    job = Job(rules, Layer.draw(20, 3), 40, window=4)
    with pytest.raises(WalkDiverged, match=r"NaN or Inf .*config 1, SGDM\(lr=1000") as caught:
        engine.walk(job, device_of(engine))
    walk = caught.value.walk
    assert 0 < walk.steps < caught.value.step <= walk.steps + 4 and np.isfinite(walk.norm_sq).all()


def test_interruption_keeps_the_walk(engine, monkeypatch):
    monkeypatch.setattr(fused, "_LAUNCH", 1)
    steps = 40 if engine is fused else 4000  # an engine is heard between launches, or chunks

    def stop(step: int) -> None:
        if step >= 8:
            raise KeyboardInterrupt

    with pytest.raises(WalkInterrupted) as caught:
        engine.walk(Job((make(AdamW, eps=0.0),), Layer.draw(20, 3), steps, window=4), device_of(engine), progress=stop)
    assert 8 <= caught.value.walk.steps < steps


def test_a_start_of_another_shape_is_refused(engine):
    job = Job((make(AdamW, eps=0.0),), Layer.draw(20, 3), 4)
    with pytest.raises(InvalidArgument, match=r"`start` must have shape \(1, 3, 20\), got \(3, 20\)"):
        engine.walk(job, device_of(engine), start=torch.zeros(3, 20))


class _Rooting(UpdateRule):
    name, hyper = "rooting", {"lr": ..., "weight_decay": ...}

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * grad**0.5}


def test_what_an_engine_lacks_is_named_with_one_that_has_it(engine):
    name = engine.__name__.rpartition(".")[2]
    with pytest.raises(Unavailable, match=f"`engine` {name} does not carry rule rooting.*use engine reference"):
        resolve_engine(name, Job((_Rooting(lr=0.1, weight_decay=0.1),), Layer.draw(20, 3), 4), device_of(engine))


# Equivalence in law: the same ensemble on the way to equilibrium, so no burn-in is needed. Large steps show much in a few.
def assert_same_law(engine: ModuleType, job: Job, catch: float, device: torch.device) -> None:
    """Ensemble means of time means agree within Z errors, and an error of `catch` would be seen."""
    ours, theirs = engine.walk(job, device_of(engine)), reference.walk(job, device)
    for name in ("norm_sq", "angle", "update_sq", "unit_grad_sq"):
        # Past the first windows: an update over the root of one or two squares has no variance.
        pair = [getattr(walk, name)[2:, 0].mean(0).reshape(job.layers, job.layer.neurons) for walk in (ours, theirs)]
        if job.layers > 1:  # what a neuron's gamma_out does to it is no noise: both engines walk the same
            level = (pair[0].mean(0) + pair[1].mean(0)) / 2
            pair = [values / level for values in pair]
        if job.gradient == "faithful":  # neurons of a layer are not independent
            pair = [values.mean(1) for values in pair]
        error = math.hypot(*(x.std() / math.sqrt(x.size) for x in pair)) / pair[1].mean()
        assert Z * error < catch, f"{name}: no power: {Z * error:.2e}"
        off = pair[0].mean() / pair[1].mean() - 1
        assert abs(off) <= Z * error + 1e-6, f"{name}: off by {off:+.3%}, {error:.3%} expected"


def law_rule(name: str, gradient: str) -> UpdateRule:
    """Hyperparameters under which much happens in a few steps. An eps, since torch's normals on a GPU may be exactly 0."""
    rule = RULES[name]
    linear = name in ("sgd", "sgdm", "nesterov", "dampened", "sgdw", "qhm")
    lr = 0.05 if not linear or gradient == "gaussian" else 5.0 if name in ("sgd", "dampened", "qhm") else 1.0
    return make(rule, lr, weight_decay=0.5 / lr * (0.02 if linear else 0.05), **({"eps": 1e-12} if "eps" in rule.hyper else {}))


@pytest.mark.parametrize(("name", "gradient"), [("adamw", "marginal"), ("sgdm", "gaussian"), ("lion", "marginal")])
def test_law_of_the_reference(engine, name, gradient, monkeypatch):
    """A few rules here; every rule and gradient to 0.3 % in the fused engine's gpu and the blocked one's slow tests."""
    if not GPU:  # one wide program: the interpreter is slow by the operation
        monkeypatch.setattr(fused.Shape, "of", classmethod(lambda cls, fan_in: cls(4, 2048, 8)))
    job = Job((law_rule(name, gradient),), Layer.draw(16, 2048, gamma="uniform"), 60, gradient, window=10)
    assert_same_law(engine, job, 0.05, device_of(engine))


def test_another_law_is_rejected():
    """Negative control: a decay larger by a seventh."""
    layer = Layer.draw(16, 2048, gamma="uniform")
    right, wrong = (Job((make(AdamW, 0.05, weight_decay=decay, eps=1e-12),), layer, 60, window=10) for decay in (0.5, 0.57))
    other = ModuleType("other")
    vars(other)["walk"] = lambda job, device: reference.walk(wrong, device)
    with pytest.raises(AssertionError, match=r": off by [+-]"):
        assert_same_law(other, right, 0.05, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["marginal", "gaussian"])
@pytest.mark.parametrize("name", RULES)
def test_law_of_the_reference_to_a_third_of_a_percent_on_the_cpu(name, gradient):
    job = Job((law_rule(name, gradient),), Layer.draw(40, 64), 100, gradient, layers=9216, window=20)
    assert_same_law(blocked, job, 0.003, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("gradient", ["marginal", "gaussian", "faithful"])
@pytest.mark.parametrize("name", RULES)
def test_law_of_the_reference_to_a_third_of_a_percent(name, gradient):
    job = Job((law_rule(name, gradient),), Layer.draw(40, 64), 100, gradient, layers=9216, window=20)
    assert_same_law(fused, job, 0.003, torch.device("cuda"))
