"""Verdicts: right theory agrees, wrong theory is rejected, and nothing is claimed that was not measured."""

import dataclasses
import json
import math
import sys
import threading

import numpy as np
import pytest

import rwsim
from rwsim import validate as validate_function
from rwsim.config import PAPER_CASES, Settings
from rwsim.errors import InvalidArgument, NoEquilibrium, WalkDiverged, WalkInterrupted
from rwsim.optimizers import SGDM, AdamL2, AdamW, Lion
from rwsim.stats.verdict import AGREES, DIFFERS, UNDECIDED, critical_value
from rwsim.theory.equilibrium import Prediction, predict_equilibrium
from rwsim.theory.full import Full, predict_full
from rwsim.theory.transient import Approach, approach
from rwsim.validate import Case, compare, prepare
from rwsim.walk.job import Job
from rwsim.walk.measure import QUANTITIES
from rwsim.walk.simulate import run
from rwsim.walk.system import Layer

# Fast to equilibrate, so that a short walk resolves half a percent.
FAST = {
    "sgdm": SGDM(lr=0.2, weight_decay=0.05, momentum=0.5),
    "adamw": AdamW(lr=2e-2, weight_decay=1.0, betas=(0.9, 0.999)),
    "adam_l2": AdamL2(lr=2e-2, weight_decay=1.0, betas=(0.9, 0.999)),
    "lion": Lion(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.9)),
}
FAST_TOY = {
    "sgdm": SGDM(lr=1.0, weight_decay=2e-3, momentum=0.9),
    "adamw": AdamW(lr=2e-2, weight_decay=0.5, betas=(0.9, 0.99)),
    "adam_l2": AdamL2(lr=5e-3, weight_decay=1e-2, betas=(0.9, 0.99)),
    "lion": Lion(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.95)),
}


def scaled(form: Full, factor: float) -> Full:
    return dataclasses.replace(form, norm_sq=form.norm_sq * factor**2, angle=form.angle * factor, update_sq=form.update_sq * factor**2)


def verdicts(walk, rule, full, settings, burn_in, layers):
    layer = Layer.draw(settings.fan_in, settings.neurons, gamma="uniform")
    case = Case(rule, layer, layers, (walk.steps,), Prediction(None, full, 1.0, 1.0), full, Approach(*np.zeros((2, 1))), burn_in, "")
    return [r.verdict for r in compare(case, walk, settings)]


@pytest.mark.parametrize("name", FAST)
def test_ideal_walk_agrees_and_one_percent_is_rejected(name):
    """Negative control at a margin of half a percent: theory times 1.01 and 0.99 must come out `differs`."""
    rule, layer = FAST[name], Layer.draw(64, 256, gamma="uniform")
    settings = Settings(fan_in=64, neurons=256, gradient="gaussian", margin=0.005, steps=4000)
    full = predict_full(rule, layer.law("gaussian"))
    walk = run(Job((rule,), layer, 4000, "gaussian", 3))
    burn_in = approach(rule, layer.law("gaussian"), layer.start_sq, 4000).burn_in(0.001)
    assert burn_in is not None
    assert verdicts(walk, rule, full, settings, burn_in, 3) == [AGREES] * 3
    for factor in (1.01, 0.99):
        assert verdicts(walk, rule, scaled(full, factor), settings, burn_in, 3) == [DIFFERS] * 3


@pytest.mark.parametrize("name", FAST_TOY)
def test_toy_system_agrees_within_half_a_percent_and_one_percent_is_rejected(name):
    rule, layer = FAST_TOY[name], Layer.draw(64, 128, gamma="uniform")
    settings = Settings(fan_in=64, steps=3000, margin=0.005)
    law = layer.law("marginal")
    full = predict_full(rule, law)
    burn_in = approach(rule, law, layer.start_sq, 3000).burn_in(0.001)
    assert burn_in is not None
    walk = run(Job((rule,), layer, 3000, layers=10))
    assert verdicts(walk, rule, full, settings, burn_in, 10) == [AGREES] * 3
    for factor in (1.01, 0.99):
        assert verdicts(walk, rule, scaled(full, factor), settings, burn_in, 10) == [DIFFERS] * 3


