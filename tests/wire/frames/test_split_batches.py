"""Large batches and bulk pushes, cut into parts: the same items, faults and answers as whole."""

from functools import partial
from typing import Any

import msgspec
import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.long_commands import steps_of
from penstock.backends.loop import each_by
from penstock.errors import InvalidField, JournalError, ProtocolError, QueueNotFound, StoreFull
from penstock.service import (
    BATCH_ITEMS_MAX,
    PART_BYTES_MAX,
    PART_ITEMS_MAX,
    PLAIN_PART_ITEMS_MAX,
    Batch,
    BatchItem,
    Delete,
    NumberedReplies,
    Pull,
    Push,
    PushMany,
    PushReply,
)
from penstock.wire.frames.bodies import (
    DECODE_REPLY,
    encode_command,
    encode_reply,
)
from penstock.wire.frames.bulk import decode_bulk_reply
from penstock.wire.frames.frames import BATCH, BULK_PUSH, FRAME_BYTES_MAX, HEADER
from penstock.wire.frames.split_batches import (
    long_answer,
    parts_of,
    pulls_one,
)

BAD_ROWS: list[Any] = [None] * 899 + [{"a": 5}]


def framed(command):
    """The kind and the body of a command's frame."""
    frame = encode_command(7, command)
    return frame[4], frame[HEADER.size :]


def cut(command):
    return list(parts_of(*framed(command)) or ())


ROW_KINDS = {
    "dedup_ids": lambda n: str(n) if n % 5 else None,
    "delays_ms": lambda n: n % 7 or None,
    "priorities": lambda n: n % 3 or None,
    "ttls_ms": lambda n: 1_000 + n if n % 2 else None,
    "groups": lambda n: f"g{n % 11}" if n % 4 else None,
    "each_attributes": lambda n: {f"a{m}": str(n) for m in range(n % 4)} if n % 6 else None,
}


@pytest.mark.parametrize("columns", [(name,) for name in ROW_KINDS] + [tuple(ROW_KINDS), ()])
def test_the_parts_of_a_bulk_push_are_its_pushes_in_order(columns):
    bodies = [b"x" * (number % 9) for number in range(5_001)]
    rows: dict[str, Any] = {
        name: [ROW_KINDS[name](number) for number in range(5_001)] for name in columns
    }
    bulk = PushMany("q", bodies, group=None if not columns else "g", **rows)
    parts = cut(bulk)
    most = PART_ITEMS_MAX if columns else PLAIN_PART_ITEMS_MAX
    assert max(len(part.bodies) for part in parts) == most
    assert [push for part in parts for push in part.pushes()] == bulk.pushes()


def test_the_parts_of_a_batch_are_its_items_in_order():
    items: list[BatchItem] = [
        Push("q", b"%d" % n) if n % 2 else Delete("q", str(n)) for n in range(1_001)
    ]
    parts = cut(Batch(items))
    assert [item for part in parts for item in part.items] == items
    assert max(len(part.items) for part in parts) == PART_ITEMS_MAX


