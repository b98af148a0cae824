"""Mutants: a room's real source text, edited in one place. Each is caught by the net that is named, which the room passes.

Nets: a derivation by its id; `peer`, float64 steps beside the optimizer people use; `walk`, a walk of the mutant against the
theory of the right room.
"""

import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from lion_pytorch import Lion as LionPytorch

from derivations import DERIVATIONS, execute
from derivations.core import Context
from rwsim.config import Settings
from rwsim.optimizers import RULES, UpdateRule
from rwsim.stats.verdict import AGREES, DIFFERS
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.transient import approach
from rwsim.validate import Case, compare
from rwsim.walk.job import Job
from rwsim.walk.simulate import run
from rwsim.walk.system import Layer
from tests.test_optimizers import trajectory


@dataclass(frozen=True)
class Mutant:
    """`what` was done to the room `rule`, the `net` that sees it, and the edits (text, replacement)."""

    rule: str
    what: str
    net: str
    edits: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.rule}: {self.what} [{self.net}]"

    def build(self) -> type[UpdateRule]:
        """The class that the edited source defines."""
        room = RULES[self.rule]
        source = textwrap.dedent(inspect.getsource(room))
        for old, new in self.edits:
            assert source.count(old) == 1, f"{self}: {old!r} occurs {source.count(old)} times"
            source = source.replace(old, new)
        names: dict[str, Any] = {"UpdateRule": UpdateRule}
        exec(source, names)
        return names[room.__name__]


def _m(rule: str, what: str, net: str, *edits: str) -> Mutant:
    return Mutant(rule, what, net, tuple(zip(edits[::2], edits[1::2], strict=True)))


_DECAY = "hyper.lr * hyper.weight_decay * state.param"
_L2 = "grad = grad + hyper.weight_decay * state.param"
_BETAS = ("beta1, beta2 = hyper.betas", "beta2, beta1 = hyper.betas")
_ROOT = "xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps"
_STEP = "hyper.lr / (1 - beta1**state.step) * (exp_avg / denom)"

