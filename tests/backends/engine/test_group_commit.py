"""Many callers wait for the disk at once: one of them syncs for all, and every wait ends."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from penstock.backends.engine.store import open_engine
from penstock.errors import JournalError, StoreUnusable
from penstock.journal.commit import GroupCommit
from penstock.service import CreateQueue, Push
from tests.server.conftest import until

TIMEOUT_S = 60


def test_the_waits_of_many_threads_for_the_disk_all_end_and_are_durable(quick_path):
    engine: Any = open_engine(quick_path / "store", durability="sync")
    journal = engine.journal
    engine.submit(CreateQueue("q"))
    lock = threading.Lock()
    ended = threading.Event()
    synced = []

    def push_and_wait():
        for _ in range(500):
            with lock:
                engine.submit(Push("q", b"x"))
                sequence = engine.answer_sequence
            journal.wait(sequence)
            synced.append(journal.durable_sequence >= sequence)

    def sync_from_elsewhere():
        # As upkeep does: it may sync an entry that a waiting thread was about to sync.
        while not ended.is_set():
            journal.sync()

    threads = [threading.Thread(target=push_and_wait, daemon=True) for _ in range(6)]
    other = threading.Thread(target=sync_from_elsewhere, daemon=True)
    for thread in [*threads, other]:
        thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    for thread in threads:
        thread.join(timeout=max(0, deadline - time.monotonic()))
    ended.set()
    other.join(timeout=TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread waits without end"
    assert synced == [True] * 3_000
    engine.close()


def test_a_wait_for_an_entry_that_is_durable_syncs_nothing(tmp_path):
    engine: Any = open_engine(tmp_path / "store", durability="sync")
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"x"))
    engine.journal.wait(engine.answer_sequence)
    offset = engine.journal.segments.durable_offset
    engine.submit(Push("q", b"y"))
    engine.journal.wait(1)
    assert engine.journal.segments.durable_offset == offset
    engine.close()


def test_after_a_callback_that_raises_the_other_waiters_are_still_notified(quick_path):
    engine: Any = open_engine(quick_path / "store", durability="sync")
    journal = engine.journal
    notified = threading.Event()

    def fail():
        raise RuntimeError("the event loop is closed")

    for _ in range(3):
        engine.submit(CreateQueue("q"))
        engine.submit(Push("q", b"x"))
        journal.notify(engine.answer_sequence, fail)
    engine.submit(Push("q", b"y"))
    journal.notify(engine.answer_sequence, notified.set)
    assert notified.wait(TIMEOUT_S)
    engine.close()


def test_after_an_interrupt_of_the_syncing_thread_every_wait_ends():
    syncing, may_continue = threading.Event(), threading.Event()
    results = iter([KeyboardInterrupt(), 2])

    def sync():
        syncing.set()
        may_continue.wait(TIMEOUT_S)
        result = next(results)
        if isinstance(result, BaseException):
            raise result
        return result

    commit = GroupCommit(sync)
    commit.start()
    ended = []

    def wait(sequence):
        with suppress(KeyboardInterrupt):
            commit.wait(sequence)
        ended.append(sequence)

    threads = [threading.Thread(target=wait, args=(sequence,), daemon=True) for sequence in (1, 2)]
    threads[0].start()
    assert syncing.wait(TIMEOUT_S)
    threads[1].start()
    until(lambda: commit._waiting)
    may_continue.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(ended) == [1, 2]
    commit.close()


@pytest.mark.parametrize("failing", [OSError("it failed"), JournalError("it failed")])
def test_the_syncing_thread_continues_after_a_failed_sync(failing):
    results = iter([failing, 1])
    tried = []

    def sync():
        tried.append(1)
        result = next(results)
        if isinstance(result, BaseException):
            raise result
        return result

    commit = GroupCommit(sync)
    commit.start()
    for _ in range(2):
        notified = threading.Event()
        commit.notify(1, notified.set)
        assert notified.wait(TIMEOUT_S)
    assert len(tried) == 2
    commit.close()


def test_a_store_that_cannot_be_opened_leaves_no_thread_running(quick_path):
    open_engine(quick_path / "store").close()
    (quick_path / "store" / f"snapshot-{1 << 40:016x}").touch()
    before = set(threading.enumerate())
    for durability in ("sync", "interval", "os"):
        with pytest.raises(StoreUnusable):
            open_engine(quick_path / "store", durability=durability)
    # One that an earlier test has left may end meanwhile.
    assert set(threading.enumerate()) <= before
