"""The work of one task of a run: every table in parts, for some ranges of a shard's messages.

The events of a range are read once; the queries of the tables run over them in one process, once
for all parts that are made, and each table gets one file for each part. `part_number` in the tables
of the connection says which part a row is of.

Where many messages of a range have ended, they become a closed part of their own, and the rest is
the open part (`spark.seals`). An event of a message that has not ended then costs a fold of the
open part alone. Events of closed and sealed parts are left out when the open part is folded again.

A connection and its queries take longer than the rows of a small part, so a task folds several
ranges together if few of their messages are left to be folded (`tasks_of_ranges`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from penstock.spark.queries import NO_LIMIT, load_query
from penstock.spark.tables import FOLDS, PART_TABLES, SUMMED_TABLES

# How many messages a range holds.
PART_MESSAGES: Final = 1 << 16
# Ended messages become a closed part if they are at least one in so many of the range's numbers.
_CLOSED_SHARE: Final = 4
# Made in memory for all parts of a task. Rows of the others are made while they are written.
_SMALL_TABLES: Final = SUMMED_TABLES
# The condition that the message of a row in `folds` has ended.
_ENDED: Final = f"until < {NO_LIMIT}"
# A hash that is the same in every version of every engine, as a number that Delta has.
_HASHED: Final = 'CAST(md5_number_lower("{0}") >> 1 AS bigint) AS {1}'
# The name of a kind in a query. In this form it is compared with the number that stands for a kind
# in `events`; without the cast, DuckDB would make a text of the kind in every row.
_KIND: Final = re.compile(f"'({'|'.join(KIND_NAMES[1:])})'")
EVENT_COLUMNS: Final = (
    "message, sequence, CAST(kind AS kinds) AS kind, at_ms, queue, term, epoch, "
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
        return f"store = {quoted(self.store)} AND shard = {self.shard} AND {self.numbers()}"

    def numbers(self) -> str:
        """The SQL condition that a message number is in its range."""
        return f"message >= {self.first} AND message < {self.end}"


@dataclass(frozen=True)
class FoldWork:
    """All that a task needs: ranges of a shard, files with their events among others, the queues.

    `sealed` and `closed` are the files of `folds` of such parts of the same ranges, whose messages
    are left out; `next_closed` has the number of the next closed part of a range, if it is not 1.
    `chosen` is a file that names the messages of a part that is being sealed, by itself.
    """

    parts: tuple[LakePart, ...]
    files: tuple[str, ...]
    queues: str
    lake: str
    sealed: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    next_closed: Mapping[LakePart, int] = field(default_factory=dict)
    chosen: str | None = None


@dataclass(frozen=True)
class FoldedPart:
    """What a task made: one file for each table in parts."""

    part: LakePart
    added: dict[str, AddedFile]


def load_kinds(duck: DuckConnection) -> None:
    """Makes the type of an event's kind: a number that is shown as its name."""
    duck.run(f"CREATE TYPE IF NOT EXISTS kinds AS ENUM ({', '.join(map(quoted, KIND_NAMES[1:]))})")


def load_parts(duck: DuckConnection, parts: Sequence[LakePart], events: str) -> None:
    """Makes the tables `part` and `events` of these parts of a shard from rows of many."""
    load_kinds(duck)
    first, last = min(parts), max(parts)
    duck.table(
        "part",
        f"SELECT {quoted(first.store)} AS store, {first.shard} AS shard, "
        f"{first.seal > 0} AS dropped",
    )
    # Row groups before and behind all ranges are skipped by their statistics.
    span = replace(first, nth=0, messages=last.end).condition() + f" AND message >= {first.first}"
    if len(parts) > 1:
        span += f" AND {_in_ranges(parts)}"
    duck.table("events", f"SELECT {EVENT_COLUMNS} FROM {events} WHERE {span}")


def _in_ranges(parts: Sequence[LakePart]) -> str:
    """The SQL condition that a message number is in one of these ranges, which are equally long."""
    return f"message // {parts[0].messages} IN ({', '.join(str(part.nth) for part in parts)})"


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


def fold_parts(work: FoldWork, threads: int) -> list[FoldedPart]:
    """Makes the files of the parts: of a range, those of the open part and of a new closed part."""
    with DuckConnection(threads) as duck:
        _load(duck, work)
        duck.table("range_folds", f"SELECT * EXCLUDE (store, shard) FROM ({_of_kinds(FOLDS.text)})")
        closing = _closing(duck, work)
        _number_parts(duck, work, closing)
        found = {row[0] for row in duck.fetch("SELECT DISTINCT part_number FROM folds")}
        parts = {
            _part_number(work, part) + 1: replace(part, closed=work.next_closed.get(part, 1))
            for part in closing
        }
        for part in work.parts:
            # A range of which all messages have ended has no open part.
            if not closing or _part_number(work, part) in found:
                parts[_part_number(work, part)] = part
        _fold_messages(duck)
        return [_write_part(duck, work, part, number) for number, part in parts.items()]


