"""What the paper prints beside Table 1 (`rwsim.theory.paper`), typed as printed: claims under test, nothing else.

Coordinate-wise symbols: G = E g^2, D = sqrt(v) of the normalizer, g~ = ||omega|| g.
"""

import sympy as sp

from rwsim.theory.paper import grad_norm_sq, unit_grad_l1, unit_grad_norm_sq
from rwsim.theory.response import lag
from rwsim.theory.symbols import C, alpha, beta1, beta2, epsilon, eta, grad_sq, lam, normalizer, t

p, m, v, gradient = (sp.Symbol(name, real=True) for name in ("p", "m", "v", "g"))
D = normalizer
weight_sq = sp.Symbol("W", positive=True)
kappa = (1 - beta1) ** 2 + beta1**2 * (1 - beta2) / (1 + beta2)


def _adam(gradient: sp.Expr) -> dict[str, sp.Expr]:
    m_new = beta1 * m + (1 - beta1) * gradient
    v_new = beta2 * v + (1 - beta2) * gradient**2
    return {"m": m_new, "v": v_new, "direction": m_new / (1 - beta1**t) / (sp.sqrt(v_new / (1 - beta2**t)) + epsilon)}


_m_sgdm = alpha * m + gradient + lam * p
_adamw, _adam_l2 = _adam(gradient), _adam(gradient + lam * p)

# Eqs sgdm_update, adamw_update, adam_update, lion_update: the new p, m (and v).
UPDATES = {
    "sgdm": {"p": p - eta * _m_sgdm, "m": _m_sgdm},
    "adamw": {"p": p - eta * (_adamw["direction"] + lam * p), "m": _adamw["m"], "v": _adamw["v"]},
    "adam_l2": {"p": p - eta * _adam_l2["direction"], "m": _adam_l2["m"], "v": _adam_l2["v"]},
    "lion": {
        "p": p - eta * (sp.sign(beta1 * m + (1 - beta1) * gradient) + lam * p),
        "m": beta2 * m + (1 - beta2) * gradient,
    },
}

# Total update contributions u and d per unit of gradient and of weight (eqs sgd_u, sgd_d; section 3.2; appendices D, E).
# Lion's is the linear part; its square is printed with a slip (see `slips`), so only d is listed.
U = {"sgdm": -eta / (1 - alpha), "adamw": -eta / D, "adam_l2": -eta / D}
DECAY = {"sgdm": -eta * lam / (1 - alpha), "adamw": -eta * lam, "adam_l2": -eta * lam / D, "lion": -eta * lam}

# Appendix D: E n_t^2 of the sign's argument, and ||u||^2 as it follows (printed with a slip).
ARGUMENT_SQ = {"lion": kappa * grad_sq}
SIGN_U_SQ = {"lion": 2 * eta**2 * C / (sp.pi * kappa)}

# The second-moment average that E g^2 / v refers to (section 3.2, appendix E).
V = {"adamw": grad_sq, "adam_l2": grad_sq + lam**2 * weight_sq}

# The norm before the last approximation (appendix C, eq. adamw_equilibrium_norm, appendix D).
FULL_NORM = {
    "sgdm": sp.root(eta * unit_grad_norm_sq / (2 * lam * (1 - alpha) - eta * lam**2), 4),
    "adamw": sp.sqrt(eta * C / (2 * lam - eta * lam**2)),
    "lion": sp.sqrt(2 * eta * C / (sp.pi * (2 * lam - eta * lam**2))) / sp.sqrt(kappa),
}

# Eq. adamw_norm_convergence.
start_sq, index = sp.Symbol("W_0", positive=True), sp.Symbol("i", integer=True, nonnegative=True)
RATE = 1 - 2 * eta * lam + eta**2 * lam**2
TRANSIENT = start_sq * RATE**index + eta**2 * C / (2 * eta * lam - eta**2 * lam**2) * (1 - RATE**index)

TRANSIENT_OF = ("adamw",)

# Table 6: tau_g and tau_r.
DIFFUSION = {
    "sgdm": (eta / (1 - alpha) * sp.sqrt(grad_norm_sq), sp.sqrt(2 * eta * lam / (1 - alpha))),
    "adamw": (eta * sp.sqrt(C), sp.sqrt(2 * eta * lam)),
}

# THEORY of this project, beyond the paper; claims too.
BEYOND_DIFFUSION = {
    "adam_l2": (eta * sp.sqrt(C), sp.root(2 * eta**2 * lam / unit_grad_l1, 3) * sp.sqrt(C)),
    "lion": (sp.sqrt(2 * eta**2 * C / (sp.pi * kappa)), None),
}
CORRELATION = {
    "lion": ((1 - beta1) * beta1 * (1 - beta2) * beta2 ** (lag - 1) + beta1**2 * (1 - beta2) / (1 + beta2) * beta2**lag) / kappa,
}
# Norm^2 over the paper's as eta lambda -> 0, by betas, to the decimals given.
STATED_EXCESS = {"lion": {(0.9, 0.999): "1.006", (0.9, 0.99): "1.015", (0.95, 0.98): "1.06"}}
