"""A queue service at the other end of a socket, for callers who may block.

There is no thread and no event loop behind it. Each caller writes its own frame; of those who wait
for answers one reads the socket for all of them, and hands that on when its own answer has come:

    caller A   write · read: B's answer, A's answer · hand on
    caller B   write · sleep ······ decode
    caller C   write · sleep ······················ read: C's answer

So one caller alone pays for two system calls and nothing else, and many share one connection.

When the connection breaks, what was never sent is sent again on a new one, and so is what may be
done twice without harm (`is_repeatable`). For the rest nobody knows whether it was done:
`BackendLost`. docs/daemon.md is the contract.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar, cast

from penstock.errors import (
    BackendLost,
    EngineClosed,
    InvalidField,
    PenstockError,
    StaleReceipt,
)
from penstock.forked import start_over_when_forked
from penstock.service import (
    REDRIVE_MAX,
    Batch,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DescribeQueue,
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
from penstock.wire.frames.bodies import DECODE_REPLY, encode_command
from penstock.wire.frames.frames import (
    ERROR,
    GOODBYE,
    REQUEST_MAX,
    STATUS,
    Body,
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

if TYPE_CHECKING:
    import ssl

R = TypeVar("R")
TIMEOUT_S: Final = 30.0
# How long a broken connection may take to come back before a caller is told.
PATIENCE_S: Final = 10.0
REDIAL_S: Final = 0.02
SOFTWARE: Final = "penstock python"
# Less than what the C library takes from the system, and gives back, each time.
_RECEIVE_BYTES: Final = 64 * 1024
_RECEIVE_BYTES_MAX: Final = 1024 * 1024
# After so long without use it is worth a system call to see whether the server has gone.
_FRESH_S: Final = 1.0
_LOST: Final = 0
_TIMEVAL: Final = struct.Struct("ll")


class ServerEndpoint(Protocol):
    """Where a server is, and how to get a socket to it."""

    shown: str
    token: str | None
    tls: "ssl.SSLContext | None"
    server_name: str | None
    # What the server's store must be running with, as far as the caller has said.
    options: Mapping[str, str]
    # For how long a server that hangs up at once is dialled again.
    patience_s_min: float

    def dial(self, patience_s: float) -> socket.socket:
        """A connected socket. Raises BackendLost, or why the server cannot be started."""
        ...


class TcpEndpoint:
    """A server at a host and port."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        tls: "ssl.SSLContext | None" = None,
    ) -> None:
        self.shown = f"penstock://{host}:{port}"
        self.token = token
        self.tls = tls
        self.server_name = host if tls is not None else None
        self.options: Mapping[str, str] = {}
        self.patience_s_min = 0.0
        self._address = (host, port)

    def dial(self, patience_s: float) -> socket.socket:
        """A connected socket; tries again until the patience is over. Raises BackendLost."""
        deadline_s = time.monotonic() + patience_s
        pause_s = 0.02
        while True:
            try:
                link = socket.create_connection(self._address, timeout=max(patience_s, 10.0))
            except (OSError, UnicodeError) as error:
                if time.monotonic() + pause_s > deadline_s:
                    said = getattr(error, "strerror", None) or str(error)
                    raise BackendLost(f"{self.shown}: cannot be reached: {said}") from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
            else:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return link


class ConnectionLost(Exception):
    """The connection broke under a request; `may_be_done` if the server may have seen all of it."""

    def __init__(self, channel: object, may_be_done: bool, reason: str, started_s: float) -> None:
        super().__init__(reason)
        self.channel = channel
        self.may_be_done = may_be_done
        self.reason = reason
        self.started_s = started_s


