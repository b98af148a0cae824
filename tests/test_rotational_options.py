"""Options of rotational optimizers: each bad value is refused by name; groups of a model; speeds."""

import math
import warnings

import pytest
import torch
from torch import nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import (
    RotationalAdam,
    RotationalAdamW,
    RotationalLion,
    RotationalSGDM,
    RotationalWrapper,
    parameter_groups,
    set_speeds,
)
from rwsim.rotational.optimizer import OPTIONS
from rwsim.rotational.rotate import layout
from tests.rotational import CLASSES, angles, drive, parameter, seeded

# Some of these optimizers have nothing that turns, which is what is tested; tests/test_rotational_keys.py holds the warning.
pytestmark = pytest.mark.filterwarnings("ignore:No parameter of this")

every = pytest.mark.parametrize("name", CLASSES)
own = pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("wrapped")])

BAD: dict[str, list] = {
    "rotation": [-0.1, math.nan, math.inf, torch.tensor(-1.0), "fastest"], "rate": ["table", None],
    "update_norm_decay_factor": [1.0, -0.1, math.nan, "much"], "rotational_eps": [-1e-9, math.nan, None], "norm": ["kept", None],
    "neuron_dims": [0, "0", (0.5,)], "blocks": [0, 1.5, -1],
}  # fmt: skip


@every
@pytest.mark.parametrize(("option", "bad"), [(option, bad) for option, values in BAD.items() for bad in values])
def test_bad_options_are_refused_by_name(name, option, bad):
    with pytest.raises(InvalidArgument) as caught:
        CLASSES[name]([parameter(4, 12)], **{option: bad})
    expected = option
    assert f"`{expected}" in str(caught.value) and (isinstance(bad, torch.Tensor) or repr(bad) in str(caught.value))


@pytest.mark.parametrize(
    ("make", "hyper", "argument"),
    [
        (RotationalSGDM, {"lr": -1.0}, "lr"), (RotationalSGDM, {"momentum": 1.0}, "momentum"),
        (RotationalSGDM, {"weight_decay": -1.0}, "weight_decay"),
        (RotationalAdamW, {"betas": (0.9, 1.2)}, r"betas\[1\]"), (RotationalAdamW, {"eps": -1.0}, "eps"),
        (RotationalAdamW, {"lr": math.nan}, "lr"),
        (RotationalLion, {"betas": (-0.1, 0.9)}, r"betas\[0\]"), (RotationalLion, {"weight_decay": math.inf}, "weight_decay"),
        (RotationalAdam, {"weight_decay": 0.1}, "rotation"), (RotationalAdamW, {"rotational": True, "weight_decay": 0.0}, "rotational"),
    ],
)  # fmt: skip
def test_bad_hyperparameters_are_refused_by_name(make, hyper, argument):
    with pytest.raises(InvalidArgument, match=f"`{argument}`"):
        make([parameter(4, 12)], **hyper)


@every
def test_unknown_options_list_those_that_there_are(name):
    with pytest.raises((InvalidArgument, TypeError), match="zero_means"):
        CLASSES[name]([parameter(4, 12)], zero_means=True)
    if not name.startswith("wrapped"):
        with pytest.raises(InvalidArgument, match=r"it takes .*lr.*zero_mean"):
            CLASSES[name]([parameter(4, 12)], zero_means=True)


@every
@pytest.mark.parametrize(
    ("shape", "more", "reason"),
    [
        ((4, 2), {}, "vectors of 2 cannot turn without their mean"), ((4, 1), {"zero_mean": False}, "vectors of 1 cannot turn"),
        ((), {}, "it has no vectors"), ((0, 4), {}, "it has no vectors"), ((5, 4), {"blocks": 2}, "does not fall into 2 blocks"),
        ((4, 12), {"neuron_dims": (2,)}, r"neuron_dims \(2,\) are not dimensions"),
        ((4, 12), {"neuron_dims": (0, 1)}, "vectors of 1 cannot"),
    ],
)  # fmt: skip
def test_what_cannot_turn_is_refused_only_when_it_must(name, shape, more, reason):
    with pytest.raises(InvalidArgument, match=reason):
        CLASSES[name]([parameter(*shape)], rotational=True, **more)
    optimizer = CLASSES[name]([parameter(*shape)], **more)
    group = optimizer.param_groups[0]
    assert not optimizer.is_rotational(group, group["params"][0])


