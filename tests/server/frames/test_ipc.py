"""The frame server, tested with bytes: pipelining, waiting, durability, limits, wrong clients."""

import os
import random
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.backends.remote.blocking import Remote
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.errors import (
    JournalError,
    Overloaded,
    ProtocolError,
    QueueDeleted,
    QueueNotFound,
    UnavailableError,
)
from penstock.journal import MemoryJournal
from penstock.server.frames.server import Limits
from penstock.service import (
    Batch,
    BatchItem,
    CreateQueue,
    Delete,
    DeleteQueue,
    History,
    Peek,
    Pull,
    Push,
    PushMany,
    PushReply,
    Stats,
)
from penstock.wire.frames.bodies import DECODE_REPLY, encode_command
from penstock.wire.frames.bulk import decode_bulk_reply, encode_bulk
from penstock.wire.frames.frames import (
    CANCEL,
    ERROR,
    FRAME_BYTES_MAX,
    GOODBYE,
    HEADER,
    PRELUDE,
    REPLY,
    STATUS,
    WELCOME,
    FrameDecoder,
    Hello,
    decode_answer,
    decode_status,
    encode_hello,
    pack,
    server_limits,
)
from tests.server.conftest import TIMEOUT_S, limit_times, until


class FrameWire:
    """A client that sends bytes and receives frames."""

    def __init__(self, server, *, hello=True, tcp=False):
        if tcp:
            self.link = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
        else:
            self.link = socket.socket(socket.AF_UNIX)
            self.link.settimeout(TIMEOUT_S)
            self.link.connect(str(server.path))
        self.decoder = FrameDecoder("server", server_limits())
        self.frames = []
        if hello:
            self.link.sendall(encode_hello(Hello("test")))
            assert self.next()[0] == WELCOME

    def next(self):
        while not self.frames:
            data = self.link.recv(65_536)
            if not data:
                raise EOFError
            self.frames += self.decoder.feed(data)
            assert self.decoder.error is None
        return self.frames.pop(0)

    def send(self, *requests):
        self.link.sendall(b"".join(encode_command(*each) for each in requests))

    def ask(self, request, command):
        self.send((request, command))
        kind, number, body = self.next()
        assert number == request
        return decode_answer(kind, body, DECODE_REPLY[type(command)])

    def is_closed_by_server(self):
        """Whether the server closes the connection, whatever it sends before."""
        try:
            while self.link.recv(65_536):
                pass
        except ConnectionResetError:
            pass
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def wire(server):
    with FrameWire(server) as wire:
        wire.ask(1, CreateQueue("orders"))
        yield wire


class SlowJournal(MemoryJournal):
    """Durable when the test says so."""

    def __init__(self):
        super().__init__(1_000)
        self.durable_sequence = 0
        self.waiting = []
        self.failure = None
        self._appended = 0

    def append(self, events):
        self._appended += 1
        return self._appended, ()

    def wait(self, sequence):
        if self.failure is not None:
            raise self.failure

    def notify(self, sequence, done):
        self.waiting.append((sequence, done))

    def sync(self):
        self.durable_sequence = self._appended
        self.call_waiting()

    def fail(self):
        self.failure = JournalError("the disk is gone")
        self.call_waiting()

    def call_waiting(self):
        waiting, self.waiting = self.waiting, []
        for _, done in waiting:
            done()


@pytest.fixture
def slow(serve):
    journal = SlowJournal()
    server = serve(engine=Engine(journal, ManualClock()))
    with FrameWire(server) as wire:
        wire.send((1, CreateQueue("orders")))
        until(lambda: journal.waiting)
        journal.sync()
        assert wire.next()[1] == 1
        yield journal, server, wire
    journal.sync()


# Pipelining.


def test_many_requests_in_one_write_are_all_answered(wire):
    wire.send(*[(n, Push("orders", b"%d" % n)) for n in range(2, 502)])
    answers = [wire.next() for _ in range(500)]
    assert [request for _, request, _ in answers] == list(range(2, 502))
    assert {kind for kind, _, _ in answers} == {REPLY}


