"""A mirror repeats the events of a store on another service, through stops, kills and failures."""

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.mirror.follow import MirrorFollower as Follower
from penstock.backends.mirror.marks import MARK
from penstock.backends.mirror.state import read_state as read_saved
from penstock.clock import ManualClock
from penstock.errors import (
    BackendLost,
    InvalidField,
    QueueNotFound,
    StoreInUse,
    StoreUnusable,
    UnsupportedOperation,
)
from penstock.journal import reader_positions
from penstock.service import Batch, CreateQueue, Push

MirrorFollower: Any = Follower
read_state: Any = read_saved


class NoDedup(BlockingEngine):
    """A service without dedup, as RabbitMQ is."""

    LACKS: ClassVar = {"dedup": "it has none"}

    def execute(self, command):
        if isinstance(command, Batch):
            assert not any(isinstance(item, Push) and item.dedup_id for item in command.items)
        return super().execute(command)


def no_pause(seconds):
    pass


class MirrorPair:
    """A store with a manual clock, a service that mirrors it, and the mirror between them."""

    def __init__(self, path, kind=BlockingEngine):
        self.path = path / "store"
        self.clock = ManualClock()
        self.primary = penstock.connect(f"file:{self.path}?embedded=1", clock=self.clock)
        self.service = kind(Engine())
        self.mirror = penstock.Queues(self.service)
        # The mirror's own; a follower closes what it is given.
        self.kept = KeptOpen(self.service)
        self._follower = None

    @property
    def follower(self):
        if self._follower is None:
            self._follower = MirrorFollower(
                str(self.path), self.kept, pause=no_pause, now_ms=self.clock.now_ms
            )
            self._follower.start()
        return self._follower

    def sync(self):
        self.follower.catch_up()
        return self.follower.progress

    def stop(self):
        """Stop in order."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def kill(self):
        """What a kill leaves: the state as it was last saved."""
        if self._follower is not None:
            self._follower._file.close()
            self._follower._reader.close()
            self._follower = None

    def close(self):
        self.stop()
        self.primary.close()
        self.service.close()

    def check_same(self):
        """The mirror has the primary's queues, with the same messages in the same states."""
        assert self.mirror.list() == self.primary.list()
        for name in self.primary.list():
            theirs, ours = self.primary.stats(name), self.mirror.stats(name)
            counts = (theirs.visible, theirs.delayed, theirs.in_flight)
            assert (ours.visible, ours.delayed, ours.in_flight) == counts, name
            assert shown(self.mirror, name) == shown(self.primary, name)


class KeptOpen:
    """A service that stays open when its user closes it."""

    def __init__(self, service):
        self.LACKS = service.LACKS
        self.redrive_max = service.redrive_max
        self.execute = service.execute
        self.lost = 0

    def close(self):
        pass


def shown(queues, name):
    messages = queues.peek(name, 1_000)
    return [(each.body, each.attributes, each.priority, each.group) for each in messages]


@pytest.fixture
def pair(quick_path):
    made = MirrorPair(quick_path)
    yield made
    made.close()


def test_queues_and_messages_appear_on_the_mirror_as_they_were_made(pair):
    primary = pair.primary
    primary.create("orders", visibility_timeout=5, priority_age=60)
    pair.sync()
    primary.push("orders", b"plain")
    primary.push("orders", b"first", priority=9, attributes={"kind": "test", "raw": b"\xff"})
    primary.push("orders", b"grouped", group="eu", dedup_id="42")
    primary.create("line.fifo")
    primary.push("line.fifo", b"1", group="a")
    primary.push_many("orders", [b"%d" % i for i in range(1_200)])
    assert pair.sync().behind_bytes == 0
    pair.check_same()
    copied = pair.mirror.describe("orders").settings
    assert (copied.visibility_timeout, copied.priority_age) == (5, 60)
    assert pair.mirror.describe("line.fifo").settings.fifo


