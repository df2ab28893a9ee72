"""Arguments that several actions of the pipeline share, and how they are read."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from penstock.cli.lake.bar import ProgressLine
from penstock.cli.progress import at_terminal
from penstock.cli.session import UsageError
from penstock.cli.values import read_pair
from penstock.errors import InvalidField
from penstock.journal.store import journals_in
from penstock.output import report
from penstock.spark.progress import follow_remote, step
from penstock.spark.session import (
    check_address,
    expected_start_s,
    is_remote,
    is_started,
    make_history,
    make_session,
)
from penstock.url import read_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from penstock.spark.session import OpenSpark


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
    parser.add_argument(
        "--insecure-other-owner",
        action="store_true",
        help="use the lake although it belongs to another user",
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
    parser.add_argument(
        "--quiet", action="store_true", help="do not say on stderr what is waited for"
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
    try:
        return read_url(text).path if text.startswith("file:") else text
    except InvalidField as error:
        raise ArgumentTypeError(str(error)) from None


def check_archive(arguments: Namespace) -> None:
    """Replaces the archive of a cluster by the journals of its shards.

    Raises UsageError unless an archive comes with exactly one journal.
    """
    arguments.journal = [each for path in arguments.journal for each in journals_in(path)]
    if arguments.archive and len(arguments.journal) != 1:
        raise UsageError("--archive belongs to one journal: give --journal once")


def open_spark(
    arguments: Namespace, *, warm: bool = True, ui: bool = False, history: str | None = None
) -> "SparkSession":
    """The Spark session that the arguments describe; says at once on stderr what is waited for.

    With `warm` it is that of `pipeline warm`, if one is kept for the lake and no other Spark is
    named. Raises SparkMissing, JavaMissing, SparkUnreachable or InvalidField.
    """
    show_progress(arguments)
    elsewhere = arguments.remote or arguments.master
    check_address(arguments.master, arguments.remote)
    with step(None, f"connecting to {elsewhere}" if elsewhere else "looking for Spark"):
        found = _warm_session(arguments) if warm and not elsewhere else None
    if found is None:
        with _starting(arguments, elsewhere):
            found = make_session(
                master=arguments.master,
                remote=arguments.remote,
                conf=dict(arguments.conf),
                ui=ui,
                history=history,
                archives=not warm,
            )
    if is_remote(found):
        follow_remote(found)
    return found


def spark_opener(
    arguments: Namespace, *, warm: bool = True, ui: bool = False, history: str | None = None
) -> "OpenSpark":
    """A function that opens that session when it is first called.

    Raises at once SparkUnreachable if nothing listens at the address that the arguments name, and
    InvalidField if the directory for event logs cannot be used.
    """
    check_address(arguments.master, arguments.remote)
    if history is not None:
        make_history(history)
    return cache(lambda: open_spark(arguments, warm=warm, ui=ui, history=history))


def show_progress(arguments: Namespace) -> None:
    """Draws the steps of the command from here on, unless the arguments ask for quiet."""
    if not arguments.quiet:
        ProgressLine.show()


@contextmanager
def _starting(arguments: Namespace, elsewhere: str | None) -> "Iterator[None]":
    """Says that a session is started, and how long that takes."""
    if is_started() or arguments.remote:
        yield
        return
    expected_s = expected_start_s()
    about = "" if expected_s is None else f", about {max(1, round(expected_s))} s"
    text = f"starting Spark{f' at {elsewhere}' if elsewhere else ''}{about}"
    if not (arguments.quiet or at_terminal()):
        report(text)
    with step(None, text, expected_s=expected_s):
        yield


def _warm_session(arguments: Namespace) -> "SparkSession | None":
    # A process has one Spark: in a shell, the one of an earlier command.
    if is_started() or arguments.conf or getattr(arguments, "lake", None) is None:
        return None
    from penstock.spark.lake import Lake
    from penstock.spark.warm import use_warm

    return use_warm(Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner))
