"""Regular lives, found in the events of a range by numpy; and the rows of those that are simple.

A life is regular if its message was pushed without delay, perhaps claimed once, perhaps deleted by
that claim, all in one queue and term, and nothing else happened to it. Most lives are. Sorted by
message, the events of such a life are one, two or three rows that follow each other, so comparing
each row with the next finds them all, and every column of a row about the message is a column of
one of these events.

A regular life is simple if its message was deleted, or if its queue was not emptied since its last
event: then its row says what became of it.

This is a short way beside the queries, which make the same rows of any life:

    fold_regular    audit/folds.sql
    message_rows    tables/lives.sql and tables/messages.sql
    attempt_rows    tables/claims.sql and tables/attempts.sql

A life that is not found here to be regular is left to them. A test compares all tables with those
that are made without this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.blocks import message_ids
from penstock.spark.ordering import Array
from penstock.spark.part_events import LakePart, RangeEvents
from penstock.spark.queries import NO_LIMIT
from penstock.spark.schemas import arrow_schema
from penstock.spark.tables import ATTEMPTS, FOLDS, MESSAGES, Derived


@dataclass(frozen=True)
class FoldedRange:
    """The folds of a range's regular lives, and the events of all others in their order.

    `lives` has the columns of `folds` without the shard and without hashes, and those that
    `audit/folds.sql` gives for other tables.
    """

    lives: pa.Table
    others: pa.Table


def fold_regular(events: RangeEvents) -> FoldedRange:
    """Finds the regular lives."""
    order = events.order
    firsts = np.flatnonzero(np.diff(events.places[order], prepend=-1))
    counts = np.diff(firsts, append=len(order))
    is_regular = _find(events, order, firsts, counts)
    others = events.rows.take(pa.array(order[np.repeat(~is_regular, counts)]))
    firsts, counts = firsts[is_regular], counts[is_regular]
    last = len(order) - 1
    pushes = pa.array(order[firsts])
    claims = pa.array(order[np.minimum(firsts + 1, last)], mask=counts < 2)
    deletes = pa.array(order[np.minimum(firsts + 2, last)], mask=counts < 3)

    def of(name: str, rows: pa.Array) -> pa.Array:
        return events.rows[name].combine_chunks().take(rows)

    pushed, claimed, deleted = (of("sequence", rows) for rows in (pushes, claims, deletes))
    queue, term, pushed_ms = (of(name, pushes) for name in ("queue", "term", "at_ms"))
    columns = {
        "message": of("message", pushes),
        "events": pa.array(counts),
        "first_sequence": pushed,
        "last_sequence": pc.coalesce(deleted, claimed, pushed),
        "until": deleted.fill_null(NO_LIMIT),
        "queue": queue,
        "least_queue": queue,
        "term": term,
        "least_term": term,
        "pushed": pushed,
        "claimed": claimed,
        "deleted": deleted,
        "first_pushed_ms": pushed_ms,
        "pushed_ms": pushed_ms,
        "expires_at_ms": of("expires_at_ms", pushes),
        "claimed_ms": of("at_ms", claims),
        "deadline_ms": of("deadline_ms", claims),
        "deleted_ms": of("at_ms", deletes),
        "regular": pa.array(np.ones(len(firsts), bool)),
        "group": of("group", pushes),
        "dedup_id": of("dedup_id", pushes),
        "priority": of("priority", pushes),
        "body_bytes": of("body_bytes", pushes),
        "holder": of("holder", claims),
        "attempt_id": of("attempt_id", claims),
    }
    return FoldedRange(pa.table(columns), others)


def _find(events: RangeEvents, order: Array, firsts: Array, counts: Array) -> Array:
    """Which lives are regular, given where each begins in the order and how many events it has."""
    kinds = _kinds(events)
    sequences, queues, terms = (events.numbers(name) for name in ("sequence", "queue", "term"))
    first_claim = events.numbers("epoch") == 1
    last = len(order) - 1
    push = order[firsts]
    claim, delete = (order[np.minimum(firsts + step, last)] for step in (1, 2))
    found = (counts <= 3) & (kinds[push] == _PUSHED)
    found &= events.rows["visible_at_ms"].combine_chunks().is_null().to_numpy(False)[push]
    for count, row, before, kind in ((2, claim, push, _CLAIMED), (3, delete, claim, _DELETED)):
        follows = (kinds[row] == kind) & first_claim[row] & (sequences[row] > sequences[before])
        follows &= (queues[row] == queues[push]) & (terms[row] == terms[push])
        found &= follows | (counts < count)
    return np.asarray(found)


_PUSHED, _CLAIMED, _DELETED, _OTHER = range(4)
_NUMBERS: Final = {"Pushed": _PUSHED, "Claimed": _CLAIMED, "Deleted": _DELETED}


def _kinds(events: RangeEvents) -> Array:
    """The kinds of the events, as numbers."""
    column = events.rows["kind"].combine_chunks()
    numbers = [_NUMBERS.get(name, _OTHER) for name in column.dictionary.to_pylist()]
    found: Array = np.array(numbers, np.uint8)[column.indices.to_numpy()]
    return found


def fold_rows(lives: pa.Table, part: LakePart) -> pa.Table:
    """Their rows in `folds`; the columns of hashes are there already."""
    return _rows(FOLDS, lives, part, {})


def message_rows(lives: pa.Table, part: LakePart, names: Mapping[int, str]) -> pa.Table:
    """The rows in `messages` of lives that are simple; queues have these names."""
    pushed_ms, claimed_ms, deleted_ms = (
        lives[name] for name in ("first_pushed_ms", "claimed_ms", "deleted_ms")
    )
    is_claimed, is_deleted = lives["claimed"].is_valid(), lives["deleted"].is_valid()
    queue = _queue_names(lives, names)
    standing = pc.if_else(is_deleted, None, pc.if_else(is_claimed, 1, 0))
    return _rows(
        MESSAGES,
        lives,
        part,
        {
            "message_id": message_ids(bytes.fromhex(part.store), lives["message"].to_numpy()),
            "queue": queue,
            "queue_number": lives["queue"],
            "held_in": queue,
            "held_in_number": lives["queue"],
            "pushed_at_ms": pushed_ms,
            "pushed_at": _timestamps(pushed_ms),
            "visible_at_ms": None,
            "first_pulled_at_ms": claimed_ms,
            "last_pulled_at_ms": claimed_ms,
            "claims": is_claimed.cast(pa.int64()),
            **dict.fromkeys(("extends", "releases", "timeouts", "moves", "dead_letters"), 0),
            "state": _words(pc.if_else(is_deleted, 0, 1), "deleted", "live"),
            "standing": _words(standing, "visible", "in_flight"),
            "ended_at_ms": deleted_ms,
            "wait_ms": pc.subtract(claimed_ms, pc.max_element_wise(pushed_ms, 0)),
            "age_ms": pc.subtract(deleted_ms, pushed_ms),
            "dropped": part.seal > 0,
        },
    )


def attempt_rows(lives: pa.Table, part: LakePart, names: Mapping[int, str]) -> pa.Table:
    """The rows in `attempts` of lives that are simple; queues have these names."""
    lives = lives.filter(lives["claimed"].is_valid())
    claimed_ms, deleted_ms = lives["claimed_ms"], lives["deleted_ms"]
    return _rows(
        ATTEMPTS,
        lives,
        part,
        {
            "message_id": message_ids(bytes.fromhex(part.store), lives["message"].to_numpy()),
            "queue": _queue_names(lives, names),
            "queue_number": lives["queue"],
            "epoch": 1,
            "started_at_ms": claimed_ms,
            "started_at": _timestamps(claimed_ms),
            "ended_at_ms": deleted_ms,
            "ended": _words(pc.if_else(lives["deleted"].is_valid(), 0, 1), "deleted", "open"),
            "extends": 0,
            "hold_ms": pc.subtract(deleted_ms, claimed_ms),
        },
    )


def _words(places: pa.ChunkedArray, *words: str) -> pa.Array:
    """A column of a few words, given the place of each row's word."""
    indexes = places.cast(pa.int32()).combine_chunks()
    return pa.DictionaryArray.from_arrays(indexes, pa.array(words))


