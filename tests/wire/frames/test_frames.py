"""Frames: golden bytes both ways, any chunking, and malformed input."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.core.receipts import Receipts, Ticket
from penstock.errors import (
    InvalidField,
    InvalidReceipt,
    MessageTooLarge,
    PenstockError,
    ProtocolError,
    QueueFull,
    RequestError,
    StaleReceipt,
)
from penstock.service import (
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
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueCounts,
    QueueInfo,
    QueueSettings,
    QueueStats,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
)
from penstock.wire.frames.bodies import (
    DECODE_REPLY,
    BadItem,
    decode_command,
    encode_claims,
    encode_command,
    encode_reply,
)
from penstock.wire.frames.bulk import (
    decode_bulk,
    decode_bulk_reply,
    encode_bulk,
    encode_bulk_reply,
)
from penstock.wire.frames.frames import (
    BULK_PUSH,
    CANCEL,
    ERROR,
    GOODBYE,
    HEADER,
    HEADER_BYTES,
    HELLO,
    HELLO_LIMITS,
    PRELUDE,
    PRELUDE_BYTES,
    PUSH,
    REPLY,
    SMALL_BYTES,
    STATUS,
    FrameDecoder,
    Hello,
    Welcome,
    client_limits,
    decode_answer,
    decode_hello,
    decode_welcome,
    encode_error,
    encode_goodbye,
    encode_hello,
    encode_welcome,
    error_from,
    error_words,
    pack,
    refusal,
    server_limits,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "frames"
# In order of age: fields were added at the end of commands, which the version allows.
FILES = (
    "version-1.txt",
    "version-1-added-fields.txt",
    "version-1-peek.txt",
    "version-1-priority-age.txt",
    "version-1-counts.txt",
    "version-1-typed-history.txt",
    "version-1-by-id.txt",
    "version-1-paused.txt",
)
ID = "b3c1917d-5eb2-8bb0-9000-000000000001"
RECEIPT = "000000000000000100000000000000010000000000000001e46e2ce1c5b15c95aff55b1dd2e83198"
FIELDS: list[Any] = [ID, "orders", b"hello", {"kind": "test", "raw": b"\xff"}, 9, "eu", "42"]
FIELDS += [1_700_000_000_000, 7, 1, 1_700_000_001_000, "first", {"trace": "1"}]
MESSAGE = Message(*FIELDS)
CLAIM = Claim(*[*FIELDS, RECEIPT, 1, 1_700_000_031_000])
INFO = QueueInfo("orders", QueueSettings(dead_letter="dead", max_receives=5), 1, 2)
FULL_PUSH = Push("orders", b"hello", 5, 9, 60_000, "42", "eu", {"a": "b", "c": b"\x00"}, {"t": "1"})

COMMANDS = {
    "push": Push("orders", b"hello"),
    "push with everything": FULL_PUSH,
    "pull": Pull("orders"),
    "pull with everything": Pull("orders", 10, 30_000, 20_000, "attempt", "worker"),
    "delete": Delete("orders", RECEIPT),
    "extend": Extend("orders", RECEIPT, 60_000),
    "release": Release("orders", RECEIPT, 1_000),
    "peek": Peek("orders", 5, "in_flight"),
    "peek of a batch": Peek("orders", 100, "visible", 65_536),
    "stats": Stats("orders"),
    "stats of a paused queue": Stats("orders"),
    "stats with counts": Stats("orders"),
    "purge": Purge("orders"),
    "redrive": Redrive("dead", "orders", 100),
    "create": CreateQueue("orders", {"visibility_ms": 30_000, "fifo": True}),
    "configure": ConfigureQueue("orders", {"messages_max": None}),
    "pause": ConfigureQueue("orders", {"paused": True}),
    "configure a priority age": ConfigureQueue("orders", {"priority_age_ms": 300_000}),
    "remove": DeleteQueue("orders"),
    "remove unless in use": DeleteQueue("orders", False),
    "describe": DescribeQueue("orders"),
    "describe all": DescribeQueues("or", "orders", 10),
    "list": ListQueues("or", "orders", 10),
    "pull of a batch": Pull("orders", 10, None, None, "attempt", None, 65_536, True),
    "delete late": Delete("orders", RECEIPT, True),
    "extend late": Extend("orders", RECEIPT, 60_000, True, 43_200_000),
    "release late": Release("orders", RECEIPT, 0, True),
    "history": History(ID),
    "history of a claim": History(ID),
    "peek from": PeekFrom("orders", 7, 100, "delayed", 65_536),
    "peek ids": PeekIds("orders", [ID]),
    "pull ids": PullIds("orders", [ID], 30_000, "worker"),
    "return ids": ReturnIds("orders", [ID]),
    "redrive ids": RedriveIds("orders-dead", [ID], "orders"),
    "batch": Batch([Push("orders", b"a"), Delete("orders", RECEIPT), Release("orders", RECEIPT)]),
}
REPLIES: dict[str, Any] = {
    "push": PushReply(ID, 7, False),
    "pull": [CLAIM],
    "delete": True,
    "extend": 1_700_000_060_000,
    "release": None,
    "peek": [MESSAGE],
    "stats": QueueStats("orders", 1, 2, 3, 400, None, 0),
    "stats with counts": QueueStats("orders", 1, 2, 3, 400, None, 0, QueueCounts(9, 8, 7, 1, 0)),
    "stats of a paused queue": QueueStats("orders", 1, 2, 3, 400, None, 0, None, True),
    "purge": 12,
    "redrive": 3,
    "create": INFO,
    "configure": INFO,
    "remove": None,
    "describe": INFO,
    "describe all": [INFO],
    "list": ["orders", "orders-dead"],
    "history": [HistoryEvent(1, "Pushed", "orders", None, "size=5")],
    "peek from": [MESSAGE],
    "peek ids": [MESSAGE],
    "pull ids": [CLAIM],
    "return ids": 1,
    "redrive ids": 1,
    "history of a claim": [
        HistoryEvent(1, "Claimed", "orders", 2, "", 30_001, holder="worker mail-7 (pid 4121)")
    ],
    "batch": [PushReply(ID, 7, True), False, QueueFull("queue: 'orders' is full")],
}
BULK = PushMany(
    queue="orders",
    bodies=[b"one", b"", b"three"],
    priority=3,
    attributes={"kind": "test"},
    groups=["a", None, "b"],
    dedup_ids=["1", "2", None],
)
BULK_REPLIES: list[Any] = [
    PushReply(ID, 7, False),
    QueueFull("queue: 'orders' is full"),
    PushReply(ID[:-1] + "2", 8, True),
]


def same(one, other):
    """Equal, with errors equal by class and message."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, PenstockError):
        return type(one) is type(other) and str(one) == str(other)
    return one == other


