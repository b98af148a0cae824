"""What a rule's one `update` says about second moments, read off by evaluating it on symbols.

In the random walk gradients are zero-mean, uncorrelated over time and uncorrelated with the weights. Write z for the
parameter and its momentum buffers, per coordinate. If the direction is linear in z and the gradient (after a square
root or a sign has been set aside), then

    z_t = A z_{t-1} + b g_t,      P = E[z z^T] = A P A^T + G b b^T,      G = E g_c^2,

and every stationary second moment follows (THEORY.md section 2). A square root of a second-moment average is replaced
by its stationary value D; a sign by a separate drive s, whose argument n is again linear in z and g.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import sympy as sp

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached

_g = sp.Symbol("g", real=True)
_s = sp.Symbol("s", real=True)


@dataclass(frozen=True)
class LinearResponse:
    """The linear state space of a rule, one coordinate.

    Attributes:
        rule: The rule it was read off.
        direction: ``"linear"``, ``"normalized"`` (second moment under a root) or ``"sign"``.
        states: Names of z; the parameter first, then the momentum buffers.
        transition: A, with `sym.t` as the step of the bias corrections.
        drive: b, the coefficient of the gradient.
        sign_drive: Coefficient of the sign in z (zero unless `direction` is ``"sign"``).
        argument: Row h and scalar k of the sign's argument n = h z + k g; None without a sign.
        square: For ``"normalized"``: matrix Q and scalar c of the averaged square, E v = tr(Q P) + c G; else None.
        average: For ``"normalized"``: the rate of v, v' = average v + (1 - average) square.
        correction: For ``"normalized"``: v^ / v, the bias correction as a function of `sym.t`.
    """

    rule: type[UpdateRule]
    direction: str
    states: tuple[str, ...]
    transition: sp.Matrix
    drive: sp.Matrix
    sign_drive: sp.Matrix
    argument: tuple[sp.Matrix, sp.Expr] | None
    square: tuple[sp.Matrix, sp.Expr] | None
    average: sp.Expr
    correction: sp.Expr

    @property
    def decoupled(self) -> bool:
        """Whether the decay bypasses the buffers: no buffer depends on the parameter."""
        return all(entry == 0 for entry in self.transition[1:, 0])

    def settled(self) -> "LinearResponse":
        """The same system long after the start: beta**t -> 0."""

        def limit(x: sp.Expr) -> sp.Expr:
            return x.replace(lambda e: e.is_Pow and e.exp.has(sym.t), lambda e: sp.Integer(0))

        return LinearResponse(
            self.rule, self.direction, self.states, self.transition.applyfunc(limit), self.drive.applyfunc(limit),
            self.sign_drive.applyfunc(limit), self.argument, self.square, self.average, limit(self.correction),
        )  # fmt: skip

    def linearized(self) -> "LinearResponse":
        """The same system with a sign replaced by its linear part n/D, D = `sym.normalizer`; itself without a sign."""
        if self.argument is None:
            return self
        (h, k), gain = self.argument, self.sign_drive / sym.normalizer
        return replace(
            self, transition=self.transition + gain * h, drive=self.drive + gain * k, sign_drive=sp.zeros(*gain.shape), argument=None
        )

    def gradient_part(self) -> tuple[sp.Matrix, sp.Matrix]:
        """A and b of the same buffers driven by gradients alone: no decay, parameter held at zero."""
        transition = self.transition.subs(sym.lam, 0)
        transition[:, 0] = sp.zeros(len(self.states), 1)
        return transition, self.drive.subs(sym.lam, 0)

    def decay_drive(self) -> sp.Matrix:
        """What one step's decay adds to z, per unit of weight."""
        return (self.transition[:, 0] - self.transition[:, 0].subs(sym.lam, 0)).applyfunc(sp.expand)


