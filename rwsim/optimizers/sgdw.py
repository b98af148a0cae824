"""SGDW: SGD with momentum and decoupled weight decay."""

from rwsim.optimizers.rule import UpdateRule


class SGDW(UpdateRule):
    """m_t = alpha m_{t-1} + g_t;  p_t = p_{t-1} - eta (m_t + lambda p_{t-1}). The momentum is a sum.

    Example:
        >>> SGDW(lr=0.1, weight_decay=1e-3).values.momentum
        0.9
    """

    name = "sgdw"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.9}
    state = ("momentum_buffer",)
    reference = "Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1, decay multiplied by the learning rate"

    @staticmethod
    def update(grad, state, hyper, xp):
        momentum_buffer = hyper.momentum * state.momentum_buffer + grad
        param = state.param - hyper.lr * momentum_buffer - hyper.lr * hyper.weight_decay * state.param
        return {"param": param, "momentum_buffer": momentum_buffer}
