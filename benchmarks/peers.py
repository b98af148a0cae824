"""What a user would write today: the toy system as a torch module, torch.optim, and statistics of every step.

One layer of one config, whatever the engines beside it walk: a user takes one after the other, at the same rate. The
gradients are faithful: inputs, batch norm and backpropagation. Three forms of one step:

- ``loop``: plain torch, the optimizer's fused step.
- ``captured``: the same step as one CUDA graph, fresh random numbers on every replay.
- ``compiled``: the same step under torch.compile, its random numbers drawn before it; the optimizer's foreach step, which
  the compiler fuses itself. torch breaks the graph at `backward`; mode reduce-overhead fails there on CUDA.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Walker
from rwsim.errors import Unavailable
from rwsim.walk.job import Job
from rwsim.walk.measure import rotation_angle

# torch refuses 0; these leave nothing of a variance.
_EPS = {torch.float32: 1e-30, torch.float64: 1e-300}


class Lion(torch.optim.Optimizer):
    """Lion in plain torch, which has none."""

    def __init__(self, params: Iterable[Any], **hyper: Any) -> None:
        super().__init__(params, hyper)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                exp_avg = self.state[param]["exp_avg"]
                direction = torch.lerp(param.grad, exp_avg, beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
                exp_avg.lerp_(param.grad, 1 - beta2)


_ADAM = frozenset(("fused", "foreach", "capturable"))
# (optimizer, switches that it knows, decay decoupled) by rule. Their hyperparameters have torch's names.
PEERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], frozenset[str], bool]] = MappingProxyType(
    {
        "sgdm": (torch.optim.SGD, _ADAM - {"capturable"}, False),
        "adamw": (torch.optim.AdamW, _ADAM, True),
        "adam_l2": (torch.optim.Adam, _ADAM, False),
        "lion": (Lion, frozenset(), True),
    }
)


class Loop:
    """The toy system, its optimizer and its statistics.

    Attributes:
        sums: Sums over the open window of squared norm, angle and update, shape (3, neuron). The update is w' - w, less the
            decay where that is decoupled; elsewhere a second buffer would be needed, which few would keep.
        trace: Means of these, a tensor per window, on the device.
    """

    def __init__(self, job: Job, device: torch.device, **switches: bool) -> None:
        layer = job.layer
        options: dict[str, Any] = {"device": device, "dtype": job.dtype}
        self.generator = torch.Generator(device).manual_seed(job.seed)
        # nn.Linear would draw the same law from the global generator.
        self.linear = nn.utils.skip_init(nn.Linear, layer.fan_in, layer.neurons, bias=False, **options)
        with torch.no_grad():
            self.linear.weight.copy_(layer.start(1, 1, self.generator, job.dtype)[0])
        self.norm = nn.BatchNorm1d(layer.neurons, eps=_EPS[job.dtype], affine=False, track_running_stats=False)
        self.gamma_in, self.gamma_out = (torch.as_tensor(gamma, **options) for gamma in (layer.gamma_in, layer.gamma_out))
        self.scale = layer.loss_scale / (layer.neurons * layer.batch)
        self.batch, self.window, self.options = layer.batch, job.window, options
        make, known, decoupled = PEERS[job.rule.name]
        hyper = vars(job.rules[0].values)
        self.optimizer = make(self.linear.parameters(), **hyper, **{k: v for k, v in switches.items() if k in known})
        self.decay = hyper["lr"] * hyper["weight_decay"] if decoupled else 0.0
        self.sums = torch.zeros(3, layer.neurons, **options)
        self.trace: list[Tensor] = []
        self.taken = 0
        self.advance: Callable[[], object] = lambda: self.step(*self.draw())

    def draw(self) -> tuple[Tensor, Tensor]:
        """Fresh inputs (batch, dim) and gradients of the loss by the outputs (batch, neuron)."""
        inputs = torch.randn(self.batch, self.linear.in_features, generator=self.generator, **self.options)
        out_grad = torch.randn(self.batch, self.linear.out_features, generator=self.generator, **self.options)
        return inputs, self.scale * out_grad

    def step(self, inputs: Tensor, out_grad: Tensor) -> None:
        """One step of training and its statistics."""
        self.optimizer.zero_grad()
        outputs = self.gamma_out * self.norm(self.linear(self.gamma_in * inputs))
        outputs.backward(gradient=out_grad)
        old = self.linear.weight.detach().clone()
        self.optimizer.step()
        new = self.linear.weight.detach()
        difference = new - old
        norm, distance = (torch.linalg.vector_norm(vector, dim=-1) for vector in (new, difference))
        angle = rotation_angle(torch.linalg.vector_norm(old, dim=-1), norm, distance)
        update = torch.linalg.vector_norm(difference + self.decay * old, dim=-1) if self.decay else distance
        self.sums += torch.stack((norm, angle, update)).square()

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            self.advance()
            self.taken += 1
            if self.taken % self.window == 0:
                self.trace.append(self.sums / self.window)
                self.sums.zero_()


def loop(job: Job, device: torch.device) -> Walker:
    return Loop(job, device, fused=True).walk


def captured(job: Job, device: torch.device) -> Walker:
    if device.type != "cuda":
        raise Unavailable("a CUDA graph needs a CUDA device")
    result = Loop(job, device, fused=True, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the optimizer's buffers must be there before the capture
        result.walk(3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(result.generator)
    with torch.cuda.graph(graph):
        result.advance()
    result.advance = graph.replay
    return result.walk


def compiled(job: Job, device: torch.device) -> Walker:
    result = Loop(job, device, foreach=True, capturable=device.type == "cuda")
    try:
        torch.compiler.reset()  # a limit counts the versions of one function, and every optimizer is one more
        step = torch.compile(result.step)
        step(*result.draw())
    except Exception as error:  # no compiler, a compiler that fails: torch has no common class for it
        text = next(iter(str(error).splitlines()), "")
        raise Unavailable(f"torch.compile failed: {type(error).__name__}: {text}") from error

    result.advance = lambda: step(*result.draw())
    return result.walk
