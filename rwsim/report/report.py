"""The public door of reports."""

from pathlib import Path

from rwsim.report.find import find
from rwsim.report.sheet import render


def report(path: str | Path) -> str:
    """A result of rwsim as one HTML page that needs nothing else: no network, no file beside it.

    The kind is told by what is in the file or directory: a validation, a sweep, an accuracy study, an audit, an experiment, a
    probe's records, a plan.

    Args:
        path: A directory that a command of rwsim wrote, or one of its files.

    Returns:
        HTML, to be written as UTF-8.

    Raises:
        InvalidArgument: Nothing there, nothing that rwsim wrote, several results, an unfinished or a damaged one; the message names
            what was looked for.

    Example:
        >>> import tempfile, rwsim
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = Path(directory, "lr.csv").write_text("a,b\\n1,2\\n")
        ...     rwsim.report(directory)
        Traceback (most recent call last):
        rwsim.errors.InvalidArgument: `path` must hold a result of rwsim, got ...
    """
    from rwsim import __version__

    kind, file = find(Path(path))
    return render(kind.sheet(file), __version__)
