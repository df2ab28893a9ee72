"""`penstock history ID`: the events of one message that are still in the journal, oldest first."""

import time
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime

import msgspec

from penstock.cli.histories import read_history
from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.life import in_words, life
from penstock.output import print_text
from penstock.service import HistoryEvent

_HEAD = ("at (UTC)", "event", "queue", "claim", "detail")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("id", metavar="ID", help="the id that the push printed")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the events."""
    with session.looking(arguments) as queues:
        events = read_history(queues, arguments.id)
    if not arguments.json:
        told = life(events, time.time_ns() // 1_000_000)
        for sentence in told.sentences:
            print_text(sentence)
        print_text("")
        print_text(table(_HEAD, [_row(event) for event in events], left=len(_HEAD)))
    else:
        for event in events:
            session.print_json(msgspec.structs.asdict(event))
    return 0


def _row(event: HistoryEvent) -> tuple[str, ...]:
    at = datetime.fromtimestamp(event.at_ms / 1_000, UTC).isoformat(" ", "milliseconds")
    epoch = "" if event.epoch is None else str(event.epoch)
    return at.removesuffix("+00:00"), event.kind, event.queue, epoch, in_words(event)