def golden_frames():
    """Everything that has a golden form, as this code writes it."""
    frames = {f"command: {name}": encode_command(7, each) for name, each in COMMANDS.items()}
    for name, reply in REPLIES.items():
        encode = encode_claims if name == "pull" else encode_reply
        frames[f"reply: {name}"] = encode(7, reply)
    return frames | {
        "bulk push": encode_bulk(7, BULK),
        "bulk reply": encode_bulk_reply(7, BULK_REPLIES),
        "hello": encode_hello(Hello("penstock python", "secret")),
        "welcome": encode_welcome(Welcome("penstock", 1_000, 10, {"durability": "sync"})),
        "error": encode_error(7, StaleReceipt("receipt: its claim has ended")),
        "goodbye": encode_goodbye("the daemon was told to stop"),
        "cancel": pack(CANCEL, 7),
        "status": pack(STATUS, 7),
    }


def read_golden(files=FILES):
    """The newest golden form of everything."""
    texts = [(GOLDEN / file).read_text() for file in files]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return {
        name: bytes.fromhex(data) for name, _, data in (line.partition(" = ") for line in lines)
    }


def body_of(frame):
    size, kind, request = HEADER.unpack_from(frame)
    assert len(frame) == HEADER_BYTES + size
    assert request == 7
    return kind, frame[HEADER_BYTES:]


@pytest.mark.parametrize("name", golden_frames())
def test_what_is_written_is_the_golden_form(name):
    assert golden_frames()[name].hex() == read_golden()[name].hex()


@pytest.mark.parametrize("file", FILES)
def test_every_golden_form_of_a_command_ever_written_is_read_back(file):
    golden = read_golden([file])
    forms = {name: golden[f"command: {name}"] for name in COMMANDS if f"command: {name}" in golden}
    assert forms
    for name, form in forms.items():
        assert decode_command(*body_of(form)) == COMMANDS[name]


@pytest.mark.parametrize("name", REPLIES)
def test_every_golden_form_of_a_reply_ever_written_is_read_back(name):
    goldens = [read_golden([file]) for file in FILES]
    forms = [each[f"reply: {name}"] for each in goldens if f"reply: {name}" in each]
    assert forms
    for form in forms:
        kind, body = body_of(form)
        found = decode_answer(kind, body, DECODE_REPLY[type(COMMANDS[name])])
        assert same(found, REPLIES[name])


