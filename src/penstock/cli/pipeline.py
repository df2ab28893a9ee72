"""`penstock pipeline run|status|audit|compact`: the events of journals as tables, and their audit.

One module an action would hide that they share everything: the journals, the lake, the session.
"""

import dataclasses
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.cli.list import every_name
from penstock.cli.session import Session, UsageError
from penstock.cli.show import table
from penstock.cli.values import read_count, read_duration, read_size, show_duration, show_size
from penstock.spark.session import make_session, require_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.audit import Verdict
    from penstock.spark.ingest import Lag
    from penstock.spark.lake import Lake

_PROBLEM: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_ = actions.add_parser("run", help="bring journals into the lake and make its tables")
    status = actions.add_parser("status", help="show how far the lake is behind the journals")
    audit = actions.add_parser("audit", help="check every message's life; status 1 if one is wrong")
    compact = actions.add_parser("compact", help="join small files, remove files nobody needs")
    for each in (run_, status, audit):
        _add_journals(each, required=each is not audit)
    for each in (run_, status, audit, compact):
        each.add_argument(
            "--lake", metavar="DIR", required=each is not audit, help="the lake's directory"
        )
        each.add_argument("--json", action="store_true", default=SUPPRESS, help=SUPPRESS)
    for each in (run_, audit):
        _add_spark(each)
    run_.add_argument("--watch", action="store_true", help="go on as the journals grow")
    run_.add_argument(
        "--every",
        metavar="DURATION",
        type=read_duration,
        default=30.0,
        help="with --watch (default: 30s)",
    )
    run_.add_argument(
        "--batch",
        metavar="SIZE",
        type=read_size,
        default=256 << 20,
        help="how much of a journal one commit takes (default: 256MiB)",
    )
    audit.add_argument("--url", metavar="URL", default=SUPPRESS, help="count against this engine")
    audit.add_argument(
        "--shown", metavar="N", type=read_count, default=20, help="findings per check"
    )
    compact.add_argument(
        "--keep-hours", metavar="N", type=int, default=168, help="keep old versions (default: 168)"
    )


def _add_journals(parser: ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--journal",
        metavar="DIR",
        action="append",
        required=required,
        default=None if required else [],
        help="a store, or a directory of segment files; may be given again",
    )
    parser.add_argument("--archive", metavar="DIR", help="where the journal's dropped files went")


def _add_spark(parser: ArgumentParser) -> None:
    parser.add_argument("--master", metavar="URL", help="a Spark master (default: local[*])")
    parser.add_argument("--remote", metavar="URL", help="a Spark Connect server, sc://HOST:PORT")
    parser.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], help="a Spark setting"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Does the action. Raises UsageError and whatever the lake and the journals raise."""
    require_packages()
    if getattr(arguments, "archive", None) and len(arguments.journal) != 1:
        raise UsageError("--archive belongs to one journal: give --journal once")
    actions: dict[str, Callable[[Session, Namespace], int]] = {
        "run": _run,
        "status": _status,
        "audit": _audit,
        "compact": _compact,
    }
    return actions[arguments.action](session, arguments)


def _spark(arguments: Namespace) -> "SparkSession":
    settings = dict(each.partition("=")[::2] for each in arguments.conf)
    if not all(settings):
        raise UsageError("--conf: give it as KEY=VALUE")
    return make_session(master=arguments.master, remote=arguments.remote, conf=settings)


def _run(session: Session, arguments: Namespace) -> int:
    from penstock.spark.ingest import lag
    from penstock.spark.lake import Lake
    from penstock.spark.stream import Stream

    # Everything that can be refused is, before Spark takes its seconds or a lake is made.
    for journal in arguments.journal:
        Stream(journal, arguments.archive).close()
    lake = Lake.open(arguments.lake, create=True)
    spark = _spark(arguments)
    while True:
        _bring_level(spark, lake, arguments)
        for journal in arguments.journal:
            _tell_lag(session, arguments, lag(lake, journal, arguments.archive))
        if not arguments.watch:
            return 0
        time.sleep(arguments.every)


def _bring_level(spark: "SparkSession", lake: "Lake", arguments: Namespace) -> None:
    from penstock.spark.ingest import ingest
    from penstock.spark.tables import TABLES, derive

    for journal in arguments.journal:
        bar = _Bar(f"reading {journal}")
        ingest(
            spark, lake, journal, arguments.archive, batch_bytes=arguments.batch, progress=bar.read
        )
        bar.end()
    bar = _Bar("tables")
    made = [0]

    def tell(name: str) -> None:
        made[0] += 1
        bar.show(made[0] / len(TABLES), name)

    derive(spark, lake, tell)
    bar.end()


class _Bar:
    """One line on stderr that says how far, how fast and how long yet; nothing if nobody looks."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start_s = time.monotonic()
        self._behind: int | None = None
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def read(self, lag: "Lag") -> None:
        """Shows how far a journal is read."""
        all_bytes = max(1, lag.durable_offset - lag.first_offset)
        done = all_bytes - lag.behind_bytes
        if self._behind is None:
            self._behind = lag.behind_bytes
        elapsed_s = max(0.001, time.monotonic() - self._start_s)
        rate = max(0, self._behind - lag.behind_bytes) / elapsed_s
        left = f", {show_duration(round(1_000 * lag.behind_bytes / rate))} left" if rate else ""
        self.show(done / all_bytes, f"{show_size(round(rate))}/s{left}")

    def show(self, part: float, text: str) -> None:
        """Shows a part of the whole."""
        if self._shown:
            filled = "━" * round(20 * part)
            sys.stderr.write(f"\r\x1b[K{self._label} {filled:·<20} {part:4.0%} {text}")
            sys.stderr.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")


