"""A client's session of our wire, without I/O: commands become frames, and answers find callers.

`channel` moves its bytes for threads that block, `asynchronous` for callers that await. Both have a
`ClientCall` of their own for each request, which says how its caller is woken.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.backends.remote.retry import ConnectionLost
from penstock.errors import InvalidField, PenstockError, UnsupportedOperation
from penstock.service import Pull, PushMany
from penstock.wire.frames.bodies import DECODE_REPLY, as_sent, encode_command
from penstock.wire.frames.frames import (
    COMMANDS_KNOWN_MIN,
    ERROR,
    GOODBYE,
    KIND_OF,
    REQUEST_MAX,
    STATUS,
    Body,
    Frame,
    FrameDecoder,
    Hello,
    Welcome,
    decode_answer,
    decode_status,
    decode_welcome,
    encode_hello,
    pack,
    server_limits,
)

SOFTWARE: Final = "penstock python"
_NO_ANSWER: Final = 0
_SILENT_TICKS_MAX: Final = 3


class ClientCall:
    """One request that waits for its answer."""

    __slots__ = ("body", "decode", "done", "is_pull", "kind", "number", "sent", "started_s")

    # Set by `prepare`.
    number: int
    is_pull: bool
    decode: Callable[[Body], Any]
    # Set with `kind`, if an answer comes.
    body: Body

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        # Whether the request may have left this process.
        self.sent = True
        # Whether the answer has come, or the connection is lost.
        self.done = False
        self.kind = _NO_ANSWER

    def wake(self) -> None:
        """Wakes the caller, because the call is done."""
        raise NotImplementedError


class ClientSession:
    """The state of one connection: the requests without an answer, and what the server said."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self.decoder = FrameDecoder("server", server_limits())
        # What the server said of itself; every request comes after it.
        self.welcome: Welcome | None = None
        # The error with which the server ended the session.
        self.refused: PenstockError | None = None
        # Why the connection was lost; it stays lost.
        self.lost: str | None = None
        self.pending: dict[int, ClientCall] = {}
        # After its goodbye the server executes no request that it has not answered.
        self._goodbye_received = False
        self._endpoint = endpoint
        self._numbers = count(1)
        self._frame_bytes_max = 0
        self._unknown_commands: frozenset[type] = frozenset()
        self._silent_ticks = 0

    def hello(self) -> bytes:
        """The first frame of a client."""
        return encode_hello(Hello(SOFTWARE, self._endpoint.token))

    def prepare(self, call: ClientCall, command: Any) -> bytes:
        """The frame of a command, or of STATUS. The call is not yet one of `pending`.

        Raises UnsupportedOperation if the server is too old, InvalidField or MessageTooLarge.
        """
        number = call.number = self._next_number()
        call.is_pull = False
        if command is STATUS:
            call.decode = decode_status
            return pack(STATUS, number)
        kind = type(command)
        if kind in self._unknown_commands:
            raise self._too_new(kind)
        call.is_pull = kind is Pull
        sent = as_sent(command) if kind is PushMany else command
        call.decode = DECODE_REPLY[type(sent)]
        return encode_command(number, sent, self._frame_bytes_max)

    def _next_number(self) -> int:
        """The number of the next request: not 0, and not that of one without an answer."""
        number = next(self._numbers) & REQUEST_MAX
        while not number or number in self.pending:
            number = next(self._numbers) & REQUEST_MAX
        return number

    def receive(self, data: bytes) -> str | None:
        """Passes each answer to its call. Returns why the connection must be dropped, if it must.

        `refused` then has the error.
        """
        self._silent_ticks = 0
        pending = self.pending
        frames = self.decoder.feed(data)
        if self.welcome is None and frames:
            try:
                self._accept(frames.pop(0))
            except PenstockError as error:
                self.refused = error
                return str(error)
        for kind, number, body in frames:
            call = pending.pop(number, None)
            if call is not None:
                call.kind = kind
                call.body = body
                call.done = True
                call.wake()
            elif not number:
                self._note(kind, body)
        if self.decoder.error is not None:
            self.refused = self.decoder.error
            return str(self.refused)
        return None

    def _accept(self, frame: Frame) -> None:
        """Reads the WELCOME. Raises PenstockError if the server refuses this client.

        Raises InvalidField if it runs with other options than the caller named.
        """
        welcome = decode_welcome(frame)
        _check_options(self._endpoint, welcome)
        self._frame_bytes_max = welcome.frame_bytes_max
        self._unknown_commands = _unknown_commands(welcome)
        self.welcome = welcome

    def _note(self, kind: int, body: Body) -> None:
        """Reads a frame about the connection: a goodbye, or an error that ends it."""
        if kind == GOODBYE:
            self._goodbye_received = True
        elif kind == ERROR:
            try:
                decode_answer(kind, body, decode_status)
            except PenstockError as error:
                self.refused = error

    def outcome(self, call: ClientCall) -> Any:
        """The reply to a call that is done.

        Raises what the server answered, or ConnectionLost if it did not.
        """
        if call.kind != _NO_ANSWER:
            return decode_answer(call.kind, call.body, call.decode)
        if call.sent and self.refused is not None:
            raise self.refused
        may_be_done = call.sent and not self._goodbye_received
        raise ConnectionLost(may_be_done, self.lost or "it was closed", call.started_s)

    def silence(self) -> bytes:
        """What to send after a third of the timeout without bytes; nothing after three of them."""
        self._silent_ticks += 1
        if self._silent_ticks >= _SILENT_TICKS_MAX:
            return b""
        return pack(STATUS, self._next_number())

    def lose(self, reason: str) -> None:
        """The connection is lost: wakes every caller. Safe if many threads call it."""
        if self.lost is None:
            self.lost = reason
        while self.pending:
            with suppress(KeyError):
                _, call = self.pending.popitem()
                call.done = True
                call.wake()

    def _too_new(self, kind: type) -> UnsupportedOperation:
        """The error for a command that an older server does not know."""
        software = "" if self.welcome is None else f" ({self.welcome.software})"
        return UnsupportedOperation(
            f"{self._endpoint.shown}: the server{software} is older than this client and does "
            f"not know {kind.__name__}; restart it with this version of Penstock"
        )


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
