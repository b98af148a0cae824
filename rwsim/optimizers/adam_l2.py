"""Adam with l2 regularization: the decay is part of the gradient, as torch.optim.Adam(weight_decay=...)."""

from rwsim.optimizers.rule import UpdateRule


class AdamL2(UpdateRule):
    """p_t = p_{t-1} - eta m^_t / (sqrt(v^_t) + eps), m^ and v^ bias-corrected averages of g + lambda p and its square
    (paper, eq. adam_update). The momentum is an average. `eps` defaults to 0, as in the analysis.

    Example:
        >>> AdamL2(lr=1e-3, weight_decay=1e-4).values.betas
        (0.9, 0.999)
    """

    name = "adam_l2"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999), "eps": 0.0}
    state = ("exp_avg", "exp_avg_sq")
    reference = "Kingma and Ba 2015, arXiv:1412.6980; torch.optim.Adam"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        grad = grad + hyper.weight_decay * state.param
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        param = state.param - hyper.lr / (1 - beta1**state.step) * (exp_avg / denom)
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
