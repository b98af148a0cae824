"""P2: no gradient, only weight decay.

Decoupled decay shrinks the weight by its own factor; decay inside Adam's gradient becomes a step of lr times the weight's
sign; an option that is stored and never used leaves the weight where it is. Weights of both signs and several sizes tell
lr * wd * w from lr * wd * sign(w) and from lr * wd. Two decays tell a factor from a power.
"""

import torch

from rwsim.audit.script import BASE, Maker, Script

TITLE = "zero gradient"


def scenes(make: Maker) -> list[Script]:
    start = torch.tensor([[2.0, -2.0], [0.7, -4.0]], dtype=torch.float64)
    zero = torch.zeros(6, 2, 2, dtype=torch.float64)
    return [
        make("no gradient", start, zero),
        make("no gradient, half the decay", start, zero, weight_decay=BASE["weight_decay"] / 2),
    ]
