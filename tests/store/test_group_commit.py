"""Many wait for the disk at once: one syncs for all, and nobody is forgotten."""

import threading
import time
from typing import Any

from penstock.backends.store import open_engine
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