def test_the_other_golden_forms_are_read_back():
    golden = read_golden()
    kind, body = body_of(golden["bulk push"])
    assert kind == BULK_PUSH
    assert decode_bulk(body).pushes() == [
        Push("orders", b"one", None, 3, None, "1", "a", {"kind": "test"}),
        Push("orders", b"", None, 3, None, "2", None, {"kind": "test"}),
        Push("orders", b"three", None, 3, None, None, "b", {"kind": "test"}),
    ]
    assert same(decode_bulk_reply(body_of(golden["bulk reply"])[1]), BULK_REPLIES)
    (hello,) = FrameDecoder("client", HELLO_LIMITS).feed(golden["hello"])
    assert decode_hello(hello[2]) == Hello("penstock python", "secret")
    (welcome,) = FrameDecoder("server", server_limits()).feed(golden["welcome"])
    assert decode_welcome(welcome) == Welcome("penstock", 1_000, 10, {"durability": "sync"})
    with pytest.raises(StaleReceipt, match="its claim has ended"):
        decode_answer(ERROR, body_of(golden["error"])[1], bytes)
    assert body_of(golden["cancel"]) == (CANCEL, b"")


def test_golden_forms_and_commands_cover_one_another():
    assert set(read_golden()) == set(golden_frames())


def test_a_frame_costs_ten_bytes_beside_its_body():
    assert len(pack(REPLY, 7, b"x" * 100)) == 110


# Decoding.


def welcome_decoder(limit=1_000):
    return FrameDecoder("client", client_limits(limit))


@given(st.data())
def test_frames_come_out_the_same_however_they_are_cut(data):
    frames = [encode_command(n + 1, each) for n, each in enumerate(COMMANDS.values())]
    frames.append(pack(PUSH, 99, b"x" * 200_000))
    chosen = data.draw(st.lists(st.sampled_from(frames), max_size=6))
    stream = PRELUDE + b"".join(chosen)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = welcome_decoder(300_000)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert decoder.error is None
    assert [pack(kind, request, bytes(body)) for kind, request, body in found] == chosen
    assert not decoder.is_amid_frame


def test_a_stream_may_come_byte_by_byte():
    stream = PRELUDE + b"".join(golden_frames()[f"command: {name}"] for name in COMMANDS)
    decoder = welcome_decoder()
    found = [frame for at in range(len(stream)) for frame in decoder.feed(stream[at : at + 1])]
    assert [decode_command(kind, body) for kind, _, body in found] == list(COMMANDS.values())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak Penstock frames"),
        (b"\x16\x03\x01\x02", "does not speak Penstock frames"),
        (b"\x89PNX", "does not speak Penstock frames"),
        (PRELUDE[:6] + b"\x02\x00", "version 2"),
        (PRELUDE + HEADER.pack(1_001, PUSH, 1), "1001 bytes; at most 1000"),
        (PRELUDE + HEADER.pack(0, 0x77, 1), "kind 0x77"),
        (PRELUDE + HEADER.pack(0, PUSH | 0x100, 1), "flags 0x01"),
        (PRELUDE + HEADER.pack(0, REPLY, 1), "kind 0x81"),
        (PRELUDE + HEADER.pack(2**32 - 1, 3, 1), "4294967295 bytes"),
        (PRELUDE + pack(STATUS, 0), "kind 0x32 with request number 0"),
        (PRELUDE + pack(CANCEL, 0), "kind 0x31 with request number 0"),
        (PRELUDE + pack(PUSH, 0, b"\x90"), "kind 0x01 with request number 0"),
    ],
)
def test_a_fault_names_who_erred_and_how(data, said):
    for step in (1, len(data)):
        decoder = welcome_decoder()
        for at in range(0, len(data), step):
            assert decoder.feed(data[at : at + step]) == []
        assert decoder.error is not None
        assert str(decoder.error).startswith("the client ")
        assert said in str(decoder.error)
        assert decoder.feed(pack(PUSH, 1)) == []


def test_frames_before_a_fault_are_given_and_none_after_it():
    decoder = welcome_decoder()
    good = pack(STATUS, 5)
    frames = decoder.feed(PRELUDE + good + HEADER.pack(0, 0x77, 1) + good)
    assert frames == [(STATUS, 5, b"")]
    assert decoder.error is not None


