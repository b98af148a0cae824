"""`rwsim report`: every kind of result, what the page is made of, hostile values, faults, size."""

import base64
import csv
import hashlib
import json
import re
import shlex
import shutil
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

import rwsim
from rwsim.cli import USAGE, app, run
from rwsim.errors import InvalidArgument
from rwsim.page.html import Html, data, escape, tag
from rwsim.page.scale import number, percent, span, tick_texts, ticks
from rwsim.report.audit import PROBES
from tests.report_samples import HOSTILE, HOSTILES, SAMPLES, hostile, kept, many_points

VOID = {"meta", "link", "br", "input", "hr", "img"}


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.inside, f"never closed: {self.inside}"

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes), "an attribute twice"
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.inside.append(name)

    def handle_endtag(self, name):
        assert self.inside.pop() == name, f"</{name}> closes something else"

    def handle_data(self, text):
        self.text.setdefault(self.inside[-1] if self.inside else "", []).append(text)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for one, attributes in self.elements if one == name]

    def said(self, *names: str) -> str:
        return " ".join(text for name in names or self.text for text in self.text.get(name, ()) if name not in ("style", "script"))


@pytest.fixture(scope="module")
def samples():
    return kept()


@pytest.fixture(scope="module")
def pages(samples):
    return {kind: rwsim.report(path) for kind, path in samples.items()}


@pytest.fixture(scope="module")
def poisoned(samples, tmp_path_factory):
    return hostile(samples, tmp_path_factory.mktemp("hostile") / "x")


@pytest.mark.parametrize("kind", SAMPLES)
def test_page_is_whole(pages, kind):
    page = Page(pages[kind])
    count = Counter(name for name, _ in page.elements)
    assert count["h1"] == count["main"] == count["header"] == count["footer"] == 1
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels)), "a heading level is left out"
    idents = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(idents)) == len(idents)
    for _, attributes in page.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key) is None or attributes[key] in idents
        assert not (attributes.get("href") or "#").startswith("#") or (attributes.get("href") or "#main")[1:] in idents
    assert count["caption"] == count["table"] >= 1 and count["figure"] >= 1
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    drawn = [attributes for attributes in page.all("svg") if attributes.get("aria-hidden") != "true"]
    assert drawn and all(attributes["role"] == "img" for attributes in drawn)
    assert count["desc"] == len(drawn) == count["title"] - 1 and all(text.strip() for text in page.text["desc"])
    said = page.said()
    assert {"Provenance", "Repeat it"} <= set(page.text["h2"])
    for fact in ("Date", "rwsim", "Read from"):
        assert fact in page.text["dt"]
    assert rwsim.__version__ in said and "nan" not in re.findall(r"\bnan\b|\binf\b", said)


@pytest.mark.parametrize("kind", SAMPLES)
def test_page_asks_for_nothing_and_runs_its_script_alone(pages, kind):
    text = pages[kind]
    page = Page(text)
    assert not re.search(r"url\(|@import|https?:|src=", text.split("<body>")[0]), "something outside in the style"
    outside = [a for _, a in page.elements if a.get("src") or not (a.get("href") or "#").startswith(("#", "data:,"))]
    assert not outside
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on") or key == "style"]
    policy = page.all("meta")[1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy["content"]
    assert policy["content"].startswith("default-src 'none'") and "connect-src 'none'" in policy["content"]


@pytest.mark.parametrize("name", HOSTILES)
def test_hostile_values_are_text(pages, poisoned, name):
    text = rwsim.report(poisoned[name])
    page, sound = Page(text), Page(pages[name.split()[0]])
    assert {name for name, _ in page.elements} <= {name for name, _ in sound.elements} | {"strong", "br"}
    assert len(page.all("script")) == 1 and not page.all("img")
    assert HOSTILE in page.said()
    assert HOSTILE not in text
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]


def test_one_result_gives_one_page(samples, pages):
    assert rwsim.report(samples["audit"]) == pages["audit"]
    assert rwsim.report(samples["audit"] / "audit.json") == pages["audit"]


