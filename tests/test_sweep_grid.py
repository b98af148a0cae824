"""What a grid is: axes, points, designs, schedules, and the file that holds it."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from rwsim.cli import run as command
from rwsim.errors import InvalidArgument
from rwsim.sweeps.grid import Axis, Grid, SweepConfig
from rwsim.theory.factors import schedule_factors
from tests.sweeping import config

pytest.importorskip("xarray", reason="the sweep extra is not installed")


def test_axes():
    assert Axis.parse("lr", "1e-4:1e-1:4:log").values == (1e-4, 1e-3, 1e-2, 1e-1)
    assert Axis.parse("lr", "0:1:3").values == (0.0, 0.5, 1.0)
    assert Axis.parse("batch", "8:128:5:log").values == (8, 16, 32, 64, 128)
    assert Axis.parse("schedule", "cosine,warmup0.1+linear").values == ("cosine", "warmup0.1+linear")
    ends = Axis.parse("lr", "3e-5:7e-2:20:log").values
    assert (ends[0], ends[-1]) == (3e-5, 7e-2) and np.allclose(np.diff(np.log(ends)), math.log(7e-2 / 3e-5) / 19)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": {"lr": "2:1:4"}}, "`axes.lr` must have LOW below HIGH"),
        ({"axes": {"lr": "0:1:4:log"}}, "`axes.lr` must lie above 0 on a log axis"),
        ({"axes": {"lr": "1:2:1"}}, "COUNT of 2 to"),
        ({"axes": {"lr": "1:2:1000000000000"}}, "COUNT of 2 to"),
        ({"axes": {"lr": "1:2"}}, "must be a range or a list"),
        ({"axes": {"lr": "1:x:3"}}, "must hold numbers, got 'x'"),
        ({"axes": {"lr": "1:inf:3"}}, "must hold finite numbers"),
        ({"axes": {"lr": []}}, "must not be empty"),
        ({"axes": {"lr": [1, 1.0]}}, "must hold distinct values"),
        ({"axes": {"batch": "8:10:5"}}, "fewer than 5 different values"),
        ({"axes": {"batch": [8.5]}}, "must hold whole numbers"),
        ({"axes": {"batch": [2]}, "hyper": {"lr": 1, "weight_decay": 1}}, "`batch` must be"),
        ({"axes": {"learning_rate": [1]}}, "is not a hyperparameter of adamw nor a setting.*known: lr, weight_decay, beta_1"),
        ({"axes": {"betas": [1]}}, "betas is a pair: sweep its entries"),
        ({"axes": {"lr": [0.1, -1]}, "hyper": {"weight_decay": 1}}, r"`lr` must lie in \[0, inf\), got -1.0"),
        ({"axes": {"lr": [0.1]}}, "`weight_decay` must be given for adamw"),
        ({"hyper": {"lr": 1}}, "`axes.lr` must not be fixed as well"),
        ({"hyper": {"momentum": 1}}, "`hyper.momentum` is not a hyperparameter of any optimizer here"),
        ({"axes": {"lr": "1:2:1000", "weight_decay": "1:2:1000", "eps": "1:2:1000"}}, "1,000,000 points at most, got '1,000,000,000'"),
        ({"optimizer": ["adamw", "adamw"]}, "must name each rule once"),
        ({"optimizer": ["adam"]}, "adam"),
        ({"optimizer": []}, "`optimizer`"),
        ({"axes": {}}, "`axes`"),
        ({"design": "latin"}, "`points` must be given for design latin"),
        ({"points": 3}, "`points` belongs to designs random and latin"),
        ({"axes": {"schedule": ["cosin"]}}, "`schedule` must be one of constant, linear, cosine"),
        ({"stepz": 3}, "`stepz`"),
        ({"steps": 0}, "`steps` must be greater than or equal to 1"),
    ],
)
def test_bad_grids_are_refused(changed, message):
    with pytest.raises(InvalidArgument, match=message):
        Grid.of(config(**{"optimizer": ["adamw"], **changed}))


def test_points_and_their_order():
    grid = Grid.of(config(replicates=2, axes={"lr": [0.1, 0.2], "beta_2": [0.9, 0.99]}, hyper={"weight_decay": 0.5, "betas": [0.8, 0.9]}))
    assert grid.dims == {"optimizer": 2, "lr": 2, "beta_2": 2, "replicate": 2} and len(grid) == len(grid.points) == 16
    third = grid.points[3]
    assert (third.optimizer, third.rule.values.lr, third.rule.values.betas, third.replicate) == ("adamw", 0.1, (0.8, 0.99), 1)
    keys = grid.keys("blocked", "cpu")
    assert len(set(keys)) == 16
    one = Grid.of(config(optimizer=["adamw"], axes={"lr": [0.2], "beta_2": [0.99]}, hyper={"weight_decay": 0.5, "betas": [0.8, 0.9]}))
    assert one.keys("blocked", "cpu")[0] == keys[6] != one.keys("fused", "cuda")[0]


def test_the_hash_of_a_point_is_that_of_its_json(tmp_path):
    """Ledgers hold these hashes: they must not change with the code that makes them."""
    axes = {"lr": [1e-7, 0.1], "weight_decay": [0, 3], "beta_1": [0.5, 1 / 3], "schedule": "constant,cosine", "batch": [8, 16]}
    given = config(axes=axes, replicates=2, loss_scale=2, window=7)
    grid = Grid.of(given)
    common = {name: getattr(given, name) for name in ("steps", "neurons", "gradient", "layers", "gamma", "seed")}
    for key, point in zip(grid.keys("fused", "cuda"), grid.points, strict=True):
        own = [point.rule.name, "", vars(point.rule.values), vars(point.setting), point.replicate]
        text = json.dumps([common, 7, own, "fused", "cuda"], sort_keys=True)
        assert key == hashlib.sha256(text.encode()).hexdigest()
    plain = Grid.of(config(optimizer=["adamw"], axes={"lr": [0.1]}, hyper={"weight_decay": 0.5}))
    assert plain.keys("blocked", "cpu") == ("d5ef4f6b297c073d73dc88d1253a0445307d995448a3bf7041826965c5fd0b2c",)


def test_designs():
    axes = {"lr": "1e-4:1e-1:2:log", "weight_decay": "0:1:2", "batch": [8, 32]}
    latin = Grid.of(config(design="latin", points=40, axes=axes))
    assert latin.dims == {"optimizer": 2, "point": 40}
    lr, decay, batch = map(np.array, zip(*latin.rows, strict=True))
    # One point in each of 40 strata of every axis.
    assert sorted(np.floor(np.log10(lr / 1e-4) / 3 * 40)) == sorted(np.floor(decay * 40)) == list(range(40)) and (batch == 8).sum() == 20
    random = Grid.of(config(design="random", points=40, axes=axes))
    assert len(set(np.floor(np.array(random.rows)[:, 1] * 40))) < 40
    assert random.rows == Grid.of(config(design="random", points=40, axes=axes)).rows
    assert random.rows != Grid.of(config(design="random", points=40, axes=axes, seed=1)).rows


def test_schedules():
    assert schedule_factors("constant", 5) is None
    np.testing.assert_allclose(schedule_factors("linear", 4), [1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(schedule_factors("cosine", 4), [1, 0.5 + 8**-0.5, 0.5, 0.5 - 8**-0.5])
    np.testing.assert_allclose(schedule_factors("warmup0.5+constant", 4), [0.5, 1, 1, 1])
    assert all(len(schedule_factors(f"warmup{w}+cosine", n)) == n for w in (0.01, 0.5, 0.99) for n in (1, 2, 7, 100))


def test_the_file_is_the_configuration(tmp_path):
    given = config(hyper={"eps": 1e-8, "betas": [0.9, 0.99]}, window=7)
    path = tmp_path / "grid.toml"
    path.write_text(given.to_toml())
    assert SweepConfig.read(path) == given
    for text, message in (
        ("lr = [", "must be a TOML file"),
        ("speed = 1", "`optimizer`|`speed`"),
        ('axes = 3\noptimizer=["adamw"]', "axes"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=message):
            SweepConfig.read(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        SweepConfig.read(tmp_path / "none.toml")


def test_the_published_schema_is_the_code(capsys):
    assert command(["sweep", "--print-schema"]) == 0
    published = Path(__file__).parent.parent / "docs" / "sweep.schema.json"
    assert capsys.readouterr().out == published.read_text()
    assert command(["sweep", "--print-config"]) == 0
    assert 'optimizer = ["adamw"]' in capsys.readouterr().out
