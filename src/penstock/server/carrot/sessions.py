"""The requests of the Carrot extension: one function for each opcode.

The functions in `TAKE` have the same parameters: the server, the connection, and the fields of the
request. Their answers are sent with the connection's next write.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.loop import Pending, Steps
from penstock.errors import (
    InvalidField,
    Overloaded,
    PenstockError,
    RequestError,
    StaleReceipt,
)
from penstock.server.carrot.server import (
    HELD_MAX,
    CarrotServer,
    HeldClaim,
    make_create,
    make_push,
)
from penstock.server.stream import ignore_reply
from penstock.service import (
    PLAIN_PART_ITEMS_MAX,
    Batch,
    BatchItem,
    Claim,
    Delete,
    DeleteQueue,
    Extend,
    Pull,
    PushMany,
    Release,
)
from penstock.wire.carrot.session import (
    EXTEND,
    GET,
    PUT,
    PUT_MANY,
    READ_BYTES_MAX,
    READ_ITEMS_MAX,
    SESSION_ACK,
    SESSION_ADD,
    SESSION_NACK,
    SESSION_REMOVE,
    UINT,
    WAIT_BY_QUEUE,
    GivenMessage,
    SessionRequest,
    encode_done,
    encode_given,
    encode_one,
    encode_refused,
    encode_session_answer,
    read_add,
    read_messages,
    read_tags,
)
from penstock.wire.carrot.single import ERROR, SUCCESS

if TYPE_CHECKING:
    from penstock.server.carrot.connection import CarrotConnection

_TAG_MAX: Final = 2**32 - 1
Settle = Callable[[HeldClaim], BatchItem]


def _put(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    name, group = server.name_of(queue)
    try:
        reply = server.submit(make_push(name, group, body))
    except PenstockError as error:
        connection.refuse(number, error)
        return
    except Exception as fault:
        server.give_up(fault)
        return
    if isinstance(reply, Pending):
        finish = partial(_finish_put, connection, number)
        server.defer(connection, reply, finish, partial(connection.refuse, number))
    else:
        connection.send(encode_session_answer(SUCCESS, number, reply.id.encode()))


def _finish_put(connection: "CarrotConnection", number: int, reply: Any) -> None:
    connection.send(encode_session_answer(SUCCESS, number, reply.id.encode()))


def _put_many(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    name, group = server.name_of(queue)
    try:
        parts = read_messages(count, body, PLAIN_PART_ITEMS_MAX)
    except InvalidField as error:
        connection.refuse(number, error)
        return
    first = next(parts)
    finish = partial(_finish_many, server, connection, number)
    refuse = partial(connection.refuse, number)
    if len(first) == count:
        server.execute(connection, PushMany(name, first, group=group), finish, refuse)
    else:
        server.execute_steps(connection, _put_parts(name, group, first, parts), finish, refuse)


def _put_parts(
    name: str, group: str | None, messages: list[bytes], parts: Iterator[list[bytes]]
) -> Steps[Sequence[Any]]:
    """Pushes the messages when all parts of them are cut out of the request."""
    for part in parts:
        yield None
        messages += part
    replies: Sequence[Any] = yield PushMany(name, messages, group=group)
    return replies


def _finish_many(
    server: CarrotServer, connection: "CarrotConnection", number: int, replies: Sequence[Any]
) -> None:
    """Answers several items: SUCCESS, or the status of each and the first one's reason."""
    refused = [each for each in replies if isinstance(each, PenstockError)]
    if refused:
        statuses = [ERROR if isinstance(each, PenstockError) else SUCCESS for each in replies]
        connection.send(encode_refused(number, statuses, server.settle_reason(refused[0])))
    else:
        connection.send(encode_session_answer(SUCCESS, number))


# Reading.


