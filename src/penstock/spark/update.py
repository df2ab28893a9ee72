"""Updates the tables from `events`: the parts that changed, then the small tables.

A part is the messages of a journal whose numbers share all but the last PART_BITS bits; it is named
by the least key that is in it. Each table
is changed in one commit that carries the version of `events` it was made from: a run that finds the
newest version there has nothing to do, and a run that was killed leaves tables that are complete,
some of them older. Each commit also carries each journal's offset: events behind it are new.

    new events ─▶ which parts they touch; queue_events (appended)
    events of these parts ─▶ messages ─▶ irregular_events ─▶ attempts, dead_letters ─▶ rollup
    the sums of rollup over all parts, and queue_events ─▶ the small tables
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final

from deltalake import DeltaTable

from penstock.spark import queries
from penstock.spark.bronze import events_table, journals_table
from penstock.spark.lake import PART, Lake, Table, TableFile, locked, our_errors
from penstock.spark.progress import step
from penstock.spark.queries import (
    DIRECTORY,
    MESSAGE_BITS,
    load_query,
    query_session,
    view_locally,
)
from penstock.spark.session import OpenSpark
from penstock.spark.tables import (
    ATTEMPTS,
    DEAD_LETTERS,
    IRREGULAR_EVENTS,
    MESSAGES,
    PART_TABLES,
    QUEUE_EVENTS,
    QUEUES,
    ROLLUP,
    ROLLUP_KEYS,
    ROLLUP_LEAST,
    ROLLUP_MOST,
    ROLLUP_SUMS,
    TABLES,
    WHOLE_TABLES,
    Derived,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# How many parts one round of statements makes: the keys of their irregular lives are in memory.
PARTS_AT_ONCE: Final = 256
# Increased when a query changes: tables made by older queries are made again.
QUERIES_VERSION: Final = 7
# The application transaction of `messages`: how many of its rows are of dropped events.
DROPPED: Final = "dropped"
_SOURCE: Final = "events"
_QUERIES: Final = "queries"
# The number of a part's journal.
_JOURNAL: Final = f"shiftright(part, {MESSAGE_BITS})"
_PREFIX: Final = (
    "concat(substr(store, 1, 8), '-', substr(store, 9, 4), '-8', substr(store, 13, 2), '0-9000-')"
)
# What the queries over events read of them.
_EVENT_COLUMNS: Final = [
    "key", "sequence", "code", "at_ms", "queue", "term", "epoch", "deadline_ms", "visible_at_ms",
    "expires_at_ms", "priority", "group", "dedup_id", "attempt_id", "holder", "name", "to_queue",
    "rank", "dead", "body_bytes",
]  # fmt: skip


@dataclass(frozen=True)
class Updated:
    """What a run changed: names of tables, and how many parts."""

    tables: list[str] = field(default_factory=list)
    parts: int = 0


def update(open_spark: OpenSpark, lake: Lake, *, rebuild: bool = False) -> Updated:
    """Updates every table from `events`. Raises LakeUnusable or LakeBusy."""
    with our_errors(), locked(lake, "tables"):
        events = events_table(lake).delta()
        if events is None or (not rebuild and is_up_to_date(lake)):
            return Updated()
        spark = query_session(open_spark(), events_table(lake).rows())
        return _Update(spark, lake, events, rebuild).make()


def is_up_to_date(lake: Lake) -> bool:
    """Whether every table was made from the newest version of `events`; reads only Delta's log."""
    events = events_table(lake).delta()
    if events is None:
        return True
    return all(is_current(table_of(lake, each), events) for each in (QUEUE_EVENTS, *TABLES))


def is_current(table: Table, events: DeltaTable | None) -> bool:
    """Whether a table was made from this version of `events`, by the queries of this version."""
    if events is None:
        return False
    made = table.committed(_SOURCE), table.committed(_QUERIES)
    return made == (events.version(), QUERIES_VERSION)


def table_of(lake: Lake, derived: Derived) -> Table:
    """The table in the lake."""
    return lake.table(derived.name, derived.schema, in_parts=derived.in_parts)


def count_dropped(lake: Lake) -> int:
    """How many messages have no events in the lake any more, as the last retention noted."""
    return table_of(lake, MESSAGES).committed(DROPPED) or 0


def part_of(key: str = "key") -> str:
    """The SQL of the part that a message is in."""
    return f"shiftleft(shiftright({key}, {queries.PART_BITS}), {queries.PART_BITS})"


