"""Each check of the audit catches its own fault, every time it occurs and nothing else."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from collections import Counter

import pyarrow as pa

from penstock.core.events import (
    Arrived,
    Carried,
    Claimed,
    ClaimExpired,
    DelayEnded,
    Deleted,
    Departed,
    Expired,
    Extended,
    Moved,
    Pushed,
    QueueCreated,
    QueuePurged,
    Released,
)
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from penstock.service import QueueSettings
from penstock.spark import audit as judging
from penstock.spark import queries
from penstock.spark.audit import audit
from penstock.spark.blocks import blocks
from penstock.spark.checks import CHECKS
from penstock.spark.lake import Lake
from penstock.spark.selection import SCHEMA
from penstock.spark.stream import Stream
from penstock.spark.tables import FINDINGS
from penstock.spark.update import table_of
from tests.backends.engine.random_store import RandomStore, exact_replay, small_slices
from tests.conftest import FULL
from tests.spark.journals import flip, write_store
from tests.spark.lakes import ARROW, add_events

T = 1_700_000_000_000
UNTIL = T + 30_000
MINUTES = 60_000
QUEUES = [
    QueueCreated(T, 1, "orders", QueueSettings(dead_letter="dead", max_receives=2)),
    QueueCreated(T, 2, "dead", QueueSettings()),
    QueueCreated(T, 3, "line", QueueSettings(fifo=True)),
]


def push(number, queue=1, at_ms=T, **more):
    return Pushed(at_ms, queue, number, b"body", **more)


def claim(number, epoch=1, queue=1):
    return Claimed(T, queue, number, epoch, UNTIL)


# Events after the queues were made, and how many findings each check must have.
FAULTS = {
    "a clean life": (
        [
            push(1), claim(1), Extended(T, 1, 1, 1, UNTIL + 5), Deleted(T, 1, 1, 1),
            push(2, visible_at_ms=T + 9), DelayEnded(T + 9, 1, 2, 0), claim(2),
            Released(T, 1, 2, 1, T + 5), DelayEnded(T + 5, 1, 2, 1), claim(2, 2),
            ClaimExpired(UNTIL, 1, 2, 2), Moved(UNTIL, 1, 2, 2, 3, True), claim(2, 3, queue=2),
            push(3, expires_at_ms=T + 9), Expired(T + 9, 1, 3),
            push(10), claim(10), ClaimExpired(UNTIL, 1, 10, 1),
            Extended(UNTIL, 1, 10, 1, UNTIL + 5), Deleted(UNTIL, 1, 10, 1),
            push(4, dedup_id="a"), push(5, at_ms=T + 5 * MINUTES, dedup_id="a"),
            push(6, 3, group="g"), push(7, 3, group="g"), push(8, 3, group="h"),
            claim(8, queue=3), claim(6, queue=3), Deleted(T, 3, 6, 1), claim(7, queue=3),
            push(11), claim(11), ClaimExpired(UNTIL, 1, 11, 1), claim(11, 2),
            Released(T, 1, 11, 2), Departed(T, 1, 11, 2, 4, "dead"), Carried(T, 1, 11, push(11)),
            QueuePurged(T, 1, 2, 9), push(9), claim(9), Arrived(T, 1, 11, 2),
            push(20, 3, group="i", dedup_id="b"), QueuePurged(T, 3, 3, 21),
            push(21, 3, group="i", dedup_id="b"),
        ],
        {},
    ),
    "pushed first": ([Extended(T, 1, 9, 1, UNTIL), claim(8), Released(T, 1, 7, 1)], 3),
    "pushed once": ([push(1), push(1), push(2)], 1),
    "nothing after the end": (
        [push(1), claim(1), Deleted(T, 1, 1, 1), Extended(T, 1, 1, 1, UNTIL),
         push(2), QueuePurged(T, 1, 1, 3), push(3), claim(2), claim(3)],
        2,
    ),
    "one holder": ([push(1), claim(1), claim(1, 2), push(2), claim(2)], 1),
    "claim of the visible": ([push(1, visible_at_ms=T + 5), claim(1), push(2), claim(2)], 1),
    "epochs rise": ([push(1), claim(1, 3), push(2), claim(2)], 1),
    "current claim only": (
        [push(1), claim(1), ClaimExpired(UNTIL, 1, 1, 1), claim(1, 2), Deleted(T, 1, 1, 1),
         push(2), claim(2), Released(T, 1, 2, 1), Released(T, 1, 2, 1),
         push(3), claim(3), Extended(T, 1, 3, 7, UNTIL)],
        3,
    ),
    "expiry of the current claim": ([push(1), claim(1), ClaimExpired(UNTIL, 1, 1, 2)], 1),
    "expiry after the deadline": (
        [push(1), claim(1), ClaimExpired(UNTIL - 1, 1, 1, 1),
         push(2), claim(2), Extended(T, 1, 2, 1, UNTIL + 9), ClaimExpired(UNTIL, 1, 2, 1)],
        2,
    ),
    "delay in full": (
        [push(1, visible_at_ms=T + 5), DelayEnded(T + 4, 1, 1, 0), push(2), DelayEnded(T, 1, 2, 0)],
        2,
    ),
    "expired when due": (
        [push(1, expires_at_ms=T + 5), Expired(T + 4, 1, 1), push(2), claim(2), Expired(T, 1, 2)],
        2,
    ),
    "move of the visible": ([push(1), claim(1), Moved(T, 1, 1, 2, 2, False)], 1),
    "arrival of the departed": (
        [push(1), Arrived(T, 1, 1, 0),
         push(2), claim(2), Released(T, 1, 2, 1), claim(2, 2), Released(T, 1, 2, 2),
         Departed(T, 1, 2, 2, 4, "dead"), Arrived(T, 1, 2, 2), Arrived(T, 1, 2, 2)],
        2,
    ),
    "departed and used": (
        [push(1), claim(1), Released(T, 1, 1, 1), claim(1, 2), Released(T, 1, 1, 2),
         Departed(T, 1, 1, 2, 4, "dead"), claim(1, 3),
         push(2), claim(2), Departed(T, 1, 2, 1, 4, "dead"),
         push(3), Departed(T, 1, 3, 0, 4, "dead")],
        {"nothing after the end": 1, "move of the visible": 1, "dead letter after N": 1},
    ),
    "dead letter after N": (
        [push(1), claim(1), Released(T, 1, 1, 1), Moved(T, 1, 1, 2, 2, True),
         push(3), claim(3), Released(T, 1, 3, 1), claim(3, 2), Released(T, 1, 3, 2), claim(3, 3)],
        2,
    ),
    "one message per dedup id": (
        [push(1, dedup_id="a"), push(2, dedup_id="b"), push(3, at_ms=T + 5 * MINUTES - 1,
         dedup_id="a"), push(4, at_ms=T + 10 * MINUTES, dedup_id="a"), push(5, 2, dedup_id="a")],
        1,
    ),
    "order in the group": (
        [push(1, 3, group="g"), push(2, 3, group="g"), claim(2, queue=3),
         push(3, 3, group="h"), push(4, 3, group="h"), claim(3, queue=3)],
        1,
    ),
    "nothing lost": ([push(1), push(2), QueuePurged(T, 1, 5, 3), push(3)], 1),
}  # fmt: skip


def in_one_pull(store):
    """Two of a group in one entry, the later first: both are out of order."""
    events = [[push(1, 3, group="g")], [push(2, 3, group="g")]]
    write_store(store, [QUEUES, *events, [claim(2, queue=3), claim(1, queue=3)]])


def from_a_replaced_owner(store):
    write_store(store, [QUEUES, [push(1)]], term=1)
    write_store(store, [[push(2)]], term=2)
    write_store(store, [[push(3), push(4)], [push(5)]], term=1)
    write_store(store, [[push(6)]], term=2)


def with_a_hole(store):
    """Entries that change nothing are damaged: stretches of one entry, of two, and the last."""
    carried = [[Carried(T, 1, 1, push(1))] for _ in range(9)]
    write_store(store, [QUEUES, [push(1)], *carried])
    stream = Stream(str(store))
    with JournalReader(store / "journal") as reader:
        starts = [entry.offset for entry in reader.entries()]
    stream.close()
    for at in (3, 6, 7, 10):
        flip(store, starts[at] + 40)


def with_a_file_missing(store):
    """What stood in it changed nothing, so the gap is all there is to find."""
    carried = [[Carried(T, 1, 1, push(1))] for _ in range(1500)]
    write_store(store, [QUEUES, [push(1)], *carried])
    files = sorted((store / "journal").glob("*.seg"))
    assert len(files) > 3
    files[1].unlink()


def without_its_beginning(store):
    """Files were dropped: earlier events of the messages in them are not known."""
    many = [[push(n)] for n in range(1, 600)]
    rest = [[claim(n)] for n in range(1, 600)] + [[Deleted(T, 1, n, 1)] for n in range(1, 600)]
    write_store(store, [QUEUES, *many, *rest])
    with Segments.open(store / "journal", background=False) as segments:
        segments.drop_before([entry.offset for entry in segments.entries()][900])


def all_events(stores, archive=None):
    """What the source gives for all of these, read here: planning twenty reads takes minutes."""
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    batches = []
    for store in stores:
        stream = Stream(str(store), None if archive is None else str(archive))
        found = blocks(stream.scan, stream.identity, stream.first, stream.end, str(store))
        batches += [pa.RecordBatch.from_arrays(block.arrow(names), names) for block in found]
        stream.close()
    return pa.Table.from_batches(batches).cast(ARROW)


MADE = {
    "in one pull": (in_one_pull, {"order in the group": 2}),
    "replaced owner": (from_a_replaced_owner, {"terms rise": 2}),
    "hole": (with_a_hole, {"no gaps": 3}),
    "missing": (with_a_file_missing, {"no gaps": 1}),
    "no beginning": (without_its_beginning, {}),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Every fault in a store of its own: all their events, and what must be found in each."""
    root = tmp_path_factory.mktemp("planted")
    expected = {}
    for nth, (name, (events, found)) in enumerate(FAULTS.items()):
        store = write_store(root / str(nth), [QUEUES, *([event] for event in events)])
        expected[store] = found if isinstance(found, dict) else {name: found}
    for name, (make, found) in MADE.items():
        make(root / name)
        expected[root / name] = found
    assert {check for found in expected.values() for check in found} == set(CHECKS)
    by_store = {}
    for store, found in expected.items():
        stream = Stream(str(store))
        by_store[stream.identity.hex()] = found
        stream.close()
    return all_events(expected), {store: found for store, found in by_store.items() if found}


