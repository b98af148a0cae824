"""The reference engine and what it measures: exact where noise is stubbed, loud where a walk breaks."""

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rwsim
from rwsim.errors import InvalidArgument, Unavailable, WalkDiverged, WalkInterrupted
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion, UpdateRule
from rwsim.stats.mcse import estimate
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.moments import linear_response
from rwsim.walk import simulate as door
from rwsim.walk.job import Job
from rwsim.walk.measure import Walk, rotation_angle
from rwsim.walk.reference import GradientPart, lacks, seeded, walk
from rwsim.walk.simulate import run, simulate
from rwsim.walk.system import Layer, marginal_lengths
from tests.statistics import SEEDS, assert_agrees

CPU = torch.device("cpu")

RULE_SETS = [
    [SGDM(lr=0.1, weight_decay=0.05)],
    [AdamW(lr=0.05, weight_decay=0.5, betas=(0.9, 0.99))],
    [AdamL2(lr=0.05, weight_decay=0.5, betas=(0.9, 0.99))],
    [Lion(lr=0.01, weight_decay=1.0)],
]


def stubbed(rules, start, gradients, window=100, schedule=None):
    """A walk from `start` on given gradients, each of the shape (config, neuron, dim) of `start`."""
    layer = Layer.draw(start.shape[2], start.shape[1], gamma="uniform")
    job = Job(tuple(rules), layer, len(gradients), "gaussian", schedule=schedule or {}, window=window, dtype=start.dtype)
    return walk(job, CPU, start=start, noise=lambda config, step: (gradients[step - 1][config], torch.ones(start.shape[1])))


def drawn(configs, neurons, dim, steps, seed=0):
    """A start and gradients of standard normals, float64."""
    generator = torch.Generator().manual_seed(seed)
    start, *gradients = (torch.randn(configs, neurons, dim, generator=generator, dtype=torch.float64) for _ in range(steps + 1))
    return start, gradients


def assert_equal(one: Walk, other: Walk, bitwise: bool = True) -> None:
    for name in ("norm_sq", "angle", "angle_sq", "update_sq", "relative_sq", "distance_sq", "unit_grad_sq"):
        a, b = getattr(one, name), getattr(other, name)
        assert np.array_equal(a, b) if bitwise else np.allclose(a, b, rtol=1e-9), name


def of(found: Walk, config: int, windows: int | None = None) -> Walk:
    """One config of a walk, its first windows."""
    series = (getattr(found, n)[:windows, config : config + 1] for n in list(vars(found))[2:])
    return Walk(found.window, found.lengths[:windows], *series)


def strong(name: str, weight_decay: float = 0.1, lr: float = 0.05) -> UpdateRule:
    """A rule of that name whose momentum forgets within a few steps."""
    betas = {"betas": (0.8, 0.9, 0.7)[: len(RULES[name].hyper["betas"])]} if "betas" in RULES[name].hyper else {}
    return RULES[name](lr=lr, weight_decay=weight_decay, **betas)


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
    start, gradients = drawn(1, 3, 5, 25)
    found = stubbed(rules, start, gradients, window=10)
    assert found.lengths.tolist() == [10, 10, 5] and found.steps == 25
    expected = by_hand(rules[0], start[0], [g[0] for g in gradients])
    names = ("norm_sq", "angle", "update_sq", "relative_sq", "unit_grad_sq")
    for name, series in zip(names, expected, strict=True):
        windows = [series[a:b].mean(0) for a, b in ((0, 10), (10, 20), (20, 25))]
        np.testing.assert_allclose(getattr(found, name)[:, 0], windows, rtol=1e-9)
    np.testing.assert_allclose(found.angle_sq[0, 0], (expected[1][:10] ** 2).mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.trace("norm")[2, 0], np.sqrt(expected[0][20:].mean(0)), rtol=1e-9)


