"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from rwsim.optimizers.rule import UpdateRule


class Lion(UpdateRule):
    """p_t = p_{t-1} - eta (sign(beta_1 m_{t-1} + (1 - beta_1) g_t) + lambda p_{t-1}), m an average of g with rate
    beta_2, updated after the sign (paper, eq. lion_update).

    Example:
        >>> Lion(lr=1e-4, weight_decay=1.0).values.betas
        (0.9, 0.99)
    """

    name = "lion"
    hyper = {"lr": ..., "weight_decay": ..., "betas": (0.9, 0.99)}
    state = ("exp_avg",)
    reference = "Chen et al. 2023, arXiv:2302.06675"

    @staticmethod
    def update(grad, state, hyper, xp):
        beta1, beta2 = hyper.betas
        direction = xp.sign(beta1 * state.exp_avg + (1 - beta1) * grad)
        exp_avg = beta2 * state.exp_avg + (1 - beta2) * grad
        param = state.param - hyper.lr * direction - hyper.lr * hyper.weight_decay * state.param
        return {"param": param, "exp_avg": exp_avg}
