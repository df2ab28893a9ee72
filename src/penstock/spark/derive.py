"""Updates silver and gold from `events`: the parts that changed, then the small tables.

Each table is changed in one commit that carries the version of `events` it was made from: a run
that finds the newest version there has nothing to do, and a run that was killed leaves tables that
are complete but older. Tables in parts are changed together, by a plan (`spark.seals`). They and
`queue_events` also carry each journal's offset: events behind it are new to the table.

    new events ─▶ queue_events (appended)
    events of the parts that new events touch ─▶ tables in parts (`spark.fold`)
    queue_events and tables in parts ─▶ queues and gold, whole, in this process
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from penstock.spark import part_events
from penstock.spark.distribute import (
    OpenSpark,
    Progress,
    distribute,
    no_progress,
    threads_until_error,
)
from penstock.spark.duck import DuckConnection, no_rows, quoted, read_files
from penstock.spark.fold import (
    FoldedRanges,
    FoldWork,
    RangeWork,
    files_added,
    fold_parts,
    tasks_of_ranges,
)
from penstock.spark.ingest import events_table
from penstock.spark.lake import (
    AddedFile,
    Lake,
    Table,
    TableFile,
    commit_all,
    locked,
    our_errors,
    scratch,
)
from penstock.spark.part_events import LakePart
from penstock.spark.seals import (
    PartsPlan,
    closed_files,
    complete_tables,
    is_sealed,
    next_number,
    part_of,
    range_of,
    sealed_files,
)
from penstock.spark.sums import PartSums, sets_of
from penstock.spark.tables import (
    FOLDS,
    OPEN_EVENTS,
    PART_TABLES,
    QUEUE_EVENTS,
    QUEUES,
    SUMMED_TABLES,
    TABLES,
    WHOLE_TABLES,
    Derived,
)

_SOURCE: Final = "events"
# Increased when a query changes: tables made by older queries are made again.
QUERIES_VERSION: Final = 6
_QUERIES: Final = "queries"
# How many small tables are made at once, at most: they share the memory of one connection.
_AT_ONCE: Final = 4
_PURGES: Final = "kind IN ('QueuePurged', 'QueueRemoved')"


@dataclass(frozen=True)
class DerivedTables:
    """What a run changed: names of tables, and how many parts of how many."""

    tables: list[str] = field(default_factory=list)
    parts: int = 0


def derive(
    open_spark: OpenSpark,
    lake: Lake,
    progress: Progress = no_progress,
    *,
    rebuild: bool = False,
) -> DerivedTables:
    """Updates every table from `events`. Raises LakeUnusable or LakeBusy."""
    with our_errors(), locked(lake, "tables"), scratch(lake, "tables") as directory:
        complete_tables(lake)
        delta = events_table(lake).delta()
        if delta is None or (not rebuild and is_up_to_date(lake)):
            return DerivedTables()
        return _Run(open_spark, lake, delta, directory, rebuild).make(progress)


def is_up_to_date(lake: Lake) -> bool:
    """Whether every table was made from the newest version of `events`; reads only Delta's log."""
    delta = events_table(lake).delta()
    if delta is None:
        return True
    return all(is_current(table_of(lake, each), delta) for each in (QUEUE_EVENTS, *TABLES))


def is_current(table: Table, events: DeltaTable | None) -> bool:
    """Whether a table was made from this version of `events`, by the queries of this version."""
    if events is None:
        return False
    made = table.committed(_SOURCE), table.committed(_QUERIES)
    return made == (events.version(), QUERIES_VERSION)


def table_of(lake: Lake, derived: Derived) -> Table:
    """The table in the lake."""
    return lake.table(derived.name, derived.schema, in_parts=derived.in_parts)