@pytest.mark.parametrize("rules", RULE_SETS, ids=lambda r: r[0].name)
def test_probed_share_equals_separate_buffers(rules):
    """The short cut for decoupled decay beside the plain way."""
    rule = rules[0]
    (start,), gradients = drawn(1, 2, 4, 29, seed=1)
    short, plain = GradientPart(type(rule), start, rule.values), GradientPart(type(rule), start)
    assert (short.keep is not None) is (rule.name in ("adamw", "lion")) and plain.keep is None
    state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in rule.state})
    for step, (grad,) in enumerate(gradients, 1):
        state.step, tape = step, []
        record = SimpleNamespace(
            sqrt=lambda x, t=tape: t.append(torch.sqrt(x)) or t[-1], sign=lambda x, t=tape: t.append(torch.sign(x)) or t[-1]
        )
        old = state.param
        state = SimpleNamespace(**rule.update(grad, state, rule.values, record))
        a, b = (part(grad, step, old, state.param, list(tape), rule.values) for part in (short, plain))
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_every_config_has_its_own_hyperparameters(name):
    rules = [strong(name), strong(name, weight_decay=0.4, lr=0.01)]
    start, gradients = drawn(2, 3, 5, 20, seed=2)
    together = stubbed(rules, start, gradients, window=5)
    for i, rule in enumerate(rules):
        assert_equal(of(together, i), stubbed([rule], start[i : i + 1], [g[i : i + 1] for g in gradients], window=5))


# A learning rate that rises and falls, and averages that sharpen.
FACTORS = {"lr": 0.2 + np.sin(np.linspace(0.0, 3.0, 40)), "betas": np.linspace(1.0, 0.8, 80).reshape(40, 2)}


