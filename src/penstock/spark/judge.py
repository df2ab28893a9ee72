"""The work of one task of an audit: every check that looks at messages, for some parts of a shard.

Most messages have a plain life: pushed, claimed once, deleted, all in one queue and one term. Their
row in `folds` shows this, and has all that the checks need of them. The events of all others
(`life_events`) go through one window pass (`states`), which gives a message's state before each
event. Two checks look across messages: a dedup id may have been used, and a group may have earlier
messages, in other parts. A task reads the rows that it needs of those parts too, once for all of
its own: parts that lie near each other are judged together.

    folds, periods ─▶ messages ─▶ life_events ─▶ states ─▶ message_findings
    messages, life_events ─▶ dedup_findings, fifo_events ─▶ order_findings
    messages, life_events ─▶ part_balances
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.duck import (
    GROUP_ROWS,
    SMALL_GROUP_ROWS,
    DuckConnection,
    no_rows,
    quoted,
    read_files,
)
from penstock.spark.lake import AddedFile, Table, TableFile
from penstock.spark.queries import load_query
from penstock.spark.schemas import arrow_rows
from penstock.spark.seals import is_closed, is_sealed
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
_OWN_COLUMNS: Final = f"{_OTHER_COLUMNS}, term, events, expires_at_ms, deadline_ms, deleted_ms"
# How many rows the parts of one task have at most, unless it is one part: they fit in the memory of
# a task, and a lake of a million events still has work for several cores.
TASK_ROWS: Final = 1 << 19
# How many spans a journal is cut into at most, to look up the period of an event.
SPANS_MAX: Final = 4_096
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
    rows: int
    first_pushed_ms: int | None
    pushed_ms: int | None
    has_dedup_ids: bool
    has_groups: bool = True

    @property
    def is_open(self) -> bool:
        """Whether it has the messages of its range that are in no closed or sealed part."""
        return not is_closed(self.part) and not is_sealed(self.part)


@dataclass(frozen=True)
class JudgeWork:
    """All that a task needs: its parts, others whose rows its checks look at, and the periods.

    The parts are of one shard, and no message is in two of them; `contexts` has one for each.
    `with_groups` are parts with messages for which those of these parts may have to wait,
    `with_ids` parts with dedup ids that these parts may use again. `known` is the directory of what
    is known of all queues, and, if `waiting` is true, of messages in the open parts of each shard:
    then these are not among `with_groups`. `sealed` are the files of `folds` of the sealed parts of
    the same ranges: their messages ended.
    """

    own: tuple[PartFiles, ...]
    contexts: tuple[str, ...]
    with_groups: tuple[PartFiles, ...]
    with_ids: tuple[PartFiles, ...]
    known: str
    lake: str
    sealed: tuple[str, ...] = ()
    waiting: bool = False


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
    others = {each.part: each for each in irregular}
    found = []
    for each in folds:
        assert each.part is not None
        store, shard, _ = each.part.rsplit("-", 2)
        low, high = each.smallest, each.largest
        events = others.get(each.part)
        found.append(
            PartFiles(
                each.part,
                store,
                int(shard),
                each.path,
                None if events is None else events.path,
                low["first_sequence"],
                high["last_sequence"],
                high["until"],
                each.rows + (0 if events is None else events.rows),
                low.get("first_pushed_ms"),
                high.get("pushed_ms"),
                "dedup_hash" in low,
                "group_hash" in low,
            )
        )
    return found


def fold_of(part: PartFiles) -> str:
    """The name of the file that a verdict on this part is about."""
    return Path(part.folds).name


def tasks_of(parts: Sequence[PartFiles]) -> list[tuple[PartFiles, ...]]:
    """Divides parts among tasks: those of a shard that lie near each other are judged together.

    A message that has events after it was sealed is in two parts of its range. Of parts with the
    same number of a seal, or none, no two have a message in common.

    Open parts are judged apart from closed ones, unless one task does all: an old message that has
    not ended may have claims of any time, and is compared with the messages of all parts since.
    """
    totals = Counter[_Kind]()
    for part in parts:
        totals[_kind(part)] += part.rows
    found: list[list[PartFiles]] = []
    last, rows = None, 0
    for part in sorted(parts, key=lambda part: _place(part, totals)):
        kind = _place(part, totals)[:2]
        if kind != last or rows + part.rows > TASK_ROWS:
            found.append([])
            last, rows = kind, 0
        found[-1].append(part)
        rows += part.rows
    return [tuple(each) for each in found]


_Kind = tuple[str, int, str]


def _kind(part: PartFiles) -> _Kind:
    """The store, the shard, and the number of the seal, empty if the part is not sealed."""
    return part.store, part.shard, part.part.partition(".")[2]


def _place(part: PartFiles, rows: Mapping[_Kind, int]) -> tuple[_Kind, bool, int, str]:
    """The order of parts, given how many rows there are of each kind."""
    kind = _kind(part)
    is_apart = rows[kind] > TASK_ROWS and is_closed(part.part)
    return kind, is_apart, part.first_sequence, part.part


def parts_with_groups(
    own: Sequence[PartFiles],
    parts: Sequence[PartFiles],
    fifo_shards: set[tuple[str, int]],
    *,
    waiting: bool,
) -> tuple[PartFiles, ...]:
    """Other parts with messages that may precede messages of these in a group.

    If `waiting`, without open parts: what is needed of those is in the files of `write_waiting`.
    """
    if (own[0].store, own[0].shard) not in fifo_shards:
        return ()
    first = min(each.first_sequence for each in own)
    return tuple(
        each
        for each in _earlier(own, parts)
        if each.until >= first and not (waiting and each.is_open)
    )


def parts_with_ids(own: Sequence[PartFiles], parts: Sequence[PartFiles]) -> tuple[PartFiles, ...]:
    """Other parts with dedup ids whose windows may include pushes of these."""
    first_ms = min(
        (each.first_pushed_ms for each in own
         if each.has_dedup_ids and each.first_pushed_ms is not None), default=None
    )  # fmt: skip
    if first_ms is None:
        return ()
    return tuple(
        each
        for each in _earlier(own, parts)
        if each.has_dedup_ids
        and each.pushed_ms is not None
        and each.pushed_ms > first_ms - DEDUP_WINDOW_MS
    )


def _earlier(own: Sequence[PartFiles], parts: Sequence[PartFiles]) -> Iterator[PartFiles]:
    """The other parts of the shard with events before the last one of these."""
    shard = own[0].store, own[0].shard
    names = {each.part for each in own}
    last = max(each.last_sequence for each in own)
    for each in parts:
        is_other = (each.store, each.shard) == shard and each.part not in names
        if is_other and each.first_sequence <= last:
            yield each


def judge_parts(work: JudgeWork, threads: int) -> list[JudgedPart]:
    """Makes the checks of these parts."""
    with DuckConnection(threads) as duck:
        _load(duck, work)
        verdicts = judge(duck, [each.part for each in work.own])
        made = []
        for own, context, verdict in zip(work.own, work.contexts, verdicts, strict=True):
            shard = own.store, own.shard
            balances = [(*shard, *row, fold_of(own), context) for row in verdict.balances]
            findings = [(row[0], *shard, *row[1:]) for row in verdict.findings]
            made.append(
                JudgedPart(
                    own.part,
                    _write(work, own, BALANCES, balances),
                    _write(work, own, FINDINGS, findings) if findings else None,
                )
            )
        return made


def _write(
    work: JudgeWork, own: PartFiles, derived: Derived, rows: Sequence[Sequence[Any]]
) -> AddedFile:
    table = Table(Path(work.lake, derived.name), derived.schema, in_parts=True)
    return table.write(own.part, arrow_rows(derived.schema, rows), GROUP_ROWS)


def judge(duck: DuckConnection, parts: Sequence[str]) -> list[PartVerdict]:
    """Makes the checks over `folds`, `irregular_events`, `periods` and `emptyings`.

    `part_number` in them is a place among `parts`, or null: such rows are of other parts.
    """
    _span_periods(duck)
    for name in STEPS:
        make = duck.table if name in _KEPT else duck.view
        make(name, load_query(f"audit/{name}"))
    verdicts = [PartVerdict(part, [], []) for part in parts]
    for name in _FINDINGS:
        for number, *row in duck.fetch(
            f'SELECT part_number, "check", message, queue, sequence, at_ms, detail FROM {name}'
        ):
            verdicts[number].findings.append(tuple(row))
    for number, *row in duck.fetch(
        "SELECT part_number, queue, emptied_before, term, CAST(events AS bigint), "
        "CAST(held AS bigint), CAST(held_before AS bigint), first_entry, last_entry, "
        "CAST(entries AS bigint) FROM part_balances"
    ):
        verdicts[number].balances.append(tuple(row))
    return verdicts


def _span_periods(duck: DuckConnection) -> None:
    """Makes `spanned_periods`: each period once for each span of the journal that it is in.

    An event is compared with those periods of its queue that are in its own span, `span_of` its
    sequence: with one or two, if there are as many spans as a queue has periods at most.
    """
    [(most, last)] = duck.fetch("""
        SELECT coalesce(max(periods), 1), coalesce(max(last), 0) FROM (
          SELECT count(*) AS periods, max(from_sequence) AS last FROM periods GROUP BY queue)""")
    spans = min(most, SPANS_MAX)
    duck.run(
        "CREATE OR REPLACE TEMP MACRO span_of(place) AS "
        f"least(place // {last // spans + 1}, {spans - 1})"
    )
    duck.table(
        "spanned_periods",
        "SELECT *, unnest(range(span_of(from_sequence), span_of(to_sequence - 1) + 1)) AS span "
        "FROM periods",
    )


def _load(duck: DuckConnection, work: JudgeWork) -> None:
    """Makes the tables that the steps read, of the parts and of what they need of others."""
    first = work.own[0]
    of_shard = f"store = {quoted(first.store)} AND shard = {first.shard}"
    for name in ("periods", "emptyings"):
        path = f"{work.known}/{name}.parquet"
        duck.table(name, f"SELECT * FROM {read_files(path)} WHERE {of_shard}")
    of_parts = [
        f"SELECT {_OWN_COLUMNS}, {number} AS part_number FROM {read_files(part.folds)} "
        "WHERE regular"
        for number, part in enumerate(work.own)
    ]
    duck.table("own_folds", " UNION ALL ".join(of_parts))
    of_parts = [
        f"SELECT *, {number} AS part_number FROM {read_files(part.irregular)}"
        for number, part in enumerate(work.own)
        if part.irregular is not None
    ]
    duck.files("no_events", [], IRREGULAR_EVENTS.types)
    empty = "SELECT *, CAST(NULL AS int) AS part_number FROM no_events"
    # Files of sealed parts may be older than the column `until`, which is null then.
    duck.view("own_events", " UNION ALL BY NAME ".join([empty, *of_parts]))
    duck.view("fifo_queues", "SELECT queue FROM periods WHERE fifo")
    _load_others(duck, work)
    duck.view("folds", "FROM own_folds UNION ALL BY NAME FROM other_folds")
    duck.view("irregular_events", "FROM own_events UNION ALL BY NAME FROM other_events")
    duck.files("sealed_folds", work.sealed, FOLDS.types)
    load_ended(
        duck,
        """
        SELECT message FROM sealed_folds WHERE message IN (
          SELECT message FROM folds UNION ALL SELECT message FROM irregular_events)
        """,
    )


def _load_others(duck: DuckConnection, work: JudgeWork) -> None:
    """Makes `other_folds` and `other_events`, of messages with a group or dedup id of these parts.

    Of a regular life the row in `folds` is enough, of the others the events are.
    """
    duck.table(
        "own_ids",
        """
        SELECT dedup_hash, max(pushed) AS last_push FROM (
          SELECT dedup_hash, pushed FROM own_folds
          UNION ALL SELECT dedup_hash, sequence FROM own_events WHERE kind = 'Pushed')
        WHERE dedup_hash IS NOT NULL GROUP BY dedup_hash
        """,
    )
    [(last_push,)] = duck.fetch("SELECT coalesce(max(last_push), 0) FROM own_ids")
    with_ids = [each for each in work.with_ids if each.first_sequence < last_push]
    both, waits, entered = _load_groups(duck, work, with_ids)
    duck.files("id_folds", [each.folds for each in with_ids], FOLDS.types)
    # By the first condition row groups are skipped: rows of messages without an id come last.
    of_id = "dedup_hash IS NOT NULL AND dedup_hash IN (SELECT dedup_hash FROM own_ids)"
    pushed_ms = [each.first_pushed_ms for each in work.own if each.first_pushed_ms is not None]
    lowest_ms = min(pushed_ms, default=0) - DEDUP_WINDOW_MS
    duck.table(
        "other_folds",
        f"""
        SELECT {_OTHER_COLUMNS} FROM group_folds JOIN own_groups
          ON coalesce(group_hash, 0) = of_group AND until >= first_claim AND pushed < last_entered
        WHERE {waits} AND pushed < {entered} AND regular
          AND queue IN (SELECT * FROM fifo_queues)
        UNION SELECT {_OTHER_COLUMNS} FROM id_folds
        WHERE pushed_ms > {lowest_ms} AND pushed < {last_push} AND regular AND {of_id}
        """,
    )
    waits = f"(until IS NULL OR ({waits}))"
    _view_events(duck, "both_events", [each for each in with_ids if each.part in both])
    _view_events(duck, "id_events", [each for each in with_ids if each.part not in both])
    duck.table(
        "others",
        f"""
        SELECT message FROM group_events JOIN own_groups ON coalesce(group_hash, 0) = of_group
          AND (until IS NULL OR until >= first_claim) AND sequence < last_entered
        WHERE {waits} AND sequence < {entered} AND kind = 'Pushed'
          AND queue IN (SELECT * FROM fifo_queues)
        UNION SELECT message FROM both_events
        WHERE sequence < {last_push} AND kind = 'Pushed' AND {of_id}
        UNION SELECT message FROM id_events
        WHERE sequence < {last_push} AND kind = 'Pushed' AND {of_id}
        """,
    )
    duck.table(
        "other_events",
        f"""
        SELECT * FROM group_events WHERE {waits} AND message IN (SELECT * FROM others)
        UNION ALL SELECT * FROM both_events
        WHERE NOT {waits} AND dedup_hash IS NOT NULL AND message IN (SELECT * FROM others)
        UNION ALL SELECT * FROM id_events
        WHERE dedup_hash IS NOT NULL AND message IN (SELECT * FROM others)
        """,
    )


def _load_groups(
    duck: DuckConnection, work: JudgeWork, with_ids: Sequence[PartFiles]
) -> tuple[set[str], str, int]:
    """Makes `own_groups`: of each group in a FIFO queue, the claims of these parts.

    A claim may have to wait for messages that entered the queue before its own message and left it
    after the claim. `group_folds` and `group_events` are made of other parts that may have such
    messages. Returns the parts whose files these read, a condition on their rows, and where the
    last message of a group entered: by both of these row groups are skipped.
    """
    duck.table(
        "own_groups",
        """
        WITH claimed AS (
          SELECT coalesce(group_hash, 0) AS of_group, claimed AS first_claim, pushed AS last_entered
          FROM own_folds WHERE queue IN (SELECT * FROM fifo_queues) AND claimed IS NOT NULL
          UNION ALL
          SELECT max(coalesce(group_hash, 0)) FILTER (WHERE kind = 'Pushed'),
            min(sequence) FILTER (WHERE kind = 'Claimed'),
            max(sequence) FILTER (WHERE kind IN ('Pushed', 'Moved'))
          FROM own_events WHERE queue IN (SELECT * FROM fifo_queues) GROUP BY message
        )
        SELECT of_group, min(first_claim) AS first_claim, max(last_entered) AS last_entered
        FROM claimed WHERE of_group IS NOT NULL AND first_claim IS NOT NULL GROUP BY of_group
        """,
    )
    [(first_claim, last_entered, all_grouped)] = duck.fetch(
        "SELECT min(first_claim), max(last_entered), bool_and(of_group <> 0) FROM own_groups"
    )
    if first_claim is None:
        duck.files("group_folds", [], FOLDS.types)
        duck.files("group_events", [], IRREGULAR_EVENTS.types)
        return set(), "false", 0
    # Open parts with dedup ids are read anyway, and then not once more from the waiting messages.
    near = [
        each
        for each in dict.fromkeys((*work.with_groups, *(each for each in with_ids if each.is_open)))
        if each.until >= first_claim
        and each.first_sequence < last_entered
        and (each.has_groups or not all_grouped)
    ]
    duck.files("near_folds", [each.folds for each in near], FOLDS.types)
    _view_events(duck, "near_events", near)
    seen = ", ".join(quoted(each.part) for each in (*work.own, *near))
    for name in ("folds", "events"):
        rows = f"SELECT * FROM near_{name}"
        if work.waiting:
            waiting = read_files(_waiting_path(work.known, work.own[0], name))
            rows += f""" UNION ALL BY NAME
                SELECT * EXCLUDE (part) FROM {waiting} WHERE part NOT IN ({seen})"""
        duck.view(f"group_{name}", rows)
    # In files, rows of messages that have a group come first.
    grouped = " AND group_hash IS NOT NULL" if all_grouped else ""
    return {each.part for each in near}, f"until >= {first_claim}{grouped}", last_entered


def write_waiting(duck: DuckConnection, known: str, parts: Sequence[PartFiles]) -> None:
    """Writes what the checks of groups need of a shard's open parts, for all tasks to read.

    Their messages in FIFO queues have not ended, or not long ago, so claims of any later time may
    have to wait for them. Every range has an open part: with many tasks in a shard, it takes less
    time than each of them would to open the files of all.
    """
    first = parts[0]
    fifo = (
        f"queue IN (SELECT queue FROM periods WHERE fifo AND store = {quoted(first.store)} "
        f"AND shard = {first.shard})"
    )
    duck.files("no_folds", [], FOLDS.types)
    duck.files("no_events", [], IRREGULAR_EVENTS.types)
    folds, events = ["SELECT *, '' AS part FROM no_folds"], ["SELECT *, '' AS part FROM no_events"]
    for each in parts:
        if each.is_open:
            named = f"SELECT *, {quoted(each.part)} AS part FROM"
            folds.append(f"{named} {read_files(each.folds)}")
            if each.irregular is not None:
                events.append(f"{named} {read_files(each.irregular)}")
    duck.view("open_folds", " UNION ALL BY NAME ".join(folds))
    duck.view("open_events", " UNION ALL BY NAME ".join(events))
    # Tasks need those that were pushed before a certain point.
    duck.write(
        f"SELECT {_OTHER_COLUMNS}, until, part FROM open_folds WHERE regular AND {fifo} "
        "ORDER BY pushed",
        _waiting_path(known, first, "folds"),
        SMALL_GROUP_ROWS,
    )
    pushed = f"SELECT message FROM open_events WHERE kind = 'Pushed' AND {fifo}"
    duck.write(
        f"SELECT * FROM open_events WHERE message IN ({pushed}) ORDER BY message, sequence",
        _waiting_path(known, first, "events"),
        SMALL_GROUP_ROWS,
    )


def _waiting_path(known: str, part: PartFiles, name: str) -> str:
    return f"{known}/waiting-{name}-{part.store}-{part.shard}.parquet"


def _view_events(duck: DuckConnection, name: str, parts: Sequence[PartFiles]) -> None:
    """Makes a view of the irregular events of these parts.

    Files of sealed parts may be older than the column `until`, which is null then, and may have
    the hashes of a message's group and dedup id in its push alone.
    """
    rows = [no_rows(IRREGULAR_EVENTS.types)]
    for sealed in (False, True):
        paths = [
            each.irregular
            for each in parts
            if each.irregular is not None and is_sealed(each.part) == sealed
        ]
        filled = (
            f"coalesce({each}, max({each}) OVER (PARTITION BY message)) AS {each}"
            for each in ("group_hash", "dedup_hash")
        )
        columns = f"* REPLACE ({', '.join(filled)})" if sealed else "*"
        if paths:
            rows.append(f"SELECT {columns} FROM {read_files(*paths)}")
    duck.view(name, " UNION ALL BY NAME ".join(rows))


def load_ended(
    duck: DuckConnection, messages: str = "SELECT 1::bigint AS message WHERE false"
) -> None:
    """Makes the table `ended_before`: messages of the part that ended in a sealed part."""
    duck.table("ended_before", messages)