def test_a_pull_that_waits_delays_no_other_request(wire):
    wire.send((2, Pull("orders", wait_ms=60_000)), (3, Stats("orders")), (4, Push("orders", b"x")))
    order = [wire.next() for _ in range(3)]
    assert order[0][1] == 3
    assert DECODE_REPLY[Stats](order[0][2]).waiting_pulls == 1
    assert {request for _, request, _ in order[1:]} == {2, 4}
    pulled = next(body for _, request, body in order if request == 2)
    (claim,) = DECODE_REPLY[Pull](pulled)
    assert claim.body == b"x"
    assert isinstance(claim.proof, str)


def test_pulls_that_wait_on_two_connections_are_served_in_turns(server, wire):
    waits = Pull("orders", 1, 30_000, 20_000)
    with FrameWire(server) as modest, FrameWire(server) as other:
        wire.send(*((number, waits) for number in range(2, 202)))
        until(lambda: other.ask(9, Stats("orders")).waiting_pulls == 200)
        modest.send((1, waits), (2, waits))
        until(lambda: other.ask(9, Stats("orders")).waiting_pulls == 202)
        for number in range(4):
            other.ask(9, Push("orders", b"%d" % number))
        assert [wire.next()[1], wire.next()[1]] == [2, 3]
        assert [modest.next()[1], modest.next()[1]] == [1, 2]


def test_a_claim_names_the_connection_unless_the_pull_names_somebody(tmp_path, serve):
    engine = open_engine(tmp_path / "named", clock=ManualClock())
    with FrameWire(serve(engine=engine)) as wire:
        wire.ask(1, CreateQueue("orders"))
        names = []
        for pull in (Pull("orders"), Pull("orders", holder="Ada")):
            message_id = wire.ask(1, Push("orders", b"x")).id
            wire.ask(1, pull)
            names.append(wire.ask(1, History(message_id))[-1].holder)
    assert names[0].startswith(f"penstock (process {os.getpid()}, ")
    assert names[1] == "Ada"


def test_a_refused_request_leaves_the_connection_as_it_was(wire):
    with pytest.raises(QueueNotFound):
        wire.ask(2, Push("nowhere", b"x"))
    assert wire.ask(3, Push("orders", b"x")).sequence == 1


def test_requests_may_come_along_with_the_hello(server):
    with FrameWire(server, hello=False) as wire:
        wire.link.sendall(encode_hello(Hello("test")) + pack(STATUS, 7))
        assert wire.next()[0] == WELCOME
        kind, request, body = wire.next()
        assert (kind, request) == (REPLY, 7)
        assert decode_status(body)["pid"] == os.getpid()


# Waiting.


def test_a_pull_that_waits_on_a_deleted_queue_gets_an_error_at_once(server, wire):
    with FrameWire(server) as other:
        other.send((1, Pull("orders", wait_ms=60_000)))
        until(lambda: wire.ask(2, Stats("orders")).waiting_pulls == 1)
        wire.ask(3, DeleteQueue("orders"))
        kind, request, body = other.next()
        assert request == 1
        with pytest.raises(QueueDeleted, match="orders"):
            decode_answer(kind, body, DECODE_REPLY[Pull])


def test_the_waits_of_a_broken_connection_end(server, wire):
    with FrameWire(server) as other:
        other.send((1, Pull("orders", wait_ms=60_000)))
        until(lambda: wire.ask(2, Stats("orders")).waiting_pulls == 1)
    until(lambda: wire.ask(2, Stats("orders")).waiting_pulls == 0)
    wire.ask(3, Push("orders", b"x"))
    assert wire.ask(4, Stats("orders")).visible == 1


def test_a_pull_can_be_cancelled(wire):
    wire.send((2, Pull("orders", wait_ms=60_000)))
    wire.link.sendall(pack(CANCEL, 2))
    kind, request, body = wire.next()
    assert (kind, request, DECODE_REPLY[Pull](body)) == (REPLY, 2, [])
    wire.ask(3, Push("orders", b"x"))
    assert wire.ask(4, Stats("orders")).visible == 1


def test_cancelling_an_answered_pull_changes_nothing(wire):
    wire.ask(2, Push("orders", b"x"))
    wire.link.sendall(pack(CANCEL, 2) + pack(CANCEL, 99))
    assert wire.ask(3, Stats("orders")).visible == 1


def test_a_wait_ends_when_its_time_is_over(serve):
    clock = ManualClock()
    with FrameWire(serve(clock=clock)) as wire:
        wire.ask(1, CreateQueue("orders"))
        wire.send((2, Pull("orders", wait_ms=5_000)))
        until(lambda: wire.ask(3, Stats("orders")).waiting_pulls == 1)
        clock.advance(seconds=5)
        assert wire.next() == (REPLY, 2, b"\x90")


