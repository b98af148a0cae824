"""Expected paths along schedules against simulated ensembles, and against what is known of them."""

import numpy as np
import pytest
import torch

from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.factors import SHAPES, schedule_factors, warmed_up
from rwsim.theory.noise import IdealWalk
from rwsim.theory.schedule import closed_path, equilibria, expected_path, hyper_values
from rwsim.walk import blocked
from rwsim.walk.job import Job
from rwsim.walk.system import Layer

WINDOW, FROM = 10, 5  # ten-step windows, from step 50 on
CASES = {
    "sgdm": SGDM(lr=0.1, weight_decay=1e-2),
    "adamw": AdamW(lr=1e-2, weight_decay=0.5),
    "adam_l2": AdamL2(lr=5e-3, weight_decay=1e-4),
    "lion": Lion(lr=1e-3, weight_decay=5.0),
}


def factors(name, steps):
    warm = 0 if name in ("constant", "linear", "step") else steps // 5
    return warmed_up("constant" if name == "warmup" else name, warm, steps)


def ensemble(rule, schedule, start, steps, layers=2, factor=1.0):
    """Largest relative errors (norm, rotation) of the expected path, and the larger error of the ensemble's own means there.

    `factor` makes the path that of another learning rate.
    """
    layer = Layer.draw(128, 512, gamma="uniform")
    law = layer.law("marginal").first
    start_sq = (start * predict_equilibrium(rule, law).exact.norm) ** 2 / 128
    lr = factors(schedule, steps)
    job = Job((rule,), layer, steps, layers=layers, schedule={"lr": lr}, seed=1, window=WINDOW)
    weight = layer.start(1, layers, torch.Generator().manual_seed(1), torch.float32) * float(np.sqrt(start_sq / layer.start_sq))
    walk = blocked.walk(job, torch.device("cpu"), start=weight)
    path = expected_path(rule, law, steps, {"lr": factor * lr}, start_sq)
    windows = slice(FROM, None)
    norm_sq, angle = (x[windows, 0] for x in (walk.norm_sq, walk.angle))
    expected = ((path.norm**2).reshape(-1, WINDOW).mean(-1)[windows], path.rotation.reshape(-1, WINDOW).mean(-1)[windows])
    errors = np.sqrt(expected[0] / norm_sq.mean(-1)) - 1, expected[1] / angle.mean(-1) - 1
    own = [float((x.std(-1) / x.mean(-1)).max() / np.sqrt(x.shape[-1])) / part for x, part in ((norm_sq, 2), (angle, 1))]
    return [float(np.abs(e).max()) for e in errors], max(own)


FAST = [("sgdm", "cosine", 0.1), ("sgdm", "constant", 10.0), ("adamw", "wsd", 0.1), ("adam_l2", "step", 1.0), ("lion", "linear", 0.1)]


@pytest.mark.parametrize(("name", "schedule", "start"), FAST)
def test_path_follows_the_ensemble(name, schedule, start):
    (norm, rotation), own = ensemble(CASES[name], schedule, start, 200)
    assert own < 0.005, "too few neurons to see one percent"
    assert norm < 0.01 and rotation < 0.01 + 3 * own


def test_rejects_a_learning_rate_off_by_two_percent():
    """From a tenth of equilibrium the norm is made of updates: it follows lr, and the rotation of a wide walk does not."""
    (norm, _), own = ensemble(CASES["adamw"], "cosine", 0.1, 200, factor=1.02)
    assert own < 0.005 and norm > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("schedule", ["constant", "warmup", "linear", "cosine", "wsd", "step"])
@pytest.mark.parametrize("name", CASES)
def test_every_trajectory_within_one_percent(name, schedule, start):
    (norm, rotation), own = ensemble(CASES[name], schedule, start, 600, layers=10)
    assert own < 0.0025
    assert norm < 0.01 and rotation < 0.01 + 2 * own


