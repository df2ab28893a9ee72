"""Two stores as two shards: a message that departs from one is kept there until it has arrived."""

from typing import Any

import pytest

from penstock.backends.engine import upkeep as upkeep_module
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import Carried, Departed, Lost
from penstock.journal.place import position_of
from penstock.journal.reader import JournalReader
from penstock.journal.snapshot import snapshot_paths
from penstock.journal.verify import verify
from penstock.service import (
    CreateQueue,
    Delete,
    DeleteQueue,
    History,
    Pull,
    Purge,
    Push,
    Release,
    Stats,
)
from tests.backends.engine.random_store import (
    exact_replay,
    first_difference,
    plain_state,
    small_slices,
)

SOURCE, TARGET = 3, 7
SETTINGS = {"dead_letter": "away", "max_receives": 1, "visibility_ms": 1_000}


class Shard:
    """A store that is one shard of two; the queue `away` is in the second."""

    def __init__(self, root, number, clock):
        self.root = root
        self.number = number
        self.clock = clock
        self.engine = self._open()

    def _open(self):
        engine = open_engine(
            self.root / "store",
            clock=self.clock,
            file_bytes=16_384,
            archive=self.root / "archive",
        )
        engine.shard.number = self.number
        engine.shard.elsewhere = {"away": TARGET} if self.number == SOURCE else {}
        return engine

    def __call__(self, *commands):
        return [self.engine.submit(command) for command in commands][-1]

    def reopen(self):
        self.engine.close()
        self.engine = self._open()
        recovered = plain_state(self.engine.shard, self.engine.journal.load)
        exact = exact_replay(self.root)
        exact.number = self.number
        assert first_difference(recovered, plain_state(exact)) is None

    def run_pass(self, between=None):
        """A pass of upkeep; `between` is called once its outline is taken."""
        steps: list[Any] = []

        def exclusive(step):
            if len(steps) == 1 and between is not None:
                between()
            steps.append(step)
            return step()

        self.engine.upkeep._exclusive = exclusive
        self.engine.upkeep.run_pass()

    def depart(self, *bodies):
        self(*(Push("work", body) for body in bodies), Pull("work", len(bodies)))
        self.clock.advance(ms=1_000)
        self.engine.catch_up()

    def owed(self):
        return [each.dedup_id for each in self.engine.shard.outbox()]

    def events(self):
        with JournalReader(self.root / "store" / "journal") as reader:
            return [each.event for each in reader.events(reader.first_offset)]


@pytest.fixture
def shards(quick_path, monkeypatch):
    small_slices(monkeypatch)
    clock = ManualClock()
    source = Shard(quick_path / "source", SOURCE, clock)
    target = Shard(quick_path / "target", TARGET, clock)
    source(CreateQueue("work", SETTINGS))
    target(CreateQueue("away"))
    yield source, target
    source.engine.close()
    target.engine.close()


def route(source, target):
    """What a router does once: it waits until each side is durable."""
    departures = source.engine.departures(3)
    source.engine.journal.wait(source.engine.answer_sequence)
    for owed, content in departures:
        target(owed.push(content))
        target.engine.journal.wait(target.engine.answer_sequence)
        yield owed
        source.engine.arrived(owed.delivery.number, owed.delivery.epoch)


def test_every_dead_letter_arrives_once_although_both_shards_restart_meanwhile(shards):
    source, target = shards
    bodies = [b"body %d" % number for number in range(10)]
    source.depart(*bodies)
    turns = 0
    while source.owed():
        for turn, _ in enumerate(route(source, target)):
            turns += 1
            if turn == 1 and turns % 3:
                # The router stops here: the arrival of its last push is not confirmed.
                break
        source.reopen()
        target.reopen()
    assert turns > len(bodies), "some were pushed twice"
    assert target(Stats("away")).messages == len(bodies)
    assert sorted(claim.body for claim in target(Pull("away", 100))) == bodies
    assert source.engine.shard.departed.stored_bytes == 0


def test_the_outbox_survives_a_snapshot_and_the_removal_of_its_queue(shards):
    source, target = shards
    source.depart(*(b"body %d" % number for number in range(12)))
    source.run_pass()
    source(Purge("work"), DeleteQueue("work"))
    owed = source.owed()
    for _ in range(2):
        source.reopen()
        assert source.owed() == owed
        source.run_pass()
    while source.owed():
        list(route(source, target))
    source.run_pass()
    source.reopen()
    assert source.owed() == []
    assert target(Stats("away")).messages == 12