class _Recorder:
    """The `xp` of the symbolic evaluation: sets roots and signs aside and remembers their arguments."""

    def __init__(self) -> None:
        self.roots: list[sp.Expr] = []
        self.signs: list[sp.Expr] = []

    def sqrt(self, argument: sp.Expr) -> sp.Expr:
        self.roots.append(sp.sympify(argument))
        return sym.normalizer

    def sign(self, argument: sp.Expr) -> sp.Expr:
        self.signs.append(sp.sympify(argument))
        return _s


# `simplify` finds nothing more in rational functions, and takes ten times as long; other functions of hyperparameters are rare.


def _tidied(expr: sp.Expr) -> sp.Expr:
    """In one fraction, common factors in front."""
    return sp.simplify(expr) if expr.has(sp.Float) else sp.factor_terms(sp.cancel(expr))  # polynomials of floats gather factors of 1.0


def _vanishes(expr: sp.Expr) -> bool:
    return bool(expr == 0 or sp.cancel(expr) == 0 or sp.simplify(expr) == 0)


def _linear(rule: str, name: str, expr: sp.Expr, variables: list[sp.Symbol]) -> list[sp.Expr]:
    """Coefficients of an expression that must be linear and homogeneous in `variables`."""
    expanded = sp.expand(expr)
    coefficients = [_tidied(sp.diff(expanded, v)) for v in variables]
    rest = sp.expand(expanded - sum(c * v for c, v in zip(coefficients, variables, strict=True)))
    if not _vanishes(rest) or any(c.has(*variables) for c in coefficients):
        raise UnsupportedRule(rule, f"`{name}` is not linear in the gradient and the buffers")
    return coefficients


@cached
def linear_response(rule: type[UpdateRule]) -> LinearResponse:
    """Evaluate `rule.update` on symbols and read the linear state space off it.

    Raises:
        UnsupportedRule: The update is not linear once one root of one second-moment average, or one sign, is set aside.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> linear_response(SGDM).transition
        Matrix([
        [-eta*lambda + 1, -alpha*eta],
        [         lambda,      alpha]])
    """
    symbols = {name: sp.Symbol(name, real=True) for name in ("param", *rule.state)}
    xp = _Recorder()
    new = rule.update(_g, SimpleNamespace(**symbols, step=sym.t), sym.hyper_symbols(rule), xp)
    new = {name: sp.expand(sp.sympify(expr)) for name, expr in new.items()}
    if len(xp.roots) + len(xp.signs) > 1:
        raise UnsupportedRule(rule.name, "more than one root or sign in the update")

    # A buffer that is quadratic in the gradient is a second-moment average; it may act through the root only.
    squares = [name for name in rule.state if new[name].is_polynomial(_g) and sp.degree(new[name], _g) == 2]
    square, average, correction = None, sp.Integer(0), sp.Integer(1)
    if xp.roots:
        if len(squares) != 1:
            raise UnsupportedRule(rule.name, "the root must hold exactly one second-moment average")
        v = symbols[squares[0]]
        average = _tidied(sp.diff(new[squares[0]], v))
        correction = sp.cancel(xp.roots[0] / new[squares[0]])
        others = [symbols[name] for name in symbols if name not in squares]
        if average.has(*others, _g, v) or correction.has(*others, _g, v):
            raise UnsupportedRule(rule.name, "the second-moment average is not a linear average of squares")
        quadratic = sp.expand(sp.cancel((new[squares[0]] - average * v) / (1 - average)))
        form = sp.hessian(quadratic, [*others, _g]) / 2
        if form.has(*others, _g) or not _vanishes(quadratic - _quadratic(form, [*others, _g])):
            raise UnsupportedRule(rule.name, "the second-moment average is not a linear average of squares")
        square = (form[:-1, :-1], form[-1, -1])
    elif squares:
        raise UnsupportedRule(rule.name, "a second-moment average that acts without a root")

    states = tuple(name for name in symbols if name not in squares)
    variables = [symbols[name] for name in states]
    rows = [_linear(rule.name, name, new[name], [*variables, _g, _s]) for name in states]
    matrix = sp.Matrix(rows)
    argument = None
    if xp.signs:
        *h, k = _linear(rule.name, "the sign's argument", xp.signs[0], [*variables, _g])
        argument = (sp.Matrix([h]), k)
        if h[0] != 0 or any(matrix[i, 0] != 0 for i in range(1, len(states))):
            raise UnsupportedRule(rule.name, "the decay enters under the sign")
        if (
            matrix[0, -2] != 0
            or any(matrix[0, i] != 0 for i in range(1, len(states)))
            or any(matrix[i, -1] != 0 for i in range(1, len(states)))
        ):
            raise UnsupportedRule(rule.name, "the sign is not the whole direction")
    direction = "sign" if xp.signs else "normalized" if xp.roots else "linear"
    n = len(states)
    return LinearResponse(rule, direction, states, matrix[:, :n], matrix[:, n], matrix[:, n + 1], argument, square, average, correction)


