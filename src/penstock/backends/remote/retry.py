"""Which requests are repeated after a lost connection.

`blocking` and `asynchronous` carry out these steps. When a connection breaks, a request that was
not sent completely is sent on the next connection, and so is one that has the same effect if it is
executed twice (`is_repeatable`). For any other request it is unknown whether the server executed
it: it fails with BackendLost. docs/how-to/daemon.md has the table.
"""

import time
from functools import partial
from typing import Any, Final, Protocol

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
from penstock.steps import Calls
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

    def __init__(self, may_be_done: bool, reason: str, started_s: float) -> None:
        super().__init__(reason)
        self.may_be_done = may_be_done
        self.reason = reason
        self.started_s = started_s


class ReopeningClient(Protocol):
    """What the steps need of a client; the calls of one that awaits return awaitables."""

    @property
    def endpoint(self) -> ServerEndpoint: ...
    @property
    def reconnect_s(self) -> float: ...
    def check_open(self) -> None: ...
    def connect(self, connect_s: float) -> Any: ...
    def reopen(self, lost: Any) -> Any: ...
    def sleep(self, seconds: float) -> Any: ...


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


def unknown_outcome(where: str, command: object, reason: object) -> BackendLost:
    """The error for a request that may or may not have been executed there."""
    hint = "; give a push a dedup_id and it is sent again safely"
    return BackendLost(
        f"{where}: {reason}; whether this {type(command).__name__} was done is "
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


def reply_of(command: object, outcome: Any, may_be_done: bool) -> Any:
    """The reply for the caller, if earlier attempts may have been done. Raises StaleReceipt."""
    if may_be_done:
        outcome = outcome_of_repeat(command, outcome)
    if isinstance(outcome, StaleReceipt):
        raise outcome
    return outcome


def opened(client: ReopeningClient, reconnect_s: float) -> Calls[Any]:
    """Opens a connection; tries again for so long. Raises BackendLost, or why it is refused."""
    deadline_s = time.monotonic() + max(reconnect_s, client.endpoint.reconnect_s_min)
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return (yield partial(client.connect, min(left_s, reconnect_s)))
        except BackendLost:
            if time.monotonic() + REOPEN_PAUSE_S > deadline_s:
                raise
        yield partial(client.sleep, REOPEN_PAUSE_S)


def repeated(
    client: ReopeningClient, command: Any, channel: Any, lost: ConnectionLost
) -> Calls[Any]:
    """Sends a request again, whose channel was lost, on other channels, if that is allowed.

    Raises BackendLost if it is not, or after `reconnect_s`. The pauses are 0 at first: they only
    protect a server that accepts connections and closes each of them at its first request.
    """
    endpoint = client.endpoint
    deadline_s = time.monotonic() + client.reconnect_s
    started_s = lost.started_s
    may_be_done = False
    pause_s = 0.0
    while True:
        client.check_open()
        if lost.may_be_done:
            if not is_repeatable(command):
                raise unknown_outcome(endpoint.shown, command, lost.reason)
            may_be_done = True
        if time.monotonic() > deadline_s:
            raise BackendLost(f"{endpoint.shown}: {lost.reason}, at every attempt")
        to_send = with_remaining_wait(command, time.monotonic() - started_s)
        yield partial(client.sleep, pause_s)
        pause_s = min(max(2 * pause_s, REOPEN_PAUSE_S), REPEAT_PAUSE_S_MAX)
        channel = yield partial(client.reopen, channel)
        try:
            outcome = yield partial(channel.exchange, to_send)
        except ConnectionLost as lost_again:
            lost = lost_again
            continue
        except StaleReceipt as stale:
            outcome = stale
        return reply_of(command, outcome, may_be_done)
