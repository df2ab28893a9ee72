"""The work of one task of a run: every table in parts, for one part.

A part is a range of a shard's message numbers. Its events are read once; the queries of the tables
run over them in one process, and each table gets one file.

Where many messages of a range have ended, they become a closed part of their own, and the rest is
the open part (`spark.seals`). An event of a message that has not ended then costs a fold of the
open part alone. Events of closed and sealed parts are left out when the open part is folded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.spark.blocks import KIND_NAMES
from penstock.spark.duck import (
    GROUP_ROWS,
    SMALL_GROUP_ROWS,
    DuckConnection,
    quoted,
    read_files,
)
from penstock.spark.lake import AddedFile, Table
from penstock.spark.queries import NO_LIMIT
from penstock.spark.tables import FOLDS, PART_TABLES

# How many messages a range holds.
PART_MESSAGES: Final = 1 << 16
# Ended messages become a closed part if they are at least one in so many of the range's numbers.
_CLOSED_SHARE: Final = 4
# The condition that the message of a row in `folds` has ended.
_ENDED: Final = f"until < {NO_LIMIT}"
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


@dataclass(frozen=True, order=True)
class LakePart:
    """A range of a shard's message numbers, or one of its sealed or closed parts, by its number."""

    store: str
    shard: int
    nth: int
    messages: int = PART_MESSAGES
    seal: int = 0
    closed: int = 0

    @property
    def name(self) -> str:
        """As the tables in parts have it."""
        name = f"{self.store}-{self.shard}-{self.nth}"
        if self.seal:
            return f"{name}.{self.seal}"
        return f"{name}_{self.closed}" if self.closed else name

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

    `sealed` and `closed` are the files of `folds` of such parts of the same range, whose messages
    are left out; `next_closed` is the number of the next closed part. `chosen` is a file that names
    the messages of a part that is being sealed.
    """

    part: LakePart
    files: tuple[str, ...]
    queues: str
    lake: str
    sealed: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    next_closed: int = 1
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


def fold_part(work: FoldWork, threads: int) -> list[FoldedPart]:
    """Makes the files of a part: of a range, those of the open part and of a new closed part."""
    with DuckConnection(threads) as duck:
        duck.files("all_events", work.files, {})
        view_unsealed(duck, "unsealed_events", "all_events", work.sealed)
        if work.chosen is not None:
            chosen = f"SELECT message FROM {read_files(work.chosen)} WHERE {work.part.condition()}"
            duck.view("unsealed_events", f"SELECT * FROM all_events WHERE message IN ({chosen})")
        if work.closed:
            duck.files("closed_folds", work.closed, FOLDS.types)
            events = "SELECT given.* FROM unsealed_events AS given ANTI JOIN closed_folds"
            duck.view("open_events", f"{events} USING (message)")
        load_part(duck, work.part, "open_events" if work.closed else "unsealed_events")
        duck.table(
            "queues",
            f"SELECT * FROM {read_files(work.queues)} "
            f"WHERE store = {quoted(work.part.store)} AND shard = {work.part.shard}",
        )
        # Made once, for both parts of a range and for all tables that read it.
        duck.table("range_folds", FOLDS.rows)
        [(ended,)] = duck.fetch(f"SELECT count(*) FROM range_folds WHERE {_ENDED}")
        if work.part.seal or ended * _CLOSED_SHARE < work.part.messages:
            return [_write_part(duck, work, work.part, "true")]
        # The events of few messages are copied, and deleted from the table of all.
        left = f"SELECT message FROM range_folds WHERE NOT {_ENDED}"
        duck.table("left_events", f"SELECT * FROM events WHERE message IN ({left})")
        duck.run(f"DELETE FROM events WHERE message IN ({left})")
        closed = replace(work.part, closed=work.next_closed)
        made = [_write_part(duck, work, closed, _ENDED)]
        if duck.fetch("SELECT 1 FROM left_events LIMIT 1"):
            duck.run("DROP TABLE events")
            duck.run("ALTER TABLE left_events RENAME TO events")
            made.append(_write_part(duck, work, work.part, f"NOT {_ENDED}"))
        return made


def _write_part(duck: DuckConnection, work: FoldWork, part: LakePart, condition: str) -> FoldedPart:
    """Writes the file of each table in parts, from the tables `events`, `part` and `queues`.

    The condition is on rows of `range_folds`: whether they are of this part.
    """
    added = {}
    for each in PART_TABLES:
        table = Table(Path(work.lake, each.name), each.schema, in_parts=True)
        path = table.new_file(part.name)
        query = each.rows
        if each is FOLDS:
            query = f"SELECT * FROM range_folds WHERE {condition}"
            duck.view(each.name, query)
        group_rows = SMALL_GROUP_ROWS if each.order else GROUP_ROWS
        duck.write(each.ordered(query), str(path), group_rows)
        if each is not FOLDS:
            # Those after it read the file: making a table in memory costs as much as writing it.
            duck.files(each.name, [str(path)], each.types)
        added[each.name] = AddedFile.of(table.path, path)
    return FoldedPart(part, added)
