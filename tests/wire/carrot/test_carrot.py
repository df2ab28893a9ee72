"""The Carrot protocol's bytes: golden both ways, any chunking, and what is no request."""

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.errors import InvalidField, PenstockError, ProtocolError, QueueFull, RequestError
from penstock.wire.carrot import OPCODE_NAMES, reasons, session, single
from penstock.wire.carrot.session import GivenMessage, SessionDecoder
from penstock.wire.carrot.single import SingleAnswer, SingleRequest

GOLDEN = Path(__file__).parents[2] / "golden" / "carrot" / "version-1.txt"
REASON = b"FULL: no room"
SINGLE = {
    "write": SingleRequest(single.WRITE, "orders", b"hello"),
    "read": SingleRequest(single.READ, "orders"),
    "add": SingleRequest(single.ADD, "orders"),
    "remove": SingleRequest(single.REMOVE, "orders"),
}
# opcode, count, body
SESSION = {
    "put": (session.PUT, 0, b"hello"),
    "put many": (session.PUT_MANY, 2, session.encode_messages([b"other", b"!"])),
    "get": (session.GET, 1, session.encode_tags([], 20_000)),
    "ack and get": (session.GET, 10, session.encode_tags([3, 4], 20_000)),
    "ack": (session.SESSION_ACK, 2, session.encode_tags([3, 4])),
    "nack": (session.SESSION_NACK, 1, session.encode_tags([3])),
    "extend": (session.EXTEND, 1, session.encode_tags([3], 60_000)),
    "add": (session.SESSION_ADD, 0, b""),
    "add with settings": (session.SESSION_ADD, 0, session.encode_add(30_000, 1_000)),
    "remove": (session.SESSION_REMOVE, 0, b""),
}
OF_CLAIMS = ("ack", "nack", "extend")
GIVEN = [GivenMessage(3, 2, b"hello"), GivenMessage(4, 1, b"")]


def session_request(name):
    opcode, count, body = SESSION[name]
    queue = "" if name in OF_CLAIMS else "orders"
    return session.encode_session_request(opcode, 7, queue, body, count)


def written():
    """Everything that has a golden form, as this code writes it."""
    return {
        **{f"single: {name}": single.encode_request(each) for name, each in SINGLE.items()},
        "single: token": single.encode_token("correct horse"),
        "answer: success": single.encode_answer(single.SUCCESS),
        "answer: error": single.encode_answer(single.ERROR, REASON),
        "answer: message": single.encode_message(b"hello"),
        **{f"session: {name}": session_request(name) for name in SESSION},
        "session answer: put": session.encode_session_answer(0, 7, b"id"),
        "session answer: given": session.encode_one(7, 3, 2, b"hello"),
        "session answer: given many": session.encode_given(7, GIVEN),
        "session answer: error": session.encode_session_answer(1, 7, REASON),
        "session answer: some refused": session.encode_refused(7, [0, 1], REASON),
    }


def read_golden():
    lines = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: bytes.fromhex(text) for name, text in (line.split(" = ") for line in lines)}


def test_everything_is_written_as_it_stands_in_the_golden_file():
    assert written() == read_golden()


@pytest.mark.parametrize("name", SINGLE)
def test_a_golden_single_request_is_read_as_what_it_stands_for(name):
    data = read_golden()[f"single: {name}"]
    assert single.read_request(data) == SINGLE[name]
    assert all(single.read_request(data[:size]) is None for size in range(len(data)))


@pytest.mark.parametrize("name", SESSION)
def test_a_golden_session_request_is_read_as_what_it_stands_for(name):
    opcode, count, body = SESSION[name]
    queue = b"" if name in OF_CLAIMS else b"orders"
    found = SessionDecoder().feed(read_golden()[f"session: {name}"])
    assert found == [(opcode, count, 7, queue, body)]


def test_golden_answers_are_read_as_what_they_stand_for():
    golden = read_golden()
    assert single.read_answer(golden["answer: success"]) == SingleAnswer(0, "")
    assert single.read_answer(golden["answer: error"]) == SingleAnswer(1, REASON.decode())
    assert single.read_message(golden["answer: message"]) == b"hello"
    assert single.read_message(golden["answer: error"]) == SingleAnswer(1, REASON.decode())
    answer = session.read_session_answer(golden["session answer: given many"])
    assert answer is not None
    assert session.read_given(answer.items, answer.body) == GIVEN
    one = session.read_session_answer(golden["session answer: given"])
    assert one is not None
    assert session.read_given(one.items, one.body) == GIVEN[:1]


def test_one_message_has_the_bytes_of_many_with_one_in_it():
    assert session.encode_one(7, *GIVEN[0]) == session.encode_given(7, GIVEN[:1])


def test_the_seeds_opcodes_and_the_extensions_are_apart():
    extension = {getattr(session, name) for name in ("PUT", "PUT_MANY", "GET", "SESSION_ACK")}
    assert not extension & (single.SINGLE_OPCODES | {single.TOKEN})
    assert set(OPCODE_NAMES) == single.SINGLE_OPCODES | set(session.REQUEST_LIMITS)
    # What a browser, a TLS client or a client of our frames would begin with is no opcode.
    assert not {*b"GPHDOTC", 0x16, 0x89} & {*OPCODE_NAMES, single.TOKEN}


