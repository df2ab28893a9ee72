"""Row 2 of the scorecard, for the whole engine: power cuts at any step, on a simulated disk.

A client keeps account of its commands and of the answers. Snapshots are on a real disk beside the
simulated one; a cut may leave the next snapshot half written.
"""

import contextlib
import random

import pytest

from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.service import CreateQueue, Delete, Pull, Purge, Push, Release
from tests.backends.engine.random_store import small_slices
from tests.conftest import FULL
from tests.journal.disk import Disk, PowerCut


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


class Client:
    """An engine, and what it must have and must not have after the answers that it gave."""

    def __init__(self, path, rng):
        self.path = path
        self.rng = rng
        self.clock = ManualClock()
        self.disk = Disk(sector_bytes=rng.choice([512, 4096]), tearing=rng.random() < 0.3)
        self.file_bytes = rng.choice([8_192, 16_384, 65_536])
        self.engine = self.open()
        self.answer(CreateQueue("q", {"visibility_ms": 10_000}))
        self.bodies = {}  # of every message that may be there
        self.kept = set()  # messages that must be there
        self.gone = set()  # messages that must not be there
        self.claims = {}
        self.openings = 0

    def open(self):
        self.disk.path = str(self.path / "store" / "journal")
        return open_engine(
            self.path / "store",
            clock=self.clock,
            file_bytes=self.file_bytes,
            storage=self.disk,
            background=False,
        )

    def answer(self, command):
        reply = self.engine.submit(command)
        self.engine.journal.wait(self.engine.answer_sequence)
        return reply

    def act(self):
        kind = self.rng.random()
        if kind < 0.45:
            self.push()
        elif kind < 0.65:
            self.pull()
        elif kind < 0.85:
            self.end_claim()
        elif kind < 0.93:
            self.clock.advance(ms=self.rng.choice([100, 4_000, 11_000]))
        elif kind < 0.99:
            self.engine.upkeep.run_pass()
        else:
            unsure, self.kept = self.kept, set()
            self.answer(Purge("q"))
            self.gone |= unsure
            self.claims.clear()

    def push(self):
        body = self.rng.randbytes(self.rng.choice([0, 20, 400, 3_000, 9_000]))
        number = self.engine.shard.next_number
        self.bodies[number] = body
        assert self.answer(Push("q", body)).sequence == number
        self.kept.add(number)

    def pull(self):
        for claim in self.answer(Pull("q", self.rng.choice([1, 4]))):
            number = int(claim.id[-12:], 16)
            assert claim.body == self.bodies[number]
            self.claims[number] = claim

    def end_claim(self):
        if not self.claims:
            return
        number = self.rng.choice(sorted(self.claims))
        claim = self.claims.pop(number)
        held = self.engine.shard.names["q"].deliveries.get(number)
        if held is None or held.epoch != claim.epoch or held.due_at_ms <= self.clock.now_ms():
            return
        if self.rng.random() < 0.3:
            self.answer(Release("q", claim.receipt))
            return
        self.kept.discard(number)
        if self.answer(Delete("q", claim.receipt)):
            self.gone.add(number)

    def act_until_cut(self):
        self.disk.steps_left = self.rng.randrange(self.rng.choice([40, 200, 900]))
        with contextlib.suppress(PowerCut):
            for _ in range(self.rng.randrange(60)):
                self.act()
        if self.rng.random() < 0.3:
            half = self.path / "store" / "snapshot.new"
            half.write_bytes(self.rng.randbytes(self.rng.randrange(300)))

    def recover(self):
        self.disk = self.disk.after_cut(self.rng)
        self.disk.path = str(self.path / "store" / "journal")
        # The power may fail again while the engine opens.
        self.disk.steps_left = self.rng.randrange(60)
        with contextlib.suppress(PowerCut):
            self.open()
        self.disk = self.disk.after_cut(self.rng)
        self.engine = self.open()
        self.openings += 1

    def accept(self):
        """Checks that every answer still holds."""
        queue = self.engine.shard.names["q"]
        assert self.kept <= queue.deliveries.keys()
        assert not self.gone & queue.deliveries.keys()
        for number, delivery in queue.deliveries.items():
            assert self.engine.journal.load(delivery.content).body == self.bodies[number]
            claim = self.claims.get(number)
            assert claim is None or delivery.epoch >= claim.epoch
        # Numbers that were never answered may be used again, for another body.
        self.kept |= queue.deliveries.keys()


@pytest.mark.parametrize("seed", range(10_000 if FULL else 300))
def test_a_power_cut_loses_no_answered_push_and_restores_no_deleted_message(quick_path, seed):
    client = Client(quick_path, random.Random(seed))
    for _ in range(4):
        client.act_until_cut()
        client.recover()
        client.accept()
    assert client.openings == 4
