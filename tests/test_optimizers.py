"""Rules: validation, hand-computed steps, and 100 float64 steps beside the optimizers people use."""

import math
from types import SimpleNamespace

import optimi
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lion_pytorch import Lion as LionPytorch

from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, Lion, UpdateRule, find_rule
from rwsim.optimizers.rule import registry

TORCH_PEERS = [
    (SGDM, dict(lr=0.1, weight_decay=0.05, momentum=0.9), torch.optim.SGD, {}),
    (SGDM, dict(lr=0.5, weight_decay=1e-4, momentum=0.0), torch.optim.SGD, {}),
    (SGDM, dict(lr=0.01, weight_decay=0.5, momentum=0.99), torch.optim.SGD, {}),
    (AdamW, dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8), torch.optim.AdamW, {}),
    (AdamW, dict(lr=0.1, weight_decay=2.0, betas=(0.5, 0.9), eps=1e-3), torch.optim.AdamW, {}),
    (AdamW, dict(lr=1e-3, weight_decay=0.0, betas=(0.0, 0.99), eps=0.0), torch.optim.AdamW, {}),
    (AdamL2, dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8), torch.optim.Adam, {}),
    (AdamL2, dict(lr=0.1, weight_decay=2.0, betas=(0.5, 0.9), eps=1e-3), torch.optim.Adam, {}),
    (AdamL2, dict(lr=1e-3, weight_decay=1e-4, betas=(0.99, 0.9), eps=0.0), torch.optim.Adam, {}),
    (Lion, dict(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.99)), LionPytorch, {"decoupled_weight_decay": False}),
    (Lion, dict(lr=1e-3, weight_decay=5.0, betas=(0.95, 0.98)), LionPytorch, {"decoupled_weight_decay": False}),
    (Lion, dict(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.99)), optimi.Lion, {"foreach": False}),
    (Lion, dict(lr=1e-3, weight_decay=0.0, betas=(0.5, 0.9)), optimi.Lion, {"foreach": False}),
]


# Their decay does not know the learning rate, by definition.
DECAY_WITHOUT_LR = ("adamw_independent",)


