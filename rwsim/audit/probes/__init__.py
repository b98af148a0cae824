"""The probes, one room each; `PROBES` maps their names to them.

A room holds TITLE and `run(context)`. Those of P1 to P5 hold `scenes(make)` instead: all their scenes are run once, and one
diagnosis is made of them together (`rwsim.audit.diagnose`).
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from rwsim.audit.probes import first_step, impulse, lifecycle, lr_change, metamorphic, paths, precision, scale, zero_gradient

PROBES: Mapping[str, ModuleType] = MappingProxyType(
    {
        "P1": first_step, "P2": zero_gradient, "P3": impulse, "P4": scale, "P5": lr_change, "P7": paths, "P8": lifecycle,
        "P9": precision, "P10": metamorphic,
    }
)  # fmt: skip
