"""The small real run: its networks are what they would be alone, its data are checked, its commands run end to end."""

import csv
import gzip
import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks import fashion
from benchmarks.fashion import CONTESTS, SETTINGS, Turned, compared, main
from benchmarks.stacked import Networks, accuracy, factor, train
from rwsim.experiments.idx import Images, load
from rwsim.rotational import RotationalSGDM

CHANNELS = (3, 4, 5)
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def images(count, seed=0):
    """Noise whose size is the label's."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    pixels = torch.rand(count, 28, 28, generator=generator) * 25 * (1 + labels)[:, None, None]
    return Images(pixels.to(torch.uint8), labels)


def idx(data):
    """(bytes of the images' file, bytes of the labels')."""
    count = len(data).to_bytes(4, "big")
    side = (28).to_bytes(4, "big")
    return (
        b"\0\0\x08\x03" + count + side + side + data.pixels.numpy().tobytes(),
        b"\0\0\x08\x01" + count + data.labels.to(torch.uint8).numpy().tobytes(),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two files gzipped and two not; small networks."""
    monkeypatch.setattr(fashion, "CHANNELS", CHANNELS)
    data = tmp_path / "data"
    data.mkdir()
    for name, content in zip(FILES, idx(images(240)) + idx(images(100, seed=1)), strict=True):
        if name.startswith("train"):
            (data / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (data / name).write_bytes(content)
    return data


def small(contest, variant, seeds, settings, data):
    networks = Networks(seeds, len(settings), CHANNELS, dtype=torch.float64)
    optimizer = (contest.variant if variant else contest.baseline)(networks.groups(settings), **contest.hyper)
    return networks, train(networks, optimizer, data, epochs=1, batch=16)


@pytest.mark.parametrize("variant", [False, True])
@pytest.mark.parametrize("name", CONTESTS)
def test_stacked_networks_are_what_they_are_alone(name, variant):
    """Two seeds, and two settings of both: parameters, running statistics, losses, rotations and accuracies."""
    contest, data = CONTESTS[name], images(100)
    setting = (SETTINGS[name].lr, SETTINGS[name].weight_decay)
    settings = [setting, (setting[0] / 3, setting[1] * 2)]
    together, found = small(contest, variant, (3, 4), settings, data)
    right = accuracy(together, data)
    for part, one in enumerate(settings):
        for place, seed in enumerate((3, 4)):
            alone, expected = small(contest, variant, (seed,), [one], data)
            number = 2 * part + place
            for key, value in alone.parts[0].items():
                mine = together.stacked(key).view(4, -1)[number]
                torch.testing.assert_close(mine, value.flatten(), rtol=1e-5, atol=1e-7)
            for key, value in alone.named_buffers():
                torch.testing.assert_close(together.get_buffer(key).view(4, -1)[number], value, rtol=1e-5, atol=1e-7)
            assert found.loss[number] == pytest.approx(expected.loss[0], rel=1e-5)
            assert found.rotation[number] == pytest.approx(expected.rotation[0], rel=1e-5)
            assert right[number] == accuracy(alone, data)[0]


def test_the_network_is_torchs():
    """One network of the stack against conv2d, batch_norm, max_pool2d and linear."""
    networks = Networks((0, 1), channels=CHANNELS, dtype=torch.float64)
    x = torch.randn(2, 1, 6, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for number, out in enumerate(networks(x)):
        y = x[number].transpose(0, 1)
        own = {name: param.detach().view(2, -1)[number] for name, param in networks.parts[0].items()}
        before = 1
        for layer, width in enumerate(CHANNELS):
            y = F.conv2d(y, own[f"conv{layer}"].view(width, before, 3, 3), padding=1)
            y = F.relu(F.batch_norm(y, None, None, own[f"gain{layer}"], own[f"shift{layer}"], training=True))
            y = F.max_pool2d(y, 2) if layer < 2 else y.mean((2, 3))
            before = width
        torch.testing.assert_close(out.T, F.linear(y, own["head"].view(10, -1), own["bias"]), rtol=1e-9, atol=1e-9)


def test_matrices_decay_and_rotate_and_vectors_do_not():
    networks = Networks((0, 1), channels=CHANNELS)
    groups = networks.groups([(0.1, 0.2)])
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.2), (1, 0.2), (1, 0.2), (1, 0.2), (7, 0.0)]
    optimizer = CONTESTS["sgdm"].variant(groups, momentum=0.9)
    turns = [[optimizer.is_rotational(group, param) for param in group["params"]] for group in optimizer.param_groups]
    assert [set(one) for one in turns] == [{True}, {True}, {True}, {True}, {False}]


