"""A queue service at the other end of a socket, for blocking callers.

It uses one `Channel`, and opens another one when that is lost; `retry` has the rules for what is
sent again then.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from penstock.backends.remote.channel import Channel
from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.backends.remote.pulls import rest_of
from penstock.backends.remote.retry import (
    RECONNECT_S,
    REOPEN_PAUSE_S,
    TIMEOUT_S,
    ConnectionLost,
    Repetition,
)
from penstock.errors import BackendLost, EngineClosed, PenstockError, StaleReceipt
from penstock.forked import start_over_when_forked
from penstock.service import REDRIVE_MAX, Claim, Command, Pull
from penstock.wire.frames.frames import STATUS

R = TypeVar("R")


class Remote:
    """A `QueueService` at the other end of a socket, safe for many threads."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self,
        endpoint: ServerEndpoint,
        *,
        timeout_s: float = TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """Connects. Raises BackendLost, or why the server refuses."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._opening = threading.Lock()
        self._closed = False
        self._channel: Channel | None = self._open(0)
        start_over_when_forked(self)

    @property
    def server_options(self) -> Mapping[str, str]:
        """The options of the server's last WELCOME."""
        channel = self._channel or self._reopen(None)
        return channel.welcome.options

    def _open(self, reconnect_s: float) -> Channel:
        deadline_s = time.monotonic() + max(reconnect_s, self._endpoint.reconnect_s_min)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return Channel(self._endpoint, self._timeout_s, min(left_s, reconnect_s))
            except BackendLost:
                if time.monotonic() + REOPEN_PAUSE_S > deadline_s:
                    raise
            time.sleep(REOPEN_PAUSE_S)

    def execute(self, command: Command[R]) -> R:
        """Executes a command, on a new connection if the last one was lost."""
        channel = self._channel
        if channel is None:
            channel = self._reopen(None)
        try:
            reply = channel.exchange(command)
        except ConnectionLost as lost:
            return cast(R, self._repeat(command, lost))
        if type(command) is Pull and command.limit > 1:
            self._pull_rest(channel, command, cast("list[Claim]", reply))
        return reply

    def _pull_rest(self, channel: Channel, pull: Pull, claims: list[Claim]) -> None:
        """Adds the claims that did not fit into one answer (`pulls`)."""
        answer = claims
        while (rest := rest_of(pull, answer, len(claims))) is not None:
            try:
                answer = channel.exchange(rest)
            except (PenstockError, ConnectionLost):
                return
            claims += answer

    def status(self) -> dict[str, Any]:
        """The server's own figures. Raises BackendLost."""
        channel = self._channel or self._reopen(None)
        try:
            return channel.status()
        except ConnectionLost as lost:
            return cast("dict[str, Any]", self._repeat(STATUS, lost))

    def _repeat(self, command: Any, lost: ConnectionLost) -> Any:
        """Sends a request again on a new connection, if `retry` allows it."""
        repetition = Repetition(self._endpoint, command, self._reconnect_s)
        while True:
            self._check_open()
            to_send = repetition.after(lost)
            time.sleep(repetition.pause_s())
            channel = self._reopen(lost.channel)
            try:
                if to_send is STATUS:
                    return channel.status()
                return repetition.outcome(channel.exchange(to_send))
            except StaleReceipt as stale:
                return repetition.outcome(stale)
            except ConnectionLost as lost_again:
                lost = lost_again

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self._endpoint.shown}: was closed")

    def _reopen(self, lost: object) -> Channel:
        """The channel that replaces the lost one; the first caller opens it."""
        with self._opening:
            self._check_open()
            channel = self._channel
            if channel is not None and channel is not lost and channel.lost is None:
                return channel
            self._channel = self._open(self._reconnect_s)
            return self._channel

    def close(self) -> None:
        """Ends the connection; waiting commands fail with EngineClosed."""
        self._closed = True
        with self._opening:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close("the client closed it")

    def start_over(self) -> None:
        """In the child of a fork: drops the parent's connection, and makes new locks."""
        self._opening = threading.Lock()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()
