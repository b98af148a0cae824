"""A plain training loop: schedule, checkpoint, resume, evaluation. What it measures is the probe's business.

A run that is resumed from its checkpoint ends, on the CPU, with the same bits as one that was never stopped: the batches follow from seed
and step, and model, optimizer and probe are restored as they were.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from rwsim.errors import InvalidArgument, RwsimError
from rwsim.experiments.data import Data, Order
from rwsim.experiments.models import build
from rwsim.experiments.step import Step, loss_of
from rwsim.optimizers import find_rule
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalOptimizer, RotationalSGDM, set_speeds
from rwsim.rotational.rate import rotation_rate
from rwsim.theory.factors import schedule_factors

# Steps after which a loss that is not finite is found: looking makes a GPU wait.
LOOK = 50
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgdm": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adam_l2": torch.optim.Adam,
    "lion": lambda params, **hyper: RotationalLion(params, rotational=False, **hyper),
}

ROTATIONAL: Mapping[str, type[RotationalOptimizer]] = {
    "sgdm": RotationalSGDM, "adamw": RotationalAdamW, "adam_l2": RotationalAdam, "lion": RotationalLion,
}  # fmt: skip

# Whose steps can be captured in a CUDA graph; SGD's can as they are, and Lion finds its own fast path.
_ADAM, _SGD, _LION = {"fused": True, "capturable": True}, {"fused": True}, {"capturable": True}
_ON_CUDA = {"sgdm": _SGD, "adamw": _ADAM, "adam_l2": _ADAM, "lion": _LION}


@dataclass(frozen=True)
class Recipe:
    """A training but for its seed.

    Attributes:
        network: A name in `rwsim.experiments.models.NETWORKS`.
        optimizer: A name in `OPTIMIZERS`, which is that of its rule.
        hyper: The rule's hyperparameters at a schedule of 1. Weights of two and more dimensions decay, others do not.
        steps: Of training.
        batch: Items a step.
        size: Of the network.
        standardized: Whether its layers are standardized, with gains; ``"gain"``: they get gains alone.
        schedule: Of lr: a name of `rwsim.theory.factors.schedule_factors`.
        every: Steps between measurements.
        autocast: Compute in bf16 on CUDA.
        rotational: Options of the rotational variant (`rwsim.rotational.RotationalOptimizer`), which turns what decays by the rate that
            `hyper` implies; None: the optimizer itself.
        rotation_schedule: Of the rotation, as a factor on that of the peak: a name like `schedule`. Empty: as lr implies.
        imbalance: Arguments ``share``, ``factor``, ``kind`` of `rwsim.rotational.set_speeds`; None: every neuron turns by the same rate.
        frozen: Whether vectors (gains, biases) stay as they begin.
        validation: Items of the training data that are held back for validation (see `ImageData.split`).
    """

    network: str
    optimizer: str
    hyper: Mapping[str, Any]
    steps: int
    batch: int
    size: Mapping[str, Any] = field(default_factory=dict)
    standardized: bool | Literal["gain"] = False
    schedule: str = "constant"
    every: int = 10
    autocast: bool = False
    rotational: Mapping[str, Any] | None = None
    rotation_schedule: str = ""
    imbalance: Mapping[str, Any] | None = None
    frozen: bool = False
    validation: int = 0

    @property
    def text(self) -> bool:
        """Whether its data are text, not images."""
        return self.network == "gpt"

    def rule(self) -> Any:
        """The rule at its peak."""
        return find_rule(self.optimizer)(**self.hyper)


class Listener(Protocol):
    """What `train` asks of a probe beside its hooks; see `rwsim.DynamicsProbe`."""

    @property
    def due(self) -> bool: ...
    def replayed(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingDiverged(RwsimError):
    """A loss that is not finite, with its step, 1 for the first."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"the loss is not finite at step {step}")


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        losses: Training loss of every step, shape (time,).
        held_out_loss: Mean over what was held out.
        accuracy: Share of it, or of its bytes, that is predicted right.
        seconds: Of training since it was last resumed.
        graph: Whether steps were replayed from a CUDA graph.
    """

    losses: Tensor
    held_out_loss: float
    accuracy: float
    seconds: float
    graph: bool


def make_optimizer(recipe: Recipe, model: nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer of a recipe, with matrices under decay and vectors without.

    Args:
        recipe: Which.
        model: On its device.
        seed: Of the run; draws which neurons an imbalance affects.

    Raises:
        InvalidArgument: An unknown optimizer; a value out of range; what only a rotational variant has, without one.
    """
    if recipe.optimizer not in OPTIMIZERS:
        raise InvalidArgument("optimizer", f"must be one of {', '.join(OPTIMIZERS)}", recipe.optimizer)
    recipe.rule()  # refuses what is out of range
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    hyper = dict(recipe.hyper)
    groups = [{"params": matrices, "weight_decay": hyper.pop("weight_decay")}]
    if vectors and not recipe.frozen:
        groups.append({"params": vectors, "weight_decay": 0.0})
    fast: dict[str, Any] = {}
    if all(param.is_cuda for param in model.parameters()):
        fast = _ON_CUDA[recipe.optimizer] if recipe.rotational is None else {"capturable": True}
    if recipe.rotational is None:
        for name in ("rotation_schedule", "imbalance"):
            if getattr(recipe, name):
                raise InvalidArgument(name, "needs a rotational variant", getattr(recipe, name), "give rotational={}")
        return OPTIMIZERS[recipe.optimizer](groups, **hyper, **fast)
    optimizer = ROTATIONAL[recipe.optimizer](groups, **hyper, **fast, **_options(recipe.rotational))
    # The first gradients are then of weights without their means, and no step turns by what was centred.
    optimizer.centre()
    if recipe.imbalance is not None:
        set_speeds(optimizer, **recipe.imbalance, generator=torch.Generator().manual_seed(seed))
    return optimizer