def _queue_names(lives: pa.Table, names: Mapping[int, str]) -> pa.Array:
    """The names of the messages' queues, each once."""
    numbers = lives["queue"].combine_chunks().dictionary_encode()
    shown = [names.get(number, f"#{number}") for number in numbers.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(numbers.indices, pa.array(shown, pa.string()))


def _timestamps(at_ms: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.multiply(at_ms, 1_000).cast(pa.timestamp("us", "UTC"))


def constant(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """A column with one value, which may be null; a text is in a dictionary."""
    if isinstance(value, str):
        same = pa.array(np.zeros(count, np.int32))
        return pa.DictionaryArray.from_arrays(same, pa.array([value]))
    return pa.repeat(pa.scalar(value, kind), count)


def _rows(derived: Derived, lives: pa.Table, part: LakePart, given: Mapping[str, Any]) -> pa.Table:
    """Rows of a table: columns that are given, as an array or one value, or else of the lives.

    Behind them is the number of each one's part.
    """
    given = {"store": part.store, "shard": part.shard, **given}
    count = len(lives)
    columns = {}
    for field in arrow_schema(derived.schema):
        column = given[field.name] if field.name in given else lives[field.name]
        is_column = isinstance(column, pa.Array | pa.ChunkedArray)
        columns[field.name] = column if is_column else constant(column, field.type, count)
    return pa.table(columns).append_column("part_number", lives["part_number"])
