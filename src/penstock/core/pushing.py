"""Pushing: the message that a push makes, or why it is refused. Nothing here changes state.

`decide_push` is for one push. `decide_run` is its fast path for many plain ones (`runs`).
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from penstock.core.events import Pushed
from penstock.core.runs import Run
from penstock.errors import InvalidField, MessageTooLarge, QueueFull
from penstock.service import (
    DELAY_MS_MAX,
    PRIORITY_MAX,
    TTL_MS_MAX,
    Push,
    PushMany,
    are_ids,
    check_id,
    check_number,
    check_pairs,
)

if TYPE_CHECKING:
    from penstock.core.queue import QueueState

_BYTES: Final = {bytes}


def decide_push(queue: "QueueState", command: Push, now_ms: int, number: int) -> Pushed | int:
    """The event of this push, or the number of the message that an earlier one made."""
    settings = queue.settings
    body = command.body
    if type(body) is not bytes:
        raise InvalidField(f"body: expected bytes, got {type(body).__name__}")
    size = len(body)
    if command.attributes is not None or command.context is not None:
        size += _check_pairs(command)
    if size > settings.body_bytes_max:
        raise MessageTooLarge(
            f"body: {size} bytes with its attributes; the queue {queue.name!r} "
            f"takes at most {settings.body_bytes_max}"
        )
    if type(command.priority) is not int or command.priority:
        check_number("priority", command.priority, 0, PRIORITY_MAX)
    delay_ms = command.delay_ms
    if delay_ms is None:
        delay_ms = settings.delay_ms
    else:
        check_number("delay_ms", delay_ms, 0, DELAY_MS_MAX)
    expires_at_ms = 0
    if command.ttl_ms is not None:
        expires_at_ms = now_ms + check_number("ttl_ms", command.ttl_ms, 1, TTL_MS_MAX)
    group = command.group
    if group is not None:
        check_id("group", group)
    if settings.fifo and (group is None or command.priority):
        raise InvalidField(
            f"group: the fifo queue {queue.name!r} needs one with every push"
            if group is None
            else f"priority: the fifo queue {queue.name!r} keeps strict order and takes none"
        )
    dedup_id = command.dedup_id
    if dedup_id is not None:
        check_id("dedup_id", dedup_id)
    elif settings.dedup_by_content:
        dedup_id = hashlib.sha256(command.body).hexdigest()
    if dedup_id is not None:
        earlier = queue.dedups.find(queue.dedup_key(dedup_id, group), now_ms)
        if earlier is not None:
            return earlier
    if settings.messages_max is not None or settings.bytes_max is not None:
        _check_room(queue, size)
    return Pushed(
        now_ms,
        queue.number,
        number,
        body,
        command.attributes or None,
        command.priority,
        group,
        dedup_id,
        now_ms + delay_ms if delay_ms else 0,
        expires_at_ms,
        command.context,
        size,
    )


def decide_run(queue: "QueueState", run: PushMany, now_ms: int, number: int) -> Run | None:
    """The events of a run, if none of its pushes can be refused; None if one can.

    In that case the caller asks `decide_push` about each push. Whether the dedup ids are new is
    checked later, when they are stored (`ShardState.push_run`).
    """
    settings = queue.settings
    bodies = run.bodies
    if settings.fifo or settings.delay_ms or settings.dedup_by_content:
        return None
    if set(map(type, bodies)) != _BYTES:
        return None
    sizes = list(map(len, bodies))
    size = sum(sizes)
    if size > settings.body_bytes_max and max(sizes) > settings.body_bytes_max:
        return None
    if not _has_room(queue, len(sizes), size):
        return None
    ids = run.dedup_ids
    if ids is not None and not (len(ids) == len(bodies) and are_ids(ids)):
        return None
    return Run(now_ms, queue.number, number, bodies, cast("Sequence[str] | None", ids), sizes, size)


def _check_pairs(command: Push) -> int:
    if command.context is not None:
        check_pairs("context", command.context, allow_bytes=False)
    if command.attributes is None:
        return 0
    return check_pairs("attributes", command.attributes, allow_bytes=True)


def _has_room(queue: "QueueState", count: int, size: int) -> bool:
    settings = queue.settings
    most, most_bytes = settings.messages_max, settings.bytes_max
    return (most is None or len(queue.deliveries) + count <= most) and (
        most_bytes is None or queue.stored_bytes + size <= most_bytes
    )


def _check_room(queue: "QueueState", size: int) -> None:
    if _has_room(queue, 1, size):
        return
    settings = queue.settings
    if settings.messages_max is not None and len(queue.deliveries) >= settings.messages_max:
        raise QueueFull(
            f"queue: {queue.name!r} is full with {len(queue.deliveries)} messages "
            f"(max_messages={settings.messages_max}); delete some, or raise the limit"
        )
    raise QueueFull(
        f"queue: {queue.name!r} is full with {queue.stored_bytes} bytes, {size} more do "
        f"not fit (max_bytes={settings.bytes_max}); delete some, or raise the limit"
    )
