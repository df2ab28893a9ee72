"""Answers that clients of the frame server and of Carrot do not read: time, memory and order."""

import socket
from contextlib import ExitStack, suppress

import pytest

from penstock.backends import scheduler
from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.server.held import WRITE_PROGRESS_BYTES
from penstock.server.stream import Limits
from penstock.service import CreateQueue, Peek, Pull, Push, Stats
from penstock.wire.carrot.session import PUT, encode_session_request
from penstock.wire.frames.bodies import DECODE_REPLY, encode_command
from penstock.wire.frames.frames import decode_answer
from tests.measure import SLACK, memory_bytes
from tests.server.carrot.conftest import BrokerInThread
from tests.server.carrot.test_session import get, receive
from tests.server.conftest import DaemonProcess, ServerInThread, limit_times, until
from tests.server.frames.test_ipc import FrameWire, SlowJournal
from tests.server.probe import probing

MIB = 1024 * 1024
BODY_BYTES = 100_000
MESSAGES = 60


class FramePeer:
    """A frame server whose clients peek at messages of 100 kB."""

    def __init__(self, directory, limits):
        self._running = ServerInThread(directory, limits=limits)
        self.call, self.stop = self._running.call, self._running.stop
        self.server = self._running.frames
        with FrameWire(self._running) as wire:
            wire.ask(1, CreateQueue("orders"))
            wire.ask(2, Push("orders", bytes(BODY_BYTES)))
        until(lambda: not self.server.connections)

    def connect(self):
        self._wire = FrameWire(self._running)
        return self._wire.link

    def small(self, number):
        return encode_command(number, Stats("orders"))

    def large(self, number):
        return encode_command(number, Peek("orders"))

    def next_number(self, link):
        """The request that the next answer on the last connection is for."""
        return self._wire.next()[1]


class CarrotPeer:
    """A Carrot broker whose clients get messages of 100 kB."""

    def __init__(self, directory, limits):
        self._running = BrokerInThread(limits=limits)
        self.call, self.stop = self._running.call, self._running.stop
        self.server = self._running.server
        self._running.submit(CreateQueue("orders"))
        for _ in range(MESSAGES):
            self._running.submit(Push("orders", bytes(BODY_BYTES)))

    def connect(self):
        return self._running.link()

    def small(self, number):
        return encode_session_request(PUT, number, "none", b"x")

    def large(self, number):
        return get(number)

    def next_number(self, link):
        return receive(link).number


@pytest.fixture(params=[FramePeer, CarrotPeer])
def start(request, tmp_path):
    started = []

    def start(**limits):
        started.append(request.param(tmp_path, Limits(**limits)))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def connect(peer, stack):
    """A client that has asked for something small, and the server's side of its connection."""
    before = set(peer.server.connections)
    link = stack.enter_context(peer.connect())
    link.sendall(peer.small(1))
    assert peer.next_number(link) == 1
    (connection,) = peer.server.connections - before
    # Most of an answer that is not read stays in the server's memory.
    wire = connection.transport.get_extra_info("socket")
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
    return link, connection


def unsent_bytes(peer, connection):
    return peer.call(lambda: connection.transport.get_write_buffer_size())


def leave_unread(peer, link, connection, least_bytes):
    """Ask for messages until so much of the answers is in the server's memory."""
    while unsent_bytes(peer, connection) < least_bytes:
        seen = peer.server.requests_seen
        link.sendall(peer.large(2))
        until(lambda seen=seen: peer.server.requests_seen > seen)


def stop_sweeps(peer):
    """The server's own sweeps end: a test gives the times itself, and no sweep at the real time
    may see progress in between."""
    peer.call(lambda: peer.server._sweep_timer.cancel())


def is_ended_at(peer, connection, now_s):
    """Whether a sweep at this time closes the connection."""
    peer.call(lambda: connection.check_progress(now_s))
    return peer.call(lambda: connection.ending)


def test_a_few_answers_that_are_not_read_end_their_connection(start):
    """Row 13: less than the limit at which a connection is not read any more."""
    peer = start()
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        leave_unread(peer, link, connection, 400_000)
        assert peer.call(lambda: not connection.writing_paused)
        limit_times(peer.call, peer.server, stall_s_max=0.4)
        until(lambda: not peer.server.connections)
        assert peer.call(lambda: peer.server.held.total_bytes) == 0


