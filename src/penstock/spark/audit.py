"""The audit of a lake: judges the parts that changed since the last one, and keeps what it found.

    messages, irregular_events ─▶ findings and balances of these parts (`spark.checks`)
    balances, queue_events ─▶ findings about whole journals, in the part STORES

A part is judged again when its messages were made again or the settings known of its queues
changed: the rows of `balances` name the file of the messages they came from, and a digest of these
settings. An event never changes what was found before it, so a finding stays until its part is
judged again.
"""

import os
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.receipts import MessageIds
from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.blocks import INDEX_BITS, KIND_NAMES
from penstock.spark.bronze import copy_events, events_table
from penstock.spark.checks import CHECKS, CheckFinding
from penstock.spark.lake import Lake, LakeBusy, TableFile, locked, our_errors
from penstock.spark.progress import step
from penstock.spark.queries import MESSAGE_BITS, load_query, query_session, view_locally
from penstock.spark.schemas import local_frame
from penstock.spark.session import OpenSpark
from penstock.spark.tables import (
    BALANCES,
    FINDINGS,
    IRREGULAR_EVENTS,
    MESSAGES,
    PART_TABLES,
    QUEUE_EVENTS,
    QUEUES,
)
from penstock.spark.update import count_dropped, table_of, update, view_journals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN_MAX: Final = 20
_Key = tuple[str, int, int]
# The part of `findings` that is about whole journals.
STORES: Final = -1
_SOURCE: Final = "messages"
_EVENTS: Final = "judged_events"
_FOUND: Final = "check, store, shard, message, queue, sequence, at_ms, detail"
_QUEUE_KEY: Final = f"shiftright(key, {MESSAGE_BITS}) * {1 << 32}L + queue_number AS queue_key"
# Messages that were in their queue, as far as their own events say.
_WAITED: Final = "state NOT IN ('deleted', 'expired', 'lost', 'arrived')"


@dataclass(frozen=True)
class AuditFinding:
    """One place where a check does not hold, and the life of the message it is about."""

    check: str
    store: str
    entry: int
    message_id: str | None
    queue: str | None
    detail: str
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How often each check failed, and the first findings of each."""

    events: int
    counts: dict[str, int]
    findings: tuple[AuditFinding, ...]
    parts: int = 0
    judged_parts: int = 0
    # Whether `events` has more than the tables, which another process is making.
    is_behind: bool = False
    # Messages that are judged by what the lake keeps of them: their events were dropped.
    dropped: int = 0
    # The version of `messages` that was judged.
    version: int = -1

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return not any(self.counts.values())


def audit(
    open_spark: OpenSpark,
    lake: Lake,
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
    *,
    everything: bool = False,
) -> Verdict:
    """Judges what changed, or everything, and gives the verdict on the whole lake.

    `engine` says how many messages each queue holds by the engine's own count, at the end of the
    events; without it, queues are compared only with what their purges and removals counted. Raises
    LakeUnusable, or LakeBusy if another audit of the lake is running.
    """
    with our_errors(), locked(lake, "verdicts"):
        is_behind = False
        try:
            update(open_spark, lake)
        except LakeBusy:
            # A run is making them. The tables that it has committed so far can be judged, if they
            # are of the same events.
            sources = {table_of(lake, each).committed("events") for each in PART_TABLES}
            if len(sources) > 1 or sources == {None}:
                raise
            is_behind = True
        dropped = count_dropped(lake)
        parts = len(_parts_of(lake))
        if not everything and not engine and is_judged(lake):
            findings = table_of(lake, FINDINGS)
            if findings.rows() == 0:
                events = findings.committed(_EVENTS) or 0
                counts = dict.fromkeys(CHECKS, 0)
                return Verdict(events, counts, (), parts, 0, is_behind, dropped, _version(lake))
        made = _Audit(query_session(open_spark(), table_of(lake, MESSAGES).rows()), lake)
        judged = made.judge(everything=everything)
        found = made.findings(engine or {})
        counts = dict.fromkeys(CHECKS, 0)
        for finding in found:
            counts[finding.check] += 1
        shown = made.shown(found, shown_max)
        return Verdict(made.events, counts, shown, parts, judged, is_behind, dropped, made.version)


def is_judged(lake: Lake) -> bool:
    """Whether the last audit was of the tables as they are now; reads only Delta's log."""
    return table_of(lake, FINDINGS).committed(_SOURCE) == _version(lake)


def _version(lake: Lake) -> int:
    messages = table_of(lake, MESSAGES).delta()
    return -1 if messages is None else messages.version()


