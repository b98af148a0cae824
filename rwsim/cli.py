"""The command line. Exit 0 = holds, 1 = does not hold or undecided, 2 = bad usage, 3 = internal error or interrupted."""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, Token

from rwsim import __version__
from rwsim.errors import InvalidArgument, NoEquilibrium, RwsimError, Unavailable, UnsupportedRule, WalkInterrupted, WalkStopped

if TYPE_CHECKING:
    from rwsim.sweeps.grid import SweepConfig
    from rwsim.sweeps.sweep import Sweep
    from rwsim.validate import CaseResult, Validation

HOLDS, FAILS, USAGE, INTERNAL = 0, 1, 2, 3

app = App(
    name="rwsim", version=__version__, help="A random-walk laboratory for optimizers with weight decay.",
    print_error=False, exit_on_error=False, suppress_keyboard_interrupt=False, result_action="return_value",
)  # fmt: skip
_HYPER = Group("Hyperparameters (with one --optimizer)", sort_key=2)
_FIXED = Group("Hyperparameters that are fixed (for every optimizer that takes them)", sort_key=2)
_RUNNING = Group("Running", sort_key=3)
_OUTPUT = Group("Output", sort_key=4)


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
    optimizer: Annotated[list[str] | None, Parameter(negative=())] = None,
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


