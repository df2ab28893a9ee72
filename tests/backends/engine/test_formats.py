"""The formats of `docs/formats/block.md` and `snapshot.md`: golden bytes, written and read.

Each line of a file has a name and bytes in hexadecimal. The files are never edited, only added to;
if a test here fails, stores of earlier versions can no longer be read.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from penstock.core.delivery import (
    DELAYED,
    DEPARTED,
    IN_FLIGHT,
    OUTBOX,
    VISIBLE,
    Arrivals,
    Delivery,
    Departure,
    Move,
)
from penstock.core.events import (
    AnyEvent,
    Arrived,
    Carried,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Departed,
    Expired,
    Extended,
    Lost,
    Moved,
    Pushed,
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    QueueStated,
    Released,
)
from penstock.core.replay import apply_arrivals_if_new, apply_if_new
from penstock.core.runs import Run
from penstock.core.shard import QueueSnapshot, ShardSnapshot, replay
from penstock.errors import CorruptEntry
from penstock.journal import codec, concerns
from penstock.journal.columns import pack_columns, unpack_columns
from penstock.journal.file_journal import FileJournal
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from penstock.journal.snapshot import (
    Outline,
    SnapshotWriter,
    pack_dedups,
    pack_slice,
    read_outline,
    read_snapshot,
    snapshot_paths,
)
from penstock.service import QueueSettings

GOLDEN = Path(__file__).parents[2] / "golden" / "blocks"
# In order of age. The fourth has queues since their settings have a priority age, the seventh since
# they can be paused.
EVENT_FILES = (
    "events-1.txt",
    "events-2.txt",
    "events-3.txt",
    "events-4.txt",
    "events-5.txt",
    "events-6.txt",
    "events-7.txt",
)
AT_MS = 1_700_000_000_123
SETTINGS = QueueSettings(dead_letter="dead", max_receives=3, annotations={"a": "b"})
PUSHED = Pushed(
    AT_MS, 2, 77, b"hello", {"kind": "test", "raw": b"\x00\xff"}, 9, "eu", "order-42",
    AT_MS + 5_000, AT_MS + 60_000, {"trace": "1"}, 5 + 8 + 5,
)  # fmt: skip
EVENTS: dict[str, list[Any]] = {
    "QueueCreated": [QueueCreated(AT_MS, 2, "orders", SETTINGS)],
    "QueueConfigured": [QueueConfigured(AT_MS, 2, SETTINGS)],
    "QueueConfigured, priority age": [
        QueueConfigured(AT_MS, 2, QueueSettings(priority_age_ms=300_000))
    ],
    "QueueConfigured, paused": [QueueConfigured(AT_MS, 2, QueueSettings(paused=True))],
    "QueueRemoved": [QueueRemoved(AT_MS, 2, 1_000)],
    "QueuePurged": [QueuePurged(AT_MS, 2, 5, 99)],
    "Pushed, plain": [Pushed(AT_MS, 2, 76, b"hi", size_bytes=2)],
    "Pushed, empty": [Pushed(AT_MS, 2, 75, b"", size_bytes=0)],
    "Pushed, with everything": [PUSHED],
    "DelayEnded": [DelayEnded(AT_MS, 2, 77, 0)],
    "Claimed, plain": [Claimed(AT_MS, 2, 77, 1, AT_MS + 30_000)],
    "Claimed, with everything": [Claimed(AT_MS, 2, 77, 1, AT_MS + 30_000, "try-1", "worker-7")],
    "Extended": [Extended(AT_MS, 2, 77, 1, AT_MS + 60_000)],
    "Released": [Released(AT_MS, 2, 77, 1)],
    "Released, delayed": [Released(AT_MS, 2, 77, 1, AT_MS + 1_000)],
    "ClaimExpired": [ClaimExpired(AT_MS, 2, 77, 1)],
    "Deleted": [Deleted(AT_MS, 2, 77, 2)],
    "Expired": [Expired(AT_MS, 2, 77)],
    "Moved": [Moved(AT_MS, 2, 77, 3, 80, False)],
    "Moved, a dead letter": [Moved(AT_MS, 2, 77, 3, 80, True)],
    "Lost": [Lost(AT_MS, 2, 77, 2)],
    "Carried": [Carried(AT_MS + 9, 3, 77, PUSHED)],
    "QueueStated": [QueueStated(AT_MS, 2, "orders", SETTINGS, AT_MS - 9, AT_MS - 1)],
    "Departed": [Departed(AT_MS, 2, 77, 3, 5, "dead")],
    "Arrived": [Arrived(AT_MS, 2, 77, 3)],
    "Arrived, with its place": [Arrived(AT_MS, 2, 77, 3, 4, 123_456)],
    "Claimed, held": [Claimed(AT_MS, 2, 77, 1, AT_MS + 30_000, None, "worker-7")],
    "claims of one holder": [
        Claimed(AT_MS, 2, 77, 1, AT_MS + 30_000, None, "worker-7"),
        Deleted(AT_MS, 2, 70, 4),
        Claimed(AT_MS, 2, 78, 1, AT_MS + 30_000, None, "worker-7"),
    ],
    "a batch": [
        Pushed(AT_MS, 2, 78, b"one", size_bytes=3),
        Pushed(AT_MS, 2, 79, b"two", group="g", size_bytes=3),
        Deleted(AT_MS, 2, 70, 4),
    ],
}


def golden(name):
    lines = (GOLDEN / name).read_text().splitlines()
    pairs = (line.rsplit(": ", 1) for line in lines if line and not line.startswith("#"))
    return {name: bytes.fromhex(digits) for name, digits in pairs}


def golden_events():
    """The newest block of every kind: a file is never edited, so later ones have their own."""
    return {name: block for file in EVENT_FILES for name, block in golden(file).items()}


@pytest.mark.parametrize("name", EVENTS)
def test_golden_blocks_are_written_and_read_as_these_bytes(name):
    events = EVENTS[name]
    block = golden_events()[name]
    assert codec.encode(events)[0] == block
    decoded = list(codec.decode(block, 0))
    found: list[Any] = [event for event, _ in decoded]
    if name == "Carried":
        # Only the content is carried; the time and the queue of the push are in the snapshot.
        assert (found[0].queue, found[0].number, found[0].at_ms) == (3, 77, AT_MS + 9)
        assert found[0].pushed.body == PUSHED.body
        assert found[0].pushed.attributes == PUSHED.attributes
        assert found[0].pushed.expires_at_ms == PUSHED.expires_at_ms
        return
    assert found == events


@pytest.mark.parametrize("file", EVENT_FILES)
def test_every_golden_block_of_a_queue_ever_written_is_read(file):
    for name, block in golden(file).items():
        if name.startswith("Queue"):
            assert [event for event, _ in codec.decode(block, 0)] == EVENTS[name]


def test_every_kind_of_event_has_a_golden_block():
    assert {type(events[0]) for events in EVENTS.values()} == set(codec.KINDS)
    assert golden_events().keys() == EVENTS.keys()


def test_the_events_of_one_message_are_found_without_reading_the_others():
    # Bodies, queues and times that contain the bytes of the numbers that are searched for.
    numbers = b"".join(number.to_bytes(8, "little") for number in range(1, 300))
    events: list[Any] = [
        Pushed(1, 1, 1, numbers, size_bytes=len(numbers)),
        *[event for name, listed in EVENTS.items() if name != "Carried" for event in listed],
        Deleted(77, 77, 78, 77),
        Deleted(256, 1, 256, 1),
        Claimed(1, 1, 1, 1, 1),
    ]
    block = codec.encode(events)[0]
    everything = [event for event, _ in codec.decode(block, 0, bodies=False)]
    for number in (1, 2, 70, 75, 76, 77, 78, 79, 80, 256, 999):
        wanted = [event for event in everything if concerns(event, number)]
        found = codec.decode_number(block, 0, number)
        assert [event for event in found if concerns(event, number)] == wanted
    assert list(codec.decode_number(b"", 0, 1)) == []


def test_a_block_has_its_shard_and_its_term():
    event = Deleted(AT_MS, 2, 77, 2)
    block = codec.encode([event], shard=5, term=9)[0]
    assert block[:16].hex(" ", 4) == "01000000 05000000 09000000 00000000"
    assert codec.read_owner(block) == (5, 9)
    assert codec.block_header(1, 5, 9) + codec.pack_plain(event, codec.EVENT_BYTES)[0] == block
    run = Run(AT_MS, 2, 70, [b"a", b"bc"], None, [1, 2], 3)
    pushes = [Pushed(AT_MS, 2, 70, b"a", size_bytes=1), Pushed(AT_MS, 2, 71, b"bc", size_bytes=2)]
    assert codec.encode_run(run, 5, 9) == codec.encode(pushes, 5, 9)[0]


def test_a_journal_writes_its_shard_and_its_term_into_every_entry(tmp_path):
    journal = FileJournal(Segments.open(tmp_path, background=False), shard=5, term=9)
    push = Pushed(AT_MS, 2, 70, b"a", size_bytes=1)
    journal.append([push])
    journal.append([push, Deleted(AT_MS, 2, 70, 1)])
    journal.append(Run(AT_MS, 2, 71, [b"a", b"bc"], None, [1, 2], 3))
    journal.close()
    with JournalReader(tmp_path) as reader:
        owners = [(each.shard, each.term) for each in reader.events()]
    assert owners == [(5, 9)] * 5


@pytest.mark.parametrize("name", EVENTS)
def test_a_block_truncated_within_its_headers_is_refused(name):
    block = golden_events()[name]
    for size in range(16 + 64 * len(EVENTS[name])):
        with pytest.raises(CorruptEntry):
            list(codec.decode(block[:size], 0))


def test_a_message_is_found_again_by_its_place_and_verified():
    events = EVENTS["a batch"]
    block, messages = codec.encode(events)
    for (at, size), pushed in zip(messages, events, strict=False):
        fields = codec.read_header(block[at : at + 64])
        start = at + fields.payload_at
        payload = block[start : start + fields.payload_bytes]
        assert codec.read_pushed(fields, payload, at) == pushed
        assert size == pushed.size_bytes
        with pytest.raises(CorruptEntry, match=f"offset {at}"):
            codec.read_pushed(fields, b"X" + payload[1:], at)


def example_snapshot():
    settings = QueueSettings()
    queue = QueueSnapshot(
        2, "orders", SETTINGS, AT_MS, AT_MS + 1, [],
        [(AT_MS, "order-42", 77), (AT_MS, ("eu", "x"), 78)],
        [(AT_MS, "try-1", [(77, 1)])],
    )  # fmt: skip
    dead = QueueSnapshot(3, "dead", settings, AT_MS, AT_MS, [], [], [])
    outline = Outline(4_096, AT_MS + 2, ShardSnapshot(81, 4, [queue, dead]))
    slices = [
        [
            Delivery(2, 76, 76, 100 << 32 | 2, AT_MS),
            Delivery(
                2, 77, 77, 200 << 32 | 18, AT_MS, IN_FLIGHT, 1, AT_MS + 9, 9, "eu", AT_MS + 99
            ),
        ],
        [
            Delivery(2, 78, 78, 300 << 32, AT_MS, DELAYED, 0, AT_MS + 5),
            Delivery(
                3, 70, 80, 50 << 32 | 7, AT_MS, VISIBLE, 3,
                first_claimed_at_ms=AT_MS, move=Move(AT_MS, 2, 3, True),
            ),
        ],
    ]  # fmt: skip
    return outline, slices


def write_golden_snapshot(directory):
    outline, slices = example_snapshot()
    dedups = outline.shard.queues[0].dedups
    outline.shard.queues[0].dedups = []
    outline.number, outline.term = 3, 7
    writer = SnapshotWriter(directory, outline)
    for each in dedups:
        writer.add(pack_dedups(2, [each]))
    for each in slices:
        writer.add(pack_slice(each))
    writer.finish()
    (path,) = snapshot_paths(directory)
    return path


def test_the_golden_snapshot_is_what_is_written(tmp_path):
    path = write_golden_snapshot(tmp_path)
    assert path.name == "snapshot-0000000000001000"
    assert path.read_bytes() == b"".join(golden("snapshot-5.txt").values())
    outline = read_outline(path)
    assert outline is not None
    assert (outline.number, outline.term) == (3, 7)


@pytest.mark.parametrize("name", [f"snapshot-{number}.txt" for number in range(1, 6)])
def test_the_golden_snapshots_are_read_as_their_state(tmp_path, name):
    path = tmp_path / "snapshot-0000000000001000"
    path.write_bytes(b"".join(golden(name).values()))
    taken = read_snapshot(path)
    outline, slices = example_snapshot()
    assert taken is not None
    if name in ("snapshot-1.txt", "snapshot-2.txt"):
        assert read_outline(path) == outline
    assert (taken.outline.offset, taken.outline.at_ms) == (4_096, AT_MS + 2)
    assert taken.is_ordered
    assert taken.early == {}
    expected = outline.shard
    expected.queues[0].deliveries = [*slices[0], slices[1][0]]
    expected.queues[1].deliveries = [slices[1][1]]
    assert taken.shard.snapshot() == expected


def test_the_golden_slice_of_the_outbox_is_written_and_read_as_these_bytes(tmp_path):
    """Written by `pack_slice` in the middle of other slices, and read into the shard's outbox."""
    outline, (first, _) = example_snapshot()
    departure = Departure(AT_MS + 1, 2, 3, True, 5, "dead")
    departed = Delivery(
        OUTBOX, 75, 75, 90 << 32 | 7, AT_MS, DEPARTED, 3, first_claimed_at_ms=AT_MS, move=departure
    )
    assert pack_slice([departed]) == golden("outbox-1.txt")["slice"]
    writer = SnapshotWriter(tmp_path, outline)
    writer.add(pack_slice([departed, *first]))
    writer.finish()
    taken = read_snapshot(snapshot_paths(tmp_path)[0])
    assert taken is not None
    assert taken.early == {}
    assert taken.shard.departed.deliveries == {75: departed}
    assert taken.shard.departed.stored_bytes == 7
    assert list(taken.shard.queues[2].deliveries.values()) == first


