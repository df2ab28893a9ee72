"""Large requests on an event loop: limited, or executed in parts with other requests in between.

The frame server, the Carrot broker and the owners of a cluster's shards share this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.backends.loop import LoopService, Pending, Steps
from penstock.errors import (
    EngineClosed,
    InFlightLimit,
    JournalError,
    PenstockError,
    UnavailableError,
)
from penstock.service import (
    PULL_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
    Batch,
    Claim,
    DescribeQueues,
    HistoryEvent,
    NumberedReplies,
    Peek,
    Pull,
    PushMany,
    QueueInfo,
    Redrive,
)
from penstock.wire.frames.bodies import BadItem, encode_row_reply, encode_rows
from penstock.wire.frames.bulk import encode_bulk_reply
from penstock.wire.frames.frames import BATCH, PULL_BYTES_MAX, PULL_MESSAGES_MAX

# The largest part of a message's row in a reply that is neither its body nor its attributes.
_ROW_BYTES: Final = 1_024
# Claims that last for less time could run out before the last part of a pull, which would return
# their messages again.
_VISIBILITY_MS_MIN: Final = 10_000
# After so many claims the next part of a pull waits for the next turn of the event loop.
_PAUSE_CLAIMS_MIN: Final = 100
# `encode_rows` has a limit.
_ROWS_MAX: Final = 10_000
# The settings of so many queues are read and encoded at once; those of one have up to 64 KiB.
PAGE_QUEUES: Final = 200


def _do_nothing() -> None:
    pass


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


def settle_before_pull(service: LoopService, pull: Pull) -> bool:
    """Settles some of what is due in the queue of a pull of many messages.

    Returns whether the pull is to be run as `pull_parts`: more is due there, or its claims are made
    in parts. In the second case nothing is settled here; `pull_parts` does it.
    """
    limit = pull.limit
    if type(limit) is not int or not service.settle_max < limit <= PULL_LIMIT_MAX:
        return False
    return divides_pull(service, pull) or service.settle_some(pull.queue)


def divides_pull(service: LoopService, pull: Pull) -> bool:
    """Whether the claims of a pull are made in parts, which must claim what one pull would claim.

    A pull from a FIFO queue is not: one pull may claim several messages of a group, a second one
    none. A pull with an attempt id is not, because the same id gives the same claims.
    """
    limit, bytes_max = pull.limit, pull.bytes_max
    if type(limit) is not int or not service.pull_part_max < limit <= PULL_LIMIT_MAX:
        return False
    queue = service.view(pull.queue)
    if queue is None or queue.settings.fifo or pull.attempt_id is not None:
        return False
    visibility_ms = pull.visibility_ms
    if visibility_ms is None:
        visibility_ms = queue.settings.visibility_ms
    if type(visibility_ms) is not int or visibility_ms < _VISIBILITY_MS_MIN:
        return False
    # The first message of each part is claimed whatever its size.
    parts = -(-limit // service.pull_part_max)
    return bytes_max is None or (
        type(bytes_max) is int and queue.settings.body_bytes_max <= bytes_max // parts
    )


def run_pull(service: LoopService, pull: Pull, steps: Steps[list[Claim]]) -> list[Claim] | Pending:
    """Runs the `pull_parts` of a pull.

    If it may wait for a message, its Pending waits from the first pause on, until it has claims.
    """
    reply = service.run(steps)
    if isinstance(reply, Pending) and not reply.claims:
        wait_ms = pull.wait_ms
        if wait_ms is None:
            queue = service.view(pull.queue)
            wait_ms = 0 if queue is None else queue.settings.wait_ms
        reply.waits = wait_ms != 0
    return reply


def pull_parts(
    service: LoopService,
    pull: Pull,
    hold: Callable[[], None] = _do_nothing,
    resume: Callable[[], None] = _do_nothing,
) -> Steps[list[Claim]]:
    """Settles what is due in the queue, then claims messages, both in parts if they are many.

    Calls `hold` before each pause, and `resume` before it may wait for a message. A pull that finds
    nothing and may wait is not divided when it is woken. An error after the first part ends the
    pull with the claims that it has. Raises it if it is the first part.
    """
    for _ in range(-(-pull.limit // service.settle_max)):
        if not service.settle_some(pull.queue):
            break
        hold()
        yield
    claims: list[Claim] = []
    if divides_pull(service, pull):
        claims = yield from _claim_parts(service, pull, hold)
    if not claims:
        # The whole pull waits, or is refused, as it would be without parts.
        resume()
        claims = yield pull
    return claims


def _claim_parts(service: LoopService, pull: Pull, hold: Callable[[], None]) -> Steps[list[Claim]]:
    claims: list[Claim] = []
    parts = -(-pull.limit // service.pull_part_max)
    bytes_max = None if pull.bytes_max is None else pull.bytes_max // parts
    for _ in range(parts):
        limit = min(service.pull_part_max, pull.limit - len(claims))
        part = msgspec.structs.replace(pull, limit=limit, wait_ms=0, bytes_max=bytes_max)
        try:
            some: list[Claim] = yield part
        except (JournalError, EngineClosed):
            raise
        except PenstockError as error:
            if claims:
                break
            if isinstance(error, InFlightLimit):
                some = []
            else:
                raise
        if not some:
            break
        claims += some
        if len(claims) == pull.limit:
            break
        if len(some) >= _PAUSE_CLAIMS_MIN:
            hold()
            yield
    return claims


def divides_redrive(service: LoopService, redrive: Redrive) -> bool:
    """Whether a redrive is made in parts."""
    limit = redrive.limit
    return type(limit) is int and service.redrive_max < limit <= PULL_LIMIT_MAX


def redrive_parts(
    service: LoopService, redrive: Redrive, hold: Callable[[], None] = _do_nothing
) -> Steps[int]:
    """Moves many messages in parts, and returns how many; calls `hold` before each pause.

    An error after the first part ends the redrive with the number that was moved. Raises it if it
    is the first part.
    """
    moved = 0
    while True:
        limit = min(service.redrive_max, redrive.limit - moved)
        try:
            some: int = yield Redrive(redrive.queue, redrive.to, limit)
        except (JournalError, EngineClosed):
            raise
        except PenstockError:
            if not moved:
                raise
            return moved
        moved += some
        if not some or moved == redrive.limit:
            return moved
        hold()
        yield


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
        yield


class HistoryAnswer:
    """The events of a history, encoded as they are read; its result is the frame of the answer."""

    def __init__(self, request: int, frame_bytes_max: int) -> None:
        self._request = request
        self._frame_bytes_max = frame_bytes_max
        self._rows: list[bytes] = []
        self._count = self._size_bytes = 0

    def add(self, events: list[HistoryEvent]) -> None:
        """Encodes the next events. Raises UnavailableError if a frame cannot have them all."""
        for start in range(0, len(events), _ROWS_MAX):
            self._rows.append(encode_rows(events[start : start + _ROWS_MAX]))
            self._size_bytes += len(self._rows[-1])
        self._count += len(events)
        if self._size_bytes > self._frame_bytes_max:
            raise UnavailableError(
                f"{self._count} events take {self._size_bytes} bytes and a frame at most "
                f"{self._frame_bytes_max}; read the journal by the pipeline instead"
            )

    def result(self) -> bytes:
        """The frame of the answer."""
        return encode_row_reply(self._request, self._count, self._rows)


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
        yield
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
        yield


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
