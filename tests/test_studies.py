"""Studies: the rule, stages, lots, resuming, files, and each of them end to end at its smallest size."""

import csv
import gzip
import html
import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rwsim.cli import FAILS, HOLDS, USAGE
from rwsim.cli import run as command
from rwsim.errors import InvalidArgument
from rwsim.experiments import STUDIES, conduct, nodecay
from rwsim.experiments.compare import FAILED, HELD, PARTLY, UNDECIDED, better, interval, near, no_worse, overall, par
from rwsim.experiments.conduct import kept_study
from rwsim.experiments.constrain import matched
from rwsim.experiments.data import VOCABULARY, ImageData, load_images
from rwsim.experiments.kept import read_trained
from rwsim.experiments.lanes import Lane, Outcome, train_lanes
from rwsim.experiments.records import Layer
from rwsim.experiments.run import Settings, plain
from rwsim.experiments.study import SCALES, Study, Trained, arm
from tests.experiments import make_data
from tests.published import held

RESULTS = {"figure.png", "runs.csv", "series.csv.gz", "settings.json", "summary.md", "table.csv"}
SMOKE = SCALES["smoke"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("studies") / "data")


# The rule.


def sample(mean, count=5, deviation=0.2, seed=0):
    return mean + deviation * np.random.default_rng(seed).standard_normal(count)


def test_the_rule_decides():
    base = sample(90.0)
    above = base + 1 + 0.1 * np.random.default_rng(1).standard_normal(5)
    noisy = base + np.array([3.0, -3, 2, -2, 0])
    assert [better("", "", *pair, "points").verdict for pair in ((above, base), (base, above), (noisy, base))] == [HELD, FAILED, UNDECIDED]
    assert [par("", "", x, base, "points").verdict for x in (base + 0.2, above, noisy)] == [HELD, FAILED, UNDECIDED]
    assert "better by more" in par("", "", above, base, "points").note
    assert [no_worse("", "", x, base, "points").verdict for x in (above, base - 1, noisy)] == [HELD, FAILED, UNDECIDED]
    assert [near("", "", x * base, base, 0.05).verdict for x in (1.02, 1.2)] == [HELD, FAILED]
    assert near("", "", noisy - 80, base - 80, 0.05).verdict == UNDECIDED


def test_a_gain_that_is_too_small_to_matter_is_not_held():
    base = sample(90.0)
    claim = better("", "", base + np.array([0.1, -0.1, 0.1, -0.1, 0]), base, "points")
    assert claim.verdict == FAILED and "below 0.5 points" in claim.note
    assert better("", "", base + 0.1, base, "points").note == "a difference below 0.5 points"


def test_an_arm_against_itself_is_par_and_not_better():
    base = sample(90.0)
    assert par("", "", base, base, "points").verdict == HELD and better("", "", base, base, "points").verdict == FAILED
    assert better("", "", base, base).verdict == UNDECIDED


def test_one_seed_decides_nothing_and_what_is_not_finite_neither():
    one, gone = np.array([90.0]), np.array([90.0, math.nan])
    for rule in (par, no_worse, better):
        assert rule("", "", one + 5, one, "points").verdict == UNDECIDED
        assert rule("", "", gone, np.array([1.0, 2.0]), "points").verdict == UNDECIDED


def test_power_and_false_alarms():
    """Of 2,000 draws with no difference, held and did not hold are rare; a difference of five standard errors is found."""
    rng = np.random.default_rng(0)
    null = rng.standard_normal((2000, 5))
    intervals = [interval(one) for one in null]
    missed = np.mean([abs(mean) > half for mean, half in intervals])
    assert abs(missed - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)
    found = [better("", "", 5.0 / math.sqrt(5) * 1.0 + one, np.zeros(5)).verdict for one in null]
    assert found.count(HELD) > 1800 and found.count(FAILED) == 0


def test_runs_are_paired():
    """What both arms of a seed have in common does not widen the interval."""
    common = sample(90.0, deviation=5.0)
    assert better("", "", common + sample(1.0, seed=1), common, "points").verdict == HELD


