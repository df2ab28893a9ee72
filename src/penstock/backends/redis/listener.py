"""The wake-ups that Redis publishes to this process: one subscription for each server.

A lost subscription is made again. Wake-ups that were published in between are lost, so `resumed` is
called then, and every waiting pull asks Redis whether it was woken.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from redis import exceptions as faults

from penstock.backends.redis.link import RedisConnection, RedisLink
from penstock.errors import PenstockError

# A subscription that has received nothing for so long is checked with a PING.
_SILENT_S: Final = 10.0
_PAUSE_S: Final = 0.2


class Listener:
    """A subscription to one channel, on the server that has a key."""

    def __init__(
        self,
        link: RedisLink,
        key: str,
        channel: str,
        on_message: Callable[[bytes], None],
        resumed: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._link = link
        self._key = key
        self._channel = channel
        self._on_message = on_message
        self._resumed = resumed
        self._timeout_s = timeout_s
        self._listens = asyncio.Event()
        self._error: PenstockError | None = None
        self._failed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_until_subscribed(self) -> None:
        """Returns once messages are received. Raises UnavailableError or RequestError."""
        if self._listens.is_set():
            return
        self._failed.clear()
        waits = [asyncio.ensure_future(each.wait()) for each in (self._listens, self._failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if not self._listens.is_set() and self._error is not None:
            raise self._error

    async def _run(self) -> None:
        is_first = True
        while True:
            connection = None
            try:
                connection = await self._link.listen(self._key)
                await connection.send_command("SUBSCRIBE", self._channel)
                async with asyncio.timeout(self._timeout_s):
                    await connection.read_response(disconnect_on_error=False)
                self._listens.set()
                if not is_first:
                    self._resumed()
                is_first = False
                await self._listen(connection)
            except PenstockError as error:
                self._error = error
                self._failed.set()
            except (faults.RedisError, OSError, TimeoutError):
                pass
            finally:
                self._listens.clear()
                if connection is not None:
                    with suppress(faults.RedisError, OSError, TimeoutError):
                        await connection.disconnect(nowait=True)
            await asyncio.sleep(_PAUSE_S)

    async def _listen(self, connection: RedisConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    message: Any = await connection.read_response(disconnect_on_error=False)
            except TimeoutError:
                await connection.send_command("PING", check_health=False)
                async with asyncio.timeout(self._timeout_s):
                    message = await connection.read_response(disconnect_on_error=False)
            if message[0] == b"message":
                self._on_message(message[2])

    async def close(self) -> None:
        """Ends the subscription."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
