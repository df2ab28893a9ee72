"""`penstock pipeline report`: what the lake tells, on one HTML page."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.session import Session, UsageError


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the action takes."""
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="the page, such as report.html"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Does it. Raises UsageError or LakeUnusable."""
    from penstock.spark.lake import Lake
    from penstock.spark.report import make_report

    out = Path(arguments.out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out: {str(out)!r} cannot be written: name a file in a directory")
    lake = Lake.open(arguments.lake)
    page, verdict = make_report(open_spark(arguments), lake)
    # Whoever looks at the page meanwhile sees the old one or the new one, never half of one.
    made = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        made.write_text(page)
        made.replace(out)
    finally:
        made.unlink(missing_ok=True)
    failed = [name for name, count in verdict.counts.items() if count]
    word = f"FAILED: {', '.join(failed)}" if failed else "every check holds"
    session.tell(
        arguments,
        {"report": str(out), "events": verdict.events, "holds": verdict.holds},
        f"{out}: {verdict.events:,} events, {word}",
    )
    return 0
