"""The engine's clock: whole milliseconds since 1970, never running backwards."""

import re
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from penstock.errors import InvalidField

# The next due time of an engine in which nothing is due; `core.due.NEVER_MS`, a layer above.
_NEVER_MS: Final = 1 << 62
# Every duration that is given as a text: on the command line, and to a clock that can be moved.
_DURATION: Final = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)?", re.ASCII)
_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# Longer than any valid duration; it also keeps an error to one short line.
_DURATION_CHARS_MAX: Final = 30
# What the names of Penstock's own threads begin with.
THREAD_PREFIX: Final = "penstock-"


class Clock(Protocol):
    """The time of an engine, and how long its waiters may sleep."""

    def now_ms(self) -> int:
        """The present instant; never less than an earlier answer."""
        ...

    def timeout_s(self, until_ms: int) -> float | None:
        """How long a waiter should really sleep until that instant; None for "until woken"."""
        ...

    def waiter_timeout_s(self, until_ms: int, *, blocks_thread: bool) -> float | None:
        """The same for a waiting pull. A manual clock may advance itself within this call.

        So the caller must not hold a lock that a subscriber takes. Raises InvalidField if the
        thread would block and nothing could wake it.
        """
        ...

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Calls `moved` whenever time jumps; returns a function that ends that."""
        ...


class SystemClock:
    """Wall time at the start, then monotonic: a jump of the wall clock moves no deadline.

    `not_before_ms` is the time of the journal's last event: the clock starts there if the wall
    clock was set back while no process had the store open. `wall_ms` is a better wall time than
    that of this machine, if there is one.
    """

    def __init__(self, not_before_ms: int = 0, *, wall_ms: int | None = None) -> None:
        if wall_ms is None:
            wall_ms = time.time_ns() // 1_000_000
        start_ms = max(wall_ms, not_before_ms)
        offset_ms = start_ms - time.monotonic_ns() // 1_000_000
        monotonic_ns = time.monotonic_ns

        # A plain function in place of a method: the engine asks for the time with every command.
        def now_ms() -> int:
            return monotonic_ns() // 1_000_000 + offset_ms

        self.now_ms = now_ms

    def timeout_s(self, until_ms: int) -> float | None:
        # One millisecond more: after waking too early, nothing would be due yet.
        return max(0, until_ms + 1 - self.now_ms()) / 1_000

    def waiter_timeout_s(self, until_ms: int, *, blocks_thread: bool) -> float | None:
        return self.timeout_s(until_ms)

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return _nothing


class ManualClock:
    """Time that stands still until `advance` moves it; then what is due happens at once.

    Any engine runs on it, so a test of a twelve-hour timeout takes no time:

        clock = ManualClock()
        queues = penstock.connect("memory:", clock=clock)
        clock.advance(seconds=43_200)

    A pull that waits ends when another thread advances the clock far enough. With `auto_advance`
    the wait itself moves time to the next instant at which something is due, and so takes no time
    in a test of one thread. Without it, a wait that no other thread could end is refused.
    """

    def __init__(self, start_ms: int = 1_700_000_000_000, *, auto_advance: bool = False) -> None:
        self._now_ms = start_ms
        self.auto_advance = auto_advance
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def timeout_s(self, until_ms: int) -> float | None:
        return None

    def waiter_timeout_s(self, until_ms: int, *, blocks_thread: bool) -> float | None:
        if self.auto_advance and until_ms < _NEVER_MS:
            self.advance(ms=max(0, until_ms - self._now_ms))
            return 0
        if blocks_thread and is_only_thread():
            raise InvalidField(
                "wait: this ManualClock stands still, and there is no other thread to advance it; "
                "pull without wait, or use ManualClock(auto_advance=True)"
            )
        return None

    def advance(self, *, seconds: float = 0, ms: int = 0) -> None:
        """Moves time forward and lets every engine on this clock do what has become due."""
        step_ms = round(seconds * 1_000) + ms
        if step_ms < 0:
            raise ValueError(f"time cannot go back (asked for {step_ms} ms)")
        with self._lock:
            self._now_ms += step_ms
            subscribers = list(self._subscribers)
        for moved in subscribers:
            moved()

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self._subscribers.append(moved)

        def unsubscribe() -> None:
            with self._lock:
                if moved in self._subscribers:
                    self._subscribers.remove(moved)

        return unsubscribe


def duration_ms(text: str) -> float:
    """Milliseconds, from `30`, `1.5`, `250ms`, `30s`, `5m`, `2h` or `4d`. Raises InvalidField."""
    found = _DURATION.fullmatch(text) if len(text) <= _DURATION_CHARS_MAX else None
    if found is None:
        shown = text if len(text) <= _DURATION_CHARS_MAX else text[:_DURATION_CHARS_MAX] + "…"
        raise InvalidField(f"{shown!r} is not a duration; use 30, 1.5, 30s, 5m, 2h or 4d")
    number, unit = found.groups()
    return float(number) * _UNITS_MS[unit or "s"]


def is_only_thread() -> bool:
    """Whether only this thread and Penstock's own are running, which advance no clock."""
    own = threading.current_thread()
    return all(each is own or each.name.startswith(THREAD_PREFIX) for each in threading.enumerate())


def _nothing() -> None:
    pass
