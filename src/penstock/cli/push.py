"""`penstock push QUEUE BODY`: add a message, or one for each line of stdin or of a file."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from penstock.cli.push_from import push_from
from penstock.cli.session import Session, UsageError, read_body_file
from penstock.cli.show import reply_as_json
from penstock.cli.values import read_count, read_duration, read_pair
from penstock.client import Queues
from penstock.errors import BatchRefused, MessageTooLarge, PenstockError
from penstock.service import BATCH_ITEMS_MAX, BODY_BYTES_MAX, PushReply

_READ_BYTES: Final = 256 * 1024


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE", nargs="?")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "source", metavar="BODY", nargs="?", help="the body; - reads stdin, @FILE reads a file"
    )
    source.add_argument("--body", metavar="TEXT", help="the body as it is: - and @ are not special")
    source.add_argument(
        "--lines", action="store_true", help="push each line of stdin as a message of its own"
    )
    source.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="push the messages that pull, peek or export have printed with --json (- is stdin): "
        "to QUEUE, or without it each to the queue that its line names",
    )
    parser.add_argument(
        "--delay", type=read_duration, metavar="DURATION", help="hide the message for this time"
    )
    parser.add_argument(
        "--priority",
        type=read_count,
        default=0,
        metavar="N",
        help="0 to 9; higher ones are pulled first (default: 0)",
    )
    parser.add_argument(
        "--ttl",
        type=read_duration,
        metavar="DURATION",
        help="remove the message after this time (default: the queue's retention)",
    )
    parser.add_argument(
        "--dedup-id", metavar="ID", help="a push with the same id within five minutes adds nothing"
    )
    parser.add_argument(
        "--group",
        metavar="GROUP",
        help="in a FIFO queue a group is delivered in order, in others it gets a fair share",
    )
    parser.add_argument(
        "--attribute",
        action="append",
        type=read_pair,
        metavar="NAME=VALUE",
        help="an attribute of the message (repeatable)",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Pushes, and prints the id of each message. Raises UsageError and the store's errors."""
    if arguments.file is not None:
        return push_from(session, arguments)
    if arguments.queue is None:
        raise UsageError("the queue is missing: penstock push QUEUE BODY")
    options: dict[str, Any] = {
        "delay": arguments.delay,
        "priority": arguments.priority,
        "ttl": arguments.ttl,
        "dedup_id": arguments.dedup_id,
        "group": arguments.group,
        "attributes": dict(arguments.attribute) if arguments.attribute else None,
    }
    if arguments.lines:
        return _push_lines(session, arguments, options)
    body = _body(session, arguments)
    queues = session.queues(arguments)
    reply = queues.push(arguments.queue, body, **options)
    _print_reply(session, arguments, reply)
    return 0


def _body(session: Session, arguments: Namespace) -> bytes:
    if arguments.body is not None:
        # The bytes that the shell passed, even if they are not UTF-8.
        return os.fsencode(arguments.body)
    source: str = arguments.source
    if source == "-":
        return session.stdin().read()
    if source.startswith("@"):
        return read_body_file(source[1:])
    return os.fsencode(source)


def _print_reply(session: Session, arguments: Namespace, reply: PushReply) -> None:
    text = f"{reply.id} (duplicate)" if reply.duplicate else reply.id
    session.print_result(arguments, reply_as_json(arguments.queue, reply), text)


def _push_lines(session: Session, arguments: Namespace, options: dict[str, Any]) -> int:
    if arguments.dedup_id is not None:
        raise UsageError("--dedup-id with --lines would push the first line only")
    stdin = session.stdin()
    queues = session.queues(arguments)
    pushed = 0
    for lines in batches_of_lines(stdin):
        pushed += _push_batch(session, arguments, queues, options, lines, pushed)
    return 0


def _push_batch(
    session: Session,
    arguments: Namespace,
    queues: Queues,
    options: dict[str, Any],
    lines: list[bytes],
    before: int,
) -> int:
    refused: list[tuple[int, PenstockError]] = []
    try:
        replies = queues.push_many(arguments.queue, lines, **options)
    except BatchRefused as several:
        replies = several.results
    for number, reply in enumerate(replies, before + 1):
        if isinstance(reply, PenstockError):
            refused.append((number, reply))
        else:
            _print_reply(session, arguments, reply)
    if refused:
        number, error = refused[0]
        last = before + len(lines)
        raise type(error)(
            f"line {number}: {error} ({len(refused)} of the lines up to {last} were refused; "
            f"the lines after {last} were not tried)"
        )
    return len(lines)


def batches_of_lines(stdin: BinaryIO) -> Iterator[list[bytes]]:
    """Yields the lines that have arrived, without newlines; few at a time from a slow writer.

    Raises MessageTooLarge for a line longer than any body may be.
    """
    rest = bytearray()
    while chunk := stdin.read1(_READ_BYTES):  # type: ignore[attr-defined]
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            lines = (bytes(rest) + head).split(b"\n")
            rest.clear()
            for start in range(0, len(lines), BATCH_ITEMS_MAX):
                yield lines[start : start + BATCH_ITEMS_MAX]
        rest += tail
        if len(rest) > BODY_BYTES_MAX:
            raise MessageTooLarge(f"body: a line is longer than {BODY_BYTES_MAX} bytes")
    if rest:
        yield [bytes(rest)]
