"""The engine in event loops: which callbacks run and when, and the effect of a cancelled pull."""

import asyncio
from typing import Any

import pytest

from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.store import open_engine
from penstock.backends.loop import AwaitedService, Pending, result_of
from penstock.clock import ManualClock, SystemClock
from penstock.errors import (
    EngineClosed,
    InFlightLimit,
    JournalError,
    MessageNotFound,
    PenstockError,
    QueueDeleted,
    QueueNotFound,
)
from penstock.journal import MemoryJournal
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    History,
    Pull,
    Purge,
    Push,
    PushMany,
    Stats,
)
from tests.server.conftest import until


class HeldJournal(MemoryJournal):
    """A journal that becomes durable when the test calls `sync`, and fails when it calls `fail`."""

    def __init__(self):
        super().__init__(1_000)
        self.appended = 0
        self.notices = []
        self.failure = None
        self.refuses = False

    def append(self, events):
        if self.refuses:
            raise JournalError("the disk is gone")
        self.appended += 1
        return self.appended, ()

    def wait(self, sequence):
        if self.failure is not None:
            raise self.failure

    def notify(self, sequence, done):
        self.notices.append(done)

    def sync(self):
        self.durable_sequence = self.appended
        self.call_notices()

    def fail(self):
        self.failure = JournalError("the disk is gone")
        self.call_notices()

    def call_notices(self):
        notices, self.notices = self.notices, []
        for done in notices:
            done()


def on_loop(check, journal=None):
    """Run a coroutine with a loop engine and its clock; no exception may reach the loop."""

    async def main():
        escaped = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        clock = ManualClock()
        service = LoopEngine(Engine(journal, clock))
        service.submit(CreateQueue("q"))
        await asyncio.sleep(0)
        if journal is not None:
            journal.sync()
        await check(service, clock)
        await service.close()
        assert escaped == []

    asyncio.run(main())


def collect(pending):
    """A list to which replies and errors will be added."""
    assert isinstance(pending, Pending)
    collected = []
    pending.then(lambda reply, error: collected.append((reply, error)))
    return collected


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("journal", [None, HeldJournal()], ids=["at_once", "deferred"])
def test_a_callback_with_a_fault_keeps_no_claims_from_those_behind_it(journal):
    async def check(service, clock):
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        pulls = [service.submit(Pull("q", wait_ms=1_000)) for _ in range(3)]
        pulls[0].then(lambda *_: 1 / 0)
        others = [collect(pending) for pending in pulls[1:]]
        # What waits for the timer must not be lost with the fault either.
        service.submit(CreateQueue("other"))
        late = collect(service.submit(Pull("other", wait_ms=2_000)))
        service.submit(PushMany("q", [b"1", b"2", b"3"]))
        await turns()
        for _ in range(2 if journal else 0):
            journal.sync()
            await turns()
        assert [[claim.body for claim in claims] for ((claims, _),) in others] == [[b"2"], [b"3"]]
        clock.advance(seconds=2)
        await turns()
        assert late == [([], None)]

    on_loop(check, journal)


def test_a_woken_pull_is_called_back_from_the_loop_and_may_submit_commands():
    async def check(service, clock):
        first, second = (
            service.submit(Pull("q", wait_ms=1_000)),
            service.submit(Pull("q", wait_ms=1_000)),
        )
        order = []

        def give_back(claims, error):
            order.append("called back")
            service.abandon(claims)

        first.then(give_back)
        served = collect(second)
        service.submit(Push("q", b"x"))
        order.append("pushed")
        await turns()
        assert order == ["pushed", "called back"]
        ((claims, error),) = served
        assert error is None
        assert [claim.epoch for claim in claims] == [2]

    on_loop(check)


def test_pulls_that_one_push_wakes_are_answered_in_order_and_not_all_in_one_turn():
    """Row 20: 2,000 connections may wait on one queue."""

    async def check(service, clock):
        answered: list[int] = []
        for number in range(1_000):
            pull = service.submit(Pull("q", wait_ms=1_000))
            pull.then(lambda claims, error, number=number: answered.append(number))
        service.submit(PushMany("q", [b"x"] * 1_000))
        counts = []
        while len(answered) < 1_000:
            await asyncio.sleep(0)
            counts.append(len(answered))
        assert [count for count in counts if count] == [200, 400, 600, 800, 1_000]
        assert answered == [*range(1_000)]

    on_loop(check)


