"""Faults of real optimizers, rebuilt small: each is caught, and the diagnosis names it."""

import math

import pytest
import torch
from lion_pytorch import Lion as LionPytorch

import rwsim
from rwsim.audit.finding import NOTE
from tests.faulty import Lion, Plain, Sgd, optimizer_of

SCENES = ["P1", "P2", "P3", "P4", "P5"]


def lr_wd(group):
    return group["lr"] * group["weight_decay"]


class DecayBeforeTheSign(Lion):  # bitsandbytes 1992
    def update(self, p, g, s, group):
        p.sub_(group["lr"] * self.direction(g + group["weight_decay"] * p, s, group))


class DecayAfter(Plain):  # bitsandbytes 2010
    def update(self, p, g, s, group):
        p.sub_(group["lr"] * self.direction(g, s, group))
        p.mul_(1 - lr_wd(group))


class Adam(Plain):  # bitsandbytes 0.50.2: AdamW under the name of Adam
    pass


class DecoupledSgd(Sgd):  # heavyball 3.2.1
    def update(self, p, g, s, group):
        p.mul_(1 - lr_wd(group))
        p.sub_(group["lr"] * self.summed(g, s, group))


class ScalarDecay(Sgd):  # torch-optimizer 0.3.0
    def update(self, p, g, s, group):
        p.sub_(group["lr"] * self.summed(g, s, group))
        p.sub_(lr_wd(group))


class InertDecay(Plain):
    def update(self, p, g, s, group):
        p.sub_(group["lr"] * self.direction(g, s, group))


class InertSign(Sgd):  # pytorch_optimizer 3.10.1
    def update(self, p, g, s, group):
        alpha = group["momentum"]
        s["momentum_buffer"].mul_(alpha).add_(g, alpha=1 - alpha)
        p.sub_(group["lr"] * s["momentum_buffer"].sign())


class DecayWithoutLr(Plain):  # Optimisers.jl 182
    def update(self, p, g, s, group):
        p.mul_(1 - group["weight_decay"])
        p.sub_(group["lr"] * self.direction(g, s, group))


class DecayOverTheFirstLr(Lion):  # lion-pytorch 39
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr, betas, weight_decay)
        self.first = lr

    def update(self, p, g, s, group):
        p.mul_(1 - lr_wd(group) / self.first)
        p.sub_(group["lr"] * self.direction(g, s, group))


class DecayOfTheFirstLr(Plain):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.first = lr

    def update(self, p, g, s, group):
        p.mul_(1 - self.first * group["weight_decay"])
        p.sub_(group["lr"] * self.direction(g, s, group))


class ResetBuffer(Sgd):  # pytorch_optimizer 516
    def update(self, p, g, s, group):
        s["momentum_buffer"] = torch.zeros_like(p)
        super().update(p, g, s, group)


class ResetAverage(Plain):
    def direction(self, g, s, group):
        s["exp_avg"] = torch.zeros_like(g)
        return super().direction(g, s, group)


class Uncorrected(Plain):
    def direction(self, g, s, group):
        m, v, _, _ = self.moments(g, s, group)
        return m / (v.sqrt() + group["eps"])


class MomentumFirst(Lion):
    def direction(self, g, s, group):
        b1, b2 = group["betas"]
        s["exp_avg"].mul_(b2).add_(g, alpha=1 - b2)
        return torch.sign(b1 * s["exp_avg"] + (1 - b1) * g)


class SwappedLion(Lion):  # Optimisers.jl 129
    def direction(self, g, s, group):
        return super().direction(g, s, {"betas": group["betas"][::-1]})


class SwappedAdam(Plain):
    def direction(self, g, s, group):
        return super().direction(g, s, {**group, "betas": group["betas"][::-1]})


class EpsUnderTheRoot(Plain):
    def direction(self, g, s, group):
        m, v, one, two = self.moments(g, s, group)
        return m / one / (v / two + group["eps"]).sqrt()