def view_journals(spark: "SparkSession", lake: Lake) -> list[str]:
    """Makes the view `journals`; the stores of all journals in the lake."""
    journals = journals_table(lake).frame(spark).selectExpr("*", f"{_PREFIX} AS prefix")
    found: list[str] = view_locally(spark, "journals", journals)["store"].to_pylist()
    return found


@dataclass
class _Update:
    """One run, over one snapshot of `events`: another commit may follow at any time."""

    spark: "SparkSession"
    lake: Lake
    events: DeltaTable
    rebuild: bool

    def make(self) -> Updated:
        """Makes the tables that are out of date."""
        self.files = events_table(self.lake).files(self.events)
        self.stores = view_journals(self.spark, self.lake)
        made_by = {table_of(self.lake, each).committed(_QUERIES) for each in PART_TABLES}
        everything = self.rebuild or made_by != {QUERIES_VERSION}
        changed = [
            each
            for each in TABLES
            if everything or not self._is_complete(table_of(self.lake, each))
        ]
        if not changed and self._is_complete(table_of(self.lake, QUEUE_EVENTS)):
            # The same events have another version now: there is nothing to make.
            for each in (QUEUE_EVENTS, *TABLES):
                table_of(self.lake, each).add([], self._transactions())
            return Updated()
        with step(self.spark, "queues"):
            self._append_queue_events(everything)
            self._describe_queues()
        parts = self._touched(everything)
        self._make_parts(parts, everything)
        self._make_small_tables()
        return Updated([each.name for each in changed], len(parts))

    def _is_complete(self, table: Table) -> bool:
        """Whether a table has all events, if perhaps of another version of `events`."""
        wanted = {**self._transactions(), _SOURCE: table.committed(_SOURCE)}
        return table.delta() is not None and all(
            table.committed(name) == at for name, at in wanted.items()
        )

    def _transactions(self) -> dict[str, int]:
        reached = {
            f"offset/{store}": self.events.transaction_version(f"offset/{store}") or 0
            for store in self.stores
        }
        return {_SOURCE: self.events.version(), _QUERIES: QUERIES_VERSION, **reached}

    def _seen(self, tables: Sequence[Derived]) -> dict[str, int]:
        """Up to which offset of each journal all of these tables are complete."""
        return {
            store: min(
                table_of(self.lake, each).committed(f"offset/{store}") or 0 for each in tables
            )
            for store in self.stores
        }

    def _new_events(self, seen: Mapping[str, int]) -> "DataFrame":
        """The events behind these offsets."""
        files = [
            each
            for each in self.files
            if any(
                each.largest.get("offset", 0) >= offset
                and each.smallest.get("store", store) <= store <= each.largest.get("store", store)
                for store, offset in seen.items()
            )
        ]
        behind = [f"(store = '{store}' AND offset >= {offset})" for store, offset in seen.items()]
        frame = events_table(self.lake).frame(self.spark, files=files)
        return frame.where(" OR ".join(behind) or "false")

    def _append_queue_events(self, everything: bool) -> None:
        """Adds the new events that name no message to their table."""
        table = table_of(self.lake, QUEUE_EVENTS)
        seen = dict.fromkeys(self.stores, 0) if everything else self._seen([QUEUE_EVENTS])
        if everything or not is_current(table, self.events):
            rows = self._new_events(seen).where("message IS NULL").coalesce(1)
            added = table.stage(rows.sortWithinPartitions("store", "sequence"))
            if everything:
                table.replace(added, self._transactions())
            else:
                table.add(added, self._transactions())

    def _describe_queues(self) -> None:
        """Makes the views of what is known of queues, from rows that are here: they are few."""
        rows = table_of(self.lake, QUEUE_EVENTS).frame(self.spark)
        rows.createOrReplaceTempView("queue_events")
        for name in ("queue_settings", "known_queues"):
            view_locally(self.spark, name, self.spark.sql(load_query(name)))

    def _touched(self, everything: bool) -> list[int]:
        """The parts to be made, in order."""
        seen = dict.fromkeys(self.stores, 0) if everything else self._seen(PART_TABLES)
        with step(self.spark, "parts"):
            new = self._new_events(seen)
            rows = new.where("key IS NOT NULL").selectExpr(f"{part_of()} AS part").distinct()
            found = {row.part for row in rows.collect()}
            if not everything:
                found |= self._changed_by_queues(seen)
            elif count_dropped(self.lake):
                # Parts without an event have rows of messages whose events were dropped.
                messages = table_of(self.lake, MESSAGES).frame(self.spark)
                rows = messages.where("dropped").select("part").distinct()
                found |= {row.part for row in rows.collect()}
            return sorted(found)

    def _changed_by_queues(self, seen: Mapping[str, int]) -> set[int]:
        """The parts with rows that new events of queues change though they name no message."""
        behind = [f"(store = '{store}' AND offset >= {offset})" for store, offset in seen.items()]
        new = self.spark.table("queue_events").where(" OR ".join(behind) or "false")
        if not len(view_locally(self.spark, "new_queue_events", new)):
            return set()
        for each in (ROLLUP, QUEUES):
            table_of(self.lake, each).frame(self.spark).createOrReplaceTempView(each.name)
        return {row.part for row in self.spark.sql(load_query("changed_parts")).collect()}

    def _make_parts(self, parts: Sequence[int], everything: bool) -> None:
        """Makes every table in parts for these parts, in place of what they were."""
        if not parts:
            for each in PART_TABLES:
                table = table_of(self.lake, each)
                is_new = everything or table.delta() is None
                table.replace([], self._transactions(), None if is_new else [])
            return
        gone: set[int] = set()
        if everything:
            tables = [table_of(self.lake, each) for each in PART_TABLES]
            gone = {
                each.part for table in tables for each in table.files() if each.part is not None
            }
            gone -= set(parts)
        rounds = [parts[at : at + PARTS_AT_ONCE] for at in range(0, len(parts), PARTS_AT_ONCE)] or [
            []
        ]
        for number, some in enumerate(rounds):
            is_last = number == len(rounds) - 1
            replaced = [*some, *gone] if is_last else some
            _PartRound(self.spark, self.lake, self.files, some).make(
                replaced, self._transactions() if is_last else {}
            )

    def _make_small_tables(self) -> None:
        """Makes those of them that are not the newest already."""
        wanted = [
            each
            for each in WHOLE_TABLES
            if self.rebuild or not is_current(table_of(self.lake, each), self.events)
        ]
        if not wanted:
            return
        rollup = table_of(self.lake, ROLLUP).frame(self.spark)
        sums = _added_up(rollup, f"{_JOURNAL} AS journal", *_quoted(ROLLUP_KEYS))
        sums = (
            sums.join(self.spark.table("journals"), "journal").drop("journal", "prefix").persist()
        )
        try:
            sums.createOrReplaceTempView("sums")
            with step(self.spark, QUEUES.name):
                view_locally(self.spark, QUEUES.name, self.spark.sql(QUEUES.query))
            for each in wanted:
                with step(self.spark, each.name):
                    table = table_of(self.lake, each)
                    query = f"TABLE {QUEUES.name}" if each is QUEUES else each.query
                    added = table.stage(self.spark.sql(query).coalesce(1))
                    table.replace(
                        added, {_SOURCE: self.events.version(), _QUERIES: QUERIES_VERSION}
                    )
        finally:
            sums.unpersist()


