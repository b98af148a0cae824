"""`rwsim sweep`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from rwsim.cli.shared import HOLDS, OUTPUT, check_place, whole
from rwsim.errors import InvalidArgument

if TYPE_CHECKING:
    from rwsim.sweeps.grid import SweepConfig
    from rwsim.sweeps.sweep import Sweep

_FIXED = Group("Hyperparameters that are fixed (for every optimizer that takes them)", sort_key=2)
_RUNNING = Group("Running", sort_key=3)


def sweep(
    grid: Path | None = None,
    /,
    *,
    optimizer: Annotated[list[str] | None, Parameter(negative=())] = None,
    axis: Annotated[list[str] | None, Parameter(negative=())] = None,
    design: Literal["grid", "random", "latin"] | None = None,
    points: Annotated[int | None, Parameter(converter=whole)] = None,
    replicates: Annotated[int | None, Parameter(converter=whole)] = None,
    steps: Annotated[int | None, Parameter(converter=whole)] = None,
    neurons: Annotated[int | None, Parameter(converter=whole)] = None,
    fan_in: Annotated[int | None, Parameter(converter=whole)] = None,
    batch: Annotated[int | None, Parameter(converter=whole)] = None,
    gradient: Literal["marginal", "faithful", "gaussian"] | None = None,
    layers: Annotated[int | None, Parameter(converter=whole)] = None,
    gamma: Literal["normal", "uniform"] | None = None,
    loss_scale: float | None = None,
    window: Annotated[int | None, Parameter(converter=whole)] = None,
    seed: Annotated[int | None, Parameter(converter=whole)] = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    engine: Literal["auto", "reference", "blocked", "fused"] | None = None,
    lr: Annotated[float | None, Parameter(group=_FIXED)] = None,
    weight_decay: Annotated[float | None, Parameter(group=_FIXED)] = None,
    momentum: Annotated[float | None, Parameter(group=_FIXED)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=_FIXED)] = None,
    eps: Annotated[float | None, Parameter(group=_FIXED)] = None,
    executor: Annotated[Literal["local", "processes", "dask"], Parameter(group=_RUNNING)] = "local",
    workers: Annotated[int | None, Parameter(converter=whole, group=_RUNNING)] = None,
    scheduler: Annotated[str, Parameter(group=_RUNNING)] = "",
    resume: Annotated[bool, Parameter(negative=(), group=_RUNNING)] = False,
    log: Annotated[Path | None, Parameter(group=_RUNNING)] = None,
    out: Annotated[Path, Parameter(group=OUTPUT)] = Path("rwsim-sweep"),
    traces: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
    csv: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    print_config: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
    print_schema: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Walk every point of a grid of hyperparameters; keep, label and draw what was measured beside the predictions.

    The grid is given by --optimizer and --axis, or by a TOML file that holds the same, changed by whatever else is given. A sweep that was
    interrupted, or killed, goes on with --resume.

    ```sh
    rwsim sweep --optimizer adamw --axis lr=1e-4:1e-1:20:log
    rwsim sweep grid.toml --steps 5000 --out results
    rwsim sweep --resume --out results
    ```

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
    if not (print_config or print_schema):
        check_place("--out", out, folder=True)
        if json_file is not None:
            check_place("--json", json_file, folder=False)
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