def test_further_requests_give_no_more_time_to_read_the_answers(start):
    """Row 13: by the default limits."""
    peer = start()
    stop_sweeps(peer)
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        leave_unread(peer, link, connection, 400_000)
        now_s = peer.server.loop.time()
        assert not is_ended_at(peer, connection, now_s)
        assert not is_ended_at(peer, connection, now_s + 29)
        # The system may take a little more before its buffers are full.
        for after_s in range(30, 300, 10):
            seen = peer.server.requests_seen
            link.sendall(peer.small(3))
            until(lambda seen=seen: peer.server.requests_seen > seen)
            if is_ended_at(peer, connection, now_s + after_s):
                break
        else:
            pytest.fail("it was not ended")


def test_a_client_that_reads_slowly_has_as_much_time_as_it_needs(start):
    """Row 13: what counts is that it reads some, not how long the whole takes."""
    peer = start()
    stop_sweeps(peer)
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        leave_unread(peer, link, connection, 500_000)
        now_s = peer.server.loop.time()
        for step in range(6):
            assert not is_ended_at(peer, connection, now_s + 25 * step)
            wanted = unsent_bytes(peer, connection) - WRITE_PROGRESS_BYTES
            while unsent_bytes(peer, connection) > wanted:
                assert link.recv(4_096)
        now_s += 25 * 6
        assert not is_ended_at(peer, connection, now_s)
        # The system may still take bytes for what was read last; then nothing moves any more.
        assert any(is_ended_at(peer, connection, now_s + 31 * later) for later in range(1, 10))


def test_over_the_limit_of_all_connections_those_that_hold_the_most_are_ended(start):
    """Row 13."""
    peer = start(held_bytes_max=1_500_000)
    with ExitStack() as stack:
        clients = [connect(peer, stack) for _ in range(3)]
        for (link, connection), size in zip(clients, (300_000, 900_000, 500_000), strict=True):
            leave_unread(peer, link, connection, size)
        (first, second, third) = (connection for _, connection in clients)
        until(lambda: second not in peer.server.connections)
        assert peer.server.connections == {first, third}
        held = peer.server.held
        assert peer.call(lambda: held.aborted) == 1
        assert peer.call(lambda: held.total_bytes == first.held_bytes + third.held_bytes)
    until(lambda: not peer.server.connections)
    assert peer.server.held.total_bytes == 0


def test_requests_wait_while_answers_are_not_read_and_keep_their_order(start):
    """Row 13: one read may bring requests whose answers are a thousand times as large."""
    peer = start()
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        numbers = list(range(2, MESSAGES + 2))
        link.sendall(b"".join(map(peer.large, numbers)))
        until(lambda: peer.call(lambda: connection._backlog and connection.must_wait))
        held_bytes = peer.call(lambda: peer.server.held.total_bytes)
        assert MIB < held_bytes < MIB + 3 * BODY_BYTES
        assert [peer.next_number(link) for _ in numbers] == numbers
        link.sendall(peer.small(1))
        assert peer.next_number(link) == 1
        until(lambda: peer.server.held.total_bytes == 0)


def test_bytes_that_are_no_request_are_refused_after_the_requests_before_them(start):
    peer = start()
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        numbers = list(range(2, 52))
        link.sendall(b"".join(map(peer.large, numbers)) + b"\xee" * 32)
        until(lambda: peer.call(lambda: connection._backlog and connection.must_wait))
        assert [peer.next_number(link) for _ in numbers] == numbers
        assert peer.next_number(link) == 0
        until(lambda: not peer.server.connections)


def test_a_server_stops_while_requests_wait_for_a_client_that_does_not_read(start):
    peer = start()
    with ExitStack() as stack:
        link, connection = connect(peer, stack)
        link.sendall(b"".join(map(peer.large, range(2, 52))))
        until(lambda: peer.call(lambda: connection._backlog and connection.must_wait))
        peer.call(lambda: peer.server.loop.call_later(0.2, connection.abort))
        peer.stop()
    assert not peer.server.connections


