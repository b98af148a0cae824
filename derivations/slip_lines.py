"""The lines of `slips`: printed and corrected sides, as data. What is right comes from the rules, what is printed is typed."""

from types import SimpleNamespace

import sympy as sp

from derivations import balance, signs
from derivations.balance import D, G, W, omega
from derivations.expectation import E, g, t
from derivations.printed import FULL_NORM, RATE, kappa
from derivations.t01_table_1 import update_sq
from derivations.t12_no_decay import rotation_without_decay, time
from rwsim.optimizers import SGDM, AdamL2, AdamW, Lion
from rwsim.theory import paper
from rwsim.theory.moments import linear_response, lyapunov
from rwsim.theory.response import Kernel, gradient_kernel, lag
from rwsim.theory.symbols import C, alpha, beta1, beta2, eta, lam

_k = sp.Symbol("k", integer=True, nonnegative=True)
_s, _r = sp.symbols("sigma r", positive=True)
_u, _d, _U = sp.symbols("u d U", positive=True)
_momentum = (1 - beta1) / (1 + beta1)


def _average(rate, weight):
    """A momentum of past gradients, as a function of the step."""
    return Kernel(weight, weight * rate**lag).output


def _normal_abs(sigma):
    """E|u| of one normal coordinate of deviation sigma, unevaluated."""
    return 2 * sp.Integral(_r * sp.exp(-(_r**2) / (2 * sigma**2)) / sp.sqrt(2 * sp.pi * sigma**2), (_r, 0, sp.oo))


def _normal_sq(sigma):
    return 2 * sp.Integral(_r**2 * sp.exp(-(_r**2) / (2 * sigma**2)) / sp.sqrt(2 * sp.pi * sigma**2), (_r, 0, sp.oo))


def _length(power):
    """E||u||^power of two normal coordinates."""
    return sp.Integral(_r**power * _r / _s**2 * sp.exp(-(_r**2) / (2 * _s**2)), (_r, 0, sp.oo))


