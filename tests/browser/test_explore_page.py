"""The explorer in a real browser: what sliders draw is what rwsim says, a point is simulated, the keyboard is enough, links do no harm."""

import math
import re
import threading
import time
from urllib.parse import urlencode

import numpy as np
import pytest

import rwsim
from rwsim.errors import NoEquilibrium
from rwsim.explore.document import document
from rwsim.explore.formulas import NAMES
from rwsim.explore.server import Server
from rwsim.explore.setting import check
from rwsim.explore.simulate import simulate
from rwsim.page.scale import MISSING
from tests.exploring import random_point

pytestmark = pytest.mark.browser
SMALL = {"optimizer": "adamw", "lr": 0.02, "weight_decay": 1, "betas_1": 0.5, "betas_2": 0.98, "loss_scale": 1, "fan_in": 64, "batch": 32}
SMALL |= {"steps": 1500, "init_norm": 1, "warmup": 0, "schedule": "constant"}


@pytest.fixture(scope="module")
def static(tmp_path_factory, browser):
    """After `browser`, so that a machine without one makes nothing."""
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    path.write_text(document(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def served(browser):
    server = Server(0, document, lambda given: simulate(check(given)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.address
    server.shutdown()
    thread.join()
    server.server_close()


def settled(page):
    """After the next two frames everything is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def drawn(page):
    """What the page has drawn last, in full precision."""
    settled(page)
    return page.evaluate("Explorer.drawn()")


def put(page, key, value):
    page.fill(f"#{key}", repr(value))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_is_what_rwsim_says(static, visit, name):
    """At random settings, typed in: equilibria of `rwsim.predict` and the path of the closure."""
    seen = visit(static)
    rng, compared = np.random.default_rng(11), 0
    seen.page.check(f"input[name=optimizer][value={name}]")
    for _ in range(4):
        point = random_point(name, rng, 150)
        for key, value in {**point.values, "fan_in": point.fan_in, "batch": point.batch, "steps": 150, "init_norm": point.start}.items():
            put(seen.page, key, value)
        put(seen.page, "warmup", 100 * point.warm / 150)
        seen.page.select_option("#schedule", point.shape)
        found = drawn(seen.page)
        known = point.path()
        with np.errstate(all="ignore"):
            room = 1e-6 * known + 1e3 * np.maximum.accumulate(np.abs(point.path(1e-13) - known), axis=1) + [[0], [3e-8]]
        steps = np.array(found["steps"]) - 1
        got = np.array([found["path"][q] for q in ("norm", "rotation")], dtype=float)
        fine = np.isfinite(known[:, steps]).all(0) & (known[0, steps] < 1e60)
        assert (np.abs(got - known[:, steps]) <= room[:, steps])[:, fine].all()
        try:
            predicted = point.predicted()
        except NoEquilibrium as error:
            assert "error" in found["here"] or found["here"]["exact"][1] > 3.14, error
            assert "error" not in found["here"] or "No equilibrium" in seen.page.inner_text("#messages")
            continue
        assert found["here"]["exact"] == pytest.approx(predicted["exact"], rel=1e-6)
        assert found["here"]["paper"] == pytest.approx(predicted["paper"], rel=1e-6)
        # What is written is that number to its digits.
        assert number(seen.page.inner_text("#norm-exact")) == pytest.approx(predicted["exact"][0], rel=1e-4)
        assert number(seen.page.inner_text("#rotation-paper")) == pytest.approx(predicted["paper"][1], rel=1e-4)
        compared += 1
    assert compared >= 2
    seen.sound(static.as_uri())


def number(said):
    return float(said.replace("\N{MINUS SIGN}", "-").replace(",", ""))


def test_sliders_change_the_curves(static, visit):
    """By the slider itself, and the pixels follow the numbers."""
    seen = visit(static)
    page = seen.page
    before, path = drawn(page), page.get_attribute("#plot-norm .line.path", "d")
    page.locator("#lr-slider").press("PageUp")
    after = drawn(page)
    assert after["here"]["exact"][0] > 1.5 * before["here"]["exact"][0]
    assert page.get_attribute("#plot-norm .line.path", "d") != path
    lr = float(page.input_value("#lr"))
    found = rwsim.predict("adamw", lr=lr, weight_decay=0.08, betas=(0.9, 0.999), fan_in=128, batch=32)
    assert after["here"]["exact"] == pytest.approx([found.exact.norm, found.exact.rotation, found.exact.rms_update], rel=1e-6)
    assert page.get_attribute("#lr-slider", "aria-valuetext") == page.input_value("#lr")
    # The last point of the path lies where the axis' ticks say that its value is.
    ticks = page.evaluate(
        "[...document.querySelectorAll('#plot-norm text.tick')]"
        ".filter((t) => t.getAttribute('text-anchor') === 'end' && +t.getAttribute('x') < 100)"
        ".map((t) => [Number(t.textContent.replace(',', '')), Number(t.getAttribute('y')) - 3.5])"
    )
    place = float(re.findall(r"[-0-9.]+", page.get_attribute("#plot-norm .line.path", "d"))[-1])
    (low, y_low), (high, y_high) = ticks[0], ticks[-1]
    value = low * (high / low) ** ((place - y_low) / (y_high - y_low))
    assert value == pytest.approx(after["path"]["norm"][-1], rel=0.02)
    seen.sound(static.as_uri())


def test_other_optimizers_have_their_own_sliders_and_formulas(static, visit):
    seen = visit(static)
    for name in NAMES:
        seen.page.check(f"input[name=optimizer][value={name}]")
        settled(seen.page)
        shown = {row.get_attribute("data-key") for row in seen.page.locator(".control[data-key]:visible").all()}
        assert ("momentum" in shown) == (name == "sgdm") and ("betas_2" in shown) == (name != "sgdm")
        assert seen.page.locator("section[data-rule]:visible").get_attribute("data-rule") == name
        assert seen.page.locator("section[data-rule]:visible math").count() >= 6
    seen.sound(static.as_uri())


def test_a_file_says_why_it_cannot_simulate(static, visit):
    seen = visit(static)
    assert seen.page.locator("#simulate").count() == 0 and "rwsim explore" in seen.page.inner_text("#no-simulation")
    seen.sound(static.as_uri())


def simulated(page):
    """Press the button and wait for what it says."""
    page.click("#simulate")
    return answered(page)


def answered(page):
    began = time.monotonic()
    while not re.search(r"walked|blow up|Not simulated", said := page.inner_text("#simulated")):
        assert time.monotonic() - began < 60, said
        page.wait_for_timeout(50)
    return said


def test_a_simulation_lays_its_points_over_the_curves(served, visit):
    seen = visit(f"{served}#{urlencode(SMALL)}")
    page = seen.page
    assert page.locator("#plot-norm .dot.measured").count() == 0
    assert simulated(page) == "128 neurons walked 1,500 steps."
    points = page.get_attribute("#plot-norm .dot.measured", "d")
    assert points.count("M") > 20 and page.get_attribute("#plot-rotation .bar.measured", "d").count("V") > 20
    assert page.locator("#figure-norm [data-series=measured]").is_visible() and page.locator("#plot-norm .line.full").count() == 1
    # The value in the table agrees with the full prediction within its error bar and one percent.
    full = rwsim.predict("adamw", lr=0.02, weight_decay=1.0, betas=(0.5, 0.98), fan_in=64, batch=32).full
    for quantity in ("norm", "rotation", "rms_update"):
        mean, error = map(number, page.inner_text(f"#{quantity}-measured").split(" ± "))
        assert abs(mean - getattr(full, quantity)) < 4.5 * error + 0.01 * mean and error < 0.01 * mean
    assert page.locator("#plot-norm-lr .dot.measured").count() == 1
    # Another setting takes them away and says so; back again they are there.
    put(page, "lr", 0.03)
    settled(page)
    assert page.locator("#plot-norm .dot.measured").count() == 0 and "has changed" in page.inner_text("#simulated")
    put(page, "lr", 0.02)
    settled(page)
    assert page.get_attribute("#plot-norm .dot.measured", "d") == points
    seen.sound(served, f"{served}simulate")


def test_a_refused_simulation_says_why(served, visit):
    seen = visit(f"{served}#{urlencode({**SMALL, 'fan_in': 16384, 'steps': 100_000})}")
    assert "at most" in simulated(seen.page)
    assert [fault for fault in seen.faults if "400" not in fault] == []


def test_the_keyboard_is_enough(served, visit):
    """Every control is reached by Tab, shows its focus, and works by keys."""
    seen = visit(f"{served}#{urlencode({**SMALL, 'steps': 100})}")
    page = seen.page
    reached = []
    page.keyboard.press("Tab")
    for _ in range(80):
        focused = page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.className")
        if focused in reached:
            break
        reached.append(focused)
        outline = page.evaluate(
            "(() => { const a = document.activeElement, b = a.type === 'radio' ? a.nextElementSibling : a;"
            " return getComputedStyle(b).outlineStyle; })()"
        )
        assert outline not in ("none", ""), focused
        page.keyboard.press("Tab")
    for key in ("lr", "weight_decay", "betas_1", "betas_2", "fan_in", "batch", "loss_scale", "steps", "init_norm", "warmup"):
        assert key in reached and f"{key}-slider" in reached
    assert {"optimizer", "schedule", "copy", "reset", "simulate", "log-steps"} <= set(reached)
    page.focus("input[value=adamw]")
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert page.is_checked("input[value=sgdm]") and page.locator("#momentum").is_visible()
    page.keyboard.press("ArrowRight")
    page.focus("#lr-slider")
    before = page.input_value("#lr")
    page.keyboard.press("ArrowUp")
    settled(page)
    assert float(page.input_value("#lr")) > float(before)
    page.focus("#weight_decay")
    page.keyboard.press("Control+A")
    page.keyboard.type("0.5")
    settled(page)
    assert drawn(page)["here"]["exact"] == pytest.approx(exact(float(page.input_value("#lr")), 0.5), rel=1e-6)
    page.focus("#schedule")
    page.keyboard.press("c")
    page.keyboard.press("ArrowDown")
    page.focus("#log-steps")
    page.keyboard.press("Space")
    assert page.is_checked("#log-steps")
    page.focus("#simulate")
    page.keyboard.press("Enter")
    assert "walked 100 steps" in answered(page)
    assert page.evaluate("document.activeElement.id") == "simulate", "the focus stays"
    page.focus("#reset")
    page.keyboard.press("Space")
    settled(page)
    assert page.input_value("#lr") == "0.0125"
    seen.sound(served, f"{served}simulate")


def exact(lr, decay):
    found = rwsim.predict("adamw", lr=lr, weight_decay=decay, betas=(0.5, 0.98), fan_in=64, batch=32).exact
    return [found.norm, found.rotation, found.rms_update]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_accessible(served, visit, name, dark):
    own = {"optimizer": name, "steps": 100, "batch": "x"}  # with a message
    seen = visit(f"{served}#{urlencode(own)}", dark=dark)
    if name == "adamw":
        simulated(seen.page)
    put(seen.page, "lr", -1.0)  # and a value that is refused
    settled(seen.page)
    assert seen.page.locator("#lr-problem").is_visible() and seen.violations() == []
    ground, ink = seen.page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
    assert bright[0] < bright[1] if dark else bright[0] > bright[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_does_not_scroll_sideways(static, visit, name):
    seen = visit(f"{static.as_uri()}#optimizer={name}&lr=abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz", width=375, height=700)
    content, window = seen.width()
    assert content <= window
    assert seen.page.locator("#readout").is_visible() and "rad" in seen.page.inner_text("#readout")
    small = seen.page.evaluate(
        "Math.min(...[...document.querySelectorAll('.plot text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.getScreenCTM().a))"
    )
    assert small > 8, "text of the figures, in pixels"
    for row in seen.page.locator(".control:visible input").all():
        box = row.bounding_box()
        assert box["height"] >= 24, "large enough for a finger"
    assert not seen.faults


def test_values_that_cannot_be_are_refused_in_words(static, visit):
    seen = visit(static)
    page = seen.page
    before = drawn(page)
    for key, value, said in (
        ("lr", "-1", "must lie in [0,"), ("lr", "", "must be a number"), ("betas_1", "1", "must lie in [0,"),
        ("batch", "3", "infinite below 4"),
        ("fan_in", "1.5", "must"), ("fan_in", "10.5", "whole number"), ("steps", "1e12", "must lie in [1,"),
    ):  # fmt: skip
        page.fill(f"#{key}", value)
        settled(page)
        assert said in page.inner_text(f"#{key}-problem") and page.get_attribute(f"#{key}", "aria-invalid") == "true"
        assert "last setting that could be taken" in page.inner_text("#messages") and drawn(page) == before
        page.click("#reset")
        settled(page)
        assert page.inner_text(f"#{key}-problem") == "" and page.get_attribute(f"#{key}", "aria-invalid") is None
    put(page, "lr", 30.0)
    put(page, "weight_decay", 1.0)
    settled(page)
    assert "No equilibrium: no stable equilibrium: lr times weight decay" in page.inner_text("#messages")
    assert page.inner_text("#norm-exact") == MISSING
    put(page, "weight_decay", 0.0)
    settled(page)
    assert "`weight_decay` is 0" in page.inner_text("#messages")
    seen.sound(static.as_uri())


def test_a_link_restores_the_whole_setting(static, visit):
    given = {"optimizer": "lion", "lr": 3e-4, "weight_decay": 2.5, "betas_1": 0.95, "betas_2": 0.98, "loss_scale": 2, "fan_in": 300}
    given |= {"batch": 64, "steps": 777, "init_norm": 3.25, "warmup": 12, "schedule": "wsd"}
    seen = visit(f"{static.as_uri()}#{urlencode(given)}")
    page = seen.page
    found = drawn(page)
    for key, value in given.items():
        if key != "optimizer":
            assert page.input_value(f"#{key}") == (value if isinstance(value, str) else f"{value:g}")
    assert page.is_checked("input[value=lion]") and page.inner_text("#messages") == ""
    put(page, "fan_in", 301)
    page.wait_for_timeout(400)
    link = page.url
    assert "fan_in=301" in link and "wsd" in link
    again = visit(link)
    assert drawn(again.page) == drawn(page) != found
    # And of the same page, by its address alone.
    again.page.evaluate("location.hash = 'optimizer=sgdm&lr=0.25'")
    settled(again.page)
    assert again.page.is_checked("input[value=sgdm]") and again.page.input_value("#lr") == "0.25"
    page.click("#copy")
    assert "link to this setting" in page.inner_text("#copied")
    seen.sound(static.as_uri(), f"{static.as_uri()}#{urlencode(given)}")


HOSTILE = (
    "lr=<img src=x onerror=alert(1)>",
    "optimizer=<script>alert(1)</script>",
    "schedule=%3Csvg%20onload%3Dalert(1)%3E",
    "lr=javascript:alert(1)&weight_decay=constructor",
    "optimizer=__proto__&lr=1",
    "optimizer=constructor",
    "__proto__=1&constructor=2&toString=3",
    "lr=1e999&weight_decay=-1e999&steps=NaN&fan_in=Infinity&batch=0x20",
    "steps=999999999999&fan_in=1e15",
    "lr=" + "9" * 1500,
    "%E0%A4%A=1&lr=%",
    "x=" + "y" * 5000,
    "lr=1;lr=2&lr[]=3",
)


@pytest.mark.parametrize("fragment", HOSTILE)
def test_a_hostile_link_is_refused_in_words(static, visit, fragment):
    seen = visit(f"{static.as_uri()}#{fragment}")
    page = seen.page
    page.wait_for_timeout(300)
    assert page.inner_text("#messages").startswith("The link") and not seen.faults
    assert page.locator("#messages img, #messages svg, #messages script").count() == 0
    assert page.evaluate("[({}).polluted, Object.prototype.lr]") == [None, None]
    # What was not refused is as it was: the page works.
    found = drawn(page)
    assert all(math.isfinite(x) for x in found["here"]["exact"])
    put(page, "lr", 0.01)
    settled(page)
    assert page.inner_text("#messages") == ""
