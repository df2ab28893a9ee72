"""The run queue of an event loop: what takes long, in turns of a few milliseconds.

An event loop serves everyone between two of its turns, and whatever runs holds up the rest. So
whatever takes long is cut into bounded steps, and each step waits in a line of the loop's one run
queue. Each turn of the loop serves the lines for about TURN_S, a step of one line after a step of
the next: a crowd of one kind does not delay other kinds, and no kind delays requests that take
little time, which never come here. A turn runs at most
as many steps as waited when it began.

    requests of a slow kind     by their kind: those of one kind take about as long as each other
    the rest of a long command  by the kind of command
    TLS handshakes              one line for all

How long a request will take is known from earlier ones of its kind: a kind is slow while its last
requests took longer than SLOW_S on average. A single one says little: it may have been interrupted,
by another process or by Python's garbage collection.

Everything on one event loop shares its queue: `run_queue` returns it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from time import perf_counter
from typing import Final
from weakref import WeakKeyDictionary, ref

# How long the lines are served in one turn of an event loop, and how long one source of requests
# (a connection, the messages to a shard) is.
TURN_S: Final = 0.005
# Requests with more than this are of another kind than those with less; data is parsed so much at a
# time.
STEP_BYTES: Final = 16 * 1024
SLOW_S: Final = 0.000_2
# A mean forgets what was this many requests ago, and none counts for more than LONG_S in it.
MEAN_REQUESTS: Final = 16
LONG_S: Final = 0.002
# A client can invent kinds.
KINDS_MAX: Final = 256


class RunQueue:
    """The lines of one event loop, and the kinds of requests that take long."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._clock = clock
        # Weak: `run_queue` forgets a loop that nobody uses any more.
        self._loop = ref(loop)
        # By kind: how long its requests took on average. Kinds that are far from slow are left out.
        # Who serves requests looks whether it is empty before it asks for the kind of one.
        self.means_s: dict[Hashable, float] = {}
        # By kind, the one that is served next first; none is empty.
        self._lines: dict[Hashable, deque[Callable[[], object]]] = {}
        self._waiting = 0
        self._is_planned = False

    def is_slow(self, kind: Hashable) -> bool:
        """Whether a request of this kind is to wait in a line."""
        return self.means_s.get(kind, 0.0) > SLOW_S

    def note(self, kind: Hashable, took_s: float) -> None:
        """Learns from a request that was executed how long its kind takes."""
        means_s = self.means_s
        mean_s = means_s.get(kind)
        if mean_s is None:
            if took_s <= SLOW_S:
                return
            if len(means_s) >= KINDS_MAX:
                means_s.clear()
            mean_s = 0.0
        mean_s += (min(took_s, LONG_S) - mean_s) / MEAN_REQUESTS
        if mean_s > SLOW_S / 2 or took_s > SLOW_S:
            means_s[kind] = mean_s
        else:
            del means_s[kind]

    def add(self, kind: Hashable, step: Callable[[], object]) -> None:
        """Calls the step in a later turn of the event loop, after those added to its line."""
        self._lines.setdefault(kind, deque()).append(step)
        self._waiting += 1
        self._plan()

    async def wait(self, kind: Hashable) -> None:
        """Returns in a later turn of the event loop, when it is this caller's turn in the line."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(kind, partial(_end_wait, turn))
        await turn

    def _plan(self) -> None:
        loop = self._loop()
        if loop is not None and not self._is_planned:
            self._is_planned = True
            loop.call_soon(self._serve)

    def _serve(self) -> None:
        """Runs steps, of those that wait now, for about TURN_S."""
        self._is_planned = False
        lines = self._lines
        until_s = self._clock() + TURN_S
        try:
            for _ in range(self._waiting):
                kind = next(iter(lines))
                line = lines.pop(kind)
                step = line.popleft()
                if line:
                    lines[kind] = line
                self._waiting -= 1
                step()
                if self._clock() > until_s:
                    break
        finally:
            # Also if a step has failed.
            if lines:
                self._plan()


def _end_wait(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


_queues: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, RunQueue]] = WeakKeyDictionary()


def run_queue(
    loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = perf_counter
) -> RunQueue:
    """The one run queue of an event loop; the first call for a loop says by which clock."""
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = RunQueue(loop, clock)
    return queue