def main_text():
    radial = sp.Symbol("u_par", real=True)
    yield {
        "id": "3.1-mean-of-square", "where": "Eq. smd_pythagorean, second leg", "rules": (),
        "printed": (_length(2), _length(1) ** 2), "corrected": (_length(2), 2 * E(radial**2, (radial, _s**2))),
        "reason": "The square of E||u_perp|| is printed where E||u_perp||^2 is meant: they differ for a random length (two normal "
        "coordinates).",
    }  # fmt: skip
    yield {
        "id": "3.1-sign-of-radial", "where": "Eq. smd_pythagorean and figure, ||d - u_par||", "rules": (),
        "printed": (_s - (_u + _d) + _u, _s - sp.Abs(-(_u + _d) - _u)), "corrected": (_s - (_u + _d) + _u, _s - sp.Abs(-(_u + _d) + _u)),
        "reason": "As vectors d points inwards and u_par outwards, so what shortens the weight is ||d + u_par||; section 3.2 has it right.",
    }  # fmt: skip
    whole = E((omega - _d + radial) ** 2, (radial, _U / C), (omega, W)) + _U * (1 - 1 / C)
    kept = E((omega - _d) ** 2, (omega, W)) + _U * (1 - 1 / C)
    yield {
        "id": "3.1-mean-of-radial", "where": "Eq. smd_pythagorean, first leg", "rules": (), "origin": "new",
        "printed": (whole, kept), "corrected": (whole, kept + _U / C),
        "reason": "E inside the first square drops the variance of u_par, a part 1/C of E||u||^2; section 3.2 keeps it.",
        "changes": "norm^2 by a part 1/C, unless u is exactly orthogonal",
    }  # fmt: skip
    yield {
        "id": "3.2-square-of-u", "where": "Section 3.2, below the recurrence: E[u] = eta^2 C", "rules": ("adamw",),
        "printed": (_normal_abs(eta), eta**2), "corrected": (_normal_sq(eta), eta**2),
        "reason": "It is E[u^2] that equals eta^2 C (shown for C = 1, normal u).",
    }  # fmt: skip
    kernel = gradient_kernel(AdamW)
    n = sp.Symbol("n", integer=True, positive=True)
    yield {
        "id": "3.2-momentum-weights", "where": "Eq. rms_update1: beta_1^(t-k) on g_(t-k)", "rules": ("adamw",),
        "printed": (kernel.tail.subs(lag, n) / kernel.head, beta1 ** (2 * n - n + 1)),
        "corrected": (kernel.tail.subs(lag, n) / kernel.head, beta1**n),
        "reason": "The gradient of k steps ago has weight beta_1^k, falling with age; the printed weight grows with age (here t = 2n + "
        "1, k = n).",
    }  # fmt: skip
    yield {
        "id": "3.2-geometric-sum", "where": "Eqs. rms_update2 to rms_update3", "rules": ("adamw",),
        "printed": (eta**2 * (1 - beta1) ** 2 * sp.Sum(beta1 ** (2 * _k), (_k, 1, sp.oo)), eta**2 * _momentum),
        "corrected": (eta**2 * (1 - beta1) ** 2 * sp.Sum(beta1 ** (2 * _k), (_k, 0, sp.oo)), eta**2 * _momentum),
        "reason": "Exponents 2t - 2k with k up to t - 1 start at 2, and the sum would be beta_1^2 times the stated one.",
    }  # fmt: skip
    yield {
        "id": "3.2-sign-of-update", "where": "Above eq. rms_update1: Delta_g p = eta m / sqrt(v)", "rules": ("adamw",),
        "printed": (kernel.head, eta * (1 - beta1) / D), "corrected": (kernel.head, -eta * (1 - beta1) / D),
        "reason": "The update subtracts; only its square is used.",
    }  # fmt: skip
    yield {
        "id": "3.2-root", "where": "Below eq. rms_update3: eta_g = E[sqrt(||Delta_g p||^2)]", "rules": ("adamw",),
        "printed": (_normal_abs(_s), sp.sqrt(_normal_sq(_s))), "corrected": (sp.sqrt(_normal_sq(_s)), _s),
        "reason": "The root belongs outside the expectation: an RMS, not a mean length.",
    }  # fmt: skip
    radial_grad = sp.Symbol("lambda_g", positive=True)
    u, d = balance.contributions(SGDM)
    yield {
        "id": "3.4-lambda-u", "where": "Section 3.4: lambda_u = -E[u_par] / (eta ||omega||), for SGDM", "rules": ("sgdm",),
        "printed": (-u * radial_grad / eta, radial_grad), "corrected": (lam * u * radial_grad / d, radial_grad),
        "reason": "The contribution of a radial gradient lambda_g omega carries momentum's factor 1/(1 - alpha), and so does the "
        "decay's: it "
        "must be divided out, as appendix H does (T6).",
    }  # fmt: skip
    slope = sp.diff(sp.log(rotation_without_decay(AdamW)), time)
    yield {
        "id": "5.1-exponential", "where": "Section 5.1 and appendix J: rotation without decay falls exponentially", "rules": (),
        "printed": (slope.subs(time, 2 * time) / slope, sp.S.One), "corrected": (slope.subs(time, 2 * time) / slope, sp.S.Half),
        "relation": "~", "small": time, "towards": sp.oo,
        "reason": "An exponential has a constant logarithmic slope. The paper's recurrence at lambda = 0 gives t^(-1/2) (T12): the slope "
        "halves when the time doubles.",
        "changes": "the stated law of the rotation without decay",
    }  # fmt: skip
    rotation = paper.TABLE_1["adam_l2"].rotation
    yield {
        "id": "5.3-thousandfold",
        "where": "Section 5.3: 30 times in Adam+l2's rotation is 1000 times in the learning rate", "rules": ("adam_l2",),
        "origin": "new", "printed": (rotation.subs(eta, 1000 * eta) / rotation, sp.Integer(30)),
        "corrected": (rotation.subs(eta, sp.Integer(30) ** sp.Rational(3, 2) * eta) / rotation, sp.Integer(30)),
        "reason": "Table 1 gives Adam+l2's rotation as eta^(2/3): 30 times is 30^(3/2) = 164. About 1000 = 30^2 follows from the "
        "square root "
        "in the other columns.",
        "changes": "no (an illustration)",
    }  # fmt: skip
    p, h = sp.symbols("p h", positive=True)
    hyper = SimpleNamespace(lr=eta, weight_decay=0, momentum=0)
    new = SGDM.update(h * p, SimpleNamespace(param=p, momentum_buffer=0, step=1), hyper, None)["param"]
    yield {
        "id": "gradient-point", "where": "Section 3.2, appendices C, D, E: g_t is the gradient at p_t", "rules": (), "origin": "new",
        "printed": (new, p - eta * h * new), "corrected": (new, p - eta * h * p),
        "reason": "p_t is computed from g_t, so g_t is the gradient at p_(t-1); at p_t the update would be implicit (shown on a quadratic "
        "loss h p^2 / 2).",
    }  # fmt: skip
    for rule, name in ((AdamW, "3.2-second-order"), (SGDM, "C-second-order")):
        relative = sp.simplify(balance.in_small(rule, balance.exact_norm_sq(rule) / balance.leading_norm_sq(rule)))
        model = sp.simplify(balance.in_small(rule, FULL_NORM[rule.name] ** 2 / balance.leading_norm_sq(rule)))
        x = balance.x
        yield {
            "id": name, "where": "The term eta lambda^2 in the norm's denominator, used for a figure in appendix J", "rules": (rule.name,),
            "origin": "new", "relation": "~", "small": x,
            "printed": (relative - 1, sp.diff(model, x).subs(x, 0) * x), "corrected": (relative - 1, sp.diff(relative, x).subs(x, 0) * x),
            "reason": "It follows from the model, but with momentum the exact second moments have another term of that order"
            + (", of the other sign for beta_1 above sqrt(5) - 2." if rule is AdamW else "."),
            "changes": "the second order only",
        }  # fmt: skip


