"""Where outcomes are kept as they come: an sqlite file that survives SIGKILL at any moment."""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rwsim.errors import InvalidArgument, StorageError
from rwsim.sweeps.outcome import Outcome

# "rwsw", and the version of the tables and of what the numbers mean.
_APPLICATION, VERSION = 0x72777377, 1
NAME = "ledger.sqlite"


class Ledger:
    """Outcomes by key, and the sweep that they belong to.

    Every `put` is one transaction: after a kill the file holds whole batches. One process at a time may have it open.

    Args:
        folder: Where ``ledger.sqlite`` is or is to be.
        identity: The sweep's configuration and engine, flat; what a resumed sweep must have in common.
        resume: Go on with the one that is there.

    Raises:
        InvalidArgument: One is there without `resume`; it is no ledger, truncated, of a newer rwsim, of another sweep, in use.
        StorageError: The place cannot be written to.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self.path = folder / NAME
        if self.path.exists():
            if not resume:
                raise InvalidArgument("out", "must not hold a sweep already", str(folder), "go on with --resume, or name another place")
            self._check(identity)
        with self._storing():
            folder.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
            # Exclusive: a second sweep on this file is refused, and no shared memory file is needed.
            self.connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                self.connection.execute("CREATE TABLE IF NOT EXISTS sweep (identity TEXT NOT NULL)")
                # Rows in the order in which they come: sorted by key, each would rewrite pages of others (ledgers of old are).
                self.connection.execute("CREATE TABLE IF NOT EXISTS outcomes (key TEXT PRIMARY KEY, outcome BLOB NOT NULL)")
                if not self.connection.execute("SELECT 1 FROM sweep").fetchone():
                    self.connection.execute("INSERT INTO sweep VALUES (?)", (json.dumps(identity),))
                self.connection.execute(f"PRAGMA application_id={_APPLICATION}")
                self.connection.execute(f"PRAGMA user_version={VERSION}")

    def _check(self, identity: Mapping[str, Any]) -> None:
        """Refuse what cannot be gone on with, touching nothing."""
        before = identity_of(self.path)
        if before is None:
            return  # killed before its first transaction
        for key in {**before, **identity}:
            if before.get(key) != json.loads(json.dumps(identity.get(key))):
                rule = f"must be what it was to resume, {json.dumps(before.get(key))}"
                raise InvalidArgument(key, rule, identity.get(key), "put it back, or name another --out")

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if "locked" in str(error):
                raise InvalidArgument("out", "is in use by another sweep", str(self.path), "wait for it, or name another place") from None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise StorageError(f"cannot keep results in {self.path}: {reason}; what it holds is safe, go on with --resume.") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:  # a full disk ends it by itself
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def put(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Keep some outcomes, all or none."""
        with self._storing(), self._transaction():
            rows = [(key, outcome.to_bytes()) for key, outcome in outcomes]
            self.connection.executemany("INSERT OR REPLACE INTO outcomes VALUES (?, ?)", rows)

    def keys(self) -> set[str]:
        """Of what is kept."""
        with self._storing():
            return {key for (key,) in self.connection.execute("SELECT key FROM outcomes")}

    def get(self, keys: Sequence[str]) -> list[Outcome | None]:
        """Outcomes in the order of `keys`; None where there is none."""
        found: dict[str, Outcome] = {}
        with self._storing():
            for key, data in self.connection.execute("SELECT key, outcome FROM outcomes"):
                try:
                    found[key] = Outcome.from_bytes(data)
                except ValueError as error:
                    raise StorageError(f"{self.path} is damaged at point {key[:12]}: {error}.") from None
        return [found.get(key) for key in keys]

    def close(self) -> None:
        """Fold the journal into the file."""
        self.connection.close()


def identity_of(path: Path) -> dict[str, Any] | None:
    """The sweep that a ledger belongs to, read without touching anything; None if it was killed before its first transaction.

    Raises:
        InvalidArgument: It is no ledger, truncated, of a newer rwsim, in use.
        StorageError: It cannot be read.
    """
    label = str(path)
    try:
        reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
        try:
            (application,) = reader.execute("PRAGMA application_id").fetchone()
            (version,) = reader.execute("PRAGMA user_version").fetchone()
            if application == 0 and not reader.execute("SELECT 1 FROM sqlite_master").fetchone():
                return None
            if application != _APPLICATION:
                raise InvalidArgument("out", "must hold a ledger of rwsim sweep", label, "it is another program's; name another place")
            if version > VERSION:
                rule = f"must hold a ledger of version {VERSION} or older"
                raise InvalidArgument("out", rule, f"version {version} in {label}", "a newer rwsim wrote it: use that")
            if (problem := reader.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(problem)
            return json.loads(reader.execute("SELECT identity FROM sweep").fetchone()[0])
        finally:
            reader.close()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise InvalidArgument("out", "is in use by another sweep", label, "wait for it, or name another place") from None
        raise StorageError(f"cannot read {label}: {error}.") from None
    except (sqlite3.DatabaseError, json.JSONDecodeError, TypeError) as error:
        remedy = f"{' '.join(str(error).split())}; keep it for a rescue, and name another place"
        raise InvalidArgument("out", "must hold a whole ledger", label, remedy) from None
