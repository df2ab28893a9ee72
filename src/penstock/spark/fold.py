"""The work of one task of a run: every table in parts, for some ranges of a shard's messages.

The events of a range are read once. Of regular lives (`spark.regular`), which most are, numpy makes
the folds and the rows; the events of the others go through the queries of the tables. Queries that
count read the folds of both. All of it is done once for all parts that are made, and then each
table gets one file for each part: `part_number` says which part a row is of.

    events ─▶ regular lives ─────────────────┬─▶ folds ─▶ tables that count
           └▶ other events ─▶ queried_folds ─┘
    regular lives that are simple, and queries over the others ─▶ messages, attempts

Where many messages of a range have ended, they become a closed part of their own, and the rest is
the open part (`spark.seals`). An event of a message that has not ended then costs a fold of the
open part alone. Events of closed and sealed parts are left out when the open part is folded again.

A connection and its queries take longer than the rows of a small part, so a task folds several
ranges together if few of their messages are left to be folded (`tasks_of_ranges`).
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark.blocks import KIND_NAMES
from penstock.spark.duck import GROUP_ROWS, SMALL_GROUP_ROWS, DuckConnection, quoted, read_files
from penstock.spark.lake import AddedFile, Table
from penstock.spark.ordering import Array, order_by, stable_order
from penstock.spark.part_events import LakePart, RangeEvents, read_events
from penstock.spark.queries import NO_LIMIT, load_query
from penstock.spark.regular import attempt_rows, fold_regular, fold_rows, message_rows
from penstock.spark.tables import (
    ATTEMPTS,
    FOLDS,
    MESSAGES,
    PART_TABLES,
    SUMMED_TABLES,
    Derived,
)

# How many ranges a task folds together at most.
_TASK_RANGES: Final = 4
# What the tables that count need of a simple life.
_COUNTED: Final = [
    "message", "part_number", "queue", "group", "body_bytes", "first_pushed_ms", "pushed",
    "pushed_ms", "claimed", "claimed_ms", "deleted", "deleted_ms", "regular", "simple",
]  # fmt: skip
# Ended messages become a closed part if they are at least one in so many of the range's numbers.
_CLOSED_SHARE: Final = 4
# The condition that the message of a row in `folds` has ended.
_ENDED: Final = f"until < {NO_LIMIT}"
# A hash that is the same in every version of every engine, as a number that Delta has.
_HASHED: Final = 'CAST(md5_number_lower("{0}") >> 1 AS bigint) AS {1}'
# The name of a kind in a query. In this form it is compared with the number that stands for a kind
# in `events`; without the cast, DuckDB would make a text of the kind in every row.
_KIND: Final = re.compile(f"'({'|'.join(KIND_NAMES[1:])})'")
_HASHES: Final = (
    f"{_HASHED.format('group', 'group_hash')}, {_HASHED.format('dedup_id', 'dedup_hash')}"
)
EVENT_COLUMNS: Final = (
    "message, sequence, CAST(kind AS kinds) AS kind, at_ms, queue, term, epoch, "
    'deadline_ms, visible_at_ms, expires_at_ms, priority, "group", dedup_id, attempt_id, holder, '
    f"name, to_queue, rank, dead, body_bytes, {_HASHES}"
)


@dataclass(frozen=True)
class RangeWork:
    """A range to be folded: files with its events among others.

    `sealed` and `closed` are the files of `folds` of such parts of the range, whose messages are
    left out; `next_closed` is the number of its next closed part.
    """

    part: LakePart
    files: tuple[str, ...]
    sealed: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    next_closed: int = 1


@dataclass(frozen=True)
class FoldWork:
    """All that a task needs: ranges of a shard, and its queues.

    `chosen` is a file that names the messages of a part that is being sealed, by itself.
    """

    ranges: tuple[RangeWork, ...]
    queues: str
    lake: str
    chosen: str | None = None

    @property
    def first(self) -> LakePart:
        """The first of the ranges."""
        return self.ranges[0].part

    def number(self, part: LakePart) -> int:
        """The number of a range's open part in the queries; the next is its new closed part."""
        return 2 * (part.nth - self.first.nth)


@dataclass(frozen=True)
class FoldedPart:
    """What a task made: one file for each table in parts."""

    part: LakePart
    added: dict[str, AddedFile]


