"""QHM: quasi-hyperbolic momentum, a fixed mixture of gradient and momentum."""

from rwsim.optimizers.rule import UpdateRule


class QHM(UpdateRule):
    """d_t = g_t + lambda p_{t-1};  m_t = alpha m_{t-1} + (1 - alpha) d_t;  p_t = p_{t-1} - eta ((1 - nu) d_t + nu m_t).

    The momentum is an average; nu = 0 is plain SGD.

    Example:
        >>> QHM(lr=1.0, weight_decay=1e-4).values.nu
        0.7
    """

    name = "qhm"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.999, "nu": 0.7}
    state = ("momentum_buffer",)
    reference = "Ma and Yarats 2019, arXiv:1810.06801"

    @staticmethod
    def update(grad, state, hyper, xp):
        grad = grad + hyper.weight_decay * state.param
        momentum_buffer = hyper.momentum * state.momentum_buffer + (1 - hyper.momentum) * grad
        param = state.param - hyper.lr * ((1 - hyper.nu) * grad + hyper.nu * momentum_buffer)
        return {"param": param, "momentum_buffer": momentum_buffer}