@own
def test_complex_parameters_are_refused(name):
    with pytest.raises(InvalidArgument, match="`params` must be real"):
        CLASSES[name]([nn.Parameter(torch.zeros(4, 12, dtype=torch.complex64))])


@every
def test_what_rotates_by_default(name):
    matrix, vector = parameter(4, 12), parameter(12)
    optimizer = CLASSES[name]([{"params": [matrix, vector]}, {"params": [parameter(4, 12)], "weight_decay": 0.0}])
    decayed, free = optimizer.param_groups
    assert optimizer.is_rotational(decayed, matrix) and not optimizer.is_rotational(decayed, vector)
    assert not optimizer.is_rotational(free, free["params"][0])
    free["rotation"] = 0.1
    assert optimizer.is_rotational(free, free["params"][0])
    decayed["rotational"] = False
    assert not optimizer.is_rotational(decayed, matrix)


def test_rotations_of_every_kind_agree():
    """A number, a tensor, a name and a function of the group."""
    right = RotationalAdamW([parameter(4, 12)], lr=1e-2, weight_decay=0.1).rotation
    group = RotationalAdamW([parameter(4, 12)], lr=1e-2, weight_decay=0.1).param_groups[0]
    rate = right(group)
    outcomes = []
    for rotation in (None, rate, torch.tensor(rate, dtype=torch.float64), "adamw", lambda group: rate):
        param = parameter(4, 12)
        optimizer = RotationalAdamW([param], lr=1e-2, weight_decay=0.1, rotation=rotation)
        drive(optimizer, [param], 4)
        outcomes.append(param.detach())
        twin = RotationalAdamW([param], lr=1e-2, weight_decay=0.1, rotation=rotation)
        twin.load_state_dict(optimizer.state_dict())
        assert twin.param_groups[0]["rotation"] is rotation or float(twin.param_groups[0]["rotation"] == rotation)
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], rtol=1e-13, atol=0)


def test_layouts():
    size = torch.Size([6, 4, 3])
    assert layout(size, True, (0,), 1) == (size, (1, 2))
    assert layout(size, True, (1,), 1) == (size, (0, 2))
    assert layout(size, True, (-2,), 1) == (size, (0, 2))
    assert layout(size, True, (0, 1), 1) == (size, (2,))
    assert layout(size, False, (0,), 1) == (size, (0, 1, 2))
    assert layout(size, True, (1,), 2) == (torch.Size([2, 3, 4, 3]), (1, 3))
    assert layout(size, True, (0,), 2) == (torch.Size([2, 3, 4, 3]), (2, 3))


# Groups of a model.


def model():
    layers = {
        "fc": nn.Linear(6, 8), "conv": nn.Conv2d(4, 8, 3), "up": nn.ConvTranspose2d(8, 4, 3), "up2": nn.ConvTranspose1d(8, 4, 3, groups=2),
        "norm": nn.LayerNorm(8), "emb": nn.Embedding(10, 8),
    }  # fmt: skip
    with torch.random.fork_rng():
        return nn.ModuleDict(layers)


@pytest.fixture
def net():
    state = torch.get_rng_state()
    made = model()
    torch.set_rng_state(state)
    return made


def test_groups_of_a_model(net):
    net["fc2"] = torch.nn.utils.skip_init(nn.Linear, 6, 8)
    net["fc2"].weight = net["fc"].weight
    groups = parameter_groups(net, 0.1, zero_mean=False)
    found = {id(param): group for group in groups for param in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(net.parameters()))
    for name, param in net.named_parameters():
        group = found[id(param)]
        assert group["weight_decay"] == (0.1 if param.dim() > 1 else 0.0)
        assert group["neuron_dims"] == ((1,) if name.startswith("up") and param.dim() > 1 else (0,))
        assert group.get("blocks", 1) == (2 if name == "up2.weight" else 1)
        assert group["zero_mean"] is False
    RotationalAdamW(groups, lr=1e-2)


