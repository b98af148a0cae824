"""Rotational optimizers for real networks: an inner optimizer's direction at a rotation that theory sets (paper, section 4)."""

from typing import TYPE_CHECKING

from rwsim._door import make_door

if TYPE_CHECKING:
    from rwsim.rotational.adam import RotationalAdam
    from rwsim.rotational.adamw import RotationalAdamW
    from rwsim.rotational.groups import parameter_groups
    from rwsim.rotational.layers import StandardizedConv1d, StandardizedConv2d, StandardizedLinear, fold, standardize
    from rwsim.rotational.lion import RotationalLion
    from rwsim.rotational.of_rule import rotational_of
    from rwsim.rotational.optimizer import RotationalOptimizer
    from rwsim.rotational.sgdm import RotationalSGDM
    from rwsim.rotational.speeds import set_speeds
    from rwsim.rotational.wrapper import RotationalWrapper

make_door(
    __name__,
    {
        "RotationalAdam": "rwsim.rotational.adam",
        "RotationalAdamW": "rwsim.rotational.adamw",
        "RotationalLion": "rwsim.rotational.lion",
        "RotationalOptimizer": "rwsim.rotational.optimizer",
        "RotationalSGDM": "rwsim.rotational.sgdm",
        "RotationalWrapper": "rwsim.rotational.wrapper",
        "StandardizedConv1d": "rwsim.rotational.layers",
        "StandardizedConv2d": "rwsim.rotational.layers",
        "StandardizedLinear": "rwsim.rotational.layers",
        "fold": "rwsim.rotational.layers",
        "parameter_groups": "rwsim.rotational.groups",
        "rotational_of": "rwsim.rotational.of_rule",
        "set_speeds": "rwsim.rotational.speeds",
        "standardize": "rwsim.rotational.layers",
    },
)

__all__ = [
    "RotationalAdam",
    "RotationalAdamW",
    "RotationalLion",
    "RotationalOptimizer",
    "RotationalSGDM",
    "RotationalWrapper",
    "StandardizedConv1d",
    "StandardizedConv2d",
    "StandardizedLinear",
    "fold",
    "parameter_groups",
    "rotational_of",
    "set_speeds",
    "standardize",
]
