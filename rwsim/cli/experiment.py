"""`rwsim experiment`."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from rwsim.cli.shared import FAILS, HOLDS, OUTPUT, Whole, check_place, whole, write_json
from rwsim.errors import InvalidArgument

if TYPE_CHECKING:
    from rwsim.experiments.case import Experiment
    from rwsim.experiments.conduct import StudyResult
    from rwsim.experiments.run import Result, Settings
    from rwsim.experiments.study import Study

_RUNNING = Group("Running", sort_key=3)
# Said where matplotlib is missing: the records are there.
_NO_FIGURE = " (no matplotlib here: draw it elsewhere with --replot)"


def experiment(
    name: str | None = None,
    /,
    *,
    list_names: Annotated[bool, Parameter(name="--list", negative=())] = False,
    config: Literal["gpu", "cpu", "smoke"] | None = None,
    data: Path | None = None,
    text: Path | None = None,
    seed: Whole = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    resume: Annotated[bool, Parameter(negative=(), group=_RUNNING)] = False,
    replot: Annotated[bool, Parameter(negative=(), group=_RUNNING)] = False,
    workers: Annotated[int | None, Parameter(converter=whole, group=_RUNNING)] = None,
    save_every: Annotated[float, Parameter(group=_RUNNING)] = 30.0,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Train small real networks: compare norm and rotation of every layer with theory, or trainings with each other.

    The exit status is 0 if every band and claim holds, 1 if one does not or is undecided. What was interrupted, or killed, goes on with
    --resume. docs/experiments.md and docs/training.md say what each experiment measures, docs/experiments.md how to get the data.

    ```sh
    rwsim experiment --list
    rwsim experiment dynamics --config cpu --data /data
    rwsim experiment dynamics --resume
    ```

    Parameters
    ----------
    name
        Which; --list names them.
    list_names
        Print the names of the experiments, one a line, and do nothing else.
    config
        Size: gpu takes minutes on a large GPU, cpu minutes on two cores, smoke seconds (and decides nothing). Default: by the device.
    data
        Directory of the four files of Fashion-MNIST (or with fashion-mnist/, which holds them) and of a text, .txt or .txt.gz. Default:
        where Debian's package dataset-fashion-mnist puts the images.
    text
        Text, a file or a directory, if it is not in --data.
    seed
        Of the first run of each case; the next take the numbers after it.
    device
        Where to train; auto takes CUDA where it is there.
    resume
        Go on with what --out holds.
    replot
        Train nothing: judge and draw again what --out holds.
    workers
        Runs at a time, each a process. Default: one a core on the CPU, one on CUDA.
    save_every
        Seconds between checkpoints of a run. Where trainings are compared, runs are kept whole or not at all.
    out
        Directory for the results. Default: rwsim-NAME.
    json_file
        Also write the table and what it says to this file.
    quiet
        Print nothing but errors.
    """
    from rwsim.experiments import NAMES

    if list_names:
        print("\n".join(NAMES))
        return HOLDS
    if name not in NAMES:
        raise InvalidArgument("name", f"must be one of {', '.join(NAMES)}", name, "see rwsim experiment --list")
    if workers is not None and workers < 1:
        raise InvalidArgument("workers", "must be at least 1", workers, "leave it out for one a core")
    if resume and replot:
        raise InvalidArgument("resume", "cannot go with --replot, which trains nothing", True, "leave one of them out")
    out = Path(f"rwsim-{name}") if out is None else out
    check_place("--out", out, folder=True)
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    from rwsim.experiments import EXPERIMENTS, STUDIES
    from rwsim.experiments.conduct import kept_study
    from rwsim.experiments.run import Settings, kept

    known: dict[str, Experiment | Study] = {**EXPERIMENTS, **STUDIES}

    if replot:
        result: Result | StudyResult = kept_study(STUDIES[name], out) if name in STUDIES else kept(EXPERIMENTS[name], out)
    else:
        chosen = Settings.chosen(config, device, seed, data, text, workers, save_every)
        result = _watched(known[name], chosen, out, resume, quiet)
    result.write(out)
    if json_file is not None:
        write_json(json_file, result.to_json())
    figure = _drawn(result, out)
    if not quiet:
        print(result.findings.text())
        print(f"Written to {out}: {', '.join(path.name for path in sorted(out.iterdir()) if path.is_file())}{'' if figure else _NO_FIGURE}")
    return HOLDS if result.findings.passed else FAILS


def _watched(which: "Experiment | Study", chosen: "Settings", out: Path, resume: bool, quiet: bool) -> "Result | StudyResult":
    """Run the experiment behind a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from rwsim.experiments.conduct import conduct
    from rwsim.experiments.run import run
    from rwsim.experiments.study import Study

    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        rows: dict[str, Any] = {}

        def heard(label: str, done: int, total: int) -> None:
            if label not in rows:
                rows[label] = bar.add_task(label, total=total)
            bar.update(rows[label], completed=done)
            if done == total:
                console.print(f"trained: {label}, {total} steps")

        try:
            return conduct(which, chosen, out, resume, heard) if isinstance(which, Study) else run(which, chosen, out, resume, heard)
        except KeyboardInterrupt:
            console.print(f"Stopped; {out} keeps what was trained: the same command with --resume goes on.")
            raise


def _drawn(result: "Result | StudyResult", out: Path) -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from rwsim.experiments.conduct import StudyResult
    from rwsim.plots import save_experiment
    from rwsim.plots.studies import save_study

    if isinstance(result, StudyResult):
        save_study(result, out)
    else:
        save_experiment(result, out)
    return True
