"""`penstock pipeline run`: ingest journals into the lake and derive its tables."""

import threading
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.cli.lake.audit import print_verdict
from penstock.cli.lake.options import (
    add_journals,
    add_lake,
    add_spark,
    check_archive,
    show_progress,
    spark_opener,
)
from penstock.cli.lake.report import check_writable, write_report
from penstock.cli.lake.status import print_lag
from penstock.cli.lake.watch import (
    Watch,
    WatchStopped,
    add_watching,
    check_watching,
    share_freed_memory,
)
from penstock.cli.session import Session, UsageError
from penstock.cli.values import read_size, within
from penstock.output import print_text, report
from penstock.spark.progress import WaitStep, step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.bronze import Lag
    from penstock.spark.lake import Lake
    from penstock.spark.session import OpenSpark


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_journals(parser)
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--rebuild", action="store_true", help="make every table again from the lake's events"
    )
    add_watching(parser)
    parser.add_argument(
        "--batch",
        metavar="SIZE",
        type=within(read_size, "1KiB", "1024GiB"),
        default=256 << 20,
        help="how much of a journal is in one commit (default: 256MiB)",
    )
    parser.add_argument(
        "--audit", action="store_true", help="then audit; status 1 if a check fails"
    )
    parser.add_argument("--report", metavar="FILE", help="then write the report, an HTML page")
    parser.add_argument(
        "--ui", action="store_true", help="open Spark's pages, and keep them open until Ctrl-C"
    )
    parser.add_argument("--event-log", metavar="DIR", help="keep Spark's event logs there")


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises the errors of the journals and the lake."""
    check_archive(arguments)
    check_watching(arguments)
    if arguments.watch:
        share_freed_memory()
    from penstock.spark.lake import Lake
    from penstock.spark.stream import Stream

    if arguments.watch and (arguments.audit or arguments.report):
        raise UsageError("--audit, --report: not with --watch, which audits by --on-finding")
    if arguments.report is not None:
        check_writable("--report", arguments.report)
    # Checked before Spark is started, which takes seconds, and before a lake is created.
    for journal in arguments.journal:
        Stream(journal, arguments.archive).close()
    spark = spark_opener(arguments, warm=False, ui=arguments.ui, history=arguments.event_log)
    lake = Lake.open(arguments.lake, create=True, other_owner=arguments.insecure_other_owner)
    show_progress(arguments)
    if arguments.ui:
        print_text(f"Spark's pages: {spark().sparkContext.uiWebUrl}")
    if arguments.watch:
        _watch(session, spark, _upgraded(spark, lake), arguments)
        return 0
    if arguments.rebuild or not _is_up_to_date(lake, arguments):
        lake = _upgraded(spark, lake)
        _update_lake(spark, lake, arguments, rebuild=arguments.rebuild)
    _print_lags(session, lake, arguments)
    status = _audit(session, spark, lake, arguments) if arguments.audit else 0
    if arguments.report is not None:
        write_report(session, arguments, spark, lake, arguments.report)
    if arguments.ui:
        _wait_for_interrupt(spark())
    return status


def _audit(session: Session, spark: "OpenSpark", lake: "Lake", arguments: Namespace) -> int:
    from penstock.spark.audit import audit

    with step(None, "audit"):
        verdict = audit(spark, lake)
    return print_verdict(session, arguments, verdict)


def _wait_for_interrupt(spark: "SparkSession") -> None:
    """Keeps Spark's pages open; Ctrl-C is the way to end this, not a failure."""
    print_text(f"{spark.sparkContext.uiWebUrl} is open until Ctrl-C")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def _upgraded(spark: "OpenSpark", lake: "Lake") -> "Lake":
    from penstock.spark.lake import VERSION
    from penstock.spark.upgrade import upgrade

    if lake.version != VERSION:
        report(f"{lake.path}: is of an earlier release; its tables are made again")
    return upgrade(spark, lake)


def _watch(session: Session, spark: "OpenSpark", lake: "Lake", arguments: Namespace) -> None:
    """Runs one round after another, until a signal asks for the end.

    Raises LakeBusy if another process watches for this lake, and LakeUnusable if the lake is
    removed.
    """
    from penstock.spark.lake import WATCH, locked

    with locked(lake, WATCH):
        watch = Watch(arguments)
        # Spark takes Ctrl-C for itself when it starts.
        spark()
        with watch:
            _watch_rounds(session, spark, lake, arguments, watch)


