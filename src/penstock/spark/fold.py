"""The work of one task of a run: every table in parts, for some ranges of a shard's messages.

The events of a range are read once. Of regular lives (`spark.regular`), which most are, numpy makes
the folds and the rows; the events of the others go through the queries of the tables. Queries that
count read the folds of both. All of it is done once for all parts that are made, and then each
table with rows of messages gets one file for each part: `part_number` says which part a row is of.

    events ─▶ regular lives ─────────────────┬─▶ folds ─▶ tables that count
           └▶ other events ─▶ queried_folds ─┘
    regular lives that are simple, and queries over the others ─▶ messages, attempts

Where many messages of a range have ended, they become a closed part of their own, and the rest is
the open part (`spark.seals`). An event of a message that has not ended then costs a fold of the
open part alone, from the events that `open_events` has of it and those that are new: they are few,
and scattered among the events of messages that have ended.

A connection and its queries take longer than the rows of a small part, so a task folds several
ranges together if few of their messages are left to be folded (`tasks_of_ranges`).
"""

import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from penstock.spark.regular import attempt_rows, constant, fold_regular, fold_rows, message_rows
from penstock.spark.tables import (
    ATTEMPTS,
    FOLDS,
    MESSAGE_TABLES,
    MESSAGES,
    OPEN_EVENTS,
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
# The condition that the message of a row in `queried_folds` has ended.
_ENDED: Final = f"(until < {NO_LIMIT} OR emptied IS NOT NULL)"
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

    If only the open part is to be made again, `open_events` are its files in that table: they have
    all events of its messages before the offset `since`. `sealed` are the files of `folds` of such
    parts of the range, whose messages are left out; `next_closed` is the number of its next closed
    part.
    """

    part: LakePart
    files: tuple[str, ...]
    sealed: tuple[str, ...] = ()
    open_events: tuple[str, ...] = ()
    since: int = 0
    next_closed: int = 1


@dataclass(frozen=True)
class FoldWork:
    """All that a task needs: ranges of a shard, and its queues.

    `chosen` is a file that names the messages of a part that is being sealed, by itself. `scratch`
    is a directory for what the task makes and no table gets as it is.
    """

    ranges: tuple[RangeWork, ...]
    queues: str
    lake: str
    scratch: str
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
    """What was made of a part: one file for each table with rows of single messages."""

    part: LakePart
    added: dict[str, AddedFile]


@dataclass(frozen=True)
class FoldedRanges:
    """What a task made: parts, and for each small table a file with what all of them add to it."""

    parts: list[FoldedPart]
    sums: dict[str, str]


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


def fold_parts(work: FoldWork, threads: int) -> FoldedRanges:
    """Makes the files of the parts: of a range, those of the open part and of a new closed part."""
    folded, staying = [], {}
    for each in work.ranges:
        events = _read(each, work.chosen)
        folded.append(fold_regular(events))
        staying[each.part] = _staying(events, folded[-1].lives, each.part)
    with DuckConnection(threads) as duck:
        _load_others(duck, work, [found.others for found in folded])
        found = pa.concat_tables([found.lives for found in folded]).unify_dictionaries()
        found = _with_emptyings(duck, found)
        closing = _closing(duck, work, found)
        lives = _numbered(duck, work, closing, found)
        _fold_others(duck, lives)
        _count(duck, lives)
        parts = _parts_made(duck, work, closing)
        made = _write_parts(duck, work, parts, lives)
        _write_open_events(work, made, staying, _closed(duck, lives))
        return FoldedRanges(made, _write_sums(duck, work, parts))


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
    events = read_events(work.files, part, wanted, first=work.open_events, since=work.since)
    for path in work.sealed:
        sealed, last_sequences = _columns(path, "message", "last_sequence")
        last = np.zeros(part.messages, np.int64)
        last[sealed - part.first] = last_sequences
        events = events.only(events.numbers("sequence") > last[events.places])
    return events


def _staying(events: RangeEvents, lives: pa.Table, part: LakePart) -> pa.Table:
    """The events of messages that may be in the range's open part, given its regular lives.

    If enough of these have ended for a closed part, theirs are left out.
    """
    ended = lives["message"].to_numpy()[lives["deleted"].is_valid().to_numpy()] - part.first
    stays = np.ones(part.messages, bool)
    if len(ended) * _CLOSED_SHARE >= part.messages:
        stays[ended] = False
    keep = events.places >= 0
    keep[keep] = stays[events.places[keep]]
    return events.rows.filter(pa.array(keep))


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
    columns = "* EXCLUDE (store, shard), CAST(NULL AS bigint) AS emptied"
    duck.table("queried_folds", f"SELECT {columns} FROM ({_of_kinds(FOLDS.text)})")


def _of_kinds(query: str) -> str:
    """A query of `events` that compares kinds by their numbers."""
    return _KIND.sub(r"CAST('\1' AS kinds)", query)


def _with_emptyings(duck: DuckConnection, lives: pa.Table) -> pa.Table:
    """Adds to each life whether it is simple, and the purge or removal that ended it, if one did.

    That of the others is in `queried_folds`.
    """
    simple = pc.or_(
        lives["deleted"].is_valid(),
        pa.array(lives["last_sequence"].to_numpy() > _last_emptied(duck, lives["queue"])),
    )
    places = pa.array(np.flatnonzero(~simple.to_numpy()))
    standing = lives.select(["message", "queue", "last_sequence"]).take(places)
    duck.arrow("regular_folds", standing.append_column("place", places))
    duck.table("emptied", load_query("tables/emptied"))
    duck.run(
        "UPDATE queried_folds SET emptied = found.emptied FROM emptied AS found "
        "WHERE found.message = queried_folds.message"
    )
    found = duck.rows("SELECT place, emptied FROM emptied JOIN regular_folds USING (message)")
    emptied = np.zeros(len(lives), np.int64)
    emptied[found["place"].to_numpy()] = found["emptied"].to_numpy()
    column = pa.array(emptied, mask=emptied == 0)
    return lives.append_column("simple", simple).append_column("emptied", column)


def _has_ended(lives: pa.Table) -> Array:
    """Which messages were deleted, or ended by a purge or removal."""
    found: Array = pc.or_(lives["deleted"].is_valid(), lives["emptied"].is_valid()).to_numpy()
    return found


def _closing(duck: DuckConnection, work: FoldWork, lives: pa.Table) -> set[int]:
    """Of which ranges, by their places in the shard, enough messages have ended to be closed."""
    messages = work.first.messages
    numbers = lives["message"].to_numpy()[_has_ended(lives)]
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
    """The folds of regular lives, with hashes of texts.

    A simple one is deleted, or its queue was not emptied since its last event. `all` are in any
    order, `simple` and `others` in the order of their parts' numbers.
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
    is_closed = np.isin(nth, list(closing)) & _has_ended(lives)
    numbers = 2 * (nth - first.nth) + is_closed
    lives = lives.append_column("part_number", pa.array(numbers, pa.int32()))
    for text, hashed in (("group", "group_hash"), ("dedup_id", "dedup_hash")):
        lives = lives.append_column(hashed, _hashes(duck, lives[text]))
    closed = f"{_ENDED} AND message // {first.messages} IN ({', '.join(map(str, closing))})"
    duck.view(
        "other_folds",
        f"SELECT *, CAST(2 * (message // {first.messages} - {first.nth}) AS int) "
        f"+ CAST({closed if closing else 'false'} AS int) AS part_number, "
        "regular AND deleted IS NOT NULL AS simple FROM queried_folds",
    )
    order = stable_order(numbers)
    is_simple = lives["simple"].to_numpy()[order]
    simple, others = (lives.take(pa.array(order[chosen])) for chosen in (is_simple, ~is_simple))
    return NumberedLives(lives, simple, others)


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
    """Writes the files of each part: its rows of messages."""
    # Queries give the rows of those lives alone of which `lives` has none.
    duck.view(FOLDS.name, "SELECT * REPLACE (coalesce(emptied, until) AS until) FROM other_folds")
    names = dict(duck.fetch("FROM queue_names"))
    regular = {
        FOLDS: fold_rows(_until_emptied(lives.all), work.first),
        MESSAGES: message_rows(lives.simple, work.first, names),
        ATTEMPTS: attempt_rows(lives.simple, work.first, names),
    }
    made = {number: FoldedPart(part, {}) for number, part in parts.items()}
    for each in MESSAGE_TABLES:
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


def _closed(duck: DuckConnection, lives: NumberedLives) -> Array:
    """The numbers of the messages in closed parts."""
    regular = lives.all["message"].to_numpy()[lives.all["part_number"].to_numpy() % 2 != 0]
    others = duck.rows("SELECT message FROM other_folds WHERE part_number % 2 <> 0")
    return np.concatenate([regular, others["message"].to_numpy()])


def _until_emptied(lives: pa.Table) -> pa.Table:
    """The lives with `until` as the table has it."""
    at = lives.column_names.index("until")
    return lives.set_column(at, "until", pc.coalesce(lives["emptied"], lives["until"]))


def _write_open_events(
    work: FoldWork,
    made: Sequence[FoldedPart],
    staying: Mapping[LakePart, pa.Table],
    closed: Array,
) -> None:
    """Writes the events of the open parts, given those of messages that may be in them."""
    table = Table(Path(work.lake, OPEN_EVENTS.name), OPEN_EVENTS.schema, in_parts=True)
    for each in made:
        part = each.part
        # Closed parts are no ranges. What a sealed part was made from is dropped.
        if part not in staying or part.seal:
            continue
        stays = np.ones(part.messages, bool)
        stays[closed[(closed >= part.first) & (closed < part.end)] - part.first] = False
        rows = staying[part]
        rows = rows.filter(pa.array(stays[rows["message"].to_numpy() - part.first]))
        rows = rows.append_column("store", constant(part.store, pa.string(), len(rows)))
        rows = rows.append_column("shard", constant(part.shard, pa.int32(), len(rows)))
        rows = rows.select(OPEN_EVENTS.columns)
        each.added[OPEN_EVENTS.name] = table.write(part.name, rows, GROUP_ROWS)


def files_added(parts: Iterable[FoldedPart]) -> dict[str, list[AddedFile]]:
    """The new files of each table with rows of messages or events."""
    found: dict[str, list[AddedFile]] = {each.name: [] for each in (*MESSAGE_TABLES, OPEN_EVENTS)}
    for part in parts:
        for name, file in part.added.items():
            found[name].append(file)
    return found


def _write_sums(
    duck: DuckConnection, work: FoldWork, parts: Mapping[int, LakePart]
) -> dict[str, str]:
    """Writes what the parts add to the small tables: a file for each table."""
    names = ", ".join(f"({number}, {quoted(part.name)})" for number, part in parts.items())
    duck.view("part_names", f"SELECT * FROM (VALUES {names}) AS names(part_number, of_part)")
    made = {}
    for each in SUMMED_TABLES:
        path = Path(work.scratch, f"{each.name}-{uuid.uuid4().hex}.parquet")
        duck.write(each.rows_of(f"{each.name} JOIN part_names USING (part_number)"), str(path))
        made[each.name] = str(path)
    return made


class PartedRows:
    """Rows by the number of their part, and in this order."""

    def __init__(self, rows: pa.Table, order: Sequence[str]) -> None:
        keys = [rows["part_number"].to_numpy()]
        for term in order:
            name, _, how = term.partition(" ")
            if how == "LAST":
                # As digits of one number: each key is one more pass over all rows.
                keys[-1] = 2 * keys[-1] + rows[name].is_null().to_numpy()
            else:
                values = rows[name].to_numpy()
                keys.append(-values if how else values)
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
    return f"({derived.text})"


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
