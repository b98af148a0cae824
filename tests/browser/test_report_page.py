"""Reports in a real browser: nothing fails, nothing is asked for, accessible, narrow, dark, printed; hostile values do nothing."""

import re
import time

import pytest

import rwsim
from rwsim.page.scale import MISSING
from tests.report_samples import HOSTILE, SAMPLES, hostile, kept, many_points, shorter

pytestmark = pytest.mark.browser
# Seconds in which the report of 10,000 points opens.
_OPENS = 2.0


@pytest.fixture(scope="module")
def samples(tmp_path_factory, browser):
    """After `browser`, so that a machine without one makes none; the experiment cut, for axe takes a second for every few hundred cells."""
    return kept() | {"experiment": shorter(kept()["experiment"], tmp_path_factory.mktemp("shorter"))}


@pytest.fixture(scope="module")
def pages(samples, tmp_path_factory):
    """A file a kind."""
    place = tmp_path_factory.mktemp("pages")
    found = {}
    for kind, path in samples.items():
        found[kind] = place / f"{kind}.html"
        found[kind].write_text(rwsim.report(path), encoding="utf-8")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_page_is_sound_and_accessible(pages, visit, kind, dark):
    seen = visit(pages[kind], dark=dark)
    assert seen.violations() == []
    ground, ink = seen.page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
    assert bright[0] < bright[1] if dark else bright[0] > bright[1]
    assert seen.requests == [pages[kind].as_uri()]
    seen.sound(pages[kind].as_uri())


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_phone_does_not_scroll_sideways(pages, visit, kind):
    seen = visit(pages[kind], width=375, height=700)
    content, window = seen.width()
    assert content <= window
    # What is wider than the phone can be scrolled by the keyboard, in a region of its own.
    for region in seen.page.locator(".scroll").all():
        assert region.get_attribute("tabindex") == "0" and region.get_attribute("aria-labelledby")
    small = seen.page.evaluate(
        "Math.min(...[...document.querySelectorAll('.plot text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.getScreenCTM().a))"
    )
    assert small > 8, "text of the figures, in pixels"
    seen.sound(pages[kind].as_uri())


def test_scrolling_regions_move_by_keyboard(pages, visit):
    seen = visit(pages["validate"], width=375, height=700)
    region = seen.page.locator("#records")
    region.focus()
    seen.page.keyboard.press("ArrowRight")
    moved = "() => new Promise(done => setTimeout(() => done(document.getElementById('records').scrollLeft), 300))"
    assert seen.page.evaluate(moved) > 0


def column(seen, ident: str, k: int) -> list[str]:
    return seen.page.locator(f"#{ident} tbody tr").evaluate_all(f"rows => rows.map(row => row.cells[{k}].innerText)")


def test_tables_sort_by_keyboard(pages, visit):
    seen = visit(pages["validate"])
    before = column(seen, "records", 2)
    heads = seen.page.locator("#records thead th")
    assert [heads.nth(i).get_attribute("aria-sort") for i in range(3)] == ["none"] * 3
    seen.page.keyboard.press("Tab")  # the link that skips to the content
    for _ in range(40):
        if seen.page.evaluate("document.activeElement.textContent") == "measured":
            break
        seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Enter")
    rising = column(seen, "records", 2)
    assert [float(x) for x in rising] == sorted(float(x) for x in before) != [float(x) for x in before]
    assert heads.nth(2).get_attribute("aria-sort") == "ascending"
    assert seen.page.locator("[role=status]").inner_text() == "Sorted by measured, ascending."
    seen.page.keyboard.press("Space")
    assert column(seen, "records", 2) == rising[::-1]
    assert heads.nth(2).get_attribute("aria-sort") == "descending"
    seen.page.locator("#records thead button").first.click()
    assert heads.nth(2).get_attribute("aria-sort") == "none" and heads.nth(0).get_attribute("aria-sort") == "ascending"
    assert seen.violations() == []
    seen.sound(pages["validate"].as_uri())


def test_what_is_missing_sorts_last_both_ways(pages, visit):
    seen = visit(pages["audit"])
    button = seen.page.locator("#findings thead button", has_text="effect")
    for _ in range(2):
        button.click()
        assert column(seen, "findings", 4)[-1] == MISSING


def test_headings_and_landmarks_are_a_tree(pages, visit):
    """As a screen reader hears the page: its landmarks, a table with its caption and headers, a figure with its description."""
    seen = visit(pages["validate"])
    tree = seen.page.locator("body").aria_snapshot()
    for said in ("- banner:", "- main:", "- contentinfo:", '- navigation "Contents":', 'heading "Validation: adamw" [level=1]'):
        assert said in tree, said
    for said in ('table "Measured and predicted. Error', 'columnheader "measured"', 'rowheader "adamw"', 'figure "Rotation"'):
        assert said in tree, said
    assert '- img "Norm"' in tree


def test_print_is_white_and_whole(pages, visit):
    seen = visit(pages["validate"], dark=True, width=1000)
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert seen.page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert seen.page.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")
    assert not seen.page.locator(".skip").is_visible()
    assert seen.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


@pytest.fixture(scope="module")
def poisoned(samples, tmp_path_factory):
    return hostile(samples, tmp_path_factory.mktemp("hostile") / "x")


@pytest.mark.parametrize("kind", SAMPLES)
def test_hostile_values_do_nothing(poisoned, visit, tmp_path, kind):
    page = tmp_path / "report.html"
    page.write_text(rwsim.report(poisoned[kind]), encoding="utf-8")
    seen = visit(page)
    for head in seen.page.locator("thead button").all():
        head.click()  # sorting moves rows about; it must not read them as HTML
    assert HOSTILE in seen.page.locator("body").inner_text()
    assert seen.page.locator("img[onerror], [onerror]").count() == 0 and seen.page.locator("script").count() == 1
    seen.sound(page.as_uri())


def test_the_policy_stops_what_escaping_would_miss(visit, pages, tmp_path):
    """Were a value ever written unescaped, the Content-Security-Policy would keep it from running."""
    page = tmp_path / "report.html"
    page.write_text(pages["plan"].read_text().replace("<main ", "<script>alert(1)</script><img src=x onerror=alert(2)><main "))
    seen = visit(page)
    assert not [fault for fault in seen.faults if fault.startswith("dialog")]
    assert sum("Content Security Policy" in fault for fault in seen.faults) >= 2


def test_ten_thousand_points_open_in_two_seconds(visit, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(rwsim.report(many_points(tmp_path)), encoding="utf-8")
    assert page.stat().st_size < 5e6
    took = []
    for _ in range(3):
        began = time.perf_counter()
        seen = visit(page)
        # Two frames after load: laid out and painted.
        seen.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        took.append(time.perf_counter() - began)
    assert min(took) < _OPENS, took
    seen.sound(page.as_uri())