@pytest.mark.parametrize("peer", [torch.optim.AdamW, torch.optim.Adam])
def test_schedule_equals_torch_with_a_scheduler(peer):
    """Beside torch's own loop: optimizer and LambdaLR, float64, the same gradients."""
    rule = AdamW if peer is torch.optim.AdamW else AdamL2
    hyper = {"lr": 0.05, "weight_decay": 0.5, "betas": (0.9, 0.99), "eps": 1e-3}
    start, gradients = drawn(1, 3, 5, 40)
    found = stubbed([rule(**hyper)], start, gradients, window=1, schedule={"lr": FACTORS["lr"]})
    param = torch.nn.Parameter(start.clone())
    optimizer = peer([param], **hyper)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: FACTORS["lr"][min(step, 39)])
    for step, grad in enumerate(gradients):
        old, param.grad = param.detach().clone(), grad.clone()
        optimizer.step()
        scheduler.step()
        np.testing.assert_allclose(found.norm_sq[step, 0], (param.detach() ** 2).sum(-1)[0], rtol=1e-12)
        np.testing.assert_allclose(found.distance_sq[step, 0], ((param.detach() - old) ** 2).sum(-1)[0], rtol=1e-9)
        if rule is AdamW:  # the share of the gradient by its own formula: w' - (1 - lr lambda) w
            keep = 1 - 0.05 * FACTORS["lr"][step] * 0.5
            np.testing.assert_allclose(found.update_sq[step, 0], ((param.detach() - keep * old) ** 2).sum(-1)[0], rtol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_schedule_equals_a_hand_loop(name):
    """Every hyperparameter that a rule has, changing; the gradient's share by separate buffers and, where decay is decoupled, by
    the short cut at this step's hyperparameters."""
    rule = strong(name)
    schedule = {key: FACTORS[key] for key in ("lr",) if key in rule.hyper}
    if "betas" in rule.hyper:
        schedule["betas"] = np.linspace(1.0, 0.8, 40 * len(rule.hyper["betas"])).reshape(40, -1)
    if "momentum" in rule.hyper:
        schedule["momentum"] = np.linspace(1.0, 0.5, 40)
    (start,), gradients = drawn(1, 3, 5, 40)
    found = stubbed([rule], start[None], gradients, window=1, schedule=schedule)
    state = SimpleNamespace(param=start, **{key: torch.zeros_like(start) for key in rule.state})
    for step, (grad,) in enumerate(gradients, 1):
        values = {k: tuple(np.multiply(v, schedule[k][step - 1]).tolist()) if np.ndim(v) else v for k, v in vars(rule.values).items()}
        values |= {k: vars(rule.values)[k] * float(schedule[k][step - 1]) for k in ("lr", "momentum") if k in schedule}
        hyper, old = SimpleNamespace(**values), state.param
        state.step = step
        state = SimpleNamespace(**rule.update(grad, state, hyper, torch))
        np.testing.assert_allclose(found.norm_sq[step - 1, 0], (state.param**2).sum(-1), rtol=1e-12)
        short = GradientPart(type(rule), start, hyper)
        assert (short.keep is not None) is linear_response(type(rule)).decoupled
        if short.keep is not None:
            part = short(grad, step, old, state.param, [], hyper)
            np.testing.assert_allclose(found.update_sq[step - 1, 0], (part**2).sum(-1), rtol=1e-9)


def test_a_constant_schedule_changes_nothing_but_the_key():
    rule = AdamL2(lr=0.05, weight_decay=0.5)
    start, gradients = drawn(1, 3, 5, 30)
    plain, scheduled = stubbed([rule], start, gradients), stubbed([rule], start, gradients, schedule={"lr": np.ones(30)})
    assert_equal(plain, scheduled)


@pytest.mark.parametrize("name", RULES)
def test_radial_gradient_is_a_decay_where_decay_is_in_the_gradient(name):
    """T6, exactly: decay lambda and radial lambda_u walk as decay lambda + lambda_u; with decoupled decay they do not."""
    layer = Layer.draw(6, 4, seed=1)
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(60)]
    lengths = marginal_lengths((60, 4), 32, generator, torch.float64)
    split, whole = (
        walk(
            Job((strong(name, weight_decay),), layer, 60, radial=radial, dtype=torch.float64, window=20),
            CPU,
            start=layer.start(1, 1, torch.Generator().manual_seed(1), torch.float64),
            noise=lambda config, step: (numbers[step - 1], lengths[step - 1]),
        )
        for weight_decay, radial in ((0.1, 0.3), (0.4, 0.0))
    )
    alike = [np.allclose(getattr(split, q), getattr(whole, q), rtol=1e-9) for q in ("norm_sq", "angle", "distance_sq", "relative_sq")]
    in_gradient = name in ("sgd", "sgdm", "nesterov", "dampened", "qhm", "adam_l2")
    assert all(alike) if in_gradient else not any(alike)
    # The radial component is part of the gradient and of its share of the update, as decay is not.
    assert not np.allclose(split.unit_grad_sq, whole.unit_grad_sq, rtol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_norm_and_rotation_follow_the_effective_decay(seed):
    """T6 by statistics: prediction at lambda + lambda_u, most of which is lambda_u."""
    layer = Layer.draw(64, 256, gamma="uniform")
    hyper = {"lr": 0.2, "momentum": 0.5}
    job = Job((SGDM(weight_decay=0.01, **hyper),), layer, 4000, "gaussian", 2, radial=0.04, seed=seed)
    kept = run(job).kept(400)
    exact = predict_equilibrium(SGDM(weight_decay=0.05, **hyper), layer.law("gaussian")).exact
    found = estimate(kept.norm_sq[:, 0])
    assert_agrees(found.mean, found.mcse, exact.norm_sq[0], catch=0.01, what="norm^2")
    found = estimate(kept.distance_sq[:, 0])
    assert_agrees(found.mean, found.mcse, (2 * math.sin(exact.angle[0] / 2)) ** 2 * exact.norm_sq[0], catch=0.01, what="distance^2")


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
    found = stubbed([SGDM(lr=1e-4, weight_decay=0.0)], start, [-tangent])
    np.testing.assert_allclose(found.angle[0, 0], math.atan(1e-4), rtol=2e-3)


KINDS = ("marginal", "faithful", "gaussian")


@pytest.mark.parametrize("gradient", KINDS)
def test_a_walk_does_not_depend_on_its_company(gradient):
    """Bit for bit: alone, among others, in another order, as the beginning of a longer walk; each with layers of its own."""
    layer = Layer.draw(16, 8)
    rules = tuple(AdamW(lr=lr, weight_decay=0.1) for lr in (0.01, 0.02, 0.03))

    def walked(chosen, steps=200):
        return run(Job(chosen, layer, steps, gradient, layers=2, seed=3))

    together, reversed_, longer = walked(rules), walked(rules[::-1]), walked(rules[:2], 400)
    for i, rule in enumerate(rules):
        alone = walked((rule,))
        assert_equal(of(together, i), alone)
        assert_equal(of(reversed_, 2 - i), alone)
        if i < 2:
            assert_equal(of(longer, i, 2), alone)
    assert len({float(x) for x in together.norm_sq[0, :, 0]}) == 3
    # Numbers of their own, not the same at other rates: the first gradient tells nothing of the next config's.
    first = run(Job(rules, layer, 1, gradient, layers=2, seed=3, window=1)).unit_grad_sq[0]
    assert np.abs(np.corrcoef(np.log(first))[np.triu_indices(3, 1)]).max() < 0.9


def test_equal_configs_walk_alike_and_replicates_and_seeds_apart():
    layer, rule = Layer.draw(16, 8), AdamW(lr=0.01, weight_decay=0.1)
    found = run(Job((rule,) * 4, layer, 150, replicates=(0, 1, 0, 2)))
    assert_equal(of(found, 0), of(found, 2))
    for i in (1, 3):
        assert not np.isin(found.norm_sq[:, i], found.norm_sq[:, 0]).any()
    one, same, other = (run(Job((rule,), layer, 150, seed=s)) for s in (0, 0, 1))
    assert_equal(one, same)
    assert not np.isin(other.norm_sq, one.norm_sq).any()


def test_keys_are_what_they_were():
    """A changed hash changes every walk: it must be noticed, and said in the changelog."""
    layer = Layer.draw(4, 2, gamma="uniform")
    job = Job((SGDM(lr=0.5, weight_decay=1e-4, momentum=0.9),), layer, 100, seed=7)
    assert job.keys() == (9412539037014488046,)


def test_keys_tell_apart_what_differs_and_nothing_else():
    rule, layer = AdamW(lr=0.01, weight_decay=0.1), Layer.draw(4, 2, gamma="uniform")

    def key(rule=rule, layer=layer, steps=10, **change):
        return Job((rule,), layer, steps, **change).keys()[0]

    others = [
        key(AdamW(lr=0.01, weight_decay=0.2)), key(AdamL2(lr=0.01, weight_decay=0.1)), key(seed=1), key(gradient="gaussian"),
        key(radial=0.1), key(replicates=(1,)), key(schedule={"lr": np.ones(10)}), key(schedule={"lr": np.full(10, 0.5)}),
        key(layer=Layer.draw(2, 4, gamma="uniform")), key(layer=Layer.draw(4, 2)), key(layer=Layer.draw(4, 2, 16, gamma="uniform")),
        key(layer=Layer.draw(4, 2, loss_scale=0.5, gamma="uniform")), key(schedule={"betas": np.ones((10, 2))}),
    ]  # fmt: skip
    assert len({key(), *others}) == len(others) + 1
    assert {key(steps=20), key(window=5), key(AdamW(lr=0.01, weight_decay=0.1, eps=0))} == {key()}
    # Numbers that are equal but not of the declared type, which the type checks of this suite keep out of a Job.
    job = Job((rule,), layer, 10)
    loose = SimpleNamespace(gamma_in=layer.gamma_in, gamma_out=layer.gamma_out, batch=np.int64(32), loss_scale=1, normalization="batch")
    loosely = {name: getattr(job, name) for name in ("rule", "rules", "configs", "gradient", "schedule", "replicates")}
    assert Job.keys(SimpleNamespace(layer=loose, seed=np.int64(0), radial=0, **loosely)) == (key(),)


def test_all_bits_of_a_key_count():
    """torch's own seeding keeps 32 of them; the words are numpy's, in its Mersenne twister's place."""
    streams = [torch.rand(4, generator=seeded(key, CPU)).tolist() for key in (5, 5 + (1 << 32), 5 + (1 << 63), (1 << 64) - 1)]
    assert len({x for stream in streams for x in stream}) == 16
    twister = np.random.MT19937(np.random.SeedSequence(5))
    twister.random_raw(1)  # numpy begins at the last of its words, torch after it
    found = torch.empty(2000, dtype=torch.int32).random_(generator=seeded(5, CPU))
    assert found.tolist() == (twister.random_raw(2000) % 2**31).tolist()


def test_progress_and_kept_windows():
    seen = []
    rule, layer = Lion(lr=0.01, weight_decay=0.1), Layer.draw(8, 2)
    found = run(Job((rule, rule), layer, 250, window=50), progress=seen.append, engine="reference")
    assert seen == [50, 100, 150, 200, 250]
    assert len(found.kept(101).lengths) == 2 and len(found.kept(0).lengths) == 5
    partial = run(Job((rule,), layer, 130, window=50))
    assert partial.kept(0).lengths.tolist() == [50, 50]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_step_is_named_and_what_came_before_is_kept(poison):
    gradients = [torch.full((3, 3, 4), 0.1) for _ in range(1000)]
    gradients[136][1, 2, 0] = poison
    gradients[140][0] = poison  # later, though walked earlier
    rules = [SGDM(lr=lr, weight_decay=0.01) for lr in (0.1, 0.2, 0.3)]
    with pytest.raises(WalkDiverged, match=r"NaN or Inf at step 137 in config 1, SGDM\(lr=0.2") as caught:
        stubbed(rules, torch.ones(3, 3, 4), gradients)
    assert caught.value.step == 137 and caught.value.walk.lengths.tolist() == [100, 36]
    assert np.isfinite(caught.value.walk.norm_sq).all() and caught.value.walk.norm_sq.shape == (2, 3, 3)


@pytest.mark.parametrize(("config", "lengths"), [(0, [100]), (1, [100, 50])])
def test_interruption_keeps_the_walk_so_far(config, lengths):
    """What every config has walked: the last of them is the one behind."""

    def noise(at, step):
        if (at, step) == (config, 151):
            raise KeyboardInterrupt
        return torch.full((1, 4), 0.1), torch.ones(1)

    job = Job((SGDM(lr=0.1, weight_decay=0.01), SGDM(lr=0.2, weight_decay=0.01)), Layer.draw(4, 1), 1000, "gaussian")
    with pytest.raises(WalkInterrupted, match="interrupted at step 151 of 1000") as caught:
        walk(job, CPU, noise=noise)
    assert caught.value.walk.lengths.tolist() == lengths and caught.value.walk.norm_sq.shape[1] == 2


def test_start_and_normalizer_are_each_configs_own():
    layer, rule = Layer.draw(4, 2, gamma="uniform"), AdamW(lr=0.1, weight_decay=0.0, betas=(0.0, 0.9))
    start = torch.arange(1.0, 17.0, dtype=torch.float64).view(2, 2, 4)
    job = Job((rule, rule), layer, 1, "gaussian", dtype=torch.float64)
    roots = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None, None]
    found = walk(job, CPU, start=start, noise=lambda c, t: (torch.ones(2, 4), torch.ones(2)), normalizer=roots)
    expected = ((start - 0.1 / roots) ** 2).sum(-1)
    np.testing.assert_allclose(found.norm_sq[0], expected, rtol=1e-12)
    each = walk(job, CPU, start=start, noise=lambda c, t: (torch.ones(2, 4), torch.ones(2)), normalizer=torch.full((2, 4), 2.0))
    np.testing.assert_allclose(each.norm_sq[0], ((start - 0.05) ** 2).sum(-1), rtol=1e-12)
    assert start[0, 0, 0] == 1.0
    for bad, message in (({"start": start[:1]}, r"`start` must have shape \(2, 2, 4\), got \(1, 2, 4\)"),):
        with pytest.raises(InvalidArgument, match=message):
            walk(job, CPU, **bad)
    with pytest.raises(InvalidArgument, match="`noise` must not be given for the faithful gradient"):
        walk(Job((rule,), layer, 1, "faithful"), CPU, noise=lambda c, t: (start[0], start[0, 0]))


