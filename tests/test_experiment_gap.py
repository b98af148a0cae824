"""The factors of a settled layer's rotation, from an experiment's records."""

import math

import numpy as np
import pytest

from rwsim.experiments.case import Case
from rwsim.experiments.gap import OF_ROTATION, gap_rows, gap_says
from rwsim.experiments.records import Layer, Series
from rwsim.experiments.settled import settled_rows
from rwsim.experiments.train import Recipe
from rwsim.probe.factors import FACTORS

# S lambda 1e-3; equilibrium at 0.01, a path that is 2 % off it.
CASE = Case("one", Recipe("tiny", "sgdm", {"lr": 0.1, "weight_decay": 1e-3, "momentum": 0.9}, 2000, 16))
STEP = np.arange(20, 1020, 20)


def records(invariant=True, **changed):
    """Of a layer half of whose neurons have no gradient and fade away; the others turn as predicted, by steps that differ by a tenth."""
    shape = (2, len(STEP), 1)
    turned = 0.005 * (1 + 0.1 * (-1.0) ** np.arange(len(STEP)))[None, :, None] * np.array([0.99, 1.01])[:, None, None]
    values = {name: np.full(shape, float(value)) for name, value in {
        "norm": 1.0, "path_norm": 1.0, "corrected_norm": 1.0, "path_rotation": 0.0102, "predicted_rotation": 0.01,
        "corrected_rotation": 0.01, "predicted_norm": 1.0, "lambda_ratio": 0.0, "rms_update": 1.0, "predicted_rms_update": 1.0,
        "scaled_grad": 1.0,
        "momentum_grad_angle": math.pi / 2, "idle": 0.5, "bursts": 1.0, "neurons": math.sqrt(0.5),
    }.items()}  # fmt: skip
    values |= {"rotation": turned, "rotation_sq": 2 * turned**2, "ln_norm": np.broadcast_to(-0.5e-3 * STEP[None, :, None], shape)}
    values |= changed
    layer = Layer("hidden", 49, 16, invariant)
    return Series((layer,), (0, 1), STEP, {name: value for name, value in values.items() if value is not None}, ({}, {}))


def test_the_factors_are_what_the_rotation_is_off_by():
    series = records()
    rows = {one.quantity.removeprefix(OF_ROTATION): one for one in gap_rows(CASE, series, 0, 0)}
    assert list(rows) == list(FACTORS)
    rotation = next(one for one in settled_rows(CASE, series, 0, 0) if one.quantity == "rotation")
    assert math.isclose(math.prod(one.measured for one in rows.values()), 1 + rotation.error, rel_tol=1e-9)
    expected = {"idle": math.sqrt(0.5), "growth": 1 / 1.02, "neurons": math.sqrt(0.5), "steps": 1 / math.sqrt(1.01)}
    for name, one in rows.items():
        assert math.isclose(one.measured, expected.get(name, 1.0), rel_tol=0.006), name
    # Seeds turn by 0.99 and 1.01, at one share of idle ones.
    assert rows["idle"].interval == 0 and 0.05 < rows["memory"].interval < 0.2
    assert rows["idle"].note == FACTORS["idle"] and not rows["radial"].note
    said = gap_says([rotation, *rows.values()])
    assert "that every neuron has gradients does not hold" in said and "radial" not in said


@pytest.mark.parametrize("lacks", ["idle", "neurons", "invariant", "time"])
def test_there_are_none_without_what_they_need(lacks):
    series = records(invariant=lacks != "invariant", **({lacks: None} if lacks in ("idle", "neurons") else {}))
    rows = list(gap_rows(CASE, series, 0, len(STEP) - 1 if lacks == "time" else 0))
    assert rows == [] and gap_says(rows) == ""
