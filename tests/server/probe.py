"""Measures a server during an attack: how long its answers take, and how much memory it uses.

`python -m tests.server.probe http|frames PORT PID` sends requests until its input ends, and then
prints its figures. It is a process of its own, so it waits for nothing but the server. The time
that either of them waited for a processor, because other programs used it, is not counted.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

from penstock.wire.frames.frames import PRELUDE, REPLY, STATUS, Hello, encode_hello, pack
from tests.measure import memory_bytes

PERIOD_S = 0.002
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


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


def ask_http(wire):
    wire.sendall(HEALTH)
    assert wire.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def send_hello(wire):
    wire.sendall(encode_hello(Hello("probe")))
    assert wire.recv(65_536).startswith(PRELUDE)


def ask_frames(wire):
    wire.sendall(pack(STATUS, 1))
    # The kind of the answer comes after the size of its body.
    assert wire.recv(65_536)[4] == REPLY


def watch(protocol, port, pid, ended):
    seen = ProbeFigures()
    ask = ask_http if protocol == "http" else ask_frames
    with socket.create_connection(("127.0.0.1", port), 30) as wire:
        if protocol == "frames":
            send_hello(wire)
        while True:
            began_s = time.perf_counter() - queued_s(pid) - queued_s("self")
            ask(wire)
            took_s = time.perf_counter() - queued_s(pid) - queued_s("self") - began_s
            seen.longest_ms = max(seen.longest_ms, took_s * 1_000)
            seen.peak_bytes = max(seen.peak_bytes, memory_bytes(pid))
            if not seen.answers:
                print("ready", flush=True)
            seen.answers += 1
            if ended.wait(PERIOD_S):
                return seen


@contextmanager
def probing(port, pid, protocol="http"):
    """Runs a probe during the block, and sets the figures that it yields when the block ends."""
    command = [sys.executable, "-m", "tests.server.probe", protocol, str(port), str(pid)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    seen = ProbeFigures()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield seen
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
        vars(seen).update(json.loads(output))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def main():
    protocol, port, pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ended = threading.Event()

    def read_input():
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read_input, daemon=True).start()
    print(json.dumps(vars(watch(protocol, port, pid, ended))))


if __name__ == "__main__":
    main()
