"""The blocking loop: `for claim in queues.consume("orders")`, its claim extended by a thread."""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from penstock.clock import THREAD_PREFIX, Clock
from penstock.consumer.options import (
    HAS_YIELD,
    ConsumerOptions,
    HoldTimes,
    check_holdable,
    refuse_generator,
    report_failure,
    unfinished,
)
from penstock.errors import InvalidField, PenstockError, RequestError, StaleReceipt
from penstock.public import QueueDescription
from penstock.service import Claim

_NEEDS_AWAITED: Final = (
    "an async function is run by the awaited loop, which penstock.aio.connect gives"
)


class QueueCalls(Protocol):
    """The part of `Queues` that a blocking loop uses."""

    clock: Clock

    def describe(self, queue: str) -> QueueDescription: ...
    def pull(
        self,
        queue: str,
        *,
        wait: float | None,
        visibility_timeout: float | None,
        holder: str | None,
    ) -> Claim | None: ...
    def extend(self, claim: Claim, duration: float) -> int: ...
    def release(self, claim: Claim, *, delay: float) -> None: ...
    def delete(self, claim: Claim) -> bool: ...


class ClaimKeeper:
    """Holds one claim at a time in a thread of its own: extends it, or releases it if abandoned."""

    def __init__(self, queues: QueueCalls, times: HoldTimes, options: ConsumerOptions) -> None:
        self._queues = queues
        self._times = times
        self._options = options
        self._claim: Claim | None = None
        self._is_abandoned = False
        self._is_closed = False
        # Whether the thread sleeps without a timeout, because there was no claim to extend.
        self._is_idle = False
        # Held while a claim is extended, so that the loop does not delete it at the same time.
        self._lock = threading.Lock()
        # Wakes the thread. A finalizer can use it at any point, because its `put` takes no lock
        # that the interrupted code may hold.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}consumer", daemon=True
        )
        self._unsubscribe = queues.clock.subscribe(self._extend_if_due)
        self._thread.start()

    def hold(self, claim: Claim) -> None:
        """Extends this claim from now on."""
        with self._lock:
            self._claim = claim
            self._times.begin()
            # A thread that is not idle wakes by its timeout, before this claim must be extended.
            needs_waking, self._is_idle = self._is_idle, False
        if needs_waking:
            self._wakes.put(None)

    def stop_holding(self) -> None:
        """Stops extending the claim."""
        with self._lock:
            self._claim = None

    def abandon(self) -> None:
        """Makes the thread release the claim and end; does not block, for use in a finalizer."""
        self._is_abandoned = self._is_closed = True
        self._wakes.put(None)

    def close(self) -> None:
        """Ends the thread; a claim that is still held is not released, and runs out."""
        self._is_closed = True
        self._wakes.put(None)
        self._unsubscribe()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                is_idle = self._is_idle = self._claim is None
                next_ms = self._times.next_ms
            wait_s = None if is_idle else self._queues.clock.timeout_s(next_ms)
            with suppress(Empty):
                self._wakes.get(timeout=wait_s)
            self._extend_if_due()
        if self._is_abandoned:
            self._unsubscribe()
            claim = self._claim
            if claim is not None:
                self._release(claim)

    def _extend_if_due(self) -> None:
        """Extends the claim if it is time; also called by a manual clock that was advanced."""
        with self._lock:
            if self._claim is None or self._is_closed or not self._times.is_due:
                return
            if self._times.is_over:
                self._claim = None
                return
            try:
                self._queues.extend(self._claim, self._times.visibility_timeout)
            except RequestError:
                # The claim ran out or the queue is gone: nothing is left to hold.
                self._claim = None
            except PenstockError:
                self._times.failed()
            else:
                self._times.extended()

    def _release(self, claim: Claim) -> None:
        # If that fails, the claim runs out by itself.
        with suppress(PenstockError):
            self._queues.release(claim, delay=self._options.delay_of(claim))


class Consumer:
    """A blocking loop over a queue's messages: an iterator of claims, and a context manager."""

    def __init__(self, queues: QueueCalls, options: ConsumerOptions) -> None:
        options.check()
        self._queues = queues
        self._options = options
        self._keeper: ClaimKeeper | None = None
        self._claim: Claim | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Ends the loop after the current message; from any thread, or a signal handler."""
        self._is_stopped = True

    def __iter__(self) -> "Consumer":
        return self

    def __next__(self) -> Claim:
        """Deletes the current claim, if there is one, and returns the next."""
        self._delete_claim()
        keeper = self._keeper or self._make_keeper()
        claim = self._pull()
        if claim is None:
            self.close()
            raise StopIteration
        self._claim = claim
        keeper.hold(claim)
        return claim

    def run(self, work: Callable[[Claim], object]) -> None:
        """Calls `work` with every claim until the loop ends; if it raises, releases the message.

        What `work` raised goes to `logging` under the name `penstock.consumer`; other exceptions
        than Exception, such as KeyboardInterrupt, end the loop. Raises InvalidField for an async
        function, before a message is pulled, and for one that returns a coroutine or a generator.
        """
        refuse_generator("work", work)
        if inspect.iscoroutinefunction(work):
            raise InvalidField(f"work: {_NEEDS_AWAITED}")
        with self:
            for claim in self:
                try:
                    finished = work(claim)
                except Exception as error:
                    report_failure(claim, error)
                    self._release_claim(self._options.delay_of(claim))
                else:
                    if finished is not None and (what := unfinished(finished)):
                        why = HAS_YIELD if what == "a generator" else _NEEDS_AWAITED
                        raise InvalidField(f"work: its call returned {what}; {why}")

    def _pull(self) -> Claim | None:
        waited = 0.0
        options = self._options
        while not self._is_stopped:
            wait = (
                options.wait if options.idle is None else min(options.wait, options.idle - waited)
            )
            claim = self._queues.pull(
                options.queue,
                wait=wait,
                visibility_timeout=options.visibility_timeout,
                holder=options.named_holder,
            )
            if claim is not None:
                return claim
            waited += wait
            if options.idle is not None and waited >= options.idle:
                return None
        return None

    def _make_keeper(self) -> ClaimKeeper:
        visibility_timeout = self._options.visibility_timeout
        if visibility_timeout is None:
            settings = self._queues.describe(self._options.queue).settings
            visibility_timeout = check_holdable(settings.visibility_timeout)
        times = HoldTimes(self._queues.clock, visibility_timeout, self._options.max_hold)
        self._keeper = ClaimKeeper(self._queues, times, self._options)
        return self._keeper

    def _delete_claim(self) -> None:
        claim = self._take_claim()
        if claim is not None:
            try:
                self._queues.delete(claim)
            except StaleReceipt:
                # The claim ran out meanwhile: the message will be, or was, delivered again.
                return

    def _release_claim(self, delay: float) -> None:
        claim = self._take_claim()
        if claim is not None:
            # If that fails, the claim runs out by itself.
            with suppress(PenstockError):
                self._queues.release(claim, delay=delay)

    def _take_claim(self) -> Claim | None:
        claim, self._claim = self._claim, None
        if self._keeper is not None:
            self._keeper.stop_holding()
        return claim

    def close(self) -> None:
        """Ends the loop; the current claim is released at once, because its work is not done."""
        self._is_stopped = True
        self._release_claim(0)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # An interrupt is no failure of the work, so the message is released without a delay.
        if isinstance(error, Exception) and self._claim is not None:
            self._release_claim(self._options.delay_of(self._claim))
        self.close()

    def __del__(self) -> None:
        # Not `close`: a finalizer may run in a thread that holds the engine's lock.
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.abandon()
