"""Work that was paused so that others have their turn: one piece of it in each turn of a loop.

Thousands of requests may be paused at the same time. If all of them continued in the next turn,
they would hold up the event loop together, however short each piece is.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

# How long one source of requests (a connection, the requests of slow kinds, the messages to a
# shard) is served in one turn of an event loop; the rest waits for a later turn.
TURN_S: Final = 0.005


class PausedWork:
    """The line of paused work on one event loop, in the order in which it was paused."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[Callable[[], object]] = deque()

    def add(self, resume: Callable[..., object], *args: Any) -> None:
        """Calls the function in a later turn of the event loop, after those added before."""
        self._line.append(partial(resume, *args))
        if len(self._line) == 1:
            self._loop.call_soon(self._resume_first)

    async def wait(self) -> None:
        """Returns in a later turn of the event loop."""
        turn = self._loop.create_future()
        self.add(_end_wait, turn)
        await turn

    def _resume_first(self) -> None:
        resume = self._line.popleft()
        if self._line:
            self._loop.call_soon(self._resume_first)
        resume()


def _end_wait(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
