"""Gains and weight standardization: what they compute, that folding them changes no bit, that no state is lost on the way."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from rwsim.errors import InvalidArgument
from rwsim.rotational.layers import (
    Gain,
    Standardization,
    StandardizedConv1d,
    StandardizedConv2d,
    StandardizedLinear,
    fold,
    standardize,
)

# Each with an input; the convolutions have groups, so that their neurons see a part of it.
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (7, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False), (2, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (1, 2, 4, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 9)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
}
READY = {
    "linear": lambda **options: StandardizedLinear(6, 5, **options),
    "conv1d": lambda **options: StandardizedConv1d(4, 6, 3, groups=2, **options),
    "conv2d": lambda **options: StandardizedConv2d(4, 6, kernel_size=3, padding=1, bias=False, **options),
}


def make(build, seed=0):
    """What `build` makes from a seed of its own: torch's constructors draw from the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer_and_input(kind, dtype=torch.float32):
    build, shape = LAYERS[kind]
    return make(build).to(dtype), normal(*shape, seed=1, dtype=dtype)


def rows(layer, weight):
    """(neuron, dim), written down apart from the code that is tested: a neuron's weights are those that its output depends on."""
    if not isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
        return weight.flatten(1)
    parts = weight.chunk(layer.groups)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts])


def original(layer):
    return layer.parametrizations.weight.original


