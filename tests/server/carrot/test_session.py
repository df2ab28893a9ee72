"""The Carrot extension over real sockets: many requests on one connection."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.errors import (
    BatchRefused,
    InvalidField,
    Overloaded,
    QueueDeleted,
    QueueFull,
    QueueNotFound,
    StaleReceipt,
    UnavailableError,
)
from penstock.server.stream import Limits
from penstock.service import DeleteQueue, Peek, Push
from penstock.wire.carrot import session
from penstock.wire.carrot.session import (
    GET,
    PUT,
    SESSION_ACK,
    encode_session_request,
    encode_tags,
    read_given,
    read_session_answer,
)
from tests.server.carrot.conftest import read_exactly
from tests.server.conftest import TIMEOUT_S, until


def get(number, queue="orders", limit=1, wait_ms=0, tags=()):
    return encode_session_request(GET, number, queue, encode_tags(tags, wait_ms), limit)


def receive(link):
    """The next answer on a raw connection."""
    head = read_exactly(link, 12)
    size = struct.unpack("<I", head[8:])[0]
    answer = read_session_answer(head + read_exactly(link, size))
    assert answer is not None
    return answer


def test_a_message_is_put_got_acknowledged_and_gone(broker):
    with broker.connect() as client:
        message_id = client.put("orders", b"hello")
        message = client.get("orders")
        assert message is not None
        assert (message.body, message.receives) == (b"hello", 1)
        assert broker.submit(Peek("orders", state="in_flight"))[0].id == message_id
        message.ack()
        assert client.get("orders") is None
    assert broker.stats("orders").messages == 0


@pytest.mark.parametrize("size", [0, 255, 256, 70_000, 1024 * 1024])
def test_a_message_may_be_of_any_size_the_queue_takes(broker, size):
    body = bytes(i % 251 for i in range(size))
    with broker.connect() as client:
        client.put("orders", body)
        with client.get("orders") as message:
            assert message.body == body


def test_a_nack_puts_the_message_back_at_the_front(broker):
    with broker.connect() as client:
        client.put_many("orders", [b"first", b"second"])
        client.get("orders").nack()
        again = client.get("orders")
        assert (again.body, again.receives) == (b"first", 2)


def test_a_hang_up_puts_back_everything_unacknowledged_in_its_order(broker):
    with broker.connect() as client:
        client.put_many("orders", [b"%d" % i for i in range(500)])
        held = client.get_many("orders", 500)
        client.ack(held[:3])
    until(lambda: broker.stats("orders").visible == 497)
    with broker.connect() as client:
        bodies = [each.body for each in client.get_many("orders", 500)]
    assert bodies == [b"%d" % i for i in range(3, 500)]


def test_a_read_acknowledges_and_reads_in_one_request(broker):
    with broker.connect() as client:
        client.put_many("orders", [b"%d" % i for i in range(6)])
        first = client.get_many("orders", 3)
        second = client.get_many("orders", 3, ack=first)
        assert [each.body for each in second] == [b"3", b"4", b"5"]
        assert client.get_many("orders", 3, ack=second) == []
        with pytest.raises(InvalidField, match="no message of this connection"):
            client.get_many("orders", 3, ack=first)
    assert broker.stats("orders").messages == 0


def test_an_acknowledgement_after_the_timeout_is_refused_and_reads_nothing(start_broker):
    clock = ManualClock()
    broker = start_broker(clock=clock)
    with broker.connect() as client:
        client.add("orders", visibility_timeout=10)
        client.put_many("orders", [b"first", b"second", b"third"])
        old = client.get("orders")
        clock.advance(seconds=6)
        new = client.get("orders")
        clock.advance(seconds=6)
        with pytest.raises(BatchRefused, match="1 of 2 items were refused"):
            client.get_many("orders", 1, ack=[old, new])
        assert broker.stats("orders").visible == 2
        late = client.get("orders")
        clock.advance(seconds=11)
        with pytest.raises(StaleReceipt):
            late.ack()


def test_a_claim_can_be_extended(start_broker):
    clock = ManualClock()
    broker = start_broker(clock=clock)
    with broker.connect() as client:
        client.add("orders", visibility_timeout=10)
        client.put("orders", b"first")
        with client.get("orders") as message:
            clock.advance(seconds=9)
            message.extend(60)
            clock.advance(seconds=50)
    assert broker.stats("orders").messages == 0


def test_waiting_reads_are_served_in_the_order_they_came(broker):
    with ThreadPoolExecutor(4) as pool, broker.connect() as writer:
        clients = [broker.connect() for _ in range(4)]
        waiting = []
        for count, client in enumerate(clients, 1):
            waiting.append(pool.submit(client.get, "orders", 20))
            until(lambda count=count: broker.stats("orders").waiting_pulls == count)
        for i in range(4):
            writer.put("orders", b"%d" % i)
        assert [each.result(TIMEOUT_S).body for each in waiting] == [b"0", b"1", b"2", b"3"]
        for client in clients:
            client.close()


def test_a_waiting_read_delays_no_other_request_of_its_connection(broker):
    with broker.link() as link:
        link.sendall(get(1, wait_ms=20_000))
        until(lambda: broker.stats("orders").waiting_pulls == 1)
        link.sendall(encode_session_request(PUT, 2, "orders", b"x"))
        answers = {each.number: each for each in (receive(link), receive(link))}
        assert [(each.tag, each.body) for each in read_given(1, answers[1].body)] == [(1, b"x")]
        assert len(answers[2].body) == 36


def test_many_requests_in_one_write_are_answered_in_order(broker):
    count = 2_000
    with broker.link() as link:
        puts = [encode_session_request(PUT, i, "orders", b"%d" % i) for i in range(1, count + 1)]
        thread = threading.Thread(target=link.sendall, args=(b"".join(puts),))
        thread.start()
        assert [receive(link).number for _ in range(count)] == list(range(1, count + 1))
        thread.join()
        link.sendall(get(1, limit=count))
        given = read_given(count, receive(link).body)
        link.sendall(
            encode_session_request(
                SESSION_ACK, 2, "", encode_tags([each.tag for each in given]), count
            )
        )
        assert receive(link).status == 0
    assert [each.body for each in given] == [b"%d" % i for i in range(1, count + 1)]
    assert broker.stats("orders").messages == 0


def test_requests_beyond_a_turns_share_wait_for_the_next_turn(broker, monkeypatch):
    """A client that fills the broker's buffer with requests holds up no other connection."""
    # Each request takes longer than this.
    monkeypatch.setattr("penstock.server.stream.TURN_S", 0.0)
    taken = []

    def flood():
        (connection,) = broker.server.connections
        connection.data_received(get(1) * 1_000)
        taken.append(broker.server.requests[GET])

    with broker.link() as link:
        link.sendall(get(1))
        receive(link)
        broker.call(flood)
        assert [receive(link).status for _ in range(1_000)] == [0] * 1_000
        assert taken == [2]
        assert broker.server.requests[GET] == 1_001
        link.sendall(get(1))
        assert receive(link).status == 0


