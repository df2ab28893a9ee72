"""`SharedQueue` with real processes: order, limits, kills of the daemon and within a pop."""

import os
import signal
import subprocess
import sys
import threading
from itertools import chain

import pytest

import penstock
from penstock import PersistedQueue, SharedQueue
from penstock.backends.remote.daemon import running_pid
from penstock.errors import InvalidField, MessageTooLarge, QueueFull, StoreUnusable
from penstock.service import BODY_BYTES_MAX
from tests.server.conftest import TIMEOUT_S, until

PUSHES = """
import sys, penstock
with penstock.SharedQueue(sys.argv[1]) as queue:
    for number in range(int(sys.argv[3])):
        queue.push(b"%s %d" % (sys.argv[2].encode(), number))
"""
POPS = """
import sys, penstock
with penstock.SharedQueue(sys.argv[1]) as queue:
    while (item := queue.pop()) != b"end":
        print((item or b"").decode(), flush=True)
"""
# Its delete ends the process, as a kill between the two requests of a pop does.
DIES_WITHIN_POP = """
import os, signal, sys
from penstock import shared
shared._POP_S = 1.0
queue = shared.SharedQueue(sys.argv[1])
queue._queues.delete = lambda claim: os.kill(os.getpid(), signal.SIGKILL)
queue.pop()
"""


def start(code, *words, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], **options)


def drain(queue):
    return list(iter(queue.pop, None))


def test_items_come_out_in_the_order_they_went_in_and_may_span_files(store):
    items = [b"", b"a", bytes(50_000), b"b" * 4_096, b"last"]
    with SharedQueue(store, file_size=8_192) as queue:
        for item in items:
            queue.push(item)
        first, *_ = (store / "journal").glob("*.seg")
        assert first.stat().st_size == 8_192
        assert (len(queue), queue.size_bytes()) == (5, 54_101)
        assert [queue.peek(n) for n in (0, 2, 4, 5)] == [b"", bytes(50_000), b"last", None]
        assert list(queue) == items == list(queue)
        assert drain(queue) == items
        assert queue.peek() is queue.pop() is None
        assert queue.size() == 0


def test_peek_and_iteration_go_beyond_one_page(store):
    with SharedQueue(store, durability="os") as queue:
        for number in range(230):
            queue.push(b"%d" % number)
        assert [queue.peek(n) for n in (99, 100, 101, 229)] == [b"99", b"100", b"101", b"229"]
        assert list(queue) == [b"%d" % number for number in range(230)]


def test_the_options_are_stored_and_the_next_process_has_them(store):
    with SharedQueue(store, max_size=4_000, default_ttl=60) as queue:
        assert (queue.capacity(), queue.capacity(1_000)) == (100, 4)
        with SharedQueue(store) as other:
            assert other.capacity() == 100
        for wanted in ({"max_size": 5_000}, {"default_ttl": 61}, {"durability": "os"}):
            with pytest.raises(InvalidField, match=next(iter(wanted))):
                SharedQueue(store, **wanted)
        for _ in range(4):
            queue.push(bytes(1_000))
        with pytest.raises(QueueFull):
            queue.push(b"1")
        queue.pop()
        queue.push(b"1")
        queue.pop()
        for _ in range(97):
            queue.push(b"")
        with pytest.raises(QueueFull):
            queue.push(b"")
        assert queue.size() == queue.capacity() == 100


@pytest.mark.parametrize(
    "options",
    [
        {"max_size": 39},
        {"max_size": "large"},
        {"default_ttl": -1},
        {"default_ttl": "hour"},
        {"file_size": 5_000},
        {"file_size": "8192"},
        {"durability": "never"},
    ],
)
def test_an_option_that_is_no_good_is_refused_by_its_name_and_makes_nothing(store, options):
    with pytest.raises(InvalidField, match=next(iter(options))):
        SharedQueue(store, **options)
    assert not store.exists()
    with SharedQueue(store), pytest.raises(InvalidField, match=next(iter(options))):
        SharedQueue(store, **options)


