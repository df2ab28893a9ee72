"""Rows 5 and 6 of the scorecard, for the engine: failed syncs, a full disk, no more descriptors."""

import random
import threading
from contextlib import suppress
from typing import Any

import pytest

from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.errors import JournalError, PenstockError, StoreFull
from penstock.journal.snapshot import snapshot_paths
from penstock.service import Batch, Extend
from tests.backends.engine.random_store import small_slices
from tests.conftest import FULL
from tests.journal.disk import Disk, PowerCut
from tests.server.conftest import until

FILE_BYTES = 131_072


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


class DiskMachine:
    """An engine whose journal is on the simulated disk; the rest of the store is in `path`."""

    def __init__(self, path, disk=None, **options):
        self.path = path
        self.disk = disk or Disk()
        self.clock = ManualClock()
        self.options = options
        self.engine: Any = None
        self.queues = self.open()

    def open(self):
        # The storage interface opens the journal by its path.
        self.disk.path = str(self.path / "store" / "journal")
        self.engine = open_engine(
            self.path / "store",
            clock=self.clock,
            file_bytes=FILE_BYTES,
            storage=self.disk,
            **self.options,
        )
        return Queues(BlockingEngine(self.engine))

    def power_cut(self, rng):
        """Opens the store on what the disk may hold after a power cut."""
        self.disk = self.disk.after_cut(rng)
        self.queues = self.open()
        return self.queues


def push_until(error, queues, body=b"x" * 100, limit=10_000):
    """Pushes until this error; returns the ids that were answered, and the error."""
    answered = []
    for _ in range(limit):
        try:
            answered.append(queues.push("q", body).id)
        except error as refused:
            return answered, refused
    raise AssertionError("no push was refused")


def everything(queues):
    found = []
    while claims := queues.pull_many("q", 100):
        found += [claim.id for claim in claims]
    return found


@pytest.mark.parametrize("durability", ["sync", "interval"])
@pytest.mark.parametrize("call", range(1, 51 if FULL else 11))
def test_after_a_failed_sync_nothing_is_answered_and_nothing_answered_is_lost(
    quick_path, call, durability
):
    machine = DiskMachine(quick_path, durability=durability, interval_ms=1)
    queues = machine.queues
    queues.create("q")
    held = queues.push("q", b"held").id
    claim = queues.pull("q")
    assert claim is not None
    assert claim.id == held
    machine.engine.journal.sync()
    machine.disk.failing_syncs = {machine.disk.syncs + call}
    answered, refused = push_until(JournalError, queues, limit=1_000_000)
    assert "Input/output error" in str(refused)
    syncs = machine.disk.syncs
    for later in (
        lambda: queues.push("q", b"more"),
        lambda: queues.push_many("q", [b"more"]),
        lambda: queues.pull("q"),
        lambda: queues.delete(claim),
        lambda: queues.extend(claim, 5),
        lambda: queues.release(claim),
        lambda: queues.create("other"),
        lambda: queues.purge("q"),
        lambda: queues.stats("q"),
    ):
        with pytest.raises(JournalError):
            later()
    queues.close()
    assert machine.disk.syncs == syncs, "a sync that failed was tried again"
    reopened = machine.power_cut(random.Random(call))
    found = everything(reopened)
    if durability == "sync":
        assert set(answered) <= set(found)
    assert reopened.delete(claim) is True
    reopened.close()


def test_waiting_pulls_get_the_error_when_the_disk_fails(quick_path):
    machine = DiskMachine(quick_path)
    queues = machine.queues
    queues.create("q")
    queues.create("other")
    errors = []

    def wait():
        try:
            queues.pull("other", wait=60)
        except PenstockError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: queues.stats("other").waiting_pulls)
    machine.disk.failing_syncs = {machine.disk.syncs + 1}
    push_until(JournalError, queues)
    with pytest.raises(JournalError):
        queues.push("other", b"too late")
    queues.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(errors) == 1


@pytest.mark.parametrize("ahead", ["push", "pull", "settle"])
def test_after_an_interrupt_before_the_append_an_engine_refuses_every_command(quick_path, ahead):
    machine = DiskMachine(quick_path, background=False)
    queues = machine.queues
    queues.create("q", visibility_timeout=5)
    queues.push("q", bytes(100))
    if ahead == "settle":
        assert queues.pull("q") is not None
        machine.clock.advance(seconds=4)
    # PowerCut is a BaseException, as the KeyboardInterrupt of Ctrl-C is.
    machine.disk.steps_left = 0
    doing = {
        "push": lambda: queues.push("q", b"not stored"),
        "pull": lambda: queues.pull("q"),
        "settle": lambda: machine.clock.advance(seconds=2),
    }
    with pytest.raises(PowerCut):
        doing[ahead]()
    machine.disk.steps_left = None
    for later in (lambda: queues.stats("q"), lambda: queues.pull("q", wait=60)):
        with pytest.raises(JournalError, match="was stopped by PowerCut"):
            later()
    queues.close()
    assert not snapshot_paths(machine.path / "store")
    queues = machine.open()
    assert len(everything(queues)) == 1
    queues.close()


