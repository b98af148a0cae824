"""Conversions: round trips, known identities, and walks of both sides that turn and move alike."""

import itertools
import math

import pytest

import rwsim
from rwsim.cli import HOLDS, USAGE, run
from rwsim.convert import MATCHES, convert, dynamics, exponents, time_constant
from rwsim.errors import InvalidArgument, NoEquilibrium, UnsupportedRule
from rwsim.optimizers import RULES, AdamL2, AdamW, UpdateRule
from rwsim.stats.mcse import estimate
from rwsim.theory.predict import gradient_law
from rwsim.theory.transient import approach
from rwsim.walk.job import Job
from rwsim.walk.simulate import run as walk
from rwsim.walk.system import Layer
from tests.published import held

PAIRS = list(itertools.permutations(("sgdm", "adamw", "adam_l2", "lion"), 2))
# Of the toy system, and of free gradients of unit variance; rotation 0.01 to 0.03 and a memory of 50 to 500 steps.
TOY = {
    "sgdm": {"lr": 0.5, "weight_decay": 2e-3}, "adamw": {"lr": 1e-2, "weight_decay": 0.2},
    "adam_l2": {"lr": 5e-3, "weight_decay": 2e-3}, "lion": {"lr": 1e-3, "weight_decay": 2.0},
}  # fmt: skip
FREE = {
    "sgdm": {"lr": 1e-3, "weight_decay": 1.0}, "adamw": {"lr": 1e-2, "weight_decay": 1.0},
    "adam_l2": {"lr": 1e-2, "weight_decay": 1.0}, "lion": {"lr": 1e-3, "weight_decay": 6.0},
}  # fmt: skip
LAWS = {"toy": {"batch": 32}, "free": {"batch": None}, "normal": {"batch": 8, "gamma": "normal", "seed": 3, "neurons": 4, "fan_in": 32}}


def _others(rule):
    return {key: value for key, value in vars(rule.values).items() if key not in ("lr", "weight_decay")}


def _round_trip(a, b, match, hyper, rel=1e-9, **law):
    there = convert(a, b, match=match, **law, **hyper)
    back = convert(b, a, match=match, **law, **vars(there.target.values), to_hyper=_others(there.source))
    for key in ("lr", "weight_decay"):
        assert getattr(back.target.values, key) == pytest.approx(getattr(there.source.values, key), rel=rel), (key, there)
    return there


@pytest.mark.parametrize(
    ("a", "b", "match", "law"),
    [
        *((*pair, "rotation", "toy") for pair in PAIRS),
        *(("adam_l2", "lion", match, law) for match, law in (("diffusion", "toy"), ("rotation", "free"), ("rotation", "normal"))),
        *(pytest.param(*pair, match, law, marks=pytest.mark.slow) for pair in PAIRS for match in MATCHES for law in LAWS),
    ],
)
def test_round_trips(a, b, match, law):
    found = _round_trip(a, b, match, (FREE if law == "free" else TOY)[a], **LAWS[law])
    kept = [quantity for quantity in found.quantities if quantity.matched]
    assert [quantity.name for quantity in kept] == list(MATCHES[match])
    assert all(quantity.after == pytest.approx(quantity.before, rel=1e-10) for quantity in kept)
    # And they are what `predict` says of both sides.
    if match == "rotation" and law != "normal":
        for rule in (found.source, found.target):
            exact = rwsim.predict(type(rule), fan_in=128, **LAWS[law], **vars(rule.values)).exact
            assert (exact.rotation, exact.rms_update) == pytest.approx((kept[0].before, kept[1].before), rel=1e-10)


# The fast ones: other kernels, a sign, another decay; each rule costs a derivation.
_FEW = ("sgdw", "nesterov", "signum", "adamw_independent")


@pytest.mark.parametrize("b", [pytest.param(b, marks=() if b in _FEW else pytest.mark.slow) for b in RULES if b not in TOY])
def test_every_rule_converts(b):
    # AdEMAMix's closed form at beta_3 = 0.9999 rounds at 1e-9.
    _round_trip("adamw", b, "rotation", {"lr": 2e-3, "weight_decay": 0.3}, rel=1e-7 if b == "ademamix" else 1e-9)


