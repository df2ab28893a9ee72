"""The interface of the suite to a backend: its queues, its clock, its LACKS, and time."""

import functools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import pytest

from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.errors import BatchRefused, QueueNotFound, RequestError
from penstock.service import Batch, BatchItem, Claim, Message, State

# How long a test waits for another thread before it fails: longer than any wait on a busy machine.
TIMEOUT_S: Final = 40.0
# The longest pause between two checks of a condition: each of them costs processor time.
POLL_S_MAX: Final = 0.03
# The factor by which the scale grows when a test is run again because it was too slow.
SLOWER: Final = (1, 4, 16)
STATES: Final[tuple[State, ...]] = ("visible", "delayed", "in_flight")

BEHAVIOURS: Final[Mapping[str, str]] = {
    "arrival order": "messages of one priority are pulled in the order they were pushed",
    "priority order": "a higher priority is pulled first",
    "priority age": "messages of an age can be pulled before younger ones of any priority",
    "head": "a released or timed-out message returns to its place at the head",
    "fair groups": "on a standard queue no group starves the others",
    "peek": "messages can be read, in order, without claiming them",
    "peek states": "delayed messages and those in flight can be read too",
    "peek pages": "a queue can be read page by page, in order of arrival, and by id",
    "by id": "messages can be claimed, returned and moved by their ids, whatever their place",
    "receipts": "delete, extend and release work only with the current receipt",
    "ended claims": "a receipt is refused as soon as its claim has ended, by deadline or release",
    "stale delete": "a delete with an old receipt, while another claim holds, raises an error",
    "gone already": "deleting a message that is gone returns another result than deleting one",
    "timeout": "a claim ends by itself at its deadline",
    "extend": "a claim that has not ended can be held for longer",
    "release": "a claim can be ended early",
    "release delay": "a released message can be delayed",
    "milliseconds": "durations may be fractions of a second",
    "visibility zero": "a claim may be over as soon as it is made",
    "in-flight limit": "a queue can limit how many messages are in flight",
    "attempts": "repeating a pull's attempt id gives the same claims while they are valid",
    "dedup": "the same dedup_id within the window gives the first message's id, and no message",
    "dedup window": "after five minutes a dedup_id counts as new",
    "delay": "a message can be pushed now and become visible later",
    "delay place": "a message whose delay ended takes the place of its arrival",
    "queue delay": "a queue can have a delay for all its messages",
    "ttl": "a message can be given a time to live",
    "retention": "a queue removes messages that are older than its retention",
    "capacity by messages": "a queue can be limited in messages",
    "capacity by bytes": "a queue can be limited in bytes",
    "capacity in flight": "a message that is in flight counts towards the limit of its queue",
    "attributes": "attributes in text are pulled as they were pushed",
    "bytes attributes": "attributes in bytes are pulled as they were pushed",
    "fifo": "a FIFO queue keeps strict order within a group and blocks it while one is in flight",
    "fifo dedup": "a FIFO queue recognises duplicates by a dedup_id, or by their bodies",
    "fifo attempts": "a repeated attempt gives the same claims of a group that they block",
    "fifo delay": "on a FIFO queue a single message may be delayed, and its group waits for it",
    "dedup by content": "a queue can recognise duplicates by their bodies",
    "dedup per group": "a FIFO queue can keep dedup ids apart by group",
    "dead letters": "a message pulled max_receives times is moved to the dead-letter queue",
    "dead-letter id": "a dead letter keeps its message id and has its source",
    "dead-letter receives": "the pulls of a dead letter are counted from its move",
    "dead-letter claims": "the epochs of a dead letter's claims go on from those before its move",
    "dead-letter creation": "a dead-letter queue that is named but missing is made",
    "redrive": "dead letters can be moved back to their source queue, or to another",
    "batches": "the items of a batch succeed or fail alone",
    "long poll": "a pull can wait for a message",
    "long poll due": "a waiting pull wakes when a delay or a claim ends",
    "first waiter": "the pull that waited first is served first",
    "waiting pulls": "stats count the pulls that wait",
    "queue deletion": "deleting a queue fails its waiters and ends its claims",
    "queue settings": "a queue's settings can be read and changed, and creating is repeatable",
    "pause": "a queue's delivery can be paused and resumed, while pushes go on",
    "queue names": "queues can be listed by prefix, page by page",
    "purge": "a queue can be emptied",
    "depth": "stats count messages by state",
    "stored bytes": "stats count bytes",
    "oldest age": "stats have the age of the oldest message",
    "history": "the events of a message can be read",
    "threads": "many threads may share one connection",
    "bad input": "a wrong request is refused by a typed error that names the field",
}

