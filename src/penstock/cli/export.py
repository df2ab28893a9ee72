"""`penstock export [QUEUE …]`: print every message as a line of JSON, without claiming any.

The three states of a queue are read side by side, page by page in order of arrival, so that memory
does not grow with the queue, and a message that changes its state meanwhile is printed once.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Final

from penstock.cli.list import every_name
from penstock.cli.peek import told_of
from penstock.cli.progress import Progress
from penstock.cli.session import Session
from penstock.cli.show import message_as_json
from penstock.client import Queues
from penstock.errors import PenstockError, UnsupportedOperation
from penstock.output import counted, report
from penstock.service import Message, PeekFrom, State

_PAGE: Final = 500
_PAGE_BYTES: Final = 4 * 1024 * 1024
# A message that passes from one state to another meanwhile is seen again, not missed: each state is
# read before those that can follow it, and claims, which can end in any way, at both ends.
_STATES: Final[tuple[State, ...]] = ("in_flight", "delayed", "visible", "in_flight")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE", nargs="*", help="(default: all queues)")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the messages. Raises UsageError and the errors of the store."""
    with session.looking(arguments) as queues:
        lacks = queues.service.LACKS.get("peek pages")
        if lacks is not None:
            raise UnsupportedOperation(
                f"export: {lacks}; penstock pull --delete --json takes messages out instead"
            )
        names = arguments.queue or list(every_name(queues))
        total = sum(queues.stats(name).messages for name in names)
        with Progress("export", total) as progress:
            try:
                for name in names:
                    _export(session, queues, name, progress)
            except (PenstockError, KeyboardInterrupt, OSError):
                done = counted(progress.done, "message")
                report(f"export: {done} of about {total:,} printed; the rest is missing")
                raise
    return 0


def _export(session: Session, queues: Queues, name: str, progress: Progress) -> None:
    for message, state in messages_of(queues, name):
        told = told_of(queues, message, state)
        session.print_json(message_as_json(message) | {"state": state} | told.as_json())
        progress.advance()


def messages_of(queues: Queues, name: str) -> Iterator[tuple[Message, State]]:
    """Every message of a queue with its state, in order of arrival. Raises QueueNotFound."""
    after = 0
    while True:
        found: dict[int, tuple[Message, State]] = {}
        # Up to where every state has been read.
        horizon: int | None = None
        for state in _STATES:
            page = queues.service.execute(PeekFrom(name, after, _PAGE, state, _PAGE_BYTES))
            found |= {each.sequence: (each, state) for each in page}
            if page:
                last = page[-1].sequence
                horizon = last if horizon is None else min(horizon, last)
        if horizon is None:
            return
        for sequence in sorted(found):
            if sequence <= horizon:
                yield found[sequence]
        after = horizon