def checked(spark, lake, counted=None, **options):
    """How often each check fails in each store, and how many events there were."""
    verdict = audit(lambda: spark, lake, counted, 1_000, **options)
    by_store: dict[str, dict[str, int]] = {}
    for finding in verdict.findings:
        counts = by_store.setdefault(finding.store, {})
        counts[finding.check] = counts.get(finding.check, 0) + 1
    assert sum(verdict.counts.values()) == len(verdict.findings)
    return by_store, verdict.events


@pytest.fixture(scope="module")
def faulty(spark, planted, tmp_path_factory):
    """A lake of all these stores."""
    lake = Lake.open(tmp_path_factory.mktemp("faulty") / "lake", create=True)
    add_events(spark, lake, planted[0])
    return lake


def test_every_planted_fault_is_counted_exactly_and_nothing_else(spark, planted, faulty):
    events, expected = planted
    assert checked(spark, faulty) == (expected, len(events))


def test_lives_are_plain_only_if_their_checks_find_nothing_one_by_one(
    spark, planted, faulty, monkeypatch
):
    """Every regular life is looked at event by event, as the others are."""
    load = queries.load_query
    held = Counter(row["check"] for row in table_of(faulty, FINDINGS).frame(spark).collect())

    def none_is_plain(name):
        query = load(name)
        return (
            f"SELECT * EXCEPT (plain), false AS plain FROM ({query})" if "lives" in name else query
        )

    monkeypatch.setattr(judging, "load_query", none_is_plain)
    events, expected = planted
    assert checked(spark, faulty, everything=True) == (expected, len(events))
    again = Counter(row["check"] for row in table_of(faulty, FINDINGS).frame(spark).collect())
    assert again == held


