"""The room for appends: it is made before a command is decided, never at its append.

A full disk must not prevent deletes: room for a claim and a delete of every message is kept back,
and pushes may not use it. A background thread makes files ahead of time; a push waits for one only
if the disk may be too full to make it later.
"""

from collections.abc import Callable
from typing import Any, Final, cast

from penstock.errors import InvalidField, StoreFull
from penstock.journal import codec
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.segments import Segments
from penstock.service import (
    PULL_LIMIT_MAX,
    Batch,
    Command,
    Delete,
    Pull,
    PullIds,
    Push,
    PushMany,
    Redrive,
    RedriveIds,
    ReturnIds,
)

# The longest holder that a server gives a claim of its own accord.
HOLDER_BYTES_MAX: Final = 64
# More than any entry needs beside the bodies: headers, texts and extras of one event.
_EVENT_ROOM_BYTES: Final = 2_048
# An entry has its size in four bytes, and is built in memory first.
_BATCH_BYTES_MAX: Final = 1024 * 1024 * 1024
_COMMAND_ROOM_BYTES: Final = 256 * 1_024
_SMALL_BODY_BYTES_MAX: Final = 64 * 1024
_AMPLE_BYTES: Final = 1024 * 1024
# What the smallest messages need that are written until the disk is checked again: their pushes
# once, their claims and deletes twice as much.
_BETWEEN_CHECKS_BYTES: Final = 3 * _AMPLE_BYTES
_LEAVING_BYTES: Final = (
    2 * (HEADER_BYTES + codec.BLOCK_BYTES + codec.EVENT_BYTES) + HOLDER_BYTES_MAX
)


class RoomBudget:
    """The room of one stream; the journal that appends keeps `end_offset` up to date."""

    def __init__(self, segments: Segments, on_full: Callable[[], object]) -> None:
        self.end_offset = segments.end_offset
        # How many messages the store holds; set by upkeep.
        self.held: Callable[[], int] = lambda: 0
        self._segments = segments
        self._on_full = on_full
        self._room_until = 0
        self._ample_until = 0

    def make_room(self, command: Command[Any]) -> None:
        """Makes room for all that the command may append. Raises StoreFull or InvalidField.

        Pushes may not use the reserve, so that pulls and deletes have room on a full disk.
        """
        if self.end_offset <= self._ample_until:
            # The fast path: a command that needs little, while there is much room.
            if type(command) is Push:
                body = command.body
                if (
                    command.attributes is None
                    and command.context is None
                    and type(body) is bytes
                    and len(body) <= _SMALL_BODY_BYTES_MAX
                ):
                    return
            elif type(command) is Delete or (type(command) is Pull and command.limit == 1):
                return
        size, may_use_reserve = room_needed(command)
        if self.end_offset + size > self._room_until:
            self._check_disk(size, may_use_reserve)

    def has_room(self, events: int) -> bool:
        """Whether that many events without content fit."""
        try:
            self._segments.ensure_room(_COMMAND_ROOM_BYTES + events * codec.EVENT_BYTES, True)
        except StoreFull:
            return False
        return True

    def _check_disk(self, size: int, may_use_reserve: bool) -> None:
        """Makes room for `size` bytes, and sets the offset up to which no check is needed."""
        segments = self._segments
        kept_back = kept_back_bytes(self.held(), segments.payload_bytes)
        segments.ahead_bytes = kept_back
        missing = size + kept_back - segments.free_bytes
        can_grow = missing > 0 and segments.can_grow(missing + _BETWEEN_CHECKS_BYTES)
        required = 0 if can_grow else kept_back
        needed = size if may_use_reserve else size + required
        if segments.free_bytes < needed:
            try:
                segments.ensure_room(needed, reserved=True)
            except StoreFull:
                self._on_full()
                raise
        ample = min(segments.free_bytes - required, _AMPLE_BYTES)
        self._room_until = self.end_offset + max(0, ample)
        self._ample_until = self._room_until - _COMMAND_ROOM_BYTES - _SMALL_BODY_BYTES_MAX


def kept_back_bytes(held: int, payload_bytes: int) -> int:
    """The reserve: room to claim and delete so many messages, and at least half a file."""
    return max(payload_bytes // 2, _LEAVING_BYTES * held + 2 * _COMMAND_ROOM_BYTES)


def room_needed(command: Command[Any]) -> tuple[int, bool]:
    """How many bytes the command may append at most, and whether it may use the reserve for it.

    The command is not validated yet: for a field of a wrong type the largest size is assumed.
    """
    kind = type(command)
    if kind is Push:
        return _message_bytes(cast(Push, command)) + _COMMAND_ROOM_BYTES, False
    if kind is PushMany:
        many = cast(PushMany, command)
        try:
            size = sum(map(len, many.bodies)) + _EVENT_ROOM_BYTES * len(many.bodies)
        except TypeError:
            raise InvalidField("bodies: expected a list of bytes") from None
        if many.attributes is not None:
            size += 8 * len(repr(many.attributes)) * len(many.bodies)
        if many.each_attributes is not None:
            size += 8 * len(repr(many.each_attributes))
        _check_entry_size("bodies", size)
        return size + _COMMAND_ROOM_BYTES, False
    if kind is Batch:
        items = cast(Batch, command).items
        if type(items) is not list:
            return _COMMAND_ROOM_BYTES, True
        pushes = [item for item in items if type(item) is Push]
        size = sum(map(_message_bytes, pushes)) + _EVENT_ROOM_BYTES * (len(items) - len(pushes))
        _check_entry_size("items", size)
        return size + _COMMAND_ROOM_BYTES, not pushes
    if isinstance(command, Pull | Redrive):
        limit = command.limit
        count = limit if type(limit) is int and 0 < limit <= PULL_LIMIT_MAX else 0
        texts = 0
        if isinstance(command, Pull):
            texts = len(str(command.attempt_id)) + len(str(command.holder))
        return count * (codec.EVENT_BYTES + 4 * texts) + _COMMAND_ROOM_BYTES, True
    if isinstance(command, PullIds | ReturnIds | RedriveIds):
        count = len(command.ids) if type(command.ids) is list else 0
        texts = len(str(getattr(command, "holder", "")))
        return 2 * count * (codec.EVENT_BYTES + 4 * texts) + _COMMAND_ROOM_BYTES, True
    return _COMMAND_ROOM_BYTES, True


def _check_entry_size(field: str, size: int) -> None:
    """Raises InvalidField for pushes that cannot be one entry."""
    if size > _BATCH_BYTES_MAX:
        raise InvalidField(
            f"{field}: about {size} bytes in all; at most {_BATCH_BYTES_MAX} can be pushed in one "
            "command, so use several"
        )


def _message_bytes(push: Push) -> int:
    """An upper bound of what the message needs; it is not validated yet."""
    size = _EVENT_ROOM_BYTES + (len(push.body) if type(push.body) is bytes else 0)
    if push.attributes is not None or push.context is not None:
        size += 8 * len(repr((push.attributes, push.context)))
    return size
