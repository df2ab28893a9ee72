"""The awaited loop: `async for claim in queues.consume("orders")`, its claim extended by a task."""

import asyncio
import inspect
from collections.abc import Callable

from penstock.clock import Clock
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
from penstock.steps import await_calls


class AsyncClaimKeeper:
    """Extends one claim at a time in a task of its own, or releases it if it was abandoned."""

    def __init__(self, clock: Clock, held: KeptClaim) -> None:
        self._clock = clock
        self._held = held
        self._is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._unsubscribe = clock.subscribe(self._wake)
        self._task = self._loop.create_task(self._run())

    def hold(self, claim: Claim) -> None:
        """Extends this claim from now on."""
        if self._held.claim is None:
            self._changed.set()
        self._held.hold(claim)

    def stop_holding(self) -> None:
        """Stops extending the claim."""
        self._held.claim = None

    def abandon(self) -> None:
        """Makes the task release the claim and end; a finalizer may call it, in any thread."""
        self._is_abandoned = True
        self._wake()

    async def close(self) -> None:
        """Ends the task; a claim that is still held is not released, and runs out."""
        self._unsubscribe()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _run(self) -> None:
        held = self._held
        while not self._is_abandoned:
            wait_s = self._clock.timeout_s(held.times.next_ms) if held.claim else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
                self._changed.clear()
            except TimeoutError:
                pass
            if not self._is_abandoned:
                await await_calls(held.extended_if_due())
        self._unsubscribe()
        await await_calls(held.released())


class AsyncConsumer:
    """The awaited loop over a queue's messages: an async iterator, and a context manager."""

    def __init__(self, queues: QueueCalls, options: ConsumerOptions) -> None:
        self._loop = ConsumerLoop(queues, options, AsyncClaimKeeper)

    def stop(self) -> None:
        """Ends the loop after the current message; from any thread, or a signal handler."""
        self._loop.is_stopped = True

    def __aiter__(self) -> "AsyncConsumer":
        return self

    async def __anext__(self) -> Claim:
        """Deletes the current claim, if there is one, and returns the next."""
        claim = await await_calls(self._loop.next_claim())
        if claim is None:
            raise StopAsyncIteration
        return claim

    async def run(self, work: Callable[[Claim], object]) -> None:
        """Calls `work` with every claim until the loop ends; if it raises, releases the message.

        A call that returns a coroutine is awaited; a plain function blocks the event loop. What
        `work` raised goes to `logging` under the name `penstock.consumer`; other exceptions than
        Exception, such as CancelledError, end the loop.
        """
        refuse_generator("work", work)
        async with self:
            async for claim in self:
                try:
                    finished = work(claim)
                    if inspect.isawaitable(finished):
                        finished = await finished
                except Exception as error:
                    report_failure(claim, error)
                    await await_calls(self._loop.release(self._loop.options.delay_of(claim)))
                else:
                    if finished is not None and (what := unfinished(finished)):
                        raise InvalidField(f"work: its call returned {what}; {HAS_YIELD}")

    async def close(self) -> None:
        """Ends the loop; the current claim is released at once, because its work is not done."""
        await await_calls(self._loop.close())

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await await_calls(self._loop.leave(error))