def test_a_study_holds_in_part():
    claims = {v: replace(better("", "", sample(1.0), sample(0.0)), verdict=v) for v in (HELD, FAILED, UNDECIDED)}
    of = [claims[HELD]], [claims[HELD], claims[FAILED]], [claims[UNDECIDED], claims[FAILED]], [claims[UNDECIDED]], []
    assert [overall(claim.verdict for claim in some) for some in of] == [HELD, PARTLY, FAILED, UNDECIDED, UNDECIDED]


# Trainings that take no time.

LAYERS = (*(Layer(f"conv{k}", 144, 16, True) for k in range(19)), Layer("head", 64, 10, False))


def outcome(lane: Lane, layers=LAYERS) -> Outcome:
    """What a run might come to; its score falls with lr and with the decay."""
    rng = np.random.default_rng([lane.seed, round(1e6 * lane.recipe.hyper["lr"])])
    step = np.arange(1, lane.recipe.steps + 1, lane.recipe.every)
    shape = len(step), len(layers)
    loss = 1 + 0.01 * rng.standard_normal() + lane.recipe.hyper["lr"]
    accuracy = 0.9 - lane.recipe.hyper["lr"] / 10
    test_loss, test_accuracy = (loss + 0.1, accuracy - 0.1) if lane.final else (math.nan, math.nan)
    norm, rotation, spread = 0.01 * np.exp(0.1 * rng.standard_normal((3, *shape)))
    last = [0.01 * np.ones(min(64, layer.neurons)) for layer in layers]
    losses = np.ones(min(100, lane.recipe.steps))
    return Outcome(loss, accuracy, test_loss, test_accuracy, None, 1.0, losses, step, norm, rotation, spread, last, layers)


@pytest.fixture
def lots(monkeypatch):
    """The lots that are begun; nothing is done for them."""
    heard = []

    def train(lanes, data, device, listen=None):
        heard.append(lanes)
        listen(len(lanes) * lanes[0].recipe.steps)
        return [outcome(lane) for lane in lanes]

    monkeypatch.setattr(conduct, "train_lanes", train)
    return heard


def search(scale, found):
    assert not found.arms
    for lr in (0.3, 0.1, 0.2):
        yield arm(scale.recipe("resnet", "adamw", lr, 1.0), 1, False, kind="plain", lr=lr)


def final(scale, found):
    best = found.best(found.select(kind="plain"))
    for kind, rotational in (("plain", None), ("RV", {})):
        yield arm(replace(best.recipe, rotational=rotational), 2, True, kind=kind, lr=best.facts["lr"])


def judge(scale, found):
    one, other = found.select(final=True)
    return [par("x", "alike", found.scores(one), found.scores(other), "points")]


TWO = Study("constrain", "two stages", "two arms are alike", "nothing", "nothing differs", (search, final), judge)
SETTINGS = Settings("smoke", "cpu", seed=3)


def test_stages_get_what_came_before(data, tmp_path, lots):
    result = conduct.conduct(TWO, replace(SETTINGS, data=data), tmp_path / "out")
    assert [(lane.recipe.hyper["lr"], lane.seed, lane.final) for (lane,) in lots] == [
        (0.3, 3, False), (0.1, 3, False), (0.2, 3, False), (0.1, 3, True), (0.1, 4, True), (0.1, 3, True), (0.1, 4, True),
    ]  # fmt: skip
    assert result.findings.passed and result.settings["stages"][1] == ["plain-lr0.1", "RV-lr0.1"]
    # What is judged comes from the files, and what stages saw is in them.
    again = kept_study(TWO, tmp_path / "out")
    assert again.findings == result.findings
    assert list(again.trained.arms) == [*(f"search-plain-lr{lr}" for lr in (0.3, 0.1, 0.2)), "plain-lr0.1", "RV-lr0.1"]
    one = again.trained.arms["RV-lr0.1"]
    assert again.trained.scores(one) == pytest.approx([79, 79]) and again.trained.scores(one, test=False) == pytest.approx([89, 89])
    run = again.trained.runs["RV-lr0.1"][1]
    made = outcome(Lane(SMOKE.recipe("resnet", "adamw", 0.1, 1.0), 4, True))
    assert run.loss == pytest.approx(made.loss, rel=1e-7) and run.layers == made.layers and math.isnan(outcome(lots[0][0]).test_loss)
    np.testing.assert_allclose(run.rotation, made.rotation, rtol=1e-3)
    assert again.trained.arms["RV-lr0.1"].recipe.hyper["betas"] == (0.9, 0.999)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4])
