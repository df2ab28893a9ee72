"""The awaited loop: `async for claim in queues.consume("orders")`, its claim extended by a task."""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from penstock.clock import Clock
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


class AsyncQueueCalls(Protocol):
    """The same part of `AsyncQueues`."""

    clock: Clock

    async def describe(self, queue: str) -> QueueDescription: ...
    async def pull(
        self,
        queue: str,
        *,
        wait: float | None,
        visibility_timeout: float | None,
        holder: str | None,
    ) -> Claim | None: ...
    async def extend(self, claim: Claim, duration: float) -> int: ...
    async def release(self, claim: Claim, *, delay: float) -> None: ...
    async def delete(self, claim: Claim) -> bool: ...


class AsyncClaimKeeper:
    """Holds one claim at a time in a task of its own: extends it, or releases it if abandoned."""

    def __init__(self, queues: AsyncQueueCalls, times: HoldTimes, options: ConsumerOptions) -> None:
        self._queues = queues
        self._times = times
        self._options = options
        self._claim: Claim | None = None
        self._is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._unsubscribe = queues.clock.subscribe(self._wake)
        self._task = self._loop.create_task(self._run())

    def hold(self, claim: Claim) -> None:
        """Extends this claim from now on."""
        if self._claim is None:
            self._changed.set()
        self._claim = claim
        self._times.begin()

    def stop_holding(self) -> None:
        """Stops extending the claim."""
        self._claim = None

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
        while not self._is_abandoned:
            wait_s = self._queues.clock.timeout_s(self._times.next_ms) if self._claim else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
                self._changed.clear()
            except TimeoutError:
                pass
            if not self._is_abandoned:
                await self._extend_if_due()
        self._unsubscribe()
        claim = self._claim
        if claim is not None:
            with suppress(PenstockError):
                await self._queues.release(claim, delay=self._options.delay_of(claim))

    async def _extend_if_due(self) -> None:
        claim = self._claim
        if claim is None or not self._times.is_due:
            return
        try:
            if self._times.is_over:
                raise StaleReceipt("held for as long as the loop may hold a claim")
            await self._queues.extend(claim, self._times.visibility_timeout)
        except RequestError:
            # The loop may have gone on to another claim while this one was extended.
            if self._claim is claim:
                self._claim = None
        except PenstockError:
            self._times.failed()
        else:
            self._times.extended()


class AsyncConsumer:
    """The awaited loop over a queue's messages: an async iterator, and a context manager."""

    def __init__(self, queues: AsyncQueueCalls, options: ConsumerOptions) -> None:
        options.check()
        self._queues = queues
        self._options = options
        self._keeper: AsyncClaimKeeper | None = None
        self._claim: Claim | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Ends the loop after the current message; from any thread, or a signal handler."""
        self._is_stopped = True

    def __aiter__(self) -> "AsyncConsumer":
        return self

    async def __anext__(self) -> Claim:
        """Deletes the current claim, if there is one, and returns the next."""
        await self._delete_claim()
        keeper = self._keeper or await self._make_keeper()
        claim = await self._pull()
        if claim is None:
            await self.close()
            raise StopAsyncIteration
        self._claim = claim
        keeper.hold(claim)
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
                    await self._release_claim(self._options.delay_of(claim))
                else:
                    if finished is not None and (what := unfinished(finished)):
                        raise InvalidField(f"work: its call returned {what}; {HAS_YIELD}")

    async def _pull(self) -> Claim | None:
        waited = 0.0
        options = self._options
        while not self._is_stopped:
            wait = (
                options.wait if options.idle is None else min(options.wait, options.idle - waited)
            )
            claim = await self._queues.pull(
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

    async def _make_keeper(self) -> AsyncClaimKeeper:
        visibility_timeout = self._options.visibility_timeout
        if visibility_timeout is None:
            settings = (await self._queues.describe(self._options.queue)).settings
            visibility_timeout = check_holdable(settings.visibility_timeout)
        times = HoldTimes(self._queues.clock, visibility_timeout, self._options.max_hold)
        self._keeper = AsyncClaimKeeper(self._queues, times, self._options)
        return self._keeper

    async def _delete_claim(self) -> None:
        claim = self._take_claim()
        if claim is not None:
            try:
                await self._queues.delete(claim)
            except StaleReceipt:
                # The claim ran out meanwhile: the message will be, or was, delivered again.
                return

    async def _release_claim(self, delay: float) -> None:
        claim = self._take_claim()
        if claim is not None:
            with suppress(PenstockError):
                await self._queues.release(claim, delay=delay)

    def _take_claim(self) -> Claim | None:
        claim, self._claim = self._claim, None
        if self._keeper is not None:
            self._keeper.stop_holding()
        return claim

    async def close(self) -> None:
        """Ends the loop; the current claim is released at once, because its work is not done."""
        self._is_stopped = True
        await self._release_claim(0)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A cancellation is no failure of the work, so the message is released without a delay.
        if isinstance(error, Exception) and self._claim is not None:
            await self._release_claim(self._options.delay_of(self._claim))
        await self.close()

    def __del__(self) -> None:
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.abandon()
