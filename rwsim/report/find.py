"""Which kind of result a file or directory holds, and where."""

from pathlib import Path
from types import ModuleType

from rwsim.errors import InvalidArgument
from rwsim.report import accuracy, audit, experiment, plan, probe, sweep, validate
from rwsim.report.read import File

# Each room: NAMES, by which its command writes; WRITES, for messages; `is_mine(file)` and `sheet(file)`.
KINDS: tuple[ModuleType, ...] = (validate, sweep, accuracy, audit, experiment, probe, plan)
_SUFFIXES = (".json", ".nc", ".csv")
# A directory with more such files than this is not one that rwsim wrote.
_MOST_FILES = 200


def find(path: Path) -> tuple[ModuleType, File]:
    """The kind of a result and the file that holds it.

    Raises:
        InvalidArgument: Nothing there, nothing that rwsim wrote, several results, an unfinished or a damaged one.
    """
    if not path.exists():
        raise InvalidArgument("path", "must be a file or directory that is there", str(path), _looked_for())
    if not path.is_dir():
        file = File.of(path)
        kind = _kind(file)
        if kind is None:
            raise InvalidArgument("path", "must be a result of rwsim", str(path), _looked_for())
        return kind, file
    found: list[tuple[ModuleType, File]] = []
    for kind in KINDS:
        # What has its command's name is taken at its word: if it is damaged that is said.
        for name in kind.NAMES:
            if (path / name).is_file():
                file = File.of(path / name)
                if not kind.is_mine(file):
                    raise InvalidArgument("path", f"must hold {kind.WRITES}", str(path / name), "it holds something else")
                found.append((kind, file))
                break
    return _one(path, found or _others(path))


def _others(path: Path) -> list[tuple[ModuleType, File]]:
    """Results under names that the user chose (`--json`)."""
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    if len(files) > _MOST_FILES:
        raise InvalidArgument("path", "must hold one result", f"{path} with {len(files)} files", "name the file")
    found, damage = [], None
    for one in files:
        try:
            file = File.of(one)
            if (kind := _kind(file)) is not None:
                found.append((kind, file))
        except InvalidArgument as error:
            damage = error
    if not found and damage is not None:
        raise damage
    return found


def _one(path: Path, found: list[tuple[ModuleType, File]]) -> tuple[ModuleType, File]:
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{file.name} ({kind.NAME})" for kind, file in found[:6])
        raise InvalidArgument("path", "must hold one result", f"{path} with {names}", "name the file")
    if (path / "ledger.sqlite").exists():
        raise InvalidArgument("path", "must hold a finished sweep", str(path), f"rwsim sweep --resume --out {path} finishes it")
    raise InvalidArgument("path", "must hold a result of rwsim", str(path), _looked_for())


def _kind(file: File) -> ModuleType | None:
    return next((kind for kind in KINDS if kind.is_mine(file)), None)


def _looked_for() -> str:
    return f"looked for {'; '.join(kind.WRITES for kind in KINDS)}"
