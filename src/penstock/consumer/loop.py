"""The consumer loop as the calls that it makes, which `blocking` and `awaited` carry out."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from penstock.clock import Clock
from penstock.consumer.options import ConsumerOptions, HoldTimes, check_holdable
from penstock.errors import PenstockError, RequestError, StaleReceipt
from penstock.service import Claim
from penstock.steps import Calls


class QueueCalls(Protocol):
    """The part of `Queues`, or of `AsyncQueues`, that a loop uses."""

    clock: Clock

    def describe(self, queue: str) -> Any: ...
    def pull(
        self,
        queue: str,
        *,
        wait: float | None,
        visibility_timeout: float | None,
        holder: str | None,
    ) -> Any: ...
    def extend(self, claim: Claim, duration: float) -> Any: ...
    def release(self, claim: Claim, *, delay: float) -> Any: ...
    def delete(self, claim: Claim) -> Any: ...


class KeptClaim:
    """The claim that a keeper holds, and when it is to be extended."""

    def __init__(self, queues: QueueCalls, times: HoldTimes, options: ConsumerOptions) -> None:
        self.claim: Claim | None = None
        self.times = times
        self._queues = queues
        self._options = options

    def hold(self, claim: Claim) -> None:
        """Holds this claim from now on."""
        self.claim = claim
        self.times.begin()

    def extended_if_due(self) -> Calls[None]:
        """Extends the claim if it is time; drops it if it has ended, or was held for too long."""
        claim = self.claim
        if claim is None or not self.times.is_due:
            return
        if self.times.is_over:
            self.claim = None
            return
        try:
            yield partial(self._queues.extend, claim, self.times.visibility_timeout)
        except RequestError:
            # The claim ran out or the queue is gone. The loop may have gone on to another claim.
            if self.claim is claim:
                self.claim = None
        except PenstockError:
            self.times.failed()
        else:
            self.times.extended()

    def released(self) -> Calls[None]:
        """Releases the claim of a loop that was abandoned. If that fails, it runs out by itself."""
        claim = self.claim
        if claim is not None:
            with suppress(PenstockError):
                yield partial(self._queues.release, claim, delay=self._options.delay_of(claim))


class Keeper(Protocol):
    """Extends one claim at a time beside the loop. It holds no reference to the loop."""

    def hold(self, claim: Claim) -> None: ...
    def stop_holding(self) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> Any: ...


class ConsumerLoop:
    """The loop over a queue's messages, of which one at a time is claimed."""

    def __init__(
        self,
        queues: QueueCalls,
        options: ConsumerOptions,
        make_keeper: Callable[[Clock, KeptClaim], Keeper],
    ) -> None:
        options.check()
        self.options = options
        self.claim: Claim | None = None
        self.is_stopped = False
        self._queues = queues
        self._make_keeper = make_keeper
        self._keeper: Keeper | None = None
        self._pull: Callable[..., Any] = queues.pull

    def next_claim(self) -> Calls[Claim | None]:
        """Deletes the current claim, if there is one, and pulls the next; None at the end."""
        ended = self._drop_claim()
        if ended is not None:
            try:
                yield partial(self._queues.delete, ended)
            except StaleReceipt:
                # The claim ran out meanwhile: the message will be, or was, delivered again.
                ended = None
        keeper = self._keeper or (yield from self._begin())
        options = self.options
        waited = 0.0
        while not self.is_stopped:
            wait = (
                options.wait if options.idle is None else min(options.wait, options.idle - waited)
            )
            claim: Claim | None = yield partial(self._pull, wait=wait)
            if claim is not None:
                self.claim = claim
                keeper.hold(claim)
                return claim
            waited += wait
            if options.idle is not None and waited >= options.idle:
                break
        yield from self.close()
        return None

    def _begin(self) -> Calls[Keeper]:
        options, queues = self.options, self._queues
        visibility_timeout = options.visibility_timeout
        if visibility_timeout is None:
            found = yield partial(queues.describe, options.queue)
            visibility_timeout = check_holdable(found.settings.visibility_timeout)
        times = HoldTimes(queues.clock, visibility_timeout, options.max_hold)
        keeper = self._keeper = self._make_keeper(queues.clock, KeptClaim(queues, times, options))
        self._pull = partial(
            queues.pull,
            options.queue,
            visibility_timeout=options.visibility_timeout,
            holder=options.named_holder,
        )
        return keeper

    def release(self, delay: float) -> Calls[None]:
        """Releases the current claim. If that fails, it runs out by itself."""
        claim = self._drop_claim()
        if claim is not None:
            with suppress(PenstockError):
                yield partial(self._queues.release, claim, delay=delay)

    def _drop_claim(self) -> Claim | None:
        claim, self.claim = self.claim, None
        if self._keeper is not None:
            self._keeper.stop_holding()
        return claim

    def close(self) -> Calls[None]:
        """Ends the loop; the current claim is released at once, because its work is not done."""
        self.is_stopped = True
        yield from self.release(0)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            yield keeper.close

    def leave(self, error: BaseException | None) -> Calls[None]:
        """Ends the loop by leaving its block, perhaps by an error of the work."""
        # An interrupt or a cancellation is no failure of the work: released without a delay.
        if isinstance(error, Exception) and self.claim is not None:
            yield from self.release(self.options.delay_of(self.claim))
        yield from self.close()

    def __del__(self) -> None:
        # Not `close`: a finalizer may run in a thread that holds the engine's lock.
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.abandon()