def test_validate_says_what_came_of_it(samples, tmp_path):
    values = json.loads((samples["validate"] / "validation.json").read_text())
    record = values["records"][0]
    text = Page(rwsim.report(samples["validate"])).said()
    assert text.count("undecided") >= 3 and "Undecided: 3 undecided of 3 quantities" in text
    assert number(record["measured"]) in text and percent(record["relative_error"]["full"]) in text
    assert number(record["predicted"]["paper"]) in text
    for one in values["records"]:
        one["verdict"] = "agrees"
    place = tmp_path / "validation.json"
    place.write_text(json.dumps(values))
    assert "Agrees: all 3 quantities" in Page(rwsim.report(place)).said()
    values["records"][1]["verdict"] = "differs"
    place.write_text(json.dumps(values))
    assert "Does not agree: 1 differs of 3 quantities" in Page(rwsim.report(place)).said()
    values["meta"] |= {"status": "WalkDiverged", "message": "NaN at step 7"}
    place.write_text(json.dumps(values))
    assert "Ended early, nothing is decided: NaN at step 7" in Page(rwsim.report(place)).said()


def test_sweep_is_one_whatever_its_file(samples, tmp_path):
    """NetCDF, CSV and JSON of one sweep give the same tables."""
    out = samples["sweep"]
    bodies = [re.findall(r"<tbody>.*?</tbody>", rwsim.report(out / name), re.DOTALL) for name in ("sweep.nc", "sweep.csv")]
    assert bodies[0] == bodies[1] and len(bodies[0]) == 2
    assert bodies[0][1].count("<tr>") == 12


def test_sweep_counts_and_errors_are_the_data_s(samples):
    import xarray as xr

    with xr.open_dataset(samples["sweep"] / "sweep.nc", engine="scipy") as found:
        settled = found["settled"].values == 1
        off = np.abs(found["norm"].values / found["norm_exact"].values - 1)[settled]
    text = Page(rwsim.report(samples["sweep"])).said()
    assert settled.any() and f"12 points: {settled.sum()} in equilibrium" in text
    half, most = (percent(float(np.quantile(off, q)), sign=False) for q in (0.5, 0.95))
    assert f"Norm: half of the points in equilibrium within {half} of the exact prediction, 95\xa0% within {most}." in text


@pytest.mark.parametrize("kind", ["validate", "sweep", "plan", "audit"])
def test_the_command_repeats_it(pages, samples, kind):
    """The options that were given, read back by the command line."""
    (line,) = Page(pages[kind]).text["code"][-1:]
    words = shlex.split(line)
    assert words[:2] == ["rwsim", kind]
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    given = bound.arguments
    expected = {
        "validate": {
            "optimizer": ["adamw"],
            "lr": 0.02,
            "weight_decay": 2.0,
            "steps": 300,
            "neurons": 8,
            "fan_in": 16,
            "betas": (0.9, 0.999),
        },
        "sweep": {
            "optimizer": ["adamw"],
            "axis": ["lr=1e-3:1e-1:4:log", "weight_decay=0.5:5:3:log"],
            "neurons": 4,
            "fan_in": 16,
            "steps": 400,
        },
        "plan": {"optimizer": "adamw", "lr": 8e-3, "weight_decay": 0.06, "steps": 2000, "fan_in": 128},
        "audit": {"optimizer": "my_optimizers.py:MyAdamW", "law": "adamw", "set_": ["betas=(0.9, 0.97)"], "seed": 3},
    }[kind]
    assert {key: given[key] for key in expected} == expected
    extra = set(given) - set(expected) - {"betas", "init_norm", "probe"}
    assert not extra, extra


def test_the_paper_s_validation_needs_no_option(samples, tmp_path):
    from rwsim.config import PAPER_CASES

    values = json.loads((samples["validate"] / "validation.json").read_text())
    one = values["records"][0]
    values["records"] = [
        one | {"optimizer": name, "loss_scale": scale, "hyper": {k: list(v) if isinstance(v, tuple) else v for k, v in hyper.items()}}
        for name, scale, hyper in PAPER_CASES
    ]
    values["meta"] |= {"steps": 15000, "neurons": 128, "fan_in": 128}
    (tmp_path / "validation.json").write_text(json.dumps(values))
    assert Page(rwsim.report(tmp_path)).text["code"] == ["rwsim validate"]


