"""The in-memory engine beside `queue.Queue` and moto: `make bench NAME=memory`.

A lifecycle is push → pull → delete of one 256-byte message through the public blocking API. For
`queue.Queue` it is put → get; for moto it is send, receive and delete through boto3, in process.
"""

import os
import queue
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import penstock
from benchmarks.harness import (
    Child,
    Target,
    Void,
    check_deletes,
    check_ledger,
    count_for,
    finish,
    install_peer,
    interleave,
    is_quick,
    machine,
    percentile,
    print_table,
    ratio,
    rss_bytes,
    run_benchmark,
    timed_in_threads,
)

BODY = b"x" * 256
ROUNDS = 9
ROUND_S = 0.6
BACKLOG_SMALL = 1_000
BACKLOG_LARGE = 1_000_000
LATENCY_COUNT = 50_000
MOTO = ("moto[sqs]>=5.1,<6", "boto3>=1.40,<2")
VERBS = ("push", "pull", "extend", "release", "delete")


class TimedRun(NamedTuple):
    """The time and the ids of one timed run of lifecycles."""

    took_s: float
    pushed: list[Any]
    pulled: list[Any]


def run_lifecycles(queues: penstock.Queues, count: int, threads: int = 1) -> TimedRun:
    """Runs `count` lifecycles, each thread an equal part. Raises Void."""
    each = count // threads
    pushed: list[list[Any]] = [[None] * each for _ in range(threads)]
    pulled: list[list[Any]] = [[None] * each for _ in range(threads)]
    deleted: list[list[Any]] = [[None] * each for _ in range(threads)]

    def body(number: int) -> None:
        push, pull, delete = queues.push, queues.pull, queues.delete
        mine, theirs, gone = pushed[number], pulled[number], deleted[number]
        for i in range(each):
            mine[i] = push("bench", BODY).id
            claim = pull("bench")
            theirs[i] = claim.id  # type: ignore[union-attr]
            gone[i] = delete(claim)  # type: ignore[arg-type]

    took_s = timed_in_threads(threads, body)
    check_deletes(chain(*deleted))
    return TimedRun(took_s, [*chain(*pushed)], [*chain(*pulled)])


def lifecycles(count: int, threads: int = 1) -> float:
    """Whole lifecycles on a new engine; lifecycles a second."""
    with penstock.connect("memory:") as queues:
        queues.create("bench")
        run = run_lifecycles(queues, count, threads)
        check_ledger(run.pushed, run.pulled)
        if queues.stats("bench").messages:
            raise Void(f"{queues.stats('bench').messages} messages are left")
    return len(run.pushed) / run.took_s


def queue_pairs(count: int, threads: int = 1) -> float:
    """Puts and gets on a `queue.Queue`; pairs a second."""
    each = count // threads
    shared: queue.Queue[bytes] = queue.Queue()
    taken: list[list[Any]] = [[None] * each for _ in range(threads)]

    def body(number: int) -> None:
        put, get, got = shared.put, shared.get, taken[number]
        for i in range(each):
            put(BODY)
            got[i] = get()

    took_s = timed_in_threads(threads, body)
    if not shared.empty() or not all(item is BODY for some in taken for item in some):
        raise Void("queue.Queue lost an item")
    return count / took_s


_moto: dict[str, Any] = {}


