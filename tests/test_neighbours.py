"""Every rule in the ideal walk at strong settings, against its exact form; and the neighbours beside what people use."""

import math
from itertools import pairwise

import numpy as np
import pytest
import sympy as sp
import torch

from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, AdamW, UpdateRule, find_rule
from rwsim.optimizers.adamc import AdamC
from rwsim.optimizers.adamw_independent import AdamWIndependent
from rwsim.optimizers.ademamix import AdEMAMix
from rwsim.optimizers.dampened import Dampened
from rwsim.optimizers.nesterov import Nesterov
from rwsim.optimizers.qhm import QHM
from rwsim.optimizers.sgd import SGD
from rwsim.optimizers.sgdm import SGDM
from rwsim.optimizers.sgdw import SGDW
from rwsim.stats.mcse import estimate
from rwsim.theory import rates
from rwsim.theory.arcsine import evaluate
from rwsim.theory.equilibrium import predict_equilibrium
from rwsim.theory.moments import linear_response, stationary_moments
from rwsim.theory.noise import IdealWalk
from rwsim.theory.symbols import alpha, beta1, epsilon, eta, lam
from rwsim.walk.job import Job
from rwsim.walk.reference import walk
from rwsim.walk.system import Layer
from tests.test_optimizers import trajectory

# eta lambda up to 0.05, momentum up to 0.99: (lr, weight_decay, momentum).
STRONG = ((0.5, 0.1, 0.9), (0.2, 0.2, 0.5), (0.5, 0.1, 0.99))


def strong(rule: type[UpdateRule], lr: float, weight_decay: float, momentum: float) -> UpdateRule:
    """The rule at a strong setting: every momentum it has is set; eta lambda is what its own decay makes of it."""
    hyper: dict = {"lr": lr, "weight_decay": weight_decay}
    if "momentum" in rule.hyper:
        hyper["momentum"] = momentum
    if "betas" in rule.hyper:
        hyper["betas"] = (momentum, 0.95, 0.98)[: len(rule.hyper["betas"])]
    if "max_lr" in rule.hyper:
        hyper["max_lr"] = 1.25 * lr
    return rule(**hyper)


def ideal(rule: UpdateRule, steps: int, seed: int = 0, weight_decay: bool = True):
    """A float64 walk of 32,768 free coordinates, second moments normalized by their exact value."""
    layer = Layer.draw(512, 64, gamma="uniform")
    normalizer = predict_equilibrium(rule, IdealWalk(512)).normalizer if weight_decay else None
    if not weight_decay and linear_response(type(rule)).square is not None:
        normalizer = np.ones((1, 1))
    root = None if normalizer is None else torch.from_numpy(np.asarray(normalizer))
    job = Job((rule,), layer, steps, "gaussian", seed=seed, dtype=torch.float64, window=20)
    return walk(job, torch.device("cpu"), normalizer=root)


def often(names):
    """The rules by name; those that in these tests do much as adamw, sgdm or lion does only in slow runs."""
    slow = {"ademamix", "nadamw", "adamc", "adamw_independent", "dampened", "qhm", "sgd", "sgdw", "nesterov", "adam_l2", "signum"}
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.parametrize(
    "setting", [STRONG[0], *(pytest.param(s, marks=pytest.mark.slow) for s in STRONG[1:])], ids=lambda s: f"lr{s[0]:g}-wd{s[1]:g}-m{s[2]:g}"
)
@pytest.mark.parametrize("name", often(RULES))
def test_ideal_walk_meets_the_exact_form(name, setting):
    """E||w||^2, 1 - E<w,w'>/E||w||^2 and the RMS update within 4 MCSE, each MCSE under 0.1 %."""
    rule = strong(RULES[name], *setting)
    exact = predict_equilibrium(rule, IdealWalk(512)).exact
    # Long enough to forget the start eleven times over in E||w||^2, and as long again as MCSE 0.1 % asks.
    response = linear_response(type(rule)).settled()
    symbols = dict(zip(rates.sym.flat(rates.sym.hyper_symbols(type(rule))), rates.sym.flat(rule.values), strict=True))
    root = predict_equilibrium(rule, IdealWalk(512)).normalizer
    symbols[rates.sym.normalizer] = 1.0 if root is None else float(root.mean())
    slowest = max(abs(complex(e)) for e in np.linalg.eigvals(np.array(response.transition.subs(symbols).evalf(), dtype=float)))
    burn_in = math.ceil(11 / (-2 * math.log(slowest)))
    walk = ideal(rule, burn_in + max(1500, 30 * burn_in)).kept(burn_in)
    norm, distance, update = (estimate(series[:, 0]) for series in (walk.norm_sq, walk.distance_sq, walk.update_sq))
    measured = {
        "norm^2": (norm.mean, norm.mcse, exact.norm_sq[0]),
        # E||w' - w||^2 = 2 (E||w||^2 - E<w,w'>): the numerator's own error; that of the norm is far smaller than its weight.
        "E||w'-w||^2": (distance.mean, distance.mcse, (2 * math.sin(exact.angle[0] / 2)) ** 2 * exact.norm_sq[0]),
        "update^2": (update.mean, update.mcse, exact.update_sq[0]),
    }
    for what, (mean, mcse, predicted) in measured.items():
        assert mcse < 1e-3 * predicted, f"{what}: MCSE {mcse / predicted:.2%}"
        assert abs(mean - predicted) <= 4 * mcse + 1e-9 * predicted, f"{what}: {mean / predicted - 1:+.3%}, MCSE {mcse / predicted:.3%}"


