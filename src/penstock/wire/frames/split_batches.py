"""Long requests and answers, decoded and encoded in bounded steps.

One frame may have 10,000 items with 64 attributes each, which take most of a second to decode, and
an answer may have a million events. A server serves other requests between two steps. It decodes a
request wholly before it executes it, so that a frame with a fault in it changes nothing.

`long_answer` is a generator: `yield None` ends a step, a command is yielded once, for its reply,
and what is returned is the frame of the answer.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec

from penstock.errors import UnavailableError
from penstock.service import (
    PART_BYTES_MAX,
    PART_ITEMS_MAX,
    PLAIN_PART_ITEMS_MAX,
    PULL_LIMIT_MAX,
    Batch,
    Command,
    Peek,
    Pull,
    PushMany,
    part_ranges,
)
from penstock.wire.frames.bodies import (
    BadItem,
    command_fault,
    decode_command,
    decode_items,
    encode_row_reply,
    encode_rows,
    raw_items,
)
from penstock.wire.frames.bulk import BulkFrame, bulk_count, encode_bulk_reply
from penstock.wire.frames.frames import (
    BATCH,
    BULK_PUSH,
    DESCRIBE_QUEUES,
    PULL_BYTES_MAX,
    PULL_MESSAGES_MAX,
    Body,
)

AnswerSteps = Generator[Command[Any] | None, Any, bytes]
# The largest part of a message's row in a reply that is neither its body nor its attributes.
_ROW_BYTES: Final = 1_024
# `encode_rows` has a limit.
_ROWS_MAX: Final = 10_000


def bounded(command: Pull | Peek, frame_bytes_max: int) -> Pull | Peek:
    """Limits a pull or peek of many, so that its answer fits into a frame.

    It gives fewer messages than were asked for.
    """
    limit = command.limit
    if type(limit) is not int or not 1 < limit <= PULL_LIMIT_MAX:
        return command
    if type(command) is Pull:
        limit = min(limit, PULL_MESSAGES_MAX)
    room_bytes = max(1, frame_bytes_max - limit * _ROW_BYTES)
    bytes_max = command.bytes_max
    if bytes_max is None or (type(bytes_max) is int and bytes_max > 0):
        bytes_max = min(room_bytes, PULL_BYTES_MAX, bytes_max or room_bytes)
    return msgspec.structs.replace(command, limit=limit, bytes_max=bytes_max)


def long_answer(
    kind: int,
    request: int,
    body: Body,
    frame_bytes_max: int,
    check: Callable[[Command[Any]], None] | None = None,
) -> AnswerSteps | None:
    """The steps of a request whose decoding or whose answer may be long; None for others.

    Raises, at once or in any step, what `decode_command` and `check`, which gets the command,
    raise, and UnavailableError if the answer does not fit into a frame.
    """
    parts: Iterator[Any] | None = None
    if kind == DESCRIBE_QUEUES:
        parts = iter((decode_command(kind, body),))
    elif kind in (BATCH, BULK_PUSH):
        parts = parts_of(kind, body)
    return None if parts is None else _answer(kind, request, parts, frame_bytes_max, check)


def _answer(
    kind: int,
    request: int,
    parts: Iterator[Any],
    frame_bytes_max: int,
    check: Callable[[Command[Any]], None] | None,
) -> AnswerSteps:
    decoded = []
    for part in parts:
        decoded.append(part)
        yield None
    command = decoded[0] if len(decoded) == 1 else _joined(decoded)
    if check is not None:
        check(command)
    replies: Any = yield command
    if kind == BULK_PUSH:
        return encode_bulk_reply(request, replies)
    if type(command) is Batch:
        replies = with_faults(command, replies)
    advice = "ask for fewer queues at a time"
    rows = _Rows(request, frame_bytes_max, "the settings of {} queues take", advice)
    for start in range(0, len(replies), PART_ITEMS_MAX):
        rows.add(replies[start : start + PART_ITEMS_MAX])
        yield None
    return rows.result()


def _joined(parts: list[Any]) -> Batch | PushMany:
    if type(parts[0]) is Batch:
        return Batch([item for part in parts for item in part.items])
    return PushMany.joined(parts)


class _Rows:
    """The rows of an answer, encoded some at a time."""

    def __init__(self, request: int, frame_bytes_max: int, what: str, advice: str) -> None:
        self._request = request
        self._frame_bytes_max = frame_bytes_max
        self._what, self._advice = what, advice
        self._rows: list[bytes] = []
        self._count = self._size_bytes = 0

    def add(self, replies: list[Any]) -> None:
        """Encodes the next rows. Raises UnavailableError if a frame cannot have them all."""
        for start in range(0, len(replies), _ROWS_MAX):
            self._rows.append(encode_rows(replies[start : start + _ROWS_MAX]))
            self._size_bytes += len(self._rows[-1])
        self._count += len(replies)
        if self._size_bytes > self._frame_bytes_max:
            raise UnavailableError(
                f"{self._what.format(self._count)} {self._size_bytes} bytes and a frame at most "
                f"{self._frame_bytes_max}; {self._advice}"
            )

    def result(self) -> bytes:
        """The frame of the answer."""
        return encode_row_reply(self._request, self._count, self._rows)


class HistoryAnswer(_Rows):
    """The events of a history, encoded as they are read; its result is the frame of the answer."""

    def __init__(self, request: int, frame_bytes_max: int) -> None:
        advice = "read the journal by the pipeline instead"
        super().__init__(request, frame_bytes_max, "{} events take", advice)


def with_faults(batch: Batch, replies: list[Any]) -> list[Any]:
    """The replies to a batch, with the decoder's error for each item that it could not decode."""
    items: list[Any] = batch.items
    if BadItem not in map(type, items):
        return replies
    pairs = zip(items, replies, strict=True)
    return [item.error if type(item) is BadItem else reply for item, reply in pairs]


