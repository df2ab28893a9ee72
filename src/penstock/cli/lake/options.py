"""Arguments that several actions of the pipeline share, and how they are read."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import cache
from typing import TYPE_CHECKING

from penstock.cli.session import UsageError
from penstock.cli.values import read_pair
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
        type=_read_directory,
        action="append",
        required=required,
        default=None if required else [],
        help="a store, a directory of segment files, or a cluster's archive; may be given again",
    )
    parser.add_argument(
        "--archive",
        metavar="DIR",
        type=_read_directory,
        help="where the journal's dropped files went",
    )


def add_lake(parser: ArgumentParser, *, required: bool = True) -> None:
    """Adds the argument for a lake."""
    parser.add_argument(
        "--lake",
        metavar="DIR",
        type=_read_directory,
        required=required,
        help="the lake's directory",
    )


def add_spark(parser: ArgumentParser) -> None:
    """Adds the arguments that choose and configure Spark."""
    parser.add_argument(
        "--master",
        metavar="URL",
        type=_read_master,
        help="a Spark master, as spark://HOST:PORT (default: local[*])",
    )
    parser.add_argument("--remote", metavar="URL", help="a Spark Connect server, sc://HOST:PORT")
    parser.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        action="append",
        type=read_pair,
        default=[],
        help="a Spark setting",
    )


def _read_master(text: str) -> str:
    # Java would print a stack trace.
    if not re.fullmatch(r"(?:local|spark|k8s|yarn)\b.*", text):
        raise ArgumentTypeError(
            f"{text!r} is not a Spark master; use local[*], spark://HOST:PORT, yarn or k8s://…"
        )
    return text


def _read_directory(text: str) -> str:
    # An unset variable of a shell; as a path it would be the working directory.
    if not text:
        raise ArgumentTypeError("names no directory")
    return text


def check_archive(arguments: Namespace) -> None:
    """Replaces the archive of a cluster by the journals of its shards.

    Raises UsageError unless an archive comes with exactly one journal.
    """
    arguments.journal = [each for path in arguments.journal for each in journals_in(path)]
    if arguments.archive and len(arguments.journal) != 1:
        raise UsageError("--archive belongs to one journal: give --journal once")


def open_spark(arguments: Namespace) -> "SparkSession":
    """The Spark session that the arguments describe. Raises SparkMissing."""
    return spark_opener(arguments)()


def spark_opener(arguments: Namespace) -> "Callable[[], SparkSession]":
    """A function that starts that session when it is first called."""
    settings = dict(arguments.conf)
    return cache(
        lambda: make_session(master=arguments.master, remote=arguments.remote, conf=settings)
    )
