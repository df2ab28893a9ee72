"""The engine, blocking and asynchronous: waits for the disk, waits for a message, and failures."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.engine import Engine
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent
from penstock.core.shard import SETTLE_MAX
from penstock.errors import EngineClosed, InvalidField, JournalError, QueueNotFound, StaleReceipt
from penstock.journal import MemoryJournal
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DescribeQueue,
    ListQueues,
    Peek,
    Pull,
    Push,
    Release,
    Stats,
)
from tests.server.conftest import until

TIMEOUT_S = 60


class Slow(MemoryJournal):
    """A journal whose entries become durable when the test calls `flush`."""

    def __init__(self) -> None:
        super().__init__(history_entries=1)
        self.appended = 0
        self.failed = False
        self._flushed = threading.Condition()
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self.asked = threading.Event()

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        self.appended += 1
        return self.appended, ()

    def wait(self, sequence: int) -> None:
        self.asked.set()
        with self._flushed:
            self._flushed.wait_for(
                lambda: self.failed or self.durable_sequence >= sequence, TIMEOUT_S
            )
        if self.failed:
            raise JournalError("the disk is gone")

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        self._waiting.append((sequence, done))
        self.asked.set()

    def flush(self, failed: bool = False) -> None:
        with self._flushed:
            self.failed = failed
            self.durable_sequence = 0 if failed else self.appended
            self._flushed.notify_all()
        for _, done in self._waiting:
            done()
        self._waiting = []


class Failing(MemoryJournal):
    """A journal that refuses every append after this number of them."""

    def __init__(self, after: int) -> None:
        super().__init__(history_entries=1)
        self.left = after

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        if not self.left:
            raise JournalError("the disk is gone")
        self.left -= 1
        return super().append(events)


def in_thread(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts the call in a thread; its result or error is put in the list."""
    given: list[Any] = []

    def call() -> None:
        try:
            given.append(run())
        except Exception as error:
            given.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, given


@pytest.fixture
def engine():
    engine = Engine(MemoryJournal(100), ManualClock())
    engine.submit(CreateQueue("q"))
    return engine


def test_a_blocking_push_answers_only_when_it_is_durable():
    journal = Slow()
    queues = Queues(BlockingEngine(Engine(journal, ManualClock())))
    thread, given = in_thread(lambda: queues.create("q"))
    assert journal.asked.wait(TIMEOUT_S)
    assert given == []
    journal.flush()
    thread.join(TIMEOUT_S)
    assert [info.queue for info in given] == ["q"]


def test_an_awaited_push_answers_only_when_it_is_durable():
    async def main():
        journal = Slow()
        service = AsyncEngine(Engine(journal, ManualClock()))
        creating = asyncio.create_task(service.execute(CreateQueue("q")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert journal.asked.is_set()
        assert not creating.done()
        journal.flush()
        info = await asyncio.wait_for(creating, TIMEOUT_S)
        await service.close()
        return info.queue

    assert asyncio.run(main()) == "q"


def test_one_flush_answers_all_callers_that_wait_for_it():
    journal = Slow()
    queues = Queues(BlockingEngine(Engine(journal, ManualClock())))
    calls = [in_thread(partial(queues.create, name)) for name in ("a", "b", "c")]
    until(lambda: journal.appended == 3)
    assert [given for _, given in calls] == [[], [], []]
    journal.flush()
    for thread, given in calls:
        thread.join(TIMEOUT_S)
        assert len(given) == 1


def test_a_write_that_cannot_be_made_durable_is_answered_with_an_error():
    journal = Slow()
    queues = Queues(BlockingEngine(Engine(journal, ManualClock())))
    thread, given = in_thread(lambda: queues.create("q"))
    assert journal.asked.wait(TIMEOUT_S)
    journal.flush(failed=True)
    thread.join(TIMEOUT_S)
    assert [type(each) for each in given] == [JournalError]


@pytest.mark.parametrize(
    "command", [ListQueues(), Stats("q"), DescribeQueue("q"), Peek("q")], ids=lambda c: str(c)
)
def test_read_only_commands_do_not_wait_for_the_disk(command):
    journal = Slow()
    engine = Engine(journal, ManualClock())
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"x"))
    engine.submit(command)
    assert engine.answer_sequence <= journal.durable_sequence


