"""Clients without a token, slow clients, floods of requests, and a store that fails."""

import socket
import ssl
import struct
from typing import Any

import pytest

from penstock import carrot
from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.errors import PenstockError, ProtocolError, UnavailableError
from penstock.server.stream import Limits
from penstock.server.tls import ServerTls
from penstock.service import CreateQueue, Push, Stats
from penstock.wire.carrot import session, single
from penstock.wire.carrot.session import PUT, encode_session_request, encode_tags
from tests.server.carrot.conftest import read_all, read_exactly
from tests.server.carrot.test_session import get, receive
from tests.server.conftest import in_each_turn, limit_times, until
from tests.server.frames.test_ipc import SlowJournal

connect: Any = carrot.connect
TOKEN = "correct horse battery staple"


def test_a_broker_with_a_token_refuses_clients_without_it(start_broker, capfd):
    broker = start_broker(token=TOKEN)
    with broker.connect() as client:
        client.add("orders")
        client.put("orders", b"by a session")
        client.put("orders", b"again")
    broker.single().write("orders", b"by a single request")
    with broker.single().read("orders") as message:
        assert message == b"by a session"
    token = single.encode_token(TOKEN[:-1] + "x")
    for refused in (b"\x0forders\0", token + b"\x0forders\0", b"\xa0\0\x0forders\0"):
        assert broker.ask(refused).startswith(b"\x01DENIED: the broker requires a token")
    for wrong in (None, "wrong"):
        with (
            connect("127.0.0.1", broker.port, token=wrong) as client,
            pytest.raises(ProtocolError, match="missing or wrong"),
        ):
            client.put("orders", b"x")
    assert broker.stats("orders").messages == 2
    shown = capfd.readouterr().err
    assert shown.count("token-refused protocol=carrot peer=127.0.0.1:") == 5
    assert TOKEN[:-1] not in shown


def test_a_token_is_ignored_where_none_is_wanted_and_may_come_only_once(broker):
    token = single.encode_token("any")
    assert broker.ask(token + b"\xf0other\0") == b"\0\0"
    assert broker.ask(token + token).startswith(b"\x01PROTOCOL: opcode 0xa0")
    assert broker.ask(b"\xa0" + b"t" * 2_000).startswith(b"\x01PROTOCOL: the token has no NUL")


def test_over_tls_everything_works_as_without(start_broker, certificate):
    broker = start_broker(tls=ServerTls(*certificate))
    trusted = ssl.create_default_context(cafile=certificate[0])
    where = "localhost", broker.port
    with connect(*where, tls=trusted) as client:
        client.add("orders")
        client.put("orders", b"x" * 300_000)
        with client.get("orders") as message:
            assert len(message.body) == 300_000
    plain = carrot.SingleClient(*where, tls=trusted)
    plain.write("orders", b"hello")
    with plain.read("orders") as message:
        assert message == b"hello"
    with pytest.raises(UnavailableError):
        connect(*where, tls=ssl.create_default_context())
    with (
        pytest.raises(PenstockError),
        connect("127.0.0.1", broker.port) as client,
    ):
        client.put("orders", b"x")


def test_connections_that_say_nothing_or_half_a_request_are_closed(start_broker):
    broker = start_broker()
    broker.submit(CreateQueue("orders"))
    silent, half, half_token = (broker.link() for _ in range(3))
    half.sendall(b"\x00\x05ord")
    half_token.sendall(b"\xa0abc")
    session_half = broker.link()
    session_half.sendall(encode_session_request(PUT, 1, "orders", b"hello")[:-1])
    idle = broker.link()
    idle.sendall(get(1))
    assert receive(idle).status == 0
    limit_times(broker.call, broker.server, hello_s_max=0.2, stall_s_max=0.4)
    with half, half_token:
        for link in (half, half_token):
            assert read_all(link).startswith(b"\x01PROTOCOL: no whole request came within 0.2 s")
    for link in (silent, session_half):
        with link:
            assert read_all_or_reset(link) == b""
    idle.sendall(get(2))
    assert receive(idle).number == 2, "a session that is idle between requests stays"
    idle.close()


