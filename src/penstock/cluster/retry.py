"""When a command is sent to an owner again, and when it has failed.

A command that was not carried out is sent again, to the current owner. One that may have been
carried out is sent again only if a second execution changes nothing (`remote.retry`). Nothing here
does I/O or reads a clock: `shard_client` applies these rules on an event loop, and the clients of
`tests/simulation` in a model.
"""

from typing import Any, Final, Generic, TypeVar, cast

from penstock.backends.remote.retry import is_repeatable, reply_of, unknown_outcome
from penstock.cluster.spread_rules import NotPlaced, SpreadChanged
from penstock.errors import BackendLost, StoreFull
from penstock.service import Command, Pull
from penstock.wire import shard_protocol as protocol

R = TypeVar("R")
# After this time a command fails. A shard without an owner gets one much sooner.
COMMAND_TIMEOUT_S: Final = 25.0
_RETRY_S: Final = 0.02
_RETRY_S_MAX: Final = 0.25


def next_pause_s(pause_s: float) -> float:
    """The pause after one of this length, which ended without success; the first one is 0."""
    return min(max(2 * pause_s, _RETRY_S), _RETRY_S_MAX)


class NotDone(Exception):
    """The command was not carried out: the node is not the owner, or does not exist."""


class MayBeDone(Exception):
    """The command may have been carried out: its owner was replaced, or the answer was lost."""


def read_answer(command: Command[Any], kind: bytes, body: bytes) -> Any:
    """The reply in an owner's answer. Raises NotDone, MayBeDone, or what refused the command."""
    if kind == protocol.NOT_OWNER:
        raise NotDone(body.decode() or "the node that got the command is not its owner")
    if kind == protocol.SPREAD_CHANGED:
        raise SpreadChanged
    if kind == protocol.NOT_PLACED:
        raise NotPlaced
    if kind == protocol.LOST:
        raise MayBeDone(
            body.decode() or "its owner was replaced before it answered, or its answer was lost"
        )
    if kind == protocol.REFUSED:
        raise protocol.read_error(body)
    return protocol.read_reply(command, body)


class Attempts(Generic[R]):
    """The attempts to have the owner of a shard execute one command."""

    __slots__ = ("_began_s", "_command", "_give_up_s", "_may_be_done", "_pause_s", "_shard")

    def __init__(self, shard: int, command: Command[R], now_s: float) -> None:
        self._shard = shard
        self._command = command
        self._began_s = now_s
        self._give_up_s = now_s + COMMAND_TIMEOUT_S
        if type(command) is Pull and command.wait_ms:
            self._give_up_s += command.wait_ms / 1_000
        self._pause_s = 0.0
        self._may_be_done = False

    def outcome(self, reply: Any) -> R:
        """The reply for the caller. Raises StaleReceipt, if `reply` is that.

        A receipt may be stale because an earlier attempt was carried out: that is a success.
        """
        return cast(R, reply_of(self._command, reply, self._may_be_done))

    def refusal(self, full: StoreFull) -> StoreFull | BackendLost:
        """The error for the caller if the shard has no room: an earlier attempt may be kept."""
        if not self._may_be_done:
            return full
        kind = type(self._command).__name__
        return BackendLost(f"{full}; whether this {kind} was done is unknown")

    def pause_s(self, failure: NotDone | MayBeDone, now_s: float) -> float:
        """How long to wait for another owner before the command is sent again.

        Raises BackendLost if it must not be repeated, or was tried for too long.
        """
        if isinstance(failure, MayBeDone):
            self._may_be_done = True
            if not is_repeatable(self._command):
                raise unknown_outcome(f"shard {self._shard}", self._command, failure) from None
        if now_s > self._give_up_s:
            tried_s = now_s - self._began_s
            message = f"shard {self._shard}: {failure}; gave up after {tried_s:.0f} s"
            raise BackendLost(message) from None
        pause_s = self._pause_s
        self._pause_s = next_pause_s(pause_s)
        return pause_s
