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

from collections.abc import Sequence
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

    `sealed` are the files of `folds` of the sealed parts of the same range: their messages ended.
    """

    own: PartFiles
    near: tuple[PartFiles, ...]
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


def near_parts(
    own: PartFiles, parts: Sequence[PartFiles], fifo_shards: set[tuple[str, int]]
) -> tuple[PartFiles, ...]:
    """The parts of the same shard that have rows which the checks of this one look at."""
    return tuple(
        each
        for each in parts
        if (each.store, each.shard) == (own.store, own.shard)
        and each.part != own.part
        and each.first_sequence <= own.last_sequence
        and (_may_share_ids(own, each) or ((own.store, own.shard) in fifo_shards
             and each.until >= own.first_sequence))
    )  # fmt: skip


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
    duck.files("near_folds", [each.folds for each in work.near], FOLDS.types)
    lowest_ms = (own.first_pushed_ms or 0) - DEDUP_WINDOW_MS
    duck.table(
        "folds",
        f"""
        SELECT *, true AS own FROM {read_files(own.folds)}
        UNION ALL
        SELECT *, false FROM near_folds WHERE first_sequence <= {own.last_sequence}
          AND ((dedup_hash IS NOT NULL AND pushed_ms > {lowest_ms})
            OR (until >= {own.first_sequence} AND (least_queue <> queue
              OR queue IN (SELECT queue FROM periods WHERE fifo))))
        """,
    )
    duck.files("sealed_folds", work.sealed, FOLDS.types)
    load_ended(
        duck, "SELECT message FROM sealed_folds WHERE message IN (SELECT message FROM folds)"
    )
    near = [each.irregular for each in work.near if each.irregular is not None]
    duck.files("own_events", [own.irregular] if own.irregular else [], IRREGULAR_EVENTS.types)
    duck.files("near_events", near, IRREGULAR_EVENTS.types)
    duck.view(
        "irregular_events",
        "SELECT *, true AS own FROM own_events UNION ALL SELECT *, false FROM near_events "
        "WHERE message IN (SELECT message FROM folds WHERE NOT own AND NOT regular)",
    )


def load_ended(
    duck: DuckConnection, messages: str = "SELECT 1::bigint AS message WHERE false"
) -> None:
    """Makes the table `ended_before`: messages of the part that ended in a sealed part."""
    duck.table("ended_before", messages)