def test_a_client_that_stops_sending_within_its_request_reads_why_it_is_refused(broker):
    with broker.link() as link:
        link.sendall(b"\x00\x05orders\0he")
        link.shutdown(socket.SHUT_WR)
        assert read_all(link).startswith(b"\x01PROTOCOL: the request was not whole")
    assert broker.stats("orders").messages == 0
    with broker.link() as link:
        link.shutdown(socket.SHUT_WR)
        assert read_all_or_reset(link) == b""


@pytest.mark.parametrize("count", [1, 10])
def test_reads_that_wait_on_two_connections_are_served_in_turns(broker, count):
    with broker.link() as greedy, broker.link() as modest:
        greedy.sendall(
            b"".join(get(number, limit=count, wait_ms=20_000) for number in range(1, 201))
        )
        until(lambda: broker.stats("orders").waiting_pulls == 200)
        modest.sendall(get(1, limit=count, wait_ms=20_000) + get(2, limit=count, wait_ms=20_000))
        until(lambda: broker.stats("orders").waiting_pulls == 202)
        for number in range(4):
            broker.submit(Push("orders", b"%d" % number))
        assert [receive(greedy).number, receive(greedy).number] == [1, 2]
        assert [receive(modest).number, receive(modest).number] == [1, 2]


def read_all_or_reset(link):
    try:
        return read_all(link)
    except ConnectionResetError:
        return b""


def test_a_client_that_reads_no_answers_is_closed_and_its_messages_return(start_broker):
    broker = start_broker(limits=Limits(unsent_bytes_max=65_536))
    with broker.connect() as client:
        client.add("orders")
        for _ in range(40):
            client.put("orders", b"x" * 1024 * 1024)
    with broker.link() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        link.sendall(get(1) * 40)
        until(lambda: broker.stats("orders").in_flight > 0)
        limit_times(broker.call, broker.server, stall_s_max=0.4)
        until(lambda: broker.stats("orders").visible == 40)
        # It was not given all of them: reading stopped when it took none.
        assert broker.server.requests[session.GET] <= 40
    with broker.connect() as client:
        assert client.get("orders").receives == 2


def test_large_messages_that_are_incomplete_have_one_limit_together(start_broker):
    size = 200_000
    broker = start_broker(limits=Limits(unfinished_bytes_max=500_000))
    broker.submit(CreateQueue("orders"))
    request = encode_session_request(PUT, 1, "orders", b"x" * size)
    links = [broker.link() for _ in range(3)]
    for number, link in enumerate(links[:2], 1):
        link.sendall(request[:-1])
        until(lambda number=number: broker.server.unfinished_bytes >= number * size)
    links[2].sendall(request[:100_000])
    answer = receive(links[2])
    assert answer.number == 0
    assert answer.body.startswith(b"BUSY: no memory for a request of 200018 bytes")
    for link in links[:2]:
        link.sendall(request[-1:])
        assert receive(link).status == 0
    for link in links:
        link.close()
    until(lambda: not broker.server.connections)
    assert broker.server.unfinished_bytes == 0


def test_a_connection_beyond_the_limit_is_refused_with_a_reason(start_broker):
    broker = start_broker(limits=Limits(connections_max=2))
    with broker.link() as one, broker.link() as two:
        one.sendall(get(1, "none"))
        two.sendall(get(1, "none"))
        assert receive(one).status == receive(two).status == 1
        with broker.link() as third:
            said = read_all(third)
        assert said.startswith(b"\x01UNAVAILABLE: the server has 2 connections already")
        with (
            broker.connect() as client,
            pytest.raises(UnavailableError, match="2 connections already"),
        ):
            client.put("orders", b"x")