def engine_module(name: str, missing: str) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(
        lacks=lambda job, device: missing if job.gradient == "faithful" else "", walk=lambda job, device, progress=None: name
    )
    return module


def test_auto_takes_the_fast_engine_where_it_carries_the_job(monkeypatch):
    monkeypatch.setitem(door.ENGINES, "blocked", ("rwsim.walk.made_up", "cpu"))
    monkeypatch.setitem(sys.modules, "rwsim.walk.made_up", engine_module("fast", "the faithful gradient"))
    layer, rules = Layer.draw(4, 2), (SGDM(lr=0.1, weight_decay=0.1),)
    carried, other = Job(rules, layer, 1), Job(rules, layer, 1, "faithful")
    assert (
        door.resolve_engine("auto", carried, CPU).walk(carried, CPU)
        == "fast"
        == door.resolve_engine("blocked", carried, CPU).walk(carried, CPU)
    )
    assert door.resolve_engine("auto", other, CPU).walk is walk and door.resolve_engine("reference", carried, CPU).walk is walk
    assert door.resolve_engine("auto", carried, torch.device("meta")).walk is walk and lacks(other, CPU) == ""
    with pytest.raises(Unavailable, match=r"`engine` blocked does not carry the faithful gradient; use engine reference"):
        door.resolve_engine("blocked", other, CPU)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, InvalidArgument, "`steps` must be at least 1"), ({"window": 0}, InvalidArgument, "`window`"),
        ({"layers": 0}, InvalidArgument, "`layers`"), ({"engine": "odd"}, InvalidArgument, "`engine` must be one of"),
        ({"device": "tpu"}, InvalidArgument, "`device`"), ({"radial": math.nan}, InvalidArgument, "`radial` must be finite"),
        ({"replicate": 0.5}, InvalidArgument, "`replicate` must be a whole number"), ({"replicate": []}, InvalidArgument, "empty"),
        ({"lr": [0.1, 0.2], "replicate": [1]}, InvalidArgument, "sequences zip"),
        ({"schedule": {"lr": np.ones(9)}}, InvalidArgument, r"`schedule\['lr'\]` must have shape \(10,\)"),
        ({"schedule": {"lr": ["a"] * 10}}, InvalidArgument, "must be numbers"),
        ({"schedule": {"momentum": [2.0] * 10}}, InvalidArgument, "must keep momentum in its range"),
        ({"schedule": {"nu": np.ones(10)}}, InvalidArgument, "is not a hyperparameter of sgdm"),
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