def _tell_lag(session: Session, arguments: Namespace, lag: "Lag") -> None:
    session.tell(
        arguments,
        {
            "journal": lag.path,
            "store": lag.store,
            "durable_offset": lag.durable_offset,
            "read_offset": lag.read_offset,
            "behind_bytes": lag.behind_bytes,
        },
        f"{lag.path}: {show_size(lag.behind_bytes)} behind, at offset {lag.read_offset:,} "
        f"of {lag.durable_offset:,}",
    )


def _status(session: Session, arguments: Namespace) -> int:
    from penstock.spark.ingest import events_table, lag
    from penstock.spark.lake import Lake
    from penstock.spark.tables import TABLES

    lake = Lake.open(arguments.lake)
    for journal in arguments.journal:
        _tell_lag(session, arguments, lag(lake, journal, arguments.archive))
    events = events_table(lake)
    delta = events.delta()
    newest = None if delta is None else delta.version()
    rows = [("events", f"{events.rows():,}", "-" if newest is None else "current")]
    for each in TABLES:
        made = lake.table(each.name, each.schema)
        current = made.committed("events") == newest and newest is not None
        rows.append((each.name, f"{made.rows():,}", "current" if current else "behind"))
    if not arguments.json:
        print(table(("table", "rows", "state"), rows))
    else:
        for name, count, state in rows:
            session.tell_json({"table": name, "rows": int(count.replace(",", "")), "state": state})
    return 0


def _audit(session: Session, arguments: Namespace) -> int:
    from penstock.spark.audit import SCHEMA, audit
    from penstock.spark.ingest import events_table
    from penstock.spark.lake import Lake, our_errors
    from penstock.spark.stream import Stream

    if bool(arguments.lake) == bool(arguments.journal):
        raise UsageError("audit: give --lake, or --journal to audit a journal by itself")
    if len(arguments.journal) > 1:
        raise UsageError("audit: give one --journal, or bring several into a lake")
    if arguments.lake:
        lake = Lake.open(arguments.lake)
        spark = _spark(arguments)
        events = events_table(lake).frame(spark)
    else:
        Stream(arguments.journal[0], arguments.archive).close()
        spark = _spark(arguments)
        source = spark.read.format("penstock").schema(SCHEMA)
        if arguments.archive:
            source = source.option("archive", arguments.archive)
        with our_errors():
            events = source.load(arguments.journal[0])
    engine = None
    if getattr(arguments, "url", None):
        queues = session.queues(arguments)
        engine = {name: queues.stats(name).messages for name in every_name(queues)}
    verdict = audit(spark, events, engine, arguments.shown)
    _tell_verdict(session, arguments, verdict)
    return 0 if verdict.holds else _PROBLEM


def _tell_verdict(session: Session, arguments: Namespace, verdict: "Verdict") -> None:
    from penstock.spark.audit import CHECKS

    if arguments.json:
        session.tell_json(
            {"events": verdict.events, "holds": verdict.holds, "counts": verdict.counts}
        )
        for finding in verdict.findings:
            session.tell_json({"finding": dataclasses.asdict(finding)})
        return
    rows = [
        ("ok" if not verdict.counts[name] else "FAILED", name, f"{verdict.counts[name]:,}", what)
        for name, what in CHECKS.items()
    ]
    print(table(("", "check", "findings", "what must hold"), rows, left=4))
    for finding in verdict.findings:
        about = finding.message_id or finding.queue or finding.store
        print(f"\n{finding.check}: {about}, entry {finding.entry}: {finding.detail}")
        for line in finding.events:
            print(f"    {line}")
    if verdict.counts.get("no gaps"):
        print("\nEntries are missing: other findings may follow from that alone.")
    word = "every check holds" if verdict.holds else "something is wrong"
    print(f"\n{verdict.events:,} events: {word}")


def _compact(session: Session, arguments: Namespace) -> int:
    from penstock.spark.ingest import events_table
    from penstock.spark.lake import Lake
    from penstock.spark.tables import TABLES

    lake = Lake.open(arguments.lake)
    tables = [events_table(lake), *(lake.table(each.name, each.schema) for each in TABLES)]
    for each in tables:
        done = each.compact(arguments.keep_hours)
        name = each.path.name
        session.tell(
            arguments,
            {"table": name, **done},
            f"{name}: {done['joined']} files joined, {done['removed']} removed",
        )
    return 0
