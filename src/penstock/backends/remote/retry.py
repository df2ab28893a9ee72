"""Which requests are repeated after a lost connection.

These rules are shared by `blocking` and `asynchronous`. When a connection breaks, a request that
was not sent completely is sent on the next connection, and so is one that has the same effect if it
is executed twice (`is_repeatable`). For any other request it is unknown whether the server executed
it: it fails with BackendLost. docs/how-to/daemon.md has the table.
"""

import time
from typing import Any, Final

import msgspec

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.errors import BackendLost, StaleReceipt
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    ListQueues,
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    Push,
    PushMany,
    Release,
    Stats,
)
from penstock.wire.frames.frames import STATUS

TIMEOUT_S: Final = 30.0
# How long a client tries to reconnect before its callers get an error.
RECONNECT_S: Final = 10.0
REOPEN_PAUSE_S: Final = 0.02
REPEAT_PAUSE_S_MAX: Final = 1.0

_ALWAYS_REPEATABLE: Final = frozenset(
    {
        Peek,
        PeekFrom,
        PeekIds,
        Stats,
        DescribeQueue,
        DescribeQueues,
        ListQueues,
        History,
        CreateQueue,
        ConfigureQueue,
    }
    | {Pull, Delete, Extend, Release}
)


class ConnectionLost(Exception):
    """The connection broke during a request; `may_be_done` if the server may have all of it."""

    def __init__(self, channel: object, may_be_done: bool, reason: str, started_s: float) -> None:
        super().__init__(reason)
        self.channel = channel
        self.may_be_done = may_be_done
        self.reason = reason
        self.started_s = started_s


def is_repeatable(command: object) -> bool:
    """Whether executing it twice has the same effect as once.

    A pull whose answer was lost may leave messages claimed until their deadlines; a repeated pull
    has no other effect, and with an attempt id it returns the same claims.
    """
    if type(command) in _ALWAYS_REPEATABLE or command is STATUS:
        return True
    if isinstance(command, Push):
        return command.dedup_id is not None
    if isinstance(command, Batch):
        return all(map(is_repeatable, command.items))
    if isinstance(command, PushMany):
        return command.dedup_ids is not None and None not in command.dedup_ids
    return False


def unknown_outcome(endpoint: ServerEndpoint, command: object, lost: ConnectionLost) -> BackendLost:
    """The error for a request that the server may or may not have executed."""
    hint = "; give a push a dedup_id and it is sent again safely"
    return BackendLost(
        f"{endpoint.shown}: {lost.reason}; whether this {type(command).__name__} was done is "
        f"unknown{hint if isinstance(command, Push | Batch | PushMany) else ''}"
    )


def with_remaining_wait(command: Any, elapsed_s: float) -> Any:
    """A command to send again: a pull waits only for the rest of its wait time."""
    if type(command) is not Pull or not command.wait_ms:
        return command
    elapsed_ms = round(elapsed_s * 1_000)
    return msgspec.structs.replace(command, wait_ms=max(0, command.wait_ms - elapsed_ms))


def outcome_of_repeat(command: object, outcome: Any) -> Any:
    """The outcome of a repeated request: a release whose claim has ended was executed before."""
    if isinstance(outcome, StaleReceipt) and type(command) is Release:
        return None
    if isinstance(command, Batch) and isinstance(outcome, list):
        return [
            outcome_of_repeat(item, each) for item, each in zip(command.items, outcome, strict=True)
        ]
    return outcome


class Repetition:
    """A request whose connection was lost, while it is repeated on other connections."""

    def __init__(self, endpoint: ServerEndpoint, command: Any, reconnect_s: float) -> None:
        self._endpoint = endpoint
        self._command = command
        self._deadline_s = time.monotonic() + reconnect_s
        self._may_be_done = False
        self._started_s: float | None = None
        self._pause_s = 0.0

    def pause_s(self) -> float:
        """How long to wait before the next connection: 0 at first, then longer each time.

        Without the pause, a server that accepts connections and closes each at its first request
        would get thousands of them a second.
        """
        pause_s = self._pause_s
        self._pause_s = min(max(2 * pause_s, REOPEN_PAUSE_S), REPEAT_PAUSE_S_MAX)
        return pause_s

    def after(self, lost: ConnectionLost) -> Any:
        """The command to send on the next connection.

        Raises BackendLost if it must not be sent again, or after `reconnect_s`.
        """
        if self._started_s is None:
            self._started_s = lost.started_s
        if lost.may_be_done:
            if not is_repeatable(self._command):
                raise unknown_outcome(self._endpoint, self._command, lost)
            self._may_be_done = True
        if time.monotonic() > self._deadline_s:
            raise BackendLost(f"{self._endpoint.shown}: {lost.reason}, at every attempt")
        return with_remaining_wait(self._command, time.monotonic() - self._started_s)

    def outcome(self, outcome: Any) -> Any:
        """The reply for the caller. Raises StaleReceipt if the server refused the receipt."""
        if self._may_be_done:
            outcome = outcome_of_repeat(self._command, outcome)
        if isinstance(outcome, StaleReceipt):
            raise outcome
        return outcome