@pytest.mark.parametrize("name", often(n for n in RULES if linear_response(RULES[n]).direction != "sign"))
def test_a_parameter_without_decay_has_the_same_update_size(name):
    """eta_g of a bias: the RMS update does not know the decay."""
    rule = strong(RULES[name], *STRONG[0])
    bare = type(rule)(**{**vars(rule.values), "weight_decay": 0.0})
    walk = ideal(bare, 3000, weight_decay=False).kept(400)
    update = estimate(walk.update_sq[:, 0])
    predicted = stationary_update_sq(bare)
    assert update.mcse < 1e-3 * predicted and abs(update.mean - predicted) <= 4 * update.mcse


def stationary_update_sq(rule: UpdateRule) -> float:
    form = stationary_moments(type(rule)).update_sq.subs({rates.sym.grad_sq: 1, rates.sym.normalizer: 1})
    values = dict(zip(rates.sym.flat(rates.sym.hyper_symbols(type(rule))), rates.sym.flat(rule.values), strict=True))
    return 512 * float(form.subs(values))


PEERS = [
    (SGD, {"lr": 0.1, "weight_decay": 0.05}, torch.optim.SGD, {}),
    (Nesterov, {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.9}, torch.optim.SGD, {"nesterov": True}),
    (QHM, {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.5, "nu": 0.0}, torch.optim.SGD, {"momentum": 0.0, "nu": None}),
]


@pytest.mark.parametrize(("rule", "hyper", "peer", "options"), PEERS)
def test_neighbours_equal_torch(rule, hyper, peer, options):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(100)]
    param = torch.nn.Parameter(start.clone())
    optimizer = peer([param], **{k: v for k, v in {**hyper, **options}.items() if v is not None})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    assert (trajectory(rule(**hyper), start, grads) - param).abs().max() <= 1e-12 * (1 + param.abs().max())


def test_neighbours_reduce_to_what_they_are_made_of():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(60)]
    same = [
        (AdamC(lr=0.1, weight_decay=0.3, max_lr=0.1), AdamW(lr=0.1, weight_decay=0.3)),
        (AdamC(lr=0.1, weight_decay=0.3, max_lr=0.2), AdamW(lr=0.1, weight_decay=0.15)),
        (AdamWIndependent(lr=0.1, weight_decay=0.03), AdamW(lr=0.1, weight_decay=0.3)),
        (AdEMAMix(lr=0.1, weight_decay=0.3, mix=0.0), AdamW(lr=0.1, weight_decay=0.3)),
        (Dampened(lr=1.0, weight_decay=0.03, momentum=0.9, dampening=0.9), QHM(lr=1.0, weight_decay=0.03, momentum=0.9, nu=1.0)),
        (SGDM(lr=0.1, weight_decay=0.3, momentum=0.9), Dampened(lr=0.1, weight_decay=0.3, momentum=0.9, dampening=0.0)),
        (SGDW(lr=0.1, weight_decay=0.0, momentum=0.9), SGDM(lr=0.1, weight_decay=0.0, momentum=0.9)),
        (SGDW(lr=0.1, weight_decay=0.3, momentum=0.0), SGD(lr=0.1, weight_decay=0.3)),
    ]
    for one, other in same:
        assert torch.allclose(trajectory(one, start, grads), trajectory(other, start, grads), rtol=1e-12, atol=1e-13), (one, other)


