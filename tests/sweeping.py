"""What the tests of sweeps share: a small one, and when two have the same numbers."""

from rwsim.sweeps.grid import SweepConfig

SMALL = {
    "optimizer": ["adamw", "lion"], "axes": {"lr": "1e-3:1e-1:4:log", "weight_decay": [0.1, 1.0]}, "fan_in": 16, "neurons": 8,
    "steps": 400,
}  # fmt: skip


def config(**changed) -> SweepConfig:
    return SweepConfig.checked(**{**SMALL, **changed})


def same(one, other) -> bool:
    """Every data variable, bit by bit."""
    return set(one.data_vars) == set(other.data_vars) and all(
        one[name].dtype == other[name].dtype and one[name].values.tobytes() == other[name].values.tobytes() for name in one.data_vars
    )
