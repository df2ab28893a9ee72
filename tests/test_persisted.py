"""PersistedQueue as its user sees it: order, expiry, limits, and what survives a crash."""

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import (
    EngineClosed,
    InvalidField,
    JournalError,
    QueueFull,
    StoreFull,
    StoreInUse,
    StoreUnusable,
)
from penstock.persisted import PersistedQueue
from tests.journal.disk import Disk, PowerCut

FILE_SIZE = 8192


class SteppedClock:
    def __init__(self, now_s=1_700_000_000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return SteppedClock()


@pytest.fixture
def queue(tmp_path, clock):
    with PersistedQueue(tmp_path / "queue", FILE_SIZE, clock=clock) as opened:
        yield opened


def drain(queue):
    return list(iter(queue.pop, None))


def test_items_come_out_in_the_order_they_went_in(queue):
    items = [b"", b"a", bytes(9000), b"b" * 4096, b"last"]
    for item in items:
        queue.push(item)
    assert queue.size() == len(queue) == 5
    assert drain(queue) == items
    assert queue.pop() is None
    assert queue.size() == 0


def test_peek_reads_every_item_and_removes_none(queue):
    items = [b"%d" % number for number in range(50)]
    for item in items:
        queue.push(item)
    assert [queue.peek(n) for n in range(50)] == items
    assert queue.peek() == queue.peek() == b"0"
    assert [queue.peek(n) for n in (49, 3, 20, 20, 50, 0)] == [
        b"49",
        b"3",
        b"20",
        b"20",
        None,
        b"0",
    ]
    assert list(queue) == items == list(queue)
    assert queue.pop() == b"0"
    assert [queue.peek(n) for n in (0, 1, 48, 49)] == [b"1", b"2", b"49", None]
    queue.push(b"50")
    assert queue.peek(49) == b"50"
    assert queue.size() == 50


def test_iterating_goes_on_while_items_are_pushed_and_popped(queue):
    for number in range(12):
        queue.push(bytes([number]) * 1000)
    seen = []
    for item in queue:
        seen.append(item[0])
        if item[0] == 3:
            for _ in range(9):
                queue.pop()
            queue.push(bytes([99]) * 1000)
    assert seen == [0, 1, 2, 3, 9, 10, 11, 99]


def test_all_items_are_there_after_closing_and_opening(tmp_path):
    path = tmp_path / "queue"
    with PersistedQueue(path, FILE_SIZE) as queue:
        for number in range(20):
            queue.push(b"%d" % number * 200)
        assert [queue.pop() for _ in range(7)] == [b"%d" % number * 200 for number in range(7)]
    with PersistedQueue(path) as queue:
        assert queue.size() == 13
        assert drain(queue) == [b"%d" % number * 200 for number in range(7, 20)]


def test_consumed_files_are_dropped_and_the_disk_does_not_grow(tmp_path, queue):
    for round_ in range(30):
        for _ in range(5):
            queue.push(bytes([round_]) * 1000)
        for _ in range(5):
            assert queue.pop() == bytes([round_]) * 1000
        assert len(os.listdir(tmp_path / "queue")) <= 4


def test_expired_items_are_skipped(queue, clock):
    queue.push(b"short", ttl=10)
    queue.push(b"long", ttl=100)
    queue.push(b"short too", ttl=10)
    queue.push(b"for ever")
    clock.now_s += 9.9
    assert (queue.peek(), queue.size()) == (b"short", 4)
    clock.now_s += 0.1
    assert list(queue) == [b"long", b"for ever"]
    assert (queue.peek(), queue.peek(1), queue.peek(2)) == (b"long", b"for ever", None)
    clock.now_s += 1000
    assert drain(queue) == [b"for ever"]
    assert queue.size() == 0


def test_the_time_to_live_of_a_push_replaces_the_default(tmp_path, clock):
    with PersistedQueue(tmp_path, FILE_SIZE, default_ttl=30, clock=clock) as queue:
        queue.push(b"default")
        queue.push(b"longer", ttl=60)
        queue.push(b"for ever", ttl=0)
        queue.push(b"part of a second", ttl=0.5)
        clock.now_s += 30
        assert list(queue) == [b"longer", b"for ever"]
    clock.now_s += 40
    with PersistedQueue(tmp_path, clock=clock) as queue:
        assert drain(queue) == [b"for ever"]


def test_if_all_items_have_one_time_to_live_the_size_counts_no_expired_ones(tmp_path, clock):
    with PersistedQueue(tmp_path, FILE_SIZE, default_ttl=10, clock=clock) as queue:
        for _ in range(10):
            queue.push(b"x")
            clock.now_s += 1
        clock.now_s += 5
        assert (queue.size(), len(queue), len(list(queue))) == (4, 4, 4)


def test_a_full_queue_refuses_and_changes_nothing(tmp_path, clock):
    with PersistedQueue(tmp_path, FILE_SIZE, max_size=1000, clock=clock) as queue:
        for _ in range(10):
            queue.push(b"x" * 60)
        with pytest.raises(QueueFull, match="holds 1000 of 1000 bytes, no room for 41 more"):
            queue.push(b"y")
        assert queue.size_bytes() == 1000
        queue.pop()
        queue.push(b"z" * 60, ttl=1)
        with pytest.raises(QueueFull):
            queue.push(b"y" * 2000)
        assert list(queue) == [b"x" * 60] * 9 + [b"z" * 60]


def test_expired_items_at_the_front_make_room(tmp_path, clock):
    with PersistedQueue(tmp_path, FILE_SIZE, max_size=1000, clock=clock) as queue:
        for _ in range(10):
            queue.push(b"x" * 60, ttl=5)
        clock.now_s += 5
        queue.push(b"y" * 60)
        assert list(queue) == [b"y" * 60]


def test_capacity_says_how_many_items_fit(tmp_path):
    with PersistedQueue(tmp_path, FILE_SIZE, max_size=4000) as queue:
        assert (queue.capacity(), queue.capacity(60)) == (100, 40)
        for _ in range(queue.capacity()):
            queue.push(b"")
        assert queue.size() == 100
        with pytest.raises(QueueFull):
            queue.push(b"")


@pytest.mark.parametrize(
    "options",
    [
        {"max_size": 39},
        {"max_size": "large"},
        {"max_size": None},
        {"file_size": 5000},
        {"file_size": "5000"},
        {"default_ttl": "hour"},
        {"default_ttl": float("nan")},
        {"default_ttl": -1},
        {"default_ttl": 2**32},
        {"durability": "maybe"},
    ],
)
def test_an_invalid_setting_is_refused_and_makes_no_directory(tmp_path, options):
    with pytest.raises(InvalidField, match=next(iter(options))):
        PersistedQueue(tmp_path / "queue", **options)
    assert not (tmp_path / "queue").exists()


def test_bad_arguments_are_refused_and_change_nothing(queue):
    for call in (
        lambda: queue.push("text"),
        lambda: queue.push(b"x", ttl=-1),
        lambda: queue.push(b"x", ttl=2**32),
        lambda: queue.push(b"x", ttl="1"),
        lambda: queue.push(b"x", ttl=float("nan")),
        lambda: queue.peek(-1),
        lambda: queue.peek("0"),
        lambda: queue.capacity(-41),
        lambda: queue.capacity("0"),
    ):
        with pytest.raises(InvalidField):
            call()
    assert queue.size() == 0


def test_a_pushed_bytearray_or_view_is_copied(queue):
    data = bytearray(b"before")
    queue.push(data)
    queue.push(memoryview(data)[2:])
    data[:] = b"after!"
    assert drain(queue) == [b"before", b"fore"]


def test_a_closed_queue_refuses_and_may_be_closed_twice(queue):
    queue.push(b"x")
    queue.close()
    queue.close()
    for call in (queue.pop, queue.peek, queue.size, lambda: queue.push(b"y"), lambda: list(queue)):
        with pytest.raises(EngineClosed, match="the queue is closed"):
            call()


def test_two_processes_cannot_open_one_queue(tmp_path, queue):
    with pytest.raises(StoreInUse, match=f"in use by process {os.getpid()}"):
        PersistedQueue(tmp_path / "queue")


def test_threads_share_a_queue_and_each_item_is_popped_once(queue):
    pushed = [b"%d-%d" % (worker, number) for worker in range(4) for number in range(60)]
    popped: list[bytes] = []
    all_pushed = threading.Barrier(5)

    def push(worker):
        for item in pushed[worker * 60 : worker * 60 + 60]:
            queue.push(item)
        all_pushed.wait()

    def pop():
        while (item := queue.pop()) is not None:
            popped.append(item)

    pushers = [threading.Thread(target=push, args=(worker,)) for worker in range(4)]
    for thread in pushers:
        thread.start()
    all_pushed.wait()
    poppers = [threading.Thread(target=pop) for _ in range(4)]
    for thread in poppers:
        thread.start()
    for thread in pushers + poppers:
        thread.join()
    assert sorted(popped) == sorted(pushed)


def test_a_damaged_item_is_skipped_and_reported(tmp_path):
    with PersistedQueue(tmp_path, FILE_SIZE) as queue:
        for item in (b"one", b"two", b"three"):
            queue.push(item)
    name = tmp_path / "000000000000.seg"
    image = bytearray(name.read_bytes())
    image[image.index(b"two")] ^= 1
    name.write_bytes(image)
    with PersistedQueue(tmp_path) as queue:
        assert drain(queue) == [b"one", b"three"]
        assert [found[:2] for found in queue.quarantined] == [(43, 43)]


def test_a_damaged_last_item_leaves_an_empty_queue_that_works(tmp_path):
    with PersistedQueue(tmp_path, FILE_SIZE) as queue:
        queue.push(b"only")
    name = tmp_path / "000000000000.seg"
    image = bytearray(name.read_bytes())
    image[4096] ^= 1
    name.write_bytes(image)
    with PersistedQueue(tmp_path) as queue:
        assert (queue.pop(), queue.size()) == (None, 0)
        queue.push(b"next")
        assert drain(queue) == [b"next"]


def test_a_full_disk_still_lets_items_be_popped_and_then_pushed_again():
    disk = Disk(room_bytes=4 * FILE_SIZE)
    queue = PersistedQueue(disk.path, FILE_SIZE, storage=disk)
    pushed = 0
    with contextlib.suppress(StoreFull):
        while True:
            queue.push(bytes([pushed]) * 1000)
            pushed += 1
    with pytest.raises(StoreFull, match="No space left on device"):
        queue.push(bytes(1000))
    assert queue.size() == pushed
    for number in range(pushed):
        assert queue.pop() == bytes([number]) * 1000
    for number in range(pushed):
        queue.push(bytes([number]))
    assert queue.size() == pushed


def test_after_a_failed_sync_the_queue_stops_and_keeps_what_it_answered():
    disk = Disk()
    queue = PersistedQueue(disk.path, FILE_SIZE, storage=disk)
    queue.push(b"answered")
    disk.failing_syncs = {disk.syncs + 1}
    with pytest.raises(JournalError):
        queue.push(b"not answered")
    for call in (lambda: queue.push(b"x"), queue.pop):
        with pytest.raises(JournalError):
            call()
    queue.close()
    left = disk.after_cut(random.Random(1))
    assert drain(PersistedQueue(left.path, storage=left))[0] == b"answered"


class QueueModel:
    """The model of a queue: the answered calls, and those that may or may not have taken effect."""

    def __init__(self, disk, durability="sync"):
        self.expected: deque[bytes] = deque()
        self.doubtful_push: bytes | None = None
        self.doubtful_pop = False
        self.number = 0
        self.open(disk)

    def open(self, disk):
        self.disk = disk
        self.queue = PersistedQueue(disk.path, FILE_SIZE, storage=disk)

    def push(self, size):
        self.number += 1
        item = random.Random(self.number).randbytes(size)
        self.doubtful_push = item
        self.queue.push(item)
        self.expected.append(item)
        self.doubtful_push = None

    def pop(self):
        self.doubtful_pop = bool(self.expected)
        popped = self.queue.pop()
        assert popped == (self.expected.popleft() if self.expected else None)
        self.doubtful_pop = False

    def accept(self, disk):
        self.open(disk)
        found = list(self.queue)
        # By the count and not by the first item: two successive items may be equal.
        if self.doubtful_pop and len(found) < len(self.expected):
            self.expected.popleft()
        if self.doubtful_push is not None and len(found) > len(self.expected):
            self.expected.append(self.doubtful_push)
        assert found == list(self.expected)
        assert self.queue.size() == len(found)
        assert self.queue.quarantined == []
        self.doubtful_push, self.doubtful_pop = None, False


@pytest.mark.parametrize("seed", range(150))
def test_no_power_cut_loses_a_push_or_brings_back_a_pop(seed):
    rng = random.Random(seed)
    disk = Disk(sector_bytes=rng.choice([512, 4096]), tearing=rng.random() < 0.3)
    account = QueueModel(disk)
    for _ in range(4):
        account.disk.steps_left = rng.randrange(80)
        try:
            while True:
                if rng.random() < 0.6:
                    account.push(rng.choice([0, 10, 500, 6000]))
                else:
                    account.pop()
        except PowerCut:
            pass
        account.disk.steps_left = None
        account.accept(account.disk.after_cut(rng))


def test_after_a_cut_of_pushes_and_pops_that_were_not_durable_the_queue_works():
    for seed in range(60):
        disk = Disk(sector_bytes=512)
        queue = PersistedQueue(disk.path, FILE_SIZE, storage=disk, durability="os")
        for number in range(12):
            queue.push(bytes([number]) * 1000)
        for _ in range(seed % 9):
            queue.pop()
        left = disk.after_cut(random.Random(seed))
        after = PersistedQueue(left.path, storage=left)
        items = drain(after)
        assert [item[0] for item in items] == sorted(item[0] for item in items)
        after.push(b"works")
        assert after.pop() == b"works"


CHILD = r"""
import sys
from penstock.persisted import PersistedQueue
queue = PersistedQueue(sys.argv[1], 8192, durability=sys.argv[2])
number = 0
while True:
    queue.push(b"%d" % number)
    print(f"pushed {number}\n", end="", flush=True)
    number += 1
    if number % 3 == 0:
        print(f"popped {int(queue.pop())}\n", end="", flush=True)
"""


@pytest.mark.parametrize("durability", ["sync", "os"])
def test_a_killed_process_loses_no_push_and_brings_back_no_pop(tmp_path, durability):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "queue"), durability]
    pushed = popped = -1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            verb, number = line.split()
            if verb == "pushed":
                pushed = int(number)
            else:
                popped = int(number)
            if pushed == 500:
                child.kill()
    with PersistedQueue(tmp_path / "queue") as queue:
        numbers = [int(item) for item in queue]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert popped + 1 <= numbers[0] <= popped + 2
    assert pushed <= numbers[-1] <= pushed + 1


