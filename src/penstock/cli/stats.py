"""`penstock stats [QUEUE …]`: how many messages queues hold; all queues if none is named."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.cli.list import every_name
from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.cli.values import show_age, show_size
from penstock.client import Queues
from penstock.errors import QueueNotFound
from penstock.journal import reader_positions
from penstock.journal.store import open_reader
from penstock.output import print_text
from penstock.public import QueueStatistics
from penstock.service import SECOND_MS
from penstock.url import read_url

_HEAD = ("queue", "visible", "delayed", "in flight", "size", "oldest", "waiting")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE", nargs="*")


def run(session: Session, arguments: Namespace) -> int:
    """Prints a table, or one JSON object for each queue."""
    with session.looking(arguments) as queues:
        if arguments.queue:
            found = [queues.stats(name) for name in arguments.queue]
        else:
            found = list(_stats_of_all(queues))
    if not arguments.json:
        print_text(table(_HEAD, [_row(stats) for stats in found]))
        if not arguments.queue:
            for line in _readers_behind(session.url(arguments)):
                print_text(line)
    else:
        for stats in found:
            session.print_json({**msgspec.structs.asdict(stats), "messages": stats.messages})
    return 0


def _stats_of_all(queues: Queues) -> Iterator[QueueStatistics]:
    for name in every_name(queues):
        try:
            yield queues.stats(name)
        except QueueNotFound:
            continue  # removed since its name was read


def _readers_behind(text: str) -> Iterator[str]:
    """One line for each named reader of a store's journal: mirrors and pipelines."""
    directory = read_url(text).directory
    if directory is None or not Path(directory, "readers").is_dir():
        return
    with open_reader(directory) as reader:
        durable = reader.durable_offset
    for each in reader_positions.registered(Path(directory)):
        yield f"reader {each.name}: {show_size(each.behind_bytes(durable))} behind"


def _row(stats: QueueStatistics) -> tuple[str, ...]:
    return (
        f"{stats.queue} (paused)" if stats.paused else stats.queue,
        f"{stats.visible:,}",
        f"{stats.delayed:,}",
        f"{stats.in_flight:,}",
        "-" if stats.stored_bytes is None else show_size(stats.stored_bytes),
        "-" if stats.oldest_age is None else show_age(round(stats.oldest_age * SECOND_MS)),
        f"{stats.waiting_pulls:,}",
    )
