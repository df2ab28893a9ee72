"""Penstock: sync tasks run in threads, async ones in a loop."""

import asyncio
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmarks.task_apps.ledger import opened, redis_url
from penstock.backends.redis.blocking import BlockingRedis
from penstock.backends.redis.link import pack
from penstock.service import Push
from penstock.tasks import TaskApp

app = TaskApp(redis_url())
ledger = opened()


@app.task
def nothing(number: int) -> None:
    """Does nothing but count."""
    ledger.note(number)


@app.task(queue="sleeping")
async def sleep_10ms(number: int) -> None:
    """Sleeps for 10 ms."""
    await asyncio.sleep(0.01)
    ledger.note(number)


@app.task(queue="timed")
def arrive(number: int, due_ms: int) -> None:
    """Notes in the ledger how many milliseconds after it was due it runs."""
    ledger.note_late_ms(number, max(0, time.time_ns() // 1_000_000 - due_ms))


_BODY = b'{"task":"nothing","args":{"number":0}}'
TASKS = {"nothing": nothing, "sleep_10ms": sleep_10ms}


def enqueue(task: str, numbers: Sequence[int]) -> None:
    """Pushes one call after the other."""
    push = TASKS[task].push
    for number in numbers:
        push(number)


def enqueue_bare(task: str, numbers: Sequence[int]) -> None:
    """Sends the bytes of one push again and again: what the script and the round trip take."""
    service = app.service
    assert isinstance(service, BlockingRedis)
    TASKS[task].push(0)
    queue = service._queues.known("tasks")
    assert queue is not None
    command = service._packed_push(queue, Push("tasks", _BODY))
    assert command is not None
    _send_again_and_again(command, numbers)


def enqueue_lpush(task: str, numbers: Sequence[int]) -> None:
    """The same with an LPUSH of the task's body: what the round trip takes."""
    _send_again_and_again(pack(("LPUSH", "limit", _BODY)), numbers)


def _send_again_and_again(command: bytes, numbers: Sequence[int]) -> None:
    address = urlsplit(redis_url())
    with socket.create_connection((address.hostname or "", address.port or 0)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in numbers:
            link.sendall(command)
            answer = link.recv(64)
            assert answer.startswith(b":"), answer


def enqueue_many(task: str, numbers: Sequence[int]) -> None:
    """Pushes all calls at once."""
    TASKS[task].push_many([(number,) for number in numbers])


def enqueue_timed(count: int, first_s: float, spread_s: float) -> None:
    """Pushes calls that are due one after the other."""
    for number in range(count):
        delay_s = first_s + spread_s * number / count
        arrive.push_in(delay_s, number, time.time_ns() // 1_000_000 + round(delay_s * 1_000))
