"""The lake: Delta tables in one directory, written by Spark and committed without a jar.

    LAKE/lake.json            marks the directory as a lake; its format version and its id
    LAKE/events/ …            one directory a table: Parquet files and Delta's `_delta_log`

Spark writes a frame as Parquet files into a directory of the table that no reader looks at; the
command then commits these files in one Delta transaction through the `deltalake` package. Every
commit carries application transactions with the position that the table has reached; the next run
continues from there. Spark reads the files that Delta's log names.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from penstock.errors import JournalError, PenstockError, UnavailableError, error_class
from penstock.files import (
    OtherOwner,
    check_named,
    make_directories,
    open_in,
    read_in,
    write_in,
)
from penstock.spark.parquet import read_bounds
from penstock.spark.schemas import arrow_schema, columns_of, local_frame
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

VERSION: Final = 3
# Lakes of this version have other tables; the first run of this release makes theirs again.
VERSION_BEFORE: Final = 2
MARKER: Final = "lake.json"
_DRAFT: Final = f".{MARKER}."
COMPACT_BYTES: Final = 128 << 20
# An id is part of the name of a file in a store: that of the lake's reader.
_ID: Final = re.compile(r"[0-9a-f]{1,64}")
# The lock of a run that watches, and that of a replay, which is also its directory.
WATCH: Final = "watch"
OUTBOX: Final = "outbox"
_DOING: Final = {WATCH: "is watching for it", OUTBOX: "is replaying from it"}
_LOCK_POLL_S: Final = 0.05
# The partition column of a table in parts; Delta's log has its values, the Parquet files do not.
PART: Final = "part"
# Files of a table until they are committed; Delta ignores names that begin with an underscore.
STAGING: Final = "_staging"
# Opened tables, each with the newest commit that it had then.
_snapshots: Final[dict[Path, "_Snapshot"]] = {}
_SNAPSHOTS_MAX: Final = 64
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
    version: int = VERSION

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, create: bool = False, other_owner: bool = False
    ) -> "Lake":
        """Opens the lake at `path`. Raises LakeUnusable, in one sentence, and changes nothing.

        A lake of another user is refused without `other_owner`.
        """
        root = Path(path)
        marker = root / MARKER
        try:
            check_named(root, other_owner=other_owner)
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
            found = json.loads(read_in(root, MARKER))
        except OtherOwner as error:
            raise LakeUnusable(f"{root}: {error.strerror}, or say --insecure-other-owner") from None
        except OSError as error:
            raise LakeUnusable(f"{root}: cannot be used: {error.strerror}") from error
        except ValueError as error:
            raise LakeUnusable(f"{marker}: cannot be read: {error}") from error
        version = found.get("version") if isinstance(found, dict) else None
        if version == VERSION_BEFORE and not create:
            raise LakeUnusable(
                f"{root}: is a lake of an earlier release; the next `pipeline run` makes its "
                "tables again"
            )
        if version not in (VERSION, VERSION_BEFORE):
            raise LakeUnusable(
                f"{root}: is a lake of version {version}; this Penstock reads version {VERSION}: "
                "make a new lake from the journal"
            )
        if not isinstance(found.get("id"), str) or not _ID.fullmatch(found["id"]):
            raise LakeUnusable(f"{marker}: has no id of a lake")
        # The working directory of an executor may be another one.
        return cls(root.absolute(), found["id"], int(version))

    def mark_upgraded(self) -> None:
        """Notes that every table is of this version."""
        _mark(self.path, self.id)

    def check_exists(self) -> None:
        """Raises LakeUnusable if the lake was removed, or replaced by another."""
        try:
            found = Lake.open(self.path, other_owner=True)
        except LakeUnusable as error:
            raise LakeUnusable(f"{self.path}: was removed while it was used") from error
        if found.id != self.id:
            raise LakeUnusable(f"{self.path}: was replaced by another lake while it was used")

    def table(self, name: str, schema: str, *, in_parts: bool = False) -> "Table":
        """The table of this name, whether or not it was ever written."""
        return Table(self.path / name, schema, in_parts)


def _make(root: Path) -> None:
    # Readable as the tables are, which other programs write.
    make_directories(root, mode=0o777)
    check_named(root)
    _mark(root, secrets.token_hex(8))


def _mark(root: Path, lake_id: str) -> None:
    made = json.dumps({"version": VERSION, "id": lake_id}) + "\n"
    write_in(root, MARKER, made.encode(), mode=0o666)


def _is_foreign(path: Path) -> bool:
    """Whether this is not what a process that was making a lake leaves when it is killed."""
    return not path.name.startswith(_DRAFT)


@contextmanager
def locked(lake: Lake, name: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Excludes other processes from the same work; ends with the process. Raises LakeBusy.

    The locks are `watch`, `outbox`, `events`, `tables` and `verdicts`, taken in this order.
    With `wait_s`, it is waited for so long.
    """
    end_s = time.monotonic() + wait_s
    try:
        file = open_in(lake.path, f".{name}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise LakeUnusable(f"{lake.path}: cannot be locked: {error.strerror}") from None
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < end_s:
                    threading.Event().wait(_LOCK_POLL_S)
                    continue
                doing = _DOING.get(name, f"is changing its {name}")
                raise LakeBusy(
                    f"{lake.path}: another process {doing}; wait until it ends"
                ) from None
        yield
    finally:
        os.close(file)


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

    def frame(
        self,
        spark: "SparkSession",
        seen: DeltaTable | None = None,
        files: Sequence["TableFile"] | None = None,
    ) -> "DataFrame":
        """The table's rows, as of `seen` if that is given, or those of some of its files."""
        files = self.files(seen) if files is None else files
        schema = f"{self.schema}, {PART} bigint" if self.in_parts else self.schema
        if not files:
            return local_frame(spark, [], schema)
        # Delta's own URIs are quoted, and Spark takes a path as a pattern that is not.
        paths = [_PATTERN.sub(r"\\\g<0>", each.path) for each in files]
        reader = spark.read.schema(schema)
        if self.in_parts:
            reader = reader.option("basePath", str(self.path / "data"))
        return reader.parquet(*paths)

    def rows(self) -> int:
        """How many rows the table holds, by its own statistics."""
        delta = self.delta()
        if delta is None:
            return 0
        return sum(delta.get_add_actions(flatten=True).column("num_records").to_pylist())

    def stage(self, frame: "DataFrame") -> list["AddedFile"]:
        """Has Spark write a frame's rows, as the table has them, into files to be committed.

        What a killed process left of that is removed. The caller holds the table's lock.
        """
        columns = [
            f"CAST(`{name}` AS {kind}) AS `{name}`" for name, kind in self._columns().items()
        ]
        staging = self.path / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        writer = frame.selectExpr(*columns).write.mode("overwrite")
        if self.in_parts:
            writer = writer.partitionBy(PART)
        writer.parquet(str(staging))
        added = []
        for path in sorted(staging.rglob("*.parquet")):
            directory = self.path / "data" / path.parent.relative_to(staging)
            directory.mkdir(parents=True, exist_ok=True)
            added.append(AddedFile.of(self.path, path.replace(directory / path.name)))
        shutil.rmtree(staging, ignore_errors=True)
        return added

    def _columns(self) -> dict[str, str]:
        columns = columns_of(self.schema)
        return {**columns, PART: "bigint"} if self.in_parts else columns

    def replace(
        self,
        added: Sequence["AddedFile"],
        transactions: Mapping[str, int],
        parts: Sequence[int] | None = None,
    ) -> None:
        """Makes these files all that the table holds, or holds in these parts, in one commit."""
        mode = "append" if parts == [] else "overwrite"
        self._commit([each for each in added if each.rows], mode, transactions, parts)

    def add(self, added: Sequence["AddedFile"], transactions: Mapping[str, int]) -> None:
        """Adds the rows of these files, which lie below the table, in one commit."""
        self._commit([each for each in added if each.rows], "append", transactions)

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
        """The files that the log names. Raises LakeUnusable if one is not of this table."""
        rows = delta.get_add_actions(flatten=True)
        names = rows.schema.names
        # Not through `pa.table`, which imports pandas: half a second of a command that has no work.
        columns = [rows.column(name).to_pylist() for name in names]
        return [
            TableFile(
                self._within(row["path"]),
                row.get(f"partition.{PART}"),
                row["num_records"] or 0,
                {n[4:]: row[n] for n in names if n.startswith("min.") and row[n] is not None},
                {n[4:]: row[n] for n in names if n.startswith("max.") and row[n] is not None},
            )
            for row in (dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True))
        ]

    def _within(self, name: str) -> str:
        """The path of a file by its name in the log. Raises LakeUnusable if it lies elsewhere."""
        path = self.path / name
        if os.path.isabs(name) or ".." in Path(name).parts or path.is_symlink():
            raise LakeUnusable(f"{self.path}: its log names {name!r}, which is not within it")
        return str(path)

    def _commit(
        self,
        added: list["AddedFile"],
        mode: str,
        transactions: Mapping[str, int],
        parts: Sequence[int] | None = None,
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
            # Statistics of the new columns, too.
            keep_texts_out(delta)
        delta.create_write_transaction(
            [each.action() for each in added],
            mode,
            schema,
            parted_by,
            [(PART, "in", list(map(str, parts)))] if parts else None,
            commit_properties=_properties(transactions),
        )

    def _delta_schema(self) -> Schema:
        made = arrow_schema(self.schema)
        if self.in_parts:
            made = made.append(pa.field(PART, pa.int64()))
        return Schema.from_arrow(made)

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
        self._check_links()
        delta = self._open()
        # What was opened before may need a commit that is removed now.
        _snapshots.pop(self.path, None)
        return 0 if delta is None else drop_versions(delta, self.path, keep_hours, commit_hours)

    def _check_links(self) -> None:
        """Raises LakeUnusable for a link to a directory: files are removed behind it, too."""
        for directory, names, _ in os.walk(self.path):
            for name in names:
                if os.path.islink(os.path.join(directory, name)):
                    raise LakeUnusable(f"{directory}: {name!r} in it is a link; lakes have none")

    def _open_to_rewrite(self) -> DeltaTable | None:
        """The table, for changes of which `deltalake` itself writes files and statistics."""
        self._check_links()
        delta = self._open()
        if delta is not None:
            self._list_files(delta)
            keep_texts_out(delta)
        return delta


def _properties(transactions: Mapping[str, int]) -> CommitProperties:
    return CommitProperties(
        app_transactions=[Transaction(name, at) for name, at in transactions.items()]
    )


@dataclass(frozen=True)
class TableFile:
    """A file of a table; statistics are of whole numbers, and of `store`."""

    path: str
    part: int | None
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
    part: int | None

    @classmethod
    def of(cls, table: Path, file: Path) -> "AddedFile":
        rows, bounds = read_bounds(file)
        found = file.stat()
        name, _, value = file.parent.name.partition("=")
        return cls(
            file.relative_to(table).as_posix(),
            found.st_size,
            found.st_mtime_ns // 1_000_000,
            rows,
            *bounds,
            int(value) if name == PART else None,
        )

    def action(self) -> AddAction:
        stats = {
            "numRecords": self.rows,
            "minValues": self.smallest,
            "maxValues": self.largest,
        }
        of_part = {} if self.part is None else {PART: str(self.part)}
        statistics = json.dumps(stats)
        return AddAction(self.path, self.size_bytes, of_part, self.modified_ms, True, statistics)


def first_line(error: Any) -> str:
    """The message of an error of PySpark or Java, without the plan and stack trace behind it."""
    text = (error.getMessage() or str(error)).strip()
    return text.partition("\n")[0].split(" SQLSTATE")[0]


# The last line of a traceback, as Python prints it in a task of Spark: the class and the message.
_OURS: Final = re.compile(r"(?<![\w.])penstock\.(?:\w+\.)+([A-Z]\w*): ([^\n]+)")
# The same, of Spark or Delta about a file that is damaged, missing or not to be used.
_FILES: Final = re.compile(
    r"(?:\[(?:FAILED_READ_FILE|PATH_NOT_FOUND)[.\w]*\]|(?<![\w.])_internal\.\w*Error:) ([^\n]+)"
)
_NO_ROOM: Final = re.compile(r"[^\n]*(?:No space left on device|Disk quota exceeded)[^\n]*")


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises as a PenstockError what Spark or Delta raised.

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
        kind = type(error)
        # What the disk said is the cause of the cause, which only the trace of Java names.
        trace = getattr(error, "_stackTrace", None) or ""
        text = f"{kind.__module__}.{kind.__qualname__}: {error}\n{trace}"
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
    return re.sub(r"^\s*(?:Caused by: )?(?:[\w.]+: )*", "", line)
