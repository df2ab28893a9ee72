"""Many callers wait for the disk at once: one of them syncs for all, and every caller returns."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from penstock.backends.engine.store import open_engine
from penstock.errors import JournalError, StoreUnusable
from penstock.journal.commit import GroupCommit
from penstock.service import CreateQueue, Push


def test_threads_that_wait_for_the_disk_share_its_syncs_and_all_come_back(quick_path):
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
        # As upkeep does: it may make durable what a thread was just told to sync itself.
        while not ended.is_set():
            journal.sync()

    threads = [threading.Thread(target=push_and_wait, daemon=True) for _ in range(6)]
    other = threading.Thread(target=sync_from_elsewhere, daemon=True)
    for thread in [*threads, other]:
        thread.start()
    deadline = time.monotonic() + 30
    for thread in threads:
        thread.join(timeout=max(0, deadline - time.monotonic()))
    ended.set()
    other.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    assert synced == [True] * 3_000
    engine.close()


def test_a_wait_for_what_is_durable_already_syncs_nothing(tmp_path):
    engine: Any = open_engine(tmp_path / "store", durability="sync")
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"x"))
    engine.journal.wait(engine.answer_sequence)
    offset = engine.journal.segments.durable_offset
    engine.submit(Push("q", b"y"))
    engine.journal.wait(1)
    assert engine.journal.segments.durable_offset == offset
    engine.close()


def test_a_waiter_whose_callback_raises_does_not_keep_others_from_being_woken(quick_path):
    engine: Any = open_engine(quick_path / "store", durability="sync")
    journal = engine.journal
    told = threading.Event()

    def cannot_be_told():
        raise RuntimeError("the event loop is closed")

    for _ in range(3):
        engine.submit(CreateQueue("q"))
        engine.submit(Push("q", b"x"))
        journal.notify(engine.answer_sequence, cannot_be_told)
    engine.submit(Push("q", b"y"))
    journal.notify(engine.answer_sequence, told.set)
    assert told.wait(20)
    engine.close()


def test_an_interrupt_of_the_syncing_thread_leaves_no_waiter_asleep():
    interrupted, may_go_on = threading.Event(), threading.Event()
    results = iter([KeyboardInterrupt(), 2])

    def sync():
        interrupted.set()
        may_go_on.wait(20)
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
    assert interrupted.wait(20)
    threads[1].start()
    while not commit._waiting:
        pass
    may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert sorted(ended) == [1, 2]
    commit.close()


@pytest.mark.parametrize("failing", [OSError("no such luck"), JournalError("no such disk")])
def test_the_syncing_thread_survives_a_failed_sync(failing):
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
        told = threading.Event()
        commit.notify(1, told.set)
        assert told.wait(20)
    assert len(tried) == 2
    commit.close()


def test_a_store_that_cannot_be_opened_leaves_no_thread_behind(quick_path):
    open_engine(quick_path / "store").close()
    (quick_path / "store" / f"snapshot-{1 << 40:016x}").touch()
    before = threading.active_count()
    for durability in ("sync", "interval", "os"):
        with pytest.raises(StoreUnusable):
            open_engine(quick_path / "store", durability=durability)
    assert threading.active_count() == before
