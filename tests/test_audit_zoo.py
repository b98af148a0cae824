"""Optimizers that people use and that are what they say: no false alarm on ten seeds. And those known to be something else."""

from importlib import util

import pytest

import rwsim

SOUND = [
    ("torch.optim:SGD", "sgdm", {}),
    ("torch.optim:SGD", "sgdm", {"foreach": False}),
    ("torch.optim:SGD", "sgdm", {"foreach": True}),
    ("torch.optim:SGD", "sgdm", {"fused": True}),
    ("torch.optim:Adam", "adam_l2", {}),
    ("torch.optim:Adam", "adam_l2", {"foreach": True}),
    ("torch.optim:Adam", "adam_l2", {"fused": True}),
    ("torch.optim:AdamW", "adamw", {}),
    ("torch.optim:AdamW", "adamw", {"foreach": False}),
    ("torch.optim:AdamW", "adamw", {"foreach": True}),
    ("torch.optim:AdamW", "adamw", {"fused": True}),
    ("optimi:SGD", "sgdm", {}),
    ("optimi:Adam", "adam_l2", {}),
    ("optimi:AdamW", "adamw", {}),
    ("optimi:Lion", "lion", {}),
    ("pytorch_optimizer:SGD", "sgdm", {}),
    ("pytorch_optimizer:Adam", "adam_l2", {}),
    ("pytorch_optimizer:AdamW", "adamw", {}),
    ("pytorch_optimizer:Lion", "lion", {}),
    ("pytorch_optimizer:SGDW", "sgdw", {}),
    ("lion_pytorch:Lion", "lion", {}),
    ("heavyball:AdamW", "adamw", {}),
    ("bitsandbytes.optim:SGD", "sgdm", {}),
    ("bitsandbytes.optim:AdamW", "adamw", {}),
    ("bitsandbytes.optim:Lion", "lion", {}),
]
KNOWN = [
    ("torch_optimizer:SGDW", "sgdw", "decay-scalar", "not times the weight"),
    ("bitsandbytes.optim:Adam", "adam_l2", "decay-decoupled", "This is adamw, not adam_l2"),
    ("heavyball:SGD", "sgdm", "decay-decoupled", "This is sgdw, not sgdm"),
]


def _need(name: str) -> None:
    library = name.partition(":")[0].partition(".")[0]
    if util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (pip install rwsim[zoo])")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "law", "settings"), SOUND)
def test_no_false_alarm_on_ten_seeds(name, law, settings):
    _need(name)
    for seed in range(10):
        report = rwsim.audit(name, law, settings=settings, seed=seed)
        assert report.passed, (seed, report.findings, report.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "law", "code", "words"), KNOWN)
def test_known_positives_are_named(name, law, code, words):
    _need(name)
    report = rwsim.audit(name, law)
    assert not report.passed and report.finished
    assert words in {finding.code: finding.text for finding in report.findings}[code]


@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param("torch.optim:AdamW", "adamw", marks=pytest.mark.slow), pytest.param("torch.optim:SGD", "sgdm", marks=pytest.mark.slow),
        pytest.param("lion_pytorch:Lion", "lion", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_whole_audit_passes(name, law):
    report = rwsim.audit(name, law)
    assert report.passed, report.findings
    assert report.to_json() == rwsim.audit(name, law).to_json(), "a fixed seed repeats it"
