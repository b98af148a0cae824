"""`rwsim export` and `rwsim verify`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rwsim.cli.shared import FAILS, HOLDS, OUTPUT, Whole, check_place, write_json
from rwsim.errors import ExportRefused

if TYPE_CHECKING:
    from rich.console import Console

    from rwsim.export.harness import Check, Verification


def export(
    rule: str,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    rate: Literal["paper", "exact"] = "paper",
    rotation: str | None = None,
    seed: Whole = 0,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Write a rule's rotational optimizer as one file that needs torch only, after verifying the rate that it carries.

    Naming a FILE.py:RULE runs that file. Exit status: 0 if it was written, 1 if something does not hold (nothing is written then), 2 bad
    usage.

    ```sh
    rwsim export adamw -o rotational_adamw.py
    rwsim export adam_l2 --rotation adamw -o rotational_adam.py
    ```

    Parameters
    ----------
    rule
        A name (sgdm, adamw, lion, nesterov, ...) or FILE.py:RULE.
    out
        The file to write. One that is there is replaced only if rwsim export wrote it.
    rate
        The form of the rotation rate that the file takes by default: Table 1, or the exact second moments.
    rotation
        Turn at the rate of this rule. adam_l2 has none of its own: --rotation adamw is the paper's special variant.
    seed
        Of every random number.
    json_file
        Also write what was verified to this file.
    quiet
        Print nothing but errors.
    """
    check_place("out", out, folder=False)
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    from rwsim.export.harness import export

    return _run(
        lambda progress: export(rule, out, rate=rate, rotation=rotation, seed=seed, progress=progress), json_file, quiet, f"wrote {out}"
    )


def verify(
    file: Path,
    /,
    *,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Hash an exported file again and, if it is as it was written, run it and repeat what was verified.

    Exit status: 0 if all of it holds, 1 if not, 2 bad usage.

    ```sh
    rwsim verify rotational_adamw.py
    ```

    Parameters
    ----------
    file
        A file that rwsim export wrote.
    json_file
        Also write what was verified to this file.
    quiet
        Print nothing but errors.
    """
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    from rwsim.export.harness import verify

    return _run(lambda progress: verify(file, progress=progress), json_file, quiet, f"{file} is verified")


def _run(work, json_file: Path | None, quiet: bool, said: str) -> int:
    from rich.console import Console

    console, began = Console(quiet=quiet, soft_wrap=True), time.monotonic()
    with console.status("") as status:
        try:
            found: Verification = work(lambda what: status.update(f"verifying {what} ..."))
        except ExportRefused as error:
            status.stop()
            _show(console, error.checks)
            raise
    _show(console, found.checks)
    if json_file is not None:
        write_json(json_file, found.to_json())
    console.print(f"{said if found.passed else 'not verified'}  ({time.monotonic() - began:.0f} s)", highlight=False)
    return HOLDS if found.passed else FAILS


def _show(console: "Console", checks: "tuple[Check, ...]") -> None:
    for check in checks:
        mark = "[green]holds[/green]" if check.passed else "[red]fails[/red]"
        console.print(f"{mark}  [bold]{check.name}[/bold]: ", end="")
        console.print(check.text, markup=False, highlight=False)
