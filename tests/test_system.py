"""The toy system: faithful gradients against autograd, and the marginal law against the faithful one."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from rwsim.errors import InvalidArgument
from rwsim.theory.noise import IdealWalk
from rwsim.walk.system import Layer, faithful_gradient
from tests.statistics import ASSERTIONS, FALSE_FAIL_RATE, SEEDS, assert_agrees, mean_and_error

BATCHES = (4, 5, 6, 10, 16, 32, 64)


def draws(kind: str, batch: int, seed: int, count: int, fan_in: int = 6, gamma: str = "normal", neurons: int = 1):
    """`count` gradients at one weight, as configs: shape (count, neuron, fan_in), float64; and the layer and weight."""
    layer = Layer.draw(fan_in, neurons, batch, gamma=gamma, seed=seed)
    generator = torch.Generator().manual_seed(1000 * seed + batch + 7 * len(kind))
    weight = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, neurons, fan_in))).expand(count, -1, -1).contiguous()
    return layer.gradient(kind, generator, torch.float64)(weight), layer, weight[0]


@pytest.mark.parametrize("layers", [1, 3])
def test_faithful_gradient_is_backpropagation(layers, monkeypatch):
    """Against autograd through torch.nn.BatchNorm1d with the same inputs and output gradients.

    torch refuses eps = 0; 1e-300 added to a variance of order 1 changes no bit of it.
    """
    layer = Layer.draw(fan_in=7, neurons=5, batch=9, loss_scale=0.3, seed=3)
    generator = torch.Generator().manual_seed(0)
    weight = layer.start(2, layers, generator, torch.float64)
    recorded = []
    original = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: recorded.append(original(*a, **k)) or recorded[-1])
    ours = layer.gradient("faithful", generator, torch.float64, layers)(weight)
    inputs, out_grad = recorded  # (config, layer, dim, batch), (config, layer, neuron, batch)
    gamma_in, gamma_out = torch.from_numpy(layer.gamma_in), torch.from_numpy(layer.gamma_out)
    for config in range(2):
        for index in range(layers):
            w = weight[config, 5 * index : 5 * index + 5].clone().requires_grad_()
            norm = torch.nn.BatchNorm1d(5, eps=1e-300, affine=False, dtype=torch.float64)
            out = gamma_out * norm((inputs[config, index].T * gamma_in) @ w.T)
            out.backward(0.3 / (5 * 9) * out_grad[config, index].T)
            assert torch.allclose(ours[config, 5 * index : 5 * index + 5], w.grad, rtol=1e-10, atol=1e-18)


def _loss(normalization, weight, inputs, gamma_in, gamma_out, out_grad):
    """sum of output gradients times outputs, written out with torch's own norms; eps 1e-300 changes no bit of order 1."""
    scaled = inputs.T * gamma_in
    if normalization == "weight":
        weight = (weight - weight.mean(-1, keepdim=True)) / weight.std(-1, keepdim=True, correction=0)
    z = scaled @ weight.T
    if normalization == "layer":
        z = torch.nn.functional.layer_norm(z, z.shape[1:], eps=1e-300)
    return (gamma_out * z * out_grad.T).sum()


