"""Commands for many messages or queues in bounded steps, between which other commands run.

`steps_of` returns the steps of a command that may be long, for the event loop's run queue. Nobody
else has to know which commands are long: `LoopEngine` asks for the steps of each command. What the
steps do together equals the command, except that others may see it half done, and that a crash or
a full disk may leave a part of a command that was not answered.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.backends.loop import Steps
from penstock.errors import EngineClosed, InFlightLimit, JournalError, PenstockError
from penstock.service import (
    PART_BYTES_MAX,
    PART_ITEMS_MAX,
    PART_QUEUES_MAX,
    PLAIN_PART_ITEMS_MAX,
    PULL_LIMIT_MAX,
    QUEUES_LIMIT_MAX,
    REDRIVE_MAX,
    Batch,
    Claim,
    DescribeQueues,
    NumberedReplies,
    Peek,
    Pull,
    PushMany,
    QueueInfo,
    Redrive,
    part_ranges,
)

# A peek at more messages than this waits for a later turn: of many clients', few are made in each.
_PEEKED_AT_ONCE: Final = 100
# Claims that last for less time could run out before the last part of a pull, which would return
# their messages again.
_VISIBILITY_MS_MIN: Final = 10_000
# After so many claims the next part of a pull waits for the next turn of the event loop.
_CLAIMS_OF_A_STEP_MIN: Final = 100


def steps_of(engine: Engine, command: Any) -> Steps[Any] | None:
    """The steps of a command that may be long; None for others. It changes nothing itself."""
    divide = _DIVIDE.get(type(command))
    return None if divide is None else divide(engine, command)


def _is_above(limit: object, least: int, most: int) -> bool:
    """Whether a limit, which is not validated yet, is valid and above `least`."""
    return type(limit) is int and least < limit <= most


# Pulls.


def _pull(engine: Engine, pull: Pull) -> Steps[list[Claim]] | None:
    if not _is_above(pull.limit, engine.settle_max, PULL_LIMIT_MAX):
        return None
    return _pull_steps(engine, pull)


def _pull_steps(engine: Engine, pull: Pull) -> Steps[list[Claim]]:
    """Settles what is due in the queue, then claims messages, both in parts if they are many.

    A pull that finds nothing and may wait is not divided when it is woken. An error after the first
    part ends the pull with the claims that it has. Raises it if it is the first part.
    """
    for _ in range(-(-pull.limit // engine.settle_max)):
        if not engine.settle_some(pull.queue):
            break
        yield None
    claims: list[Claim] = []
    if divides_pull(engine, pull):
        claims = yield from _claim_parts(engine, pull)
    if not claims:
        # The whole pull waits, or is refused, as it would be without parts.
        claims = yield pull
    return claims


def divides_pull(engine: Engine, pull: Pull) -> bool:
    """Whether the claims of a pull are made in parts, which must claim what one pull would claim.

    A pull from a FIFO queue is not: one pull may claim several messages of a group, a second one
    none. A pull with an attempt id is not, because the same id gives the same claims.
    """
    if not _is_above(pull.limit, engine.pull_part_max, PULL_LIMIT_MAX):
        return False
    queue = engine.shard.names.get(pull.queue) if type(pull.queue) is str else None
    if queue is None or queue.settings.fifo or pull.attempt_id is not None:
        return False
    visibility_ms = pull.visibility_ms
    if visibility_ms is None:
        visibility_ms = queue.settings.visibility_ms
    if type(visibility_ms) is not int or visibility_ms < _VISIBILITY_MS_MIN:
        return False
    # The first message of each part is claimed whatever its size.
    parts = -(-pull.limit // engine.pull_part_max)
    bytes_max = pull.bytes_max
    return bytes_max is None or (
        type(bytes_max) is int and queue.settings.body_bytes_max <= bytes_max // parts
    )


def _claim_parts(engine: Engine, pull: Pull) -> Steps[list[Claim]]:
    claims: list[Claim] = []
    parts = -(-pull.limit // engine.pull_part_max)
    bytes_max = None if pull.bytes_max is None else pull.bytes_max // parts
    for _ in range(parts):
        limit = min(engine.pull_part_max, pull.limit - len(claims))
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
        if len(some) >= _CLAIMS_OF_A_STEP_MIN:
            yield None
    return claims


# Peeks, redrives and descriptions.


def _peek(engine: Engine, peek: Peek) -> Steps[Any] | None:
    is_long = _is_above(peek.limit, _PEEKED_AT_ONCE, PULL_LIMIT_MAX)
    return _peek_steps(peek) if is_long else None


def _peek_steps(peek: Peek) -> Steps[Any]:
    yield None
    return (yield peek)


def _redrive(engine: Engine, redrive: Redrive) -> Steps[int] | None:
    is_long = _is_above(redrive.limit, REDRIVE_MAX, PULL_LIMIT_MAX)
    return _redrive_steps(redrive) if is_long else None


def _redrive_steps(redrive: Redrive) -> Steps[int]:
    """An error after the first part ends the redrive with the number that was moved."""
    moved = 0
    while True:
        limit = min(REDRIVE_MAX, redrive.limit - moved)
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
        yield None


def _describe(engine: Engine, command: DescribeQueues) -> Steps[list[QueueInfo]] | None:
    is_long = _is_above(command.limit, PART_QUEUES_MAX, QUEUES_LIMIT_MAX)
    return _describe_steps(command) if is_long else None


def _describe_steps(command: DescribeQueues) -> Steps[list[QueueInfo]]:
    """Each queue is as it was when its page was read."""
    found: list[QueueInfo] = []
    after = command.after
    while True:
        limit = min(command.limit - len(found), PART_QUEUES_MAX)
        page: list[QueueInfo] = yield DescribeQueues(command.prefix, after, limit)
        found += page
        if len(page) < limit or len(found) == command.limit:
            return found
        after = page[-1].queue
        yield None


# Batches and bulk pushes.


def _batch(engine: Engine, batch: Batch) -> Steps[list[Any]] | None:
    items: list[Any] = batch.items
    if type(items) is not list or len(items) < 2:
        return None
    sizes = [_size_of(getattr(item, "body", b"")) for item in items]
    if len(items) <= PART_ITEMS_MAX and sum(sizes) <= PART_BYTES_MAX:
        return None
    ranges = part_ranges(sizes, PART_ITEMS_MAX)
    return _executed((Batch(items[start:stop]), stop - start) for start, stop in ranges)


def _push_many(engine: Engine, command: PushMany) -> Steps[Sequence[Any]] | None:
    bodies = command.bodies
    count = len(bodies)
    if count < 2:
        return None
    sizes = list(map(_size_of, bodies))
    is_small = sum(sizes) <= PART_BYTES_MAX
    if count <= PART_ITEMS_MAX and is_small:
        return None
    items_max = PLAIN_PART_ITEMS_MAX if command.is_plain else PART_ITEMS_MAX
    if (count <= items_max and is_small) or not command.has_whole_columns:
        return None
    ranges = part_ranges(sizes, items_max)
    return _executed((command.part(start, stop), stop - start) for start, stop in ranges)


def _size_of(body: object) -> int:
    """Of a body that is not validated yet."""
    return len(body) if type(body) is bytes else 0


def _executed(parts: Iterator[tuple[Batch | PushMany, int]]) -> Steps[Any]:
    """Executes the parts in order; the replies to each item.

    If a part is refused as a whole (the store is full), its items and those after it are replied to
    with that error. Raises it if it is the first part.
    """
    replies: NumberedReplies | list[Any] = []
    refused: PenstockError | None = None
    for part, count in parts:
        some: Sequence[Any] = ()
        if refused is None:
            try:
                some = yield part
            except (JournalError, EngineClosed):
                raise
            except PenstockError as error:
                if not replies:
                    raise
                refused = error
        replies = _joined(replies, some if refused is None else [refused] * count)
        yield None
    return replies


def _joined(
    before: NumberedReplies | list[Any], some: Sequence[Any]
) -> NumberedReplies | list[Any]:
    """Both replies: a range of numbers while the messages have them in a row."""
    if isinstance(some, NumberedReplies):
        if not before:
            return some
        if isinstance(before, NumberedReplies) and before.numbers.stop == some.numbers.start:
            numbers = range(before.numbers.start, some.numbers.stop)
            return NumberedReplies(before.id_start, numbers)
    if isinstance(before, list):
        before += some
        return before
    return [*before, *some]


_DIVIDE: Final[dict[type, Callable[[Engine, Any], Steps[Any] | None]]] = {
    Pull: _pull,
    Peek: _peek,
    Redrive: _redrive,
    DescribeQueues: _describe,
    Batch: _batch,
    PushMany: _push_many,
}
# Commands for which `steps_of` may have steps.
MAY_BE_LONG: Final = frozenset(_DIVIDE)
