"""What a file of a result holds: JSON, the columns of a CSV, or the variables of a NetCDF; damage is said in one line."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from rwsim.config import first_problem
from rwsim.errors import InvalidArgument

Array = np.ndarray
_NETCDF, _HDF, _GZIP = b"CDF", b"\x89HDF", b"\x1f\x8b"


class Columns(Mapping[str, Array]):
    """Named columns of one length, as text or as numbers.

    Args:
        file: For messages.
        columns: By name; arrays of numbers or of text.
    """

    def __init__(self, file: str, columns: Mapping[str, Array]) -> None:
        self.file, self._columns = file, dict(columns)

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __iter__(self) -> Any:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def rows(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def text(self, name: str) -> Array:
        """A column as text."""
        return self._need(name).astype(str)

    def numbers(self, name: str) -> Array:
        """A column as numbers, NaN where a field is empty.

        Raises:
            InvalidArgument: No such column, or a field that is no number.
        """
        column = self._need(name)
        if column.dtype.kind in "biuf":
            return column.astype(float)
        found = np.empty(len(column))
        for i, text in enumerate(column):
            try:
                found[i] = float(text) if text not in (None, "") else math.nan
            except ValueError:
                raise InvalidArgument(
                    f"{self.file}, line {i + 2}, {name}", "must be a number", _short(text), "the file is damaged: write it again"
                ) from None
        return found

    def is_numeric(self, name: str) -> bool:
        """Whether a column can be read as numbers."""
        try:
            self.numbers(name)
        except InvalidArgument:
            return False
        return True

    def _need(self, name: str) -> Array:
        if name not in self._columns:
            raise InvalidArgument(
                self.file, f"must have a column {name}", ", ".join(self._columns)[:200], "the file is damaged: write it again"
            )
        return self._columns[name]


@dataclass(frozen=True)
class File:
    """One file of a result.

    Attributes:
        path: Where it is.
        form: ``json``, ``csv`` or ``netcdf``.
        zipped: Whether a CSV is gzipped.
    """

    path: Path
    form: str
    zipped: bool = False

    @classmethod
    def of(cls, path: Path) -> "File":
        """A file, its form read off its first bytes.

        Raises:
            InvalidArgument: Not readable, empty, or of another form.
        """
        try:
            with path.open("rb") as stream:
                head = stream.read(4096)
        except OSError as error:
            raise InvalidArgument("path", "must be a readable file", str(path), error.strerror or "") from None
        if not head.strip():
            raise InvalidArgument("path", "must not be an empty file", str(path), "repeat the command that writes it")
        if head.startswith(_NETCDF):
            return cls(path, "netcdf")
        if head.startswith(_HDF):
            raise InvalidArgument("path", "must be NetCDF 3, as rwsim writes it", str(path), "it is HDF5 (NetCDF 4)")
        return cls(path, "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else "csv", head.startswith(_GZIP))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def date(self) -> str:
        """When it was written, as the file system says, which is said too."""
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC (of the file)")

    def damaged(self, why: object) -> InvalidArgument:
        return InvalidArgument("path", f"must be a whole {self.form.upper().replace('NETCDF', 'NetCDF')} file", str(self.path), _short(why))

    @cached_property
    def json(self) -> dict[str, Any]:
        """The object of a JSON file."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(error) from None
        return found if isinstance(found, dict) else {}

    @cached_property
    def header(self) -> tuple[str, ...]:
        """Names of a CSV's columns."""
        return tuple(self._lines(1)[0])

    @cached_property
    def csv(self) -> Columns:
        """The columns of a CSV file, as text."""
        header, *lines = self._lines(None)
        if len(set(header)) < len(header):
            raise self.damaged("a column twice")
        for i, line in enumerate(lines):
            if len(line) != len(header):
                raise self.damaged(f"line {i + 2} has {len(line)} fields, not {len(header)}")
        return Columns(self.name, {name: np.array([line[k] for line in lines], dtype=object) for k, name in enumerate(header)})

    def _lines(self, most: int | None) -> list[list[str]]:
        try:
            with (gzip.open if self.zipped else open)(self.path, "rt", newline="", encoding="utf-8-sig") as stream:
                lines = [line for line in islice(csv.reader(stream), most) if line]
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise self.damaged(error) from None
        if not lines:
            raise self.damaged("it has no header")
        return lines

    @cached_property
    def netcdf(self) -> "NetCDF":
        """The content of a NetCDF file."""
        from scipy.io import netcdf_file

        try:
            with netcdf_file(self.path, mmap=False) as found:
                attributes = {name: _plain(value) for name, value in found._attributes.items()}
                variables = {name: _variable(one) for name, one in found.variables.items()}
        except Exception as error:  # whatever damaged bytes make its reader say
            raise self.damaged(f"{type(error).__name__}: {error}") from None
        return NetCDF(attributes, variables)


@dataclass(frozen=True)
class NetCDF:
    """Attributes, and variables as (dimensions, values)."""

    attributes: Mapping[str, Any]
    variables: Mapping[str, tuple[tuple[str, ...], Array]]


def _variable(one: Any) -> tuple[tuple[str, ...], Array]:
    values = np.array(one.data)
    if values.dtype.kind == "S":
        # Text is an array of characters over a last dimension of its own.
        joined = np.array([b"".join(row).rstrip(b"\0").decode("utf-8", "replace") for row in values.reshape(-1, values.shape[-1])], object)
        return tuple(one.dimensions[:-1]), joined.reshape(values.shape[:-1])
    return tuple(one.dimensions), values.astype(values.dtype.newbyteorder("="))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if getattr(value, "size", 0) == 1 else value


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], file: File) -> Model:
    """What a JSON file holds, as it should be.

    Raises:
        InvalidArgument: A key that is missing or of another type.
    """
    try:
        return model.model_validate(file.json)
    except ValidationError as error:
        problem = first_problem(error, model)
        raise InvalidArgument(f"{file.name}: {problem.argument}", problem.rule, _short(problem.got)) from None


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else f"{text[:119]}…"
