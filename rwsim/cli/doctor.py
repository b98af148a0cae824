"""`rwsim doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rwsim.cli.shared import FAILS, HOLDS, OUTPUT, check_place, write_json

if TYPE_CHECKING:
    from rwsim.doctor import Health


def doctor(
    *,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Say what is installed here, what it runs on, and whether rwsim can do its main job.

    It walks an optimizer for some steps on the CPU, and on a GPU if there is one. Exit status: 0 if `rwsim validate` can run, 1 if not,
    and then what to do about it.

    ```sh
    rwsim doctor
    rwsim doctor --json health.json
    ```

    Parameters
    ----------
    json_file
        Also write what was found to this file.
    quiet
        Print nothing but errors.
    """
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    from rwsim.doctor import examine

    found = examine()
    if json_file is not None:
        write_json(json_file, found.to_json())
    if not quiet:
        print("\n".join(_lines(found)))
    return HOLDS if found.passed else FAILS


def _lines(found: "Health") -> list[str]:
    kind = {True: "editable", False: "installed", None: "not installed"}[found.editable]
    triton = {
        "compiles": "compiles", "fails": "does not compile", "interprets": "interprets (TRITON_INTERPRET=1)",
        "idle": "has nothing to compile for without a GPU", "absent": "is not here",
    }  # fmt: skip
    lines = [
        f"rwsim     {found.rwsim} ({kind}, {found.place})",
        f"Python    {found.python}, {found.platform}",
        f"packages  {', '.join(f'{name} {version}' for name, version in found.packages.items() if version)}",
        f"CPU       {found.cores} cores; torch takes {found.threads} threads",
        *(f"GPU {i}     {gpu.name}, {gpu.memory / 2**30:.0f} GiB, capability {gpu.capability}" for i, gpu in enumerate(found.gpus)),
        *([] if found.gpus else ["GPU       none that torch sees"]),
        f"Triton    {triton[found.triton]}",
    ]
    for extra, missing in found.extras.items():
        lines.append(f"[{extra}]".ljust(9) + (f" lacks {', '.join(missing)}: pip install 'rwsim[{extra}]'" if missing else " is here"))
    lines += [f"{name}: {folder or 'not here'}" for name, folder in found.places.items()]
    for trouble in found.troubles:
        lines.append(f"{'PROBLEM' if trouble.fatal else 'note'}: {trouble.what}; {trouble.remedy}")
    return [*lines, "rwsim can do its main job: rwsim validate" if found.passed else "rwsim CANNOT do its main job; see the problems above"]
