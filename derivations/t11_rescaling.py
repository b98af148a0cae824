"""T11: rescaling two layers around a ReLU leaves the function and scales their relative SGD updates by r^(-2), r^2."""

from types import SimpleNamespace

import sympy as sp

from derivations.core import Derivation, Step, for_rules
from rwsim.theory import symbols as sym

_r = sp.Symbol("r", positive=True)
WIDTH = 2
inputs = sp.Matrix(1, WIDTH, sp.symbols("x_1:3", real=True))
w1, w2 = (sp.Matrix(WIDTH, WIDTH, sp.symbols(f"{n}_1:5", real=True)) for n in ("v", "w"))
b1, b2 = (sp.Matrix(1, WIDTH, sp.symbols(f"{n}_1:3", real=True)) for n in ("b", "c"))
targets = sp.symbols("y_1:3", real=True)


def network(w1, w2, b1, b2):
    hidden = (inputs * w1 + b1).applyfunc(lambda z: sp.Piecewise((z, z > 0), (0, True)))
    return hidden * w2 + b2


def _loss(out):
    return sum((o - y) ** 2 for o, y in zip(out, targets, strict=True)) + out[0] ** 3


def relative_sq(rule, weight, grad):
    """Squared relative size of one plain SGD step: the room's update without momentum and decay."""
    hyper = SimpleNamespace(lr=sym.eta, weight_decay=0, momentum=0)
    moves = []
    for w, g in zip(weight, grad, strict=True):
        new = rule.update(g, SimpleNamespace(param=w, momentum_buffer=0, step=1), hyper, None)["param"]
        moves.append(new - w)
    return sum(m**2 for m in moves) / sum(w**2 for w in weight)


def steps(context):
    outputs = network(w1, w2, b1, b2)
    rescaled = network(_r * w1, w2 / _r, _r * b1, b2)
    for i in range(WIDTH):
        yield Step(
            f"the function, output {i + 1}", rescaled[i], outputs[i],
            "A ReLU is positively homogeneous, so r passes through it and cancels.", symbolic=False,
        )  # fmt: skip
    loss = _loss(outputs)
    scaling = {**{w: _r * w for w in (*w1, *b1)}, **{w: w / _r for w in w2}}
    layers = {"first weight": (w1, _r**-2), "first bias": (b1, _r**-2), "second weight": (w2, _r**2), "second bias": (b2, _r**0)}
    for rule in context.rules:
        for name, (weight, factor) in layers.items():
            grad = [sp.diff(loss, w) for w in weight]
            before = relative_sq(rule, weight, grad)
            yield Step(
                f"{rule.name}: {name}", before.subs(scaling, simultaneous=True), factor**2 * before,
                "The gradient at the rescaled point is divided by the weight's factor, and the weight is multiplied by it (squares are "
                "compared).", symbolic=False,
            )  # fmt: skip


DERIVATION = Derivation("T11", "Rescaling around a ReLU", "appendix H", for_rules("sgdm"), steps)