def test_rotation_is_measured():
    """A variant that turns by exactly 0.01 in every step."""
    networks = Networks((0, 1), channels=CHANNELS, dtype=torch.float64)
    optimizer = RotationalSGDM(networks.groups([(0.1, 1e-3)]), momentum=0.9, rotation=0.01, fixed_angle=True)
    found = train(networks, optimizer, images(100), epochs=2, batch=16, rate=lambda group: 2 * group["rotation"])
    assert found.rotation == pytest.approx([0.01, 0.01], rel=1e-9) and found.predicted == pytest.approx(0.02)
    assert math.isnan(train(networks, optimizer, images(100), epochs=1, batch=16).predicted)


def test_a_baselines_rotation_is_replayed():
    """Step by step: what turned by exactly these angles turns by them again, each layer by its own."""
    networks = [Networks((0, 1), channels=CHANNELS, dtype=torch.float64) for _ in range(2)]
    optimizers = [RotationalSGDM(one.groups([(0.1, 1e-3)]), momentum=0.9, fixed_angle=True) for one in networks]
    for place, group in enumerate(optimizers[0].param_groups):
        group["rotation"] = lambda group, place=place: 0.1 * (place + 1) * group["lr"]
    found, again = Turned(), Turned()
    found.record(optimizers[0])
    found.replay(optimizers[1])
    again.record(optimizers[1])
    for one, optimizer in zip(networks, optimizers, strict=True):
        optimizer.centre()
        train(one, optimizer, images(100), epochs=2, batch=16)
    assert [len(angles) for angles in found.angles] == [12] * 4
    expected = [[0.01 * (place + 1) * factor(step, 12) for step in range(12)] for place in range(4)]
    for turned in (found, again):
        torch.testing.assert_close(torch.tensor(turned.angles, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def test_schedule():
    assert [factor(step, 40) for step in (0, 1, 2)] == [0.5, 1.0, 1.0] and factor(39, 40) < 0.01


def test_end_to_end(capsys, folder, tmp_path):
    """It learns, the files hold what is said, and the variant's rotation is of the predicted size."""
    out = tmp_path / "made" / "here"
    arguments = ["--data", str(folder), "--out", str(out), "--device", "cpu", "--seeds", "2", "--epochs", "3", "--batch", "16"]
    assert main(arguments) == 0
    with (out / "fashion.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer"], row["variant"], row["seed"]) for row in rows] == [
        (name, variant, seed) for name in CONTESTS for variant in ("baseline", "rotational", "head gain") for seed in "01"
    ]
    for row in rows:
        assert 0 <= float(row["test_accuracy"]) <= 1 and math.isfinite(float(row["train_loss"])) and float(row["seconds"]) > 0
        if row["variant"] != "baseline":
            # Few steps, few neurons, and signs that mostly agree, of which nothing is left without their mean.
            assert 0.5 < float(row["rotation"]) / float(row["predicted_rotation"]) < 1.5
    assert max(float(row["test_accuracy"]) for row in rows) > 0.2
    text = capsys.readouterr().out
    assert "python -m benchmarks.fashion --data" in text and all(f"\n{name}" in text for name in CONTESTS)
    assert text.count("predicted") == 9


