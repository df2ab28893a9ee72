"""Requests of many items over the Carrot extension: served in parts, in order, others between."""

import socket
import struct
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from penstock import carrot
from penstock.backends import scheduler
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.errors import StoreFull
from penstock.server.process import allow_many_files
from penstock.service import CreateQueue, DeleteQueue, PushMany, Stats
from penstock.wire.carrot.session import (
    EXTEND,
    PUT,
    PUT_MANY,
    READ_ITEMS_MAX,
    SESSION_ACK,
    SESSION_NACK,
    SessionDecoder,
    encode_messages,
    encode_session_request,
    encode_tags,
    read_given,
    read_messages,
)
from tests.conftest import FULL
from tests.measure import IN_SCORE, SLACK
from tests.server.carrot.test_serve import carrot_port, server  # noqa: F401
from tests.server.carrot.test_session import get, receive
from tests.server.conftest import TIMEOUT_S, in_each_turn, until
from tests.server.probe import probing
from tests.server.sqs.test_attacks import LONGEST_MS_MAX, ROUNDS

MANY = 10_000
STEP_MS_MAX = 50 * SLACK
# Connections that send a request at one instant.
CROWD = 1_000 if IN_SCORE else 100


def put_many(number, bodies, queue="orders"):
    body = encode_messages(bodies)
    return encode_session_request(PUT_MANY, number, queue, body, len(bodies))


def take(link, number, count):
    """So many tags of messages that are read now."""
    tags: list[int] = []
    while len(tags) < count:
        link.sendall(get(number, limit=count - len(tags)))
        answer = receive(link)
        assert answer.items, "the queue has fewer"
        tags += [given.tag for given in read_given(answer.items, answer.body)]
    return tags


@contextmanager
def watching(broker, queue):
    """What others see of a queue, messages and those in flight, in each turn of the event loop."""
    seen: set[tuple[int, int]] = set()

    def look():
        stats = broker.server.service.submit(Stats(queue))
        seen.add((stats.messages, stats.in_flight))

    with in_each_turn(broker, look):
        yield seen


@pytest.mark.parametrize("queue", ["orders", "orders.fifo"])
def test_a_put_of_many_is_one_answer_and_later_requests_of_its_connection_come_after_it(
    start_broker, queue
):
    """Row 20: 10,000 messages are stored in parts, and nothing of the same client gets between."""
    broker = start_broker()
    broker.submit(CreateQueue(queue, {"fifo": True} if queue.endswith("fifo") else {}))
    bodies = [b"%d" % number for number in range(MANY)]
    with watching(broker, queue) as seen, broker.link() as link:
        last = encode_session_request(PUT, 2, queue, b"last")
        link.sendall(put_many(1, bodies, queue) + last)
        answers = [receive(link), receive(link)]
        assert [(each.number, each.status) for each in answers] == [(1, 0), (2, 0)]
    between = {messages for messages, _ in seen} - {0, MANY, MANY + 1}
    assert len(between) >= 3, "nobody was served between the parts"
    # A FIFO queue gives one at a time; its order is read by other means.
    found = []
    if queue == "orders":
        with broker.connect() as client:
            while messages := client.get_many(queue, MANY):
                assert len(messages) <= READ_ITEMS_MAX
                found += [message.body for message in messages]
                client.ack(messages)
        assert found == [*bodies, b"last"]
    else:
        with broker.connect() as client:
            for body in bodies[:20]:
                with client.get(queue) as message:
                    assert message.body == body


@pytest.mark.parametrize(
    ("opcode", "first", "in_flight"),
    [(SESSION_ACK, None, 0), (SESSION_NACK, None, 0), (EXTEND, 60_000, MANY)],
)
def test_a_verdict_on_many_is_one_answer_and_others_are_served_before_it_is_done(
    broker, opcode, first, in_flight
):
    """Row 20: 10,000 tags are settled in parts."""
    broker.submit(PushMany("orders", [b"x"] * MANY))
    with broker.link() as link:
        tags = take(link, 1, MANY)
        with watching(broker, "orders") as seen:
            link.sendall(encode_session_request(opcode, 2, "", encode_tags(tags, first), MANY))
            assert (receive(link).status, broker.stats("orders").in_flight) == (0, in_flight)
    between = {in_flight for _, in_flight in seen} - {0, MANY}
    assert len(between) >= 10 or opcode == EXTEND, "nobody was served between the parts"
    until(lambda: broker.stats("orders").in_flight == 0)
    assert broker.stats("orders").messages == (0 if opcode == SESSION_ACK else MANY)


