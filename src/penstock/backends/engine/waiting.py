"""The waiting line of an engine: pulls that found nothing.

There is one line of waiters per queue. They are served in order of arrival, and those of named
holders in turns: one with hundreds of waiting pulls gets no second message before others have their
first. They are served within the command that made a message visible. So `wake` must not submit
commands: it sets a signal, or schedules a callback. Serving a pull makes events, and these may make
other messages visible: their queues are noted and served in the same loop, which nothing calls a
second time. When a step has ended or moved as many messages as it may, the rest of the line is
served in the next one; only a pull that comes in between may be served before it.

A waiter that only watches is woken, without a claim, when a message became visible
that no pull took; watchers have a line of their own, under the negative number of their queue.
`arrange` is called when `tick` is to be called earlier than it was arranged before; no waiter needs
a timer of its own.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from penstock.core.due import NEVER_MS, Alarm
from penstock.core.events import AnyEvent, Claimed, Extended, Moved, QueueRemoved
from penstock.core.runs import Run
from penstock.errors import InFlightLimit, PenstockError, QueueDeleted
from penstock.service import Claim, Pull

# So many holders are remembered besides those that wait.
_HOLDERS_KEPT: Final = 100


class Waiter:
    """A pull that waits: served with claims, timed out with none, or failed."""

    __slots__ = (
        *("_wake", "claims", "command", "deadline_ms", "done", "error", "queue", "sequence"),
        "turn",
    )

    def __init__(
        self, command: Pull, queue: int, deadline_ms: int, wake: Callable[[], None]
    ) -> None:
        self.command = command
        self.queue = queue
        self.deadline_ms = deadline_ms
        self.claims: list[Claim] = []
        self.sequence = 0
        self.error: PenstockError | None = None
        self.done = False
        # Its place in the line; of equal ones, the first to come is served first.
        self.turn = 0
        self._wake = wake

    def finish(
        self, claims: list[Claim], sequence: int, error: PenstockError | None = None
    ) -> None:
        """Sets the waiter's answer and wakes it."""
        self.claims = claims
        self.sequence = sequence
        self.error = error
        self.done = True
        self._wake()

    def wake(self) -> None:
        """Wakes the waiter without an answer."""
        self._wake()


def _do_nothing() -> None:
    pass


class HolderTurns:
    """The turns of the holders whose pulls wait on one queue."""

    __slots__ = ("_last", "now")

    def __init__(self) -> None:
        # The turn of the waiter that was served last.
        self.now = 0
        self._last: dict[str, int] = {}

    def next_of(self, holder: str | None, waiters: deque[Waiter]) -> int:
        """The turn of a holder's next pull: after its last one, and not before the current one."""
        if holder is None:
            return self.now
        if len(self._last) > 2 * len(waiters) + _HOLDERS_KEPT:
            self._last = {each.command.holder or "": each.turn for each in waiters if not each.done}
        turn = self._last[holder] = max(self.now, self._last.get(holder, -1) + 1)
        return turn


class Tried(NamedTuple):
    """What a waiter's pull led to when it was tried again."""

    claims: list[Claim]
    # The sequence that must be durable before the claims are shown.
    sequence: int
    refused: PenstockError | None
    # All that happened, also if there are no claims: messages that expired, moved or were lost.
    events: Sequence[AnyEvent]