def test_the_order_of_departure_survives_a_snapshot(shards):
    source, _ = shards
    source(Push("work", b"first"), Push("work", b"second"))
    _, second = source(Pull("work", 2))
    source(Release("work", second.proof))
    source.clock.advance(ms=1_000)
    source.engine.catch_up()
    source.run_pass()
    source.reopen()
    assert source.owed() == ["departed-3-2-1", "departed-3-1-1"]


def test_a_message_that_departs_between_the_outline_and_its_slice_is_kept_once(shards):
    source, _ = shards
    source(*(Push("work", b"body %d" % number) for number in range(20)), Pull("work", 13))
    source.clock.advance(ms=1_000)
    source.run_pass(source.engine.catch_up)
    source.reopen()
    assert len(source.owed()) == 13
    assert source(Stats("work")).messages == 7


def test_a_message_that_arrives_between_the_outline_and_its_slice_is_not_restored(shards):
    source, target = shards
    source.depart(*(b"body %d" % number for number in range(7)))
    source.run_pass(lambda: list(route(source, target)))
    source.reopen()
    assert source.owed() == [f"departed-3-{number}-1" for number in range(4, 8)]


def test_a_queue_removed_during_the_pass_leaves_the_outbox_unchanged(shards):
    source, _ = shards
    source(*(Push("work", b"body %d" % number) for number in range(9)), Pull("work", 6))
    source.clock.advance(ms=1_000)

    def depart_and_remove():
        source.engine.catch_up()
        source(DeleteQueue("work"))

    source.run_pass(depart_and_remove)
    source.reopen()
    assert len(source.owed()) == 6


@pytest.mark.parametrize("is_newest_snapshot_lost", [False, True])
def test_the_content_of_the_outbox_is_carried_when_its_file_is_dropped(
    shards, monkeypatch, is_newest_snapshot_lost
):
    source, target = shards
    monkeypatch.setattr(upkeep_module, "GROWTH_BYTES_MIN", 1 << 40)
    source.depart(b"kept for long")
    source(CreateQueue("busy"))
    for _ in range(2):
        for _ in range(30):
            source(Push("busy", bytes(2_000)))
            (claim,) = source(Pull("busy"))
            source(Delete("busy", claim.proof))
        source.run_pass()
    carried = [each for each in source.events() if isinstance(each, Carried)]
    assert [(each.queue, each.number) for each in carried][:1] == [(1, 1)]
    assert not any(isinstance(each, Departed) for each in source.events()), "its file was dropped"
    (owed,) = source.engine.shard.outbox()
    assert position_of(owed.delivery.content) >= source.engine.journal.first_position
    if is_newest_snapshot_lost:
        # The snapshot before it has the old place; the journal has the new one.
        newest, _ = snapshot_paths(source.root / "store")
        newest.write_bytes(b"")
    source.reopen()
    list(route(source, target))
    assert [claim.body for claim in target(Pull("away"))] == [b"kept for long"]


def test_a_store_with_an_outbox_verifies_and_has_the_history_of_its_messages(shards):
    source, _ = shards
    reply = source(Push("work", b"departs"))
    source.depart(b"stays")
    source(Push("work", b"another"))
    history = source(History(reply.id))
    assert [each.kind for each in history] == ["Pushed", "Claimed", "ClaimExpired", "Departed"]
    assert history[-1].detail == "to_queue=away"
    source.run_pass()
    source.engine.close()
    findings = verify(str(source.root / "store"))
    assert [each.text for each in findings if each.is_damage] == []
    assert any("1 queue with 3 messages" in each.text for each in findings)


def test_a_damaged_message_in_the_outbox_is_lost_and_the_others_still_arrive(shards):
    source, target = shards
    source.depart(b"DAMAGED", b"sound")
    # After a snapshot the content is not read when the store opens, only when it is pushed there.
    source.run_pass()
    source.engine.close()
    for path in (source.root / "store" / "journal").glob("*.seg"):
        path.write_bytes(path.read_bytes().replace(b"DAMAGED", b"damaged"))
    source.engine = source._open()
    assert len(source.owed()) == 2
    list(route(source, target))
    assert Lost in map(type, source.events())
    assert [claim.body for claim in target(Pull("away", 10))] == [b"sound"]
    assert source.owed() == []
