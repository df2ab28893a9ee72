"""The public methods: push, pull, extend, release, delete and the rest, on any backend.

`Queues` blocks, `AsyncQueues` is awaited; they have the same methods with the same parameters (a
test compares them). Bodies are bytes; text is encoded as UTF-8. Words and units are those of
`public`, which translates them for `service`.
"""

from builtins import list as List  # noqa: N812 - in the classes, `list` is a method
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import sleep
from typing import Any, Final, TypeVar, cast

from penstock.clock import Clock, SystemClock
from penstock.consumer.blocking import Consumer
from penstock.consumer.options import read_options
from penstock.errors import BatchRefused, InvalidField, PenstockError, RequestError
from penstock.public import (
    AnyClaim,
    ClaimRef,
    QueueDescription,
    QueueStatistics,
    Seconds,
    claimed,
    optional_ms,
    public_info,
    public_stats,
    to_ms,
    to_settings,
    with_public_names,
)
from penstock.service import (
    Attributes,
    Batch,
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
_ITEM_FIELDS: Final = ("body", "delay", "priority", "ttl", "dedup_id", "group", "attributes")
_FIFO: Final = ".fifo"


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
    delay: Seconds | None = None,
    priority: int = 0,
    ttl: Seconds | None = None,
    dedup_id: str | None = None,
    group: str | None = None,
    attributes: Attributes | None = None,
) -> Push:
    """The command of a push."""
    return Push(
        queue,
        to_bytes(body),
        optional_ms("delay", delay),
        priority,
        optional_ms("ttl", ttl),
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
    delay: Seconds | None,
    priority: int,
    ttl: Seconds | None,
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
        delay_ms=optional_ms("delay", delay),
        priority=priority,
        ttl_ms=optional_ms("ttl", ttl),
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


def check_results(results: Sequence[T]) -> Sequence[T]:
    """The results of several items. Raises BatchRefused if there is an error among them."""
    if type(results) is NumberedReplies or set(map(type, results)) <= _NO_ERRORS:
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
    wait: Seconds | None,
    visibility_timeout: Seconds | None,
    attempt_id: str | None,
    holder: str | None,
) -> Pull:
    """The command of a pull."""
    return Pull(
        queue,
        limit,
        optional_ms("visibility_timeout", visibility_timeout),
        optional_ms("wait", wait),
        attempt_id,
        holder,
    )


def make_deletes(claims: Iterable[AnyClaim]) -> Batch:
    """The command that deletes several claimed messages. Raises InvalidField."""
    return Batch(
        [
            Delete(claim.queue, claim.proof) if type(claim) is Claim else Delete(*claimed(claim))
            for claim in to_list("claims", claims)
        ]
    )


def to_list(field: str, items: Iterable[T]) -> list[T]:
    """The items as a list. Raises InvalidField for a single body, claim or other value."""
    if isinstance(items, str | bytes | Claim | ClaimRef) or not isinstance(items, Iterable):
        raise InvalidField(f"{field}: expected several, got one {type(items).__name__}")
    return list(items)


