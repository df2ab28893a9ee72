"""Large requests on an event loop: limited, or executed in parts with other requests in between.

The frame server, the Carrot broker and the owners of a cluster's shards share this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.backends.loop import PAUSE, Steps
from penstock.errors import EngineClosed, JournalError, PenstockError, UnavailableError
from penstock.service import (
    PULL_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
    Batch,
    DescribeQueues,
    NumberedReplies,
    Peek,
    Pull,
    PushMany,
    QueueInfo,
)
from penstock.wire.frames.bodies import BadItem, encode_row_reply, encode_rows
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import BATCH, PULL_BYTES_MAX, PULL_MESSAGES_MAX

# The largest part of a message's row in a reply that is neither its body nor its attributes.
_ROW_BYTES: Final = 1_024
# The settings of so many queues are read and encoded at once; those of one have up to 64 KiB.
PAGE_QUEUES: Final = 200


def bounded(command: Pull | Peek, frame_bytes_max: int) -> Pull | Peek:
    """Limits a pull or peek of many, so that it is short and its answer fits into a frame.

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


def takes_pages(command: object) -> bool:
    """Whether a command asks for the settings of so many queues that they are read in pages."""
    if type(command) is not DescribeQueues:
        return False
    return type(command.limit) is int and PAGE_QUEUES < command.limit <= QUEUES_LIMIT_MAX


def take_pages(request: int, command: DescribeQueues, frame_bytes_max: int) -> Steps[bytes]:
    """Reads the settings of many queues in pages, and returns the frame of the one answer.

    Each queue is as it was when its page was read. Raises UnavailableError if the answer is too
    large for a frame.
    """
    rows: list[bytes] = []
    count = size_bytes = 0
    after = command.after
    while True:
        limit = min(command.limit - count, PAGE_QUEUES)
        page: list[QueueInfo] = yield DescribeQueues(command.prefix, after, limit)
        rows.append(encode_rows(page))
        count += len(page)
        size_bytes += len(rows[-1])
        if size_bytes > frame_bytes_max:
            raise UnavailableError(
                f"the settings of {count} queues take {size_bytes} bytes and a frame at most "
                f"{frame_bytes_max}; ask for fewer queues at a time"
            )
        if len(page) < limit or count == command.limit:
            return encode_row_reply(request, count, rows)
        after = page[-1].queue
        yield PAUSE


def take_parts(
    kind: int,
    request: int,
    parts: Iterator[Batch | PushMany],
    check: Callable[[Batch | PushMany], None] | None = None,
) -> Steps[bytes]:
    """Decodes all parts, executes them in order, and returns the frame of the one answer.

    If the first part is refused as a whole (the store is full), so is the request. Raises what
    `parts` and `check`, which gets each part, raise, before anything was changed.
    """
    decoded: list[Batch | PushMany] = []
    for part in parts:
        if check is not None:
            check(part)
        decoded.append(part)
        yield PAUSE
    answer: _BatchAnswer | _BulkAnswer = _BatchAnswer() if kind == BATCH else _BulkAnswer()
    yield from execute_parts(decoded, answer.add)
    return answer.encode(request)


def execute_parts(
    parts: Iterable[Batch | PushMany], add: Callable[[Any, Sequence[Any]], None]
) -> Steps[None]:
    """Executes the parts in order, and calls `add(part, replies)` with the replies to each.

    If a part is refused as a whole, its items and those after it are replied to with that error.
    Raises it if it is the first part.
    """
    refused: PenstockError | None = None
    replies: Sequence[Any] = ()
    for part in parts:
        if refused is None:
            try:
                replies = yield part
            except (JournalError, EngineClosed):
                raise
            except PenstockError as error:
                if not replies:
                    raise
                refused = error
        if refused is not None:
            replies = [refused] * (len(part.items if isinstance(part, Batch) else part.bodies))
        add(part, replies)
        yield PAUSE


class _BatchAnswer:
    """The replies to a batch, encoded as they come."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: list[bytes] = []

    def add(self, part: Any, replies: Sequence[Any]) -> None:
        self.count += len(replies)
        self._rows.append(encode_rows(with_faults(part, list(replies))))

    def encode(self, request: int) -> bytes:
        return encode_row_reply(request, self.count, self._rows)


class _BulkAnswer:
    """The replies to a bulk push: a range of numbers while its messages have them in a row."""

    def __init__(self) -> None:
        self.count = 0
        self._replies: NumberedReplies | list[Any] = []

    def add(self, part: Any, replies: Sequence[Any]) -> None:
        self.count += len(replies)
        before = self._replies
        if not before and isinstance(replies, NumberedReplies):
            self._replies = replies
        elif (
            isinstance(before, NumberedReplies)
            and isinstance(replies, NumberedReplies)
            and before.numbers.stop == replies.numbers.start
        ):
            joined = range(before.numbers.start, replies.numbers.stop)
            self._replies = NumberedReplies(before.id_start, joined)
        else:
            self._replies = [*before, *replies]

    def encode(self, request: int) -> bytes:
        return encode_bulk_reply(request, self._replies)


def with_faults(batch: Batch, replies: list[Any]) -> list[Any]:
    """The replies to a batch, with the decoder's error for each item that it could not decode."""
    items: list[Any] = batch.items
    if BadItem not in map(type, items):
        return replies
    pairs = zip(items, replies, strict=True)
    return [item.error if type(item) is BadItem else reply for item, reply in pairs]