@pytest.mark.parametrize(("lr", "weight_decay", "loss_scale"), [(1e-6, 1e-3, 1e-4), (0.3, 1.0, 1e3)])
def test_extremes(lr, weight_decay, loss_scale):
    for b in ("sgdm", "adam_l2", "lion"):
        _round_trip("adamw", b, "rotation", {"lr": lr, "weight_decay": weight_decay}, loss_scale=loss_scale)


@pytest.mark.parametrize("match", MATCHES)
def test_decay_conventions_that_are_one_walk(match):
    """Known by hand: a decay times lr, a dampening that is a factor of lr, a schedule's peak; whatever is matched."""
    independent = convert("adamw", "adamw_independent", match=match, lr=2e-3, weight_decay=0.3).target.values
    assert (independent.lr, independent.weight_decay) == pytest.approx((2e-3, 6e-4), rel=1e-10)
    dampened = convert("sgdm", "dampened", match=match, lr=0.1, weight_decay=3e-3, to_hyper={"dampening": 0.4}).target.values
    assert (dampened.lr, dampened.weight_decay) == pytest.approx((0.1 / 0.6, 3e-3), rel=1e-10)
    adamc = convert("adamw", "adamc", match=match, lr=2e-3, weight_decay=0.3, to_hyper={"max_lr": 1e-2}).target.values
    assert (adamc.lr, adamc.weight_decay) == pytest.approx((2e-3, 1.5), rel=1e-10)


def test_decay_inside_the_buffer_and_beside_it():
    """THEORY.md section 2: r^2 = 2 eta lambda / (1 + alpha) exactly with the decay inside, times 1 - alpha without, to first order."""
    found = convert("sgdm", "sgdw", lr=0.5, weight_decay=1e-6, momentum=0.8)
    assert found.target.values.momentum == 0.8
    assert (found.target.values.lr, found.target.values.weight_decay) == pytest.approx((0.5, 1e-6 / 0.2), rel=1e-5)


def test_hyperparameters_of_one_name_and_default_carry_over():
    assert convert("adamw", "adam_l2", lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)).target.values.betas == (0.8, 0.95)
    assert convert("adamw", "lion", lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)).target.values.betas == (0.9, 0.99)
    given = convert("adamw", "lion", lr=1e-3, weight_decay=0.1, to_hyper={"betas": (0.95, 0.98)})
    assert given.target.values.betas == (0.95, 0.98)


def test_leading_order_form():
    """form="paper" inverts Table 1: Lion from AdamW by hand."""
    found = convert("adamw", "lion", lr=1e-3, weight_decay=0.1, form="paper", to_hyper={"betas": (0.9, 0.99)}).target.values
    lr = 1e-3 * math.sqrt(0.1 / 1.9)
    kappa = 0.1**2 + 0.9**2 * 0.01 / 1.99
    assert (found.lr, found.weight_decay) == pytest.approx((lr, 2e-4 * 0.1 / 1.9 / (math.pi * lr * kappa)), rel=1e-9)
    with pytest.raises(InvalidArgument, match="`form` must be one that the prediction of sgdw has"):
        convert("sgdm", "sgdw", lr=0.1, weight_decay=1e-3, form="paper")


def test_exponents():
    """Table 1's powers of lr, and of the gradient's size under scale invariance."""
    expected = {  # lr: norm, rotation, rms_update; loss_scale: the same
        "sgdm": ((1 / 4, 1 / 2, 3 / 4), (1 / 2, 0, 1 / 2)), "adamw": ((1 / 2, 1 / 2, 1), (0, 0, 0)),
        "adam_l2": ((1 / 3, 2 / 3, 1), (1 / 3, -1 / 3, 0)), "lion": ((1 / 2, 1 / 2, 1), (0, 0, 0)),
    }  # fmt: skip
    for name, both in expected.items():
        rule = RULES[name](lr=1e-4, weight_decay=1e-4)
        for cause, powers in zip(("lr", "loss_scale"), both, strict=True):
            found = exponents(rule, gradient_law(64, batch=32), cause)
            assert tuple(found.values()) == pytest.approx(powers, abs=0.02), (name, cause)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2"])
