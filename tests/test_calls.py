"""The blocked engine's calls: whichever library takes a sum, it rounds alike."""

import numpy as np
import pytest
import torch

from rwsim.walk import calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 16), (7, 9), (64, 128), (128, 128), (100, 101), (160, 128)], ids=str)
def test_a_sum_rounds_alike_by_every_call(dtype, shape):
    """BLAS for arrays of a suitable size, torch for others, and for columns: a config must not notice its company."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = [0.1, -3e-5, 1.0]
    columns = torch.tensor(values, dtype=dtype)[:, None, None].expand(3, shape[0], 1)
    start, y = torch.randn(2, *shape, dtype=dtype, generator=generator).unbind(0)
    outs = [start.clone() for _ in range(4)]
    for t in range(3):
        expected = outs[0].clone().add_(y, alpha=values[t])
        calls.add(outs[0], y, values, outs[0])(t)
        calls.add(outs[1], y, columns, outs[1])(t)
        calls.add(outs[2], y, values, outs[3])(t)
        outs[2] = outs[3].clone()
        assert all(torch.equal(out, expected) for out in outs)
    calls.add(outs[0], outs[0], [1.0], outs[0])(0)
    assert torch.equal(outs[0], expected * 2)


@pytest.mark.skipif(calls._axpy(torch.float32) is None, reason="BLAS rounds otherwise here")
@pytest.mark.parametrize(("shape", "pieces"), [((64, 128), [8192]), ((128, 128), [8192, 8192]), ((160, 128), []), ((7, 9), [])], ids=str)
def test_blas_takes_what_suits_it(monkeypatch, shape, pieces):
    axpy, taken = calls._axpy(torch.float32), []
    monkeypatch.setattr(calls, "_axpy", lambda dtype: lambda x, y, n, a: (taken.append(n), axpy(x, y, n, a)))
    out, y = torch.zeros(shape), torch.ones(shape)
    calls.add(out, y, [0.5], out)(0)
    assert taken == pieces and torch.equal(out, torch.full(shape, 0.5))


def test_nothing_times_infinity_is_noticed():
    """A schedule of 0 beside a buffer that is not finite."""
    outs = [torch.ones(64, 128) for _ in range(2)]
    y = torch.full((64, 128), torch.inf)
    calls.add(outs[0], y, [0.0], outs[0])(0)
    calls.add(outs[1], y, torch.zeros(1, 64, 1), outs[1])(0)
    assert all(out.isnan().all() for out in outs)


def test_blas_that_rounds_otherwise_is_not_used(monkeypatch):
    def coarse(x, y, n, a):
        y += np.float32(np.float16(a)) * x

    monkeypatch.setattr(calls.blas, "saxpy", coarse)
    assert calls._axpy.__wrapped__(torch.float32) is None
    out, y = torch.zeros(4, 64), torch.ones(4, 64)
    monkeypatch.setattr(calls, "_axpy", calls._axpy.__wrapped__)
    calls.add(out, y, [0.1], out)(0)
    assert torch.equal(out, torch.full((4, 64), 0.1))
