"""The public methods: push, pull, extend, release, delete and the rest, on any backend.

`Queues` blocks, `AsyncQueues` is awaited; they have the same methods with the same parameters (a
test compares them). Durations are seconds here, fractions allowed, and become the whole
milliseconds of `service`. Bodies are bytes; text is encoded as UTF-8. Settings have other names
here than in `service`, and an error of `create` or `configure` uses the names here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import sleep
from typing import Any, Final, TypeVar, cast

from penstock.clock import Clock, SystemClock
from penstock.consumer.blocking import Consumer
from penstock.consumer.options import ConsumerOptions
from penstock.errors import BatchRefused, InvalidField, PenstockError, RequestError
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
    DescribeQueues,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    NumberedReplies,
    Peek,
    Pull,
    Purge,
    Push,
    PushMany,
    PushReply,
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

# Between two steps of a redrive. A thread that releases the engine's lock and takes it again at
# once gets it before waiting threads are awake, and a million messages need a thousand steps.
REDRIVE_PAUSE_S: Final = 0.000_1
_SECONDS_MAX: Final = 10**12
_SECONDS_LIMITS_MS: Final = {
    "delay": (0, DELAY_MS_MAX),
    "ttl": (1, TTL_MS_MAX),
    "wait": (0, WAIT_MS_MAX),
    "visibility": (0, VISIBILITY_MS_MAX),
    "visibility_timeout": (0, VISIBILITY_MS_MAX),
    "retention": (1, TTL_MS_MAX),
    "priority_age": (1, TTL_MS_MAX),
    "seconds": (1, VISIBILITY_MS_MAX),
}

# The settings of a queue: the name here, and the name in `service`.
_SETTINGS_IN_SECONDS: Final = {
    "visibility_timeout": "visibility_ms",
    "delay": "delay_ms",
    "wait": "wait_ms",
    "retention": "retention_ms",
    "priority_age": "priority_age_ms",
}
_OPTIONAL_SECONDS: Final = frozenset({"priority_age"})
_SETTINGS_UNCHANGED: Final = {
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
    "paused": "paused",
}
_PUBLIC_NAMES: Final = {
    inside: word
    for word, inside in (_SETTINGS_IN_SECONDS | _SETTINGS_UNCHANGED).items()
    if word != inside
}
_INTERNAL_NAME: Final = re.compile(rf"\b(?:{'|'.join(_PUBLIC_NAMES)})\b")
_ITEM_FIELDS: Final = ("body", "delay", "priority", "ttl", "dedup_id", "group", "attributes")
_FIFO: Final = ".fifo"


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
            is_none = value is None and name in _OPTIONAL_SECONDS
            settings[_SETTINGS_IN_SECONDS[name]] = None if is_none else to_ms(name, value)
        elif name in _SETTINGS_UNCHANGED:
            settings[_SETTINGS_UNCHANGED[name]] = value
        else:
            known = ", ".join([*_SETTINGS_IN_SECONDS, *_SETTINGS_UNCHANGED])
            raise InvalidField(f"settings: there is no setting {name!r}; there are {known}")
    return settings


def with_public_names(error: RequestError) -> RequestError:
    """The error with settings named as `create` and `configure` name them."""
    text = _INTERNAL_NAME.sub(lambda found: _PUBLIC_NAMES[found[0]], str(error))
    return error if text == str(error) else type(error)(text)


def make_create(queue: str, given: dict[str, Any]) -> CreateQueue:
    """The command that makes a queue; a name that ends in .fifo makes a FIFO queue.

    Raises InvalidField.
    """
    # A name that is not text is refused later, by the service.
    if str(queue).partition("@")[0].endswith(_FIFO):
        if given.get("fifo", True) is False:
            raise InvalidField(
                f"fifo: a name that ends in {_FIFO}, as {queue!r} does, is for FIFO queues only; "
                "use another name"
            )
        given = {"fifo": True, **given}
    return CreateQueue(queue, to_settings(given))


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
    """The command of a push."""
    return Push(
        queue,
        to_bytes(body),
        None if delay is None else to_ms("delay", delay),
        priority,
        None if ttl is None else to_ms("ttl", ttl),
        dedup_id,
        group,
        attributes,
    )


def to_bytes(body: Any) -> Any:
    """Text as UTF-8, anything else as it is. Raises InvalidField."""
    if not isinstance(body, str):
        return body
    try:
        return body.encode()
    except UnicodeEncodeError:
        raise InvalidField("body: holds a lone surrogate, which is not text") from None


def make_push_many(
    queue: str,
    bodies: Iterable[bytes | str | Mapping[str, Any]],
    delay: float | None,
    priority: int,
    ttl: float | None,
    dedup_id: str | None,
    group: str | None,
    attributes: Attributes | None,
) -> PushMany | Batch:
    """The command that pushes several messages. Raises InvalidField.

    A PushMany holds only bytes. With another body it is a Batch, where that item alone is refused.
    """
    items = to_list("bodies", bodies)
    if dedup_id is not None:
        raise InvalidField(
            "dedup_id: one for all would keep only the first message; give each item its own, "
            'as {"body": …, "dedup_id": …}'
        )
    columns: dict[str, list[Any]] = {}
    kinds = set(map(type, items))
    if not kinds <= _BODY_KINDS:
        fields = [_item_fields(number, item) for number, item in enumerate(items)]
        items = [each["body"] for each in fields]
        columns = {
            name: [each.get(field) for each in fields]
            for field, name in _COLUMNS.items()
            if any(field in each for each in fields)
        }
    if kinds != _ONLY_BYTES:
        items = [to_bytes(item) for item in items]
    command = PushMany(
        queue,
        cast(list[bytes], items),
        delay_ms=None if delay is None else to_ms("delay", delay),
        priority=priority,
        ttl_ms=None if ttl is None else to_ms("ttl", ttl),
        group=group,
        attributes=attributes,
        **columns,
    )
    if kinds == _ONLY_BYTES or all(type(item) is bytes for item in items):
        return command
    return Batch([*command.pushes()])


_ONLY_BYTES: Final = frozenset({bytes})
_BODY_KINDS: Final = frozenset({bytes, str})
_COLUMNS: Final = {
    "delay": "delays_ms",
    "priority": "priorities",
    "ttl": "ttls_ms",
    "dedup_id": "dedup_ids",
    "group": "groups",
    "attributes": "each_attributes",
}


def _item_fields(number: int, item: Any) -> dict[str, Any]:
    """The options of one item of several. Raises InvalidField, naming the item."""
    if not isinstance(item, Mapping):
        return {"body": item}
    unknown = [str(name) for name in item if name not in _ITEM_FIELDS]
    if unknown or "body" not in item:
        wrong = f"there is no {unknown[0]!r}" if unknown else "there is no body"
        raise InvalidField(f"bodies[{number}]: {wrong}; an item has {', '.join(_ITEM_FIELDS)}")
    fields = {name: value for name, value in item.items() if value is not None or name == "body"}
    for name in ("delay", "ttl"):
        if name in fields:
            fields[name] = to_ms(name, fields[name])
    return fields


# The types of most results, none of which is an error.
_NO_ERRORS: Final = frozenset({PushReply, bool})


def check_results(results: Sequence[T], return_errors: bool) -> Sequence[T]:
    """The results of several items. Raises BatchRefused if there is an error among them."""
    if return_errors or type(results) is NumberedReplies or set(map(type, results)) <= _NO_ERRORS:
        return results
    refused = [(n, each) for n, each in enumerate(results) if isinstance(each, PenstockError)]
    if not refused:
        return results
    number, first = refused[0]
    raise BatchRefused(
        f"{len(refused)} of {len(results)} items were refused, the others done; "
        f"item {number}: {first}",
        results,
    ) from first


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
    return [
        Delete(claim.queue, claim.proof) if type(claim) is Claim else Delete(*claimed(claim, None))
        for claim in to_list("claims", claims)
    ]


def to_list(field: str, items: Iterable[T]) -> list[T]:
    """The items as a list. Raises InvalidField for a single body, claim or other value."""
    if isinstance(items, str | bytes | Claim) or not isinstance(items, Iterable):
        raise InvalidField(f"{field}: expected several, got one {type(items).__name__}")
    return list(items)


class Queues:
    """Every queue of one backend, for callers that may block. Safe for many threads."""

    def __init__(self, service: QueueService, clock: Clock | None = None) -> None:
        self.service = service
        self.clock = clock or SystemClock()
        self._execute = service.execute

    def create(self, queue: str, **settings: Any) -> QueueInfo:
        """Makes a queue, or returns it if it exists with these settings.

        Settings: visibility_timeout, delay, wait, retention, priority_age (seconds); max_messages,
        max_bytes, max_body_bytes, max_in_flight; dead_letter with max_receives; fifo,
        dedup_by_content, dedup_per_group; annotations; paused. A name that ends in .fifo makes a
        FIFO queue. A dead-letter queue that does not exist is made, and named in the reply's
        `also_created`.
        """
        command = make_create(queue, settings)
        try:
            return self._execute(command)
        except RequestError as error:
            raise with_public_names(error) from None

    def configure(self, queue: str, **settings: Any) -> QueueInfo:
        """Changes some settings of a queue."""
        command = ConfigureQueue(queue, to_settings(settings))
        try:
            return self._execute(command)
        except RequestError as error:
            raise with_public_names(error) from None

    def pause(self, queue: str) -> QueueInfo:
        """Pauses delivery: pulls get nothing until `resume`, also after a restart.

        Pushes go on, and so do the claims that are held.
        """
        return self.configure(queue, paused=True)

    def resume(self, queue: str) -> QueueInfo:
        """Resumes delivery; pulls that wait are served."""
        return self.configure(queue, paused=False)

    def remove(self, queue: str, *, force: bool = False) -> None:
        """Deletes a queue with all its messages; pulls that wait on it fail with QueueDeleted.

        Raises QueueInUse, without `force`, if other queues send their dead letters to it.
        """
        self._execute(DeleteQueue(queue, force))

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
        """Adds a message and returns its id; the message is durable when this returns."""
        # The fast path of `make_push` for the most common push.
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
        """Claims up to `limit` messages, waiting up to `wait` seconds for the first.

        Through a server, a pull with an `attempt_id` gives 2,000 messages or 8 MiB at most.
        """
        return self._execute(make_pull(queue, limit, wait, visibility, attempt_id, holder))

    def extend(self, claim: Claim | str, seconds: float, *, receipt: str | None = None) -> int:
        """Holds a claim for `seconds` from now; returns the new deadline in milliseconds."""
        queue, proof = claimed(claim, receipt)
        return self._execute(Extend(queue, proof, to_ms("seconds", seconds)))

    def release(self, claim: Claim | str, *, delay: float = 0, receipt: str | None = None) -> None:
        """Returns a message to its place in the queue, at once or after `delay` seconds."""
        queue, proof = claimed(claim, receipt)
        self._execute(Release(queue, proof, to_ms("delay", delay)))

    def delete(self, claim: Claim | str, *, receipt: str | None = None) -> bool:
        """Deletes a claimed message; False if it was gone already."""
        if type(claim) is Claim:
            return self._execute(Delete(claim.queue, claim.proof))
        return self._execute(Delete(*claimed(claim, receipt)))

    def batch(self, items: Iterable[BatchItem]) -> list[Any]:
        """Runs several commands in one append; each reply, or the error that refused that item."""
        return self._execute(Batch(to_list("items", items)))

    def push_many(
        self,
        queue: str,
        bodies: Iterable[bytes | str | Mapping[str, Any]],
        *,
        delay: float | None = None,
        priority: int = 0,
        ttl: float | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
        return_errors: bool = False,
    ) -> Sequence[Any]:
        """Pushes several messages in one append; returns the PushReply of each.

        An item is a body, or a dict of `body` and options of its own, which replace those given
        for all; a `dedup_id` can only be an item's own. Raises BatchRefused if some are refused,
        or with `return_errors` returns the error of each in the place of its reply.
        """
        command = make_push_many(queue, bodies, delay, priority, ttl, dedup_id, group, attributes)
        return check_results(self._execute(command), return_errors)

    def delete_many(self, claims: Iterable[Claim], *, return_errors: bool = False) -> Sequence[Any]:
        """Deletes several claimed messages; the result of `delete` for each.

        Raises BatchRefused if some are refused, or with `return_errors` returns the error of each
        in the place of its reply.
        """
        return check_results(self.batch(make_deletes(claims)), return_errors)

    def consume(
        self,
        queue: str,
        *,
        visibility: float | None = None,
        wait: float = 1.0,
        idle: float | None = None,
        hold_max: float = 43_200.0,
        backoff: float = 1.0,
        backoff_max: float = 300.0,
        holder: str | None = None,
    ) -> Consumer:
        """A loop over the queue's messages: each claim is extended while the loop's body runs.

        The next iteration deletes the current claim's message. Leaving the loop releases it: at
        once, or after an exception with a delay of `backoff` seconds, doubled at each further
        failure of the message up to `backoff_max`. The loop ends by `stop()`, within `wait`
        seconds, or after `idle` seconds without a message. No claim is held for longer than
        `hold_max` seconds.
        """
        return Consumer(
            self,
            ConsumerOptions(queue, visibility, wait, idle, hold_max, backoff, backoff_max, holder),
        )

    def peek(self, queue: str, limit: int = 1, *, state: State = "visible") -> list[Message]:
        """Reads messages without claiming them."""
        return self._execute(Peek(queue, limit, state))

    def stats(self, queue: str) -> QueueStats:
        """The counts of a queue's messages, and the age of the oldest."""
        return self._execute(Stats(queue))

    def purge(self, queue: str) -> int:
        """Removes every message of a queue; returns how many."""
        return self._execute(Purge(queue))

    def redrive(self, queue: str, *, to: str | None = None, limit: int | None = None) -> int:
        """Moves dead letters back to their source queues, or to `to`; returns how many.

        Raises InvalidField for a queue that has no dead letters and is no dead-letter queue.
        """
        moved = 0
        step = self.service.redrive_max
        for command in redrive_steps(queue, to, limit, self.stats(queue).visible, step):
            count = self._execute(command)
            moved += count
            if count < command.limit:
                break
            sleep(REDRIVE_PAUSE_S)
        if not moved and to is None:
            check_is_dead_letter_queue(queue, self._every_info())
        return moved

    def _every_info(self) -> Iterator[QueueInfo]:
        page = self._execute(DescribeQueues())
        while page:
            yield from page
            page = self._execute(DescribeQueues(after=page[-1].queue))

    def history(self, message_id: str) -> list[HistoryEvent]:
        """The events of a message that the journal still has."""
        return self._execute(History(message_id))

    def close(self) -> None:
        """Closes the backend."""
        self.service.close()

    def __enter__(self) -> "Queues":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def redrive_steps(
    queue: str, to: str | None, limit: int | None, visible: int, step_max: int
) -> Iterable[Redrive]:
    """The commands of a redrive: short ones, because other commands wait while one is done."""
    left = visible if limit is None else check_number("limit", limit, 1, 2**63 - 1)
    if not left:
        # Nothing to move, but a wrong name must still raise.
        yield Redrive(queue, to, 1)
    while left:
        step = min(left, step_max)
        yield Redrive(queue, to, step)
        left -= step


def check_is_dead_letter_queue(queue: str, infos: Iterable[QueueInfo]) -> None:
    """Refuses a redrive of a queue that no other names as its dead-letter queue.

    Raises InvalidField.
    """
    if not any(info.settings.dead_letter == queue for info in infos):
        raise InvalidField(
            f"queue: {queue!r} is the dead-letter queue of no queue and holds no dead letters; "
            "nothing was moved"
        )
