"""Frames that ask for much: executed in parts, with commands of other connections in between."""

import asyncio
import itertools
import random
import threading
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.long_commands import divides_pull, steps_of
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.errors import (
    InFlightLimit,
    MessageNotFound,
    QueueNotFound,
    StoreFull,
    UnavailableError,
)
from penstock.journal import MemoryJournal
from penstock.server import stream
from penstock.server.frames.server import Limits
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueues,
    Extend,
    History,
    ListQueues,
    Pull,
    Push,
    PushMany,
    Redrive,
    Stats,
)
from penstock.wire.frames.bodies import DECODE_REPLY
from penstock.wire.frames.bulk import encode_bulk
from penstock.wire.frames.frames import CANCEL, REPLY, pack
from tests.server.conftest import TIMEOUT_S, in_each_turn, until
from tests.server.frames.test_ipc import FrameWire, SlowJournal

MANY = 10_000
PULLED = 2_000
PARTS = {500, 1_000, 1_500}


@pytest.fixture
def orders(serve):
    """A server with the queues `orders` and `other`, and a connection to it."""
    with connected(serve()) as (server, wire):
        yield server, wire


@contextmanager
def connected(server):
    for queue in ("orders", "other"):
        submit(server, CreateQueue(queue))
    with FrameWire(server) as wire:
        yield server, wire


def submit(server, command):
    """Executes a command on the engine, in one step."""
    return server.call(lambda: server.engine.submit(command))


@contextmanager
def watching(server):
    """What others see of both queues in each turn of the event loop: (messages, in flight)."""
    seen: set[tuple[tuple[int, int], ...]] = set()

    def look():
        stats = [server.frames.service.submit(Stats(queue)) for queue in ("orders", "other")]
        seen.add(tuple((each.messages, each.in_flight) for each in stats))

    with in_each_turn(server, look):
        yield seen


@contextmanager
def once(server, condition, act):
    """Calls `act` in the first turn of the event loop in which the condition holds."""
    done: list[object] = []

    def look():
        if not done and condition(server.frames.service):
            done.append(act(server.frames.service))

    with in_each_turn(server, look):
        yield


def receive(wire, command):
    """The request and the reply of the next answer, which is to this command."""
    kind, request, body = wire.next()
    assert kind == REPLY, body
    return request, DECODE_REPLY[type(command)](body)


def numbers(claims):
    return [int(claim.body) for claim in claims]


# Redrives.


def test_a_redrive_of_many_is_one_answer_and_others_are_served_before_it_is_done(orders):
    """Row 20: 10,000 messages are moved in parts of 250."""
    server, wire = orders
    submit(server, PushMany("orders", [b"x"] * MANY))
    submit(server, Push("orders", b"last"))
    with watching(server) as seen:
        assert wire.ask(1, Redrive("orders", "other", MANY)) == MANY
    assert sorted({others for _, (others, _) in seen}) == [*range(0, MANY + 1, 250)]
    assert all(messages + others == MANY + 1 for (messages, _), (others, _) in seen)
    assert wire.ask(2, Redrive("orders", "other", MANY)) == 1
    assert wire.ask(3, Redrive("orders", "other", MANY)) == 0


def test_a_request_after_a_redrive_of_many_is_executed_after_it(orders):
    server, wire = orders
    submit(server, PushMany("orders", [b"x"] * MANY))
    redrive, stats = Redrive("orders", "other", MANY), Stats("orders")
    wire.send((1, redrive), (2, stats))
    wire.send((3, stats))
    assert receive(wire, redrive) == (1, MANY)
    for number in (2, 3):
        request, reply = receive(wire, stats)
        assert (request, reply.messages) == (number, 0)


def test_a_redrive_whose_target_is_removed_meanwhile_is_answered_with_what_it_has_moved(orders):
    server, wire = orders
    submit(server, PushMany("orders", [b"x"] * MANY))
    names = ["orders", "other"]
    with once(
        server,
        lambda service: (
            service.submit(ListQueues()) == names and service.submit(Stats("other")).messages
        ),
        lambda service: service.submit(DeleteQueue("other")),
    ):
        moved = wire.ask(1, Redrive("orders", "other", MANY))
    assert 250 <= moved < MANY
    assert wire.ask(2, Stats("orders")).visible == MANY - moved
    with pytest.raises(QueueNotFound):
        wire.ask(3, Redrive("orders", "other", MANY))