@pytest.mark.parametrize("batch", [None, 32])
def test_time_constant_is_that_of_the_recurrence(name, batch):
    """The slope of the recurrence's last approach to its limit; a wrong factor of scale invariance (2, 1.5) would show."""
    hyper = {"lr": 1e-3, "weight_decay": 0.3}
    if batch and name != "adamw":
        hyper = {"lr": 0.3, "weight_decay": 1e-4} if name == "sgdm" else {"lr": 1e-3, "weight_decay": 1e-2}
    law = gradient_law(32, batch=batch, neurons=4)
    rule = RULES[name](**hyper, **({} if name == "sgdm" else {"betas": (0.5, 0.6)}))
    predicted = time_constant(dynamics(rule, law), exponents(rule, law, "loss_scale")["norm"])
    assert 100 < predicted < 6000
    found = approach(rule, law, (0.97 * dynamics(rule, law).norm) ** 2 / 32, int(4 * predicted)).deviation
    first, last = int(predicted), int(3 * predicted)
    assert (last - first) / math.log(found[first] / found[last]) == pytest.approx(predicted, rel=0.03)


def test_notes_name_what_differs():
    def notes(*pair, **options):
        return " ".join(convert(*pair, **options).notes)

    same = notes("adamw", "adamw_independent", lr=1e-3, weight_decay=0.1)
    assert "rotation follows lr^0.50 in adamw and lr^0.00 in adamw_independent" in same and "time to" not in same and "scale" not in same
    lion = notes("adamw", "lion", lr=1e-3, weight_decay=0.1)
    assert "time to equilibrium: adamw forgets its start in 4996 steps, lion in 1974" in lion and "gradient scale" not in lion
    assert "single steps: they turn by" in notes("adamw", "lion", lr=1e-3, weight_decay=0.1, match="diffusion")
    sgdm = notes("adamw", "sgdm", lr=1e-3, weight_decay=0.1)
    assert "gradient scale: holds for the gradients given" in sgdm and "the way there" in sgdm
    assert "gradient scale" not in notes("adamw", "sgdm", lr=1e-3, weight_decay=0.1, batch=None)
    assert convert("sgdm", "dampened", lr=0.1, weight_decay=1e-3, batch=None).notes == ()


@pytest.mark.parametrize("match", MATCHES)
def test_a_pair_that_follows_the_gradients_size_needs_it(match):
    """SGDM from AdamW: the update is proportional to the gradient, whose size at the common norm follows the loss scale."""
    one, ten = (convert("adamw", "sgdm", match=match, lr=1e-3, weight_decay=0.1, loss_scale=s).target.values for s in (1.0, 10.0))
    assert (ten.lr * 10, ten.weight_decay / 10) == pytest.approx((one.lr, one.weight_decay), rel=1e-9)


class Untuned(UpdateRule):
    name = "untuned"
    hyper = {"lr": ...}

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": (1 - 0.1 * hyper.lr) * state.param - hyper.lr * grad}


class Clipped(UpdateRule):
    name = "clipped"
    hyper = {"lr": ..., "weight_decay": ...}

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * (grad / (1 + grad**2) + hyper.weight_decay * state.param)}


class Timid(UpdateRule):
    """Decays by at most 0.01 a step, however large the decay: its rotation has an end."""

    name = "timid"
    hyper = {"lr": ..., "weight_decay": ...}

    @staticmethod
    def update(grad, state, hyper, xp):
        share = hyper.weight_decay / (1 + hyper.weight_decay) / 100
        return {"param": state.param - hyper.lr * grad - share * state.param}


