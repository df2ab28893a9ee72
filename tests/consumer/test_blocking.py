"""The blocking loop: what happens to a message when its work succeeds, fails, or takes long."""

import gc
import logging
import signal
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

import pytest

import penstock
from penstock import ManualClock, Queues
from penstock.errors import BackendLost, InvalidField
from penstock.service import Extend

TIMEOUT_S = 60


@pytest.fixture
def clock():
    return ManualClock(auto_advance=True)


@pytest.fixture(params=["memory", "file"])
def queues(request, clock, quick_path):
    url = "memory:" if request.param == "memory" else f"file:{quick_path / 'store'}?embedded=1"
    with penstock.connect(url, clock=clock) as queues:
        queues.create("orders", visibility_timeout=30)
        yield queues


def until(condition):
    """Waits for an effect of a thread of the loop."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s


def stats(queues):
    found = queues.stats("orders")
    return found.visible, found.delayed, found.in_flight


def test_every_message_is_given_once_and_deleted(queues):
    queues.push_many("orders", ["a", "b", "c"])
    assert [claim.body for claim in queues.consume("orders", idle=0)] == [b"a", b"b", b"c"]
    assert stats(queues) == (0, 0, 0)


def test_a_message_is_deleted_when_the_next_is_asked_for_and_not_before(queues):
    queues.push_many("orders", ["a", "b"])
    with queues.consume("orders", idle=0) as claims:
        next(claims)
        assert stats(queues) == (1, 0, 1)
        next(claims)
        assert stats(queues) == (0, 0, 1)
        with pytest.raises(StopIteration):
            next(claims)
    assert stats(queues) == (0, 0, 0)


def fail(queues, kind, **options):
    with queues.consume("orders", **options) as claims:
        for _ in claims:
            raise kind


def test_an_exception_releases_the_message_after_a_delay_that_doubles(queues, clock):
    queues.push("orders", "poison")
    for delay_s in (2, 4, 8, 10, 10):
        with pytest.raises(ZeroDivisionError):
            fail(queues, ZeroDivisionError, backoff=2, max_backoff=10)
        assert stats(queues) == (0, 1, 0)
        clock.advance(seconds=delay_s - 1)
        assert stats(queues) == (0, 1, 0)
        clock.advance(seconds=1)
        assert stats(queues) == (1, 0, 0)


def fail_without_closing(queues):
    for _ in queues.consume("orders", backoff=5):
        raise ZeroDivisionError


def test_a_loop_that_an_exception_ends_is_collected_and_its_message_released(queues):
    queues.push("orders", "x")
    with pytest.raises(ZeroDivisionError):
        fail_without_closing(queues)
    gc.collect()
    until(lambda: stats(queues) == (0, 1, 0))


def test_a_break_releases_the_message_at_once(queues):
    queues.push("orders", "x")
    with queues.consume("orders") as claims:
        for _ in claims:
            break
    assert stats(queues) == (1, 0, 0)


def test_an_interrupt_releases_the_message_at_once(queues):
    queues.push("orders", "x")
    with pytest.raises(KeyboardInterrupt):
        fail(queues, KeyboardInterrupt)
    assert stats(queues) == (1, 0, 0)


def test_a_claim_is_extended_for_as_long_as_the_work_takes(queues, clock):
    queues.push_many("orders", ["slow", "next"])
    for claim in queues.consume("orders", idle=0):
        for _ in range(20):
            clock.advance(seconds=15)
        assert claim.receives == 1
        assert stats(queues)[2] == 1
    assert stats(queues) == (0, 0, 0)


def test_the_thread_extends_in_real_time_too():
    with penstock.connect("memory:") as queues:
        queues.create("orders")
        queues.push("orders", "x")
        # Long enough for a busy machine to extend the claim before it ends.
        for claim in queues.consume("orders", visibility_timeout=2, idle=0):
            deadline_ms = claim.deadline_ms
            while queues.clock.now_ms() < deadline_ms + 1_000:
                assert queues.stats("orders").in_flight == 1
        assert stats(queues) == (0, 0, 0)


class Unreachable:
    """A service that cannot be reached by the next so many extensions."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max = 250

    def __init__(self, service, failures):
        self._service = service
        self._failures = failures
        self.close = service.close

    def execute(self, command):
        if type(command) is Extend and self._failures:
            self._failures -= 1
            raise BackendLost("no answer")
        return self._service.execute(command)


def test_an_extension_that_fails_is_tried_twice_more_before_the_claim_runs_out(queues, clock):
    queues.push("orders", "x")
    failing = Queues(Unreachable(queues.service, 2), clock)
    with failing.consume("orders") as claims:
        next(claims)
        for _ in range(29):
            clock.advance(seconds=1)
        # Its first deadline has passed.
        clock.advance(seconds=5)
        assert stats(queues) == (0, 0, 1)


def test_a_claim_is_held_no_longer_than_asked_for(queues, clock):
    queues.push("orders", "stuck")
    with queues.consume("orders", max_hold=60) as claims:
        next(claims)
        for _ in range(10):
            clock.advance(seconds=10)
        assert stats(queues) == (1, 0, 0)


