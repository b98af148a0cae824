"""The probe's hooks and sums: single steps by hand, a run that it does not change, what it sees of what it hangs on."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import rwsim
from rwsim import DynamicsProbe
from rwsim.probe.quantities import QUANTITIES
from tests.probing import WALKS, Lion, Weight, close, data, learn, small
from tests.rotational import CLASSES, seeded

ROWS, COLUMNS = 5, 7


def taken(probe, name="weight", at=-1):
    """Quantities of one measured step, by neuron."""
    return {key: torch.from_numpy(values[at]) for key, values in probe.read(name).found.items()}


def angle(one, other):
    """Between rows, by the half-angle formula: accurate for small ones."""
    one, other = (x / x.norm(dim=1, keepdim=True) for x in (one, other))
    return 2 * torch.atan2((one - other).norm(dim=1), (one + other).norm(dim=1))


def stepped(optimizer, model, steps=4):
    """Weights, gradient and state before the last of some steps; weights after it."""
    generator = seeded(3)
    for _ in range(steps):
        model.weight.grad = torch.randn(model.weight.shape, generator=generator, dtype=torch.float64)
        before = model.weight.detach().clone()
        state = {key: value.clone() for key, value in optimizer.state.get(model.weight, {}).items() if isinstance(value, torch.Tensor)}
        optimizer.step()
    return before, model.weight.grad, state, model.weight.detach()


@pytest.mark.parametrize("rule", WALKS)
def test_one_step_by_hand(rule):
    """Every quantity of a step from what the optimizer holds, in float64."""
    model = Weight(ROWS, COLUMNS)
    optimizer = WALKS[rule]([model.weight])
    with DynamicsProbe(model, optimizer, every=1) as probe:
        w, g, state, after = stepped(optimizer, model)
    found, group = taken(probe), optimizer.param_groups[0]
    lr, decay = group["lr"], group["weight_decay"]
    buffer = state.get("momentum_buffer", state.get("exp_avg"))
    close(found["norm"], after.norm(dim=1))
    close(found["rotation"], angle(w, after))
    close(found["relative_update"], (after - w).norm(dim=1) / w.norm(dim=1))
    close(found["grad_norm"], g.norm(dim=1))
    close(found["weight_grad_angle"], angle(w, g))
    close(found["momentum_grad_angle"], angle(buffer, g))
    norm_sq, radial = w.square().sum(1), (w * g).sum(1)
    if rule in ("adamw", "adam_l2"):
        root = (optimizer.state[model.weight]["exp_avg_sq"] / (1 - 0.99**4)).sqrt() + group["eps"]
        close(found["scaled_grad"], (g / root).norm(dim=1) / math.sqrt(COLUMNS))
        radial = (w * g / root).sum(1)
        norm_sq = (w * w / root).sum(1) if rule == "adam_l2" else norm_sq
    else:
        assert found["scaled_grad"].isnan().all()
    if rule == "lion":
        argument_sq = 0.9**2 * buffer.square().sum(1) + 0.1**2 * g.square().sum(1)  # whatever they have in common
        radial = (w * g.sign()).sum(1) * g.norm(dim=1) / argument_sq.sqrt()
    close(found["lambda_u"], radial / norm_sq)
    change = after - w
    # What a decay takes off in all, and how much of that the step has in common with the decay's past, 0.9^2/(1 - 0.9^2).
    share, past = lr * decay, 0.0
    if rule in ("sgdm", "adam_l2"):
        share, past = share * (norm_sq / w.square().sum(1) if rule == "adam_l2" else 10), 0.81 / 0.19
    size = change.square().sum(1)
    of_grad = size + 2 * share * ((w * change).sum(1) - past * size) + share**2 * w.square().sum(1)
    close(found["rms_update"], of_grad.sqrt())


def test_the_gradient_part_of_sgdm_is_that_of_a_buffer_of_its_own():
    """Decay goes through the buffer: in equilibrium what is taken off is right on average, as a buffer of gradients alone has it."""
    model, generator = Weight(64, 32), seeded(1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9, weight_decay=0.05)
    shadow, expected = torch.zeros(64, 32, dtype=torch.float64), []
    with DynamicsProbe(model, optimizer, every=1) as probe:
        for _ in range(400):
            model.weight.grad = torch.randn(64, 32, generator=generator, dtype=torch.float64)
            shadow = 0.9 * shadow + model.weight.grad
            expected.append((0.1 * shadow).square().sum(1).mean())
            optimizer.step()
    found = probe.read("weight").found["rms_update"] ** 2
    ratio = found[100:].mean() / torch.stack(expected)[100:].mean().item()
    assert abs(ratio - 1) < 0.01
    # What the step itself, or the decay of the present weights taken off it, would say.
    lengths = (probe.read("weight").found["relative_update"] ** 2 * probe.read("weight").found["norm"] ** 2)[100:].mean()
    assert abs(lengths / torch.stack(expected)[100:].mean().item() - 1) < 0.02


def test_the_first_step_has_no_momentum_and_a_bias_corrected_root():
    model = Weight(ROWS, COLUMNS)
    optimizer = WALKS["adamw"]([model.weight])
    with DynamicsProbe(model, optimizer, every=1) as probe:
        stepped(optimizer, model, 1)
    found = taken(probe)
    assert found["momentum_grad_angle"].isnan().all()
    close(found["scaled_grad"], torch.ones(ROWS), rtol=1e-6, atol=0)


def test_small_angles_survive_float32():
    model = Weight(3, 64, dtype=torch.float32)
    optimizer = torch.optim.SGD([model.weight], lr=1e-5)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        model.weight.grad = torch.randn(3, 64, generator=seeded(1))
        before = model.weight.detach().double()
        optimizer.step()
    close(taken(probe)["rotation"], angle(before, model.weight.detach().double()), rtol=1e-4, atol=0)


def test_half_precision_is_measured_in_float32():
    model = Weight(3, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        model.weight.grad = torch.randn(3, 64, generator=seeded(1)).bfloat16()
        before = model.weight.detach().double()
        optimizer.step()
    close(taken(probe)["rotation"], angle(before, model.weight.detach().double()), rtol=1e-5, atol=0)


# The run is not changed.


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2", "lion", "rotational"])
def test_a_run_with_the_probe_is_bitwise_the_run_without(name):
    def trained(probed):
        model = small()
        optimizer = CLASSES["adamw"](model.parameters()) if name == "rotational" else WALKS[name](list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        probe = DynamicsProbe(model, optimizer, every=2, flush=3) if probed else None
        grads = []
        for x in data(12):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            grads.append([param.grad.clone() for param in model.parameters()])
            kept = [param.grad for param in model.parameters()]
            optimizer.step()
            assert all(param.grad is grad for param, grad in zip(model.parameters(), kept, strict=True))
            scheduler.step()
        if probe is not None:
            probe.diagnose if len(probe.steps) < 8 else probe.diagnose()
            probe.close()
        state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor)]
        return [*model.parameters(), *state, *(grad for step in grads for grad in step)]

    for one, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(one, other)


def test_hooks_are_removed():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = DynamicsProbe(model, optimizer)
    assert optimizer._optimizer_step_pre_hooks and optimizer._optimizer_step_post_hooks
    with probe:
        learn(model, optimizer, data(1))
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    learn(model, optimizer, data(2))
    probe.close()
    assert probe.steps == [1]


# What it hangs on.


def test_intervals():
    def measured(every, steps):
        model = Weight(3, 4)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        with DynamicsProbe(model, optimizer, every=every) as probe:
            stepped(optimizer, model, steps)
        return probe.steps

    assert measured(10, 31) == [1, 11, 21, 31]
    assert measured([(3, 1), (10, 3), (None, 5)], 21) == [1, 2, 3, 4, 7, 10, 11, 16, 21]


def test_accumulated_gradients_are_one_step():
    x = data(4, torch.float64)

    def run(parts):
        model = small(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with DynamicsProbe(model, optimizer, every=1) as probe:
            for pair in zip(x[::2], x[1::2], strict=True):
                optimizer.zero_grad()
                for batch in [torch.cat(pair)] if parts == 1 else pair:
                    (model(batch).square().mean() / parts).backward()
                optimizer.step()
        return probe

    one, two = run(1), run(2)
    assert one.steps == two.steps == [1, 2]
    for name in ("0.weight", "3.weight"):
        for key in QUANTITIES:
            np.testing.assert_allclose(one.read(name).found[key], two.read(name).found[key], rtol=1e-7)


def test_schedules_and_tensor_hyperparameters():
    model = Weight(ROWS, COLUMNS)
    optimizer = torch.optim.AdamW([model.weight], lr=torch.tensor(0.1), weight_decay=0.1)
    with DynamicsProbe(model, optimizer, every=2) as probe:
        for lr in (0.1, 0.2, 0.3):
            optimizer.param_groups[0]["lr"].fill_(lr)
            stepped(optimizer, model, 1)
    np.testing.assert_allclose(probe.read("weight").every_hyper["lr"], [0.1, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_allclose(probe.read("weight").predicted["lr"], [0.1, 0.3], rtol=1e-6)


def test_closures():
    def run(closed):
        model = small(torch.float64)
        optimizer = WALKS["adamw"](list(model.parameters()))
        with DynamicsProbe(model, optimizer, every=1) as probe:
            for x in data(3, torch.float64):

                def closure(x=x):
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss

                if closed:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        return probe

    one, other = run(True), run(False)
    for key in QUANTITIES:
        np.testing.assert_array_equal(one.read("3.weight").found[key], other.read("3.weight").found[key])


class Overflowing(nn.Module):
    """A weight whose gradient is infinite in some calls."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(4, 6, generator=seeded(2))), 0

    def forward(self, x):
        self.calls += 1
        return (self.weight * x).sum() * (torch.inf if self.calls in (2, 5) else 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_steps_and_scales_gradients(fused):
    """Skipped steps are not counted, and gradients are those without the scale: a fused optimizer unscales them itself."""
    inputs = torch.randn(6, 4, 6, generator=seeded(4))

    def run(scaled):
        model = Overflowing()
        optimizer = torch.optim.AdamW([model.weight], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        with DynamicsProbe(model, optimizer, every=1) as probe:
            for step, x in enumerate(inputs):
                if not scaled and step in (1, 4):
                    model.calls += 1
                    continue
                optimizer.zero_grad()
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
        return probe

    scaled, plain = run(True), run(False)
    assert scaled.steps == plain.steps == [1, 2, 3, 4]
    assert len(scaled.read("weight").every_hyper["lr"]) == 4
    for key in QUANTITIES:
        np.testing.assert_allclose(scaled.read("weight").found[key], plain.read("weight").found[key], rtol=2e-5)


def test_frozen_parameters_and_missing_gradients():
    model = small()
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        learn(model, optimizer, data(2))
    found = probe.read("3.weight").found
    np.testing.assert_allclose(found["norm"][0], model[3].weight.norm(dim=1).detach(), rtol=1e-6)
    assert all(np.isnan(found[key]).all() for key in QUANTITIES if key != "norm")
    assert np.isfinite(probe.read("5.weight").found["rotation"]).all()


def test_a_gradient_that_is_there_now_and_then():
    model = Weight(ROWS, COLUMNS)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        for step in range(3):
            model.weight.grad = None if step == 1 else torch.ones(ROWS, COLUMNS, dtype=torch.float64)
            optimizer.step()
    assert np.isnan(probe.read("weight").found["rotation"]).all(1).tolist() == [False, True, False]
    assert np.isfinite(probe.read("weight").measured["norm"]).all()


def test_sparse_gradients():
    embedding = nn.Embedding(6, 4, sparse=True, _weight=torch.randn(6, 4, generator=seeded(1)))
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    with DynamicsProbe(embedding, optimizer, every=1) as probe:
        embedding(torch.tensor([1, 1, 3])).square().sum().backward()
        optimizer.step()
    turned = taken(probe)["grad_norm"]
    assert (turned > 0).tolist() == [False, True, False, True, False, False]


def test_maximizing_turns_the_sign_of_lambda_u():
    found = []
    for maximize in (False, True):
        model = Weight(ROWS, COLUMNS)
        optimizer = torch.optim.SGD([model.weight], lr=0.1, weight_decay=0.1, maximize=maximize)
        with DynamicsProbe(model, optimizer, every=1) as probe:
            model.weight.grad = 0.3 * model.weight.detach().clone() * (-1 if maximize else 1)
            optimizer.step()
        found.append(taken(probe)["lambda_u"])
    close(found[0], torch.full((ROWS,), 0.3))
    close(found[1], found[0])


def test_a_restored_optimizer_is_followed():
    """torch replaces the groups of an optimizer that loads a state."""
    model = Weight(ROWS, COLUMNS)
    optimizer = WALKS["adamw"]([model.weight])
    with DynamicsProbe(model, optimizer, every=1) as probe:
        stepped(optimizer, model, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.5
        stepped(optimizer, model, 1)
    assert probe.read("weight").every_hyper["lr"].tolist() == [1e-2, 1e-2, 0.5]


def test_unknown_optimizers_are_measured_without_prediction():
    model = Weight(ROWS, COLUMNS)
    optimizer = torch.optim.RMSprop([model.weight], lr=0.1)
    with DynamicsProbe(model, optimizer, every=1) as probe:
        stepped(optimizer, model, 2)
    reading = probe.read("weight")
    assert np.isfinite(reading.measured["rotation"]).all() and np.isnan(reading.predicted["predicted_rotation"]).all()
    assert "rule" in probe.notes["weight"] and "RMSprop" in probe.notes["weight"]


def test_a_rule_can_be_given():
    class Mine(Lion):
        pass

    model = Weight(ROWS, COLUMNS)
    optimizer = Mine([model.weight], lr=1e-3, weight_decay=1.0)
    probe = DynamicsProbe(model, optimizer, every=1, rule="lion")
    stepped(optimizer, model, 1)
    expected = rwsim.predict("lion", lr=1e-3, weight_decay=1.0, betas=(0.9, 0.99), fan_in=COLUMNS).exact.rotation
    np.testing.assert_allclose(probe.read("weight").predicted["predicted_rotation"], expected)


@pytest.mark.parametrize("name", ["adamw", "sgdm", "adam", "wrapped adamw"])
def test_rotational_optimizers_turn_as_they_say(name):
    model = Weight(32, 64, dtype=torch.float64)
    optimizer = CLASSES[name]([model.weight])
    with DynamicsProbe(model, optimizer, every=1) as probe:
        stepped(optimizer, model, 200)
    reading = probe.read("weight")
    predicted = reading.predicted
    np.testing.assert_allclose(predicted["predicted_rotation"], float(optimizer.rotation(optimizer.param_groups[0])))
    np.testing.assert_allclose(reading.measured["norm"], predicted["predicted_norm"], rtol=1e-12)
    turned = np.sqrt((reading.found["rotation"][100:] ** 2).mean())
    assert abs(turned / predicted["predicted_rotation"][0] - 1) < 0.02
