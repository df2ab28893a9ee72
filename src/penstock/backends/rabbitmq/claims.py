"""The live claims of a connection: their receipts, their deadlines, and how they ended.

A claim is a delivery that this process has not acknowledged. Its receipt contains its number,
signed with a key that only this connection has. One heap and one timer serve all deadlines. A claim
ends exactly once: the caller that removes it from the table acknowledges or returns its message.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.rabbitmq.content import Content
from penstock.clock import Clock
from penstock.core.receipts import KEY_BYTES, Receipts, Ticket
from penstock.errors import InvalidReceipt, MessageGone, StaleReceipt
from penstock.service import Claim

if TYPE_CHECKING:
    from penstock.backends.rabbitmq.line import PullLine

# How many deleted claims are remembered, so that a second delete is not an error.
_DELETED_MAX: Final = 100_000


class LiveClaim(msgspec.Struct, eq=False):
    """A message that this connection holds.

    `channel` and `tag` identify the delivery; a tag is valid on its own channel only.
    """

    number: int
    line: "PullLine"
    channel: Any
    tag: int
    content: Content
    receives: int
    pulled_at_ms: int
    deadline_ms: int
    ticket: Ticket


class Claims:
    """Every live claim of one connection."""

    def __init__(self, clock: Clock, expired: Callable[[LiveClaim], None]) -> None:
        self._clock = clock
        self._expired = expired
        self._receipts = Receipts(secrets.token_bytes(KEY_BYTES))
        self._live: dict[int, LiveClaim] = {}
        self._deleted: OrderedDict[int, None] = OrderedDict()
        # The messages whose last claim ran out, by the number of that claim, and the other way.
        self._late: OrderedDict[int, str] = OrderedDict()
        self._late_numbers: dict[str, int] = {}
        self._next_number = 1
        self._deadlines: list[tuple[int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def add(
        self, line: "PullLine", delivery: Any, content: Content, receives: int, visibility_ms: int
    ) -> LiveClaim:
        """Adds the claim of a delivery."""
        now_ms = self._clock.now_ms()
        number = self._next_number
        self._next_number += 1
        ticket = Ticket(line.queue.number, number, receives, self._receipts)
        claim = LiveClaim(
            number,
            line,
            delivery.channel,
            delivery.delivery_tag,
            content,
            receives,
            now_ms,
            now_ms + visibility_ms,
            ticket,
        )
        self._live[number] = claim
        line.claims[number] = claim
        late = self._late_numbers.pop(content.id, None)
        if late is not None:
            del self._late[late]
        if visibility_ms:
            # A claim without a visibility timeout is ended by its pull (`return_all`).
            self._note(claim)
        return claim

    def find(self, line: "PullLine", receipt: object) -> LiveClaim:
        """The live claim of a receipt. Raises InvalidReceipt, StaleReceipt or MessageGone."""
        try:
            ticket = self._receipts.read(receipt)
        except InvalidReceipt:
            raise InvalidReceipt(
                "receipt: not one of this connection: RabbitMQ binds a message to the connection "
                "that pulled it, so only that connection can use its receipt"
            ) from None
        if ticket.queue != line.queue.number:
            raise InvalidReceipt(f"receipt: it is of another queue than {line.queue.name!r}")
        claim = self._live.get(ticket.number)
        if claim is not None and self.is_live(claim):
            return claim
        if ticket.number in self._deleted:
            raise MessageGone("receipt: its message was deleted")
        raise StaleReceipt(
            "receipt: its claim has ended: released, timed out, or the connection was lost"
        )

    def get(self, shown: Claim) -> LiveClaim | None:
        """The live claim of a claim that a pull returned; None if it has ended."""
        return self._live.get(shown.proof.number)

    def is_live(self, claim: LiveClaim | None) -> bool:
        """Whether a claim has neither ended nor reached its deadline."""
        return claim is not None and claim.deadline_ms > self._clock.now_ms()

    def extend(self, claim: LiveClaim, visibility_ms: int) -> int:
        """Sets a claim's deadline to `visibility_ms` from now, and returns it."""
        claim.deadline_ms = self._clock.now_ms() + visibility_ms
        self._note(claim)
        return claim.deadline_ms

    def end(self, claim: LiveClaim, *, deleted: bool = False) -> bool:
        """Removes a claim from the table; False if it was not there."""
        if self._live.pop(claim.number, None) is None:
            return False
        claim.line.claims.pop(claim.number, None)
        if deleted:
            self._deleted[claim.number] = None
            if len(self._deleted) > _DELETED_MAX:
                self._deleted.popitem(last=False)
        return True

    def delete_late(self, receipt: object) -> str | None:
        """The message of a claim that ran out, and which was not pulled here since; else None."""
        if self._timer is not None:
            self._timer.cancel()
        # A claim may have reached its deadline just now.
        self._end_expired()
        number = self._receipts.read(receipt).number
        message_id = self._late.pop(number, None)
        if message_id is not None:
            del self._late_numbers[message_id]
            self._deleted[number] = None
        return message_id

    def note_late(self, claim: LiveClaim) -> None:
        """Notes that a claim has run out, and that its message returns to its queue."""
        self._late[claim.number] = claim.content.id
        self._late_numbers[claim.content.id] = claim.number
        if len(self._late) > _DELETED_MAX:
            _, message_id = self._late.popitem(last=False)
            del self._late_numbers[message_id]

    def forget_delete(self, claim: LiveClaim) -> None:
        """Notes that a claim that has ended was not deleted after all."""
        self._deleted.pop(claim.number, None)

    def _note(self, claim: LiveClaim) -> None:
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._live):
            # Most entries are of claims that ended before their deadlines.
            self._deadlines = [(live.deadline_ms, live.number) for live in self._live.values()]
            heapify(self._deadlines)
        heappush(self._deadlines, (claim.deadline_ms, claim.number))
        if self._timer is None or claim.deadline_ms < self._timer_ms:
            self._set_timer(claim.deadline_ms)

    def _set_timer(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ms - self._clock.now_ms()) / 1_000
        self._timer_ms = at_ms
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_expired)

    def _end_expired(self) -> None:
        """Ends the claims whose deadline has passed."""
        self._timer = None
        now_ms = self._clock.now_ms()
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number = heappop(self._deadlines)
            claim = self._live.get(number)
            if claim is not None and claim.deadline_ms <= now_ms:
                self.end(claim)
                self._expired(claim)
        if self._deadlines:
            self._set_timer(self._deadlines[0][0])

    def close(self) -> None:
        """Ends every claim: the broker returns their messages when the connection ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._live.clear()
