"""The options of a consumer loop, and when its current claim must be extended."""

from typing import Final, NamedTuple

from penstock.clock import Clock
from penstock.errors import InvalidField
from penstock.service import Claim

# An extension that fails is tried twice more before the claim runs out.
EXTENSIONS_PER_VISIBILITY: Final = 3
BACKOFF_DOUBLINGS_MAX: Final = 30


class ConsumerOptions(NamedTuple):
    """The options of `Queues.consume`, which explains them; durations in seconds."""

    queue: str
    visibility: float | None = None
    wait: float = 1.0
    idle: float | None = None
    hold_max: float = 43_200.0
    backoff: float = 1.0
    backoff_max: float = 300.0
    holder: str | None = None

    def delay_of(self, claim: Claim) -> float:
        """How long a message whose work failed stays hidden."""
        doublings = min(max(0, claim.receives - 1), BACKOFF_DOUBLINGS_MAX)
        return float(min(self.backoff * 2**doublings, self.backoff_max))

    def check(self) -> None:
        """Raises InvalidField for a value outside its limits."""
        for name in ("wait", "hold_max", "backoff", "backoff_max", "idle"):
            value = getattr(self, name)
            if name == "idle" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InvalidField(f"{name}: expected a number of seconds, zero or more")
        if self.visibility is not None and not self.visibility > 0:
            raise InvalidField("visibility: a loop needs claims that last longer than 0 s")


class HoldTimes:
    """When the current claim is to be extended next, and when for the last time."""

    def __init__(self, clock: Clock, visibility: float, hold_max: float) -> None:
        self.now_ms = clock.now_ms
        self.visibility = visibility
        self._step_ms = max(1, round(visibility * 1_000 / EXTENSIONS_PER_VISIBILITY))
        self._hold_max_ms = round(hold_max * 1_000)
        self.next_ms = 0
        self._end_ms = 0

    def begin(self) -> None:
        """A claim was taken just now."""
        self.extended()
        self._end_ms = self.now_ms() + self._hold_max_ms

    def extended(self) -> None:
        """The claim was extended just now, or that failed and will be tried again."""
        self.next_ms = self.now_ms() + self._step_ms

    @property
    def is_due(self) -> bool:
        return self.now_ms() >= self.next_ms

    @property
    def is_over(self) -> bool:
        """Whether the claim has been held for as long as it may be."""
        return self.now_ms() >= self._end_ms


def visibility_of(visibility_ms: int) -> float:
    """The seconds that a queue's claims last. Raises InvalidField if they last 0 seconds."""
    if not visibility_ms:
        raise InvalidField(
            "visibility: claims of this queue last 0 s, so a loop cannot hold them; "
            "give consume a visibility"
        )
    return visibility_ms / 1_000


def report_failure(claim: Claim, error: Exception) -> None:
    """Logs that the work on a message failed."""
    # Imported late: it is slow to import, and most loops never need it.
    import logging

    logging.getLogger("penstock.consumer").error(
        "the work on message %s of %r failed; it is released",
        claim.id,
        claim.queue,
        exc_info=error,
    )
