"""P3: the momentum, without weight decay.

One gradient and then none shows how long and how strongly a buffer remembers it: for SGD the response is the kernel itself.
Gradients of size one keep Adam's second moment at one, so that the kernel shows there too. For Lion a gradient of 1 is
followed by one of -x: at which x the sign of the mixture flips tells the weights of the mixture (36 values of x to a decade).
"""

import torch

from rwsim.audit.script import Maker, Script

TITLE = "impulse and flip sweep"


def scenes(make: Maker) -> list[Script]:
    impulse = torch.zeros(10, 2, 3, dtype=torch.float64)
    impulse[0] = 1.0 + make.randn(2, 3).abs()
    ratios = torch.logspace(-2.5, 2.5, 181, dtype=torch.float64).reshape(1, -1)
    flips = torch.cat([torch.ones(1, *ratios.shape, dtype=torch.float64), -ratios[None]])
    return [
        make("an impulse", torch.zeros(2, 3, dtype=torch.float64), impulse, weight_decay=0.0),
        make("gradients of size one", torch.zeros(2, 4, dtype=torch.float64), torch.sign(make.randn(12, 2, 4)), weight_decay=0.0),
        make("flips", torch.zeros_like(ratios), flips, weight_decay=0.0),
    ]
