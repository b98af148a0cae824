"""Rotational optimizers against the paper's Algorithm 1, written out here line by line, and the properties that follow from it."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rwsim.optimizers import RULES
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalSGDM, rotational_of
from tests.rotational import CLASSES, angles, drive, gradients, parameter, preset, seeded, warmup_cosine, wrapped

# Some of these optimizers have nothing that turns, which is what is tested; tests/test_rotational_keys.py holds the warning.
pytestmark = pytest.mark.filterwarnings("ignore:No parameter of this")

STEPS = 200


# Algorithm 1, from the paper. An inner optimizer F is (parameter, gradient, eta, t) -> Delta_g of one neuron.


class SgdOfPaper:
    alpha = 0.9

    def __init__(self, look_ahead=False):
        self.m, self.look_ahead = 0.0, look_ahead

    def get_update(self, p, g, eta, t):
        self.m = self.alpha * self.m + g
        return -eta * (g + self.alpha * self.m if self.look_ahead else self.m)


class AdamOfPaper:
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 0.1

    def __init__(self, coupled=False, look_ahead=False):
        self.m, self.v, self.coupled, self.look_ahead = 0.0, 0.0, coupled, look_ahead

    def get_update(self, p, g, eta, t):
        g = g + self.decay * p if self.coupled else g
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        top = self.m / (1 - self.beta1**t)
        if self.look_ahead:
            top = self.beta1 * self.m / (1 - self.beta1 ** (t + 1)) + (1 - self.beta1) * g / (1 - self.beta1**t)
        return -eta * top / (torch.sqrt(self.v / (1 - self.beta2**t)) + self.eps)


class LionOfPaper:
    beta1, beta2 = 0.9, 0.99

    def __init__(self):
        self.m = 0.0

    def get_update(self, p, g, eta, t):
        sign = torch.sign(self.beta1 * self.m + (1 - self.beta1) * g)
        self.m = self.beta2 * self.m + (1 - self.beta2) * g
        return -eta * sign


class TorchInner:
    """A torch optimizer of one neuron: the step that it takes from where the neuron is, without its decoupled decay."""

    def __init__(self, cls, decoupled=0.0, **hyper):
        self.cls, self.hyper, self.decoupled, self.inner = cls, hyper, decoupled, None

    def get_update(self, p, g, eta, t):
        if self.inner is None:
            self.at = nn.Parameter(p.clone())
            self.inner = self.cls([self.at], lr=eta, **self.hyper)
        self.inner.param_groups[0]["lr"] = eta
        with torch.no_grad():
            self.at.copy_(p)
        self.at.grad = g.clone()
        self.inner.step()
        return self.at.detach() - p + eta * self.decoupled * p


def transcribed(weight, grads, make_inner, rate, lrs, beta=0.9, eps=1e-8):
    """Algorithm 1, one neuron at a time."""
    neurons = []
    for row in weight:
        p = row.clone()
        nu = 0.0  # line 2
        n = p.norm()  # line 3
        p = n * (p - p.mean()) / (p - p.mean()).norm()  # line 4
        inner, one = make_inner(), torch.ones_like(p)
        for t, (g, eta) in enumerate(zip((each[len(neurons)] for each in grads), lrs, strict=True), 1):
            update = inner.get_update(p, g, eta, t)  # line 10
            update = update / eta  # line 12
            update = update - (update @ p) / p.norm() ** 2 * p - (update @ one) / one.norm() ** 2 * one  # line 14
            nu = beta * nu + (1 - beta) * update.norm() ** 2  # line 15
            p = p + rate(eta) * n * update / (torch.sqrt(nu / (1 - beta**t)) + eps)  # line 16
            p = n * p / p.norm()  # line 17
        neurons.append(p)
    return torch.stack(neurons)


def of_adamw(eta, decay=0.1):
    return math.sqrt(2 * eta * decay * (1 - 0.9) / (1 + 0.9))


def of_sgdm(eta, decay=1e-3):
    return math.sqrt(2 * eta * decay / (1 + 0.9))


def of_nesterov(eta):
    return of_sgdm(eta) * math.sqrt(1 + 2 * 0.9 * (1 - 0.9**2))


def of_lion(eta, decay=0.1):
    return math.sqrt(math.pi * eta * decay) * math.sqrt((1 - 0.9) ** 2 + 0.9**2 * (1 - 0.99) / (1 + 0.99))


def of_nadamw(eta):
    return of_adamw(eta) * math.sqrt(1 + 2 * 0.9 * (1 - 0.9**2))


ALGORITHM = {
    "sgdm": (CLASSES["sgdm"], SgdOfPaper, of_sgdm, 0.1),
    "nesterov": (CLASSES["nesterov"], lambda: SgdOfPaper(look_ahead=True), of_nesterov, 0.1),
    "adamw": (CLASSES["adamw"], AdamOfPaper, of_adamw, 1e-2),
    "special adam": (CLASSES["adam"], lambda: AdamOfPaper(coupled=True), of_adamw, 1e-2),
    "lion": (CLASSES["lion"], LionOfPaper, of_lion, 1e-2),
    "wrapped adamw": (CLASSES["wrapped adamw"], lambda: TorchInner(torch.optim.AdamW, 0.1, weight_decay=0.1), of_adamw, 1e-2),
    "wrapped adam": (CLASSES["wrapped adam"], lambda: TorchInner(torch.optim.Adam, weight_decay=0.1), of_adamw, 1e-2),
    "wrapped sgd": (CLASSES["wrapped sgd"], lambda: TorchInner(torch.optim.SGD, momentum=0.9, weight_decay=1e-3), of_sgdm, 0.1),
    "nadamw": (CLASSES["rule"], lambda: AdamOfPaper(look_ahead=True), of_nadamw, 1e-2),
}


@pytest.mark.parametrize("centred_first", [True, False])
@pytest.mark.parametrize("name", ALGORITHM)
def test_algorithm_1(name, centred_first):
    make, inner, rate, peak = ALGORITHM[name]
    weight = parameter(3, 24)
    lrs = [warmup_cosine(t, STEPS, peak) for t in range(1, STEPS + 1)]
    feed = gradients(3, 24)
    grads = [next(feed) + 0.1 for _ in lrs]
    expected = transcribed(weight.detach(), grads, inner, rate, lrs)
    before = weight.detach().clone()
    optimizer = make([weight])
    assert torch.equal(weight, before)
    if centred_first:
        optimizer.centre()
        assert float(weight.detach().mean(1).abs().max()) < 1e-15
        torch.testing.assert_close(weight.detach().norm(dim=1), before.norm(dim=1), rtol=1e-14, atol=0)
    for lr, grad in zip(lrs, grads, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = grad
        optimizer.step()
    gap = float((weight.detach() - expected).norm() / expected.norm())
    assert gap < 1e-12
    assert float(angles(before, weight.detach()).min()) > 0.02  # it went somewhere


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_algorithm_1_at_other_options(beta, eps):
    weight = parameter(3, 24)
    lrs = [warmup_cosine(t, STEPS, 1e-2) for t in range(1, STEPS + 1)]
    feed = gradients(3, 24)
    grads = [next(feed) for _ in lrs]
    expected = transcribed(weight.detach(), grads, AdamOfPaper, of_adamw, lrs, beta, eps)
    optimizer = CLASSES["adamw"]([weight], update_norm_decay_factor=beta, rotational_eps=eps)
    for lr, grad in zip(lrs, grads, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = grad
        optimizer.step()
    assert float((weight.detach() - expected).norm() / expected.norm()) < 1e-12


# What does not rotate takes the inner optimizer's own step.

PLAIN = {
    "sgdm": (RotationalSGDM, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd": (RotationalSGDM, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "nesterov": (RotationalSGDM, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adamw": (RotationalAdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-3}),
    "adam": (preset(RotationalAdam, rotation=0.01), torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-3}),
    "rule": (rotational_of("adamw"), torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-3}),
    "rule, coupled": (rotational_of("sgdm"), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}),
    "wrapper": (
        lambda params, rotational=None, **hyper: wrapped(torch.optim.AdamW, "adamw")(params, rotational=rotational, **hyper),
        torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_what_does_not_rotate_takes_torchs_step(name, maximize):
    make, law, hyper = PLAIN[name]
    ours, theirs = ([parameter(4, 6), parameter(5, seed=1), parameter(seed=2)] for _ in range(2))
    extra = {"maximize": True} if maximize else {}
    if name == "wrapper" and maximize:
        pytest.skip("maximize belongs to the inner optimizer")
    optimizer = make([{"params": ours[:1], "rotational": False}, {"params": ours[1:]}], **hyper, **extra)
    drive(optimizer, ours, 50)
    drive(law(theirs, **hyper, **extra), theirs, 50)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), right.detach(), rtol=1e-12, atol=1e-13)


def rule_step(rule, grad, state, values):
    after = rule.update(grad, SimpleNamespace(**state), SimpleNamespace(**values), torch)
    return {**after, "step": state["step"] + 1}


@pytest.mark.parametrize("wd", [0.0, 0.5])
def test_lion_without_rotation_is_the_rules_update(wd):
    values = {"lr": 0.1, "weight_decay": wd, "betas": (0.8, 0.95)}
    param = parameter(4, 6)
    optimizer = RotationalLion([param], rotational=False, **values)
    state = {"param": param.detach().clone(), "exp_avg": torch.zeros(4, 6, dtype=torch.float64), "step": 1}
    feed = gradients(4, 6)
    for _ in range(50):
        param.grad = next(feed)
        optimizer.step()
        state = rule_step(RULES["lion"], param.grad, state, values)
    torch.testing.assert_close(param.detach(), state["param"], rtol=1e-12, atol=1e-13)


DIRECTIONS = {
    "sgdm": (RotationalSGDM, {"momentum": 0.8}), "sgd": (RotationalSGDM, {}),
    "nesterov": (RotationalSGDM, {"momentum": 0.8, "nesterov": True}), "adamw": (RotationalAdamW, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "lion": (RotationalLion, {"betas": (0.8, 0.95)}),
    "adam_l2": (preset(RotationalAdam, rotation=0.01), {"betas": (0.8, 0.95), "eps": 1e-3}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DIRECTIONS, *(f"of {rule}" for rule in RULES)])
def test_direction_is_the_rules_update(name):
    """The in-place direction against `rule.update` on tensors, from weights of zero at lr 1 without decay."""
    rule = RULES[name.removeprefix("of ")]
    make, hyper = DIRECTIONS.get(name, (rotational_of(rule), {"max_lr": 1.0} if "max_lr" in rule.hyper else {}))
    optimizer = make([parameter(4, 6)], lr=0.1, weight_decay=0.1, **{"rotation": 0.01, **hyper})
    group = optimizer.param_groups[0]
    zeros = torch.zeros(4, 6, dtype=torch.float64)
    state = {key: zeros.clone() for key in rule.state}
    own = {key: zeros.clone() for key in optimizer.buffers(group)}
    values = {**{key: group.get(key) for key in rule.hyper}, "lr": 1.0, "weight_decay": 0.0}
    feed = gradients(4, 6)
    for step in range(1, 30):
        grad = next(feed)
        before = grad.clone()
        direction = optimizer.direction(grad, own, group, float(step))
        after = rule.update(grad, SimpleNamespace(param=zeros, step=step, **state), SimpleNamespace(**values), torch)
        state = {key: after[key] for key in rule.state}
        torch.testing.assert_close(direction, -after["param"], rtol=1e-12, atol=1e-14)
        assert torch.equal(grad, before)
        for key in own:
            torch.testing.assert_close(own[key], state[key], rtol=1e-12, atol=1e-14)
            assert direction.data_ptr() != own[key].data_ptr()


# Properties.

few = settings(max_examples=12)

# Rows long enough that a sign vector is hardly ever constant: what is left of one without its mean is rounding.
shapes = st.tuples(st.integers(1, 4), st.integers(20, 30))
names = st.sampled_from(sorted(CLASSES))
options = st.fixed_dictionaries(
    {
        "per_neuron": st.booleans(), "zero_mean": st.booleans(), "fixed_angle": st.booleans(),
        "update_norm_decay_factor": st.sampled_from([0.0, 0.9, 0.99]),
    }
)  # fmt: skip


@few
@given(name=names, shape=shapes, extra=options, seed=st.integers(0, 99))
def test_norms_are_kept_and_means_stay_out(name, shape, extra, seed):
    param = parameter(*shape, seed=seed)
    kept = param.detach().norm(dim=1) if extra["per_neuron"] else param.detach().norm()
    drive(CLASSES[name]([param], rotation=0.1, **extra), [param], 5, seed + 1000)
    now = param.detach()
    torch.testing.assert_close(now.norm(dim=1) if extra["per_neuron"] else now.norm(), kept, rtol=1e-13, atol=0)
    if extra["zero_mean"]:
        assert float((now.mean(1) if extra["per_neuron"] else now.mean()).abs().max()) < 1e-14 * float(kept.max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["adam", "wrapped sgd"])
def test_means_stay_out_where_decay_is_the_direction(name, dtype):
    """Updates that point along the weights, 200 times: what rounding leaves of a mean does not grow with them."""
    param = parameter(8, 32, dtype=dtype)
    optimizer = CLASSES[name]([param], rotation=0.1, weight_decay=0.1)
    feed = gradients(8, 32, dtype=dtype)
    for _ in range(200):
        param.grad = next(feed) * 1e-3
        optimizer.step()
    now = param.detach()
    assert float((now.mean(1).abs() / now.square().mean(1).sqrt()).max()) < 32 * torch.finfo(dtype).eps


@few
@given(name=names, shape=shapes, seed=st.integers(0, 99))
def test_a_step_is_orthogonal_to_the_weights_and_to_ones(name, shape, seed):
    """What is left of a step beside the weights is tan(angle) long; it sums to zero."""
    param = parameter(*shape, seed=seed)
    optimizer = CLASSES[name]([param], rotation=0.1)
    optimizer.centre()
    drive(optimizer, [param], 3, seed + 1000)
    before = param.detach().clone()
    param.grad = next(gradients(*shape, seed=seed + 2000))
    optimizer.step()
    after = param.detach()
    # Along the old weights the new ones have cos(angle), the rest sin(angle): undo the normalization.
    cos = (after * before).sum(1, keepdim=True) / (before * before).sum(1, keepdim=True)
    step = after / cos - before
    assert float((step * before).sum(1).abs().max()) < 1e-13
    assert float(step.sum(1).abs().max()) < 1e-13
    assert float(step.norm()) > 0


@pytest.mark.parametrize("name", ["adamw", "lion", "sgdm", "nesterov", "rule", "wrapped adamw"])
@few
@given(scale=st.sampled_from([1e-3, 0.25, 7.0, 1e3]), seed=st.integers(0, 99))
def test_gradient_scale_does_not_matter(name, scale, seed):
    ends = []
    for factor in (1.0, scale):
        param = parameter(3, 24, seed=seed)
        without = {"eps": 0.0} if "adam" in name or name == "rule" else {}
        optimizer, feed = CLASSES[name]([param], rotational_eps=0.0, **without), gradients(3, 24, seed=seed + 1000)
        for _ in range(10):
            param.grad = factor * next(feed)
            optimizer.step()
        ends.append(param.detach())
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-11)


@few
@given(name=names, rate=st.floats(1e-5, 1.0), beta=st.sampled_from([0.0, 0.9, 0.999]), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_the_first_angle_is_the_arc_tangent_of_the_rate(name, rate, beta, scale):
    param = parameter(3, 24)
    optimizer = CLASSES[name]([param], rotation=rate, update_norm_decay_factor=beta, rotational_eps=0.0)
    optimizer.centre()
    before = param.detach().clone()
    param.grad = scale * next(gradients(3, 24))
    optimizer.step()
    torch.testing.assert_close(angles(before, param.detach()), torch.full((3,), math.atan(rate), dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_lr_zero_leaves_rotating_weights(name):
    param = parameter(3, 6)
    optimizer = CLASSES[name]([param])
    optimizer.centre()
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    drive(optimizer, [param], 20)
    torch.testing.assert_close(param.detach(), before, rtol=1e-14, atol=1e-15)


@few
@given(name=names, seed=st.integers(0, 99))
def test_order_of_parameters_does_not_matter(name, seed):
    ends = []
    for order in (1, -1):
        params = [parameter(3, 6, seed=seed), parameter(4, seed=seed + 1), parameter(2, 4, 3, seed=seed + 2)]
        optimizer = CLASSES[name](params[::order])
        drive(optimizer, params, 5, seed + 1000)
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def run(name, values, grads, **more):
    """End of a parameter that starts at `values` under gradients."""
    param = nn.Parameter(values.clone())
    optimizer = CLASSES[name]([param], **more)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@few
@given(name=names, length=st.integers(20, 30), seed=st.integers(0, 99))
def test_per_tensor_is_per_neuron_on_one_row(name, length, seed):
    values, feed = parameter(1, length, seed=seed).detach(), gradients(1, length, seed=seed + 1000)
    grads = [next(feed) for _ in range(5)]
    torch.testing.assert_close(run(name, values, grads, per_neuron=False), run(name, values, grads), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("per_neuron", [True, False])
@few
@given(name=names, blocks=st.integers(2, 3), seed=st.integers(0, 99))
def test_blocks_are_separate_tensors(per_neuron, name, blocks, seed):
    values, feed = parameter(2 * blocks, 20, seed=seed).detach(), gradients(2 * blocks, 20, seed=seed + 1000)
    grads = [next(feed) for _ in range(5)]
    whole = run(name, values, grads, per_neuron=per_neuron, blocks=blocks)
    parts = [
        run(name, part, each, per_neuron=per_neuron)
        for part, each in zip(values.split(2), zip(*(grad.split(2) for grad in grads), strict=True), strict=True)
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-13, atol=1e-14)


@few
@given(name=names, seed=st.integers(0, 99))
def test_a_transposed_convolution_is_the_transposed_matrix(name, seed):
    """(in, out, k, k) with neurons in dimension 1 against (out, in k k)."""
    values, feed = parameter(6, 4, 2, 2, seed=seed).detach(), gradients(6, 4, 2, 2, seed=seed + 1000)
    grads = [next(feed) for _ in range(5)]

    def flat(x):
        return x.transpose(0, 1).reshape(4, 24)

    end = run(name, values, grads, neuron_dims=(1,))
    torch.testing.assert_close(flat(end), run(name, flat(values), [flat(grad) for grad in grads]), rtol=1e-13, atol=1e-14)


@few
@given(name=names, groups=st.integers(2, 3), seed=st.integers(0, 99))
def test_a_grouped_transposed_convolution_is_one_matrix_a_group(name, groups, seed):
    values, feed = parameter(10 * groups, 4, 2, seed=seed).detach(), gradients(10 * groups, 4, 2, seed=seed + 1000)
    grads = [next(feed) for _ in range(5)]
    end = run(name, values, grads, neuron_dims=(1,), blocks=groups)
    for i in range(groups):
        part = slice(10 * i, 10 * i + 10)
        torch.testing.assert_close(end[part], run(name, values[part], [g[part] for g in grads], neuron_dims=(1,)), rtol=1e-13, atol=1e-14)


@few
@given(name=names, seed=st.integers(0, 99))
def test_stacked_experts_are_separate_matrices(name, seed):
    values, feed = parameter(3, 2, 20, seed=seed).detach(), gradients(3, 2, 20, seed=seed + 1000)
    grads = [next(feed) for _ in range(5)]
    end = run(name, values, grads, neuron_dims=(0, 1))
    for i in range(3):
        torch.testing.assert_close(end[i], run(name, values[i], [grad[i] for grad in grads]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["sgdm", "nesterov", "wrapped sgd"])
def test_what_rounding_leaves_of_a_radial_gradient_turns_nothing(name, dtype):
    """A gradient along the weights or along ones has nothing across them; its rounding is no direction."""
    param = parameter(6, 24, dtype=dtype)
    optimizer = CLASSES[name]([param])
    optimizer.centre()
    before = param.detach().clone()
    for _ in range(20):
        param.grad = torch.cat([0.37 * param.detach()[:3], torch.full_like(param[3:], 0.37)])
        optimizer.step()
    assert float(angles(before, param.detach()).max()) < (1e-13 if dtype == torch.float64 else 1e-5)
    assert not optimizer.state[param]["hits"].any()


@pytest.mark.parametrize("name", CLASSES)
def test_large_tensors_step_in_parts(name):
    """More elements than a step works on at a time give the same rows as small tensors do."""
    values = torch.randn(70, 1000, generator=seeded(), dtype=torch.float64)
    feed = gradients(70, 1000)
    grads = [next(feed) for _ in range(2)]
    whole = run(name, values, grads)
    for part in (slice(0, 3), slice(64, 70)):
        torch.testing.assert_close(whole[part], run(name, values[part], [grad[part] for grad in grads]), rtol=1e-12, atol=1e-13)
