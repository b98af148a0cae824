"""How good the predictions are: a fixed design of hyperparameters, walked and compared with the paper's, exact and full forms.

    python -m benchmarks.accuracy walk --device cuda     # walks the design (minutes on one GPU), writes accuracy.csv
    python -m benchmarks.accuracy                        # predicts it, prints the table, draws docs/accuracy.png

The design is a scrambled Latin hypercube with a fixed seed: 200 points an optimizer. `accuracy.csv` beside this file holds what
was measured, so that predictions are judged without a GPU.
"""

import argparse
import csv
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import qmc

from rwsim.optimizers import UpdateRule, find_rule

OPTIMIZERS = ("sgdm", "adamw", "adam_l2", "lion")
MEASURED = Path(__file__).with_suffix(".csv")
POINTS = 200
# Output scales of a layer; its copies make up the rest of the neurons.
_NEURONS = 16
_ELEMENTS = 2**21
_MOST_ROWS = 2**16
_LONGEST_WINDOW = 2000
# Rates of learning at which nothing but the size of the weights changes (and with it what eps is compared with).
_LR = {"sgdm": 0.1, "adamw": 1e-2, "adam_l2": 1e-3, "lion": 1e-2}


@dataclass(frozen=True)
class Point:
    """One setting of the design.

    Attributes:
        rate: eta lambda; for Adam+l2 the nominal eta lambda / sqrt(v) of uniform gammas, which is what plays its part there.
    """

    optimizer: str
    number: int
    rate: float
    lr: float
    weight_decay: float
    beta_1: float
    beta_2: float
    eps: float
    fan_in: int
    batch: int
    gamma: str
    loss_scale: float

    @property
    def rule(self) -> UpdateRule:
        kind = find_rule(self.optimizer)
        hyper = {"lr": self.lr, "weight_decay": self.weight_decay}
        hyper |= {"momentum": self.beta_1} if "momentum" in kind.hyper else {"betas": (self.beta_1, self.beta_2)}
        return kind(**hyper, **({"eps": self.eps} if "eps" in kind.hyper else {}))

    @property
    def layer(self):
        from rwsim.walk.system import Layer

        return Layer.draw(self.fan_in, _NEURONS, self.batch, self.loss_scale, self.gamma, self.number)

    @property
    def burn_in(self) -> int:
        """Steps that the slowest average and the weights need, from weights that have the predicted size."""
        slow = 1 / (1 - self.beta_2) if self.beta_2 else 1 / (1 - self.beta_1)
        weights = 1 / self.rate * (1 - self.beta_1 if self.optimizer == "sgdm" else 1)
        return math.ceil((8 if self.optimizer == "adam_l2" else 5) * weights + 8 * slow + 200)

    @property
    def steps(self) -> int:
        weights = 1 / self.rate * (1 - self.beta_1 if self.optimizer == "sgdm" else 1)
        return self.burn_in + math.ceil(5 * weights + 500)


def design(optimizer: str, points: int = POINTS) -> list[Point]:
    """eta lambda 1e-4 to 5e-2; 1 - beta_1 (momentum) 1 to 0.01, 1 - beta_2 0.1 to 1e-4; C 16 to 4096; B 8 to 512; gammas uniform
    and normal; loss scale 1e-3 to 1e3: all but the gammas on logarithmic scales."""
    unit = qmc.LatinHypercube(7, rng=np.random.default_rng(OPTIMIZERS.index(optimizer))).random(points)
    found = []
    for number, u in enumerate(unit):
        rate = float(10 ** (-4 + u[0] * math.log10(500)))
        beta_1, beta_2 = float(1 - 10 ** (-2 * u[1])), float(1 - 10 ** (-1 - 3 * u[2]))
        fan_in, batch = round(16 * 256 ** u[3]), round(8 * 64 ** u[4])
        # Multiples of 16 above 128: the kernel is compiled for fewer cases.
        fan_in = fan_in if fan_in < 128 else 16 * round(fan_in / 16)
        gamma, loss_scale = ("uniform", "normal")[int(2 * u[5])], float(10 ** (-3 + 6 * u[6]))
        lr = _LR[optimizer]
        decay = rate / lr
        if optimizer == "adam_l2":
            scale = loss_scale / (_NEURONS * batch) * math.sqrt(batch * (batch - 2) / (batch - 3))
            decay = (rate / fan_in) ** 1.5 * math.sqrt(2) * fan_in * scale / lr**2
        beta_2 = 0.0 if optimizer == "sgdm" else beta_2
        eps = 1e-8 if optimizer in ("adamw", "adam_l2") else 0.0
        found.append(Point(optimizer, number, rate, lr, decay, beta_1, beta_2, eps, fan_in, batch, gamma, loss_scale))
    return found