def test_what_is_due_on_a_full_disk_causes_no_busy_loop(quick_path):
    machine = DiskMachine(quick_path, Disk(room_bytes=24 * FILE_BYTES), durability="os")
    queues = machine.queues
    queues.create("q", visibility_timeout=5)
    push_until(StoreFull, queues, bytes(200))
    claims = queues.pull_many("q", 1_000)
    # Extensions of claims use the last room on the disk.
    extensions = Batch([Extend("q", claim.receipt, 5_000) for claim in claims[:50]])
    with suppress(StoreFull):
        for _ in range(10_000):
            machine.engine.submit(extensions)
    with pytest.raises(StoreFull):
        machine.engine.submit(extensions)
    machine.clock.advance(seconds=6)
    now_ms = machine.clock.now_ms()
    assert machine.engine.next_wake_ms > now_ms, "a waiting pull would try again at once"
    machine.disk.room_bytes *= 2
    machine.clock.advance(seconds=1)
    assert queues.stats("q").in_flight == 0
    queues.close()


@pytest.mark.parametrize("body_bytes", [10, 3_000])
def test_on_a_full_disk_pushes_are_refused_and_every_message_can_be_deleted(quick_path, body_bytes):
    machine = DiskMachine(quick_path, Disk(room_bytes=24 * FILE_BYTES), durability="os")
    queues = machine.queues
    queues.create("q")
    answered, refused = push_until(StoreFull, queues, bytes(body_bytes))
    assert "No space left on device" in str(refused)
    assert len(answered) > 50
    with pytest.raises(StoreFull):
        queues.push_many("q", [bytes(body_bytes)] * 10)
    with pytest.raises(StoreFull):
        queues.push("q", bytes(body_bytes))
    left = []
    while claims := queues.pull_many("q", 10):
        left += [claim.id for claim in claims]
        assert all(queues.delete_many(claims))
    assert left == answered
    queues.close()


def test_on_a_full_disk_every_message_can_be_deleted_one_by_one_after_a_restart(quick_path):
    machine = DiskMachine(quick_path, Disk(room_bytes=24 * FILE_BYTES), durability="os")
    queues = machine.queues
    queues.create("q")
    answered, _ = push_until(StoreFull, queues, bytes(30))
    queues.close()
    queues = machine.open()
    with pytest.raises(StoreFull):
        queues.push("q", bytes(30))
    left = []
    while (claim := queues.pull("q")) is not None:
        left.append(claim.id)
        assert queues.delete(claim) is True
    assert left == answered
    queues.close()


def test_on_a_full_disk_hundreds_of_claims_that_run_out_do_not_stop_the_engine(quick_path):
    machine = DiskMachine(quick_path, Disk(room_bytes=24 * FILE_BYTES), durability="os")
    queues = machine.queues
    queues.create("q", visibility_timeout=5)
    answered, _ = push_until(StoreFull, queues, bytes(200))
    for _ in range(3):
        claims = queues.pull_many("q", 300)
        assert claims
        machine.clock.advance(seconds=6)
    left = set()
    for _ in range(len(answered)):
        claims = queues.pull_many("q", 10)
        if not claims:
            break
        left |= {claim.id for claim in claims}
        assert all(queues.delete_many(claims))
    assert left == set(answered)
    queues.close()


@pytest.mark.parametrize("limit", ["room_bytes", "open_files_max"])
def test_pushes_are_accepted_again_when_there_is_room_again(quick_path, limit):
    machine = DiskMachine(quick_path, durability="os")
    queues = machine.queues
    queues.create("q")
    short = {"room_bytes": 24 * FILE_BYTES, "open_files_max": 24}[limit]
    setattr(machine.disk, limit, short)
    answered, _ = push_until(StoreFull, queues, bytes(500))
    setattr(machine.disk, limit, 2 * short)
    more, _ = push_until(StoreFull, queues, bytes(500))
    assert len(more) > 100
    assert everything(queues) == answered + more
    queues.close()


def test_a_snapshot_without_room_stops_neither_the_engine_nor_the_next_snapshot(quick_path):
    machine = DiskMachine(quick_path, durability="os")
    queues = machine.queues
    upkeep: Any = machine.engine.upkeep
    queues.create("q")
    first = queues.push("q", b"one").id
    queues.push("q", b"two")
    draft = quick_path / "store" / "snapshot.new"
    draft.mkdir()
    with pytest.raises(StoreFull, match=r"snapshot\.new"):
        upkeep.run_pass()
    claim = queues.pull("q")
    assert claim is not None
    assert claim.id == first
    assert queues.delete(claim) is True
    queues.push("q", b"three")
    draft.rmdir()
    upkeep.run_pass()
    assert len(snapshot_paths(quick_path / "store")) == 1
    queues.close()
    queues = machine.open()
    assert [claim.body for claim in queues.pull_many("q", 9)] == [b"two", b"three"]
    queues.close()
