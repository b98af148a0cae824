"""The paper's printed claims (Table 1), and nothing else: these are what is being tested, so they are typed as printed.

Symbols: eta, lambda, alpha, beta_1, beta_2, C; `grad_norm_sq` is E||g||^2, `unit_grad_norm_sq` is E||g~||^2 and
`unit_grad_l1` is <1, sqrt(E g~^2)>, with g~ = ||omega|| g.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy as sp

from rwsim.theory.symbols import C, alpha, beta1, beta2, eta, lam

grad_norm_sq = sp.Symbol("E_g2", positive=True)
unit_grad_norm_sq = sp.Symbol("E_gt2", positive=True)
unit_grad_l1 = sp.Symbol("E_gt1", positive=True)


# What the columns take of the gradient.
GRADIENT = (grad_norm_sq, unit_grad_norm_sq, unit_grad_l1)


@dataclass(frozen=True)
class Column:
    """One column of Table 1: eta_g, eta_r (radians per step) and the equilibrium norm."""

    rms_update: sp.Expr
    rotation: sp.Expr
    norm: sp.Expr


_momentum = (1 - beta1) / (1 + beta1)
_kappa = (1 - beta1) ** 2 + beta1**2 * (1 - beta2) / (1 + beta2)

TABLE_1: Mapping[str, Column] = MappingProxyType(
    {
        "sgdm": Column(
            rms_update=eta * sp.sqrt(grad_norm_sq / (1 - alpha**2)),
            rotation=sp.sqrt(2 * eta * lam / (1 + alpha)),
            norm=sp.root(eta * unit_grad_norm_sq / (2 * lam * (1 - alpha)), 4),
        ),
        "adamw": Column(
            rms_update=eta * sp.sqrt(C * _momentum),
            rotation=sp.sqrt(2 * eta * lam * _momentum),
            norm=sp.sqrt(eta * C / (2 * lam)),
        ),
        "adam_l2": Column(
            rms_update=eta * sp.sqrt(C * _momentum),
            rotation=sp.root(2 * eta**2 * lam / unit_grad_l1, 3) * sp.sqrt(_momentum * C),
            norm=sp.root(eta / (2 * lam) * unit_grad_l1, 3),
        ),
        "lion": Column(
            rms_update=eta * sp.sqrt(C),
            rotation=sp.sqrt(sp.pi * eta * lam) * sp.sqrt(_kappa),
            norm=sp.sqrt(eta * C / (sp.pi * lam)) / sp.sqrt(_kappa),
        ),
    }
)
