"""The options of a consumer loop, and when its current claim must be extended."""

import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from penstock.clock import Clock
from penstock.errors import InvalidField
from penstock.output import logger
from penstock.public import to_seconds
from penstock.service import Claim

EXTENSIONS_PER_VISIBILITY: Final = 3
# An extension that fails is tried again after this part of the usual time: at least twice more
# before the claim runs out, as long as each of them fails within a sixth of that claim's time.
SOONER: Final = 3
BACKOFF_DOUBLINGS_MAX: Final = 30
HAS_YIELD: Final = "it has a yield, so a call runs none of its code; use a function without one"


class ConsumerOptions(NamedTuple):
    """The options of `Queues.consume`, which explains them; durations in seconds."""

    queue: str
    visibility_timeout: float | None = None
    wait: float = 1.0
    idle: float | None = None
    max_hold: float = 43_200.0
    backoff: float = 1.0
    max_backoff: float = 300.0
    holder: str | None = None

    @property
    def named_holder(self) -> str | None:
        """The holder of the claims: as given, or the name and number of this process."""
        if self.holder is not None:
            return self.holder
        program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        return f"{program[:80]} (pid {os.getpid()})" if program.isprintable() else None

    def delay_of(self, claim: Claim) -> float:
        """How long a message whose work failed stays hidden."""
        doublings = min(max(0, claim.receives - 1), BACKOFF_DOUBLINGS_MAX)
        return float(min(self.backoff * 2**doublings, self.max_backoff))

    def check(self) -> None:
        """Raises InvalidField for a value outside its limits."""
        for name in ("wait", "max_hold", "backoff", "max_backoff", "idle", "visibility_timeout"):
            value = getattr(self, name)
            if name in ("idle", "visibility_timeout") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InvalidField(f"{name}: expected a number of seconds, zero or more")
        if self.visibility_timeout == 0:
            raise InvalidField("visibility_timeout: a loop needs claims that last longer than 0 s")


def read_options(queue: str, *given: Any) -> ConsumerOptions:
    """The options as `consume` has them, in its order; a timedelta becomes its seconds."""
    return ConsumerOptions(queue, *map(to_seconds, given))


class HoldTimes:
    """When the current claim is to be extended next, and when for the last time."""

    def __init__(self, clock: Clock, visibility_timeout: float, max_hold: float) -> None:
        self.now_ms = clock.now_ms
        self.visibility_timeout = visibility_timeout
        self._step_ms = max(1, round(visibility_timeout * 1_000 / EXTENSIONS_PER_VISIBILITY))
        self._hold_max_ms = round(max_hold * 1_000)
        self.next_ms = 0
        self._end_ms = 0

    def begin(self) -> None:
        """A claim was taken just now."""
        self.extended()
        self._end_ms = self.now_ms() + self._hold_max_ms

    def extended(self) -> None:
        """The claim was extended just now."""
        self.next_ms = self.now_ms() + self._step_ms

    def failed(self) -> None:
        """An extension failed, and will be tried again."""
        self.next_ms = self.now_ms() + max(1, self._step_ms // SOONER)

    @property
    def is_due(self) -> bool:
        return self.now_ms() >= self.next_ms

    @property
    def is_over(self) -> bool:
        """Whether the claim has been held for as long as it may be."""
        return self.now_ms() >= self._end_ms


def check_holdable(visibility_timeout: float) -> float:
    """The seconds that a queue's claims last. Raises InvalidField if they last 0 seconds."""
    if not visibility_timeout:
        raise InvalidField(
            "visibility_timeout: claims of this queue last 0 s, so a loop cannot hold them; "
            "give consume a visibility_timeout"
        )
    return visibility_timeout


def refuse_generator(where: str, function: Callable[..., Any]) -> None:
    """Raises InvalidField for what cannot be called, and for a generator function.

    A call of a generator function runs none of its code.
    """
    if not callable(function):
        raise InvalidField(f"{where}: expected a function, got {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidField(f"{where}: {HAS_YIELD}")


def unfinished(value: object) -> str | None:
    """What a call returned instead of doing its work: a coroutine or a generator. None if neither.

    A coroutine is closed: Python would warn of one that is dropped, and the caller's error says
    more.
    """
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator"
    if not isinstance(value, Awaitable):
        return None
    if inspect.iscoroutine(value):
        value.close()
    return "a coroutine"


def report_failure(claim: Claim, error: Exception) -> None:
    """Logs that the work on a message failed."""
    # Imported late: it is slow to import, and most loops never need it.

    logger("penstock.consumer").error(
        "the work on message %s of %r failed; it is released",
        claim.id,
        claim.queue,
        exc_info=error,
    )
