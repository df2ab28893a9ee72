"""Creates, changes, removes, counts and purges queues at the broker, and keeps the registry.

A queue is declared at the broker before it is added to the registry, and removed at the broker
before it is removed from the registry: after a crash between the two, the same command again
completes it.
"""

from typing import Any, Final

from penstock.backends.rabbitmq.delays import level_names
from penstock.backends.rabbitmq.lacks import COMMON
from penstock.backends.rabbitmq.link import NOT_FOUND, Link, RefusedByBroker
from penstock.backends.rabbitmq.registry import (
    QueueAdded,
    QueueDropped,
    RabbitQueue,
    Registry,
    SettingsChanged,
    new_token,
)
from penstock.backends.rabbitmq.target import Kind
from penstock.clock import Clock
from penstock.errors import (
    InvalidField,
    QueueExists,
    QueueNotFound,
    RequestError,
    UnsupportedOperation,
)
from penstock.service import (
    PRIORITY_MAX,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    QueueInfo,
    QueueSettings,
    changed_settings,
    check_name,
    check_unused,
)

LIMITED_DELAY: Final = (
    "a queue with a limit cannot have one at RabbitMQ: a message whose delay ends would be dropped "
    "if the queue is full then"
)
_LIMITED_DEAD: Final = (
    "has a limit: a dead letter that it has no room for would stay at the head of its queue"
)
# Settings that RabbitMQ does not support, and the missing behaviour of each.
_UNSUPPORTED: Final = {
    "in_flight_max": "in-flight limit",
    "priority_age_ms": "priority age",
    "fifo": "fifo",
    "dedup_by_content": "dedup by content",
    "dedup_per_group": "dedup per group",
    "paused": "pause",
}


def queue_arguments(kind: Kind, settings: QueueSettings) -> dict[str, Any]:
    """The arguments with which a queue is declared."""
    arguments: dict[str, Any] = {"x-max-priority": PRIORITY_MAX}
    if kind == "quorum":
        arguments = {"x-queue-type": "quorum"}
    if is_limited(settings):
        arguments["x-overflow"] = "reject-publish"
    if settings.messages_max is not None:
        arguments["x-max-length"] = settings.messages_max
    if settings.bytes_max is not None:
        arguments["x-max-length-bytes"] = settings.bytes_max
    return arguments


def is_limited(settings: QueueSettings) -> bool:
    """Whether a queue may be full."""
    return settings.messages_max is not None or settings.bytes_max is not None