@pytest.mark.parametrize("normalization", ["layer", "weight", "none"])
def test_neighbouring_gradients_are_backpropagation(normalization, monkeypatch):
    """Against autograd through torch's layer norm, a standardized weight, and the bare layer."""
    layer = Layer.draw(fan_in=7, neurons=5, batch=9, loss_scale=0.3, seed=3, normalization=normalization)
    generator = torch.Generator().manual_seed(0)
    weight = layer.start(2, 3, generator, torch.float64)
    recorded = []
    original = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: recorded.append(original(*a, **k)) or recorded[-1])
    ours = layer.gradient("faithful", generator, torch.float64, 3)(weight)
    inputs, out_grad = recorded
    for config in range(2):
        for index in range(3):
            w = weight[config, 5 * index : 5 * index + 5].clone().requires_grad_()
            scale = torch.from_numpy(layer.gamma_out) * 0.3 / (5 * 9)
            _loss(normalization, w, inputs[config, index], torch.from_numpy(layer.gamma_in), scale, out_grad[config, index]).backward()
            assert torch.allclose(ours[config, 5 * index : 5 * index + 5], w.grad, rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize(("normalization", "neuron", "matrix"), [("batch", 0, 0), ("layer", 1, 0), ("weight", 0, 0), ("none", 1, 1)])
def test_what_is_scale_invariant(normalization, neuron, matrix):
    """Radial part of the gradient, squared, over its share 1/C by chance: of single neurons, and of the whole matrix.

    Weight standardization and layer norm know a second direction: the mean of a row, and of all rows, which no gradient moves.
    """
    layer = Layer.draw(24, 16, 32, gamma="uniform", normalization=normalization)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((400, 16, 24), generator=generator, dtype=torch.float64)
    gradient = layer.gradient("faithful", generator, torch.float64)(weight)
    for unit, invariant in (((-1,), not neuron), ((-1, -2), not matrix)):
        size = math.prod(weight.shape[axis] for axis in unit)
        along = (gradient * weight).sum(unit)
        share = size * along.square() / ((gradient**2).sum(unit) * (weight**2).sum(unit))
        found, error = mean_and_error(share.flatten())
        if invariant:
            assert found < 1e-20
        else:
            assert abs(found - 1) < 0.25 and error < 0.1  # and of either sign: its mean is nothing
            assert abs(float(along.mean())) < 6 * float(along.std()) / math.sqrt(along.numel())
    row, rows = gradient.sum(-1).abs().max() / gradient.abs().max(), gradient.sum(-2).abs().max() / gradient.abs().max()
    assert (float(row) < 1e-12) is (normalization == "weight") and (float(rows) < 1e-12) is (normalization == "layer")
    # The gradient at four times the weight is a quarter; without normalization it is the same.
    one, four = (layer.gradient("faithful", torch.Generator().manual_seed(5), torch.float64)(s * weight[:1]) for s in (1.0, 4.0))
    assert torch.allclose(one, four if normalization == "none" else 4 * four, rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize("kind", ["faithful", "marginal"])
@pytest.mark.parametrize("batch", BATCHES)
def test_gradient_is_orthogonal_to_the_weight(kind, batch):
    gradient, _, weight = draws(kind, batch, 0, 200)
    cosine = (gradient * weight).sum(-1) / (gradient.norm(dim=-1) * weight.norm(dim=-1))
    assert cosine.abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["faithful", "marginal"])
def test_gradient_is_inverse_to_the_weights_scale(kind):
    layer = Layer.draw(6, 3, 8, seed=1)
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, 6)))
    one, four = (layer.gradient(kind, torch.Generator().manual_seed(5), torch.float64)(s * weight) for s in (1.0, 4.0))
    assert torch.allclose(one, 4 * four, rtol=1e-12)


@pytest.mark.parametrize("gamma", ["normal", "uniform"])
@pytest.mark.parametrize("kind", ["faithful", "marginal"])
@pytest.mark.parametrize("batch", [6, 10, 32])
def test_second_moments_are_those_of_theory(kind, gamma, batch):
    """E g_c^2 coordinate by coordinate, and E g_c g_d = 0 beyond what the projector makes."""
    for seed in SEEDS:
        count = 60_000
        gradient, layer, weight = draws(kind, batch, seed, count, gamma=gamma)
        spread = (weight**2).numpy()
        predicted = layer.law("marginal").second_moment(spread)[0]
        g = gradient[:, 0]
        total, error = mean_and_error((g**2 / torch.from_numpy(predicted)).mean(-1))
        # B = 6 has an infinite variance of g^2 nearly (fourth moment finite only just): a wide but honest error.
        assert_agrees(total, error, 1.0, catch=0.05 if batch >= 10 else 0.15, what=f"{kind} {gamma} B={batch} seed {seed}")
        scaled = layer.gamma_in * weight[0].numpy()
        projector = np.eye(6) - np.outer(scaled, scaled) / (scaled @ scaled)
        covariance = predicted[0] / (layer.gamma_in[0] ** 2 * projector[0, 0]) * np.outer(layer.gamma_in, layer.gamma_in) * projector
        for c, d in ((0, 1), (2, 3), (4, 5)):
            found, error = mean_and_error(g[:, c] * g[:, d])
            scale = math.sqrt(predicted[c] * predicted[d])
            assert abs(found - covariance[c, d]) <= 6 * error and 6 * error < 0.25 * scale


@pytest.mark.parametrize("batch", [10, 32])
def test_fourth_moments_agree(batch):
    """Kurtosis 3 B (B-3) / ((B-2)(B-5)) of a coordinate (THEORY.md section 3), in both systems."""
    kurtosis = 3 * batch * (batch - 3) / ((batch - 2) * (batch - 5))
    # E g^4 of a Gaussian times the fourth moment of the length, whose own sample mean needs the eighth moment.
    for kind in ("faithful", "marginal"):
        gradient, layer, weight = draws(kind, batch, 0, 300_000 if batch == 10 else 100_000, fan_in=3)
        second = torch.from_numpy(layer.law("marginal").second_moment((weight**2).numpy())[0])
        found, error = mean_and_error((gradient[:, 0] ** 4 / second**2).mean(-1))
        assert_agrees(found, error, kurtosis, catch=0.3 if batch == 10 else 0.1, what=f"{kind} B={batch}")