def test_dampening_is_torchs_after_its_first_step():
    """torch's first step moves by lr g, not lr (1 - tau) g: with that step's gradient scaled up, all others agree."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, generator=generator, dtype=torch.float64)
    grads = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(30)]
    param = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, dampening=0.9)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    ours = trajectory(Dampened(lr=0.1, weight_decay=0.0, momentum=0.9, dampening=0.9), start, [grads[0] / 0.1, *grads[1:]])
    assert (ours - param).abs().max() <= 1e-12


def test_known_neighbour_results():
    """THEORY.md section 2: Nesterov keeps the norm and turns sqrt(1 + 2 a (1 - a^2)) faster; SGDW's norm and rotation."""
    small = {"lr": 1e-4, "weight_decay": 1e-2, "momentum": 0.9}
    sgdm, nesterov, sgdw = (predict_equilibrium(rule(**small), IdealWalk(8)).exact for rule in (SGDM, Nesterov, SGDW))
    assert nesterov.norm == pytest.approx(sgdm.norm, rel=1e-4)
    assert nesterov.rotation / sgdm.rotation == pytest.approx(math.sqrt(1 + 2 * 0.9 * (1 - 0.81)), rel=1e-4)
    assert sgdw.norm**2 == pytest.approx(8 * 1e-4 / (2 * 1e-2 * 0.1**2), rel=1e-4)
    assert sgdw.rotation == pytest.approx(math.sqrt(2 * 1e-6 * 0.1 / 1.9), rel=1e-4)


def test_total_response_and_diffusion_of_table_6():
    assert sp.simplify(rates.diffusion_sq(SGDM) - eta**2 * rates.sym.grad_sq / (1 - alpha) ** 2) == 0
    ideal_adamw = rates.diffusion_sq(AdamW).subs({epsilon: 0, rates.sym.normalizer: sp.sqrt(rates.sym.grad_sq)})
    assert sp.simplify(ideal_adamw - eta**2) == 0
    for name in ("lion", "signum"):
        # tau_g^2 = 2 eta^2 / (pi kappa) of the linear part: with D^2 = (pi/2) kappa G.
        response = rates.total_response(RULES[name])
        assert sp.simplify(response + eta / rates.sym.normalizer) == 0


@pytest.mark.parametrize("name", often(n for n in RULES if linear_response(RULES[n]).direction != "sign"))
def test_diffusion_is_the_variance_growth_of_a_walk_without_decay(name):
    """Simulated: the displacement over T steps without decay has variance tau_g^2 T (steady momentum, so a correction 1/T)."""
    rule = type(strong(RULES[name], *STRONG[1]))(**{**vars(strong(RULES[name], *STRONG[1]).values), "weight_decay": 0.0})
    symbols = dict(zip(rates.sym.flat(rates.sym.hyper_symbols(type(rule))), rates.sym.flat(rule.values), strict=True))
    tau_sq = float(rates.diffusion_sq(type(rule)).subs(symbols).subs({rates.sym.grad_sq: 1, rates.sym.normalizer: 1}))
    walk = ideal(rule, 2400, weight_decay=False)
    at = np.cumsum(walk.lengths)
    late = walk.norm_sq[:, 0].mean(-1)
    slope = (late[at == 2400][0] - late[at == 1200][0]) / 1200 / 512
    # Norm^2 of 32,768 coordinates: relative deviation of the slope about sqrt(2/32768) x 2.
    assert slope == pytest.approx(tau_sq, rel=6 * 2 * math.sqrt(2 / 32_768))


