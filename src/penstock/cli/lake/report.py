"""`penstock pipeline report`: an HTML page about the tables of the lake."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.lake.bar import Bar
from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.session import Session, UsageError


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="the page, such as report.html"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError or LakeUnusable."""
    from penstock.spark.lake import Lake
    from penstock.spark.report import make_report

    out = Path(arguments.out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out: {str(out)!r} cannot be written: name a file in a directory")
    lake = Lake.open(arguments.lake)
    # Written beside and renamed: a reader gets the old page or the new one, never a part.
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        # Tried before the work, which takes seconds.
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise UsageError(f"--out: {str(out)!r} cannot be written: {error.strerror}") from None
    try:
        with Bar("report") as bar:
            bar.show(0, "")
            spark = open_spark(arguments)
            page, verdict = make_report(spark, lake, lambda part: bar.show(part, ""))
        draft.write_text(page)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    failed = [name for name, count in verdict.counts.items() if count]
    result = f"FAILED: {', '.join(failed)}" if failed else "every check holds"
    session.print_result(
        arguments,
        {"report": str(out), "events": verdict.events, "holds": verdict.holds},
        f"{out}: {verdict.events:,} events, {result}",
    )
    return 0
