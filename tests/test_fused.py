"""What is the fused engine's own: its random numbers, its special functions, the faithful kernel, its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from rwsim.errors import Unavailable
from rwsim.optimizers import AdamW
from rwsim.walk import fused, kernel
from rwsim.walk.job import Job
from rwsim.walk.simulate import resolve_engine, run
from rwsim.walk.system import REACH, Layer, faithful_gradient, length_polynomial
from tests.statistics import Z

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
four_normals, arcsine, philox = kernel.four_normals, kernel.arcsine, kernel.philox


@triton.jit
def _normals(out, key0, key1, row, step, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    k0, k1 = tl.full((), key0, tl.uint32), tl.full((), key1, tl.uint32)
    z0, z1, z2, z3 = four_normals(k0, k1, place.to(tl.uint32), tl.full((), row, tl.uint32), tl.full((), step, tl.uint32), 0)
    tl.store(out + place, z0)
    tl.store(out + SIZE + place, z1)
    tl.store(out + 2 * SIZE + place, z2)
    tl.store(out + 3 * SIZE + place, z3)


@triton.jit
def _arcsine(x, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, arcsine(tl.load(x + place)))


@triton.jit
def _philox(out, k0, k1, c0, c1, c2, c3):
    zero = tl.full((), 0, tl.uint32)
    b0, b1, b2, b3 = philox(zero + k0, zero + k1, zero + c0, zero + c1, zero + c2, zero + c3)
    tl.store(out, b0.to(tl.int64))
    tl.store(out + 1, b1.to(tl.int64))
    tl.store(out + 2, b2.to(tl.int64))
    tl.store(out + 3, b3.to(tl.int64))


def normals(key0=1, key1=2, row=3, step=4, size=1 << 14) -> np.ndarray:
    out = torch.empty(4, size, device=DEVICE)
    _normals[(1,)](out, key0, key1, row, step, size)
    return out.cpu().double().numpy()


def test_philox_against_plain_integers():
    def expected(key, counter, rounds=7):
        (k0, k1), (c0, c1, c2, c3) = key, counter
        for _ in range(rounds):
            p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
            c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return [c0, c1, c2, c3]

    # The tenth round's numbers are the published test vectors of Random123 (kat_vectors, philox4x32 10, all zeros).
    assert expected((0, 0), (0, 0, 0, 0), 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    for key, counter in (((0, 0), (0, 0, 0, 0)), ((5, 77), (1, 2, 3, 4)), ((0x7FFFFFF1, 9), (0x7FFFFFFE, 0, 12345, 1))):
        _philox[(1,)](out, *key, *counter)
        assert out.tolist() == expected(key, counter)


def test_normals_are_normal_and_independent():
    z = np.concatenate([normals(step=t) for t in range(8)], axis=1)  # four of a call, one after the other step
    n = z.size
    flat = z.ravel()
    assert stats.kstest(flat, "norm").pvalue > 1e-6 and np.isfinite(flat).all()
    for power, mean, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)):
        assert abs((flat**power).mean() - mean) < Z * math.sqrt((square - mean**2) / n), power
    # Nothing links the four of a call, squares included (a shared radius would show there), neighbours, steps or rows.
    m = z.shape[1]
    pairs = [(z[i], z[j]) for i in range(4) for j in range(i)] + [(z[0, 1:], z[0, :-1]), (normals(step=0), normals(step=1))]
    pairs += [(normals(row=0), normals(row=1)), (normals(key0=1), normals(key0=2)), (normals(key1=1), normals(key1=2))]
    for a, b in pairs:
        assert abs((a * b).mean()) < Z / math.sqrt(min(a.size, m))
        assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < Z * 2 / math.sqrt(min(a.size, m))
    assert not np.array_equal(normals(key0=1), normals(key0=2)) and np.array_equal(normals(), normals())


@pytest.mark.parametrize("batch", [4, 5, 6, 8, 11, 12, 23, 24, 32, 128, 1024])
def test_length_polynomial_has_the_law(batch):
    """exp P(z) is the quantile function; its mean square is B (B - 2) / (B - 3); float32 evaluation keeps that."""
    coefficients = np.array(length_polynomial(batch), dtype=np.float32)

    def length(z):
        power = np.full_like(z, coefficients[-1])
        for c in coefficients[-2::-1]:
            power = power * z + c
        return np.exp(power.astype(np.float64))

    z, weights = np.polynomial.hermite_e.hermegauss(120)
    inner = abs(z) < REACH
    mean_square = (weights[inner] * length(z[inner].astype(np.float32)) ** 2).sum() / weights.sum()
    # At B = 4 the square's own tail beyond the largest normal counts.
    assert mean_square == pytest.approx(batch * (batch - 2) / (batch - 3), rel=2e-2 if batch == 4 else 1e-3 if batch < 7 else 2e-5)
    z = np.linspace(-4, 4, 801)
    quantile = stats.f.ppf(stats.norm.cdf(z), batch - 2, batch - 1) * (batch - 2) / (batch - 1) * batch
    np.testing.assert_allclose(length(z.astype(np.float32)) ** 2, quantile, rtol=2e-4 if batch < 8 else 1e-5)


def test_arcsine():
    x = torch.linspace(0, 1, 1024, dtype=torch.float32, device=DEVICE)
    out = torch.empty_like(x)
    _arcsine[(1,)](x, out, 1024)
    torch.testing.assert_close(out.double(), x.double().asin(), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize(("neurons", "fan_in", "batch", "layers"), [(5, 40, 12, 3), (16, 16, 16, 1), (20, 70, 33, 2)])
def test_faithful_kernel_is_backpropagation(neurons, fan_in, batch, layers, monkeypatch):
    layer, generator = Layer.draw(fan_in, neurons, batch), torch.Generator().manual_seed(0)
    inputs = torch.randn(layers, fan_in, batch, generator=generator)
    outputs = torch.randn(layers * neurons, batch, generator=generator)
    start = torch.randn(1, layers * neurons, fan_in, generator=generator)
    job = Job((AdamW(lr=1e-2, weight_decay=0.1),), layer, 1, "faithful", layers=layers)
    (part,) = fused._parts(job, [DEVICE], start)
    part.launch(0, 1, lambda config, step: (inputs, outputs))
    drawn = iter((inputs[None].double(), outputs.view(1, layers, neurons, batch).double()))
    monkeypatch.setattr(torch, "randn", lambda *size, **options: next(drawn))
    gamma_in, gamma_out = layer.scales(torch.float64, torch.device("cpu"), layers)
    expected = faithful_gradient(start.double(), gamma_in, gamma_out, batch, layers, generator)[0]
    error = (part.grad.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-6


@pytest.mark.slow
def test_faithful_windows_and_spans(monkeypatch):
    """Means of windows do not depend on how many steps are captured at a time, nor on company."""
    layer = Layer.draw(16, 3, 8)
    rules = (AdamW(lr=1e-2, weight_decay=0.1), AdamW(lr=2e-2, weight_decay=0.1))
    job = Job(rules, layer, 7, "faithful", layers=2, window=2)
    whole = fused.walk(job, DEVICE)
    assert whole.lengths.tolist() == [2, 2, 2, 1] and np.isfinite(whole.angle).all()
    monkeypatch.setattr(fused, "_SPAN", 3)
    assert np.array_equal(fused.walk(replace(job, rules=rules[1:]), DEVICE).angle[:, 0], whole.angle[:, 1])
    single = fused.walk(replace(job, window=7), DEVICE)
    np.testing.assert_allclose(single.angle[0], (whole.lengths[:, None, None] * whole.angle).sum(0) / 7, rtol=1e-5)
    assert [fused._span(window) for window in (1, 2, 3, 4, 7, 9)] == [3, 2, 3, 2, 1, 3]


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"gradient": "faithful", "dtype": torch.float64}, "the faithful gradient in float64"),
        ({"window": 20_000, "steps": 20_000}, "windows of more than 10000 steps"),
        ({"layer": Layer.draw(20_000, 2)}, "a fan-in of 20000"),
    ],
)
def test_limits_are_named(change, missing):
    job = replace(Job((AdamW(lr=1e-2, weight_decay=0.1),), Layer.draw(8, 2), 4), **change)
    with pytest.raises(Unavailable, match=f"`engine` fused does not carry {missing}.*use engine .*reference"):
        resolve_engine("fused", job, DEVICE)


def test_without_a_gpu_or_triton_the_reason_is_given(monkeypatch):
    job = Job((AdamW(lr=1e-2, weight_decay=0.1),), Layer.draw(8, 2), 4)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(Unavailable, match=r"`engine` fused does not carry device cpu; use engine .*reference"):
        run(job, engine="fused", device="cpu")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="fused does not carry a machine without Triton"):
        run(job, engine="fused")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_gives_what_single_steps_give(monkeypatch):
    job = Job((AdamW(lr=1e-2, weight_decay=0.1),), Layer.draw(128, 64), 1000, "faithful", layers=8)
    captured = fused.walk(job, DEVICE)
    monkeypatch.setattr(fused._Part, "_capture", lambda self, varying: None)
    assert np.array_equal(captured.angle, fused.walk(job, DEVICE).angle)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("gradient", ["marginal", "faithful"])
def test_devices_share_a_walk_bitwise(gradient):
    rules = tuple(AdamW(lr=lr, weight_decay=0.1) for lr in (1e-2, 2e-2, 3e-2))
    job = Job(rules, Layer.draw(128, 64), 500, gradient, layers=100)
    one, all_of_them = (fused.walk(job, torch.device(name)) for name in ("cuda:0", "cuda"))
    for name in ("norm_sq", "angle", "update_sq", "unit_grad_sq"):
        assert np.array_equal(getattr(one, name), getattr(all_of_them, name))
