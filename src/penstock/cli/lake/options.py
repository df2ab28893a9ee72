"""Arguments that several actions of the pipeline share, and how they are read."""

from argparse import ArgumentParser, Namespace
from functools import cache
from typing import TYPE_CHECKING

from penstock.cli.session import UsageError
from penstock.journal.store import journals_in
from penstock.spark.session import make_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


def add_journals(parser: ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments for journals and their archive."""
    parser.add_argument(
        "--journal",
        metavar="DIR",
        action="append",
        required=required,
        default=None if required else [],
        help="a store, a directory of segment files, or a cluster's archive; may be given again",
    )
    parser.add_argument("--archive", metavar="DIR", help="where the journal's dropped files went")


def add_lake(parser: ArgumentParser, *, required: bool = True) -> None:
    """Adds the argument for a lake."""
    parser.add_argument("--lake", metavar="DIR", required=required, help="the lake's directory")


def add_spark(parser: ArgumentParser) -> None:
    """Adds the arguments that choose and configure Spark."""
    parser.add_argument("--master", metavar="URL", help="a Spark master (default: local[*])")
    parser.add_argument("--remote", metavar="URL", help="a Spark Connect server, sc://HOST:PORT")
    parser.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], help="a Spark setting"
    )


def check_archive(arguments: Namespace) -> None:
    """Replaces the archive of a cluster by the journals of its shards.

    Raises UsageError unless an archive comes with exactly one journal.
    """
    arguments.journal = [each for path in arguments.journal for each in journals_in(path)]
    if arguments.archive and len(arguments.journal) != 1:
        raise UsageError("--archive belongs to one journal: give --journal once")


def open_spark(arguments: Namespace) -> "SparkSession":
    """The Spark session that the arguments describe. Raises UsageError or SparkMissing."""
    return spark_opener(arguments)()


def spark_opener(arguments: Namespace) -> "Callable[[], SparkSession]":
    """A function that starts that session when it is first called.

    Raises UsageError if the arguments do not describe one.
    """
    settings = dict(each.partition("=")[::2] for each in arguments.conf)
    if not all(settings):
        raise UsageError("--conf: give it as KEY=VALUE")
    return cache(
        lambda: make_session(master=arguments.master, remote=arguments.remote, conf=settings)
    )