class Queues:
    """Every queue of one backend, for callers that may block. Safe for many threads.

    Every method raises InvalidField for a value outside its limits, QueueNotFound for a queue that
    does not exist, and UnavailableError if the backend cannot answer now. `service` is the backend,
    for other parts of Penstock: nothing is promised of it.
    """

    def __init__(self, service: QueueService, clock: Clock | None = None) -> None:
        self.service = service
        self.clock = clock or SystemClock()
        self._execute = service.execute

    def create(self, queue: str, **settings: Any) -> QueueDescription:
        """Makes a queue, or returns it if it exists with these settings; else raises QueueExists.

        Settings: visibility_timeout, delay, wait, retention, priority_age (seconds); max_messages,
        max_bytes, max_body_bytes, max_in_flight; dead_letter with max_receives; fifo,
        dedup_by_content, dedup_per_group; annotations; paused. A name that ends in .fifo makes a
        FIFO queue. A dead-letter queue that does not exist is made, and named in the reply's
        `also_created`.
        """
        command = make_create(queue, settings)
        try:
            return public_info(self._execute(command))
        except RequestError as error:
            raise with_public_names(error) from None

    def configure(self, queue: str, **settings: Any) -> QueueDescription:
        """Changes some settings of a queue; returns all."""
        command = ConfigureQueue(queue, to_settings(settings))
        try:
            return public_info(self._execute(command))
        except RequestError as error:
            raise with_public_names(error) from None

    def pause(self, queue: str) -> QueueDescription:
        """Pauses delivery: pulls get nothing until `resume`, also after a restart.

        Pushes go on, and so do the claims that are held.
        """
        return self.configure(queue, paused=True)

    def resume(self, queue: str) -> QueueDescription:
        """Resumes delivery; pulls that wait are served."""
        return self.configure(queue, paused=False)

    def remove(self, queue: str, *, force: bool = False) -> None:
        """Deletes a queue with all its messages; pulls that wait on it fail with QueueDeleted.

        Raises QueueInUse, without `force`, if other queues send their dead letters to it.
        """
        self._execute(DeleteQueue(queue, force))

    def describe(self, queue: str) -> QueueDescription:
        """Returns a queue's settings and dates."""
        return public_info(self._execute(DescribeQueue(queue)))

    def push(
        self,
        queue: str,
        body: bytes | str,
        *,
        delay: Seconds | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> PushReply:
        """Adds a message; it is durable when this returns.

        `delay` and `ttl` are seconds. A `dedup_id` that was used within five minutes adds nothing.
        Raises QueueFull, MessageTooLarge and StoreFull.
        """
        # The fast path of `make_push` for the most common push.
        if delay is None and ttl is None and type(body) is bytes:
            command = Push(queue, body, None, priority, None, dedup_id, group, attributes)
        else:
            command = make_push(queue, body, delay, priority, ttl, dedup_id, group, attributes)
        return self._execute(command)

    def pull(
        self,
        queue: str,
        *,
        wait: Seconds | None = None,
        visibility_timeout: Seconds | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> Claim | None:
        """Claims the next message, waiting up to `wait` seconds for one.

        Raises InFlightLimit, QueueDeleted while it waits, and AttemptLapsed for an `attempt_id`
        whose claims have ended.
        """
        if wait is None and visibility_timeout is None:
            command = Pull(queue, 1, None, None, attempt_id, holder)
        else:
            command = make_pull(queue, 1, wait, visibility_timeout, attempt_id, holder)
        claims = self._execute(command)
        return claims[0] if claims else None

    def pull_many(
        self,
        queue: str,
        limit: int = 10,
        *,
        wait: Seconds | None = None,
        visibility_timeout: Seconds | None = None,
        attempt_id: str | None = None,
        holder: str | None = None,
    ) -> List[Claim]:
        """Claims up to `limit` messages, waiting up to `wait` seconds for the first; as `pull`.

        Through a server, a pull with an `attempt_id` gives 2,000 messages or 8 MiB at most.
        """
        return self._execute(make_pull(queue, limit, wait, visibility_timeout, attempt_id, holder))

    def extend(self, claim: AnyClaim, duration: Seconds) -> int:
        """Holds a claim for `duration` seconds from now; returns its new `deadline_ms`.

        Raises StaleReceipt if the claim has ended.
        """
        return self._execute(Extend(*claimed(claim), to_ms("duration", duration)))

    def release(self, claim: AnyClaim, *, delay: Seconds = 0) -> None:
        """Returns a message to its place in the queue, at once or after `delay` seconds.

        Raises StaleReceipt if the claim has ended.
        """
        self._execute(Release(*claimed(claim), to_ms("delay", delay)))

    def delete(self, claim: AnyClaim) -> bool:
        """Deletes a claimed message; False if it was gone already.

        Raises StaleReceipt if the claim has ended.
        """
        if type(claim) is Claim:
            return self._execute(Delete(claim.queue, claim.proof))
        return self._execute(Delete(*claimed(claim)))

    def push_many(
        self,
        queue: str,
        bodies: Iterable[bytes | str | Mapping[str, Any]],
        *,
        delay: Seconds | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
        dedup_id: str | None = None,
        group: str | None = None,
        attributes: Attributes | None = None,
    ) -> Sequence[PushReply]:
        """Pushes several messages in one append; returns the reply to each.

        An item is a body, or a dict of `body` and options of its own, which replace those given
        for all; a `dedup_id` can only be an item's own. Raises BatchRefused if some are refused:
        the others are pushed, and its `results` has the reply of each, or the error.
        """
        command = make_push_many(queue, bodies, delay, priority, ttl, dedup_id, group, attributes)
        return check_results(self._execute(command))

    def delete_many(self, claims: Iterable[AnyClaim]) -> Sequence[bool]:
        """Deletes several claimed messages; returns for each whether it was still there.

        Raises BatchRefused if some are refused: the others are deleted, and its `results` has the
        reply of each, or the error.
        """
        return check_results(self._execute(make_deletes(claims)))

    def consume(
        self,
        queue: str,
        *,
        visibility_timeout: Seconds | None = None,
        wait: Seconds = 1.0,
        idle: Seconds | None = None,
        max_hold: Seconds = 43_200.0,
        backoff: Seconds = 1.0,
        max_backoff: Seconds = 300.0,
        holder: str | None = None,
    ) -> Consumer:
        """Makes a loop over the queue's messages: a claim is extended while the loop's body runs.

        The next iteration deletes the current claim's message. Leaving the loop releases it: at
        once, or after an exception with a delay of `backoff` seconds, doubled at each further
        failure of the message up to `max_backoff`. The loop ends by `stop()`, within `wait`
        seconds, or after `idle` seconds without a message. No claim is held for longer than
        `max_hold` seconds.
        """
        return Consumer(
            self,
            read_options(
                queue, visibility_timeout, wait, idle, max_hold, backoff, max_backoff, holder
            ),
        )

    def peek(self, queue: str, limit: int = 1, *, state: State = "visible") -> List[Message]:
        """Reads messages that are `visible`, `delayed` or `in_flight`, without claiming them."""
        return self._execute(Peek(queue, limit, state))

    def stats(self, queue: str) -> QueueStatistics:
        """Counts a queue's messages by state; also the age of the oldest."""
        return public_stats(self._execute(Stats(queue)))

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

    def history(self, message_id: str) -> List[HistoryEvent]:
        """Returns the events of a message that the journal still has.

        Raises MessageNotFound, and UnsupportedOperation if the backend keeps no history.
        """
        return self._execute(History(message_id))

    def list(self, prefix: str = "", *, after: str = "", limit: int = 1_000) -> List[str]:
        """Returns names in alphabetical order: those with this prefix that follow `after`."""
        return self._execute(ListQueues(prefix, after, limit))

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
