"""The report: the tables of a lake on one HTML page that needs nothing but a browser.

Spark reduces the tables to a bounded number of points, rows and cells; the page holds them as JSON
and draws itself with its own script. Names and ids come from outside. They reach the page only
inside that JSON, in which nothing can end a script, and the script writes them only as text. The
page's content security policy allows no other script and no request.

The page also names the versions of the tables it was made from: while a lake has no others, its
page is current, which Delta's log alone can say.
"""

import base64
import hashlib
import html
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

import penstock
from penstock import drawing
from penstock.files import open_in
from penstock.service import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from penstock.spark.audit import Verdict, audit, is_judged
from penstock.spark.blocks import KIND_NAMES
from penstock.spark.bronze import events_table
from penstock.spark.checks import CHECKS
from penstock.spark.lake import Lake, LakeUnusable, our_errors
from penstock.spark.progress import WaitStep, step
from penstock.spark.tables import FINDINGS, MESSAGES, QUEUE_EVENTS, TABLES
from penstock.spark.update import is_current, is_up_to_date, table_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POINTS_MAX: Final = 240
CELLS_MAX: Final = 96
LINES_MAX: Final = 6
ROWS_MAX: Final = 12
QUEUES_MAX: Final = 200
FINDINGS_MAX: Final = 5
BINS_PER_DECADE: Final = 6
MEASURES: Final = ("wait", "hold", "end to end")
_OTHERS: Final = ""
_PAGE: Final = Path(__file__).with_name("page")
# What a page says of itself is before its style.
_HEAD_BYTES: Final = 16 << 10
_SUMMARY: Final = re.compile(rb'<meta name="penstock-report" content="([^"]*)">')
_STEPS_MS: Final = (
    *(n * SECOND_MS for n in (1, 2, 5, 10, 15, 30)),
    *(n * MINUTE_MS for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR_MS for n in (1, 2, 3, 6, 12)),
)

# Each period of time that a message spent in one queue. Few messages ever move, and only theirs
# are put in order; a life with a move is not regular, so its events are in `irregular_events`.
_MOVED: Final = KIND_NAMES.index("Moved")
_STAYS: Final = f"""
    WITH moved AS (
      SELECT key, to_queue AS queue_number, at_ms, sequence
      FROM {{irregular_events}} WHERE code = {_MOVED}
      UNION ALL
      SELECT key, queue_number, pushed_at_ms, -1 FROM {{messages}} WHERE moves > 0
    ), stays AS (
      SELECT *, lead(at_ms) OVER (PARTITION BY key ORDER BY sequence) AS left_ms FROM moved
    )
    SELECT store, queue, pushed_at_ms, pushed_at_ms AS from_ms, ended_at_ms AS until_ms
    FROM {{messages}} WHERE moves = 0
    UNION ALL
    SELECT messages.store, queues.queue, pushed_at_ms, at_ms, coalesce(left_ms, ended_at_ms)
    FROM stays
    JOIN {{messages}} AS messages USING (key)
    JOIN {{queues}} AS queues ON queues.store = messages.store AND queues.shard = messages.shard
      AND queues.queue_number = stays.queue_number
"""
# Each message that was ever dead-lettered, once, by the last time it was.
_LAST_DEAD: Final = """(
      SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY message, shard, store ORDER BY at_ms DESC) AS nth
        FROM {dead_letters})
      WHERE nth = 1)"""


class ReportSummary(msgspec.Struct, frozen=True):
    """What a page says of itself in its head: what it was made from, and its verdict in short."""

    versions: str
    events: int
    failed: list[str]


def make_report(spark: "SparkSession", lake: Lake) -> tuple[str, ReportSummary]:
    """The page, and what it says of itself. Raises LakeUnusable."""
    with our_errors():
        with step(spark, "audit"):
            verdict = audit(lambda: spark, lake, shown_max=FINDINGS_MAX)
        # Before the tables are read: a page of newer ones is only made again once too often.
        versions = _versions(lake, verdict.version)
        failed = [name for name, count in verdict.counts.items() if count]
        summary = ReportSummary(versions, verdict.events, failed)
        with step(spark, "report") as made:
            tables = _Tables.of(spark, lake)
            return render(tables.figures(verdict, made), summary), summary


def read_current(lake: Lake, page: Path) -> ReportSummary | None:
    """What a page says of itself, if a report of the lake would be the same; needs no Spark."""
    try:
        with os.fdopen(open_in(page.parent, page.name), "rb") as file:
            found = _SUMMARY.search(file.read(_HEAD_BYTES))
        said = None if found is None else html.unescape(found[1].decode())
        summary = None if said is None else msgspec.json.decode(said, type=ReportSummary)
    except (OSError, ValueError):
        return None
    if summary is None or not summary.versions:
        return None
    with our_errors():
        return summary if summary.versions == _versions(lake) else None