_ALWAYS_REPEATABLE: Final = frozenset(
    {Peek, Stats, DescribeQueue, ListQueues, History, CreateQueue, ConfigureQueue}
    | {Pull, Delete, Extend, Release}
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


def still_to_wait(command: Any, started_s: float) -> Any:
    """A pull that is sent again waits only for what is left of its time."""
    if type(command) is not Pull or not command.wait_ms:
        return command
    left_ms = max(0, command.wait_ms - round((time.monotonic() - started_s) * 1_000))
    return Pull(
        command.queue,
        command.limit,
        command.visibility_ms,
        left_ms,
        command.attempt_id,
        command.holder,
    )


def settle_repeated(command: object, outcome: Any) -> Any:
    """What a repeated request came to: a release that finds its claim ended has been done."""
    if isinstance(outcome, StaleReceipt) and type(command) is Release:
        return None
    if isinstance(command, Batch) and isinstance(outcome, list):
        return [
            settle_repeated(item, each) for item, each in zip(command.items, outcome, strict=True)
        ]
    return outcome


def check_welcome(endpoint: ServerEndpoint, welcome: Welcome) -> None:
    """Refuses a server whose store runs otherwise than the caller asked. Raises InvalidField."""
    for name, wanted in endpoint.options.items():
        found = welcome.options.get(name)
        if found is not None and found != wanted:
            raise InvalidField(
                f"url: {name}={wanted} was asked for, but the daemon of {endpoint.shown} runs "
                f"with {name}={found}; leave the option out, or stop the daemon first"
            )


class _Call:
    __slots__ = ("body", "done", "kind", "signal")

    def __init__(self) -> None:
        self.done = False
        self.kind = _LOST
        self.body: Body = b""
        self.signal: threading.Lock | None = None


class Channel:
    """One connection, shared by any number of threads; once lost it stays lost."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float, patience_s: float) -> None:
        self.lost: str | None = None
        self.refused: PenstockError | None = None
        self._endpoint = endpoint
        self._link = endpoint.dial(patience_s)
        self._decoder = FrameDecoder("server", server_limits())
        self._requests = count(1)
        self._pending: dict[int, _Call] = {}
        self._followers: dict[int, _Call] = {}
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._said_goodbye = False
        self._heard = 0
        self._heard_before = -1
        self._silent_ticks = 0
        self._used_s = time.monotonic()
        try:
            self._link.settimeout(timeout_s)
            self.welcome = self._greet()
            self._link.settimeout(None)
            # The system's own timeouts: those of Python would cost a system call each time.
            tick_s = timeout_s / 3
            tick = _TIMEVAL.pack(int(tick_s), int(tick_s % 1 * 1_000_000) or 1)
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            patience = _TIMEVAL.pack(int(timeout_s) or 1, 0)
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        except BaseException:
            self._link.close()
            raise

    def _greet(self) -> Welcome:
        shown = self._endpoint.shown
        try:
            self._link.sendall(encode_hello(Hello(SOFTWARE, self._endpoint.token)))
            while True:
                data = self._link.recv(_RECEIVE_BYTES)
                frames = self._decoder.feed(data)
                if frames:
                    break
                if self._decoder.error is not None:
                    raise self._decoder.error
                if not data:
                    raise BackendLost(f"{shown}: hung up before it said anything")
        except OSError as error:
            said = error.strerror or str(error)
            raise BackendLost(f"{shown}: broke off before it said anything: {said}") from None
        welcome = decode_welcome(frames[0])
        check_welcome(self._endpoint, welcome)
        return welcome

    def exchange(self, command: Command[R]) -> R:
        """Sends a command and waits for its reply.

        Raises ConnectionLost, or what the server raised.
        """
        request = next(self._requests) & REQUEST_MAX
        if not request or request in self._pending:
            return self.exchange(command)
        frame = encode_command(request, command, self.welcome.frame_bytes_max)
        return cast(R, self.request(request, frame, DECODE_REPLY[type(command)]))

    def status(self) -> dict[str, Any]:
        """What the server says of itself."""
        request = next(self._requests) & REQUEST_MAX
        found: dict[str, Any] = self.request(request, pack(STATUS, request), decode_status)
        return found

    def request(self, request: int, frame: bytes, decode: Callable[[Body], Any]) -> Any:
        """Sends a frame and waits for the answer to it."""
        started_s = time.monotonic()
        call = _Call()
        sent = False
        self._pending[request] = call
        with self._sending:
            try:
                if started_s - self._used_s > _FRESH_S:
                    self._look_for_end()
                self._used_s = started_s
                if self.lost is None:
                    self._link.sendall(frame)
                    sent = True
            except OSError as error:
                # An incomplete frame was not obeyed, and what follows would not be understood.
                self._drop(f"the connection broke: {error.strerror or error}", "sender")
            except BaseException:
                self._drop("a caller was interrupted while it wrote", "sender")
                raise
        if not sent:
            self._pending.pop(request, None)
            raise ConnectionLost(self, False, cast(str, self.lost), started_s)
        try:
            # Nearly always nobody else is reading; the rest of the dance is for many threads.
            if self._reading.acquire(False):
                self._lead(call)
            else:
                self._follow(request, call)
        except BaseException:
            # It may have been about to read, or to hand that on: nobody else knows.
            self._drop("a caller was interrupted", "other")
            raise
        if call.kind == _LOST:
            if self.refused is not None:
                raise self.refused
            raise ConnectionLost(self, not self._said_goodbye, cast(str, self.lost), started_s)
        return decode_answer(call.kind, call.body, decode)

    def _lead(self, call: _Call) -> None:
        """Reads the socket for everyone until this call's answer has come."""
        try:
            while not call.done:
                self._read()
        except BaseException:
            self._drop("a caller was interrupted while it read", "reader")
            raise
        finally:
            self._reading.release()
            if self._followers:
                self._promote()

    def _follow(self, request: int, call: _Call) -> None:
        """Sleeps until the answer has come, or until it is our turn to read."""
        call.signal = threading.Lock()
        call.signal.acquire()
        try:
            while not call.done:
                # In this order: whoever stops reading after this will find us.
                self._followers[request] = call
                if self._reading.acquire(False):
                    self._lead(call)
                elif not call.done:
                    call.signal.acquire()
        except BaseException:
            self._drop("a caller was interrupted while it waited", "other")
            raise
        finally:
            self._followers.pop(request, None)
            if call.done and self._followers and not self._reading.locked():
                self._promote()

    def _promote(self) -> None:
        """Wakes one of those who wait, so that somebody reads."""
        while True:
            try:
                _, call = self._followers.popitem()
            except KeyError:
                return
            if not call.done:
                _wake(call)
                return

    def _read(self) -> None:
        missing = self._decoder.missing_bytes
        size = _RECEIVE_BYTES if missing < _RECEIVE_BYTES else min(missing, _RECEIVE_BYTES_MAX)
        try:
            data = self._link.recv(size)
        except BlockingIOError:
            self._check_silence()
            return
        except OSError as error:
            self._drop(f"the connection broke: {error.strerror or error}", "reader")
            return
        if not data:
            self._drop("the server closed the connection", "reader")
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Hands each answer to whoever waits for it."""
        self._heard += 1
        pending = self._pending
        for kind, request, body in self._decoder.feed(data):
            call = pending.pop(request, None)
            if call is not None:
                call.kind = kind
                call.body = body
                call.done = True
                if call.signal is not None:
                    _wake(call)
            elif not request:
                self._dispatch(kind, body)
        if self._decoder.error is not None:
            self.refused = self._decoder.error
            self._drop(str(self.refused), "reader")

    def _dispatch(self, kind: int, body: Body) -> None:
        """Takes in what the server says of the connection itself."""
        if kind == GOODBYE:
            self._said_goodbye = True
        elif kind == ERROR:
            try:
                decode_answer(kind, body, decode_status)
            except PenstockError as error:
                self.refused = error

    def _check_silence(self) -> None:
        """Asks a server that has been silent for a while whether it is there; then gives it up."""
        if self._heard != self._heard_before:
            self._heard_before = self._heard
            self._silent_ticks = 0
        self._silent_ticks += 1
        if self._silent_ticks >= 3:
            self._drop("the server has stopped answering", "reader")
        elif self._sending.acquire(False):
            try:
                self._link.sendall(pack(STATUS, next(self._requests) & REQUEST_MAX))
            except OSError:
                pass  # the next read finds out
            finally:
                self._sending.release()

    def _look_for_end(self) -> None:
        """Notices a server that went away while nobody was looking, before anything is sent."""
        if not self._reading.acquire(False):
            return
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            while self.lost is None:
                if self._link.recv(1, flags):
                    self._take(self._link.recv(_RECEIVE_BYTES))
                else:
                    self._drop("the server closed the connection", "both")
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(f"the connection broke: {error.strerror or error}", "both")
        finally:
            self._reading.release()

    def _drop(self, reason: str, role: str) -> None:
        """Gives the connection up, for everyone. The socket is closed when nobody uses it."""
        if self.lost is None:
            self.lost = reason
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        while self._pending:
            with suppress(KeyError):
                _, call = self._pending.popitem()
                call.done = True
                if call.signal is not None:
                    _wake(call)
        # Closing under somebody's hands would let them read from a stranger's new socket.
        free_to_send = role in ("sender", "both") or self._sending.acquire(role == "reader")
        free_to_read = role in ("reader", "both") or self._reading.acquire(False)
        if free_to_send and free_to_read:
            self._link.close()
        if free_to_send and role in ("reader", "other"):
            self._sending.release()
        if free_to_read and role in ("sender", "other"):
            self._reading.release()

    def close(self, reason: str) -> None:
        """Ends the connection; whoever waits is told it was lost."""
        with self._sending:
            self._drop(reason, "sender")

    def abandon(self) -> None:
        """Lets go of a socket that belongs to the parent of this process."""
        self.lost = "this process was forked"
        self._link.close()


def _wake(call: _Call) -> None:
    # It may have been woken already, to read, and not have got round to it.
    with suppress(RuntimeError):
        cast(threading.Lock, call.signal).release()


class Remote:
    """A `QueueService` at the other end of a socket, safe for many threads."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self,
        endpoint: ServerEndpoint,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._opening = threading.Lock()
        self._closed = False
        self._channel: Channel | None = self._open(0)
        start_over_when_forked(self)

    def _open(self, patience_s: float) -> Channel:
        deadline_s = time.monotonic() + max(patience_s, self._endpoint.patience_s_min)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return Channel(self._endpoint, self._timeout_s, min(left_s, patience_s))
            except BackendLost:
                if time.monotonic() + REDIAL_S > deadline_s:
                    raise
            time.sleep(REDIAL_S)

    def execute(self, command: Command[R]) -> R:
        """Does what the command says, on a new connection if need be."""
        channel = self._channel
        if channel is None:
            channel = self._reopen(None)
        try:
            return channel.exchange(command)
        except ConnectionLost as lost:
            return cast(R, self._again(command, lost))

    def status(self) -> dict[str, Any]:
        """What the server says of itself. Raises BackendLost."""
        channel = self._channel or self._reopen(None)
        try:
            return channel.status()
        except ConnectionLost as lost:
            return cast("dict[str, Any]", self._again(STATUS, lost))

    def _again(self, command: Any, lost: ConnectionLost) -> Any:
        """Sends on a new connection what the old one lost, if that can do no harm."""
        repeated = False
        started_s = lost.started_s
        deadline_s = time.monotonic() + self._patience_s
        while True:
            if self._closed:
                raise EngineClosed(f"{self._endpoint.shown}: was closed")
            if lost.may_be_done:
                if not is_repeatable(command):
                    raise unknown_fate(self._endpoint, command, lost) from None
                repeated = True
            if time.monotonic() > deadline_s:
                raise BackendLost(f"{self._endpoint.shown}: {lost.reason}, again and again")
            channel = self._reopen(lost.channel)
            try:
                if command is STATUS:
                    return channel.status()
                outcome = channel.exchange(still_to_wait(command, started_s))
                return settle_repeated(command, outcome) if repeated else outcome
            except StaleReceipt as stale:
                if repeated and settle_repeated(command, stale) is None:
                    return None
                raise
            except ConnectionLost as once_more:
                lost = once_more

    def _reopen(self, lost: object) -> Channel:
        """The channel that took the place of the lost one; the first who asks opens it."""
        with self._opening:
            if self._closed:
                raise EngineClosed(f"{self._endpoint.shown}: was closed")
            channel = self._channel
            if channel is not None and channel is not lost and channel.lost is None:
                return channel
            self._channel = self._open(self._patience_s)
            return self._channel

    def close(self) -> None:
        """Ends the connection; waiting commands fail with EngineClosed."""
        self._closed = True
        with self._opening:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close("it was closed here")

    def start_over(self) -> None:
        """In the child of a fork: the connection is the parent's, as the locks' holders were."""
        self._opening = threading.Lock()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()
