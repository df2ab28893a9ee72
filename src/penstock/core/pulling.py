"""Pulling: which messages a pull claims, chosen and taken in one step.

A pull is validated, then looked up by its attempt id, then takes messages out of the queue's order
and claims them. Choosing a message means taking it out of the order, so `pull` decides and applies
at once; `ShardState.apply` of the events that it adds gives the same state.

A pull from a paused queue gets nothing but the claims of an earlier pull with its attempt id.
`pull_chosen` is not affected: whoever names messages works on the queue, and is not a consumer.

A caller that must read a message's content before it answers passes `load`. It is called
with each message before that message is claimed. If it raises, that message goes back to its place
unclaimed, and the pull ends: with the messages claimed before it, or by raising if there are none.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.core.delivery import VISIBLE, Delivery, size_bytes
from penstock.core.events import AnyEvent, Claimed, Expired
from penstock.core.visible import FifoOrder
from penstock.errors import AttemptLapsed, InFlightLimit, PenstockError
from penstock.service import (
    PULL_LIMIT_MAX,
    VISIBILITY_MS_MAX,
    Pull,
    PullIds,
    check_holder,
    check_id,
    check_number,
)

if TYPE_CHECKING:
    from penstock.core.queue import QueueState
    from penstock.core.shard import ShardState

Load = Callable[[Delivery], object]
# A pull that has moved or ended this many messages returns the claims it has so far.
SKIPPED_MAX: Final = 1_000


def pull(
    shard: "ShardState",
    command: Pull,
    now_ms: int,
    events: list[AnyEvent],
    load: Load | None = None,
) -> list[Delivery]:
    """Claims the next messages; or returns those an earlier pull with this attempt id claimed.

    Adds the events to `events`. Raises RequestError, or what `load` raised; then no message was
    claimed, and the events are of messages that were moved or ended before.
    """
    try:
        queue = shard.names[command.queue]
    except (KeyError, TypeError):
        queue = shard.queue(command.queue)
    settings = queue.settings
    limit = command.limit
    visibility_ms = command.visibility_ms
    if visibility_ms is None:
        visibility_ms = settings.visibility_ms
    else:
        check_number("visibility_ms", visibility_ms, 0, VISIBILITY_MS_MAX)
    if type(limit) is not int or limit != 1:
        check_number("limit", limit, 1, PULL_LIMIT_MAX)
    check_holder(command.holder)
    if command.attempt_id is not None:
        earlier = _claims_of_attempt(queue, command.attempt_id, now_ms)
        if earlier is not None:
            return earlier
    if settings.paused:
        return []
    if settings.in_flight_max is not None:
        limit = min(limit, _room_in_flight(queue, settings.in_flight_max))
    deadline_ms = now_ms + visibility_ms
    # While many messages are due, some that have expired may not be settled yet.
    checks_age = shard.alarm.next_ms <= now_ms and queue.may_have_expired(now_ms)
    if limit == 1 and not checks_age and queue.takes_first:
        return _take_one(queue, command, now_ms, deadline_ms, events, load)
    if limit > 1 and not checks_age and _is_plain(queue, command):
        claims, is_done = _take_plain(queue, command, limit, now_ms, deadline_ms, events, load)
        if is_done:
            return claims
    else:
        claims = []
    return _claim_each(
        shard, queue, command, limit, now_ms, deadline_ms, events, load, claims, checks_age
    )


def pull_chosen(
    shard: "ShardState",
    command: PullIds,
    numbers: list[int],
    now_ms: int,
    events: list[AnyEvent],
) -> list[Delivery]:
    """Claims those of these messages that can be claimed now; adds the events as `pull` does."""
    queue = shard.queue(command.queue)
    visibility_ms = command.visibility_ms
    if visibility_ms is None:
        visibility_ms = queue.settings.visibility_ms
    check_number("visibility_ms", visibility_ms, 0, VISIBILITY_MS_MAX)
    check_holder(command.holder)
    limit = len(numbers)
    if queue.settings.in_flight_max is not None:
        limit = min(limit, _room_in_flight(queue, queue.settings.in_flight_max))
    claims: list[Delivery] = []
    for number in numbers:
        delivery = queue.deliveries.get(number)
        if delivery is None or delivery.state != VISIBLE or queue.is_expired(delivery, now_ms):
            continue
        queue.order.begin_pull()
        if isinstance(queue.order, FifoOrder) and not queue.order.is_next(delivery):
            continue
        if len(claims) == limit:
            break
        event = Claimed(
            now_ms,
            queue.number,
            number,
            delivery.epoch + 1,
            now_ms + visibility_ms,
            None,
            command.holder,
        )
        shard.apply(event)
        events.append(event)
        claims.append(delivery)
    return claims


def _claims_of_attempt(queue: "QueueState", attempt_id: str, now_ms: int) -> list[Delivery] | None:
    earlier = queue.attempt(check_id("attempt_id", attempt_id), now_ms)
    if earlier == []:
        raise AttemptLapsed(
            f"attempt_id: a claim given to {attempt_id!r} has ended; pull with a new attempt id"
        )
    return earlier


def _room_in_flight(queue: "QueueState", most: int) -> int:
    if queue.in_flight >= most:
        raise InFlightLimit(
            f"queue: {queue.name!r} has {queue.in_flight} messages in flight "
            f"(max_in_flight={most}); delete or release some first"
        )
    return most - queue.in_flight


def _is_plain(queue: "QueueState", command: Pull) -> bool:
    """Whether messages can be claimed without examining each one first."""
    return not (
        queue.settings.fifo
        or command.attempt_id is not None
        or queue.settings.max_receives is not None
        or (command.bytes_max is not None and queue.stored_bytes > command.bytes_max)
    )


def _take_one(
    queue: "QueueState",
    command: Pull,
    now_ms: int,
    deadline_ms: int,
    events: list[AnyEvent],
    load: Load | None,
) -> list[Delivery]:
    """Claims one message where the first can be taken: `_take` for the usual pull."""
    delivery = queue.order.take(queue.in_flight)
    if delivery is None:
        return []
    if load is not None:
        try:
            load(delivery)
        except BaseException:
            queue.order.come_back(delivery)
            raise
    event = Claimed(
        now_ms,
        queue.number,
        delivery.number,
        delivery.epoch + 1,
        deadline_ms,
        command.attempt_id,
        command.holder,
    )
    queue.claim_taken(delivery, event)
    events.append(event)
    return [delivery]


def _take_plain(
    queue: "QueueState",
    command: Pull,
    limit: int,
    now_ms: int,
    deadline_ms: int,
    events: list[AnyEvent],
    load: Load | None,
) -> tuple[list[Delivery], bool]:
    """Claims many at once where only arrival decides the order: the fast path of `_take`.

    Returns the claims, and whether the pull ends with them because a message could not be loaded.
    """
    order = queue.order
    assert not isinstance(order, FifoOrder)
    taken = order.take_plain(limit)
    loaded = 0
    if load is not None:
        try:
            for delivery in taken:
                load(delivery)
                loaded += 1
        except BaseException as error:
            order.put_back_plain(taken[loaded:])
            del taken[loaded:]
            if not taken or not isinstance(error, PenstockError):
                order.put_back_plain(taken)
                raise
            events += queue.claim_all_taken(taken, now_ms, deadline_ms, command.holder)
            return taken, True
    events += queue.claim_all_taken(taken, now_ms, deadline_ms, command.holder)
    return taken, False


def _claim_each(
    shard: "ShardState",
    queue: "QueueState",
    command: Pull,
    limit: int,
    now_ms: int,
    deadline_ms: int,
    events: list[AnyEvent],
    load: Load | None,
    claims: list[Delivery],
    checks_age: bool,
) -> list[Delivery]:
    """Claims messages one by one until there are `limit` claims, or no message is left."""
    order = queue.order
    max_receives = queue.settings.max_receives
    take: Callable[[int], Delivery | None] = order.take
    priority_age_ms = queue.settings.priority_age_ms
    if priority_age_ms is not None and not isinstance(order, FifoOrder):
        take = partial(order.take_by_age, now_ms - priority_age_ms)
    room_bytes = None if command.limit == 1 else command.bytes_max
    order.begin_pull()
    while len(claims) < limit and len(events) < limit + SKIPPED_MAX:
        delivery = take(queue.in_flight)
        if delivery is None:
            break
        if checks_age and queue.is_expired(delivery, now_ms):
            events.append(Expired(now_ms, queue.number, delivery.number))
            shard.apply(events[-1])
            continue
        # A message may be over its limit here if the limit was lowered while it waited.
        if max_receives is not None and queue.is_dead(delivery):
            moved = shard.decide_dead_letter(delivery, now_ms)
            if moved is not None:
                shard.apply(moved)
                events.append(moved)
                continue
        if room_bytes is not None:
            room_bytes -= size_bytes(delivery)
            if room_bytes < 0 and claims:
                order.come_back(delivery)
                break
        if load is not None:
            try:
                load(delivery)
            except BaseException as error:
                order.come_back(delivery)
                if claims and isinstance(error, PenstockError):
                    break
                raise
        event = Claimed(
            now_ms,
            queue.number,
            delivery.number,
            delivery.epoch + 1,
            deadline_ms,
            command.attempt_id,
            command.holder,
        )
        queue.claim_taken(delivery, event)
        events.append(event)
        claims.append(delivery)
    return claims