@pytest.mark.parametrize("acknowledged", [0, 1])
def test_a_get_of_many_is_one_answer_and_later_requests_of_its_connection_come_after_it(
    broker, acknowledged
):
    """Row 20: 2,000 messages are claimed in parts."""
    bodies = [b"%d" % number for number in range(4_001)]
    broker.submit(PushMany("orders", bodies))
    with broker.link() as link:
        tags = take(link, 1, acknowledged) if acknowledged else None
        with watching(broker, "orders") as seen:
            first = get(2, limit=MANY, tags=tags) if tags else get(2, limit=MANY)
            link.sendall(first + get(3, limit=MANY))
            answers = [receive(link), receive(link)]
    found = [given.body for answer in answers for given in read_given(answer.items, answer.body)]
    assert found == bodies[acknowledged : acknowledged + 4_000]
    between = {in_flight for _, in_flight in seen} - {0, 2_000, 4_000}
    assert {500, 1_000, 1_500, 2_500} <= between, "nobody was served between the parts"


def test_a_get_that_acknowledges_many_reads_after_the_last_of_them(broker):
    broker.submit(PushMany("orders", [b"x"] * 3_000 + [b"next"]))
    with broker.link() as link:
        tags = take(link, 1, 3_000)
        link.sendall(get(2, tags=tags) + get(3))
        (given,) = read_given(1, receive(link).body)
        assert given.body == b"next"
        assert receive(link).items == 0
        stats = broker.stats("orders")
        assert (stats.messages, stats.in_flight) == (1, 1)


def test_a_client_that_leaves_amid_a_get_that_acknowledges_many_leaves_nothing_in_flight(broker):
    broker.submit(PushMany("orders", [b"x"] * 5_000))
    link = broker.link()
    tags = take(link, 1, 5_000)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.sendall(get(2, tags=tags, wait_ms=0))
    until(lambda: broker.stats("orders").messages < 5_000)
    link.close()
    until(lambda: not broker.server.connections)
    until(lambda: broker.stats("orders").in_flight == 0)


def test_a_fault_after_a_request_in_parts_is_answered_after_it(broker):
    with broker.link() as link:
        link.sendall(put_many(1, [b"x"] * MANY) + b"\xff" * 12)
        assert (receive(link).number, receive(link).number) == (1, 0)
    assert broker.stats("orders").messages == MANY


def test_requests_sent_while_a_request_is_in_parts_are_taken_in_their_order(broker):
    bodies = [b"%d" % number for number in range(300)]
    with broker.link() as link:
        link.sendall(put_many(1, [b"x"] * MANY))
        for number, body in enumerate(bodies, 2):
            link.sendall(encode_session_request(PUT, number, "orders", body))
        assert [receive(link).number for _ in range(301)] == [*range(1, 302)]
        tags = take(link, 400, MANY)
        link.sendall(encode_session_request(SESSION_ACK, 401, "", encode_tags(tags), MANY))
        assert receive(link).status == 0
        link.sendall(get(402, limit=300))
        answer = receive(link)
        assert [given.body for given in read_given(300, answer.body)] == bodies


def test_a_disk_that_fills_between_the_parts_refuses_the_rest(start_broker, tmp_path, monkeypatch):
    engine = open_engine(tmp_path / "store", clock=ManualClock())
    broker = start_broker(engine=engine)
    broker.submit(CreateQueue("orders"))
    rooms: list[int] = []
    make_room: Any = engine._make_room

    def no_room_after_two(*arguments):
        rooms.append(1)
        if len(rooms) > 2:
            raise StoreFull("the disk is full")
        return make_room(*arguments)

    broker.call(lambda: monkeypatch.setattr(engine, "_make_room", no_room_after_two))
    with broker.link() as link:
        link.sendall(put_many(1, [b"x"] * MANY))
        answer = receive(link)
    assert (answer.status, answer.items) == (1, MANY)
    assert answer.body[:5_000] == bytes(5_000)
    assert answer.body[5_000:MANY] == b"\1" * 5_000
    assert answer.body[MANY:].startswith(b"FULL: the disk is full")
    monkeypatch.undo()
    assert broker.stats("orders").messages == 5_000


def test_a_large_put_of_many_is_cut_by_its_bytes_and_not_copied_as_a_whole():
    bodies = [bytes([number]) * 1_500_000 for number in range(8)]
    sent = put_many(1, bodies) + encode_session_request(PUT, 2, "orders", b"small")
    decoder = SessionDecoder()
    assert decoder.feed(sent[:100_000]) == []
    many: Any
    many, small = decoder.feed(sent[100_000:])
    assert small == (PUT, 0, 2, b"orders", b"small")
    assert type(many[4]) is memoryview
    assert many[3] == b"orders"
    parts = list(read_messages(many[1], many[4]))
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert [body for part in parts for body in part] == bodies


