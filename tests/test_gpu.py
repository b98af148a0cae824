"""The reference engine on CUDA: the same statistics as on the CPU, from generators of its own."""

import math

import numpy as np
import pytest
import torch

import rwsim
from rwsim.optimizers import AdamL2, AdamW, Lion, UpdateRule
from rwsim.optimizers.sgdm import SGDM
from rwsim.stats.mcse import estimate
from rwsim.walk.job import Job
from rwsim.walk.reference import seeded
from rwsim.walk.simulate import run
from rwsim.walk.system import Layer
from tests.statistics import Z

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RULES: list[UpdateRule] = [
    SGDM(lr=1.0, weight_decay=2e-3, momentum=0.9),
    AdamW(lr=2e-2, weight_decay=0.5, betas=(0.9, 0.99)),
    AdamL2(lr=5e-3, weight_decay=1e-2, betas=(0.9, 0.99)),
    Lion(lr=1e-2, weight_decay=1.0, betas=(0.9, 0.95)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("gradient", ["marginal", "faithful", "gaussian"])
def test_devices_agree_by_statistics(rule, gradient):
    layer = Layer.draw(64, 256, gamma="uniform")
    if gradient == "gaussian" and rule.name == "adam_l2":  # gradients of unit size: its decay must be as large
        rule = AdamL2(lr=5e-3, weight_decay=2.0, betas=(0.9, 0.99))
    walks = [run(Job((rule,), layer, 1500, gradient, 2), device=device).kept(700) for device in ("cuda", "cpu")]
    for quantity in ("norm", "rotation", "rms_update"):
        gpu, cpu = (estimate(walk.statistic(quantity)[:, 0]) for walk in walks)
        error = math.hypot(gpu.mcse, cpu.mcse) / cpu.mean
        assert Z * error < 0.05 and abs(gpu.mean / cpu.mean - 1) <= Z * error + 1e-6


def test_float64_and_batched_configs_on_cuda():
    layer = Layer.draw(32, 64)
    rules = (AdamW(lr=0.01, weight_decay=0.1), AdamW(lr=0.02, weight_decay=0.1))
    one, same = (run(Job(rules, layer, 200, dtype=torch.float64), device="cuda") for _ in range(2))
    assert one.norm_sq.shape == (2, 2, 64) and np.array_equal(one.norm_sq, same.norm_sq)


@pytest.mark.parametrize("gradient", ["marginal", "faithful", "gaussian"])
def test_a_walk_does_not_depend_on_its_company_on_cuda(gradient):
    layer = Layer.draw(32, 64)
    rules = tuple(AdamW(lr=lr, weight_decay=0.1) for lr in (0.01, 0.02))
    together = run(Job(rules[::-1], layer, 200, gradient), device="cuda", engine="reference")
    for i, rule in enumerate(rules):
        alone = run(Job((rule,), layer, 100, gradient), device="cuda", engine="reference")
        assert np.array_equal(together.norm_sq[:1, 1 - i], alone.norm_sq[:, 0])
    device = torch.device("cuda")
    one, other = (torch.rand(4, generator=seeded(key, device), device=device) for key in (5, 5 + (1 << 63)))
    assert not torch.isin(one, other).any()


def test_validate_on_cuda_agrees():
    result = rwsim.validate("adamw", lr=2e-2, weight_decay=0.5, betas=(0.9, 0.99), steps=3000, device="cuda")
    assert result.passed, result.records
