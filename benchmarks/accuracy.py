"""How good the predictions are: a fixed design of hyperparameters, walked and compared with the paper's, exact and full forms.

    python -m benchmarks.accuracy walk --device cuda   # walks the design (five minutes on an H200), writes benchmarks/accuracy.csv
    python -m benchmarks.accuracy                      # predicts it (minutes on a CPU), prints the table, draws docs/accuracy.png

The design is a scrambled Latin hypercube with a fixed seed, 200 points an optimizer. `accuracy.csv` holds what was measured, so that
predictions are judged without a GPU. The factors of the full prediction's error estimate and the
threshold of `valid` were set on this design and on those of `--seed 1` and `--seed 2` (`accuracy-1.csv`, `accuracy-2.csv`); that of
`--seed 3` (`accuracy-3.csv`) was walked after the last of these choices.
"""

import argparse
import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from scipy.stats import qmc

from rwsim.optimizers import UpdateRule, find_rule
from rwsim.theory.equilibrium import Closure, predict_equilibrium
from rwsim.theory.forms import settled
from rwsim.theory.full import CORRECTIONS, predict_full
from rwsim.walk.system import Layer

OPTIMIZERS = ("sgdm", "adamw", "adam_l2", "lion")
QUANTITIES = ("norm", "rotation", "rms_update")
FORMS = ("paper", "exact", "full")
POINTS = 200
# Output scales of a layer; its copies make up the rest of the neurons.
_NEURONS = 16
_ELEMENTS, _MOST_ROWS = 2**21, 2**16
_LONGEST_WINDOW = 2000
# Errors below this, in percent, are drawn at it.
_LEAST = 1e-3
# Only the size of the weights follows these, and with it what eps is compared with.
_LR = {"sgdm": 0.1, "adamw": 1e-2, "adam_l2": 1e-3, "lion": 1e-2}


@dataclass(frozen=True)
class Point:
    """One setting of the design.

    Attributes:
        number: Seed of its gammas and of its walk.
        rate: eta lambda; for Adam+l2 eta lambda / sqrt(v) at even gammas, which plays its part there.
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
        momentum = {"momentum": self.beta_1} if "momentum" in kind.hyper else {"betas": (self.beta_1, self.beta_2)}
        return kind(lr=self.lr, weight_decay=self.weight_decay, **momentum, **({"eps": self.eps} if "eps" in kind.hyper else {}))

    @property
    def layer(self) -> Layer:
        return Layer.draw(self.fan_in, _NEURONS, self.batch, self.loss_scale, self.gamma, self.number)

    @property
    def relaxation(self) -> float:
        """Steps in which weights forget."""
        return (1 - self.beta_1 if self.optimizer == "sgdm" else 1) / self.rate

    @property
    def burn_in(self) -> int:
        """From weights of the predicted size: what they and the longest average need."""
        longest = 1 / (1 - (self.beta_2 or self.beta_1))
        return math.ceil((8 if self.optimizer == "adam_l2" else 5) * self.relaxation + 8 * longest + 200)

    @property
    def window(self) -> int:
        return min(_LONGEST_WINDOW, max(50, self.burn_in // 20))

    @property
    def steps(self) -> int:
        """Whole windows, at least four after the burn-in."""
        measured = max(math.ceil(5 * self.relaxation + 500), 4 * self.window)
        return -(-(self.burn_in + measured + self.window) // self.window) * self.window


def design(optimizer: str, points: int = POINTS, seed: int = 0) -> list[Point]:
    """eta lambda 1e-4 to 5e-2; 1 - beta_1 (momentum) 1 to 0.01, 1 - beta_2 0.1 to 1e-4; C 16 to 4096; B 8 to 512; loss scale 1e-3 to
    1e3, all logarithmic; gammas all one or standard normal."""
    unit = qmc.LatinHypercube(7, rng=np.random.default_rng(OPTIMIZERS.index(optimizer) + 1000 * seed)).random(points)
    found = []
    for number, u in enumerate(unit, 1000 * seed):
        rate = float(10 ** (-4 + u[0] * math.log10(500)))
        beta_1, beta_2 = float(1 - 10 ** (-2 * u[1])), float(1 - 10 ** (-1 - 3 * u[2]))
        fan_in, batch = round(16 * 256 ** u[3]), round(8 * 64 ** u[4])
        # Multiples of 16 above 128: the kernel is compiled for fewer cases.
        fan_in = fan_in if fan_in < 128 else 16 * round(fan_in / 16)
        gamma, loss_scale = ("uniform", "normal")[int(2 * u[5])], float(10 ** (-3 + 6 * u[6]))
        lr = _LR[optimizer]
        decay = rate / lr
        if optimizer == "adam_l2":  # sqrt(v) of Table 1 at even gammas
            scale = loss_scale / (_NEURONS * batch) * math.sqrt(batch * (batch - 2) / (batch - 3))
            decay = (rate / fan_in) ** 1.5 * math.sqrt(2) * fan_in * scale / lr**2
        beta_2 = 0.0 if optimizer == "sgdm" else beta_2
        eps = 1e-8 if optimizer in ("adamw", "adam_l2") else 0.0
        found.append(Point(optimizer, number, rate, lr, decay, beta_1, beta_2, eps, fan_in, batch, gamma, loss_scale))
    return found


def walk(point: Point, device: str) -> dict[str, float]:
    """Measured norm, mean rotation and RMS update, and their relative errors: rows walk independently."""
    import torch

    from rwsim.walk.job import Job
    from rwsim.walk.simulate import resolve_device, resolve_engine

    layers = max(2, min(_MOST_ROWS, _ELEMENTS // point.fan_in) // _NEURONS)
    job = Job((point.rule,), point.layer, point.steps, "marginal", layers, seed=point.number, window=point.window)
    law = point.layer.law("marginal")
    if settled(type(point.rule)).direction == "sign":
        spread = (predict_equilibrium(point.rule, law).exact.norm_sq / point.fan_in)[:, None].repeat(point.fan_in, 1)
    else:
        spread = Closure(point.rule).spread(law)
    normal = torch.randn(job.shape, generator=torch.Generator().manual_seed(point.number))
    start = normal * torch.as_tensor(np.sqrt(spread), dtype=torch.float32).repeat(layers, 1)
    target = resolve_device(device)
    found = resolve_engine("auto", job, target).walk(job, target, start=start).kept(point.burn_in)
    out = {}
    for name in QUANTITIES:
        rows = found.statistic(name)[:, 0].mean(0).reshape(layers, _NEURONS)  # alike but for gamma_out
        mean = float(rows.mean())
        error = math.sqrt((rows.var(0, ddof=1) / layers).mean() / _NEURONS) / mean
        out[name], out[f"{name}_mcse"] = (mean, error) if name == "rotation" else (math.sqrt(mean), error / 2)
    return out


def walk_design(optimizer: str, device: str, seed: int, limit: int, out: Path) -> None:
    """Points in the order of their fan-in, which is that of the kernels; one line each as it ends."""
    began = time.monotonic()
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _columns(), lineterminator="\n")
        for point in sorted(design(optimizer, seed=seed)[:limit], key=lambda p: p.fan_in):
            writer.writerow(asdict(point) | walk(point, device))
            file.flush()
    print(f"{optimizer}: {time.monotonic() - began:.0f} s", flush=True)


def _columns() -> list[str]:
    return [f.name for f in fields(Point)] + [c for q in QUANTITIES for c in (q, f"{q}_mcse")]


def measured(path: Path) -> list[tuple[Point, dict[str, float]]]:
    """The points of a file and what was measured."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = Point(**{f.name: f.type(row[f.name]) for f in fields(Point)})  # type: ignore[operator]  # annotations are classes here
            rows.append((point, {name: float(row[name]) for name in _columns()[len(fields(Point)) :]}))
    return rows