def walk(point: Point, device: str) -> dict[str, float]:
    """Measured norm, mean rotation and RMS update with their errors, relative; rows are independent."""
    import torch

    from rwsim.theory.equilibrium import predict_equilibrium  # noqa: F401
    from rwsim.walk.job import Job
    from rwsim.walk.simulate import resolve_device, resolve_engine

    layer = point.layer
    layers = max(1, min(_MOST_ROWS, _ELEMENTS // point.fan_in) // _NEURONS)
    window = min(_LONGEST_WINDOW, max(50, point.burn_in // 20))
    job = Job((point.rule,), layer, -(-point.steps // window) * window, "marginal", layers, seed=point.number, window=window)
    generator = torch.Generator().manual_seed(point.number)
    spread = start_spread(point)
    start = torch.randn(job.shape, generator=generator) * torch.as_tensor(np.sqrt(spread), dtype=torch.float32).repeat(layers, 1)
    target = resolve_device(device)
    engine = resolve_engine("auto", job, target)
    found = engine.walk(job, target, start=start).kept(point.burn_in)
    half = len(found.lengths) // 2
    out = {}
    for name, quantity in (("norm", "norm"), ("rotation", "rotation"), ("rms_update", "rms_update")):
        series = found.statistic(quantity)[:, 0]
        # Rows are alike but for gamma_out: errors are taken within each of its values.
        per_row = series.mean(0).reshape(layers, _NEURONS)
        mean = per_row.mean()
        error = math.sqrt((per_row.var(0, ddof=1) / layers).mean() / _NEURONS) / mean if layers > 1 else math.nan
        drift = series[half:].mean() / series[:half].mean() - 1
        root = quantity != "rotation"
        out[name] = math.sqrt(mean) if root else mean
        out[f"{name}_mcse"] = error / 2 if root else error
        out[f"{name}_drift"] = drift / 2 if root else drift
    return out


def start_spread(point: Point) -> np.ndarray:
    """The predicted E w_c^2, (neuron, dim): a start near the end."""
    from rwsim.theory import equilibrium

    rule, law = point.rule, point.layer.law("marginal")
    solve = equilibrium._sign if equilibrium._settled(type(rule)).direction == "sign" else equilibrium._rational
    return solve(rule, law)[1]


def walk_design(optimizer: str, device: str, out: Path, limit: int) -> None:
    began = time.monotonic()
    with out.open("w", newline="") as file:
        writer = None
        for point in sorted(design(optimizer)[:limit], key=lambda p: p.fan_in):
            start = time.monotonic()
            try:
                found = walk(point, device)
            except Exception as error:  # one point must not cost the others
                print(f"{optimizer} {point.number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            row = asdict(point) | found
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            if point.number % 20 == 0:
                print(f"{optimizer} {point.number} C={point.fan_in} steps={point.steps} {time.monotonic() - start:.2f} s, in all {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="compare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=MEASURED.parent)
    parser.add_argument("--optimizer")
    parser.add_argument("--limit", type=int, default=POINTS)
    arguments = parser.parse_args()
    if arguments.optimizer:
        walk_design(arguments.optimizer, arguments.device, arguments.out / f"{arguments.optimizer}.csv", arguments.limit)
    else:
        jobs = [subprocess.Popen([sys.executable, "-m", "benchmarks.accuracy", "walk", "--device", arguments.device, "--out", str(arguments.out), "--optimizer", o, "--limit", str(arguments.limit)]) for o in OPTIMIZERS]
        sys.exit(max(job.wait() for job in jobs))