def test_a_redrive_on_a_disk_that_fills_meanwhile_is_answered_with_what_it_has_moved(
    serve, tmp_path, monkeypatch
):
    engine = open_engine(tmp_path / "store", clock=ManualClock())
    rooms: list[int] = []
    make_room: Any = engine._make_room

    def room_for_two(command):
        if type(command) is Redrive:
            rooms.append(1)
            if len(rooms) > 2:
                raise StoreFull("the disk is full")
        return make_room(command)

    with connected(serve(engine=engine)) as (server, wire):
        submit(server, PushMany("orders", [b"x"] * MANY))
        server.call(lambda: monkeypatch.setattr(engine, "_make_room", room_for_two))
        assert wire.ask(1, Redrive("orders", "other", MANY)) == 500
        with pytest.raises(StoreFull):
            wire.ask(2, Redrive("orders", "other", MANY))
        monkeypatch.undo()
        assert wire.ask(3, Stats("other")).messages == 500


# Pulls.


def test_a_pull_of_many_is_one_answer_and_others_are_served_before_it_is_done(orders):
    """Row 20: 2,000 messages are claimed in parts of 500."""
    server, wire = orders
    submit(server, PushMany("orders", [b"%d" % number for number in range(5_000)]))
    with watching(server) as seen:
        claims = wire.ask(1, Pull("orders", MANY))
    assert numbers(claims) == [*range(PULLED)]
    assert len({claim.proof for claim in claims}) == PULLED
    assert {in_flight for (_, in_flight), _ in seen} == {0, *PARTS, PULLED}


def test_pulls_of_many_on_one_connection_are_executed_in_order(orders):
    server, wire = orders
    submit(server, PushMany("orders", [b"%d" % number for number in range(5_000)]))
    pull = Pull("orders", MANY)
    wire.send((1, pull), (2, pull), (3, pull), (4, Stats("orders")))
    found = [receive(wire, pull) for _ in range(3)]
    assert [request for request, _ in found] == [1, 2, 3]
    assert [numbers(claims) for _, claims in found] == [
        [*range(2_000)],
        [*range(2_000, 4_000)],
        [*range(4_000, 5_000)],
    ]
    assert receive(wire, Stats("orders"))[1].in_flight == 5_000


def test_a_client_that_leaves_amid_a_pull_in_parts_leaves_nothing_in_flight(orders):
    server, wire = orders
    submit(server, PushMany("orders", [b"x"] * 5_000))

    def abort_all(service):
        for each in list(server.frames.connections):
            each.abort()

    def is_amid(service):
        return service.submit(Stats("orders")).in_flight in PARTS

    with once(server, is_amid, abort_all):
        wire.send((1, Pull("orders", MANY)))
        assert wire.is_closed_by_server()
    until(lambda: submit(server, Stats("orders")).in_flight == 0)
    assert submit(server, Stats("orders")).visible == 5_000


def test_claims_that_cannot_be_delivered_are_released_in_parts(serve):
    """Row 20: 4,000 claims that are not durable when their client leaves."""
    journal = SlowJournal()
    server = serve(engine=Engine(journal, ManualClock()))
    server.call(lambda: server.engine.submit(CreateQueue("orders")))
    server.call(lambda: server.engine.submit(PushMany("orders", [b"x"] * 5_000)))
    seen: list[int] = []

    def look():
        in_flight = server.frames.service.submit(Stats("orders")).in_flight
        if not seen or seen[-1] != in_flight:
            seen.append(in_flight)

    journal.sync()
    with FrameWire(server) as wire, in_each_turn(server, look):
        wire.send((1, Pull("orders", MANY)), (2, Pull("orders", MANY)))
        until(lambda: 4_000 in seen)
        wire.link.close()
        until(lambda: seen[-1] == 0)
    falling = seen[seen.index(4_000) :]
    assert falling == [*range(4_000, -1, -200)]
    journal.sync()


def test_messages_of_a_pull_in_parts_count_until_they_are_durable(serve):
    """Rows 13 and 20: the first part has no large message, so only the others count."""
    journal = SlowJournal()
    server = serve(engine=Engine(journal, ManualClock()))
    bodies = [*[b"x"] * 500, *[bytes(1_000)] * 1_500, *[b"x"] * 2_000]
    server.call(lambda: server.engine.submit(CreateQueue("orders")))
    server.call(lambda: server.engine.submit(PushMany("orders", bodies)))
    journal.sync()
    pull = Pull("orders", MANY)
    with FrameWire(server) as wire:
        wire.send((1, pull), (2, pull))
        (held,) = server.frames.connections
        until(lambda: held.pulled_bytes == {1: 1_500_500})
        assert submit(server, Stats("orders")).in_flight == PULLED
        assert held.is_full()
        until(lambda: journal.waiting)
        journal.sync()
        assert len(receive(wire, pull)[1]) == PULLED
        until(lambda: held.pulled_bytes == {2: 2_000})
        until(lambda: journal.waiting)
        journal.sync()
        assert len(receive(wire, pull)[1]) == PULLED
        assert (held.pulled_bytes, held.deferred) == ({}, 0)
        assert not held.is_full()


