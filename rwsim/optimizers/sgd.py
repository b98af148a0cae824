"""Plain SGD with l2 regularization, as torch.optim.SGD(momentum=0)."""

from rwsim.optimizers.rule import UpdateRule


class SGD(UpdateRule):
    """p_t = p_{t-1} - eta (g_t + lambda p_{t-1}).

    Example:
        >>> SGD(lr=0.1, weight_decay=1e-3)
        SGD(lr=0.1, weight_decay=0.001)
    """

    name = "sgd"
    hyper = {"lr": ..., "weight_decay": ...}
    reference = "Robbins and Monro 1951; torch.optim.SGD(momentum=0)"

    @staticmethod
    def update(grad, state, hyper, xp):
        return {"param": state.param - hyper.lr * (grad + hyper.weight_decay * state.param)}
