"""P5: the learning rate changed from outside after construction, also to zero.

How decay follows the learning rate is invisible while that stays: multiplied by lr, by lr^2 over its largest value, by the
constructor's lr, or not at all. A learning rate of zero must freeze the weights; they drift if the momentum holds updates
that were already multiplied by the old one.
"""

import torch

from rwsim.audit.script import Maker, Script

TITLE = "learning rate changes"


def scenes(make: Maker) -> list[Script]:
    weights = make.randn(3, 4)
    halved = (1.0,) * 4 + (0.5,) * 8
    return [
        make("lr halved, no decay", torch.zeros(3, 4, dtype=torch.float64), make.randn(12, 3, 4), halved, weight_decay=0.0),
        make("lr halved", weights, make.randn(12, 3, 4), halved),
        make("lr raised", weights, make.randn(6, 3, 4), (1.0,) * 2 + (2.0,) * 4),
        make("lr to zero", weights, make.randn(10, 3, 4), (1.0,) * 4 + (0.0,) * 4 + (0.25,) * 2),
        make("lr halved, no gradient", 1 + weights.abs(), torch.zeros(6, 3, 4, dtype=torch.float64), (1.0,) * 2 + (0.5,) * 4),
    ]
