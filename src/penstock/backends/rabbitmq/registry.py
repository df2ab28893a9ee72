"""The queues and their settings: a stream at the broker that every process follows.

AMQP can neither list queues nor store settings with them. So each change is an entry in the stream
`penstock/registry`. The broker orders the entries, every process folds them by the same rules, and
a change is answered when its own entry was read back. Reading settings needs no request.

A stream is never rewritten. To keep the start fast, a process that has read a thousand entries
since the last snapshot publishes a new one, as the only message of the queue
`penstock/registry/snapshot`. If that message is missing, or another process has it just then, the
stream is read from its beginning.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

import msgspec
from pamqp.commands import Basic

from penstock.backends.rabbitmq.link import NOT_FOUND, AmqpSession, Link, RefusedByBroker
from penstock.backends.rabbitmq.target import Kind
from penstock.errors import BackendLost, PenstockError, RequestError
from penstock.service import QueueInfo, QueueSettings, changed_settings

STREAM: Final = "penstock/registry"
SNAPSHOT: Final = "penstock/registry/snapshot"
SNAPSHOT_AFTER: Final = 1_000
_PREFETCH: Final = 500
# After a start, or the loss of a node, it may take some time until a stream can be read.
_RETRY_S: Final = 0.1
# RabbitMQ registers a stream in a file that it writes when nothing changed for half a second, at
# the latest a second after. Killed before, it never finds the stream again.
_REGISTERED_S: Final = 1.5
_STREAM_ARGUMENTS: Final = {"x-queue-type": "stream"}
_SNAPSHOT_ARGUMENTS: Final = {"x-max-length": 1}


class RabbitQueue(msgspec.Struct):
    """A queue of the registry; `levels` has a bit for each delay queue that it has."""

    name: str
    number: int
    kind: Kind
    settings: QueueSettings
    created_at_ms: int
    configured_at_ms: int
    levels: int = 0

    @property
    def info(self) -> QueueInfo:
        """The queue as its users see it."""
        return QueueInfo(self.name, self.settings, self.created_at_ms, self.configured_at_ms)


class _Entry(msgspec.Struct, frozen=True, tag_field="entry"):
    token: str


class QueueAdded(_Entry, frozen=True, tag="added"):
    """A queue was created, unless one of this name exists."""

    at_ms: int
    queue: str
    kind: Kind
    settings: QueueSettings


class SettingsChanged(_Entry, frozen=True, tag="changed"):
    """Some settings of a queue were changed."""

    at_ms: int
    queue: str
    number: int
    changes: dict[str, Any]


class LevelsAdded(_Entry, frozen=True, tag="levels"):
    """A queue has more delay queues."""

    queue: str
    number: int
    levels: int


class QueueDropped(_Entry, frozen=True, tag="dropped"):
    """A queue was removed."""

    queue: str
    number: int


class Mark(_Entry, frozen=True, tag="mark"):
    """No change: the process that appended it has read the stream up to here when it returns."""


Entry = QueueAdded | SettingsChanged | LevelsAdded | QueueDropped | Mark


class RegistrySnapshot(msgspec.Struct):
    """All queues after the entry at this offset."""

    offset: int
    queues: list[RabbitQueue]


def new_token() -> str:
    """A random token by which the writer of an entry recognises it."""
    return secrets.token_hex(8)


def fold(queues: dict[str, RabbitQueue], entry: Entry, offset: int) -> RabbitQueue | None:
    """Applies an entry; returns its queue, as it is then, or was before its removal."""
    if isinstance(entry, Mark):
        return None
    known = queues.get(entry.queue)
    if isinstance(entry, QueueAdded):
        if known is None:
            at_ms = entry.at_ms
            known = RabbitQueue(entry.queue, offset, entry.kind, entry.settings, at_ms, at_ms)
            queues[entry.queue] = known
        return known
    if known is None or known.number != entry.number:
        # The entry is of a queue that was removed, and perhaps created again.
        return None
    if isinstance(entry, QueueDropped):
        del queues[entry.queue]
    elif isinstance(entry, LevelsAdded):
        known.levels |= entry.levels
    else:
        settings = changed_settings(known.settings, entry.changes)
        if _without_notes(settings) != _without_notes(known.settings):
            known.configured_at_ms = entry.at_ms
        known.settings = settings
    return known


def _without_notes(settings: QueueSettings) -> QueueSettings:
    kept = {name: text for name, text in settings.annotations.items() if not name.startswith(".")}
    return msgspec.structs.replace(settings, annotations=kept)


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Entry).decode
_decode_snapshot: Final = msgspec.json.Decoder(RegistrySnapshot).decode


class Registry:
    """The queues of a vhost, up to the last entry that was read."""

    def __init__(self, puller: Link, pusher: Link) -> None:
        self.queues: dict[str, RabbitQueue] = {}
        self.on_dropped: Callable[[RabbitQueue], None] | None = None
        self._puller = puller
        self._pusher = pusher
        self._next_offset = -1
        self._snapshot_offset = -1
        self._pending: dict[str, asyncio.Future[RabbitQueue | None]] = {}
        self._writes: set[asyncio.Task[None]] = set()

    async def follow(self, session: AmqpSession) -> None:
        """Reads the stream to its end, and then every new entry. Raises PenstockError.

        A broker that has just started, or another node that was just killed, makes it refuse to
        read a stream for a moment: it is tried again.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._puller.target.timeout_s
        while True:
            try:
                if self._next_offset < 0:
                    await self._load(session)
                await self._consume(session)
                break
            except RefusedByBroker as refused:
                # Once the stream is declared, only its replicas can be missing: they are elected.
                is_temporary = refused.code == NOT_FOUND or self._next_offset >= 0
                if not is_temporary:
                    raise RequestError(f"{STREAM}: {refused}") from None
                if loop.time() > give_up_s:
                    shown = self._puller.target.shown
                    raise BackendLost(f"{shown}: {STREAM} cannot be read: {refused}") from None
                await asyncio.sleep(_RETRY_S)
        await self.append(Mark(new_token()), session)

    async def _load(self, session: AmqpSession) -> None:
        """Declares the stream, and loads the snapshot if there is one."""
        if not await self._exists(session, STREAM):
            await self._declare(session, STREAM, _STREAM_ARGUMENTS)
            await asyncio.sleep(_REGISTERED_S)
        offset = -1
        try:
            await self._declare(session, SNAPSHOT, _SNAPSHOT_ARGUMENTS)
            shown = await session.control(lambda channel: channel.basic_get(SNAPSHOT))
        except RefusedByBroker as refused:
            if refused.code != NOT_FOUND:
                raise
            # The snapshot is on a node of the cluster that is down; the stream is complete.
            shown = None
        if shown is not None and shown.delivery_tag:
            await session.control(
                lambda channel: channel.basic_nack(shown.delivery_tag, requeue=True)
            )
            try:
                snapshot = _decode_snapshot(shown.body)
            except (msgspec.MsgspecError, ValueError):
                # Written by a newer version; the stream is complete.
                snapshot = RegistrySnapshot(-1, [])
            self.queues = {queue.name: queue for queue in snapshot.queues}
            offset = snapshot.offset
        self._next_offset = offset + 1
        self._snapshot_offset = offset

    async def _exists(self, session: AmqpSession, name: str) -> bool:
        """Whether a queue is known to the broker and can be used."""
        try:
            await session.control(lambda channel: channel.queue_declare(name, passive=True))
        except RefusedByBroker as refused:
            if refused.code != NOT_FOUND:
                raise
            return False
        return True

    async def _declare(self, session: AmqpSession, name: str, arguments: dict[str, Any]) -> None:
        await session.control(
            lambda channel: channel.queue_declare(name, durable=True, arguments=arguments)
        )

    async def _consume(self, session: AmqpSession) -> None:
        """Subscribes to all further entries."""
        channel = await session.channel()
        await session.call(channel.basic_qos(prefetch_count=_PREFETCH))

        async def deliver(message: Any) -> None:
            self._deliver(message)
            await channel.basic_ack(message.delivery_tag, wait=False)

        arguments = {"x-stream-offset": self._next_offset}
        await session.call(channel.basic_consume(STREAM, deliver, arguments=arguments))

    def _deliver(self, message: Any) -> None:
        offset = message.header.properties.headers["x-stream-offset"]
        if offset < self._next_offset:
            # The broker delivers from the beginning of a chunk, which may be earlier.
            return
        self._next_offset = offset + 1
        try:
            entry = _decode(message.body)
            queue = fold(self.queues, entry, offset)
        except (msgspec.MsgspecError, ValueError, PenstockError):
            # Not an entry, or one that a newer version has written.
            return
        if isinstance(entry, QueueDropped) and queue is not None and self.on_dropped is not None:
            self.on_dropped(queue)
        pending = self._pending.pop(entry.token, None)
        if pending is not None and not pending.done():
            pending.set_result(queue)

    async def append(
        self, entry: Entry, following: AmqpSession | None = None
    ) -> RabbitQueue | None:
        """Appends an entry; returns its queue when the entry was folded here.

        `following` is the session that reads the stream. Raises PenstockError.
        """
        following = following or await self._puller.ready()
        session = await self._pusher.ready()
        folded: asyncio.Future[RabbitQueue | None] = asyncio.get_running_loop().create_future()
        self._pending[entry.token] = folded
        try:
            properties = Basic.Properties(message_id=entry.token, delivery_mode=2)
            await session.publish("", STREAM, _encode(entry), properties)
            if following.loss is not None:
                raise following.loss
            async with asyncio.timeout(self._puller.target.timeout_s):
                queue = await folded
        except TimeoutError:
            raise following.drop("the registry cannot be read") from None
        finally:
            self._pending.pop(entry.token, None)
        if self._next_offset - self._snapshot_offset > SNAPSHOT_AFTER:
            self._snapshot_offset = self._next_offset - 1
            write = asyncio.ensure_future(self._write_snapshot(session))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
        return queue

    async def _write_snapshot(self, session: AmqpSession) -> None:
        snapshot = RegistrySnapshot(self._next_offset - 1, list(self.queues.values()))
        properties = Basic.Properties(message_id=new_token(), delivery_mode=2)
        try:
            await session.publish("", SNAPSHOT, _encode(snapshot), properties)
        except PenstockError:
            # The next attempt is after another thousand entries.
            return

    def lost(self, error: PenstockError) -> None:
        """Fails the appends that wait for their entries to return."""
        pending, self._pending = self._pending, {}
        for folded in pending.values():
            if not folded.done():
                folded.set_exception(error)

    async def catch_up(self) -> None:
        """Reads all entries that were appended before this call."""
        await self.append(Mark(new_token()))

    async def add(self, entry: QueueAdded) -> RabbitQueue:
        """Adds a queue, or returns the one that has its name."""
        queue = await self.append(entry)
        if queue is None:
            raise RequestError(f"queue: {entry.queue!r} was removed while it was made")
        return queue
