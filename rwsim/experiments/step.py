"""One step of training. On CUDA it is replayed from graphs: networks this small are bound by launches, not by arithmetic."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwsim.experiments.data import Order

# Passes that cuDNN and the allocator are warmed up with before a graph is captured.
_WARM = 3


class Graph:
    """Work that is done as it is written, or replayed from a CUDA graph once it is captured.

    Args:
        works: What is done. They must not depend on each other: in a graph each has a stream of its own.
        refused: Whether never to capture.
    """

    def __init__(self, works: Sequence[Callable[[], object]], refused: bool = False) -> None:
        self.works, self.refused = works, refused
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for work in self.works:
            work()

    def capture(self) -> bool:
        """Capture the work, which is not done then; whether that worked. It must have been done before."""
        if self.refused or self._graph is not None:
            return self.captured
        try:
            found = torch.cuda.CUDAGraph()
            with torch.cuda.graph(found):
                self._record()
        except RuntimeError:  # a driver or an operator that cannot: the plain way is slower and as right
            self.refused = True
            return False
        self._graph = found
        return True

    def _record(self) -> None:
        if len(self.works) == 1:
            self.works[0]()
            return
        main, sides = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in self.works]
        # Streams come from a small pool: where one of them is `main`, the others must not wait for its work.
        begin = main.record_event()
        for side, work in zip(sides, self.works, strict=True):
            side.wait_event(begin)
            with torch.cuda.stream(side):
                work()
        for side in sides:
            main.wait_stream(side)


class Pass:
    """Loss and gradients of a model, at items that stay in one place.

    Args:
        model: In training mode.
        order: Of the batches.
        autocast: Compute in bf16.

    Attributes:
        loss: Of the last pass; it stays in one place too.
    """

    def __init__(self, model: nn.Module, order: Order, autocast: bool) -> None:
        self.model, self.order, self.autocast = model, order, autocast
        self._items = order.items(0).clone()
        self.loss = torch.zeros((), device=self._items.order.device)

    def load(self, step: int) -> None:
        """Take the items of step 0, 1, ..."""
        self._items.copy_(self.order.items(step))

    def __call__(self) -> None:
        """Fresh gradients in the parameters, and the loss."""
        self.model.zero_grad(set_to_none=True)
        inputs, targets = self.order.data.batch(self._items)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast and inputs.is_cuda, cache_enabled=False):
            loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.loss.copy_(loss.detach())

    def warm(self) -> None:
        """Make ready what a graph cannot; running statistics stay as they are."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM):
                self()
        torch.cuda.current_stream().wait_stream(aside)
        self.model.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)


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
        self.optimizer = optimizer
        self._bases = [group["lr"] for group in optimizer.param_groups]
        self._pass = Pass(model, order, autocast)
        self._gradients, self._step = Graph([self._pass], not capture), Graph([self._stepped], not capture)
        if capture:
            self._lrs = [torch.full((), lr, device="cuda") for lr in self._bases]
            self._pass.warm()
            self._step.refused = not self._gradients.capture()

    @property
    def captured(self) -> bool:
        """Whether `replay` can be called: from the second step on, when the optimizer has its state."""
        return self._step.captured

    def schedule(self, factor: float) -> None:
        """Set each group's lr to `factor` times what it began with."""
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * factor

    def take(self, step: int) -> Tensor:
        """Take step 0, 1, ... with the optimizer's hooks; its loss."""
        loss = self._fresh(step)
        self.optimizer.step()
        self._step.capture()
        return loss

    def replay(self, step: int) -> Tensor:
        """Take step 0, 1, ... without hooks; its loss."""
        loss = self._fresh(step)
        for lr, group in zip(self._lrs, self.optimizer.param_groups, strict=True):
            lr.fill_(group["lr"])
        self._step()
        return loss

    def _fresh(self, step: int) -> Tensor:
        """The loss, with fresh gradients in the parameters."""
        self._pass.load(step)
        self._gradients()
        return self._pass.loss

    def _stepped(self) -> None:
        """A step whose lr is on the device."""
        floats = [group["lr"] for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        try:
            self.optimizer.step()
        finally:
            for group, lr in zip(self.optimizer.param_groups, floats, strict=True):
                group["lr"] = lr


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy over the last axis of `logits`, in float32 at least."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction=reduction)