def _quadratic(form: sp.Matrix, variables: list[sp.Symbol]) -> sp.Expr:
    vector = sp.Matrix(variables)
    return sp.expand((vector.T * form * vector)[0])


@dataclass(frozen=True)
class StationaryMoments:
    """Stationary second moments of one coordinate, as functions of the hyperparameters, `sym.grad_sq` and
    `sym.normalizer`; dimension: weights squared.

    Attributes:
        weight_sq: E omega^2.
        lag_one: E[omega_t omega_{t+1}].
        update_sq: E of the squared gradient part of the update.
    """

    weight_sq: sp.Expr
    lag_one: sp.Expr
    update_sq: sp.Expr


def lyapunov(transition: sp.Matrix, drive: sp.Matrix) -> sp.Matrix:
    """The stationary second moment P = A P A^T + G b b^T of z' = A z + b g, with G = `sym.grad_sq`.

    Example:
        >>> a = sp.Symbol("a")
        >>> sp.simplify(lyapunov(sp.Matrix([[a]]), sp.Matrix([[1]]))[0] - sym.grad_sq / (1 - a**2))
        0
    """
    n = transition.rows
    if n == 0:
        return sp.zeros(0, 0)
    entries = {(i, j): sp.Symbol(f"P_{i}{j}") for i in range(n) for j in range(i, n)}
    p = sp.Matrix(n, n, lambda i, j: entries[min(i, j), max(i, j)])
    residual = p - transition * p * transition.T - sym.grad_sq * drive * drive.T
    (solution,) = sp.linsolve([residual[i, j] for i, j in entries], list(entries.values()))
    found = dict(zip(entries, map(sp.factor, solution), strict=True))
    return sp.Matrix(n, n, lambda i, j: found[min(i, j), max(i, j)])


@cached
def stationary_moments(rule: type[UpdateRule]) -> StationaryMoments:
    """Exact stationary second moments of a linear or second-moment-normalized rule, in closed form.

    Raises:
        UnsupportedRule: A sign rule, whose moments are arcsine sums (see `equilibrium`), or one that is not linear.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> stationary_moments(SGDM).weight_sq
        -G*eta*(alpha + 1)/(lambda*(alpha - 1)*(2*alpha - eta*lambda + 2))
    """
    response = linear_response(rule).settled()
    if response.direction == "sign":
        raise UnsupportedRule(rule.name, "the moments of a sign are arcsine sums, not a rational closed form")
    p = lyapunov(response.transition, response.drive)
    lag_one = sp.factor((response.transition * p)[0, 0])
    transition, drive = response.gradient_part()
    row = transition[0, 1:]
    update_sq = (row * lyapunov(transition[1:, 1:], drive[1:, :]) * row.T)[0] + drive[0] ** 2 * sym.grad_sq
    return StationaryMoments(p[0, 0], lag_one, sp.factor(update_sq))
