"""Measures servers during an attack: how long their answers take, and how much memory they use.

`python -m tests.server.probe PROTOCOL PORT PID [PORT PID …]` is a process of its own, so it waits
for nothing but the servers. The first line of its input begins a measurement and the next one ends
it, and so on; at the end of each it prints its figures. The time that a server or the probe waited
for a processor, because other programs used it, is not counted.

    http      a request that needs the store: the page /health
    refused   a request that the endpoint refuses by itself, without its store
    frames    a STATUS frame
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress

from penstock.wire.frames.frames import PRELUDE, REPLY, STATUS, Hello, encode_hello, pack
from tests.measure import memory_bytes

PERIOD_S = 0.002
TIMEOUT_S = 60
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNKNOWN = b"GET /?Action=None HTTP/1.1\r\nHost: localhost\r\n\r\n"
REQUESTS = {"http": HEALTH, "refused": UNKNOWN, "frames": pack(STATUS, 1)}


class ProbeFigures:
    """The longest answer, the most memory, and the number of answers."""

    def __init__(self):
        self.longest_ms = 0.0
        self.peak_bytes = 0
        self.answers = 0


def queued_s(pid):
    """How long a process was ready to run but waited for a processor, which others used."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def check(protocol, answer):
    if protocol == "frames":
        # The kind of the answer comes after the size of its body.
        assert answer[4] == REPLY
    else:
        expected = b"HTTP/1.1 200 OK" if protocol == "http" else b"HTTP/1.1 400 "
        assert answer.startswith(expected), answer


def send_hello(wire):
    wire.sendall(encode_hello(Hello("probe")))
    assert wire.recv(65_536).startswith(PRELUDE)


class ProbedServer:
    """A connection to one server."""

    def __init__(self, protocol, port, pid):
        self.pid = pid
        self._protocol = protocol
        self._wire = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._began_s = 0.0
        if protocol == "frames":
            send_hello(self._wire)

    def fileno(self):
        return self._wire.fileno()

    def _now_s(self):
        return time.perf_counter() - queued_s(self.pid) - queued_s("self")

    def ask(self):
        self._began_s = self._now_s()
        self._wire.sendall(REQUESTS[self._protocol])

    def take(self, seen):
        check(self._protocol, self._wire.recv(65_536))
        seen.longest_ms = max(seen.longest_ms, (self._now_s() - self._began_s) * 1_000)
        seen.peak_bytes = max(seen.peak_bytes, memory_bytes(self.pid))
        seen.answers += 1


def ask_all(targets, seen):
    """Asks all servers at once, and waits for the answers of all."""
    for each in targets:
        each.ask()
    waiting = list(targets)
    while waiting:
        answered = select.select(waiting, [], [], TIMEOUT_S)[0]
        assert answered, f"no answer in {TIMEOUT_S} s"
        for each in answered:
            each.take(seen)
            waiting.remove(each)


def measure(targets):
    """Asks until the next line of input comes, or its end; the figures."""
    seen = ProbeFigures()
    while True:
        ask_all(targets, seen)
        if seen.answers == len(targets):
            print("begun", flush=True)
        if select.select([0], [], [], PERIOD_S)[0]:
            return seen


class Probe:
    """A probe of some servers, each given by its port and its process, for many measurements."""

    def __init__(self, protocol, *servers):
        words = [str(number) for server in servers for number in server]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.probe", protocol, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _send_line(self):
        """Begins or ends a measurement; what the probe prints then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # If it has failed, its errors are shown below.
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1].decode()
        return line

    @contextmanager
    def measuring(self):
        """Measures during the block, and sets the figures that it yields when the block ends."""
        seen = ProbeFigures()
        assert self._send_line() == b"begun\n"
        try:
            yield seen
        finally:
            vars(seen).update(json.loads(self._send_line()))

    def close(self):
        self._process.kill()
        self._process.communicate()


@contextmanager
def probing(port, pid, protocol="http"):
    """Measures one server during the block."""
    with closing(Probe(protocol, (port, pid))) as probe, probe.measuring() as seen:
        yield seen


def main():
    protocol, *numbers = sys.argv[1:]
    ports, pids = map(int, numbers[::2]), map(int, numbers[1::2])
    targets = [ProbedServer(protocol, *each) for each in zip(ports, pids, strict=True)]
    while os.read(0, 1):
        print(json.dumps(vars(measure(targets))), flush=True)
        os.read(0, 1)


if __name__ == "__main__":
    main()