def test_a_waiting_pull_of_many_is_given_all_that_a_push_brings(orders):
    server, wire = orders
    wire.send((1, Pull("orders", MANY, wait_ms=60_000)))
    until(lambda: submit(server, Stats("orders")).waiting_pulls == 1)
    with FrameWire(server) as other:
        other.link.sendall(encode_bulk(1, PushMany("orders", [b"x"] * 1_500)))
        assert other.next()[0] == REPLY
    assert len(receive(wire, Pull("orders"))[1]) == 1_500


def test_a_pull_of_many_ends_at_the_limit_in_flight_and_the_next_one_is_refused(orders):
    server, wire = orders
    submit(server, ConfigureQueue("orders", {"in_flight_max": 700}))
    submit(server, PushMany("orders", [b"x"] * 5_000))
    claims = wire.ask(1, Pull("orders", MANY))
    assert len(claims) == 700
    with pytest.raises(InFlightLimit):
        wire.ask(2, Pull("orders", MANY))


@pytest.mark.parametrize(
    ("settings", "pull"),
    [
        ({}, Pull("q", MANY)),
        ({"fifo": True}, Pull("q", MANY)),
        ({}, Pull("q", MANY, visibility_ms=0)),
        ({"visibility_ms": 0}, Pull("q", MANY)),
        ({}, Pull("q", MANY, attempt_id="a")),
        ({"body_bytes_max": 64 * 1024 * 1024}, Pull("q", MANY)),
    ],
)
def test_a_pull_of_many_finds_each_message_once(serve, settings, pull):
    """A FIFO group is open to one pull only, and claims may run out at once."""
    server = serve()
    submit(server, CreateQueue("q", settings))
    submit(
        server,
        PushMany(
            "q",
            [b"%d" % number for number in range(1_500)],
            group="g" if settings.get("fifo") else None,
        ),
    )
    with FrameWire(server) as wire:
        assert numbers(wire.ask(1, pull)) == [*range(1_500)]
        if pull.attempt_id is not None:
            assert numbers(wire.ask(2, pull)) == [*range(1_500)]


class CountedEvents(MemoryJournal):
    """Counts the events that were appended."""

    def __init__(self):
        super().__init__(1_000)
        self.count = 0

    def append(self, events):
        self.count += len(events)
        return super().append(events)


@contextmanager
def counting(server, journal):
    """How many events were appended in each turn of the event loop."""
    counts = [journal.count]

    def look():
        if journal.count != counts[-1]:
            counts.append(journal.count)

    found: list[int] = []
    with in_each_turn(server, look):
        yield found
    found += [after - before for before, after in itertools.pairwise(counts)]


@pytest.fixture
def counted(serve):
    """A server, a connection, and the journal that counts events; nothing else settles anything."""
    journal = CountedEvents()
    server = serve(engine=Engine(journal, ManualClock()))
    server.call(lambda: server.frames.service._sweeper.cancel())
    submit(server, CreateQueue("dead"))
    with FrameWire(server) as wire:
        yield server, wire, journal


DUE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of a plain queue": ({}, {}),
    "with a dead-letter queue": ({"max_receives": 1_000, "dead_letter": "dead"}, {}),
    "of a FIFO queue": ({"fifo": True}, {}),
    "with an attempt id": ({"fifo": True}, {"attempt_id": "a"}),
    "that may wait": ({}, {"wait_ms": 20_000}),
    "of large messages": ({"body_bytes_max": 64 * 1024 * 1024}, {}),
}


@pytest.mark.parametrize("case", DUE)
def test_claims_that_are_due_are_settled_in_turns_before_a_pull_of_many(counted, case):
    """Row 20: 2,000 claims that were made for no time, and a pull of all their messages."""
    server, wire, journal = counted
    settings, options = DUE[case]
    group = "g" if settings.get("fifo") else None
    submit(server, CreateQueue("q", settings))
    submit(server, PushMany("q", [b"%d" % number for number in range(PULLED)], group=group))
    assert len(submit(server, Pull("q", PULLED, visibility_ms=0))) == PULLED
    with counting(server, journal) as counts:
        claims = wire.ask(1, Pull("q", MANY, visibility_ms=0, **options))
    assert numbers(claims) == [*range(PULLED)]
    assert sum(counts) >= 2 * PULLED
    # The claims of a pull that cannot be divided, and at most 250 of each kind that was due.
    assert max(counts) <= PULLED + 250
    assert len(counts) >= 7


