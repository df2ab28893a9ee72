"""Sends commands to the mirror's service, and repeats them until it can be reached.

A command that fails because the service cannot be reached is tried again, without a limit.
`losses` counts lost connections. Claims made before the last loss may have ended. Commands that
were answered before it may be undone, if the service answers before its disk has the data.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from penstock.errors import BackendLost, PenstockError, QueueNotFound, UnavailableError
from penstock.service import Batch, Claim, Command, Delete, Pull, QueueService, Release

R = TypeVar("R")
T = TypeVar("T")
ITEMS_MAX: Final = 500
_RETRY_S: Final = 0.1
_RETRY_S_MAX: Final = 5.0


class MirrorCounts:
    """How many changes a mirror has made since it started."""

    def __init__(self) -> None:
        self.pushed = 0
        self.deleted = 0
        # Pushes that the mirror refused, and deletes of messages that it does not have.
        self.refused = 0
        self.unmatched = 0
        self.last_error: PenstockError | None = None


class MirrorCalls:
    """The mirror's service. Not thread-safe."""

    def __init__(self, service: QueueService, pause: Callable[[float], None]) -> None:
        """`pause` is called between two attempts; it may raise to end the mirror."""
        self.counts = MirrorCounts()
        self.losses = 0
        self._service = service
        self._pause = pause

    def execute(self, command: Command[R], retry_lost: bool = True) -> R:
        """Executes a command; without `retry_lost` raises BackendLost if it may have been done."""
        pause_s = _RETRY_S
        while True:
            try:
                reply = self._service.execute(command)
            except UnavailableError as error:
                self.note_unreachable(error)
                self._pause(pause_s)
                if isinstance(error, BackendLost) and not retry_lost:
                    raise
                pause_s = min(_RETRY_S_MAX, 2 * pause_s)
            else:
                self.counts.last_error = None
                return reply

    def batch(self, items: Sequence[Any]) -> list[Any]:
        """The reply to each item, or its error; a lost connection may fail some items only."""
        replies: list[Any] = []
        for some in slices(items, ITEMS_MAX):
            found = self.execute(Batch([*some]))
            for reply in found:
                if isinstance(reply, UnavailableError):
                    self.note_unreachable(reply)
            replies += found
        return replies

    def pull(self, name: str, limit: int, hidden_ms: int) -> list[Claim]:
        """Claims messages from the head of a queue; returns none if it does not exist."""
        try:
            return self.execute(Pull(name, min(limit, ITEMS_MAX), hidden_ms, 0))
        except QueueNotFound:
            return []

    def release(self, claims: Iterable[Claim]) -> None:
        """Ends claims; a refusal means that the claim has ended already."""
        self.batch([Release(claim.queue, claim.proof) for claim in claims])

    def delete(self, claims: Iterable[Claim]) -> None:
        """Deletes messages whose claims have not ended."""
        self.batch([Delete(claim.queue, claim.proof) for claim in claims])

    def note_unreachable(self, error: PenstockError) -> None:
        """Notes that the service could not be reached."""
        self.counts.last_error = error
        self.losses += isinstance(error, BackendLost)

    def note_refused(self, error: PenstockError) -> None:
        """Counts a command that the service refused; it is not repeated."""
        self.counts.refused += 1
        self.counts.last_error = error

    def wait(self) -> None:
        """Pauses before the next attempt."""
        self._pause(_RETRY_S)

    def close(self) -> None:
        """Closes the service."""
        self._service.close()


def slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