@dataclass
class _Run:
    """One run, over one snapshot of `events`: another commit may follow at any time."""

    open_spark: OpenSpark
    lake: Lake
    events: DeltaTable
    scratch: Path
    rebuild: bool

    def __post_init__(self) -> None:
        self.version = self.events.version()
        self.files = events_table(self.lake).files(self.events)
        self.stores = self._stores()

    def make(self, progress: Progress) -> DerivedTables:
        """Makes the tables that are out of date."""
        versions = {table_of(self.lake, each).committed(_QUERIES) for each in PART_TABLES}
        everything = self.rebuild or versions != {QUERIES_VERSION}
        cores = len(os.sched_getaffinity(0))
        # Each of several threads of this process makes a table by itself.
        with (
            DuckConnection(max(1, cores // 2)) as duck,
            threads_until_error(min(cores, _AT_ONCE)) as beside,
        ):
            touched = None if everything else beside.submit(self._touched, duck)
            sums = PartSums(self.lake, duck)
            self._append_queue_events(duck)
            # Made from what is known before the parts are; only `queues` itself needs the parts.
            duck.table("queues", QUEUES.rows)
            queues = self.scratch / "queues.parquet"
            duck.write("SELECT * FROM queues", str(queues))
            ranges = None
            if touched is not None:
                ranges = touched.result() | self._touched_by_queues(duck, touched.result())
            progress(0.05)
            folded = self._fold(ranges, queues, lambda part: progress(0.05 + 0.9 * part))
            replaced = None if ranges is None else self._parts_before(ranges, folded)
            new = [part.part.name for each in folded for part in each.parts]
            sums.replace(replaced, new, [each.sums for each in folded])
            duck.table("queues", QUEUES.rows)
            sets = None if replaced is None else sets_of(replaced)
            summed = {each.name: beside.submit(sums.write, each, sets) for each in SUMMED_TABLES}
            whole = [beside.submit(self._make_whole, duck, each) for each in WHOLE_TABLES]
            # These are committed while the other tables are made.
            self._commit_parts(
                replaced, sets, folded, {name: files.result() for name, files in summed.items()}
            )
            # Each is committed once it is made, while others still are being made.
            commit_all(map(_committing, whole))
        made = sum(len(each.parts) for each in folded)
        tables = [*PART_TABLES, *WHOLE_TABLES] if made else WHOLE_TABLES
        progress(1)
        return DerivedTables([each.name for each in tables], made)

    def _stores(self) -> list[str]:
        """The journals that `events` holds, by the transactions of its commits."""
        found = {str(each.smallest["store"]) for each in self.files if "store" in each.smallest}
        mixed = [
            each.path
            for each in self.files
            if each.smallest.get("store") != each.largest.get("store")
            or "store" not in each.smallest
        ]
        if mixed:
            with DuckConnection() as duck:
                query = f"SELECT DISTINCT store FROM {read_files(*mixed)}"
                found |= {row[0] for row in duck.fetch(query)}
        return sorted(found)

    def _transactions(self) -> dict[str, int]:
        """The application transactions of a commit: what the table was made from."""
        offsets = {
            f"offset/{store}": at
            for store in self.stores
            if (at := self.events.transaction_version(f"offset/{store}")) is not None
        }
        return {_SOURCE: self.version, _QUERIES: QUERIES_VERSION, **offsets}

    def _seen(self, tables: Sequence[Derived]) -> dict[str, int]:
        """The offset of each journal up to which all of these tables are complete, or 0."""
        found = [table_of(self.lake, each) for each in tables]
        return {
            store: min(table.committed(f"offset/{store}") or 0 for table in found)
            for store in self.stores
        }

    def _now(self, derived: Derived) -> tuple[list[str], dict[str, str]]:
        """The files of a table as it is now, and its columns."""
        return [each.path for each in table_of(self.lake, derived).files()], derived.types

    def _new_events(self, seen: Mapping[str, int]) -> str:
        """A query of the events behind these offsets; files without any are left out."""
        files = [
            each.path
            for each in self.files
            if any(
                each.largest.get("offset", 0) >= offset
                and each.smallest.get("store", store) <= store <= each.largest.get("store", store)
                for store, offset in seen.items()
            )
        ]
        if not files:
            return no_rows({**QUEUE_EVENTS.types, "message": "bigint"})
        return f"SELECT * FROM {read_files(*files)} WHERE {_behind(seen)}"

    def _append_queue_events(self, duck: DuckConnection) -> None:
        """Adds the new events that name no message to their table."""
        table = table_of(self.lake, QUEUE_EVENTS)
        if self.rebuild or not is_current(table, self.events):
            columns = ", ".join(f'"{name}"' for name in QUEUE_EVENTS.columns)
            seen = dict.fromkeys(self.stores, 0) if self.rebuild else self._seen([QUEUE_EVENTS])
            path = table.new_file()
            duck.write(
                f"SELECT {columns} FROM ({self._new_events(seen)}) WHERE message IS NULL "
                "ORDER BY store, sequence",
                str(path),
            )
            added = [AddedFile.of(table.path, path)]
            if self.rebuild:
                table.replace(added, self._transactions())
            else:
                table.add(added, self._transactions())
        duck.files("queue_events", *self._now(QUEUE_EVENTS))

    def _touched(self, duck: DuckConnection) -> dict[LakePart, bool]:
        """The ranges with new events of messages.

        True if messages of closed parts are among them: then those are to be made again too, and
        not only the open part. Runs in another thread than the one that uses the connection.
        """
        with duck.other_thread() as duck:
            duck.table(
                "new_messages",
                "SELECT DISTINCT store, shard, message, "
                f"message // {part_events.PART_MESSAGES} AS nth "
                f"FROM ({self._new_events(self._seen(PART_TABLES))}) WHERE message IS NOT NULL",
            )
            found = {
                _range(*row): False
                for row in duck.fetch("SELECT DISTINCT store, shard, nth FROM new_messages")
            }
            closed = closed_files(table_of(self.lake, FOLDS).files())
            paths = [path for part in found for path in closed.get(part.name, ())]
            duck.files("closed_folds", paths, FOLDS.types)
            for row in duck.fetch("""
                SELECT DISTINCT store, shard, nth
                FROM new_messages SEMI JOIN closed_folds USING (store, shard, message)"""):
                found[_range(*row)] = True
        return found

    def _touched_by_queues(
        self, duck: DuckConnection, touched: Mapping[LakePart, bool]
    ) -> dict[LakePart, bool]:
        """The ranges with messages that a new event of a queue changes; true as above."""
        seen = self._seen(PART_TABLES)
        duck.table("new_changes", f"SELECT * FROM queue_events WHERE {_behind(seen)}")
        found: dict[LakePart, bool] = {}
        for name, is_whole in self._parts_changed_by_queues(duck):
            store, shard, nth = range_of(name).rsplit("-", 2)
            part = _range(store, int(shard), int(nth))
            found[part] = is_whole or found.get(part, False) or touched.get(part, False)
        return found

    def _parts_changed_by_queues(self, duck: DuckConnection) -> list[tuple[str, bool]]:
        """Parts with rows that a new event of a queue changes though it names no message.

        A purge or removal ends the messages that a queue holds, none of which is in a closed part.
        A queue that had only a number may have a name now, and a new dead-letter queue may be where
        messages without a push are: true if one of these is so.
        """
        if not duck.fetch("SELECT 1 FROM new_changes LIMIT 1"):
            return []
        duck.files("old_queues", *self._now(QUEUES))
        return duck.fetch(f"""
            WITH renamed AS (
              SELECT store, shard, queue_number FROM queues JOIN old_queues AS old
              USING (store, shard, queue_number) WHERE queues.queue <> old.queue
            ), dead AS (
              SELECT store, shard FROM queues LEFT JOIN old_queues AS old
              USING (store, shard, queue_number)
              WHERE queues.dead_letter IS DISTINCT FROM old.dead_letter
            ), purged AS (SELECT store, shard, queue FROM new_changes WHERE {_PURGES}),
            changed AS (
              SELECT of_part,
                messages > 0 AND (store, shard, queue_number) IN (FROM purged) AS is_purged,
                (store, shard, queue_number) IN (FROM renamed)
                  OR (unpushed > 0 AND (store, shard) IN (FROM dead)) AS is_whole
              -- The messages of a sealed part have ended: nothing ends or moves them again.
              FROM part_status WHERE NOT contains(of_part, '.'))
            SELECT of_part, bool_or(is_whole) FROM changed WHERE is_purged OR is_whole
            GROUP BY of_part""")

    def _fold(
        self, ranges: dict[LakePart, bool] | None, queues: Path, progress: Progress
    ) -> list[FoldedRanges]:
        """Makes the parts of these ranges, None for all."""
        folds = table_of(self.lake, FOLDS).files()
        sealed, closed = sealed_files(folds), closed_files(folds)
        chosen = dict.fromkeys(self._every_range(), True) if ranges is None else ranges
        kept = {part: () if whole else closed.get(part.name, ()) for part, whole in chosen.items()}
        seen = self._seen([OPEN_EVENTS])
        stored = {each.part: each.path for each in table_of(self.lake, OPEN_EVENTS).files()}

        def work_of(part: LakePart) -> RangeWork:
            since = 0 if chosen[part] else seen[part.store]
            return RangeWork(
                part,
                tuple(files_of(self.files, part, since)),
                sealed.get(part.name, ()),
                (stored[part.name],) if since and part.name in stored else (),
                since,
                next_number(kept[part]),
            )

        work = [
            FoldWork(tuple(map(work_of, task)), str(queues), str(self.lake.path), str(self.scratch))
            for task in tasks_of_ranges(self._left(kept, folds))
        ]
        return distribute(
            self.open_spark, fold_parts, work, FoldedRanges, self.scratch, progress,
            size=len(chosen),
        )  # fmt: skip

    def _parts_before(
        self, ranges: Mapping[LakePart, bool], folded: Sequence[FoldedRanges]
    ) -> set[str]:
        """The parts that are made now, and those in whose place they are."""
        closed = closed_files(table_of(self.lake, FOLDS).files())
        found = {part.part.name for each in folded for part in each.parts}
        for part, is_whole in ranges.items():
            found.add(part.name)
            if is_whole:
                found.update(map(part_of, closed.get(part.name, ())))
        return found

    def _commit_parts(
        self,
        replaced: Set[str] | None,
        sets: list[str] | None,
        folded: Sequence[FoldedRanges],
        summed: Mapping[str, list[AddedFile]],
    ) -> None:
        """Commits the tables in parts, in place of these parts, None for all but sealed ones."""
        tables = [table_of(self.lake, each) for each in PART_TABLES]
        if replaced == set() and all(is_current(table, self.events) for table in tables):
            return
        made = [part for each in folded for part in each.parts]
        if replaced is None:
            now = {str(each.part) for each in table_of(self.lake, FOLDS).files()}
            if any(map(is_sealed, now)):
                replaced = {part.part.name for part in made}
                replaced |= {name for name in now if not is_sealed(name)}
        PartsPlan(
            time.time_ns(),
            None if replaced is None else sorted(replaced),
            {**files_added(made), **summed},
            sets,
            self._transactions(),
        ).save(self.lake)
        complete_tables(self.lake)

    def _left(
        self, ranges: Mapping[LakePart, Sequence[str]], folds: Sequence[TableFile]
    ) -> dict[LakePart, int]:
        """How many messages of each range are in none of its files of `folds`, at most."""
        rows = {each.path: each.rows for each in folds}
        newest = max((int(each.largest.get("message", 0)) for each in self.files), default=0)
        return {
            part: min(part.messages, newest + 1 - part.first) - sum(rows[path] for path in paths)
            for part, paths in ranges.items()
        }

    def _every_range(self) -> list[LakePart]:
        with DuckConnection(len(os.sched_getaffinity(0))) as duck:
            duck.files("all_events", [each.path for each in self.files], {})
            found = (
                duck.fetch(f"""
                SELECT DISTINCT store, shard, message // {part_events.PART_MESSAGES} FROM all_events
                WHERE message IS NOT NULL""")
                if self.files
                else []
            )
        return [_range(*row) for row in found]

    def _make_whole(self, duck: DuckConnection, derived: Derived) -> Callable[[], None]:
        """Makes a small table, if it is not the newest already. Returns what commits it."""
        table = table_of(self.lake, derived)
        if not self.rebuild and is_current(table, self.events):
            return lambda: None
        path = table.new_file()
        with duck.other_thread() as own:
            own.write(derived.rows if derived is not QUEUES else "FROM queues", str(path))
        transactions = {_SOURCE: self.version, _QUERIES: QUERIES_VERSION}
        return lambda: table.replace([AddedFile.of(table.path, path)], transactions)


def _committing(made: Future[Callable[[], None]]) -> Callable[[], None]:
    """Commits what is being made."""
    return lambda: made.result()()


def _behind(seen: Mapping[str, int]) -> str:
    """The condition that an event is behind the offset of its journal."""
    journals = [
        f'(store = {quoted(store)} AND "offset" >= {offset})' for store, offset in seen.items()
    ]
    return " OR ".join(journals) or "false"


def _range(store: str, shard: int, nth: int) -> LakePart:
    return LakePart(store, shard, nth, part_events.PART_MESSAGES)


def files_of(files: Sequence[TableFile], part: LakePart, since: int = 0) -> Iterator[str]:
    """The files of `events` that may hold events of the part's messages, by their statistics.

    `since` is an offset behind which the events are.
    """
    for each in files:
        if each.largest.get("offset", since) < since:
            continue
        store = each.smallest.get("store", part.store), each.largest.get("store", part.store)
        if "message" not in each.smallest or not store[0] <= part.store <= store[1]:
            continue
        if each.smallest["message"] < part.end and each.largest["message"] >= part.first:
            yield each.path
