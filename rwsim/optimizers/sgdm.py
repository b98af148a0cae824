"""SGD with momentum and the decay inside the buffer, as torch.optim.SGD."""

from rwsim.optimizers.rule import UpdateRule


class SGDM(UpdateRule):
    """m_t = alpha m_{t-1} + g_t + lambda p_{t-1};  p_t = p_{t-1} - eta m_t  (paper, eq. sgdm_update).

    The momentum is a sum, not an average: the total response to a gradient is eta / (1 - alpha).

    Example:
        >>> SGDM(lr=0.5, weight_decay=1e-4).values.momentum
        0.9
    """

    name = "sgdm"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.9}
    state = ("momentum_buffer",)
    reference = "Polyak 1964; Sutskever et al. 2013; torch.optim.SGD(nesterov=False, dampening=0)"

    @staticmethod
    def update(grad, state, hyper, xp):
        momentum_buffer = hyper.momentum * state.momentum_buffer + grad + hyper.weight_decay * state.param
        return {"param": state.param - hyper.lr * momentum_buffer, "momentum_buffer": momentum_buffer}