def test_jobs_need_rules_of_one_class_and_a_number_for_each():
    layer, rule = Layer.draw(4, 2), SGDM(lr=1, weight_decay=0)
    for rules in ((), (rule, Lion(lr=1, weight_decay=0))):
        with pytest.raises(InvalidArgument, match="`rules`"):
            Job(rules, layer, 1)
    with pytest.raises(InvalidArgument, match="`replicates` must hold one number per config, 1"):
        Job((rule,), layer, 1, replicates=(0, 1))
    with pytest.raises(InvalidArgument, match="`dtype`"):
        Job((rule,), layer, 1, dtype=torch.float16)


def test_simulation_takes_schedule_radial_and_replicates():
    settings = {"lr": 0.1, "weight_decay": 0.1, "fan_in": 8, "neurons": 2, "steps": 20}
    found = simulate("sgdm", **settings, replicate=[0, 1, 0], radial=0.2, schedule={"lr": [0.5] * 20})
    assert found.attributes["radial"] == 0.2 and found.attributes["schedule"] == "lr" and found.attributes["replicate"] == (0, 1, 0)
    assert_equal(of(found.walk, 0), of(found.walk, 2))
    assert not np.array_equal(found.walk.norm_sq[:, 0], found.walk.norm_sq[:, 1])
    alone = simulate("sgdm", **settings, replicate=1, radial=0.2, schedule={"lr": [0.5] * 20})
    assert_equal(alone.walk, of(found.walk, 1))
    pairs = simulate("lion", **settings, schedule={"betas": np.ones((20, 2))})
    assert pairs.walk.steps == 20 and pairs.attributes["schedule"] == "betas"


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
