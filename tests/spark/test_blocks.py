"""Decoding by numpy gives what the journal's own codec gives, and damage costs only what it hit."""

import pytest

pytest.importorskip("pyarrow", reason="service not installed: penstock[spark]")

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import events as facts
from penstock.core.receipts import MessageIds
from penstock.errors import JournalError, StoreUnusable
from penstock.journal import codec
from penstock.journal.entry import pack
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from penstock.service import CreateQueue, Purge, Push, QueueSettings
from penstock.spark.blocks import COLUMNS, Wanted, blocks
from penstock.spark.stream import Point, Stream, align
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_upkeep import ReopenedStore
from tests.spark.journals import FORMAT, flip, write_store

IDENTITY = bytes(range(16))
NUMBERS = st.integers(1, 2**47)
SMALL = st.integers(1, 9)
TEXT = st.none() | st.text(min_size=1, max_size=20)
PUSHES = st.builds(
    facts.Pushed,
    at_ms=NUMBERS,
    queue=st.integers(1, 9),
    number=NUMBERS,
    body=st.binary(max_size=60) | st.just(codec.VERSION * 3),
    attributes=st.none()
    | st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.binary(max_size=5), min_size=1),
    priority=st.integers(0, 9),
    group=TEXT,
    dedup_id=TEXT,
    visible_at_ms=st.integers(0, 2**47),
    expires_at_ms=st.integers(0, 2**47),
)
EVENTS = st.one_of(
    PUSHES,
    st.builds(facts.Claimed, NUMBERS, SMALL, NUMBERS, SMALL, NUMBERS, TEXT, TEXT),
    st.builds(facts.Moved, NUMBERS, SMALL, NUMBERS, SMALL, NUMBERS, st.booleans()),
    st.builds(facts.Deleted, NUMBERS, SMALL, NUMBERS, SMALL),
    st.builds(facts.Released, NUMBERS, SMALL, NUMBERS, SMALL, NUMBERS),
    st.builds(facts.QueuePurged, NUMBERS, SMALL, SMALL, NUMBERS),
    st.builds(facts.QueueCreated, NUMBERS, SMALL, st.text(min_size=1), st.just(QueueSettings())),
)