def test_refusals():
    fine = {"lr": 1e-3, "weight_decay": 0.1}
    for options, message in (
        ({"match": "norm"}, "`match` must be one of rotation, diffusion"),
        ({"to_hyper": {"lr": 1.0}}, "`to_hyper\\['lr'\\]` must not be given"),
        ({"to_hyper": {"momentum": 0.9}}, "`momentum` is not a hyperparameter of lion"),
        ({"to_hyper": {"betas": (0.9, 1.0)}}, "`betas\\[1\\]` must lie in"),
        ({"batch": 3}, "`batch`"), ({"fan_in": 1}, "`fan_in`"), ({"loss_scale": 0.0}, "`loss_scale`"), ({"form": "best"}, "`form`"),
        ({"gamma": "odd"}, "`gamma`"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            convert("adamw", "lion", **{**fine, **options})
    with pytest.raises(InvalidArgument, match="`to` must be a rule with lr and weight_decay"):
        convert("adamw", Untuned, **fine)
    with pytest.raises(NoEquilibrium, match="`weight_decay` is 0"):
        convert("adamw", "lion", lr=1e-3, weight_decay=0.0)
    with pytest.raises(UnsupportedRule):
        convert("adamw", Clipped, **fine)


def test_what_cannot_be_reached_is_refused():
    reachable = convert("sgd", Timid, lr=0.1, weight_decay=0.05, batch=None).target.values  # r^2 = 2 x 0.005
    assert reachable.weight_decay == pytest.approx(1.0, rel=1e-9)
    with pytest.raises(NoEquilibrium, match=r"which timid has sgd's rotation 0\.2003 and rms_update"):
        convert("sgd", Timid, lr=0.1, weight_decay=0.2, batch=None)


# Walks.


def measured(rule, gradient, seed, *, fan_in, steps, burn_in):
    """Mean angle and RMS update of a walk, each with its relative standard error."""
    layer = Layer.draw(fan_in, 128, gamma="uniform", seed=0)
    kept = walk(Job((rule,), layer, steps, gradient, 2, seed=seed)).kept(burn_in)
    rotation, update = (estimate(kept.statistic(quantity)[:, 0]) for quantity in ("rotation", "rms_update"))
    return {
        "rotation": (rotation.mean, rotation.mcse / rotation.mean),
        "rms_update": (math.sqrt(update.mean), update.mcse / update.mean / 2),
    }


def differences(before, after):
    """Relative difference and its standard error, by quantity."""
    return {name: (after[name][0] / before[name][0] - 1, math.hypot(before[name][1], after[name][1])) for name in before}


def test_converted_walks_agree():
    """One pair, few steps, 1 %; every pair is in the slow test. A learning rate wrong by 2 % is rejected."""
    size = {"fan_in": 128, "steps": 1500, "burn_in": 500}
    found = convert("sgdm", "lion", **TOY["sgdm"])
    before = measured(found.source, "marginal", 1, **size)
    for name, (off, error) in differences(before, measured(found.target, "marginal", 2, **size)).items():
        assert 4 * error < 0.01, name
        assert abs(off) < 0.01, (name, off, error)
    values = vars(found.target.values)
    wrong = type(found.target)(**{**values, "lr": 1.02 * values["lr"]})
    off, error = differences(before, measured(wrong, "marginal", 2, **size))["rms_update"]
    assert off - 4 * error > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["gaussian", "marginal"])
@pytest.mark.parametrize("a", ["sgdm", "adamw", "adam_l2", "lion"])
def test_every_converted_walk_agrees_within_half_a_percent(a, gradient):
    """Rotation (mean angle) and RMS update of both sides, 128 coordinates at batch 32, from hyperparameters alone."""
    # In the toy system AdamW's normalizer remembers the small initial weights for 10,000 steps.
    size = {"steps": 20_000, "burn_in": 3_000} if gradient == "gaussian" else {"steps": 18_000, "burn_in": 13_000}
    hyper, batch = (FREE, None) if gradient == "gaussian" else (TOY, 32)
    before = measured(RULES[a](**hyper[a]), gradient, 1, fan_in=128, **size)
    for b in sorted({"sgdm", "adamw", "adam_l2", "lion"} - {a}):
        target = convert(a, b, batch=batch, **hyper[a]).target
        for name, (off, error) in differences(before, measured(target, gradient, 2, fan_in=128, **size)).items():
            assert 4 * error < 0.005, (b, name, error)
            assert abs(off) < 0.005, (b, name, off, error)


def spread(rule, gradient_coordinates, seed, steps=400, settled=100):
    """tau_g^2 of one coordinate as measured: growth of E w^2 per step without decay, once the momentum is full."""
    layer = Layer.draw(512, gradient_coordinates // 512, gamma="uniform")
    bare = type(rule)(**{**vars(rule.values), "weight_decay": 0.0})
    found = walk(Job((bare,), layer, steps, "gaussian", window=1, seed=seed)).norm_sq[:, 0] / 512
    growth = (found[-1] - found[settled]) / (steps - 1 - settled)
    return growth.mean(), growth.std() / math.sqrt(len(growth)) / growth.mean()


@pytest.mark.parametrize("coordinates", [2**17, pytest.param(2**22, marks=pytest.mark.slow)])
def test_diffusion_is_measured_without_decay(coordinates):
    """Long-run variance of both sides, by walks in which nothing pulls back: 2 % in the fast form, 0.5 % in the slow one."""
    margin = 0.02 if coordinates < 2**20 else 0.005
    found = convert("lion", "sgdm", match="diffusion", batch=None, **FREE["lion"], betas=(0.9, 0.9), fan_in=512)
    tau_g = found.quantities[1]
    assert tau_g.name == "tau_g"
    (one, e1), (two, e2) = (spread(rule, coordinates, seed) for seed, rule in enumerate((found.source, found.target)))
    for off, error in ((two / one, math.hypot(e1, e2)), (one * 512 / tau_g.before**2, e1), (two * 512 / tau_g.after**2, e2)):
        assert 4 * error < 2 * margin and abs(off - 1) < 2 * margin, (off, error)  # a variance has twice the error of tau
    # Matching single steps instead does not match the long run.
    steps = convert("lion", "sgdm", batch=None, **FREE["lion"], betas=(0.9, 0.9), fan_in=512).target
    assert abs(spread(steps, 2**16, 3)[0] / one - 1) > 0.2


# Command line.


def test_command_line(tmp_path, capsys):
    arguments = ["convert", "--from", "adamw", "--lr", "1e-3", "--weight-decay", "0.1", "--to", "sgdm"]
    assert run([*arguments, "--json", str(tmp_path / "deep" / "file.json")]) == HOLDS
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "solved" in out and "matched" in out and "gradient scale" in out
    document = held("convert", tmp_path / "deep" / "file.json")
    assert document["meta"]["batch"] == 32 and document["from"]["optimizer"] == "adamw" and document["to"]["momentum"] == 0.9
    found = convert("adamw", "sgdm", lr=1e-3, weight_decay=0.1)
    assert document["to"]["lr"] == found.target.values.lr and document["notes"] == list(found.notes)
    assert {"name": "norm", "unit": "", "matched": False} == {k: document["quantities"][4][k] for k in ("name", "unit", "matched")}
    assert run([*arguments, "--quiet", "--gamma", "normal", "--seed", "2"]) == HOLDS
    assert capsys.readouterr() == ("", "")


def test_seed_draws_the_layer_that_validate_draws():
    found = [convert("adamw", "sgdm", lr=1e-3, weight_decay=0.1, gamma="normal", seed=seed) for seed in (0, 1, None)]
    assert len({each.target.values.lr for each in found}) == 3
    law = Layer.draw(128, 128, gamma="normal", seed=1).law("marginal")
    assert found[1].quantities[4].before == dynamics(AdamW(lr=1e-3, weight_decay=0.1), law).norm
    assert dynamics(AdamL2(lr=1e-3, weight_decay=0.1), law).norm > 0


BAD_USAGE = {
    "--to lion": "--from",
    "--from adamw --lr 1e-3 --weight-decay 0.1": "--to",
    "--from adamw --to lion": "`lr` must be given for adamw",
    "--from adam --to lion": "`optimizer` must be one of sgdm",
    "--from adamw --to lion --lr 0 --weight-decay 1": "`lr` is 0",
    "--from adamw --to lion --lr 1e-3 --weight-decay 1 --momentum 0.9": "`momentum` is not a hyperparameter of adamw",
    "--from adamw --to lion --lr 1e-3 --weight-decay 1 --to-betas 1 0": "`betas[0]` must lie in [0, 1)",
    "--from adamw --to lion --lr 1 --weight-decay 3": "no stable equilibrium",
    "--from adamw --to lion --lr 1e-3 --weight-decay 1 --batch 3": "`batch`",
    "--from adamw --to lion --lr 1e-3 --weight-decay 1 --match norm": "--match",
}


@pytest.mark.parametrize("arguments", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_two(arguments, capsys):
    assert run(["convert", *arguments.split()]) == USAGE
    out, err = capsys.readouterr()
    assert err.startswith("rwsim: error: ") and err.count("\n") == 1 and BAD_USAGE[arguments] in err and out == ""
