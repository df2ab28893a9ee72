"""The original protocol over real sockets, byte by byte: one request a connection."""

import socket
import struct
import threading

import pytest

from penstock.clock import ManualClock, SystemClock
from penstock.errors import MessageTooLarge, QueueFull, QueueNotFound
from penstock.service import ConfigureQueue, CreateQueue, DeleteQueue, Push
from penstock.wire.carrot.session import SESSION_REMOVE, encode_session_request
from tests.server.carrot.conftest import read_all, read_exactly
from tests.server.conftest import until


def write(queue, message):
    return bytes((0, len(message))) + queue + b"\0" + message


def test_a_message_is_written_read_acknowledged_and_gone(broker):
    answer = broker.ask(write(b"orders", b"hello"))
    assert (answer[:1], answer[-1:], len(answer)) == (b"\0", b"\0", 38)
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        assert read_exactly(link, 7) == b"\0\x05hello"
        assert broker.stats("orders").in_flight == 1
        link.sendall(b"\0")
        assert read_all(link) == b"\0\0"
    assert broker.stats("orders").messages == 0
    assert broker.ask(b"\x0forders\0").startswith(b"\x01EMPTY: ")


@pytest.mark.parametrize("message", [b"", b"\0", b"\0\0\xff\0", bytes(range(255))])
def test_a_message_may_be_any_bytes_up_to_255_of_them(broker, message):
    broker.ask(write(b"orders", message))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        assert read_exactly(link, 2 + len(message)) == bytes((0, len(message))) + message


def test_a_nack_puts_the_message_back_at_the_front(broker):
    for body in (b"first", b"second"):
        broker.ask(write(b"orders", body))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        assert read_exactly(link, 7) == b"\0\x05first"
        link.sendall(b"\x01")
        assert read_all(link).startswith(b"\0the message is at the front")
    with broker.single().read("orders") as message:
        assert message == b"first"


@pytest.mark.parametrize("how", ["close", "half close", "reset"])
def test_a_hang_up_before_the_verdict_puts_the_message_back_at_the_front(broker, how):
    for body in (b"first", b"second"):
        broker.ask(write(b"orders", body))
    link = broker.link()
    link.sendall(b"\x0forders\0")
    assert read_exactly(link, 7) == b"\0\x05first"
    if how == "half close":
        link.shutdown(socket.SHUT_WR)
        assert read_all(link) == b""
    if how == "reset":
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()
    until(lambda: broker.stats("orders").in_flight == 0)
    with broker.single().read("orders") as message:
        assert message == b"first"


def test_silence_until_the_timeout_puts_the_message_back_and_says_so(start_broker):
    from penstock.backends.engine.engine import Engine

    broker = start_broker(engine=Engine(clock=SystemClock()))
    broker.submit(CreateQueue("orders", {"visibility_ms": 300}))
    broker.ask(write(b"orders", b"first"))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        assert read_exactly(link, 7) == b"\0\x05first"
        assert read_all(link).startswith(b"\x01TIMEOUT: no acknowledgement came in time")
    broker.submit(ConfigureQueue("orders", {"visibility_ms": 60_000}))
    with broker.single().read("orders") as message:
        assert message == b"first"


def test_an_acknowledgement_after_the_timeout_is_an_error(start_broker):
    clock = ManualClock()
    broker = start_broker(clock=clock)
    broker.submit(CreateQueue("orders", {}))
    broker.ask(write(b"orders", b"first"))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        assert read_exactly(link, 7) == b"\0\x05first"
        clock.advance(seconds=31)
        link.sendall(b"\0")
        assert read_all(link).startswith(b"\x01TIMEOUT: ")
    assert broker.stats("orders").visible == 1


def test_what_is_neither_ack_nor_nack_puts_the_message_back(broker):
    broker.ask(write(b"orders", b"first"))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        read_exactly(link, 7)
        link.sendall(b"\x07")
        assert read_all(link).startswith(b"\x01PROTOCOL: 0x07 is neither")
    until(lambda: broker.stats("orders").visible == 1)


def test_an_acknowledgement_that_comes_along_with_the_read_is_one(broker):
    broker.ask(write(b"orders", b"first"))
    assert broker.ask(b"\x0forders\0\0") == b"\0\x05first\0\0"
    assert broker.stats("orders").messages == 0


def test_a_full_queue_refuses_a_message_with_the_reason(broker):
    broker.submit(ConfigureQueue("orders", {"messages_max": 1}))
    assert broker.ask(write(b"orders", b"first")).startswith(b"\0")
    answer = broker.ask(write(b"orders", b"second"))
    assert answer.startswith(b"\x01FULL: queue: 'orders' is full with 1 messages")
    assert answer.endswith(b"\0")
    with pytest.raises(QueueFull, match="is full with 1 messages"):
        broker.single().write("orders", b"third")
    assert broker.stats("orders").messages == 1


def test_a_queue_that_does_not_exist_is_an_error_for_all_but_add(broker):
    for request in (write(b"other", b"x"), b"\x0fother\0", b"\xffother\0"):
        assert broker.ask(request).startswith(b"\x01NOT_FOUND: ")
    with pytest.raises(QueueNotFound):
        broker.single().write("other", b"x")
    assert broker.ask(b"\xf0other\0") == b"\0\0"


