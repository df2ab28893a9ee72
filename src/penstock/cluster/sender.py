"""Sends the items of `wire.shard_protocol` over NATS, and takes received messages apart.

All that is sent to one subject in one turn of the event loop is one NATS message.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Final

from nats.aio.client import Client

from penstock.wire.shard_protocol import ITEM, pack, unpack

# How much of a message is handled in one turn of the event loop. After each turn its results are
# appended to the log, or sent, so that the log, owners and routers work at the same time.
SLICE_BYTES: Final = 2_048
# For how many of the last messages the tokens are known, in case NATS could not deliver one.
_SENT_MAX: Final = 4_096


class Sender:
    """Publishes items from plain callbacks; items for one subject share messages.

    With `replies`, a subject, each message has a reply subject below it that ends in a number. If
    the message's subject has no subscriber, NATS sends an error there, and `take_undelivered`
    says which tokens that message had.
    """

    def __init__(self, client: Client, replies: str = "") -> None:
        self._client = client
        self._replies = replies
        self._waiting: dict[str, list[tuple[int, bytes]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        # The tokens of the last messages, by their numbers.
        self._sent: dict[str, list[int]] = {}

    def send(self, subject: str, token: int, data: bytes) -> None:
        """Publishes an item in a later turn of the event loop."""
        self._waiting.setdefault(subject, []).append((token, data))
        if self._task is None:
            self._task = self._loop.create_task(self._publish())

    async def _publish(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                for subject, items in waiting.items():
                    for tokens, message in pack(items):
                        await self._client.publish(subject, message, reply=self._reply(tokens))
        except Exception:
            # The connection was closed, or its buffer is full. Receivers notice that nothing comes
            # and repeat their commands.
            self._waiting.clear()
        finally:
            self._task = None

    def _reply(self, tokens: list[int]) -> str:
        if not self._replies:
            return ""
        number = str(next(self._numbers))
        self._sent[number] = tokens
        if len(self._sent) > _SENT_MAX:
            del self._sent[next(iter(self._sent))]
        return f"{self._replies}.{number}"

    def take_undelivered(self, number: str) -> list[int]:
        """The tokens of a message that NATS could not deliver, by its number."""
        return self._sent.pop(number, [])

    async def drain(self) -> None:
        """Waits until all items were passed to the NATS client."""
        while self._task is not None:
            await asyncio.wait([self._task])


async def in_slices(message: bytes) -> AsyncIterator[tuple[int, bytes]]:
    """The items of a message; after every `SLICE_BYTES` the event loop runs once."""
    handled = 0
    for token, data in unpack(message):
        if handled > SLICE_BYTES:
            handled = 0
            await asyncio.sleep(0)
        yield token, data
        handled += ITEM.size + len(data)
