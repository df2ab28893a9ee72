"""`penstock pipeline run`: ingest journals into the lake and derive its tables."""

import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from penstock.cli.lake.bar import Bar, show_left
from penstock.cli.lake.options import (
    add_journals,
    add_lake,
    add_spark,
    check_archive,
    spark_opener,
)
from penstock.cli.lake.status import print_lag
from penstock.cli.lake.watch import (
    Watch,
    WatchStopped,
    add_watching,
    check_watching,
    share_freed_memory,
)
from penstock.cli.session import Session
from penstock.cli.values import read_size, show_size, within

if TYPE_CHECKING:
    from penstock.spark.distribute import OpenSpark
    from penstock.spark.ingest import Lag
    from penstock.spark.lake import Lake


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


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises the errors of the journals and the lake."""
    check_archive(arguments)
    check_watching(arguments)
    if arguments.watch:
        share_freed_memory()
    from penstock.spark.lake import Lake
    from penstock.spark.stream import Stream

    # Checked before Spark is started, which takes seconds, and before a lake is created.
    for journal in arguments.journal:
        Stream(journal, arguments.archive).close()
    lake = Lake.open(arguments.lake, create=True)
    if not arguments.watch and not arguments.rebuild and _is_up_to_date(lake, arguments):
        _print_lags(session, lake, arguments)
        return 0
    spark = spark_opener(arguments)
    if not arguments.watch:
        _update_lake(spark, lake, arguments, rebuild=arguments.rebuild)
        _print_lags(session, lake, arguments)
        return 0
    _watch(session, spark, lake, arguments)
    return 0


def _watch(session: Session, spark: "OpenSpark", lake: "Lake", arguments: Namespace) -> None:
    """Runs one round after another, until a signal asks for the end.

    Raises LakeBusy if another process watches for this lake, and LakeUnusable if the lake is
    removed.
    """
    from penstock.spark.lake import WATCH, LakeBusy, LakeFull, locked

    with locked(lake, WATCH), Watch(arguments) as watch:
        # Once: what later rounds make is made by the same queries.
        rebuild = arguments.rebuild
        upkeep = _Upkeep(spark, lake)
        while True:
            try:
                _round(session, spark, lake, arguments, watch, rebuild=rebuild)
                rebuild = False
                upkeep.run_if_due()
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


def _round(
    session: Session,
    spark: "OpenSpark",
    lake: "Lake",
    arguments: Namespace,
    watch: Watch,
    *,
    rebuild: bool,
) -> None:
    from penstock.spark.audit import audit

    # Without this, a lake that was removed would be made again in part.
    lake.check_exists()
    _update_lake(spark, lake, arguments, watch, rebuild=rebuild)
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

    def run_if_due(self) -> None:
        """Compacts the lake if that is due. Raises LakeUnusable, LakeFull or LakeBusy."""
        from penstock.spark import upkeep

        now_s = time.monotonic()
        is_early = self._done_s is not None and now_s < self._done_s + upkeep.UPKEEP_S
        if is_early or not upkeep.needs_upkeep(self._lake):
            return
        keep = upkeep.WATCH_KEEP_HOURS, upkeep.WATCH_COMMIT_HOURS
        for _ in upkeep.compact_lake(self._spark, self._lake, *keep):
            continue
        self._done_s = now_s


def _is_up_to_date(lake: "Lake", arguments: Namespace) -> bool:
    """Whether the lake has all durable events and current tables; reads no events."""
    from penstock.spark.derive import is_up_to_date
    from penstock.spark.ingest import is_ingested

    return is_up_to_date(lake) and all(
        is_ingested(lake, journal, arguments.archive) for journal in arguments.journal
    )


def _print_lags(session: Session, lake: "Lake", arguments: Namespace) -> "list[Lag]":
    from penstock.spark.ingest import lag

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
    from penstock.spark.derive import derive
    from penstock.spark.ingest import ingest, lag

    for journal in arguments.journal:
        with _ReadingBar(f"reading {journal}") as bar:

            def show(found: "Lag", bar: _ReadingBar = bar) -> None:
                bar.read(found)
                if watch is not None:
                    watch.show_progress(lake, found)
                    # A batch is committed: what is read so far stays.
                    watch.check()

            show(lag(lake, journal, arguments.archive))
            ingest(
                spark,
                lake,
                journal,
                arguments.archive,
                batch_bytes=arguments.batch,
                progress=show,
            )
    with Bar("tables") as tables:
        tables.show(0, "")
        derive(spark, lake, lambda part: tables.show(part, ""), rebuild=rebuild)


class _ReadingBar(Bar):
    def read(self, lag: "Lag") -> None:
        """Shows how far a journal is read."""
        all_bytes = max(1, lag.durable_offset - lag.first_offset)
        rate = self.rate(all_bytes - lag.behind_bytes)
        left = show_left(lag.behind_bytes, rate)
        self.show(1 - lag.behind_bytes / all_bytes, f"{show_size(round(rate))}/s{left}")
