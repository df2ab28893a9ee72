"""Owners of a shard on a replicated log: takeovers, fencing, replay, snapshots."""

import itertools

import pytest

from penstock.backends.engine.upkeep import Upkeep
from penstock.clock import ManualClock
from penstock.cluster.extent import Extent, pack_extent, unpack_extent
from penstock.cluster.log import (
    Append,
    Demote,
    Mismatch,
    Pause,
    PurgeSlots,
    ReadSlots,
    Unanswered,
)
from penstock.cluster.replica import ShardReplica
from penstock.cluster.snapshots import keep_snapshot, manifest_key
from penstock.cluster.stream_copy import FileCopy, MemoryCopy
from penstock.cluster.takeover import append_extent, append_steps, owner_key, take_over
from penstock.errors import Fenced, NotOwner, StoreUnusable
from penstock.journal.restore import Recovery
from penstock.service import Batch, CreateQueue, Delete, Peek, Pull, Push, PushMany, Stats
from penstock.steps import run_steps
from tests.cluster.plainlog import PlainLog

SHARD = 3
KEY, IDENTITY = b"k" * 32, b"identit"
names = (f"name-{n}" for n in itertools.count())


class OwnerOnLog:
    """One owner of the shard on a log in memory."""

    def __init__(self, log, path, node="a", in_files=False):
        self.log = log
        self.path = path / f"{node}-{next(names)}"
        make = None if in_files else MemoryCopy
        self.replica = ShardReplica(SHARD, self.path, make)
        self.node = node
        self.clock = ManualClock()

    def take(self):
        found = self.log.registers.get(owner_key(SHARD))
        revision = found.revision if found else 0
        steps = take_over(self.replica, self.node, next(names), revision)
        self.journal = run_steps(self.log.answer, steps)
        self.engine = self.replica.engine(self.journal, lambda last_ms: self.clock, IDENTITY, KEY)
        self.upkeep = Upkeep(self.engine, self.journal, self.path, None)
        return self

    def do(self, command):
        reply = self.engine.submit(command)
        self.flush()
        return reply

    def flush(self):
        run_steps(self.log.answer, append_steps(self.journal))

    def snapshot(self):
        steps = keep_snapshot(self.journal, self.upkeep, self.path, next(names))
        return run_steps(self.answer, steps)

    def answer(self, request):
        if self.journal.has_unsent and type(request) is not Append:
            self.flush()
        return self.log.answer(request)

    @property
    def state(self):
        return self.engine.shard.snapshot()


@pytest.fixture
def log():
    return PlainLog()


@pytest.fixture
def owner(log, quick_path):
    return OwnerOnLog(log, quick_path).take()


@pytest.fixture
def other(log, quick_path):
    return OwnerOnLog(log, quick_path, "b")


def bodies(owner):
    return [m.body for m in owner.do(Peek("q", 1000))]


def finish(steps, request, log):
    """Runs steps that have yielded this request to their end."""
    while True:
        request = steps.send(log.answer(request))


def filled(owner, count=5, size=10):
    owner.do(CreateQueue("q"))
    for n in range(count):
        owner.do(Push("q", b"%06d" % n + b"x" * size))
    return owner


def test_a_new_owner_has_the_identical_state(owner, other):
    filled(owner)
    claims = owner.do(Pull("q", 2))
    owner.do(Delete("q", claims[0].receipt))
    other.take()
    assert other.state == owner.state
    # A receipt of the previous owner is valid with the next one.
    assert other.do(Delete("q", claims[1].receipt))
    assert other.do(Stats("q")).messages == 3


def test_many_appends_share_an_extent_while_one_is_under_way(log, owner):
    owner.do(CreateQueue("q"))
    before = log.last(SHARD)
    for n in range(50):
        owner.engine.submit(Push("q", b"%d" % n))
    assert owner.journal.durable_sequence < owner.journal.last_sequence
    owner.flush()
    assert log.last(SHARD) == before + 1
    assert owner.journal.durable_sequence == owner.journal.last_sequence


def test_a_reply_is_notified_only_once_its_extent_is_kept(log, owner):
    owner.do(CreateQueue("q"))
    owner.engine.submit(Push("q", b"1"))
    done = []
    owner.journal.notify(owner.engine.answer_sequence, lambda: done.append(1))
    steps = append_steps(owner.journal)
    request = next(steps)
    assert type(request) is Append
    slot = log.answer(request)
    assert not done
    with pytest.raises(StopIteration):
        steps.send(slot)
    assert done == [1]


def test_a_fenced_owner_appends_nothing_and_stops(log, owner, other):
    filled(owner)
    other.take()
    owner.engine.submit(Push("q", b"stale"))
    with pytest.raises(Fenced):
        owner.flush()
    with pytest.raises(Fenced):
        owner.engine.submit(Push("q", b"stale"))
    assert b"stale" not in bodies(other)


