"""Rotational optimizers as torch optimizers: groups, schedulers, scalers, closures, saving, half precision; the audit cases by number."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW, RotationalSGDM
from tests.rotational import CLASSES, angles, drive, gradients, parameter, seeded

# Some of these optimizers have nothing that turns, which is what is tested; tests/test_rotational_keys.py holds the warning.
pytestmark = pytest.mark.filterwarnings("ignore:No parameter of this")

every = pytest.mark.parametrize("name", CLASSES)
# The wrapper's half-precision state is its inner optimizer's own.
own = pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("wrapped")])


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def same(one, other):
    """Of nested dicts, lists and tensors."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@every
def test_groups_have_their_own_options(name):
    """Two groups are two optimizers."""
    apart = []
    for i, rate in enumerate((0.01, 0.1)):
        param = parameter(4, 12, seed=i)
        drive(CLASSES[name]([param], rotation=rate, per_neuron=not i), [param], 5, 100 + i)
        apart.append(param)
    params = [parameter(4, 12, seed=i) for i in range(2)]
    groups = [{"params": [params[0]], "rotation": 0.01}, {"params": [params[1]], "rotation": 0.1, "per_neuron": False}]
    drive(CLASSES[name](groups), params, 5)
    assert equal(params, apart)


@every
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("schedule", ["lambda", "cosine"])
def test_schedulers(name, tensor, schedule):
    """A float and a tensor lr give one path; a tensor is not multiplied by itself."""
    lr = {"sgdm": 0.1, "nesterov": 0.1, "wrapped sgd": 0.1}.get(name, 1e-2)
    seen, outcomes = [], []
    for as_tensor in {False, tensor}:
        param = parameter(4, 12)
        optimizer = CLASSES[name]([param], lr=torch.tensor(lr, dtype=torch.float64) if as_tensor else lr)
        kinds = torch.optim.lr_scheduler
        step = kinds.LambdaLR(optimizer, lambda t: 0.5**t) if schedule == "lambda" else kinds.CosineAnnealingLR(optimizer, 8)
        feed = gradients(4, 12)
        for _ in range(6):
            param.grad = next(feed)
            optimizer.step()
            step.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        outcomes.append(param.detach())
    right = [lr * (0.5**t if schedule == "lambda" else (1 + math.cos(math.pi * t / 8)) / 2) for t in range(1, 7)]
    assert seen == pytest.approx(right * len(outcomes), rel=1e-9)
    torch.testing.assert_close(outcomes[0], outcomes[-1], rtol=1e-12, atol=1e-13)


@every
def test_a_schedule_of_lr_sets_the_rotation(name):
    """Rates go with the root of lr eta lambda: a quarter of it halves the angle of the step to come."""
    turned = []
    for factor in (1.0, 0.25):
        param = parameter(4, 12)
        optimizer = CLASSES[name]([param], fixed_angle=True)
        drive(optimizer, [param], 3)
        before = param.detach().clone()
        optimizer.param_groups[0]["lr"] *= factor
        drive(optimizer, [param], 1, 7)
        turned.append(angles(before, param.detach()))
    torch.testing.assert_close(turned[0], 2 * turned[1], rtol=1e-9, atol=0)


@every
def test_gradient_accumulation_and_clipping(name):
    layer = torch.nn.utils.skip_init(nn.Linear, 12, 4, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight, generator=seeded())
    torch.nn.init.zeros_(layer.bias)
    twin = copy.deepcopy(layer)
    first, second = CLASSES[name](layer.parameters()), CLASSES[name](twin.parameters())
    x = next(gradients(6, 12))
    for _ in range(3):
        for part in x.split(2):
            (layer(part).square().sum()).backward()
        twin(x).square().sum().backward()
        for model, optimizer in ((layer, first), (twin, second)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-11, atol=1e-12)


@every
def test_sparse_gradients_are_refused_and_nothing_changes(name):
    dense, embedding = parameter(4, 12), nn.Embedding(5, 12, sparse=True, dtype=torch.float64, _weight=parameter(5, 12, seed=1))
    optimizer = CLASSES[name]([dense, embedding.weight])
    dense.grad = next(gradients(4, 12))
    embedding(torch.tensor([1, 2])).sum().backward()
    before = [dense.detach().clone(), embedding.weight.detach().clone()]
    with pytest.raises(RuntimeError, match=r"Rotational\w+ does not support sparse gradients: build the embedding with sparse=False"):
        optimizer.step()
    assert equal([dense, embedding.weight], before)
    assert not optimizer.state