def a_life(tmp_path, monkeypatch, seed):
    small_slices(monkeypatch)
    life = RandomStore(tmp_path, seed)
    life.run(rounds=12)
    held = {queue.name: len(queue.deliveries) for queue in exact_replay(life.root).queues.values()}
    return life, held


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [8, 9] if FULL else [8])
def test_nothing_is_found_in_a_life_with_kills_and_timeouts(spark, tmp_path, monkeypatch, seed):
    life, held = a_life(tmp_path, monkeypatch, seed)
    events = all_events([life.root / "store"], life.root / "archive")
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(spark, lake, events)
    assert checked(spark, lake, held) == ({}, len(events))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [8, 9, 10, 11] if FULL else [9])
def test_nothing_is_found_in_a_store_that_has_dropped_its_beginning(
    spark, tmp_path, monkeypatch, seed
):
    """It lived through many snapshots, and its archive is not given: counts are exact all the same,
    and a message that the engine does not have is missed."""
    life, held = a_life(tmp_path, monkeypatch, seed)
    events = all_events([life.root / "store"])
    assert min(events["entry"].to_pylist()) > 100
    lake = Lake.open(tmp_path / "lake", create=True)
    add_events(spark, lake, events)
    assert checked(spark, lake, held) == ({}, len(events))
    found, _ = checked(spark, lake, {name: count - 1 for name, count in held.items()})
    assert list(found.values()) == [{"nothing lost": len(held)}], "a queue was not compared"
