"""The reference engine and what it measures: exact where noise is stubbed, loud where a walk breaks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rwsim
from rwsim.errors import InvalidArgument, Unavailable, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion
from rwsim.walk.measure import rotation_angle
from rwsim.walk.reference import GradientPart, batched_hyper, walk
from rwsim.walk.simulate import run, simulate
from rwsim.walk.system import Layer

RULE_SETS = [
    [SGDM(lr=0.1, weight_decay=0.05)],
    [AdamW(lr=0.05, weight_decay=0.5, betas=(0.9, 0.99))],
    [AdamL2(lr=0.05, weight_decay=0.5, betas=(0.9, 0.99))],
    [Lion(lr=0.01, weight_decay=1.0)],
]


def replay(gradients):
    """A gradient source that returns the given tensors in order."""
    iterator = iter(gradients)
    return lambda weight: next(iterator)


def by_hand(rule, start, gradients):
    """The same quantities, step by step in float64, by their definitions; the gradient share by separate buffers."""
    w, rows = start, []
    buffers = {name: torch.zeros_like(start) for name in rule.state}
    share = {name: torch.zeros_like(start) for name in rule.state}
    for step, grad in enumerate(gradients, 1):
        tape = []
        keep = SimpleNamespace(
            sqrt=lambda x, t=tape: t.append(torch.sqrt(x)) or t[-1], sign=lambda x, t=tape: t.append(torch.sign(x)) or t[-1]
        )
        new = rule.update(grad, SimpleNamespace(param=w, step=step, **buffers), rule.values, keep)
        again = iter(tape)
        give = SimpleNamespace(sqrt=lambda x, a=again: next(a), sign=lambda x, a=again: next(a))
        bare = SimpleNamespace(**{**vars(rule.values), "weight_decay": 0.0})
        part = rule.update(grad, SimpleNamespace(param=torch.zeros_like(w), step=step, **share), bare, give)
        after = new["param"]
        cosine = (w * after).sum(-1) / (w.norm(dim=-1) * after.norm(dim=-1))
        rows.append(
            [
                (after**2).sum(-1), torch.arccos(cosine.clamp(-1, 1)), (part["param"] ** 2).sum(-1),
                ((after - w) ** 2).sum(-1) / (w**2).sum(-1), (grad**2).sum(-1) * (w**2).sum(-1),
            ]
        )  # fmt: skip
        w, buffers, share = after, {n: new[n] for n in rule.state}, {n: part[n] for n in rule.state}
    return [torch.stack(column).numpy() for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("rules", RULE_SETS, ids=lambda r: r[0].name)
def test_engine_equals_the_definitions(rules):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 3, 5, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(1, 3, 5, generator=generator, dtype=torch.float64) for _ in range(25)]
    found = walk(rules, replay(gradients), start, 25, window=10)
    assert found.lengths.tolist() == [10, 10, 5] and found.steps == 25
    expected = by_hand(rules[0], start, gradients)
    names = ("norm_sq", "angle", "update_sq", "relative_sq", "unit_grad_sq")
    for name, series in zip(names, expected, strict=True):
        windows = [series[a:b].mean(0) for a, b in ((0, 10), (10, 20), (20, 25))]
        np.testing.assert_allclose(getattr(found, name), windows, rtol=1e-9)
    np.testing.assert_allclose(found.angle_sq[0], (expected[1][:10] ** 2).mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.trace("norm")[2], np.sqrt(expected[0][20:].mean(0)), rtol=1e-9)


@pytest.mark.parametrize("rules", RULE_SETS, ids=lambda r: r[0].name)
def test_probed_share_equals_separate_buffers(rules):
    """The short cut for decoupled decay beside the plain way."""
    rule = rules[0]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1, 2, 4, generator=generator, dtype=torch.float64)
    short, plain = (GradientPart(type(rule), rule.values, start, probe=probe) for probe in (True, False))
    assert (short.keep is not None) is (rule.name in ("adamw", "lion"))
    state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in rule.state})
    for step in range(1, 30):
        grad = torch.randn(1, 2, 4, generator=generator, dtype=torch.float64)
        state.step, tape = step, []
        record = SimpleNamespace(
            sqrt=lambda x, t=tape: t.append(torch.sqrt(x)) or t[-1], sign=lambda x, t=tape: t.append(torch.sign(x)) or t[-1]
        )
        old = state.param
        state = SimpleNamespace(**rule.update(grad, state, rule.values, record))
        a, b = (part(grad, step, old, state.param, list(tape)) for part in (short, plain))
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_batched_configs_equal_single_ones(name):
    settings = [{"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.4}]
    if "betas" in RULES[name].hyper:
        count = len(RULES[name].hyper["betas"])
        settings = [{**s, "betas": b[:count]} for s, b in zip(settings, ((0.9, 0.99, 0.95), (0.5, 0.9, 0.8)), strict=True)]
    rules = [RULES[name](**s) for s in settings]
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(2, 3, 5, generator=generator, dtype=torch.float64) for _ in range(20)]
    together = walk(rules, replay(gradients), start, 20, window=5)
    for i, rule in enumerate(rules):
        alone = walk([rule], replay([g[i : i + 1] for g in gradients]), start[i : i + 1], 20, window=5)
        np.testing.assert_allclose(together.norm_sq[:, i], alone.norm_sq[:, 0], rtol=1e-12)
        np.testing.assert_allclose(together.update_sq[:, i], alone.update_sq[:, 0], rtol=1e-9)
    assert batched_hyper(rules[:1], start) is rules[0].values


@given(angle=st.floats(1e-6, 3.0), scale=st.floats(0.1, 10.0))
def test_angle_in_float32_keeps_its_precision(angle, scale):
    """A cosine in float32 cannot tell angles below 3e-4 apart; the chord can."""
    old = torch.tensor([1.0, 0.0], dtype=torch.float64)
    new = scale * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    sizes = [x.float().norm() for x in (old, new, new - old)]
    # Each rounded to 6e-8: chord^2 = (d^2 - (n' - n)^2) / (n n') is off by that much of d^2 and of the radial part.
    chord_sq = 4 * math.sin(angle / 2) ** 2
    distance_sq = chord_sq * scale + (scale - 1) ** 2
    error = 6e-8 * (2 * distance_sq + 2 * abs(scale - 1) * (1 + scale)) / scale + 2e-7 * chord_sq
    low, high = (2 * math.asin(min(1.0, math.sqrt(max(chord_sq + side * error, 0.0)) / 2)) for side in (-1, 1))
    found = float(rotation_angle(*(s.double() for s in sizes)))
    # The vectors themselves are rounded to float32 first, each coordinate by 6e-8 of its size.
    assert low - 2e-7 * (1 + 1 / scale) <= found <= high + 2e-7 * (1 + 1 / scale)


def test_small_rotations_survive_float32():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 50, 128, generator=generator)
    tangent = torch.randn(1, 50, 128, generator=generator)
    tangent -= start * (tangent * start).sum(-1, keepdim=True) / (start**2).sum(-1, keepdim=True)
    tangent *= start.norm(dim=-1, keepdim=True) / tangent.norm(dim=-1, keepdim=True)
    found = walk([SGDM(lr=1e-4, weight_decay=0.0)], lambda w: -tangent, start, 1)
    np.testing.assert_allclose(found.angle[0, 0], math.atan(1e-4), rtol=2e-3)


def test_walk_is_bitwise_repeatable_and_seeds_differ():
    layer = Layer.draw(16, 8)
    one, same, other = (run([AdamW(lr=0.01, weight_decay=0.1)], layer, steps=150, seed=s) for s in (0, 0, 1))
    assert np.array_equal(one.norm_sq, same.norm_sq) and not np.array_equal(one.norm_sq, other.norm_sq)


def test_progress_and_kept_windows():
    seen = []
    found = run([Lion(lr=0.01, weight_decay=0.1)], Layer.draw(8, 2), steps=250, window=50, progress=seen.append)
    assert seen == [50, 100, 150, 200, 250]
    assert len(found.kept(101).lengths) == 2 and len(found.kept(0).lengths) == 5
    partial = run([Lion(lr=0.01, weight_decay=0.1)], Layer.draw(8, 2), steps=130, window=50)
    assert partial.kept(0).lengths.tolist() == [50, 50]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_step_is_named_and_what_came_before_is_kept(poison):
    start = torch.ones(2, 3, 4)

    def gradient(weight, count=[0]):  # noqa: B006 - the counter is meant to persist
        count[0] += 1
        grad = torch.full_like(weight, 0.1)
        if count[0] == 137:
            grad[1, 2, 0] = poison
        return grad

    rules = [SGDM(lr=0.1, weight_decay=0.01), SGDM(lr=0.2, weight_decay=0.01)]
    with pytest.raises(WalkDiverged, match=r"NaN or Inf at step 137 in config 1, SGDM\(lr=0.2") as caught:
        walk(rules, gradient, start, 1000)
    assert caught.value.step == 137 and caught.value.walk.lengths.tolist() == [100, 36]
    assert np.isfinite(caught.value.walk.norm_sq).all()


def test_interruption_keeps_the_walk_so_far():
    def gradient(weight, count=[0]):  # noqa: B006 - the counter is meant to persist
        count[0] += 1
        if count[0] == 151:
            raise KeyboardInterrupt
        return torch.full_like(weight, 0.1)

    with pytest.raises(WalkInterrupted, match="interrupted at step 151 of 1000") as caught:
        walk([SGDM(lr=0.1, weight_decay=0.01)], gradient, torch.ones(1, 1, 4), 1000)
    assert caught.value.walk.lengths.tolist() == [100, 50]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, InvalidArgument, "`steps` must be at least 1"), ({"window": 0}, InvalidArgument, "`window`"),
        ({"layers": 0}, InvalidArgument, "`layers`"), ({"engine": "odd"}, InvalidArgument, "`engine` must be one of"),
        ({"engine": "fused"}, Unavailable, "fused is not there yet; use reference"), ({"device": "tpu"}, InvalidArgument, "`device`"),
        ({"lr": [0.1, 0.2], "weight_decay": [0.1]}, InvalidArgument, "sequences zip"), ({"lr": []}, InvalidArgument, "empty"),
        ({"gamma": np.ones(3)}, InvalidArgument, "`gamma` must hold fan_in = 8"),
    ],
)  # fmt: skip
def test_bad_simulations_are_named(change, error, message):
    with pytest.raises(error, match=message):
        simulate("sgdm", **{"lr": 0.1, "weight_decay": 0.1, "fan_in": 8, "neurons": 2, "steps": 10, **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(Unavailable, match="finds no CUDA device"):
        simulate("sgdm", lr=0.1, weight_decay=0.1, fan_in=8, neurons=2, steps=10, device="cuda")


def test_walks_need_one_class_and_one_rule_per_config():
    for rules in ([SGDM(lr=1, weight_decay=0)] * 2, [SGDM(lr=1, weight_decay=0), Lion(lr=1, weight_decay=0)]):
        with pytest.raises(InvalidArgument, match="`rules`"):
            walk(rules, lambda w: w, torch.ones(1 if rules[0] is rules[1] else 2, 1, 2), 1)


def test_simulation_exports(tmp_path):
    result = rwsim.simulate("lion", lr=[1e-3, 2e-3], weight_decay=1.0, betas=(0.9, 0.99), fan_in=8, neurons=2, steps=200, gamma="uniform")
    assert [r.values.lr for r in result.rules] == [1e-3, 2e-3] and result.rules[0].values.betas == (0.9, 0.99)
    lines = result.to_csv().splitlines()
    assert len(lines) == 1 + 2 * 2 * 2 and lines[1].startswith("100,0,0,0.001,1.0,0.9 0.99,")
    assert result.to_csv(tmp_path / "walk.csv") is None and (tmp_path / "walk.csv").read_text().splitlines() == lines
    assert rwsim.simulate("sgdm", lr=0.1, weight_decay=0.1, fan_in=4, neurons=1, steps=5, gamma=np.arange(1.0, 5.0)).walk.steps == 5


def test_simulation_to_xarray():
    xarray = pytest.importorskip("xarray", reason="the sweep extra is not installed")
    result = rwsim.simulate("adamw", lr=[1e-3, 2e-3], weight_decay=1.0, fan_in=8, neurons=2, steps=200)
    data = result.to_xarray()
    assert isinstance(data, xarray.Dataset) and data["norm"].dims == ("time", "config", "neuron")
    assert data["betas_2"].values.tolist() == [0.999, 0.999] and data["rotation"].attrs["units"] == "radians per step"