def _get(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    held = connection.held
    count = min(count, READ_ITEMS_MAX)
    if len(held) + count > HELD_MAX and not _has_room(server, connection, count):
        reason = (
            f"{len(held)} messages are unacknowledged on this connection, at most {HELD_MAX}; "
            "acknowledge some first"
        )
        connection.refuse(number, Overloaded(reason))
        return
    if len(body) != 4:
        _ack_and_get(server, connection, count, number, queue, body)
        return
    (wait_ms,) = UINT.unpack(body)
    pull = _pull(server.name_of(queue)[0], count, wait_ms, connection.holder)
    try:
        reply = server.submit(pull)
    except PenstockError as error:
        connection.refuse(number, error)
        return
    except Exception as fault:
        server.give_up(fault)
        return
    if isinstance(reply, Pending):
        _wait(server, connection, number, reply)
    else:
        _give(connection, number, reply)


def _pull(name: str, count: int, wait_ms: int, holder: str) -> Pull:
    wait = None if wait_ms == WAIT_BY_QUEUE else wait_ms
    if count <= 1:
        return Pull(name, count, None, wait, None, holder)
    return Pull(name, count, None, wait, None, holder, READ_BYTES_MAX)


def _wait(
    server: CarrotServer, connection: "CarrotConnection", number: int, pending: Pending
) -> None:
    if pending.waits and len(connection.waits) >= server.limits.waits_max:
        pending.then(ignore_reply)
        pending.cancel()
        reason = f"{len(connection.waits)} reads wait on this connection; open another one"
        connection.refuse(number, Overloaded(reason))
        return
    finish = partial(_give, connection, number)
    refuse = partial(connection.refuse, number)
    server.defer(connection, pending, finish, refuse, is_pull=True)


def _give(connection: "CarrotConnection", number: int, claims: list[Claim]) -> None:
    """Sends the messages, and holds their claims until they are acknowledged."""
    if len(claims) == 1:
        # A fast path for the most common read; it equals the code below.
        (claim,) = claims
        tag = connection.last_tag + 1
        if tag > _TAG_MAX:
            tag = _first_free(connection)
        connection.last_tag = tag
        connection.held[tag] = HeldClaim(claim.queue, claim.proof, claim.deadline_ms)
        connection.send(encode_one(number, tag, claim.receives, claim.body))
        return
    given = []
    for claim in claims:
        tag = connection.last_tag = _first_free(connection)
        connection.held[tag] = HeldClaim(claim.queue, claim.proof, claim.deadline_ms)
        given.append(GivenMessage(tag, claim.receives, claim.body))
    connection.send(encode_given(number, given))


def _first_free(connection: "CarrotConnection") -> int:
    """The next tag that no claim has; tags begin with 1."""
    tag = connection.last_tag
    while True:
        tag = tag % _TAG_MAX + 1
        if tag not in connection.held:
            return tag


def _has_room(server: CarrotServer, connection: "CarrotConnection", count: int) -> bool:
    """Drops the claims that have run out; returns whether `count` more are allowed then."""
    now_ms = server.service.now_ms()
    held = connection.held
    for tag in [tag for tag, claim in held.items() if claim.deadline_ms <= now_ms]:
        del held[tag]
    return len(held) + count <= HELD_MAX


def _ack_and_get(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    """A GET that acknowledges first; its acknowledgements are durable when it is answered."""
    try:
        wait_ms, *tags = read_tags(body)
    except (InvalidField, ValueError):
        connection.refuse(number, InvalidField("GET: expected a wait time, and then tags"))
        return
    taken = _take_held(connection, tags)
    if isinstance(taken, InvalidField):
        connection.refuse(number, taken)
        return
    pull = _pull(server.name_of(queue)[0], count, wait_ms, connection.holder)
    steps = _acked_then_pulled(server, taken, pull)
    server.execute_steps(
        connection,
        steps,
        partial(_finish_ack_and_get, server, connection, number),
        partial(_refuse_settled, server, connection, number, dict(zip(tags, taken, strict=True))),
        is_pull=True,
    )


def _acked_then_pulled(
    server: CarrotServer, taken: list[HeldClaim], pull: Pull
) -> Steps[tuple[Sequence[Any], Any]]:
    try:
        replies: Sequence[Any] = yield Batch([*map(_delete, taken)])
    except GeneratorExit:
        # The connection broke amid the deletes: those that were not made are released.
        server.release(taken)
        raise
    if any(isinstance(each, PenstockError) for each in replies):
        return replies, []
    return replies, (yield pull)


def _finish_ack_and_get(
    server: CarrotServer,
    connection: "CarrotConnection",
    number: int,
    reply: tuple[Sequence[Any], list[Claim]],
) -> None:
    replies, claims = reply
    if any(isinstance(each, PenstockError) for each in replies):
        _finish_many(server, connection, number, replies)
    else:
        _give(connection, number, claims)


# Acknowledging.


def _take_held(
    connection: "CarrotConnection", tags: Sequence[int]
) -> list[HeldClaim] | InvalidField:
    """Takes the claims with these tags from those held; if one is unknown, it takes none."""
    held = connection.held
    unknown = next((tag for tag in tags if tag not in held), None)
    if unknown is not None:
        return InvalidField(f"tag {unknown}: no message of this connection waits for an answer")
    if len(set(tags)) != len(tags):
        return InvalidField("tags: one of them is given twice")
    return [held.pop(tag) for tag in tags]


def _refuse_settled(
    server: CarrotServer,
    connection: "CarrotConnection",
    number: int,
    taken: dict[int, HeldClaim],
    error: PenstockError,
) -> None:
    """Refuses a whole request; its tags may be used again, unless their claims have ended."""
    if not isinstance(error, RequestError):
        connection.held.update(taken)
    connection.send(encode_session_answer(ERROR, number, server.settle_reason(error)))


def _end_claims(
    server: CarrotServer,
    connection: "CarrotConnection",
    number: int,
    tags: Sequence[int],
    command: Settle,
) -> None:
    taken = _take_held(connection, tags)
    if isinstance(taken, InvalidField):
        connection.refuse(number, taken)
        return
    by_tag = dict(zip(tags, taken, strict=True))
    refuse = partial(_refuse_settled, server, connection, number, by_tag)
    if len(taken) == 1:
        finish = partial(_finish_one, connection, number)
        server.execute(connection, command(taken[0]), finish, refuse)
    else:
        finish = partial(_finish_settled, server, connection, number, by_tag)
        server.execute(connection, Batch(list(map(command, taken))), finish, refuse)


def _finish_settled(
    server: CarrotServer,
    connection: "CarrotConnection",
    number: int,
    taken: dict[int, HeldClaim],
    replies: Sequence[Any],
) -> None:
    """As `_finish_many`; tags of a part that was refused as a whole may be used again."""
    for (tag, claim), reply in zip(taken.items(), replies, strict=True):
        if isinstance(reply, PenstockError) and not isinstance(reply, RequestError):
            connection.held[tag] = claim
    _finish_many(server, connection, number, replies)


def _finish_one(connection: "CarrotConnection", number: int, reply: Any) -> None:
    connection.send(encode_done(number))


def _delete(claim: HeldClaim) -> BatchItem:
    return Delete(claim.queue, claim.proof)


def _release(claim: HeldClaim) -> BatchItem:
    return Release(claim.queue, claim.proof)


def _ack_or_nack(
    command: Settle,
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    if len(body) != 4 * count or not count:
        reason = f"count: {count}, and {len(body)} bytes of tags; each has 4"
        connection.refuse(number, InvalidField(reason))
        return
    _end_claims(server, connection, number, read_tags(body), command)


def _ack(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    """An ACK, with a fast path for a single tag; it equals `_end_claims`."""
    if count != 1 or len(body) != 4:
        _ack_or_nack(_delete, server, connection, count, number, queue, body)
        return
    (tag,) = UINT.unpack(body)
    claim = connection.held.pop(tag, None)
    if claim is None:
        _end_claims(server, connection, number, [tag], _delete)
        return
    try:
        reply = server.submit(Delete(claim.queue, claim.proof))
    except PenstockError as error:
        _refuse_settled(server, connection, number, {tag: claim}, error)
        return
    except Exception as fault:
        server.give_up(fault)
        return
    if isinstance(reply, Pending):
        refuse = partial(_refuse_settled, server, connection, number, {tag: claim})
        server.defer(connection, reply, partial(_finish_one, connection, number), refuse)
    else:
        connection.send(encode_done(number))


def _extend(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    if len(body) != 4 + 4 * count or not count:
        reason = f"count: {count}, and {len(body)} bytes; expected a time and so many tags"
        connection.refuse(number, InvalidField(reason))
        return
    visibility_ms, *tags = read_tags(body)
    held = connection.held
    unknown = next((tag for tag in tags if tag not in held), None)
    if unknown is not None:
        reason = f"tag {unknown}: no message of this connection waits for an answer"
        connection.refuse(number, InvalidField(reason))
        return
    items = [Extend(held[tag].queue, held[tag].proof, visibility_ms) for tag in tags]
    finish = partial(_finish_extend, server, connection, number, tags)
    refuse = partial(connection.refuse, number)
    server.execute(connection, Batch([*items]), finish, refuse)


def _finish_extend(
    server: CarrotServer,
    connection: "CarrotConnection",
    number: int,
    tags: Sequence[int],
    replies: Sequence[Any],
) -> None:
    held = connection.held
    for tag, reply in zip(tags, replies, strict=True):
        claim = held.get(tag)
        if claim is None:
            continue
        if isinstance(reply, StaleReceipt):
            del held[tag]
        elif not isinstance(reply, PenstockError):
            held[tag] = claim._replace(deadline_ms=reply)
    _finish_many(server, connection, number, replies)


# Queues.


def _add(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    try:
        visibility_ms, messages_max = read_add(body)
    except InvalidField as error:
        connection.refuse(number, error)
        return
    settings: dict[str, Any] = {}
    if visibility_ms:
        settings["visibility_ms"] = visibility_ms
    if messages_max:
        settings["messages_max"] = messages_max

    command = make_create(server.name_of(queue)[0], settings)
    finish = partial(_finish_one, connection, number)
    server.execute(connection, command, finish, partial(connection.refuse, number))


def _remove(
    server: CarrotServer,
    connection: "CarrotConnection",
    count: int,
    number: int,
    queue: bytes,
    body: bytes,
) -> None:
    name = server.name_of(queue)[0]

    def finish(reply: Any) -> None:
        _finish_one(connection, number, reply)
        server.cancel_reads(name)

    server.execute(connection, DeleteQueue(name), finish, partial(connection.refuse, number))


TAKE: Final[dict[int, Callable[..., None]]] = {
    PUT: _put,
    PUT_MANY: _put_many,
    GET: _get,
    SESSION_ACK: _ack,
    SESSION_NACK: partial(_ack_or_nack, _release),
    EXTEND: _extend,
    SESSION_ADD: _add,
    SESSION_REMOVE: _remove,
}


def execute_request(connection: "CarrotConnection", request: SessionRequest) -> None:
    """Executes one request of a session."""
    opcode, count, number, queue, body = request
    server = connection.server
    server.requests_seen += 1
    server.requests[opcode] += 1
    TAKE[opcode](server, connection, count, number, queue, body)
