"""The client's session of our wire: what it sends, and how it reads what the server says."""

from itertools import count

import pytest

from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.backends.remote.session import ClientSession
from penstock.errors import Overloaded, UnsupportedOperation
from penstock.service import ListQueues, PeekIds, PushMany
from penstock.wire.frames.frames import (
    BATCH,
    HEADER,
    REQUEST_MAX,
    FrameDecoder,
    Welcome,
    encode_error,
    encode_goodbye,
    encode_welcome,
    server_limits,
)


def frames_of(data):
    """The frames of a server that has sent its WELCOME, and then this."""
    welcome = encode_welcome(Welcome("test", 10**6, 10, {}))
    return FrameDecoder("server", server_limits()).feed(welcome + data)


@pytest.fixture
def session():
    """A session that an old server has accepted."""
    session = ClientSession(TcpEndpoint("127.0.0.1", 1))
    session.accept(frames_of(b"")[0])
    return session


def test_a_number_is_not_used_again_while_its_request_has_no_answer(session):
    session._numbers = count(REQUEST_MAX - 1)
    waiting, abandoned = {REQUEST_MAX - 1}, {1}
    # After the largest one come 0, which is no number of a request, and 1, which was cancelled.
    assert session.next_number(waiting, abandoned) == REQUEST_MAX
    assert session.next_number(waiting, abandoned) == 2


def test_a_command_that_the_server_does_not_know_is_not_sent(session):
    assert session.encode(1, ListQueues())[0]
    with pytest.raises(UnsupportedOperation, match="does not know PeekIds"):
        session.encode(2, PeekIds("orders", ["1"]))


def test_a_bulk_push_of_few_messages_is_sent_as_a_batch(session):
    frame, _ = session.encode(3, PushMany("orders", [b"a", b"b"]))
    assert HEADER.unpack_from(frame)[1] == BATCH


def test_a_goodbye_and_an_error_of_the_connection_are_noted(session):
    for kind, request, body in frames_of(encode_goodbye("it stops"))[1:]:
        assert request == 0
        session.note(kind, body)
    assert (session.goodbye_received, session.refused) == (True, None)
    for kind, _, body in frames_of(encode_error(0, Overloaded("no memory")))[1:]:
        session.note(kind, body)
    assert isinstance(session.refused, Overloaded)
