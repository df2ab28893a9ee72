"""`penstock history ID`: the events of one message that are still in the journal, oldest first."""

from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime

import msgspec

from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.service import HistoryEvent

_HEAD = ("at (UTC)", "event", "queue", "claim", "detail")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("id", metavar="ID", help="the id that the push printed")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the events."""
    events = session.queues(arguments).history(arguments.id)
    if not arguments.json:
        print(table(_HEAD, [_row(event) for event in events], left=len(_HEAD)))
    else:
        for event in events:
            session.print_json(msgspec.structs.asdict(event))
    return 0


def _row(event: HistoryEvent) -> tuple[str, ...]:
    at = datetime.fromtimestamp(event.at_ms / 1_000, UTC).isoformat(" ", "milliseconds")
    epoch = "" if event.epoch is None else str(event.epoch)
    return at.removesuffix("+00:00"), event.kind, event.queue, epoch, event.detail