def test_no_request_of_the_extension_delays_the_others(server, record_property):  # noqa: F811
    """Row 20: the longest answer to a probe while 10,000 items are put, read and settled."""
    web = int(server.url.rpartition(":")[2])
    longest_ms = []
    with carrot.connect("127.0.0.1", carrot_port(server)) as client:
        for turn in range(10 if FULL else 3):
            with probing(web, server.process.pid) as seen:
                use_large_requests(client, f"many-{turn}")
            longest_ms.append(seen.longest_ms)
    # A step that is too long is so in every turn; a pause of the machine is not.
    record_property("figure", f"{min(longest_ms):.0f} ms")
    assert min(longest_ms) <= STEP_MS_MAX


def test_requests_that_wait_for_their_turn_keep_the_order_of_their_connection(broker, monkeypatch):
    """Row 20: every PUT_MANY waits in a line here, the PUTs between do not."""
    monkeypatch.setattr(scheduler, "SLOW_S", -1.0)
    sent = [b"%d" % number for number in range(300)]
    with broker.link() as link:
        for first in range(0, 300, 3):
            link.sendall(
                put_many(first + 1, sent[first : first + 2])
                + encode_session_request(PUT, first + 3, "orders", sent[first + 2])
            )
        assert [receive(link).number for _ in range(200)] == [
            number for number in range(1, 301) if number % 3 != 2
        ]
    with broker.connect() as client:
        assert [message.body for message in client.get_many("orders", MANY)] == sent


CROWDED = {
    "puts": put_many(1, [b"x"] * 1_000, "crowd"),
    "gets": get(1, "crowd", limit=MANY),
    "gets of a few": get(1, "crowd", limit=100),
}


@pytest.mark.parametrize("case", CROWDED)
def test_requests_of_many_connections_at_one_instant_do_not_delay_others(
    server,  # noqa: F811
    case,
    record_property,
):
    """Row 20: the connections are open before."""
    allow_many_files()
    web, port = server.port, carrot_port(server)
    least_ms, answers = float("inf"), 0
    with carrot.connect("127.0.0.1", port) as client:
        client.add("crowd", visibility_timeout=600)
        for _ in range(ROUNDS):
            client.put_many("crowd", [b"x"] * MANY)
            with ExitStack() as stack:
                links = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
                    for _ in range(CROWD)
                ]
                with probing(web, server.process.pid) as seen:
                    for link in links:
                        link.sendall(CROWDED[case])
                    assert {receive(link).number for link in links} == {1}
            least_ms, answers = min(least_ms, seen.longest_ms), seen.answers
            if least_ms <= LONGEST_MS_MAX:
                break
    record_property("figure", f"{least_ms:.0f} ms, {CROWD} connections")
    assert least_ms <= LONGEST_MS_MAX
    # Also if the crowd is small: the probe is answered between its requests, which take less time
    # on a faster machine.
    assert answers >= 3


def use_large_requests(client, queue):
    """Puts, reads, extends, returns and deletes many messages with one request each."""
    for name in (queue, queue + ".fifo"):
        client.add(name)
        client.put_many(name, [b"x" * 256] * MANY)
    messages: list[Any] = []
    while len(messages) < MANY:
        messages += client.get_many(queue, MANY)
    client.extend(messages, 60)
    client.nack(messages)
    messages = []
    while len(messages) < MANY:
        messages += client.get_many(queue, MANY)
    client.ack(messages)
    client.put_many(queue, [b"x" * 1_000_000] * 40)
    for name in (queue, queue + ".fifo"):
        client.remove(name)


def test_a_removal_between_the_parts_of_a_put_ends_it_with_the_reason(broker):
    def remove_when_begun():
        service, loop = broker.server.service, broker.server.loop
        if service.submit(Stats("orders")).messages:
            service.submit(DeleteQueue("orders"))
        else:
            loop.call_soon(remove_when_begun)

    with broker.link() as link:
        broker.call(remove_when_begun)
        link.sendall(put_many(1, [b"x"] * MANY))
        answer = receive(link)
        statuses, reason = answer.body[: answer.items], answer.body[answer.items :]
        stored = statuses.count(0)
        assert (answer.status, answer.items) == (1, MANY)
        assert 0 < stored < MANY
        assert statuses == b"\0" * stored + b"\1" * (MANY - stored)
        assert reason.startswith(b"REMOVED: ")
        link.sendall(get(2))
        assert receive(link).body.startswith(b"NOT_FOUND: ")
