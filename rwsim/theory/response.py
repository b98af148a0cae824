"""How one gradient, and one decay, act on all later updates: kernels read off a rule's one `update`.

The total response (sum of a kernel) is the paper's total update contribution; its square per unit of gradient is the
diffusion rate. The energy (sum of squares) is the size of a single update.
"""

from dataclasses import dataclass, replace

import sympy as sp

from rwsim.errors import UnsupportedRule
from rwsim.optimizers.rule import UpdateRule
from rwsim.theory import symbols as sym
from rwsim.theory.moments import LinearResponse, linear_response

lag = sp.Symbol("k", integer=True, positive=True)
_past = sp.Symbol("j", integer=True, positive=True)  # bound in sums, so that `now` may hold `lag`


@dataclass(frozen=True)
class Kernel:
    """Coefficients of an input in the outputs of the same step (`head`) and of `lag` = 1, 2, ... steps later (`tail`).

    Dimensionless but for the input's own unit; functions of the hyperparameters and `sym.normalizer`.
    """

    head: sp.Expr
    tail: sp.Expr

    @property
    def total(self) -> sp.Expr:
        """Sum over all lags, left as a sum."""
        return self.head + sp.Sum(self.tail, (lag, 1, sp.oo)) if self.tail != 0 else self.head

    def output(self, source: sp.IndexedBase, now: sp.Expr) -> sp.Expr:
        """The output at step `now` of the inputs source[now], source[now - 1], ..."""
        past = sp.Sum(self.tail.subs(lag, _past) * source[now - _past], (_past, 1, sp.oo)) if self.tail != 0 else 0
        return self.head * source[now] + past


def _settled(rule: type[UpdateRule]) -> LinearResponse:
    """The response long after the start, with eps ignored (the paper's assumption)."""
    r = linear_response(rule).settled()
    plain = {name: getattr(r, name).subs(sym.epsilon, 0) for name in ("transition", "drive", "sign_drive")}
    return replace(r, **plain)


def through_buffers(row: sp.Matrix, buffers: sp.Matrix, into: sp.Matrix) -> sp.Expr:
    """row B^(lag-1) into."""
    if buffers.rows == 0 or into.is_zero_matrix:
        return sp.Integer(0)
    power = buffers ** (lag - 1) if buffers.rows > 1 else sp.Matrix([[buffers[0] ** (lag - 1)]])
    return sp.powsimp(sp.factor((row * power * into)[0]))


def argument_kernel(rule: type[UpdateRule]) -> Kernel:
    """Coefficients of the gradients in the sign's argument n_t.

    Raises:
        UnsupportedRule: The rule has no sign.

    Example:
        >>> from rwsim.optimizers import Lion
        >>> argument_kernel(Lion).head
        1 - beta_1
    """
    r = _settled(rule)
    if r.argument is None:
        raise UnsupportedRule(rule.name, "it has no sign")
    h, head = r.argument
    return Kernel(head, through_buffers(h[0, 1:], r.transition[1:, 1:], r.drive[1:, :]))


def gradient_kernel(rule: type[UpdateRule]) -> Kernel:
    """Coefficients of a gradient in the updates of its own and later steps, decay aside; a sign is replaced by its
    linear part n/D with D = `sym.normalizer`.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> gradient_kernel(SGDM).tail
        -alpha**k*eta
    """
    transition, drive = _settled(rule).linearized().gradient_part()
    return Kernel(drive[0], through_buffers(transition[0, 1:], transition[1:, 1:], drive[1:, :]))


def decay_kernel(rule: type[UpdateRule]) -> Kernel:
    """Coefficients of one step's decay, per unit of weight, in that and later updates.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> decay_kernel(AdamW)
        Kernel(head=-eta*lambda, tail=0)
    """
    r = _settled(rule).linearized()
    injected = r.decay_drive()
    return Kernel(injected[0], through_buffers(r.transition[0, 1:], r.transition[1:, 1:], injected[1:, :]))
