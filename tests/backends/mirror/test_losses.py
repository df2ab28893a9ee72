"""Row 26: a mirror whose connection is lost, or which is killed, at every command that it sends."""

from contextlib import suppress
from typing import Any, ClassVar

import pytest

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.mirror.follow import MirrorFollower
from penstock.backends.mirror.marks import MARK
from penstock.clock import ManualClock
from penstock.errors import BackendLost, PenstockError, RequestError
from penstock.service import Batch, Pull, Push, Release

CONNECT: Any = penstock.connect
FOLLOWER: Any = MirrorFollower
QUEUES: Any = penstock.Queues


class MirrorKilled(Exception):
    """The mirroring process ends here."""


class WithoutDedup(BlockingEngine):
    """A service without dedup, as RabbitMQ is."""

    LACKS: ClassVar = {"dedup": "it has none"}


class LosesConnection:
    """A service whose connection is lost at one command, as RabbitMQ loses it.

    Every claim is over then. The command was `not done`, `done`, or, if it is a batch, `half done`:
    then its first items were answered and the rest have the error. With `kill` the one who asked
    ends, instead of getting an error; claims live on, as at a service that keeps them.
    """

    def __init__(self, service, at, how, kill=False):
        self.LACKS = service.LACKS
        self.redrive_max = service.redrive_max
        self.lost = False
        self._service = service
        self._claims: list[Any] = []
        self._left = at
        self._how = how
        self._kill = kill

    def execute(self, command):
        self._left -= 1
        if self._left != 0:
            reply = self._service.execute(command)
            if isinstance(command, Pull):
                self._claims += reply
            return reply
        self.lost = True
        replies: list[Any] = []
        if self._how == "done":
            with suppress(RequestError):
                reply = self._service.execute(command)
                self._claims += reply if isinstance(command, Pull) else []
        elif self._how == "half done" and isinstance(command, Batch):
            some = command.items[: len(command.items) // 2]
            replies = self._service.execute(Batch(some)) if some else []
        if self._kill:
            raise MirrorKilled
        for claim in self._claims:
            with suppress(PenstockError):
                self._service.execute(Release(claim.queue, claim.proof))
        error = BackendLost("the connection was closed")
        if self._how == "half done" and replies:
            assert isinstance(command, Batch)
            return [*replies, *[error] * (len(command.items) - len(replies))]
        raise error

    def close(self):
        pass


def no_pause(seconds):
    pass


def shown(queues, name):
    return [(each.body, each.priority) for each in queues.peek(name, 1_000)]


class Workload:
    """Commands of every kind on the primary, in steps, each followed by the mirror."""

    def __init__(self, path):
        self.path = path / "store"
        self.clock = ManualClock()
        self.primary = CONNECT(f"file:{self.path}?embedded=1", clock=self.clock)
        self.steps = [
            self.begin, self.consume, self.make_dead_letter, self.empty, self.remove, self.end
        ]  # fmt: skip

    def begin(self):
        self.primary.create("a", dead_letter="dead", max_receives=2)
        self.primary.create("b")
        self.primary.push_many("a", [b"a%d" % i for i in range(12)])
        self.primary.push("b", b"b0")
        self.held = self.primary.pull_many("a", 6)

    def consume(self):
        self.primary.push_many("a", [b"more%d" % i for i in range(4)])
        for claim in self.held[:3]:
            self.primary.delete(claim)
        self.primary.release(self.held[3])
        self.primary.extend(self.held[4], 600)

    def make_dead_letter(self):
        self.primary.release(self.primary.pull("a"))
        self.primary.push("a", b"between")
        self.primary.redrive("dead", to="b")

    def empty(self):
        self.primary.push("b", b"b1")
        self.primary.purge("b")
        self.primary.push("b", b"b2")

    def remove(self):
        self.primary.push("b", b"b3")
        self.primary.remove("b")
        self.primary.create("b")
        self.primary.push("b", b"b4")

    def end(self):
        self.primary.push_many("a", [b"z%d" % i for i in range(3)])
        self.primary.delete(self.held[4])

    def run(self, service):
        """The whole workload, followed step by step; False if the connection was never lost."""
        follower = FOLLOWER(str(self.path), service, pause=no_pause, now_ms=self.clock.now_ms)
        follower.start()
        for step in self.steps:
            step()
            follower.catch_up()
        follower.close()
        return service.lost

    def run_with_kill(self, service, engine):
        """The same; the killed mirror leaves its state as it was last saved."""
        was_killed = False
        follower: Any = None
        steps = iter(self.steps)
        step = next(steps)
        step()
        while True:
            try:
                if follower is None:
                    follower = FOLLOWER(
                        str(self.path), service, pause=no_pause, now_ms=self.clock.now_ms
                    )
                    follower.start()
                follower.catch_up()
                step = next(steps)
                step()
            except MirrorKilled:
                was_killed = True
                follower._file.close()
                follower._reader.close()
                follower = None
                service = LosesConnection(engine, 0, "not done")
            except StopIteration:
                break
        follower.close()
        return was_killed

    def check(self, mirrored):
        """No message is missing, duplicated or out of order."""
        primary = self.primary
        assert mirrored.list() == primary.list()
        for name in primary.list():
            assert shown(mirrored, name) == shown(primary, name), name
            assert mirrored.stats(name).in_flight == primary.stats(name).in_flight


@pytest.mark.parametrize("how", ["not done", "done", "half done"])
def test_a_connection_lost_at_any_command_loses_and_duplicates_no_message(quick_path, how):
    """Row 12: after the push, before its answer; between claim and delete; amid a batch."""
    for at in range(1, 200):
        workload = Workload(quick_path / f"{at}")
        engine = WithoutDedup(Engine(clock=workload.clock))
        was_lost = workload.run(LosesConnection(engine, at, how))
        workload.check(QUEUES(engine))
        workload.primary.close()
        engine.close()
        if not was_lost:
            break
    assert 20 < at < 199


def test_claims_and_deletes_that_an_idle_service_lost_are_repeated(quick_path):
    """As a broker that is killed while the mirror is idle: claims end, deletes come back."""
    workload = Workload(quick_path)
    engine = WithoutDedup(Engine(clock=workload.clock))
    service = LosesConnection(engine, 0, "not done")
    follower = FOLLOWER(str(workload.path), service, pause=no_pause, now_ms=workload.clock.now_ms)
    follower.start()
    primary, mirrored = workload.primary, QUEUES(engine)
    primary.create("orders")
    primary.push_many("orders", [b"0", b"1", b"2", b"3"])
    follower.catch_up()
    gone, kept = primary.pull_many("orders", 2)
    follower.catch_up()
    primary.delete(gone)
    follower.catch_up()
    # What the broker has after its restart: the deleted message, and no claims.
    forgotten = engine.execute(Push("orders", b"0", context={MARK: "1"}, priority=9))
    for claim in service._claims:
        with suppress(PenstockError):
            engine.execute(Release(claim.queue, claim.proof))
    assert forgotten is not None
    assert [body for body, _ in shown(mirrored, "orders")] == [b"0", b"1", b"2", b"3"]
    follower._target.search_missing(forget=False)
    assert shown(mirrored, "orders") == shown(primary, "orders") == [(b"2", 0), (b"3", 0)]
    assert mirrored.stats("orders").in_flight == 1
    primary.delete(kept)
    follower.catch_up()
    assert mirrored.stats("orders").messages == 2
    follower.close()
    primary.close()
    engine.close()


def test_a_lost_claim_whose_message_is_not_found_yet_is_made_when_it_is_there_again(quick_path):
    """As a broker that gives back late what a lost connection held."""
    workload = Workload(quick_path)
    engine = WithoutDedup(Engine(clock=workload.clock))
    service = LosesConnection(engine, 0, "not done")
    follower = FOLLOWER(str(workload.path), service, pause=no_pause, now_ms=workload.clock.now_ms)
    follower.start()
    primary, mirrored = workload.primary, QUEUES(engine)
    primary.create("orders")
    primary.push_many("orders", [b"0", b"1", b"2"])
    follower.catch_up()
    primary.pull("orders")
    follower.catch_up()
    assert mirrored.stats("orders").in_flight == 1
    for claim in service._claims:
        with suppress(PenstockError):
            engine.execute(Release(claim.queue, claim.proof))
    hidden = mirrored.pull("orders")
    assert hidden.body == b"0"
    follower._target.search_missing(forget=False)
    # A claim that comes later holds, and is not the one that is looked at.
    primary.pull("orders")
    follower.catch_up()
    mirrored.release(hidden)
    follower._target.search_missing(forget=False)
    assert shown(mirrored, "orders") == shown(primary, "orders") == [(b"2", 0)]
    assert mirrored.stats("orders").in_flight == 2
    follower.close()
    primary.close()
    engine.close()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (WithoutDedup, "not done"),
        (WithoutDedup, "done"),
        (WithoutDedup, "half done"),
        (BlockingEngine, "done"),
    ],
)
def test_a_mirror_killed_at_any_command_loses_nothing(quick_path, kind, how):
    """What its claims hid is found when these have run out."""
    for at in range(1, 200):
        workload = Workload(quick_path / f"{at}")
        engine = kind(Engine(clock=workload.clock))
        was_killed = workload.run_with_kill(LosesConnection(engine, at, how, kill=True), engine)
        check_after_kill(workload, engine)
        workload.primary.close()
        engine.close()
        if not was_killed:
            break
    assert 20 < at < 199


def check_after_kill(workload, engine):
    """Claims of the killed process run out; then each side has the same messages, once."""
    workload.clock.advance(seconds=3_600)
    service = LosesConnection(engine, 0, "not done")
    follower = FOLLOWER(str(workload.path), service, pause=no_pause, now_ms=workload.clock.now_ms)
    follower.start()
    workload.primary.push("a", b"last")
    follower.catch_up()
    follower._target.search_missing(forget=False)
    follower.catch_up()
    mirrored = QUEUES(engine)
    for name in workload.primary.list():
        assert sorted(shown(mirrored, name)) == sorted(shown(workload.primary, name)), name
    follower.close()
