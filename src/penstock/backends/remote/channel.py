"""One connection that blocking callers share, without a thread or an event loop of its own.

Each caller writes its own frame. One of the callers that wait for answers reads the socket for all
of them. When it has its own answer, it wakes another one to read:

    caller A   write · read: B's answer, A's answer · wake C
    caller B   write · sleep ······ decode
    caller C   write · sleep ······················ read: C's answer

So a single caller needs two system calls for each request, and many callers share one connection.
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, Final

from penstock.backends.remote.endpoints import ServerEndpoint
from penstock.backends.remote.session import ClientCall, ClientSession
from penstock.errors import BackendLost
from penstock.wire.frames.frames import Welcome

# Small enough that the C library serves it from its heap, without a system call for each read.
_RECEIVE_BYTES: Final = 64 * 1024
_RECEIVE_BYTES_MAX: Final = 1024 * 1024
# After this time without use, one more system call checks whether the server has closed it.
_FRESH_S: Final = 1.0
_TIMEVAL: Final = struct.Struct("ll")


class _BlockedCall(ClientCall):
    """A request of a thread; one that sleeps is woken by a lock."""

    __slots__ = ("signal",)

    signal: "threading.Lock | None"

    def wake(self) -> None:
        """Wakes the thread that made the call, if it sleeps."""
        if self.signal is not None:
            # It may have been woken already, in order to read, and not have run yet.
            with suppress(RuntimeError):
                self.signal.release()


class _SocketOwner:
    """Closes a socket when it is shut and no call uses it any more.

    If it were closed earlier, a call could read from the next socket that gets the same number.
    There is no lock: a call adds itself to `users` before it looks whether the socket is shut, and
    `shut` marks it before it looks for users, so at least one of the two sees the other. A call
    that leaves `users` when the socket is shut calls `close_if_unused`. Closing twice is harmless.
    """

    __slots__ = ("_link", "is_shut", "users")

    def __init__(self, link: socket.socket) -> None:
        self.is_shut = False
        self.users: set[ClientCall] = set()
        self._link = link

    def shut(self) -> None:
        """Ends the connection: calls that read or write get an error or the end of the stream."""
        self.is_shut = True
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """Closes the socket, which is shut, unless a call uses it."""
        if not self.users:
            self._link.close()

    def close(self) -> None:
        """Closes the socket, which no call uses, without ending the connection."""
        self.is_shut = True
        self._link.close()


class Channel:
    """One connection, shared by any number of threads; once lost it stays lost."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float, connect_s: float) -> None:
        self._session = ClientSession(endpoint)
        self._shown = endpoint.shown
        self._link = endpoint.open(connect_s)
        self._owner = _SocketOwner(self._link)
        self._sleeping: dict[int, _BlockedCall] = {}
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._used_s = time.monotonic()
        try:
            self._link.settimeout(timeout_s)
            self.welcome = self._handshake()
            self._link.settimeout(None)
            # The system's own timeouts: those of Python would cost a system call each time.
            tick_s = timeout_s / 3
            tick = _TIMEVAL.pack(int(tick_s), int(tick_s % 1 * 1_000_000) or 1)
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            send_timeout = _TIMEVAL.pack(int(timeout_s) or 1, 0)
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        except BaseException:
            self._link.close()
            raise

    @property
    def lost(self) -> str | None:
        """Why the connection was lost."""
        return self._session.lost

    def _handshake(self) -> Welcome:
        session = self._session
        try:
            self._link.sendall(session.hello())
            while session.welcome is None:
                data = self._link.recv(_RECEIVE_BYTES)
                session.receive(data)
                if session.refused is not None:
                    raise session.refused
                if not data:
                    raise BackendLost(f"{self._shown}: closed the connection before its WELCOME")
        except OSError as error:
            reason = error.strerror or str(error)
            raise BackendLost(f"{self._shown}: no WELCOME came: {reason}") from None
        return session.welcome

    def exchange(self, command: Any) -> Any:
        """Sends a command, or STATUS, and waits for its reply.

        Raises ConnectionLost, UnsupportedOperation if the server is too old, or what the server
        raised.
        """
        call = _BlockedCall(time.monotonic())
        call.signal = None
        frame = self._session.prepare(call, command)
        owner = self._owner
        try:
            owner.users.add(call)
            if owner.is_shut or not self._send(call, frame):
                call.sent = False
            # Nearly always no other thread is reading.
            elif self._reading.acquire(False):
                self._read_until_answered(call)
            else:
                self._sleep_until_answered(call)
        except BaseException:
            # This thread may have been about to read, or to wake the next reader.
            self._drop("a caller was interrupted")
            raise
        finally:
            owner.users.discard(call)
            if owner.is_shut:
                owner.close_if_unused()
        return self._session.outcome(call)

    def _send(self, call: ClientCall, frame: bytes) -> bool:
        """Whether the whole frame was sent; if not, the server did not execute it."""
        session = self._session
        session.pending[call.number] = call
        with self._sending:
            try:
                if call.started_s - self._used_s > _FRESH_S:
                    self._check_closed()
                self._used_s = call.started_s
                if session.lost is None:
                    self._link.sendall(frame)
                    return True
            except OSError as error:
                # What follows an incomplete frame could not be decoded.
                self._drop(f"the connection broke: {error.strerror or error}")
            except BaseException:
                # Before another caller writes behind half a frame.
                self._drop("a caller was interrupted while it wrote")
                raise
        session.pending.pop(call.number, None)
        return False

    def _read_until_answered(self, call: ClientCall) -> None:
        """Reads the socket for all callers until this call's answer has come."""
        try:
            while not call.done:
                self._read()
        except BaseException:
            # Before another caller reads: the decoder may have lost bytes.
            self._drop("a caller was interrupted while it read")
            raise
        finally:
            self._reading.release()
            if self._sleeping:
                self._wake_next_reader()

    def _sleep_until_answered(self, call: _BlockedCall) -> None:
        """Sleeps until the answer has come; reads for all callers if it is woken for that."""
        call.signal = threading.Lock()
        call.signal.acquire()
        try:
            while not call.done:
                # Before the check: a thread that stops reading after it finds this call.
                self._sleeping[call.number] = call
                if self._reading.acquire(False):
                    self._read_until_answered(call)
                elif not call.done:
                    call.signal.acquire()
        finally:
            self._sleeping.pop(call.number, None)
            if call.done and self._sleeping and not self._reading.locked():
                self._wake_next_reader()

    def _wake_next_reader(self) -> None:
        """Wakes one of the sleeping callers, which then reads."""
        while True:
            try:
                _, call = self._sleeping.popitem()
            except KeyError:
                return
            if not call.done:
                call.wake()
                return

    def _read(self) -> None:
        missing = self._session.decoder.missing_bytes
        size = _RECEIVE_BYTES if missing < _RECEIVE_BYTES else min(missing, _RECEIVE_BYTES_MAX)
        try:
            data = self._link.recv(size)
        except BlockingIOError:
            self._check_silence()
            return
        except OSError as error:
            self._drop(f"the connection broke: {error.strerror or error}")
            return
        if not data:
            self._drop("the server closed the connection")
            return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        fault = self._session.receive(data)
        if fault is not None:
            self._drop(fault)

    def _check_silence(self) -> None:
        """Asks the server for an answer, after a tick without bytes; drops one that gives none."""
        frame = self._session.silence()
        if not frame:
            self._drop("the server has stopped answering")
        elif self._sending.acquire(False):
            try:
                self._link.sendall(frame)
            except OSError:
                pass  # the next read raises it again
            finally:
                self._sending.release()

    def _check_closed(self) -> None:
        """Checks whether the server closed the connection while no call was reading."""
        if not self._reading.acquire(False):
            return
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            while self._session.lost is None:
                if self._link.recv(1, flags):
                    self._receive(self._link.recv(_RECEIVE_BYTES))
                else:
                    self._drop("the server closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(f"the connection broke: {error.strerror or error}")
        finally:
            self._reading.release()

    def _drop(self, reason: str) -> None:
        """Drops the connection for every caller, and wakes those that wait."""
        # Before the socket is shut: a caller that finds it shut says why.
        self._session.lost = self._session.lost or reason
        self._owner.shut()
        self._session.lose(reason)

    def close(self, reason: str) -> None:
        """Ends the connection; calls that wait raise ConnectionLost."""
        self._drop(reason)

    def abandon(self) -> None:
        """In the child of a fork: closes its copy of the socket; the parent's stays connected."""
        self._session.lost = "this process was forked"
        self._owner.close()