class WaitingLine:
    """All waiting pulls of one engine.

    `pull` tries a waiter's command again; it must not call `serve`. `has_visible` says of a queue's
    number whether a message of it is visible. `queues` has the waiters of each queue by its number.
    It is always the same dict, and empty while no pull waits.
    """

    def __init__(
        self,
        alarm: Alarm,
        pull: Callable[[Pull], Tried],
        has_visible: Callable[[int], bool],
    ) -> None:
        self.queues: dict[int, deque[Waiter]] = {}
        self._turns: dict[int, HolderTurns] = {}
        self._alarm = alarm
        self._pull = pull
        self._has_visible = has_visible
        # The queues that are to be served, in order.
        self._noted: dict[int, None] = {}
        self._timeouts: list[tuple[int, int, Waiter]] = []
        self._joined = 0
        # Set by who calls `tick`; and for when the next call was arranged.
        self.arrange: Callable[[], None] = _do_nothing
        self._planned_ms = NEVER_MS

    def join(self, waiter: Waiter) -> None:
        """Puts a waiter into its queue's line, behind those of the same or an earlier turn."""
        if not self.queues:
            self._planned_ms = NEVER_MS
        waiters = self.queues.setdefault(waiter.queue, deque())
        turns = self._turns.setdefault(waiter.queue, HolderTurns())
        waiter.turn = turns.next_of(waiter.command.holder, waiters)
        place = len(waiters)
        while place and waiters[place - 1].turn > waiter.turn:
            place -= 1
        waiters.insert(place, waiter)
        self._joined += 1
        heappush(self._timeouts, (waiter.deadline_ms, self._joined, waiter))
        if self._has_visible(waiter.queue):
            # The pull may have ended or moved as many as it may in one step: try again soon.
            self._noted[waiter.queue] = None
            self._alarm.next_ms = 0
        self._arrange()

    def leave(self, waiter: Waiter) -> None:
        """Removes a waiter that has no answer yet from the line."""
        waiter.done = True
        self._drop_finished(waiter.queue)

    def count(self, number: int) -> int:
        """How many pulls wait on a queue."""
        return sum(not waiter.done for waiter in self.queues.get(number, ()))

    @property
    def next_wake_ms(self) -> int:
        """When `tick` should next be called, if any pull waits."""
        timeout_ms = self._timeouts[0][0] if self._timeouts else NEVER_MS
        return min(timeout_ms, self._alarm.next_ms)

    def tick(self, now_ms: int) -> None:
        """Ends the waits whose time is over, with no claims; what was due has been settled."""
        while self._timeouts and self._timeouts[0][0] <= now_ms:
            _, _, waiter = heappop(self._timeouts)
            if not waiter.done:
                waiter.finish([], 0)
                self._drop_finished(waiter.queue)
        # Who called it arranges the next call.
        self._planned_ms = self.next_wake_ms

    def _arrange(self) -> None:
        wake_ms = self.next_wake_ms
        if wake_ms < self._planned_ms:
            self._planned_ms = wake_ms
            self.arrange()

    def serve(self, events: Sequence[AnyEvent] = ()) -> None:
        """Serves the pulls that waited for what these events made visible.

        It also serves the queues that an earlier call left for later.
        """
        self._note(events)
        noted = self._noted
        later: dict[int, None] = {}
        while noted:
            number = next(iter(noted))
            del noted[number]
            if number in later:
                continue
            if number in self.queues and not self._serve_queue(number):
                later[number] = None
            if -number in self.queues and self._has_visible(number):
                self._wake_watchers(-number)
        if later:
            noted.update(later)
            # So that `serve` is called again soon.
            self._alarm.next_ms = 0
        if self.queues:
            self._arrange()

    def _note(self, events: Sequence[AnyEvent]) -> None:
        """Notes the queues in which these events may have made a message visible."""
        # The first event of a run is enough: all are of one queue.
        for event in events[:1] if type(events) is Run else events:
            if isinstance(event, QueueRemoved):
                self._fail_queue(event.queue)
            elif not isinstance(event, Claimed | Extended):
                number = event.to if isinstance(event, Moved) else event.queue
                if number in self.queues or -number in self.queues:
                    self._noted[number] = None

    def _wake_watchers(self, number: int) -> None:
        for waiter in self.queues[number]:
            if not waiter.done:
                waiter.finish([], 0)
        self._drop_finished(number)

    def _serve_queue(self, number: int) -> bool:
        """Serves the pulls of one queue in order, as far as there are messages.

        False if a pull found none because it had ended or moved as many as it may in one step.
        """
        is_complete = True
        waiters, turns = self.queues[number], self._turns[number]
        while waiters:
            waiter = waiters[0]
            if waiter.done:
                waiters.popleft()
                continue
            tried = self._pull(waiter.command)
            self._note(tried.events)
            # After an InFlightLimit the next delete or return makes room, and is served again.
            if type(tried.refused) is InFlightLimit or not (tried.claims or tried.refused):
                is_complete = not tried.events
                break
            waiter.finish(tried.claims, tried.sequence, tried.refused)
            turns.now = max(turns.now, waiter.turn)
            if tried.claims:
                self._answer_alike(waiter, waiters)
        self._drop_finished(number)
        return is_complete

    def _answer_alike(self, served: Waiter, waiters: deque[Waiter]) -> None:
        """Gives the same claims to every waiter with the same attempt id."""
        attempt_id = served.command.attempt_id
        if attempt_id is None:
            return
        for waiter in waiters:
            if not waiter.done and waiter.command.attempt_id == attempt_id:
                waiter.finish(served.claims, served.sequence)

    def _fail_queue(self, number: int) -> None:
        self._turns.pop(number, None)
        self._turns.pop(-number, None)
        for waiter in (*self.queues.pop(number, ()), *self.queues.pop(-number, ())):
            if not waiter.done:
                name = waiter.command.queue
                waiter.finish([], 0, QueueDeleted(f"queue: {name!r} was deleted during the wait"))

    def _drop_finished(self, number: int) -> None:
        waiters = self.queues.get(number)
        if waiters is None:
            return
        while waiters and waiters[0].done:
            waiters.popleft()
        if not waiters:
            del self.queues[number], self._turns[number]
        while self._timeouts and self._timeouts[0][2].done:
            heappop(self._timeouts)

    def fail(self, error: PenstockError) -> None:
        """Ends every wait with this error."""
        waiting = [waiter for waiters in self.queues.values() for waiter in waiters]
        self.queues.clear()
        self._turns.clear()
        self._noted.clear()
        for waiter in waiting:
            if not waiter.done:
                waiter.finish([], 0, error)