def test_a_snapshot_of_another_version_is_ignored(tmp_path):
    path = tmp_path / "snapshot-0000000000001000"
    path.write_bytes(b"".join(golden("snapshot-2.txt").values()).replace(b"PSNAPS02", b"PSNAPS99"))
    assert read_snapshot(path) is None
    assert read_outline(path) is None


def plain_deliveries(numbers, queue=2):
    return [Delivery(queue, n, n, n << 40 | 5, AT_MS + n // 70) for n in numbers]


def test_unpacking_columns_gives_the_packed_deliveries():
    plain = plain_deliveries(range(9, 450, 9))
    _, slices = example_snapshot()
    for deliveries in ([], *slices, [*plain, *slices[0], *slices[1]], plain[::-1]):
        assert unpack_columns(pack_columns(deliveries)) == deliveries
    found = unpack_columns(pack_columns(plain))
    assert found == Arrivals(2, [each.number for each in plain], plain, 5 * len(plain))
    assert found.deliveries[0].pushed_at_ms is found.deliveries[4].pushed_at_ms
    with pytest.raises(ValueError, match="1 messages of 2"):
        unpack_columns(pack_columns(plain[:1]).replace(b"\x9f\x01", b"\x9f\x02", 1))


@pytest.mark.parametrize("field", ["state", "priority", "group", "expires_at_ms", "move"])
def test_messages_with_a_field_that_is_not_plain_are_not_unpacked_as_arrivals(field):
    values = {"state": DELAYED, "group": "g", "move": Move(AT_MS, 3, 1, False)}
    deliveries = plain_deliveries(range(1, 9))
    for each in deliveries:
        setattr(each, field, values.get(field, 4))
    assert unpack_columns(pack_columns(deliveries)) == deliveries


@pytest.mark.parametrize("moved", [False, True])
def test_the_slices_of_a_snapshot_are_joined_in_order_of_rank(tmp_path, moved):
    outline, _ = example_snapshot()
    held = Delivery(2, 1, 1, 8 << 32, AT_MS, IN_FLIGHT, 1, AT_MS + 9)
    later = Delivery(2, 30, 70 if moved else 30, 9 << 32, AT_MS)
    slices = [
        [held, *plain_deliveries(range(2, 5))],
        plain_deliveries(range(5, 20)),
        [*plain_deliveries(range(20, 30)), later],
        plain_deliveries(range(31, 60)),
    ]
    writer = SnapshotWriter(tmp_path, outline)
    for each in slices:
        writer.add(pack_slice(each))
    writer.finish()
    taken = read_snapshot(snapshot_paths(tmp_path)[0])
    assert taken is not None
    queue = taken.shard.queues[2]
    everything = sorted((each for part in slices for each in part), key=attrgetter("rank"))
    assert list(queue.deliveries.values()) == everything
    assert (queue.in_flight, queue.stored_bytes) == (1, 5 * (len(everything) - 2))
    shown = [queue.order.take(0) for _ in everything[1:]]
    assert shown == everything[1:]
    assert shown[-1] == (later if moved else slices[-1][-1])


def test_many_plain_pushes_of_a_block_are_applied_as_if_one_by_one():
    pushes = [Pushed(AT_MS + n, 2, 40 + n, b"x" * n, size_bytes=n) for n in range(5)]
    block = codec.encode(pushes)[0]
    arrivals = codec.plain_arrivals(block, 1_000)
    assert arrivals is not None
    shards = [replay([QueueCreated(AT_MS, 2, "orders", SETTINGS)]) for _ in range(2)]
    assert apply_arrivals_if_new(shards[0], arrivals)
    for event, place in codec.decode(block, 1_000, bodies=False):
        assert apply_if_new(shards[1], event, place)
    assert shards[0].snapshot() == shards[1].snapshot()
    assert shards[0].queues[2].stored_bytes == shards[1].queues[2].stored_bytes == 10
    assert not apply_arrivals_if_new(shards[0], arrivals), "they were applied before"


def test_pushes_of_which_one_is_not_plain_are_applied_one_by_one():
    others: list[AnyEvent] = [
        Pushed(AT_MS, 3, 41, b"another queue", size_bytes=13),
        Pushed(AT_MS, 2, 42, b"a number left out", size_bytes=17),
        Pushed(AT_MS, 2, 41, b"a priority", priority=1, size_bytes=10),
        Pushed(AT_MS, 2, 41, b"a group", group="g", size_bytes=7),
        Pushed(AT_MS, 2, 41, b"a dedup id", dedup_id="d", size_bytes=10),
        Pushed(AT_MS, 2, 41, b"an attribute", {"a": "b"}, size_bytes=14),
        Pushed(AT_MS, 2, 41, b"a delay", visible_at_ms=AT_MS + 1, size_bytes=7),
        Pushed(AT_MS, 2, 41, b"a ttl", expires_at_ms=AT_MS + 1, size_bytes=5),
        Deleted(AT_MS, 2, 41, 1),
    ]
    first = Pushed(AT_MS, 2, 40, b"plain", size_bytes=5)
    for other in others:
        assert codec.plain_arrivals(codec.encode([first, other])[0], 0) is None
    assert codec.plain_arrivals(codec.encode([first])[0], 0) is None
    assert codec.plain_arrivals(codec.encode([first, first])[0][:100], 0) is None
