"""A clock that a test moves: it stands still, or moves when nothing else happens, or flows."""

import time
from typing import Final

from penstock.clock import ManualClock, SystemClock
from penstock.core.due import NEVER_MS
from penstock.errors import InvalidField
from penstock.service import DAY_MS
from penstock.settings import CLOCKS

# How far a clock can be moved at once, and in all: to 9990, because dates end with the year 9999.
ADVANCE_MS_MAX: Final = 3_660 * DAY_MS
NOW_MS_MAX: Final = 253_086_768_000_000
# In the mode auto: time moves only when no request has come for so long. A program with several
# consumers would otherwise find that a wait of one of them ends the claims of the others.
QUIET_S: Final = 0.02


class MovableClock(ManualClock):
    """The clock of a store that is tested. It begins at the real time, or where it is told to.

    `manual` stands still until it is advanced. `auto` does, too, and a pull that waits advances it
    to the next instant at which something is due. `system` flows, and can be advanced besides.
    """

    def __init__(self, mode: str = "manual", *, start_ms: int | None = None) -> None:
        self._real = SystemClock()
        self._since_ms = self._real.now_ms()
        self._flows = False
        self.mode = "manual"
        self._asked_s = 0.0
        super().__init__(self._since_ms if start_ms is None else start_ms)
        self.set_mode(mode)

    def now_ms(self) -> int:
        passed_ms = self._real.now_ms() - self._since_ms if self._flows else 0
        return self._now_ms + passed_ms

    def set_mode(self, mode: str) -> None:
        """Stands still, or flows, from now on. Raises InvalidField."""
        check_mode(mode)
        with self._lock:
            self._now_ms = self.now_ms()
            self._since_ms = self._real.now_ms()
            self._flows = mode == "system"
        self.mode = mode
        self.auto_advance = mode == "auto"
        # Those who wait may have slept for too long, or forever.
        self.advance()

    def travel(self, step_ms: float, field: str = "advance") -> None:
        """Moves time forward by that many milliseconds. Raises InvalidField."""
        if not 0 <= step_ms <= ADVANCE_MS_MAX:
            raise InvalidField(
                f"{field}: {step_ms / 1_000:g} s is outside 0 to {ADVANCE_MS_MAX // 1_000} s; time "
                "never goes back"
            )
        if self.now_ms() + step_ms > NOW_MS_MAX:
            raise InvalidField(f"{field}: the clock ends with the year 9989; begin another account")
        self.advance(ms=round(step_ms))

    def note_request(self) -> None:
        """A request has come: in the mode auto, time does not move for a moment."""
        self._asked_s = time.monotonic()

    def timeout_s(self, until_ms: int) -> float | None:
        if not self._flows:
            return None
        return max(0, until_ms + 1 - self.now_ms()) / 1_000

    def waiter_timeout_s(self, until_ms: int, *, blocks_thread: bool) -> float | None:
        # Nothing is due if the pull was answered just now.
        if self.mode != "auto" or until_ms >= NEVER_MS:
            if self._flows:
                return self.timeout_s(until_ms)
            return super().waiter_timeout_s(until_ms, blocks_thread=blocks_thread)
        quiet_s = time.monotonic() - self._asked_s
        if quiet_s < QUIET_S:
            return QUIET_S - quiet_s
        self.advance(ms=max(0, until_ms - self._now_ms))
        return 0


def check_mode(mode: str) -> None:
    """Raises InvalidField if there is no such mode."""
    if mode not in CLOCKS:
        raise InvalidField(f"clock: {mode!r} is none of {', '.join(CLOCKS)}")
