"""The keys of a queue, and a message's bytes in Redis. `lua/queue.lua` explains each key.

A message is a header that the scripts read, then the group and the source, then its content:

    arrived (8) · expires (8) · size (4) · priority (1) · group length (2) · source length (2)

Numbers are big-endian, instants are doubles in milliseconds. The content is a MessagePack array:
body, attributes, dedup id, context, id, pushed at; trailing fields that are None are left out. Only
messages that came from another queue have the last two. The source is the name and the number of
the queue that a message was dead-lettered from, with a zero byte between.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from penstock.core.receipts import MessageIds, Receipts, Ticket
from penstock.service import Attributes, Claim, Message, Push, QueueInfo

KEYS: Final = (
    "meta",
    "messages",
    "state",
    "queued",
    "grouped",
    "lines",
    "heads",
    "groups",
    "unacked",
    "arrivals",
    "overdue",
    "expiries",
    "dedups",
    "dedup_order",
    "attempts",
    "attempt_order",
    "outbox",
    "owed",
    "waiters",
    "woken",
    "alive",
    "history",
)
QUEUE_BITS: Final = 56
_HEADER: Final = struct.Struct(">ddIBHH")
# The beginning of a state: epoch, epoch on arrival, size, first claimed.
_STATE: Final = struct.Struct(">IIId")
_PUSHED: Final = struct.Struct(">IBddHHI")
# A message as the argument that is sent to Redis, without the end of its line, in two parts.
PlainItem = tuple[bytes, bytes]
# The end of the header: size, priority, no group, no source.
_PLAIN: Final = struct.Struct(">IBHH")
_ARRIVING: Final = struct.Struct(">IBIdHHH")
_CLAIM: Final = struct.Struct(">cddddB")
_ABSENT: Final = [None] * 6
_PLAIN_HEADS_MAX: Final = 1_000
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def keys_of(prefix: str, queue: str) -> tuple[str, ...]:
    """The keys of a queue, in the order in which every script takes them."""
    return tuple(f"{prefix}:{{{queue}}}:{key}" for key in KEYS)


class RedisQueue(NamedTuple):
    """A queue as it was when it was last read; `identity` is its number and settings version."""

    info: QueueInfo
    keys: tuple[str, ...]
    identity: bytes
    number: int
    receipts: Receipts
    ids: MessageIds
    # Whether `push_plain.lua` can add messages: the queue has no setting that it does not support.
    has_plain_pushes: bool
    body_bytes_max: int

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.info.queue

    @property
    def source(self) -> bytes:
        """This queue as the source of a message."""
        return f"{self.info.queue}\0{self.number}".encode()


def redis_queue(
    info: QueueInfo,
    keys: tuple[str, ...],
    number: int,
    version: int,
    secret: bytes,
    has_history: bool,
) -> RedisQueue:
    """A queue that was read."""
    identity = f"{number}:{version}".encode()
    ids = MessageIds(number.to_bytes(QUEUE_BITS // 8, "big"))
    settings = info.settings
    has_plain_pushes = (
        not (has_history or settings.fifo or settings.dedup_by_content or settings.delay_ms)
        and settings.messages_max is None
        and settings.bytes_max is None
    )
    return RedisQueue(
        info,
        keys,
        identity,
        number,
        Receipts(secret),
        ids,
        has_plain_pushes,
        settings.body_bytes_max,
    )


def encode_push(command: Push, size: int, dedup_id: str | None) -> bytes:
    """A message as `push.lua` takes it."""
    group = b"" if command.group is None else command.group.encode()
    dedup = b"" if dedup_id is None else dedup_id.encode()
    content = _content(
        command.body, command.attributes or None, dedup_id, command.context, None, None
    )
    head = _PUSHED.pack(
        size,
        command.priority,
        -1 if command.delay_ms is None else command.delay_ms,
        -1 if command.ttl_ms is None else command.ttl_ms,
        len(group),
        len(dedup),
        len(content),
    )
    return b"".join((head, group, dedup, content))


def encode_bare(body: bytes) -> bytes:
    """A message that is only a body: the same bytes as from `encode_push`."""
    content = _encode((body,))
    return _PUSHED.pack(len(body), 0, -1, -1, 0, 0, len(content)) + content


def encode_plain(command: Push, size: int) -> PlainItem:
    """A message without a group, dedup id, delay or ttl, as `push_plain.lua` takes it."""
    content = _content(command.body, command.attributes or None, None, command.context, None, None)
    return _plain_start(size, command.priority, len(content)) + content, b""


@lru_cache(maxsize=_PLAIN_HEADS_MAX)
def plain_head(size: int, priority: int) -> bytes:
    """What comes before a body of this size in a message with nothing else; see encode_plain."""
    content = _encode((bytes(size),))
    return _plain_start(size, priority, len(content)) + content[: len(content) - size]


def _plain_start(size: int, priority: int, content_bytes: int) -> bytes:
    return b"$%d\r\n" % (_PLAIN.size + content_bytes) + _PLAIN.pack(size, priority, 0, 0)


def _content(
    body: bytes,
    attributes: Attributes | None,
    dedup_id: str | None,
    context: dict[str, str] | None,
    message_id: str | None,
    pushed_at_ms: int | None,
) -> bytes:
    fields: list[Any] = [body, attributes, dedup_id, context, message_id, pushed_at_ms]
    while fields[-1] is None:
        fields.pop()
    return _encode(fields)


def encode_claim(verb: bytes, ticket: Ticket, ms: int, held_ms_max: int, late: bool) -> bytes:
    """A delete, extend or release as `receipts.lua` takes it."""
    return _CLAIM.pack(verb, ticket.number, ticket.epoch, ms, held_ms_max, late)


class _Stored(NamedTuple):
    arrived_at_ms: int
    size: int
    priority: int
    group: str | None
    source: bytes
    content: list[Any]


def _read(stored: bytes) -> _Stored:
    arrived, _, size, priority, group_bytes, source_bytes = _HEADER.unpack_from(stored)
    at = _HEADER.size
    group = stored[at : at + group_bytes].decode() if group_bytes else None
    at += group_bytes
    source = stored[at : at + source_bytes]
    content = _decode(memoryview(stored)[at + source_bytes :])
    content += _ABSENT[len(content) :]
    return _Stored(int(arrived), size, priority, group, source, content)


def decode_message(queue: RedisQueue, number: bytes, stored: bytes, state: bytes | None) -> Message:
    """A message that was peeked at."""
    if state is None:
        return Message(*_fields(queue, int(number), stored, 0, 0, 0))
    epoch, arrival_epoch, _, first_ms = _STATE.unpack_from(state)
    return Message(*_fields(queue, int(number), stored, epoch, arrival_epoch, first_ms))


def decode_claim(
    queue: RedisQueue, number: bytes, stored: bytes, state: bytes, deadline_ms: int
) -> Claim:
    """A message that was claimed."""
    epoch, arrival_epoch, _, first_ms = _STATE.unpack_from(state)
    local = int(number)
    shown = _fields(queue, local, stored, epoch, arrival_epoch, first_ms)
    ticket = Ticket(queue.number, local, epoch, queue.receipts)
    return Claim(*(*shown, ticket, epoch, deadline_ms))


def _fields(
    queue: RedisQueue, number: int, stored: bytes, epoch: int, arrival_epoch: int, first_ms: float
) -> tuple[Any, ...]:
    kept = _read(stored)
    body, attributes, dedup_id, context, message_id, pushed_at_ms = kept.content
    return (
        message_id or queue.ids.show(number),
        queue.info.queue,
        body,
        attributes or {},
        kept.priority,
        kept.group,
        dedup_id,
        kept.arrived_at_ms if pushed_at_ms is None else pushed_at_ms,
        number,
        epoch - arrival_epoch,
        int(first_ms) or None,
        kept.source.partition(b"\0")[0].decode() if kept.source else None,
        context,
    )


class OwedMessage(NamedTuple):
    """A message that left its queue for another one, and has not arrived there."""

    number: bytes
    to: str
    item: bytes


def read_owed(queue: RedisQueue, fields: Sequence[Any]) -> OwedMessage:
    """A message in the outbox, from the four fields that `owed.lua` returns, for `arrive.lua`.

    Its identity is the same however often it is sent.
    """
    number, stored, state, destination = fields
    epoch, _, _, first_ms = _STATE.unpack_from(state)
    kept = _read(stored)
    body, attributes, dedup_id, context, message_id, pushed_at_ms = kept.content
    group = b"" if kept.group is None else kept.group.encode()
    source = queue.source if destination.startswith(b"1") else b""
    identity = f"{queue.number}:{int(number)}".encode()
    head = _ARRIVING.pack(
        kept.size, kept.priority, epoch, first_ms, len(group), len(source), len(identity)
    )
    content = _content(
        body,
        attributes,
        dedup_id,
        context,
        message_id or queue.ids.show(int(number)),
        kept.arrived_at_ms if pushed_at_ms is None else pushed_at_ms,
    )
    to = destination[1:].decode()
    return OwedMessage(number, to, b"".join((head, group, source, identity, content)))
