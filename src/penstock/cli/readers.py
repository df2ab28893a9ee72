"""`penstock readers PATH`: the named readers of a store's journal, and how far each has read.

Files that a reader has not read are never dropped: remove readers that are no longer used.
"""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec

from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.cli.values import show_age, show_size
from penstock.journal import readers
from penstock.journal.store import open_reader

_HEAD = ("reader", "floor", "behind", "moved")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("path", metavar="PATH", help="a store")
    parser.add_argument(
        "--forget", metavar="NAME", help="remove this reader: what it has not read may be dropped"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Prints the readers, or removes one; returns 1 if there is none of that name."""
    with open_reader(session.path(arguments)) as reader:
        store = Path(reader.path).parent
        if arguments.forget is not None:
            return 0 if readers.forget(store, arguments.forget) else 1
        durable = reader.durable_offset
    registered = readers.registered(store)
    if arguments.json:
        for each in registered:
            behind = {"behind_bytes": max(0, durable - each.floor_offset)}
            session.print_json(msgspec.structs.asdict(each) | behind)
    elif registered:
        now_ms = time.time_ns() // 1_000_000
        rows = [
            (
                each.name,
                str(each.floor_offset),
                show_size(max(0, durable - each.floor_offset)),
                show_age(max(0, now_ms - each.moved_at_ms)),
            )
            for each in registered
        ]
        print(table(_HEAD, rows))
    return 0
