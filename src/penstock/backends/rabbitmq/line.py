"""The pulls of one queue in order of arrival, and the channel that serves them.

    one message is wanted      basic.get
    several are wanted         basic.consume with that number as prefetch, then basic.cancel
    every pull waits           the same, cancelled only when a message or another pull arrives, or
                               a wait ends

The prefetch is the number of messages that the waiting pulls want in all, so the broker delivers no
others; a message that is delivered while a wait ends answers that pull. Each queue has its own
channel: if the broker closes it, because the queue was removed, other queues lose no claims.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock.backends.rabbitmq.claims import Claims, LiveClaim
from penstock.backends.rabbitmq.content import Content, decode, earlier_deliveries, new_id
from penstock.backends.rabbitmq.content import pushed_at_ms as pushed_at
from penstock.backends.rabbitmq.link import NOT_FOUND, AmqpSession, Link, RefusedByBroker
from penstock.backends.rabbitmq.registry import RabbitQueue
from penstock.clock import Clock
from penstock.errors import BackendLost, PenstockError, QueueDeleted, QueueNotFound
from penstock.service import Claim, Pull

# A classic queue delivers this many messages before it pauses; a consumer that is cancelled then
# gets no more of them.
_PREFETCH_MAX: Final = 200
# For how many returned messages a process remembers how often they were pulled.
_RETURNED_MAX: Final = 100_000


class AmqpDelivery(Protocol):
    """A message that the broker delivered."""

    channel: Any
    header: Any
    body: bytes
    delivery_tag: int | None
    redelivered: bool | None


class UnansweredPull:
    """A pull that is not answered yet."""

    __slots__ = ("answer", "bytes", "claims", "command", "is_full", "until_s", "visibility_ms")

    def __init__(self, command: Pull, visibility_ms: int, until_s: float) -> None:
        self.command = command
        self.visibility_ms = visibility_ms
        self.until_s = until_s
        self.claims: list[Claim] = []
        self.bytes = 0
        self.is_full = False
        self.answer: asyncio.Future[list[Claim]] = asyncio.get_running_loop().create_future()

    @property
    def wanted(self) -> int:
        """How many more messages it can take."""
        if self.is_full or self.answer.done():
            return 0
        return self.command.limit - len(self.claims)

    def takes(self, size_bytes: int) -> bool:
        """Whether a message of this size still fits into its answer."""
        if not self.wanted:
            return False
        limit = self.command.bytes_max
        if limit is not None and self.claims and self.bytes + size_bytes > limit:
            self.is_full = True
            return False
        self.bytes += size_bytes
        return True


class PullLine:
    """One queue's pulls, its channel, and the claims made on it.

    `is_dead_letter` says whether a message was pulled too often; `move_dead_letter` moves such a
    message. `start` runs a coroutine in the background.
    """

    def __init__(
        self,
        queue: RabbitQueue,
        puller: Link,
        claims: Claims,
        clock: Clock,
        move_dead_letter: Callable[["PullLine", Content, AmqpDelivery], Coroutine[Any, Any, None]],
        is_dead_letter: Callable[[RabbitQueue, int], bool],
        start: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.queue = queue
        self.claims: dict[int, LiveClaim] = {}
        # Messages that were released with a delay, by the numbers of their claims.
        self.held_back: dict[int, LiveClaim] = {}
        self.waiting: deque[UnansweredPull] = deque()
        self._puller = puller
        self._all_claims = claims
        self._clock = clock
        self._move_dead_letter = move_dead_letter
        self._is_dead_letter = is_dead_letter
        self._start = start
        self._pump: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._channel: Any = None
        self._session: AmqpSession | None = None
        self._prefetch = 0
        self._lock = asyncio.Lock()
        # Requests on the channel: how many were sent, how many are unanswered, and the flushes that
        # wait for the answer to a request with at least this number.
        self._begun = 0
        self._running = 0
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        # Of returned messages: how often they were pulled, and when for the first time.
        self._returned: OrderedDict[str, tuple[int, int]] = OrderedDict()
        # Messages that were deleted after their claims had run out.
        self._dropped_later: OrderedDict[str, None] = OrderedDict()

    @property
    def waiting_count(self) -> int:
        """How many pulls wait for a message."""
        return sum(not each.answer.done() for each in self.waiting)

    @property
    def is_idle(self) -> bool:
        """Whether its channel can be closed without ending a claim or a pull."""
        return not (self.claims or self.held_back or self.waiting or self._lock.locked())

    async def pull(self, command: Pull, visibility_ms: int, wait_ms: int) -> list[Claim]:
        """Claims messages, after a wait if there are none. Raises PenstockError."""
        until_s = asyncio.get_running_loop().time() + wait_ms / 1_000 if wait_ms else 0
        waiting = UnansweredPull(command, visibility_ms, until_s)
        self.waiting.append(waiting)
        self._arrived.set()
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._serve())
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._arrived.set()
            for claim in waiting.claims:
                live = self._all_claims.get(claim)
                if live is not None and self._all_claims.end(live):
                    self._start(self.requeue(live))
            raise

    async def _serve(self) -> None:
        """Serves the waiting pulls until there are none."""
        try:
            while self._drop_answered():
                all_wait = all(each.until_s for each in self.waiting)
                if not all_wait or self._wanted(self.waiting) == 1:
                    await self._fetch_round()
                if all_wait and self._drop_answered():
                    await self._wait_round()
        except PenstockError as error:
            self.fail(error)
        except Exception as error:
            self.fail(BackendLost(f"queue: {self.queue.name!r} cannot be pulled: {error!r}"))
            raise
        finally:
            self._pump = None

    def _drop_answered(self) -> bool:
        while self.waiting and self.waiting[0].answer.done():
            self.waiting.popleft()
        if any(each.answer.done() for each in self.waiting):
            self.waiting = deque(each for each in self.waiting if not each.answer.done())
        return bool(self.waiting)

    def _wanted(self, asked: Iterable[UnansweredPull]) -> int:
        return min(_PREFETCH_MAX, sum(each.wanted for each in asked))

    async def _fetch_round(self) -> None:
        """Answers with messages that are ready; pulls without a wait get an answer in any case."""
        asked = list(self.waiting)
        while wanted := self._wanted(asked):
            found = await self.fetch(wanted)
            await self._hand_out(found)
            if len(found) < wanted:
                break
            # There may be more: one fetch is limited, and expired messages do not count.
        self._answer(asked, at_once=True)

    async def _wait_round(self) -> None:
        """Waits until a message or another pull arrives, or the first wait ends."""
        asked = list(self.waiting)
        # Cleared before the count, so that a pull that arrives from here on ends the wait.
        self._arrived.clear()
        wanted = self._wanted(asked)
        if wanted:
            await self._hand_out(await self._wait(wanted))
        more = self._wanted(each for each in asked if each.claims)
        if more:
            # Messages that were pushed together are delivered one after another.
            await self._hand_out(await self.fetch(more))
        self._answer(asked, at_once=False)

    def _answer(self, asked: list[UnansweredPull], *, at_once: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        for each in asked:
            is_over = now_s >= each.until_s if each.until_s else at_once
            if (each.claims or is_over) and not each.answer.done():
                each.answer.set_result(each.claims)

    # The channel.

    async def channel(self) -> Any:
        """The channel of this queue, opened again if it was closed. Raises PenstockError."""
        session = await self._puller.ready()
        if self._session is not session or self._channel is None or self._channel.is_closed:
            self.forget_claims()
            self._channel = channel = await session.channel()
            channel.closing.add_done_callback(lambda _: self._closed(channel))
            self._session = session
            self._prefetch = 0
        return self._channel

    def _closed(self, channel: Any) -> None:
        if self._channel is channel:
            self.forget_claims()
            self._arrived.set()

    async def call(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a request on this channel. Raises PenstockError."""
        assert self._session is not None
        self._begun += 1
        number = self._begun
        self._running += 1
        try:
            answer = await self._session.call(request)
        except PenstockError as error:
            self._running -= 1
            self._end_flushes(self._begun + 1, error)
            if isinstance(error, RefusedByBroker):
                self.forget_claims()
                if error.code == NOT_FOUND:
                    raise QueueNotFound(
                        f"queue: RabbitMQ has no queue {self.queue.name!r} any more; "
                        "create it again"
                    ) from None
            raise
        self._running -= 1
        self._end_flushes(number, None)
        return answer

    async def fetch(self, wanted: int) -> list[AmqpDelivery]:
        """At most `wanted` messages that are ready now. Raises PenstockError."""
        async with self._lock:
            channel = await self.channel()
            if wanted == 1:
                message = await self.call(channel.basic_get(self.queue.name))
                return [message] if message.delivery_tag else []
            found, tag = await self._consume(channel, wanted, None)
            await self.call(channel.basic_cancel(tag))
            return found

    async def fetch_directly(self, wanted: int) -> list[AmqpDelivery]:
        """The same for a caller other than the waiting pulls; interrupts their wait."""
        self._arrived.set()
        return await self.fetch(wanted)

    async def _wait(self, wanted: int) -> list[AmqpDelivery]:
        async with self._lock:
            channel = await self.channel()
            found, tag = await self._consume(channel, wanted, self._arrived)
            try:
                until_s = min((each.until_s for each in self.waiting), default=0)
                timeout_s = max(0, until_s - asyncio.get_running_loop().time())
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                pass
            if channel.is_closed:
                raise self._end_of()
            await self.call(channel.basic_cancel(tag))
            return found

    async def _consume(
        self, channel: Any, prefetch: int, arrived: asyncio.Event | None
    ) -> tuple[list[AmqpDelivery], str]:
        if self._prefetch != prefetch:
            # Set before the call: a flush sends the newest value again.
            self._prefetch = prefetch
            await self.call(channel.basic_qos(prefetch_count=prefetch))
        found: list[AmqpDelivery] = []

        async def deliver(message: Any) -> None:
            found.append(message)
            if arrived is not None:
                arrived.set()

        answer = await self.call(channel.basic_consume(self.queue.name, deliver))
        return found, answer.consumer_tag

    def _end_of(self) -> PenstockError:
        if self._session is not None and self._session.loss is not None:
            return self._session.loss
        return BackendLost(f"queue: RabbitMQ closed the channel of {self.queue.name!r}")

    async def flush(self) -> None:
        """Waits until the broker has processed all earlier acknowledgements and returns.

        The broker processes a channel in order, so the answer to any later request proves it. If no
        other request is sent, one is sent for all flushes that wait. Raises BackendLost.
        """
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append((self._begun + 1, taken))
        self._flush_soon()
        await taken

    def _flush_soon(self) -> None:
        # Later in this turn of the loop: a caller that was just answered may send a request.
        asyncio.get_running_loop().call_soon(self._flush_if_idle)

    def _flush_if_idle(self) -> None:
        if not self._flushes or self._running:
            return
        channel = self._channel
        if channel is None or channel.is_closed:
            self._end_flushes(self._begun + 1, self._end_of())
        else:
            # Any request would do; this one changes nothing.
            self._start(self.call(channel.basic_qos(prefetch_count=self._prefetch)))

    def _end_flushes(self, number: int, error: PenstockError | None) -> None:
        """Ends the flushes that wait for a request with at most this number."""
        waiting, self._flushes = self._flushes, []
        for wanted, taken in waiting:
            if wanted > number:
                self._flushes.append((wanted, taken))
            elif taken.done():
                continue
            elif error is None:
                taken.set_result(None)
            else:
                taken.set_exception(self._end_of())
        if self._flushes:
            self._flush_soon()

    # Deliveries.

    async def _hand_out(self, found: list[AmqpDelivery]) -> None:
        """Gives deliveries to the waiting pulls, as claims.

        Raises the error of a dead letter that cannot be moved, after the others were given out.
        """
        refused: PenstockError | None = None
        for delivery in found:
            if delivery.channel.is_closed:
                # The broker has returned it, and a claim on it could not be ended.
                raise self._end_of()
            content = self.read(delivery)
            receives = self._receives(content, delivery)
            if content.id in self._dropped_later or self._has_ended(content):
                self._dropped_later.pop(content.id, None)
                await self.write(delivery.channel.basic_ack(delivery.delivery_tag, wait=False))
            elif self._is_dead_letter(self.queue, receives - 1):
                # If it cannot be moved now, it must not be delivered as a fresh message.
                content.receives = receives - 1
                try:
                    await self._move_dead_letter(self, content, delivery)
                except PenstockError as error:
                    refused = error
            else:
                await self._claim(content, delivery, receives)
        if refused is not None:
            raise refused

    async def _claim(self, content: Content, delivery: AmqpDelivery, receives: int) -> None:
        size_bytes = len(content.body) + sum(
            len(name) + len(value) for name, value in content.attributes.items()
        )
        taker = next((each for each in self.waiting if each.takes(size_bytes)), None)
        if taker is None:
            content.receives = receives - 1
            await self.return_delivery(content, delivery)
            return
        claim = self._all_claims.add(self, delivery, content, receives, taker.visibility_ms)
        if content.first_pulled_at_ms is None:
            content.first_pulled_at_ms = claim.pulled_at_ms
        content.receives = receives
        taker.claims.append(self.shown(claim))

    def read(self, delivery: AmqpDelivery) -> Content:
        """The content of a delivery."""
        unnamed = "" if delivery.header.properties.message_id else new_id(self._clock.now_ms())
        return decode(delivery.body, delivery.header.properties, unnamed)

    def _receives(self, content: Content, delivery: AmqpDelivery) -> int:
        """How often the message was pulled, this time included; sets the time of the first."""
        before, first_ms = self._returned.pop(content.id, (0, None))
        if content.first_pulled_at_ms is None:
            content.first_pulled_at_ms = first_ms
        counted = earlier_deliveries(delivery.header.properties)
        if counted is not None:
            return content.receives + counted + 1
        if first_ms is None and delivery.redelivered:
            # Another connection pulled it; a classic queue does not say how often.
            before = content.receives + 1
        return max(before, content.receives) + 1

    def _has_ended(self, content: Content) -> bool:
        now_ms = self._clock.now_ms()
        if content.expires_at_ms is not None:
            return content.expires_at_ms <= now_ms
        at_ms = pushed_at(content.id)
        if at_ms is None or content.source is not None or content.receives:
            # The time of its arrival is unknown; the broker's own TTL ends it.
            return False
        return at_ms + self.queue.settings.retention_ms <= now_ms

    def shown(self, claim: LiveClaim) -> Claim:
        """A claim as a pull returns it."""
        content = claim.content
        return Claim(
            content.id,
            self.queue.name,
            content.body,
            content.attributes,
            content.priority,
            None,
            None,
            pushed_at(content.id) or claim.pulled_at_ms,
            0,
            claim.receives,
            content.first_pulled_at_ms,
            content.source,
            content.context,
            claim.ticket,
            content.moved_epoch + claim.receives,
            claim.deadline_ms,
        )

    # Acknowledging and returning.

    async def acknowledge(self, claim: LiveClaim) -> None:
        """Removes the message of an ended claim from the broker."""
        await self.write(claim.channel.basic_ack(claim.tag, wait=False))

    async def requeue(self, claim: LiveClaim) -> None:
        """Returns the message of an ended claim to its place in the queue."""
        self.remember_count(claim.content, claim.receives)
        await self.write(claim.channel.basic_nack(claim.tag, wait=False))

    async def return_delivery(self, content: Content, delivery: AmqpDelivery) -> None:
        """Returns a message for which no claim was made."""
        self.remember_count(content, content.receives)
        await self.write(delivery.channel.basic_nack(delivery.delivery_tag, wait=False))

    async def return_all(self, deliveries: Iterable[AmqpDelivery]) -> None:
        """Returns messages for which no claim was made, wherever that is still needed."""
        for delivery in deliveries:
            # If the channel is closed, the broker has returned the message.
            with suppress(BackendLost):
                await self.return_delivery(self.read(delivery), delivery)

    async def write(self, request: Coroutine[Any, Any, None]) -> None:
        """Writes a request that has no answer. Raises BackendLost if the channel is closed."""
        try:
            await request
        except asyncio.CancelledError:
            raise
        except Exception:
            raise self._end_of() from None

    def remember_count(self, content: Content, receives: int) -> None:
        """Remembers how often a message was pulled: a classic queue does not count."""
        first_ms = content.first_pulled_at_ms or self._clock.now_ms()
        self._returned[content.id] = (receives, first_ms)
        if len(self._returned) > _RETURNED_MAX:
            self._returned.popitem(last=False)

    def drop_later(self, message_id: str) -> None:
        """Drops a message when it is delivered to this connection again."""
        self._dropped_later[message_id] = None
        if len(self._dropped_later) > _RETURNED_MAX:
            self._dropped_later.popitem(last=False)

    def forget_claims(self) -> None:
        """Ends every claim: the channel is closed, and the broker has returned the messages."""
        for claim in list(self.claims.values()):
            self._all_claims.end(claim)
            self.remember_count(claim.content, claim.receives)
        self.claims.clear()
        self.held_back.clear()
        self._channel = None

    def lost(self, error: PenstockError) -> None:
        """Ends every claim and fails every pull, because the connection was lost."""
        self.forget_claims()
        self.fail(error)

    def dropped(self) -> None:
        """Ends every claim and fails every pull, because the queue was removed."""
        channel = self._channel
        self.forget_claims()
        self.fail(QueueDeleted(f"queue: {self.queue.name!r} was deleted"))
        if channel is not None and not channel.is_closed:
            self._start(channel.close())

    async def close_channel(self) -> None:
        """Closes the channel of an idle line; it is opened again when it is needed."""
        channel, self._channel = self._channel, None
        if channel is not None and not channel.is_closed:
            await self.call(channel.close())

    def fail(self, error: PenstockError) -> None:
        """Answers every waiting pull with this error."""
        waiting, self.waiting = self.waiting, deque()
        for each in waiting:
            if each.answer.done():
                continue
            if each.claims:
                each.answer.set_result(each.claims)
            elif each.until_s and type(error) is QueueNotFound:
                each.answer.set_exception(QueueDeleted(str(error)))
            else:
                each.answer.set_exception(error)
        self._arrived.set()