def test_before_its_hello_a_client_may_only_send_a_short_hello():
    for frame in (encode_command(1, Push("q", b"x")), pack(HELLO, 0, b"x" * 5_000)):
        decoder = FrameDecoder("client", HELLO_LIMITS)
        assert decoder.feed(PRELUDE + frame) == []
        assert decoder.error is not None


def test_frames_behind_a_hello_wait_until_it_was_checked():
    decoder = FrameDecoder("client", HELLO_LIMITS)
    stream = encode_hello(Hello("test")) + pack(STATUS, 5)
    ((kind, _, _),) = decoder.feed(stream)
    assert kind == HELLO
    decoder.admit(client_limits())
    assert decoder.feed(b"") == [(STATUS, 5, b"")]


def test_an_http_client_is_refused_in_http():
    said = refusal(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolError("no"))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"Penstock frames" in body


def test_a_client_of_any_other_protocol_is_refused_in_frames():
    decoder = FrameDecoder("server", server_limits())
    ((kind, request, body),) = decoder.feed(refusal(b"EHLO x", ProtocolError("no frames")))
    assert (kind, request) == (ERROR, 0)
    with pytest.raises(ProtocolError, match="no frames"):
        decode_answer(kind, body, bytes)


# Errors.


def test_every_error_arrives_as_its_own_class():
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(kinds) > 15
    for kind in kinds:
        made: Any = kind("why")
        found = error_from(error_words(made))
        assert type(found) is kind
        assert str(found) == "why"


def test_an_unknown_error_arrives_as_the_nearest_class_known_here():
    assert type(error_from(["why", "FromTheFuture", "QueueFull", "RequestError"])) is QueueFull
    assert type(error_from(["why", "FromTheFuture", "RequestError"])) is RequestError
    assert type(error_from(["why", "FromTheFuture"])) is PenstockError
    assert type(error_from(["why", "Exception", "object"])) is PenstockError


def test_a_long_message_is_cut_and_not_refused():
    assert len(encode_error(1, InvalidField("x" * 10**6))) < 3_000


# What cannot be sent.


def test_a_claim_from_another_store_is_sent_as_the_text_of_its_receipt():
    ticket = Ticket(1, 2, 3, Receipts(b"k" * 32))
    for command in (Delete("q", ticket), Extend("q", ticket, 5), Release("q", ticket)):
        found: Any = decode_command(*body_of(encode_command(7, command)))
        assert found.receipt == str(ticket)
    batch: Any = decode_command(*body_of(encode_command(7, Batch([Delete("q", ticket)]))))
    assert batch.items[0].receipt == str(ticket)


@pytest.mark.parametrize(
    ("command", "kind", "field"),
    [
        (Push("q\ud800", b""), InvalidField, "queue"),
        (Push("q", cast(bytes, bytearray(b"x"))), InvalidField, "body"),
        (Push("q", b"", 2**70), InvalidField, "delay_ms"),
        (Push("q", b"", attributes={"a": cast(str, object())}), InvalidField, "attributes"),
        (CreateQueue("q", {"messages_max": 2**70}), InvalidField, "messages_max"),
        (CreateQueue("q", {"annotations": {"a": "x" * 100_000}}), InvalidField, "65536"),
        (Delete("q", "\ud800"), InvalidReceipt, "receipt"),
        (Delete("q", "x" * 100_000), InvalidReceipt, "receipt"),
        (Push("q", b"x" * 90_000), MessageTooLarge, "body"),
        (Batch([Push("q", b"x" * 90_000)]), InvalidField, "items"),
        ("push", InvalidField, "command"),
    ],
)
def test_a_command_that_cannot_be_sent_is_refused_before_sending(command, kind, field):
    with pytest.raises(kind, match=field):
        encode_command(1, command, 80_000)


# Malformed input.