def test_patterns_of_names(net):
    fc = {"rotational": False, "weight_decay": 0.3}
    groups = parameter_groups(net, 0.1, special={"*weight": {"rotation": 0.1}, "fc.*": fc, "emb.*": {}})
    found = {id(param): group for group in groups for param in group["params"]}
    assert found[id(net["fc"].weight)]["rotational"] is False and found[id(net["fc"].bias)]["weight_decay"] == 0.3
    assert found[id(net["conv"].weight)]["rotation"] == 0.1
    with pytest.raises(InvalidArgument, match=r"`special` must name parameters of the model, got 'head.\*'"):
        parameter_groups(net, 0.1, special={"head.*": {}})
    with pytest.raises(InvalidArgument, match="`zero_means` is not an option"):
        parameter_groups(net, 0.1, zero_means=True)


def test_parametrized_weights_are_found_by_their_owner(net):
    torch.nn.utils.parametrize.register_parametrization(net["up"], "weight", nn.Identity())
    groups = parameter_groups(net, 0.1)
    original = net["up"].parametrizations.weight.original
    assert next(group for group in groups if any(param is original for param in group["params"]))["neuron_dims"] == (1,)


# Speeds.


@pytest.mark.parametrize(
    ("kind", "right"), [("slower", [0.25] * 4 + [1.0] * 4), ("faster", [1.0] * 4 + [4.0] * 4), ("both", [0.25] * 2 + [1.0] * 4 + [4.0] * 2)]
)
def test_speeds_multiply_the_angle(kind, right):
    param = parameter(8, 64)
    optimizer = RotationalAdamW([param], lr=1e-3, weight_decay=0.1, fixed_angle=True)
    set_speeds(optimizer, share=0.5, factor=4, kind=kind, generator=seeded())
    optimizer.centre()
    before = param.detach().clone()
    drive(optimizer, [param], 1)
    turned = angles(before, param.detach()) / optimizer.rotation(optimizer.param_groups[0])
    torch.testing.assert_close(turned.sort().values, torch.tensor(right, dtype=torch.float64), rtol=1e-9, atol=0)
    # They are saved with the rest.
    second = RotationalAdamW([nn.Parameter(param.detach().clone())], lr=1e-3, weight_decay=0.1, fixed_angle=True)
    second.load_state_dict(optimizer.state_dict())
    assert torch.equal(second.state[second.param_groups[0]["params"][0]]["speed"], optimizer.state[param]["speed"])


def test_speeds_are_refused_by_name():
    optimizer = RotationalAdamW([parameter(4, 12)])
    for name, value in (("share", 1.5), ("factor", 0.5), ("kind", "sideways")):
        with pytest.raises(InvalidArgument, match=f"`{name}`"):
            set_speeds(optimizer, **{"share": 0.5, "factor": 2, name: value})
    param = parameter(4, 12)
    wrapper = RotationalWrapper(torch.optim.SGD([param], lr=0.1), rotation=0.01)
    with pytest.raises(InvalidArgument, match="`optimizer` must have taken a step"):
        set_speeds(wrapper, 0.5, 2)
    drive(wrapper, [param], 1)
    set_speeds(wrapper, 0.5, 2, generator=seeded())
    drive(wrapper, [param], 1)
    assert wrapper.state[param]["speed"].shape == (4, 1)


def test_constant_rows_keep_their_mean_without_a_warning():
    param = nn.Parameter(torch.ones(2, 8, dtype=torch.float64))
    optimizer = RotationalAdamW([param])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.centre()
    assert torch.equal(param, torch.ones(2, 8, dtype=torch.float64))
    drive(optimizer, [param], 5)
    torch.testing.assert_close(param.detach().norm(dim=1), torch.full((2,), math.sqrt(8), dtype=torch.float64))


def test_every_option_is_in_the_signature():
    import inspect

    for cls in (RotationalSGDM, RotationalAdamW, RotationalLion, RotationalAdam):
        assert set(OPTIONS) <= set(inspect.signature(cls).parameters)