def test_a_thousand_idle_sessions_leave_the_broker_usable(broker):
    """Row 13: idle connections, and ones amid a message, cost the others nothing."""
    links = []
    try:
        for number in range(1_000):
            link = broker.link()
            link.sendall(get(1, wait_ms=0) if number % 2 else b"\xc0\x06")
            links.append(link)
        with broker.connect() as client:
            client.put_many("orders", [b"%d" % i for i in range(100)])
            for _ in range(100):
                with client.get("orders") as message:
                    assert message is not None
        until(lambda: len(broker.server.connections) >= 1_000)
    finally:
        for link in links:
            link.close()
    until(lambda: not broker.server.connections)


def test_half_open_connections_lose_no_message(broker):
    """Half-open connections: the client's machine fails during each kind of request."""
    broker.ask(b"\x00\x05orders\0first")
    for request in (b"\x0forders\0", get(1), get(1, wait_ms=20_000), b"\x00\x05orders\0sec"):
        link = broker.link()
        link.sendall(request)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: broker.server.connections)
        link.close()
        until(lambda: not broker.server.connections)
    stats = broker.stats("orders")
    assert (stats.visible, stats.in_flight, stats.waiting_pulls) == (1, 0, 0)


def test_a_store_that_fails_gives_every_client_an_error_and_no_success(start_broker):
    journal = SlowJournal()
    broker = start_broker(engine=Engine(journal, ManualClock()))
    with broker.link() as writer, broker.link() as other, broker.link() as reader:
        writer.sendall(encode_session_request(session.SESSION_ADD, 1, "orders"))
        until(lambda: journal.waiting)
        journal.sync()
        assert receive(writer).status == 0
        writer.sendall(encode_session_request(PUT, 2, "orders", b"x"))
        other.sendall(b"\x00\x01orders\0y")
        reader.sendall(b"\x0forders\0")
        until(lambda: broker.server.deferred == 3)
        journal.fail()
        answer = receive(writer)
        assert (answer.number, answer.body) == (0, b"FAILED: the disk is gone")
        assert read_all(other) == read_all(reader) == b"\x01FAILED: the disk is gone\0"
    assert [str(each) for each in broker.failures] == ["the disk is gone"]


def test_a_claim_of_a_client_that_disconnects_before_it_is_durable_is_released(start_broker):
    journal = SlowJournal()
    broker = start_broker(engine=Engine(journal, ManualClock()))
    broker.submit(CreateQueue("orders"))
    broker.submit(Push("orders", b"x"))
    for request in (b"\x0forders\0", get(1)):
        with broker.link() as link:
            link.sendall(request)
            until(lambda: broker.stats("orders").in_flight == 1)
        until(lambda: broker.stats("orders").visible == 1)
    until(lambda: broker.server.deferred == 0)
    journal.sync()


def test_an_acknowledgement_counts_although_its_client_has_disconnected(broker):
    broker.ask(b"\x00\x05orders\0first")
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        read_exactly(link, 7)
        link.sendall(b"\0")
    until(lambda: broker.stats("orders").messages == 0)
    with broker.link() as link:
        link.sendall(get(1, tags=[]) + encode_session_request(PUT, 2, "orders", b"x"))
        receive(link)
        receive(link)
        link.sendall(get(3))
        (given,) = session.read_given(1, receive(link).body)
        ack = encode_session_request(session.SESSION_ACK, 4, "", encode_tags([given.tag]), 1)
        link.sendall(ack)
    until(lambda: broker.stats("orders").messages == 0)


def test_requests_that_take_long_together_give_way_to_other_connections(broker, monkeypatch):
    """Row 20: after TURN_S the rest of one read waits for the next turn of the event loop."""
    # Each request takes longer than this.
    monkeypatch.setattr("penstock.server.stream.TURN_S", 0.0)
    seen: set[int] = set()
    puts = [encode_session_request(PUT, number, "orders", b"x") for number in range(1, 41)]

    def look():
        seen.add(broker.server.service.submit(Stats("orders")).messages)

    with in_each_turn(broker, look), broker.link() as link:
        link.sendall(b"".join(puts))
        assert [receive(link).number for _ in puts] == [*range(1, 41)]
    # One in each turn; the bytes may have come in more than one read.
    assert len(seen) >= 20