def test_a_request_number_that_still_waits_cannot_be_used_again(wire):
    wire.send((2, Pull("orders", wait_ms=60_000)), (2, Pull("orders", wait_ms=60_000)))
    kind, request, body = wire.next()
    assert (kind, request) == (ERROR, 0)
    with pytest.raises(ProtocolError, match="request 2 again"):
        decode_answer(kind, body, bytes)
    assert wire.is_closed_by_server()


def test_a_connection_may_have_only_so_many_pulls_waiting(serve):
    with FrameWire(serve(limits=Limits(waits_max=2))) as wire:
        wire.ask(1, CreateQueue("orders"))
        wire.send((2, Pull("orders", wait_ms=60_000)), (3, Pull("orders", wait_ms=60_000)))
        with pytest.raises(UnavailableError, match="2 pulls wait"):
            wire.ask(4, Pull("orders", wait_ms=60_000))


def test_a_claim_too_large_for_a_frame_returns_and_the_line_goes_on(serve):
    # The push fits into a frame; the claim, which has more fields, does not.
    with FrameWire(serve(limits=Limits(frame_bytes_max=4_096))) as wire:
        wire.ask(1, CreateQueue("orders"))
        wire.send((2, Pull("orders", wait_ms=60_000)), (3, Pull("orders", wait_ms=60_000)))
        wire.send((4, Push("orders", b"x" * 4_000)))
        answers = {}
        for _ in range(3):
            kind, request, body = wire.next()
            answers[request] = (kind, body)
        assert answers[4][0] == REPLY
        for request in (2, 3):
            with pytest.raises(UnavailableError, match="pull fewer"):
                decode_answer(*answers[request], bytes)
        assert wire.ask(5, Stats("orders")).visible == 1
        assert wire.ask(6, Stats("orders")).waiting_pulls == 0


# Durability.


def test_nothing_is_answered_before_it_is_durable_and_one_notice_serves_many(slow):
    journal, _, wire = slow
    wire.send(*[(n, Push("orders", b"x")) for n in range(2, 12)], (12, Stats("orders")))
    # A peek need not be durable, so it is answered before requests that wait for the disk.
    assert wire.next()[1] == 12
    until(lambda: journal.waiting)
    assert len(journal.waiting) == 1
    journal.sync()
    assert [wire.next()[1] for _ in range(10)] == list(range(2, 12))


def test_a_client_with_many_answers_waiting_for_the_disk_is_not_read_from(serve):
    journal = SlowJournal()
    server = serve(engine=Engine(journal, ManualClock()), limits=Limits(deferred_max=4))
    with FrameWire(server) as wire:
        wire.send((1, CreateQueue("orders")))
        (connection,) = until(lambda: server.frames.connections)
        for number in range(2, 40):
            wire.send((number, Push("orders", b"x")))
        until(lambda: connection._reading_paused)
        answered: list[int] = []
        while len(answered) < 39:
            until(lambda: journal.waiting)
            journal.sync()
            answered.append(wire.next()[1])
            answered += [request for _, request, _ in wire.frames]
            wire.frames.clear()
        assert answered == list(range(1, 40))


def test_claims_for_a_broken_connection_are_released(slow):
    journal, server, wire = slow
    wire.send((2, Push("orders", b"x")))
    until(lambda: journal.waiting)
    journal.sync()
    wire.next()
    with FrameWire(server) as other:
        other.send((1, Pull("orders")))
        until(lambda: wire.ask(3, Stats("orders")).in_flight == 1)
    until(lambda: len(server.frames.connections) == 1)
    journal.sync()
    until(lambda: wire.ask(4, Stats("orders")).visible == 1)


def test_claims_of_a_named_attempt_stay_for_a_repeated_pull(slow):
    journal, server, wire = slow
    wire.send((2, Push("orders", b"x")))
    until(lambda: journal.waiting)
    journal.sync()
    wire.next()
    with FrameWire(server) as other:
        other.send((1, Pull("orders", attempt_id="a")))
        until(lambda: wire.ask(3, Stats("orders")).in_flight == 1)
    until(lambda: len(server.frames.connections) == 1)
    journal.sync()
    (claim,) = wire.ask(4, Pull("orders", attempt_id="a"))
    assert claim.epoch == 1