def test_all_pulls_that_wait_are_answered_when_the_engine_closes():
    async def check(service, clock):
        waiting = [collect(service.submit(Pull("q", wait_ms=1_000))) for _ in range(1_000)]
        await service.close()
        assert {type(error) for ((_, error),) in waiting} == {EngineClosed}

    on_loop(check)


def test_a_tick_that_the_journal_refuses_ends_the_waits_with_its_error():
    journal = HeldJournal()

    async def check(service, clock):
        failures: list[PenstockError] = []
        service.on_failure(failures.append)
        service.submit(Push("q", b"x", delay_ms=1_000)).then(lambda *_: None)
        journal.sync()
        waiting = collect(service.submit(Pull("q", wait_ms=5_000)))
        journal.refuses = True
        clock.advance(seconds=2)
        await turns()
        ((_, error),) = waiting
        assert isinstance(error, JournalError)
        assert [str(each) for each in failures] == ["the disk is gone"]

    on_loop(check, journal)


def test_one_notification_of_the_journal_answers_all_commands_of_one_turn_of_the_loop():
    journal = HeldJournal()

    async def check(service, clock):
        answers = [collect(service.submit(Push("q", b"x"))) for _ in range(10)]
        await turns()
        assert len(journal.notices) == 1
        assert answers == [[]] * 10
        journal.sync()
        await turns()
        assert [error for ((_, error),) in answers] == [None] * 10

    on_loop(check, journal)


def test_a_lone_command_asks_for_its_sync_at_once_and_commands_after_shared_ones_wait_a_turn():
    journal = HeldJournal()

    async def sync():
        journal.sync()
        await turns()

    async def check(service, clock):
        await sync()
        lone = collect(service.submit(Push("q", b"lone")))
        assert len(journal.notices) == 1
        others = [collect(service.submit(Push("q", b"x"))) for _ in range(3)]
        await turns()
        assert len(journal.notices) == 1
        journal.durable_sequence = journal.appended - 3
        journal.call_notices()
        await turns()
        assert len(lone) == 1
        assert others == [[], [], []]
        assert len(journal.notices) == 1
        await sync()
        assert [len(each) for each in others] == [1, 1, 1]
        # The last notification served three: these share theirs.
        both = [collect(service.submit(Push("q", b"y"))) for _ in range(2)]
        assert journal.notices == []
        await turns()
        assert len(journal.notices) == 1
        await sync()
        assert [len(each) for each in both] == [1, 1]

    on_loop(check, journal)


def test_replies_that_wait_for_a_failed_disk_fail_after_the_listeners_were_called():
    journal = HeldJournal()

    async def check(service, clock):
        order: list[object] = []
        service.on_failure(lambda error: order.append("server"))
        service.submit(Push("q", b"x")).then(lambda reply, error: order.append(type(error)))
        await turns()
        journal.fail()
        await turns()
        assert order == ["server", JournalError]

    on_loop(check, journal)


def test_a_read_only_command_at_the_end_does_not_make_the_change_before_it_durable():
    journal = HeldJournal()

    def steps():
        yield Push("q", b"x")
        return (yield Stats("q")).visible

    async def check(service, clock):
        answer = collect(service.run(steps()))
        await turns()
        assert answer == []
        journal.sync()
        await turns()
        assert answer == [(1, None)]

    on_loop(check, journal)


def test_an_error_is_thrown_into_the_steps_and_their_exception_reaches_the_caller():
    def steps():
        try:
            yield Push("nowhere", b"x")
        except QueueNotFound:
            yield Push("q", b"x")
        raise ZeroDivisionError

    async def check(service, clock):
        with pytest.raises(ZeroDivisionError):
            service.run(steps())
        assert service.submit(Stats("q")).visible == 1

    on_loop(check)


def test_steps_continue_after_a_pull_that_waited():
    def steps():
        (claim,) = yield Pull("q", wait_ms=1_000)
        yield Delete("q", claim.proof)
        return claim.body

    async def check(service, clock):
        answer = collect(service.run(steps()))
        service.submit(Push("q", b"x"))
        assert answer == []
        await turns()
        assert answer == [(b"x", None)]
        assert service.submit(Stats("q")).messages == 0

    on_loop(check)


