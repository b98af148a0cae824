"""One step of training. On CUDA it is replayed from graphs: networks this small are bound by launches, not by arithmetic."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwsim.experiments.data import Order

# Passes that cuDNN and the allocator are warmed up with before a graph is captured.
_WARM = 3


class Step:
    """Batch, loss, gradients, and the optimizer's step.

    Hooks hear nothing of a replayed step, so there are two graphs, one of the gradients and one of the optimizer's step, and a step that
    is measured takes the second as it is written.

    Args:
        model: In training mode.
        optimizer: Of its parameters, at its peak lr; what state either has may still be loaded.
        order: Of the batches.
        autocast: Compute in bf16.
        capture: Whether to, where that works.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: Order, autocast: bool, capture: bool) -> None:
        self.model, self.optimizer, self.order, self.autocast = model, optimizer, order, autocast
        self._bases = [group["lr"] for group in optimizer.param_groups]
        self._gradients: torch.cuda.CUDAGraph | None = None
        self._step: torch.cuda.CUDAGraph | None = None
        self._refused = not capture
        if capture:
            self._items, self._lrs = order.items(0).clone(), [torch.full((), lr, device="cuda") for lr in self._bases]
            buffers = [buffer.clone() for buffer in model.buffers()]
            self._gradients = self._tried(self._capture_gradients)
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)

    @property
    def captured(self) -> bool:
        """Whether `replay` can be called: from the second step on, when the optimizer has its state."""
        return self._step is not None

    def schedule(self, factor: float) -> None:
        """Set each group's lr to `factor` times what it began with."""
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * factor

    def take(self, step: int) -> Tensor:
        """Take step 0, 1, ... with the optimizer's hooks; its loss."""
        loss = self._fresh(step)
        self.optimizer.step()
        if self._gradients is not None and self._step is None and not self._refused:
            self._step = self._tried(self._capture_step)
        return loss

    def replay(self, step: int) -> Tensor:
        """Take step 0, 1, ... without hooks; its loss."""
        assert self._step is not None
        loss = self._fresh(step)
        for lr, group in zip(self._lrs, self.optimizer.param_groups, strict=True):
            lr.fill_(group["lr"])
        self._step.replay()
        return loss

    def _fresh(self, step: int) -> Tensor:
        """The loss, with fresh gradients in the parameters."""
        if self._gradients is None:
            self.model.zero_grad(set_to_none=True)
            return self._pass(*self.order.batch(step))
        self._items.copy_(self.order.items(step))
        self._gradients.replay()
        return self._loss

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast and inputs.is_cuda, cache_enabled=False):
            loss = loss_of(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def _tried(self, capture: Callable[[], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph | None:
        try:
            return capture()
        except RuntimeError:  # a driver or an operator that cannot: the plain way is slower and as right
            self._refused = True
            return None

    def _capture_gradients(self) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM):
                self.model.zero_grad(set_to_none=True)
                self._pass(*self.order.data.batch(self._items))
        torch.cuda.current_stream().wait_stream(aside)
        # The captured backward pass then allocates gradients of its own, and writes into them at each replay.
        self.model.zero_grad(set_to_none=True)
        found = torch.cuda.CUDAGraph()
        with torch.cuda.graph(found):
            self._loss = self._pass(*self.order.data.batch(self._items))
        return found

    def _capture_step(self) -> torch.cuda.CUDAGraph:
        floats = [group["lr"] for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        found = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(found):
                self.optimizer.step()
        finally:
            for group, lr in zip(self.optimizer.param_groups, floats, strict=True):
                group["lr"] = lr
        return found


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy over the last axis of `logits`, in float32 at least."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction=reduction)
