"""What theory says of a watched layer: equilibrium at the hyperparameters of each step, and the way there.

For rules whose updates have a size of their own (AdamW, Lion) nothing is fitted. Where the gradient's size matters, its running average
is measured, as in the paper: E||g~||^2 = E(||w|| ||g||)^2 for SGDM, <1, sqrt(E g~^2)> for Adam+l2.

*Radial gradients.* A gradient lambda_u w + g_perp is a decay lambda_u as far as the momentum passes it on like one (paper, section 3.4;
derivations, T6). With u = R g the total effect of a gradient and d = -S lambda w that of a step's decay (R and S of a rule: sums over all
later updates, which is where momentum's factor is), the lambda_u whose decay does what the radial part of u does is

    lambda_u = <w, R g> / <w, S w>,        positive where the gradient points along w: its step then shrinks w, as a decay does.

SGDM: R = S = eta/(1 - alpha), so lambda_u = <w, g>/||w||^2 as in appendix H. AdamW: R = eta/(sqrt(v^) + eps) by coordinate, S = eta:
lambda_u = <w, g/(sqrt(v^) + eps)>/||w||^2, momentum's factor (1 - beta_1) sum beta_1^k being 1. It may differ from 0 where g and w are
orthogonal. Adam+l2: <w, g/D>/<w, w/D>. Lion: the sign's linear part by coordinate, sign(n_i) = k_i n_i + rest with
k_i^2 = (2/pi)/E n_i^2, gives R = eta k_i. The gradient's own sign has the linear part k_i g_i ||n||/||g||, where coordinates differ in
scale alone: lambda_u = ||g||/||n|| <w, sign(g)>/||w||^2.

*Correlated gradients.* Let M = E||Delta_g w||^2/eta^2 as measured. If gradients are orthogonal to w at their own time and the second moment
is steady, E<w, m> follows from M whatever the gradients' correlation, and in equilibrium AdamW (rho = 1 - eta lambda) and SGDM have

    E||w||^2 = eta^2 M (1 + rho beta_1)/((1 - rho beta_1)(1 - rho^2)),   r^2 = 2 eta lambda (1 - beta_1)/(1 + rho beta_1);
    E||w||^2 = eta M (1 + alpha)/(2 lambda),                              r^2 = 2 eta lambda/(1 + alpha):

correlation, and a second moment that is off, change the norm by the measured size of the update over the predicted one, and the
rotation not at all. With lambda_e = lambda + lambda_u both hold for radial gradients too. Lion's updates have one size whatever the
gradients. Of a sign of n = h m + k' g, m' = a m + b g, with h y a sign's correlation with the next one, by coordinate
E sign(n_i) k_i m'_i with k_i^2 = (2/pi)/E n_i^2, and phi = k' + rho h b/(1 - rho a), the same steps lead to

    E||w||^2 = eta^2 C V,   V = (1 + 2 rho h y/(1 - rho a))/(1 - rho^2 + 2 rho phi eta lambda_u),
    r^2/2 = 1 - rho + phi eta lambda_u - h y/((1 - rho a) V),

where phi says that momentum passes on radial parts of weights that have turned and shrunk since. Coordinates' gradients differ in size, and
a sign makes them count alike, so y is measured by signs: for normal n and m' of correlation c, E sign(n) sign(m') = (2/pi) arcsin c,
and y = (2/pi) sin(pi s/2) ||m'||/||n|| with s the mean of sign(n_i) sign(m'_i), if coordinates differ in scale alone. What these give over
their values at lambda_u = 0 and the y of uncorrelated gradients multiplies the exact prediction.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import sympy as sp

from rwsim.errors import InvalidArgument, UnsupportedRule
from rwsim.optimizers import UpdateRule
from rwsim.theory import paper
from rwsim.theory import symbols as sym
from rwsim.theory.forms import numeric, settled
from rwsim.theory.moments import stationary_moments
from rwsim.theory.noise import Array, IdealWalk
from rwsim.theory.rates import total_decay, total_response
from rwsim.theory.rotation import norm_sq_form, relative_sq_form
from rwsim.theory.signs import sign_autocovariance, sign_closure

_NO_MORE: Mapping[sp.Symbol, Any] = MappingProxyType({})
# Steps whose sums over a sign's memory are held at a time.
_CHUNK = 64
# What a measured size of the update over the predicted one does: exponents of norm and rotation. See the module's docstring.
_ELASTICITY = {"linear": (0.25, 0.0), "normalized": (0.5, 0.0), "coupled": (1 / 3, 1 / 6)}


@dataclass(frozen=True)
class Moments:
    """Measured averages that a prediction may need; arrays that broadcast to (time, neuron).

    Attributes:
        grad_sq: E||g||^2 across w.
        unit_grad_sq: E(||w|| ||g||)^2, likewise.
        unit_grad_l1: ||w|| <1, sqrt(v^)>.
    """

    grad_sq: Array
    unit_grad_sq: Array
    unit_grad_l1: Array


@dataclass(frozen=True)
class Equilibrium:
    """Norm, RMS rotation (radians per step) and RMS update; (time, neuron), NaN where there is no equilibrium."""

    norm: Array
    rotation: Array
    rms_update: Array


@dataclass(frozen=True)
class _Lengths(IdealWalk):
    """Gradients whose squared lengths over their mean are these, each as likely."""

    lengths_sq: Array = field(default_factory=lambda: np.ones(1))

    def length_squared(self, nodes: int = 1) -> tuple[Array, Array]:
        return self.lengths_sq, np.full(len(self.lengths_sq), 1 / len(self.lengths_sq))


class Theory:
    """A rule as a probe uses it: arrays of hyperparameters in, arrays out. eps is taken to be negligible.

    Args:
        rule: Which.

    Raises:
        UnsupportedRule: The theory cannot carry the rule.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> hyper = {"lr": np.array([1e-3, 1e-2]), "weight_decay": np.array([0.1, 0.1]), "betas": np.array([[0.9, 0.99]] * 2)}
        >>> Theory(AdamW).equilibrium(hyper, hyper["weight_decay"], 128, None).norm[:, 0].round(3)
        array([0.8  , 2.519])
    """

    def __init__(self, rule: type[UpdateRule]) -> None:
        self.rule = rule
        self.direction = settled(rule).direction
        response, decay = total_response(rule), sp.factor(total_decay(rule) / sym.lam)
        self.scales_grad, self.scales_decay = (self.direction == "normalized" and x.has(sym.normalizer) for x in (response, decay))
        self.kind = "coupled" if self.scales_decay else self.direction
        plain = {sym.normalizer: 1, sym.epsilon: 0}
        self._decay = decay.subs(plain)
        self._radial = sp.factor(response.subs(plain) / self._decay)
        self._carried = _carried(rule, self._decay.subs(sym.epsilon, 0) * sym.lam) if self.direction != "sign" else sp.Integer(0)
        if self.kind == "coupled" and rule.name not in paper.TABLE_1:
            raise UnsupportedRule(rule.name, "its equilibrium depends on the size of the gradients by coordinate")
        if self.kind == "linear":
            stationary_moments(rule)
        if self.kind == "sign" and len(settled(rule).states) != 2:
            raise UnsupportedRule(rule.name, "its sign has other than one buffer")

    def flat(self, hyper: Mapping[str, Any], decay: Any = None) -> list[Any]:
        """Hyperparameters in the order of lambdified forms, each of shape (time, 1).

        Raises:
            InvalidArgument: One is missing.
        """
        given = dict(hyper) if decay is None else {**hyper, "weight_decay": decay}
        columns: list[Any] = []
        for name, default in self.rule.hyper.items():
            value = 0.0 if name == "eps" else given.get(name, default)
            if value is ...:
                raise InvalidArgument("optimizer", f"must have {name} in its groups for the rule {self.rule.name}", sorted(hyper))
            if isinstance(default, tuple):
                table = np.broadcast_to(np.asarray(value, dtype=float), (*np.shape(value)[:-1], len(default)))
                columns += [table[..., i, None] for i in range(len(default))]
            else:
                columns.append(np.asarray(value, dtype=float)[..., None])
        return columns

    def _evaluate(
        self, expression: sp.Expr, hyper: Mapping[str, Any], decay: Any = None, extra: Mapping[sp.Symbol, Any] = _NO_MORE
    ) -> Array:
        with np.errstate(all="ignore"):
            (value,) = numeric(self.rule, (expression,), tuple(extra))(*self.flat(hyper, decay), *extra.values())
        return np.asarray(value, dtype=float)

    def decay(self, hyper: Mapping[str, Any]) -> Array:
        """S lambda: what a step's decay takes off w in all, (time, 1); of a decay that is divided by D times that."""
        return -self._evaluate(self._decay * sym.lam, hyper)

    def carried(self, hyper: Mapping[str, Any]) -> Array:
        """c, (time, 1): of a decay that goes through the momentum, what its past has in common with the step; see `_carried`."""
        return self._evaluate(self._carried, hyper)

    def radial(self, hyper: Mapping[str, Any]) -> Array:
        """R/S, (time, 1), at D and the sign's k of 1."""
        return self._evaluate(self._radial, hyper)

    def argument(self, hyper: Mapping[str, Any]) -> tuple[Array, Array, Array, Array]:
        """h, k, a, b of a sign's argument n = h m + k g and of its buffer m' = a m + b g, each (time, 1)."""
        response = settled(self.rule)
        assert response.argument is not None
        row, of_grad = response.argument
        parts = row[1], of_grad, response.transition[1, 1], response.drive[1]
        one, two, three, four = (self._evaluate(part, hyper) for part in parts)
        return one, two, three, four

    def passed(self, hyper: Mapping[str, Any]) -> Array:
        """phi, (time, 1): the share of a radial part that acts, where a sign's buffer passes it on late; else 1."""
        if self.kind != "sign":
            return np.ones((len(hyper["lr"]), 1))
        h, k, a, b = self.argument(hyper)
        rho = 1 - self.decay(hyper)
        return np.asarray((k + rho * h * b / (1 - rho * a)) / (k + h * b / (1 - a)))

    def bursts(self, hyper: Mapping[str, Any], lengths_sq: Array) -> float:
        """The rotation under gradients of varying length over that under ones of one length: 1 but for a sign.

        A long gradient keeps a sign's buffer, and with it the signs to come, as they are: updates then agree for longer, norms are larger
        and the rotation is smaller.

        Args:
            hyper: Of one step, each of shape (1,) or (1, 2).
            lengths_sq: ||g||^2 over its mean, each as likely.
        """
        if self.kind != "sign":
            return 1.0
        columns = np.concatenate([np.ravel(one) for one in self.flat(hyper)])
        rule, decay = self.rule(**self._named(columns)), self.decay(hyper)
        turns = [sign_closure(decay, sign_autocovariance(rule, law)[0])[1].item() for law in (_Lengths(2, 1, lengths_sq), IdealWalk(2))]
        return math.sqrt(turns[0] / turns[1])

    def equilibrium(self, hyper: Mapping[str, Any], decay: Array, fan_in: int, moments: Moments | None) -> Equilibrium:
        """At the hyperparameters of each step, as if they stayed.

        Args:
            hyper: Name -> (time,) or (time, 2).
            decay: lambda or lambda_e, (time,).
            fan_in: C.
            moments: What is measured; None will do where nothing is needed.
        """
        decay = np.where(decay > 0, decay, np.nan)
        given = {sym.C: fan_in, **({paper.grad_norm_sq: moments.grad_sq, paper.unit_grad_norm_sq: moments.unit_grad_sq,
                 paper.unit_grad_l1: moments.unit_grad_l1} if moments else dict.fromkeys(paper.GRADIENT, np.nan))}  # fmt: skip
        if self.kind == "sign":
            found = self._signs(hyper, decay, fan_in)
        elif self.kind == "coupled":
            column = paper.TABLE_1[self.rule.name]
            forms = column.norm, column.rotation, column.rms_update
            one, two, three = (self._evaluate(form, hyper, decay, given) for form in forms)
            found = one, two, three
        else:
            norm, update = self._sizes
            relative_sq = self._evaluate(_form(self.rule), hyper, decay)
            with np.errstate(invalid="ignore"):
                rotation = 2 * np.arcsin(np.sqrt(relative_sq) / 2)
            found = self._evaluate(norm, hyper, decay, given), rotation, self._evaluate(update, hyper, decay, given)
        norm, rotation, update = np.broadcast_arrays(*found)
        fine = np.isfinite(norm) & (norm > 0) & (np.asarray(hyper["lr"])[:, None] > 0)
        return Equilibrium(np.where(fine, norm, np.nan), np.where(fine, rotation, np.nan), update)

    @cached_property
    def _sizes(self) -> tuple[sp.Expr, sp.Expr]:
        """Norm and RMS update of a whole vector."""
        moments = stationary_moments(self.rule)
        if self.kind == "linear":
            # With E||g||^2 = E||g~||^2/||w||^2 the norm is a fourth root.
            weight = moments.weight_sq.subs(sym.grad_sq, 1)
            return sp.root(weight * paper.unit_grad_norm_sq, 4), sp.sqrt(moments.update_sq.subs(sym.grad_sq, paper.grad_norm_sq))
        update = sp.factor(moments.update_sq.subs({sym.normalizer: sp.sqrt(sym.grad_sq), sym.epsilon: 0}))
        return sp.sqrt(norm_sq_form(self.rule, "exact")), sp.sqrt(sym.C * update)

    def _signs(self, hyper: Mapping[str, Any], decay: Array, fan_in: int) -> tuple[Array, Array, Array]:
        """As in `rwsim.theory.equilibrium`, for many steps: the sign's memory is that of each pair of betas."""
        columns = np.concatenate(np.broadcast_arrays(*self.flat(hyper, decay), np.zeros((len(decay), 1)))[:-1], axis=1)
        step = -self._evaluate(settled(self.rule).sign_drive[0], hyper)[:, 0]
        taken = self._evaluate(-sp.expand(settled(self.rule).transition[0, 0] - 1), hyper, decay)[:, 0]
        memory = [i for i, symbol in enumerate(sym.flat(sym.hyper_symbols(self.rule))) if symbol not in (sym.eta, sym.lam)]
        norm_sq, turn = np.full((2, len(decay)), np.nan)
        keys, which = np.unique(columns[:, memory], axis=0, return_inverse=True)
        for k, key in enumerate(keys):
            values = np.ones(columns.shape[1])
            values[memory] = key
            gamma, _ = sign_autocovariance(self.rule(**self._named(values)), IdealWalk(2))
            members = np.flatnonzero((which.ravel() == k) & (taken > 0) & (taken < 2))
            for first in range(0, len(members), _CHUNK):
                some = members[first : first + _CHUNK]
                norm_sq[some], turn[some] = sign_closure(taken[some], gamma)
        size = np.abs(step) * math.sqrt(fan_in)
        return (size * np.sqrt(norm_sq))[:, None], (2 * np.arcsin(np.sqrt(turn / 2)))[:, None], size[:, None]

    def _named(self, flat: Array) -> dict[str, Any]:
        rest = iter(flat.tolist())
        return {
            name: tuple(next(rest) for _ in default) if isinstance(default, tuple) else next(rest)
            for name, default in self.rule.hyper.items()
        }

    def corrected(self, effective: Equilibrium, factor: Array) -> tuple[Array, Array]:
        """Norm and rotation with lambda_e, and a measured `factor` of E||Delta_g w||^2 over the predicted one. Not of a sign."""
        norm, rotation = _ELASTICITY[self.kind]
        with np.errstate(invalid="ignore"):
            return effective.norm * factor**norm, effective.rotation * factor**rotation

    def corrected_sign(self, plain: Equilibrium, hyper: Mapping[str, Any], radial: Array, memory: Array) -> tuple[Array, Array]:
        """Norm and rotation of a sign with lambda_u and y as measured, both (time, 1); see the module's docstring."""
        h, k, a, b = self.argument(hyper)
        decay = self.decay(hyper)
        rho, spread = 1 - decay, b**2 / (1 - a**2)
        uncorrelated = 2 / math.pi * (h * a * spread + k * b) / (h**2 * spread + k**2)
        pull = self._evaluate(-self._decay, hyper) * self.passed(hyper) * radial

        def form(pull: Any, y: Array) -> tuple[Array, Array]:
            common = h * y / (1 - rho * a)
            norm_sq = (1 + 2 * rho * common) / (decay * (1 + rho) + 2 * rho * pull)
            return norm_sq, decay + pull - common / norm_sq

        with np.errstate(invalid="ignore", divide="ignore"):
            norm_sq, turn = (measured / ideal for measured, ideal in zip(form(pull, memory), form(0.0, uncorrelated), strict=True))
            return plain.norm * np.sqrt(norm_sq), plain.rotation * np.sqrt(turn)


def _form(rule: type[UpdateRule]) -> sp.Expr:
    form = relative_sq_form(rule, "exact")
    assert form is not None  # only a sign has none
    return form


def _carried(rule: type[UpdateRule], decay: sp.Expr) -> sp.Expr:
    """c of ||Delta_g w||^2 = ||d||^2 + 2 s (<w, d> - c ||d||^2) + s^2 ||w||^2, with d the whole step and s what a decay takes in all.

    A decay that goes through the momentum acts on weights of before, which differ from w by steps that correlate with d. c is what makes
    the equation hold in equilibrium, where <w, d> = -||d||^2/2, as s goes to 0: 0 for a decoupled decay, alpha^2/(1 - alpha^2) for SGDM.
    """
    moments = stationary_moments(rule)
    plain = {sym.normalizer: 1, sym.epsilon: 0, sym.grad_sq: 1}
    step_sq = (2 * (moments.weight_sq - moments.lag_one)).subs(plain)
    share, relative_sq = moments.update_sq.subs(plain) / step_sq, step_sq / moments.weight_sq.subs(plain)
    taken = -decay
    return sp.factor(sp.cancel((1 - taken + taken**2 / relative_sq - share) / (2 * taken)).subs(sym.lam, 0))