@pytest.mark.parametrize(("attempt_id", "visible"), [(None, 1), ("a", 0)])
@pytest.mark.parametrize("when", ["woken", "not yet durable"])
def test_claims_of_a_cancelled_pull_return_unless_an_attempt_was_named(attempt_id, visible, when):
    journal = HeldJournal()

    async def check(service, clock):
        pull = service.submit(Pull("q", wait_ms=1_000, attempt_id=attempt_id))
        answer = collect(pull)
        service.submit(Push("q", b"x")).then(lambda *_: None)
        if when != "woken":
            await turns()
        pull.cancel()
        assert service.submit(Stats("q")).visible == visible
        journal.sync()
        await turns()
        assert answer == []

    on_loop(check, journal)


def test_a_pull_that_may_wait_waits_for_room_below_the_in_flight_limit():
    async def check(service, clock):
        service.submit(ConfigureQueue("q", {"in_flight_max": 1}))
        service.submit(Push("q", b"1"))
        service.submit(Push("q", b"2"))
        (claim,) = service.submit(Pull("q"))
        with pytest.raises(InFlightLimit):
            service.submit(Pull("q"))
        answer = collect(service.submit(Pull("q", wait_ms=1_000)))
        late = collect(service.submit(Pull("q", wait_ms=500)))
        service.submit(Delete("q", claim.proof))
        await turns()
        ((claims, _),) = answer
        assert [claim.body for claim in claims] == [b"2"]
        clock.advance(seconds=1)
        await turns()
        assert late == [([], None)]

    on_loop(check)


def test_a_view_follows_every_change_of_its_queue():
    async def check(service, clock):
        first = service.view("q")
        assert service.view("q") is first
        service.submit(ConfigureQueue("q", {"delay_ms": 5}))
        assert service.view("q").settings.delay_ms == 5
        service.submit(DeleteQueue("q"))
        assert service.view("q") is None
        clock.advance(seconds=1)
        service.submit(CreateQueue("q"))
        assert service.view("q").created_at_ms == first.created_at_ms + 1_000

    on_loop(check)


def test_an_awaited_service_has_the_same_interface_and_drops_old_views():
    def steps():
        (claim,) = yield Pull("q", wait_ms=1_000)
        try:
            yield Push("nowhere", b"x")
        except QueueNotFound:
            yield Delete("q", claim.proof)
        return claim.body

    async def main():
        service = AwaitedService(AsyncEngine(Engine(None, ManualClock())))
        await result_of(service.submit(CreateQueue("q")))
        assert service.view("q") is None
        described = await result_of(service.submit(DescribeQueue("q")))
        assert service.view("q") == described
        await result_of(service.submit(ConfigureQueue("q", {"delay_ms": 0})))
        assert service.view("q") is None
        await result_of(service.submit(Push("q", b"x")))
        assert await result_of(service.run(steps())) == b"x"
        assert (await result_of(service.submit(Stats("q")))).messages == 0
        await service.close()

    asyncio.run(main())


def test_a_cancelled_pull_of_an_awaited_service_leaves_no_claim():
    async def main():
        service = AwaitedService(AsyncEngine(Engine(None, ManualClock())))
        await result_of(service.submit(CreateQueue("q")))
        for _ in range(3):
            pull: Any = service.submit(Pull("q", wait_ms=60_000))
            answer = collect(pull)
            await turns(2)
            assert pull.waits
            await result_of(service.submit(Push("q", b"x")))
            pull.cancel()
            await turns(10)
            stats = await result_of(service.submit(Stats("q")))
            assert (stats.in_flight, stats.waiting_pulls, answer) == (0, 0, [])
            await result_of(service.submit(Purge("q")))
        await service.close()

    asyncio.run(main())


def two_pushes(pause):
    """Steps that push, pause and push again."""
    first = yield Push("q", b"1")
    if pause:
        yield None
    second = yield Push("q", b"2")
    return first.id != second.id


def test_other_commands_are_answered_while_steps_pause_and_the_last_change_must_be_durable():
    async def check(service, clock):
        replies = collect(service.run(two_pushes(pause=True)))
        assert service.submit(Stats("q")).messages == 1
        await turns()
        assert service.submit(Stats("q")).messages == 2
        assert replies == []
        service.engine.journal.sync()
        await turns()
        assert replies == [(True, None)]

    on_loop(check, HeldJournal())


def test_steps_may_pause_before_their_first_command():
    def steps():
        yield None
        return (yield Push("q", b"1")).duplicate

    async def check(service, clock):
        replies = collect(service.run(steps()))
        assert service.submit(Stats("q")).messages == 0
        await turns()
        assert (replies, service.submit(Stats("q")).messages) == ([(False, None)], 1)

    on_loop(check)


