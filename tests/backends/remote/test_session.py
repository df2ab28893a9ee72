"""The client's session of our wire: what it sends, and how it reads what the server says."""

from itertools import count

import pytest

from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.backends.remote.retry import ConnectionLost
from penstock.backends.remote.session import ClientCall, ClientSession
from penstock.errors import Overloaded, ProtocolError, UnsupportedOperation
from penstock.service import ListQueues, PeekIds, PushMany
from penstock.wire.frames.frames import (
    BATCH,
    GOODBYE,
    HEADER,
    REPLY,
    REQUEST_MAX,
    Welcome,
    encode_error,
    encode_goodbye,
    encode_welcome,
    pack,
)


class NotedCall(ClientCall):
    """A call that notes how often it was woken."""

    woken = 0

    def wake(self):
        self.woken += 1


@pytest.fixture
def session():
    """A session that an old server has accepted."""
    session = ClientSession(TcpEndpoint("127.0.0.1", 1))
    assert session.receive(encode_welcome(Welcome("test", 10**6, 10, {}))) is None
    return session


def waiting(session, command):
    """A call that was sent and has no answer."""
    call = NotedCall(0.0)
    session.prepare(call, command)
    session.pending[call.number] = call
    return call


def test_a_number_is_not_used_again_while_its_request_has_no_answer(session):
    session._numbers = count(REQUEST_MAX - 1)
    session.pending = {REQUEST_MAX - 1: ClientCall(0.0), 1: ClientCall(0.0)}
    # After the largest one come 0, which is no number of a request, and 1, which has no answer.
    assert waiting(session, ListQueues()).number == REQUEST_MAX
    assert waiting(session, ListQueues()).number == 2


def test_a_command_that_the_server_does_not_know_is_not_sent(session):
    assert session.prepare(ClientCall(0.0), ListQueues())
    with pytest.raises(UnsupportedOperation, match="does not know PeekIds"):
        session.prepare(ClientCall(0.0), PeekIds("orders", ["1"]))
    assert session.pending == {}


def test_a_bulk_push_of_few_messages_is_sent_as_a_batch(session):
    frame = session.prepare(ClientCall(0.0), PushMany("orders", [b"a", b"b"]))
    assert HEADER.unpack_from(frame)[1] == BATCH


def test_each_answer_finds_its_call_in_any_order(session):
    first, second = waiting(session, ListQueues()), waiting(session, ListQueues())
    assert session.receive(pack(REPLY, second.number, b"\x91\xa1b")) is None
    assert (first.done, second.done, first.woken, second.woken) == (False, True, 0, 1)
    assert session.outcome(second) == ["b"]
    assert session.receive(pack(REPLY, first.number, b"\x91\xa1a")) is None
    assert session.outcome(first) == ["a"]
    assert session.pending == {}


def test_a_lost_connection_wakes_every_call_and_says_what_may_be_done(session):
    sent, unsent = waiting(session, ListQueues()), waiting(session, ListQueues())
    unsent.sent = False
    session.lose("it broke")
    assert (sent.woken, unsent.woken) == (1, 1)
    for call in (sent, unsent):
        with pytest.raises(ConnectionLost, match="it broke") as lost:
            session.outcome(call)
        assert lost.value.may_be_done is call.sent


def test_after_a_goodbye_a_request_without_an_answer_was_not_done(session):
    call = waiting(session, ListQueues())
    session.receive(encode_goodbye("it stops"))
    session.lose("it stopped")
    with pytest.raises(ConnectionLost) as lost:
        session.outcome(call)
    assert lost.value.may_be_done is False


def test_an_error_of_the_connection_is_raised_for_what_was_sent(session):
    sent, unsent = waiting(session, ListQueues()), waiting(session, ListQueues())
    unsent.sent = False
    session.receive(encode_error(0, Overloaded("no memory")))
    session.lose("the server closed the connection")
    with pytest.raises(Overloaded, match="no memory"):
        session.outcome(sent)
    with pytest.raises(ConnectionLost):
        session.outcome(unsent)


def test_bytes_that_are_no_frames_end_the_connection():
    session = ClientSession(TcpEndpoint("127.0.0.1", 1))
    fault = session.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert fault is not None
    assert "does not speak Penstock frames" in fault
    assert isinstance(session.refused, ProtocolError)


def test_the_third_tick_without_bytes_in_a_row_ends_the_connection(session):
    assert [bool(session.silence()) for _ in range(3)] == [True, True, False]
    session.receive(encode_goodbye("it stops"))
    assert [bool(session.silence()) for _ in range(3)] == [True, True, False]


def test_a_goodbye_that_comes_with_the_welcome_is_read():
    session = ClientSession(TcpEndpoint("127.0.0.1", 1))
    goodbye = pack(GOODBYE, 0, b"\x91\xa8it stops")
    session.receive(encode_welcome(Welcome("test", 10**6, 10, {})) + goodbye)
    call = waiting(session, ListQueues())
    session.lose("it stopped")
    with pytest.raises(ConnectionLost) as lost:
        session.outcome(call)
    assert lost.value.may_be_done is False