def test_search_prints_the_line_to_paste(capsys, folder, tmp_path):
    arguments = ["--data", str(folder), "--out", str(tmp_path), "--device", "cpu", "--epochs", "1", "--batch", "32", "--search"]
    assert main([*arguments, "--optimizers", "sgdm"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith('    "sgdm": Setting(lr=')]
    setting = eval(f"{{{line.partition('#')[0]}}}", {"Setting": fashion.Setting})["sgdm"]
    assert setting in CONTESTS["sgdm"].grid and "200 training images, 40 of validation" in text
    with (tmp_path / "fashion-search.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = {one: 0.0 for one in CONTESTS["sgdm"].grid}
    for row in rows:
        means[fashion.Setting(float(row["lr"]), float(row["weight_decay"]))] += float(row["validation_accuracy"])
    assert len(rows) == 24 and means[setting] == max(means.values())


@pytest.mark.parametrize("shift, word", [(0.0, "on par"), (-0.0028, "on par"), (0.1, "above"), (-0.1, "below")])
def test_the_verdict_is_the_rule(shift, word):
    """Deviation 0.004 of four each: a standard error of 0.2 %, of the difference sqrt(2) times that."""
    accuracies = [0.9, 0.9, 0.9 + 0.002 * 12**0.5, 0.9 + 0.002 * 12**0.5]
    line = compared("adamw", accuracies, [x + shift for x in accuracies])
    assert line.endswith(f"0.283  {word}") and f"{100 * shift:+.3f}" in line and " 0.000 " in line


@pytest.mark.parametrize(
    "name, change, word",
    [
        (FILES[0], None, "must hold train-images"),
        (FILES[3], None, "must hold t10k-labels"),
        (FILES[0], lambda data: gzip.compress(data)[:500], "readable"),
        (FILES[0], lambda data: b"\x1f\x8b\x08 not gzip at all", "readable"),
        (FILES[2], lambda data: b"\0\0\x08\x01" + data[4:], "magic number 2051, got 2049"),
        (FILES[2], lambda data: data[:-1], "bytes after its header"),
        (FILES[2], lambda data: data[:6], "magic number"),
        (FILES[2], lambda data: data[:8] + (27).to_bytes(4, "big") + data[12:], "28 by 28"),
        (FILES[3], lambda data: idx(images(99))[1], "label for each of 100 images, got 99"),
        (FILES[3], lambda data: data[:-1] + b"\x0a", "labels below 10"),
    ],
)
def test_broken_data_is_one_line_and_exit_2(folder, name, change, word, capsys):
    path = next(path for path in (folder / name, folder / f"{name}.gz") if path.exists())
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(gzip.decompress(data) if path.suffix == ".gz" else data))
    assert main(["--data", str(folder), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("benchmarks.fashion: error: ") and word in captured.err and "dataset-fashion-mnist" in captured.err


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--seeds", "1"], "seeds"),
        (["--epochs", "0"], "epochs"),
        (["--batch", "201"], "batch"),
        (["--optimizers", "adam"], "adam"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(folder, arguments, word, capsys):
    try:
        status = main(["--data", str(folder), "--device", "cpu", *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and captured.err.count("\n") == 1 and word in captured.err


def test_the_loader_reads_what_was_written(folder):
    training, test = load(folder)
    for got, expected in ((training, images(240)), (test, images(100, seed=1))):
        assert torch.equal(got.pixels, expected.pixels) and torch.equal(got.labels, expected.labels)


def test_divergence_stops_with_its_seed_and_step(folder, capsys, monkeypatch):
    monkeypatch.setitem(fashion.SETTINGS, "sgdm", fashion.Setting(math.inf, 0.0))
    arguments = ["--data", str(folder), "--device", "cpu", "--seeds", "2", "--epochs", "2", "--batch", "60", "--optimizers", "sgdm"]
    assert main(arguments) == 3
    assert "seed 0 is not finite by step 4" in capsys.readouterr().err
