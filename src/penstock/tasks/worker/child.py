"""The process in which a task runs that may have to be killed: `python -m … APP FD`.

The main thread runs one task after the other. A second thread reads the socket, so that this
process ends as soon as its worker has, whatever the task does.
"""

import os
import signal
import socket
import sys
import threading
from queue import SimpleQueue

from penstock.errors import PenstockError
from penstock.tasks.app import TaskApp
from penstock.tasks.envelope import Failure
from penstock.tasks.running import hold, run_to_end
from penstock.tasks.worker.children import (
    ChildReply,
    ChildRequest,
    claim_of,
    receive_frame,
    requests,
    send_frame,
    starts,
)
from penstock.tasks.worker.options import load_app


def main() -> None:
    """Runs tasks until the worker closes the socket."""
    target, fd = sys.argv[1:]
    # A Ctrl-C is for the worker, which ends this process if necessary.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = socket.socket(fileno=int(fd))
    frame = receive_frame(peer)
    if frame is None:
        # The worker has ended.
        return
    waiting: SimpleQueue[ChildRequest] = SimpleQueue()
    try:
        app = load_app(target)
        app.use_url(starts.decode(frame).url)
    except PenstockError as error:
        # The worker has imported the app, so the source has been changed since.
        send_frame(peer, ChildReply("failed", failure=Failure(str(error))))
        return
    threading.Thread(target=_read, args=(peer, waiting), daemon=True).start()
    send_frame(peer, ChildReply("ready"))
    while True:
        send_frame(peer, _run(app, waiting.get(), peer))


def _read(peer: socket.socket, waiting: "SimpleQueue[ChildRequest]") -> None:
    while (frame := receive_frame(peer)) is not None:
        waiting.put(requests.decode(frame))
    os._exit(0)


def _run(app: TaskApp, request: ChildRequest, peer: socket.socket) -> ChildReply:
    held = hold(app, claim_of(request))
    if held.outcome is None:
        _, context = held.call
        context.start(
            request.timeout_ms,
            lambda deadline_ms: send_frame(
                peer, ChildReply("deadline", left_ms=deadline_ms - context.now_ms())
            ),
        )
        run_to_end(held, app.middleware)
    assert held.outcome is not None
    return ChildReply("done", value=held.outcome.value, failure=held.outcome.failure)


if __name__ == "__main__":
    main()