def test_when_the_journal_fails_every_client_gets_the_error_and_the_server_ends(slow):
    journal, server, wire = slow
    wire.send((2, Push("orders", b"x")))
    until(lambda: journal.waiting)
    journal.fail()
    kind, request, body = wire.next()
    assert (kind, request) == (ERROR, 0)
    with pytest.raises(JournalError, match="the disk is gone"):
        decode_answer(kind, body, bytes)
    assert wire.is_closed_by_server()
    (failure,) = until(lambda: server.failures)
    assert str(failure) == "the disk is gone"


@pytest.mark.parametrize(
    "frame",
    [
        encode_command(2, Peek("orders")),
        encode_bulk(2, PushMany(queue="orders", bodies=[b"x"]), FRAME_BYTES_MAX),
    ],
)
def test_a_fault_within_the_engine_ends_the_server_and_is_logged_once(server, wire, caplog, frame):
    for kind in (Peek, PushMany):
        server.engine._handlers[kind] = lambda command, now_ms: 1 / 0
    wire.link.sendall(frame)
    kind, request, _ = wire.next()
    assert (kind, request) == (ERROR, 0)
    assert wire.is_closed_by_server()
    (failure,) = until(lambda: server.failures)
    assert "ZeroDivisionError" in str(failure)
    (logged,) = [each.getMessage() for each in caplog.records]
    assert logged.startswith("fault in the engine, which was stopped: ZeroDivisionError\n")
    assert "test_ipc.py" in logged
    with FrameWire(server, hello=False) as late:
        assert late.next()[0] == ERROR


def test_the_status_shows_why_housekeeping_fails(serve, tmp_path):
    engine: Any = open_engine(tmp_path / "store", durability="os")
    (tmp_path / "store" / "readers").mkdir()
    (tmp_path / "store" / "readers" / "lake.json").write_text("nonsense")
    server = serve(engine=engine)
    assert server.call(server.frames.status)["housekeeping_error"] is None
    engine.submit(CreateQueue("q"))
    engine.journal.grown()
    said = until(lambda: server.call(server.frames.status)["housekeeping_error"])
    assert said.startswith("StoreUnusable: ")
    assert "lake.json" in said


# Stopping.


def test_a_server_that_stops_sends_goodbye_to_clients_that_wait(server, wire):
    wire.send((2, Pull("orders", wait_ms=60_000)))
    until(lambda: server.frames.status()["waiting_pulls"] == 1)
    server.stop()
    assert wire.next()[:2] == (GOODBYE, 0)
    with pytest.raises(EOFError):
        wire.next()


def test_a_server_that_stops_answers_what_it_has_taken(slow):
    journal, server, wire = slow
    wire.send((2, Push("orders", b"x")))
    until(lambda: journal.waiting)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    until(lambda: server.frames.stopping)
    journal.sync()
    assert wire.next()[:2] == (REPLY, 2)
    assert wire.next()[0] == GOODBYE
    stopping.join(TIMEOUT_S)


# Limits.


def test_a_large_bulk_push_is_answered_once_and_others_are_served_before_it_is_done(serve):
    """Row 20: one frame of 10,000 messages is executed in parts."""
    server = serve()
    with FrameWire(server) as other, FrameWire(server) as wire:
        wire.ask(1, CreateQueue("orders"))
        asker = min(server.frames.connections, key=lambda each: each.since_s)

        def ask_after_the_first_part():
            """Has the other client ask in the first turn of the loop that finds messages."""
            if server.frames.service.submit(Stats("orders")).messages:
                asker.data_received(encode_command(2, Stats("orders")))
            else:
                server.loop.call_soon(ask_after_the_first_part)

        bodies = [b"%d" % number for number in range(10_000)]
        rows: list[Any] = [{"number": str(n), "more": "x"} for n in range(10_000)]
        server.call(ask_after_the_first_part)
        wire.link.sendall(encode_bulk(2, PushMany("orders", bodies, each_attributes=rows)))
        messages = DECODE_REPLY[Stats](other.next()[2]).messages
        assert 0 < messages < 10_000, "nobody was served between the parts"
        kind, request, body = wire.next()
        replies: list[Any] = decode_bulk_reply(body)
        assert (kind, request) == (REPLY, 2)
        assert [reply.sequence for reply in replies] == [*range(1, 10_001)]
        assert len({reply.id for reply in replies}) == 10_000
        found = []
        while claims := wire.ask(3, Pull("orders", 10_000)):
            assert len(claims) <= 2_000
            found += claims
        assert [claim.body for claim in found] == bodies
        assert [claim.attributes for claim in found] == rows


