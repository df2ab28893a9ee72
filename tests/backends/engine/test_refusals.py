"""Row 6 of the scorecard, for the engine: a refused command changes neither state nor journal.

A journal that keeps its events in a list fails at its n-th call, for every n and every command, and
an interrupt comes at every point, also with a journal that keeps nothing. The last tests use a
store on disk, with a missing file and with no descriptor left.
"""

import copy
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent, Pushed
from penstock.core.shard import ShardState, replay
from penstock.errors import (
    CorruptEntry,
    JournalError,
    PenstockError,
    UnavailableError,
)
from penstock.journal import MemoryJournal
from penstock.journal.place import pack_place, position_of
from penstock.service import (
    Batch,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    ListQueues,
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    PushMany,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
)
from tests.core.observed import as_bytes
from tests.interrupts import interrupted

ATTEMPT = "an-attempt"


class PlacingJournal:
    """A journal in a list that assigns places, and fails at the call that the test chooses."""

    keeps_nothing = False

    def __init__(self) -> None:
        self.durable_sequence = 0
        self.entries: list[Sequence[AnyEvent]] = []
        self.contents: list[Pushed] = []
        self.damaged: set[int] = set()
        self.calls: list[str] = []
        self.fail_at = 0
        self.error: Exception | None = None

    @property
    def events(self) -> list[AnyEvent]:
        return [event for entry in self.entries for event in entry]

    def arm(self, fail_at: int, error: Exception) -> None:
        self.calls.clear()
        self.fail_at, self.error = fail_at, error

    def disarm(self) -> None:
        self.fail_at = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None and len(self.calls) == self.fail_at:
            raise self.error

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        self._call("append")
        self.entries.append(list(events))
        places = []
        for event in events:
            if isinstance(event, Pushed):
                places.append(pack_place(len(self.contents), event.size_bytes))
                self.contents.append(event)
        self.durable_sequence += 1
        return self.durable_sequence, places

    def make_room(self, command: Command[Any]) -> None:
        self._call("make_room")

    def has_room(self, events: int) -> bool:
        self._call("has_room")
        return True

    def load(self, place: int) -> Pushed:
        self._call("load")
        if position_of(place) in self.damaged:
            raise CorruptEntry("the content of this message is damaged")
        return self.contents[position_of(place)]

    def wait(self, sequence: int) -> None:
        pass

    def notify(self, sequence: int, done: Any) -> None:
        done()

    def history(self, number: int) -> list[AnyEvent]:
        self._call("history")
        return [event for event in self.events if getattr(event, "number", None) == number]

    def close(self) -> None:
        pass


def contents(shard: ShardState, journal: PlacingJournal | MemoryJournal) -> list[Any]:
    """All of a state as plain data, with each message's content instead of its place."""
    snapshot = copy.deepcopy(shard.snapshot())
    for queue in snapshot.queues:
        for delivery in queue.deliveries:
            if isinstance(delivery.content, int):
                assert isinstance(journal, PlacingJournal)
                delivery.content = journal.contents[position_of(delivery.content)]
    return [snapshot.next_number, snapshot.next_queue, snapshot.queues]


class FilledEngine:
    """An engine with messages in every state, always the same."""

    def __init__(self, due: bool = False, waiting: bool = False, volatile: bool = False) -> None:
        self.journal = PlacingJournal()
        self.clock = ManualClock()
        journal = MemoryJournal() if volatile else self.journal
        self.engine = Engine(journal, self.clock, key=b"k" * 32, identity=b"i" * 7)
        submit = self.engine.submit
        submit(CreateQueue("q", {"dead_letter": "dead", "max_receives": 3}))
        submit(CreateQueue("once", {"dead_letter": "dead", "max_receives": 1}))
        submit(CreateQueue("f", {"fifo": True}))
        submit(CreateQueue("empty"))
        self.ids: list[str] = []
        for number in range(8):
            self.ids.append(submit(Push("q", b"q%d" % number, priority=number % 2)).id)
            submit(Push("once", b"once%d" % number))
            submit(Push("f", b"f%d" % number, group="ab"[number % 2]))
        submit(Push("q", b"late", delay_ms=5_000))
        submit(Push("q", b"short", ttl_ms=7_000))
        submit(Push("dead", b"dead0"))
        self.id = submit(Push("dead", b"dead1")).id
        (self.claim,) = submit(Pull("q"))
        self.attempt = submit(Pull("f", 2, attempt_id=ATTEMPT))
        self.waiter = None
        if waiting:
            self.waiter = self.engine.wait(Pull("empty", 4, wait_ms=60_000), lambda: None)
        if due:
            self.clock.advance(seconds=40)

    def commands(self) -> dict[str, Command[Any]]:
        receipt = self.claim.receipt
        return {
            "push": Push("q", b"new"),
            "push that wakes": Push("empty", b"new"),
            "push many": PushMany("empty", [b"%d" % number for number in range(30)]),
            "push two": PushMany("q", [b"1", b"2"]),
            "pull": Pull("q"),
            "pull many": Pull("q", 10),
            "pull the last time": Pull("once", 10),
            "pull fifo": Pull("f", 10),
            "pull within": Pull("q", 10, bytes_max=5),
            "pull under an id": Pull("q", 3, attempt_id="another"),
            "pull again": Pull("f", 2, attempt_id=ATTEMPT, renew=True),
            "delete": Delete("q", receipt),
            "extend": Extend("q", receipt, 60_000),
            "release": Release("q", receipt),
            "peek": Peek("q", 10),
            "peek from": PeekFrom("q", 0, 10),
            "peek ids": PeekIds("q", self.ids),
            "pull ids": PullIds("q", self.ids),
            "return ids": ReturnIds("q", self.ids),
            "redrive ids": RedriveIds("dead", [self.id], "q"),
            "stats": Stats("q"),
            "purge": Purge("q"),
            "redrive": Redrive("dead", "q"),
            "create": CreateQueue("made", {"dead_letter": "made-dead", "max_receives": 1}),
            "configure": ConfigureQueue("q", {"retention_ms": 60_000}),
            "remove": DeleteQueue("q"),
            "describe": DescribeQueue("q"),
            "describe all": DescribeQueues(),
            "list": ListQueues(),
            "history": History(self.id),
            "unknown queue": Push("nowhere", b"new"),
            "batch": Batch(
                [Push("q", b"x"), Delete("q", receipt), Push("nowhere", b""), Push("f", b"y")]
            ),
        }

    def plain_state(self) -> list[Any]:
        return contents(self.engine.shard, self.journal)

    def replayed(self) -> list[Any]:
        return contents(replay(self.journal.events), self.journal)


