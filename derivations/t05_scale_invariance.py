"""T5: scale invariance makes the gradient orthogonal to the weight and inversely proportional to its norm.

In general by differentiating L(r omega) = L(omega), then through batch normalization and weight standardization, term by
term at symbolic small sizes. General sizes are a property test (tests/test_derivations.py).
"""

import sympy as sp

from derivations.core import Derivation, Step, for_rules

BATCH, FAN_IN = 3, 2
_r = sp.Symbol("r", positive=True)
_eps = sp.Symbol("epsilon_N", nonnegative=True)
omega = sp.Matrix(sp.symbols(f"omega_1:{FAN_IN + 1}", real=True))
inputs = sp.Matrix(BATCH, FAN_IN, sp.symbols(f"z_1:{BATCH * FAN_IN + 1}", real=True))
out_grad = sp.Matrix(sp.symbols(f"y_1:{BATCH + 1}", real=True))
ones = sp.ones(BATCH, 1)


def normalized(x, eps=0):
    """Batch norm of one feature (eq. bn-appendix)."""
    centered = x - sp.ones(x.rows, 1) * sum(x) / x.rows
    return centered / sp.sqrt(sum(c**2 for c in centered) / x.rows + eps)


def gradient(loss, variables):
    return sp.Matrix([sp.diff(loss, v) for v in variables])


def _general():
    direction = sp.Matrix(sp.symbols("a b", real=True))
    s, c = direction[1] / direction[0], sp.symbols("c_1:4", real=True)
    # A function of the direction alone; to first order in a change of direction these coefficients make it any function.
    loss = c[0] * s + c[1] * s**2 + c[2] * s**3
    grad = gradient(loss, direction)
    scaled = grad.subs({w: _r * w for w in direction}, simultaneous=True)
    yield Step(
        "Euler: orthogonality", grad.dot(direction), sp.Integer(0),
        "For a differentiable loss of the direction alone, the derivative along the weight vanishes.",
    )  # fmt: skip
    yield Step(
        "Euler: inverse proportionality", scaled.dot(scaled), grad.dot(grad) / _r**2,
        "The chain rule takes one factor r out of the gradient at r omega: squared lengths.",
    )  # fmt: skip


def _batch_norm():
    x = inputs * omega
    yield Step(
        "batch norm: scale invariance", normalized(_r * x)[0], normalized(x)[0],
        "Mean and deviation scale with the input (epsilon = 0).", symbolic=False,
    )  # fmt: skip
    plain = sp.Matrix(sp.symbols(f"x_1:{BATCH + 1}", real=True))
    hat, sigma = normalized(plain, _eps), sp.sqrt(sum((c - sum(plain) / BATCH) ** 2 for c in plain) / BATCH + _eps)
    printed = (out_grad - ones * ones.dot(out_grad) / BATCH - hat * hat.dot(out_grad) / BATCH) / sigma
    grad = gradient(hat.dot(out_grad), plain)
    for i in range(BATCH):
        yield Step(
            f"batch norm: backpropagation, x_{i + 1}", grad[i], printed[i],
            "The printed backward pass is the derivative of the forward pass, for any epsilon (gamma = 1; y is the gradient of the "
            "output).",
            symbolic=False,
        )  # fmt: skip
    yield Step(
        "batch norm: no mean in the gradient", printed.dot(ones), sp.Integer(0),
        "Shifting all inputs changes nothing, whatever epsilon is.", symbolic=False,
    )  # fmt: skip
    yield Step(
        "batch norm: orthogonal to the output", printed.subs(_eps, 0).dot(hat.subs(_eps, 0)), sp.Integer(0),
        "With epsilon = 0 the output has squared length B, and the last two terms cancel.", symbolic=False,
    )  # fmt: skip
    loss = normalized(x).dot(out_grad)
    grad_w = gradient(loss, omega)
    yield Step(
        "batch norm: gradient orthogonal to the weight", grad_w.dot(omega), sp.Integer(0),
        "The weight's gradient is Z^T times the gradient of x, so its product with omega is that of x with its gradient.", symbolic=False,
    )  # fmt: skip
    scaled = grad_w.subs({w: _r * w for w in omega}, simultaneous=True)
    for i in range(FAN_IN):
        yield Step(
            f"batch norm: inverse proportionality, coordinate {i + 1}", scaled[i], grad_w[i] / _r,
            "The factor 1/sigma of the backward pass, and sigma grows with the norm.", symbolic=False,
        )  # fmt: skip
    yield Step(
        "batch norm: epsilon breaks it", gradient(normalized(x, 1 + _eps).dot(out_grad), omega).dot(omega), sp.Integer(0),
        "With epsilon of the order of the variance a radial part remains: the negative control of the lines above.", relation="!=",
    )  # fmt: skip


def _weight_standardization():
    weight = sp.Matrix(sp.symbols("omega_1:4", real=True))
    loss = normalized(weight).dot(sp.Matrix(sp.symbols("y_1:4", real=True)))
    grad = gradient(loss, weight)
    yield Step(
        "weight standardization: orthogonal to the weight", grad.dot(weight), sp.Integer(0),
        "The same normalization applied to the weight itself.", symbolic=False,
    )  # fmt: skip
    yield Step(
        "weight standardization: orthogonal to ones", sum(grad), sp.Integer(0),
        "It also removes the mean, so that the gradient has none.", symbolic=False,
    )  # fmt: skip
    scaled = grad.subs({w: _r * w for w in weight}, simultaneous=True)
    yield Step(
        "weight standardization: inverse proportionality", scaled.dot(scaled), grad.dot(grad) / _r**2,
        "Squared length of the gradient at r omega.", symbolic=False,
    )  # fmt: skip


def steps(context):
    yield from _general()
    yield from _batch_norm()
    yield from _weight_standardization()


DERIVATION = Derivation("T5", "Scale invariance: orthogonal, inversely proportional gradients", "section 2, appendix B", for_rules(), steps)