@pytest.mark.parametrize("name", RULES)
def test_every_rule_ends_in_its_equilibrium(name):
    hyper = {"betas": (0.5, 0.99, 0.95)[: len(RULES[name].hyper["betas"])]} if "betas" in RULES[name].hyper else {}
    hyper |= {"momentum": 0.5} if "momentum" in RULES[name].hyper else {}
    hyper |= {"max_lr": 2e-2} if "max_lr" in RULES[name].hyper else {}
    decay = 0.01 if name == "adamw_independent" else 1.0
    rule = RULES[name](lr=2e-2, weight_decay=decay, **hyper)
    layer = Layer.draw(64, 1, gamma="uniform")
    path = expected_path(rule, layer.law("marginal"), 700, {}, 1 / 192)
    exact = predict_equilibrium(rule, layer.law("marginal")).exact
    assert path.norm[-1] == pytest.approx(exact.norm, rel=0.03)
    assert path.rotation[-1] == pytest.approx(exact.rotation, rel=0.06)
    assert path.rms_update[-1] == pytest.approx(exact.rms_update, rel=0.03)
    assert path.equilibrium_norm == pytest.approx(np.full(700, exact.norm))


SETTLING = {
    "sgdm": (CASES["sgdm"], 1500),
    "adamw": (AdamW(lr=1e-2, weight_decay=0.5, betas=(0.9, 0.99)), 1500),
    "adam_l2": (AdamL2(lr=5e-3, weight_decay=1e-4, betas=(0.9, 0.99)), 5000),
    "lion": (CASES["lion"], 1500),
}


@pytest.mark.parametrize("name", SETTLING)
def test_the_closure_ends_in_the_exact_form(name):
    """And is the expected path but for what fluctuates: within three percent early, one late."""
    (rule, steps), law = SETTLING[name], Layer.draw(128, 128, gamma="uniform").law("marginal").first
    norm, rotation = closed_path(rule, law, steps, {}, 1 / 384)
    path, exact = expected_path(rule, law, steps, {}, 1 / 384), predict_equilibrium(rule, law).exact
    assert norm == pytest.approx(path.norm, rel=0.03) and norm[50:] == pytest.approx(path.norm[50:], rel=0.01)
    assert rotation == pytest.approx(path.rotation, rel=0.03) and rotation[50:] == pytest.approx(path.rotation[50:], rel=0.01)
    assert (norm[-1], rotation[-1]) == pytest.approx((exact.norm, exact.rotation), rel=1e-3)


def test_the_closure_of_several_coordinates():
    """Of 16 coordinates of almost one gamma it is that of one, in arrays; of unlike ones it ends in their exact form."""
    rule = AdamL2(lr=5e-3, weight_decay=0.01, betas=(0.9, 0.95))
    even, uneven, unlike = (
        Layer(gamma, np.ones(1)).law("marginal") for gamma in (np.ones(16), np.linspace(0.999, 1.001, 16), np.linspace(0.5, 2, 16))
    )
    assert closed_path(rule, uneven, 200, {}, 1 / 48) == pytest.approx(np.array(closed_path(rule, even, 200, {}, 1 / 48)), rel=1e-3)
    norm, rotation = closed_path(rule, unlike, 8000, {}, 1 / 48)
    exact = predict_equilibrium(rule, unlike).exact
    assert (norm[-1], rotation[-1]) == pytest.approx((exact.norm, exact.rotation), rel=2e-3)
    with pytest.raises(InvalidArgument, match="start_sq"):
        closed_path(rule, even, 10, {}, 0.0)


def test_arrays_of_coordinates_and_numbers_are_one_path():
    """With an eps that is as good as none, 16 coordinates of almost one gamma are 16 kinds, in arrays and classes."""
    rule = AdamW(lr=1e-2, weight_decay=0.5, betas=(0.9, 0.95), eps=1e-30)
    even, uneven = (
        expected_path(rule, Layer(gamma, np.ones(1)).law("marginal"), 150, {}, 1 / 48)
        for gamma in (np.ones(16), np.linspace(0.97, 1.03, 16))
    )
    assert uneven.norm == pytest.approx(even.norm, rel=3e-3)
    assert uneven.rotation[20:] == pytest.approx(even.rotation[20:], rel=3e-3)