def test_an_extent_whose_answer_was_lost_is_not_appended_twice(log, owner):
    filled(owner)

    def lose_answer(request):
        if type(request) is Append:
            log.fault = lambda request: None
            log.answer(request)
            raise Unanswered("lost")

    log.fault = lose_answer
    before = log.last(SHARD)
    owner.do(Push("q", b"once"))
    assert log.last(SHARD) == before + 1
    assert bodies(owner).count(b"once") == 1


def test_a_refusal_by_an_attempt_that_disappears_is_not_taken_for_a_fence(log, owner):
    """Error 10071 because of an attempt that was accepted and never kept."""
    filled(owner)
    refusals = iter([True, True, True])

    def refuse(request):
        if type(request) is Append and next(refusals, False):
            raise Mismatch

    log.fault = refuse
    before = log.last(SHARD)
    owner.do(Push("q", b"in the end"))
    assert log.last(SHARD) == before + 1


def test_until_an_append_is_resolved_only_the_same_bytes_are_sent(log, owner):
    filled(owner)
    owner.engine.submit(Push("q", b"first"))
    steps = append_steps(owner.journal)
    sent = next(steps)
    owner.engine.submit(Push("q", b"second"))
    steps.throw(Unanswered("lost"))
    assert steps.send(None) == sent


def test_an_owner_that_was_replaced_before_it_opened_its_term_gives_up(
    log, owner, other, quick_path
):
    """The slower of two new owners opens its term behind a higher one: its extent is void."""
    filled(owner)
    slow = take_over(other.replica, "b", "slow", log.registers[owner_key(SHARD)].revision)
    request = next(slow)
    while type(request) is not Append:
        request = slow.send(log.answer(request))
    third = OwnerOnLog(log, quick_path, "c").take()
    third.do(Push("q", b"third"))
    # Its append is taken after the third owner's extents.
    void = Append(SHARD, log.last(SHARD), request.extent)
    log.answer(void)
    request = slow.throw(Mismatch())
    with pytest.raises(Fenced):
        finish(slow, request, log)
    # The third owner skips the void extent, and so does every later one.
    third.do(Push("q", b"goes on"))
    last = OwnerOnLog(log, quick_path, "d").take()
    assert bodies(last)[-2:] == [b"third", b"goes on"]


def test_a_shard_that_another_node_took_first_is_not_taken(log, owner, other):
    seen = log.registers[owner_key(SHARD)].revision
    OwnerOnLog(log, other.path, "c").take()
    steps = take_over(other.replica, "b", "late", seen)
    with pytest.raises(NotOwner):
        run_steps(log.answer, steps)


def test_a_swap_whose_answer_was_lost_still_makes_the_owner(log, owner, other):
    def lose_answer(request):
        if type(request).__name__ == "Swap":
            log.fault = lambda request: None
            log.answer(request)
            raise Unanswered("lost")

    log.fault = lose_answer
    other.take()
    assert other.journal.term == log.registers[owner_key(SHARD)].revision


def test_a_term_is_opened_though_the_end_that_was_asked_for_is_purged_since(log):
    """The slot was read from a replica that lags far: such a takeover did not end once."""
    for after in range(10):
        log.answer(Append(SHARD, after, pack_extent(Extent(SHARD, 1, 0, 0, b"", True))))
    log.answer(PurgeSlots(SHARD, 8))
    opening = pack_extent(Extent(SHARD, 2, 0, 0, b"late", opens_term=True))

    def answer(request):
        assert len(log.requests) < 50
        return log.answer(request)

    assert run_steps(answer, append_extent(SHARD, 2, 3, opening)) == 11


def test_an_entry_larger_than_an_extent_spans_several(log, owner, other):
    owner.do(CreateQueue("q", {"body_bytes_max": 5_000_000}))
    before = log.last(SHARD)
    owner.do(Push("q", b"y" * 3_500_000))
    assert log.last(SHARD) == before + 4
    other.take()
    assert bodies(other) == [b"y" * 3_500_000]


def test_half_an_entry_of_a_replaced_owner_is_dropped(log, owner, other, quick_path):
    owner.do(CreateQueue("q", {"body_bytes_max": 5_000_000}))
    owner.do(Push("q", b"kept"))
    owner.engine.submit(Push("q", b"y" * 3_500_000))
    steps = append_steps(owner.journal)
    steps.send(log.answer(next(steps)))
    other.take()
    other.do(Push("q", b"next"))
    assert bodies(other) == [b"kept", b"next"]
    last = OwnerOnLog(log, quick_path, "c").take()
    assert last.state == other.state


def test_a_log_with_a_gap_is_not_served(log, owner, other):
    filled(owner)
    missing = log.slots[SHARD].pop(4)

    def heal(request):
        if type(request) is Demote:
            log.slots[SHARD][4] = missing

    log.fault = heal
    other.take()
    assert log.demoted == [SHARD]
    assert other.replica.gaps == 1
    assert other.state == owner.state