def test_a_large_batch_is_answered_with_each_items_reply(wire):
    pushes: list[BatchItem] = [
        Push("orders" if number % 3 else "missing", b"%d" % number) for number in range(1_000)
    ]
    replies = wire.ask(2, Batch(pushes))
    kinds = [type(reply) for reply in replies]
    assert kinds == [PushReply if number % 3 else QueueNotFound for number in range(1_000)]
    claims = wire.ask(3, Pull("orders", 1_000))
    assert [int(claim.body) for claim in claims] == [n for n in range(1_000) if n % 3]
    assert wire.ask(4, Batch([Delete("orders", claim.proof) for claim in claims])) == [True] * 666


def test_a_large_frame_with_a_fault_at_its_end_changes_nothing(wire):
    rows: list[Any] = [*[{"name": "value"}] * 4_999, {"name": 5}]
    bulk = PushMany("orders", [b"x"] * 5_000, each_attributes=rows)
    wire.link.sendall(encode_bulk(2, bulk))
    kind, request, _ = wire.next()
    assert (kind, request) == (ERROR, 2)
    assert wire.ask(3, Stats("orders")).messages == 0


def test_an_answer_that_would_not_fit_into_a_frame_comes_in_parts(serve):
    server = serve(limits=Limits(frame_bytes_max=3 * 1024 * 1024))
    with Queues(Remote(server.endpoint)) as queues, FrameWire(server) as wire:
        queues.create("orders")
        for _ in range(5):
            queues.push("orders", b"x" * 1_000_000)
        first = wire.ask(1, Pull("orders", 10))
        assert 1 <= len(first) < 4
        assert len(queues.peek("orders", 10)) < 5
        # The client asks until it has what it was asked for.
        assert len(first) + len(queues.pull_many("orders", 10)) == 5


def test_many_small_messages_come_in_one_answer_whatever_the_limit_of_their_queue(serve):
    server = serve(limits=Limits(frame_bytes_max=3 * 1024 * 1024))
    with Queues(Remote(server.endpoint)) as queues:
        queues.create("orders", max_body_bytes=64 * 1024 * 1024)
        queues.push_many("orders", [b"x"] * 1_000)
        assert len(queues.pull_many("orders", 1_000)) == 1_000


def test_a_pull_of_many_ends_before_its_answer_is_too_large_and_not_sooner(serve):
    server = serve(limits=Limits(frame_bytes_max=3 * 1024 * 1024))
    with Queues(Remote(server.endpoint)) as queues, FrameWire(server) as wire:
        queues.create("orders", max_body_bytes=100_000)
        # All together would never fit; a few hundred small ones do, and few of the large.
        queues.push_many("orders", [b"x"] * 400)
        for _ in range(8):
            queues.push_many("orders", [bytes(90_000)] * 10)
        first = wire.ask(1, Pull("orders", 500))
        assert [claim.body for claim in first[:400]] == [b"x"] * 400
        assert 20 < len(first) - 400 < 30
        sizes = [len(claim.body) for claim in wire.ask(2, Pull("orders", 500))]
        assert 20 < len(sizes) < 30


def test_a_client_that_does_not_read_is_not_read_from_and_then_let_go(serve):
    server = serve(limits=Limits(unsent_bytes_max=65_536))
    with FrameWire(server) as wire, FrameWire(server) as other:
        wire.ask(1, CreateQueue("orders"))
        wire.ask(2, Push("orders", b"x" * 500_000))
        peeks = b"".join(encode_command(n, Peek("orders")) for n in range(3, 40))
        wire.link.sendall(peeks)
        limit_times(server.call, server.frames, stall_s_max=0.4)
        until(lambda: len(server.frames.connections) == 1)
        assert other.ask(1, Stats("orders")).visible == 1
        assert wire.is_closed_by_server()