@app.command
def sweep(
    grid: Path | None = None,
    /,
    *,
    optimizer: Annotated[list[str] | None, Parameter(negative=())] = None,
    axis: Annotated[list[str] | None, Parameter(negative=())] = None,
    design: Literal["grid", "random", "latin"] | None = None,
    points: Annotated[int | None, Parameter(converter=_whole)] = None,
    replicates: Annotated[int | None, Parameter(converter=_whole)] = None,
    steps: Annotated[int | None, Parameter(converter=_whole)] = None,
    neurons: Annotated[int | None, Parameter(converter=_whole)] = None,
    fan_in: Annotated[int | None, Parameter(converter=_whole)] = None,
    batch: Annotated[int | None, Parameter(converter=_whole)] = None,
    gradient: Literal["marginal", "faithful", "gaussian"] | None = None,
    layers: Annotated[int | None, Parameter(converter=_whole)] = None,
    gamma: Literal["normal", "uniform"] | None = None,
    loss_scale: float | None = None,
    window: Annotated[int | None, Parameter(converter=_whole)] = None,
    seed: Annotated[int | None, Parameter(converter=_whole)] = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    engine: Literal["auto", "reference", "blocked", "fused"] | None = None,
    lr: Annotated[float | None, Parameter(group=_FIXED)] = None,
    weight_decay: Annotated[float | None, Parameter(group=_FIXED)] = None,
    momentum: Annotated[float | None, Parameter(group=_FIXED)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=_FIXED)] = None,
    eps: Annotated[float | None, Parameter(group=_FIXED)] = None,
    executor: Annotated[Literal["local", "processes", "dask"], Parameter(group=_RUNNING)] = "local",
    workers: Annotated[int | None, Parameter(converter=_whole, group=_RUNNING)] = None,
    scheduler: Annotated[str, Parameter(group=_RUNNING)] = "",
    resume: Annotated[bool, Parameter(negative=(), group=_RUNNING)] = False,
    log: Annotated[Path | None, Parameter(group=_RUNNING)] = None,
    out: Annotated[Path, Parameter(group=_OUTPUT)] = Path("rwsim-sweep"),
    traces: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
    csv: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
    json_file: Annotated[Path | None, Parameter(name="--json", group=_OUTPUT)] = None,
    print_config: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
    print_schema: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
    quiet: Annotated[bool, Parameter(negative=(), group=_OUTPUT)] = False,
) -> int:
    """Walk every point of a grid of hyperparameters; keep, label and draw what was measured beside the predictions.

    `rwsim sweep --optimizer adamw --axis lr=1e-4:1e-1:20:log --axis weight_decay=1e-2:1:20:log`, or a TOML file that holds
    the same, changed by whatever else is given. A sweep that was interrupted, or killed, goes on with --resume.

    Parameters
    ----------
    grid
        TOML file; --print-config shows one, --print-schema its schema.
    optimizer
        Rule to walk (a name, or FILE.py:RULE); may be repeated.
    axis
        NAME=LOW:HIGH:COUNT[:log] or NAME=VALUE,VALUE,...; may be repeated. NAME is a hyperparameter (of a pair beta_1,
        beta_2) or loss_scale, batch, fan_in, schedule (constant, linear, cosine, warmup0.1+cosine, ...).
    design
        Every combination, or --points drawn within the axes, independently or as a Latin hypercube. Default: grid.
    points
        Points of a random or latin design.
    replicates
        Walks of each point, alike but for their random numbers. Default: 1.
    steps
        Length of each walk. Default: 15000.
    neurons
        K, neurons per layer. Default: 128.
    fan_in
        C, weights per neuron. Default: 128.
    batch
        B, inputs per step. Default: 32.
    gradient
        As in validate. Default: marginal.
    layers
        Independent copies of the layer. Default: 1.
    gamma
        Scales of inputs and outputs: standard normal draws or all one. Default: normal.
    loss_scale
        Factor on the output gradients. Default: 1.
    window
        Steps per recorded window. Default: a fortieth of the walk.
    seed
        Of gammas, weights, gradients and designs. Default: 0.
    device
        Where to walk; auto takes the CPU, cuda every visible GPU. Default: auto.
    engine
        auto takes the fastest that carries every point. Default: auto.
    lr
        Fixed learning rate.
    weight_decay
        Fixed weight decay.
    momentum
        Fixed momentum.
    betas
        Fixed averages.
    eps
        Fixed constant beside the root.
    executor
        This process, processes of its own, or dask workers.
    workers
        Processes or dask workers. Default: one per core.
    scheduler
        Address of a dask scheduler. Default: a cluster of this machine's.
    resume
        Go on with the ledger in --out.
    log
        Walk nothing: lay this CSV of measured norms, rotations or RMS updates over the predictions.
    out
        Directory for ledger.sqlite, sweep.nc and the pictures.
    traces
        Also write traces.nc, every window of every point, and draw some.
    csv
        Also write sweep.csv, one line a point.
    json_file
        Also write the points to this file.
    print_config
        Print the configuration as TOML and do nothing else.
    print_schema
        Print the JSON schema of that file and do nothing else.
    quiet
        Print nothing but errors.
    """
    from rwsim.sweeps.grid import SweepConfig
    from rwsim.sweeps.ledger import NAME

    if print_schema:
        print(json.dumps(SweepConfig.model_json_schema(), indent=1))
        return HOLDS
    config = _sweep_config(
        grid, optimizer, axis, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps},
        {"design": design, "points": points, "replicates": replicates, "steps": steps, "neurons": neurons, "fan_in": fan_in,
         "batch": batch, "gradient": gradient, "layers": layers, "gamma": gamma, "loss_scale": loss_scale, "window": window,
         "seed": seed, "device": device, "engine": engine},
        example=print_config, log=log is not None, ledger=out / NAME if resume else None,
    )  # fmt: skip
    if print_config:
        print(config.to_toml(), end="")
        return HOLDS
    _check_place("--out", out, folder=True)
    if json_file is not None:
        _check_place("--json", json_file, folder=False)
    from rwsim.sweeps import result

    if log is not None:
        from rwsim.sweeps.log import read_log

        data = read_log(log, config)
        out.mkdir(parents=True, exist_ok=True)
        result.write_netcdf(data, out / "sweep.nc")
        found = None
    else:
        found = _swept(config, out, quiet, resume=resume, executor=executor, workers=workers, scheduler=scheduler)
        data = found.data
    rows = result.records(data)
    if csv:
        result.write_csv(rows, out / "sweep.csv")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        meta = {key: value.item() if hasattr(value, "item") else value for key, value in data.attrs.items()}
        with result.whole(json_file) as draft:
            draft.write_text(json.dumps({"meta": meta, "points": rows}, indent=1, allow_nan=False) + "\n")
    from rwsim.plots import save_sweep, save_trajectories

    pictures = save_sweep(data, out)
    if traces and found is not None:
        series = found.traces()
        result.write_netcdf(series, out / "traces.nc")
        pictures += save_trajectories(series, data, out)
    if not quiet:
        for line in result.summary(data):
            print(line)
        written = {NAME: found, "sweep.nc": True, "sweep.csv": csv, "traces.nc": traces and found}
        print(f"Written to {out}: {', '.join([*filter(written.get, written), *(path.name for path in pictures)])}")
    return HOLDS