@pytest.mark.parametrize("gamma", ["normal", "uniform"])
@pytest.mark.parametrize("batch", BATCHES)
def test_lengths_have_one_law(batch, gamma):
    """Kolmogorov-Smirnov on log ||g||, which has every moment at every B >= 4."""
    rate = FALSE_FAIL_RATE / ASSERTIONS
    for seed in SEEDS:
        lengths = [draws(kind, batch, seed, 8000, gamma=gamma)[0].norm(dim=-1).log().flatten().numpy() for kind in ("faithful", "marginal")]
        assert stats.ks_2samp(*lengths).pvalue > rate
        # Power: a length 12 % longer is seen.
        assert stats.ks_2samp(lengths[0], lengths[1] + 0.12).pvalue < rate


def test_rejects_a_law_with_one_dimension_too_many():
    """Negative control: chi2_3 / chi2_4 where chi2_2 / chi2_3 is right (B = 4), scale divided out, is noticed."""
    faithful, right, wrong = (
        draws(kind, batch, seed, 20_000)[0].norm(dim=-1).log().flatten().numpy()
        for kind, batch, seed in (("faithful", 4, 0), ("marginal", 4, 0), ("marginal", 5, 0))
    )
    rate = FALSE_FAIL_RATE / ASSERTIONS
    assert stats.ks_2samp(faithful - np.median(faithful), right - np.median(right)).pvalue > rate
    assert stats.ks_2samp(faithful - np.median(faithful), wrong - np.median(wrong)).pvalue < rate


def test_marginal_neurons_are_independent_and_faithful_ones_uncorrelated():
    for kind, lengths_correlate in (("marginal", False), ("faithful", True)):
        gradient, _, _ = draws(kind, 6, 0, 40_000, fan_in=4, gamma="uniform", neurons=2)
        inner = (gradient[:, 0] * gradient[:, 1]).sum(-1) / (gradient[:, 0].norm(dim=-1) * gradient[:, 1].norm(dim=-1))
        found, error = mean_and_error(inner)
        assert abs(found) < 6 * error
        logs = gradient.norm(dim=-1).log()
        z = float(torch.corrcoef(logs.T)[0, 1]) * math.sqrt(40_000)
        assert (abs(z) > 6) is lengths_correlate  # shared inputs: this is why the layer is the unit there


def test_gaussian_is_the_ideal_walk():
    gradient, layer, _ = draws("gaussian", 32, 0, 4000)
    found, error = mean_and_error((gradient**2).flatten())
    assert_agrees(found, error, 1.0, catch=0.06)
    assert layer.law("gaussian") == IdealWalk(6, 1)


def test_start_is_torchs_linear_default():
    layer = Layer.draw(64, 16, seed=0)
    start = layer.start(50, 1, torch.Generator().manual_seed(0), torch.float64)
    assert start.abs().max() <= 1 / 8 and start.abs().max() > 0.124
    found, error = mean_and_error((start**2).flatten())
    assert_agrees(found, error, layer.start_sq, catch=0.03)


def test_gammas_follow_the_seed():
    one, same, other = (Layer.draw(8, 4, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.gamma_in, same.gamma_in) and not np.array_equal(one.gamma_in, other.gamma_in)
    assert np.array_equal(Layer.draw(8, 4, gamma="uniform").gamma_in, np.ones(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fan_in": 1}, "`fan_in` must be at least 2"), ({"neurons": 0}, "`neurons` must be at least 1"),
        ({"batch": 3}, "`batch` must be at least 4"), ({"loss_scale": 0.0}, "`loss_scale`"), ({"loss_scale": math.inf}, "`loss_scale`"),
        ({"gamma": "odd"}, "`gamma` must be one of normal, uniform"),
        ({"normalization": "group"}, "`normalization` must be one of batch, layer, weight, none"),
        ({"normalization": "layer", "neurons": 2}, "`neurons` must be at least 3 under layer normalization"),
        ({"normalization": "weight", "fan_in": 2}, "`fan_in` must be at least 3 under weight standardization"),
    ],
)  # fmt: skip
def test_bad_layers_are_named(change, message):
    with pytest.raises(InvalidArgument, match=message):
        Layer.draw(**{"fan_in": 8, "neurons": 4, **change})
    with pytest.raises(InvalidArgument, match="`gamma_in` must be finite"):
        Layer(np.array([1.0, 0.0]), np.ones(2))
    with pytest.raises(InvalidArgument, match="`gradient` must be one of marginal"):
        Layer.draw(4, 4).gradient("odd", torch.Generator())
    with pytest.raises(InvalidArgument, match="`normalization` must be batch with the marginal gradient, got 'layer'; take the faithful"):
        Layer.draw(4, 4, normalization="layer").gradient("marginal", torch.Generator())
    with pytest.raises(InvalidArgument, match="`normalization` must be batch for a prediction"):
        Layer.draw(4, 4, normalization="layer").law("faithful")


def test_faithful_gradient_takes_plain_tensors():
    weight = torch.ones(1, 2, 3)
    gradient = faithful_gradient(weight, torch.ones(3), torch.ones(2), 5, 1, torch.Generator().manual_seed(0))
    assert gradient.shape == weight.shape and torch.isfinite(gradient).all()