def appendix_c_d():
    m = _average(alpha, sp.S.One)
    size = E((eta * (alpha * m(g, t - 1) + g[t])) ** 2)
    yield {
        "id": "C-eta-squared", "where": "Eq. sgd_deltag_1", "rules": ("sgdm",),
        "printed": (size, eta**2 * alpha**2 * E(m(g, t - 1) ** 2) + E(g[t] ** 2)),
        "corrected": (size, eta**2 * alpha**2 * E(m(g, t - 1) ** 2) + eta**2 * E(g[t] ** 2)),
        "reason": "eta^2 multiplies both terms; the next line has it.",
    }  # fmt: skip
    response = linear_response(SGDM).settled()
    full = lyapunov(response.transition, response.drive)[1, 1]
    yield {
        "id": "C-decay-in-momentum", "where": "Eq. sgd_deltag_0: m holds lambda p", "rules": ("sgdm",),
        "printed": (alpha**2 * full + G, G * sp.Sum(alpha ** (2 * _k), (_k, 0, sp.oo))),
        "corrected": (alpha**2 * E(m(g, t - 1) ** 2) + G, G * sp.Sum(alpha ** (2 * _k), (_k, 0, sp.oo))),
        "reason": "With m as defined the left side holds the decay too; the sum is that of the gradients' part of m, which is what "
        "Delta_g stands for.",
    }  # fmt: skip
    average = _average(beta2, 1 - beta2)
    kept, now = E(average(g, t - 1) ** 2), (1 - beta2) * g[t - 1]
    yield {
        "id": "D-momentum-index",
        "where": "Appendix D, second line of E||n_t||^2: m_(t-1) within m_(t-1)", "rules": ("lion",), "origin": "new",
        "printed": (kept, E((beta2 * average(g, t - 1) + now) ** 2)), "corrected": (kept, E((beta2 * average(g, t - 2) + now) ** 2)),
        "reason": "m_(t-1) = beta_2 m_(t-2) + (1 - beta_2) g_(t-1); as printed m_(t-1) and g_(t-1) would be correlated.",
    }  # fmt: skip

    def argument(power):
        return beta1**2 * (1 - beta2) ** 2 * sp.Sum(beta2 ** (power * _k), (_k, 0, sp.oo)) * G + (1 - beta1) ** 2 * G

    yield {
        "id": "D-square-of-beta-2", "where": "Appendix D, third and fourth line of E||n_t||^2", "rules": ("lion",),
        "printed": (balance.argument_sq(Lion), argument(1)), "corrected": (balance.argument_sq(Lion), argument(2)),
        "reason": "The weights are squared: beta_2^(2k). The last line has the sum of squares.",
    }  # fmt: skip
    u, _ = balance.contributions(Lion)
    u_sq = balance.eliminate(Lion, u**2 * G)
    yield {
        "id": "D-eta-squared", "where": "Appendix D, both lines of E||u||^2", "rules": ("lion",),
        "printed": (u_sq, 2 * eta * C / (sp.pi * kappa)), "corrected": (u_sq, 2 * eta**2 * C / (sp.pi * kappa)),
        "reason": "u is proportional to eta.",
    }  # fmt: skip
    norm_sq = FULL_NORM["lion"] ** 2
    yield {
        "id": "D-balance", "where": "Appendix D, third line of the norm balance", "rules": ("lion",),
        "printed": ((1 - 2 * eta * lam + eta**2 * lam**2) * norm_sq + 2 * eta * C / (sp.pi * kappa), norm_sq),
        "corrected": ((1 - 2 * eta * lam + eta**2 * lam**2) * norm_sq + 2 * eta**2 * C / (sp.pi * kappa), norm_sq),
        "reason": "The same eta; the norm printed next solves the balance with eta^2.",
    }  # fmt: skip
    without = signs.excess(Lion).subs(beta1, 0).subs(signs.ARCS, 0)
    yield {
        "id": "D-orthogonal-part", "where": "Appendix D: the part of the sign orthogonal to n cancels out on average", "rules": ("lion",),
        "origin": "new", "printed": (without, sp.S.One), "corrected": (without, sp.pi / 2),
        "reason": "Its square adds to the norm^2 and does not vanish as eta lambda -> 0 (arcsine law, T2). Without momentum it is all that "
        "the linear part lacks.",
        "changes": "norm^2 of Lion: times 1.006 at betas (0.9, 0.999), pi/2 at beta_1 = 0",
    }  # fmt: skip


