"""The words people use: push, pull, extend, release, delete and the rest, on any backend.

`Queues` blocks, `AsyncQueues` is awaited; they have the same methods with the same parameters (a
test holds them to it). Durations are seconds here, fractions allowed, and become the whole
milliseconds of `service`. Bodies are bytes; text is encoded as UTF-8 for you.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, TypeVar

from penstock.errors import InvalidField
from penstock.service import (
    DELAY_MS_MAX,
    TTL_MS_MAX,
    VISIBILITY_MS_MAX,
    WAIT_MS_MAX,
    Attributes,
    Batch,
    BatchItem,
    Claim,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    Peek,
    Pull,
    Purge,
    Push,
    QueueInfo,
    QueueService,
    QueueStats,
    Redrive,
    Release,
    State,
    Stats,
    check_number,
)

T = TypeVar("T")

_SECONDS_MAX: Final = 10**12
_SECONDS_LIMITS_MS: Final = {
    "delay": (0, DELAY_MS_MAX),
    "ttl": (1, TTL_MS_MAX),
    "wait": (0, WAIT_MS_MAX),
    "visibility": (0, VISIBILITY_MS_MAX),
    "visibility_timeout": (0, VISIBILITY_MS_MAX),
    "retention": (1, TTL_MS_MAX),
    "seconds": (1, VISIBILITY_MS_MAX),
}

# What a queue can be given, by its name here, and the name and unit it has inside.
_SETTINGS_IN_SECONDS: Final = {
    "visibility_timeout": "visibility_ms",
    "delay": "delay_ms",
    "wait": "wait_ms",
    "retention": "retention_ms",
}
_SETTINGS_AS_THEY_ARE: Final = {
    "max_body_bytes": "body_bytes_max",
    "max_messages": "messages_max",
    "max_bytes": "bytes_max",
    "max_in_flight": "in_flight_max",
    "dead_letter": "dead_letter",
    "max_receives": "max_receives",
    "fifo": "fifo",
    "dedup_by_content": "dedup_by_content",
    "dedup_per_group": "dedup_per_group",
    "annotations": "annotations",
}


def to_ms(field: str, seconds: object) -> int:
    """Seconds as whole milliseconds, within the limits of that field. Raises InvalidField."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidField(f"{field}: expected a number of seconds, got {type(seconds).__name__}")
    low_ms, high_ms = _SECONDS_LIMITS_MS.get(field, (0, _SECONDS_MAX * 1_000))
    # Compared as seconds, because a float may be too large to become a number of milliseconds.
    if not low_ms / 1_000 <= seconds <= high_ms / 1_000:
        shown = f"{seconds} s" if -_SECONDS_MAX < seconds < _SECONDS_MAX else "that long"
        raise InvalidField(
            f"{field}: {shown} is outside {low_ms / 1_000:g} to {high_ms // 1_000} s"
        )
    return round(seconds * 1_000)


def to_settings(given: dict[str, Any]) -> dict[str, Any]:
    """A queue's settings as `service` names them. Raises InvalidField."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SETTINGS_IN_SECONDS:
            settings[_SETTINGS_IN_SECONDS[name]] = to_ms(name, value)
        elif name in _SETTINGS_AS_THEY_ARE:
            settings[_SETTINGS_AS_THEY_ARE[name]] = value
        else:
            known = ", ".join([*_SETTINGS_IN_SECONDS, *_SETTINGS_AS_THEY_ARE])
            raise InvalidField(f"settings: there is no setting {name!r}; there are {known}")
    return settings


def make_push(
    queue: str,
    body: bytes | str,
    delay: float | None = None,
    priority: int = 0,
    ttl: float | None = None,
    dedup_id: str | None = None,
    group: str | None = None,
    attributes: Attributes | None = None,
) -> Push:
    """The command of a push; several of them make a `push_many`."""
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError:
            raise InvalidField("body: holds a lone surrogate, which is not text") from None
    return Push(
        queue,
        body,
        None if delay is None else to_ms("delay", delay),
        priority,
        None if ttl is None else to_ms("ttl", ttl),
        dedup_id,
        group,
        attributes,
    )


def make_pull(
    queue: str,
    limit: int,
    wait: float | None,
    visibility: float | None,
    attempt_id: str | None,
    holder: str | None,
) -> Pull:
    """The command of a pull."""
    return Pull(
        queue,
        limit,
        None if visibility is None else to_ms("visibility", visibility),
        None if wait is None else to_ms("wait", wait),
        attempt_id,
        holder,
    )


def claimed(claim: Claim | str, receipt: str | None) -> tuple[str, Any]:
    """The queue and receipt of a claim, or of a queue's name and a receipt. Raises InvalidField."""
    if isinstance(claim, Claim):
        return claim.queue, claim.proof
    if receipt is None:
        raise InvalidField("claim: expected a Claim, or a queue's name followed by a receipt")
    return claim, receipt


def make_deletes(claims: Iterable[Claim]) -> list[BatchItem]:
    """The commands that delete several claims."""
    return [Delete(*claimed(claim, None)) for claim in to_list("claims", claims)]


def to_list(field: str, items: Iterable[T]) -> list[T]:
    """The items as a list. Raises InvalidField for what is one thing and not several."""
    if isinstance(items, str | bytes | Claim) or not isinstance(items, Iterable):
        raise InvalidField(f"{field}: expected several, got one {type(items).__name__}")
    return list(items)


