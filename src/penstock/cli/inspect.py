"""`penstock inspect PATH`: the durable events of a store's journal, one for each line.

It can run while another process has the store open, takes no lock and changes nothing. PATH may be
a store, a journal or an archive directory.
"""

import time
from argparse import ArgumentParser, Namespace
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.cli.session import Session
from penstock.cli.show import as_text
from penstock.cli.values import read_count
from penstock.core.events import AnyEvent, Carried, Moved, Pushed, QueueCreated, QueueStated
from penstock.core.receipts import MessageIds
from penstock.journal import codec
from penstock.journal.entry import StoredEntry
from penstock.journal.reader import JournaledEvent, JournalReader
from penstock.journal.scan import Quarantined
from penstock.journal.snapshot import read_outline, snapshot_paths
from penstock.journal.store import open_reader

DAMAGED: Final = 6
_POLL_S: Final = 0.1
_PREVIEW_CHARS: Final = 48
_FIELDS_WITH_COLUMN: Final = (
    "at_ms",
    "queue",
    "number",
    "pushed",
    "body",
    "attributes",
    "context",
    "settings",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a store, a journal or an archive (default: the store of --url)",
    )
    parser.add_argument("--archive", metavar="DIR", help="begin with the files archived there")
    parser.add_argument("--queue", metavar="NAME", help="only events of this queue (or #NUMBER)")
    parser.add_argument(
        "--from", dest="start", type=read_count, metavar="OFFSET", help="begin at this offset"
    )
    parser.add_argument("--follow", action="store_true", help="continue as events are written")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the events; returns 6 if some of them are damaged."""
    with open_reader(session.path(arguments), arguments.archive) as reader:
        printer = EventPrinter(session, arguments, reader)
        start = reader.first_offset if arguments.start is None else arguments.start
        for _ in follow(reader, printer, start):
            if not arguments.follow:
                break
        return DAMAGED if reader.damage else 0


def follow(reader: JournalReader, printer: "EventPrinter", start: int) -> Iterator[None]:
    """Prints the events from an offset on; yields each time when all that there are are printed."""
    offset: int | None = start
    while True:
        for entry in reader.entries(offset):
            printer.print_entry(entry)
        printer.print_damage()
        yield
        offset = None
        while reader.refresh() == reader.position:
            time.sleep(_POLL_S)


class EventPrinter:
    """Prints events with the names of their queues, also of queues that were deleted."""

    def __init__(
        self,
        session: Session,
        arguments: Namespace,
        reader: JournalReader,
        *,
        with_places: bool = True,
    ) -> None:
        """`with_places`: each line begins with the place of its event in the journal."""
        self._with_places = with_places
        self._session = session
        self._arguments = arguments
        self._reader = reader
        self._ids = MessageIds(reader.identity)
        self._printed: set[Quarantined] = set()
        self._names: dict[int, str] = {}
        for path in reversed(snapshot_paths(Path(reader.path).parent)):
            outline = read_outline(path)
            if outline is not None:
                self._names |= {kept.number: kept.name for kept in outline.shard.queues}

    def print_entry(self, entry: StoredEntry) -> None:
        """Prints the events of an entry, and before them the damage found before it."""
        if entry.version != codec.VERSION:
            version = entry.version.decode(errors="backslashreplace")
            fields = {"offset": entry.offset, "entry": entry.entry_id, "version": version}
            text = f"{entry.offset:>12}  {entry.entry_id:>8}  {version}, {len(entry.data)} bytes"
            self._session.print_result(self._arguments, fields | {"bytes": len(entry.data)}, text)
            return
        journaled = self._reader.decoded(entry)
        self.print_damage()
        for each in journaled:
            self.note_name(each.event)
            if self._arguments.queue in (None, *self._names_of(each.event)):
                self._session.print_result(
                    self._arguments, self._as_json(each), self._as_text(each)
                )

    def note_name(self, event: AnyEvent) -> None:
        """Takes the name of a queue from the event that made it."""
        if isinstance(event, QueueCreated | QueueStated):
            self._names[event.queue] = event.name

    def print_damage(self) -> None:
        """Prints the damage found since the last call."""
        for found in self._reader.damage:
            if found not in self._printed:
                self._printed.add(found)
                fields = {"offset": found.offset, "damaged": found.why, "bytes": found.size_bytes}
                text = f"{found.offset:>12}  DAMAGED: {found.why} ({found.size_bytes} bytes)"
                self._session.print_result(self._arguments, fields, text)

    def _name(self, number: int) -> str:
        return self._names.get(number, f"#{number}")

    def _names_of(self, event: AnyEvent) -> Iterator[str]:
        for number in (event.queue, event.to) if isinstance(event, Moved) else (event.queue,):
            yield self._name(number)
            yield f"#{number}"

    def _details(self, event: AnyEvent) -> dict[str, Any]:
        """The fields of the event that have no column of their own; empty ones are left out."""
        source = event.pushed if isinstance(event, Carried) else event
        named = {
            name: getattr(source, name)
            for name in source.__struct_fields__
            if name not in _FIELDS_WITH_COLUMN and getattr(source, name)
        }
        if isinstance(event, Moved):
            named["to"] = self._name(event.to)
        return named

    def _as_json(self, journaled: JournaledEvent) -> dict[str, Any]:
        event = journaled.event
        fields: dict[str, Any] = {
            "offset": journaled.offset,
            "entry": journaled.entry_id,
            "at_ms": event.at_ms,
            "event": type(event).__name__,
            "queue": self._name(event.queue),
        }
        if hasattr(event, "number"):
            fields["message"] = self._ids.show(event.number)
        content = event.pushed if isinstance(event, Carried) else event
        if isinstance(content, Pushed):
            text = as_text(content.body)
            if text is None:
                fields["body_base64"] = b64encode(content.body).decode()
            else:
                fields["body"] = text
            fields["attributes"] = content.attributes or {}
            if content.context is not None:
                fields["context"] = content.context
        settings = getattr(event, "settings", None)
        if settings is not None:
            fields["settings"] = settings
        return fields | self._details(event)

    def _as_text(self, journaled: JournaledEvent) -> str:
        event = journaled.event
        at = datetime.fromtimestamp(event.at_ms / 1_000, UTC).isoformat(" ", "milliseconds")
        place = f"{journaled.offset:>12}  {journaled.entry_id:>8}  " if self._with_places else ""
        words = [
            f"{place}{at.removesuffix('+00:00')}",
            f"{type(event).__name__:<15}",
            self._name(event.queue),
        ]
        if hasattr(event, "number"):
            words.append(self._ids.show(event.number))
        words += [f"{name}={value}" for name, value in self._details(event).items()]
        content = event.pushed if isinstance(event, Carried) else event
        if isinstance(content, Pushed):
            words.append(_preview(content.body))
        return "  ".join(words)


def _preview(body: bytes) -> str:
    """The first characters of a body on one line; control characters are escaped."""
    text = as_text(body[: 4 * _PREVIEW_CHARS])
    if text is None:
        return f"{len(body)} bytes"
    shown = ascii(text[:_PREVIEW_CHARS])
    return shown + ("…" if len(text) > _PREVIEW_CHARS or len(body) > 4 * _PREVIEW_CHARS else "")
