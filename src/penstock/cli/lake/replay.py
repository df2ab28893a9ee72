"""`penstock pipeline replay`: send messages of the lake to a queue."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Final

from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.session import Session
from penstock.cli.values import read_count, show_size
from penstock.output import report
from penstock.service import check_name, check_number

if TYPE_CHECKING:
    from penstock.spark.replay import Outcome

_NOT_ALL: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_lake(parser)
    add_spark(parser)
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        required=True,
        help="which messages: a condition of Spark SQL on the table `messages`, as in "
        "\"queue = 'orders' and state = 'dead'\"; like a query of `sql` it can read any file and "
        "run any code that you may",
    )
    parser.add_argument(
        "--to", metavar="QUEUE", required=True, help="the queue to send the messages to"
    )
    parser.add_argument(
        "--rate", metavar="N", type=read_count, help="send at most N messages a second"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="send again what was sent under another name (default: --to)"
    )
    parser.add_argument("--dry-run", action="store_true", help="count the messages and send none")


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises InvalidField, LakeUnusable and the errors of the queue."""
    from penstock.spark.lake import Lake
    from penstock.spark.replay import RATE_MAX, check_where, replay

    # Checked before Spark is started, which takes seconds.
    check_where(arguments.where)
    check_name(arguments.to, "to")
    check_name(arguments.name or arguments.to, "name")
    if arguments.rate is not None:
        check_number("rate", arguments.rate, 1, RATE_MAX)
    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    queues = session.queues(arguments)
    queues.describe(arguments.to)
    outcome = replay(
        open_spark(arguments),
        lake,
        queues,
        arguments.where,
        arguments.to,
        name=arguments.name,
        rate=arguments.rate,
        dry_run=arguments.dry_run,
    )
    _print_outcome(session, arguments, outcome)
    return 0 if outcome.matched and not outcome.bodiless and not outcome.refused else _NOT_ALL


def _print_outcome(session: Session, arguments: Namespace, outcome: "Outcome") -> None:
    if arguments.dry_run:
        text = f"would send {outcome.to_send:,} messages ({show_size(outcome.bytes)})"
    else:
        text = f"sent {outcome.sent:,} messages"
    text += f" to {arguments.to}"
    if not outcome.matched:
        text = f"no message meets the condition: {text}"
    if outcome.sent_before:
        name = arguments.name or arguments.to
        text += f"; {outcome.sent_before:,} were sent before under the name {name!r}"
    session.print_result(
        arguments,
        {
            "matched": outcome.matched,
            "sent": outcome.sent,
            "to_send": outcome.to_send,
            "sent_before": outcome.sent_before,
            "without_body": outcome.bodiless,
            "dropped": outcome.dropped,
            "refused": len(outcome.refused),
        },
        text,
    )
    if outcome.bodiless:
        shown = ", ".join(outcome.bodiless_ids)
        more = ", …" if outcome.bodiless > len(outcome.bodiless_ids) else ""
        why = f"{outcome.dropped:,} were dropped by `compact --keep`: " if outcome.dropped else ""
        report(f"{outcome.bodiless:,} messages have no body in the lake: {why}{shown}{more}")
    if outcome.refused:
        message_id, why = outcome.refused[0]
        report(
            f"{len(outcome.refused):,} messages were refused, the first, {message_id}, "
            f"because of {why}"
        )
