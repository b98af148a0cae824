"""AdEMAMix: AdamW with a second, slow momentum."""

from rwsim.optimizers.rule import UpdateRule


class AdEMAMix(UpdateRule):
    """p_t = p_{t-1} - eta ((m^_t + mix s_t) / (sqrt(v^_t) + eps) + lambda p_{t-1}); m and v as in AdamW, s an average of g with
    rate beta_3, not bias-corrected. Constant `mix` (the paper's alpha) and beta_3, without their warmup schedules.

    Example:
        >>> AdEMAMix(lr=1e-3, weight_decay=0.1).values.betas
        (0.9, 0.999, 0.9999)
    """

    name = "ademamix"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.999, 0.9999), "mix": 5.0, "eps": 0.0}
    state = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    reference = "Pagliardini, Ablin and Grangier 2024, arXiv:2409.03137"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2, beta3 = hyper.betas
        exp_avg = beta1 * state.exp_avg + (1 - beta1) * grad
        exp_avg_slow = beta3 * state.exp_avg_slow + (1 - beta3) * grad
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad**2
        denom = xp.sqrt(exp_avg_sq / (1 - beta2**state.step)) + hyper.eps
        mixed = exp_avg / (1 - beta1**state.step) + hyper.mix * exp_avg_slow
        param = state.param - hyper.lr * (mixed / denom) - hyper.lr * hyper.weight_decay * state.param
        return {"param": param, "exp_avg": exp_avg, "exp_avg_slow": exp_avg_slow, "exp_avg_sq": exp_avg_sq}