def rows_of(scan, start, end, wanted=None):
    found = []
    for block in blocks(scan, IDENTITY, start, end, "here"):
        kept = block if wanted is None or block.damage else wanted.of(block)
        columns = dict(zip(COLUMNS, kept.arrow(list(COLUMNS)), strict=True))
        lists = {name: column.to_pylist() for name, column in columns.items()}
        found += [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return found


def expected(event, entry, index):
    """What one event's row says, from the event itself."""
    row = {"kind": type(event).__name__, "at_ms": event.at_ms, "queue": event.queue}
    row |= {"entry": entry, "index": index, "sequence": entry << 20 | index}
    row["message"] = getattr(event, "number", None)
    row["message_id"] = row["message"] and MessageIds(IDENTITY).show(row["message"])
    fields = msgspec.structs.asdict(event)
    renamed = {"to": "to_queue"}
    for name in ("epoch", "deadline_ms", "group", "dedup_id", "attempt_id", "holder", "name",
                 "to", "rank", "dead", "count", "before", "body", "priority"):  # fmt: skip
        row[renamed.get(name, name)] = fields.get(name)
    for name in ("visible_at_ms", "expires_at_ms"):
        row[name] = fields.get(name) or None
    return row


@given(st.lists(st.lists(EVENTS, min_size=1, max_size=5), max_size=12))
def test_every_event_becomes_a_row_with_its_values(groups):
    check_rows(groups)


def check_rows(groups):
    """Encodes each group as an entry, and compares the rows with the events."""
    stream = b"".join(
        pack(codec.VERSION, 0, at, codec.encode(group, 3, 7)[0])
        for at, group in enumerate(groups, 1)
    )
    found = rows_of(
        lambda offset, size: stream[offset : offset + size],
        Point(0, 1),
        Point(len(stream), len(groups) + 1),
    )
    wanted = [expected(e, at, i) for at, group in enumerate(groups, 1) for i, e in enumerate(group)]
    assert [
        {name: row[name] for name in want} for row, want in zip(found, wanted, strict=True)
    ] == (wanted)
    assert {(row["shard"], row["term"], row["store"]) for row in found} <= {(3, 7, IDENTITY.hex())}


@pytest.mark.parametrize("holders", [["w1"], ["w1", None], ["w1", "a-worker"], [None]])
def test_claims_that_share_the_bytes_of_their_holder_are_read(holders):
    """As the engine writes them for one pull, with and without other claims and deletes."""
    events: list[facts.AnyEvent] = []
    for number in range(1, 30):
        holder = holders[number % len(holders)]
        events.append(facts.Claimed(5, 1, number, 1, 30_005, None, holder))
        if number % 3 == 0:
            events.append(facts.Deleted(6, 1, number, 1))
    check_rows([events, [facts.Deleted(7, 1, 1, 1)], events[:1]])


def pushes(count, body=b"x" * 40):
    return [[facts.Pushed(at, 1, at, body)] for at in range(1, count + 1)]


def read(store, wanted=None):
    stream = Stream(str(store))
    try:
        return rows_of(stream.scan, stream.first, stream.end, wanted)
    finally:
        stream.close()


def test_a_damaged_entry_becomes_a_row_and_the_rest_is_read(tmp_path):
    store = write_store(tmp_path / "s", pushes(1000))
    entry_bytes = 32 + 16 + 64 + 40
    flip(store, 500 * entry_bytes + 120)
    flip(store, 700 * entry_bytes + 6)
    rows = read(store)
    damaged = [row for row in rows if row["kind"] == "Damaged"]
    assert [(row["entry"], row["offset"], row["body_bytes"]) for row in damaged] == [
        (501, 500 * entry_bytes, entry_bytes),
        (701, 700 * entry_bytes, entry_bytes),
    ]
    assert [row["damage"] for row in damaged] == [
        "data does not match its checksum",
        "header does not match its checksum",
    ]
    assert {row["entry"] for row in rows if row["kind"] == "Pushed"} == set(range(1, 1001)) - {
        501,
        701,
    }


def test_an_entry_with_inconsistent_events_is_damage(tmp_path):
    store = write_store(tmp_path / "s", pushes(2))
    bad = bytearray(codec.encode(pushes(1)[0])[0])
    bad[16] = 99
    with Segments.open(store / "journal") as segments:
        segments.append([bytes(bad)], version=codec.VERSION)
        segments.append([b"short"], version=codec.VERSION)
    write_store(store, [[facts.Deleted(9, 1, 1, 1)]])
    found = sorted(read(store), key=lambda row: row["entry"])
    assert [(row["entry"], row["kind"]) for row in found] == [
        (1, "Pushed"), (2, "Pushed"), (3, "Damaged"), (4, "Damaged"), (5, "Deleted"),
    ]  # fmt: skip


def test_a_missing_file_is_a_gap_and_the_files_around_it_are_read(tmp_path):
    store = write_store(tmp_path / "s", pushes(2000))
    (store / "journal" / "000000000001.seg").unlink()
    rows = read(store)
    kept = {row["entry"] for row in rows if row["kind"] == "Pushed"}
    assert 1 in kept
    assert 2000 in kept
    assert len(kept) < 2000
    gaps = [row for row in rows if row["kind"] == "Damaged"]
    # The entry that reached into the file, and then all that began in it.
    first = min(set(range(1, 2001)) - kept)
    assert [row["entry"] for row in gaps] == [first, first + 1]


def test_an_entry_of_another_version_is_refused_in_one_sentence(tmp_path):
    store = write_store(tmp_path / "s", pushes(3))
    with Segments.open(store / "journal") as segments:
        segments.append([b"new"], version=b"PENSTK99")
    with pytest.raises(StoreUnusable, match=r"offset .* is of the format b'PENSTK99'"):
        read(store)


def test_a_journal_being_written_is_read_as_far_as_it_is_durable(tmp_path):
    store = write_store(tmp_path / "s", pushes(3))
    with Segments.open(store / "journal") as segments:
        segments.append([codec.encode(pushes(1)[0])[0]], version=codec.VERSION)
        assert [row["entry"] for row in read(store)] == [1, 2, 3]
        segments.sync()
        assert [row["entry"] for row in read(store)] == [1, 2, 3, 4]


def test_a_store_of_another_format_is_refused(tmp_path):
    store = write_store(tmp_path / "s", pushes(3))
    (store / "store").write_bytes(FORMAT.replace(b"1", b"9"))
    with pytest.raises(StoreUnusable, match="a store of another format"):
        Stream(str(store))
    with pytest.raises(StoreUnusable, match="holds no segment files"):
        Stream(str(tmp_path))
    with pytest.raises(StoreUnusable, match="No such file"):
        Stream(str(tmp_path / "nowhere"))


def test_any_offset_aligns_to_an_entry_even_inside_a_body_that_imitates_entries(tmp_path):
    inner = b"".join(
        pack(codec.VERSION, 0, at, codec.encode(pushes(1)[0])[0]) for at in range(1, 40)
    )
    store = write_store(tmp_path / "s", [*pushes(30), [facts.Pushed(1, 1, 31, inner)], *pushes(50)])
    stream = Stream(str(store))
    with JournalReader(store / "journal") as reader:
        starts = {entry.offset: entry.entry_id for entry in reader.entries()}
    for offset in range(0, stream.end.offset, 97):
        point = align(stream.scan, offset, stream.end)
        assert point == Point(min(at for at in [*starts, stream.end.offset] if at >= offset),
                              point.entry)  # fmt: skip
        assert starts.get(point.offset, stream.end.entry) == point.entry
    stream.close()


def test_only_what_is_wanted_is_kept():
    group: list[facts.AnyEvent] = [
        facts.Pushed(5, 1, 1, b""),
        facts.Claimed(6, 2, 2, 1, 9),
        facts.Moved(7, 2, 3, 1, 8, True),
    ]
    stream = pack(codec.VERSION, 0, 1, codec.encode(group)[0])

    def kinds(wanted):
        scan = lambda offset, size: stream[offset : offset + size]  # noqa: E731
        return [row["kind"] for row in rows_of(scan, Point(0, 1), Point(len(stream), 2), wanted)]

    assert kinds(Wanted(("Claimed",))) == ["Claimed"]
    assert kinds(Wanted(queues=(1,))) == ["Pushed", "Moved"]
    assert kinds(Wanted(from_ms=6, to_ms=7)) == ["Claimed"]
    assert kinds(Wanted(from_entry=2)) == []
    assert kinds(Wanted(to_entry=2)) == ["Pushed", "Claimed", "Moved"]


def test_an_archive_is_read_alone_and_together_with_its_journal(tmp_path):
    store = write_store(tmp_path / "s", pushes(2000))
    archive = tmp_path / "archive"
    with Segments.open(store / "journal", background=False) as segments:
        at = [entry.offset for entry in segments.entries()][1500]
        assert segments.drop_before(at, archive=archive) > 1
    assert {row["entry"] for row in read(store)} == set(range(1501, 2001))
    stream = Stream(str(store), str(archive))
    assert [row["entry"] for row in rows_of(stream.scan, stream.first, stream.end)] == list(
        range(1, 2001)
    )
    stream.close()
    alone = [row["entry"] for row in read(archive)]
    assert alone == list(range(1, len(alone) + 1))
    assert 1000 < len(alone) < 2000


def test_files_dropped_while_they_are_read_are_not_reported_as_a_gap(tmp_path):
    store = write_store(tmp_path / "s", pushes(2000))
    stream = Stream(str(store))
    with Segments.open(store / "journal", background=False) as segments:
        segments.drop_before([entry.offset for entry in segments.entries()][1500])
    with pytest.raises(JournalError, match="was dropped before it was read"):
        rows_of(stream.scan, stream.first, stream.end)
    stream.close()


def test_a_store_that_dropped_its_beginning_before_the_first_read_names_its_queues(
    quick_path, monkeypatch
):
    small_slices(monkeypatch)
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("orders"), CreateQueue("other"))
    for _ in range(8):
        store(*[Push("other", bytes(2_000))] * 12)
        store(Push("orders", b"order"), Purge("other"))
        store.run_pass()
    store.engine.close()
    stream = Stream(str(quick_path / "store"))
    assert stream.first.offset > 0
    names: dict[int, str] = {}
    for block in blocks(stream.scan, stream.identity, stream.first, stream.end, stream.path):
        numbers, called, kinds = block.arrow(["queue", "name", "kind"])
        rows = zip(numbers.to_pylist(), called.to_pylist(), kinds.to_pylist(), strict=True)
        names |= {number: name for number, name, kind in rows if kind == "QueueStated"}
    assert sorted(names.values()) == ["orders", "other"]
    stream.close()