NAMES = list(FilledEngine().commands())
ERRORS = [UnavailableError("no descriptor left"), JournalError("a file is missing")]


def test_errors_are_injected_into_every_command_of_the_engine():
    kinds = {type(command) for command in FilledEngine().commands().values()}
    assert kinds == set(FilledEngine().engine._handlers)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("due", [False, True], ids=["", "due"])
def test_row_6_an_error_at_any_step_of_any_command_changes_nothing(name, due, error):
    """Row 6: an error at any step of any handler leaves no command partly done."""
    for fail_at in range(1, 200):
        filled = FilledEngine(due)
        journal, engine = filled.journal, filled.engine
        command = filled.commands()[name]
        before, entries = filled.plain_state(), len(journal.entries)
        journal.arm(fail_at, error)
        refused = None
        try:
            engine.submit(command)
        except PenstockError as raised:
            refused = raised
        failed_in = journal.calls[fail_at - 1] if len(journal.calls) >= fail_at else None
        journal.disarm()
        assert engine._events == []
        if failed_in == "append":
            # The state is ahead of the journal, so the engine refuses all further commands.
            assert refused is error
            with pytest.raises(PenstockError):
                engine.submit(Push("q", b"next"))
            continue
        assert filled.plain_state() == filled.replayed()
        if failed_in is None:
            assert refused is None or not isinstance(refused, type(error))
            break
        if refused is not None:
            settled = journal.entries[entries:]
            assert due or (settled == [] and filled.plain_state() == before)
        if name != "remove" or refused is not None:
            assert engine.submit(Push("q", b"next")).id
            assert engine.submit(Pull("q", 100))
        assert filled.plain_state() == filled.replayed()
    else:
        pytest.fail("the command has more than 200 steps")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_row_6_an_error_while_a_waiting_pull_is_served_fails_that_pull_alone(error):
    """Row 6: the push that serves a waiter succeeds even if the pull of the waiter fails."""
    filled = FilledEngine(waiting=True)
    # The calls of the push: make_room, append, and the load for the waiter.
    filled.journal.arm(3, error)
    assert filled.engine.submit(Push("empty", b"new")).id
    assert filled.journal.calls == ["make_room", "append", "load"]
    filled.journal.disarm()
    assert filled.waiter is not None
    assert (filled.waiter.done, filled.waiter.error) == (True, error)
    assert filled.plain_state() == filled.replayed()
    assert [claim.epoch for claim in filled.engine.submit(Pull("empty"))] == [1]


def submit_or_refuse(filled: FilledEngine, command: Command[Any]) -> None:
    with suppress(PenstockError):
        filled.engine.submit(command)


# Of an interrupt that Python ignores, where it closes a generator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", ["", "due", "waiting"])
@pytest.mark.parametrize("volatile", [False, True], ids=["kept", "memory"])
def test_row_6_an_interrupt_at_any_point_changes_nothing_or_stops_the_engine(name, state, volatile):
    """Row 6: after an interrupt no command is served from a state that is partly changed."""
    options = {"volatile": volatile, "due": state == "due", "waiting": state == "waiting"}
    done = FilledEngine(**options)
    before = done.plain_state()
    submit_or_refuse(done, done.commands()[name])
    after = done.plain_state()
    stops = 0
    for point in range(1, 10_000):
        filled = FilledEngine(**options)
        call = partial(submit_or_refuse, filled, filled.commands()[name])
        if not interrupted(call, point):
            break
        if filled.engine._stopped is None:
            assert filled.plain_state() in (before, after)
            assert volatile or filled.plain_state() == filled.replayed()
        else:
            stops += 1
            with pytest.raises(JournalError, match="was stopped by KeyboardInterrupt"):
                filled.engine.submit(Push("q", b"next"))
            assert filled.waiter is None or filled.waiter.done
        assert filled.engine._events == []
    assert stops > 0