def test_a_claim_hides_a_release_returns_and_a_delete_deletes(pair):
    primary = pair.primary
    primary.create("orders")
    primary.push_many("orders", [b"0", b"1", b"2", b"3"])
    pair.sync()
    held = primary.pull_many("orders", 3)
    pair.sync()
    pair.check_same()
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"3"]
    primary.release(held[1])
    primary.delete(held[0])
    primary.extend(held[2], 600)
    pair.sync()
    pair.check_same()
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"1", b"3"]
    primary.delete(held[2])
    pair.sync()
    pair.check_same()
    assert (pair.follower.progress.pushed, pair.follower.progress.deleted) == (4, 2)


def test_a_claim_that_runs_out_and_a_message_that_expires_do_so_on_the_mirror(pair):
    primary = pair.primary
    primary.create("orders", visibility_timeout=10)
    primary.push("orders", b"short", ttl=60)
    primary.push("orders", b"long")
    assert primary.pull("orders").body == b"short"
    pair.sync()
    pair.clock.advance(seconds=11)
    primary.push("orders", b"last")
    pair.sync()
    pair.check_same()
    pair.clock.advance(seconds=60)
    primary.push("orders", b"later")
    pair.sync()
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"long", b"last", b"later"]


def test_a_message_pushed_and_deleted_within_one_batch_is_not_on_the_mirror(pair):
    primary = pair.primary
    primary.create("orders")
    pair.sync()
    for i in range(50):
        primary.push("orders", b"%d" % i)
        claim = primary.pull("orders")
        if i % 3:
            primary.release(claim)
            claim = primary.pull("orders")
        primary.delete(claim)
    assert pair.sync().pushed == 50
    pair.check_same()
    assert pair.follower.progress.unmatched == 0


def test_queues_are_purged_and_removed_and_made_again(pair):
    primary = pair.primary
    primary.create("orders")
    primary.create("other")
    primary.push_many("orders", [b"1", b"2", b"3"])
    primary.push("other", b"x")
    pair.sync()
    claim = primary.pull("orders")
    pair.sync()
    primary.purge("orders")
    primary.remove("other")
    primary.push("orders", b"4")
    pair.sync()
    pair.check_same()
    primary.remove("orders")
    primary.create("orders")
    primary.push("orders", b"5")
    pair.sync()
    pair.check_same()
    with pytest.raises(QueueNotFound):
        pair.mirror.stats("other")
    assert claim is not None


def test_dead_letters_and_redrives_move_on_the_mirror(pair):
    primary = pair.primary
    primary.create("orders", dead_letter="dead", max_receives=1)
    primary.push_many("orders", [b"1", b"2", b"3"])
    pair.sync()
    for _ in range(2):
        primary.release(primary.pull("orders"))
        primary.pull("orders", visibility_timeout=1)
        pair.clock.advance(seconds=2)
    primary.push("orders", b"4")
    pair.sync()
    pair.check_same()
    assert pair.mirror.stats("dead").messages > 0
    primary.redrive("dead")
    pair.sync()
    pair.check_same()
    assert pair.mirror.stats("dead").messages == 0


def test_what_was_there_before_is_copied_in_order_with_its_states(pair):
    primary = pair.primary
    primary.create("orders")
    primary.create("empty")
    primary.push_many("orders", [b"%d" % i for i in range(700)])
    primary.push("orders", b"late", delay=3_600)
    primary.push("orders", b"urgent", priority=9)
    held = primary.pull_many("orders", 5)
    primary.delete(held[0])
    pair.sync()
    pair.check_same()
    primary.delete(held[1])
    primary.release(held[2])
    pair.sync()
    pair.check_same()


def test_a_mirror_that_was_stopped_goes_on_where_it_was(pair):
    primary = pair.primary
    primary.create("orders")
    primary.push_many("orders", [b"0", b"1", b"2"])
    held = primary.pull("orders")
    pair.sync()
    pair.stop()
    primary.delete(held)
    primary.push("orders", b"3")
    claim = primary.pull("orders")
    pair.sync()
    pair.check_same()
    pair.stop()
    primary.delete(claim)
    pair.sync()
    pair.check_same()
    assert pair.follower.progress.unmatched == 0


