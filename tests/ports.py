"""Ports for tests that cannot let a server choose its own."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# Below the ports that Linux assigns to sockets without a given port, and to outgoing connections.
LOWEST, COUNT = 20_000, 10_000
# How far this process has gone through them: a server may open its port long after it was chosen.
_steps = itertools.count()


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so that no other process can listen at it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def lasting_port() -> int:
    """A free port that is still free after a server there has ended: Linux does not assign it.

    The same process gets each port only once.

    The first port to try depends on the process: two that run at the same time, which often have
    consecutive numbers, start a hundred ports apart.
    """
    for step in itertools.islice(_steps, COUNT):
        port = LOWEST + (101 * os.getpid() + step) % COUNT
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port is free from {LOWEST} to {LOWEST + COUNT}")
