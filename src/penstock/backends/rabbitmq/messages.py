"""Push, delete, extend and release, alone or in batches; and the end of a claim.

A message that moves, to the dead-letter queue or into a delay that is too long to hold it here, is
published and confirmed there before it is acknowledged here. A crash between the two leaves it in
both places, never in none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar, cast

from penstock.backends.rabbitmq.claims import Claims, LiveClaim
from penstock.backends.rabbitmq.content import (
    EXPIRATION_MS_MAX,
    Content,
    check_push,
    encode,
    new_id,
)
from penstock.backends.rabbitmq.delays import Delays
from penstock.backends.rabbitmq.lacks import QUORUM_ONLY
from penstock.backends.rabbitmq.line import AmqpDelivery, PullLine
from penstock.backends.rabbitmq.link import Link, Unroutable
from penstock.backends.rabbitmq.queues import LIMITED_DELAY, is_limited
from penstock.backends.rabbitmq.registry import RabbitQueue, Registry
from penstock.clock import Clock
from penstock.errors import (
    ClaimTooLong,
    EngineClosed,
    InvalidField,
    MessageGone,
    MessageTooLarge,
    Overloaded,
    PenstockError,
    QueueFull,
    QueueNotFound,
    StaleReceipt,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import (
    BATCH_ITEMS_MAX,
    DELAY_MS_MAX,
    VISIBILITY_MS_MAX,
    Batch,
    Claim,
    Delete,
    Extend,
    Push,
    PushReply,
    Release,
    check_number,
)

R = TypeVar("R")
_NO_ATTRIBUTES: Final[dict[str, str | bytes]] = {}


class RabbitMessages:
    """The commands with a message or a receipt."""

    def __init__(
        self,
        pusher: Link,
        registry: Registry,
        delays: Delays,
        clock: Clock,
        find: Callable[[str], Coroutine[Any, Any, RabbitQueue]],
        line_of: Callable[[RabbitQueue], Coroutine[Any, Any, PullLine]],
    ) -> None:
        self.claims = Claims(clock, self._expired)
        self._pusher = pusher
        self._registry = registry
        self._delays = delays
        self._clock = clock
        self._find = find
        self._line_of = line_of
        self._tasks: set[asyncio.Future[Any]] = set()
        self._verbs: Final[dict[type, Callable[[Any], Coroutine[Any, Any, Any]]]] = {
            Push: self.push,
            Delete: self.delete,
            Extend: self.extend,
            Release: self.release,
        }

    def start(self, work: Awaitable[Any]) -> "asyncio.Future[Any]":
        """Runs a coroutine in the background; its errors, as of a lost connection, are dropped."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Awaitable[R]) -> R:
        """Awaits work that runs to its end even if its caller is cancelled. Raises what it raises.

        If the service is closed meanwhile, raises EngineClosed.
        """
        task = self.start(work)
        try:
            return cast(R, await asyncio.shield(task))
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineClosed("this service was closed") from None
            raise

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def push(self, command: Push) -> PushReply:
        """Publishes a message and waits for the broker's confirm."""
        queue = await self._find(command.queue)
        size_bytes = check_push(command)
        settings = queue.settings
        if size_bytes > settings.body_bytes_max:
            raise MessageTooLarge(
                f"body: {size_bytes} bytes with its attributes; the queue {queue.name!r} "
                f"takes at most {settings.body_bytes_max}"
            )
        if command.priority and queue.kind == "quorum":
            raise UnsupportedOperation(f"priority: {QUORUM_ONLY['priority order']}")
        now_ms = self._clock.now_ms()
        content = Content(
            new_id(now_ms),
            command.body,
            command.attributes or _NO_ATTRIBUTES,
            command.priority,
            command.context,
        )
        if command.ttl_ms is not None:
            content.expires_at_ms = now_ms + command.ttl_ms
        delay_ms = settings.delay_ms if command.delay_ms is None else command.delay_ms
        await self._publish(queue, content, delay_ms)
        return PushReply(content.id, 0, False)

    async def _publish(self, queue: RabbitQueue, content: Content, delay_ms: int = 0) -> None:
        """Publishes a message that is visible after a delay. Raises PenstockError."""
        ttl_ms = queue.settings.retention_ms
        if content.expires_at_ms is not None:
            ttl_ms = content.expires_at_ms - self._clock.now_ms()
            if ttl_ms <= delay_ms:
                # Its time to live ends before its delay: it could never be pulled.
                return
        exchange, key = "", queue.name
        properties = encode(content, ttl_ms)
        can_be_full = is_limited(queue.settings)
        if delay_ms and can_be_full:
            raise UnsupportedOperation(f"delay: {LIMITED_DELAY}")
        if delay_ms:
            exchange, key = await self._delays.route(queue, delay_ms)
            # In a delay queue, an expiration would end the delay early, and be removed.
            properties.expiration = None
        session = self._pusher.session or await self._pusher.ready()
        try:
            await session.publish(exchange, key, content.body, properties)
        except Unroutable:
            self._delays.forget(queue)
            raise QueueNotFound(
                f"queue: RabbitMQ has no queue {queue.name!r} any more; create it again"
            ) from None
        except Overloaded:
            if not can_be_full:
                raise
            raise _full(queue) from None

    async def _claim_of(self, command: Delete | Extend | Release) -> LiveClaim:
        queue = await self._find(command.queue)
        return self.claims.find(await self._line_of(queue), command.receipt)

    async def delete(self, command: Delete) -> bool:
        """Acknowledges a message; returns False if it was deleted already.

        With a late receipt, the message is dropped when it is delivered again.
        """
        line = await self._line_of(await self._find(command.queue))
        try:
            claim = self.claims.find(line, command.receipt)
        except MessageGone:
            return False
        except StaleReceipt:
            late_id = self.claims.delete_late(command.receipt) if command.late else None
            if late_id is None:
                raise
            line.drop_later(late_id)
            return True
        self.claims.end(claim, deleted=True)
        try:
            await claim.line.acknowledge(claim)
            await claim.line.flush()
        except PenstockError:
            # Unknown whether the broker got it; the claim has ended in any case.
            self.claims.forget_delete(claim)
            raise
        return True

    async def extend(self, command: Extend) -> int:
        """Moves a claim's deadline."""
        check_number("visibility_ms", command.visibility_ms, 1, VISIBILITY_MS_MAX)
        claim = await self._claim_of(command)
        held_ms = self._clock.now_ms() + command.visibility_ms - claim.pulled_at_ms
        self.check_hold("visibility", held_ms)
        limit_ms = command.held_ms_max
        if limit_ms is not None and claim.receives == 1 and held_ms > limit_ms:
            raise ClaimTooLong(
                f"visibility_ms: the message would be held for {held_ms} ms in all, "
                f"at most {limit_ms} are allowed"
            )
        return self.claims.extend(claim, command.visibility_ms)

    def check_hold(self, field: str, held_ms: int) -> None:
        """Checks that the broker allows to hold a message so long. Raises InvalidField."""
        hold_ms = self._pusher.target.hold_ms
        if held_ms > hold_ms:
            raise InvalidField(
                f"{field}: RabbitMQ requeues a message that is held for longer than its "
                f"consumer_timeout; use at most {hold_ms // 1_000} s, or raise consumer_timeout "
                "there and hold= in the URL"
            )

    async def release(self, command: Release) -> None:
        """Ends a claim; its message returns to its place, at once or after a delay."""
        check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
        if command.delay_ms > EXPIRATION_MS_MAX:
            raise InvalidField(
                f"delay: RabbitMQ delays a message for at most {EXPIRATION_MS_MAX // 1_000} s"
            )
        claim = await self._claim_of(command)
        self.claims.end(claim)
        await self._return(claim, command.delay_ms)
        await claim.line.flush()

    async def return_all(self, line: PullLine, claims: list[Claim]) -> None:
        """Ends claims whose visibility timeout is 0."""
        for shown in claims:
            claim = self.claims.get(shown)
            if claim is not None and self.claims.end(claim):
                await self._return(claim, 0)
        if claims:
            await line.flush()

    def _expired(self, claim: LiveClaim) -> None:
        if not self.is_dead_letter(claim.line.queue, claim.receives):
            self.claims.note_late(claim)
        self.start(self._return(claim, 0))

    # The end of a claim.

    def is_dead_letter(self, queue: RabbitQueue, receives: int) -> bool:
        """Whether a message that was pulled `receives` times belongs in the dead-letter queue."""
        settings = queue.settings
        return (
            settings.max_receives is not None
            and receives >= settings.max_receives
            and settings.dead_letter in self._registry.queues
        )

    async def _return(self, claim: LiveClaim, delay_ms: int) -> None:
        line = claim.line
        try:
            if self.is_dead_letter(line.queue, claim.receives):
                await self._publish(*self._dead_letter(line.queue, claim.content))
                await line.acknowledge(claim)
            elif not delay_ms:
                await line.requeue(claim)
            elif self._clock.now_ms() + delay_ms - claim.pulled_at_ms <= self._hold_ms:
                line.held_back[claim.number] = claim
                loop = asyncio.get_running_loop()
                loop.call_later(delay_ms / 1_000, self._held_long_enough, claim)
            else:
                await self._publish(line.queue, claim.content, delay_ms)
                await line.acknowledge(claim)
        except PenstockError:
            # The claim has ended, so this process must not keep the message.
            self.start(line.requeue(claim))
            raise

    @property
    def _hold_ms(self) -> int:
        return self._pusher.target.hold_ms

    def _held_long_enough(self, claim: LiveClaim) -> None:
        if claim.line.held_back.pop(claim.number, None) is not None:
            self.start(claim.line.requeue(claim))

    def _dead_letter(self, queue: RabbitQueue, content: Content) -> tuple[RabbitQueue, Content]:
        return self._registry.queues[str(queue.settings.dead_letter)], content.moved(queue.name)

    async def move_dead_letter(
        self, line: PullLine, content: Content, delivery: AmqpDelivery
    ) -> None:
        """Moves a delivery to the dead-letter queue. Raises PenstockError."""
        try:
            await self._publish(*self._dead_letter(line.queue, content))
        except PenstockError:
            self.start(line.return_delivery(content, delivery))
            raise
        await line.write(delivery.channel.basic_ack(delivery.delivery_tag, wait=False))

    async def move(
        self, to: RabbitQueue, line: PullLine, content: Content, delivery: AmqpDelivery
    ) -> None:
        """Moves a delivery to another queue as a new message. Raises PenstockError.

        It keeps its id.
        """
        moved = content.moved(None)
        if to.kind == "quorum":
            moved.priority = 0
        await self._publish(to, moved)
        await line.write(delivery.channel.basic_ack(delivery.delivery_tag, wait=False))

    async def purge_claims(self, line: PullLine) -> int:
        """Removes the messages of a queue that this connection holds; returns how many."""
        held = [*line.held_back.values()]
        line.held_back.clear()
        for claim in list(line.claims.values()):
            self.claims.end(claim, deleted=True)
            held.append(claim)
        for claim in held:
            await line.acknowledge(claim)
        if held:
            await line.flush()
        return len(held)

    # Batches.

    async def batch(self, command: Batch) -> list[Any]:
        """The reply or the error of each item; the items are executed concurrently.

        Raises UnavailableError if no item was executed.
        """
        items = command.items
        if type(items) is not list or len(items) > BATCH_ITEMS_MAX:
            raise InvalidField(f"items: expected a list of at most {BATCH_ITEMS_MAX} commands")
        replies = await asyncio.gather(
            *(self._item(place, item) for place, item in enumerate(items)), return_exceptions=True
        )
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, PenstockError):
                raise reply
        if replies and all(isinstance(reply, UnavailableError) for reply in replies):
            raise replies[0]
        return replies

    async def _item(self, place: int, item: Any) -> Any:
        verb = self._verbs.get(type(item))
        if verb is None or not isinstance(item.queue, str):
            kind = type(item).__name__
            raise InvalidField(f"items[{place}]: {kind} cannot be part of a batch")
        return await verb(item)

    async def close(self) -> None:
        """Cancels the coroutines in the background."""
        self.claims.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _full(queue: RabbitQueue) -> QueueFull:
    settings = queue.settings
    limits = {"messages": settings.messages_max, "bytes": settings.bytes_max}
    shown = {field: limit for field, limit in limits.items() if limit is not None}
    return QueueFull(
        f"{', '.join(shown)}: the queue {queue.name!r} is full; it takes "
        f"{' and '.join(f'{limit} {field}' for field, limit in shown.items())}"
    )
