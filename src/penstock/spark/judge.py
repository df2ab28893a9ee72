"""The work of one task of an audit: every check that looks at messages, for one part.

Most messages have a plain life: pushed, claimed once, deleted, all in one queue and one term. Their
row in `folds` shows this, and has all that the checks need of them. The events of all others
(`life_events`) go through one window pass (`states`), which gives a message's state before each
event. Two checks look across messages: a dedup id may have been used, and a group may have earlier
messages, in other parts. A task reads the rows that it needs of those parts too.

    folds, periods ─▶ messages ─▶ life_events ─▶ states ─▶ message_findings
    messages, life_events ─▶ dedup_findings, fifo_events ─▶ order_findings
    messages, life_events ─▶ part_balances
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.duck import DuckConnection, quoted, read_files
from penstock.spark.lake import AddedFile, Table, TableFile
from penstock.spark.queries import load_query
from penstock.spark.schemas import arrow_rows
from penstock.spark.tables import (
    BALANCES,
    FINDINGS,
    FOLDS,
    IRREGULAR_EVENTS,
    Derived,
)

STEPS: Final = (
    "messages", "life_events", "states", "message_findings", "dedup_findings", "fifo_events",
    "order_findings", "part_balances",
)  # fmt: skip
# Steps that others read several times are computed once.
_KEPT: Final = ("messages", "life_events", "fifo_events")
# What the checks need of regular lives in other parts; other columns are null.
_OTHER_COLUMNS: Final = (
    "message, queue, pushed, claimed, deleted, pushed_ms, claimed_ms, group_hash, dedup_hash, "
    "regular"
)
_FINDINGS: Final = ("message_findings", "dedup_findings", "order_findings")

# Check, message, queue, sequence, at_ms, detail.
FoundRow = tuple[str, int, int, int, int | None, str]
# Queue, emptied_before, term, events, held, held_before, first_entry, last_entry, entries.
BalanceRow = tuple[int, int, int | None, int, int, int, int, int, int]


@dataclass(frozen=True)
class PartFiles:
    """The files of a part in the kept tables, with the bounds of its rows."""

    part: str
    store: str
    shard: int
    folds: str
    irregular: str | None
    first_sequence: int
    last_sequence: int
    until: int
    first_pushed_ms: int | None
    pushed_ms: int | None
    has_dedup_ids: bool


@dataclass(frozen=True)
class JudgeWork:
    """All that a task needs: the part, others whose rows its checks look at, and the periods.

    `with_groups` are parts with messages for which those of this part may have to wait, `with_ids`
    parts with dedup ids that this part may use again. `sealed` are the files of `folds` of the
    sealed parts of the same range: their messages ended.
    """

    own: PartFiles
    with_groups: tuple[PartFiles, ...]
    with_ids: tuple[PartFiles, ...]
    periods: str
    lake: str
    fold: str
    context: str
    sealed: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgedPart:
    """What a task made: the rows of the part in `balances`, and in `findings` if there are any."""

    part: str
    balances: AddedFile
    findings: AddedFile | None


@dataclass(frozen=True)
class PartVerdict:
    """What was found in a part, and the counts of its events."""

    part: str
    findings: list[FoundRow]
    balances: list[BalanceRow]


def parts_of(folds: Sequence[TableFile], irregular: Sequence[TableFile]) -> list[PartFiles]:
    """The parts of these tables, each of which is one file."""
    others = {each.part: each.path for each in irregular}
    found = []
    for each in folds:
        assert each.part is not None
        store, shard, _ = each.part.rsplit("-", 2)
        low, high = each.smallest, each.largest
        found.append(
            PartFiles(
                each.part,
                store,
                int(shard),
                each.path,
                others.get(each.part),
                low["first_sequence"],
                high["last_sequence"],
                high["until"],
                low.get("first_pushed_ms"),
                high.get("pushed_ms"),
                "dedup_hash" in low,
            )
        )
    return found


def parts_with_groups(
    own: PartFiles, parts: Sequence[PartFiles], fifo_shards: set[tuple[str, int]]
) -> tuple[PartFiles, ...]:
    """Other parts with messages that may precede messages of this one in a group."""
    if (own.store, own.shard) not in fifo_shards:
        return ()
    return tuple(each for each in _earlier(own, parts) if each.until >= own.first_sequence)


def parts_with_ids(own: PartFiles, parts: Sequence[PartFiles]) -> tuple[PartFiles, ...]:
    """Other parts with dedup ids whose windows may include pushes of this one."""
    return tuple(each for each in _earlier(own, parts) if _may_share_ids(own, each))


def _earlier(own: PartFiles, parts: Sequence[PartFiles]) -> Iterator[PartFiles]:
    """The other parts of the shard with events before the last one of this part."""
    for each in parts:
        is_other = (each.store, each.shard) == (own.store, own.shard) and each.part != own.part
        if is_other and each.first_sequence <= own.last_sequence:
            yield each


def _may_share_ids(own: PartFiles, other: PartFiles) -> bool:
    """Whether a push there may be within the dedup window of one here."""
    if not (own.has_dedup_ids and other.has_dedup_ids):
        return False
    if own.first_pushed_ms is None or other.pushed_ms is None:
        return False
    return other.pushed_ms > own.first_pushed_ms - DEDUP_WINDOW_MS


def judge_part(work: JudgeWork, threads: int) -> JudgedPart:
    """Makes the checks of one part."""
    own = work.own
    with DuckConnection(threads) as duck:
        _load(duck, work)
        verdict = judge(duck, own.part)
        balances = [
            (own.store, own.shard, *row, work.fold, work.context) for row in verdict.balances
        ]
        findings = [(row[0], own.store, own.shard, *row[1:]) for row in verdict.findings]
        return JudgedPart(
            own.part,
            _write(duck, work, BALANCES, balances),
            _write(duck, work, FINDINGS, findings) if findings else None,
        )


def _write(
    duck: DuckConnection, work: JudgeWork, derived: Derived, rows: Sequence[Sequence[Any]]
) -> AddedFile:
    table = Table(Path(work.lake, derived.name), derived.schema, in_parts=True)
    path = table.new_file(work.own.part)
    duck.arrow("written", arrow_rows(derived.schema, rows))
    duck.write("SELECT * FROM written", str(path))
    return AddedFile.of(table.path, path)


def judge(duck: DuckConnection, part: str) -> PartVerdict:
    """Makes the checks over `folds`, `irregular_events`, `periods` and `emptyings`."""
    for name in STEPS:
        make = duck.table if name in _KEPT else duck.view
        make(name, load_query(f"audit/{name}"))
    findings: list[Any] = [
        row
        for name in _FINDINGS
        for row in duck.fetch(
            f'SELECT "check", message, queue, sequence, at_ms, detail FROM {name}'
        )
    ]
    balances: list[Any] = duck.fetch(
        "SELECT queue, emptied_before, term, CAST(events AS bigint), CAST(held AS bigint), "
        "CAST(held_before AS bigint), first_entry, last_entry, CAST(entries AS bigint) "
        "FROM part_balances"
    )
    return PartVerdict(part, findings, balances)


def _load(duck: DuckConnection, work: JudgeWork) -> None:
    """Makes the tables that the steps read, of the part and of what it needs of others."""
    own = work.own
    of_shard = f"store = {quoted(own.store)} AND shard = {own.shard}"
    for name in ("periods", "emptyings"):
        path = f"{work.periods}/{name}.parquet"
        duck.table(name, f"SELECT * FROM {read_files(path)} WHERE {of_shard}")
    duck.table("own_folds", f"SELECT *, true AS own FROM {read_files(own.folds)}")
    _view_events(duck, "own_events", [own])
    duck.view("fifo_queues", "SELECT queue FROM periods WHERE fifo")
    _load_others(duck, work)
    duck.view("folds", "FROM own_folds UNION ALL BY NAME FROM other_folds")
    duck.view(
        "irregular_events",
        "SELECT *, true AS own FROM own_events UNION ALL SELECT *, false FROM other_events",
    )
    duck.files("sealed_folds", work.sealed, FOLDS.types)
    load_ended(
        duck, "SELECT message FROM sealed_folds WHERE message IN (SELECT message FROM folds)"
    )


def _load_others(duck: DuckConnection, work: JudgeWork) -> None:
    """Makes `other_folds` and `other_events`, of messages with a group or a dedup id of this part.

    Of a regular life the row in `folds` is enough, of the others the events are.
    """
    own = work.own
    duck.table(
        "own_groups",
        """
        SELECT coalesce(group_hash, 0) FROM own_folds
        WHERE regular AND queue IN (SELECT * FROM fifo_queues)
        UNION SELECT coalesce(group_hash, 0) FROM own_events
        WHERE kind = 'Pushed' AND queue IN (SELECT * FROM fifo_queues)
        """,
    )
    duck.table(
        "own_ids",
        """
        SELECT dedup_hash FROM own_folds WHERE regular AND dedup_hash IS NOT NULL
        UNION SELECT dedup_hash FROM own_events WHERE kind = 'Pushed' AND dedup_hash IS NOT NULL
        """,
    )
    with_groups = work.with_groups if duck.fetch("FROM own_groups LIMIT 1") else ()
    with_ids = work.with_ids if duck.fetch("FROM own_ids LIMIT 1") else ()
    duck.files("group_folds", [each.folds for each in with_groups], FOLDS.types)
    duck.files("id_folds", [each.folds for each in with_ids], FOLDS.types)
    _view_events(duck, "group_events", with_groups)
    _view_events(duck, "id_events", with_ids)
    # Row groups without such rows are skipped by their statistics.
    waits = f"until >= {own.first_sequence}"
    of_group = (
        "queue IN (SELECT * FROM fifo_queues) "
        "AND coalesce(group_hash, 0) IN (SELECT * FROM own_groups)"
    )
    of_id = "dedup_hash IN (SELECT * FROM own_ids)"
    lowest_ms = (own.first_pushed_ms or 0) - DEDUP_WINDOW_MS
    duck.table(
        "other_folds",
        f"""
        SELECT {_OTHER_COLUMNS}, false AS own FROM group_folds
        WHERE {waits} AND regular AND {of_group}
        UNION SELECT {_OTHER_COLUMNS}, false FROM id_folds
        WHERE pushed_ms > {lowest_ms} AND regular AND {of_id}
        """,
    )
    waits = f"(until IS NULL OR {waits})"
    duck.table(
        "others",
        f"""
        SELECT message FROM group_events WHERE {waits} AND kind = 'Pushed' AND {of_group}
        UNION SELECT message FROM id_events WHERE kind = 'Pushed' AND {of_id}
        """,
    )
    # Each event once: all parts in the second list with events that wait are in the first too.
    rest = f"NOT {waits}" if with_groups else "true"
    duck.table(
        "other_events",
        f"""
        SELECT * FROM group_events WHERE {waits} AND message IN (SELECT * FROM others)
        UNION ALL SELECT * FROM id_events WHERE {rest} AND message IN (SELECT * FROM others)
        """,
    )


def _view_events(duck: DuckConnection, name: str, parts: Sequence[PartFiles]) -> None:
    """Makes a view of the irregular events of these parts.

    Files of sealed parts may be older than the column `until`, which is null then.
    """
    paths = [each.irregular for each in parts if each.irregular is not None]
    duck.files("no_events", [], IRREGULAR_EVENTS.types)
    duck.files(f"stored_{name}", paths, IRREGULAR_EVENTS.types)
    duck.view(name, f"SELECT * FROM no_events UNION ALL BY NAME SELECT * FROM stored_{name}")


def load_ended(
    duck: DuckConnection, messages: str = "SELECT 1::bigint AS message WHERE false"
) -> None:
    """Makes the table `ended_before`: messages of the part that ended in a sealed part."""
    duck.table("ended_before", messages)
