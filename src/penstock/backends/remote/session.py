"""A client's session of our wire, without I/O: commands become frames, and frames are read.

`channel` moves its bytes for threads that block, `asynchronous` for callers that await. Each of
them passes the answers to those who wait.
"""

from collections.abc import Callable, Container
from itertools import count
from typing import Any, Final

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.errors import InvalidField, PenstockError, UnsupportedOperation
from penstock.service import Command, PushMany
from penstock.wire.frames.bodies import DECODE_REPLY, as_sent, encode_command
from penstock.wire.frames.frames import (
    COMMANDS_KNOWN_MIN,
    ERROR,
    GOODBYE,
    KIND_OF,
    REQUEST_MAX,
    Body,
    Frame,
    FrameDecoder,
    Hello,
    Welcome,
    decode_answer,
    decode_status,
    decode_welcome,
    encode_hello,
    server_limits,
)

SOFTWARE: Final = "penstock python"


class ClientSession:
    """The state of one connection: its numbers of requests, and what the server said of itself."""

    # Set by `accept`, before the first request.
    welcome: Welcome

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self.decoder = FrameDecoder("server", server_limits())
        # The error with which the server ended the session.
        self.refused: PenstockError | None = None
        # After its goodbye the server executes no request that it has not answered.
        self.goodbye_received = False
        self._endpoint = endpoint
        self._numbers = count(1)
        self._unknown_commands: frozenset[type] = frozenset()

    def hello(self) -> bytes:
        """The first frame of a client."""
        return encode_hello(Hello(SOFTWARE, self._endpoint.token))

    def accept(self, frame: Frame) -> None:
        """Reads the WELCOME. Raises PenstockError if the server refuses this client.

        Raises InvalidField if it runs with other options than the caller named.
        """
        welcome = decode_welcome(frame)
        _check_options(self._endpoint, welcome)
        self.welcome = welcome
        self._unknown_commands = _unknown_commands(welcome)

    def next_number(self, waiting: Container[int], abandoned: Container[int] = ()) -> int:
        """The number of the next request: not 0, and not that of one without an answer."""
        number = next(self._numbers) & REQUEST_MAX
        while not number or number in waiting or number in abandoned:
            number = next(self._numbers) & REQUEST_MAX
        return number

    def encode(self, number: int, command: Command[Any]) -> tuple[bytes, Callable[[Body], Any]]:
        """The frame of a command, and what decodes the body of its reply.

        Raises UnsupportedOperation if the server is too old, InvalidField or MessageTooLarge.
        """
        if type(command) in self._unknown_commands:
            raise _too_new(self._endpoint, self.welcome, command)
        sent = as_sent(command) if type(command) is PushMany else command
        frame = encode_command(number, sent, self.welcome.frame_bytes_max)
        return frame, DECODE_REPLY[type(sent)]

    def note(self, kind: int, body: Body) -> None:
        """Reads a frame about the connection: a goodbye, or an error that ends it."""
        if kind == GOODBYE:
            self.goodbye_received = True
        elif kind == ERROR:
            try:
                decode_answer(kind, body, decode_status)
            except PenstockError as error:
                self.refused = error


def _check_options(endpoint: ServerEndpoint, welcome: Welcome) -> None:
    """Checks that the store runs with the options that the caller named. Raises InvalidField."""
    for name, wanted in endpoint.options.items():
        actual = welcome.options.get(name)
        if actual is not None and actual != wanted:
            raise InvalidField(
                f"url: {name}={wanted} was asked for, but the process that holds {endpoint.shown} "
                f"runs with {name}={actual}; leave the option out, or stop that process first"
            )


def _unknown_commands(welcome: Welcome) -> frozenset[type]:
    """The commands that this server does not know, by the options of its WELCOME."""
    text = welcome.options.get("commands", "")
    is_number = text.isascii() and text.isdigit() and len(text) <= 3
    known = int(text) if is_number else COMMANDS_KNOWN_MIN
    return frozenset(command for command, kind in KIND_OF.items() if kind > known)


def _too_new(endpoint: ServerEndpoint, welcome: Welcome, command: object) -> UnsupportedOperation:
    """The error for a command that an older server does not know."""
    return UnsupportedOperation(
        f"{endpoint.shown}: the server ({welcome.software}) is older than this client and does "
        f"not know {type(command).__name__}; restart it with this version of Penstock"
    )