def test_messages_that_are_due_for_a_dead_letter_queue_are_moved_in_turns(counted):
    """Row 20: each is a claim that runs out and a move."""
    server, wire, journal = counted
    submit(server, CreateQueue("q", {"max_receives": 1, "dead_letter": "dead"}))
    submit(server, PushMany("q", [b"%d" % number for number in range(2 * PULLED)]))
    assert len(submit(server, Pull("q", PULLED, visibility_ms=0))) == PULLED
    with counting(server, journal) as counts:
        claims = wire.ask(1, Pull("q", MANY))
    assert numbers(claims) == [*range(PULLED, 2 * PULLED)]
    assert max(counts) <= 2 * 250 + 500
    assert submit(server, Stats("dead")).messages == PULLED


def test_more_than_a_pull_asks_for_is_not_settled_for_it(counted):
    """Row 20: 12,000 claims are due, and the pull is answered before all of them are settled."""
    server, wire, journal = counted
    submit(server, CreateQueue("q"))
    submit(server, PushMany("q", [b"x"] * MANY))
    submit(server, PushMany("q", [b"x"] * PULLED))
    for _ in range(6):
        submit(server, Pull("q", PULLED, visibility_ms=0))
    with counting(server, journal) as counts:
        assert len(wire.ask(1, Pull("q", MANY, visibility_ms=0))) == PULLED
    assert max(counts) <= PULLED + 2 * 250
    assert submit(server, Stats("q")).in_flight > 3 * PULLED


def test_a_pull_that_waits_after_what_was_due_is_settled_can_be_cancelled(counted):
    """Its messages have all become dead letters; requests after it are executed meanwhile."""
    server, wire, _ = counted
    submit(server, CreateQueue("q", {"max_receives": 1, "dead_letter": "dead"}))
    submit(server, PushMany("q", [b"x"] * PULLED))
    assert len(submit(server, Pull("q", PULLED, visibility_ms=0))) == PULLED
    pull = Pull("q", MANY, wait_ms=20_000)
    wire.send((1, pull), (2, Stats("dead")))
    request, stats = receive(wire, Stats("dead"))
    assert (request, stats.messages) == (2, PULLED)
    assert submit(server, Stats("q")).waiting_pulls == 1
    assert server.call(lambda: [list(each.waits) for each in server.frames.connections]) == [[1]]
    wire.link.sendall(pack(CANCEL, 1))
    assert receive(wire, pull) == (1, [])
    assert submit(server, Stats("q")).waiting_pulls == 0


def test_a_client_that_leaves_while_what_is_due_is_settled_claims_nothing(counted):
    server, wire, _ = counted
    submit(server, CreateQueue("q"))
    submit(server, PushMany("q", [b"x"] * PULLED))
    assert len(submit(server, Pull("q", PULLED, visibility_ms=0))) == PULLED

    def abort_all(service):
        for each in list(server.frames.connections):
            each.abort()

    with once(server, lambda service: server.engine.shard.names["q"].visible >= 500, abort_all):
        wire.send((1, Pull("q", MANY, wait_ms=20_000)))
        assert wire.is_closed_by_server()
    until(lambda: submit(server, Stats("q")).visible == PULLED)
    assert submit(server, Stats("q")).waiting_pulls == 0


def run_steps(engine, steps):
    """What the steps return, if their commands are executed one after the other."""
    try:
        command = next(steps)
        while True:
            command = steps.send(None if command is None else engine.submit(command))
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bytes_max", [None, 20_000])
def test_a_pull_in_parts_claims_what_one_pull_would_claim(seed, bytes_max):
    """Any priorities and groups, some messages claimed before; parts of 7 of at most 61."""

    async def main():
        found = []
        for in_parts in (False, True):
            chance = random.Random(seed)
            engine = Engine(None, ManualClock())
            service = LoopEngine(engine)
            engine.pull_part_max = engine.settle_max = 7
            engine.submit(CreateQueue("q", {"body_bytes_max": 2_000}))
            for number in range(chance.randrange(100)):
                engine.submit(
                    Push(
                        "q",
                        b"%d" % number + bytes(chance.choice([0, 10, 1_900])),
                        priority=chance.randrange(3),
                        group=chance.choice([None, "a", "b"]),
                    )
                )
            engine.submit(Pull("q", 5))
            pull = Pull("q", chance.randrange(8, 62), bytes_max=bytes_max)
            assert divides_pull(engine, pull)
            steps = steps_of(engine, pull) if in_parts else None
            claims = engine.submit(pull) if steps is None else run_steps(engine, steps)
            found.append([claim.body for claim in claims])
            await service.close()
        return found

    whole, parts = asyncio.run(main())
    if bytes_max is None:
        assert parts == whole
    else:
        # Each part has its share of the bytes.
        assert parts == whole[: len(parts)]
        assert bool(parts) == bool(whole)
        assert sum(map(len, parts)) <= bytes_max


