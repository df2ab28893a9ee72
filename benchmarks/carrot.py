"""The Carrot broker beside beanstalkd and Redis: `make bench NAME=carrot`.

A lifecycle is put → reserve → delete of one 256-byte message: PUT, GET and ACK of the Carrot
extension; put, reserve-with-timeout and delete of beanstalkd; LPUSH and BRPOP of Redis, which has
no third step, because a message that was popped is gone. Nothing is kept on disk by any of them.

One process drives sixteen connections; it waits for all of them with epoll and has every request
prepared. At depth 1 a connection sends a request and waits for its answer; at depth 16 it sends
sixteen in one write and waits for all their answers. `batched` is Carrot with PUT_MANY, GET of
sixteen and ACK of sixteen, for which the others have no request. `bare` is a server in Python that
only reads the same requests and answers them (`carrot_bare`): the limit of a broker in Python.
"""

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from benchmarks.harness import (
    Child,
    Target,
    check_ledger,
    count_for,
    finish,
    interleave,
    is_quick,
    machine,
    print_table,
    ratio,
    run_benchmark,
)
from penstock.wire.carrot.session import (
    GET,
    PUT,
    PUT_MANY,
    SESSION_ACK,
    encode_messages,
    encode_session_request,
    encode_tags,
    read_given,
    read_session_answer,
)

CONNECTIONS = 16
BODY_BYTES = 256
DEPTH = 16
ROUNDS = 7
ROUND_S = 1.5
TIMEOUT_S = 30.0
QUEUE = "bench"

# The bodies in the answers of a step, and the ids that the next step needs; None if incomplete.
Parsed = tuple[list[bytes], list[bytes]]


class Steps(NamedTuple):
    """The protocol of a contestant: the requests of each step, and how their answers are read."""

    put: Callable[[list[bytes]], bytes]
    is_put: Callable[[bytes, int], bool]
    reserve: Callable[[int], bytes]
    reserved: Callable[[bytes, int], Parsed | None]
    delete: Callable[[list[bytes]], bytes] | None
    is_deleted: Callable[[bytes, int], bool] | None


# beanstalkd.

_RESERVED = re.compile(rb"RESERVED (\d+) %d\r\n" % BODY_BYTES)


def _beanstalk_put(bodies: list[bytes]) -> bytes:
    return b"".join([b"put 1 0 60 %d\r\n%b\r\n" % (BODY_BYTES, body) for body in bodies])


def _beanstalk_reserved(data: bytes, depth: int) -> Parsed | None:
    found = list(_RESERVED.finditer(data))
    if len(found) < depth or len(data) < found[-1].end() + BODY_BYTES + 2:
        return None
    return [data[each.end() : each.end() + BODY_BYTES] for each in found], [
        each[1] for each in found
    ]


BEANSTALK = Steps(
    _beanstalk_put,
    lambda data, depth: data.count(b"INSERTED ") == depth and data.endswith(b"\n"),
    lambda depth: b"reserve-with-timeout 5\r\n" * depth,
    _beanstalk_reserved,
    lambda ids: b"".join([b"delete %b\r\n" % each for each in ids]),
    lambda data, depth: data.count(b"DELETED\r\n") == depth,
)

# Redis.

_POPPED = b"*2\r\n$5\r\nbench\r\n$%d\r\n" % BODY_BYTES


def _redis_put(bodies: list[bytes]) -> bytes:
    head = b"*3\r\n$5\r\nLPUSH\r\n$5\r\nbench\r\n$%d\r\n" % BODY_BYTES
    return b"".join([head + body + b"\r\n" for body in bodies])


def _redis_reserved(data: bytes, depth: int) -> Parsed | None:
    size = len(_POPPED) + BODY_BYTES + 2
    if len(data) < depth * size:
        return None
    starts = range(len(_POPPED), depth * size, size)
    return [data[at : at + BODY_BYTES] for at in starts], []


REDIS = Steps(
    _redis_put,
    lambda data, depth: data.count(b"\r\n") == depth,
    lambda depth: b"*3\r\n$5\r\nBRPOP\r\n$5\r\nbench\r\n$1\r\n5\r\n" * depth,
    _redis_reserved,
    None,
    None,
)

# Carrot.

_ANSWER_BYTES = 12
_PUT_ANSWER_BYTES = _ANSWER_BYTES + 36
_ROW_AT = _ANSWER_BYTES
_GIVEN_BYTES = _ANSWER_BYTES + 12 + BODY_BYTES
_REQUEST_PUT = encode_session_request(PUT, 1, QUEUE, b"x" * BODY_BYTES)[:-BODY_BYTES]
_REQUEST_GET = encode_session_request(GET, 1, QUEUE, encode_tags([], 5_000), 1)
_REQUEST_ACK = encode_session_request(SESSION_ACK, 1, "", b"tags", 1)[:-4]


