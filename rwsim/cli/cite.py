"""`rwsim cite`."""

from typing import Annotated, Literal

from cyclopts import Parameter

from rwsim.cli.shared import HOLDS


def cite(
    *rules: Annotated[str, Parameter(negative=())],
    format: Literal["bibtex", "cff"] = "bibtex",
) -> int:
    """Print how to cite rwsim and the paper that it is after.

    ```sh
    rwsim cite
    rwsim cite adamw lion
    ```

    Parameters
    ----------
    rules
        Say where these rules were published too (names, or FILE.py:RULE).
    format
        bibtex, or the Citation File Format (what CITATION.cff holds).
    """
    from rwsim import citation
    from rwsim.optimizers import find_rule

    found = [find_rule(rule) for rule in rules]
    print(citation.bibtex() if format == "bibtex" else citation.cff(), end="")
    for rule in found:
        print(f"{'%' if format == 'bibtex' else '#'} {rule.name}: {rule.reference or 'unpublished'}")
    return HOLDS
