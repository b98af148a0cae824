"""SGD with momentum and dampening, as torch.optim.SGD(dampening=...) after its first step."""

from rwsim.optimizers.rule import UpdateRule


class Dampened(UpdateRule):
    """m_t = alpha m_{t-1} + (1 - tau) (g_t + lambda p_{t-1});  p_t = p_{t-1} - eta m_t, with dampening tau.

    torch leaves dampening out of the first step; here every step is alike. With tau = alpha the momentum is an average.

    Example:
        >>> Dampened(lr=0.1, weight_decay=1e-3).values.dampening
        0.9
    """

    name = "dampened"
    hyper = {"lr": ..., "weight_decay": ..., "momentum": 0.9, "dampening": 0.9}
    state = ("momentum_buffer",)
    reference = "torch.optim.SGD(dampening=...)"

    @staticmethod
    def update(grad, state, hyper, xp):
        grad = grad + hyper.weight_decay * state.param
        momentum_buffer = hyper.momentum * state.momentum_buffer + (1 - hyper.dampening) * grad
        return {"param": state.param - hyper.lr * momentum_buffer, "momentum_buffer": momentum_buffer}