def test_what_was_stopped_trains_only_what_is_missing(data, tmp_path, lots, after):
    settings = replace(SETTINGS, data=data)
    conduct.conduct(TWO, settings, tmp_path / "whole")
    whole = [len(lots), {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.name != "settings.json"}]
    lots.clear()

    def stop(*_):
        if len(lots) == after + 1:  # in the lot after those
            raise Stop

    with pytest.raises(Stop):
        conduct.conduct(TWO, settings, tmp_path / "out", heard=stop)
    assert len(list((tmp_path / "out" / "runs").iterdir())) == after
    with pytest.raises(InvalidArgument, match="must not hold an experiment already"):
        conduct.conduct(TWO, settings, tmp_path / "out")
    with pytest.raises(InvalidArgument, match="with the same seed"):
        conduct.conduct(TWO, replace(settings, seed=4), tmp_path / "out", resume=True)
    conduct.conduct(TWO, settings, tmp_path / "out", resume=True)
    assert len(lots) == whole[0] + 1 and [lane.seed for (lane,) in lots].count(3) == 5 + (after == 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "settings.json"} == whole[1]


@pytest.fixture
def stopped(data, tmp_path, lots):
    """A directory with one run of `TWO`, and how it is conducted."""

    def stop(*_):
        if len(lots) == 2:
            raise Stop

    settings = replace(SETTINGS, data=data)
    with pytest.raises(Stop):
        conduct.conduct(TWO, settings, tmp_path / "out", heard=stop)
    lots.clear()
    return tmp_path / "out", settings


def test_a_recipe_that_changed_is_trained_again(stopped, lots, monkeypatch):
    out, settings = stopped
    monkeypatch.setitem(conduct.SCALES, "smoke", replace(SMOKE, batch=4))
    conduct.conduct(TWO, settings, out, resume=True)
    assert [lane.recipe.batch for (lane,) in lots] == [4] * 7


def test_other_data_do_not_go_on_with_what_was_begun(stopped, tmp_path):
    out, settings = stopped
    other = make_data(tmp_path / "other")
    labels = next(other.glob("**/train-labels*"))
    raw = bytearray(gzip.decompress(labels.read_bytes()))
    raw[8] = (raw[8] + 1) % 10
    labels.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(InvalidArgument, match="with the same data"):
        conduct.conduct(TWO, replace(settings, data=other), out, resume=True)


def test_a_damaged_run_is_named(stopped):
    out, settings = stopped
    (path,) = (out / "runs").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidArgument, match=r"damaged file, search-plain-lr0\.3-3\.\w+\.pt"):
        conduct.conduct(TWO, settings, out, resume=True)


@pytest.mark.parametrize("name", ["runs.csv", "series.csv.gz", "settings.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty"])
def test_damaged_results_name_themselves(data, tmp_path, lots, name, how):
    conduct.conduct(TWO, replace(SETTINGS, data=data), tmp_path / "out")
    path = tmp_path / "out" / name
    kept = {"cut": path.read_bytes()[:60], "empty": gzip.compress(b"") if name.endswith("gz") else b"{}"}
    path.unlink()
    if how in kept:
        path.write_bytes(kept[how])
    with pytest.raises(InvalidArgument, match=name if (name, how) != ("settings.json", "gone") else "finished experiment"):
        kept_study(TWO, tmp_path / "out")


