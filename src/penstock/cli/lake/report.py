"""`penstock pipeline report`: an HTML page about the tables of the lake."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.lake.options import add_lake, add_spark, spark_opener
from penstock.cli.session import Session, UsageError
from penstock.files import remove_in, write_in

if TYPE_CHECKING:
    from penstock.spark.lake import Lake
    from penstock.spark.session import OpenSpark


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--output", metavar="FILE", required=True, help="the page, such as report.html"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError or LakeUnusable."""
    from penstock.spark.lake import Lake

    check_writable("--output", arguments.output)
    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    write_report(session, arguments, spark_opener(arguments), lake, arguments.output)
    return 0


def check_writable(option: str, path: str) -> None:
    """Raises UsageError if the page cannot be written: asked before the work."""
    out = Path(path)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"{option}: {path!r} cannot be written: name a file in a directory")
    try:
        # Tried before the work, which takes seconds.
        write_in(out.parent, f".{out.name}.new", b"", durable=False)
        remove_in(out.parent, f".{out.name}.new")
    except OSError as error:
        raise UsageError(f"{option}: {path!r} cannot be written: {error.strerror}") from None


def write_report(
    session: Session, arguments: Namespace, spark: "OpenSpark", lake: "Lake", path: str
) -> None:
    """Writes the page, unless there is one that would be the same, and prints what it did.

    Raises LakeUnusable.
    """
    from penstock.spark.report import make_report, read_current

    out = Path(path)
    summary = read_current(lake, out)
    is_current = summary is not None
    if summary is None:
        page, summary = make_report(spark(), lake)
        write_in(out.parent, out.name, page.encode(), mode=0o666, durable=False)
    result = f"FAILED: {', '.join(summary.failed)}" if summary.failed else "every check holds"
    text = f"{out}: {summary.events:,} events, {result}"
    session.print_result(
        arguments,
        {"report": str(out), "events": summary.events, "holds": not summary.failed,
         "written": not is_current},
        f"{text}; it is of the lake as it is and was left" if is_current else text,
    )  # fmt: skip