def test_rejects_the_wrong_optimizers_law():
    """An AdamW walk judged by Adam+l2's law and by Lion's; an SGDM walk by SGDM's law without momentum."""
    layer, settings = Layer.draw(32, 128, gamma="uniform"), Settings(fan_in=32, steps=3000)
    law = layer.law("marginal")
    walk = run(Job((FAST_TOY["adamw"],), layer, 3000))
    for other in (AdamL2(lr=2e-2, weight_decay=0.5), Lion(lr=2e-2, weight_decay=0.5), AdamW(lr=2e-2, weight_decay=0.5, betas=(0.8, 0.999))):
        found = verdicts(walk, FAST_TOY["adamw"], predict_full(other, law), settings, 1000, 1)
        assert found.count(DIFFERS) >= 2
    walk = run(Job((FAST_TOY["sgdm"],), layer, 3000))
    plain = SGDM(lr=1.0, weight_decay=2e-3, momentum=0.0)
    assert verdicts(walk, FAST_TOY["sgdm"], predict_full(plain, law), settings, 1000, 1) == [DIFFERS] * 3


def test_rejects_lion_with_swapped_betas():
    class Swapped(Lion):
        name = "swapped"

        @staticmethod
        def update(grad, state, hyper, xp):
            flipped = type(hyper)(**{**vars(hyper), "betas": hyper.betas[::-1]})
            return Lion.update(grad, state, flipped, xp)

    layer, settings = Layer.draw(32, 128, gamma="uniform"), Settings(fan_in=32, steps=3000)
    values = vars(FAST_TOY["lion"].values)
    walk = run(Job((Swapped(**values),), layer, 3000))
    found = verdicts(walk, FAST_TOY["lion"], predict_full(FAST_TOY["lion"], layer.law("marginal")), settings, 1000, 1)
    assert found[:2] == [DIFFERS, DIFFERS]


@pytest.mark.parametrize("rule", [SGDM(lr=0.5, weight_decay=0.5, momentum=0.0), AdamL2(lr=0.5, weight_decay=0.5, betas=(0.0, 0.999))])
def test_rejects_an_update_size_that_holds_the_decay(rule):
    """Without momentum eta_g^2 / (r^2 norm^2) = 1 - eta lambda / 2 (eta lambda / 2 sqrt(v) for Adam+l2): 6 % in eta_g."""
    layer = Layer.draw(64, 128, gamma="uniform")
    exact, full = predict_equilibrium(rule, layer.law("gaussian")).exact, predict_full(rule, layer.law("gaussian"))
    total_sq = (2 * np.sin(exact.angle / 2)) ** 2 * exact.norm_sq
    assert np.sqrt(total_sq / exact.update_sq).item() > 1.05
    walk = run(Job((rule,), layer, 1500, "gaussian"))
    settings = Settings(fan_in=64, gradient="gaussian", steps=1500, margin=0.02)
    whole = dataclasses.replace(full, update_sq=total_sq)
    assert verdicts(walk, rule, full, settings, 500, 1)[2] == AGREES
    assert verdicts(walk, rule, whole, settings, 500, 1)[2] == DIFFERS


def test_a_prediction_less_sure_than_the_margin_says_so():
    """Lion whose momentum outlasts its weights, on few coordinates: what the walk finds stands, and the reason names the doubt."""
    result = rwsim.validate("lion", lr=1e-2, weight_decay=1.0, betas=(0.9, 0.999), steps=600, neurons=8, fan_in=16)
    full = result.cases[0].case.full
    assert full.norm_error > 0.01 and not full.valid and full.doubts
    assert all("the prediction is sure to" in r.reason for r in result.records)


def test_short_walks_are_undecided_with_a_reason():
    result = rwsim.validate(steps=300, neurons=16, fan_in=16)
    assert not result.passed and len(result.records) == 15
    assert {r.verdict for r in result.records} == {UNDECIDED}
    assert all("not in equilibrium" in r.reason or "too few effective samples" in r.reason for r in result.records)


def test_few_samples_are_a_reason_of_their_own():
    found = rwsim.validate("adamw", lr=0.1, weight_decay=5.0, betas=(0.5, 0.5), steps=120, neurons=1, fan_in=8, window=10, layers=1).records
    assert {r.verdict for r in found} == {UNDECIDED} and any("too few effective samples" in r.reason for r in found)