def test_a_flipped_byte_never_ends_in_a_traceback(data, tmp_path, lots):
    conduct.conduct(TWO, replace(SETTINGS, data=data), tmp_path / "out")
    path = tmp_path / "out" / "series.csv.gz"
    whole, refused = path.read_bytes(), 0
    for at in range(20, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            kept_study(TWO, tmp_path / "out")
        except InvalidArgument:
            refused += 1
    assert refused > 30  # a gzip file has a checksum


def test_a_run_without_loss_that_did_not_diverge_is_refused(data, tmp_path, lots):
    conduct.conduct(TWO, replace(SETTINGS, data=data), tmp_path / "out")
    path = tmp_path / "out" / "runs.csv"
    head, first, *rest = path.read_text().splitlines()
    fields = first.split(",")
    fields[head.split(",").index("loss")] = ""
    path.write_text("\n".join([head, ",".join(fields), *rest]) + "\n")
    with pytest.raises(InvalidArgument, match=r"runs\.csv"):
        kept_study(TWO, tmp_path / "out")


PUBLISHED = Path(__file__).parent.parent / "docs" / "experiments"


@pytest.mark.parametrize("name", [name for name in STUDIES if (PUBLISHED / name).is_dir()])
def test_published_results_are_of_these_settings(name):
    """From the outcomes that are kept every stage gives the arms that were trained."""
    facts = json.loads((PUBLISHED / name / "settings.json").read_text())
    trained, before = read_trained(facts, PUBLISHED / name), Trained()
    for stage, names in zip(STUDIES[name].stages, facts["stages"], strict=True):
        arms = list(stage(SCALES[facts["config"]], before))
        for one, kept in zip(arms, names, strict=True):
            now, then = plain(one.recipe), facts["arms"][kept]["recipe"]
            # What was chosen by a measurement, which is kept with four digits, is one of three.
            decays = now["hyper"].pop("weight_decay"), then["hyper"].pop("weight_decay")
            assert now == then and decays[0] == pytest.approx(decays[1], rel=2e-3 if "few-shot" in kept else 0)
        before = before.added((one, trained.runs[kept]) for one, kept in zip(arms, names, strict=True))


def test_arms_at_the_edge_of_a_search_are_said():
    lane = Lane(SMOKE.recipe("resnet", "adamw", 0.1, 1.0), 0, True)
    searched = [arm(lane.recipe, 1, False, kind="x", lr=lr, decay=1.0) for lr in (0.1, 0.2, 0.3)]
    found = {lr: arm(lane.recipe, 1, True, kind="x", lr=lr, decay=1.0) for lr in (0.1, 0.2, 0.3)}
    trained = Trained((one, (outcome(lane),)) for one in (*searched, *found.values()))
    assert [trained.at_edge(one) for one in found.values()] == [["lowest lr"], [], ["highest lr"]]
    assert trained.at_edge(arm(lane.recipe, 1, True, kind="y", lr=0.1)) == []


@pytest.mark.parametrize(
    ("key", "value", "said"), [("card", None, "no card"), ("config", None, "no config"), ("config", "huge", "config huge")]
)
def test_settings_that_lack_something_are_refused(data, tmp_path, lots, key, value, said):
    conduct.conduct(TWO, replace(SETTINGS, data=data), tmp_path / "out")
    path = tmp_path / "out" / "settings.json"
    facts = {**json.loads(path.read_text()), key: value}
    path.write_text(json.dumps({name: one for name, one in facts.items() if one is not None or name != key}))
    with pytest.raises(InvalidArgument, match=f"settings.json, got '?{said}"):
        kept_study(TWO, tmp_path / "out")


@pytest.mark.parametrize("options", [["--seed", "99999999999999999"], ["--save-every", "-1"]])
def test_numbers_out_of_range_are_refused(data, tmp_path, capsys, options):
    assert command(["experiment", "adam", "--config", "smoke", "--data", str(data), "--out", str(tmp_path / "out"), *options]) == USAGE
    assert "must " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_unfinished_study_is_refused(stopped):
    with pytest.raises(InvalidArgument, match="finish it with --resume"):
        kept_study(TWO, stopped[0])


def test_lots_share_data_and_steps(data, tmp_path, lots, monkeypatch):
    monkeypatch.setitem(conduct._LANES, "cpu", 8)
    heard = []
    conduct.conduct(STUDIES["warmup"], replace(SETTINGS, data=data), tmp_path / "out", heard=lambda *told: heard.append(told))
    assert max(map(len, lots)) == 8 and len(heard) == len(lots) and all(done == total for _, done, total in heard)
    for lanes in lots:
        assert len({(lane.recipe.text, lane.recipe.steps) for lane in lanes}) == 1


# Runs that are all of the GPU's budget: about 650.
BUDGET = {
    "constrain": 138,
    "nodecay": 20,
    "tradeoff": 100,
    "adam": 75,
    "warmup": 105,
    "standardize": 50,
    "imbalance": 102,
    "sensitivity": 78,
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_at_the_size_of_a_gpu(name, data, tmp_path, lots, monkeypatch):
    """Its arms have names of their own, its runs fit the budget, its files stay small, and all of it can be judged."""
    monkeypatch.setattr(nodecay, "expected", lambda found, one: np.full(len(found.runs[one.name][0].step), 0.01))
    monkeypatch.setitem(conduct.SCALES, "smoke", replace(SCALES["gpu"], validation=16))
    result = conduct.conduct(STUDIES[name], replace(SETTINGS, data=data), tmp_path / "out")
    assert len(lots) <= BUDGET[name] and sum(BUDGET.values()) < 670
    names = [one for stage in result.settings["stages"] for one in stage]
    assert max(Counter(names).values()) == 1 and set(names) == set(result.trained.arms)
    assert (tmp_path / "out" / "series.csv.gz").stat().st_size < 1e6
    for one in result.trained.arms.values():
        assert one.seeds >= (3 if one.final else 1)
    parity = [claim for claim in result.findings.claims if claim.rule in ("par", "no_worse")]
    assert all(claim.seeds == 5 for claim in parity) and all(claim.seeds >= 3 for claim in result.findings.claims)


def test_runs_that_diverged_count_as_guessing():
    lanes = [Lane(SMOKE.recipe(network, "adamw", 0.1, 1.0), 0, True) for network in ("resnet", "gpt")]
    gone = dict.fromkeys(("loss", "accuracy", "test_loss", "test_accuracy"), math.nan)
    arms = [arm(lane.recipe, 2, True, kind=lane.recipe.network) for lane in lanes]
    found = Trained((one, (outcome(lane), replace(outcome(lane), **gone, diverged=2))) for one, lane in zip(arms, lanes, strict=True))
    assert found.scores(arms[1])[0] == pytest.approx(-outcome(lanes[1]).test_loss)
    assert [found.scores(one)[1] for one in arms] == [10.0, pytest.approx(-math.log(VOCABULARY))]
    assert [found.diverged(one) for one in arms] == [1, 1]


# Trainings that are done.


def test_searches_leave_the_test_data_alone(data, monkeypatch):
    images = load_images(data)
    looked = []

    def evaluation(self, validation=False):
        looked.append(validation)
        if not validation:
            raise AssertionError("the test data")
        return whole(self, validation)

    whole = ImageData.evaluation
    monkeypatch.setattr(ImageData, "evaluation", evaluation)
    lane = Lane(SMOKE.recipe("resnet", "adamw", 0.1, 1.0), 0, False)
    (found,) = train_lanes([lane], images, torch.device("cpu"))
    assert looked == [True] and math.isfinite(found.loss) and math.isnan(found.test_accuracy)
    with pytest.raises(AssertionError, match="the test data"):
        train_lanes([replace(lane, final=True)], images, torch.device("cpu"))


@pytest.mark.parametrize("schedule", ["", "warmup0.05+cosine"])
@pytest.mark.parametrize("optimizer", ["sgdm", "adamw", "lion"])
def test_the_few_shot_decay_turns_as_much_as_it_is_to(data, optimizer, schedule):
    """Every step turns by the rate itself, where signs are not all alike: the update of a convolution in the middle has a direction."""
    changed = {"steps": 20, "rotational": {"fixed_angle": True}, "rotation_schedule": schedule, "size": {"width": 8}}
    recipe = SMOKE.recipe("resnet", optimizer, 0.01, 1.0, **changed)
    (found,) = train_lanes([Lane(matched(recipe, 0.02), 0)], load_images(data), torch.device("cpu"))
    assert found.rotation[:, 1].mean() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("name", STUDIES)
def test_each_runs_end_to_end(name, data, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "found.json"
    arguments = ["experiment", name, "--config", "smoke", "--data", str(data), "--out", str(out)]
    assert command([*arguments, "--json", str(file)]) in (HOLDS, FAILS)
    said = " ".join(capsys.readouterr().out.split())
    assert {path.name for path in out.iterdir()} == RESULTS and (out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    settings, summary = json.loads((out / "settings.json").read_text()), (out / "summary.md").read_text()
    rows, document = list(csv.DictReader((out / "table.csv").read_text().splitlines())), held("experiment", file)
    assert len(rows) == len(document["claims"]) > 0 and document["verdict"] in (HELD, PARTLY, FAILED, UNDECIDED)
    assert "What differs from the paper" in summary and all(row["claim"] in summary and row["claim"] in said for row in rows)
    runs = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert len(runs) == sum(one["seeds"] for one in settings["arms"].values()) and all(
        bool(run["loss"]) for run in runs if not run["diverged"]
    )
    assert all(one["recipe"]["validation"] for one in settings["arms"].values()) and settings["margins"] == {"points": 0.5, "nats": 0.02}
    tested = {run["arm"] for run in runs if run["test_loss"]}
    assert tested <= {name for name, one in settings["arms"].items() if one["final"]}
    assert gzip.decompress((out / "series.csv.gz").read_bytes()).startswith(b"arm,seed,quantity,layer,values\n")


def test_replot_gives_the_same_bytes(data, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["experiment", "adam", "--config", "smoke", "--data", str(data), "--out", str(out)]
    command([*arguments, "--json", str(tmp_path / "found.json")])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name in ("table.csv", "summary.md", "figure.png"):
        (out / name).unlink()
    capsys.readouterr()
    assert command(["experiment", "adam", "--out", str(out), "--replot"]) in (HOLDS, FAILS)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    page = tmp_path / "report.html"
    for place in (out, tmp_path / "found.json"):
        assert command(["report", str(place), "-o", str(page)]) == HOLDS
        claims = len((out / "table.csv").read_text().splitlines()) - 1
        text = html.unescape(page.read_text())
        assert '<figure id="differences-0">' in text
        assert (
            f"{claims} claims" in text and "the RV with Adam+l2's direction above Adam+l2" in text and "What differs from the paper" in text
        )
    (out / "table.csv").unlink()
    capsys.readouterr()
    assert command(["report", str(out), "-o", str(page)]) == USAGE and "--replot writes it" in capsys.readouterr().err
    assert command([*arguments, "--quiet"]) == USAGE and "must not hold an experiment already" in capsys.readouterr().err
    assert command(["experiment", "warmup", "--out", str(out), "--replot"]) == USAGE
    assert "must hold results of warmup" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_command_goes_on(data, tmp_path):
    arguments = [sys.executable, "-m", "rwsim.cli", "experiment", "adam", "--config", "smoke", "--data", str(data), "--quiet"]
    subprocess.run([*arguments, "--out", str(tmp_path / "whole"), "--workers", "2"], check=False, capture_output=True)
    process = subprocess.Popen([*arguments, "--out", str(tmp_path / "out")])
    while len(list(tmp_path.glob("out/runs/*.pt"))) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    process.kill()
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*.pt")}
    assert len(before) < 16
    subprocess.run([*arguments, "--out", str(tmp_path / "out"), "--resume"], check=False, capture_output=True)
    for name in ("table.csv", "series.csv.gz", "figure.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
