"""Queues in Redis beside the raw limit and the method of dyno-queues: `make bench NAME=redis`.

All contestants use one redis-server, redis-py and hiredis, and send batches of a hundred messages:

- penstock: `redis://`, one script call for a batch; every delivery rule, a ledger at the end.
- raw limit: redis-py's pipeline, one EVALSHA a message of a script that returns its argument. A
  push is one such call; a pull and a delete are two, the first with the body, the second with an
  id.
- three commands a step: the method of dyno-queues and Milau in one pipeline: a sorted set, a hash
  and an un-ack set, without a script, and so without epochs, groups, dedup or atomic steps.

The cost of an operation is measured with 1,000 and with 1,000,000 messages queued. At last, single
pushes of one thread show what each of the blocking service's two shorter ways buys: its own socket
beside the portal, and the plain function for a plain push beside the coroutine for every push.
"""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import redis.asyncio

import penstock.aio
from benchmarks.harness import (
    Child,
    Target,
    check_deletes,
    check_ledger,
    count_for,
    finish,
    interleave,
    is_quick,
    machine,
    print_table,
    ratio,
    run_benchmark,
)
from penstock.backends.portal import Portal
from penstock.backends.redis.service import open_async_service, open_service
from penstock.client import Queues
from penstock.service import Batch, Delete, Pull, PushMany, QueueService
from penstock.url import read_url

BODY = b"x" * 256
BATCH = 100
ROUNDS = 7
ROUND_S = 0.5
BACKLOGS = (1_000, 1_000_000)
RAW = "return ARGV[1]"
OURS, LIMIT, STEPS = "penstock", "raw limit", "three commands a step"
CONTESTANTS = (OURS, LIMIT, STEPS)
STEPS_NAMES = ("push", "pull + delete")
PORTAL, COROUTINE, PLAIN = "portal", "own socket, coroutine", "own socket, plain function"
# A way that buys less than this is removed.
OWN_SOCKET_MIN, PLAIN_MIN = 2.0, 1.2


