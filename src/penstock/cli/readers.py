"""`penstock readers PATH`: the named readers of a store's journal, and how far each has read.

Files that a reader has not read are never dropped: remove readers that are no longer used. One is
marked as abandoned if it has not moved for two days, and 16 MiB or more are kept for it.
"""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec

from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.cli.values import show_age, show_size
from penstock.journal import reader_positions
from penstock.journal.store import open_reader
from penstock.output import print_text

_HEAD = ("reader", "floor", "behind", "moved", "")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a store (default: the store of --url)",
    )
    parser.add_argument(
        "--forget", metavar="NAME", help="remove this reader: what it has not read may be dropped"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Prints the readers, or removes one; returns 1 if there is none of that name."""
    with open_reader(session.path(arguments)) as reader:
        store = Path(reader.path).parent
        if arguments.forget is not None:
            return 0 if reader_positions.forget(store, arguments.forget) else 1
        durable = reader.durable_offset
    registered = reader_positions.registered(store)
    now_ms = time.time_ns() // 1_000_000
    if arguments.json:
        for each in registered:
            found = {
                "behind_bytes": each.behind_bytes(durable),
                "abandoned": each.is_abandoned(durable, now_ms),
            }
            session.print_json(msgspec.structs.asdict(each) | found)
    elif registered:
        rows = [
            (
                each.name,
                str(each.floor_offset),
                show_size(each.behind_bytes(durable)),
                show_age(max(0, now_ms - each.moved_at_ms)),
                "abandoned?" if each.is_abandoned(durable, now_ms) else "",
            )
            for each in registered
        ]
        print_text(table(_HEAD, rows))
        abandoned = [each for each in registered if each.is_abandoned(durable, now_ms)]
        for each in abandoned:
            kept = show_size(each.behind_bytes(durable))
            print_text(
                f"{each.name}: {kept} of the journal are kept for it; if it is not used any more: "
                f"penstock readers {store} --forget {each.name}"
            )
    return 0