def test_a_part_has_no_more_bytes_than_it_may_unless_it_is_one_item():
    large = b"x" * (PART_BYTES_MAX // 2)
    sizes = [[len(body) for body in part.bodies] for part in cut(PushMany("q", [large] * 5))]
    assert sizes == [[len(large)] * 2, [len(large)] * 2, [len(large)]]
    huge = b"x" * (PART_BYTES_MAX + 1)
    assert [len(part.items) for part in cut(Batch([Push("q", huge)] * 3))] == [1, 1, 1]


def test_a_small_frame_is_not_split():
    assert parts_of(*framed(Push("q", b"x" * 100_000))) is None
    assert parts_of(*framed(Batch([Push("q", b"x" * 100)] * PART_ITEMS_MAX))) is None
    assert parts_of(*framed(PushMany("q", [b"x"] * PART_ITEMS_MAX, group="g"))) is None
    assert parts_of(*framed(PushMany("q", [b"x"] * PART_ITEMS_MAX))) is None


def test_too_many_items_are_refused_before_any_is_decoded():
    body = msgspec.msgpack.encode([16, [[1, "q", b""]] * (BATCH_ITEMS_MAX + 1)])
    with pytest.raises(InvalidField, match=r"items: .*10000"):
        list(parts_of(BATCH, body) or ())


def divided(engine, command):
    steps = steps_of(engine, command)
    assert steps is not None
    return steps


def answered(frame, replies):
    """The frame that answers a long request, and what was executed, if a service replies so."""
    kind, body = frame
    engine = Engine()
    decoding = long_answer(kind, 7, body, FRAME_BYTES_MAX)
    assert decoding is not None
    steps = each_by(decoding, partial(divided, engine), next(decoding))
    executed = []
    reply = None
    try:
        step = next(steps)
        while True:
            if step is None:
                step = steps.send(None)
                continue
            executed.append(step)
            reply = replies(step)
            step = steps.throw(reply) if isinstance(reply, Exception) else steps.send(reply)
    except StopIteration as stop:
        return stop.value, executed


def test_the_answer_to_parts_of_a_batch_is_that_to_the_whole():
    items: list[BatchItem] = [Push("q", b"x", dedup_id=str(n)) for n in range(1_000)]
    missing = QueueNotFound("queue: there is none")

    def replies(batch):
        numbers = [int(item.dedup_id) for item in batch.items]
        return [missing if n % 3 else PushReply(f"id-{n}", n, False) for n in numbers]

    frame, executed = answered(framed(Batch(items)), replies)
    assert frame == encode_reply(7, replies(Batch(items)))
    assert [len(part.items) for part in executed] == [PART_ITEMS_MAX] * 5


@pytest.mark.parametrize("step", [0, 1])
def test_the_answer_to_parts_of_a_bulk_push_is_that_to_the_whole(step):
    """Also if other pushes were executed between the parts, so that numbers are left out."""
    bulk = PushMany("q", [b"x"] * 1_000, group="g")
    numbers = [range(500 + n * (200 + step), 700 + n * (200 + step)) for n in range(5)]
    given = iter(numbers)
    frame, _ = answered(framed(bulk), lambda _: NumberedReplies("id-", next(given)))
    whole = [reply for each in numbers for reply in NumberedReplies("id-", each)]
    assert decode_bulk_reply(frame[HEADER.size :]) == whole


@pytest.mark.parametrize("kind", [BATCH, BULK_PUSH])
def test_a_store_that_becomes_full_refuses_the_items_from_there_on(kind):
    pushes: list[BatchItem] = [Push("q", b"x", group="g")] * 700
    command = Batch(pushes) if kind == BATCH else PushMany("q", [b"x"] * 700, group="g")
    full = StoreFull("journal: no room")
    replies = [[PushReply("a", 1, False)] * 200, [PushReply("a", 1, False)] * 200, full]
    given = iter(replies)
    frame, executed = answered(framed(command), lambda _: next(given))
    decode = DECODE_REPLY[Batch] if kind == BATCH else decode_bulk_reply
    found = decode(frame[HEADER.size :])
    assert len(executed) == 3
    assert [type(each) for each in found] == [PushReply] * 400 + [StoreFull] * 300


@pytest.mark.parametrize("error", [StoreFull("no room"), JournalError("stopped")])
def test_the_first_part_refused_is_the_request_refused(error):
    with pytest.raises(type(error)):
        answered(framed(Batch([Push("q", b"x")] * 700)), lambda _: error)


def test_a_journal_that_fails_in_a_later_part_fails_the_request():
    given = iter([[PushReply("a", 1, False)] * 200, JournalError("stopped")])
    with pytest.raises(JournalError):
        answered(framed(Batch([Push("q", b"x")] * 700)), lambda _: next(given))


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (BATCH, [16, [*[[1, "q", b"x"]] * 900, [1, b"\xff", b"x"]]], None),
        (BATCH, msgspec.msgpack.encode([16, [[1, "q", b"x"]] * 900])[:-1], ProtocolError),
        (BULK_PUSH, PushMany("q", [b"x"] * 900, each_attributes=BAD_ROWS), None),
    ],
)
def test_a_fault_in_the_last_part_is_found_before_the_first_is_executed(kind, body, error):
    if isinstance(body, PushMany):
        body = framed(body)[1]
    elif isinstance(body, list):
        body = msgspec.msgpack.encode(body)
    executed = []
    if error is None and kind == BATCH:
        # An item of the wrong shape is refused alone, as in a small batch.
        frame, executed = answered((kind, body), lambda b: [True] * len(b.items))
        assert [type(each) for each in DECODE_REPLY[Batch](frame[HEADER.size :])] == [
            *[bool] * 900,
            InvalidField,
        ]
        return
    with pytest.raises(error or InvalidField):
        answered((kind, body), executed.append)
    assert executed == []


@pytest.mark.parametrize("length", [1, 31, 32, 80, 255])
@pytest.mark.parametrize("limit", [1, 2, 127, 128, 10_000])
def test_a_pull_of_one_is_recognised_by_its_bytes(length, limit):
    body = framed(Pull("q" * length, limit, visibility_ms=1, wait_ms=1))[1]
    assert pulls_one(body) == pulls_one(memoryview(body)) == (limit == 1)


def test_the_bytes_of_a_pull_may_be_cut_anywhere():
    body = framed(Pull("orders", 2))[1]
    # Without a limit it is 1; the decoder decides about what is no pull.
    assert [pulls_one(body[:size]) for size in range(12)] == [False] * 4 + [True] * 6 + [False] * 2
    assert pulls_one(msgspec.msgpack.encode([2, "orders"]))
    assert not pulls_one(msgspec.msgpack.encode([2, None, 1]))
