"""RotationalWrapper around torch's optimizers, and the audit of every rotational class."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import rwsim
from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalSGDM, RotationalWrapper, rotational_of
from tests.rotational import angles, drive, gradients, parameter, preset, wrapped

# Some of these optimizers have nothing that turns, which is what is tested; tests/test_rotational_keys.py holds the warning.
pytestmark = pytest.mark.filterwarnings("ignore:No parameter of this")

INNER = {
    "SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "NAdam": {}, "RAdam": {}, "Adamax": {}, "Adagrad": {}, "RMSprop": {},
    "Adadelta": {}, "ASGD": {}, "Rprop": {}, "Muon": {},
}  # fmt: skip
present = pytest.mark.parametrize("name", [name for name in INNER if hasattr(torch.optim, name)])


@present
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_any_torch_optimizer(name, weight_decay):
    """Finite, at its norm, turning by the rate in the root mean square while the sizes of its steps are steady; else as its tracker says.

    Steps of Rprop shrink by factors, and those of RAdam, Adamax, Adagrad and RMSprop change at first: the tracker lags by ten steps.
    """
    if name == "Rprop" and weight_decay:
        pytest.skip("Rprop has no weight decay")
    param = parameter(32, 48)
    norm = param.detach().norm(dim=1)
    decay = {} if name == "Rprop" else {"weight_decay": weight_decay}
    optimizer = RotationalWrapper(getattr(torch.optim, name)([param], lr=1e-3, **INNER[name], **decay), rotation=0.01)
    optimizer.centre()
    feed, squares, tracked = gradients(32, 48), [], 0.0
    for t in range(1, 151):
        before = param.detach().clone()
        param.grad = next(feed)
        optimizer.step()
        now = optimizer.state[param]["update_norm_sq"].flatten().clone()
        size = (now - 0.9 * tracked) / (1 - 0.9)
        turned = angles(before, param.detach())
        torch.testing.assert_close(turned, torch.atan(0.01 * (size * (1 - 0.9**t) / now).sqrt()), rtol=1e-4, atol=0)
        tracked = now
        squares.append(turned**2)
    assert torch.isfinite(param).all()
    torch.testing.assert_close(param.detach().norm(dim=1), norm, rtol=1e-12, atol=0)
    if name not in ("Rprop", "RAdam", "Adamax", "Adagrad", "RMSprop"):
        assert math.sqrt(float(torch.stack(squares[50:]).mean())) == pytest.approx(0.01, rel=0.015)


def test_a_closure_it_cannot_do_without_is_refused():
    with pytest.raises(InvalidArgument, match="`optimizer` must take its step without a closure, got 'LBFGS'"):
        RotationalWrapper(torch.optim.LBFGS([parameter(4, 12)]), rotation=0.01)


@pytest.mark.parametrize(
    ("name", "hyper", "mode"),
    [
        ("AdamW", {"weight_decay": 0.1}, "free"), ("Adam", {"weight_decay": 0.1}, "coupled"), ("Adam", {}, "free"),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, "coupled"), ("SGD", {"momentum": 0.9}, "free"),
        ("SGD", {"weight_decay": 0.1}, "free"),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "maximize": True, "nesterov": True}, "coupled"),
        ("NAdam", {"weight_decay": 0.1}, "coupled"), ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "free"),
        ("RMSprop", {}, "free"), ("RMSprop", {"weight_decay": 0.1}, "coupled"), ("Adagrad", {"weight_decay": 0.1}, "coupled"),
        ("Rprop", {}, "free"),
    ],
)  # fmt: skip
def test_how_directions_depend_on_weights_is_found(name, hyper, mode):
    optimizer = RotationalWrapper(getattr(torch.optim, name)([parameter(4, 12)], lr=0.1, **hyper), rotation=0.01)
    with torch.no_grad():
        assert optimizer._mode(optimizer.param_groups[0]) == mode
    assert not optimizer.state or name == "Adagrad"  # the trial left nothing; Adagrad has its state from the start


def test_a_trust_ratio_is_taken_as_a_difference():
    """Steps in proportion to the weights' norm: neither free of the weights nor a decayed gradient."""

    class Lars(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(group["lr"] * param.norm() * param.grad / param.grad.norm())

    param = parameter(4, 12)
    optimizer = RotationalWrapper(Lars([param], lr=0.1), rotation=0.01)
    norm = param.detach().norm(dim=1)
    for _ in range(5):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(0), dtype=param.dtype)
        optimizer.step()
    assert set(optimizer._modes.values()) == {"difference"}
    torch.testing.assert_close(param.detach().norm(dim=1), norm)


