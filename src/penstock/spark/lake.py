"""The lake: Delta tables in one directory, written by Spark and committed without a jar.

    LAKE/lake.json            marks the directory as a lake; its format version and its id
    LAKE/events/ …            one directory a table: Parquet files and Delta's `_delta_log`

Tasks write Parquet files below the table; the command then commits them in one Delta transaction
through the `deltalake` package. Until then no reader sees them. Every commit carries application
transactions with the position that the table has reached; the next run continues from there.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from penstock.errors import JournalError, PenstockError, UnavailableError, error_class
from penstock.spark.parquet import ColumnBounds, bounds_of, read_bounds, write_parquet
from penstock.spark.schemas import arrow_schema
from penstock.spark.versions import (
    NewestCommit,
    commits_in,
    drop_versions,
    keep_texts_out,
    newest_commit,
    table_properties,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION: Final = 2
MARKER: Final = "lake.json"
_DRAFT: Final = f".{MARKER}."
COMPACT_BYTES: Final = 128 << 20
# The lock of a run that watches.
WATCH: Final = "watch"
# The partition column of a table in parts; Delta's log has its values, the Parquet files do not.
PART: Final = "part"
# Opened tables, each with the newest commit that it had then.
_snapshots: Final[dict[Path, "_Snapshot"]] = {}
_SNAPSHOTS_MAX: Final = 64
# How many tables are committed at once.
COMMITS_AT_ONCE: Final = 4
_MISREAD: Final = re.compile(r"%[0-9a-fA-F]{2}|\\")
# The characters that have a meaning in Hadoop's patterns of paths.
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")


class LakeUnusable(JournalError):
    """The directory is not a lake, or is a lake of an unknown version."""


class LakeBusy(UnavailableError):
    """Another process is changing the same tables of this lake."""


class LakeFull(UnavailableError):
    """The disk of the lake, of its journal or of temporary files has no room left."""


@dataclass(frozen=True)
class Lake:
    """An open lake."""

    path: Path
    id: str

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = False) -> "Lake":
        """Opens the lake at `path`. Raises LakeUnusable, in one sentence, and changes nothing."""
        root = Path(path)
        marker = root / MARKER
        try:
            if not marker.exists():
                if not create:
                    raise LakeUnusable(f"{root}: is not a Penstock lake; `pipeline run` makes one")
                if root.exists() and not root.is_dir():
                    raise LakeUnusable(f"{root}: is not a directory")
                if root.exists() and any(map(_is_foreign, root.iterdir())):
                    raise LakeUnusable(f"{root}: is not empty and not a Penstock lake")
                if _MISREAD.search(str(root.absolute())):
                    raise LakeUnusable(
                        f"{root}: cannot be a lake: Delta takes a backslash, or % before two "
                        "hexadecimal digits, in the name of a directory for something else"
                    )
                _make(root)
            found = json.loads(marker.read_text())
        except OSError as error:
            raise LakeUnusable(f"{root}: cannot be used: {error.strerror}") from error
        except ValueError as error:
            raise LakeUnusable(f"{marker}: cannot be read: {error}") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            version = found.get("version") if isinstance(found, dict) else None
            raise LakeUnusable(
                f"{root}: is a lake of version {version}; this Penstock reads version {VERSION}: "
                "make a new lake from the journal"
            )
        # The working directory of an executor may be another one.
        return cls(root.absolute(), str(found["id"]))

    def check_exists(self) -> None:
        """Raises LakeUnusable if the lake was removed, or replaced by another."""
        try:
            found = Lake.open(self.path)
        except LakeUnusable as error:
            raise LakeUnusable(f"{self.path}: was removed while it was used") from error
        if found.id != self.id:
            raise LakeUnusable(f"{self.path}: was replaced by another lake while it was used")

    def table(self, name: str, schema: str, *, in_parts: bool = False) -> "Table":
        """The table of this name, whether or not it was ever written."""
        return Table(self.path / name, schema, in_parts)


def _make(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    made = root / f"{_DRAFT}{os.getpid()}"
    try:
        made.write_text(json.dumps({"version": VERSION, "id": secrets.token_hex(8)}) + "\n")
        made.replace(root / MARKER)
    finally:
        made.unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    """Whether this is not what a process that was making a lake leaves when it is killed."""
    return not path.name.startswith(_DRAFT)


@contextmanager
def locked(lake: Lake, name: str) -> Iterator[None]:
    """Excludes other processes from the same work; ends with the process. Raises LakeBusy.

    The locks are `watch`, `events`, `tables` and `verdicts`; a process takes them in this order.
    """
    path = lake.path / f".{name}.lock"
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            doing = "is watching for it" if name == WATCH else f"is changing its {name}"
            raise LakeBusy(f"{lake.path}: another process {doing}; wait until it ends") from None
        yield
    finally:
        os.close(file)


@contextmanager
def locked_outbox(lake: Lake) -> Iterator[Path]:
    """Excludes other replays from this lake; gives the directory of what is about to be sent.

    Raises LakeUnusable if a replay is running.
    """
    # The lock is on the directory itself, and ends with the process that holds it.
    fd = os.open(lake.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LakeUnusable(f"{lake.path}: another replay from this lake is running") from None
        yield lake.path / "outbox"
    finally:
        os.close(fd)


@contextmanager
def scratch(lake: Lake, name: str) -> Iterator[Path]:
    """An empty directory in the lake, which executors see too; it is removed at the end.

    The caller holds the lock of the work that uses it.
    """
    path = lake.path / f"_{name}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Table:
    """One Delta table: its rows, and the two ways to change them.

    The rows of a table in parts have one more column, `part`, when they are written; single parts
    can be replaced.
    """

    path: Path
    schema: str
    in_parts: bool = False

    def delta(self) -> DeltaTable | None:
        """The table as it is now, None if it was never written; for reading only.

        Opened tables are kept: a run reads them some hundred times, and opening takes milliseconds.
        """
        held = _snapshots.get(self.path)
        newest = newest_commit(self._commits_path, None if held is None else held.newest.version)
        if held is not None and held.newest == newest:
            return held.delta
        opened = self._open()
        _snapshots.pop(self.path, None)
        if opened is not None and newest is not None:
            if len(_snapshots) >= _SNAPSHOTS_MAX:
                _snapshots.clear()
            _snapshots[self.path] = _Snapshot(newest, opened)
        return opened

    @property
    def _commits_path(self) -> Path:
        return self.path / "_delta_log"

    def _open(self) -> DeltaTable | None:
        """The table, to be changed."""
        # `DeltaTable.is_deltatable` would list the log.
        if not self._commits_path.is_dir():
            return None
        try:
            return DeltaTable(str(self.path))
        except TableNotFoundError:
            return None
        except DeltaError as error:
            # The lines behind the first are a trace.
            why = str(error).partition("\n")[0]
            raise LakeUnusable(f"{self.path}: cannot be read as a table: {why}") from error

    def committed(self, application: str) -> int | None:
        """The version under which this application last committed here."""
        held = _snapshots.get(self.path)
        newest = newest_commit(self._commits_path, None if held is None else held.newest.version)
        # Most often the last commit says it: the table need not be opened.
        if newest is not None:
            found = dict(newest.transactions).get(application)
            if found is not None:
                return found
        delta = self.delta()
        return None if delta is None else delta.transaction_version(application)

    def frame(self, spark: "SparkSession", seen: DeltaTable | None = None) -> "DataFrame":
        """The table's rows, as of `seen` if that is given."""
        # Delta's own URIs are quoted, and Spark takes a path as a pattern that is not.
        paths = [_PATTERN.sub(r"\\\g<0>", each.path) for each in self.files(seen)]
        if not paths:
            return spark.createDataFrame([], self.schema)
        return spark.read.schema(self.schema).parquet(*paths)

    def rows(self) -> int:
        """How many rows the table holds, by its own statistics."""
        delta = self.delta()
        if delta is None:
            return 0
        return sum(delta.get_add_actions(flatten=True).column("num_records").to_pylist())

    def move_in(self, files: Sequence[str], directory: str) -> list["AddedFile"]:
        """Moves files from elsewhere below the table into a directory of it.

        Files that a killed run left in the directory are removed.
        """
        if not files:
            return []
        target = self.path / directory
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        paths = [Path(file).replace(target / Path(file).name) for file in files]
        return [AddedFile.of(self.path, path) for path in paths]

    def replace(
        self,
        added: Sequence["AddedFile"],
        transactions: Mapping[str, int],
        parts: Sequence[str] | None = None,
    ) -> None:
        """Makes these files all that the table holds, or holds in these parts, in one commit."""
        mode = "append" if parts == [] else "overwrite"
        self._commit([each for each in added if each.rows], mode, transactions, parts)

    def add(self, added: Sequence["AddedFile"], transactions: Mapping[str, int]) -> None:
        """Adds the rows of these files, which lie below the table, in one commit."""
        self._commit([each for each in added if each.rows], "append", transactions)

    def new_file(self, part: str | None = None) -> Path:
        """A path for a new file below the table; readers see it once it is committed."""
        directory = self.path / "data"
        if part is not None:
            directory /= f"{PART}={part}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{uuid.uuid4().hex}.parquet"

    def write(self, part: str, rows: pa.Table, group_rows: int) -> "AddedFile":
        """Writes rows of a part into a new file; readers see it once it is committed."""
        path = self.new_file(part)
        write_parquet(rows, path, group_rows)
        return AddedFile.written(self.path, path, rows)

    def files(self, seen: DeltaTable | None = None) -> list["TableFile"]:
        """The files of the table with the statistics of their columns, as of `seen` if given."""
        delta = seen or self.delta()
        if delta is None:
            return []
        held = _snapshots.get(self.path)
        if held is None or held.delta is not delta:
            return self._list_files(delta)
        if held.files is None:
            held.files = self._list_files(delta)
        return list(held.files)

    def _list_files(self, delta: DeltaTable) -> list["TableFile"]:
        rows = delta.get_add_actions(flatten=True)
        names = rows.schema.names
        # Not through `pa.table`, which imports pandas: half a second of a command that has no work.
        columns = [rows.column(name).to_pylist() for name in names]
        return [
            TableFile(
                str(self.path / row["path"]),
                row.get(f"partition.{PART}"),
                row["num_records"] or 0,
                {n[4:]: row[n] for n in names if n.startswith("min.") and row[n] is not None},
                {n[4:]: row[n] for n in names if n.startswith("max.") and row[n] is not None},
            )
            for row in (dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True))
        ]

    def _commit(
        self,
        added: list["AddedFile"],
        mode: str,
        transactions: Mapping[str, int],
        parts: Sequence[str] | None = None,
    ) -> None:
        schema = self._delta_schema()
        parted_by = [PART] if self.in_parts else None
        # A commit of files does not change the table as it was opened.
        delta = self.delta()
        if delta is None:
            delta = DeltaTable.create(
                str(self.path),
                schema,
                mode="ignore",
                partition_by=parted_by,
                configuration=table_properties(schema),
            )
        known = {each.name for each in delta.schema().fields}
        new = [each for each in schema.fields if each.name not in known]
        if new:
            # The table was made before it had these columns.
            delta = DeltaTable(str(self.path))
            delta.alter.add_columns(new)
        delta.create_write_transaction(
            [each.action() for each in added],
            mode,
            schema,
            parted_by,
            [(PART, "in", list(parts))] if parts else None,
            commit_properties=_properties(transactions),
        )

    def _delta_schema(self) -> Schema:
        made = arrow_schema(self.schema)
        if self.in_parts:
            made = made.append(pa.field(PART, pa.string()))
        return Schema.from_arrow(made)

    def overwrite(self, predicate: str, rows: Any, transactions: Mapping[str, int]) -> None:
        """Replaces the rows that meet a condition by these, which meet it too, in one commit."""
        write_deltalake(
            self._open_to_rewrite() or str(self.path),
            rows,
            mode="overwrite",
            predicate=predicate,
            commit_properties=_properties(transactions),
        )

    def update(self, predicate: str, changes: Mapping[str, str]) -> int:
        """Changes the rows that meet a condition, in one commit; how many there were."""
        delta = self._open_to_rewrite()
        if delta is None:
            return 0
        return int(delta.update(updates=dict(changes), predicate=predicate)["num_updated_rows"])

    def compact(self, keep_hours: int, commit_hours: int | None = None) -> dict[str, int]:
        """Joins small files into larger ones, and removes files that no version needs any more."""
        delta = self._open_to_rewrite()
        if delta is None:
            return {"joined": 0, "removed": 0}
        done = delta.optimize.compact(target_size=COMPACT_BYTES)
        removed = self.drop_versions(keep_hours, commit_hours)
        return {"joined": int(done["numFilesRemoved"]), "removed": removed}

    def commits(self) -> int:
        """How many commits its log has."""
        return commits_in(self._commits_path)

    def drop_versions(self, keep_hours: int, commit_hours: int | None = None) -> int:
        """Removes files and commits that no version of the last hours needs; how many files.

        The caller holds the lock of whoever adds files: until they are committed, they count as
        unused.
        """
        delta = self._open()
        return 0 if delta is None else drop_versions(delta, self.path, keep_hours, commit_hours)

    def _open_to_rewrite(self) -> DeltaTable | None:
        """The table, for changes of which `deltalake` itself writes files and statistics."""
        delta = self._open()
        if delta is not None:
            keep_texts_out(delta)
        return delta