def test_a_drift_that_theory_did_not_see_is_a_reason():
    rule, settings = FAST_TOY["adamw"], Settings(fan_in=32, neurons=64, steps=1500, gamma="uniform")
    case = dataclasses.replace(prepare(rule, settings, 1.0), burn_in=0)  # told that no burn-in is needed
    records = compare(case, run(Job((rule,), case.layer, 1500, layers=case.layers)), settings)
    assert {r.verdict for r in records} == {UNDECIDED} and "drifts" in records[0].reason


def test_results_repeat_bitwise_and_seeds_differ():
    settings = dict(steps=400, neurons=8, fan_in=8, lr=0.05, weight_decay=1.0)
    one, same, other = (rwsim.validate("adamw", seed=s, **settings) for s in (0, 0, 1))
    assert [r.measured for r in one.records] == [r.measured for r in same.records]
    assert [r.measured for r in one.records] != [r.measured for r in other.records]


def test_json_has_the_published_form():
    result = rwsim.validate("lion", lr=1e-2, weight_decay=1.0, steps=300, neurons=2, fan_in=4)
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["meta"]["status"] == "complete" and document["meta"]["seed"] == 0
    required = {
        "optimizer",
        "hyper",
        "gradient",
        "quantity",
        "measured",
        "mcse",
        "predicted",
        "relative_error",
        "verdict",
        "reason",
        "margin",
    }
    assert all(required <= set(record) for record in document["records"])
    assert [r["quantity"] for r in document["records"]] == list(QUANTITIES)
    assert document["records"][0]["hyper"] == {"lr": 0.01, "weight_decay": 1.0, "betas": [0.9, 0.999]}
    assert set(document["records"][0]["predicted"]) == {"paper", "exact", "full"}


