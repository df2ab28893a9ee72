"""When a command is sent to an owner again, and when it has failed: the rules of whoever asks.

What was not done is sent again, to the owner of the day. What may have been done is sent again only
if doing it twice comes to the same (`remote.retry`). Nothing here does I/O or reads a clock:
`asking` follows these rules on an event loop, and the clients of `testing.simulation` in a model.
"""

from typing import Any, Final, Generic, TypeVar, cast

from penstock.backends.remote.retry import is_repeatable, outcome_of_repeat
from penstock.cluster import calls
from penstock.cluster.spread import NotPlaced, SpreadChanged
from penstock.errors import BackendLost, StaleReceipt
from penstock.service import Batch, Command, Pull, Push, PushMany

R = TypeVar("R")
# How long a command is tried before it fails: a shard is without an owner for less than this.
PATIENCE_S: Final = 25.0
_RETRY_S: Final = 0.02
_RETRY_S_MAX: Final = 0.25


class NotDone(Exception):
    """The owner did nothing of it: it is not the owner, or is not there."""


class MayBeDone(Exception):
    """The owner was replaced before it answered, or its answer was lost."""


def read_answer(command: Command[Any], kind: bytes, body: bytes) -> Any:
    """The reply in an owner's answer. Raises NotDone, MayBeDone, or what refused the command."""
    if kind == calls.NOT_OWNER:
        raise NotDone("the node that was asked is not its owner")
    if kind == calls.SPREAD_OTHERWISE:
        raise SpreadChanged
    if kind == calls.NOT_PLACED_HERE:
        raise NotPlaced
    if kind == calls.LOST:
        raise MayBeDone("its owner was replaced before it answered, or its answer was lost")
    if kind == calls.REFUSED:
        raise calls.read_error(body)
    return calls.read_reply(command, body)


class Attempts(Generic[R]):
    """The attempts to have one command done by the owner of a shard."""

    __slots__ = ("_command", "_give_up_s", "_may_be_done", "_pause_s", "_shard")

    def __init__(self, shard: int, command: Command[R], now_s: float) -> None:
        self._shard = shard
        self._command = command
        self._give_up_s = now_s + PATIENCE_S
        if type(command) is Pull and command.wait_ms:
            self._give_up_s += command.wait_ms / 1_000
        self._pause_s = 0.0
        self._may_be_done = False

    def settle(self, reply: Any) -> R:
        """What the caller gets for a reply, or for a receipt that was refused as stale.

        Raises StaleReceipt, unless an earlier attempt may be what ended the claim.
        """
        if not isinstance(reply, StaleReceipt):
            settled = outcome_of_repeat(self._command, reply) if self._may_be_done else reply
            return cast(R, settled)
        if self._may_be_done and outcome_of_repeat(self._command, reply) is None:
            return cast(R, None)
        raise reply

    def pause_s(self, failure: NotDone | MayBeDone, now_s: float) -> float:
        """How long to wait, or until there is another owner, before the command is sent again.

        Raises BackendLost.
        """
        if isinstance(failure, MayBeDone):
            self._may_be_done = True
            if not is_repeatable(self._command):
                kind = type(self._command)
                hint = "; give a push a dedup_id and it is sent again safely"
                raise BackendLost(
                    f"shard {self._shard}: {failure}; whether this {kind.__name__} was done is "
                    f"unknown{hint if kind in (Push, Batch, PushMany) else ''}"
                ) from None
        if now_s > self._give_up_s:
            raise BackendLost(f"shard {self._shard}: {failure}, again and again") from None
        pause_s = self._pause_s
        self._pause_s = min(max(2 * pause_s, _RETRY_S), _RETRY_S_MAX)
        return pause_s
