"""Requests that take long, of all connections of a server: a few in each turn of the event loop.

Thousands of clients may send a request at the same instant, and an event loop passes on the data of
all of them in one turn. A request of another client that comes then would wait until all are
answered. So requests that take long wait in lines, one for each kind of request. Each turn of the
event loop serves them for about TURN_S, one of each kind after the other: a crowd of one kind does
not delay the others. Requests that take little time are answered at once.

How long a request will take is known from earlier ones of its kind: a kind is slow while its last
requests took longer than SLOW_S on average. A single one says little: it may have been interrupted,
by another process or by Python's garbage collection.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Final, Generic, TypeVar

from penstock.backends.paused import TURN_S

R = TypeVar("R")
SLOW_S: Final = 0.000_2
# A mean forgets what was this many requests ago, and none counts for more than LONG_S in it.
MEAN_REQUESTS: Final = 16
LONG_S: Final = 0.002
# Requests with more than this are of another kind than those with less; data is parsed so much at a
# time.
LARGE_BYTES: Final = 16 * 1024
# A client can invent kinds.
KINDS_MAX: Final = 256


class Turns(Generic[R]):
    """The kinds of requests that take long, and the lines of those that wait.

    Requests of one kind, which `kind_of` returns, take about as long as each other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind_of: Callable[[R], Hashable]) -> None:
        self._loop = loop
        self._kind_of = kind_of
        # By kind: how long its requests took on average. Kinds that are far from slow are left out.
        self._means_s: dict[Hashable, float] = {}
        # By kind, the one that is served next first; none is empty.
        self._lines: dict[Hashable, deque[Callable[[], None]]] = {}
        self._is_planned = False

    def is_slow(self, request: R) -> bool:
        """Whether a request is to wait in a line."""
        means_s = self._means_s
        return bool(means_s) and means_s.get(self._kind_of(request), 0.0) > SLOW_S

    def note(self, request: R, took_s: float) -> None:
        """Learns from a request that was executed how long its kind takes."""
        means_s = self._means_s
        if took_s <= SLOW_S and not means_s:
            return
        kind = self._kind_of(request)
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

    def add(self, request: R, begin: Callable[[], None]) -> None:
        """Adds to the line of the request's kind a function that begins it."""
        self._lines.setdefault(self._kind_of(request), deque()).append(begin)
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_planned = False
        lines = self._lines
        until_s = perf_counter() + TURN_S
        while lines:
            kind = next(iter(lines))
            line = lines.pop(kind)
            begin = line.popleft()
            if line:
                lines[kind] = line
            begin()
            if lines and perf_counter() > until_s:
                self._plan()
                return