def test_decay_that_is_scheduled_in_is_found():
    """Free at weight_decay 0, not when l2 comes in later."""
    optimizer = RotationalWrapper(torch.optim.SGD([parameter(4, 12)], lr=0.1, momentum=0.9), rotation=0.01)
    with torch.no_grad():
        assert optimizer._mode(optimizer.param_groups[0]) == "free"
        optimizer.param_groups[0]["weight_decay"] = 0.1
        assert optimizer._mode(optimizer.param_groups[0]) == "coupled"


@pytest.mark.parametrize("maximize", [False, True])
def test_decay_in_the_gradient_is_taken_from_zero_and_gradients_stay(maximize):
    """The step from weights of zero, with the decayed gradient, is the difference that the step would have made."""
    ends = []
    for mode in ("coupled", "difference"):
        param = parameter(4, 12)
        inner = torch.optim.Adam([param], lr=1e-2, weight_decay=0.3, maximize=maximize)
        optimizer = RotationalWrapper(inner, rotation=0.01)
        optimizer._modes = dict.fromkeys([(id(inner.param_groups[0]), True)], mode)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            grad = torch.randn(4, 12, generator=generator, dtype=param.dtype)
            param.grad = grad
            before = grad.clone()
            optimizer.step()
            assert param.grad is grad and torch.equal(grad, before)
        ends.append(param.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("holder", ["inner", "wrapper"])
def test_a_scheduler_may_hold_either(holder):
    param, twin = parameter(4, 12), parameter(4, 12)
    inner = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    optimizer = RotationalWrapper(inner, rotation="adamw")
    schedule = torch.optim.lr_scheduler.StepLR(inner if holder == "inner" else optimizer, 2, 0.5)
    right = RotationalAdamW([twin], lr=1e-2, weight_decay=0.1)
    for t in range(8):
        right.param_groups[0]["lr"] = 1e-2 * 0.5 ** (t // 2)
        param.grad = next(gradients(4, 12, seed=t))
        twin.grad = param.grad.clone()
        optimizer.step()
        right.step()
        schedule.step()
    torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-12, atol=1e-13)


class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise RuntimeError("out of order")


def test_weights_are_restored_if_the_inner_step_raises():
    for decay in (0.0, 0.1):
        params = [parameter(4, 12), parameter(4, 12, seed=1)]
        optimizer = RotationalWrapper(Faulty(params, lr=0.1, momentum=0.9, weight_decay=decay), rotation=0.01, zero_mean=False)
        before = [param.detach().clone() for param in params]
        with pytest.raises(RuntimeError, match="out of order"):
            drive(optimizer, params, 1)
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies(copied):
    params = [parameter(4, 12)]
    optimizer = RotationalWrapper(torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), rotation="adamw")
    drive(optimizer, params, 4)
    pair = (optimizer, params)
    twin, own = copy.deepcopy(pair) if copied == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert type(twin.inner) is torch.optim.AdamW and twin.inner is not optimizer.inner
    drive(twin, own, 4, 9)
    drive(optimizer, params, 4, 9)
    assert torch.equal(own[0], params[0])


def test_the_inner_state_is_the_inner_optimizers():
    """Its moments are those that it has alone under the same gradients."""
    param, twin = parameter(4, 12), parameter(4, 12)
    inner = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    optimizer, alone = RotationalWrapper(inner, rotation="adamw"), torch.optim.AdamW([twin], lr=1e-2, weight_decay=0.1)
    drive(optimizer, [param], 5)
    drive(alone, [twin], 5)
    for key, value in alone.state[twin].items():
        assert torch.equal(inner.state[param][key], value)
    assert set(inner.state[param]) - set(alone.state[twin]) == {"norm", "update_norm_sq", "hits"}


@pytest.mark.parametrize(
    "bad", [{"rotation": -1.0}, {"rotation": None}, {"rotation": 0.1, "norm": "equilibrium"}, {"rotation": 0.1, "blocks": 0}]
)
def test_a_wrapper_that_fails_leaves_the_optimizer_as_it_was(bad):
    inner = torch.optim.AdamW([parameter(4, 12)], weight_decay=0.1)
    before = dict(inner.param_groups[0])
    with pytest.raises(InvalidArgument, match=f"`{list(bad)[-1]}`"):
        RotationalWrapper(inner, **bad)
    assert inner.param_groups[0].keys() == before.keys()
    assert RotationalWrapper(inner, rotation=0.01).param_groups[0]["rotation"] == 0.01


