"""Waiting pulls: one line for each queue, kept in Redis for all processes, without polling.

    pull.lua finds nothing → the pull joins the line → a script that makes a message visible takes
    the first out of the line and publishes to its process → that pull is tried again

The line belongs to the queue, so the pull that waited first is served first, in whichever process
it is. A message is kept for a second for the waiter that was woken for it. A process that has ended
is noticed because it no longer receives what is published to it. A tick corrects every other
failure, such as a lost wake-up: every few seconds each process renews its waiting pulls, settles
what is due, and learns which pulls were woken. For what is due in between, the end of a delay or of
a claim, the process of the first pull in line has a timer: at that instant it tries the pull again,
which settles what is due and claims it in one call.
"""

import asyncio
import itertools
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from penstock.backends.redis.address import HostPort
from penstock.backends.redis.layout import RedisQueue
from penstock.backends.redis.link import RedisLink
from penstock.backends.redis.listener import Listener
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.clock import Clock
from penstock.errors import (
    EngineClosed,
    PenstockError,
    QueueDeleted,
    RequestError,
    UnavailableError,
)

TICK_S: Final = 5.0
# A timer never fires early by rounding.
_MORE_S: Final = 0.001


class WaitingPull:
    """A pull of this process that may wait; `address` identifies it before it is in the line."""

    def __init__(self, address: str, began_ms: int) -> None:
        """`began_ms` is the time of the service's own clock, or 0 if it has none."""
        self.address = address
        self.id: bytes | None = None
        self.began_ms = began_ms
        self.deadline_ms = 0
        self.is_over = False
        self.error: PenstockError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._signal = asyncio.Event()

    def wake(self) -> None:
        """Lets the pull be tried again."""
        self._signal.set()

    def end(self, error: PenstockError | None = None) -> None:
        """Lets the pull be tried for the last time, or fail with `error`."""
        self.is_over = True
        self.error = error
        self._signal.set()

    async def woken(self) -> None:
        """Returns when it is to be tried again. Raises the error it fails with."""
        await self._signal.wait()
        self._signal.clear()
        if self.error is not None:
            raise self.error


class _Line:
    """The pulls of this process that wait on one queue."""

    def __init__(self, queue: RedisQueue) -> None:
        self.queue = queue
        self.pulls: dict[str, WaitingPull] = {}
        self.leaving: list[bytes] = []
        self.timer: asyncio.TimerHandle | None = None
        self.tick: asyncio.Task[None] | None = None
        self.is_tick_wanted = False


