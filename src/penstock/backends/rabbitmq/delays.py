"""Delays by the broker: a message passes through queues whose TTLs add up to its delay.

A delay is a number of milliseconds; its bit i stands for 2**i ms. A queue has a delay queue for
each bit that was used. All messages in the delay queue of bit i wait for the same 2**i ms, so no
message waits for an earlier one. Then the broker sends it to the exchange of the next lower bit:

    exchange i ──bit is 1──> queue NAME/delay/i (TTL 2**i ms) ──expired──┐
        │                                                                v
        └──────bit is 0────────────────────────────────────────> exchange i-1 … exchange -1 ──> NAME

The routing key is the 32 bits, lowest first, and the name, as words of a topic. The exchanges are
shared by all queues; the delay queues belong to their queue and are removed with it.
"""

from typing import Any, Final

from penstock.backends.rabbitmq.link import Link
from penstock.backends.rabbitmq.registry import LevelsAdded, RabbitQueue, Registry, new_token

LEVELS: Final = 32


def exchange_name(level: int) -> str:
    """The exchange that routes by the bit of this level; that of -1 routes to the queues."""
    return f"penstock/delay/{level}" if level >= 0 else "penstock/due"


def level_name(queue: str, level: int) -> str:
    """The delay queue of a queue for one bit."""
    return f"{queue}/delay/{level}"


def level_names(queue: RabbitQueue) -> list[str]:
    """The delay queues that a queue has."""
    return [level_name(queue.name, level) for level in range(LEVELS) if queue.levels >> level & 1]


def routing_key(queue: str, delay_ms: int) -> str:
    """The routing key that leads a message through the exchanges."""
    bits = ".".join(str(delay_ms >> level & 1) for level in range(LEVELS))
    return f"{bits}.{_word(queue)}"


def _word(queue: str) -> str:
    """A queue's name as one word of a topic; no name has a slash."""
    return queue.replace(".", "/")


def level_arguments(queue: RabbitQueue, level: int) -> dict[str, Any]:
    """The arguments with which the delay queue is declared."""
    arguments: dict[str, Any] = {
        "x-message-ttl": 1 << level,
        "x-dead-letter-exchange": exchange_name(level - 1),
    }
    if queue.kind == "quorum":
        arguments |= {
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    return arguments


class Delays:
    """Declares exchanges and delay queues when they are first needed."""

    def __init__(self, puller: Link, registry: Registry) -> None:
        self._puller = puller
        self._registry = registry
        self._exchanges = -2
        self._bound: set[tuple[int, int]] = set()

    async def route(self, queue: RabbitQueue, delay_ms: int) -> tuple[str, str]:
        """The exchange and the routing key for a message with this delay. Raises PenstockError."""
        top = delay_ms.bit_length() - 1
        if top > self._exchanges:
            await self._declare_exchanges(top)
        missing = [
            level
            for level in (-1, *range(LEVELS))
            if (level < 0 or delay_ms >> level & 1) and (queue.number, level) not in self._bound
        ]
        for level in missing:
            await self._declare_level(queue, level)
        levels = delay_ms & ~queue.levels
        if levels:
            await self._registry.append(LevelsAdded(new_token(), queue.name, queue.number, levels))
        return exchange_name(top), routing_key(queue.name, delay_ms)

    async def _declare_exchanges(self, top: int) -> None:
        session = await self._puller.ready()
        for level in range(self._exchanges if self._exchanges > -2 else -1, top + 1):
            name = exchange_name(level)
            await session.control(
                lambda channel, name=name: channel.exchange_declare(  # type: ignore[misc]
                    name, exchange_type="topic", durable=True
                )
            )
            if level >= 0:
                key, below = "*." * level + "0.#", exchange_name(level - 1)
                await session.control(
                    lambda channel, name=name, key=key, below=below: (  # type: ignore[misc]
                        channel.exchange_bind(destination=below, source=name, routing_key=key)
                    )
                )
        self._exchanges = max(top, self._exchanges)

    async def _declare_level(self, queue: RabbitQueue, level: int) -> None:
        session = await self._puller.ready()
        key = f"#.{_word(queue.name)}"
        name = queue.name
        if level >= 0:
            name = level_name(queue.name, level)
            key = "*." * level + "1." + key
            await session.control(
                lambda channel: channel.queue_declare(
                    name, durable=True, arguments=level_arguments(queue, level)
                )
            )
        await session.control(
            lambda channel: channel.queue_bind(name, exchange_name(level), routing_key=key)
        )
        self._bound.add((queue.number, level))

    def forget(self, queue: RabbitQueue) -> None:
        """Drops what is known about a removed queue."""
        self._bound = {each for each in self._bound if each[0] != queue.number}
