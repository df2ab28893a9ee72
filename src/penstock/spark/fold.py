"""The work of one task of a run: every table in parts, for some ranges of a shard's messages.

The events of a range are read once; the queries of the tables run over them in one process, and
each table gets one file for each part.

Where many messages of a range have ended, they become a closed part of their own, and the rest is
the open part (`spark.seals`). An event of a message that has not ended then costs a fold of the
open part alone. Events of closed and sealed parts are left out when the open part is folded again.

A connection and its queries take longer than the rows of a small part, so a task folds several
ranges together if few of their messages are left to be folded (`tasks_of_ranges`).
"""

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
from penstock.spark.queries import NO_LIMIT
from penstock.spark.tables import (
    ATTEMPTS,
    FOLDS,
    IRREGULAR_EVENTS,
    MESSAGES,
    PART_DEAD_LETTERS,
    PART_TABLES,
)

# How many messages a range holds.
PART_MESSAGES: Final = 1 << 16
# Ended messages become a closed part if they are at least one in so many of the range's numbers.
_CLOSED_SHARE: Final = 4
# Made once for all parts of a task: a row is of one message, whose number says which part has it.
_OF_MESSAGES: Final = (IRREGULAR_EVENTS, MESSAGES, ATTEMPTS, PART_DEAD_LETTERS)
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


def load_parts(duck: DuckConnection, parts: Sequence[LakePart], events: str) -> None:
    """Makes the tables `part` and `events` of these parts of a shard from rows of many."""
    duck.run(f"CREATE TYPE IF NOT EXISTS kinds AS ENUM ({', '.join(map(quoted, KIND_NAMES[1:]))})")
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
    duck.table("events", f"SELECT {_COLUMNS} FROM {events} WHERE {span}")


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
        # Made once, for both parts of a range and for all tables that read it.
        duck.table("range_folds", FOLDS.rows)
        closing = _closing(duck, work)
        if not closing:
            return _write_parts(duck, work, work.parts, "true")
        is_closed = f"({_ENDED} AND {_in_ranges(closing)})"
        # The events of few messages are copied, and deleted from the table of all.
        left = f"SELECT message FROM range_folds WHERE NOT {is_closed}"
        duck.table("left_events", f"SELECT * FROM events WHERE message IN ({left})")
        duck.run(f"DELETE FROM events WHERE message IN ({left})")
        closed = [replace(part, closed=work.next_closed.get(part, 1)) for part in closing]
        made = _write_parts(duck, work, closed, is_closed)
        found = duck.fetch(f"SELECT DISTINCT message // {work.parts[0].messages} FROM left_events")
        rest = [part for part in work.parts if (part.nth,) in found]
        if rest:
            duck.run("DROP TABLE events")
            duck.run("ALTER TABLE left_events RENAME TO events")
            made += _write_parts(duck, work, rest, f"NOT {is_closed}")
        return made


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


def _closing(duck: DuckConnection, work: FoldWork) -> list[LakePart]:
    """The ranges of which enough messages have ended for a closed part."""
    messages = work.parts[0].messages
    found = duck.fetch(f"""
        SELECT message // {messages} FROM range_folds WHERE {_ENDED} GROUP BY ALL
        HAVING count(*) * {_CLOSED_SHARE} >= {messages}""")
    return [part for part in work.parts if not part.seal and (part.nth,) in found]


def _write_parts(
    duck: DuckConnection, work: FoldWork, parts: Sequence[LakePart], condition: str
) -> list[FoldedPart]:
    """Writes the files of parts of several ranges, from the tables `events`, `part` and `queues`.

    The condition is on rows of `range_folds`: whether they are of one of these parts.
    """
    if len(parts) == 1:
        return [_write_part(duck, work, parts[0], {FOLDS.name: _folds(condition)})]
    duck.view(FOLDS.name, _folds(condition))
    for each in _OF_MESSAGES:
        duck.table(f"range_{each.name}", each.rows)
        duck.view(each.name, f"SELECT * FROM range_{each.name}")
    duck.run("ALTER TABLE events RENAME TO range_events")
    made = []
    for part in parts:
        of_part = part.numbers()
        duck.view("events", f"SELECT * FROM range_events WHERE {of_part}")
        queries = {FOLDS.name: _folds(f"{condition} AND {of_part}")}
        for each in _OF_MESSAGES:
            queries[each.name] = f"SELECT * FROM range_{each.name} WHERE {of_part}"
        made.append(_write_part(duck, work, part, queries))
    duck.run("DROP VIEW events")
    duck.run("ALTER TABLE range_events RENAME TO events")
    return made


def _folds(condition: str) -> str:
    return f"SELECT * FROM range_folds WHERE {condition}"


def _write_part(
    duck: DuckConnection, work: FoldWork, part: LakePart, queries: Mapping[str, str]
) -> FoldedPart:
    """Writes the file of each table of a part, by its query if it is not among these.

    A query that is given reads tables that are made already.
    """
    added = {}
    for each in PART_TABLES:
        table = Table(Path(work.lake, each.name), each.schema, in_parts=True)
        path = table.new_file(part.name)
        query = queries.get(each.name, each.rows)
        if each.name in queries:
            duck.view(each.name, query)
        group_rows = SMALL_GROUP_ROWS if each.order else GROUP_ROWS
        duck.write(each.ordered(query), str(path), group_rows)
        if each.name not in queries:
            # Those after it read the file: making a table in memory costs as much as writing it.
            duck.files(each.name, [str(path)], each.types)
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
