"""Verifies a whole store: what is damaged, what is missing, and what is lost by it.

It checks every checksum of the journal, the archive and the snapshots; that no file is missing;
that each snapshot, and the journal if it is complete, lead to one and the same state; and that
every message of that state can be read. It reads beside a live writer and changes nothing.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from penstock.core.receipts import MessageIds
from penstock.core.shard import ShardState
from penstock.errors import CorruptEntry, JournalError, StoreUnusable
from penstock.journal import codec, reader_positions
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.loss import Loss
from penstock.journal.place import position_of
from penstock.journal.reader import JournalReader
from penstock.journal.restore import Recovery
from penstock.journal.snapshot import Taken, read_snapshot, snapshot_paths
from penstock.journal.store import is_backup, open_reader, read_key
from penstock.output import counted

_ATTEMPTS_MAX: Final = 3


class Finding(NamedTuple):
    """One line about a store, and whether it reports damage or loss."""

    is_damage: bool
    text: str


def verify(path: str, archive: str | None = None) -> list[Finding]:
    """All findings about a store, a journal or an archive, in order.

    Raises StoreUnusable if it is none of these.
    """
    for _ in range(_ATTEMPTS_MAX - 1):
        # A live writer may drop a file while it is read: that is no damage.
        with suppress(JournalError):
            return _Verification(path, archive).findings()
    return _Verification(path, archive).findings()


class _Verification:
    """One pass over everything."""

    def __init__(self, path: str, archive: str | None) -> None:
        # The snapshots first: all that is in them is below the watermark that is read after them.
        self._taken: dict[Path, Taken | None] = {}
        with open_reader(path, archive) as reader:
            self._store = Path(reader.path).parent
            self._is_store = (self._store / "store").is_file() or is_backup(self._store)
        if self._is_store:
            self._taken = {each: read_snapshot(each) for each in snapshot_paths(self._store)}
        self._path = path
        self._archive = archive

    def findings(self) -> list[Finding]:
        with open_reader(self._path, self._archive) as reader:
            found = [*self._journal(reader), *self._missing_files(reader)]
            found += [
                Finding(True, f"journal: {each.why}, {each.size_bytes} bytes at {each.offset}")
                for each in reader.damage
            ]
            if self._is_store:
                found += self._key()
                found += self._snapshots(reader)
                found += self._state(reader, is_whole=not any(each.is_damage for each in found))
                found += self._readers(reader)
        return found

    def _journal(self, reader: JournalReader) -> list[Finding]:
        entries = events = 0
        lost: list[Finding] = []
        # A stream begins with the id 1; of one whose beginning was dropped the first id is unknown.
        end, next_id = reader.first_offset, int(reader.first_offset == 0)
        for entry in reader.entries(reader.first_offset):
            entries += 1
            if entry.version == codec.VERSION:
                events += len(reader.decoded(entry, bodies=False))
            lost += _lost_entries(end, next_id, entry.offset, entry.entry_id)
            end, next_id = entry.end_offset, entry.entry_id + 1
        if end <= reader.durable_offset == reader.position:
            lost += _lost_entries(end, next_id, reader.durable_offset, reader.next_id)
        text = (
            f"journal: {counted(entries, 'entry', 'entries')} with {counted(events, 'event')}, "
            f"offsets {reader.first_offset} to {reader.durable_offset}, "
            f"{counted(len(reader.file_numbers), 'file')}, identity {reader.identity.hex()}"
        )
        return [Finding(False, text), *lost]

    def _missing_files(self, reader: JournalReader) -> Iterator[Finding]:
        if self._is_store:
            loss = reader.loss()
        else:
            # An archive alone: the stream goes on in files that are not archived yet.
            files = reader.file_numbers
            first = reader.first_offset // reader.payload_bytes
            missing = sorted(set(range(first, files[-1] + 1)).difference(files))
            loss = Loss(reader.payload_bytes, files[-1], missing)
        for text in loss.findings() if loss else ():
            yield Finding(True, f"journal: {text}")

    def _key(self) -> Iterator[Finding]:
        try:
            key = read_key(self._store)
        except StoreUnusable as error:
            yield Finding(True, f"key: {str(error).rpartition(': ')[2]}")
            return
        if key is None:
            yield Finding(True, "key: is missing; receipts given out before will be refused")

    def _snapshots(self, reader: JournalReader) -> Iterator[Finding]:
        for path, taken in self._taken.items():
            if taken is None:
                # A live writer may have removed it since the names were listed.
                if path.exists():
                    yield Finding(True, f"{path.name}: is not whole")
            elif taken.outline.offset > reader.durable_offset:
                yield Finding(True, f"{path.name}: begins behind the end of the journal")
            else:
                count = len(taken.shard.departed.deliveries)
                count += sum(len(queue.deliveries) for queue in taken.shard.queues.values())
                yield Finding(False, f"{path.name}: {count:,} messages at {taken.outline.offset}")

    def _state(self, reader: JournalReader, is_whole: bool) -> Iterator[Finding]:
        states: list[tuple[str, ShardState]] = []
        for path, taken in self._taken.items():
            if taken is not None and _reaches(reader, taken):
                states.append((path.name, _replay(reader, taken)))
        if reader.first_offset == 0:
            states.append(("the whole journal", _replay(reader, None)))
        if not states:
            yield Finding(True, "state: neither a snapshot nor the journal leads to it")
            return
        name, newest = states[0]
        snapshot = newest.snapshot()
        queues = len(newest.queues)
        messages = sum(len(kept.deliveries) for kept in snapshot.queues)
        yield Finding(
            False,
            f"state: {counted(queues, 'queue')} with {counted(messages, 'message')}, from {name}",
        )
        for other, state in states[1:]:
            # Where entries are lost two ways to the state may differ; the loss is reported above.
            if is_whole and state.snapshot() != snapshot:
                yield Finding(True, f"state: {other} leads to another state than {name}")
        yield from self._contents(reader, newest)

    def _contents(self, reader: JournalReader, shard: ShardState) -> Iterator[Finding]:
        ids = MessageIds(reader.identity)
        messages_in = {queue.name: queue.deliveries for queue in shard.queues.values()}
        messages_in["the outbox"] = shard.departed.deliveries
        for name, deliveries in messages_in.items():
            for delivery in deliveries.values():
                assert isinstance(delivery.content, int)
                offset = position_of(delivery.content)
                try:
                    fields = codec.read_header(reader.read(offset, codec.EVENT_BYTES))
                    payload = reader.read(offset + fields.payload_at, fields.payload_bytes)
                    number = codec.read_pushed(fields, payload, offset).number
                except CorruptEntry:
                    number = 0
                if number != delivery.number:
                    which = f"message {ids.show(delivery.number)} in {name}"
                    yield Finding(True, f"{which}: its content at offset {offset} is damaged")

    def _readers(self, reader: JournalReader) -> Iterator[Finding]:
        try:
            registered = reader_positions.registered(self._store)
        except StoreUnusable as error:
            yield Finding(True, f"readers: {error}")
            return
        for each in registered:
            behind_bytes = each.behind_bytes(reader.durable_offset)
            text = (
                f"reader {each.name}: has read to {each.floor_offset}, {behind_bytes:,} bytes "
                "behind"
            )
            if each.floor_offset < reader.first_offset:
                text += f"; events before {reader.first_offset}, which it needs, are not here"
            yield Finding(False, text)


def _lost_entries(end: int, next_id: int, offset: int, entry_id: int) -> Iterator[Finding]:
    """The entries lost between one that ends at `end` and the next one that could be read."""
    count = entry_id - next_id if next_id else 0
    # A single lost entry is already reported in `damage`, with the reason.
    if count > 1:
        # If recovery could not count the lost entries, it skipped as many ids as could fit.
        at_most = "at most " if count == (offset - end) // HEADER_BYTES else ""
        text = f"{at_most}{count:,} entries are lost, ids {next_id} to {entry_id - 1}"
        yield Finding(True, f"journal: {text}, between offsets {end} and {offset}")


def _reaches(reader: JournalReader, taken: Taken) -> bool:
    return reader.first_offset <= taken.outline.offset <= reader.durable_offset


def _replay(reader: JournalReader, taken: Taken | None) -> ShardState:
    recovery = Recovery(taken)
    start = reader.first_offset if taken is None else taken.outline.offset
    for each in reader.events(start, bodies=False):
        recovery.apply_if_new(each.event, each.place)
    return recovery.finish()
