"""The blocking loop: `for claim in queues.consume("orders")`, its claim extended by a thread."""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from penstock.clock import THREAD_PREFIX, Clock
from penstock.consumer.loop import ConsumerLoop, KeptClaim, QueueCalls
from penstock.consumer.options import (
    HAS_YIELD,
    ConsumerOptions,
    refuse_generator,
    report_failure,
    unfinished,
)
from penstock.errors import InvalidField
from penstock.service import Claim
from penstock.steps import run_calls

_NEEDS_AWAITED: Final = (
    "an async function is run by the awaited loop, which penstock.aio.connect gives"
)


class ClaimKeeper:
    """Extends one claim at a time in a thread of its own, or releases it if it was abandoned."""

    def __init__(self, clock: Clock, held: KeptClaim) -> None:
        self._clock = clock
        self._held = held
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
        self._unsubscribe = clock.subscribe(self._extend_if_due)
        self._thread.start()

    def hold(self, claim: Claim) -> None:
        """Extends this claim from now on."""
        with self._lock:
            self._held.hold(claim)
            # A thread that is not idle wakes by its timeout, before this claim must be extended.
            needs_waking, self._is_idle = self._is_idle, False
        if needs_waking:
            self._wakes.put(None)

    def stop_holding(self) -> None:
        """Stops extending the claim."""
        with self._lock:
            self._held.claim = None

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
                is_idle = self._is_idle = self._held.claim is None
                next_ms = self._held.times.next_ms
            wait_s = None if is_idle else self._clock.timeout_s(next_ms)
            with suppress(Empty):
                self._wakes.get(timeout=wait_s)
            self._extend_if_due()
        if self._is_abandoned:
            self._unsubscribe()
            run_calls(self._held.released())

    def _extend_if_due(self) -> None:
        """Extends the claim if it is time; also called by a manual clock that was advanced."""
        with self._lock:
            if not self._is_closed:
                run_calls(self._held.extended_if_due())


class Consumer:
    """A blocking loop over a queue's messages: an iterator of claims, and a context manager."""

    def __init__(self, queues: QueueCalls, options: ConsumerOptions) -> None:
        self._loop = ConsumerLoop(queues, options, ClaimKeeper)

    def stop(self) -> None:
        """Ends the loop after the current message; from any thread, or a signal handler."""
        self._loop.is_stopped = True

    def __iter__(self) -> "Consumer":
        return self

    def __next__(self) -> Claim:
        """Deletes the current claim, if there is one, and returns the next."""
        claim = run_calls(self._loop.next_claim())
        if claim is None:
            raise StopIteration
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
                    run_calls(self._loop.release(self._loop.options.delay_of(claim)))
                else:
                    if finished is not None and (what := unfinished(finished)):
                        why = HAS_YIELD if what == "a generator" else _NEEDS_AWAITED
                        raise InvalidField(f"work: its call returned {what}; {why}")

    def close(self) -> None:
        """Ends the loop; the current claim is released at once, because its work is not done."""
        run_calls(self._loop.close())

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run_calls(self._loop.leave(error))