def parts_of(kind: int, body: Body) -> Iterator[Batch | PushMany] | None:
    """The parts of a large batch or bulk push, decoded one by one; None if it is not large.

    Raises, at once or with any part, what `decode_command` raises.
    """
    if kind == BATCH:
        return _batch_parts(body) if _has_many_items(body) else None
    if kind != BULK_PUSH or not _has_many_messages(body):
        return None
    frame = BulkFrame(body)
    items_max = PLAIN_PART_ITEMS_MAX if frame.is_plain else PART_ITEMS_MAX
    if frame.count <= items_max and frame.ends[-1] <= PART_BYTES_MAX:
        return None
    return _bulk_parts(frame, items_max)


def _has_many_items(body: Body) -> bool:
    """Whether a batch is to be split: by its size, or by the header of its array of items."""
    if len(body) > PART_BYTES_MAX:
        return True
    # The header of the command's array and its tag are a byte each. The header of an array of
    # sixteen or more has their number in two or four bytes. Anything else is short, or is refused.
    header = bytes(body[2:7])
    if header[:1] == b"\xdd":
        return int.from_bytes(header[1:5]) > PART_ITEMS_MAX
    return header[:1] == b"\xdc" and int.from_bytes(header[1:3]) > PART_ITEMS_MAX


def _has_many_messages(body: Body) -> bool:
    """Whether a bulk push may have to be split; if its head is wrong, the decoder refuses it."""
    if len(body) > PART_BYTES_MAX:
        return True
    count = bulk_count(body)
    return count is not None and count > PART_ITEMS_MAX


def pulls_one(body: Body) -> bool:
    """Whether the body of a pull asks for one message; it is not decoded, and may be wrong."""
    # The command's array and its tag have a byte each, as above. Then come the header of the
    # queue's name, which has one byte or two, the name and the limit, which is 1 if it is left out.
    if len(body) < 4:
        return False
    head = body[2]
    if 0xA0 <= head < 0xC0:
        place = 3 + (head & 0x1F)
    elif head == 0xD9:
        place = 4 + body[3]
    else:
        return False
    return len(body) <= place or body[place] == 1


def _batch_parts(body: Body) -> Iterator[Batch]:
    try:
        raws = raw_items(body)
        for start, stop in part_ranges([len(memoryview(raw)) for raw in raws], PART_ITEMS_MAX):
            yield Batch(decode_items(raws[start:stop], start))
    except Exception as fault:
        raise command_fault(BATCH, fault) from None


def _bulk_parts(frame: BulkFrame, items_max: int) -> Iterator[PushMany]:
    sizes = [end - start for start, end in pairwise(frame.ends)]
    for start, stop in part_ranges(sizes, items_max):
        yield frame.part(start, stop)