@pytest.mark.parametrize("kind", [BlockingEngine, NoDedup])
def test_a_mirror_that_was_killed_repeats_its_last_steps_without_duplicates(quick_path, kind):
    pair = MirrorPair(quick_path, kind)
    primary = pair.primary
    primary.create("orders")
    pair.sync()
    for turn in range(4):
        primary.push_many("orders", [b"%d.%d" % (turn, i) for i in range(600)])
        pair.sync()
        pair.kill()
        primary.push("orders", b"between")
    pair.sync()
    pair.check_same()
    pair.close()


def test_a_delete_whose_claim_a_kill_lost_is_done_when_the_message_is_visible_again(quick_path):
    clock = ManualClock()
    pair = MirrorPair(quick_path)
    pair.service.close()
    pair.service = BlockingEngine(Engine(clock=clock))
    pair.mirror = penstock.Queues(pair.service)
    pair.kept = KeptOpen(pair.service)
    primary: Any = pair.primary
    primary.create("orders")
    primary.push("orders", b"x")
    pair.sync()
    held = primary.pull("orders")
    pair.sync()
    pair.kill()
    primary.delete(held)
    pair.sync()
    assert pair.mirror.stats("orders").in_flight == 1
    clock.advance(seconds=3_600)
    pair.follower._target.search_missing(forget=False)
    assert pair.mirror.stats("orders").messages == 0
    assert pair.follower.progress.unmatched == 0
    pair.close()


def test_a_copy_that_was_interrupted_begins_again(pair):
    primary = pair.primary
    primary.create("orders")
    primary.push_many("orders", [b"%d" % i for i in range(1_500)])
    follower = MirrorFollower(str(pair.path), FailingAfter(pair.service, 4))
    with pytest.raises(KeyboardInterrupt):
        follower.start()
    follower.close()
    assert 0 < pair.mirror.stats("orders").messages < 1_500
    pair.sync()
    pair.check_same()


class FailingAfter(KeptOpen):
    """A service whose user is interrupted after so many commands."""

    def __init__(self, service, commands):
        super().__init__(service)
        self._left = commands
        self._execute = service.execute
        self.execute = self.fail_later

    def fail_later(self, command):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._execute(command)


class LosingAnswers(KeptOpen):
    """A service whose answers to every third batch are lost, done or not."""

    def __init__(self, service):
        super().__init__(service)
        self._execute = service.execute
        self.execute = self.lose_some
        self.lost = 0
        self._count = 0

    def lose_some(self, command):
        if isinstance(command, Batch):
            self._count += 1
            if self._count % 3 == 0:
                self.lost += 1
                if self._count % 2:
                    self._execute(command)
                raise BackendLost("the answer was lost")
        return self._execute(command)


@pytest.mark.parametrize("kind", [BlockingEngine, NoDedup])
def test_lost_answers_neither_lose_nor_duplicate_messages(quick_path, kind):
    pair = MirrorPair(quick_path, kind)
    pair.kept = LosingAnswers(pair.service)
    primary = pair.primary
    primary.create("orders")
    for turn in range(12):
        primary.push_many("orders", [b"%d.%d" % (turn, i) for i in range(20)])
        claims = primary.pull_many("orders", 8)
        for claim in claims[:4]:
            primary.delete(claim)
        primary.release(claims[5])
        pair.sync()
    pair.check_same()
    assert pair.kept.lost > 5
    pair.close()


def test_the_mirror_continues_beside_a_consumer_of_its_queues(pair):
    primary = pair.primary
    primary.create("orders")
    primary.push_many("orders", [b"0", b"1", b"2"])
    pair.sync()
    taken = pair.mirror.pull("orders")
    assert taken.body == b"0"
    pair.mirror.delete(taken)
    for claim in primary.pull_many("orders", 2):
        primary.delete(claim)
    pair.sync()
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"2"]
    pair.follower._target.search_missing(forget=True)
    assert pair.follower.progress.unmatched == 1
    pair.mirror.remove("orders")
    primary.push("orders", b"3")
    pair.sync()
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"3"]