def commit_all(commits: Iterable[Callable[[], None]]) -> None:
    """Makes commits of different tables at once: most of a commit is waiting."""
    with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
        for done in [pool.submit(commit) for commit in commits]:
            done.result()


def _properties(transactions: Mapping[str, int]) -> CommitProperties:
    return CommitProperties(
        app_transactions=[Transaction(name, at) for name, at in transactions.items()]
    )


@dataclass(frozen=True)
class TableFile:
    """A file of a table; statistics are of whole numbers, and of `store`."""

    path: str
    part: str | None
    rows: int
    smallest: dict[str, Any]
    largest: dict[str, Any]


@dataclass
class _Snapshot:
    """A table as of one commit, and its files once they were asked for."""

    newest: NewestCommit
    delta: DeltaTable
    files: list[TableFile] | None = None


@dataclass(frozen=True)
class AddedFile:
    """A file to be committed to a table, with the statistics of its footer."""

    path: str
    size_bytes: int
    modified_ms: int
    rows: int
    smallest: dict[str, int | str]
    largest: dict[str, int | str]
    part: str | None

    @classmethod
    def of(cls, table: Path, file: Path) -> "AddedFile":
        rows, bounds = read_bounds(file)
        return cls._of(table, file, rows, bounds)

    @classmethod
    def written(cls, table: Path, file: Path, rows: pa.Table) -> "AddedFile":
        """A file that has exactly these rows: its footer need not be read."""
        return cls._of(table, file, len(rows), bounds_of(rows))

    @classmethod
    def _of(cls, table: Path, file: Path, rows: int, bounds: ColumnBounds) -> "AddedFile":
        found = file.stat()
        name, _, value = file.parent.name.partition("=")
        return cls(
            file.relative_to(table).as_posix(),
            found.st_size,
            found.st_mtime_ns // 1_000_000,
            rows,
            *bounds,
            value if name == PART else None,
        )

    def action(self) -> AddAction:
        stats = {
            "numRecords": self.rows,
            "minValues": self.smallest,
            "maxValues": self.largest,
        }
        of_part = {} if self.part is None else {PART: self.part}
        statistics = json.dumps(stats)
        return AddAction(self.path, self.size_bytes, of_part, self.modified_ms, True, statistics)


