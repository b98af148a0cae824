"""Predictions of many configs at once: each as alone, whatever its company."""

import dataclasses

import numpy as np
import pytest

from rwsim.errors import InvalidArgument, NoEquilibrium, UnsupportedRule
from rwsim.optimizers import RULES, SGDM, AdamL2, AdamW, UpdateRule
from rwsim.theory import equilibrium
from rwsim.theory.equilibrium import Predictions, predict_equilibria, predict_equilibrium
from rwsim.theory.noise import IdealWalk, ToySystem

_RNG = np.random.default_rng(0)
LAWS = {
    "ideal": IdealWalk(12),
    "shared": ToySystem(_RNG.standard_normal((1, 12)), _RNG.standard_normal((5, 1)), 32, 1.0, 128),
    "own": ToySystem(_RNG.standard_normal((5, 12)), _RNG.standard_normal((5, 1)), 4, 30.0, 5),
    "two dims, far apart": ToySystem(np.array([[0.03, 3.0]]), np.array([[1e-3], [3.0]]), 8, 1.0, 2),
}
ARRAYS = ("norm_sq", "angle", "update_sq")


def configs(rule: type[UpdateRule]) -> list[UpdateRule]:
    extra = {"eps": 1e-4} if "eps" in rule.hyper else {}
    return [
        rule(lr=1e-3, weight_decay=0.1), rule(lr=0.05, weight_decay=0.9), rule(lr=0.0, weight_decay=0.1),
        rule(lr=30.0, weight_decay=1.0), rule(lr=0.05, weight_decay=1e-3, **extra), rule(lr=1e-2, weight_decay=0.0),
        rule(lr=2e-4, weight_decay=0.5, **extra), rule(lr=1e-3, weight_decay=0.1),
    ]  # fmt: skip


def same(a: Predictions, b: Predictions, rows: list[int]) -> bool:
    """Whether `a` is, bit for bit, the rows of `b`."""
    forms = [(a.exact, b.exact)] + ([] if a.paper is None or b.paper is None else [(a.paper, b.paper)])
    return a.reasons == tuple(b.reasons[i] for i in rows) and all(
        np.array_equal(getattr(x, name), getattr(y, name)[rows], equal_nan=True) for x, y in forms for name in ARRAYS
    )


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_config_as_alone(rule, law):
    """But for rounding, where all neurons are alike and one stands for all; those without equilibrium are NaN and say why."""
    rules = configs(rule)
    many = predict_equilibria(rules, law)
    assert (many.paper is None) == (rule.name not in ("sgdm", "adamw", "adam_l2", "lion"))
    for i, config in enumerate(rules):
        for form in filter(None, (many.exact, many.paper)):
            assert (
                np.isnan(form.norm_sq[i]).all()
                == np.isnan(form.angle[i]).all()
                == np.isnan(form.update_sq[i]).all()
                == bool(many.reasons[i])
            )
            assert np.isnan(form.norm_sq[i]).all() == np.isnan(form.norm_sq[i]).any()
        if many.reasons[i]:
            with pytest.raises(NoEquilibrium) as raised:
                predict_equilibrium(config, law)
            assert str(raised.value) == many.reasons[i]
            continue
        alone = predict_equilibrium(config, law)
        for found, expected in ((many.exact, alone.exact), (many.paper, alone.paper)):
            if found is None or expected is None:
                continue
            for name in ARRAYS:
                np.testing.assert_allclose(getattr(found, name)[i], getattr(expected, name), rtol=1e-13)
            for name in ("norm", "rotation", "rms_update"):
                assert getattr(found, name)[i] == pytest.approx(getattr(expected, name), rel=1e-13)
                assert isinstance(getattr(expected, name), float)
    assert many.reasons[2].startswith("`lr` is 0") and many.reasons[5].startswith("`weight_decay` is 0")


@pytest.mark.parametrize("name", ["sgdm", "adamw", "adam_l2", "lion"])
def test_order_and_company_do_not_matter(name):
    rules, law = configs(RULES[name]), LAWS["shared"]
    whole = predict_equilibria(rules, law)
    for rows in ([7, 6, 5, 4, 3, 2, 1, 0], [4], [1, 6], [3, 0]):
        assert same(predict_equilibria([rules[i] for i in rows], law), whole, rows)