def test_a_duplicate_waits_for_the_message_it_is_a_duplicate_of():
    journal = Slow()
    engine = Engine(journal, ManualClock())
    engine.submit(CreateQueue("q"))
    first = engine.submit(Push("q", b"x", dedup_id="42"))
    made = engine.answer_sequence
    again = engine.submit(Push("q", b"x", dedup_id="42"))
    assert (again.id, again.duplicate) == (first.id, True)
    assert engine.answer_sequence == made > journal.durable_sequence


def test_deleting_what_is_gone_waits_for_the_delete_that_removed_it():
    journal = Slow()
    engine = Engine(journal, ManualClock())
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"x"))
    (claim,) = engine.submit(Pull("q"))
    assert engine.submit(Delete("q", claim.receipt)) is True
    deleted = engine.answer_sequence
    assert engine.submit(Delete("q", claim.receipt)) is False
    assert engine.answer_sequence == deleted > journal.durable_sequence


def test_after_its_journal_failed_an_engine_refuses_every_command():
    engine = Engine(Failing(after=1), ManualClock())
    engine.submit(CreateQueue("q"))
    with pytest.raises(JournalError, match="gone"):
        engine.submit(Push("q", b"x"))
    for command in (Push("q", b"x"), Pull("q"), Stats("q"), ListQueues()):
        with pytest.raises(JournalError, match="gone"):
            engine.submit(command)


def test_waiting_callers_get_the_error_when_the_journal_fails():
    engine = Engine(Failing(after=1), ManualClock())
    engine.submit(CreateQueue("q"))
    woken = threading.Event()
    waiter = engine.wait(Pull("q", wait_ms=1_000), woken.set)
    with pytest.raises(JournalError):
        engine.submit(Push("q", b"x"))
    assert waiter is not None
    assert waiter.done
    assert isinstance(waiter.error, JournalError)
    assert woken.is_set()


def test_an_unknown_command_is_refused(engine):
    for odd in (None, "push", object(), {"push": 1}):
        with pytest.raises(InvalidField, match="command"):
            engine.submit(odd)


def test_closing_ends_all_waits_and_all_commands(engine):
    queues = Queues(BlockingEngine(engine))
    thread, given = in_thread(lambda: queues.pull("q", wait=1_000))
    until(lambda: queues.stats("q").waiting_pulls)
    queues.close()
    thread.join(TIMEOUT_S)
    assert [type(each) for each in given] == [EngineClosed]
    with pytest.raises(EngineClosed):
        queues.push("q", "x")


def test_a_pull_without_a_wait_is_not_a_waiter(engine):
    assert engine.wait(Pull("q"), lambda: None) is None
    assert engine.wait(Pull("q", wait_ms=0), lambda: None) is None
    assert not engine.has_waiters


def test_waiting_on_a_queue_that_does_not_exist_is_refused(engine):
    with pytest.raises(QueueNotFound):
        engine.submit(Pull("nowhere", wait_ms=1_000))


def test_a_cancelled_wait_gets_no_message(engine):
    first = engine.wait(Pull("q", wait_ms=1_000), lambda: None)
    second = engine.wait(Pull("q", wait_ms=1_000), lambda: None)
    engine.cancel_wait(first)
    assert engine.submit(Stats("q")).waiting_pulls == 1
    engine.submit(Push("q", b"x"))
    assert [claim.body for claim in second.claims] == [b"x"]
    assert first.claims == []


def test_a_wait_cancelled_after_it_was_served_releases_its_message(engine):
    first = engine.wait(Pull("q", wait_ms=1_000), lambda: None)
    second = engine.wait(Pull("q", wait_ms=1_000), lambda: None)
    engine.submit(Push("q", b"x"))
    assert [claim.epoch for claim in first.claims] == [1]
    engine.cancel_wait(first)
    assert [claim.epoch for claim in second.claims] == [2]


def test_a_cancelled_wait_loses_no_message():
    async def main():
        service = AsyncEngine(Engine(None, ManualClock()))
        await service.execute(CreateQueue("q"))
        pull = asyncio.create_task(service.execute(Pull("q", wait_ms=60_000)))
        await asyncio.sleep(0)
        assert (await service.execute(Stats("q"))).waiting_pulls == 1
        # It gets the message, but is cancelled before its task runs again.
        await service.execute(Push("q", b"x"))
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        stats = await service.execute(Stats("q"))
        (claim,) = await service.execute(Pull("q"))
        await service.close()
        return stats.visible, stats.in_flight, claim.body

    assert asyncio.run(main()) == (1, 0, b"x")


