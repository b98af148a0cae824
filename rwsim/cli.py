"""The command line. Exit 0 = holds, 1 = does not hold or undecided, 2 = bad usage, 3 = internal error or interrupted."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, Token

from rwsim import __version__
from rwsim.errors import InvalidArgument, NoEquilibrium, RwsimError, Unavailable, UnsupportedRule, WalkInterrupted, WalkStopped

if TYPE_CHECKING:
    from rwsim.validate import CaseResult, Validation

HOLDS, FAILS, USAGE, INTERNAL = 0, 1, 2, 3

app = App(
    name="rwsim", version=__version__, help="A random-walk laboratory for optimizers with weight decay.",
    print_error=False, exit_on_error=False, suppress_keyboard_interrupt=False, result_action="return_value",
)  # fmt: skip
_HYPER = Group("Hyperparameters (with one --optimizer)", sort_key=2)
_OUTPUT = Group("Output", sort_key=3)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: every way out has its exit status, and bad usage is one line on stderr."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Like `main`, returning the exit status."""
    try:
        result = app(arguments)
        return result if isinstance(result, int) else HOLDS
    except (CycloptsError, InvalidArgument, NoEquilibrium, Unavailable, UnsupportedRule) as error:
        return _refuse(error, USAGE)
    except WalkStopped as error:
        return _refuse(error, INTERNAL if isinstance(error, WalkInterrupted) else FAILS)
    except RwsimError as error:
        return _refuse(error, INTERNAL)
    except KeyboardInterrupt:
        return _refuse("interrupted", INTERNAL)
    except BrokenPipeError:
        # The reader of our output went away; say nothing more to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except Exception as error:
        traceback.print_exc()
        return _refuse(f"internal error: {type(error).__name__}: {error}", INTERNAL)


def _refuse(error: object, status: int) -> int:
    print(f"rwsim: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _whole(_: type, tokens: Sequence[Token]) -> int:
    """Integers only: 1.5 is refused, not rounded."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise InvalidArgument((tokens[0].keyword or "").lstrip("-"), "must be a whole number", tokens[0].value) from None


_Whole = Annotated[int, Parameter(converter=_whole)]


def _check_place(argument: str, path: Path, folder: bool) -> None:
    """Refuse, before any work and without creating anything, a place that cannot be written to."""
    if folder and path.exists() and not path.is_dir():
        raise InvalidArgument(argument, "must be a directory", str(path), "name one that is not a file")
    if not folder and path.is_dir():
        raise InvalidArgument(argument, "must be a file", str(path), "name a file in that directory")
    above = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if not path.exists() and not above.is_dir():
        raise InvalidArgument(argument, f"must not lie below the file {above.name}", str(path), "name another place")
    if not os.access(above, os.W_OK):
        raise InvalidArgument(argument, "must be writable", str(path), "name another place")


@app.command
def validate(
    *,
    optimizer: list[str] | None = None,
    steps: _Whole = 15_000,
    neurons: _Whole = 128,
    fan_in: _Whole = 128,
    batch: _Whole = 32,
    gradient: Literal["marginal", "faithful", "gaussian"] = "marginal",
    layers: Annotated[int | None, Parameter(converter=_whole)] = None,
    gamma: Literal["normal", "uniform"] = "normal",
    loss_scale: float | None = None,
    margin: float = 0.02,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    engine: Literal["auto", "reference", "blocked", "fused"] = "auto",
    seed: _Whole = 0,
    lr: Annotated[float | None, Parameter(group=_HYPER)] = None,
    weight_decay: Annotated[float | None, Parameter(group=_HYPER)] = None,
    momentum: Annotated[float | None, Parameter(group=_HYPER)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=_HYPER)] = None,
    eps: Annotated[float | None, Parameter(group=_HYPER)] = None,
    out: Annotated[Path, Parameter(group=_OUTPUT)] = Path("rwsim-validate"),
    json_file: Annotated[Path | None, Parameter(name="--json", group=_OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
) -> int:
    """Walk the paper's random-walk experiment and compare it with Table 1 and with the exact theory.

    Without options: the paper's Figure 9, four optimizers at its settings, and Lion once more at its usual betas.
    The exit status follows the exact theory: 0 if every quantity agrees, 1 if one differs or is undecided.

    Parameters
    ----------
    optimizer
        Rule to validate; may be repeated. Default: all of the paper's.
    steps
        Length of the walk.
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
        Independent copies of the layer. Default: as many as make up for the steps lost to burn-in.
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
    _check_place("--out", out, folder=True)
    if json_file is not None:
        _check_place("--json", json_file, folder=False)
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
        return _refuse(result.stopped, INTERNAL if isinstance(result.stopped, WalkInterrupted) else FAILS)
    return HOLDS if result.passed else FAILS


@app.command
def derive(
    what: str = "all",
    /,
    *,
    format: Literal["text", "latex", "markdown"] = "text",
    order: _Whole = 1,
    json_file: Annotated[Path | None, Parameter(name="--json", group=_OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
) -> int:
    """Derive the paper's results step by step, each step carried out and checked; fail if one does not hold.

    Parameters
    ----------
    what
        all; a rule (a name, or FILE.py:RULE for your own); or an id: T1 to T12, slips.
    format
        text, a LaTeX document, or Markdown.
    order
        To which order in lr times weight decay the exact norm is compared with the paper's.
    json_file
        Also write every step and how it was checked to this file.
    quiet
        Print nothing but errors.
    """
    if json_file is not None:
        _check_place("--json", json_file, folder=False)
    import derivations
    from rwsim.optimizers import RULES, find_rule

    chosen = find_rule(what) if what in RULES or ":" in what else what
    results = derivations.run(chosen, order=order)
    failures = [result.failure for result in results if not result.ok]
    if not quiet:
        print(derivations.render(results, format))
        if format == "text":
            steps = sum(len(result.checked) for result in results)
            print(f"\n{len(results)} derivations, {steps} steps: {'every step holds' if not failures else 'NOT every step holds'}.")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(derivations.records(results), indent=1) + "\n")
    for failure in failures:
        _refuse(failure, FAILS)
    return FAILS if failures else HOLDS


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


if __name__ == "__main__":
    main()
