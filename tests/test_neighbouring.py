"""Where the prediction stops: other normalizations, radial gradients, relative optimizers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rwsim
from benchmarks import neighbours, relative
from rwsim.errors import InvalidArgument, Unavailable
from rwsim.optimizers import SGDM, AdamW, Lion
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.noise import IdealWalk
from rwsim.walk.job import Job
from rwsim.walk.system import NORMALIZATIONS, Layer

SMALL = {"size": 16, "layers": 16, "steps": 1200, "burn_in": 300}


def test_simulate_takes_a_normalization():
    settings = {"lr": 0.1, "weight_decay": 1e-3, "fan_in": 8, "neurons": 4, "steps": 20, "window": 10, "gradient": "faithful"}
    walks = [rwsim.simulate("sgdm", normalization=normalization, **settings) for normalization in NORMALIZATIONS]
    assert len({float(found.walk.norm_sq[-1, 0, 0]) for found in walks}) == 4
    assert [found.attributes["normalization"] for found in walks] == list(NORMALIZATIONS)
    again = rwsim.simulate("sgdm", **settings)
    assert np.array_equal(again.walk.norm_sq, walks[0].walk.norm_sq)
    with pytest.raises(InvalidArgument, match="`normalization` must be batch with the marginal gradient"):
        rwsim.simulate("sgdm", **{**settings, "gradient": "marginal"}, normalization="none")


@pytest.mark.parametrize(
    ("engine", "what"), [("fused", "layer normalization|device cpu|a machine without Triton"), ("blocked", "the faithful gradient")]
)
def test_other_engines_name_the_one_that_carries_it(engine, what):
    with pytest.raises(Unavailable, match=f"`engine` {engine} does not carry ({what}); use engine reference"):
        rwsim.simulate(
            "sgdm", lr=0.1, weight_decay=1e-3, fan_in=8, neurons=4, steps=5, gradient="faithful", normalization="layer", engine=engine
        )


def test_configs_are_keyed_by_their_normalization():
    def key(normalization):
        return Job((SGDM(lr=0.1, weight_decay=1e-3),), Layer.draw(8, 4, normalization=normalization), 5, "faithful").keys()

    assert len({key(normalization) for normalization in NORMALIZATIONS}) == 4


@pytest.mark.parametrize("normalization", ["layer", "batch", "weight", "none"])
@pytest.mark.slow
def test_rotation_holds_and_the_gradients_size_does_not(normalization):
    """SGDM: the matrix's rotation as predicted from hyperparameters in every system; norms given the gradient's size; the
    balance of the neurons only where each is scale-invariant by itself."""
    found = neighbours.measure(normalization, SGDM(lr=0.5, weight_decay=2e-3), **SMALL)
    invariant = normalization in ("batch", "weight")
    assert found.matrix.mcse < 0.006 and abs(found.matrix.errors[0]) < 0.005 + 4 * found.matrix.mcse
    assert found.norm.mcse < 0.006 and abs(found.norm.errors[1]) < 0.01 + 4 * found.norm.mcse
    assert found.uneven.mcse < 0.02 and abs(found.uneven.errors[1]) < 0.01 + 4 * found.uneven.mcse
    # norm ~ sqrt(gamma) where a neuron's gradient shrinks with its own norm, ~ gamma where not.
    assert (abs(found.uneven.errors[0]) < 0.05) is invariant and (found.uneven.errors[0] > 0.3) is not invariant


def test_a_radial_part_is_a_decay():
    """T6 in the walk, for AdamW through its momentum and normalizer; leaving it out is noticed."""
    found = neighbours.measure_radial(AdamW(lr=1e-2, weight_decay=1.0), 0.5, fan_in=64, neurons=256, steps=3500)
    for each in (found.norm, found.rotation):
        assert 4 * each.mcse < 0.01 and abs(each.errors[2]) < 0.005 + 4 * each.mcse, each
        assert abs(each.errors[0]) > 0.15


def test_radial_part_inside_the_update_is_the_plain_rule_where_it_is_zero():
    for rule in (SGDM(lr=1e-3, weight_decay=1.0), AdamW(lr=1e-2, weight_decay=1.0)):
        plain, with_none = (predict_equilibrium(r, IdealWalk(16)).exact for r in (rule, neighbours.with_radial(rule, 0.0)))
        assert (with_none.norm, with_none.rotation) == pytest.approx((plain.norm, plain.rotation), rel=1e-12)


def test_lion_multiplies_a_radial_part_and_stops_at_its_bound():
    """A sign sees lambda_u w beside the deviation of its argument: 6.7 times at betas (0.9, 0.99). Against a decay too small to
    hold that, every weight runs to the bound 1/lambda and nothing turns."""
    rule = Lion(lr=1e-3, weight_decay=8.0)
    kappa = 0.1**2 + 0.9**2 * 0.01 / 1.99
    assert neighbours.sign_gain(rule) == pytest.approx(math.sqrt(2 / (math.pi * kappa)), rel=1e-9)
    walk = rwsim.simulate("lion", lr=1e-3, weight_decay=8.0, fan_in=64, neurons=16, steps=2000, gradient="gaussian", radial=-4.0).walk
    assert np.sqrt(walk.norm_sq[-1]) == pytest.approx(math.sqrt(64) / 8, rel=1e-3) and walk.angle[-1].max() < 1e-4


LAYER = Layer.draw(64, 32, gamma="uniform")


@pytest.mark.parametrize("name", relative.RELATIVE)
def test_relative_optimizers_turn_in_proportion_to_lr(name):
    """From the first steps on, whatever the norm, and by the formula; Nero's is an RMS over gradient lengths."""
    slow, fast = (relative.walk_relative(name, lr, np.ones(400), LAYER)[100:].mean() for lr in (0.0025, 0.005))
    assert fast / slow == pytest.approx(2.0, rel=0.01)
    assert slow / (0.0025 * relative.RELATIVE[name][1]) == pytest.approx(1.0, rel=0.03 if name == "nero" else 0.01)