def test_default_cases_are_the_papers():
    settings = [(name, scale, dict(values)) for name, scale, values in PAPER_CASES]
    assert settings == [
        ("sgdm", 1.0, {"lr": 0.5, "weight_decay": 1e-4, "momentum": 0.9}),
        ("adamw", 1.0, {"lr": 1.25e-2, "weight_decay": 8e-2, "betas": (0.9, 0.999)}),
        ("adam_l2", 0.1, {"lr": 7.813e-4, "weight_decay": 1.25e-4, "betas": (0.9, 0.999)}),
        ("lion", 1.0, {"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.999)}),
        ("lion", 1.0, {"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)}),
    ]
    defaults = Settings()
    assert (defaults.steps, defaults.neurons, defaults.fan_in, defaults.batch) == (15_000, 128, 128, 32)


def test_a_walk_goes_on_for_as_long_as_the_margin_needs():
    """In equilibrium: what brings the interval, and two and a half standard errors more, below what a likely error leaves; and not
    where layers are given."""
    rule, asked = FAST_TOY["adamw"], {"steps": 1000, "neurons": 16, "fan_in": 16}
    found = {margin: prepare(rule, Settings(margin=margin, **asked), 1.0) for margin in (0.2, 0.05, 0.02)}
    for margin, case in found.items():
        full = case.full
        error = (margin - 0.4 * max(full.norm_error, full.rotation_error)) / (critical_value(15, math.inf) + 2.5)
        assert case.layers == 1 and case.burn_in is not None and case.steps % 100 == 0
        # The norm is a root: half the relative error of what is averaged.
        wanted = 1.1**2 * full.norm_noise / (16 * (2 * error) ** 2)
        assert case.steps - case.burn_in == pytest.approx(max(1000 - case.burn_in, min(16_000, 1.6 * wanted)), abs=100)
    assert found[0.2].steps == 1000 < found[0.05].steps < found[0.02].steps
    assert prepare(rule, Settings(layers=1, margin=0.02, **asked), 1.0).steps == 1000
    result = rwsim.validate("adamw", lr=0.02, weight_decay=0.5, betas=(0.9, 0.99), margin=0.02, **asked)
    assert result.cases[0].walk.steps in found[0.02].looks and result.cases[0].walk.norm_sq.shape[2] == 16
    assert rwsim.validate("adamw", lr=0.02, weight_decay=1.0, steps=300, neurons=4, fan_in=8, layers=3).cases[0].walk.norm_sq.shape[2] == 12


def test_a_walk_ends_at_the_first_look_that_decides_everything():
    asked = {"steps": 500, "neurons": 32, "fan_in": 32, "margin": 0.04, "window": 50}
    early = 0
    for seed in range(2):
        found = rwsim.validate("adamw", lr=0.02, weight_decay=0.5, betas=(0.9, 0.99), seed=seed, **asked).cases[0]
        case, settings, ended = found.case, Settings(seed=seed, **asked), found.walk.steps
        assert len(case.looks) == 5 and ended in case.looks
        # The walk is as it would have been, and at the looks before something was open.
        whole = run(Job((case.rule,), case.layer, case.steps, seed=seed, window=50))
        assert np.array_equal(whole.until(ended).angle, found.walk.angle)
        verdicts_at = {look: {r.verdict for r in compare(case, whole.until(look), settings)} for look in case.looks if look <= ended}
        assert all(UNDECIDED in verdicts_at[look] for look in verdicts_at if look < ended)
        assert UNDECIDED not in verdicts_at[ended] or ended == case.steps
        early += ended < case.steps
    assert early
    # Five looks: each has a fifth of the chance of a false alarm, and so a wider interval.
    five, once = (compare(dataclasses.replace(case, looks=looks), whole, settings)[0] for looks in (case.looks, case.looks[-1:]))
    assert five.interval > once.interval and five.mcse == once.mcse


@pytest.mark.parametrize("name", FAST_TOY)
def test_noise_of_a_mean_norm(name):
    """Between 512 neurons' means, whose spread is known to 6 %: theory's variance is of first order, and right within a factor of two."""
    rule, layer = FAST_TOY[name], Layer.draw(64, 64)
    full = predict_full(rule, layer.law("marginal"))
    walk = run(Job((rule,), layer, 2000, layers=8)).kept(500)
    means = walk.norm_sq[:, 0].mean(0).reshape(8, 64) / full.norm_sq
    assert 0.4 < means.var(ddof=1) / means.mean() ** 2 / (full.norm_noise / walk.steps) < 2


def test_a_walk_that_had_ended_is_kept_when_another_is_interrupted(monkeypatch):
    ended = threading.Event()

    def progress(label: str, step: int, steps: int) -> None:
        if label.startswith("lion") and step == steps:
            ended.set()
        elif label.startswith("sgdm"):
            assert ended.wait(60)
            raise KeyboardInterrupt

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    result = rwsim.validate(["sgdm", "lion"], steps=300, neurons=4, fan_in=8, progress=progress)
    assert isinstance(result.stopped, WalkInterrupted) and not result.cases
    kept = {case.rule.name: walk.steps for case, walk in result.partial}
    assert kept["lion"] == 300 and kept["sgdm"] >= 100


@pytest.mark.parametrize("engine", ["blocked", "reference"])
def test_what_was_decided_before_a_walk_diverges_stands(engine, monkeypatch):
    asked = {"steps": 500, "neurons": 32, "fan_in": 32, "margin": 0.04, "window": 50, "engine": engine}
    settings = Settings(**asked)
    case = prepare(AdamW(lr=0.02, weight_decay=0.5, betas=(0.9, 0.99)), settings, 1.0)
    whole = run(Job((case.rule,), case.layer, case.steps, window=50), engine=engine)
    first = next(look for look in case.looks if {r.verdict for r in compare(case, whole.until(look), settings)} == {AGREES})
    assert first < case.steps

    def diverging(job, **options):
        raise WalkDiverged("NaN", first + 50, whole.until(first), (0,))

    module = sys.modules["rwsim.validate"]
    monkeypatch.setattr(module, "run", diverging)
    result = rwsim.validate("adamw", lr=0.02, weight_decay=0.5, betas=(0.9, 0.99), **asked)
    assert result.passed and result.cases[0].walk.steps == first
    monkeypatch.setattr(module, "_LOOKS", (1.6,))
    assert isinstance(rwsim.validate("adamw", lr=0.02, weight_decay=0.5, betas=(0.9, 0.99), **asked).stopped, WalkDiverged)


def test_a_walk_that_blows_up_keeps_the_cases_before_it(monkeypatch):
    result = rwsim.validate("sgdm", lr=1e30, weight_decay=1e-4, steps=300, neurons=4, fan_in=4)
    assert isinstance(result.stopped, WalkDiverged) and "step 1 in config 0, SGDM(lr=1e+30" in str(result.stopped)
    assert result.to_json()["meta"]["status"] == "WalkDiverged" and not result.passed


def test_an_unstable_walk_that_survives_is_undecided():
    result = rwsim.validate("sgdm", lr=2.05, weight_decay=1.0, momentum=0.0, gradient="gaussian", steps=10, window=5, neurons=4, fan_in=4)
    assert {r.verdict for r in result.records} == {UNDECIDED} and "no stable equilibrium" in result.records[0].reason
    assert result.to_json()["records"][0]["predicted"]["full"] is None


def test_interruption_keeps_finished_cases():
    def stop(label, step, total):
        if "betas=0.9/0.99 " in label and step == 200:
            raise KeyboardInterrupt

    # The reference engine, which tells its progress after every window.
    result = rwsim.validate("lion", steps=300, neurons=4, fan_in=4, progress=stop, engine="reference")
    assert isinstance(result.stopped, WalkInterrupted) and len(result.cases) == 1
    ((case, walk),) = result.partial
    assert case.rule.values.betas == (0.9, 0.99) and walk.steps == 200

    def stop_between(case):
        raise KeyboardInterrupt

    between = rwsim.validate("lion", steps=200, neurons=4, fan_in=4, done=stop_between)
    assert isinstance(between.stopped, WalkInterrupted) and len(between.cases) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": "adam"}, InvalidArgument, "must be one of sgdm"),
        ({"lr": 0.1}, InvalidArgument, "`lr` needs exactly one optimizer"),
        ({"optimizer": ["sgdm", "lion"], "lr": 0.1}, InvalidArgument, "exactly one"),
        ({"batch": 3}, InvalidArgument, "`batch`"),
        ({"steps": 0}, InvalidArgument, "`steps`"),
        ({"gradient": "odd"}, InvalidArgument, "`gradient`"),
        ({"optimizer": "sgdm", "lr": 0.0}, NoEquilibrium, "`lr` is 0"),
        ({"optimizer": "lion", "weight_decay": 0.0}, NoEquilibrium, "`weight_decay`"),
        ({"optimizer": "sgdm", "step": 3}, InvalidArgument, "`step` is not a hyperparameter of sgdm"),
    ],
)
def test_bad_validations_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        validate_function(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_papers_experiment_agrees(seed):
    """The acceptance run: about a minute on two cores."""
    result = rwsim.validate(seed=seed)
    assert result.passed, [(r.optimizer, r.quantity, r.verdict, r.reason) for r in result.records]
    for record in result.records:
        assert abs(record.relative_error["full"]) < 0.01 and record.mcse < 0.002 * record.measured
    paper = {
        r.quantity: r.relative_error["paper"] for r in result.records if r.hyper.get("betas") == (0.9, 0.999) and r.optimizer == "lion"
    }
    assert paper["norm"] == pytest.approx(1 / 1.165 - 1, abs=0.015) and paper["rotation"] == pytest.approx(0.155, abs=0.015)


@pytest.mark.slow
def test_faithful_and_marginal_walks_agree_with_each_other():
    """The system as printed against the exact law, within their joint error, on every quantity."""
    faithful, marginal = rwsim.validate(gradient="faithful", layers=8), rwsim.validate()
    for a, b in zip(faithful.records, marginal.records, strict=True):
        assert a.mcse < 0.003 * a.measured
        assert abs(a.measured - b.measured) <= 4.5 * math.hypot(a.mcse, b.mcse) + 1e-4 * b.measured, (a.optimizer, a.quantity)


@pytest.mark.slow
def test_rejects_one_percent_either_way_at_half_a_percent():
    """The narrow margin on the paper's own experiment: several minutes on two cores."""
    result = rwsim.validate(margin=0.005)
    assert result.passed, [(r.optimizer, r.quantity, r.verdict, r.reason) for r in result.records]
    for found in result.cases:
        for factor in (1.01, 0.99):
            wrong = dataclasses.replace(found.case, full=scaled(found.case.full, factor))
            assert [r.verdict for r in compare(wrong, found.walk, result.settings, checks=15)].count(AGREES) == 0
