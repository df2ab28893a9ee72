"""What a client may ask of a server, and what it repeats after a lost connection.

These rules are shared by `blocking` and `asynchronous`. When a connection breaks, a request that
was never sent whole is sent on the next connection, and so is one that may be done twice without
harm (`is_repeatable`). For the rest it is unknown whether the server did it: `BackendLost`.
docs/daemon.md has the table.
"""

import time
from typing import Any, Final

import msgspec

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.errors import BackendLost, InvalidField, StaleReceipt, UnsupportedOperation
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
    Pull,
    Push,
    PushMany,
    Release,
    Stats,
)
from penstock.wire.frames.frames import COMMANDS_KNOWN_MIN, KIND_OF, STATUS, Welcome

TIMEOUT_S: Final = 30.0
# How long a broken connection may take to come back before its callers get an error.
PATIENCE_S: Final = 10.0
REOPEN_PAUSE_S: Final = 0.02
REPEAT_PAUSE_S_MAX: Final = 1.0
SOFTWARE: Final = "penstock python"

_ALWAYS_REPEATABLE: Final = frozenset(
    {Peek, Stats, DescribeQueue, DescribeQueues, ListQueues, History, CreateQueue, ConfigureQueue}
    | {Pull, Delete, Extend, Release}
)


class ConnectionLost(Exception):
    """The connection broke under a request; `may_be_done` if the server may have seen all of it."""

    def __init__(self, channel: object, may_be_done: bool, reason: str, started_s: float) -> None:
        super().__init__(reason)
        self.channel = channel
        self.may_be_done = may_be_done
        self.reason = reason
        self.started_s = started_s


def check_welcome(endpoint: ServerEndpoint, welcome: Welcome) -> None:
    """Refuses a server whose store runs otherwise than the caller asked. Raises InvalidField."""
    for name, wanted in endpoint.options.items():
        actual = welcome.options.get(name)
        if actual is not None and actual != wanted:
            raise InvalidField(
                f"url: {name}={wanted} was asked for, but the process that holds {endpoint.shown} "
                f"runs with {name}={actual}; leave the option out, or stop that process first"
            )


def unknown_commands(welcome: Welcome) -> frozenset[type]:
    """The commands that this server does not know, by the options of its WELCOME."""
    text = welcome.options.get("commands", "")
    is_number = text.isascii() and text.isdigit() and len(text) <= 3
    known = int(text) if is_number else COMMANDS_KNOWN_MIN
    return frozenset(command for command, kind in KIND_OF.items() if kind > known)


def too_new(endpoint: ServerEndpoint, welcome: Welcome, command: object) -> UnsupportedOperation:
    """The error of a command that the server is too old for."""
    return UnsupportedOperation(
        f"{endpoint.shown}: the server ({welcome.software}) is older than this client and does "
        f"not know {type(command).__name__}; restart it with this version of Penstock"
    )


def is_repeatable(command: object) -> bool:
    """Whether doing it twice comes to the same as doing it once.

    A pull whose answer was lost may hold messages until their claims run out; nothing else is
    harmed by another one, and with an attempt id it finds those very claims.
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


def unknown_fate(endpoint: ServerEndpoint, command: object, lost: ConnectionLost) -> BackendLost:
    """The error of a request that may or may not have been done."""
    hint = "; give a push a dedup_id and it is sent again safely"
    return BackendLost(
        f"{endpoint.shown}: {lost.reason}; whether this {type(command).__name__} was done is "
        f"unknown{hint if isinstance(command, Push | Batch | PushMany) else ''}"
    )


def still_to_wait(command: Any, elapsed_s: float) -> Any:
    """A pull that is sent again waits only for what is left of its time."""
    if type(command) is not Pull or not command.wait_ms:
        return command
    elapsed_ms = round(elapsed_s * 1_000)
    return msgspec.structs.replace(command, wait_ms=max(0, command.wait_ms - elapsed_ms))


def settle_repeated(command: object, outcome: Any) -> Any:
    """What a repeated request came to: a release that finds its claim ended has been done."""
    if isinstance(outcome, StaleReceipt) and type(command) is Release:
        return None
    if isinstance(command, Batch) and isinstance(outcome, list):
        return [
            settle_repeated(item, each) for item, each in zip(command.items, outcome, strict=True)
        ]
    return outcome


class Repetition:
    """One request that lost its connection, on its way to an answer on another connection."""

    def __init__(self, endpoint: ServerEndpoint, command: Any, patience_s: float) -> None:
        self._endpoint = endpoint
        self._command = command
        self._deadline_s = time.monotonic() + patience_s
        self._may_be_done = False
        self._started_s: float | None = None
        self._pause_s = 0.0

    def pause_s(self) -> float:
        """How long to wait before the next connection: nothing at first, then longer and longer.

        A server that accepts connections and drops each at its first request would otherwise be
        asked thousands of times a second.
        """
        pause_s = self._pause_s
        self._pause_s = min(max(2 * pause_s, REOPEN_PAUSE_S), REPEAT_PAUSE_S_MAX)
        return pause_s

    def after(self, lost: ConnectionLost) -> Any:
        """What to send on the next connection.

        Raises BackendLost if it must not be sent again, or if that was tried for long enough.
        """
        if self._started_s is None:
            self._started_s = lost.started_s
        if lost.may_be_done:
            if not is_repeatable(self._command):
                raise unknown_fate(self._endpoint, self._command, lost)
            self._may_be_done = True
        if time.monotonic() > self._deadline_s:
            raise BackendLost(f"{self._endpoint.shown}: {lost.reason}, again and again")
        return still_to_wait(self._command, time.monotonic() - self._started_s)

    def settle(self, outcome: Any) -> Any:
        """The reply for the caller. Raises StaleReceipt if that is the outcome."""
        if self._may_be_done:
            outcome = settle_repeated(self._command, outcome)
        if isinstance(outcome, StaleReceipt):
            raise outcome
        return outcome
