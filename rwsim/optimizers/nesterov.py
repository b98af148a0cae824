"""SGD with Nesterov momentum and the decay inside the buffer, as torch.optim.SGD(nesterov=True)."""

from rwsim.optimizers.rule import UpdateRule


class Nesterov(UpdateRule):
    """d_t = g_t + lambda p_{t-1};  m_t = alpha m_{t-1} + d_t;  p_t = p_{t-1} - eta (d_t + alpha m_t). The momentum is a sum.

    Example:
        >>> Nesterov(lr=0.1, weight_decay=1e-3).values.momentum
        0.9
    """

    name = "nesterov"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.9}
    state = ("momentum_buffer",)
    reference = "Nesterov 1983; Sutskever et al. 2013; torch.optim.SGD(nesterov=True)"

    @staticmethod
    def update(grad, state, hyper, xp):
        grad = grad + hyper.weight_decay * state.param
        momentum_buffer = hyper.momentum * state.momentum_buffer + grad
        param = state.param - hyper.lr * (grad + hyper.momentum * momentum_buffer)
        return {"param": param, "momentum_buffer": momentum_buffer}