def test_a_tick_is_arranged_again_when_something_is_due_earlier_than_planned(engine):
    arranged: list[int] = []
    engine.arrange_ticks(lambda: arranged.append(engine.next_wake_ms))
    engine.wait(Pull("q", wait_ms=60_000), lambda: None)
    engine.submit(Push("q", b"x", delay_ms=5_000))
    engine.submit(Push("q", b"y", delay_ms=9_000))
    assert len(arranged) == 2
    assert arranged[1] < arranged[0]


def test_a_tick_is_arranged_for_a_pull_that_waits_alone_after_an_earlier_one(engine):
    arranged: list[int] = []
    engine.arrange_ticks(lambda: arranged.append(engine.next_wake_ms))
    first = engine.wait(Pull("q", wait_ms=1_000), lambda: None)
    engine.cancel_wait(first)
    engine.wait(Pull("q", wait_ms=60_000), lambda: None)
    assert len(arranged) == 2
    assert arranged[0] < arranged[1]


def test_waiting_and_deadlines_start_no_threads(engine):
    queues = Queues(BlockingEngine(engine))
    before = set(threading.enumerate())
    for _ in range(50):
        queues.push("q", "x", delay=5)
        queues.push("q", "x", ttl=5)
        queues.pull("q", visibility_timeout=3)
    # One that an earlier test has left may end meanwhile.
    assert set(threading.enumerate()) <= before


def test_what_is_due_is_settled_before_the_next_command_of_any_caller(engine):
    engine.submit(Push("q", b"x"))
    (claim,) = engine.submit(Pull("q", visibility_ms=5_000))
    engine.clock.advance(seconds=5)
    assert engine.submit(Stats("q")).visible == 1
    with pytest.raises(StaleReceipt, match="receipt"):
        engine.submit(Release("q", claim.receipt))


def test_a_pull_gets_its_limit_of_messages_however_many_are_due_at_once(engine):
    count = 6 * SETTLE_MAX + 7
    engine.submit(Batch([Push("q", str(number).encode()) for number in range(count)]))
    assert len(engine.submit(Pull("q", count, visibility_ms=5_000))) == count
    engine.clock.advance(seconds=5)
    again = engine.submit(Pull("q", count))
    assert [claim.body for claim in again] == [str(number).encode() for number in range(count)]


def test_all_claims_that_run_out_at_once_are_settled_after_enough_ticks(engine):
    count = 6 * SETTLE_MAX + 7
    engine.submit(Batch([Push("q", str(number).encode()) for number in range(count)]))
    engine.submit(Pull("q", count, visibility_ms=5_000))
    assert not engine.has_due_work
    engine.clock.advance(seconds=5)
    ticks = 0
    while engine.has_due_work:
        engine.tick()
        ticks += 1
    assert ticks >= 6
    stats = engine.submit(Stats("q"))
    assert (stats.visible, stats.in_flight) == (count, 0)


def test_all_messages_that_reach_the_retention_at_once_expire(engine):
    count = 3 * SETTLE_MAX + 7
    engine.submit(Batch([Push("q", b"x", ttl_ms=n % 2 * 4_000 or None) for n in range(count)]))
    engine.submit(ConfigureQueue("q", {"retention_ms": 5_000}))
    engine.clock.advance(seconds=5)
    engine.catch_up()
    stats = engine.submit(Stats("q"))
    assert (stats.messages, stats.stored_bytes) == (0, 0)


def test_pulls_find_a_message_after_many_dead_letters(engine):
    count = 2 * SETTLE_MAX + 7
    engine.submit(Batch([Push("q", b"dead") for _ in range(count)]))
    engine.submit(Pull("q", count, visibility_ms=0))
    engine.submit(Push("q", b"not dead"))
    engine.submit(ConfigureQueue("q", {"dead_letter": "dead", "max_receives": 1}))
    found = engine.submit(Pull("q"))
    while not found and engine.submit(Stats("q")).visible:
        found = engine.submit(Pull("q"))
    assert [claim.body for claim in found] == [b"not dead"]
    assert engine.submit(Stats("dead")).visible == count


def test_a_receipt_is_valid_in_another_engine_with_the_same_key():
    clock, key, identity = ManualClock(), b"k" * 32, b"i" * 7
    first = Engine(None, clock, key=key, identity=identity)
    first.submit(CreateQueue("q"))
    pushed = first.submit(Push("q", b"x"))
    (claim,) = first.submit(Pull("q"))
    second = Engine(None, clock, shard=first.shard, key=key, identity=identity)
    assert claim.id == pushed.id
    assert second.submit(Delete("q", claim.receipt)) is True
