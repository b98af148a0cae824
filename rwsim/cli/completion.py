"""`rwsim completion`."""

from typing import Annotated, Literal

from cyclopts import Parameter

from rwsim.cli.shared import HOLDS
from rwsim.errors import InvalidArgument, StorageError


def completion(
    shell: Literal["bash", "zsh", "fish", "powershell"] | None = None,
    /,
    *,
    install: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Print the script that completes commands, options and choices in a shell, or install it.

    ```sh
    rwsim completion bash > rwsim.bash
    rwsim completion --install
    ```

    Parameters
    ----------
    shell
        Which. Default: the one that this runs in.
    install
        Write the script to where the shell looks for it, and have the shell's startup file load it where that is needed.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    from rwsim.cli import app

    try:
        shell = shell or detect_shell()
    except ShellDetectionError:
        raise InvalidArgument("shell", "must be named where it cannot be told", None, "for example rwsim completion bash") from None
    if not install:
        print(app.generate_completion(shell=shell))
        return HOLDS
    try:
        place = app.install_completion(shell=shell)
    except OSError as error:
        raise StorageError(f"cannot install the completion of {shell}: {error.strerror}: {error.filename}.") from None
    print(f"Written: {place}. A new {shell} completes rwsim.")
    return HOLDS