def appendix_e_to_l():
    phi = sp.atan(sp.Symbol("z", positive=True))
    size = sp.Symbol("w", positive=True)
    yield {
        "id": "E-tangent", "where": "Appendix E, assumption 4: E||u|| = ||omega|| tan(phi)", "rules": ("adam_l2",), "origin": "new",
        "printed": ((size * sp.cos(phi)) ** 2 + (size * sp.tan(phi)) ** 2, size**2),
        "corrected": ((size * sp.cos(phi)) ** 2 + (size * sp.sin(phi)) ** 2, size**2),
        "reason": "In the triangle, with ||d|| = ||omega|| (1 - cos phi), u is the leg ||omega|| sin(phi); to first order in phi they "
        "agree.",
    }  # fmt: skip
    _, d = balance.contributions(AdamL2)
    yield {
        "id": "E-sign-of-d", "where": "Appendix E, first line of the coordinate balance: omega_k - d_k", "rules": ("adam_l2",),
        "printed": ((omega - d * omega) ** 2, (1 - eta * lam / D) ** 2 * omega**2),
        "corrected": ((omega + d * omega) ** 2, (1 - eta * lam / D) ** 2 * omega**2),
        "reason": "d_k is an element of the vector d, which is negative: the next line follows from omega_k + d_k.",
    }  # fmt: skip
    squares = eta**2 * (1 - beta1) ** 2 * sp.Sum(beta1 ** (2 * _k), (_k, 0, sp.oo))
    derived = update_sq(AdamL2).doit().subs(G, D**2)
    yield {
        "id": "E-root-of-v", "where": "Appendix E, update size: ||g_k / v||", "rules": ("adam_l2",),
        "printed": (derived, squares * D**2 / D**4), "corrected": (derived, squares * D**2 / D**2),
        "reason": "The gradient is divided by sqrt(v); only then does E g^2 = v leave C.",
    }  # fmt: skip
    l1 = sp.Symbol("S", positive=True)  # <1, sqrt(E g^2)>, without scale invariance
    per_root_v = balance.full_norm_sq(AdamL2) / D
    norm_sq = per_root_v * l1
    rotation = sp.sqrt(C * update_sq(AdamL2).doit().subs(G, D**2) / norm_sq)
    yield {
        "id": "E-norm-without-scale-invariance",
        "where": "Appendix E: a square root instead of a cube root, in the norm", "rules": ("adam_l2",),
        "printed": (sp.sqrt(norm_sq), sp.sqrt(eta / (2 * lam) * l1)), "corrected": None,
        "reason": "Suspected with the sentence on the rotation; for the norm the replacement is right.",
    }  # fmt: skip
    yield {
        "id": "E-rotation-without-scale-invariance",
        "where": "Appendix E: the rotation's cube root would be a square root", "rules": ("adam_l2",),
        "printed": (rotation, sp.sqrt(2 * eta**2 * lam / l1) * sp.sqrt(_momentum * C)),
        "corrected": (rotation, sp.sqrt(2 * eta * lam / l1) * sp.sqrt(_momentum * C)),
        "reason": "Under the square root eta^2 becomes eta.",
    }  # fmt: skip
    yield {
        "id": "G-C-err", "where": "Appendix G: E||g/sqrt(v)|| = C C_err", "rules": ("adamw",),
        "printed": (sp.sqrt(sp.sqrt(C) / C), sp.S.One), "corrected": (sp.sqrt(C / C), sp.S.One),
        "reason": "Without error the length is sqrt(C), which the printed definition takes for C_err = 1/sqrt(C); with the square it "
        "is 1, and "
        "the printed effect sqrt(C_err) on the norm is right (T7).",
    }  # fmt: skip
    yield {
        "id": "G-length-of-g", "where": "Appendix G: the assumption E||g/sqrt(v)|| = sqrt(C)", "rules": ("adamw",), "origin": "new",
        "printed": (_normal_abs(1), sp.S.One), "corrected": (_normal_sq(1), sp.S.One),
        "reason": "Section 3.2 assumes E||g/sqrt(v)||^2 = C. The mean length is smaller (shown for C = 1).",
    }  # fmt: skip
    m = _average(beta1, 1 - beta1)
    inner = E(g[t] * m(g, t - 1))
    yield {
        "id": "G-angle", "where": "Appendix G, caption: the angle of g_t and m_(t-1) is nearly zero", "rules": ("adamw",),
        "printed": (sp.acos(inner.doit()), sp.S.Zero), "corrected": (sp.acos(inner.doit()), sp.pi / 2),
        "reason": "Orthogonality is meant, and plotted: the cosine is near zero, the angle is near pi/2.",
    }  # fmt: skip

    def tracked(beta):
        return (beta * (1 - RATE) * W + (1 - beta) * _U, (1 - RATE) * (RATE * W + _U))

    yield {
        "id": "I-decay-of-tracker", "where": "Appendix I: beta should be about sqrt(a)", "rules": (),
        "printed": tracked(sp.sqrt(RATE)), "corrected": tracked(RATE),
        "reason": "nu tracks the squared update, as ||omega||^2 accumulates it at rate a: with beta = a the tracker is (1 - a) "
        "||omega||^2 at "
        "every step. The root belongs to the norm.",
        "changes": "no (the default 0.9 is another value)",
    }  # fmt: skip
