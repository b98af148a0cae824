"""The explorer without a browser: the printed formulas against rwsim's own numbers (in node), and the checks of a setting."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import sympy as sp

from rwsim.errors import InvalidArgument, NoEquilibrium
from rwsim.explore import formulas
from rwsim.explore.document import document
from rwsim.explore.setting import check, hyper_controls, paper_values
from rwsim.explore.simulate import LARGEST, neurons_for, simulate
from rwsim.optimizers import RULES
from rwsim.page import scale
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.predict import gradient_law
from rwsim.theory.signs import sign_autocovariance
from tests.exploring import random_point

# What the issue asks of the page; rounding alone leaves 1e-11.
TOLERANCE = 1e-6
# Settings of each optimizer; Lion's exact form takes Python a second where averages are long.
POINTS = {"sgdm": 60, "adamw": 60, "adam_l2": 60, "lion": 12}
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here: the same numbers are compared in the browser's tests")
SETTING = {"optimizer": "adamw", "schedule": "constant", "warmup": 0, "steps": 300, "init_norm": 1.0, "fan_in": 16, "batch": 32}
SETTING |= {"lr": 0.02, "weight_decay": 2.0, "betas_1": 0.5, "betas_2": 0.9, "loss_scale": 1.0}


def node(expression, given=None, theory=None):
    """The value of a JavaScript expression in which THEORY, Runtime, Plot and `given` are known."""
    parts = [f"const THEORY = {formulas.javascript() if theory is None else theory};"]
    parts += [files("rwsim.explore").joinpath(name).read_text() for name in ("runtime.js", "plot.js")]
    parts.append(f"const given = {json.dumps(given)}; console.log(JSON.stringify({expression}));")
    done = subprocess.run([NODE], input="\n".join(parts), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


EQUILIBRIA = "given.map((p) => Runtime.equilibrium(p.name, p.hyper, p.at))"
PATHS = (
    "given.map((p) => Runtime.path(p.name, p.hyper, p.at, p.steps, Runtime.factors(p.shape, p.warm, p.steps), p.start)"
    ".map((values) => Array.from(values)))"
)


@needs_node
@pytest.mark.parametrize("name", formulas.NAMES)
def test_equilibria_are_those_of_predict(name):
    """Paper and exact, anywhere on the sliders."""
    rng = np.random.default_rng(1)
    points = [random_point(name, rng, 10) for _ in range(POINTS[name])]
    settled = 0
    for point, found in zip(points, node(EQUILIBRIA, [point.asked() for point in points]), strict=True):
        try:
            known = point.predicted()
        except NoEquilibrium:
            # At the very edge of stability, half a turn a step, rounding decides.
            assert "error" in found or found["exact"][1] > 3.14, point
            continue
        assert found["exact"] == pytest.approx(known["exact"], rel=TOLERANCE), point
        assert found["paper"] == pytest.approx(known["paper"], rel=TOLERANCE), point
        assert [found["time"]] == pytest.approx(known["time"], rel=TOLERANCE), point
        settled += 1
    assert settled > POINTS[name] / 2


@needs_node
@pytest.mark.parametrize("name", formulas.NAMES)
def test_paths_are_those_of_the_closure(name):
    """A path that amplifies rounding itself (a recurrence that blows up, an angle near 0) is compared as far as it is known."""
    rng = np.random.default_rng(2)
    steps, count = 80, 10
    points = [random_point(name, rng, steps) for _ in range(count)]
    compared = 0
    for point, found in zip(points, node(PATHS, [point.asked() for point in points]), strict=True):
        known, unsure = point.path(), point.path(1e-13)
        got = np.array(found, dtype=float)
        with np.errstate(all="ignore"):
            # Rates that differ by rounding: what that changes, a thousand times over, is not known.
            room = TOLERANCE * known + 1e3 * np.maximum.accumulate(np.abs(unsure - known), axis=1)
            room[1] += 3e-8  # radians: what rounding leaves of an angle whose square it is read off
            fine = np.isfinite(known).all(0) & (known[0] < 1e60)
            assert (np.abs(got - known)[:, fine] <= room[:, fine]).all(), point
            compared += int((room[:, fine] < 2 * TOLERANCE * known[:, fine] + 1e-7).all(0).sum())
    # A start far below equilibrium makes a jump after which momentum and weights are parallel, and the next angles rounding.
    assert compared > 0.6 * count * steps, "too much of the paths is too sensitive to compare"


@needs_node
@pytest.mark.parametrize(("name", "right", "wrong"), [("sgdm", "2*alpha", "2.00002*alpha"), ("lion", "Math.asin", "1.00001*Math.asin")])
def test_rejects_a_formula_that_is_off_by_a_hundred_thousandth(name, right, wrong):
    """The comparison above would see it."""
    rng = np.random.default_rng(3)
    points = [random_point(name, rng, 10) for _ in range(6)]
    broken = formulas.javascript().replace(right, wrong)
    seen = 0
    for point, found in zip(points, node(EQUILIBRIA, [point.asked() for point in points], broken), strict=True):
        with contextlib.suppress(NoEquilibrium):
            seen += "error" not in found and found["exact"] != pytest.approx(point.predicted()["exact"], rel=TOLERANCE)
    assert seen


@needs_node
@pytest.mark.parametrize("batch", [4, 5, 32, 4096])
def test_lengths_and_signs_of_a_batch(batch):
    law = gradient_law(64, batch)
    nodes, weights = node("Runtime.lengths(given)", batch)
    known = law.length_squared()
    assert nodes == pytest.approx(known[0], rel=1e-9)
    # Weights of far nodes are as small as 1e-9: they count as they are, not in relative terms.
    assert weights == pytest.approx(known[1], rel=1e-7, abs=1e-13)
    for betas in ((0.9, 0.99), (0.0, 0.9), (0.95, 0.0), (0.99, 0.5)):
        rule = RULES["lion"](lr=1e-3, weight_decay=1.0, betas=betas)
        found = node(
            "Array.from(Runtime.signs(...THEORY.rules.lion.kernel(1e-3, 1, ...given[0]), given[1], THEORY.rules.lion.tail))", [betas, batch]
        )
        assert found == pytest.approx(sign_autocovariance(rule, law)[0], rel=1e-9, abs=1e-12)


@needs_node
def test_settings_without_equilibrium_say_so():
    at = {"fan_in": 16, "batch": 32, "loss_scale": 1, "neurons": 128}
    for name in formulas.NAMES:
        rest = [0.9] if name == "sgdm" else [0.9, 0.99] if name == "lion" else [0.9, 0.99, 0]
        for lr, decay, said in ((0, 1, "`lr` is 0"), (1, 0, "`weight_decay` is 0"), (100, 1, "no stable equilibrium")):
            point = {"name": name, "hyper": [lr, decay, *rest], "at": at}
            found = node(EQUILIBRIA, [point])[0]
            if name == "adam_l2" and lr == 100:  # stable at any size: its normalizer grows with the weights
                assert found["exact"][0] > 0
            else:
                assert said in found["error"]


@needs_node
def test_numbers_are_written_as_on_other_pages():
    rng = np.random.default_rng(4)
    for _ in range(3):
        spans = [(float(a), float(a * b)) for a, b in zip(10 ** rng.uniform(-7, 4, 25), 10 ** rng.uniform(0.1, 6, 25), strict=True)]
        known = [scale.ticks(low, high, log, 5) for low, high in spans for log in (False, True)]
        found = node("given.flatMap(([low, high]) => [false, true].map((log) => Plot.ticks(low, high, log, 5)))", spans)
        assert found == [pytest.approx(ticks, rel=1e-9) for ticks in known]
        assert node("given.map((values) => Plot.tickTexts(values))", known) == [scale.tick_texts(values) for values in known]
    errors = [0.00194, -0.1321, 0.42, 3.5, -1e-9, 12.3456]
    assert node("given.map((x) => Plot.percent(x))", errors) == [scale.percent(x) for x in errors]
    values = [0.0071931, 1234.5678, -2.5e-7, 0.5, 3.0, 1e9]
    assert node("given.map((x) => Plot.number(x))", values)[0::2] == [scale.number(x) for x in values][0::2]


def test_functions_know_their_arguments():
    x, y = sp.symbols("x y")
    with pytest.raises(ValueError, match="not among the arguments: y"):
        formulas.function((x,), [x + y])
    assert "lambda" in formulas.javascript() and "undefined" not in formulas.javascript()


@pytest.mark.slow
def test_formulas_are_printed_in_time():
    """In less than 3 s of one core that imports sympy, numpy and scipy in 2.5 s (a busy one is slower at both)."""
    code = (
        "import time; t = time.process_time(); import sympy, numpy, scipy.stats, scipy.special; a = time.process_time() - t;"
        "import rwsim.explore.formulas as f; t = time.process_time(); f.javascript(); print(a, time.process_time() - t)"
    )
    needed, took = map(float, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert took < 3 * max(1.0, needed / 2.5)


def test_a_file_is_one_page_without_requests():
    text = document()
    assert text.count("<script") == 2 and "connect-src &#x27;none&#x27;" in text and "Simulate this point" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text) and "@import" not in text and "url(" not in text
    assert 'id="no-simulation"' in text and "rwsim explore" in text
    served = document("a-token")
    assert "a-token" in served and "connect-src &#x27;self&#x27;" in served and "Simulate this point" in served


@pytest.mark.parametrize("name", formulas.NAMES)
def test_settings_are_taken_as_they_are(name):
    given = {**{k: SETTING[k] for k in ("schedule", "warmup", "steps", "init_norm", "fan_in", "batch")}, **paper_values(name)}
    setting = check({**given, "optimizer": name, "schedule": "cosine", "warmup": 10})
    assert type(setting.rule) is RULES[name] and setting.rule.values.lr == given["lr"] and setting.factors.shape == (300,)
    assert setting.factors[:30] == pytest.approx(np.arange(1, 31) / 30) and setting.start_sq == pytest.approx(1 / 16)


BAD = {
    "not an object": ([], "setting"),
    "an unknown optimizer": ({"optimizer": "<b>"}, "optimizer"),
    "an optimizer that is not text": ({"optimizer": ["adamw"]}, "optimizer"),
    "an unknown schedule": ({"schedule": "x"}, "schedule"),
    "a schedule that is not text": ({"schedule": {}}, "schedule"),
    "text": ({"lr": "0.1"}, "lr"),
    "a truth value": ({"lr": True}, "lr"),
    "null": ({"lr": None}, "lr"),
    "not a number": ({"lr": float("nan")}, "lr"),
    "infinite": ({"lr": float("inf")}, "lr"),
    "too large for a float": ({"lr": 10**400}, "lr"),
    "negative": ({"lr": -1.0}, "lr"),
    "an average of 1": ({"betas_1": 1.0}, "betas_1"),
    "a share of a step": ({"steps": 1.5}, "steps"),
    "too many steps": ({"steps": 10**9}, "steps"),
    "a batch of 3": ({"batch": 3}, "batch"),
    "a fan-in of 1": ({"fan_in": 1}, "fan_in"),
    "a fan-in out of memory": ({"fan_in": 10**12}, "fan_in"),
    "no start": ({"init_norm": 0}, "init_norm"),
    "a key too many": ({"x": 1}, "setting"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case):
    change, argument = BAD[case]
    with pytest.raises(InvalidArgument) as caught:
        check({**SETTING, **change} if isinstance(change, dict) else change)
    assert caught.value.argument == argument


def test_refuses_a_setting_without_a_key():
    with pytest.raises(InvalidArgument, match="setting"):
        check({key: value for key, value in SETTING.items() if key != "lr"})


def test_sliders_stay_within_what_the_rules_take():
    for control in hyper_controls():
        assert control.least <= control.low < control.high <= control.most
    for name in formulas.NAMES:
        for key, value in paper_values(name).items():
            assert value is not None, key


def test_simulations_are_bounded():
    assert neurons_for(check(SETTING)) == 128
    wide = check({**SETTING, "fan_in": 16384, "steps": 300})
    assert neurons_for(wide) * 16384 * 300 <= LARGEST and neurons_for(wide) < 128
    with pytest.raises(InvalidArgument, match="times fan_in must be at most"):
        neurons_for(check({**SETTING, "fan_in": 16384, "steps": 100_000}))


WALKS = {
    "sgdm": {"lr": 0.1, "weight_decay": 0.02, "momentum": 0.5},
    "adamw": {"lr": 0.02, "weight_decay": 1.0, "betas_1": 0.5, "betas_2": 0.98},
    "adam_l2": {"lr": 5e-3, "weight_decay": 1e-3, "betas_1": 0.5, "betas_2": 0.98},
    "lion": {"lr": 2e-3, "weight_decay": 5.0, "betas_1": 0.5, "betas_2": 0.9},
}


@pytest.mark.parametrize("name", ["sgdm", "adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam_l2", "lion"))])
def test_a_simulated_point_agrees(name):
    """With the full prediction, within one percent and its error bars."""
    rest = {key: SETTING[key] for key in ("schedule", "warmup", "init_norm", "batch", "loss_scale")}
    setting = check({**WALKS[name], **rest, "optimizer": name, "steps": 1500, "fan_in": 64})
    found = simulate(setting)
    assert found["neurons"] == 128 and found["reason"] == "" and found["stopped"] == ""
    points, full = ({key: np.array(values) for key, values in found[part].items()} for part in ("points", "full"))
    late = points["step"] > 50
    for quantity in ("norm", "rotation"):
        expected = np.exp(np.interp(np.log(points["step"]), np.log(full["step"]), np.log(full[quantity])))
        room = 0.01 * expected + 4.5 * points[f"{quantity}_error"]
        assert (np.abs(points[quantity] - expected) < room)[late].all()
        assert (points[f"{quantity}_error"] < 0.03 * points[quantity])[late].all(), "too few neurons to see anything"
    known = predict_equilibrium(setting.rule, gradient_law(64, 32, 128)).full
    for quantity, (mean, error) in found["equilibrium"].items():
        assert error < 0.01 * mean and abs(mean - getattr(known, quantity)) < 0.01 * mean + 4.5 * error


def test_a_walk_that_blows_up_says_so():
    found = simulate(check({**SETTING, "lr": 9.0, "weight_decay": 9.0}))
    assert "blow up at step" in found["stopped"] and found["equilibrium"] is None
    json.dumps(found, allow_nan=False)


def test_a_schedule_has_no_equilibrium_value():
    found = simulate(check({**SETTING, "schedule": "cosine", "steps": 100}))
    assert found["equilibrium"] is None and "schedule" in found["reason"]
    short = simulate(check({**SETTING, "lr": 1e-4, "steps": 100}))
    assert short["equilibrium"] is None and "too short" in short["reason"]