def test_lamb_steps_are_of_length_lr_times_the_norm():
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn((5, 7), generator=generator, dtype=torch.float64) for _ in range(2))
    new = relative.lamb(weight, grad, 0.01, 1, {})
    assert torch.allclose((new - weight).norm(dim=-1), 0.01 * weight.norm(dim=-1), rtol=1e-12)
    once = relative.lars(weight, grad, 0.01, 1, {})
    assert torch.allclose((once - weight).norm(dim=-1), 0.01 * weight.norm(dim=-1), rtol=1e-12)
    kept = relative.nero(weight, grad, 0.01, 1, {})
    assert torch.allclose(kept.norm(dim=-1), torch.ones(5, dtype=torch.float64)) and kept.sum(-1).abs().max() < 1e-12


def test_a_schedule_acts_like_its_square_while_equilibrium_can_follow():
    """LARS under s and AdamW under s^2 turn alike in the first half of a cosine; under s itself AdamW turns far too fast; and at its
    end the memory of AdamW, which grows as 1/s^2, has outgrown the schedule."""
    options = {"settle": 600, "window": 50}
    assert abs(relative.follow("lars", 1.0, 2000, LAYER, **options).worst(0.1)) < 0.04
    rule = AdamW(lr=2e-2, weight_decay=2.0)  # a memory of 12 steps
    squared, plain = (relative.follow(rule, power, 2000, LAYER, **options) for power in (2.0, 1.0))
    assert abs(squared.worst(0.5)) < 0.12 and squared.share < 0.7 and squared.worst(0.1) < -0.4
    assert plain.worst(0.5) > 0.3 and plain.share < squared.share


def test_share_and_worst():
    found = relative.Followed("x", 2.0, 400, 0.0, np.array([0.01, -0.02, -0.2, -0.5]))
    assert found.share == 0.5 and found.worst(0.5) == -0.02 and found.worst(0.0) == -0.5
    assert relative.Followed("x", 1.0, 200, 0.0, np.array([0.01, 0.0])).share == 1.0
    assert SimpleNamespace(s=relative.cosine(4)).s == pytest.approx((1 + np.cos(np.pi * np.array([1, 3, 5, 7]) / 8)) / 2)