def test_a_full_queue_refuses_with_the_reason_and_takes_the_rest_of_a_batch(broker):
    with broker.connect() as client:
        client.add("small", max_messages=3)
        client.put("small", b"0")
        with pytest.raises(BatchRefused, match=r"1 of 3 items .* 'small' is full with 3") as caught:
            client.put_many("small", [b"1", b"2", b"3"])
        assert [each is None for each in caught.value.results] == [True, True, False]
        with pytest.raises(QueueFull):
            client.put("small", b"4")
        with pytest.raises(QueueFull):
            client.put_many("small", [b"4", b"5"])
        assert [each.body for each in client.get_many("small", 10)] == [b"0", b"1", b"2"]


def test_a_removal_ends_the_waiting_reads_with_a_clear_error(broker):
    with broker.connect() as client, broker.connect() as other, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(each.get, "orders", 20) for each in (client, other)]
        until(lambda: broker.stats("orders").waiting_pulls == 2)
        with broker.connect() as remover:
            remover.remove("orders")
        for each in waiting:
            with pytest.raises(QueueDeleted):
                each.result(TIMEOUT_S)
        client.add("orders")
        client.put("orders", b"both connections live on")
        assert other.get("orders") is not None


def test_an_acknowledgement_after_a_removal_says_so(broker):
    with broker.connect() as client:
        client.put_many("orders", [b"1", b"2", b"3"])
        one, *two = client.get_many("orders", 3)
        broker.submit(DeleteQueue("orders"))
        with pytest.raises(QueueDeleted):
            one.ack()
        with pytest.raises(QueueDeleted):
            client.ack(two)
        with pytest.raises(QueueNotFound):
            client.get("orders")