def trajectory(rule: UpdateRule, start: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    state = SimpleNamespace(param=start, **{name: torch.zeros_like(start) for name in rule.state})
    for step, grad in enumerate(grads, 1):
        state.step = step
        state = SimpleNamespace(**rule.update(grad, state, rule.values, torch))
    return state.param


@pytest.mark.parametrize(("rule", "hyper", "peer", "options"), TORCH_PEERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_float64_trajectory_equals_the_peer(rule, hyper, peer, options):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    grads = [torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in range(100)]
    param = torch.nn.Parameter(start.clone())
    optimizer = peer([param], **hyper, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    ours = trajectory(rule(**hyper), start, grads)
    assert (ours - param).abs().max() <= 1e-12 * (1 + param.abs().max())


@pytest.mark.parametrize(
    ("rule", "hyper", "first", "second"),
    [
        # w = 1, g = 2 twice, by hand.
        (SGDM, dict(lr=0.1, weight_decay=0.5, momentum=0.5), 1 - 0.1 * 2.5, 0.75 - 0.1 * (0.5 * 2.5 + 2 + 0.5 * 0.75)),
        (AdamW, dict(lr=0.1, weight_decay=0.5, betas=(0.5, 0.5)), 1 - 0.1 * (1 + 0.5), 0.85 - 0.1 * (1 + 0.5 * 0.85)),
        (AdamL2, dict(lr=0.1, weight_decay=0.5, betas=(0.0, 0.0)), 0.9, 0.8),
        (Lion, dict(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99)), 1 - 0.1 - 0.05, 0.85 - 0.1 - 0.0425),
    ],
)
def test_hand_computed_steps(rule, hyper, first, second):
    one, two = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
    assert trajectory(rule(**hyper), one, [two]).item() == pytest.approx(first, rel=1e-14)
    assert trajectory(rule(**hyper), one, [two, two]).item() == pytest.approx(second, rel=1e-14)


@pytest.mark.parametrize("name", RULES)
@given(values=st.lists(st.floats(-10, 10).filter(lambda x: abs(x) > 1e-3), min_size=3, max_size=3))
def test_lr_zero_is_the_identity(name, values):
    eps = {"eps": 1e-8} if "eps" in RULES[name].hyper else {}  # a drawn gradient may be exactly zero
    rule = RULES[name](lr=0.0, weight_decay=0.0 if name in DECAY_WITHOUT_LR else 0.3, **eps)
    start = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(trajectory(rule, start, [start + 1, -start]), start)


@pytest.mark.parametrize("name", RULES)
def test_update_changes_nothing_in_place(name):
    rule = RULES[name](lr=0.1, weight_decay=0.3)
    tensors = {key: torch.full((3,), 0.5, dtype=torch.float64) for key in ("param", *rule.state)}
    before = {key: value.clone() for key, value in tensors.items()}
    rule.update(torch.ones(3, dtype=torch.float64), SimpleNamespace(**tensors, step=2), rule.values, torch)
    assert all(torch.equal(before[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize(
    ("rule", "hyper", "message"),
    [
        (SGDM, dict(lr=-1, weight_decay=0.1), r"`lr` must lie in \[0, inf\), got -1"),
        (SGDM, dict(lr=math.nan, weight_decay=0.1), "`lr` must lie in .* got nan"),
        (SGDM, dict(lr=math.inf, weight_decay=0.1), "`lr` must lie in .* got inf"),
        (SGDM, dict(lr=1, weight_decay=-0.1), "`weight_decay` must lie in"),
        (SGDM, dict(lr=1, weight_decay=0.1, momentum=1), r"`momentum` must lie in \[0, 1\), got 1"),
        (AdamW, dict(lr=1, weight_decay=0.1, betas=(0.9, 1.0)), r"`betas\[1\]` must lie in \[0, 1\), got 1.0"),
        (AdamW, dict(lr=1, weight_decay=0.1, betas=(-0.1, 0.9)), r"`betas\[0\]`"),
        (AdamW, dict(lr=1, weight_decay=0.1, betas=0.9), "`betas` must hold 2 numbers"),
        (AdamW, dict(lr=1, weight_decay=0.1, betas=(0.9,)), "`betas` must hold 2 numbers"),
        (AdamW, dict(lr=1, weight_decay=0.1, betas="0.9"), "`betas` must hold 2 numbers"),
        (AdamW, dict(lr=1, weight_decay=0.1, eps=-1e-8), "`eps` must lie in"),
        (Lion, dict(lr="fast", weight_decay=0.1), "`lr` must be a number, got 'fast'"),
        (Lion, dict(lr=1.0), "`weight_decay` must be given for lion"),
        (
            Lion,
            dict(lr=1.0, weight_decay=0.1, momentum=0.9),
            "`momentum` is not a hyperparameter of lion.*it takes lr, weight_decay, betas",
        ),
    ],
)
def test_bad_hyperparameters_are_named(rule, hyper, message):
    with pytest.raises(InvalidArgument, match=message):
        rule(**hyper)


def test_unknown_rule_lists_the_known():
    with pytest.raises(InvalidArgument, match=r"must be one of sgdm, adamw, adam_l2, lion, .*, got 'adam'"):
        find_rule("adam")
    assert find_rule(Lion) is Lion


def test_registry_refuses_duplicates():
    with pytest.raises(ValueError, match="two rules are named 'lion'"):
        registry([Lion, Lion])


@pytest.mark.parametrize("name", RULES)
def test_every_room_is_complete(name):
    rule = RULES[name]
    assert rule.name == name and rule.reference and rule.__doc__ and "Example" in rule.__doc__
    assert {"lr", "weight_decay"} <= set(rule.hyper)
    assert "lr=0.1" in repr(rule(lr=0.1, weight_decay=0.2))


def test_a_rule_without_update_says_so():
    with pytest.raises(NotImplementedError, match="must define `update`"):
        UpdateRule.update(None, SimpleNamespace(), SimpleNamespace(), torch)
