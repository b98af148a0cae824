"""`rwsim validate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rwsim.cli.shared import FAILS, HOLDS, HYPER, INTERNAL, OUTPUT, Whole, check_place, refuse, whole
from rwsim.errors import WalkInterrupted

if TYPE_CHECKING:
    from rwsim.validate import CaseResult, Validation


def validate(
    *,
    optimizer: Annotated[list[str] | None, Parameter(negative=())] = None,
    steps: Whole = 15_000,
    neurons: Whole = 128,
    fan_in: Whole = 128,
    batch: Whole = 32,
    gradient: Literal["marginal", "faithful", "gaussian"] = "marginal",
    layers: Annotated[int | None, Parameter(converter=whole)] = None,
    gamma: Literal["normal", "uniform"] = "normal",
    loss_scale: float | None = None,
    margin: float = 0.01,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    engine: Literal["auto", "reference", "blocked", "fused"] = "auto",
    seed: Whole = 0,
    lr: Annotated[float | None, Parameter(group=HYPER)] = None,
    weight_decay: Annotated[float | None, Parameter(group=HYPER)] = None,
    momentum: Annotated[float | None, Parameter(group=HYPER)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=HYPER)] = None,
    eps: Annotated[float | None, Parameter(group=HYPER)] = None,
    out: Annotated[Path, Parameter(group=OUTPUT)] = Path("rwsim-validate"),
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Walk the paper's random-walk experiment and compare it with Table 1 and with the full prediction.

    Without options: the paper's Figure 9, four optimizers at its settings, and Lion once more at its usual betas.
    The exit status follows the full prediction: 0 if every quantity agrees, 1 if one differs or is undecided.

    ```sh
    rwsim validate
    rwsim validate --optimizer lion --lr 1e-3 --weight-decay 0.5 --betas 0.9 0.99
    ```

    Parameters
    ----------
    optimizer
        Rule to validate; may be repeated. Default: all of the paper's.
    steps
        Length of the walk, until equilibrium and beyond; it goes on for as long as the margin needs unless layers are given.
    neurons
        K, neurons per layer.
    fan_in
        C, weights per neuron, at least 2.
    batch
        B, inputs per step, at least 4.
    gradient
        marginal: the exact law of one neuron's gradient, neurons independent. faithful: inputs, batch norm and
        backpropagation as printed; the layer is the unit of the error bars. gaussian: free i.i.d. gradients.
    layers
        Independent copies of the layer, walked for these steps and no more. Default: one, walked on as the margin needs.
    gamma
        Scales of inputs and outputs: standard normal draws (the paper's) or all one.
    loss_scale
        Factor on the output gradients. Default: 1, and 0.1 for adam_l2 (at 1 it needs far more than 15,000 steps).
    margin
        Largest relative difference that counts as agreement.
    device
        Where to walk; auto takes the CPU.
    engine
        auto takes the fastest that carries the walk.
    seed
        Of gammas, weights and gradients.
    lr
        Learning rate.
    weight_decay
        Weight decay.
    momentum
        Momentum of sgdm.
    betas
        Averages of adamw, adam_l2, lion.
    eps
        Added to the root in adamw and adam_l2; default 0, as in the analysis.
    out
        Directory for walk.png, walk.csv and validation.json.
    json_file
        Also write the records to this file.
    quiet
        Print nothing but errors.
    """
    given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
    options = {
        "steps": steps, "neurons": neurons, "fan_in": fan_in, "batch": batch, "gradient": gradient, "layers": layers, "gamma": gamma,
        "loss_scale": loss_scale, "margin": margin, "device": device, "engine": engine, "seed": seed,
    }  # fmt: skip
    check_place("--out", out, folder=True)
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    result = _watched(optimizer or [], {k: v for k, v in given.items() if v is not None}, options, quiet)
    text = json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "validation.json").write_text(text)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text)
    _write_traces(result, out / "walk.csv")
    from rwsim.plots import save_validation

    figure = save_validation(result, out)
    if not quiet:
        print(f"\nWritten to {out}: validation.json, walk.csv{', walk.png' if figure else ''}  ({result.seconds:.0f} s)")
    if result.stopped is not None:
        return refuse(result.stopped, INTERNAL if isinstance(result.stopped, WalkInterrupted) else FAILS)
    return HOLDS if result.passed else FAILS


def _watched(optimizers: list[str], hyper: dict[str, Any], options: dict[str, Any], quiet: bool) -> "Validation":
    """Run the validation behind a progress bar, printing each optimizer's rows when they are there."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import rwsim
    from rwsim.tables import case_table, footnotes

    console = Console(quiet=quiet, highlight=False, soft_wrap=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done)

        def finished(case: "CaseResult") -> None:
            if (task := tasks.pop(case.case.label, None)) is not None:
                bar.remove_task(task)
            console.print(case_table(case))

        result = rwsim.validate(optimizers, progress=progress, done=finished, **hyper, **options)
    for line in footnotes(result):
        console.print(line)
    return result


def _write_traces(result: "Validation", path: Path) -> None:
    """Window by window: the layer mean of every quantity, also of a walk that ended early."""
    import numpy as np

    from rwsim.walk.measure import QUANTITIES, layer_mean

    walks = [(done.case.label, done.walk) for done in result.cases]
    walks += [(f"{case.label} (ended early)", walk) for case, walk in result.partial]
    lines = [",".join(("optimizer", "step", *QUANTITIES))]
    for label, walk in walks:
        means = [layer_mean(walk, quantity) for quantity in QUANTITIES]
        for i, step in enumerate(np.cumsum(walk.lengths)):
            lines.append(",".join((label, str(step), *(repr(float(m[i])) for m in means))))
    path.write_text("\n".join(lines) + "\n")