def test_a_pull_returns_the_messages_that_were_loaded_before_an_error():
    filled = FilledEngine()
    # make_room, then the loads: the third message cannot be read.
    filled.journal.arm(4, UnavailableError("no descriptor left"))
    claims = filled.engine.submit(Pull("once", 10))
    assert [claim.body for claim in claims] == [b"once0", b"once1"]
    filled.journal.disarm()
    assert filled.plain_state() == filled.replayed()
    claims = filled.engine.submit(Pull("once", 10))
    assert [claim.body for claim in claims] == [b"once%d" % number for number in range(2, 8)]
    assert [claim.epoch for claim in claims] == [1] * 6


@pytest.mark.parametrize("queue", ["q", "once", "f"])
def test_a_refused_pull_does_not_change_the_order(queue):
    wanted = [claim.body for claim in FilledEngine().engine.submit(Pull(queue, 100))]
    filled = FilledEngine()
    for _ in range(3):
        filled.journal.arm(2, UnavailableError("no descriptor left"))
        with pytest.raises(UnavailableError):
            filled.engine.submit(Pull(queue, 100))
        filled.journal.disarm()
    assert [claim.body for claim in filled.engine.submit(Pull(queue, 100))] == wanted


def test_a_damaged_message_is_lost_by_an_event_even_if_the_pull_that_finds_it_is_refused():
    filled = FilledEngine()
    (first, *_) = filled.engine.submit(Peek("once", 1))
    damaged = next(e for e in filled.journal.contents if e.body == first.body)
    filled.journal.damaged.add(filled.journal.contents.index(damaged))
    # The first message is damaged, and the second cannot be read.
    filled.journal.arm(3, UnavailableError("no descriptor left"))
    with pytest.raises(UnavailableError):
        filled.engine.submit(Pull("once", 1))
    filled.journal.disarm()
    assert filled.plain_state() == filled.replayed()
    assert [type(event).__name__ for event in filled.journal.entries[-1]] == ["Claimed", "Lost"]
    assert filled.engine.submit(Stats("dead")).visible == 2
    (claim,) = filled.engine.submit(Pull("once", 1))
    assert claim.body == b"once1"


DEAD_LETTERING = {"dead_letter": "dead", "max_receives": 1}


def filled_store(path, count, file_bytes, settings=DEAD_LETTERING):
    """A store of several files whose messages are no longer kept in memory."""
    engine = open_engine(path, clock=ManualClock(), file_bytes=file_bytes)
    engine.submit(CreateQueue("q", settings))
    engine.submit(PushMany("q", [b"%0200d" % number for number in range(count)]))
    engine.close()
    return open_engine(path, clock=ManualClock(), file_bytes=file_bytes)


@pytest.mark.parametrize("settings", [DEAD_LETTERING, {}], ids=["plain path", "fast path"])
def test_row_6_a_pull_refused_because_a_file_is_missing_changes_nothing(tmp_path, settings):
    """Row 6: with a segment missing a pull is refused, and other commands are answered."""
    engine = filled_store(tmp_path / "store", 400, 16_384, settings)
    segments = sorted((tmp_path / "store" / "journal").glob("*.seg"))
    engine.submit(Pull("q", 1))
    before = as_bytes(engine.shard)
    data = segments[0].read_bytes()
    segments[0].unlink()
    engine.journal.segments._files._close_some(0)
    for limit in (10, 1):
        with pytest.raises(JournalError):
            engine.submit(Pull("q", limit))
    assert as_bytes(engine.shard) == before
    assert engine.submit(Push("q", b"before")).id
    segments[0].write_bytes(data)
    assert engine.submit(Push("q", b"next")).id
    claims = engine.submit(Pull("q", 10))
    assert [int(claim.body) for claim in claims] == list(range(1, 11))
    assert [claim.epoch for claim in claims] == [1] * 10
    engine.close()


@pytest.mark.parametrize("left", [0, 1])
def test_row_6_a_pull_refused_for_lack_of_descriptors_changes_nothing(tmp_path, left):
    """Row 6: with no descriptor left a pull is refused as unavailable, and claims nothing.

    With one left the file can be opened, but not mapped.
    """
    engine = filled_store(tmp_path / "store", 8_000, 1 << 20)
    before = as_bytes(engine.shard)
    # Room is made while files can be created, so that only reading fails.
    engine.journal.make_room(Pull("q", 10))
    engine.journal.segments._files._close_some(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + left, hard))
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"cannot (open|read)"):
                engine.submit(Pull("q", 10))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert as_bytes(engine.shard) == before
    assert engine.submit(Push("q", b"next")).id
    assert [claim.epoch for claim in engine.submit(Pull("q", 10))] == [1] * 10
    assert engine.submit(Stats("dead")).messages == 0
    engine.close()
