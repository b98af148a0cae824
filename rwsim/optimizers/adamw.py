"""AdamW: Adam with decoupled weight decay, as torch.optim.AdamW."""

from rwsim.optimizers.rule import UpdateRule


class AdamW(UpdateRule):
    """p_t = p_{t-1} - eta (m^_t / (sqrt(v^_t) + eps) + lambda p_{t-1}), m^ and v^ bias-corrected averages of g and g^2
    (paper, eq. adamw_update). The momentum is an average. `eps` defaults to 0, as in the analysis.

    Example:
        >>> AdamW(lr=1e-3, weight_decay=0.1).values.eps
        0.0
    """

    name = "adamw"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999), "eps": 0.0}
    state = ("exp_avg", "exp_avg_sq")
    reference = "Loshchilov and Hutter 2019, arXiv:1711.05101; torch.optim.AdamW"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        # The decay is its own term: in float32 the factor 1 - lr * weight_decay would round lr * weight_decay itself.
        decayed = hyper.lr * hyper.weight_decay * state.param
        param = state.param - hyper.lr / (1 - beta1**state.step) * (exp_avg / denom) - decayed
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