def test_a_queue_of_the_mirror_that_has_messages_is_not_mixed_with_a_copy(pair):
    pair.mirror.create("orders")
    pair.mirror.push("orders", b"somebody else's")
    pair.primary.create("orders")
    follower = MirrorFollower(str(pair.path), pair.kept)
    with pytest.raises(InvalidField, match="'orders' has messages already; purge or remove it"):
        follower.start()
    follower.close()
    assert pair.mirror.stats("orders").messages == 1


def test_a_refused_message_is_counted_and_delays_no_other(pair):
    pair.primary.create("orders", max_body_bytes=2_000_000)
    pair.sync()
    pair.mirror.configure("orders", max_body_bytes=1_000)
    pair.primary.push("orders", bytes(2_000))
    pair.primary.push("orders", b"small")
    progress = pair.sync()
    assert progress.refused == 1
    assert "MessageTooLarge" in progress.error
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"small"]


def test_two_mirrors_of_a_store_need_two_names(pair):
    pair.primary.create("orders")
    pair.sync()
    with pytest.raises(StoreInUse, match="another process mirrors it as 'mirror'"):
        MirrorFollower(str(pair.path), pair.kept)
    other = BlockingEngine(Engine())
    second = MirrorFollower(str(pair.path), other, "second")
    second.start()
    second.close()
    assert [each.name for each in reader_positions.registered(pair.path)] == ["mirror", "second"]
    with pytest.raises(InvalidField, match=r"reader: '\.\./x'"):
        MirrorFollower(str(pair.path), pair.kept, "../x")


def test_a_mirror_whose_events_were_dropped_says_so_and_what_to_do(pair):
    pair.primary.create("orders")
    pair.sync()
    pair.stop()
    state = read_state(pair.path, "mirror")
    state_file = pair.path / "mirrors" / "mirror.json"
    text = state_file.read_text()
    state_file.write_text(text.replace(f'"position":{state.position}', '"position":99999999999'))
    with pytest.raises(StoreUnusable, match="stopped at offset 99999999999"):
        pair.sync()
    pair.kill()
    pair._follower = None
    state_file.write_text(text.replace(state.journal, "00" * 16))
    with pytest.raises(StoreUnusable, match="belongs to another journal"):
        MirrorFollower(str(pair.path), pair.kept)
    for content in ("{", '{"x":' + "[" * 100_000):
        state_file.write_text(content)
        with pytest.raises(StoreUnusable, match="cannot be read as a mirror's state"):
            MirrorFollower(str(pair.path), pair.kept)
    shutil.rmtree(pair.path / "mirrors")


def test_files_that_the_mirror_has_not_read_are_kept(pair):
    primary = pair.primary
    primary.create("orders")
    pair.sync()
    position = pair.follower.progress.position
    pair.stop()
    primary.push_many("orders", [bytes(1_000)] * 100)
    (reader,) = reader_positions.registered(pair.path)
    assert reader.name == "mirror"
    assert reader.floor_offset == position
    pair.sync()
    pair.stop()
    (reader,) = reader_positions.registered(pair.path)
    assert reader.floor_offset > position + 100_000


def test_a_mirrored_message_differs_only_by_its_mark(pair):
    pair.primary.create("orders")
    pair.primary.service.execute(Push("orders", b"x", context={"trace": "1"}))
    pair.sync()
    (message,) = pair.mirror.peek("orders", 1)
    assert message.context == {"trace": "1", MARK: "1"}