def test_relaxation_rates():
    assert sp.simplify(rates.relaxation_rate(SGDM) - 2 * eta * lam / (1 - alpha)) == 0
    assert rates.relaxation_rate(AdamW) == 2 * eta * lam
    assert sp.simplify(rates.relaxation_rate(RULES["adam_l2"]) - 2 * eta * lam / (rates.sym.normalizer + epsilon)) == 0
    for name in RULES:  # each is the slowest eigenvalue's, numerically
        rule = strong(RULES[name], 1e-3, 1e-3, 0.5)
        symbols = dict(zip(rates.sym.flat(rates.sym.hyper_symbols(type(rule))), rates.sym.flat(rule.values), strict=True))
        symbols[rates.sym.normalizer] = 1.0
        transition = np.array(linear_response(type(rule)).settled().transition.subs(symbols).evalf(), dtype=float)
        slowest = max(abs(np.linalg.eigvals(transition)))
        assert float(rates.relaxation_rate(type(rule)).subs(symbols)) == pytest.approx(-2 * math.log(slowest), rel=5e-3)


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2", "nesterov"])
def test_series_converges_to_the_form(name):
    moments = stationary_moments(RULES[name])
    values = {eta: sp.Rational(1, 10), lam: sp.Rational(1, 20), alpha: sp.Rational(1, 2), beta1: sp.Rational(1, 2), epsilon: 0}
    values |= {rates.sym.grad_sq: 1, rates.sym.normalizer: 1}
    for form in (moments.weight_sq, 2 * (1 - moments.lag_one / moments.weight_sq)):
        truth = form.subs(values)
        errors = [abs(float(rates.series(form, order).subs(rates.small, eta * lam).subs(values) / truth) - 1) for order in range(4)]
        assert errors[0] < 0.01 and all(later <= earlier / 5 or later < 1e-15 for earlier, later in pairwise(errors))


@pytest.mark.parametrize("name", ["lion", "signum"])
def test_arcsine_sums_have_a_stated_bound(name):
    """30 digits against 50, within the bound; and against the floating-point sum that predictions use."""
    rule = strong(RULES[name], 0.01, 1.0, 0.9)
    value, lag_one, bound = evaluate(rule, 30)
    finer, _, _ = evaluate(rule, 50)
    assert 0 < bound < 1e-28 and abs(value / finer - 1) <= bound
    exact = predict_equilibrium(rule, IdealWalk(1)).exact
    assert float(value) == pytest.approx(exact.norm_sq[0], rel=1e-10)
    assert 2 * math.asin(math.sqrt(float(1 - lag_one / value) / 2)) == pytest.approx(exact.angle[0], rel=1e-10)


def test_transient_of_any_rule_from_any_start():
    omega = sp.Symbol("omega_0")
    assert (
        sp.simplify(
            rates.weight_sq_after(SGD, 2) - ((1 - eta * lam) ** 4 * omega**2 + eta**2 * rates.sym.grad_sq * (1 + (1 - eta * lam) ** 2))
        )
        == 0
    )
    values = {eta: 0.1, lam: 0.5, alpha: 0.5, rates.sym.grad_sq: 1.0, omega: 3.0}
    from rwsim.theory.transient import approach

    rule = SGDM(lr=0.1, weight_decay=0.5, momentum=0.5)
    limit = predict_equilibrium(rule, IdealWalk(2)).linear_norm_sq
    series = limit * (1 + approach(rule, IdealWalk(2), 9.0, 6).deviation) / 2
    assert [float(rates.weight_sq_after(SGDM, i).subs(values)) for i in range(1, 7)] == pytest.approx(series.tolist(), rel=1e-9)


def test_a_users_rule_is_found_in_its_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from rwsim.optimizers import UpdateRule\n"
        "class Mine(UpdateRule):\n"
        "    name = 'mine'\n    hyper = {'lr': ..., 'weight_decay': ..., 'momentum': 0.5}\n    state = ('buffer',)\n"
        "    @staticmethod\n    def update(grad, state, hyper, xp):\n"
        "        buffer = hyper.momentum * state.buffer + grad\n"
        "        return {'param': state.param - hyper.lr * (buffer + hyper.weight_decay * state.param), 'buffer': buffer}\n"
    )
    for label in ("Mine", "mine"):
        rule = find_rule(f"{path}:{label}")
        assert rule.name == "mine" and linear_response(rule).decoupled
    mine, sgdw = (predict_equilibrium(r(lr=0.1, weight_decay=0.1, momentum=0.5), IdealWalk(4)).exact for r in (rule, SGDW))
    assert mine.norm == pytest.approx(sgdw.norm, rel=1e-12)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for label, message in (
        (f"{path}:Other", "defines: Mine"),
        (f"{tmp_path}/absent.py:Mine", "not there"),
        (f"{tmp_path}/broken.py:Mine", "fails with ZeroDivisionError"),
        ("adam", "must be one of sgdm.*or FILE.py:RULE"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            find_rule(label)