def test_equilibrium_of_every_step():
    rule, law, steps = Lion(lr=1e-3, weight_decay=1.0), IdealWalk(32), 300
    lr = warmed_up("cosine", 37, steps)
    decay = np.repeat([1.0, 0.0, 3.0], 100)
    values = hyper_values(rule, {"lr": lr, "weight_decay": decay}, steps)
    norm, rotation = equilibria(rule, law, values)
    assert np.isnan(norm[100:200]).all() and np.isnan(rotation[100:200]).all()
    for step in (0, 20, 36, 37, 60, 99, 200, 250, 299):
        exact = predict_equilibrium(Lion(lr=1e-3 * lr[step], weight_decay=float(decay[step])), law).exact
        assert (norm[step], rotation[step]) == pytest.approx((exact.norm, exact.rotation), rel=1e-3)


@pytest.mark.parametrize(
    "rule", [AdamW(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.99)), SGDM(lr=0.1, weight_decay=0.0)], ids=lambda r: r.name
)
def test_without_decay_rotation_falls_as_the_root_of_time(rule):
    """T12: not exponentially, as the paper says, but as its own recurrence at lambda = 0: t^(-1/2)."""
    law = Layer.draw(64, 1, gamma="uniform").law("marginal")
    path = expected_path(rule, law, 8000, {}, 1 / 192)
    slope = np.log(path.rotation[7999] / path.rotation[1999]) / np.log(4)
    assert slope == pytest.approx(-0.5, abs=0.02)
    assert np.isnan(path.equilibrium_norm).all()


def test_pairs_take_schedules_too():
    rule, law = AdamW(lr=1e-2, weight_decay=0.5, betas=(0.9, 0.99)), IdealWalk(32)
    beta = np.tile([1.0, 1.0], (400, 1))
    beta[200:, 0] = 0.5 / 0.9
    path = expected_path(rule, law, 400, {"betas": beta}, 1e-2)
    before, after = (predict_equilibrium(AdamW(lr=1e-2, weight_decay=0.5, betas=b), law).exact for b in ((0.9, 0.99), (0.5, 0.99)))
    assert path.equilibrium_rotation[[199, 200]] == pytest.approx([before.rotation, after.rotation])
    assert path.rotation[399] / path.rotation[199] == pytest.approx(after.rotation / before.rotation, rel=0.05)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2", "lion"])
def test_steps_without_a_learning_rate_change_nothing(name):
    lr = np.ones(90)
    lr[:5] = lr[60:70] = lr[-1] = 0
    path = expected_path(CASES[name], Layer.draw(32, 1, gamma="uniform").law("marginal"), 90, {"lr": lr}, 1 / 96)
    assert np.isfinite(path.norm).all() and path.norm[[4, 69, 89]] == pytest.approx([path.norm[0], path.norm[59], path.norm[88]], rel=1e-6)
    assert path.rotation[[3, 65, 89]] == pytest.approx(0, abs=1e-6)


def test_shapes():
    for shape in SHAPES:
        found = warmed_up(shape, 20, 100)
        assert found.shape == (100,) and found[19] == 1 and (np.diff(found[19:]) <= 0).all() and found.min() >= 0
    assert warmed_up("wsd", 0, 100)[[79, 90]] == pytest.approx([1, 0.5])
    assert warmed_up("step", 0, 100)[[49, 50, 75]] == pytest.approx([1, 0.1, 0.01])
    assert schedule_factors("warmup0.5", 4).tolist() == [0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "steps", "start", "text"),
    [
        ({"momentum": np.ones(5)}, 5, 1.0, "is not a hyperparameter of adamw"),
        ({"lr": np.ones(4)}, 5, 1.0, "must have shape"),
        ({"lr": np.full(5, -1.0)}, 5, 1.0, "`lr` must lie in"),
        ({"betas": np.full((5, 2), 2.0)}, 5, 1.0, "must lie in"),
        ({}, 0, 1.0, "`steps` must be at least 1"),
        ({}, 5, 0.0, "`start_sq` must lie in"),
    ],
)
def test_refuses(schedule, steps, start, text):
    with pytest.raises(InvalidArgument, match=text):
        expected_path(AdamW(lr=1e-3, weight_decay=0.1), IdealWalk(8), steps, schedule, start)


def test_a_walk_that_blows_up_says_so():
    path = expected_path(SGDM(lr=1.0, weight_decay=5.0, momentum=0.0), IdealWalk(8), 2000, {}, 1.0)
    assert not np.isfinite(path.norm[-1]) and np.isfinite(path.norm[:10]).all()
