"""`rwsim report`."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rwsim.cli.shared import HOLDS, OUTPUT, check_place


def report(
    path: Path,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"), group=OUTPUT)] = Path("report.html"),
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Make one self-contained page of a result: verdict, tables, figures, provenance and the command that repeats it.

    The kind is told by what is there: a validation, a sweep, an accuracy study, an
    audit's --json, an experiment, a probe's records, a plan. The page asks for nothing else, network included. Exit status: 0 if the
    page was written, whatever the result says; 2 if there is no result to report.

    ```sh
    rwsim report rwsim-validate -o report.html
    ```

    Parameters
    ----------
    path
        Directory that a command of rwsim wrote, or one of its files.
    out
        The page.
    quiet
        Print nothing but errors.
    """
    check_place("--out", out, folder=False)
    from rwsim.report.report import report as make

    text = make(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    if not quiet:
        print(f"Written: {out} ({len(text.encode()) / 1000:,.0f} kB)")
    return HOLDS