@dataclass
class _PartRound:
    """Some parts, whose rows are made again in every table in parts."""

    spark: "SparkSession"
    lake: Lake
    files: Sequence[TableFile]
    parts: Sequence[int]

    def make(self, replaced: Sequence[int], transactions: Mapping[str, int]) -> None:
        """Makes the rows and commits them in place of those of the replaced parts."""
        slots, slot = slots_of(self.parts)
        events = self._events().selectExpr("*", f"CAST({slot} AS int) AS slot")
        kept = self._view_dropped()
        if kept:
            events = self.spark.sql(
                "SELECT /*+ BROADCAST(dropped) */ events.* FROM {events} AS events "
                "LEFT ANTI JOIN dropped ON dropped.key = events.key "
                "AND events.sequence <= dropped.last_sequence",
                events=events,
            )
        for each in (MESSAGES, IRREGULAR_EVENTS, ATTEMPTS, DEAD_LETTERS, ROLLUP):
            with step(self.spark, each.name):
                # One exchange brings the events of a part together: its rows are then in one file.
                is_first = each is MESSAGES
                given = events
                if is_first:
                    given = given.repartitionById(slots, "slot")
                    given = given.sortWithinPartitions("slot", "part", "key")
                given.createOrReplaceTempView("part_events")
                rows = self._rollup() if each is ROLLUP else self.spark.sql(each.query)
                if each is IRREGULAR_EVENTS:
                    rows = rows.repartitionById(slots, "slot")
                    rows = rows.sortWithinPartitions("part", "key", "sequence")
                elif not is_first:
                    rows = (
                        rows.repartition(min(slots, 64), "part") if slots > 1 else rows.coalesce(1)
                    )
                if kept and each is not ROLLUP:
                    rows = rows.unionByName(self._kept(each), allowMissingColumns=True)
                table = table_of(self.lake, each)
                added = table.stage(rows)
                parts = None if table.delta() is None else list(replaced)
                table.replace(added, transactions, parts)
                files = [file for file in table.files() if file.part in set(self.parts)]
                table.frame(self.spark, files=files).createOrReplaceTempView(each.name)

    def _events(self) -> "DataFrame":
        """The events of the parts."""
        table = events_table(self.lake)
        if not self.parts:
            return table.frame(self.spark, files=[]).selectExpr(
                *_quoted(_EVENT_COLUMNS), "key AS part"
            )
        size = 1 << queries.PART_BITS
        least, most = self.parts[0], self.parts[-1] + size
        files = [
            each
            for each in self.files
            if each.smallest.get("key", least) < most and each.largest.get("key", least) >= least
        ]
        frame = table.frame(self.spark, files=files)
        frame = frame.where(f"key >= {least} AND key < {most}")
        frame = frame.selectExpr(*_quoted(_EVENT_COLUMNS), f"{part_of()} AS part")
        if len(self.parts) * size < most - least:
            frame = frame.where(f"part IN ({', '.join(map(str, self.parts))})")
        return frame

    def _view_dropped(self) -> bool:
        """Makes a view of the messages of these parts whose events were dropped, if any were."""
        if not count_dropped(self.lake):
            return False
        self._before(MESSAGES).where("dropped").createOrReplaceTempView("dropped")
        return True

    def _before(self, derived: Derived) -> "DataFrame":
        """The rows of these parts before they are made again."""
        table = table_of(self.lake, derived)
        files = [file for file in table.files() if file.part in set(self.parts)]
        return table.frame(self.spark, files=files)

    def _kept(self, derived: Derived) -> "DataFrame":
        """The rows of messages whose events were dropped: they are never made again."""
        if derived is MESSAGES:
            return self.spark.table("dropped")
        return self._before(derived).join(
            self.spark.table("dropped").select("key"), "key", "left_semi"
        )

    def _rollup(self) -> "DataFrame":
        """What the rows of these parts add to the small tables."""
        names = sorted(path.stem for path in DIRECTORY.glob("rollup/*.sql"))
        each = [self.spark.sql(load_query(f"rollup/{name}")) for name in names]
        rows = reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), each)
        return _added_up(rows, PART, *_quoted(ROLLUP_KEYS))


