"""AdamW with independent decay: the decay is not multiplied by the learning rate, as first published."""

from rwsim.optimizers.rule import UpdateRule


class AdamWIndependent(UpdateRule):
    """p_t = p_{t-1} - eta m^_t / (sqrt(v^_t) + eps) - lambda p_{t-1}: rotation depends on lambda only (paper, section 5.3).

    Example:
        >>> AdamWIndependent(lr=1e-3, weight_decay=1e-4).values.weight_decay
        0.0001
    """

    name = "adamw_independent"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999), "eps": 0.0}
    state = ("exp_avg", "exp_avg_sq")
    reference = "Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        param = state.param - hyper.lr / (1 - beta1**state.step) * (exp_avg / denom) - hyper.weight_decay * state.param
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
