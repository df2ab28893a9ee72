"""The contract under many threads: a ledger shows that no message is lost or deleted twice."""

import threading
from collections import Counter
from typing import Final

from penstock.client import Queues
from penstock.service import Claim
from penstock.testing.conformance.seam import TIMEOUT_S, Contract, behaviour

PRODUCERS: Final = 4
CONSUMERS: Final = 4
MESSAGES_EACH: Final = 60
STOP: Final = b"stop"


class Ledger:
    """The results of the threads: which messages are held, and how often each was deleted."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.finished: Counter[str] = Counter()
        self.faults: list[str] = []
        self._held: set[str] = set()
        self._lock = threading.Lock()

    def push(self, message_id: str) -> None:
        """Notes a push that was answered."""
        with self._lock:
            self.pushed.append(message_id)

    def note_pull(self, claim: Claim) -> None:
        """Notes a claim; a fault if another consumer holds the message."""
        with self._lock:
            if claim.id in self._held:
                self.faults.append(f"{claim.id} has two live claims")
            if self.finished[claim.id]:
                self.faults.append(f"{claim.id} came back after its delete")
            self._held.add(claim.id)

    def release(self, claim: Claim) -> None:
        """Notes that a consumer is about to end its claim."""
        with self._lock:
            self._held.discard(claim.id)

    def finish(self, claim: Claim, was_there: bool) -> None:
        """Notes a delete."""
        with self._lock:
            self.finished[claim.id] += 1
            if not was_there:
                self.faults.append(f"{claim.id} was gone before its holder deleted it")


def consume(queues: Queues, queue: str, ledger: Ledger, limit: int) -> None:
    """Deletes every message it pulls; every third one is released once before."""
    while True:
        for claim in queues.pull_many(queue, limit, wait=3_600):
            if claim.body == STOP:
                queues.delete(claim)
                return
            ledger.note_pull(claim)
            ledger.release(claim)
            if claim.receives == 1 and claim.sequence % 3 == 0:
                queues.release(claim)
            else:
                ledger.finish(claim, queues.delete(claim))


def produce(queues: Queues, queue: str, ledger: Ledger, producer: int, groups: bool) -> None:
    """Pushes its part of the messages, one by one and in batches."""
    group = f"g{producer}" if groups else None
    for number in range(MESSAGES_EACH // 4):
        ledger.push(queues.push(queue, f"{producer}/{number}", group=group).id)
        bodies = [f"{producer}/{number}/{part}" for part in range(3)]
        for reply in queues.push_many(queue, bodies, group=group):
            ledger.push(reply.id)


class CrowdContract(Contract):
    """Producers and consumers in many threads."""

    def crowd(self, queue: str, limits: list[int], groups: bool) -> Ledger:
        """Runs all threads until every message is deleted, then ends the consumers."""
        ledger = Ledger()
        queues = self.store
        consumers = [
            threading.Thread(target=consume, args=(queues, queue, ledger, limit), daemon=True)
            for limit in limits
        ]
        producers = [
            threading.Thread(
                target=produce, args=(queues, queue, ledger, number, groups), daemon=True
            )
            for number in range(PRODUCERS)
        ]
        for thread in [*consumers, *producers]:
            thread.start()
        for thread in producers:
            thread.join(TIMEOUT_S)
        total = PRODUCERS * MESSAGES_EACH
        self.until(lambda: ledger.finished.total() >= total or bool(ledger.faults))
        # One at a time, so that no consumer pulls two of them.
        for _ in consumers:
            alive = sum(thread.is_alive() for thread in consumers)
            queues.push(queue, STOP, group="stop" if groups else None)
            self.until(lambda left=alive: sum(t.is_alive() for t in consumers) < left)  # type: ignore[misc]
        return ledger

    def check(self, ledger: Ledger) -> None:
        """Checks that no message was lost or deleted twice, or had two live claims."""
        assert ledger.faults == []
        assert len(ledger.pushed) == len(set(ledger.pushed)) == PRODUCERS * MESSAGES_EACH
        assert dict(ledger.finished) == dict.fromkeys(ledger.pushed, 1)

    @behaviour("threads", "long poll", "release", "batches")
    def test_many_threads_lose_nothing_and_delete_nothing_twice(self) -> None:
        queue = self.queue()
        self.check(self.crowd(queue, [1, 2, 5, 10], groups=False))
        assert self.is_empty(queue)

    @behaviour("threads", "long poll", "release", "batches", "fifo")
    def test_many_threads_on_a_fifo_queue_lose_nothing_and_delete_nothing_twice(self) -> None:
        queue = self.queue(fifo=True)
        self.check(self.crowd(queue, [1, 1, 3, 3], groups=True))
        assert self.is_empty(queue)

    @behaviour("threads", "dedup")
    def test_threads_that_push_the_same_dedup_id_make_one_message(self) -> None:
        queue = self.queue()
        ids: list[str] = []
        start = threading.Barrier(CONSUMERS)

        def push() -> None:
            start.wait(TIMEOUT_S)
            ids.extend(self.store.push(queue, "x", dedup_id=f"{n}").id for n in range(20))

        threads = [threading.Thread(target=push, daemon=True) for _ in range(CONSUMERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert (len(ids), len(set(ids))) == (20 * CONSUMERS, 20)
        assert self.counts(queue) == (20, 0, 0)