def _added_up(rows: "DataFrame", *keys: str) -> "DataFrame":
    """The rows of a rollup added up by these keys."""
    from pyspark.sql.functions import expr

    sums = [expr(f"sum({name})").alias(name) for name in ROLLUP_SUMS]
    most = [expr(f"max({name})").alias(name) for name in ROLLUP_MOST]
    least = [expr(f"min({name})").alias(name) for name in ROLLUP_LEAST]
    return rows.groupBy(*map(expr, keys)).agg(*sums, *most, *least)


def _quoted(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def slots_of(parts: Sequence[int]) -> tuple[int, str]:
    """How many tasks share these parts, and the SQL of the one that a part belongs to.

    Neighbouring parts go to different tasks, which a hash would not see to.
    """
    by_journal = defaultdict(list)
    for part in parts:
        by_journal[part >> MESSAGE_BITS].append(part >> queries.PART_BITS)
    cases, first = [], 0
    for journal, own in by_journal.items():
        cases.append(f"WHEN {journal} THEN nth - {own[0] - first}")
        first += len(own)
    slots = max(1, len(parts))
    slot = f"CASE {_JOURNAL} {' '.join(cases)} END" if cases else "part"
    nth = f"shiftright(part, {queries.PART_BITS})"
    return slots, f"pmod({slot.replace('nth', nth)}, {slots})"