def _sweep_config(
    path: Path | None, optimizers: list[str] | None, axes: list[str] | None, fixed: dict[str, Any], settings: dict[str, Any],
    *, example: bool, log: bool, ledger: Path | None,
) -> "SweepConfig":  # fmt: skip
    """The file's configuration, or that of the sweep to resume, changed by what the command line gives."""
    from rwsim.sweeps.grid import SweepConfig
    from rwsim.sweeps.ledger import identity_of

    values: dict[str, Any] = {} if path is None else SweepConfig.read(path).model_dump()
    if ledger is not None and path is None and not optimizers and not axes:
        if not ledger.exists():
            raise InvalidArgument("out", "must hold a sweep to resume", str(ledger.parent), "name its --out, or leave out --resume")
        values = identity_of(ledger) or {}
        settings = {**{key: values.pop(key, None) for key in ("device", "engine")}, **{k: v for k, v in settings.items() if v is not None}}
    if optimizers:
        values["optimizer"] = optimizers
    given: dict[str, str | list[float | str]] = {}
    for text in axes or []:
        name, equals, spec = text.partition("=")
        if not equals or not name or not spec:
            raise InvalidArgument("axis", "must be NAME=LOW:HIGH:COUNT[:log] or NAME=VALUE,VALUE,...", text, "e.g. lr=1e-4:1e-1:20:log")
        if name in given:
            raise InvalidArgument("axis", "must be given once for each name", text, f"{name} was given as {given[name]}")
        given[name] = spec
    values["axes"] = {**values.get("axes", {}), **given}
    hyper = {key: list(value) if isinstance(value, tuple) else value for key, value in fixed.items() if value is not None}
    values["hyper"] = {**values.get("hyper", {}), **hyper}
    values |= {key: value for key, value in settings.items() if value is not None}
    if example and path is None and not optimizers and not given:
        values |= {"optimizer": ["adamw"], "axes": {"lr": "1e-4:1e-1:20:log", "weight_decay": "1e-2:1:20:log"}}
    if log and not values["axes"]:
        values["axes"] = {"log": []}  # its columns are the axes
    for key, option, example_of in (("optimizer", "optimizer", "adamw"), ("axes", "axis", "lr=1e-4:1e-1:20:log")):
        if not values.get(key):
            raise InvalidArgument(option, "must be given, here or in a file", None, f"e.g. --{option} {example_of}")
    return SweepConfig.checked(**values)


def _swept(config: "SweepConfig", out: Path, quiet: bool, **options: Any) -> "Sweep":
    """Run the sweep behind a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from rwsim.sweeps.run import Plan
    from rwsim.sweeps.sweep import sweep as walk

    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points, {task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        row = bar.add_task("sweep", total=None, rate="")
        each = 0.0
        began = time.monotonic()

        def planned(plan: Plan, kept: int) -> None:
            nonlocal each, began
            each, began = plan.neuron_steps / plan.points, time.monotonic()
            bar.update(row, total=plan.points)
            console.print(f"{kept:,} points are there already; {plan}" if kept else str(plan))

        def progress(done: int) -> None:
            bar.update(row, completed=done, rate=f"{each * done / max(time.monotonic() - began, 1e-9):.2g} neuron-steps/s")

        return walk(config, out, planned=planned, progress=progress, **options)


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