def test_a_rate_needs_its_hyperparameters():
    with pytest.raises(InvalidArgument, match="`rotation` needs the hyperparameter weight_decay"):
        RotationalWrapper(torch.optim.Rprop([parameter(4, 12)], lr=0.1), rotation="adamw", rotational=True)


def test_options_of_the_inner_optimizer_are_refused():
    for name, value in (("norm", "equilibrium"), ("maximize", True)):
        with pytest.raises(InvalidArgument, match=f"`{name}` is not an option of RotationalWrapper"):
            RotationalWrapper(torch.optim.SGD([parameter(4, 12)]), rotation=0.01, **{name: value})
    optimizer = RotationalWrapper(torch.optim.SGD([parameter(4, 12)]), rotation=0.01)
    with pytest.raises(InvalidArgument, match="`norm` is not an option of RotationalWrapper"):
        optimizer.add_param_group({"params": [parameter(4, 12)], "norm": "equilibrium"})
    assert len(optimizer.param_groups) == 1


# The audit.


def wrapped_adamw(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1):
    return wrapped(torch.optim.AdamW, "adamw")(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def wrapped_sgd(params, lr=1e-3, momentum=0.9, weight_decay=0.1):
    return wrapped(torch.optim.SGD, "sgdm")(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


AUDITED = {
    "sgdm": (RotationalSGDM, {}), "adamw": (RotationalAdamW, {}), "lion": (RotationalLion, {}),
    "adam": (RotationalAdam, {"rotation": "adamw", "weight_decay": 0.1}), "wrapped adamw": (wrapped_adamw, {}),
    "wrapped sgd": (wrapped_sgd, {}), "nesterov": (rotational_of("nesterov"), {"lr": 0.1, "weight_decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", [name if name == "wrapped adamw" else pytest.param(name, marks=pytest.mark.slow) for name in AUDITED])
def test_the_audit_of_paths_lifecycle_precision_and_options(name):
    subject, settings = AUDITED[name]
    probes = ["P7", "P8", "P9", "P10"]
    report = rwsim.audit(subject, probes=probes, settings=settings)
    assert report.passed, [finding.text for finding in report.findings if finding.kind != "note"]


@pytest.mark.parametrize(
    ("subject", "law", "settings"),
    [
        pytest.param(RotationalAdamW, "adamw", {}, marks=pytest.mark.slow),
        pytest.param(RotationalSGDM, "sgdm", {}, marks=pytest.mark.slow),
        pytest.param(RotationalLion, "lion", {}, marks=pytest.mark.slow),
        pytest.param(RotationalAdam, "adam_l2", {"rotation": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_without_rotation_the_inner_optimizer_is_the_law(subject, law, settings):
    report = rwsim.audit(subject, law, settings={"rotational": False, **settings})
    assert report.identity.startswith(law)
    # Without rotation its options do nothing, as they should.
    faults = [finding.text for finding in report.findings if finding.kind != "note" and "accepted and changes nothing" not in finding.text]
    assert not faults


def test_rotational_of_a_name_and_of_a_rule_are_one():
    for rule in ("nesterov", rwsim.RULES["nesterov"]):
        param = parameter(4, 12)
        optimizer = rotational_of(rule)([param], lr=0.1, weight_decay=0.1)
        drive(optimizer, [param], 3)
        assert type(optimizer).__name__ == "RotationalNesterov"
    assert preset(rotational_of("lion"), lr=1.0, weight_decay=0.1)([nn.Parameter(torch.ones(2, 5))]).rule is rwsim.RULES["lion"]


def test_gradscaler_of_an_optimizer_without_a_fused_option():
    """Groups of RMSprop say nothing of how a step is computed; GradScaler asks."""
    one, other = (parameter(4, 12, dtype=torch.float32) for _ in range(2))
    plain, scaled = (RotationalWrapper(torch.optim.RMSprop([param], lr=1e-3), rotation=0.01) for param in (one, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    feed = gradients(4, 12, dtype=torch.float32)
    for _ in range(3):
        scaler.scale(torch.zeros(()))
        one.grad = next(feed)
        other.grad = one.grad * scaler.get_scale()
        plain.step()
        scaler.step(scaled)
        scaler.update()
    torch.testing.assert_close(one, other, rtol=0, atol=0)
