"""AdamC: AdamW whose decay follows the learning rate twice, so that the equilibrium norm does not follow the schedule."""

from rwsim.optimizers.rule import UpdateRule


class AdamC(UpdateRule):
    """AdamW with lambda_t = lambda eta_t / eta_max: each step decays by eta_t^2 lambda / eta_max.

    `max_lr` is the peak of the learning rate schedule, > 0; at eta_t = max_lr the rule is AdamW.

    Example:
        >>> AdamC(lr=1e-3, weight_decay=0.1, max_lr=1e-2).values.max_lr
        0.01
    """

    name = "adamc"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999), "eps": 0.0, "max_lr": 1.0}
    state = ("exp_avg", "exp_avg_sq")
    reference = "Defazio 2025, arXiv:2506.02285"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        decayed = hyper.lr * (hyper.lr / hyper.max_lr) * hyper.weight_decay * state.param
        param = state.param - hyper.lr / (1 - beta1**state.step) * (exp_avg / denom) - decayed
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
