"""The parent's side of a child process that runs one task at a time and can be killed.

Frames on a socket pair, each four bytes of length and then JSON:

    to the child      ChildStart, then any number of ChildRequest
    from the child    ChildReply: ready or failed, then for each request any number of deadline,
                      one done

A child is another Python that has imported the app: it shares nothing with the worker but the
socket, and ends when that is closed.
"""

import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from penstock.service import Claim
from penstock.tasks.envelope import Failure
from penstock.tasks.errors import TaskTimeout
from penstock.tasks.running import HeldTask, TaskOutcome
from penstock.tasks.worker.endings import ending_of

START_S_MAX: Final = 60.0
FRAME_BYTES_MAX: Final = 128 << 20
_LENGTH: Final = struct.Struct(">I")


class ChildStart(msgspec.Struct, frozen=True):
    """The store of the child's app. It may have a password, so it is in no list of processes."""

    url: str


class ChildRequest(msgspec.Struct, frozen=True):
    """A task for the child: the body of its message, and the other fields of its context."""

    id: str
    queue: str
    body: bytes
    attributes: dict[str, str]
    timeout_ms: int | None


class ChildReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from the child: it is ready, a deadline has moved, or the task has ended.

    `failed` with a failure means that it cannot import the app.
    """

    kind: str
    left_ms: int = 0
    value: bytes = b""
    failure: Failure | None = None


_replies: Final = msgspec.json.Decoder(ChildReply)
starts: Final = msgspec.json.Decoder(ChildStart)
requests: Final = msgspec.json.Decoder(ChildRequest)


class ChildEnded(Exception):
    """The child has ended although its task has not."""


class TaskChild:
    """One child process, for one thread of the worker."""

    def __init__(self, app: str, url: str) -> None:
        """Starts it; it imports the app. Raises ChildEnded, and leaves no process, if it fails."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        module = "penstock.tasks.worker.child"
        command = [sys.executable, "-m", module, app, str(theirs.fileno())]
        with theirs:
            # A session of its own: a signal to the worker's group, such as Ctrl-C, does not end
            # it, and killing its group ends the programs that the task has started.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.is_over = False
        send_frame(ours, ChildStart(url))
        try:
            reply = self._receive(time.monotonic() + START_S_MAX)
            if reply is None:
                raise ChildEnded(f"the process for the task did not start within {START_S_MAX:g} s")
            if reply.failure is not None:
                raise ChildEnded(f"the process for the task did not start: {reply.failure.error}")
        except ChildEnded:
            self.close()
            raise

    def run(self, held: HeldTask, timeout_ms: int | None) -> TaskOutcome:
        """Runs a task. Raises TaskTimeout after killing the child, or ChildEnded."""
        claim = held.claim
        attributes = {k: v for k, v in claim.attributes.items() if isinstance(v, str)}
        request = ChildRequest(held.id, claim.queue, claim.body, attributes, timeout_ms)
        send_frame(self._socket, request)
        end_s = None if timeout_ms is None else time.monotonic() + timeout_ms / 1_000
        while True:
            reply = self._receive(end_s)
            if reply is None:
                self.kill()
                limit = 0 if timeout_ms is None else timeout_ms / 1_000
                raise TaskTimeout(
                    f"the task ran for longer than {limit:g} s, and its process was killed"
                )
            if reply.kind == "done":
                return TaskOutcome(reply.value or b"null", reply.failure)
            end_s = time.monotonic() + reply.left_ms / 1_000

    def kill(self) -> None:
        """Kills the child and the processes it has started; may be called in any thread."""
        self.is_over = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills it and waits for its end."""
        self.kill()
        self._process.wait()
        self._socket.close()

    @property
    def ending(self) -> str:
        """How the child has ended, for people."""
        code = self._process.wait()
        return f"{'ended with' if code >= 0 else 'was ended by'} {ending_of(code)}"

    def _receive(self, end_s: float | None) -> ChildReply | None:
        """The next reply; None if there is none by then. Raises ChildEnded."""
        if end_s is not None:
            # Not select, which refuses file descriptors above 1,023.
            readable = select.poll()
            readable.register(self._socket, select.POLLIN)
            if not readable.poll(max(0, math.ceil((end_s - time.monotonic()) * 1_000))):
                return None
        frame = receive_frame(self._socket)
        if frame is None:
            self.is_over = True
            raise ChildEnded(f"the process of the task {self.ending}")
        return _replies.decode(frame)


def send_frame(to: socket.socket, content: Any) -> None:
    """Sends one object."""
    body = msgspec.json.encode(content)
    with suppress(BrokenPipeError, ConnectionResetError):
        to.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(source: socket.socket) -> bytes | None:
    """The next frame; None if the other side has ended."""
    head = _receive_exactly(source, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    return _receive_exactly(source, size) if size <= FRAME_BYTES_MAX else None


def _receive_exactly(source: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = source.recv(min(size, 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def claim_of(request: ChildRequest) -> Claim:
    """A claim for the child's task; the worker holds the real one."""
    return Claim(
        request.id, request.queue, request.body, dict(request.attributes), 0, None, None, 0, 0, 1,
        None, None, None, "", 0, 0,
    )  # fmt: skip