def test_a_place_or_size_that_is_no_number_is_refused(store):
    with SharedQueue(store) as queue:
        queue.push(b"x")
        for call, name in (
            (lambda: queue.peek("0"), "n"),  # type: ignore[arg-type]
            (lambda: queue.peek(-1), "n"),
            (lambda: queue.capacity(-41), "data_bytes"),
            (lambda: queue.capacity("0"), "data_bytes"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidField, match=f"^{name}:"):
                call()
        assert drain(queue) == [b"x"]


def test_an_item_lives_as_long_as_its_ttl_or_the_default(store):
    with SharedQueue(store, default_ttl=0.5) as queue:
        queue.push(b"short")
        queue.push(b"long", ttl=600)
        queue.push(b"longest", ttl=0)
        until(lambda: queue.size() == 2)
        assert drain(queue) == [b"long", b"longest"]
        with pytest.raises(InvalidField, match="ttl"):
            queue.push(b"x", ttl=-1)
        with pytest.raises(InvalidField, match="bytes"):
            queue.push("text")  # type: ignore[arg-type]
        with pytest.raises(MessageTooLarge):
            queue.push(bytes(BODY_BYTES_MAX + 1))
        assert queue.size() == 0


def test_a_directory_is_of_one_class_and_refused_by_the_other(tmp_path, store):
    with PersistedQueue(tmp_path / "persisted") as queue:
        queue.push(b"x")
    with pytest.raises(StoreUnusable, match="is a PersistedQueue"):
        SharedQueue(tmp_path / "persisted")
    SharedQueue(store).close()
    before = sorted(os.listdir(store))
    with pytest.raises(StoreUnusable, match="SharedQueue"):
        PersistedQueue(store)
    assert sorted(os.listdir(store)) == before


def test_processes_push_and_pop_at_once_and_each_item_comes_out_once_and_in_order(store):
    with SharedQueue(store, durability="os") as queue:
        producers = [start(PUSHES, store, name, 150) for name in ("a", "b")]
        consumers = [start(POPS, store, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [producer.wait(TIMEOUT_S) for producer in producers] == [0, 0]
        until(lambda: queue.size() == 0)
        queue.push(b"end")
        queue.push(b"end")
        outputs = [
            [line.split() for line in consumer.communicate(timeout=TIMEOUT_S)[0].splitlines()]
            for consumer in consumers
        ]
        assert queue.size() == 0
    popped = [[words for words in lines if words] for lines in outputs]
    for name in ("a", "b"):
        by_consumer = [[int(n) for who, n in lines if who == name] for lines in popped]
        assert all(numbers == sorted(numbers) for numbers in by_consumer)
        assert sorted(chain(*by_consumer)) == list(range(150))


def test_a_daemon_killed_again_and_again_loses_no_push_and_repeats_no_pop(store):
    pushed: list[bytes] = []
    popped: list[bytes] = []
    ended = threading.Event()

    def push():
        with SharedQueue(store) as queue:
            for number in range(400):
                queue.push(b"%d" % number)
                pushed.append(b"%d" % number)
        ended.set()

    with SharedQueue(store) as queue:
        thread = threading.Thread(target=push)
        thread.start()
        kills = 0
        while not ended.is_set():
            for _ in range(20):
                item = queue.pop()
                if item is not None:
                    popped.append(item)
            pid = running_pid(store)
            if pid is not None and kills < 4 and len(pushed) > 60 * (kills + 1):
                os.kill(pid, signal.SIGKILL)
                kills += 1
        thread.join()
        popped += drain(queue)
        assert queue.size() == 0
    assert kills >= 2
    assert popped == pushed == [b"%d" % number for number in range(400)]


def test_an_item_of_a_process_that_was_killed_within_a_pop_is_back_in_its_place(store):
    with SharedQueue(store) as queue:
        queue.push(b"first")
        queue.push(b"second")
        assert start(DIES_WITHIN_POP, store).wait(TIMEOUT_S) == -signal.SIGKILL
        assert queue.size() == 2
        until(lambda: queue.peek() == b"first")
        assert drain(queue) == [b"first", b"second"]


def test_the_words_of_penstock_work_on_the_same_items(store):
    with SharedQueue(store) as queue, penstock.connect(f"file:{store}") as queues:
        queue.push(b"x")
        assert [claim.body for claim in queues.pull_many("queue", 2)] == [b"x"]
        assert (queue.size(), queue.pop()) == (1, None)
