"""Signum: the sign of a momentum, with decoupled weight decay."""

from rwsim.optimizers.rule import UpdateRule


class Signum(UpdateRule):
    """m_t = alpha m_{t-1} + (1 - alpha) g_t;  p_t = p_{t-1} - eta (sign(m_t) + lambda p_{t-1}). The momentum is an average.

    Example:
        >>> Signum(lr=1e-4, weight_decay=0.1).values.momentum
        0.9
    """

    name = "signum"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.9}
    state = ("momentum_buffer",)
    reference = "Bernstein et al. 2018, arXiv:1802.04434"

    @staticmethod
    def update(grad, state, hyper, xp):
        momentum_buffer = hyper.momentum * state.momentum_buffer + (1 - hyper.momentum) * grad
        param = state.param - hyper.lr * xp.sign(momentum_buffer) - hyper.lr * hyper.weight_decay * state.param
        return {"param": param, "momentum_buffer": momentum_buffer}
