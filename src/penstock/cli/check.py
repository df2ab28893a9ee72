"""`penstock check PATH`: verifies all of a store, and says by its exit status whether it is sound.

Every checksum of the journal, the archive and the snapshots; that no file is missing between
others; that each snapshot, and the whole journal if it is still there, lead to one and the same
state; and that every message of that state can be read. It reads beside a live writer and changes
nothing.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.backends.engine.store import Recovery
from penstock.cli.inspect import DAMAGED, open_reader
from penstock.cli.session import Session
from penstock.cli.values import show_size
from penstock.core.delivery import position_of
from penstock.core.receipts import KEY_BYTES, MessageIds
from penstock.core.shard import ShardState
from penstock.errors import CorruptEntry, JournalError, StoreUnusable
from penstock.journal import codec, readers
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import Taken, read_snapshot, snapshot_paths

_TRIES: Final = 3


def add_arguments(parser: ArgumentParser) -> None:
    """Says what the command takes."""
    parser.add_argument("path", metavar="PATH", help="a store, a journal or an archive")
    parser.add_argument("--archive", metavar="DIR", help="verify the files archived there, too")


def run(session: Session, arguments: Namespace) -> int:
    """Prints what was found; 6 if anything is damaged."""
    findings = _findings(arguments.path, arguments.archive)
    damaged = [text for is_damage, text in findings if is_damage]
    if arguments.json:
        sound = [text for is_damage, text in findings if not is_damage]
        session.tell_json({"sound": not damaged, "damaged": damaged, "found": sound})
    else:
        for is_damage, text in findings:
            print(("DAMAGED  " if is_damage else "ok       ") + text)
        print("sound" if not damaged else f"{len(damaged)} damaged")
    return DAMAGED if damaged else 0


def _findings(path: str, archive: str | None) -> list[tuple[bool, str]]:
    for _ in range(_TRIES - 1):
        # A live writer may drop what we are reading: that is no damage.
        with suppress(JournalError):
            return _Check(path, archive).findings()
    return _Check(path, archive).findings()


class _Check:
    """One look at everything; a finding is whether it is damage, and a line about it."""

    def __init__(self, path: str, archive: str | None) -> None:
        # The snapshots first: whatever they show is then below the watermark we read next.
        self._taken: dict[Path, Taken | None] = {}
        with open_reader(path, archive) as reader:
            self._store = Path(reader.path).parent
            self._is_store = (self._store / "store").is_file()
        if self._is_store:
            self._taken = {each: read_snapshot(each) for each in snapshot_paths(self._store)}
        self._path = path
        self._archive = archive

    def findings(self) -> list[tuple[bool, str]]:
        """Everything there is to say, in order."""
        with open_reader(self._path, self._archive) as reader:
            found = [*self._journal(reader)]
            if self._is_store:
                found += self._key()
                found += self._snapshots(reader)
                found += self._state(reader, is_whole=not any(bad for bad, _ in found))
                found += self._readers(reader)
        return found

    def _journal(self, reader: JournalReader) -> Iterator[tuple[bool, str]]:
        entries = events = 0
        for entry in reader.entries(reader.first_offset):
            entries += 1
            if entry.version == codec.VERSION:
                events += len(reader.decoded(entry, bodies=False))
        files = reader.file_numbers
        start, end = reader.first_offset, reader.durable_offset
        told = f"journal: {entries:,} entries with {events:,} events, offsets {start} to {end}, "
        yield False, told + f"{len(files)} files, identity {reader.identity.hex()}"
        if not self._is_store:
            # An archive alone: the stream goes on in files that are not archived yet.
            end = (files[-1] + 1) * reader.payload_bytes
        needed = range(start // reader.payload_bytes, -(-end // reader.payload_bytes))
        for number in sorted(set(needed) - set(files)):
            yield True, f"journal: file {number:012d}.seg is missing"
        for damage in reader.damage:
            yield (
                True,
                f"journal: {damage.why}, {damage.size_bytes} bytes at offset {damage.offset}",
            )

    def _key(self) -> Iterator[tuple[bool, str]]:
        path = self._store / "key"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            yield True, "key: is missing; receipts given out before will not be known"
            return
        if size != KEY_BYTES:
            yield True, f"key: holds {size} bytes where a key has {KEY_BYTES}"

    def _snapshots(self, reader: JournalReader) -> Iterator[tuple[bool, str]]:
        for path, taken in self._taken.items():
            if taken is None:
                # A live writer may have let it go between two looks.
                if path.exists():
                    yield True, f"{path.name}: is not whole"
            elif taken.outline.offset > reader.durable_offset:
                yield True, f"{path.name}: begins behind the end of the journal"
            else:
                count = sum(len(queue.deliveries) for queue in taken.shard.queues.values())
                yield False, f"{path.name}: {count:,} messages at {taken.outline.offset}"

    def _state(self, reader: JournalReader, is_whole: bool) -> Iterator[tuple[bool, str]]:
        states: list[tuple[str, ShardState]] = []
        for path, taken in self._taken.items():
            if taken is not None and self._reaches(reader, taken):
                states.append((path.name, _replay(reader, taken)))
        if reader.first_offset == 0:
            states.append(("the whole journal", _replay(reader, None)))
        if not states:
            yield True, "state: neither a snapshot nor the journal leads to it"
            return
        name, newest = states[0]
        snapshot = newest.snapshot()
        queues = len(snapshot.queues)
        messages = sum(len(kept.deliveries) for kept in snapshot.queues)
        yield False, f"state: {queues} queues with {messages:,} messages, from {name}"
        for other, state in states[1:]:
            # Where entries are lost two ways to the state may differ; that is told already.
            if is_whole and state.snapshot() != snapshot:
                yield True, f"state: {other} leads to another state than {name}"
        yield from self._contents(reader, newest)

    def _reaches(self, reader: JournalReader, taken: Taken) -> bool:
        return reader.first_offset <= taken.outline.offset <= reader.durable_offset

    def _contents(self, reader: JournalReader, shard: ShardState) -> Iterator[tuple[bool, str]]:
        ids = MessageIds(reader.identity)
        for queue in shard.queues.values():
            for delivery in queue.deliveries.values():
                assert isinstance(delivery.content, int)
                offset = position_of(delivery.content)
                try:
                    fields = codec.read_header(reader.read(offset, codec.EVENT_BYTES))
                    payload = reader.read(offset + fields.payload_at, fields.payload_bytes)
                    whose = codec.read_pushed(fields, payload, offset).number
                except CorruptEntry:
                    whose = 0
                if whose != delivery.number:
                    which = f"message {ids.show(delivery.number)} in {queue.name}"
                    yield True, f"{which}: its content at offset {offset} is damaged"

    def _readers(self, reader: JournalReader) -> Iterator[tuple[bool, str]]:
        try:
            found = readers.registered(self._store)
        except StoreUnusable as error:
            yield True, f"readers: {error}"
            return
        for each in found:
            behind = show_size(max(0, reader.durable_offset - each.floor_offset))
            text = f"reader {each.name}: has read to {each.floor_offset}, {behind} behind"
            if each.floor_offset < reader.first_offset:
                text += f"; what it needs before {reader.first_offset} is not here"
            yield False, text


def _replay(reader: JournalReader, taken: Taken | None) -> ShardState:
    recovery = Recovery(taken)
    start = reader.first_offset if taken is None else taken.outline.offset
    for seen in reader.events(start, bodies=False):
        recovery.apply_if_new(seen.event, seen.place)
    return recovery.finish()