def test_work_that_lost_its_claim_goes_on_with_the_next_message(queues, clock):
    queues.push("orders", "late")
    seen = []
    for claim in queues.consume("orders", idle=0):
        seen.append(claim.receives)
        if len(seen) == 1:
            # A jump past the deadline: the claim could not have been extended before.
            clock.advance(seconds=31)
    assert seen == [1, 2]
    assert stats(queues) == (0, 0, 0)


def test_stop_ends_the_loop_after_the_current_message(queues):
    queues.push_many("orders", ["a", "b"])
    consumer = queues.consume("orders")
    for _ in consumer:
        consumer.stop()
    assert stats(queues) == (1, 0, 0)
    assert list(consumer) == []


def test_stop_from_a_signal_handler_ends_a_loop_that_waits(queues):
    consumer = queues.consume("orders", wait=0.05)
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
    try:
        threading.Timer(0.05, signal.raise_signal, [signal.SIGUSR1]).start()
        assert list(consumer) == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_loop_ends_after_it_was_idle_for_long_enough(queues, clock):
    before_ms = clock.now_ms()
    assert list(queues.consume("orders", idle=2.5)) == []
    assert clock.now_ms() - before_ms == 2_500


def test_a_handler_that_fails_does_not_end_the_loop(queues, caplog):
    queues.push_many("orders", ["bad", "good"])
    done = []

    def work(claim):
        if claim.body == b"bad" and claim.receives < 3:
            raise ZeroDivisionError("the handler fails")
        done.append(claim.body)

    with caplog.at_level(logging.ERROR, "penstock.consumer"):
        queues.consume("orders", idle=10).run(work)
    assert done == [b"good", b"bad"]
    assert [entry.exc_info[0] for entry in caplog.records] == [ZeroDivisionError] * 2
    assert stats(queues) == (0, 0, 0)


def test_ending_a_loop_ends_its_thread(queues):
    queues.push("orders", "x")
    with queues.consume("orders") as claims:
        next(claims)
        assert "penstock-consumer" in {thread.name for thread in threading.enumerate()}
    until(lambda: "penstock-consumer" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"visibility_timeout": 0}, "visibility_timeout"),
        ({"wait": -1}, "wait"),
        ({"backoff": "long"}, "backoff"),
        ({"idle": True}, "idle"),
        ({"max_hold": float("nan")}, "max_hold"),
    ],
)
def test_a_wrong_option_is_refused_by_name_before_the_loop_begins(queues, options, complaint):
    with pytest.raises(InvalidField, match=complaint):
        queues.consume("orders", **options)


def test_a_queue_whose_claims_last_no_time_needs_a_visibility_timeout(queues):
    queues.create("zero", visibility_timeout=0)
    with pytest.raises(InvalidField, match="visibility_timeout: claims of this queue last 0 s"):
        next(queues.consume("zero"))
    with pytest.raises(penstock.QueueNotFound):
        next(queues.consume("nowhere"))


class AsyncWork:
    """A callable whose calls return coroutines, which its type does not show."""

    async def __call__(self, claim):
        raise AssertionError("nothing awaits this")


async def async_work(claim):
    raise AssertionError("nothing awaits this")


def generate(claim):
    yield claim


class GeneratingWork:
    """A callable whose calls return generators, which its type does not show."""

    def __call__(self, claim):
        yield claim


@pytest.mark.parametrize("work", [async_work, AsyncWork(), lambda claim: async_work(claim)])
def test_a_function_that_has_to_be_awaited_is_refused_and_loses_no_message(queues, work):
    queues.push_many("orders", ["a", "b"])
    with pytest.raises(InvalidField, match=r"^work: .*penstock\.aio\.connect"):
        queues.consume("orders", idle=0).run(work)
    assert sum(stats(queues)) == 2
    assert stats(queues)[2] == 0


def test_a_generator_function_is_refused_before_a_message_is_pulled(queues):
    queues.push("orders", "a")
    with pytest.raises(InvalidField, match="work: it has a yield"):
        queues.consume("orders", idle=0).run(generate)
    assert stats(queues) == (1, 0, 0)


@pytest.mark.parametrize("work", [GeneratingWork(), lambda claim: generate(claim)])
def test_work_whose_call_returns_a_generator_loses_no_message(queues, work):
    queues.push_many("orders", ["a", "b"])
    with pytest.raises(InvalidField, match="work: its call returned a generator; it has a yield"):
        queues.consume("orders", idle=0).run(work)
    assert sum(stats(queues)) == 2


@pytest.mark.parametrize("work", [None, "work"])
def test_what_cannot_be_called_is_refused_before_a_message_is_pulled(queues, work):
    queues.push("orders", "a")
    with pytest.raises(InvalidField, match="work: expected a function"):
        queues.consume("orders", idle=0).run(work)
    assert stats(queues) == (1, 0, 0)