def _versions(lake: Lake, judged: int | None = None) -> str:
    """All that a page follows from, in short; empty if a report would make or judge something.

    With `judged`, also if that is not the version of `messages` that the lake has now.
    """
    if not (is_up_to_date(lake) and is_judged(lake)):
        return ""
    tables = [table_of(lake, each).delta() for each in (QUEUE_EVENTS, *TABLES, FINDINGS)]
    found = {str(delta.metadata().id): delta.version() for delta in tables if delta is not None}
    messages = table_of(lake, MESSAGES).delta()
    if messages is None or judged not in (None, messages.version()):
        return ""
    named = repr((penstock.__version__, lake.id, lake.path.resolve().name, found))
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def warm_up(spark: "SparkSession", lake: Lake, ended: threading.Event) -> None:
    """Runs the queries of a report: Java compiles, and Spark keeps, what the next ones use."""
    with our_errors():
        tables = _Tables.of(spark, lake)
        for section in tables.sections().values():
            if ended.is_set():
                return
            section()


def render(figures: dict[str, Any], summary: ReportSummary | None = None) -> str:
    """The page of these figures."""
    style = drawing.joined_style(_page("report.css"))
    script = drawing.joined_script(_page("report.js"))
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "summary": html.escape("" if summary is None else msgspec.json.encode(summary).decode()),
        "title": html.escape(f"Penstock: {figures['lake']}"),
        "style": style,
        "script": script,
        # Without a `<` there is neither an end of the script nor a comment that could hide it.
        "data": json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    }
    # One pass: values that were put in are not expanded again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _page("report.html"))