def audit_journal(
    open_spark: OpenSpark,
    journal: str,
    archive: str | None = None,
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
) -> Verdict:
    """Audits a journal by itself: its events, without bodies, go into a lake that is then removed.

    The lake is made where Spark keeps its temporary files; executors must see it.
    """
    with tempfile.TemporaryDirectory(
        prefix="penstock-audit-", dir=os.environ.get("SPARK_LOCAL_DIRS")
    ) as directory:
        lake = Lake.open(Path(directory, "lake"), create=True)
        with our_errors():
            copy_events(open_spark, lake, journal, archive)
        return audit(open_spark, lake, engine, shown_max)


def _parts_of(lake: Lake) -> dict[int, list[TableFile]]:
    """The parts of `messages` with their files."""
    found: dict[int, list[TableFile]] = {}
    for each in table_of(lake, MESSAGES).files():
        assert each.part is not None
        found.setdefault(each.part, []).append(each)
    return found


@dataclass
class _Audit:
    """One audit of one snapshot of the tables."""

    spark: "SparkSession"
    lake: Lake
    events: int = 0
    whole: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.version = _version(self.lake)
        self.parts = _parts_of(self.lake)
        view_journals(self.spark, self.lake)
        self.stores = {
            row.journal: (row.store, row.shard) for row in self.spark.table("journals").collect()
        }
        self._view(QUEUE_EVENTS.name, table_of(self.lake, QUEUE_EVENTS).frame(self.spark))
        kinds = [(number, name) for number, name in enumerate(KIND_NAMES)]
        self._view("kinds", local_frame(self.spark, kinds, "code tinyint, kind string"))
        with step(self.spark, "settings of queues"):
            views = {
                name: view_locally(self.spark, name, self.spark.sql(load_query(f"audit/{name}")))
                for name in ("queue_changes", "queue_rules", "periods")
            }
        self.periods: list[dict[str, Any]] = views["periods"].to_pylist()

    def _view(self, name: str, frame: "DataFrame") -> None:
        frame.createOrReplaceTempView(name)

    def judge(self, *, everything: bool) -> int:
        """Judges the parts that changed, and then the journals; how many parts that were."""
        findings, balances = (table_of(self.lake, each) for each in (FINDINGS, BALANCES))
        if everything or findings.committed(_SOURCE) != self.version:
            rows = balances.frame(self.spark).select("part", "judged").distinct().collect()
            before = {row.part: row.judged for row in rows}
            now = self._marks()
            changed = sorted(p for p, mark in now.items() if everything or before.get(p) != mark)
            gone = sorted(set(before) - set(now))
            if changed or gone or balances.delta() is None:
                self._judge_parts(changed, now, gone)
        else:
            changed = []
        self._describe_stores()
        if findings.committed(_SOURCE) != self.version or changed:
            found = self._find_in_stores({})
            of_stores = local_frame(
                self.spark, [(*each, STORES) for each in found], f"{FINDINGS.schema}, part bigint"
            )
            added = findings.stage(of_stores.coalesce(1))
            # The last of the commits says that all of them are there.
            done = {_SOURCE: self.version, _EVENTS: self.events}
            findings.replace(added, done, None if findings.delta() is None else [STORES])
        return len(changed)

    def _marks(self) -> dict[int, str]:
        """What each part is judged by: its file of messages, and what is known of its queues."""
        known: dict[int, list[tuple[int, str]]] = {}
        for row in self.periods:
            begins = max(row["from_sequence"], (row["created_entry"] or 0) << INDEX_BITS)
            text = repr([value for name, value in row.items() if name != "to_sequence"])
            known.setdefault(row["queue_key"] >> 32, []).append((begins, text))
        digests: dict[int, tuple[list[int], list[str]]] = {}
        for journal, rows in known.items():
            digest = blake2b(digest_size=16)
            starts, texts = [], []
            for begins, text in sorted(rows):
                digest.update(text.encode())
                starts.append(begins)
                texts.append(digest.hexdigest())
            digests[journal] = starts, texts
        marks = {}
        for part, files in self.parts.items():
            starts, texts = digests.get(part >> MESSAGE_BITS, ([], []))
            last = max(each.largest.get("last_sequence", 0) for each in files)
            at = bisect_right(starts, last)
            names = ",".join(sorted(Path(each.path).name for each in files))
            marks[part] = f"{names}/{texts[at - 1] if at else ''}"
        return marks

    def _judge_parts(
        self, parts: Sequence[int], marks: Mapping[int, str], gone: Sequence[int]
    ) -> None:
        """Makes the findings and the balances of these parts."""
        self._view(
            "judged_parts",
            local_frame(self.spark, [(p, marks[p]) for p in parts], "part bigint, judged string"),
        )
        own = set(parts)
        messages = self._messages([each for p in parts for each in self.parts[p]])
        self._view("messages", messages)
        irregular = table_of(self.lake, IRREGULAR_EVENTS)
        own_files = [each for each in irregular.files() if each.part in own]
        events = irregular.frame(self.spark, files=own_files)
        self._view(IRREGULAR_EVENTS.name, events)
        twice = local_frame(self.spark, [], "key bigint")
        if count_dropped(self.lake):
            twice = self.spark.sql("SELECT key FROM messages GROUP BY key HAVING count(*) > 1")
        self._view("twice", twice)
        others = self._others(parts, own_files)
        if others is not None:
            more = irregular.frame(
                self.spark, files=[each for each in irregular.files() if each.part not in own]
            )
            more = more.join(others.where("NOT regular").select("key"), "key", "left_semi")
            messages, events = messages.unionByName(others), events.unionByName(more)
        self._view("near_messages", messages)
        self._view("near_events", events)
        for name in ("regular_lives", "life_events", "states"):
            self._view(name, self.spark.sql(load_query(f"audit/{name}")))
        names = ["message_findings", "dedup_findings"]
        if any(row["fifo"] for row in self.periods):
            names.append("order_findings")
        found = " UNION ALL ".join(f"({load_query(f'audit/{name}')})" for name in names)
        replaced = [*parts, *gone]
        with step(self.spark, "checks"):
            table = table_of(self.lake, FINDINGS)
            rows = self.spark.sql(f"""
                SELECT check, store, shard, key & {(1 << MESSAGE_BITS) - 1} AS message, queue,
                  sequence, at_ms, detail, part
                FROM ({found}) JOIN journals ON journal = shiftright(key, {MESSAGE_BITS})""")
            added = table.stage(rows.repartition(1))
            # Findings first: a part counts as judged once its balances say so.
            table.replace(added, {}, None if table.delta() is None else replaced)
        with step(self.spark, "balances"):
            table = table_of(self.lake, BALANCES)
            rows = self.spark.sql(load_query("audit/part_balances"))
            added = table.stage(rows.repartition(min(8, max(1, len(parts))), "part"))
            table.replace(added, {}, None if table.delta() is None else replaced)

    def _messages(self, files: Sequence[TableFile]) -> "DataFrame":
        return (
            table_of(self.lake, MESSAGES).frame(self.spark, files=files).selectExpr("*", _QUEUE_KEY)
        )

    def _others(self, parts: Sequence[int], own_files: Sequence[TableFile]) -> "DataFrame | None":
        """Messages of other parts that claims or dedup ids of these parts are compared with.

        Those are the messages that were pushed within a window before these, and, with FIFO queues,
        those that had not left their queue before the first event here.
        """
        own = [each for part in parts for each in self.parts[part]]
        others = [
            each for part, files in self.parts.items() if part not in set(parts) for each in files
        ]
        if not own or not others:
            return None
        first_ms = min(each.smallest.get("pushed_at_ms", 0) for each in own) - DEDUP_WINDOW_MS
        near = f"pushed_at_ms > {first_ms}"
        if any(row["fifo"] for row in self.periods):
            starts = [each.smallest.get("pushed", 0) for each in own]
            starts += [each.smallest.get("sequence", 0) for each in own_files]
            near += f" OR last_sequence >= {min(starts)} OR {_WAITED}"
        else:
            others = [e for e in others if e.largest.get("pushed_at_ms", first_ms) > first_ms]
        return self._messages(others).where(near)

    def _describe_stores(self) -> None:
        """Makes the views of what is known of journals, from `balances` and `queue_events`."""
        self._view("balances", table_of(self.lake, BALANCES).frame(self.spark))
        with step(self.spark, "journals"):
            for name in ("stores", "replaced_terms"):
                frame = self.spark.sql(load_query(f"audit/{name}"))
                rows = view_locally(self.spark, name, frame).to_pylist()
                if name == "stores":
                    self.events = sum(row["events"] for row in rows)
                    self.whole = {row["store"] for row in rows if row["first_entry"] == 1}
                    self.has_gaps = any(
                        row["first_entry"] is not None
                        and row["entries"] <= row["last_entry"] - row["first_entry"]
                        for row in rows
                    )
                else:
                    self.has_replaced = any(row["is_used"] for row in rows)

    def _find_in_stores(self, engine: Mapping[str, int]) -> list[CheckFinding]:
        """Findings about whole journals; a pass over all events is made if a count shows one."""
        counted = local_frame(self.spark, list(engine.items()), "name string, counted bigint")
        self._view("engine", counted)
        names = ["balance_findings"]
        names += ["term_findings"] * self.has_replaced + ["gap_findings"] * self.has_gaps
        if len(names) > 1:
            self._view_all_events()
        found: list[CheckFinding] = []
        with step(self.spark, "journals"):
            for name in names:
                query = f"SELECT {_FOUND} FROM ({load_query(f'audit/{name}')})"
                found += [CheckFinding(*row) for row in self.spark.sql(query).collect()]
        return found

    def _view_all_events(self) -> None:
        """All events, for the passes that are seldom needed; of those dropped, what is kept."""
        self._view("events", events_table(self.lake).frame(self.spark))
        dropped = table_of(self.lake, MESSAGES).frame(self.spark).where("dropped")
        self._view("dropped", dropped)
        irregular = table_of(self.lake, IRREGULAR_EVENTS).frame(self.spark)
        self._view("all_irregular_events", irregular)
        self._view("all_events", self.spark.sql(load_query("audit/all_events")))

    def findings(self, engine: Mapping[str, int]) -> list[CheckFinding]:
        """Every finding of the lake, old and new."""
        table = table_of(self.lake, FINDINGS)
        files = [each for each in table.files() if not engine or each.part != STORES]
        rows = table.frame(self.spark, files=files).select(*_FOUND.split(", ")).collect()
        found = [CheckFinding(*row) for row in rows]
        if engine:
            found += self._find_in_stores(engine)
        # In a journal that has lost its beginning, every push may have been there.
        return [each for each in found if each.check != "pushed first" or each.store in self.whole]

    def shown(self, found: Sequence[CheckFinding], shown_max: int) -> tuple[AuditFinding, ...]:
        """The first findings of each check, with the events of their messages."""
        order = {check: at for at, check in enumerate(CHECKS)}
        chosen: list[CheckFinding] = []
        taken = dict.fromkeys(CHECKS, 0)
        for each in sorted(found, key=lambda each: (order[each.check], each.store, each.sequence)):
            taken[each.check] += 1
            if taken[each.check] <= shown_max:
                chosen.append(each)
        lives = self._lives(
            {(each.store, each.shard, each.message) for each in chosen if each.message is not None}
        )
        if not chosen:
            return ()
        queues = table_of(self.lake, QUEUES).frame(self.spark)
        rows = queues.select("store", "shard", "queue_number", "queue").collect()
        names = {tuple(row[:3]): row[3] for row in rows}
        shown = []
        for each in chosen:
            message_id: str | None = None
            events: tuple[str, ...] = ()
            if each.message is not None:
                message_id, events = lives[each.store, each.shard, each.message]
            queue = names.get((each.store, each.shard, each.queue))
            entry = each.sequence >> INDEX_BITS
            finding = AuditFinding(
                each.check, each.store, entry, message_id, queue, each.detail, events
            )
            shown.append(finding)
        return tuple(shown)

    def _lives(self, about: set[_Key]) -> dict[_Key, tuple[str, tuple[str, ...]]]:
        """The id of each of these messages, and its events in words."""
        if not about:
            return {}
        journals = {store: journal for journal, store in self.stores.items()}
        keys = {journals[key[:2]] << MESSAGE_BITS | key[2]: key for key in about}
        wanted = f"key IN ({', '.join(map(str, keys))})"
        files = [
            each
            for each in events_table(self.lake).files()
            if any(
                each.smallest.get("key", key) <= key <= each.largest.get("key", key) for key in keys
            )
        ]
        events = events_table(self.lake).frame(self.spark, files=files)
        lines: dict[_Key, list[str]] = {}
        for row in events.where(wanted).drop("body", "extra").orderBy("sequence").collect():
            lines.setdefault(keys[row.key], []).append(_event_line(row.asDict()))
        if count_dropped(self.lake):
            messages = table_of(self.lake, MESSAGES).frame(self.spark)
            for row in messages.where(f"dropped AND {wanted}").select("key").collect():
                text = "earlier events were dropped by compact --keep"
                lines.setdefault(keys[row.key], []).insert(0, text)
        return {
            key: (MessageIds(bytes.fromhex(key[0])).show(key[2]), tuple(lines.get(key, ())))
            for key in about
        }


def _event_line(row: dict[str, Any]) -> str:
    """One event of a message, in a line."""
    words = [f"{row['entry']}.{row['index']}", f"{row['at_ms']} ms", row["kind"]]
    labels: Sequence[tuple[str, str]] = (
        ("epoch", "claim"), ("deadline_ms", "until"), ("visible_at_ms", "visible at"),
        ("holder", "by"), ("to_queue", "to queue"), ("name", "to queue"), ("rank", "rank"),
        ("group", "group"), ("dedup_id", "dedup id"),
    )  # fmt: skip
    return " ".join([*words, *(f"{label} {row[n]}" for n, label in labels if row[n] is not None)])