def test_frames_that_wait_for_their_turn_keep_the_order_of_their_connection(serve, monkeypatch):
    """Row 20: every request that may take long waits in a line here, the pushes between do not."""
    monkeypatch.setattr(scheduler, "SLOW_S", -1.0)
    server = serve()
    with FrameWire(server) as wire:
        wire.ask(1, CreateQueue("orders"))
        for first in range(1, 100, 3):
            wire.send(
                (first, Push("orders", b"x")),
                (first + 1, Stats("orders")),
                (first + 2, Push("orders", b"x")),
            )
        pushed = 0
        for number in range(1, 100):
            kind, request, body = wire.next()
            assert request == number
            if number % 3 == 2:
                assert decode_answer(kind, body, DECODE_REPLY[Stats]).messages == pushed
            else:
                pushed += 1
    assert server.call(lambda: server.frames.deferred) == 0


def test_requests_of_lost_connections_do_not_wait_any_more(serve, monkeypatch):
    """Row 20: what waited for its turn is not counted any more."""
    monkeypatch.setattr(scheduler, "SLOW_S", -1.0)
    server = serve()
    with FrameWire(server) as wire:
        wire.ask(1, CreateQueue("orders"))
        wire.ask(2, Stats("orders"))
        large = encode_command(3, Push("orders", bytes(100_000)))
        with ExitStack() as stack:
            wires = [stack.enter_context(FrameWire(server)) for _ in range(20)]
            for each in wires:
                each.link.sendall(large)
        until(lambda: len(server.frames.connections) == 1)
        assert server.call(lambda: server.frames.deferred) == 0
        assert server.call(lambda: server.frames.held.total_bytes) == 0
        assert wire.ask(4, Stats("orders")).messages <= len(wires)


def test_requests_wait_while_the_messages_before_them_are_not_durable(serve):
    """Row 13: claims that wait for the disk are in memory, too."""
    journal = SlowJournal()
    server = serve(engine=Engine(journal, ManualClock()))
    count = 40
    with FrameWire(server) as wire:
        pushes = [(n, Push("orders", bytes(BODY_BYTES))) for n in range(2, count + 2)]
        wire.send((1, CreateQueue("orders")), *pushes)
        until(lambda: server.frames.deferred == count + 1)
        server.call(journal.sync)
        assert [wire.next()[1] for _ in range(count + 1)] == list(range(1, count + 2))
        numbers = list(range(1, count + 1))
        wire.send(*((n, Pull("orders")) for n in numbers))
        until(lambda: server.frames.held.total_bytes > MIB)
        assert server.call(lambda: server.frames.deferred) == 11
        assert server.call(lambda: server.frames.held.total_bytes) < MIB + 2 * BODY_BYTES
        answered: list[int] = []
        while len(answered) < count:
            executed = min(11, count - len(answered))
            until(lambda executed=executed: server.frames.deferred == executed)
            server.call(journal.sync)
            answered += [wire.next()[1] for _ in range(executed)]
        assert answered == numbers
        until(lambda: server.frames.held.total_bytes == 0)


def test_answers_of_frames_that_are_not_read_are_limited_over_all_connections(
    store, record_property
):
    """Row 13: 100 clients that ask for 8 MiB each and do not read it; by the default limits."""
    clients, limit_bytes = 100, Limits().held_bytes_max
    daemon = DaemonProcess(store, "--listen", "127.0.0.1:0")
    try:
        pid = daemon.process.pid
        with ExitStack() as stack:
            owner = stack.enter_context(FrameWire(daemon, tcp=True))
            owner.ask(1, CreateQueue("orders"))
            for _ in range(8):
                owner.ask(2, Push("orders", bytes(MIB - 1_000)))
            peek = encode_command(3, Peek("orders", 8))
            before_bytes = memory_bytes(pid)
            with probing(daemon.port, pid, "frames") as seen:
                # The last one asks for as much as the others together, in one write.
                for count in [*([1] * clients), clients]:
                    wire = stack.enter_context(FrameWire(daemon, tcp=True))
                    wire.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                    wire.link.sendall(peek * count)
                    with suppress(ConnectionError):
                        wire.link.recv(1)
            peak_bytes = seen.peak_bytes - before_bytes
            taken = f"{peak_bytes / MIB:.0f} MiB, {seen.longest_ms:.0f} ms"
            record_property("figure", f"{clients} unread answers of frames: {taken}")
            assert 0.5 * limit_bytes < peak_bytes <= limit_bytes + 96 * MIB
            assert seen.longest_ms <= 200 * SLACK
    finally:
        assert daemon.stop() == ""
