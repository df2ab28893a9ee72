"""Messages from lines of JSON, in the form in which `pull`, `peek` and `export` print them.

What only a queue can give a message, such as its id and its place, may be in a line and is left
out. A field of any other name is refused: it may be a misspelt one.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.errors import InvalidField, MessageTooLarge
from penstock.service import (
    BODY_BYTES_MAX,
    DELAY_MS_MAX,
    PRIORITY_MAX,
    Attributes,
    Push,
    QueueSettings,
    check_id,
    check_name,
    check_number,
    check_pairs,
)

# A body in base64 is a third larger, and text may be escaped.
LINE_BYTES_MAX: Final = 6 * BODY_BYTES_MAX + 2**20


class MessageLine(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One line: first what is pushed, then what only describes the message where it was."""

    queue: str | None = None
    body: str | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET
    attributes: dict[str, str] = {}
    attributes_base64: dict[str, bytes] = {}
    priority: int = 0
    group: str | None = None
    dedup_id: str | None = None
    visible_at_ms: int | None = None
    context: dict[str, str] | None = None
    id: Any = None
    state: Any = None
    pushed_at_ms: Any = None
    sequence: Any = None
    receives: Any = None
    first_pulled_at_ms: Any = None
    source: Any = None
    receipt: Any = None
    epoch: Any = None
    deadline_ms: Any = None
    moved_at_ms: Any = None
    deliveries: Any = None
    held_by: Any = None


_decode: Final = msgspec.json.Decoder(MessageLine).decode


def read_push(line: bytes, queue: str | None, now_ms: int) -> Push:
    """The push of the message in a line, to `queue` or else to the queue that the line names.

    Raises InvalidField.
    """
    try:
        read = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"not a message in JSON: {error}") from None
    body = read.body_base64 if isinstance(read.body, UnsetType) else read.body.encode()
    if isinstance(body, UnsetType) or not (read.body is UNSET or read.body_base64 is UNSET):
        raise InvalidField("body: give one of body and body_base64")
    both = read.attributes.keys() & read.attributes_base64.keys()
    if both:
        raise InvalidField(f"attributes: {min(both)!r} is in attributes_base64, too")
    attributes: Attributes = {**read.attributes, **read.attributes_base64}
    name = queue or read.queue
    if name is None:
        raise InvalidField("queue: the line names none; name it as in penstock push QUEUE --from")
    # The delay ends when it would have ended, unless that is past.
    delay_ms = max(0, (read.visible_at_ms or 0) - now_ms)
    push = Push(
        check_name(name),
        body,
        check_number("visible_at_ms", delay_ms, 0, DELAY_MS_MAX) or None,
        check_number("priority", read.priority, 0, PRIORITY_MAX),
        dedup_id=None if read.dedup_id is None else check_id("dedup_id", read.dedup_id),
        group=None if read.group is None else check_id("group", read.group),
        attributes=attributes or None,
        context=read.context,
    )
    check_pairs("attributes", attributes, allow_bytes=True)
    check_pairs("context", read.context or {}, allow_bytes=False)
    return push


def check_fits(push: Push, settings: QueueSettings) -> None:
    """Raises InvalidField or MessageTooLarge if a queue with these settings would refuse it."""
    if settings.fifo and (push.group is None or push.priority):
        what = "group: a fifo queue needs one" if push.group is None else "priority: must be 0"
        raise InvalidField(f"{what} in the fifo queue {push.queue!r}")
    size = len(push.body)
    if size > settings.body_bytes_max:
        raise MessageTooLarge(
            f"body: {size} bytes; the queue {push.queue!r} takes at most {settings.body_bytes_max}"
        )