def test_a_client_that_never_introduces_itself_is_let_go(serve):
    with FrameWire(serve(limits=Limits(hello_s_max=0.2)), hello=False) as wire:
        assert wire.is_closed_by_server()


def test_a_frame_that_is_never_finished_is_not_waited_for(serve):
    server = serve(limits=Limits(stall_s_max=0.3))
    with FrameWire(server) as wire, FrameWire(server) as idle:
        wire.link.sendall(HEADER.pack(1_000, 1, 1) + b"x")
        assert wire.is_closed_by_server()
        # One that is merely silent may stay.
        idle.ask(1, CreateQueue("orders"))


def test_large_frames_that_have_begun_share_what_memory_there_is(serve):
    server = serve(limits=Limits(unfinished_bytes_max=1_500_000))
    frame = encode_command(2, Push("orders", bytes(1_000_000)))
    with FrameWire(server) as first, FrameWire(server) as second, FrameWire(server) as third:
        first.ask(1, CreateQueue("orders"))
        first.link.sendall(frame[:100])
        until(lambda: server.frames.unfinished_bytes > 1_000_000)
        second.link.sendall(frame[:100])
        kind, request, body = second.next()
        assert request == 0
        with pytest.raises(
            Overloaded, match=r"no memory for a frame of \d+ bytes while others are received"
        ):
            decode_answer(kind, body, bytes)
        assert second.is_closed_by_server()
        first.link.sendall(frame[100:])
        assert first.next()[:2] == (REPLY, 2)
        # What was set aside is free again.
        third.link.sendall(frame)
        assert third.next()[:2] == (REPLY, 2)
        until(lambda: server.frames.unfinished_bytes == 0)


def test_only_so_many_connections_are_let_in(serve):
    server = serve(limits=Limits(connections_max=1))
    with FrameWire(server), FrameWire(server, hello=False) as late:
        kind, _, body = late.next()
        with pytest.raises(UnavailableError, match="1 connections"):
            decode_answer(kind, body, bytes)


# Strangers.


def test_a_browser_gets_a_page_that_says_what_this_is(server):
    with FrameWire(server, hello=False, tcp=True) as wire:
        wire.link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = wire.link.recv(4_096)
        assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"Penstock frames" in said
        assert wire.is_closed_by_server()


def test_another_version_is_refused_with_the_one_that_is_supported(server):
    with FrameWire(server, hello=False) as wire:
        wire.link.sendall(PRELUDE[:6] + b"\x63\x00")
        kind, _, body = wire.next()
        with pytest.raises(ProtocolError, match="speaks version 99 of the frames"):
            decode_answer(kind, body, bytes)
        assert wire.is_closed_by_server()


def test_bytes_that_are_no_frame_end_the_connection_with_a_reason(wire):
    wire.link.sendall(HEADER.pack(5, 0x55, 1) + b"wrong")
    kind, request, body = wire.next()
    assert (kind, request) == (ERROR, 0)
    with pytest.raises(ProtocolError, match="the client sent a frame of kind 0x55"):
        decode_answer(kind, body, bytes)
    assert wire.is_closed_by_server()


def test_no_garbage_brings_the_server_down(server, wire):
    chance = random.Random(7)
    good = encode_hello(Hello("test")) + encode_command(1, Push("orders", b"x"))
    for number in range(150):
        with FrameWire(server, hello=False, tcp=number % 2 == 0) as stranger:
            spoilt = bytearray(good)
            for _ in range(3):
                spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
            try:
                stranger.link.sendall(bytes(spoilt) + chance.randbytes(20))
                stranger.link.shutdown(socket.SHUT_WR)
            except OSError:
                continue
            assert stranger.is_closed_by_server()
    assert wire.ask(2, Stats("orders")).queue == "orders"
    assert server.failures == []


AS_NOBODY = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
sys.stdout.buffer.write(link.recv(4096))
"""


@pytest.mark.root
def test_another_user_is_turned_away_even_if_it_reaches_the_socket(server):
    import subprocess

    # Parallel runs nest their directories deeper than a run by itself.
    root = Path(tempfile.gettempdir())
    for directory in server.path.parents:
        if directory.is_relative_to(root) and directory != root:
            directory.chmod(0o755)
    server.path.chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(server.path)], capture_output=True, check=False
    )
    assert b"user 65534 may not use it" in done.stdout, done.stderr
    until(lambda: not server.frames.connections)