def train(model, x, steps=5, lr=0.1):
    """SGD towards fixed outputs; every parameter moves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    target = normal(*model(x).shape, seed=2, dtype=x.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    return model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.depthwise(self.stem(x)).mean((2, 3)))


# What is computed.


@pytest.mark.parametrize("scale", ["init", "fan_in"])
@pytest.mark.parametrize("kind", LAYERS)
def test_rows_are_centred_at_the_norm_asked_for(kind, scale):
    layer, _ = layer_and_input(kind, torch.float64)
    raw = rows(layer, layer.weight).detach()
    standardize(layer, scale=scale)
    found = rows(layer, layer.weight)
    centred = raw - raw.mean(1, keepdim=True)
    length = raw.norm(dim=1) if scale == "init" else torch.ones(len(raw), dtype=torch.float64)
    torch.testing.assert_close(found, length[:, None] * centred / centred.norm(dim=1, keepdim=True), rtol=1e-13, atol=1e-15)
    assert rows(layer, original(layer)).equal(raw)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_gain_scales_the_outputs_of_its_neuron(kind):
    layer, x = layer_and_input(kind, torch.float64)
    layer.bias = None
    before = standardize(layer)(x).detach()
    gain = layer.parametrizations.weight[1].gain
    with torch.no_grad():
        gain.copy_(torch.arange(1.0, gain.numel() + 1))
    torch.testing.assert_close(layer(x), before * gain.view(1, -1, *[1] * (x.ndim - 2)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
def test_gains_alone_change_no_bit_at_first(kind):
    layer, x = layer_and_input(kind)
    before = layer(x)
    assert standardize(layer, standardize=False)(x).equal(before)
    assert [type(step) for step in layer.parametrizations.weight] == [Gain]


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_orthogonal_to_the_row_and_to_ones(kind):
    layer, x = layer_and_input(kind, torch.float64)
    standardize(layer)(x).square().sum().backward()
    p, g = rows(layer, original(layer)), rows(layer, original(layer).grad)
    size = g.norm(dim=1)
    assert size.min() > 1e-3
    assert ((p * g).sum(1) / (p.norm(dim=1) * size)).abs().max() < 1e-12
    assert (g.sum(1) / (g.shape[1] ** 0.5 * size)).abs().max() < 1e-12


def test_derivatives_are_those_of_finite_differences():
    step, weight = Standardization(normal(3, 5, dtype=torch.float64)), normal(3, 5, seed=3, dtype=torch.float64).requires_grad_()
    assert make(lambda: torch.autograd.gradcheck(step, (weight,)))
    assert make(lambda: torch.autograd.gradgradcheck(step, (weight,)))


@given(seed=st.integers(0, 999), power=st.floats(-30, 30), shift=st.floats(-10, 10))
def test_neither_scale_nor_mean_of_a_raw_row_matters(seed, power, shift):
    weight = normal(4, 9, seed=seed)
    step = Standardization(weight)
    moved = (weight + shift).mul(10.0**power)
    torch.testing.assert_close(step(moved), step(weight), rtol=1e-4, atol=1e-4)
    assert step(moved * 2).equal(step(moved))


def test_half_precision_is_standardized_in_single():
    # A mean of 2, rounded to bfloat16, would be off by up to 2^-8: most of the smaller entries.
    weight = (normal(4, 4096) + 2).bfloat16()
    found, exact = (Standardization(w, scale="fan_in")(w) for w in (weight, weight.double()))
    assert found.dtype == torch.bfloat16
    # One rounding of the result, and float32's of the mean.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 1), (2, 3), (2, 1000)])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e-30])
def test_rows_without_direction_are_zero_with_a_finite_gradient(shape, value, dtype):
    weight = torch.full(shape, value, dtype=dtype, requires_grad=True)
    step = Standardization(weight)
    found = step(weight)
    found.sum().backward()
    assert not found.any()
    assert not weight.grad.any()


def test_a_zero_row_among_others_stays_zero_while_they_train():
    layer, x = layer_and_input("linear")
    with torch.no_grad():
        layer.weight[2] = 0
    train(standardize(layer), x)
    assert not layer.weight[2].any()
    assert layer.weight[[0, 1, 3, 4]].abs().min() > 0
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_not_a_number_shows():
    weight = normal(2, 5)
    step = Standardization(weight)
    weight[1, 3] = torch.nan
    assert step(weight)[0].isfinite().all()
    assert step(weight)[1].isnan().all()


# Folding.


@pytest.mark.parametrize("options", [{}, {"gain": False}, {"standardize": False}, {"scale": "fan_in"}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_folding_changes_no_bit(kind, options):
    layer, x = layer_and_input(kind)
    plain, reference = type(layer), copy.deepcopy(layer)
    standardize(layer, **options)
    start = original(layer).clone()
    train(layer, x)
    assert not original(layer).equal(start)
    before = layer(x)
    assert fold(layer) is layer
    assert layer(x).equal(before)
    assert type(layer) is plain
    assert list(layer.state_dict()) == list(reference.state_dict())
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in reference.named_parameters()]
    reference.load_state_dict(layer.state_dict())
    assert reference(x).equal(before)


@pytest.mark.parametrize("kind", READY)
def test_ready_layers_are_converted_ones_and_fold_to_the_torch_class(kind):
    _, x = layer_and_input(kind)
    for options in ({}, {"gain": False}, {"standardize": False}, {"gain": False, "standardize": False}, {"scale": "fan_in"}):
        ready, plain = make(lambda options=options: READY[kind](**options)), make(LAYERS[kind][0])
        torch_class, converted = type(plain), standardize(plain, **options)
        assert list(ready.state_dict()) == list(converted.state_dict())
        before = ready(x)
        assert before.equal(converted(x))
        assert type(fold(ready)) is torch_class
        assert ready(x).equal(before)


def test_subclasses_of_ready_layers_keep_what_they_add():
    class Doubled(StandardizedLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = make(lambda: Doubled(6, 5)), normal(7, 6)
    before = layer(x)
    assert type(fold(layer)) is Doubled
    assert layer(x).equal(before)


def test_folding_a_copy_leaves_the_model_that_was_copied():
    model, x = standardize(make(Net)), normal(2, 3, 6, 6)
    model.eval()
    before, state = model(x), list(model.state_dict())
    folded = fold(copy.deepcopy(model))
    assert folded(x).equal(before)
    assert model(x).equal(before)
    assert list(model.state_dict()) == state
    assert fold(model)(x).equal(before)


def test_a_converted_net_trains_and_folds():
    net, x = standardize(make(Net)), normal(16, 3, 6, 6)
    start = {name: parameter.clone() for name, parameter in net.named_parameters()}
    train(net, x, steps=20)
    # The mean of a batch-normalized channel does not matter, so a bias before it would not move; there is none.
    assert all(not parameter.equal(start[name]) for name, parameter in net.named_parameters())
    for mode in (True, False):
        net.train(mode)
        mirror = copy.deepcopy(net)
        before = mirror(x)
        plain = make(Net).train(mode)
        plain.load_state_dict(fold(copy.deepcopy(net)).state_dict())
        assert plain(x).equal(before)
    assert not any(parametrize.is_parametrized(module) for module in fold(net).modules())
    assert all(parameter.grad is None for parameter in (net.stem[0].weight, net.depthwise.weight, net.head.weight))


def test_a_folded_weight_is_the_parameter_that_was_trained():
    layer, x = layer_and_input("linear")
    weight = layer.weight
    assert original(standardize(layer)) is weight
    train(layer, x)
    assert fold(layer).weight is weight
    assert list(fold(layer).state_dict()) == ["weight", "bias"]


def test_memory_format_is_kept():
    layer = make(lambda: nn.Conv2d(4, 6, 3)).to(memory_format=torch.channels_last)
    x = normal(2, 4, 5, 5).to(memory_format=torch.channels_last)
    before = standardize(layer)(x)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert fold(layer)(x).equal(before)


# State.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_goes_into_a_fresh_model_and_through_a_file(dtype):
    trained = train(standardize(make(Net)), normal(8, 3, 6, 6), steps=3).to(dtype).eval()
    x = normal(8, 3, 6, 6, dtype=dtype)
    assert {value.dtype for value in trained.state_dict().values()} == {dtype, torch.int64}
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    # Of another beginning: its norms are others.
    fresh = standardize(make(Net, seed=9)).to(dtype).eval()
    assert not fresh(x).equal(trained(x))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh(x).equal(trained(x))
    assert fold(fresh)(x).equal(trained(x))


def test_a_deep_copy_is_a_model_of_its_own():
    model, x = standardize(make(Net)).eval(), normal(4, 3, 6, 6)
    before, twin = model(x), copy.deepcopy(model)
    assert twin(x).equal(before)
    train(twin, x)
    assert not twin(x).equal(before)
    assert model(x).equal(before)


def test_a_gain_learns_what_a_fixed_norm_cannot():
    """Targets 3 times as large as the outputs: the rows keep their norms, so the gains alone can reach them."""
    layer, x = standardize(make(lambda: nn.Linear(6, 5, bias=False))), normal(64, 6)
    target = 3 * layer(x).detach()
    norms = layer.weight.norm(dim=1).detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    standardization, gain = layer.parametrizations.weight
    torch.testing.assert_close(gain.gain.detach(), torch.full((5,), 3.0), rtol=1e-2, atol=0)
    torch.testing.assert_close(standardization(original(layer)).norm(dim=1).detach(), norms, rtol=1e-5, atol=0)


def test_gains_of_frozen_weights_are_frozen():
    layer, _ = layer_and_input("linear")
    layer.weight.requires_grad_(False)
    assert [name for name, parameter in standardize(layer).named_parameters() if parameter.requires_grad] == ["bias"]


def test_layers_print_themselves():
    layer = standardize(make(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2)))
    assert "Standardization(neurons=6, groups=2)" in repr(layer)
    assert "Gain(neurons=5)" in repr(standardize(make(lambda: nn.Linear(6, 5))))


def test_layers_are_made_on_the_meta_device():
    layer = StandardizedLinear(6, 5, device="meta")
    layer.load_state_dict(make(lambda: StandardizedLinear(6, 5)).state_dict(), assign=True)
    assert layer(normal(2, 6)).isfinite().all()


# Whole models.


def test_skipped_and_unknown_modules_are_left():
    net = make(Net)
    standardize(net, skip=["stem", "head"])
    assert [name for name, module in net.named_modules() if parametrize.is_parametrized(module)] == ["depthwise"]
    # A name that begins another's is not its parent.
    pair = make(lambda: nn.ModuleDict({"a": nn.Linear(3, 3), "ab": nn.Linear(3, 3)}))
    standardize(pair, skip=["a"])
    assert [name for name, module in pair.named_modules() if parametrize.is_parametrized(module)] == ["ab"]
    embedding = make(lambda: nn.Embedding(5, 3))
    assert not parametrize.is_parametrized(standardize(embedding))


def test_a_module_of_two_names_is_converted_once():
    layer = make(lambda: nn.Linear(3, 3))
    model = standardize(nn.ModuleDict({"a": layer, "b": layer}))
    assert len(layer.parametrizations.weight) == 2
    x = normal(2, 3)
    before = layer(x)
    assert fold(model)["b"](x).equal(before)
    assert not parametrize.is_parametrized(standardize(model, skip=["b"])["a"])


def tied():
    model = make(lambda: nn.ModuleDict({"embedding": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5, bias=False)}))
    model["head"].weight = model["embedding"].weight
    return model


def test_tied_weights_are_refused_before_anything_is_converted():
    model = tied()
    with pytest.raises(InvalidArgument, match=r"`model.head` must not share.*embedding.weight.*head.weight"):
        standardize(model)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    standardize(model, skip=["head"])
    assert model["head"].weight is model["embedding"].weight
    assert parametrize.is_parametrized(model["body"])


def test_raw_weights_tied_after_conversion_are_not_folded_twice():
    model = standardize(make(lambda: nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])))
    model[1].parametrizations.weight.original = original(model[0])
    with pytest.raises(InvalidArgument, match="must not share"):
        fold(model)


def test_foreign_parametrizations_are_told_apart():
    layer = make(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert fold(layer) is layer
    assert parametrize.is_parametrized(layer, "weight")
    with pytest.raises(InvalidArgument, match=r"plain, initialized parameter.*WeightNorm"):
        standardize(layer)
    both = standardize(make(lambda: nn.Linear(3, 3)))
    make(lambda: nn.utils.parametrizations.orthogonal(both))
    with pytest.raises(InvalidArgument, match=r"no other parametrization.*Standardization.*Orthogonal"):
        fold(both)


def zeroed(layer):
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: StandardizedLinear(3, 2), {}, r"`model` must hold its weight as a plain.*\['Standardization', 'Gain'\].*fold"),
        (lambda: nn.Sequential(StandardizedLinear(3, 2)), {}, r"`model.0` must hold its weight as a plain"),
        (lambda: nn.Linear(3, 2), {"scale": "fan_out"}, r"`scale` must be one of init, fan_in, got 'fan_out'"),
        (lambda: nn.ReLU(), {"scale": "fan_out"}, r"`scale` must be one of"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), {"skip": ["1"]}, r"`skip` must name modules of the model, got \['1'\]"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), {"skip": "0"}, r"`skip` must be a collection of names, got '0'"),
        (lambda: nn.Sequential(nn.Linear(1, 2)), {}, r"`model.0` must have a row with something left.*skip"),
        (lambda: zeroed(nn.Linear(3, 2)), {}, r"`model` must have a row with something left.*shape \(2, 3\)"),
        (lambda: nn.LazyLinear(2), {}, r"`model` must hold its weight as a plain, initialized parameter"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), {}, r"`weight` must hold real floating-point numbers"),
    ],
)
def test_bad_input_is_refused(build, options, message):
    model = make(build)
    with pytest.raises(InvalidArgument, match=message):
        standardize(model, **options)


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_divide_the_first_axis(groups):
    with pytest.raises(InvalidArgument, match="`groups` must divide the first axis of weight, 4"):
        Gain(normal(4, 6), groups)


def test_weights_have_rows():
    for weight in (normal(4), normal(4, 0)):
        with pytest.raises(InvalidArgument, match="at least 2 axes"):
            Standardization(weight)
