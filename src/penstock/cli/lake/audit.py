"""`penstock pipeline audit`: check every message's events from push to end."""

import dataclasses
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Final

from penstock.cli.lake.options import (
    add_journals,
    add_lake,
    add_spark,
    check_archive,
    show_progress,
    spark_opener,
)
from penstock.cli.list import every_name
from penstock.cli.session import Session, UsageError
from penstock.cli.show import table
from penstock.cli.values import read_count, within
from penstock.output import print_text
from penstock.spark.progress import step

if TYPE_CHECKING:
    from penstock.spark.audit import Verdict

_PROBLEM: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_journals(parser, required=False)
    add_lake(parser, required=False)
    add_spark(parser)
    parser.add_argument(
        "--all", action="store_true", help="check again what was checked before, not only new parts"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=within(read_count, "0", "1000000"),
        default=20,
        help="findings per check",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError, and the errors of the journal or the lake."""
    from penstock.spark.audit import audit, audit_journal
    from penstock.spark.lake import Lake
    from penstock.spark.stream import Stream

    check_archive(arguments)
    if bool(arguments.lake) == bool(arguments.journal):
        raise UsageError("audit: give --lake, or --journal to audit a journal by itself")
    if len(arguments.journal) > 1:
        raise UsageError("audit: give one --journal, or bring several into a lake")
    spark = spark_opener(arguments)
    engine = None
    if getattr(arguments, "url", None):
        with session.looking(arguments) as queues:
            engine = {name: queues.stats(name).messages for name in every_name(queues)}
        if not engine:
            raise UsageError("--url: there is no queue whose messages could be counted")
    show_progress(arguments)
    with step(None, "audit"):
        if arguments.lake:
            lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
            verdict = audit(spark, lake, engine, arguments.limit, everything=arguments.all)
        else:
            [path] = arguments.journal
            Stream(path, arguments.archive).close()
            verdict = audit_journal(spark, path, arguments.archive, engine, arguments.limit)
    return print_verdict(session, arguments, verdict)


def print_verdict(session: Session, arguments: Namespace, verdict: "Verdict") -> int:
    """Prints the verdict; the exit status that says whether it holds."""
    _print_verdict(session, arguments, verdict)
    return 0 if verdict.holds else _PROBLEM


def _print_verdict(session: Session, arguments: Namespace, verdict: "Verdict") -> None:
    from penstock.spark.checks import CHECKS

    if arguments.json:
        session.print_json(
            {
                "events": verdict.events,
                "holds": verdict.holds,
                "counts": verdict.counts,
                "parts": verdict.parts,
                "judged_parts": verdict.judged_parts,
                "dropped_messages": verdict.dropped,
            }
        )
        for finding in verdict.findings:
            session.print_json({"finding": dataclasses.asdict(finding)})
        return
    rows = [
        ("ok" if not verdict.counts[name] else "FAILED", name, f"{verdict.counts[name]:,}", what)
        for name, what in CHECKS.items()
    ]
    print_text(table(("", "check", "findings", "what must hold"), rows, left=4))
    for finding in verdict.findings:
        about = finding.message_id or finding.queue or finding.store
        print_text("")
        print_text(f"{finding.check}: {about}, entry {finding.entry}: {finding.detail}")
        for line in finding.events:
            print_text(f"    {line}")
    if verdict.counts.get("no gaps"):
        print_text("")
        print_text("Entries are missing: other findings may follow from that alone.")
    word = "every check holds" if verdict.holds else "some checks failed"
    print_text("")
    print_text(f"{verdict.events:,} events: {word}")
    if verdict.judged_parts < verdict.parts:
        print_text(
            f"judged {verdict.judged_parts:,} of {verdict.parts:,} parts: the others are as before"
        )
    if verdict.dropped:
        print_text(
            f"judged {verdict.dropped:,} messages by what is kept of them: "
            "their events were dropped"
        )
    if verdict.is_behind:
        print_text("a run is making the tables: what it has not finished is not judged yet")