@given(st.data())
def test_requests_are_the_same_in_any_chunks(data):
    names = data.draw(st.lists(st.sampled_from(sorted(SESSION)), min_size=1, max_size=6))
    stream = b"".join(map(session_request, names))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = SessionDecoder()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == SessionDecoder().feed(stream)
    assert len(found) == len(names) == decoder.requests_seen
    assert not decoder.is_amid_frame


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_the_beginning_of_one_or_refused(data):
    for read in (single.read_request, single.read_token, single.read_answer, single.read_message):
        with suppress(ProtocolError):
            read(data)
    decoder = SessionDecoder()
    found = decoder.feed(data)
    assert decoder.error is not None or len(found) * session.HEAD_BYTES <= len(data)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ((0xC0, 0, 0, 1, 64 * 1024 * 1024 + 1), "body of 67108865 bytes; at most 67108864"),
        ((0xC2, 0, 10_001, 1, 4), "a GET with a count of 10001; at most 10000"),
        ((0xC0, 0, 1, 1, 0), "a PUT with a count of 1; at most 0"),
        ((0xC0, 0, 0, 0, 0), "number 0"),
        ((0xC9, 0, 0, 1, 0), "opcode 0xc9"),
        ((0x00, 0, 0, 1, 0), "opcode 0x00 is not one of a session"),
    ],
)
def test_a_head_that_breaks_a_limit_is_refused_before_its_body_comes(head, said):
    decoder = SessionDecoder()
    good = session_request("put")
    assert len(decoder.feed(good + struct.pack("<BBHII", *head))) == 1
    assert said in str(decoder.error)
    assert decoder.feed(good) == []


def test_an_id_without_an_end_is_refused_as_soon_as_it_is_too_long():
    assert single.read_request(b"\x0f" + b"q" * 161) is None
    with pytest.raises(ProtocolError, match="no NUL"):
        single.read_request(b"\x0f" + b"q" * 162)
    with pytest.raises(ProtocolError, match="no NUL"):
        single.read_token(b"\xa0" + b"t" * 1_025)
    with pytest.raises(ProtocolError, match="opcode 0x47 is unknown"):
        single.read_request(b"GET / HTTP/1.1\r\n")


def test_what_cannot_be_a_request_is_refused_where_it_is_made():
    with pytest.raises(InvalidField, match="256 bytes; a WRITE takes at most 255"):
        single.encode_request(SingleRequest(single.WRITE, "q", b"x" * 256))
    with pytest.raises(InvalidField, match="without NUL"):
        single.encode_request(SingleRequest(single.READ, "q\0r"))
    with pytest.raises(InvalidField, match="queue: 162 bytes"):
        session.encode_session_request(session.PUT, 1, "q" * 162)
    with pytest.raises(InvalidField, match="count 10001"):
        session.encode_session_request(session.GET, 1, "q", b"", 10_001)


@pytest.mark.parametrize(
    ("count", "body"), [(0, b""), (2, b"\0" * 4), (1, b"\5\0\0\0four"), (1, b"\3\0\0\0four")]
)
def test_sizes_that_do_not_add_up_are_refused(count, body):
    with pytest.raises(InvalidField, match="PUT_MANY"):
        session.read_messages(count, body)


def test_every_error_has_a_word_and_the_client_raises_the_same_kind():
    kinds = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, PenstockError)
    ]
    for kind in kinds:
        reason = reasons.reason_of(kind("queue: what is\nwrong"))
        word, text = reasons.read_reason(reason)
        assert word.isupper()
        assert text == "queue: what is wrong"
        raised = reasons.error_of(reason)
        assert str(raised) == text
        assert isinstance(raised, PenstockError)
    assert isinstance(reasons.error_of(b"FULL: no room"), QueueFull)
    assert type(reasons.error_of(b"NEWER: never heard of")) is RequestError


def test_a_reason_is_short_text_without_nul_whatever_the_error_says():
    reason = reasons.make_reason("INVALID", "a\0b" + "é" * 2_000)
    assert b"\0" not in reason
    assert len(reason) <= reasons.REASON_BYTES_MAX
    assert reason.decode().startswith("INVALID: a b")


def test_the_examples_of_the_specification_are_what_this_code_writes():
    page = Path(__file__).parents[3] / "docs" / "formats" / "carrot.md"
    text = page.read_text().split("## Examples, byte by byte")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line[:2] in ("> ", "< ")]
    found = [line[2:].split("  ")[0].replace(" ", "") for line in lines]
    ack = session.encode_session_request(session.SESSION_ACK, 7, "", session.encode_tags([3]), 1)
    assert found == [
        each.hex()
        for each in (
            single.encode_request(SINGLE["write"]),
            single.encode_answer(single.ERROR, REASON),
            single.encode_request(SINGLE["read"]),
            single.encode_message(b"hello"),
            bytes([single.ACK]),
            single.encode_answer(single.SUCCESS),
            session_request("put"),
            session.encode_session_answer(single.SUCCESS, 7, b"id"),
            session_request("get"),
            session.encode_given(7, GIVEN[:1]),
            ack,
            session.encode_done(7),
        )
    ]
    assert session.encode_one(7, 3, 2, b"hello") == session.encode_given(7, GIVEN[:1])


def column(heading, number=0):
    """The entries of one column of the first table below a heading of the specification."""
    page = Path(__file__).parents[3] / "docs" / "formats" / "carrot.md"
    text = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [row[number].strip().strip("`") for row in rows[2:]]


def test_the_specification_has_every_opcode_and_every_reason():
    numbers = column("Sessions")
    names = dict(zip(numbers, column("Sessions", 1), strict=True))
    assert {int(number, 16): name for number, name in names.items()} == {
        opcode: OPCODE_NAMES[opcode] for opcode in session.REQUEST_LIMITS
    }
    words = {word for _, word in reasons._WORD_OF} | set(reasons._ERROR_OF) | {reasons.EMPTY}
    assert sorted(column("Reasons")) == sorted(words)
