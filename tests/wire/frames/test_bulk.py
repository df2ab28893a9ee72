"""Bulk pushes: there and back, and what does not add up."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidField, PenstockError, ProtocolError, QueueFull
from penstock.service import BATCH_ITEMS_MAX, NumberedReplies, Push, PushMany, PushReply
from penstock.wire.frames.bodies import BULK_MIN, as_sent, decode_command, encode_command
from penstock.wire.frames.bulk import (
    decode_bulk,
    decode_bulk_reply,
    encode_bulk,
    encode_bulk_reply,
)
from penstock.wire.frames.frames import BATCH, HEADER_BYTES

TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
ATTRIBUTES = st.dictionaries(TEXTS, TEXTS | st.binary(max_size=5), max_size=3)


def columns(count, values):
    return st.none() | st.lists(st.none() | values, min_size=count, max_size=count)


@st.composite
def bulks(draw):
    bodies = draw(st.lists(st.binary(max_size=30), max_size=8))
    count = len(bodies)
    return PushMany(
        queue=draw(TEXTS),
        bodies=bodies,
        delay_ms=draw(st.none() | st.integers(0, 99)),
        priority=draw(st.integers(0, 9)),
        ttl_ms=draw(st.none() | st.integers(1, 99)),
        group=draw(st.none() | TEXTS),
        attributes=draw(st.none() | ATTRIBUTES),
        delays_ms=draw(columns(count, st.integers(0, 99))),
        priorities=draw(columns(count, st.integers(0, 9))),
        ttls_ms=draw(columns(count, st.integers(1, 99))),
        groups=draw(columns(count, TEXTS)),
        dedup_ids=draw(columns(count, TEXTS)),
        each_attributes=draw(columns(count, ATTRIBUTES)),
    )


def chosen(column, place, shared):
    """A row's own value, or the one all share."""
    own = None if column is None else column[place]
    return shared if own is None else own


def meant(bulk):
    return [
        Push(
            bulk.queue,
            body,
            chosen(bulk.delays_ms, place, bulk.delay_ms),
            chosen(bulk.priorities, place, bulk.priority),
            chosen(bulk.ttls_ms, place, bulk.ttl_ms),
            chosen(bulk.dedup_ids, place, None),
            chosen(bulk.groups, place, bulk.group),
            chosen(bulk.each_attributes, place, bulk.attributes),
        )
        for place, body in enumerate(bulk.bodies)
    ]


@given(bulks())
def test_a_bulk_push_is_decoded_as_its_pushes(bulk):
    found = decode_bulk(encode_bulk(1, bulk)[HEADER_BYTES:])
    items = found.pushes()
    assert items == meant(bulk)


@given(bulks())
def test_few_pushes_are_sent_as_a_batch_of_the_same_pushes(bulk):
    frame = encode_command(7, as_sent(bulk))
    found: Any = decode_command(BATCH, frame[HEADER_BYTES:])
    assert found.items == meant(bulk)


def test_many_pushes_are_sent_in_columns():
    many = PushMany("orders", [b""] * BULK_MIN)
    assert as_sent(many) is many


def test_few_pushes_with_a_column_of_another_length_are_refused():
    with pytest.raises(InvalidField, match="groups: 2 values for 1 bodies"):
        as_sent(PushMany("orders", [b""], groups=["a", "b"]))


@pytest.mark.parametrize("dedup_ids", [None, ["1", "2"]])
def test_bodies_with_nothing_but_ids_arrive_plain(dedup_ids):
    bulk = PushMany("q", [b"a", b"bc"], dedup_ids=dedup_ids)
    found = decode_bulk(encode_bulk(1, bulk)[HEADER_BYTES:])
    assert found == PushMany("q", [b"a", b"bc"], dedup_ids)
    assert found.is_plain


@pytest.mark.parametrize(
    "option",
    [
        {"dedup_ids": ["1", None]},
        {"dedup_ids": ["1"]},
        {"delay_ms": 0},
        {"priority": 1},
        {"group": "g"},
        {"each_attributes": [None, {"a": "b"}]},
    ],
)
def test_anything_beside_a_body_and_an_id_is_not_plain(option):
    assert not PushMany("q", [b"a", b"bc"], **option).is_plain


