"""The normals of the blocked engine: their law, and that a stream goes on where it stopped."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from rwsim.walk.normals import Normals, table


def drawn(count: int, key: int = 1, path: tuple[int, ...] = (1, 0), dtype: torch.dtype = torch.float32) -> np.ndarray:
    out = np.empty(count, torch.empty(0, dtype=dtype).numpy().dtype)
    Normals(Normals.begin(key, path), dtype).fill(out)
    return out


def test_the_table_has_the_moments_of_a_normal():
    values = table()
    assert np.array_equal(values, np.sort(values)) and np.allclose(values, -values[::-1], atol=1e-9)
    for power, moment, within in ((1, 0, 1e-12), (2, 1, 1e-12), (3, 0, 1e-9), (4, 3, 2e-4), (6, 15, 1e-2)):
        assert (values**power).mean() == pytest.approx(moment, abs=within)
    assert np.abs(values).mean() == pytest.approx(np.sqrt(2 / np.pi), rel=1e-6) and 4.3 < values.max() < 4.4


def test_draws_are_normal_and_independent():
    sample = drawn(2**18).astype(float)
    assert kstest(sample, "norm").pvalue > 1e-6
    for lag in (1, 2, 3, 4, 128):
        for x in (sample, np.abs(sample)):
            assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 5 / np.sqrt(len(x))


def test_streams_differ_by_key_and_path_and_repeat():
    assert np.array_equal(drawn(99), drawn(99))
    for other in (drawn(99, key=2), drawn(99, path=(1, 1)), drawn(99, key=1 + 2**40)):
        assert (other != drawn(99)).mean() > 0.95
    np.testing.assert_allclose(drawn(99), drawn(99, dtype=torch.float64), rtol=1e-6)


def test_a_stream_goes_on_where_it_stopped():
    whole, halves = np.empty((2, 7), np.float32), np.empty((2, 7), np.float32)
    stream = Normals(Normals.begin(3, ()), torch.float32)
    for row in whole:
        stream.fill(row)
    words = Normals.begin(3, ())
    for row in halves:
        one = Normals(words, torch.float32)
        one.fill(row)
        words = one.words
    assert np.array_equal(whole, halves) and not np.array_equal(whole[0], whole[1])