def _page(name: str) -> str:
    return (_PAGE / name).read_text()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def step_ms(span_ms: int, most: int, least_ms: int = SECOND_MS) -> int:
    """The shortest round step of which at most `most` cover the span."""
    for each in _STEPS_MS:
        if each >= least_ms and span_ms < (most - 1) * each:
            return each
    return DAY_MS * (span_ms // ((most - 1) * DAY_MS) + 1)


@dataclass(frozen=True)
class _Time:
    """The instants of an axis: `points` steps, the last of which may be cut short."""

    first_ms: int
    to_ms: int
    step_ms: int

    @classmethod
    def of(cls, first_ms: int, to_ms: int, most: int, least_ms: int = SECOND_MS) -> "_Time":
        return cls(first_ms, to_ms, step_ms(to_ms - first_ms, most, least_ms))

    @property
    def from_ms(self) -> int:
        return self.first_ms // self.step_ms * self.step_ms

    @property
    def points(self) -> int:
        return (self.to_ms - self.from_ms) // self.step_ms + 1

    def at(self, instant: str) -> str:
        """The SQL of the step in which an instant lies; those before the first lie in it."""
        # Not `greatest`, which ignores null and would give 0.
        step = f"int(({instant} - {self.from_ms}) div {self.step_ms})"
        return f"CASE WHEN {instant} < {self.from_ms} THEN 0 ELSE {step} END"

    def ends_ms(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        ends = self.from_ms + (np.arange(self.points, dtype=np.int64) + 1) * self.step_ms
        return np.minimum(ends, self.to_ms)


@dataclass(frozen=True)
class _Tables:
    """The lake's tables at one moment, and the figures that the page shows of them."""

    spark: "SparkSession"
    lake: Lake
    frames: "dict[str, DataFrame]"
    behind: list[str]
    stores: int
    events: int
    first_ms: int
    to_ms: int

    @classmethod
    def of(cls, spark: "SparkSession", lake: Lake) -> "_Tables":
        events = events_table(lake)
        seen = events.delta()
        frames = {QUEUE_EVENTS.name: table_of(lake, QUEUE_EVENTS).frame(spark)}
        behind = []
        for each in TABLES:
            table = table_of(lake, each)
            if seen is not None and table.delta() is None:
                raise LakeUnusable(
                    f"{lake.path}: has no table {each.name} yet; `pipeline run` makes it"
                )
            if seen is not None and not is_current(table, seen):
                behind.append(each.name)
            frames[each.name] = table.frame(spark)
        named: Any = {
            name: frames[name] for name in ("queue_events", "messages", "irregular_events")
        }
        # Not from `events`, of which some may be dropped.
        found = spark.sql(
            """
            SELECT count(DISTINCT store) AS stores, coalesce(sum(events), 0) AS events,
              min(first_ms) AS first_ms, max(to_ms) AS to_ms
            FROM (
              SELECT store, count(*) AS events, min(at_ms) AS first_ms, max(at_ms) AS to_ms
              FROM {queue_events} WHERE kind <> 'Damaged' GROUP BY store
              UNION ALL
              SELECT store, sum(events), min(pushed_at_ms),
                max(greatest(pushed_at_ms, last_pulled_at_ms, ended_at_ms))
              FROM {messages} GROUP BY store
              UNION ALL
              SELECT NULL, 0, min(at_ms), max(at_ms) FROM {irregular_events})
            """,
            **named,
        ).collect()[0]
        first_ms, to_ms = found["first_ms"] or 0, found["to_ms"] or 0
        return cls(spark, lake, frames, behind, found["stores"], found["events"], first_ms, to_ms)

    def rows(self, query: str, **more: "DataFrame") -> list[dict[str, Any]]:
        """The rows of a query over the tables; `label` is the name of a queue on the page."""
        label = "coalesce(queue, '?')"
        if self.stores > 1:
            label = f"concat(substr(store, 1, 8), '/', {label})"
        named: dict[str, Any] = {
            name: frame.selectExpr("*", f"{label} AS label") if "queue" in frame.columns else frame
            for name, frame in (self.frames | more).items()
            if f"{{{name}}}" in query
        }
        return [row.asDict() for row in self.spark.sql(query, **named).collect()]

    @property
    def _axis(self) -> _Time:
        return _Time.of(self.first_ms, self.to_ms, POINTS_MAX)

    def sections(self) -> dict[str, Callable[[], Any]]:
        """What makes each section of the page, by its name."""
        return {
            "figures": self._figures,
            "depth": lambda: self._depth(self._axis),
            "latency": self._latency,
            "redelivery": self._redelivery,
            "dead_letters": self._dead_letters,
            "hot_queues": self._hot_queues,
            "hot_groups": self._hot_groups,
            "queues": self._queues,
        }

    def figures(self, verdict: Verdict, progress: WaitStep) -> dict[str, Any]:
        """Everything on the page."""
        axis = self._axis
        sections = self.sections()
        made = {}
        for number, (name, section) in enumerate(sections.items()):
            progress.reached(number, len(sections))
            made[name] = section()
        return {
            "lake": self.lake.path.resolve().name,
            "version": penstock.__version__,
            "made_at_ms": time.time_ns() // 1_000_000,
            "events": self.events,
            "dropped": verdict.dropped,
            "behind": self.behind,
            "time": asdict(axis) | {"from_ms": axis.from_ms, "points": axis.points},
            "audit": {
                "holds": verdict.holds,
                "events": verdict.events,
                "checks": [
                    {"name": name, "what": what, "findings": verdict.counts[name]}
                    for name, what in CHECKS.items()
                ],
                "findings": [asdict(each) for each in verdict.findings],
            },
            **made,
        }

    def _figures(self) -> dict[str, int]:
        return self.rows("""
            SELECT count(pushed_at_ms) AS pushed, coalesce(sum(body_bytes), 0) AS body_bytes,
              count_if(state = 'deleted') AS deleted, count(standing) AS live,
              count_if(standing = 'in_flight') AS in_flight, count_if(claims > 0) AS pulled,
              count_if(claims > 1) AS redelivered, count_if(dead_letters > 0) AS dead_letters,
              count_if(state = 'dead') AS dead, count_if(state = 'expired') AS expired,
              count_if(state = 'purged') AS purged, count_if(state = 'removed') AS removed,
              count_if(state = 'lost') AS lost
            FROM {messages}""")[0]

    def _depth(self, axis: _Time) -> list[dict[str, Any]]:
        """Depth and age of the deepest queues at the end of each step, and of all the others."""
        deepest = self.rows("""
            SELECT label, max(messages) AS messages FROM {depth} GROUP BY label
            ORDER BY messages DESC, label""")
        names = [row["label"] for row in deepest]
        drawn = names if len(names) <= LINES_MAX + 1 else names[:LINES_MAX]
        chosen = self.spark.createDataFrame([(name,) for name in drawn], "chosen string")
        inputs: dict[str, Any] = {
            name: self.frames[name] for name in ("irregular_events", "messages", "queues")
        }
        stays = self.spark.sql(_STAYS, **inputs)
        grouped = self.rows(
            f"""
            WITH spans AS (
              SELECT label, pushed_at_ms, coalesce({axis.at("from_ms")}, 0) AS came,
                coalesce({axis.at("until_ms")}, {axis.points}) AS went
              FROM {{stays}}
            )
            SELECT coalesce(chosen, '{_OTHERS}') AS name, came, went, count(*) AS messages,
              min(pushed_at_ms) AS oldest_ms
            FROM spans LEFT JOIN {{chosen}} ON label = chosen
            WHERE went > came GROUP BY ALL""",
            stays=stays,
            chosen=chosen,
        )
        lines = {name: _ChartLine(axis) for name in [*drawn, _OTHERS]}
        for row in grouped:
            lines[row["name"]].add(row)
        series: list[dict[str, Any]] = [
            {"queue": name, "others": 0, **lines[name].as_lists()} for name in drawn
        ]
        if len(names) > len(drawn):
            others = len(names) - len(drawn)
            series.append({"queue": None, "others": others, **lines[_OTHERS].as_lists()})
        return series

    def _latency(self) -> dict[str, Any]:
        bins = self.rows(f"""
            WITH samples AS (
              SELECT 'wait' AS measure, wait_ms AS took_ms FROM {{messages}}
              UNION ALL
              SELECT 'end to end', age_ms FROM {{messages}} WHERE state = 'deleted'
              UNION ALL
              SELECT 'hold', hold_ms FROM {{attempts}}
            )
            SELECT measure, int(floor({BINS_PER_DECADE} * log10(greatest(took_ms, 1)))) AS bin,
              count(*) AS samples
            FROM samples WHERE took_ms IS NOT NULL GROUP BY measure, bin ORDER BY measure, bin""")
        queues = self.rows(f"""
            SELECT * FROM (
              SELECT label AS queue, measure, samples, p50_ms, p90_ms, p99_ms, p999_ms, max_ms,
                count(*) OVER (PARTITION BY measure) AS all,
                row_number() OVER (PARTITION BY measure ORDER BY samples DESC, label) AS place
              FROM {{latency}}) WHERE place <= {ROWS_MAX} ORDER BY measure, place""")
        return {
            measure: {
                "bins": [[row["bin"], row["samples"]] for row in bins if row["measure"] == measure],
                "samples": sum(row["samples"] for row in bins if row["measure"] == measure),
                "queues": (shown := [row for row in queues if row["measure"] == measure]),
                "more": shown[0]["all"] - len(shown) if shown else 0,
            }
            for measure in MEASURES
        }

    def _redelivery(self) -> dict[str, Any]:
        often = 5
        claims = self.rows(f"""
            SELECT least(claims, {often}) AS claims, sum(messages) AS messages,
              sum(deleted) AS deleted, sum(dead) AS dead
            FROM {{redeliveries}} GROUP BY least(claims, {often}) ORDER BY claims""")
        for row in claims:
            row["name"] = {1: "once", 2: "twice"}.get(row["claims"], f"{row['claims']} times")
            if row["claims"] == often:
                row["name"] += " or more"
        ended = self.rows("""
            SELECT ended AS name, count(*) AS claims FROM {attempts} WHERE started_at_ms IS NOT NULL
            GROUP BY ended ORDER BY claims DESC, name""")
        queues = self.rows("""
            SELECT label AS queue, sum(timeouts) AS timeouts, sum(releases) AS releases
            FROM {redeliveries} GROUP BY label HAVING timeouts + releases > 0
            ORDER BY timeouts + releases DESC, label""")
        holders = self.rows(f"""
            SELECT coalesce(holder, '') AS holder, count_if(ended = 'timed out') AS timed_out,
              count_if(ended = 'released') AS released
            FROM {{attempts}} GROUP BY holder HAVING timed_out + released > 0
            ORDER BY timed_out + released DESC, holder LIMIT {ROWS_MAX}""")
        more = max(0, len(queues) - ROWS_MAX)
        return {
            "claims": claims,
            "ended": ended,
            "queues": queues[:ROWS_MAX],
            "more": more,
            "holders": holders,
        }

    def _dead_letters(self) -> dict[str, Any]:
        queues = self.rows(f"""
            SELECT label AS queue, count(*) AS messages,
              count_if(timeouts > 0 AND releases = 0) AS timed_out,
              count_if(timeouts = 0 AND releases > 0) AS released,
              count_if((timeouts > 0) = (releases > 0)) AS both
            FROM {_LAST_DEAD} GROUP BY label ORDER BY messages DESC, label""")
        holders = self.rows(f"""
            SELECT last_holder AS holder, count(*) AS messages FROM {_LAST_DEAD}
            GROUP BY last_holder ORDER BY messages DESC, holder LIMIT {ROWS_MAX}""")
        more = max(0, len(queues) - ROWS_MAX)
        return {"queues": queues[:ROWS_MAX], "holders": holders, "more": more}

    def _hot_queues(self) -> dict[str, Any]:
        rows = self.rows("""
            SELECT label AS name, sum(events) AS total FROM {hot_queues} GROUP BY label
            ORDER BY total DESC, name""")
        return self._heat(rows, "label", "unix_millis(minute)", "events", "hot_queues")

    def _hot_groups(self) -> dict[str, Any]:
        name = "concat(label, ' · ', `group`)"
        rows = self.rows(f"""
            SELECT {name} AS name, sum(messages) AS total FROM {{hot_groups}} GROUP BY 1
            ORDER BY total DESC, name LIMIT {ROWS_MAX}""")
        made = self._heat(rows, name, "pushed_at_ms", "1", "messages")
        groups = self.rows("SELECT count(*) AS groups FROM {hot_groups}")[0]["groups"]
        return made | {"more": max(0, groups - len(rows))}

    def _heat(
        self, rows: list[dict[str, Any]], name: str, instant: str, amount: str, table: str
    ) -> dict[str, Any]:
        axis = _Time.of(self.first_ms, self.to_ms, CELLS_MAX, MINUTE_MS)
        shown = rows[:ROWS_MAX]
        chosen = self.spark.createDataFrame([(row["name"],) for row in shown], "chosen string")
        cells = {row["name"]: [0] * axis.points for row in shown}
        found = self.rows(
            f"""
            SELECT chosen, {axis.at(instant)} AS at, sum({amount}) AS amount
            FROM {{{table}}} JOIN {{chosen}} ON chosen = {name}
            WHERE {instant} IS NOT NULL GROUP BY ALL""",
            chosen=chosen,
        )
        for row in found:
            cells[row["chosen"]][min(row["at"], axis.points - 1)] += row["amount"]
        return {
            "from_ms": axis.from_ms,
            "step_ms": axis.step_ms,
            "rows": [row | {"cells": cells[row["name"]]} for row in shown],
            "more": max(0, len(rows) - len(shown)),
        }

    def _queues(self) -> dict[str, Any]:
        rows = self.rows(f"""
            WITH came_back AS (
              SELECT label, sum(timeouts) AS timeouts FROM {{redeliveries}} GROUP BY label
            ), died AS (
              SELECT label, count(*) AS dead_letters FROM {_LAST_DEAD} GROUP BY label
            )
            SELECT status.label AS queue, sum(messages) AS messages, sum(visible) AS visible,
              sum(delayed) AS delayed, sum(in_flight) AS in_flight,
              max(oldest_age_ms) AS oldest_age_ms, sum(stored_bytes) AS stored_bytes,
              sum(pushed) AS pushed, sum(deleted) AS deleted, sum(expired) AS expired,
              coalesce(max(timeouts), 0) AS timeouts,
              coalesce(max(dead_letters), 0) AS dead_letters, max(p99_ms) AS wait_p99_ms
            FROM {{queue_status}} AS status
            LEFT JOIN came_back ON came_back.label = status.label
            LEFT JOIN died ON died.label = status.label
            LEFT JOIN {{latency}} AS waits ON waits.label = status.label AND measure = 'wait'
            GROUP BY status.label ORDER BY pushed DESC, queue LIMIT {QUEUES_MAX}""")
        count = self.rows("SELECT count(DISTINCT label) AS queues FROM {queue_status}")[0]["queues"]
        return {"rows": rows, "more": count - len(rows)}


class _ChartLine:
    """One queue's depth and the push of its oldest message, at the end of each step."""

    def __init__(self, axis: _Time) -> None:
        self._ends_ms = axis.ends_ms()
        self._never = np.iinfo(np.int64).max
        self._messages = np.zeros(axis.points, np.int64)
        self._oldest_ms = np.full(axis.points, self._never)

    def add(self, row: dict[str, Any]) -> None:
        """Adds the messages that came in one step and went in a later one."""
        held = slice(row["came"], row["went"])
        self._messages[held] += row["messages"]
        if row["oldest_ms"] is not None:
            np.minimum(self._oldest_ms[held], row["oldest_ms"], out=self._oldest_ms[held])

    def as_lists(self) -> dict[str, Any]:
        """Depth and age; an empty queue has no age."""
        ages = self._ends_ms - self._oldest_ms
        known = self._oldest_ms != self._never
        return {
            "messages": self._messages.tolist(),
            "age_ms": [
                age if seen else None
                for age, seen in zip(ages.tolist(), known.tolist(), strict=True)
            ],
        }