REPLIES = st.builds(PushReply, TEXTS, st.integers(0, 2**63), st.booleans()) | st.builds(
    QueueFull, TEXTS
)


@given(st.lists(REPLIES, max_size=8))
def test_each_message_has_its_own_reply_or_error(replies):
    found = decode_bulk_reply(encode_bulk_reply(1, replies)[HEADER_BYTES:])
    assert len(found) == len(replies)
    for one, other in zip(found, replies, strict=True):
        if isinstance(other, PenstockError):
            assert (type(one), str(one)) == (type(other), str(other))
        else:
            assert one == other


@given(st.integers(1, 2**40), st.integers(1, 300))
def test_the_reply_to_a_run_names_each_message(first, count):
    numbers = range(first, first + count)
    start = "b3c1917d-5eb2-8bb0-9000-"
    found = decode_bulk_reply(encode_bulk_reply(1, NumberedReplies(start, numbers))[HEADER_BYTES:])
    assert found == [PushReply(f"{start}{number:012x}", number, False) for number in numbers]


def test_ids_that_share_their_start_take_little_room():
    replies = [PushReply(f"b3c1917d-5eb2-8bb0-9000-{n:012x}", n, False) for n in range(1_000)]
    frame = encode_bulk_reply(1, replies)
    assert len(frame) < 12 * 1_000
    assert decode_bulk_reply(frame[HEADER_BYTES:]) == replies


def test_an_error_that_refused_many_is_sent_once():
    frame = encode_bulk_reply(1, [QueueFull("the same")] * 1_000)
    assert frame.count(b"the same") == 1
    assert len(decode_bulk_reply(frame[HEADER_BYTES:])) == 1_000


@pytest.mark.parametrize(
    ("bulk", "said"),
    [
        (PushMany("q", [b""] * (BATCH_ITEMS_MAX + 1)), "at most 10000"),
        (PushMany("q", [b"a"], groups=["a", "b"]), "groups: 2 values for 1 bodies"),
        (PushMany(queue="q\ud800", bodies=[b"a"]), "cannot be sent"),
        (PushMany("q", ["text"]), "cannot be sent"),  # type: ignore[list-item]
        (PushMany("q", [b"x" * 999]), "a frame takes at most 900"),
    ],
)
def test_a_command_that_cannot_be_sent_is_refused_before_sending(bulk, said):
    with pytest.raises(InvalidField, match=said):
        encode_bulk(1, bulk, 900)


def made(fields, *sizes, bodies=b""):
    head = msgspec.msgpack.encode(fields)
    lengths = b"".join(struct.pack("<I", size) for size in sizes)
    return struct.pack("<I", len(head)) + head + lengths + bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01\x00",
        b"\xff\xff\xff\xff",
        struct.pack("<I", 1) + b"\xc1",
        made(["q", 2], 1, bodies=b""),
        made(["q", 1], 1, bodies=b""),
        made(["q", 1], 1, bodies=b"ab"),
        made(["q", 2], 2**31, 2**31, bodies=b"ab"),
    ],
)
def test_sizes_that_do_not_add_up_are_the_fault_of_the_peer(body):
    with pytest.raises(ProtocolError, match="the client"):
        decode_bulk(body)


@pytest.mark.parametrize(
    "fields",
    [
        ["q", BATCH_ITEMS_MAX + 1],
        ["q", -1],
        [7, 0],
        ["q", 0, None, "high"],
        ["q", 0, None, 0, None, None, {"a": 7}],
        ["q", 0, None, 0, None, None, {str(n): "" for n in range(65)}],
        ["q", 0, None, 0, None, None, None, [1]],
    ],
)
def test_a_head_of_the_wrong_shape_is_the_fault_of_one_request(fields):
    with pytest.raises(InvalidField):
        decode_bulk(made(fields)).pushes()


@pytest.mark.parametrize(
    "fields",
    [
        [2, "a", b"bc", b"\x00" * 8, [], []],
        [1, "a", b"b", b"\x00" * 7, [], []],
        [3, "a", [], b"", [], [(["why"], [5, 6])]],
        [10**9, "a", [], b"", [], []],
        [0],
    ],
)
def test_a_reply_that_does_not_add_up_is_the_fault_of_the_server(fields):
    with pytest.raises(ProtocolError, match="the server"):
        decode_bulk_reply(msgspec.msgpack.encode(fields))
