"""A queue service at the other end of a socket, for blocking callers.

It uses one `Channel`, and opens another one when that is lost; `retry` has the rules for what is
sent again then.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar, cast

from penstock.backends.remote.channel import Channel
from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.backends.remote.pulls import add_rest
from penstock.backends.remote.retry import (
    RECONNECT_S,
    TIMEOUT_S,
    ConnectionLost,
    opened,
    repeated,
)
from penstock.errors import EngineClosed
from penstock.forked import start_over_when_forked
from penstock.service import REDRIVE_MAX, Command, Pull
from penstock.steps import Calls, run_calls
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
        self.endpoint: Final = endpoint
        self.reconnect_s: Final = reconnect_s
        self._timeout_s = timeout_s
        self._opening = threading.Lock()
        self._closed = False
        self._channel: Channel | None = run_calls(opened(self, 0))
        start_over_when_forked(self)

    @property
    def server_options(self) -> Mapping[str, str]:
        """The options of the server's last WELCOME."""
        channel = self._channel or self.reopen(None)
        return channel.welcome.options

    def execute(self, command: Command[R]) -> R:
        """Executes a command, on a new connection if the last one was lost."""
        channel = self._channel
        if channel is None:
            channel = self.reopen(None)
        try:
            reply = channel.exchange(command)
        except ConnectionLost as lost:
            return cast(R, run_calls(repeated(self, command, channel, lost)))
        if type(command) is Pull and command.limit > 1:
            run_calls(add_rest(channel, command, reply))
        return cast(R, reply)

    def status(self) -> dict[str, Any]:
        """The server's own figures. Raises BackendLost."""
        request: Any = STATUS
        status: dict[str, Any] = self.execute(request)
        return status

    def check_open(self) -> None:
        """Raises EngineClosed if this client was closed."""
        if self._closed:
            raise EngineClosed(f"{self.endpoint.shown}: was closed")

    def connect(self, connect_s: float) -> Channel:
        """A new channel. Raises BackendLost, or why the server refuses."""
        return Channel(self.endpoint, self._timeout_s, connect_s)

    def reopen(self, lost: Channel | None) -> Channel:
        """The channel that replaces the lost one; the first caller opens it."""
        with self._opening:
            self.check_open()
            channel = self._channel
            if channel is not None and channel is not lost and channel.lost is None:
                return channel
            opening: Calls[Channel] = opened(self, self.reconnect_s)
            self._channel = channel = run_calls(opening)
            return channel

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

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