class EpsHat(Plain):  # TensorFlow
    def direction(self, g, s, group):
        m, v, one, two = self.moments(g, s, group)
        return m * math.sqrt(two) / one / (v.sqrt() + group["eps"])


class HoldsLr(Sgd):  # Adafactor
    def update(self, p, g, s, group):
        p.sub_(self.summed(group["lr"] * (g + group["weight_decay"] * p), s, group))


class OverwrittenNesterov(Sgd):  # Shampoo
    def update(self, p, g, s, group):
        g = g + group["weight_decay"] * p
        p.sub_(group["lr"] * self.summed(g, s, group).mul_(group["momentum"]).add_(g))


class DecayTwice(Plain):
    def update(self, p, g, s, group):
        p.mul_(1 - 2 * lr_wd(group))
        p.sub_(group["lr"] * self.direction(g, s, group))


class DecayTwiceOver(Plain):
    def update(self, p, g, s, group):
        p.mul_(1 - lr_wd(group))
        super().update(p, g, s, group)


class DecayTen(Plain):
    def update(self, p, g, s, group):
        p.mul_(1 - 10 * lr_wd(group))
        p.sub_(group["lr"] * self.direction(g, s, group))


class CautiousMask(Plain):
    def update(self, p, g, s, group):
        d = self.direction(g, s, group)
        mask = (d * g > 0).to(d.dtype)
        p.mul_(1 - lr_wd(group))
        p.sub_(group["lr"] * d * mask / mask.mean().clamp(min=1e-3))


class CautiousDecay(Plain):
    def update(self, p, g, s, group):
        d = self.direction(g, s, group)
        p.sub_(lr_wd(group) * p * (d * p > 0) + group["lr"] * d)


class CoupledAdamW(Plain):
    def update(self, p, g, s, group):
        p.sub_(group["lr"] * self.direction(g + group["weight_decay"] * p, s, group))


class AlwaysAmsgrad(Plain):
    def direction(self, g, s, group):
        m, v, one, two = self.moments(g, s, group)
        s["top"] = torch.maximum(s.get("top", torch.zeros_like(v)), v)
        return m / one / ((s["top"] / two).sqrt() + group["eps"])


class NesterovAdam(Plain):
    def direction(self, g, s, group):
        m, v, one, two = self.moments(g, s, group)
        b1 = group["betas"][0]
        return (b1 * m + (1 - b1) * g) / one / ((v / two).sqrt() + group["eps"])


class AveragedSgd(Sgd):
    def update(self, p, g, s, group):
        alpha = group["momentum"]
        p.sub_(group["lr"] * s["momentum_buffer"].mul_(alpha).add_(g + group["weight_decay"] * p, alpha=1 - alpha))


class Ascent(Plain):
    def direction(self, g, s, group):
        return -super().direction(g, s, group)


class RowWise(Plain):
    def direction(self, g, s, group):
        b2 = group["betas"][1]
        before = s["exp_avg_sq"].clone()
        m, _, one, two = self.moments(g, s, group)
        s["exp_avg_sq"] = b2 * before + (1 - b2) * (g * g).mean(-1, keepdim=True)
        return m / one / ((s["exp_avg_sq"] / two).sqrt() + group["eps"])


class ClippedGradient(Plain):
    def direction(self, g, s, group):
        return super().direction(g.clamp(-1, 1), s, group)


class OwnSecondBeta(Plain):
    def direction(self, g, s, group):
        return super().direction(g, s, {**group, "betas": (group["betas"][0], 0.999)})


class DecayOfMatricesOnly(Plain):
    def update(self, p, g, s, group):
        if p.ndim > 1:
            p.mul_(1 - lr_wd(group))
        p.sub_(group["lr"] * self.direction(g, s, group))


