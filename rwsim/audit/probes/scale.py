"""P4: gradients of several sizes.

The step of Adam and Lion does not follow the gradient's size, that of SGD is proportional to it. Rows of unequal size show
whether a second moment is kept for each weight, each row or the whole tensor; gradients that shrink tell a maximum
(AMSGrad) from an average. With weight decay they show whether the decay passes through the buffers.
"""

import torch

from rwsim.audit.script import Maker, Script

TITLE = "scale sweep"
# Scenes of other shapes than the small matrix of all others.
SHAPES = ("a vector", "a single weight", "a kernel", "a large matrix")


def scenes(make: Maker) -> list[Script]:
    sizes = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)[:, None]
    falling = torch.linspace(1, 0.1, 12, dtype=torch.float64)[:, None, None]
    weights = make.randn(3, 4)
    return [
        make("random gradients", make.randn(3, 4), make.randn(24, 3, 4), weight_decay=0.0),
        make("rows of unequal size, no decay", weights, sizes * make.randn(16, 3, 4), weight_decay=0.0),
        make("gradients that shrink, no decay", weights, falling * make.randn(12, 3, 4), weight_decay=0.0),
        make("random gradients with decay", weights, make.randn(24, 3, 4)),
        make("rows of unequal size", weights, sizes * make.randn(16, 3, 4)),
        # Biases, kernels and large matrices: some classes have another rule for them.
        make("a vector", make.randn(5), make.randn(8, 5)),
        make("a single weight", make.randn(1), make.randn(8, 1)),
        make("a kernel", make.randn(2, 2, 3, 3), make.randn(8, 2, 2, 3, 3)),
        make("a large matrix", make.randn(130, 132), make.randn(4, 130, 132)),
    ]