def _part_number(work: FoldWork, part: LakePart) -> int:
    """The number of a range's open part in the queries; the next one is its new closed part."""
    return 2 * (part.nth - work.parts[0].nth)


def _number_parts(duck: DuckConnection, work: FoldWork, closing: Sequence[LakePart]) -> None:
    """Makes the view `folds`: the folds of all ranges, with the number of each message's part."""
    first = work.parts[0]
    is_closed = f"{_ENDED} AND {_in_ranges(closing)}" if closing else "false"
    duck.view(
        FOLDS.name,
        f"SELECT *, CAST(2 * (message // {first.messages} - {first.nth}) AS int) "
        f"+ CAST({is_closed} AS int) AS part_number FROM range_folds",
    )


def _fold_messages(duck: DuckConnection) -> None:
    """Makes what the tables' rows come from, once for all parts of the task."""
    # Of a regular life the row in `folds` says all.
    irregular = "SELECT message FROM range_folds WHERE NOT regular"
    duck.table("irregular", f"SELECT * FROM events WHERE message IN ({irregular})")
    duck.run("DROP TABLE events")
    duck.run("ALTER TABLE irregular RENAME TO events")
    for name in ("lives", "claims"):
        duck.table(f"eventful_{name}", _of_kinds(load_query(f"tables/eventful_{name}")))
        duck.view(name, load_query(f"tables/{name}"))
    duck.table("part_events", _of_kinds(load_query("tables/part_events")))
    for each in _SMALL_TABLES:
        duck.table(each.name, _of_kinds(each.text))


def _load(duck: DuckConnection, work: FoldWork) -> None:
    """Makes the tables `part`, `events` and `queues` of a task."""
    duck.files("all_events", work.files, {})
    view_unsealed(duck, "unsealed_events", "all_events", work.sealed)
    first = work.parts[0]
    if work.chosen is not None:
        chosen = f"SELECT message FROM {read_files(work.chosen)} WHERE {first.condition()}"
        duck.view("unsealed_events", f"SELECT * FROM all_events WHERE message IN ({chosen})")
    if work.closed:
        duck.files("closed_folds", work.closed, FOLDS.types)
        events = "SELECT given.* FROM unsealed_events AS given ANTI JOIN closed_folds"
        duck.view("open_events", f"{events} USING (message)")
    load_parts(duck, work.parts, "open_events" if work.closed else "unsealed_events")
    duck.table(
        "queues",
        f"SELECT * FROM {read_files(work.queues)} "
        f"WHERE store = {quoted(first.store)} AND shard = {first.shard}",
    )
    duck.view("queue_names", "SELECT queue_number, queue FROM queues")


def _of_kinds(query: str) -> str:
    """A query of `events` that compares kinds by their numbers."""
    return _KIND.sub(r"CAST('\1' AS kinds)", query)


def _closing(duck: DuckConnection, work: FoldWork) -> list[LakePart]:
    """The ranges of which enough messages have ended for a closed part."""
    messages = work.parts[0].messages
    found = duck.fetch(f"""
        SELECT message // {messages} FROM range_folds WHERE {_ENDED} GROUP BY ALL
        HAVING count(*) * {_CLOSED_SHARE} >= {messages}""")
    return [part for part in work.parts if not part.seal and (part.nth,) in found]


def _write_part(duck: DuckConnection, work: FoldWork, part: LakePart, number: int) -> FoldedPart:
    """Writes the file of each table of a part."""
    added = {}
    for each in PART_TABLES:
        table = Table(Path(work.lake, each.name), each.schema, in_parts=True)
        path = table.new_file(part.name)
        if each is FOLDS:
            source = f"{FOLDS.name}, part"
        else:
            source = each.name if each in _SMALL_TABLES else f"({each.text})"
        query = f"{each.rows_of(source)} WHERE part_number = {number}"
        group_rows = SMALL_GROUP_ROWS if each.order else GROUP_ROWS
        duck.write(each.ordered(query), str(path), group_rows)
        added[each.name] = AddedFile.of(table.path, path)
    return FoldedPart(part, added)


def tasks_of_ranges(ranges: Mapping[LakePart, int]) -> list[tuple[LakePart, ...]]:
    """Divides ranges among tasks, given how many messages each has to be folded at most.

    Ranges of a shard are folded together while they have no more messages than one whole range.
    """
    found: list[list[LakePart]] = []
    last, room = None, 0
    # The newest ranges have most of the new messages: the longest tasks come first.
    for part in sorted(ranges, key=lambda part: (part.store, part.shard, -part.nth)):
        if (part.store, part.shard) != last or ranges[part] > room:
            found.append([])
            last, room = (part.store, part.shard), part.messages
        found[-1].append(part)
        room -= ranges[part]
    return sorted(map(tuple, found), key=lambda task: -task[0].nth)
