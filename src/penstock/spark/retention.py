"""Retention: drops the events of messages that ended long ago, and keeps what follows from them.

A message's events are dropped when it ended before a given instant, the tables hold it, and the
audit has judged it and found nothing about it. Its rows in the tables stay as they are: that of
`messages` says `dropped`, and from then on events of it up to its last are left out wherever events
are read, and its rows are kept when its part is made again. What is lost is its body, its
attributes, and the text of each of its events. Events of queues are never dropped.

    messages ─▶ rows with `dropped`, in place of those of their parts, in one commit
    events ─▶ written again without those of dropped messages, in one commit

Killed between the two, the events are still there and are left out; the next retention drops them.
"""

from dataclasses import dataclass

from penstock.spark.audit import audit, is_judged
from penstock.spark.bronze import events_table
from penstock.spark.lake import Lake, LakeBusy, locked, our_errors
from penstock.spark.progress import step
from penstock.spark.queries import query_session
from penstock.spark.session import OpenSpark
from penstock.spark.tables import FINDINGS, MESSAGES
from penstock.spark.update import DROPPED, count_dropped, is_up_to_date, table_of

# The application transaction of `events` that says how many messages have none there.
_DONE = "dropped"
_CHOSEN = """
    SELECT messages.key FROM messages LEFT ANTI JOIN findings
      ON findings.store = messages.store AND findings.shard = messages.shard
      AND findings.message = messages.message
    WHERE NOT dropped AND standing IS NULL AND state <> 'departed' AND ended_at_ms < {before_ms}
"""


@dataclass(frozen=True)
class Dropped:
    """What a retention removed: events, of how many messages."""

    messages: int = 0
    events: int = 0


def drop_before(open_spark: OpenSpark, lake: Lake, before_ms: int) -> Dropped:
    """Drops the events of messages that ended before this instant.

    Updates the tables and audits what changed first. Raises LakeUnusable, or LakeBusy if
    another process is changing the lake.
    """
    with our_errors():
        audit(open_spark, lake)
        # An audit in between would find messages without events.
        with locked(lake, "events"), locked(lake, "tables"), locked(lake, "verdicts"):
            if events_table(lake).delta() is None:
                return Dropped()
            if not is_up_to_date(lake) or not is_judged(lake):
                raise LakeBusy(f"{lake.path}: has new events since its audit; repeat the command")
            done = _Retention(open_spark, lake).drop(before_ms)
        # The version of `events` has changed: the tables are marked as made from it.
        audit(open_spark, lake)
    return done


class _Retention:
    def __init__(self, open_spark: OpenSpark, lake: Lake) -> None:
        self._spark = query_session(open_spark())
        self._lake = lake

    def drop(self, before_ms: int) -> Dropped:
        messages = self._mark(before_ms)
        return Dropped(messages, self._drop_events() if count_dropped(self._lake) else 0)

    def _mark(self, before_ms: int) -> int:
        """Marks the messages whose events can be dropped; how many."""
        spark, lake, table = self._spark, self._lake, table_of(self._lake, MESSAGES)
        for each in (MESSAGES, FINDINGS):
            table_of(lake, each).frame(spark).createOrReplaceTempView(each.name)
        with step(spark, "choosing messages"):
            spark.sql(_CHOSEN.format(before_ms=before_ms)).createOrReplaceTempView("chosen")
            rows = spark.sql("""
                SELECT part, count(*) AS messages FROM messages LEFT SEMI JOIN chosen USING (key)
                WHERE NOT dropped GROUP BY part""").collect()
            if not rows:
                return 0
            parts = [row.part for row in rows]
            files = [each for each in table.files() if each.part in set(parts)]
            columns = ", ".join(
                "old.dropped OR chosen.key IS NOT NULL AS dropped"
                if name == "dropped"
                else f"old.`{name}`"
                for name in (*MESSAGES.columns, "part")
            )
            table.frame(spark, files=files).createOrReplaceTempView("old")
            marked = spark.sql(f"""
                SELECT {columns} FROM old LEFT JOIN chosen ON chosen.key = old.key""")
            added = table.stage(marked.repartition(min(len(parts), 64), "part"))
        count = sum(int(row.messages) for row in rows)
        table.replace(added, {DROPPED: count_dropped(lake) + count}, parts)
        return count

    def _drop_events(self) -> int:
        """Writes `events` again without those of dropped messages; how many these were."""
        spark, table = self._spark, events_table(self._lake)
        if table.committed(_DONE) == count_dropped(self._lake):
            return 0
        before = table.rows()
        table.frame(spark).createOrReplaceTempView("events")
        messages = table_of(self._lake, MESSAGES).frame(spark)
        messages.where("dropped").createOrReplaceTempView("dropped")
        with step(spark, "dropping events"):
            kept = spark.sql("""
                SELECT events.* FROM events LEFT ANTI JOIN dropped
                ON dropped.key = events.key AND events.sequence <= dropped.last_sequence""")
            added = table.stage(kept)
            table.replace(added, {_DONE: count_dropped(self._lake)})
        return before - table.rows()