# Histories.


def extend_often(server, count):
    """The id of a message whose claim is extended so often."""
    message = submit(server, Push("orders", b"x"))
    (claim,) = submit(server, Pull("orders"))
    for _ in range(count // 1_000):
        submit(server, Batch([Extend("orders", claim.proof, 60_000)] * 1_000))
    return message.id


class CountedParts:
    """Counts the events of each part of a history."""

    def __init__(self):
        self.sizes = []

    def add(self, events):
        self.sizes.append(len(events))

    def result(self):
        return self.sizes


def test_a_history_of_many_events_is_one_answer_that_is_made_in_parts(serve, tmp_path):
    """Row 20: each part is read and encoded in a turn of its own."""
    engine = open_engine(tmp_path / "store", clock=ManualClock(), durability="os")
    with connected(serve(engine=engine)) as (server, wire):
        history = History(extend_often(server, 20_000))
        events = wire.ask(1, history)
        assert [event.kind for event in events] == ["Pushed", "Claimed", *["Extended"] * 20_000]
        with pytest.raises(MessageNotFound):
            wire.ask(2, History(history.id[:-4] + "ffff"))
        sizes: list[int] = []
        done = threading.Event()

        def finish(reply, error):
            sizes.extend(reply)
            done.set()

        server.call(lambda: server.frames.service.history(history, CountedParts()).then(finish))
        assert done.wait(TIMEOUT_S)
        assert (max(sizes), sum(sizes)) == (1_002, 20_002)


def test_a_history_that_does_not_fit_into_a_frame_is_refused(serve, tmp_path):
    """Row 20."""
    engine = open_engine(tmp_path / "store", clock=ManualClock(), durability="os")
    limits = Limits(frame_bytes_max=1024 * 1024)
    with connected(serve(engine=engine, limits=limits)) as (server, wire):
        history = History(extend_often(server, 20_000))
        with pytest.raises(
            UnavailableError, match=r"\d+ events take \d+ bytes and a frame at most"
        ):
            wire.ask(1, history)
        assert wire.ask(2, Stats("orders")).in_flight == 1


# Many requests.


def test_requests_that_take_long_together_give_way_to_other_connections(orders, monkeypatch):
    """Row 20: after TURN_S the rest of one read waits for the next turn of the event loop."""
    server, wire = orders
    # Each request takes longer than this.
    monkeypatch.setattr(stream, "TURN_S", 0.0)
    with watching(server) as seen:
        wire.send(*[(number, Push("orders", b"x")) for number in range(1, 41)])
        assert [wire.next()[1] for _ in range(40)] == [*range(1, 41)]
    # One in each turn; the bytes may have come in more than one read.
    assert len(seen) >= 20


# Settings of many queues.


def test_settings_that_do_not_fit_into_a_frame_are_refused_and_pages_of_them_are_not(serve):
    """Row 20: annotations of 60 KB in each of 300 queues, and a frame of at most 10 MiB."""
    server = serve(limits=Limits(frame_bytes_max=10 * 1024 * 1024))
    for number in range(300):
        annotations = {"note": "x" * 60_000}
        submit(server, CreateQueue(f"q-{number:03}", {"annotations": annotations}))
    with FrameWire(server) as wire:
        with pytest.raises(
            UnavailableError,
            match=r"the settings of 200 queues take \d+ bytes and a frame at most 10485760; "
            "ask for fewer queues at a time",
        ):
            wire.ask(1, DescribeQueues(limit=2**31))
        # The connection goes on, and the same queues can be had in smaller pages.
        found: list[str] = []
        while page := wire.ask(2, DescribeQueues(after=found[-1] if found else "", limit=100)):
            found += [info.queue for info in page]
        assert found == [f"q-{number:03}" for number in range(300)]