class Queues:
    """Every queue of one backend, for callers who may block. Safe for many threads."""

    def __init__(self, service: QueueService) -> None:
        self.service = service
        self._execute = service.execute

    def create(self, queue: str, **settings: Any) -> QueueInfo:
        """Makes a queue, or returns it if it exists with these settings.

        Settings: visibility_timeout, delay, wait, retention (seconds); max_messages, max_bytes,
        max_body_bytes, max_in_flight; dead_letter with max_receives; fifo, dedup_by_content,
        dedup_per_group; annotations.
        """
        return self._execute(CreateQueue(queue, to_settings(settings)))

    def configure(self, queue: str, **settings: Any) -> QueueInfo:
        """Changes some settings of a queue."""
        return self._execute(ConfigureQueue(queue, to_settings(settings)))

    def remove(self, queue: str) -> None:
        """Deletes a queue with all it holds; pulls that wait on it fail with QueueDeleted."""
        self._execute(DeleteQueue(queue))

    def describe(self, queue: str) -> QueueInfo:
        """A queue's settings and dates."""
        return self._execute(DescribeQueue(queue))

    def names(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> list[str]:
        """Names of queues, in alphabetical order."""
        return self._execute(ListQueues(prefix, after, limit))

    def push(
        self,
        queue: str,
        body: bytes | str,
        *,
        delay: float | None = None,
        priority: int = 0,
        ttl: float | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> str:
        """Adds a message and returns its id; it is kept when this returns."""
        # The plainest push is the commonest: it goes straight to its command.
        if delay is None and ttl is None and type(body) is bytes:
            command = Push(queue, body, None, priority, None, dedup_id, group, attributes)
        else:
            command = make_push(queue, body, delay, priority, ttl, dedup_id, group, attributes)
        return self._execute(command).id

    def pull(
        self,
        queue: str,
        *,
        wait: float | None = None,
        visibility: float | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> Claim | None:
        """Claims the next message, waiting up to `wait` seconds for one."""
        if wait is None and visibility is None:
            command = Pull(queue, 1, None, None, attempt_id, holder)
        else:
            command = make_pull(queue, 1, wait, visibility, attempt_id, holder)
        claims = self._execute(command)
        return claims[0] if claims else None

    def pull_many(
        self,
        queue: str,
        limit: int = 10,
        *,
        wait: float | None = None,
        visibility: float | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> list[Claim]:
        """Claims up to `limit` messages, waiting up to `wait` seconds for the first."""
        return self._execute(make_pull(queue, limit, wait, visibility, attempt_id, holder))

    def extend(self, claim: Claim | str, seconds: float, *, receipt: str | None = None) -> int:
        """Holds a claim for `seconds` from now; returns the new deadline in milliseconds."""
        queue, proof = claimed(claim, receipt)
        return self._execute(Extend(queue, proof, to_ms("seconds", seconds)))

    def release(self, claim: Claim | str, *, delay: float = 0, receipt: str | None = None) -> None:
        """Gives a message back to its place, at once or after `delay` seconds."""
        queue, proof = claimed(claim, receipt)
        self._execute(Release(queue, proof, to_ms("delay", delay)))

    def delete(self, claim: Claim | str, *, receipt: str | None = None) -> bool:
        """Ends a message for good; false if it was gone already."""
        if type(claim) is Claim:
            return self._execute(Delete(claim.queue, claim.proof))
        return self._execute(Delete(*claimed(claim, receipt)))

    def batch(self, items: Iterable[BatchItem]) -> list[Any]:
        """Runs several commands in one append; each reply, or the error that refused that item."""
        return self._execute(Batch(to_list("items", items)))

    def push_many(self, queue: str, bodies: Iterable[bytes | str], **options: Any) -> list[Any]:
        """Pushes several messages with the same options; each PushReply, or its error."""
        return self.batch(make_push(queue, body, **options) for body in to_list("bodies", bodies))

    def delete_many(self, claims: Iterable[Claim]) -> list[Any]:
        """Deletes several claims; each True or False as `delete` gives, or its error."""
        return self.batch(make_deletes(claims))

    def peek(self, queue: str, limit: int = 1, *, state: State = "visible") -> list[Message]:
        """Shows messages without claiming them."""
        return self._execute(Peek(queue, limit, state))

    def stats(self, queue: str) -> QueueStats:
        """How deep the queue is, and how old its oldest message."""
        return self._execute(Stats(queue))

    def purge(self, queue: str) -> int:
        """Removes every message of a queue, and counts them."""
        return self._execute(Purge(queue))

    def redrive(self, queue: str, *, to: str | None = None, limit: int | None = None) -> int:
        """Moves messages back to where they were dead-lettered from, or to `to`; counts them."""
        moved = 0
        step = self.service.redrive_max
        for command in redrive_steps(queue, to, limit, self.stats(queue).visible, step):
            count = self._execute(command)
            moved += count
            if count < command.limit:
                break
        return moved

    def history(self, message_id: str) -> list[HistoryEvent]:
        """Everything the journal still knows of a message."""
        return self._execute(History(message_id))

    def close(self) -> None:
        """Lets go of the backend."""
        self.service.close()

    def __enter__(self) -> "Queues":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def redrive_steps(
    queue: str, to: str | None, limit: int | None, visible: int, step_max: int
) -> Iterable[Redrive]:
    """The commands of a redrive: short ones, so that nobody else has to wait for a long one."""
    left = visible if limit is None else check_number("limit", limit, 1, 2**63 - 1)
    if not left:
        # Nothing to move, but a wrong name must still be told.
        yield Redrive(queue, to, 1)
    while left:
        step = min(left, step_max)
        yield Redrive(queue, to, step)
        left -= step