@contextmanager
def redis_server() -> Iterator[str]:
    """A server of its own, which keeps nothing on disk."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("benchmark: there is no redis-server: make services")
    directory = tempfile.mkdtemp(prefix="penstock-bench-")
    port = _free_port()
    server = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", directory],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_it_answers(url: str) -> None:
    client = redis.asyncio.Redis.from_url(url)
    give_up_s = time.monotonic() + 10
    while True:
        try:
            await client.ping()
            break
        except redis.exceptions.ConnectionError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.05)
    await client.aclose()


# In a child process: the ids that were pushed, for the ledger of the pulls that follow.
_pushed: list[str] = []


def run_step(url: str, name: str, step: str, count: int) -> float:
    """Runs one step of one contestant; returns the seconds it took."""
    return asyncio.run(_run_step(url, name, step, count))


async def _run_step(url: str, name: str, step: str, count: int) -> float:
    if name == OURS:
        return await _ours(url, step, count)
    client = redis.asyncio.Redis.from_url(url)
    try:
        if name == LIMIT:
            return await _limit(client, step, count)
        return await _steps(client, step, count)
    finally:
        await client.aclose()


async def _ours(url: str, step: str, count: int) -> float:
    queues = await penstock.aio.connect(url)
    try:
        await queues.create("bench")
        execute = queues.service.execute
        began_s = time.perf_counter()
        if step == "push":
            made = [await execute(PushMany("bench", [BODY] * BATCH)) for _ in range(count // BATCH)]
            took_s = time.perf_counter() - began_s
            _pushed.extend(each.id for batch in made for each in batch)
            return took_s
        pulled: list[str] = []
        answers: list[Any] = []
        for _ in range(count // BATCH):
            claims = await execute(Pull("bench", BATCH))
            pulled += [claim.id for claim in claims]
            answers += await execute(Batch([Delete("bench", claim.proof) for claim in claims]))
        took_s = time.perf_counter() - began_s
        check_ledger(_pushed, pulled)
        check_deletes(answers)
        _pushed.clear()
        return took_s
    finally:
        await queues.close()


async def _limit(client: Any, step: str, count: int) -> float:
    sha = await client.script_load(RAW)
    began_s = time.perf_counter()
    for at in range(0, count, BATCH):
        pipe = client.pipeline(transaction=False)
        for _ in range(BATCH):
            pipe.evalsha(sha, 1, "raw", BODY)
        await pipe.execute()
        if step != "push":
            pipe = client.pipeline(transaction=False)
            for number in range(BATCH):
                pipe.evalsha(sha, 1, "raw", at + number)
            await pipe.execute()
    return time.perf_counter() - began_s


async def _steps(client: Any, step: str, count: int) -> float:
    began_s = time.perf_counter()
    for at in range(0, count, BATCH):
        if step == "push":
            pipe = client.pipeline(transaction=False)
            for number in range(at, at + BATCH):
                pipe.hset("steps:messages", str(number), BODY)
                pipe.zadd("steps:queued", {str(number): time.time()})
            await pipe.execute()
            continue
        ids = await client.zrangebyscore("steps:queued", 0, time.time(), 0, BATCH)
        pipe = client.pipeline(transaction=False)
        for each in ids:
            pipe.zadd("steps:unacked", {each: time.time() + 30})
            pipe.zrem("steps:queued", each)
            pipe.hget("steps:messages", each)
        await pipe.execute()
        pipe = client.pipeline(transaction=False)
        for each in ids:
            pipe.zrem("steps:unacked", each)
            pipe.hdel("steps:messages", each)
        await pipe.execute()
    return time.perf_counter() - began_s


def cycles(url: str, queue: str, count: int) -> float:
    """Seconds of `count` messages pushed, pulled and deleted, in batches, with a backlog."""
    return asyncio.run(_cycles(url, queue, count))


async def _cycles(url: str, queue: str, count: int) -> float:
    queues = await penstock.aio.connect(url)
    execute = queues.service.execute
    began_s = time.perf_counter()
    for _ in range(count // BATCH):
        await execute(PushMany(queue, [BODY] * BATCH))
        claims = await execute(Pull(queue, BATCH))
        check_deletes(await execute(Batch([Delete(queue, each.proof) for each in claims])))
    took_s = time.perf_counter() - began_s
    await queues.close()
    return took_s


def fill(url: str, queue: str, count: int) -> None:
    """Creates a queue with a backlog of `count` messages."""
    asyncio.run(_fill(url, queue, count))


async def _fill(url: str, queue: str, count: int) -> None:
    queues = await penstock.aio.connect(url)
    await queues.create(queue)
    for _ in range(count // 1_000):
        await queues.service.execute(PushMany(queue, [BODY] * 1_000))
    await queues.close()


def main() -> None:
    """Runs the race, prints the tables and the targets."""
    with redis_server() as url:
        asyncio.run(_until_it_answers(url))
        children = {name: Child() for name in CONTESTANTS}
        try:
            rates = _race(url, children)
            flat = _flatness(url, children[OURS])
            ways = _blocking_ways(url)
        finally:
            for child in children.values():
                child.close()
    rows = [
        (step, name, f"{median(rates[step][name]):,.0f}", f"{shown:.2f} ×")
        for step in STEPS_NAMES
        for name in CONTESTANTS
        for shown in [ratio(rates[step][name], rates[step][LIMIT])]
    ]
    print_table(
        f"messages a second, batches of {BATCH}, 256 bytes ({machine()})",
        ("step", "contestant", "messages/s", "of the raw limit"),
        rows,
    )
    targets = [
        Target(f"{step} against the raw limit", ratio(rates[step][OURS], rates[step][LIMIT]), 0.6)
        for step in STEPS_NAMES
    ]
    targets.append(Target("cost behind the long backlog, × the short one", flat, 1.3, False))
    own_socket = ratio(ways[PORTAL], ways[COROUTINE])
    plain = ratio(ways[COROUTINE], ways[PLAIN])
    targets.append(Target("a blocking push, own socket × portal", own_socket, OWN_SOCKET_MIN))
    targets.append(Target("a blocking push, plain function × coroutine", plain, PLAIN_MIN))
    figures = {step: {n: round(median(r)) for n, r in rates[step].items()} for step in STEPS_NAMES}
    finish("redis", targets, {"messages_per_s": figures})


def _race(url: str, children: dict[str, Child]) -> dict[str, dict[str, list[float]]]:
    def whole(count: int) -> int:
        return max(1, count // BATCH) * BATCH

    def calibrate(count: int) -> float:
        took_s = children[OURS].call(run_step, url, OURS, "push", whole(count))
        children[OURS].call(run_step, url, OURS, "pull + delete", whole(count))
        return took_s

    count = whole(count_for(ROUND_S, calibrate, 2 * BATCH))
    rates: dict[str, dict[str, list[float]]] = {
        step: {name: [] for name in CONTESTANTS} for step in STEPS_NAMES
    }

    def turn(name: str) -> float:
        for step in STEPS_NAMES:
            rates[step][name].append(count / children[name].call(run_step, url, name, step, count))
        return 0.0

    interleave(ROUNDS, {name: lambda name=name: turn(name) for name in CONTESTANTS})  # type: ignore[misc]
    return rates


def _flatness(url: str, child: Child) -> float:
    """The cost of a message with a million queued, divided by that with a thousand."""
    lengths = (1_000, 10_000) if is_quick() else BACKLOGS
    count = 1_000 if is_quick() else 20_000
    for length in lengths:
        child.call(fill, url, f"backlog-{length}", length)

    def turn(length: int) -> Callable[[], float]:
        return lambda: child.call(cycles, url, f"backlog-{length}", count)

    # In turns, so that other load on the machine affects both equally.
    took = interleave(ROUNDS, {str(length): turn(length) for length in lengths})
    short, long = (took[str(length)] for length in lengths)
    rows = [(f"{length:,}", f"{median(took[str(length)]) / count * 1e6:.1f}") for length in lengths]
    print_table("a push, a pull and a delete", ("queued", "µs a message"), rows)
    return ratio(long, short)


def _blocking_ways(url: str) -> dict[str, list[float]]:
    """The times of single pushes by one thread, for each way to make them."""
    count = 100 if is_quick() else 2_000
    target = read_url(url)

    def portal() -> QueueService:
        return Portal(lambda: open_async_service(target))

    def coroutine() -> QueueService:
        service: Any = open_service(target)
        service._push_plain = lambda command: None
        return service  # type: ignore[no-any-return]

    def turn(make: Callable[[], QueueService]) -> float:
        with Queues(make()) as queues:
            queues.create("ways")
            queues.purge("ways")
            queues.push("ways", BODY)
            began_s = time.perf_counter()
            for _ in range(count):
                queues.push("ways", BODY)
            return time.perf_counter() - began_s

    ways = {PORTAL: portal, COROUTINE: coroutine, PLAIN: lambda: open_service(target)}
    took = interleave(ROUNDS, {name: lambda make=make: turn(make) for name, make in ways.items()})  # type: ignore[misc]
    rows = [(name, f"{count / median(took[name]):,.0f}") for name in ways]
    print_table("single pushes of one thread", ("way", "messages/s"), rows)
    return took


if __name__ == "__main__":
    run_benchmark(main)