@every
def test_none_frozen_and_empty_parameters_are_skipped(name):
    params = [parameter(4, 12), parameter(4, 12, seed=1), parameter(0, 12)]
    params[1].requires_grad_(False)
    silent = parameter(4, 12, seed=2)
    before = [param.detach().clone() for param in [*params, silent]]
    optimizer = CLASSES[name]([*params, silent])
    params[0].grad, params[2].grad = next(gradients(4, 12)), torch.zeros(0, 12, dtype=torch.float64)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert equal([*params[1:], silent], before[1:])
    assert not optimizer.state.get(params[1]) and not optimizer.state.get(silent)


@every
def test_deepcopy_goes_its_own_way(name):
    params = [parameter(4, 12)]
    optimizer = CLASSES[name](params)
    drive(optimizer, params, 5)
    twin, copied = copy.deepcopy((optimizer, params))
    assert type(twin) is type(optimizer)
    drive(twin, copied, 3, 9)
    drive(optimizer, params, 3, 9)
    assert equal(params, copied)
    drive(twin, copied, 1, 10)
    assert not equal(params, copied)


# Audit cases, by their numbers in audit-cases.md.


@every
def test_case_19_state_dict_aliases(name):
    straight = [parameter(4, 12)]
    drive(CLASSES[name](straight), straight, 5)
    (first, mine), (second, other) = [(CLASSES[name](params), params) for params in ([parameter(4, 12)], [parameter(4, 12)])]
    feed = gradients(4, 12)
    for _ in range(4):
        mine[0].grad = next(feed)
        first.step()
    second.load_state_dict(first.state_dict())
    drive(second, other, 3, 50)
    mine[0].grad = next(feed)
    first.step()
    assert equal(mine, straight)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", ["memory", "buffer"])
def test_case_20_loading_casts_state(name, dtype, through):
    params = [parameter(4, 12, dtype=dtype), parameter(5, seed=1, dtype=dtype)]
    optimizer = CLASSES[name](params)
    drive(optimizer, params, 5)
    saved = optimizer.state_dict()
    if through == "buffer":
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    second = CLASSES[name](resumed)
    second.load_state_dict(saved)
    for one, other in zip(params, resumed, strict=True):
        for key, value in optimizer.state[one].items():
            loaded = second.state[other][key]
            assert not isinstance(value, torch.Tensor) or (value.dtype == loaded.dtype and torch.equal(value, loaded)), key
    drive(optimizer, params, 10, 9)
    drive(second, resumed, 10, 9)
    assert equal(params, resumed)


@own
def test_case_21_bf16_decay_stagnates(name):
    """What does not rotate decays in bf16 too, by steps below its resolution; the decay of a sign or of Adam+l2 has its own size."""
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    twin = nn.Parameter(torch.ones(8))
    for one in (param, twin):
        optimizer = CLASSES[name]([one], lr=1e-3, weight_decay=0.5)
        for _ in range(300):
            one.grad = torch.zeros_like(one)
            optimizer.step()
    assert float(twin.detach().max()) < 0.95
    torch.testing.assert_close(param.detach().float(), twin.detach(), rtol=2**-7, atol=2**-7)


@every
def test_case_22_zero_rows_and_zero_gradients(name):
    values = parameter(4, 12).detach()
    values[0] = 0
    param = nn.Parameter(values.clone())
    optimizer = CLASSES[name]([param])
    feed = gradients(4, 12)
    for t in range(6):
        grad = next(feed)
        grad[:2] = 0
        param.grad = torch.zeros_like(grad) if t in (0, 3) else grad
        if t:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="1 of 4 vectors of a parameter of shape .4, 12. are zero"):
                optimizer.step()
    assert torch.isfinite(param).all()
    assert not param[0].any()
    torch.testing.assert_close(param.detach().norm(dim=1), values.norm(dim=1), rtol=1e-13, atol=0)
    if name in ("sgdm", "nesterov", "adamw", "lion", "rule", "wrapped adamw", "wrapped sgd"):  # else decay is part of the direction
        assert not optimizer.state[param]["hits"].flatten()[1]


@every
def test_case_23_gradients_are_not_written(name):
    params = [parameter(4, 12), parameter(5, seed=1)]
    optimizer = CLASSES[name](params, **({} if name.startswith("wrapped") else {"maximize": True}))
    for seed in range(3):
        for param in params:
            param.grad = next(gradients(*param.shape, seed=seed))
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert equal([param.grad for param in params], before)


