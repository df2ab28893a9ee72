"""`penstock pipeline report`: an HTML page about the tables of the lake."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.session import Session, UsageError
from penstock.files import remove_in, write_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.lake import Lake


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
    write_report(session, arguments, open_spark(arguments), lake, arguments.output)
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
    session: Session, arguments: Namespace, spark: "SparkSession", lake: "Lake", path: str
) -> None:
    """Writes the page, and prints that it did. Raises LakeUnusable."""
    from penstock.spark.report import make_report

    out = Path(path)
    page, verdict = make_report(spark, lake)
    write_in(out.parent, out.name, page.encode(), mode=0o666, durable=False)
    failed = [name for name, count in verdict.counts.items() if count]
    result = f"FAILED: {', '.join(failed)}" if failed else "every check holds"
    session.print_result(
        arguments,
        {"report": str(out), "events": verdict.events, "holds": verdict.holds},
        f"{out}: {verdict.events:,} events, {result}",
    )