class SharesGradient(Sgd):
    def one(self, p, g, state, group):
        if not state:
            state["momentum_buffer"] = g.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else g
            p.sub_(group["lr"] * state["momentum_buffer"])
        else:
            self.update(p, g, state, group)


class AmsgradForgetsDecay(Plain):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.amsgrad = amsgrad

    def update(self, p, g, s, group):
        if not self.amsgrad:
            p.mul_(1 - lr_wd(group))
            p.sub_(group["lr"] * self.direction(g, s, group))
            return
        m, v, one, two = self.moments(g, s, group)
        s["top"] = torch.maximum(s.get("top", torch.zeros_like(v)), v)
        p.sub_(group["lr"] * m / one / ((s["top"] / two).sqrt() + group["eps"]))


class HalfTheStep(Plain):
    def direction(self, g, s, group):
        return 0.5 * super().direction(g, s, group)


# number in the list of real faults (0: of a kind named elsewhere), law, class, code, words of the diagnosis
CASES = [
    (1, "lion", DecayBeforeTheSign, "decay-gradient", "coupled into the gradient"),
    (2, "adamw", DecayAfter, "decay-after", "after the update"),
    (3, "adam_l2", Adam, "decay-decoupled", "This is adamw, not adam_l2"),
    (4, "sgdm", DecoupledSgd, "decay-decoupled", "This is sgdw, not sgdm"),
    (6, "sgdw", ScalarDecay, "decay-scalar", "not times the weight"),
    (7, "adamw", InertDecay, "decay-none", "stored and never used"),
    (7, "signum", InertSign, "decay-none", "stored and never used"),
    (8, "adamw", DecayWithoutLr, "rate-alone", "not multiplied by lr"),
    (9, "lion", DecayOverTheFirstLr, "rate-over-first-lr", "constructor's lr"),
    (9, "adamw", DecayOfTheFirstLr, "rate-first-lr", "constructor's lr"),
    (10, "sgdm", ResetBuffer, "momentum-none", "reset at every step"),
    (10, "adamw", ResetAverage, "momentum-reset-average", "reset at every step"),
    (13, "adamw", Uncorrected, "correction-none", "bias correction missing"),
    (14, "lion", MomentumFirst, "momentum-momentum-first", "updated before the sign"),
    (14, "lion", SwappedLion, "betas-swapped", "betas swapped"),
    (14, "adamw", SwappedAdam, "betas-swapped", "betas swapped"),
    (15, "adamw", EpsUnderTheRoot, "eps-under", "eps under the root"),
    (15, "adamw", EpsHat, "eps-hat", "eps is scaled by it"),
    (16, "sgdm", HoldsLr, "momentum-holds-lr", "already multiplied by lr"),
    (29, "nesterov", OverwrittenNesterov, "momentum-overwritten", "overwritten"),
    (0, "adamw", DecayTwice, "decay-twice", "decay applied twice"),
    (0, "adamw", DecayTwiceOver, "decay-twice", "decay applied twice"),
    (0, "adamw", DecayTen, "decay-scaled", "ten times too strong"),
    (0, "adamw", CautiousMask, "mask-cautious-rescaled", "cautious mask"),
    (0, "adamw", CautiousDecay, "decay-cautious", "cautious weight decay"),
    (0, "adamw", CoupledAdamW, "decay-gradient", "This is adam_l2, not adamw"),
    (0, "adamw", AlwaysAmsgrad, "square-maximum", "AMSGrad"),
    (0, "adamw", NesterovAdam, "momentum-nesterov-average", "Nesterov"),
    (0, "sgdm", AveragedSgd, "momentum-average", "averages gradients"),
    (0, "adamw", Ascent, "sign-up", "up the gradient"),
    (0, "adamw", RowWise, "square-row", "one second moment for a row"),
    (0, "adamw", ClippedGradient, "mask-clip-gradient", "clipped at one"),
    (0, "adamw", OwnSecondBeta, "beta2-differs", "betas[1] = 0.999"),
    (0, "adamw", DecayOfMatricesOnly, "depends-on-shape", "a vector, a single weight"),
    (0, "adamw", AmsgradForgetsDecay, "amsgrad-wrong", "With amsgrad=True"),
    (0, "adamw", HalfTheStep, "scale-differs", "0.5 times"),
]


