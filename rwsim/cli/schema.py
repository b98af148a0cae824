"""`rwsim schema`."""

import json

from rwsim.cli.shared import HOLDS
from rwsim.errors import InvalidArgument


def schema(command: str, /) -> int:
    """Print the JSON schema of what a command writes with --json.

    ```sh
    rwsim schema validate
    rwsim schema plan > plan.schema.json
    ```

    Parameters
    ----------
    command
        Which: validate, derive, sweep, plan, convert, audit, export, verify, experiment or doctor.
    """
    from rwsim.schemas import DOCUMENTS
    from rwsim.schemas import schema as made

    if command not in DOCUMENTS:
        raise InvalidArgument("command", f"must be one of {', '.join(DOCUMENTS)}", command, "the others write no --json")
    print(json.dumps(made(command), indent=1))
    return HOLDS
