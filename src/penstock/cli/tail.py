"""`penstock tail QUEUE`: what happens in a queue, as it happens.

Of a store on this machine these are the events of its journal. Of any other, and of a server over
HTTP, they are the changes of the queue's counts, looked at every second.
"""

import asyncio
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.cli.inspect import EventPrinter, follow
from penstock.cli.live.source import open_source
from penstock.cli.session import Session
from penstock.errors import QueueNotFound, UnavailableError
from penstock.journal.snapshot import offset_of, snapshot_paths
from penstock.journal.store import open_reader
from penstock.output import flush, report
from penstock.server.console.status import differences
from penstock.service import QueueCounts
from penstock.url import read_url

_DEPTHS: Final = ("visible", "in_flight", "delayed")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("queue", metavar="QUEUE")


def run(session: Session, arguments: Namespace) -> int:
    """Prints what happens until it is interrupted. Raises the errors of the store."""
    url = session.live_url(arguments)
    directory = None if url.startswith(("http:", "https:")) else read_url(url).directory
    if directory is None:
        asyncio.run(_tail_counts(session, arguments, url))
    else:
        with session.looking(arguments) as queues:
            queues.stats(arguments.queue)  # raises if there is no such queue
        _tail_events(session, arguments, directory)
    return 0


def _tail_events(session: Session, arguments: Namespace, directory: str) -> None:
    with open_reader(directory) as reader:
        printer = EventPrinter(session, arguments, reader, with_places=False)
        end = reader.durable_offset
        # Queues are numbers in the journal: those made since the last snapshot have names there.
        snapshots = [offset_of(path) for path in snapshot_paths(Path(directory))]
        for journaled in reader.events(min(end, max([reader.first_offset, *snapshots])), False):
            printer.note_name(journaled.event)
        for _ in follow(reader, printer, reader.position):
            flush()


async def _tail_counts(session: Session, arguments: Namespace, url: str) -> None:
    source = await open_source(url)
    try:
        before = (await source.read("queue", name=arguments.queue))["queue"]
        report(
            f"{source.shown}: events are in the journal of a store on this machine; this shows "
            "what changed when the queue was looked at, every second"
        )
        while True:
            async for change in source.changes(arguments.queue):
                if arguments.queue in change.get("gone", ()):
                    raise QueueNotFound(f"queue: {arguments.queue!r} was deleted")
                if change.get("error"):
                    raise UnavailableError(change["error"])
                for now in change["queues"]:
                    _print_change(session, arguments, before, now, change["at_ms"])
                    before = now
    finally:
        await source.close()


def _print_change(
    session: Session, arguments: Namespace, before: dict[str, Any], now: dict[str, Any], at_ms: int
) -> None:
    counts = [None if each["counts"] is None else QueueCounts(*each["counts"])
              for each in (before, now)]  # fmt: skip
    happened = differences(*counts)
    depths = {name: now[name] for name in _DEPTHS}
    if not happened and depths == {name: before[name] for name in _DEPTHS}:
        return
    at = datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    what = ", ".join(f"{count:,} {name}" for name, count in happened.items()) or "changed"
    held = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in depths.items())
    fields = {"at_ms": at_ms, "queue": arguments.queue, **happened, **depths}
    session.print_result(arguments, fields, f"{at}  {what:<40}  {held}")
    flush()