def _all_succeeded(data: bytes, size: int, depth: int) -> bool:
    return len(data) >= depth * size and not any(data[: depth * size : size])


def _carrot_reserved(data: bytes, depth: int) -> Parsed | None:
    if len(data) < depth * _GIVEN_BYTES:
        return None
    starts = range(0, depth * _GIVEN_BYTES, _GIVEN_BYTES)
    bodies = [data[at + 24 : at + _GIVEN_BYTES] for at in starts]
    return bodies, [data[at + _ROW_AT : at + _ROW_AT + 4] for at in starts]


CARROT = Steps(
    lambda bodies: b"".join([_REQUEST_PUT + body for body in bodies]),
    lambda data, depth: _all_succeeded(data, _PUT_ANSWER_BYTES, depth),
    lambda depth: _REQUEST_GET * depth,
    _carrot_reserved,
    lambda tags: b"".join([_REQUEST_ACK + tag for tag in tags]),
    lambda data, depth: _all_succeeded(data, _ANSWER_BYTES, depth),
)


def _batch_reserved(data: bytes, depth: int) -> Parsed | None:
    answer = read_session_answer(data)
    if answer is None:
        return None
    given = read_given(answer.items, answer.body)
    return [each.body for each in given], [each.tag.to_bytes(4, "little") for each in given]


CARROT_BATCHED = Steps(
    lambda bodies: encode_session_request(PUT_MANY, 1, QUEUE, encode_messages(bodies), len(bodies)),
    lambda data, depth: _all_succeeded(data, _ANSWER_BYTES, 1),
    lambda depth: encode_session_request(GET, 1, QUEUE, encode_tags([], 5_000), depth),
    _batch_reserved,
    lambda tags: encode_session_request(SESSION_ACK, 1, "", b"".join(tags), len(tags)),
    lambda data, depth: _all_succeeded(data, _ANSWER_BYTES, 1),
)
STEPS = {
    "beanstalkd": BEANSTALK,
    "redis": REDIS,
    "carrot": CARROT,
    "carrot batched": CARROT_BATCHED,
    "bare": CARROT,
}


class Driver:
    """One connection that runs lifecycles, `depth` of them at a time."""

    def __init__(self, port: int, steps: Steps, depth: int, bodies: list[bytes]) -> None:
        self.link = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pulled: list[bytes] = []
        self._steps = steps
        self._depth = depth
        self._bodies = bodies
        self._at = 0
        self._received = b""
        self._next = self._put

    def start(self) -> bool:
        """Sends the first request; returns False when all lifecycles are done."""
        some = self._bodies[self._at : self._at + self._depth]
        self._at += len(some)
        self._size = len(some)
        if not some:
            return False
        self.link.sendall(self._steps.put(some))
        self._next = self._put
        return True

    def take(self) -> bool:
        """Reads what has arrived; returns False when all lifecycles are done."""
        data = self._received + self.link.recv(256 * 1024)
        self._received = data
        return self._next(data)

    def _put(self, data: bytes) -> bool:
        if self._steps.is_put(data, self._size):
            self._received = b""
            self._next = self._reserved
            self.link.sendall(self._steps.reserve(self._size))
        return True

    def _reserved(self, data: bytes) -> bool:
        found = self._steps.reserved(data, self._size)
        if found is None:
            return True
        bodies, ids = found
        self._received = b""
        self.pulled += bodies
        # A read of many may return fewer than were put: another connection got the rest.
        self._size = len(bodies)
        if self._steps.delete is None:
            return self.start()
        self._next = self._deleted
        self.link.sendall(self._steps.delete(ids))
        return True

    def _deleted(self, data: bytes) -> bool:
        assert self._steps.is_deleted is not None
        if not self._steps.is_deleted(data, self._size):
            return True
        self._received = b""
        return self.start()