def test_a_queue_is_added_with_settings_and_not_changed_by_others(broker):
    with broker.connect() as client:
        client.add("small", visibility_timeout=5, max_messages=7)
        client.add("small", visibility_timeout=5, max_messages=7)
        client.add("small")
        with pytest.raises(InvalidField, match="'small'"):
            client.add("small", max_messages=8)
        with pytest.raises(InvalidField, match="max_messages"):
            client.add("small", max_messages=2**32)
        client.add("line.fifo")
        client.put_many("line.fifo", [b"1", b"2"])
        client.put("line.fifo", b"3")
        assert client.get("line.fifo").body == b"1"
        assert client.get("line.fifo") is None


def test_a_read_beyond_the_limit_of_unacknowledged_messages_is_refused(start_broker):
    clock = ManualClock()
    broker = start_broker(clock=clock)
    with broker.connect() as client:
        client.add("orders")
        for _ in range(2):
            client.put_many("orders", [b"x"] * 6_000)
        # An answer has 2,000 messages at most, and a connection holds 10,000.
        assert [len(client.get_many("orders", 6_000)) for _ in range(5)] == [2_000] * 5
        with pytest.raises(Overloaded, match="10000 messages are unacknowledged"):
            client.get_many("orders", 1)
        clock.advance(seconds=31)
        assert len(client.get_many("orders", 2_000)) == 2_000


def test_messages_on_disk_are_answered_once_they_are_durable(start_broker, quick_path):
    engine = open_engine(quick_path / "store", clock=ManualClock())
    broker = start_broker(engine=engine)
    with broker.connect() as client, broker.connect() as reader, ThreadPoolExecutor(1) as pool:
        client.add("orders")
        waiting = pool.submit(reader.get, "orders", 20)
        until(lambda: broker.stats("orders").waiting_pulls == 1)
        client.put("orders", b"0")
        client.put_many("orders", [b"1", b"2"])
        first = waiting.result(TIMEOUT_S)
        assert first.body == b"0"
        rest = reader.get_many("orders", 5, ack=[first])
        assert [each.body for each in rest] == [b"1", b"2"]
        reader.ack(rest)
        assert broker.stats("orders").messages == 0
        single = broker.single()
        single.write("orders", b"3")
        with single.read("orders") as message:
            assert message == b"3"
    assert broker.stats("orders").messages == 0
    assert broker.server.deferred == 0


def test_wrong_fields_are_refused_and_the_session_continues(broker):
    broker.submit(Push("orders", b"x"))
    request = encode_session_request
    refused = [
        (request(GET, 1, "orders", b"", 1), b"INVALID: GET: expected a wait time"),
        (request(GET, 1, "orders", b"\0" * 7, 1), b"INVALID: GET: expected a wait time"),
        (get(1, limit=0), b"INVALID: limit: 0"),
        (get(1, wait_ms=2**31), b"INVALID: wait_ms"),
        (get(1, tags=[9]), b"INVALID: tag 9: no message"),
        (request(SESSION_ACK, 1, "", b"\1\0\0\0", 2), b"INVALID: count: 2, and 4 bytes"),
        (request(SESSION_ACK, 1, "", b"", 0), b"INVALID: count: 0"),
        (request(session.EXTEND, 1, "", b"\1\0\0\0", 1), b"INVALID: count: 1"),
        (request(session.EXTEND, 1, "", encode_tags([5], 1), 1), b"INVALID: tag 5"),
        (request(session.PUT_MANY, 1, "orders", b"", 3), b"INVALID: PUT_MANY: 3 sizes"),
        (request(session.SESSION_ADD, 1, "../x"), b"INVALID: queue: '../x' is not a queue name"),
        (request(session.SESSION_ADD, 1, "x", b"abc"), b"INVALID: ADD: a body of 3 bytes"),
        (request(PUT, 1, "none", b"x"), b"NOT_FOUND: "),
    ]
    with broker.link() as link:
        for asked, reason in refused:
            link.sendall(asked)
            answer = receive(link)
            assert (answer.status, answer.number) == (1, 1)
            assert answer.body.startswith(reason), (asked, answer.body)
        link.sendall(get(2))
        (given,) = read_given(1, receive(link).body)
        link.sendall(
            encode_session_request(SESSION_ACK, 3, "", encode_tags([given.tag, given.tag]), 2)
        )
        assert receive(link).body.startswith(b"INVALID: tags: one of them is given twice")
        link.sendall(encode_session_request(SESSION_ACK, 4, "", encode_tags([given.tag]), 1))
        assert receive(link).status == 0


