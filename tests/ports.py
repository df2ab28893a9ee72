"""Ports for tests that cannot let a server choose its own."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# Below those that Linux gives to whoever asks for any, and to every connection that goes out.
LOWEST, COUNT = 20_000, 10_000


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port at which everybody is refused: it is taken, so nobody else can come to listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def lasting_port() -> int:
    """A free port that stays free when a server there has ended: nobody is given it by chance.

    Where to look first depends on the process: two that run side by side, which often have
    numbers in a row, look a hundred ports apart and do not meet.
    """
    for step in range(COUNT):
        port = LOWEST + (101 * os.getpid() + step) % COUNT
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port is free from {LOWEST} to {LOWEST + COUNT}")