def test_a_damaged_extent_is_read_from_another_replica(log, owner, other):
    filled(owner)
    good = log.slots[SHARD][4]
    log.slots[SHARD][4] = good[:50] + bytes([good[50] ^ 1]) + good[51:]

    def heal(request):
        if type(request) is Demote:
            log.slots[SHARD][4] = good

    log.fault = heal
    other.take()
    assert other.state == owner.state


def test_a_replica_that_is_behind_is_waited_for(log, owner, other):
    """An owner that served before it has read the slot of its own term would lose messages."""
    filled(owner)
    reads = iter(range(3))

    def behind(request):
        if type(request) is ReadSlots and next(reads, None) is not None:
            raise Unanswered("behind")

    log.fault = behind
    log.behind_for = 2
    other.take()
    assert not log.behind_for
    assert other.state == owner.state


def test_a_snapshot_bounds_what_is_replayed(log, owner, other):
    filled(owner, 40, 100_000)
    for claim in owner.do(Pull("q", 39)):
        owner.do(Delete("q", claim.receipt))
    assert owner.snapshot()
    owner.do(Push("q", b"after"))
    assert owner.snapshot()
    assert log.firsts[SHARD] > 20
    owner.do(Push("q", b"last"))
    other.take()
    assert other.state == owner.state
    assert len(bodies(other)) == 3


def test_a_takeover_without_a_standby_applies_only_what_follows_the_snapshot(
    log, owner, other, monkeypatch
):
    filled(owner, 60)
    assert owner.snapshot()
    for n in range(3):
        owner.do(Push("q", b"after %d" % n))
    applied = []
    apply_entry = Recovery.apply_entry

    def note_and_apply(recovery, entry):
        applied.append(entry.entry_id)
        apply_entry(recovery, entry)

    monkeypatch.setattr(Recovery, "apply_entry", note_and_apply)
    last = owner.journal.last_sequence
    other.take()
    assert applied == [last - 2, last - 1, last]
    # Older slots are read as well: only they contain the bodies of messages.
    assert other.state == owner.state
    assert bodies(other) == bodies(owner)


def test_a_snapshot_of_an_owner_never_waits_for_a_disk(owner, monkeypatch):
    """It is taken on the event loop, on which every shard of the node is served."""
    filled(owner, 40, 100_000)

    def fail(descriptor):
        raise AssertionError("a sync on the event loop")

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"penstock.journal.snapshot.os.{name}", fail)
    assert owner.snapshot()


def test_a_snapshot_of_many_messages_is_taken_in_short_steps(log, owner):
    owner.do(CreateQueue("q"))
    for _ in range(2):
        owner.do(PushMany("q", [b"x" * 1_000] * 10_000))
    assert owner.snapshot()
    for _ in range(2):
        claims = owner.do(Pull("q", 10_000))
        deletes = [Delete("q", claim.receipt) for n, claim in enumerate(claims) if n % 4]
        owner.do(Batch([*deletes]))
    log.requests.clear()
    assert owner.snapshot()
    # Of 5,000 messages in two slices, 1,000 are carried in a step.
    assert sum(type(request) is Pause for request in log.requests) >= 7
    assert owner.journal.first_position > 0


def test_two_snapshots_are_kept_and_either_is_enough(log, owner, other, quick_path):
    filled(owner, 30, 100_000)
    for n in range(4):
        assert owner.snapshot()
        owner.do(Push("q", b"after %d" % n))
    assert len({name for _, name, _ in log.chunks}) == 2
    newest = log.registers[manifest_key(SHARD)].value
    first = min(log.chunks, key=lambda key: newest.index(key[1].encode()))
    good = log.chunks[first]
    log.chunks[first] = b"damaged" + good[7:]
    other.take()
    assert other.state == owner.state
    for key in log.chunks:
        log.chunks[key] = b"damaged"
    with pytest.raises(StoreUnusable):
        OwnerOnLog(log, quick_path, "c").take()


def test_dedup_ids_survive_snapshot_and_takeover(log, owner, other):
    owner.do(CreateQueue("q"))
    first = owner.do(Push("q", b"1", dedup_id="same"))
    assert owner.snapshot()
    other.take()
    again = other.do(Push("q", b"2", dedup_id="same"))
    assert again.duplicate
    assert again.id == first.id


def test_a_standby_that_tails_reads_only_what_is_new(log, owner, other):
    filled(owner)
    run_steps(log.answer, other.replica.catch_up())
    reached = other.replica.next_slot
    assert reached == log.last(SHARD) + 1
    owner.do(Push("q", b"new"))
    log.requests.clear()
    other.take()
    reads = [r for r in log.requests if type(r) is ReadSlots]
    # Once to see what is behind the slot it knew, and once to apply it.
    assert {r.first for r in reads} == {reached}
    assert bodies(other)[-1] == b"new"