MUTANTS = [
    _m("sgdm", "sign of the gradient", "T2", "+ grad +", "- grad +"),
    _m("sgdm", "sign of the step", "T2", "state.param - hyper.lr", "state.param + hyper.lr"),
    _m("sgdm", "sign of the decay", "T2", "grad + hyper.weight_decay", "grad - hyper.weight_decay"),
    _m(
        "sgdm", "decay out of the buffer", "T2", " + hyper.weight_decay * state.param", "",
        "hyper.lr * momentum_buffer", f"hyper.lr * momentum_buffer - {_DECAY}",
    ),
    _m("sgdm", "momentum as an average", "T1", "+ grad +", "+ (1 - hyper.momentum) * grad +"),
    _m("sgdm", "last step's buffer", "peer", "hyper.lr * momentum_buffer", "hyper.lr * state.momentum_buffer"),
    _m("sgdm", "Nesterov", "peer", "hyper.lr * momentum_buffer", "hyper.lr * (grad + hyper.momentum * momentum_buffer)"),
    _m("sgdm", "decay times lr twice", "walk", "+ hyper.weight_decay", "+ hyper.lr * hyper.weight_decay"),
    _m("adamw", "betas swapped", "T1", *_BETAS),
    _m("adamw", "square dropped", "T2", "grad**2", "grad"),
    _m("adamw", "root dropped", "T2", "xp.sqrt(exp_avg_sq / (1 - beta2**state.step))", "exp_avg_sq / (1 - beta2**state.step)"),
    _m("adamw", "factor of the momentum dropped", "T1", "+ (1 - beta1) * grad", "+ grad"),
    _m("adamw", "factor of the square dropped", "walk", "+ (1 - beta2) * grad**2", "+ grad**2"),
    _m("adamw", "square of the momentum", "walk", "grad**2", "exp_avg**2"),
    _m("adamw", "decay into the gradient", "T1", f"{_BETAS[0]}\n", f"{_BETAS[0]}\n        {_L2}\n", " - decayed", ""),
    _m("adamw", "decay twice", "T2", f"decayed = {_DECAY}", f"decayed = 2 * {_DECAY}"),
    _m("adamw", "decay not times lr", "T1", f"decayed = {_DECAY}", "decayed = hyper.weight_decay * state.param"),
    _m("adamw", "decay times lr twice", "peer", f"decayed = {_DECAY}", f"decayed = hyper.lr * {_DECAY}"),
    _m(
        "adamw", "decay after the step", "peer",
        "- decayed", "- hyper.lr * hyper.weight_decay * (state.param - hyper.lr * exp_avg / denom)",
    ),
    _m("adamw", "momentum uncorrected", "peer", _STEP, "hyper.lr * (exp_avg / denom)"),
    _m("adamw", "square uncorrected", "peer", "exp_avg_sq / (1 - beta2**state.step)", "exp_avg_sq"),
    _m("adamw", "correction one step late", "peer", "(1 - beta1**state.step)", "(1 - beta1**(state.step + 1))"),
    _m("adamw", "eps under the root", "peer", _ROOT, "xp.sqrt(exp_avg_sq / (1 - beta2**state.step) + hyper.eps)"),
    _m("adamw", "eps before the correction", "peer", _ROOT, "(xp.sqrt(exp_avg_sq) + hyper.eps) / (1 - beta2**state.step) ** 0.5"),
    _m("adam_l2", "betas swapped", "T1", *_BETAS),
    _m("adam_l2", "decay out of the square", "T2", "grad**2", "(grad - hyper.weight_decay * state.param) ** 2"),
    _m("adam_l2", "decay out of the buffers", "T1", f"        {_L2}\n", "", "(exp_avg / denom)", f"(exp_avg / denom) - {_DECAY}"),
    _m("adam_l2", "momentum uncorrected", "peer", _STEP, "hyper.lr * (exp_avg / denom)"),
    _m("adam_l2", "eps squared under the root", "peer", _ROOT, "xp.sqrt(exp_avg_sq / (1 - beta2**state.step) + hyper.eps**2)"),
    _m("adam_l2", "factor of the momentum dropped", "walk", "+ (1 - beta1) * grad\n", "+ grad\n"),
    _m("lion", "betas swapped", "T2", *_BETAS),
    _m(
        "lion", "new momentum before the sign", "T2", "        exp_avg = beta2 * state.exp_avg + (1 - beta2) * grad\n", "",
        "        direction =", "        exp_avg = beta2 * state.exp_avg + (1 - beta2) * grad\n        direction =",
        "xp.sign(beta1 * state.exp_avg", "xp.sign(beta1 * exp_avg",
    ),
    _m("lion", "sign dropped", "T1", "xp.sign(beta1 * state.exp_avg + (1 - beta1) * grad)", "beta1 * state.exp_avg + (1 - beta1) * grad"),
    _m("lion", "decay under the sign", "T2", f"{_BETAS[0]}\n", f"{_BETAS[0]}\n        {_L2}\n", f" - {_DECAY}", ""),
    _m("lion", "factor under the sign dropped", "walk", "(1 - beta1) * grad)", "grad)"),
    _m("lion", "one beta for both", "peer", "beta2 * state.exp_avg + (1 - beta2) * grad", "beta1 * state.exp_avg + (1 - beta1) * grad"),
    _m("sgd", "decay twice", "peer", "(grad + hyper.weight_decay", "(grad + 2 * hyper.weight_decay"),
    _m("nesterov", "plain momentum", "peer", "(grad + hyper.momentum * momentum_buffer)", "momentum_buffer"),
    _m("nesterov", "last step's buffer ahead", "walk", "hyper.momentum * momentum_buffer)", "hyper.momentum * state.momentum_buffer)"),
    _m("dampened", "dampening dropped", "walk", "(1 - hyper.dampening) * grad", "grad"),
    _m("dampened", "dampening without its complement", "walk", "(1 - hyper.dampening)", "hyper.dampening"),
    _m(
        "sgdw", "decay into the buffer", "walk",
        "state.momentum_buffer + grad", "state.momentum_buffer + grad + hyper.weight_decay * state.param", f" - {_DECAY}", "",
    ),
    _m("signum", "last step's buffer under the sign", "peer", "xp.sign(momentum_buffer)", "xp.sign(state.momentum_buffer)"),
    _m("signum", "no momentum under the sign", "walk", "xp.sign(momentum_buffer)", "xp.sign(grad)"),
    _m("nadamw", "correction of this step", "peer", "(state.step + 1)", "state.step"),
    _m("nadamw", "factor of the gradient dropped", "walk", "(1 - beta1) / (1 - beta1**state.step)", "1 / (1 - beta1**state.step)"),
    _m("adamc", "decay as in AdamW", "peer", "hyper.lr * (hyper.lr / hyper.max_lr)", "hyper.lr"),
    _m("adamw_independent", "decay times lr", "peer", "- hyper.weight_decay", "- hyper.lr * hyper.weight_decay"),
    _m("qhm", "shares swapped", "walk", "(1 - hyper.nu) * grad + hyper.nu", "hyper.nu * grad + (1 - hyper.nu)"),
    _m("ademamix", "averages swapped", "walk", "beta1, beta2, beta3 = hyper.betas", "beta3, beta2, beta1 = hyper.betas"),
    _m(
        "ademamix", "mixture on the fast average", "walk",
        "mixed = exp_avg", "mixed = hyper.mix * exp_avg", "+ hyper.mix * exp_avg_slow", "+ exp_avg_slow",
    ),
]  # fmt: skip
# Equivalent in law, not in every step: a `walk` cannot tell Signum of last step's buffer, or a flipped gradient (its law is
# symmetric), from the right room. They are above, under nets that can.