def test_bytes_that_are_no_request_end_the_session_after_those_before_them(broker):
    with broker.link() as link:
        link.sendall(encode_session_request(PUT, 1, "orders", b"x") + b"\x7f" * 12)
        assert receive(link).number == 1
        last = receive(link)
        assert (last.status, last.number) == (1, 0)
        assert last.body.startswith(b"PROTOCOL: opcode 0x7f")
        assert link.recv(1) == b""
    assert broker.stats("orders").messages == 1


def test_too_many_waiting_reads_on_one_connection_are_refused(start_broker):
    broker = start_broker(limits=Limits(waits_max=2))
    with broker.connect() as client, broker.link() as link:
        client.add("orders")
        link.sendall(b"".join(get(number, wait_ms=20_000) for number in (1, 2, 3)))
        answer = receive(link)
        assert (answer.number, answer.status) == (3, 1)
        assert answer.body.startswith(b"BUSY: 2 reads wait")
        client.put("orders", b"x")
        assert receive(link).number == 1


def test_a_broker_that_stops_ends_the_waits_and_puts_messages_back(start_broker, quick_path):
    broker = start_broker(engine=open_engine(quick_path / "store"))
    with broker.connect() as client, broker.connect() as other, ThreadPoolExecutor(1) as pool:
        client.add("orders")
        client.put("orders", b"x")
        assert client.get("orders") is not None
        waiting = pool.submit(other.get, "orders", 20)
        until(lambda: broker.stats("orders").waiting_pulls == 1)
        broker.stop()
        with pytest.raises(UnavailableError, match="the test is over"):
            waiting.result(TIMEOUT_S)
    again = start_broker(engine=open_engine(quick_path / "store"))
    assert again.stats("orders").visible == 1


def test_a_client_that_was_interrupted_does_not_take_an_old_answer_for_a_new_one(broker):
    client = broker.connect()
    client._timeout_s = 0.05
    with pytest.raises(UnavailableError):
        client._ask(GET, "orders", encode_tags([], 5_000), 1)
    with pytest.raises(UnavailableError):
        client.put("orders", b"x")


def answer_to_ack(broker, situation, together):
    """The answer to an ACK of one message; `together` with another, or alone."""
    with broker.link() as link:
        tags = []
        for _ in range(2):
            link.sendall(encode_session_request(PUT, 1, "orders", b"x"))
            receive(link)
            link.sendall(get(2))
            answer = receive(link)
            tags += [each.tag for each in read_given(answer.items, answer.body)]
        situation(broker)
        wanted = [9_999] if situation is unknown else tags[:1]
        body = [*wanted, tags[1]] if together else wanted
        if situation is twice:
            link.sendall(encode_session_request(SESSION_ACK, 3, "", encode_tags(tags), 2))
            receive(link)
        link.sendall(encode_session_request(SESSION_ACK, 7, "", encode_tags(body), len(body)))
        answer = receive(link)
        # Of several items an ERROR may begin with a status for each.
        return answer.status, answer.number, answer.body[answer.items :]


def usual(broker):
    pass


def unknown(broker):
    pass


def twice(broker):
    pass


def removed(broker):
    broker.submit(DeleteQueue("orders"))


def timed_out(broker):
    broker.engine_clock.advance(seconds=31)


@pytest.mark.parametrize("situation", [usual, unknown, twice, removed, timed_out])
def test_an_acknowledgement_of_one_message_is_answered_as_one_of_several(start_broker, situation):
    """A single tag has a shorter path."""
    answers = []
    for together in (False, True):
        clock = ManualClock()
        broker = start_broker(clock=clock)
        broker.engine_clock = clock
        assert broker.ask(b"\xf0orders\0") == b"\0\0"
        answers.append(answer_to_ack(broker, situation, together))
    assert answers[0] == answers[1]
    assert (answers[0][0] == 0) is (situation is usual)
