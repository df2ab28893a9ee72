"""The RabbitMQ adapter beside a bare aio-pika loop: `make bench NAME=rabbitmq`.

Each contestant is a process with one event loop, on a broker of its own that runs for the whole
race. A worker publishes a message and waits for the confirm, takes a message and acknowledges it,
and does so again. Queues are durable classic queues, messages are persistent.

    penstock             push, pull, delete
    aio-pika             publish with confirm, queue.get, ack: the same steps
    aio-pika, consuming  publish with confirm, a consumer with a prefetch of 100, ack: it has no
                         pull, because the broker sends messages to subscribers

Every body that was published must have been taken exactly once, or the run is void.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from benchmarks.harness import (
    Child,
    Target,
    Void,
    check_ledger,
    disk_directory,
    finish,
    install_package,
    interleave,
    is_quick,
    machine,
    print_table,
    ratio,
    run_benchmark,
)
from tests.rabbit import Broker

BODY_BYTES: Final = 256
ROUNDS: Final = 7
CYCLES: Final = 3_000
QUICK_CYCLES: Final = 60
WORKERS: Final = (1, 16, 64)
GOAL: Final = 0.7
OURS, BARE, CONSUMING = "penstock", "aio-pika", "aio-pika, consuming"
QUEUE: Final = "bench"

Cycle = Callable[[bytes], Awaitable[bytes]]


async def _penstock(url: str, queue: str) -> tuple[Cycle, Callable[[], Awaitable[Any]]]:
    import penstock.aio

    queues = await penstock.aio.connect(url)
    await queues.create(queue, visibility_timeout=600)

    async def cycle(body: bytes) -> bytes:
        await queues.push(queue, body)
        claim = await queues.pull(queue, wait=30)
        if claim is None or await queues.delete(claim) is not True:
            raise Void("a pull found nothing, or a delete deleted nothing")
        return claim.body

    return cycle, queues.close


async def _bare(url: str, queue: str) -> tuple[Cycle, Callable[[], Awaitable[Any]]]:
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    declared = await channel.declare_queue(queue, durable=True)

    async def cycle(body: bytes) -> bytes:
        await _publish(channel, queue, body)
        message = await declared.get(fail=True, timeout=30)
        await message.ack()
        return message.body

    return cycle, connection.close


async def _consuming(url: str, queue: str) -> tuple[Cycle, Callable[[], Awaitable[Any]]]:
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    declared = await channel.declare_queue(queue, durable=True)
    await channel.set_qos(prefetch_count=100)
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    await declared.consume(arrived.put)

    async def cycle(body: bytes) -> bytes:
        await _publish(channel, queue, body)
        message = await arrived.get()
        await message.ack()
        return bytes(message.body)

    return cycle, connection.close


async def _publish(channel: Any, queue: str, body: bytes) -> None:
    import aio_pika

    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, routing_key=queue, mandatory=True)


CONTESTANTS: Final[dict[str, Any]] = {OURS: _penstock, BARE: _bare, CONSUMING: _consuming}


def run_cycles(name: str, url: str, workers: int, count: int) -> float:
    """Runs `count` cycles in all by this number of workers; cycles a second. Raises Void."""
    return asyncio.run(_run_cycles(name, url, workers, count))


async def _run_cycles(name: str, url: str, workers: int, count: int) -> float:
    queue = f"{QUEUE}-{name.replace(', ', '-')}"
    cycle, close = await CONTESTANTS[name](url, queue)
    pushed = [f"{number:0{BODY_BYTES}}".encode() for number in range(count)]
    pulled: list[bytes] = []

    async def work(number: int) -> None:
        for body in pushed[number::workers]:
            pulled.append(await cycle(body))  # noqa: PERF401

    try:
        # This opens the channels and warms up the interpreter.
        await asyncio.gather(*(cycle(b"warm") for _ in range(workers)))
        began_s = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(workers)))
        took_s = time.perf_counter() - began_s
    finally:
        await close()
    check_ledger(pushed, pulled)
    return count / took_s


def main() -> None:
    """Runs the race at each number of workers."""
    install_package("rabbitmq-server", "rabbitmq-server")
    count = QUICK_CYCLES if is_quick() else CYCLES
    directory = disk_directory()
    broker = Broker(directory)
    children = {name: Child() for name in CONTESTANTS}
    rows, targets, figures = [], [], {}
    try:
        broker.start()
        for workers in WORKERS:
            rates = interleave(
                ROUNDS,
                {
                    name: lambda name=name, workers=workers: children[name].call(  # type: ignore[misc]
                        run_cycles, name, broker.url, workers, count
                    )
                    for name in CONTESTANTS
                },
            )
            beside = {name: ratio(rates[OURS], rates[name]) for name in (BARE, CONSUMING)}
            for name, values in rates.items():
                shown = f"{beside[name]:.2f} ×" if name in beside else ""
                rows.append((str(workers), name, f"{sorted(values)[len(values) // 2]:,.0f}", shown))
            targets.append(Target(f"{OURS} / {BARE}, {workers} workers", beside[BARE], GOAL))
            figures[str(workers)] = {"rates": rates, "ratios": beside}
    finally:
        for child in children.values():
            child.close()
        broker.end()
        shutil.rmtree(directory, ignore_errors=True)
    print_table(
        f"publish, take, acknowledge; {BODY_BYTES} B; {machine()}",
        ("workers", "", "cycles/s", "penstock is"),
        rows,
    )
    finish("rabbitmq", targets, {"workers": figures})


if __name__ == "__main__":
    run_benchmark(main)