@every
def test_case_24_construction_leaves_weights(name):
    params = [parameter(4, 12), parameter(5, seed=1)]
    before = [param.detach().clone() for param in params]
    optimizer = CLASSES[name](params)
    assert equal(params, before) and not optimizer.state
    assert all(param.grad is None for param in params)


@every
def test_case_25_gradscaler_overflow(name):
    def path(overflow):
        params = [parameter(4, 12, dtype=torch.float32), parameter(5, seed=1, dtype=torch.float32)]
        optimizer = CLASSES[name](params)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        feeds = [gradients(*param.shape, dtype=torch.float32) for param in params]
        for t in range(6):
            scaler.scale(torch.zeros(()))  # a scaler starts with its first loss
            if t == 3 and overflow:
                before = [param.detach().clone() for param in params]
                state = copy.deepcopy(optimizer.state_dict())
                for param in params:
                    param.grad = torch.full_like(param, math.inf)
                scaler.step(optimizer)
                scaler.update()
                assert equal(params, before)
                assert same(optimizer.state_dict(), state)
            for param, feed in zip(params, feeds, strict=True):
                param.grad = next(feed) * scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
        return params

    torch.testing.assert_close(path(True), path(False), rtol=0, atol=0)


@every
def test_case_26_closures_run_with_gradients(name):
    param, twin = parameter(4, 12), parameter(4, 12)
    optimizer, second = CLASSES[name]([param]), CLASSES[name]([twin])
    x = next(gradients(12))

    def closure():
        optimizer.zero_grad()
        loss = (param @ x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        second.zero_grad()
        right = (twin @ x).square().sum()
        right.backward()
        second.step()
        assert torch.equal(optimizer.step(closure), right)
    assert torch.equal(param, twin)


@every
def test_case_28_a_group_added_later(name):
    first, late = parameter(4, 12), parameter(3, 12, seed=1)
    alone = [parameter(4, 12), parameter(3, 12, seed=1)]
    optimizer = CLASSES[name]([first])
    drive(optimizer, [first], 5)
    optimizer.add_param_group({"params": [late], "rotation": 0.05})
    drive(optimizer, [first, late], 5, 9)
    one, two = CLASSES[name](alone[:1]), CLASSES[name](alone[1:], rotation=0.05)
    drive(one, alone[:1], 5)
    drive(one, alone[:1], 5, 9)
    drive(two, alone[1:], 5, 10)
    assert equal([first, late], alone)


@pytest.mark.parametrize("name", ["nesterov", "sgdm", "wrapped sgd"])
def test_case_29_the_buffer_after_an_impulse_is_the_gradient(name):
    for rotational in (None, False):
        param = parameter(4, 12)
        optimizer = CLASSES[name]([param], rotational=rotational, **({} if rotational is None else {"weight_decay": 0.0}))
        decay = optimizer.param_groups[0]["weight_decay"] if name == "wrapped sgd" else 0.0
        grad = next(gradients(4, 12))
        param.grad = grad
        optimizer.centre()
        at = param.detach().clone()
        optimizer.step()
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], grad + decay * at, rtol=1e-13, atol=0)


def rare(hit_counts, steps=800, share=0.02):
    """RMS angle over the rate of a row that gets a gradient in a share of the steps."""
    param = parameter(128, 24)
    optimizer = RotationalSGDM([param], lr=0.1, weight_decay=1e-3)
    optimizer.centre()
    generator, feed = seeded(5), gradients(128, 24)
    rate = optimizer.rotation(optimizer.param_groups[0])
    total, hits = torch.zeros(128, dtype=torch.float64), torch.zeros(128, dtype=torch.float64)
    for t in range(1, steps + 1):
        hit = torch.rand(128, generator=generator, dtype=torch.float64) < share
        param.grad = next(feed) * hit[:, None]
        if t > 1 and not hit_counts:  # REQ's fault: every row's average decays, and its correction takes the optimizer's count
            state = optimizer.state[param]
            state["update_norm_sq"][~hit] *= 0.9
            state["hits"].fill_(t - 1)
        before = param.detach().clone()
        optimizer.step()
        turned = angles(before, param.detach())
        assert not turned[~hit].any()
        total += turned**2
        hits += hit
    return (math.sqrt(float(total.sum() / hits.sum())) / rate, int(hits.sum()))


def test_case_30_rare_rows_turn_by_the_rate():
    ratio, hits = rare(True)
    # A squared angle's relative spread is 2/(24 - 2) and the arc's and the tracker's own terms are below 1 %.
    assert abs(ratio - 1) < 0.01 + 4 * math.sqrt(2 / 22 / hits) / 2


