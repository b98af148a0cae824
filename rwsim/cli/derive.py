"""`rwsim derive`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rwsim.cli.shared import FAILS, HOLDS, OUTPUT, Whole, check_place, refuse, write_json


def derive(
    what: str = "all",
    /,
    *,
    format: Literal["text", "latex", "markdown"] = "text",
    order: Whole = 1,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Derive the paper's results step by step, each step carried out and checked; fail if one does not hold.

    ```sh
    rwsim derive adamw
    rwsim derive all --format markdown
    rwsim derive my_rule.py:MyRule
    ```

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
        check_place("--json", json_file, folder=False)
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
        write_json(json_file, derivations.records(results))
    for failure in failures:
        refuse(failure, FAILS)
    return FAILS if failures else HOLDS