def load_kinds(duck: DuckConnection) -> None:
    """Makes the type of an event's kind: a number that is shown as its name."""
    duck.run(f"CREATE TYPE IF NOT EXISTS kinds AS ENUM ({', '.join(map(quoted, KIND_NAMES[1:]))})")


def load_events(duck: DuckConnection, part: LakePart, rows: str) -> None:
    """Makes the tables `part` and `events` of a part's shard from these rows of events."""
    load_kinds(duck)
    duck.table(
        "part",
        f"SELECT {quoted(part.store)} AS store, {part.shard} AS shard, {part.seal > 0} AS dropped",
    )
    duck.table("events", f"SELECT {EVENT_COLUMNS} FROM {rows}")


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
    folded = [fold_regular(_read(each, work.chosen)) for each in work.ranges]
    with DuckConnection(threads) as duck:
        _load_others(duck, work, [found.others for found in folded])
        found = pa.concat_tables([found.lives for found in folded]).unify_dictionaries()
        closing = _closing(duck, work, found)
        lives = _numbered(duck, work, closing, found)
        _fold_others(duck, lives)
        _count(duck, lives)
        return _write_parts(duck, work, _parts_made(duck, work, closing), lives)


def _read(work: RangeWork, chosen: str | None) -> RangeEvents:
    """The events that the parts of a range are made from."""
    part = work.part
    wanted = np.ones(part.messages, bool)
    if chosen is not None:
        with DuckConnection() as duck:
            query = f"SELECT message FROM {read_files(chosen)} WHERE {part.condition()}"
            numbers = duck.rows(query)["message"].to_numpy()
        wanted[:] = False
        wanted[numbers - part.first] = True
        return read_events(work.files, part, wanted)
    for path in work.closed:
        [closed] = _columns(path, "message")
        wanted[closed - part.first] = False
    events = read_events(work.files, part, wanted)
    for path in work.sealed:
        sealed, last_sequences = _columns(path, "message", "last_sequence")
        last = np.zeros(part.messages, np.int64)
        last[sealed - part.first] = last_sequences
        events = events.only(events.numbers("sequence") > last[events.places])
    return events


def _columns(path: str, *names: str) -> list[Array]:
    """Columns of numbers of a file."""
    # Not by `read_table`, whose import takes longer than the reading.
    with pq.ParquetFile(path) as file:
        rows = file.read(list(names), use_threads=False)
    return [rows[name].to_numpy() for name in names]


def _load_others(duck: DuckConnection, work: FoldWork, events: Sequence[pa.Table]) -> None:
    """Makes the tables that queries of the other lives read, and their folds."""
    duck.register("other_events", pa.concat_tables(events).unify_dictionaries())
    load_events(duck, work.first, "other_events")
    duck.table(
        "queues",
        f"SELECT * FROM {read_files(work.queues)} "
        f"WHERE store = {quoted(work.first.store)} AND shard = {work.first.shard}",
    )
    duck.view("queue_names", "SELECT queue_number, queue FROM queues")
    folds = f"SELECT * EXCLUDE (store, shard) FROM ({_of_kinds(FOLDS.text)})"
    duck.table("queried_folds", folds)


def _of_kinds(query: str) -> str:
    """A query of `events` that compares kinds by their numbers."""
    return _KIND.sub(r"CAST('\1' AS kinds)", query)