@pytest.mark.parametrize(
    ("kind", "fields", "error", "said"),
    [
        (1, [1, "q", "text"], InvalidField, "body: Expected bytes, got str"),
        (1, [1, "q", b"", None, True], InvalidField, "priority: Expected int, got bool"),
        (1, [1, "q"], InvalidField, "command: Expected array of at least length 3"),
        (1, {"queue": "q"}, InvalidField, "command: "),
        (2, [3, "q", "r"], InvalidField, "command: "),
        (6, [6, "q", 1, "asleep"], InvalidField, "state: "),
        (15, [15, 7], errors.MessageNotFound, "id: "),
    ],
)
def test_a_body_of_the_wrong_shape_is_the_fault_of_one_request(kind, fields, error, said):
    with pytest.raises(error) as caught:
        decode_command(kind, msgspec.msgpack.encode(fields))
    assert type(caught.value) is error
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (7, b""),
        (7, b"\xc1"),
        (1, b"\x93\x01\xa1q"),
        (7, b"\x92\x07\xa1\xff"),
        (10, msgspec.msgpack.encode([10, "q", {}]) + b"x"),
        (10, b"\x93\x0a\xa1q\x81\xa1a" + b"\x91" * 60_000),
    ],
)
def test_a_body_that_is_not_messagepack_is_the_fault_of_the_peer(kind, body):
    with pytest.raises(ProtocolError, match="the client"):
        decode_command(kind, body)


def test_a_field_that_is_added_later_does_not_disturb_an_older_peer():
    longer = msgspec.msgpack.encode([7, "orders", "new", {"more": 1}])
    assert decode_command(7, longer) == Stats("orders")
    shorter = msgspec.msgpack.encode([1, "orders", b"hello"])
    assert decode_command(1, shorter) == Push("orders", b"hello")


def test_a_bad_item_of_a_batch_does_not_affect_the_others():
    for padding in (b"", b"x" * SMALL_BYTES):
        items = [[1, "q", padding], [1, "q", None], 7, [3, "q", "receipt"], [2, "q"]]
        batch: Any = decode_command(16, msgspec.msgpack.encode([16, items]))
        assert batch.items[0] == Push("q", padding)
        assert batch.items[3] == Delete("q", "receipt")
        for place in (1, 2, 4):
            assert isinstance(batch.items[place], BadItem)
            assert str(batch.items[place].error).startswith(f"items[{place}]: ")
        assert "body" in str(batch.items[1].error)


def bombs():
    """Small in bytes, large once they are lists and dicts."""
    lists = b"\xdd" + struct.pack(">I", 10**6) + b"\x90" * 10**6
    texts = b"\xde\x00\x02\xa1a" + lists + b"\xa1b\xa1c"
    keys = b"".join(b"\xa3%03d\xa0" % n for n in range(1_000)) * 100
    crowd = b"\xdf" + struct.pack(">I", 100_000) + keys
    push = b"\x99\x01\xa1q\xc4\x01x\xc0\x00\xc0\xc0\xc0"
    batch = b"\x92\x10"
    return {
        "a list as a receipt": (16, batch + b"\x91\x93\x03\xa1q" + lists),
        "lists for items": (16, batch + lists),
        "a list among attributes": (1, push + texts),
        "too many attributes": (1, push + crowd),
        "a list for a body": (1, b"\x93\x01\xa1q" + lists),
        "settings in a batch": (16, batch + b"\x91\x93\x0a\xa1q\x81\xa1a" + lists),
        "a promise of two billion": (16, batch + b"\xdd\x7f\xff\xff\xff" + b"x" * 70_000),
    }


def refused_with(kind, body):
    """What is wrong with a body; a batch is not refused whole for one bad item."""
    try:
        found: Any = decode_command(kind, body)
    except PenstockError as error:
        return error
    return found.items[0].error


@pytest.mark.parametrize("name", bombs())
def test_a_body_that_would_expand_is_refused_without_being_decoded(name):
    kind, body = bombs()[name]
    tracemalloc.start()
    try:
        assert isinstance(refused_with(kind, body), RequestError | ProtocolError)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_large_push_keeps_its_attributes_of_both_kinds():
    push = Push("q", b"x" * SMALL_BYTES, attributes={"text": "ü" * 300, "raw": b"\xff" * 300})
    assert decode_command(*body_of(encode_command(7, push))) == push
    batch = Batch([push, Delete("q", "r"), Extend("q", "r", 5), Release("q", "r", 6)])
    assert decode_command(*body_of(encode_command(7, batch))) == batch


@pytest.mark.parametrize("kind", [REPLY, ERROR])
def test_an_answer_of_the_wrong_shape_is_the_fault_of_the_server(kind):
    for decode in DECODE_REPLY.values():
        with pytest.raises(ProtocolError, match="the server"):
            decode_answer(kind, b"\xa5wrong", decode)


def test_a_goodbye_gives_its_reason():
    (frame,) = FrameDecoder("server", server_limits()).feed(PRELUDE + encode_goodbye("why"))
    assert (frame[0], msgspec.msgpack.decode(frame[2])) == (GOODBYE, ["why"])
    assert PRELUDE_BYTES == 8
