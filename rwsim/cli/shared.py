"""What the commands share: exit statuses, groups of options, and the refusal of bad usage in one line."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter, Token

from rwsim.errors import InvalidArgument

HOLDS, FAILS, USAGE, INTERNAL = 0, 1, 2, 3

HYPER = Group("Hyperparameters (with one --optimizer)", sort_key=2)
OUTPUT = Group("Output", sort_key=4)


def refuse(error: object, status: int) -> int:
    print(f"rwsim: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def write_json(path: Path, document: object) -> None:
    """Write plain data to the file of a --json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def whole(_: type, tokens: Sequence[Token]) -> int:
    """Integers only: 1.5 is refused, not rounded."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        try:
            remedy = f"write {int(float(text))}" if float(text).is_integer() and abs(float(text)) < 1e15 else "for example 15000"
        except ValueError:
            remedy = "for example 15000"
        raise InvalidArgument((tokens[0].keyword or "").lstrip("-"), "must be a whole number", text, remedy) from None


Whole = Annotated[int, Parameter(converter=whole)]


def check_place(argument: str, path: Path, folder: bool) -> None:
    """Refuse, before any work and without leaving anything there, a place that cannot be written to."""
    try:
        if folder and path.exists() and not path.is_dir():
            raise InvalidArgument(argument, "must be a directory", str(path), "name one that is not a file")
        if not folder and path.is_dir():
            raise InvalidArgument(argument, "must be a file", str(path), "name a file in that directory")
        above = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
        if not path.exists() and not above.is_dir():
            raise InvalidArgument(argument, f"must not lie below the file {above.name}", str(path), "name another place")
        if not os.access(above, os.W_OK):
            raise InvalidArgument(argument, "must be writable", str(path), "name another place")
        if above.is_dir():  # what may be written need not be: /proc, a full disk
            with tempfile.TemporaryFile(dir=above):
                pass
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgument(argument, f"must be writable ({reason})", str(path)[:200], "name another place") from None