class QueueMachine(RuleBasedStateMachine):
    """A queue and a deque that get the same operations have the same items."""

    @initialize()
    def start(self):
        self.disk = Disk()
        self.clock = SteppedClock()
        self.model: deque[tuple[bytes, float]] = deque()
        self.queue = self.open()

    def open(self):
        return PersistedQueue(
            self.disk.path, FILE_SIZE, max_size=30_000, storage=self.disk, clock=self.clock
        )

    def drop_expired(self):
        self.model = deque(pair for pair in self.model if pair[1] > self.clock.now_s)

    @rule(size=st.integers(0, 9000), fill=st.integers(0, 255), ttl=st.sampled_from([0, 5, 50]))
    def push(self, size, fill, ttl):
        item = bytes([fill]) * size
        try:
            self.queue.push(item, ttl=ttl)
        except QueueFull:
            assert self.queue.size_bytes() + size + 40 > 30_000
        else:
            self.model.append((item, self.clock.now_s + ttl if ttl else float("inf")))

    @rule()
    def pop(self):
        self.drop_expired()
        assert self.queue.pop() == (self.model.popleft()[0] if self.model else None)

    @rule(n=st.integers(0, 6))
    def peek(self, n):
        self.drop_expired()
        assert self.queue.peek(n) == (self.model[n][0] if n < len(self.model) else None)

    @rule(seconds=st.sampled_from([1, 7, 60]))
    def wait(self, seconds):
        self.clock.now_s += seconds

    @rule(killed=st.booleans())
    def reopen(self, killed):
        if not killed:
            self.queue.close()
        self.queue = self.open()

    @invariant()
    def items_are_the_same(self):
        self.drop_expired()
        assert list(self.queue) == [item for item, _ in self.model]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_queue_that_misses_a_file_opens_only_if_the_loss_is_accepted(tmp_path):
    """Row 3: the items of the other files are still there, in order."""
    with PersistedQueue(tmp_path, file_size=8192) as queue:
        for number in range(12):
            queue.push(bytes([number]) * 984)
    (tmp_path / "000000000001.seg").unlink()
    with pytest.raises(StoreUnusable, match=r"missing: 000000000001\.seg"):
        PersistedQueue(tmp_path)
    with PersistedQueue(tmp_path, accept_loss=True) as queue:
        assert [item[0] for item in queue] == [0, 1, 2, 3, 8, 9, 10, 11]