def moto_lifecycles(count: int) -> float:
    """Send, receive and delete against moto's SQS in this process; lifecycles a second."""
    if not _moto:
        _start_moto()
    url = _moto["url"]
    send, receive = _moto["client"].send_message, _moto["client"].receive_message
    delete, body = _moto["client"].delete_message, BODY.decode()
    sent: list[Any] = [None] * count
    pulled: list[Any] = [None] * count
    start_s = time.perf_counter()
    for i in range(count):
        sent[i] = send(QueueUrl=url, MessageBody=body)["MessageId"]
        message = receive(QueueUrl=url, MaxNumberOfMessages=1)["Messages"][0]
        pulled[i] = message["MessageId"]
        delete(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    took_s = time.perf_counter() - start_s
    check_ledger(sent, pulled)
    return count / took_s


def _start_moto() -> None:
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    import boto3  # type: ignore[import-untyped, unused-ignore]
    from moto import mock_aws  # type: ignore[import-not-found, unused-ignore]

    _moto["mock"] = mock_aws()
    _moto["mock"].start()
    _moto["client"] = boto3.client("sqs")
    _moto["url"] = _moto["client"].create_queue(QueueName="bench")["QueueUrl"]


class Backlog:
    """A queue with a backlog on which lifecycles run: each adds a message and takes the oldest."""

    def __init__(self, size: int) -> None:
        self.queues = penstock.connect("memory:")
        self.queues.create("bench")
        self.pushed = [id_ for ids in fill(self.queues, size) for id_ in ids]
        self.pulled: list[Any] = []

    def cost_us(self, count: int) -> float:
        """Microseconds a lifecycle."""
        run = run_lifecycles(self.queues, count)
        self.pushed += run.pushed
        self.pulled += run.pulled
        return run.took_s / count * 1e6

    def close_and_check(self) -> None:
        """Pulls everything and checks the ledger. Raises Void."""
        while claims := self.queues.pull_many("bench", 1_000):
            check_deletes(self.queues.delete_many(claims))
            self.pulled += (claim.id for claim in claims)
        check_ledger(self.pushed, self.pulled)
        self.queues.close()


def fill(queues: penstock.Queues, size: int) -> Iterator[list[str]]:
    """Pushes `size` messages with distinct body objects; yields the ids, a thousand at a time."""
    for start in range(0, size, 1_000):
        bodies = [b"%0256d" % number for number in range(start, start + 1_000)]
        yield [reply.id for reply in queues.push_many("bench", bodies)]


# A child process runs one of these at a time, and keeps it between calls.
_backlogs: list[Backlog] = []


def start_backlog(size: int) -> None:
    """Fills this process's queue."""
    _backlogs.append(Backlog(size))


def backlog_cost_us(count: int) -> float:
    """Microseconds a lifecycle with that backlog."""
    return _backlogs[0].cost_us(count)


def empty_and_check_backlog() -> None:
    """Empties this process's queue and checks its ledger. Raises Void."""
    _backlogs.pop().close_and_check()


def rss_per_message(size: int) -> float:
    """Resident bytes for each queued message of 256 bytes, its body included."""
    with penstock.connect("memory:") as queues:
        queues.create("bench")
        run_lifecycles(queues, 1_000)
        before_bytes = rss_bytes()
        pushed = sum(len(ids) for ids in fill(queues, size))
        grown_bytes = rss_bytes() - before_bytes
        if queues.stats("bench").messages != pushed:
            raise Void(f"the queue has {queues.stats('bench').messages} messages of {pushed}")
        return grown_bytes / pushed


def latencies(count: int) -> dict[str, dict[str, float]]:
    """The median and the 99th percentile of each verb, in microseconds, one thread."""
    times = {verb: array("q", bytes(8 * count)) for verb in VERBS}
    push_ns, pull_ns, extend_ns, release_ns, delete_ns = times.values()
    now = time.perf_counter_ns
    with penstock.connect("memory:") as queues:
        queues.create("bench")
        run_lifecycles(queues, 1_000)
        for i in range(count):
            t0 = now()
            queues.push("bench", BODY)
            t1 = now()
            claim = queues.pull("bench")
            t2 = now()
            assert claim is not None
            t3 = now()
            queues.extend(claim, 60)
            t4 = now()
            queues.release(claim)
            t5 = now()
            again = queues.pull("bench")
            assert again is not None
            t6 = now()
            queues.delete(again)
            t7 = now()
            push_ns[i], pull_ns[i], extend_ns[i] = t1 - t0, t2 - t1, t4 - t3
            release_ns[i], delete_ns[i] = t5 - t4, t7 - t6
    return {verb: _quantiles_us(sorted(ns)) for verb, ns in times.items()}


def _quantiles_us(sorted_ns: Sequence[float]) -> dict[str, float]:
    return {f"p{p}_us": round(percentile(sorted_ns, p) / 1_000, 2) for p in (50, 99)}


def race() -> dict[str, list[float]]:
    """Runs interleaved rounds of all contestants; the rates of each, round by round."""
    ours, theirs, moto = Child(), Child(), Child(None if is_quick() else "moto")
    runs: dict[str, Callable[[int], float]] = {
        "penstock, 1 thread": lambda count: ours.call(lifecycles, count, 1),
        "queue.Queue, 1 thread": lambda count: theirs.call(queue_pairs, count, 1),
        "moto, 1 thread": lambda count: moto.call(moto_lifecycles, count),
        "penstock, 4 threads": lambda count: ours.call(lifecycles, count, 4),
        "queue.Queue, 4 threads": lambda count: theirs.call(queue_pairs, count, 4),
    }
    if is_quick():
        del runs["moto, 1 thread"]
    figures = interleave(ROUNDS, calibrated(runs))
    for child in (ours, theirs, moto):
        child.close()
    return figures


def calibrated(runs: dict[str, Callable[[int], float]]) -> dict[str, Callable[[], float]]:
    """Each run with as many lifecycles as take about ROUND_S."""

    def sized(run: Callable[[int], float]) -> Callable[[], float]:
        run(100)
        count = count_for(ROUND_S, lambda count: count / run(count))
        return lambda: run(count)

    return {name: sized(run) for name, run in runs.items()}


def backlog_large() -> int:
    """How many messages wait in the larger of two queues."""
    return 10 * BACKLOG_SMALL if is_quick() else BACKLOG_LARGE


def race_backlogs() -> dict[str, list[float]]:
    """Microseconds a lifecycle with a small and a large backlog, round by round."""
    children = {size: Child() for size in (BACKLOG_SMALL, backlog_large())}
    for size, child in children.items():
        child.call(start_backlog, size)
    small = children[BACKLOG_SMALL]
    count = count_for(ROUND_S, lambda count: count * small.call(backlog_cost_us, count) / 1e6)

    def run(size: int) -> Callable[[], float]:
        return lambda: children[size].call(backlog_cost_us, count)

    costs = interleave(ROUNDS, {f"backlog {size:,}": run(size) for size in children})
    for child in children.values():
        child.call(empty_and_check_backlog)
        child.close()
    return costs


def main() -> None:
    """Runs everything and prints it."""
    if not is_quick():
        install_peer("moto", MOTO)
    line = machine()
    print(line)
    rates = race()
    costs = race_backlogs()
    child = Child()
    rss = child.call(rss_per_message, backlog_large())
    verbs = child.call(latencies, LATENCY_COUNT)
    child.close()

    ours, theirs = rates["penstock, 1 thread"], rates["queue.Queue, 1 thread"]
    small, large = costs.values()
    rows = [(name, *_spread(values, "{:,.0f}")) for name, values in rates.items()]
    print_table("lifecycles a second, 256 B", ("", "median", "lowest", "highest"), rows)
    rows = [(name, *_spread(values, "{:.2f}")) for name, values in costs.items()]
    print_table("microseconds a lifecycle", ("", "median", "lowest", "highest"), rows)
    quantiles = [(verb, f"{q['p50_us']:.1f}", f"{q['p99_us']:.1f}") for verb, q in verbs.items()]
    print_table("microseconds a verb, one thread", ("", "p50", "p99"), quantiles)
    four = ratio(rates["penstock, 4 threads"], rates["queue.Queue, 4 threads"])
    print(f"\nfour threads: {four:.2f} × queue.Queue")
    print(f"memory: {rss:.0f} B resident for each queued message of 256 B")
    targets = [
        Target("one thread / queue.Queue pairs", ratio(ours, theirs), 0.2),
        Target("cost with 1,000,000 / with 1,000", ratio(large, small), 1.5, at_least=False),
    ]
    if "moto, 1 thread" in rates:
        targets.append(Target("one thread / moto", ratio(ours, rates["moto, 1 thread"]), 100))
    finish(
        "memory",
        targets,
        {
            "machine": line,
            "rates_per_s": {name: round(median(values), 1) for name, values in rates.items()},
            "lifecycle_us": {name: round(median(values), 3) for name, values in costs.items()},
            "four_threads_ratio": round(four, 3),
            "rss_bytes_per_message": round(rss),
            "latency": verbs,
        },
    )


def _spread(values: Sequence[float], form: str) -> tuple[str, str, str]:
    return form.format(median(values)), form.format(min(values)), form.format(max(values))


if __name__ == "__main__":
    run_benchmark(main)