def _closing(duck: DuckConnection, work: FoldWork, lives: pa.Table) -> set[int]:
    """Of which ranges, by their places in the shard, enough messages have ended to be closed."""
    messages = work.first.messages
    numbers = lives["message"].to_numpy()[lives["deleted"].is_valid().to_numpy()]
    places, counts = np.unique(numbers // messages, return_counts=True)
    ended = Counter(dict(zip(places.tolist(), counts.tolist(), strict=True)))
    for nth, count in duck.fetch(
        f"SELECT message // {messages}, count(*) FROM queried_folds WHERE {_ENDED} GROUP BY ALL"
    ):
        ended[nth] += count
    return {
        each.part.nth
        for each in work.ranges
        if not each.part.seal and ended[each.part.nth] * _CLOSED_SHARE >= messages
    }


@dataclass(frozen=True)
class NumberedLives:
    """The folds of regular lives in the order of their parts' numbers, with hashes of texts.

    A simple one is deleted, or its queue was not emptied since its last event.
    """

    all: pa.Table
    simple: pa.Table
    others: pa.Table


def _numbered(
    duck: DuckConnection, work: FoldWork, closing: set[int], lives: pa.Table
) -> NumberedLives:
    """Gives each life the number of its message's part; those of the others are `other_folds`."""
    first = work.first
    nth = lives["message"].to_numpy() // first.messages
    is_closed = np.isin(nth, list(closing)) & lives["deleted"].is_valid().to_numpy()
    numbers = 2 * (nth - first.nth) + is_closed
    lives = lives.append_column("part_number", pa.array(numbers, pa.int32()))
    lives = lives.take(pa.array(stable_order(numbers)))
    for text, hashed in (("group", "group_hash"), ("dedup_id", "dedup_hash")):
        lives = lives.append_column(hashed, _hashes(duck, lives[text]))
    closed = f"{_ENDED} AND message // {first.messages} IN ({', '.join(map(str, closing))})"
    duck.view(
        "other_folds",
        f"SELECT *, CAST(2 * (message // {first.messages} - {first.nth}) AS int) "
        f"+ CAST({closed if closing else 'false'} AS int) AS part_number, "
        "regular AND deleted IS NOT NULL AS simple FROM queried_folds",
    )
    simple = pc.or_(
        lives["deleted"].is_valid(),
        pa.array(lives["last_sequence"].to_numpy() > _last_emptied(duck, lives["queue"])),
    )
    lives = lives.append_column("simple", simple)
    return NumberedLives(lives, lives.filter(simple), lives.filter(pc.invert(simple)))


def _last_emptied(duck: DuckConnection, queues: pa.ChunkedArray) -> Array:
    """When each of these queues was last purged or removed: the sequence of that, or else 0."""
    found = dict(
        duck.fetch("SELECT queue_number, list_max(ends).sequence FROM queues WHERE ends <> []")
    )
    numbers = queues.combine_chunks().dictionary_encode()
    last = [found.get(number, 0) for number in numbers.dictionary.to_pylist()]
    return np.asarray(np.array(last, np.int64)[numbers.indices.to_numpy()])


def _hashes(duck: DuckConnection, texts: pa.ChunkedArray) -> pa.Array:
    """The hashes of texts, as the queries make them."""
    encoded = texts.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    words = encoded.dictionary
    duck.register("words", pa.table({"word": words, "place": np.arange(len(words))}))
    rows = duck.rows(f"SELECT place, {_HASHED.format('word', 'hash')} FROM words")
    found = np.empty(len(words), np.int64)
    found[rows["place"].to_numpy()] = rows["hash"].to_numpy()
    return pa.array(found).take(encoded.indices)


def _parts_made(duck: DuckConnection, work: FoldWork, closing: set[int]) -> dict[int, LakePart]:
    """The parts that get files, by their numbers."""
    found = {row[0] for row in duck.fetch("SELECT DISTINCT part_number FROM folds")}
    parts = {}
    for each in work.ranges:
        number = work.number(each.part)
        if each.part.nth in closing:
            parts[number + 1] = replace(each.part, closed=each.next_closed)
        # A range of which all messages have ended has no open part.
        if not closing or number in found:
            parts[number] = each.part
    return parts


def _fold_others(duck: DuckConnection, lives: NumberedLives) -> None:
    """Makes what becomes of all lives but those that are simple.

    `lives` and `claims` are views: they read `folds` as it is when they are used.
    """
    # The events of a regular life are known from its row. Here are few of them, or none.
    regular = "SELECT message FROM queried_folds WHERE regular"
    duck.run(f"DELETE FROM events WHERE message IN ({regular})")
    duck.arrow("regular_folds", lives.others)
    duck.view(FOLDS.name, "FROM other_folds UNION ALL BY NAME FROM regular_folds")
    for name in ("lives", "claims"):
        duck.table(f"eventful_{name}", _of_kinds(load_query(f"tables/eventful_{name}")))
        duck.view(name, load_query(f"tables/{name}"))


def _count(duck: DuckConnection, lives: NumberedLives) -> None:
    """Makes the tables that count messages, for all parts of the task."""
    duck.arrow("simple_folds", lives.simple.select(_COUNTED))
    # Columns that nothing counts are null in the rows of `simple_folds`.
    duck.view(
        FOLDS.name,
        "FROM other_folds UNION ALL BY NAME FROM regular_folds UNION ALL BY NAME FROM simple_folds",
    )
    duck.table("part_events", _of_kinds(load_query("tables/part_events")))
    for each in SUMMED_TABLES:
        duck.table(each.name, _of_kinds(each.text))


def _write_parts(
    duck: DuckConnection, work: FoldWork, parts: Mapping[int, LakePart], lives: NumberedLives
) -> list[FoldedPart]:
    """Writes the file of each table of each part."""
    # Queries give the rows of those lives alone of which `lives` has none.
    duck.view(FOLDS.name, "FROM other_folds")
    names = dict(duck.fetch("FROM queue_names"))
    regular = {
        FOLDS: fold_rows(lives.all, work.first),
        MESSAGES: message_rows(lives.simple, work.first, names),
        ATTEMPTS: attempt_rows(lives.simple, work.first, names),
    }
    made = {number: FoldedPart(part, {}) for number, part in parts.items()}
    for each in PART_TABLES:
        pieces = [duck.rows(each.rows_of(_source(each), "part_number"))]
        if each in regular:
            pieces = _alike(regular[each], *pieces)
        if each.order:
            pieces = [pa.concat_tables(pieces)]
        parted = [PartedRows(rows, each.order) for rows in pieces]
        table = Table(Path(work.lake, each.name), each.schema, in_parts=True)
        group_rows = SMALL_GROUP_ROWS if each.order else GROUP_ROWS
        for number, part in parts.items():
            rows = pa.concat_tables([piece.of_part(number) for piece in parted])
            made[number].added[each.name] = table.write(part.name, rows, group_rows)
    return list(made.values())


class PartedRows:
    """Rows by the number of their part, and in this order."""

    def __init__(self, rows: pa.Table, order: Sequence[str]) -> None:
        keys = [rows["part_number"].to_numpy()]
        for term in order:
            name, _, direction = term.partition(" ")
            values = rows[name].to_numpy()
            keys.append(-values if direction else values)
        if order or (keys[0][1:] < keys[0][:-1]).any():
            rows = rows.take(pa.array(order_by(*keys)))
        self._numbers = rows["part_number"].to_numpy()
        self._rows = rows.drop("part_number")

    def of_part(self, number: int) -> pa.Table:
        """The rows of a part."""
        start, end = np.searchsorted(self._numbers, [number, number + 1]).tolist()
        return self._rows.slice(start, end - start)


def _source(derived: Derived) -> str:
    """Where the queries have the rows of a table, with the numbers of their parts."""
    if derived is FOLDS:
        return f"{FOLDS.name}, part"
    return derived.name if derived in SUMMED_TABLES else f"({derived.text})"


def _alike(rows: pa.Table, more: pa.Table) -> list[pa.Table]:
    """Both; texts of the second become dictionaries where those of the first are."""
    for at, name in enumerate(rows.column_names):
        if pa.types.is_dictionary(rows[name].type):
            more = more.set_column(at, name, more[name].dictionary_encode())
    return [rows, more.cast(rows.schema)]


def tasks_of_ranges(ranges: Mapping[LakePart, int]) -> list[tuple[LakePart, ...]]:
    """Divides ranges among tasks, given how many messages each has to be folded at most.

    Ranges of a shard are folded together while they have no more messages than one whole range, or
    than up to _TASK_RANGES if there are many: planning the queries takes as long as some rows.
    """
    found: list[list[LakePart]] = []
    last, room = None, 0
    cores = len(os.sched_getaffinity(0))
    together = max(1, min(_TASK_RANGES, len(ranges) // (2 * cores)))
    # The newest ranges have most of the new messages: the longest tasks come first.
    for part in sorted(ranges, key=lambda part: (part.store, part.shard, -part.nth)):
        if (part.store, part.shard) != last or ranges[part] > room:
            found.append([])
            last, room = (part.store, part.shard), together * part.messages
        found[-1].append(part)
        room -= ranges[part]
    return sorted(map(tuple, found), key=lambda task: -task[0].nth)