def _watch_rounds(
    session: Session, spark: "OpenSpark", lake: "Lake", arguments: Namespace, watch: Watch
) -> None:
    from penstock.spark.lake import LakeBusy, LakeFull

    # Once: what later rounds make is made by the same queries.
    rebuild = arguments.rebuild
    upkeep = _Upkeep(spark, lake)
    while True:
        try:
            # Without this, a lake that was removed would be made again in part.
            lake.check_exists()
            _update_lake(spark, lake, arguments, watch, rebuild=rebuild)
            _end_round(session, spark, lake, arguments, watch)
            rebuild = False
            if upkeep.is_due():
                upkeep.run()
            if not _follow(session, spark, lake, arguments, watch, upkeep):
                return
            continue
        except WatchStopped:
            return
        except (LakeBusy, LakeFull) as error:
            watch.show_failure(error)
        except Exception:
            # If the lake is gone, that is the reason, whatever was noticed first.
            lake.check_exists()
            raise
        if not watch.wait():
            return


def _follow(
    session: Session,
    spark: "OpenSpark",
    lake: "Lake",
    arguments: Namespace,
    watch: Watch,
    upkeep: "_Upkeep",
) -> bool:
    """Makes the tables of what is appended, until a signal or until the lake is to be compacted.

    False if it was a signal.
    """
    from penstock.spark.bronze import follow, lag
    from penstock.spark.update import is_up_to_date, update

    def show(found: "Lag") -> None:
        watch.show_progress(lake, found)
        watch.wake()

    journals, archive = arguments.journal, arguments.archive
    every_s = watch.every_s
    with follow(spark, lake, journals, archive, every_s=every_s, on_batch=show) as check:
        while watch.wait():
            lake.check_exists()
            check()
            if is_up_to_date(lake):
                for journal in journals:
                    watch.show_progress(lake, lag(lake, journal, archive))
                watch.end_round()
                continue
            with step(None, "tables"):
                update(spark, lake)
            _end_round(session, spark, lake, arguments, watch)
            if upkeep.is_due():
                return True
    return False


def _end_round(
    session: Session, spark: "OpenSpark", lake: "Lake", arguments: Namespace, watch: Watch
) -> None:
    from penstock.spark.audit import audit

    for lag in _print_lags(session, lake, arguments):
        watch.show_progress(lake, lag)
    watch.end_round()
    if watch.audits:
        watch.show_verdict(audit(spark, lake))


class _Upkeep:
    """Compacts the lake when it has many commits, at most once an hour."""

    def __init__(self, spark: "OpenSpark", lake: "Lake") -> None:
        self._spark = spark
        self._lake = lake
        self._done_s: float | None = None

    def is_due(self) -> bool:
        """Whether the lake is to be compacted now."""
        from penstock.spark import upkeep

        is_early = self._done_s is not None and time.monotonic() < self._done_s + upkeep.UPKEEP_S
        return not is_early and upkeep.needs_upkeep(self._lake)

    def run(self) -> None:
        """Compacts the lake. Raises LakeUnusable, LakeFull or LakeBusy."""
        from penstock.spark import upkeep

        keep = upkeep.WATCH_KEEP_HOURS, upkeep.WATCH_COMMIT_HOURS
        for _ in upkeep.compact_lake(self._spark, self._lake, *keep):
            continue
        self._done_s = time.monotonic()


def _is_up_to_date(lake: "Lake", arguments: Namespace) -> bool:
    """Whether the lake has all durable events and current tables; reads no events."""
    from penstock.spark.bronze import is_ingested
    from penstock.spark.lake import VERSION
    from penstock.spark.update import is_up_to_date

    return (
        lake.version == VERSION
        and is_up_to_date(lake)
        and all(is_ingested(lake, journal, arguments.archive) for journal in arguments.journal)
    )


def _print_lags(session: Session, lake: "Lake", arguments: Namespace) -> "list[Lag]":
    from penstock.spark.bronze import lag

    lags = [lag(lake, journal, arguments.archive) for journal in arguments.journal]
    for each in lags:
        print_lag(session, arguments, each)
    return lags


def _update_lake(
    spark: "OpenSpark",
    lake: "Lake",
    arguments: Namespace,
    watch: Watch | None = None,
    *,
    rebuild: bool,
) -> None:
    from penstock.spark.bronze import ingest, lag
    from penstock.spark.update import update

    for journal in arguments.journal:
        with step(None, f"reading {journal}") as reading:

            def show(found: "Lag", reading: WaitStep = reading) -> None:
                all_bytes = max(1, found.durable_offset - found.first_offset)
                reading.reached(all_bytes - found.behind_bytes, all_bytes)
                if watch is not None:
                    watch.show_progress(lake, found)
                    # A batch is committed: what is read so far stays.
                    watch.check()

            show(lag(lake, journal, arguments.archive))
            ingest(
                spark, lake, journal, arguments.archive, batch_bytes=arguments.batch, on_batch=show
            )
    with step(None, "tables"):
        update(spark, lake, rebuild=rebuild)