class RedisWaits:
    """All waiting pulls of one service."""

    def __init__(
        self, link: RedisLink, queues: RedisQueues, moves: RedisMoves, clock: Clock | None
    ) -> None:
        self._link = link
        self._queues = queues
        self._moves = moves
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._process = secrets.token_hex(8)
        self._counter = itertools.count(1)
        self._listeners: dict[HostPort, Listener] = {}
        self._lines: dict[bytes, _Line] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False
        queues.gone = self._queue_gone

    async def begin(self, queue: RedisQueue) -> WaitingPull:
        """A pull that may join the line of a queue: wake-ups for it are received from now on."""
        await self._listen(queue)
        if self._closed:
            raise EngineClosed("this service was closed")
        began_ms = 0 if self._clock is None else self._clock.now_ms()
        waiting = WaitingPull(f"{self._process}:{next(self._counter)}", began_ms)
        number = _number(queue)
        line = self._lines.get(number)
        if line is None:
            line = self._lines[number] = _Line(queue)
        line.pulls[waiting.address] = waiting
        if self._ticker is None or self._ticker.done():
            self._ticker = self.start(self._tick_periodically())
        return waiting

    def joined(self, waiting: WaitingPull, waiter: bytes, wait_ms: int, due_ms: int) -> None:
        """A pull is in the line, for the first time or again."""
        is_first = waiting.id is None
        waiting.id = waiter
        clock = self._clock
        if clock is None:
            if is_first:
                waiting.timer = self._loop.call_later(wait_ms / 1_000 + _MORE_S, waiting.end)
            return
        if is_first:
            waiting.deadline_ms = waiting.began_ms + wait_ms
        if waiting.deadline_ms <= clock.now_ms():
            # The clock was set after the script had run and before its reply was read.
            waiting.end()
            return
        until_ms = min(waiting.deadline_ms, due_ms or waiting.deadline_ms)
        timeout_s = clock.waiter_timeout_s(until_ms, blocks_thread=False)
        if timeout_s is not None:
            self._loop.call_later(timeout_s, self._clock_moved)

    def left(self, queue: RedisQueue, waiting: WaitingPull, *, served: bool) -> None:
        """A pull no longer waits; if it was not served, it may still be in the line."""
        if waiting.timer is not None:
            waiting.timer.cancel()
        line = self._lines.get(_number(queue))
        if line is None or line.pulls.pop(waiting.address, None) is None:
            return
        if not served and waiting.id is not None:
            line.leaving.append(waiting.id)
            self._tick_soon(line)
        elif not line.pulls:
            self._drop(line)

    def clock_moved(self) -> None:
        """Settles what is due after a manual clock moved; may be called in any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._clock_moved)

    def _clock_moved(self) -> None:
        if self._clock is None or self._closed:
            return
        now_ms = self._clock.now_ms()
        for line in list(self._lines.values()):
            for waiting in line.pulls.values():
                if waiting.id is not None and waiting.deadline_ms <= now_ms:
                    waiting.end()
            self._tick_soon(line)

    # Messages of Redis.

    async def _listen(self, queue: RedisQueue) -> None:
        where = await self._link.find(queue.keys[0])
        listener = self._listeners.get(where)
        if listener is None:
            listener = self._listeners[where] = Listener(
                self._link,
                queue.keys[0],
                self._queues.channel + self._process,
                self._on_message,
                self._tick_all,
                self._queues.target.timeout_s,
            )
        await listener.wait_until_subscribed()

    def _on_message(self, message: bytes) -> None:
        kind, number, text = message.split(b"\n", 2)
        line = self._lines.get(number)
        if line is None:
            return
        if kind == b"W":
            waiting = line.pulls.get(_address(text))
            if waiting is not None:
                waiting.wake()
            else:
                # The pull has just left: the next one in line must be woken.
                line.leaving.append(text)
                self._tick_soon(line)
        elif kind == b"T":
            delay_ms, _, waiter = text.partition(b":")
            self._set_timer(line, int(delay_ms), waiter)
        elif kind == b"D":
            self._end_line(line, QueueDeleted(_deleted(line.queue)))

    def _set_timer(self, line: _Line, delay_ms: int, waiter: bytes) -> None:
        if self._clock is not None:
            return
        if line.timer is not None:
            line.timer.cancel()
        line.timer = self._loop.call_later(
            delay_ms / 1_000 + _MORE_S, self._try_first, line, waiter
        )

    def _try_first(self, line: _Line, waiter: bytes) -> None:
        """Something is due: tries the first pull in line again, which settles it."""
        waiting = line.pulls.get(_address(waiter))
        if waiting is None:
            # That pull has left: another one is the first now.
            self._tick_soon(line)
        else:
            waiting.wake()

    # Ticks.

    async def _tick_periodically(self) -> None:
        while self._lines:
            await asyncio.sleep(TICK_S)
            self._tick_all()

    def _tick_all(self) -> None:
        for line in list(self._lines.values()):
            self._tick_soon(line)

    def _tick_soon(self, line: _Line) -> None:
        line.is_tick_wanted = True
        if line.tick is None or line.tick.done():
            line.tick = self.start(self._tick(line))

    async def _tick(self, line: _Line) -> None:
        failures = 0
        while line.is_tick_wanted and not self._closed:
            line.is_tick_wanted = False
            leaving, line.leaving = line.leaving, []
            staying = [each.id for each in line.pulls.values() if each.id is not None]
            try:
                reply = await self._queues.run(
                    "tick", line.queue.keys, len(leaving), *leaving, *staying
                )
            except UnavailableError as error:
                # The first failure may be a lost connection; the next try opens another.
                failures += 1
                line.leaving += leaving
                if failures > 1:
                    self._end_line(line, error)
                    return
                line.is_tick_wanted = True
                continue
            except RequestError as error:
                self._end_line(line, error)
                return
            failures = 0
            if reply is None or reply[0].partition(b":")[0] != _number(line.queue):
                self._end_line(line, QueueDeleted(_deleted(line.queue)))
                return
            woken = set(reply[4:])
            for waiting in list(line.pulls.values()):
                if waiting.id in woken:
                    waiting.wake()
            line.is_tick_wanted = line.is_tick_wanted or bool(reply[3])
            await self._moves.carry_owed(line.queue, reply)
        if not line.pulls and not line.leaving:
            self._drop(line)

    def _queue_gone(self, queue: RedisQueue) -> None:
        line = self._lines.get(_number(queue))
        if line is not None:
            self._end_line(line, QueueDeleted(_deleted(queue)))

    def _end_line(self, line: _Line, error: PenstockError) -> None:
        for waiting in list(line.pulls.values()):
            waiting.end(error)
        line.pulls.clear()
        self._drop(line)

    def _drop(self, line: _Line) -> None:
        if line.timer is not None:
            line.timer.cancel()
        if self._lines.get(_number(line.queue)) is line and not line.leaving:
            del self._lines[_number(line.queue)]

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs it in a task, which `close` cancels."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Otherwise asyncio would log an exception that no caller has retrieved.
            task.exception()

    async def close(self) -> None:
        """Ends every wait with EngineClosed."""
        self._closed = True
        for line in list(self._lines.values()):
            self._end_line(line, EngineClosed("this service was closed while this waited"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners.values():
            await listener.close()


def _address(waiter: bytes) -> str:
    return waiter.partition(b":")[2].decode()


def _number(queue: RedisQueue) -> bytes:
    return queue.identity.partition(b":")[0]


def _deleted(queue: RedisQueue) -> str:
    return f"queue: {queue.name!r} was deleted during the wait"