def lifecycles(port: int, name: str, depth: int, count: int) -> float:
    """Runs lifecycles on sixteen connections; lifecycles a second. Raises Void."""
    each = max(depth, count // CONNECTIONS // depth * depth)
    bodies = [
        [b"%08d.%08d" % (number, i) + b"x" * (BODY_BYTES - 17) for i in range(each)]
        for number in range(CONNECTIONS)
    ]
    drivers = [Driver(port, STEPS[name], depth, some) for some in bodies]
    by_fd = {driver.link.fileno(): driver for driver in drivers}
    with select.epoll() as poll:
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN)
        left = len(drivers)
        start_s = time.perf_counter()
        for driver in drivers:
            driver.start()
        while left:
            ready = poll.poll(TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{name} does not answer")
            for fd, _ in ready:
                if not by_fd[fd].take():
                    poll.unregister(fd)
                    left -= 1
        took_s = time.perf_counter() - start_s
    for driver in drivers:
        driver.link.close()
    pushed = [body for some in bodies for body in some]
    check_ledger(pushed, [body for driver in drivers for body in driver.pulled])
    return len(pushed) / took_s


# Servers.


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], port: int) -> Iterator[int]:
    """A server process at a port, ended at the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + TIMEOUT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > give_up_s:
                sys.exit(f"benchmark: {command[0]} does not start")
            time.sleep(0.02)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)


@contextmanager
def carrot_server() -> Iterator[int]:
    """`penstock serve --carrot` with its messages in memory."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", "--store", "memory:", "--port", "0"]
    with server([*command, "--carrot", str(port)], port):
        from penstock import carrot

        with carrot.connect("127.0.0.1", port) as broker:
            broker.add(QUEUE)
        yield port


def bare_command(port: int) -> list[str]:
    """A server of the same protocol without a queue."""
    return [sys.executable, "-m", "benchmarks.carrot_bare", str(port)]


def beanstalkd_command(port: int) -> list[str]:
    """beanstalkd with its messages in memory."""
    return ["beanstalkd", "-l", "127.0.0.1", "-p", str(port)]


def redis_command(port: int, directory: str) -> list[str]:
    """Redis with its messages in memory."""
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    return [*words, "--appendonly", "no", "--dir", directory, "--loglevel", "warning"]


def main() -> None:
    """Runs every contestant at both depths, and prints the ratios."""
    with tempfile.TemporaryDirectory() as directory, carrot_server() as carrot_port:
        ports = {"carrot": carrot_port, "bare": free_port()}
        os.environ["PATH"] += os.pathsep + "/usr/sbin"
        with (
            server(bare_command(ports["bare"]), ports["bare"]),
            _peer("beanstalkd", beanstalkd_command(at := free_port()), at, ports),
            _peer("redis", redis_command(at := free_port(), directory), at, ports),
        ):
            _compare(ports)


@contextmanager
def _peer(name: str, command: list[str], port: int, ports: dict[str, int]) -> Iterator[None]:
    """Starts a peer, if it is installed and this is no quick run."""
    if is_quick() or shutil.which(command[0]) is None:
        print(f"without {name}: not installed, or a quick run")
        yield
        return
    with server(command, port):
        ports[name] = port
        yield


def _compare(ports: dict[str, int]) -> None:
    child = Child()
    rows: dict[str, dict[str, list[float]]] = {}
    for title, depth, names in (
        ("one request at a time", 1, list(ports)),
        (f"{DEPTH} requests at a time", DEPTH, [*ports, "carrot batched"]),
    ):
        runs: dict[str, Callable[[], float]] = {}
        for name in names:
            port = ports[name.split(" batched")[0]]

            def run(count: int, port: int = port, name: str = name) -> float:
                return child.call(lifecycles, port, name, depth, count)  # noqa: B023

            count = count_for(ROUND_S, lambda n, run=run: n / run(n), CONNECTIONS * depth)
            runs[name] = lambda run=run, count=count: run(count)  # type: ignore[misc]
        rows[title] = interleave(ROUNDS, runs)
    child.close()
    targets = []
    for title, figures in rows.items():
        peer = figures.get("beanstalkd")
        shown = [
            (
                name,
                f"{median(rates):,.0f}",
                "" if peer is None else f"{ratio(rates, peer):.2f}",
            )
            for name, rates in figures.items()
        ]
        print_table(
            f"{title}, {CONNECTIONS} connections", ("broker", "lifecycles/s", "÷ beanstalkd"), shown
        )
        if peer is not None:
            targets.append(
                Target(f"carrot ÷ beanstalkd, {title}", ratio(figures["carrot"], peer), 1)
            )
            if "carrot batched" in figures:
                batched = ratio(figures["carrot batched"], peer)
                targets.append(Target(f"carrot batched ÷ beanstalkd, {title}", batched, 1))
    medians = {
        title: {name: round(median(rates)) for name, rates in figures.items()}
        for title, figures in rows.items()
    }
    print(machine())
    finish("carrot", targets, {"lifecycles_per_s": medians, "rounds": ROUNDS})


if __name__ == "__main__":
    run_benchmark(main)