def _options(rotational: Mapping[str, Any]) -> dict[str, Any]:
    """Of a rotational optimizer; a rate at other hyperparameters than the direction's becomes a function of the group."""
    options = dict(rotational)
    if isinstance(options.get("rotation"), Mapping):
        others = dict(options["rotation"])
        rate = rotation_rate(find_rule(others.pop("rule")))
        options["rotation"] = lambda group: rate({**group, **others})
    return options


def train(
    recipe: Recipe, data: Data, seed: int, device: torch.device, attach: Callable[[nn.Module, torch.optim.Optimizer], Listener], *,
    checkpoint: Path | None = None, save_seconds: float = 30.0, heard: Callable[[int], None] | None = None, graph: bool = True,
) -> Trained:  # fmt: skip
    """Train.

    Args:
        recipe: What.
        data: On `device`.
        seed: Of weights, order and augmentation.
        device: Where.
        attach: Given model and optimizer, gives the probe, which listens to steps.
        checkpoint: File that the state is kept in, and resumed from where it is there; removed by whoever has kept the result.
        save_seconds: Between checkpoints; one is also written at Ctrl-C, after the step that is under way.
        heard: Called with the number of steps done, now and then; may raise.
        graph: Capture steps in CUDA graphs where that works.

    Raises:
        TrainingDiverged: A loss is not finite.
        InvalidArgument: An unknown optimizer, a checkpoint of something else.
        KeyboardInterrupt: Ctrl-C.
    """
    model = build(recipe.network, seed, recipe.standardized, **recipe.size).to(device)
    optimizer = make_optimizer(recipe, model, seed)
    probe = attach(model, optimizer)
    factors = schedule_factors(recipe.schedule, recipe.steps)
    losses = torch.zeros(recipe.steps, device=device)
    order = Order(data, recipe.batch, seed)
    model.train()
    step = Step(model, optimizer, order, recipe.autocast, graph and device.type == "cuda")
    done, identity = 0, {"recipe": _plain(recipe), "seed": seed}
    if checkpoint is not None and checkpoint.exists():
        done = _restore(checkpoint, identity, model, optimizer, probe, losses)
    looked, saved, began = done, time.monotonic(), time.monotonic()

    def save() -> None:
        if checkpoint is not None:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "probe": probe.state_dict()}
            write(checkpoint, {**identity, "step": done, "losses": losses[:done].clone(), **kept})

    with _stops_between_steps() as stopped:
        while done < recipe.steps:
            step.schedule(1.0 if factors is None else float(factors[done]))
            if step.captured and not probe.due:
                losses[done] = step.replay(done)
                probe.replayed()
            else:
                losses[done] = step.take(done)
            done += 1
            if done % LOOK == 0 or done == recipe.steps:
                _check(losses, looked, done)
                looked = done
                if heard is not None:
                    heard(done)
                if time.monotonic() - saved > save_seconds:
                    save()
                    saved = time.monotonic()
            if stopped:
                save()
                raise KeyboardInterrupt
    seconds = time.monotonic() - began
    return Trained(losses.cpu(), *evaluate(model, data.evaluation()), seconds, step.captured)


@contextmanager
def _stops_between_steps() -> Iterator[list[int]]:
    """What has a Ctrl-C in it once there was one: within a step it would leave a state that is neither before nor after it.

    A second one is not waited for.
    """
    stopped: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, _: Any) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """(mean loss, share predicted right) over (inputs, targets), with running statistics."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for inputs, targets in batches:
        logits = model(inputs)
        loss += float(loss_of(logits, targets, "sum"))
        right += int((logits.argmax(-1) == targets).sum())
        count += targets.numel()
    return loss / count, right / count


def _check(losses: Tensor, looked: int, done: int) -> None:
    finite = torch.isfinite(losses[looked:done])
    if not finite.all():
        raise TrainingDiverged(looked + int(torch.nonzero(~finite)[0]) + 1)


def _plain(recipe: Recipe) -> dict[str, Any]:
    """A recipe in what `torch.load` takes without running code."""
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in asdict(recipe).items()}


def write(path: Path, content: dict[str, Any]) -> None:
    """Save whole or not at all."""
    draft = path.with_name(f"{path.name}.part")
    torch.save(content, draft)
    os.replace(draft, path)


def _restore(path: Path, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, probe: Any, losses: Tensor) -> int:
    """Load a checkpoint; the steps that it has done."""
    try:
        kept = torch.load(path, map_location=losses.device, weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch say
        raise InvalidArgument("--out", f"holds a checkpoint, {path.name}, that cannot be read ({type(error).__name__})", str(path.parent),
                              "remove it to start that run again") from None  # fmt: skip
    if {key: kept.get(key) for key in identity} != identity:
        raise InvalidArgument("--out", f"holds a checkpoint, {path.name}, of other settings", str(path.parent), "name another directory")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    probe.load_state_dict(kept["probe"])
    losses[: kept["step"]] = kept["losses"]
    return kept["step"]
