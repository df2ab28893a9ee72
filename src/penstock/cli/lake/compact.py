"""`penstock pipeline compact`: join small files, drop old events, remove unused files."""

import time
from argparse import ArgumentParser, Namespace
from math import ceil
from typing import TYPE_CHECKING

from penstock.cli.lake.options import add_lake, add_spark, show_progress, spark_opener
from penstock.cli.session import Session
from penstock.cli.values import read_duration, within
from penstock.spark.progress import step

if TYPE_CHECKING:
    from penstock.spark.lake import Lake
    from penstock.spark.session import OpenSpark


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    parser.description = (
        "Joins small files of the lake and removes those that no recent version needs. With --keep "
        "it first drops the events, with the bodies, of messages that ended earlier than that and "
        "in which the audit found nothing; the rows of these messages in the tables stay."
    )
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--keep",
        metavar="DURATION",
        type=within(read_duration, "0s", "36500d"),
        help="drop events of messages that ended longer ago, such as 90d (default: drop none)",
    )
    parser.add_argument(
        "--keep-versions",
        metavar="DURATION",
        type=within(read_duration, "0s", "36500d"),
        default=168 * 3_600.0,
        help="keep the versions of the tables for this time (default: 7d)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises LakeUnusable or LakeBusy."""
    from penstock.spark.lake import Lake
    from penstock.spark.upkeep import compact_lake

    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    spark = spark_opener(arguments)
    if arguments.keep is not None:
        _drop_events(session, arguments, lake, spark)
    for name, done in compact_lake(spark, lake, ceil(arguments.keep_versions / 3_600)):
        session.print_result(
            arguments,
            {"table": name, **done},
            f"{name}: {done['joined']} files joined, {done['removed']} removed",
        )
    return 0


def _drop_events(session: Session, arguments: Namespace, lake: "Lake", spark: "OpenSpark") -> None:
    from penstock.spark.retention import drop_before

    before_ms = time.time_ns() // 1_000_000 - round(1_000 * arguments.keep)
    show_progress(arguments)
    with step(None, "dropping events"):
        done = drop_before(spark, lake, before_ms)
    session.print_result(
        arguments,
        {"dropped_messages": done.messages, "dropped_events": done.events},
        f"{done.events:,} events of {done.messages:,} messages dropped",
    )