def test_an_add_that_is_repeated_succeeds_whatever_the_queues_settings(broker):
    assert broker.ask(b"\xf0orders\0") == b"\0\0"
    broker.submit(ConfigureQueue("orders", {"visibility_ms": 1_000}))
    assert broker.ask(b"\xf0orders\0") == b"\0\0"


def test_a_removal_ends_the_read_that_waits_for_its_verdict(broker):
    broker.ask(write(b"orders", b"first"))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        read_exactly(link, 7)
        assert broker.ask(b"\xfforders\0") == b"\0\0"
        assert read_all(link).startswith(b"\x01REMOVED: ")


def test_a_verdict_on_a_queue_that_another_protocol_removed_is_an_error(broker):
    broker.ask(write(b"orders", b"first"))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        read_exactly(link, 7)
        broker.submit(DeleteQueue("orders"))
        broker.submit(CreateQueue("orders", {}))
        link.sendall(b"\0")
        assert read_all(link).startswith(b"\x01REMOVED: ")


def test_a_read_waits_as_long_as_the_queues_own_setting_says(broker):
    broker.submit(ConfigureQueue("orders", {"wait_ms": 20_000}))
    with broker.link() as link:
        link.sendall(b"\x0forders\0")
        until(lambda: broker.stats("orders").waiting_pulls == 1)
        broker.ask(write(b"orders", b"late"))
        assert read_exactly(link, 6) == b"\0\x04late"


def test_a_message_too_long_for_a_read_stays_at_the_front(broker):
    broker.submit(Push("orders", b"x" * 256))
    answer = broker.ask(b"\x0forders\0")
    assert answer.startswith(b"\x01TOO_LARGE: the next message has 256 bytes")
    with pytest.raises(MessageTooLarge), broker.single().read("orders"):
        pass
    assert broker.stats("orders").visible == 1


def test_a_client_may_close_its_side_before_the_answer(broker):
    with broker.link() as link:
        link.sendall(write(b"orders", b"hello"))
        link.shutdown(socket.SHUT_WR)
        assert read_all(link).startswith(b"\0")
    assert broker.stats("orders").messages == 1


def test_a_request_may_come_byte_by_byte(broker):
    with broker.link() as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in write(b"orders", b"hello"):
            link.sendall(bytes((byte,)))
        assert read_all(link).startswith(b"\0")


@pytest.mark.parametrize("name", [b"", b"../x", b"a/b", b"\xff\xfe", b"q" * 81])
def test_an_invalid_name_is_refused_and_makes_no_queue(broker, name):
    assert broker.ask(b"\xf0" + name + b"\0").startswith(b"\x01INVALID: ")


def test_the_words_of_other_protocols_are_refused_and_the_connection_closed(broker):
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\x89PNSTK\1\0", b"\x7f"):
        assert broker.ask(first).startswith(b"\x01PROTOCOL: opcode ")
    assert broker.ask(b"\x0f" + b"q" * 300).startswith(b"\x01PROTOCOL: the queue's id has no NUL")


def test_concurrent_writers_and_readers_exchange_every_message_once(broker):
    """Many connections at once: each message is read by exactly one of them."""
    writers, each = 8, 25
    bodies = [[f"{number}.{i}".encode() for i in range(each)] for number in range(writers)]
    found: list[bytes] = []

    def write_all(some):
        for body in some:
            broker.single().write("orders", body)

    def read_some():
        while len(found) < writers * each:
            with broker.single().read("orders") as message:
                if message is not None:
                    found.append(message)

    threads = [threading.Thread(target=write_all, args=(some,)) for some in bodies]
    threads += [threading.Thread(target=read_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(body for some in bodies for body in some)
    assert broker.stats("orders").messages == 0


def test_the_client_releases_a_message_if_its_block_raises(broker):
    single = broker.single()
    single.write("orders", "hello")
    with pytest.raises(ZeroDivisionError), single.read("orders") as message:
        print(len(message) // 0)
    until(lambda: broker.stats("orders").visible == 1)
    with single.read("orders") as message:
        assert message == b"hello"
    with single.read("orders") as message:
        assert message is None
    single.remove_queue("orders")
    single.add_queue("orders")


@pytest.mark.parametrize(
    "removal",
    [b"\xfforders\0", encode_session_request(SESSION_REMOVE, 1, "orders")],
    ids=["single", "session"],
)
def test_a_removal_by_either_part_ends_reads_that_wait_for_a_message_or_a_verdict(broker, removal):
    broker.submit(ConfigureQueue("orders", {"wait_ms": 20_000}))
    broker.ask(write(b"orders", b"first"))
    with broker.link() as for_verdict, broker.link() as for_message, broker.link() as remover:
        for_verdict.sendall(b"\x0forders\0")
        assert read_exactly(for_verdict, 7) == b"\0\x05first"
        for_message.sendall(b"\x0forders\0")
        until(lambda: broker.stats("orders").waiting_pulls == 1)
        remover.sendall(removal)
        assert read_exactly(remover, 2) == b"\0\0"
        assert read_all(for_message).startswith(b"\x01REMOVED: ")
        assert read_all(for_verdict).startswith(b"\x01REMOVED: ")
    assert broker.ask(b"\x0forders\0").startswith(b"\x01NOT_FOUND: ")