def test_audit_shows_findings_and_programs(pages):
    page = Page(pages["audit"])
    said = page.said()
    assert "Departs from the law adamw." in said and "1 fault, 1 note" in said
    assert "print('decay < twice')" in said and percent(0.89) in said and percent(-0.3) in said


def test_audit_names_the_probes():
    from rwsim.audit.probes import PROBES as rooms

    assert PROBES == {name: room.TITLE for name, room in rooms.items()}


def test_experiment_counts_its_table(pages, samples):
    page = Page(pages["experiment"])
    with (samples["experiment"] / "table.csv").open() as file:
        verdicts = Counter(row["verdict"] for row in csv.DictReader(file))
    inside, outside, undecided = (verdicts[name] for name in ("inside", "outside", "undecided"))
    judged = inside + outside + undecided
    assert f"of {judged} judged quantities {inside} are inside their bands, {outside} outside, {undecided} undecided" in page.said()
    assert "normalized" in page.text["strong"]
    assert pages["experiment"].count("<tr>") > 265


def test_probe_is_one_whatever_its_file(samples):
    """To the digits that the CSV has."""
    text = [Page(rwsim.report(path)).said("td", "th") for path in (samples["probe"], samples["probe"].with_name("dynamics.nc"))]
    assert text[0] == text[1]


def test_accuracy_without_predictions_says_so(samples, tmp_path):
    with (samples["accuracy"] / "errors.csv").open() as file:
        lines = [line.rstrip("\n").split(",") for line in file]
    keep = lines[0].index("rms_update_mcse") + 1
    (tmp_path / "accuracy.csv").write_text("\n".join(",".join(line[:keep]) for line in lines) + "\n")
    assert "4 points measured; this file holds no prediction." in Page(rwsim.report(tmp_path)).said()


FAULTS = {
    "nothing": (lambda s, p: p / "nowhere", "must be a file or directory that is there"),
    "an empty directory": (lambda s, p: p, "looked for validation.json of rwsim validate; sweep.nc"),
    "an empty file": (lambda s, p: _write(p / "a.json", b" \n"), "must not be an empty file"),
    "another JSON": (lambda s, p: _write(p / "a.json", b'{"a": 1}'), "must be a result of rwsim"),
    "another CSV": (lambda s, p: _write(p / "a.csv", b"a,b\n1,2\n"), "must be a result of rwsim"),
    "bytes": (lambda s, p: _write(p / "a.bin", bytes(range(256))), "must be a whole CSV file"),
    "HDF5": (lambda s, p: _write(p / "a.nc", b"\x89HDF\r\n"), "it is HDF5"),
    "a cut JSON": (lambda s, p: _edited(s["validate"] / "validation.json", p, cut=900), "must be a whole JSON file"),
    "a cut NetCDF": (lambda s, p: _edited(s["sweep"] / "sweep.nc", p, cut=2500), "must be a whole NetCDF file"),
    "a cut line": (lambda s, p: _edited(s["probe"] / "dynamics.csv", p, cut=-40), "fields, not 49"),
    "a number that is none": (lambda s, p: _edited(s["probe"] / "dynamics.csv", p, b"0.01,", b"x,"), "must be a number"),
    "a verdict of another type": (lambda s, p: _changed(s["validate"] / "validation.json", p, verdict=3), "records.0.verdict` must be"),
    "a measurement that is none": (
        lambda s, p: _changed(s["validate"] / "validation.json", p, measured="x"),
        "records.0.measured` must be",
    ),
    "a sweep that is not finished": (lambda s, p: _write(p / "ledger.sqlite", b"x").parent, "rwsim sweep --resume"),
    "an experiment without its table": (lambda s, p: _copy(s["experiment"] / "settings.json", p / "settings.json"), "--replot"),
    "two results": (lambda s, p: _twice(s["audit"] / "audit.json", p), "a.json (audit), b.json (audit)"),
    "another file under that name": (lambda s, p: _copy(s["audit"] / "audit.json", p / "validation.json").parent, "something else"),
    "no point": (lambda s, p: _write(p / "sweep.csv", b"optimizer,lr,norm,norm_exact,norm_paper\n"), "it holds no point"),
}