_ADAM = {"lr": 0.1, "weight_decay": 2.0, "betas": (0.5, 0.9), "eps": 1e-3}
_SGD = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}
# Our hyperparameters, and the peer's.
PEERS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "sgdm": (_SGD, torch.optim.SGD, _SGD),
    "sgd": ({"lr": 0.1, "weight_decay": 0.5}, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5}),
    "nesterov": (_SGD, torch.optim.SGD, {**_SGD, "nesterov": True}),
    "adamw": (_ADAM, torch.optim.AdamW, _ADAM),
    "adam_l2": (_ADAM, torch.optim.Adam, _ADAM),
    "adamc": ({**_ADAM, "max_lr": 0.4}, torch.optim.AdamW, {**_ADAM, "weight_decay": 2.0 * 0.1 / 0.4}),
    "adamw_independent": ({**_ADAM, "weight_decay": 0.05}, torch.optim.AdamW, {**_ADAM, "weight_decay": 0.05 / 0.1}),
    # Its momentum rises as 1 - 0.96^(step momentum_decay) / 2: at once, so that it is constant as ours is.
    "nadamw": (_ADAM, torch.optim.NAdam, {**_ADAM, "decoupled_weight_decay": True, "momentum_decay": 1e6}),
    "lion": (
        {"lr": 1e-2, "weight_decay": 1.0, "betas": (0.9, 0.99)}, LionPytorch,
        {"lr": 1e-2, "weight_decay": 1.0, "betas": (0.9, 0.99), "decoupled_weight_decay": False},
    ),
    # Signum is Lion with equal betas.
    "signum": (
        {"lr": 1e-2, "weight_decay": 1.0, "momentum": 0.9}, LionPytorch,
        {"lr": 1e-2, "weight_decay": 1.0, "betas": (0.9, 0.9), "decoupled_weight_decay": False},
    ),
}  # fmt: skip

_FAST_ADAM = {"lr": 5e-2, "weight_decay": 1.0, "betas": (0.8, 0.99)}
WALKS: dict[str, dict[str, Any]] = {
    "sgdm": {"lr": 0.2, "weight_decay": 0.1, "momentum": 0.5},
    "adamw": _FAST_ADAM,
    "adam_l2": _FAST_ADAM,
    "lion": {"lr": 5e-2, "weight_decay": 1.0, "betas": (0.8, 0.9)},
    "nesterov": {"lr": 0.2, "weight_decay": 0.1, "momentum": 0.5},
    "dampened": {"lr": 0.2, "weight_decay": 0.2, "momentum": 0.5, "dampening": 0.3},
    "sgdw": {"lr": 0.2, "weight_decay": 0.2, "momentum": 0.5},
    "signum": {"lr": 5e-2, "weight_decay": 1.0, "momentum": 0.8},
    "nadamw": _FAST_ADAM,
    "qhm": {"lr": 0.2, "weight_decay": 0.2, "momentum": 0.8, "nu": 0.7},
    "ademamix": {"lr": 5e-2, "weight_decay": 1.0, "betas": (0.5, 0.99, 0.9), "mix": 2.0},
}