def first_line(error: Any) -> str:
    """The message of an error of PySpark or Java, without the plan and stack trace behind it."""
    text = (error.getMessage() or str(error)).strip()
    return text.partition("\n")[0].split(" SQLSTATE")[0]


# The last line of a traceback, as Python prints it in a task of Spark: the class and the message.
_OURS: Final = re.compile(r"(?<![\w.])penstock\.(?:\w+\.)+([A-Z]\w*): ([^\n]+)")
# The same, of DuckDB or Delta about a file that is damaged, missing or not to be used.
_FILES: Final = re.compile(
    r"(?<![\w.])(?:_duckdb\.(?:IO|InvalidInput)Exception|_internal\.\w*Error): ([^\n]+)"
)
_NO_ROOM: Final = re.compile(r"[^\n]*(?:No space left on device|Disk quota exceeded)[^\n]*")


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises as a PenstockError what Spark, DuckDB or Delta raised.

    A PenstockError of a task is wrapped by Spark in an exception of its own, and only its text
    passes through Java. Class names are unique in the package, so the name finds the class; an
    error that `penstock.errors` does not define becomes a JournalError. A disk that is full becomes
    LakeFull, and a file that cannot be used LakeUnusable.
    """
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            # DuckDB raises an error of its own when Ctrl-C ends its query.
            raise KeyboardInterrupt from error
        kind = type(error)
        text = f"{kind.__module__}.{kind.__qualname__}: {error}"
        if full := _NO_ROOM.search(text):
            raise LakeFull(f"{_message(full[0])}: nothing is lost, free some space") from error
        if isinstance(error, PenstockError):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            raise LakeUnusable(f"{error.filename}: cannot be used: {error.strerror}") from error
        if ours := _OURS.findall(str(error)):
            name, message = ours[-1]
            raise (error_class([name]) or JournalError)(message.strip()) from error
        if files := _FILES.findall(text):
            raise LakeUnusable(f"a file of the lake cannot be used: {files[-1]}") from error
        raise


def _message(line: str) -> str:
    """The message in the last line of a traceback."""
    return re.sub(r"^\s*(?:[\w.]+: )*", "", line)