def test_a_standby_that_has_read_everything_takes_over_without_reading(log, owner, other):
    filled(owner)
    run_steps(log.answer, other.replica.catch_up())
    log.requests.clear()
    other.take()
    assert not [r for r in log.requests if type(r) is ReadSlots]
    assert other.state == owner.state
    assert other.replica.next_slot == log.last(SHARD) + 1
    other.do(Push("q", b"goes on"))
    assert bodies(other)[-1] == b"goes on"


def test_a_long_log_is_read_in_short_steps(log, owner, other):
    """The event loop that reads serves other shards between the steps."""
    filled(owner, 200)
    log.requests.clear()
    other.take()
    assert log.requests.count(Pause(0)) >= 20
    assert other.state == owner.state


def test_a_standby_reads_a_long_log_in_parts_with_pauses_and_a_takeover_does_not(log, owner, other):
    """No client waits for a standby; clients of its node's other shards do."""
    filled(owner, 250)
    log.requests.clear()
    run_steps(log.answer, other.replica.catch_up())
    reads = [each for each in log.requests if type(each) is ReadSlots]
    # 252 slots; the last read finds nothing.
    assert len(reads) == 4
    assert {each.limit for each in reads} == {100}
    waits = [each for each in log.requests if type(each) is Pause and each.ms]
    assert len(waits) == 3
    for n in range(250):
        owner.do(Push("q", b"%d" % n))
    log.requests.clear()
    other.take()
    assert {each.limit for each in log.requests if type(each) is ReadSlots} == {500}
    assert not [each for each in log.requests if type(each) is Pause and each.ms]
    assert other.state == owner.state


def test_a_long_read_waits_while_it_is_paused(log, owner, other):
    filled(owner, 50)
    replica = other.replica
    paused = [True] * 5
    reached = []

    def is_paused():
        reached.append(replica.next_slot)
        return bool(paused) and paused.pop()

    replica.is_paused = is_paused
    run_steps(log.answer, replica.catch_up())
    # It went on with the next slot after the pause, and had read nothing meanwhile.
    assert reached[:6] == [reached[0]] * 6
    assert reached[6] > reached[0]
    assert replica.next_slot == log.last(SHARD) + 1


def test_a_large_extent_is_applied_in_short_steps_and_reading_may_end_between_them(
    log, owner, other
):
    filled(owner)
    run_steps(log.answer, other.replica.catch_up())
    for n in range(100):
        owner.engine.submit(Push("q", b"%d" % n + b"x" * 2_000))
    owner.flush()
    steps = other.replica.catch_up()
    request = next(steps)
    while request != Pause(0):
        request = steps.send(log.answer(request))
    # The task that reads is cancelled, and the replica is used to take the shard over.
    steps.close()
    log.requests.clear()
    other.take()
    assert log.requests.count(Pause(0)) >= 4
    assert other.state == owner.state


def test_a_standby_that_was_left_behind_begins_at_the_next_snapshot(log, owner, other):
    filled(owner)
    run_steps(log.answer, other.replica.catch_up())
    for n in range(30):
        owner.do(Push("q", b"%d" % n + b"z" * 100_000))
        if n % 10 == 9:
            for claim in owner.do(Pull("q", 1000)):
                owner.do(Delete("q", claim.receipt))
            assert owner.snapshot()
    assert other.replica.next_slot < log.firsts[SHARD]
    other.take()
    assert other.state == owner.state


def test_contents_in_files_are_those_in_memory(quick_path):
    in_files, in_memory = FileCopy(quick_path / "f", 1000), MemoryCopy(1000)
    for n in range(1, 50):
        for each in (in_files, in_memory):
            each.append(bytes([n]) * n)
    position = 1000
    for n in range(1, 50):
        assert in_files.read(position, n) == in_memory.read(position, n) == bytes([n]) * n
        position += n
    assert in_files.end_position == in_memory.end_position == position


def test_an_owner_in_files_serves_bodies_from_them(log, quick_path):
    owner = OwnerOnLog(log, quick_path, "f", in_files=True).take()
    filled(owner, 20, 20_000)
    owner.journal._recent.clear()
    assert [len(body) for body in bodies(owner)] == [20_006] * 20
    assert list((owner.path / "stream").iterdir())
    owner.engine.close()
    assert not list((owner.path / "stream").iterdir())


def test_an_extent_is_what_was_packed():
    extent = Extent(7, 12, 1 << 40, 99, b"data", goes_on=True)
    assert unpack_extent(pack_extent(extent)) == extent
    opening = Extent(7, 12, 0, 0, b"node", opens_term=True)
    assert unpack_extent(pack_extent(opening)) == opening