def test_steps_that_are_cancelled_while_they_pause_end_there():
    ended = []

    def steps():
        try:
            yield from two_pushes(pause=True)
        finally:
            ended.append(True)

    async def check(service, clock):
        pending = service.run(steps())
        collect(pending)
        pending.cancel()
        await turns()
        assert ended == [True]
        assert service.submit(Stats("q")).messages == 1

    on_loop(check)


def test_an_error_after_a_pause_reaches_the_callback_and_a_closed_engine_refuses_steps():
    def steps():
        yield Stats("q")
        yield None
        yield Stats("gone")

    async def check(service, clock):
        missing = collect(service.run(steps()))
        await turns()
        assert isinstance(missing[0][1], QueueNotFound)
        closed = collect(service.run(steps()))
        await service.close()
        await turns()
        assert isinstance(closed[0][1], PenstockError)

    on_loop(check)


def test_steps_pause_with_an_awaited_service_too():
    async def main():
        service = AwaitedService(AsyncEngine(Engine(None, ManualClock())))
        await result_of(service.submit(CreateQueue("q")))
        assert await result_of(service.run(two_pushes(pause=True))) is True
        await service.close()

    asyncio.run(main())


def test_other_commands_are_answered_between_the_slices_of_a_history(tmp_path):
    async def main():
        service: Any = LoopEngine(open_engine(tmp_path, durability="os"))
        service.submit(CreateQueue("q"))
        first = service.submit(Push("q", b"0"))
        for number in range(5_000):
            service.submit(Push("q", b"%d" % number))
        last = service.submit(Push("q", b"z"))
        both = [collect(service.history(History(message.id))) for message in (first, last)]
        unknown = collect(service.history(History(last.id[:-4] + "ffff")))
        turns_taken = 0
        while not all(both) or not unknown:
            turns_taken += 1
            assert service.submit(Stats("q")).messages == 5_002
            await asyncio.sleep(0)
        assert turns_taken >= 5
        assert [[event.kind for event in replies[0][0]] for replies in both] == [["Pushed"]] * 2
        assert isinstance(unknown[0][1], MessageNotFound)
        await service.close()

    asyncio.run(main())


def test_a_watcher_is_woken_by_a_visible_message_and_claims_none():
    """A pull that only watches ends once a message is visible that no waiting pull has taken."""

    async def work():
        engine: Any = LoopEngine(Engine(MemoryJournal(), ManualClock()))
        engine.submit(CreateQueue("q"))
        ended: list[Any] = []
        engine.watch(Pull("q", wait_ms=60_000)).then(lambda claims, error: ended.append(claims))
        served = engine.submit(Pull("q", wait_ms=60_000))
        served.then(lambda claims, error: ended.append([claim.body for claim in claims]))
        engine.submit(Push("q", b"for the pull"))
        await asyncio.sleep(0)
        assert ended == [[b"for the pull"]]
        engine.submit(Push("q", b"for the watch"))
        await asyncio.sleep(0)
        assert ended == [[b"for the pull"], []]
        assert engine.submit(Stats("q")).visible == 1
        assert engine.submit(Stats("q")).waiting_pulls == 0
        # A watch that is cancelled, and one whose queue is removed.
        engine.watch(Pull("q", wait_ms=60_000)).cancel()
        ends: list[Any] = []
        engine.watch(Pull("q", wait_ms=60_000)).then(lambda claims, error: ends.append(error))
        engine.submit(DeleteQueue("q"))
        await asyncio.sleep(0)
        assert [type(error) for error in ends] == [QueueDeleted]
        assert not engine.engine.has_waiters
        await engine.close()

    asyncio.run(work())


def test_what_is_due_is_settled_while_there_is_no_command_and_no_waiting_pull():
    """On the system clock: more than one step of it, by the timer of the event loop alone."""

    async def main():
        engine = Engine(MemoryJournal(), SystemClock())
        face = LoopEngine(engine)
        face.submit(CreateQueue("q"))
        for _ in range(3 * engine.settle_max):
            face.submit(Push("q", b"x", ttl_ms=500))
        deliveries = engine.shard.names["q"].deliveries
        assert len(deliveries) > 2 * engine.settle_max
        await asyncio.to_thread(until, lambda: not deliveries)
        assert not engine.has_due_work
        await face.close()

    asyncio.run(main())