class RabbitQueues:
    """The queues of one vhost."""

    def __init__(self, puller: Link, registry: Registry, clock: Clock) -> None:
        self._puller = puller
        self._registry = registry
        self._clock = clock

    async def find(self, name: str) -> RabbitQueue:
        """The queue of this name. Raises InvalidField, QueueNotFound or BackendLost."""
        if self._puller.session is None:
            await self._puller.ready()
        try:
            return self._registry.queues[name]
        except (KeyError, TypeError):
            check_name(name)
        # Another process may have created it just now; then the broker has it.
        if await self._is_declared(name):
            await self._registry.catch_up()
            known = self._registry.queues.get(name)
            if known is not None:
                return known
            raise QueueNotFound(
                f"queue: {name!r} exists at RabbitMQ, but was not created with Penstock; create it "
                "with Penstock to use it"
            )
        raise QueueNotFound(f"queue: there is no queue {name!r}; create it first")

    async def _is_declared(self, name: str) -> bool:
        try:
            await self._declare(name, passive=True)
        except RefusedByBroker as refused:
            if refused.code == NOT_FOUND:
                return False
        return True

    async def _declare(self, name: str, **how: Any) -> int:
        session = await self._puller.ready()
        answer = await session.control(lambda channel: channel.queue_declare(name, **how))
        return answer.message_count or 0

    async def count(self, name: str) -> int:
        """How many messages of a queue are ready at the broker. Raises QueueNotFound."""
        try:
            return await self._declare(name, passive=True)
        except RefusedByBroker as refused:
            raise self._missing(name, refused) from None

    async def purge(self, name: str) -> int:
        """Purges a queue at the broker; returns how many messages. Raises QueueNotFound."""
        session = await self._puller.ready()
        try:
            answer = await session.control(lambda channel: channel.queue_purge(name))
        except RefusedByBroker as refused:
            raise self._missing(name, refused) from None
        return answer.message_count or 0

    def _missing(self, name: str, refused: RefusedByBroker) -> RequestError:
        if refused.code != NOT_FOUND:
            return refused
        return QueueNotFound(f"queue: RabbitMQ has no queue {name!r} any more; create it again")

    def _check(self, name: str, settings: QueueSettings) -> None:
        if name.startswith("amq."):
            raise InvalidField(f"queue: {name!r} begins with amq., which RabbitMQ reserves")
        for field, lacking in _UNSUPPORTED.items():
            if getattr(settings, field):
                raise UnsupportedOperation(f"{field}: {COMMON[lacking]}")
        hold_ms = self._puller.target.hold_ms
        if settings.visibility_ms > hold_ms:
            raise InvalidField(
                f"visibility_timeout: RabbitMQ requeues a message that is held for longer than its "
                f"consumer_timeout; use at most {hold_ms // 1_000} s, or raise consumer_timeout "
                "there and hold= in the URL"
            )
        if is_limited(settings) and settings.delay_ms:
            raise UnsupportedOperation(f"delay: {LIMITED_DELAY}")
        if settings.dead_letter == name:
            raise InvalidField(f"dead_letter: {name!r} cannot be its own dead-letter queue")
        dead = self._registry.queues.get(settings.dead_letter or "")
        if dead is not None and is_limited(dead.settings):
            raise UnsupportedOperation(f"dead_letter: {dead.name!r} {_LIMITED_DEAD}")
        sources = (each for each in self._registry.queues.values() if each.name != name)
        if is_limited(settings) and any(each.settings.dead_letter == name for each in sources):
            raise UnsupportedOperation(
                f"queue: {name!r} is a dead-letter queue, and {_LIMITED_DEAD}"
            )

    async def create(self, command: CreateQueue) -> QueueInfo:
        """Creates a queue, and its dead-letter queue if that does not exist."""
        name = check_name(command.queue)
        await self._puller.ready()
        known = self._registry.queues.get(name)
        settings = changed_settings(QueueSettings(), command.settings)
        self._check(name, settings)
        if known is not None:
            self._check_same(known, command.settings)
        made = await self._create_dead_letter(settings) if known is None else []
        kind = self._puller.target.kind if known is None else known.kind
        await self._declare_as(name, kind, settings if known is None else known.settings)
        if known is None:
            entry = QueueAdded(new_token(), self._clock.now_ms(), name, kind, settings)
            # Another process may have created it meanwhile.
            known = await self._registry.add(entry)
            self._check_same(known, command.settings)
        info = known.info
        return QueueInfo(info.queue, info.settings, info.created_at_ms, info.configured_at_ms, made)

    async def _declare_as(self, name: str, kind: Kind, settings: QueueSettings) -> None:
        try:
            await self._declare(name, durable=True, arguments=queue_arguments(kind, settings))
        except RefusedByBroker as refused:
            reason = str(refused).rpartition(" - ")[2]
            raise QueueExists(
                f"queue: RabbitMQ has a queue {name!r} with other arguments "
                f"({reason}); use another name, or delete it there"
            ) from None

    def _check_same(self, known: RabbitQueue, asked: dict[str, Any]) -> None:
        settings = changed_settings(known.settings, asked)
        if settings != known.settings:
            fields = QueueSettings.__struct_fields__
            different = ", ".join(
                f"{field} is {getattr(known.settings, field)!r}, "
                f"asked for {getattr(settings, field)!r}"
                for field in fields
                if getattr(known.settings, field) != getattr(settings, field)
            )
            raise QueueExists(
                f"queue: {known.name!r} exists with other settings ({different}); "
                "configure it instead"
            )

    async def _create_dead_letter(self, settings: QueueSettings) -> list[str]:
        name = settings.dead_letter
        if name is None or name in self._registry.queues:
            return []
        await self.create(CreateQueue(name))
        return [name]

    async def configure(self, command: ConfigureQueue) -> QueueInfo:
        """Changes some settings of a queue."""
        queue = await self.find(command.queue)
        settings = changed_settings(queue.settings, command.settings)
        self._check(queue.name, settings)
        for field in ("messages_max", "bytes_max"):
            if getattr(settings, field) != getattr(queue.settings, field):
                raise UnsupportedOperation(
                    f"{field}: RabbitMQ cannot change the limits of a queue that exists; create "
                    "another queue, or set a policy there"
                )
        made = await self._create_dead_letter(settings)
        if settings != queue.settings:
            await self._registry.append(
                SettingsChanged(
                    new_token(), self._clock.now_ms(), queue.name, queue.number, command.settings
                )
            )
        info = queue.info
        return QueueInfo(info.queue, info.settings, info.created_at_ms, info.configured_at_ms, made)

    async def remove(self, command: DeleteQueue) -> None:
        """Removes a queue, its delay queues and its messages."""
        queue = await self.find(command.queue)
        if not command.force:
            sources = [
                each.name
                for each in self._registry.queues.values()
                if each.settings.dead_letter == queue.name and each is not queue
            ]
            check_unused(queue.name, sources)
        session = await self._puller.ready()
        for name in (queue.name, *level_names(queue)):
            await session.control(lambda channel, name=name: channel.queue_delete(name))  # type: ignore[misc]
        await self._registry.append(QueueDropped(new_token(), queue.name, queue.number))
