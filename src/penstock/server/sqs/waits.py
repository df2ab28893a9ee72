"""What an answer may have to wait for: the disk, or a message.

Both wait as entries in a line, not as tasks: ten thousand receives that wait cost one timer.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.core.due import NEVER_MS
from penstock.errors import JournalError
from penstock.server.http import HttpConnection, response
from penstock.service import Pull


class Answers:
    """Answers that wait for the disk: one sync lets all of them go that it covers."""

    def __init__(self, engine: Engine, failed: Callable[[JournalError], None]) -> None:
        self._journal = engine.journal
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, HttpConnection, bytes]] = deque()
        self._asked_for = 0
        self._asking = False

    def send_when_durable(self, sequence: int, connection: HttpConnection, answer: bytes) -> None:
        """Sends the answer once the journal has this sequence on the disk."""
        self._waiting.append((sequence, connection, answer))
        if not self._asking:
            self._asking = True
            # Not yet: whoever else is read from in this turn of the loop shares the sync.
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._asked_for = max(sequence for sequence, _, _ in self._waiting)
        self._journal.notify(self._asked_for, self._told)

    def _told(self) -> None:
        self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        durable = self._journal.durable_sequence
        if durable < self._asked_for:
            try:
                self._journal.wait(self._asked_for)
            except JournalError as error:
                self._fail(error)
                return
            durable = self._journal.durable_sequence
        later: deque[tuple[int, HttpConnection, bytes]] = deque()
        while self._waiting:
            sequence, connection, answer = self._waiting.popleft()
            if sequence <= durable:
                connection.finish(answer)
            else:
                later.append((sequence, connection, answer))
        self._waiting = later
        self._asking = bool(later)
        if later:
            self._ask()

    def _fail(self, error: JournalError) -> None:
        """Nothing that waits will ever be durable: whoever asked must not believe it was."""
        self._asking = False
        self._failed(error)
        refused = response(503, b"Connection: close\r\n", b"", self._loop.time())
        while self._waiting:
            _, connection, _ = self._waiting.popleft()
            connection.finish(refused)
            connection.close()


class Wait:
    """One receive that waits on behalf of a connection; `done` is told how it ended, once."""

    __slots__ = ("_connection", "_done", "_waits", "waiter")

    def __init__(
        self, waits: "Waits", connection: HttpConnection, done: Callable[[Waiter], None]
    ) -> None:
        self._waits = waits
        self._connection = connection
        self._done: Callable[[Waiter], None] | None = done
        self.waiter: Waiter | None = None

    def wake(self) -> None:
        """Called by the engine: the wait is over, or somebody must look at the clock."""
        if self.waiter is not None and self.waiter.done:
            # Not here: the engine is in the middle of somebody else's command.
            self._waits.loop.call_soon(self.finish)
        else:
            self._waits.plan()

    def finish(self) -> None:
        """Tells how the wait ended, unless the client has gone away meanwhile."""
        done, self._done = self._done, None
        if done is not None and self.waiter is not None:
            self._waits.waiting.discard(self)
            self._connection.on_gone = None
            done(self.waiter)

    def gone(self) -> None:
        """The client went away: what it was given meanwhile returns to its place."""
        if self._done is not None and self.waiter is not None:
            self._done = None
            self._waits.waiting.discard(self)
            self._waits.engine.forget(self.waiter)


class Waits:
    """All receives that wait, and the one timer that wakes the engine for them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.waiting: set[Wait] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._unsubscribe = engine.clock.subscribe(self._time_moved)

    def wait(self, pull: Pull, connection: HttpConnection, done: Callable[[Waiter], None]) -> bool:
        """Puts a pull that found nothing in line; false if it does not want to wait.

        Raises PenstockError.
        """
        wait = Wait(self, connection, done)
        waiter = self.engine.wait(pull, wait.wake)
        if waiter is None:
            return False
        wait.waiter = waiter
        self.waiting.add(wait)
        connection.on_gone = wait.gone
        self.plan()
        return True

    def plan(self) -> None:
        """Sets the timer for the next instant at which someone who waits may be served."""
        wake_ms = self.engine.next_wake_ms
        if self._timer is not None:
            if self._timer_ms == wake_ms:
                return
            self._timer.cancel()
            self._timer = None
        timeout_s = self.engine.clock.timeout_s(wake_ms)
        if wake_ms < NEVER_MS and timeout_s is not None:
            self._timer_ms = wake_ms
            self._timer = self.loop.call_later(timeout_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.engine.tick()
        if self.engine.has_waiters:
            self.plan()

    def _time_moved(self) -> None:
        self.loop.call_soon_threadsafe(self._tick)

    def end(self) -> None:
        """Lets every receive that waits go home with what it has, which is nothing."""
        for wait in list(self.waiting):
            if wait.waiter is not None and not wait.waiter.done:
                self.engine.forget(wait.waiter)
                self.loop.call_soon(wait.finish)

    def close(self) -> None:
        """Stops looking at the clock."""
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
