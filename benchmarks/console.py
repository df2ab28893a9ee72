"""The SQS endpoint with an open console beside the same without: `make bench NAME=console`.

Two servers of this checkout get the same load in turn. One of them sends the changes of its queues
to an open page, which is read as a browser reads it.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import run_benchmark
from benchmarks.sqs_beside import HERE, race
from benchmarks.sqs_servers import PeerServer

EVENTS = "/console/api/events"
HEADERS = {"Accept": "text/event-stream", "Sec-Fetch-Site": "same-origin"}


@contextmanager
def open_page(name: str, server: PeerServer) -> Iterator[None]:
    """The page of all queues at the server `here`. Raises RuntimeError if it gets no event."""
    if name != "here":
        yield
        return
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", EVENTS, headers=HEADERS)
    reply = connection.getresponse()
    received = 0

    def read() -> None:
        nonlocal received
        try:
            while data := reply.read1():
                received += data.count(b"data: ")
        except (OSError, ValueError, http.client.HTTPException):
            return  # The connection was closed below.

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        server.stop()
        reader.join(10)
        connection.close()
    if reply.status != 200 or not received:
        raise RuntimeError(f"the console sent no event: status {reply.status}")


def main() -> None:
    """Runs both servers and prints the ratios."""
    race("console", {"here": HERE, "beside": HERE}, {"here": "with an open console"}, open_page)


if __name__ == "__main__":
    run_benchmark(main)