Test = TypeVar("Test", bound=Callable[..., None])


def behaviour(*keys: str) -> Callable[[Test], Test]:
    """Marks the behaviours that a test needs; it is skipped for a backend that lacks one."""
    unknown = [key for key in keys if key not in BEHAVIOURS]
    if unknown or not keys:
        raise ValueError(f"no such behaviour: {', '.join(unknown) or 'none named'}")

    def mark(test: Test) -> Test:
        @functools.wraps(test)
        def run(self: "Contract", *arguments: Any, **named: Any) -> None:
            __tracebackhide__ = True
            self._run(lambda: test(self, *arguments, **named))

        run.behaviours = keys  # type: ignore[attr-defined]
        return cast("Test", run)

    return mark


def refused_of(call: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
    """The reply or error of each item of a call of which some items are refused."""
    with pytest.raises(BatchRefused) as refused:
        call(*arguments)
    return refused.value.results


class Contract:
    """The fixtures, the time and the checks that every part of the suite uses.

    A backend overrides the fixture `queues`, and `clock` if it can run on a manual one.
    """

    SCALE: ClassVar[float] = 0.2
    # The shortest retention a queue of this backend may have, in real seconds.
    RETENTION_MIN: ClassVar[float] = 0
    # How late the backend's timers may be, in real seconds.
    LATE_S: ClassVar[float] = 0.02
    LACKS: ClassVar[Mapping[str, str]] = {}

    store: Queues
    _clock: ManualClock | None
    _lacks: Mapping[str, str]
    _made: list[str]
    _absent: str | None = None
    _slower: int = 1
    _slept_s: float = 0
    # Whether the test has given the backend a duration, or let one pass.
    _is_timed: bool = False

    @pytest.fixture(name="clock")
    def _real_time(self) -> ManualClock | None:
        return None

    @pytest.fixture(name="queues")
    def _no_queues(self) -> Queues:
        raise NotImplementedError(f"{type(self).__name__} must have a fixture called queues")

    @pytest.fixture(autouse=True)
    def _set_up(
        self, request: pytest.FixtureRequest, queues: Queues, clock: ManualClock | None
    ) -> Iterator[None]:
        self.store = queues
        self._clock = clock
        self._lacks = {**queues.service.LACKS, **self.LACKS}
        self._made = []
        for key in request.function.behaviours:
            if key in self._lacks:
                pytest.skip(f"lacks {key}: {self._lacks[key]}")
        yield
        self._remove_all()

    def _run(self, test: Callable[[], None]) -> None:
        """Runs a test; if it fails because its steps took too long in real time, runs it again.

        The expectations of a test about a deadline hold only if its own steps take a small part of
        the time that it lets pass. A failure of a test that was fast enough, or that waited until
        the time limit, is reported.
        """
        __tracebackhide__ = True
        for self._slower in SLOWER:
            began_s, self._slept_s, self._is_timed = time.monotonic(), 0, False
            try:
                test()
            except (Exception, pytest.fail.Exception):
                own_s = time.monotonic() - began_s - self._slept_s
                is_late = self._is_timed and self.seconds(1) < own_s < TIMEOUT_S
                if not is_late or self._slower == SLOWER[-1]:
                    raise
                self._remove_all()
            else:
                return

    @behaviour("arrival order")
    def test_lacks_names_only_behaviours_of_the_contract(self) -> None:
        unknown = sorted(key for key in self._lacks if key not in BEHAVIOURS)
        assert not unknown, f"LACKS names no behaviour of the contract: {unknown}"
        assert all(self._lacks.values()), "every entry of LACKS gives its reason"

    def name(self, fifo: bool = False) -> str:
        """A unique queue name; the queue is removed when the test ends."""
        name = f"conformance-{secrets.token_hex(6)}" + (".fifo" if fifo else "")
        self._made.append(name)
        return name

    def absent(self) -> str:
        """The name of a queue that does not exist; always the same one in a test."""
        if self._absent is None:
            self._absent = self.name()
        return self._absent

    def queue(self, **settings: Any) -> str:
        """Creates a queue; by default its claims last longer than any test."""
        name = self.name(fifo=settings.get("fifo", False))
        settings.setdefault("visibility_timeout", 600)
        self.store.create(name, **settings)
        return name

    def _remove_all(self) -> None:
        self._absent = None
        while self._made:
            with suppress(QueueNotFound):
                self.store.remove(self._made.pop(0), force=True)

    def seconds(self, count: float) -> float:
        """A duration of the suite's time, in the seconds that are passed to the backend."""
        self._is_timed = True
        return count if self._clock is not None else count * self.SCALE * self._slower

    def retention(self) -> float:
        """A short retention for a queue, in seconds of the suite's time."""
        return max(20, self.RETENTION_MIN / self.seconds(1))

    def pass_time(self, count: float) -> None:
        """Advances the suite's time by so many seconds; slightly more if the time is real."""
        if self._clock is not None:
            self._clock.advance(seconds=count)
        else:
            real_s = self.seconds(count) + self.LATE_S
            self._slept_s += real_s
            time.sleep(real_s)

    def batch(self, items: Sequence[BatchItem]) -> list[Any]:
        """Executes several commands in one append; the reply to each, or its error."""
        return self.store._execute(Batch([*items]))

    def push_all(self, queue: str, *bodies: str, **options: Any) -> list[str]:
        """Pushes each body; returns the ids."""
        return [self.store.push(queue, body, **options).id for body in bodies]

    def claim(self, queue: str, **options: Any) -> Claim:
        """Pulls a message; fails if there is none."""
        claim = self.store.pull(queue, **options)
        assert claim is not None, f"a pull from {queue} found nothing"
        return claim

    def drain(self, queue: str) -> list[str]:
        """Pulls all visible messages, one by one; returns the bodies. The claims stay."""
        found = []
        while (claim := self.store.pull(queue)) is not None:
            found.append(claim.body.decode())
        return found

    def consume(self, queue: str) -> list[str]:
        """Pulls and deletes until nothing is left; returns the bodies."""
        found = []
        while (claim := self.store.pull(queue)) is not None:
            assert self.store.delete(claim) is True
            found.append(claim.body.decode())
        return found

    def counts(self, queue: str) -> tuple[int, int, int]:
        """How many messages are visible, delayed and in flight."""
        stats = self.store.stats(queue)
        return stats.visible, stats.delayed, stats.in_flight

    def is_empty(self, queue: str) -> bool:
        """Whether the queue holds nothing, and nothing can be pulled from it."""
        return self.store.pull(queue) is None and self.counts(queue) == (0, 0, 0)

    def pulling(self, queue: str, **options: Any) -> "Future[Claim | None]":
        """Starts a pull in another thread, and returns once it waits (or has an answer)."""
        return self.in_thread(queue, lambda: self.store.pull(queue, **options))

    def in_thread(self, queue: str, pull: Callable[[], Any]) -> "Future[Any]":
        """Starts a pull that must wait on this queue, and returns once it waits."""
        before = self.waiting(queue)
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(pull())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        if before is None:
            time.sleep(0.2)
        else:
            self.until(lambda: future.done() or (self.waiting(queue) or 0) > before)
        return future

    def waiting(self, queue: str) -> int | None:
        """How many pulls wait on the queue; None if the backend does not count them."""
        if "waiting pulls" in self._lacks:
            return None
        return self.store.stats(queue).waiting_pulls

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until the condition holds; fails after the time limit."""
        give_up = time.monotonic() + TIMEOUT_S
        pause_s = 0.002
        while not holds():
            assert time.monotonic() < give_up, "the condition did not hold within the time limit"
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S_MAX)

    def seen(self) -> list[object]:
        """The observable state of this test's queues, without what changes with time."""
        return [each for each in map(self._seen_of, self._made) if each is not None]

    def _seen_of(self, name: str) -> object:
        try:
            stats = self.store.stats(name)
        except QueueNotFound:
            return None
        shown: list[list[Message]] = []
        for state in STATES:
            lacked = "peek" if state == "visible" else "peek states"
            shown.append([] if lacked in self._lacks else self.store.peek(name, 100, state=state))
        counts = (stats.visible, stats.delayed, stats.in_flight)
        return self.store.describe(name), counts, stats.stored_bytes, shown

    @contextmanager
    def refused(self, field: str, kind: type[RequestError] = RequestError) -> Iterator[None]:
        """Expects an error of this kind that names the field, and that nothing has changed."""
        before = self.seen()
        with pytest.raises(kind) as caught:
            yield
        assert re.search(field, str(caught.value))
        assert self.seen() == before