@pytest.mark.parametrize("name", ["adamw", "nadamw", "adamc"])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_configs_at_once_are_as_one_by_one(name, law, monkeypatch):
    """And do not show how many are taken at a time."""
    rules = configs(RULES[name])
    whole = predict_equilibria(rules, law)
    monkeypatch.setattr(equilibrium, "_TOGETHER", 3)
    assert same(predict_equilibria(rules, law), whole, list(range(len(rules))))
    monkeypatch.setattr(equilibrium, "_at_once", lambda rules, *_: np.zeros(len(rules), bool))
    slowly = predict_equilibria(rules, law)
    assert slowly.reasons == whole.reasons
    for array in ARRAYS:
        np.testing.assert_allclose(getattr(slowly.exact, array), getattr(whole.exact, array), rtol=1e-14)


def test_rejects_a_last_bit():
    whole = predict_equilibria([AdamW(lr=1e-3, weight_decay=0.1)], LAWS["shared"])
    angle = np.nextafter(whole.exact.angle, 1.0)
    assert not same(dataclasses.replace(whole, exact=dataclasses.replace(whole.exact, angle=angle)), whole, [0])


def residual(rule: AdamL2 | AdamW, law: ToySystem, factor: float) -> float:
    """Relative error of E omega^2 by iterating the equations as they stand, half a step in the logarithm, from `factor`
    times the solution's own size; SGDM's closed form at the step that the normalizer leaves."""
    lr, decay, beta, eps = rule.values.lr, rule.values.weight_decay, rule.values.betas[0], rule.values.eps
    alone = predict_equilibrium(rule, law)
    spread = np.full(law.second_moment(np.ones((1, law.fan_in))).shape, factor * alone.exact.norm_sq.mean() / law.fan_in)
    for _ in range(400):
        moment = law.second_moment(spread)
        root = np.sqrt(moment + (decay**2 * spread if isinstance(rule, AdamL2) else 0))
        if isinstance(rule, AdamL2):
            step = lr * (1 - beta) / (root + eps)
            new = moment * step * (1 + beta) / (decay * (1 - beta) * (2 * (1 + beta) - step * decay))
        else:
            keep, drive = 1 - lr * decay, lr * (1 - beta) / (root + eps)
            new = moment * drive**2 * (1 + keep * beta) / ((1 - keep**2) * (1 - beta**2) * (1 - keep * beta))
        spread = np.sqrt(spread * new)
    return float(np.abs(spread.sum(-1) / alone.exact.norm_sq - 1).max())


@pytest.mark.parametrize("law", [LAWS["shared"], LAWS["own"], LAWS["two dims, far apart"]])
@pytest.mark.parametrize("rule", [AdamL2, AdamW])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_newton_solves_the_coupled_equations(rule, eps, law):
    for lr, decay in ((1e-4, 1e-3), (1e-2, 1e-2), (0.05, 0.9)):
        assert residual(rule(lr=lr, weight_decay=decay, eps=eps), law, 3.0) < 1e-9


def test_slow_rotation_keeps_its_digits():
    """1 - lag one / E omega^2 as a difference of numbers would have lost all digits here."""
    rule = SGDM(lr=1e-9, weight_decay=1e-8)
    assert predict_equilibrium(rule, LAWS["ideal"]).exact.rotation == pytest.approx((2e-17 / 1.9) ** 0.5, rel=1e-12)


def test_refusals():
    with pytest.raises(InvalidArgument, match="`rules`"):
        predict_equilibria([], LAWS["ideal"])
    with pytest.raises(InvalidArgument, match="of one class"):
        predict_equilibria([AdamW(lr=0.1, weight_decay=0.1), SGDM(lr=0.1, weight_decay=0.1)], LAWS["ideal"])

    class Clipped(SGDM):
        name = "clipped"

        @staticmethod
        def update(grad, state, hyper, xp):
            return SGDM.update(grad * xp.sign(grad) * xp.sign(state.param), state, hyper, xp)

    with pytest.raises(UnsupportedRule):
        predict_equilibria([Clipped(lr=0.1, weight_decay=0.1)], LAWS["ideal"])
