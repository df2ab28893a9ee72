"""Translates messages between Penstock's form and that of AMQP.

A body is the AMQP body, and attributes are AMQP headers, so that other clients of the broker see
what was pushed. `message_id` is a UUID of version 7, whose first 48 bits are the time of the push
in milliseconds. Fields that AMQP does not have are JSON in the header `x-penstock`.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec
from pamqp.commands import Basic

from penstock.backends.rabbitmq.lacks import COMMON
from penstock.errors import InvalidField, MessageTooLarge, UnsupportedOperation
from penstock.service import (
    DELAY_MS_MAX,
    PRIORITY_MAX,
    TTL_MS_MAX,
    Attributes,
    Push,
    check_id,
    check_number,
    check_pairs,
)

MORE: Final = "x-penstock"
# The broker refuses a longer expiration or TTL; a longer time to live is checked at each pull.
EXPIRATION_MS_MAX: Final = 2**32 - 1
# Headers must fit into one AMQP frame, of which RabbitMQ's default is 128 KiB.
HEADERS_BYTES_MAX: Final = 65_536
_NAME_BYTES_MAX: Final = 200
# Headers with a meaning to RabbitMQ or to this module: they are not attributes.
_RESERVED: Final = frozenset(
    {
        MORE,
        "CC",
        "BCC",
        "x-death",
        "x-delivery-count",
        "x-acquired-count",
        "x-stream-offset",
        *(f"x-{which}-death-{what}" for which in ("first", "last")
          for what in ("queue", "reason", "exchange")),
    }
)  # fmt: skip


class MoreHeader(msgspec.Struct, omit_defaults=True):
    """The content of the header `x-penstock`.

    `receives` is how often the message was pulled before it was last published, and `moved_epoch`
    how often in the queues from which it was moved; `expires_at_ms` is the end of its own time to
    live.
    """

    text: dict[str, str] = {}
    base64: dict[str, bytes] = {}
    context: dict[str, str] | None = None
    source: str | None = None
    expires_at_ms: int | None = None
    receives: int = 0
    first_pulled_at_ms: int | None = None
    moved_epoch: int = 0


_NOTHING_MORE: Final = MoreHeader()
_encode_more = msgspec.json.Encoder().encode
_decode_more = msgspec.json.Decoder(MoreHeader).decode


class Content(msgspec.Struct, gc=False):
    """A message without its queue: the fields that stay when it moves to another queue."""

    id: str
    body: bytes
    attributes: Attributes
    priority: int
    context: dict[str, str] | None
    source: str | None = None
    expires_at_ms: int | None = None
    receives: int = 0
    first_pulled_at_ms: int | None = None
    moved_epoch: int = 0

    def moved(self, source: str | None) -> "Content":
        """The same in another queue, where its pulls are counted anew."""
        return msgspec.structs.replace(
            self,
            source=source,
            receives=0,
            first_pulled_at_ms=None,
            moved_epoch=self.moved_epoch + self.receives,
        )


def new_id(now_ms: int) -> str:
    """A UUID of version 7 for a message pushed now."""
    number = now_ms << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def pushed_at_ms(message_id: str) -> int | None:
    """When the message with this id was pushed; None if the id does not contain the time."""
    if len(message_id) == 36 and message_id[14] == "7":
        try:
            return UUID(message_id).int >> 80
        except ValueError:
            pass
    return None


def check_push(command: Push) -> int:
    """The size of the body and attributes. Raises InvalidField, UnsupportedOperation."""
    if type(command.body) is not bytes:
        raise InvalidField(f"body: expected bytes, got {type(command.body).__name__}")
    size_bytes = headers_bytes = 0
    if command.attributes is not None:
        size_bytes = headers_bytes = check_pairs("attributes", command.attributes, allow_bytes=True)
    if command.context is not None:
        headers_bytes += check_pairs("context", command.context, allow_bytes=False)
    check_number("priority", command.priority, 0, PRIORITY_MAX)
    if command.delay_ms is not None:
        check_number("delay_ms", command.delay_ms, 0, DELAY_MS_MAX)
        if command.delay_ms > EXPIRATION_MS_MAX:
            raise InvalidField(
                f"delay: RabbitMQ delays a message for at most {EXPIRATION_MS_MAX // 1_000} s; "
                f"got {command.delay_ms // 1_000} s"
            )
    if command.ttl_ms is not None:
        check_number("ttl_ms", command.ttl_ms, 1, TTL_MS_MAX)
    if command.group is not None:
        check_id("group", command.group)
        raise UnsupportedOperation(f"group: {COMMON['fair groups']}")
    if command.dedup_id is not None:
        check_id("dedup_id", command.dedup_id)
        raise UnsupportedOperation(f"dedup_id: {COMMON['dedup']}")
    if headers_bytes > HEADERS_BYTES_MAX:
        raise MessageTooLarge(
            f"attributes: {headers_bytes} bytes; at RabbitMQ they are headers, which take at most "
            f"{HEADERS_BYTES_MAX}"
        )
    return size_bytes + len(command.body)


def encode(content: Content, ttl_ms: int) -> Basic.Properties:
    """The AMQP properties of a message with this time to live."""
    return Basic.Properties(
        message_id=content.id,
        delivery_mode=2,
        priority=content.priority or None,
        expiration=str(max(1, ttl_ms)) if ttl_ms <= EXPIRATION_MS_MAX else None,
        headers=_headers(content),
    )


def _headers(content: Content) -> dict[str, Any] | None:
    more = MoreHeader(
        context=content.context or None,
        source=content.source,
        expires_at_ms=content.expires_at_ms,
        receives=content.receives,
        first_pulled_at_ms=content.first_pulled_at_ms,
        moved_epoch=content.moved_epoch,
    )
    headers: dict[str, Any] = {}
    for name, value in content.attributes.items():
        if name not in _RESERVED and len(name.encode()) <= _NAME_BYTES_MAX:
            headers[name] = bytearray(value) if isinstance(value, bytes) else value
        elif isinstance(value, bytes):
            more.base64 = {**more.base64, name: value}
        else:
            more.text = {**more.text, name: value}
    if more != _NOTHING_MORE:
        headers[MORE] = _encode_more(more).decode()
    return headers or None


def decode(body: bytes, properties: Any, unnamed: str) -> Content:
    """A delivered message; `unnamed` is its id if its publisher gave it none."""
    headers = properties.headers
    message_id = str(properties.message_id or unnamed)
    priority = min(properties.priority or 0, PRIORITY_MAX)
    if not headers:
        return Content(message_id, body, {}, priority, None)
    more = _read_more(headers.get(MORE))
    attributes: Attributes = {
        name: _attribute(value)
        for name, value in headers.items()
        if name not in _RESERVED and value is not None
    }
    attributes |= more.text
    attributes |= more.base64
    return Content(
        message_id,
        body,
        attributes,
        priority,
        more.context,
        more.source,
        more.expires_at_ms,
        more.receives,
        more.first_pulled_at_ms,
        more.moved_epoch,
    )


def earlier_deliveries(properties: Any) -> int | None:
    """How often a quorum queue has delivered the message before; None on a classic queue."""
    headers: Mapping[str, Any] = properties.headers or {}
    counts = [headers.get(name) for name in ("x-delivery-count", "x-acquired-count")]
    return max((count for count in counts if isinstance(count, int)), default=None)


def _attribute(value: Any) -> str | bytes:
    """A header as an attribute: headers of other publishers may be numbers, lists or tables."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def _read_more(text: Any) -> MoreHeader:
    try:
        return _decode_more(text) if text else _NOTHING_MORE
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _NOTHING_MORE
