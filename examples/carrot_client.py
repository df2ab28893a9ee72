"""The Carrot protocol in plain sockets: add a queue, write a message, read it twice.

Start a broker with `penstock serve --carrot 11311`, then run `python carrot_client.py 11311`.
docs/formats/carrot.md has every byte.
"""

import socket
import sys

WRITE, READ, ADD, REMOVE, ACK, NACK = b"\x00", b"\x0f", b"\xf0", b"\xff", b"\x00", b"\x01"
if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
    sys.exit("usage: python carrot_client.py PORT, that of a broker on this machine")
ADDRESS = ("127.0.0.1", int(sys.argv[1]))


def answer(link: socket.socket) -> tuple[int, str]:
    """The status, 0 for SUCCESS and 1 for ERROR, and the text up to its NUL."""
    data = link.recv(1)
    while not data[1:].endswith(b"\0"):
        data += link.recv(4_096)
    return data[0], data[1:-1].decode()


def ask(request: bytes) -> tuple[int, str]:
    """One request, on a connection of its own."""
    with socket.create_connection(ADDRESS) as link:
        link.sendall(request)
        return answer(link)


def read(queue: bytes, verdict: bytes) -> bytes | str:
    """The next message, with the verdict on it; or the reason why there is none."""
    with socket.create_connection(ADDRESS) as link, link.makefile("rb") as incoming:
        link.sendall(READ + queue + b"\0")
        if incoming.read(1) == b"\x01":
            return incoming.read().rstrip(b"\0").decode()
        message = incoming.read(incoming.read(1)[0])
        link.sendall(verdict)
        return message if incoming.read() else b""  # the verdict's answer; the broker closes


queue = b"example"
try:
    ask(ADD + queue + b"\0")
except (OSError, OverflowError) as error:
    sys.exit(f"no broker answers at port {sys.argv[1]}: {error}")
ask(WRITE + bytes([len(b"hello")]) + queue + b"\0" + b"hello")
print("read", read(queue, NACK))
print("read", read(queue, ACK), "again")
print(str(read(queue, ACK)).partition(":")[0])
ask(REMOVE + queue + b"\0")