def _passes_derivation(net: str, rule: type[UpdateRule]) -> bool:
    return execute(DERIVATIONS[net], Context((rule,))).ok


@cache
def _peer(name: str) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Start, gradients and where the peer ends after a few float64 steps."""
    _, peer, options = PEERS[name]
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(9))
    param = torch.nn.Parameter(start.clone())
    optimizer = peer([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return start, grads, param.detach()


def _passes_peer(rule: type[UpdateRule], name: str) -> bool:
    start, grads, expected = _peer(name)
    ours = trajectory(rule(**PEERS[name][0]), start, grads)
    return bool((ours - expected).abs().max() <= 1e-12 * (1 + expected.abs().max()))


def _passes_walk(rule: type[UpdateRule], name: str) -> bool:
    """A short ideal walk of `rule` against the theory of the room `name`: every quantity agrees; else one must differ."""
    right = RULES[name](**WALKS[name])
    settings = Settings(fan_in=32, neurons=128, gradient="gaussian", steps=1200, margin=0.03, window=50)
    layer = Layer.draw(settings.fan_in, settings.neurons, gamma="uniform")
    law = layer.law("gaussian")
    coming = approach(right, law, layer.start_sq, settings.steps)
    prediction = predict_equilibrium(right, law)
    case = Case(right, layer, 1, (settings.steps,), prediction, prediction.full, coming, coming.burn_in(0.006), "")
    walk = run(Job((rule(**WALKS[name]),), layer, settings.steps, "gaussian", window=settings.window))
    verdicts = {record.verdict for record in compare(case, walk, settings)}
    assert verdicts == {AGREES} or DIFFERS in verdicts, f"{rule.__name__} of {name}: undecided, the walk is too short"
    return verdicts == {AGREES}


def _passes(net: str, rule: type[UpdateRule], name: str) -> bool:
    match net:
        case "peer":
            return _passes_peer(rule, name)
        case "walk":
            return _passes_walk(rule, name)
        case _:
            return _passes_derivation(net, rule)


@cache
def _room_passes(net: str, name: str) -> bool:
    return _passes(net, RULES[name], name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_rejects_the_mutant_and_passes_the_room(mutant):
    assert _room_passes(mutant.net, mutant.rule), f"{mutant.net} rejects the room itself"
    built = mutant.build()
    # Caught by a net, not by its own spelling: it takes steps like any rule.
    zero = torch.zeros(4, dtype=torch.float64)
    assert trajectory(built(lr=1e-3, weight_decay=0.1), zero, [zero + 1, zero + 3, zero + 2]).isfinite().all()
    assert not _passes(mutant.net, built, mutant.rule), f"survived: {mutant}"


def test_every_room_has_a_mutant_and_every_net_a_catch():
    assert {m.rule for m in MUTANTS} == set(RULES)
    assert {m.net for m in MUTANTS} == {"T1", "T2", "peer", "walk"}
    assert len({str(m) for m in MUTANTS}) == len(MUTANTS)


def test_an_edit_that_finds_nothing_is_refused():
    with pytest.raises(AssertionError, match="occurs 0 times"):
        _m("sgdm", "nothing", "T2", "no such text", "").build()
    with pytest.raises(AssertionError, match=r"occurs [2-9] times"):
        _m("sgdm", "everywhere", "T2", "state.param", "").build()


def test_an_edit_without_effect_survives():
    """The control of the control: the room's own text, executed, passes every net."""
    for name, net in (("sgdm", "T1"), ("adamw", "peer"), ("lion", "walk")):
        assert _passes(net, Mutant(name, "nothing", net, ()).build(), name)