def test_case_30_rejects_a_global_count():
    assert 2.5 < rare(False)[0] < 3.5


@pytest.mark.parametrize("name", CLASSES)
def test_case_30_rows_without_a_gradient_stand_still(name):
    """Until they are hit; then momentum carries them on."""
    if name in ("adam", "wrapped adam"):
        pytest.skip("the decay of every row is in its direction: a sign of the weights, which turns them")
    param = parameter(4, 24, dtype=torch.float32)
    optimizer = CLASSES[name]([param])
    optimizer.centre()
    before = param.detach().clone()
    for grad, _ in zip(gradients(4, 24, dtype=torch.float32), range(30), strict=False):
        grad[:2] = 0
        param.grad = grad
        optimizer.step()
    assert float(angles(before, param.detach())[:2].max()) < 1e-6
    assert optimizer.state[param]["hits"].flatten().tolist() == [0, 0, 30, 30]


# Half precision.


@pytest.mark.parametrize(
    ("name", "dtype", "steps"),
    [
        ("adamw", torch.float16, 400),
        ("sgdm", torch.bfloat16, 400),
        ("lion", torch.bfloat16, 400),
        pytest.param("adamw", torch.bfloat16, 2000, marks=pytest.mark.slow),
    ],
)
def test_half_precision_holds_norms_and_adds_up_small_turns(name, dtype, steps):
    """A rotation of 1e-4 or so is below bf16's resolution; many of them go where float32 goes."""
    param = parameter(4, 64, dtype=dtype)
    twin = nn.Parameter(param.detach().float().clone())
    RotationalAdamW([twin]).centre()
    start = twin.detach().clone()
    along = next(gradients(4, 64, dtype=dtype))
    for one in (param, twin):
        optimizer, feed = CLASSES[name]([one], rotation=0.2 / steps), gradients(4, 64, dtype=dtype)
        for _ in range(steps):
            one.grad = (along + next(feed)).to(one.dtype)
            optimizer.step()
        floats = [value for key, value in optimizer.state[one].items() if isinstance(value, torch.Tensor) and key != "residual"]
        assert all(value.dtype == torch.float32 for value in floats)
    half = param.detach().float()
    torch.testing.assert_close(half.norm(dim=1), start.norm(dim=1), rtol=2**-8, atol=0)
    turned = angles(start, twin.detach())
    assert float(turned.min()) > 0.01
    # Of how far it turned: resolution of the residual, and of the parameter itself.
    assert float((angles(half, twin.detach()) / turned).max()) < 0.15 + 2**-8 / float(turned.min())


def test_half_precision_needs_its_residual():
    """Without it the same turns are lost: the control of the test above."""
    param = parameter(4, 64, dtype=torch.bfloat16)
    optimizer = RotationalAdamW([param], rotation=1e-4)
    optimizer.centre()
    start = param.detach().clone()
    along = next(gradients(4, 64, dtype=torch.bfloat16))
    for _ in range(200):
        param.grad = along
        if optimizer.state:
            optimizer.state[param].get("residual", torch.zeros(1)).zero_()
        optimizer.step()
    assert float(angles(start, param.detach()).max()) < 0.5 * 200 * 1e-4


@every
def test_a_bad_group_leaves_the_optimizer_as_it_was(name):
    param = parameter(4, 12)
    optimizer = CLASSES[name]([param])
    drive(optimizer, [param], 3)
    before = copy.deepcopy(optimizer.state_dict())
    for bad in ({"rotation": -1.0}, {"rotational_eps": -1.0}, {"norm": "bound"}, {"blocks": 5, "rotational": True}):
        with pytest.raises(InvalidArgument, match=r"`r|`n|`b"):
            optimizer.add_param_group({"params": [parameter(3, 12)], **bad})
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", ["sgdm", "nesterov"])
def test_an_update_too_large_to_be_squared_is_not_taken(name):
    """1e20 in float32: the row waits for its momentum, then for its tracked size to come down, and goes on; norms hold."""
    from rwsim.rotational import rotational_of

    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(4, 32, generator=generator))
    optimizer = rotational_of(name)([param], lr=0.1, weight_decay=0.01)
    norm = param.detach().norm(dim=1)
    for step in range(1500):
        param.grad = torch.randn(4, 32, generator=generator) * (1e20 if step == 3 else 1.0)
        before = param.detach().clone()
        optimizer.step()
    assert bool(param.isfinite().all()) and torch.allclose(param.detach().norm(dim=1), norm, rtol=1e-5)
    assert not torch.equal(before, param.detach())
