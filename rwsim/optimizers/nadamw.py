"""NAdam-style AdamW: Nesterov momentum in Adam's numerator, decoupled weight decay."""

from rwsim.optimizers.rule import UpdateRule


class NAdamW(UpdateRule):
    """AdamW whose numerator is beta_1 m_t / (1 - beta_1^{t+1}) + (1 - beta_1) g_t / (1 - beta_1^t).

    Example:
        >>> NAdamW(lr=1e-3, weight_decay=0.1).values.betas
        (0.9, 0.999)
    """

    name = "nadamw"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999), "eps": 0.0}
    state = ("exp_avg", "exp_avg_sq")
    reference = "Dozat 2016; constant momentum, decoupled decay"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        ahead = beta1 / (1 - beta1 ** (state.step + 1)) * exp_avg + (1 - beta1) / (1 - beta1**state.step) * grad
        param = state.param - hyper.lr * (ahead / denom) - hyper.lr * hyper.weight_decay * state.param
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