@pytest.mark.parametrize("seed", range(6))
def test_random_commands_give_the_same_queues_on_the_mirror(quick_path, seed):
    """Random commands, with stops and kills of the mirror between them."""
    chance = random.Random(seed)
    pair = MirrorPair(quick_path, chance.choice([BlockingEngine, NoDedup]))
    primary = pair.primary
    names = ["a", "b", "c"]
    primary.create("dead")
    for name in names:
        primary.create(name, dead_letter="dead", max_receives=4, visibility_timeout=30)
    held: list[penstock.Claim] = []
    for turn in range(300):
        name = chance.choice(names)
        match chance.randrange(12):
            case 0 | 1 | 2:
                primary.push(name, b"%d" % turn, priority=chance.choice([0, 0, 5]))
            case 3:
                primary.push_many(name, [b"%d.%d" % (turn, i) for i in range(20)])
            case 4 | 5 | 6:
                held += primary.pull_many(name, chance.randint(1, 8))
            case 7 | 8 if held:
                end_claim(primary.delete, held.pop(chance.randrange(len(held))))
            case 9 if held:
                end_claim(primary.release, held.pop(chance.randrange(len(held))))
            case 10:
                if chance.random() < 0.2:
                    primary.purge(name)
                elif chance.random() < 0.2:
                    # It is refused if no queue that messages came from exists.
                    with suppress(InvalidField):
                        primary.redrive("dead")
                elif chance.random() < 0.1:
                    primary.remove(name)
                    primary.create(name, dead_letter="dead", max_receives=4)
                else:
                    pair.clock.advance(seconds=chance.randint(1, 20))
            case 11:
                pair.sync()
                chance.choice([pair.stop, list, list])()
    primary.push("a", b"the end")
    pair.sync()
    pair.check_same()
    pair.close()


def end_claim(end, claim):
    with suppress(penstock.errors.InvalidReceipt, QueueNotFound):
        end(claim)


def test_only_a_store_can_be_mirrored_and_not_to_itself(tmp_path):
    for url, said in [
        ("mirror:", "is not of the form mirror:"),
        ("mirror:?primary=memory:&mirror=memory:", "has no journal that can be followed"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=file:{tmp_path}/s", "is the primary itself"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=nowhere:", "unknown URL scheme 'nowhere'"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=memory:", "loses its messages"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=file:{tmp_path}/./s", "is the primary itself"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=file:x&x=1", "has no option 'x'"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=file:x&name=../x", "reader: '../x'"),
        (f"mirror:?primary=file:{tmp_path}/s&mirror=file:x&moved=2", "neither 0 nor 1"),
        ("mirror:?primary=amqp://u:hunter2@h&mirror=file:x", "has no journal"),
        ("mirror:?primary=file:x&miror=amqp://u:hunter2@h", "has an unknown option; it has mirror"),
        ("mirror:x?primary=file:x&mirror=amqp://u:hunter2@h", "is not of the form mirror:"),
        ("mirror:?primary=file:x&mirror=amqpp://u:hunter2@h", "unknown URL scheme 'amqpp'"),
    ]:
        with pytest.raises(InvalidField, match=said) as caught:
            penstock.connect(url)
        assert "hunter2" not in str(caught.value)
    assert not Path(tmp_path / "s").exists()
    with pytest.raises(StoreUnusable):
        MirrorFollower(str(tmp_path / "s"), BlockingEngine(Engine()))


def test_fields_that_the_mirrors_service_lacks_are_left_out(quick_path):
    class PlainEngine(BlockingEngine):
        LACKS: ClassVar = dict.fromkeys(
            ["dedup", "fair groups", "fifo", "priority order", "priority age"], "no"
        )

        def execute(self, command):
            for item in getattr(command, "items", []):
                if isinstance(item, Push) and (item.group or item.dedup_id or item.priority):
                    raise UnsupportedOperation("no")
            if isinstance(command, CreateQueue):
                assert "priority_age_ms" not in command.settings
                if command.settings.get("retention_ms"):
                    raise InvalidField("retention: at most 14 days")
            return super().execute(command)

    pair = MirrorPair(quick_path, PlainEngine)
    pair.primary.create("line.fifo")
    pair.primary.push("line.fifo", b"1", group="a")
    pair.primary.create("orders", priority_age=60)
    pair.primary.push("orders", b"2", priority=3, group="b", dedup_id="c")
    progress = pair.sync()
    assert (progress.pushed, progress.refused) == (2, 0)
    assert [each.body for each in pair.mirror.peek("line.fifo", 9)] == [b"1"]
    assert [each.body for each in pair.mirror.peek("orders", 9)] == [b"2"]
    pair.close()