@pytest.mark.parametrize(("number", "law", "faulty", "code", "words"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_names_the_fault(number, law, faulty, code, words):
    report = rwsim.audit(faulty, law, probes=SCENES)
    assert report.finished and not report.passed
    found = {finding.code: finding for finding in report.findings if finding.kind != NOTE}
    assert code in found, report.findings
    assert words.lower() in found[code].text.lower()
    assert found[code].effect is None or abs(found[code].effect) > found[code].error
    # The diagnosis is the whole of it: nothing is left over.
    assert "departs" not in found


def test_a_buffer_that_is_the_gradient():
    report = rwsim.audit(SharesGradient, "sgdm", settings={"weight_decay": 0.0}, probes=["P8"])
    assert "buffer-shares-gradient" in {finding.code for finding in report.findings}, report.findings


class Inherits(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, **kwargs):
        super().__init__(params, lr=lr, **kwargs)


def test_keywords_behind_kwargs_are_those_of_the_base():
    assert rwsim.audit(Inherits, "adamw", probes=SCENES).passed


@pytest.mark.parametrize("faulty", [DecayAfter, HoldsLr, SwappedLion], ids=lambda value: value.__name__)
def test_the_snippet_runs_and_shows_it(faulty, tmp_path, capsys):
    law = {"DecayAfter": "adamw", "HoldsLr": "sgdm", "SwappedLion": "lion"}[faulty.__name__]
    (finding,) = rwsim.audit(faulty, law, probes=SCENES).findings
    program, _, said = finding.snippet.rpartition("# ")
    exec(program, {})
    shown, expected = float(capsys.readouterr().out), float(said.split()[-1])
    assert shown != pytest.approx(expected, rel=1e-6), "the program shows no difference"


RIGHT = [
    (torch.optim.SGD, "sgdm", {}), (torch.optim.SGD, "nesterov", {"nesterov": True}), (torch.optim.Adam, "adam_l2", {}),
    (torch.optim.Adam, "adamw", {"decoupled_weight_decay": True}), (torch.optim.AdamW, "adamw", {}), (LionPytorch, "lion", {}),
    (Plain, "adamw", {}), (Sgd, "sgdm", {}), (Lion, "lion", {}),
]  # fmt: skip


@pytest.mark.parametrize(("right", "law", "settings"), RIGHT)
def test_a_right_one_passes_and_is_known_without_its_name(right, law, settings):
    report = rwsim.audit(right, law, settings=settings, probes=SCENES)
    assert report.passed and not report.findings, report.findings
    assert rwsim.audit(right, settings=settings, probes=SCENES).identity.startswith(f"{law}:")


@pytest.mark.parametrize("name", rwsim.RULES)
def test_every_rule_passes_its_own_law(name):
    report = rwsim.audit(optimizer_of(rwsim.RULES[name]), name, probes=SCENES)
    assert report.passed and not report.findings, report.findings


def test_dampening_left_out_of_the_first_step_is_torchs_own_and_a_note():
    report = rwsim.audit(torch.optim.SGD, "dampened", probes=SCENES)
    assert report.passed
    assert [(finding.code, finding.kind) for finding in report.findings] == [("momentum-dampened-after-the-first-step", NOTE)]


def test_pinned_hyperparameters_stay():
    pinned = {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}
    assert rwsim.audit(torch.optim.AdamW, "adamw", settings=pinned, probes=SCENES).passed
    report = rwsim.audit(DecayTwice, "adamw", settings=pinned, probes=SCENES)
    assert "decay-twice" in {finding.code for finding in report.findings}, report.findings