def _write(path, content):
    path.write_bytes(content)
    return path


def _edited(source, place, old=b"", new=b"", cut=None):
    return _write(place / source.name, source.read_bytes()[:cut].replace(old, new) if old else source.read_bytes()[:cut])


def _copy(source, target):
    shutil.copy(source, target)
    return target


def _twice(source, place):
    for name in ("a.json", "b.json"):
        shutil.copy(source, place / name)
    return place


def _changed(source, place, **record):
    values = json.loads(source.read_text())
    values["records"][0] |= record
    return _write(place / source.name, json.dumps(values).encode())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line_and_write_nothing(samples, tmp_path, capsys, fault):
    place, out = tmp_path / "x", tmp_path / "report.html"
    place.mkdir()
    make, message = FAULTS[fault]
    path = make(samples, place)
    with pytest.raises(InvalidArgument) as raised:
        rwsim.report(path)
    assert message in str(raised.value)
    assert run(["report", str(path), "-o", str(out)]) == USAGE
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("rwsim: error: ")
    assert not out.exists() and not list(tmp_path.glob(".report*"))


@pytest.mark.parametrize("kind", ["validate", "sweep", "probe"])
def test_no_cut_file_gives_a_traceback(samples, tmp_path, kind):
    """A file cut anywhere is reported or refused."""
    name = {"validate": "validation.json", "sweep": "sweep.nc", "probe": "dynamics.csv"}[kind]
    content = (samples[kind] / name).read_bytes()
    refused = 0
    for length in np.linspace(1, len(content) - 2, 25).astype(int):
        (tmp_path / name).write_bytes(content[:length])
        try:
            rwsim.report(tmp_path / name)
        except InvalidArgument:
            refused += 1
    assert refused >= 20


def test_command_writes_the_page(samples, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert run(["report", str(samples["plan"]), "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == rwsim.report(samples["plan"])
    assert f"Written: {out}" in capsys.readouterr().out
    assert run(["report", str(samples["plan"]), "-o", str(tmp_path)]) == USAGE


def test_ten_thousand_points_are_light(tmp_path):
    text = rwsim.report(many_points(tmp_path))
    size, elements = len(text.encode()), len(Page(text).elements)
    assert size < 5e6 and elements < 15_000, (size, elements)
    said = Page(text).said()
    assert "10,000 points: " in said and "9,700 points are left out of this table; sweep.nc has them all." in said


def test_html_is_built_escaped():
    assert tag("p", HOSTILE, title=HOSTILE).count("<") == 2
    assert escape(Html("<b>")) == "<b>" and escape(Html("<b>") + "") == "&lt;b&gt;"
    assert escape("\ud800\x00\u202e") == "⟨U+D800⟩⟨U+0000⟩⟨U+202E⟩"
    block = data("x", {"a": "</script><!--"})
    assert block.count("<") == 2 and json.loads(re.findall(">(.*)<", block)[0]) == {"a": "</script><!--"}
    with pytest.raises(ValueError, match="must not hold </script"):
        rwsim.page.document.page("x", "", script="'</SCRIPT>'")


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.0, 1.0, False), (-3e-9, 2e-9, False), (1e-12, 1e12, True), (0.9, 1.1, True), (5e4, 5.001e4, False)]
)
def test_ticks_are_few_and_told_apart(low, high, log):
    found, room = ticks(low, high, log), 1e-3 * (high - low)
    assert 2 <= len(found) <= 6 and low - room <= found[0] and found[-1] <= high + room
    assert len(set(tick_texts(found))) == len(found)


def test_span_of_little():
    for values in ([], [float("nan")], [2.0], [0.0, 0.0], [1.0, 1.0 + 1e-9]):
        low, high = span(values)
        assert high > low and (not values or not np.isfinite(values[0]) or low < values[0] < high)


@pytest.mark.slow
def test_what_the_commands_write_today_is_reported(tmp_path):
    """The results in the repository were written by an older rwsim; these are by this one."""
    for kind, make in SAMPLES.items():
        page = Page(rwsim.report(make(tmp_path)))
        assert page.all("table") and page.all("figure"), kind
