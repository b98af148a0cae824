"""`dynamics`: norm and rotation of real networks at constant learning rate against prediction (the paper's figures of ResNet-50 and GPT2-124M).

Claim: after the predicted transient every scale-invariant layer rotates at the predicted rate, whatever its gradients, and has the predicted
norm; on the way there it follows the predicted path. Layers that are not scale-invariant are reported beside them and not judged.
"""

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.settled import analyse_settled
from rwsim.experiments.train import Recipe

# lr times decay is such that equilibrium takes a small part of the run; norms start at about half of their equilibrium, or less.
_GPU = Config(
    (
        Case("resnet-sgdm", Recipe("resnet", "sgdm", {"lr": 0.5, "weight_decay": 2e-4, "momentum": 0.9}, 6000, 128)),
        Case("resnet-adamw", Recipe("resnet", "adamw", {"lr": 1e-2, "weight_decay": 0.1}, 6000, 128)),
        Case("resnet-lion", Recipe("resnet", "lion", {"lr": 1e-3, "weight_decay": 1.0}, 6000, 128)),
        Case("gpt-adamw", Recipe("gpt", "adamw", {"lr": 2e-3, "weight_decay": 0.5}, 6000, 32)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", {"lr": 2e-3, "weight_decay": 0.5}, 6000, 32, standardized=True)),
    )
)
_SMALL_RESNET, _SMALL_GPT = {"width": 4, "blocks": 1}, {"width": 32, "depth": 2, "heads": 2, "context": 32}
_CPU = Config(
    (
        Case("resnet-sgdm", Recipe("resnet", "sgdm", {"lr": 0.5, "weight_decay": 1e-3, "momentum": 0.9}, 800, 32, _SMALL_RESNET, every=4)),
        Case("resnet-adamw", Recipe("resnet", "adamw", {"lr": 1e-2, "weight_decay": 0.5, "betas": (0.9, 0.99)}, 800, 32, _SMALL_RESNET, every=4)),
        Case("resnet-lion", Recipe("resnet", "lion", {"lr": 2e-3, "weight_decay": 2.5}, 800, 32, _SMALL_RESNET, every=4)),
        Case("gpt-adamw", Recipe("gpt", "adamw", {"lr": 5e-3, "weight_decay": 1.0, "betas": (0.9, 0.99)}, 800, 8, _SMALL_GPT, every=4)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", {"lr": 5e-3, "weight_decay": 1.0, "betas": (0.9, 0.99)}, 800, 8, _SMALL_GPT, True, every=4)),
    )
)  # fmt: skip
_TINY_RESNET, _TINY_GPT = {"width": 2, "blocks": 1}, {"width": 8, "depth": 1, "heads": 2, "context": 8}
_SMOKE = Config(
    (
        Case("resnet-adamw", Recipe("resnet", "adamw", {"lr": 2e-2, "weight_decay": 1.0, "betas": (0.9, 0.99)}, 40, 8, _TINY_RESNET, every=2)),
        Case("gpt-ws-adamw", Recipe("gpt", "adamw", {"lr": 2e-2, "weight_decay": 1.0, "betas": (0.9, 0.99)}, 40, 4, _TINY_GPT, True, every=2)),
    ),
)  # fmt: skip

DYNAMICS = Experiment(
    "dynamics",
    "norm and rotation at constant learning rate: a ResNet with SGDM, AdamW and Lion, a GPT with and without weight standardization",
    {"gpu": _GPU, "cpu": _CPU, "smoke": _SMOKE},
    analyse_settled,
)