def judge(case: tuple[Point, dict[str, float], tuple[str, ...]]) -> dict[str, float | str]:
    """Relative errors of every form, measured over predicted less one."""
    point, found, corrections = case
    law = point.layer.law("marginal")
    prediction, full = predict_equilibrium(point.rule, law), predict_full(point.rule, law, corrections)
    out: dict[str, float | str] = {"optimizer": point.optimizer, "number": point.number, "valid": full.valid}
    for name, form in (("paper", prediction.paper), ("exact", prediction.exact), ("full", full)):
        out |= {f"{name}_{q}": found[q] / getattr(form, q) - 1 for q in QUANTITIES}
    out |= {f"{q}_mcse": found[f"{q}_mcse"] for q in QUANTITIES}
    return out | {"norm_error": full.norm_error, "rotation_error": full.rotation_error}


def write_errors(cases: list[tuple[Point, dict[str, float]]], rows: list[dict], path: Path) -> None:
    """A line a point: its setting, what was measured, and the relative error of every form (``full_norm``, ...)."""
    lines = [asdict(point) | found | row for (point, found), row in zip(cases, rows, strict=True)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def table(rows: list[dict], optimizers: Iterable[str] = (*OPTIMIZERS, "all")) -> str:
    """Markdown: absolute errors in percent; `valid` restricts to the points that the full prediction stands by."""
    lines = [
        "| optimizer | quantity | form | median | 95 % | most | valid: share | 95 % | most | estimate holds | estimate / error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for optimizer in optimizers:
        mine = [row for row in rows if optimizer in (row["optimizer"], "all")]
        valid = np.array([row["valid"] for row in mine], dtype=bool)
        for quantity in QUANTITIES[:2]:
            for form in FORMS:
                error = 100 * np.abs([row[f"{form}_{quantity}"] for row in mine])
                cells = [f"{np.median(error):.3f}", f"{np.quantile(error, 0.95):.2f}", f"{error.max():.2f}"]
                if form == "full":
                    estimate = 100 * np.array([row[f"{quantity}_error"] for row in mine])
                    noise = 200 * np.array([row[f"{quantity}_mcse"] for row in mine])
                    holds = np.mean(error <= np.hypot(estimate, noise))
                    kept = error[valid]
                    cells += [f"{100 * valid.mean():.0f} %", f"{np.quantile(kept, 0.95):.2f}", f"{kept.max():.2f}"]
                    cells += [f"{100 * holds:.1f} %", f"{np.median(estimate) / np.median(error):.1f}"]
                else:
                    cells += [""] * 5
                lines.append(f"| {optimizer} | {quantity} | {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def without(rows_of: dict[str, list[dict]]) -> str:
    """Markdown: what each correction brings, the 95 % quantile of the absolute error in percent without it."""
    lines = [
        "| optimizer | quantity | full | " + " | ".join(f"without {c}" for c in CORRECTIONS) + " |",
        "|---" * (3 + len(CORRECTIONS)) + "|",
    ]
    for optimizer in OPTIMIZERS:
        for quantity in QUANTITIES[:2]:
            cells = []
            for name in ("full", *CORRECTIONS):
                error = [abs(row[f"full_{quantity}"]) for row in rows_of[name] if row["optimizer"] == optimizer and row["valid"]]
                cells.append(f"{100 * np.quantile(error, 0.95):.2f}" if error else "")
            lines.append(f"| {optimizer} | {quantity} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Distributions of the absolute errors of all points, valid or not, a panel for each optimizer and quantity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(OPTIMIZERS), figsize=(11, 5), sharex=True, sharey=True, layout="constrained")
    colours = {"paper": "0.6", "exact": "tab:blue", "full": "tab:red"}
    for column, optimizer in enumerate(OPTIMIZERS):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        for line, quantity in enumerate(QUANTITIES[:2]):
            axis = axes[line, column]
            for form in FORMS:
                error = np.sort(100 * np.abs([row[f"{form}_{quantity}"] for row in mine]))
                axis.plot(np.maximum(error, _LEAST), np.arange(1, len(error) + 1) / len(error), color=colours[form], label=form)
            noise = 100 * float(np.median([row[f"{quantity}_mcse"] for row in mine]))
            axis.axvspan(_LEAST, max(noise, _LEAST), color="0.93", lw=0, label="below the error of the measurement")
            axis.axvline(0.5, color="0.75", lw=0.8, ls=":", label="half a percent")
            axis.set(xscale="log", xlim=(_LEAST, 300), ylim=(0, 1))
            if line == 0:
                axis.set_title(optimizer)
            else:
                axis.set_xlabel("error, %")
            if column == 0:
                axis.set_ylabel(f"share of points\n({'norm' if line == 0 else 'mean angle'})")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=120)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("compare", "walk"), default="compare")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0, help="of the design")
    parser.add_argument("--limit", type=int, default=POINTS, help="points an optimizer")
    parser.add_argument("--out", type=Path, default=here, help="directory of the measurements")
    parser.add_argument("--figure", type=Path, help="by default docs/accuracy.png for seed 0, else none")
    parser.add_argument("--errors", type=Path, help="also write every point's relative errors to this file; `rwsim report` shows it")
    parser.add_argument("--without", action="store_true", help="also what each correction brings (five times the time)")
    parser.add_argument("--only", choices=OPTIMIZERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    file = options.out / (f"accuracy-{options.seed}.csv" if options.seed else "accuracy.csv")
    if options.only:
        walk_design(options.only, options.device, options.seed, options.limit, options.out / f"{options.only}.part.csv")
        return
    if options.what == "walk":
        # One process an optimizer: kernels are compiled side by side.
        jobs = [subprocess.Popen([sys.executable, "-m", "benchmarks.accuracy", *sys.argv[1:], "--only", o]) for o in OPTIMIZERS]
        if any([job.wait() for job in jobs]):
            sys.exit(3)
        parts = [options.out / f"{o}.part.csv" for o in OPTIMIZERS]
        file.write_text(",".join(_columns()) + "\n" + "".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
        for part in parts:
            part.unlink()
        return
    cases = [(p, m) for p, m in measured(file) if p.number % 1000 < options.limit]
    with ProcessPoolExecutor(os.cpu_count()) as pool:

        def rows(corrections: tuple[str, ...]) -> list[dict]:
            return list(pool.map(judge, [(*case, corrections) for case in cases], chunksize=4))

        full = rows(CORRECTIONS)
        print(table(full))
        if options.errors is not None:
            write_errors(cases, full, options.errors)
        if options.without:
            print("\n" + without({"full": full} | {c: rows(tuple(x for x in CORRECTIONS if x != c)) for c in CORRECTIONS}))
    figure = options.figure or (here.parent / "docs" / "accuracy.png" if not options.seed else None)
    if figure is not None:
        draw(full, figure)


if __name__ == "__main__":
    main()
