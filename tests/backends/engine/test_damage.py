"""Row 4 of the scorecard, for the engine: damage costs only the damaged entries.

A store is built, bits are flipped in a copy of it, and all messages of the copy are pulled.
"""

import random
import shutil

import pytest

from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import Carried, Deleted, Pushed
from penstock.errors import StoreUnusable
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import snapshot_paths
from penstock.journal.verify import verify
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    ListQueues,
    Pull,
    Push,
)
from tests.backends.engine.random_store import first_difference, plain_state, small_slices
from tests.backends.engine.test_upkeep import ReopenedStore

FILE_BYTES = 16_384
PAGE_BYTES = 4_096


class Built:
    """A closed store, the messages that it should have, and the position of each event."""

    def __init__(self, root, passes):
        self.root = root
        rng = random.Random(len(str(passes)))
        store = ReopenedStore(root, file_bytes=FILE_BYTES, archive=None)
        store(CreateQueue("a"), CreateQueue("b", {"visibility_ms": 1_000}))
        for turn in range(60):
            queue = "ab"[turn % 2]
            body = rng.randbytes(rng.choice([0, 9, 700]))
            store(Push(queue, body, priority=turn % 3, group="g"))
            if turn % 5 == 4:
                for claim in store(Pull(queue, 2)):
                    store(Delete(queue, claim.receipt))
            if turn in passes:
                store.run_pass()
        load = store.engine.journal.load
        self.live = {
            each.number: load(each.content)
            for queue in store.engine.shard.queues.values()
            for each in queue.deliveries.values()
        }
        store.engine.close()
        with JournalReader(root / "store" / "journal", archive=root / "none") as reader:
            self.payload_bytes = reader.payload_bytes
            self.end = reader.durable_offset
            self.entries = [
                (entry.offset, entry.end_offset, [seen.event for seen in reader.decoded(entry)])
                for entry in reader.entries(reader.first_offset)
            ]

    def hit_by(self, offset):
        """The events of the entry that contains this byte of the stream."""
        return [e for start, end, events in self.entries if start <= offset < end for e in events]

    def flipped(self, to, *bits):
        """A copy with these bits of the stream flipped."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.root / "store", to)
        for offset, bit in bits:
            number, within = divmod(offset, self.payload_bytes)
            flip(to / "journal" / f"{number:012d}.seg", PAGE_BYTES + within, bit)
        return to


def flip(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def drained(engine):
    """All messages of all queues that can be pulled, by number."""
    found = {}
    engine.clock.advance(seconds=3_600)
    for name in engine.submit(ListQueues()):
        engine.submit(ConfigureQueue(name, {"dead_letter": None, "max_receives": None}))
        while claims := engine.submit(Pull(name, 100)):
            for claim in claims:
                assert claim.sequence not in found
                found[int(claim.id[-12:], 16)] = claim
                assert engine.submit(Delete(name, claim.receipt)) is True
    return found


def open_copy(path):
    return open_engine(path, clock=ManualClock(), file_bytes=FILE_BYTES)


def check_served(built, engine, hit):
    """Checks that no wrong content is pulled, and only events of the damaged entry are lost."""
    lost_contents = {event.number for event in hit if isinstance(event, Pushed | Carried)}
    lost_deletes = {event.number for event in hit if isinstance(event, Deleted)}
    found = drained(engine)
    every = {e.number: e for _, _, events in built.entries for e in events if isinstance(e, Pushed)}
    every |= built.live
    for number, claim in found.items():
        pushed = every[number]
        assert (claim.body, claim.priority, claim.group) == (pushed.body, pushed.priority, "g")
    assert built.live.keys() - found.keys() <= lost_contents
    assert found.keys() - built.live.keys() <= lost_deletes
    engine.close()


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return {
        "journal": Built(tmp_path_factory.mktemp("journal"), ()),
        "snapshots": Built(tmp_path_factory.mktemp("snapshots"), (25, 45)),
    }


@pytest.mark.parametrize("kind", ["journal", "snapshots"])
@pytest.mark.parametrize("part", range(4))
def test_a_flipped_bit_anywhere_in_the_stream_costs_only_its_entry(built, quick_path, kind, part):
    store = built[kind]
    rng = random.Random(part)
    for _ in range(40):
        offset = rng.randrange(store.end)
        copy = store.flipped(quick_path / "copy", (offset, rng.randrange(8)))
        check_served(store, open_copy(copy), store.hit_by(offset))


@pytest.mark.parametrize("kind", ["journal", "snapshots"])
def test_a_flipped_bit_in_a_header_costs_only_its_entry(built, quick_path, kind):
    store = built[kind]
    for start, _, _ in (store.entries[0], store.entries[len(store.entries) // 2]):
        for bit in range(0, 32 * 8, 7):
            copy = store.flipped(quick_path / "copy", (start + bit // 8, bit % 8))
            check_served(store, open_copy(copy), store.hit_by(start))


@pytest.mark.parametrize("kind", ["journal", "snapshots"])
def test_damage_is_reported_in_one_line_when_a_store_is_opened(built, quick_path, kind, caplog):
    store = built[kind]
    start = store.entries[-2][0]
    copy = store.flipped(quick_path / "copy", (start + 40, 1))
    open_copy(copy).close()
    (line,) = caplog.messages
    assert line.startswith(f"{copy}: the journal is damaged: data does not match its checksum, ")
    assert line.endswith(f"; penstock check {copy} says what is lost")
    assert {each.levelname for each in caplog.records} == {"WARNING"}
    caplog.clear()
    open_copy(store.flipped(quick_path / "copy")).close()
    assert caplog.messages == []


@pytest.mark.parametrize("kind", ["journal", "snapshots"])
def test_a_store_whose_header_page_was_repaired_has_no_damage(built, quick_path, kind, caplog):
    copy = built[kind].flipped(quick_path / "copy")
    flip(sorted((copy / "journal").glob("*.seg"))[0], 20, 3)
    assert [each.text for each in verify(str(copy)) if each.is_damage] != []
    engine = open_copy(copy)
    assert "does not match its checksum, 0 bytes at" in caplog.messages[0]
    # A snapshot of the state is compared with the journal by `verify`.
    assert engine.upkeep is not None
    engine.upkeep.run_pass()
    engine.close()
    assert [each.text for each in verify(str(copy)) if each.is_damage] == []


@pytest.mark.parametrize("part", range(3))
def test_content_damaged_while_the_engine_runs_is_never_returned_by_a_pull(built, quick_path, part):
    store = built["snapshots"]
    rng = random.Random(part)
    pushes = [entry for entry in store.entries if isinstance(entry[2][0], Pushed | Carried)]
    for _ in range(40):
        copy = store.flipped(quick_path / "copy")
        engine = open_copy(copy)
        start, end, events = rng.choice(pushes)
        # After the entry's own header, which is not read again: the event's header and payload.
        offset = rng.randrange(start + 32, end)
        number, within = divmod(offset, store.payload_bytes)
        flip(copy / "journal" / f"{number:012d}.seg", PAGE_BYTES + within, rng.randrange(8))
        check_served(store, engine, events)


def test_a_pull_skips_many_damaged_messages_in_a_row(quick_path):
    store = ReopenedStore(quick_path, archive=None, file_bytes=FILE_BYTES)
    store(CreateQueue("q"))
    for number in range(3_000):
        store(Push("q", b"%04d" % number * 4))
    store(Push("q", b"whole"))
    store.run_pass()
    store.reopen()
    for delivery in list(store.engine.shard.queues[1].deliveries.values())[:-1]:
        offset = delivery.content >> 32
        for at in range(offset + 64, offset + 64 + 8):
            number, within = divmod(at, store.engine.journal.segments.payload_bytes)
            flip(quick_path / "store" / "journal" / f"{number:012d}.seg", PAGE_BYTES + within, 3)
    found = []
    for _ in range(3_001):
        found += [claim.body for claim in store(Pull("q"))]
    assert found == [b"whole"]
    store.engine.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_flipped_bit_in_one_snapshot_costs_nothing(built, quick_path, which):
    store = built["snapshots"]
    expected = None
    rng = random.Random(which)
    for turn in range(60):
        copy = store.flipped(quick_path / "copy")
        path = snapshot_paths(copy)[which]
        if turn:
            flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        engine = open_copy(copy)
        found = plain_state(engine.shard, engine.journal.load)
        expected = expected or found
        assert first_difference(found, expected) is None
        engine.close()


def test_a_snapshot_cut_short_anywhere_costs_nothing(built, quick_path):
    store = built["snapshots"]
    size = snapshot_paths(store.root / "store")[0].stat().st_size
    for cut in range(0, size, 97):
        copy = store.flipped(quick_path / "copy")
        path = snapshot_paths(copy)[0]
        path.write_bytes(path.read_bytes()[:cut])
        check_served(store, open_copy(copy), [])


def test_a_store_whose_snapshots_are_all_damaged_is_refused(quick_path):
    store = ReopenedStore(quick_path, archive=None, file_bytes=FILE_BYTES)
    store(CreateQueue("q"), CreateQueue("gone"))
    for _ in range(6):
        store(*[Push("gone", bytes(2_000))] * 20)
        store(Push("q", b"kept"))
        store(DeleteQueue("gone"), CreateQueue("gone"))
        store.run_pass()
    assert store.engine.journal.segments.first_offset > 0
    store.engine.close()
    for path in snapshot_paths(quick_path / "store"):
        flip(path, 50, 1)
    with pytest.raises(StoreUnusable, match="no snapshot is whole"):
        open_copy(quick_path / "store")


def test_messages_of_a_queue_whose_creation_was_lost_are_in_a_recovered_queue(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), Push("q", b"one"), Push("q", b"two"))
    store.engine.close()
    flip(quick_path / "store" / "journal" / "000000000000.seg", PAGE_BYTES + 60, 1)
    store.reopen()
    assert store(ListQueues()) == ["recovered-1"]
    assert store.bodies("recovered-1") == [b"one", b"two"]
    store.engine.close()


def test_the_number_of_a_message_lost_to_damage_is_not_used_again(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), Push("q", b"one"))
    lost = store(Push("q", b"two")).id
    end = store.engine.journal.segments.end_offset
    store.engine.close()
    flip(quick_path / "store" / "journal" / "000000000000.seg", PAGE_BYTES + end - 1, 1)
    store.reopen()
    assert store(Push("q", b"three")).id != lost
    assert store.bodies("q") == [b"one", b"three"]
    store.engine.close()


def test_a_queue_whose_removal_was_lost_is_replaced_by_the_next_of_its_name(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("q"), Push("q", b"old", ttl_ms=5_000), Pull("q", visibility_ms=1_000))
    start = store.engine.journal.segments.end_offset
    store(DeleteQueue("q"))
    store(CreateQueue("q"), Push("q", b"new"))
    store.engine.close()
    flip(quick_path / "store" / "journal" / "000000000000.seg", PAGE_BYTES + start + 40, 1)
    store.reopen()
    store.clock.advance(seconds=10)
    store.engine.tick()
    assert store.bodies("q") == [b"new"]
    store.engine.close()
