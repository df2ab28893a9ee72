"""The work of one task of a run: every table in parts, for one part.

A part is a range of a shard's message numbers. Its events are read once; the queries of the tables
run over them in one process, and each table gets one file.

A sealed part holds messages of such a range whose events are dropped (`spark.retention`). It is
never folded again: the part of the same range leaves these events out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.spark.blocks import KIND_NAMES
from penstock.spark.duck import DuckConnection, quoted, read_files
from penstock.spark.lake import AddedFile, Table
from penstock.spark.tables import FOLDS, PART_TABLES

# How many messages a part holds.
PART_MESSAGES: Final = 1 << 16
# A hash that is the same in every version of every engine, as a number that Delta has.
_HASHED: Final = 'CAST(md5_number_lower("{0}") >> 1 AS bigint) AS {1}'
_COLUMNS: Final = (
    'message, sequence, "index", CAST(kind AS kinds) AS kind, at_ms, queue, term, epoch, '
    'deadline_ms, visible_at_ms, expires_at_ms, priority, "group", dedup_id, attempt_id, holder, '
    "name, to_queue, rank, dead, body_bytes, "
    + _HASHED.format("group", "group_hash")
    + ", "
    + _HASHED.format("dedup_id", "dedup_hash")
)


@dataclass(frozen=True)
class LakePart:
    """A range of a shard's message numbers; with `seal`, those of its messages sealed by it."""

    store: str
    shard: int
    nth: int
    messages: int = PART_MESSAGES
    seal: int = 0

    @property
    def name(self) -> str:
        """As the tables in parts have it."""
        name = f"{self.store}-{self.shard}-{self.nth}"
        return f"{name}.{self.seal}" if self.seal else name

    @property
    def first(self) -> int:
        """The least message number in it."""
        return self.nth * self.messages

    @property
    def end(self) -> int:
        """The least message number behind it."""
        return self.first + self.messages

    def condition(self) -> str:
        """The SQL condition that an event is of one of its messages."""
        return (
            f"store = {quoted(self.store)} AND shard = {self.shard} "
            f"AND message >= {self.first} AND message < {self.end}"
        )


@dataclass(frozen=True)
class FoldWork:
    """All that a task needs: the part, files with its events among others, and the queues.

    `sealed` are the files of `folds` of the sealed parts of the same range; `chosen` is a file that
    names the messages of a part that is being sealed.
    """

    part: LakePart
    files: tuple[str, ...]
    queues: str
    lake: str
    sealed: tuple[str, ...] = ()
    chosen: str | None = None


@dataclass(frozen=True)
class FoldedPart:
    """What a task made: one file for each table in parts."""

    part: LakePart
    added: dict[str, AddedFile]


def load_part(duck: DuckConnection, part: LakePart, events: str) -> None:
    """Makes the tables `part` and `events` of one part from rows of many."""
    duck.run(f"CREATE TYPE IF NOT EXISTS kinds AS ENUM ({', '.join(map(quoted, KIND_NAMES[1:]))})")
    duck.table(
        "part",
        f"SELECT {quoted(part.store)} AS store, {part.shard} AS shard, {part.seal > 0} AS dropped",
    )
    duck.table("events", f"SELECT {_COLUMNS} FROM {events} WHERE {part.condition()}")


def view_unsealed(duck: DuckConnection, name: str, events: str, sealed: Sequence[str]) -> None:
    """Makes a view of the events that are not of these sealed parts, given by their `folds`."""
    duck.files("sealed_folds", sealed, FOLDS.types)
    duck.view(
        name,
        f"""
        SELECT * FROM {events} AS given WHERE message IS NULL OR NOT EXISTS (
          SELECT 1 FROM sealed_folds WHERE sealed_folds.store = given.store
            AND sealed_folds.shard = given.shard AND sealed_folds.message = given.message
            AND given.sequence <= last_sequence)"""
        if sealed
        else f"SELECT * FROM {events}",
    )


def fold_part(work: FoldWork, threads: int) -> FoldedPart:
    """Makes the files of a part."""
    added = {}
    with DuckConnection(threads) as duck:
        duck.files("all_events", work.files, {})
        view_unsealed(duck, "unsealed_events", "all_events", work.sealed)
        if work.chosen is not None:
            chosen = f"SELECT message FROM {read_files(work.chosen)} WHERE {work.part.condition()}"
            duck.view("unsealed_events", f"SELECT * FROM all_events WHERE message IN ({chosen})")
        load_part(duck, work.part, "unsealed_events")
        duck.table(
            "queues",
            f"SELECT * FROM {read_files(work.queues)} "
            f"WHERE store = {quoted(work.part.store)} AND shard = {work.part.shard}",
        )
        for each in PART_TABLES:
            table = Table(Path(work.lake, each.name), each.schema, in_parts=True)
            path = table.new_file(work.part.name)
            duck.write(each.query, str(path))
            # Those after it read the file: making a table in memory costs as much as writing it.
            duck.files(each.name, [str(path)], each.types)
            added[each.name] = AddedFile.of(table.path, path)
    return FoldedPart(work.part, added)
