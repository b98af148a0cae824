"""P1: one step from a state of zeros, with large lr and weight decay.

The first step shows what later ones hide: whether decay comes before or after the update (they differ by lr^2 wd times the
update), whether the averages are corrected for their start at zero, which way is down. A gradient as small as eps shows where
eps stands: torch's Adam moves by lr / 2, with eps scaled by the bias correction it moves by less, with eps under the root
hardly at all.
"""

import torch

from rwsim.audit.script import Maker, Script

TITLE = "first step"


def scenes(make: Maker) -> list[Script]:
    found = [make("one step", 1 + make.randn(2, 3).abs(), make.randn(1, 2, 3), lr=0.4, weight_decay=0.6)]
    if "eps" in make.words:
        tiny = float(make.pinned.get("eps", 1e-6)) or 1e-6
        grads = torch.full((3, 1, 2), tiny, dtype=torch.float64)
        found.append(make("a gradient of eps", torch.zeros(1, 2, dtype=torch.float64), grads, weight_decay=0.0, eps=tiny))
    return found
