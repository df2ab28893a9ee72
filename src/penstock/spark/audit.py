"""The audit: runs the checks of `spark.checks` with Spark and collects their findings."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.checks import CHECKS, SCHEMA, check_all
from penstock.spark.lake import our_errors
from penstock.spark.queries import MESSAGE_ID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN_MAX: Final = 20
# So many rows of a few numbers are sent to every executor rather than sorted with the events.
_SENT_MAX: Final = 4_000_000
# How many tables an audit keeps where there are FIFO queues: progress is measured by it.
_KEPT_TABLES: Final = 11


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

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return not any(self.counts.values())


@dataclass
class _Spark:
    """Spark as a runner; a table is the name of a view, and all go with `close`.

    What is kept lives as long as the view of it.
    """

    session: "SparkSession"
    progress: Callable[[float], None] = lambda part: None
    kept: int = 0
    prefix: str = field(default_factory=lambda: f"audit_{secrets.token_hex(8)}")
    views: list[str] = field(default_factory=list)

    def named(self, frame: "DataFrame") -> str:
        """These rows as a table."""
        self.views.append(f"{self.prefix}_{len(self.views)}")
        frame.createOrReplaceTempView(self.views[-1])
        return self.views[-1]

    def ask(self, query: str, **tables: str) -> str:
        return self.named(self.session.sql(query.format(**tables)))

    def keep(self, table: str, *, small: bool) -> str:
        kept = self._keep(table, small=small)
        self.kept += 1
        self.progress(min(1, self.kept / _KEPT_TABLES))
        return kept

    def _keep(self, table: str, *, small: bool) -> str:
        frame = self.session.table(table)
        if not small:
            # Not `cache`: each query over a cached table plans again how it was made.
            return self.named(frame.localCheckpoint())
        # Spark does not know how few rows these are: without the hint it sorts all events to join.
        # In one partition, what is made of them alone needs no exchange.
        rows = self.session.createDataFrame(frame.collect(), frame.schema)
        return self.named(rows.coalesce(1).hint("broadcast"))

    def send(self, table: str) -> str:
        frame = self.session.table(table)
        return self.named(frame.hint("broadcast")) if frame.count() <= _SENT_MAX else table

    def any(self, table: str, condition: str) -> bool:
        return not self.session.table(table).where(condition).isEmpty()

    def close(self) -> None:
        for view in self.views:
            self.session.catalog.dropTempView(view)


def audit(
    spark: "SparkSession",
    events: "DataFrame",
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
    progress: Callable[[float], None] = lambda part: None,
) -> Verdict:
    """Makes every check over these events; `progress` is given the part that is done.

    `engine` says how many messages each queue holds by the engine's own count, at the end of the
    events; without it, queues are compared only with what their purges and removals counted.
    """
    runner = _Spark(spark, progress)
    with our_errors():
        try:
            events = events.select(*[column.split()[0] for column in SCHEMA.split(", ")])
            counted = _counted(spark, engine)
            found, stores = check_all(runner, runner.named(events), runner.named(counted))
            counts = dict.fromkeys(CHECKS, 0)
            each = spark.table(found).groupBy("check").count()
            counts |= {row["check"]: row["count"] for row in each.collect()}
            findings: tuple[AuditFinding, ...] = ()
            if any(counts.values()):
                # Kept only if there are any, which is rare.
                findings = _shown(spark, events, runner.keep(found, small=False), shown_max)
            total = sum(row["events"] for row in spark.table(stores).collect())
            return Verdict(total, counts, findings)
        finally:
            runner.close()


def _counted(spark: "SparkSession", engine: Mapping[str, int] | None) -> "DataFrame":
    counted: list[tuple[Any, ...]] = list((engine or {}).items())
    return spark.createDataFrame(counted, "name string, counted bigint")


def _shown(
    spark: "SparkSession", events: "DataFrame", found: str, shown_max: int
) -> tuple[AuditFinding, ...]:
    """The first findings of each check, with the events of their messages."""
    first = spark.sql(
        f"""
        SELECT *, if(message IS NULL, NULL, {MESSAGE_ID}) AS message_id FROM (
          SELECT *, row_number() OVER (PARTITION BY check ORDER BY store, sequence) AS nth
          FROM {found}) WHERE nth <= {int(shown_max)}
        """
    ).collect()
    names = {
        (row["store"], row["shard"], row["queue"]): row["name"]
        for row in events.where("kind IN ('QueueCreated', 'QueueStated')").collect()
    }
    lives: dict[tuple[Any, ...], list[str]] = {}
    about = sorted(
        {(row["store"], row["shard"], row["message"]) for row in first if row["message"]}
    )
    if about:
        keys = spark.createDataFrame(about, "store string, shard int, message bigint")
        for row in events.join(keys, ["store", "shard", "message"]).orderBy("sequence").collect():
            key = row["store"], row["shard"], row["message"]
            lives.setdefault(key, []).append(_event_line(row))
    order = list(CHECKS)
    return tuple(
        AuditFinding(
            row["check"],
            row["store"],
            row["entry"],
            row["message_id"],
            names.get((row["store"], row["shard"], row["queue"])),
            row["detail"],
            tuple(lives.get((row["store"], row["shard"], row["message"]), ())),
        )
        for row in sorted(first, key=lambda row: (order.index(row["check"]), row["nth"]))
    )


def _event_line(row: Any) -> str:
    """One event of a message, in a line."""
    words = [f"{row['entry']}.{row['index']}", f"{row['at_ms']} ms", row["kind"]]
    labels: Sequence[tuple[str, str]] = (
        ("epoch", "claim"), ("deadline_ms", "until"), ("visible_at_ms", "visible at"),
        ("holder", "by"), ("to_queue", "to queue"), ("rank", "rank"), ("group", "group"),
        ("dedup_id", "dedup id"),
    )  # fmt: skip
    return " ".join([*words, *(f"{label} {row[n]}" for n, label in labels if row[n] is not None)])
