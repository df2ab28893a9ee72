"""The durable queues that `benchmarks.durable` compares, each with the same methods.

What an answer means in each of them, by durability:

    | store                | os                 | interval    | sync                         |
    |----------------------|--------------------|-------------|------------------------------|
    | Penstock             | in the mapped file | within 50 ms| synced, many with one sync   |
    | litequeue            | WAL, NORMAL        | –           | WAL, FULL: a sync a call     |
    | persist-queue SQLite | WAL, NORMAL        | –           | WAL, FULL: a sync a call     |
    | persist-queue file   | written            | –           | – (syncs full chunks only)   |
    | beanstalkd           | -F                 | -f50        | -f0: a sync a put and delete |

Under NORMAL SQLite syncs at its checkpoints only, which is durability `os`. A store without a
call for several messages is called once for each.
"""

import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import penstock
from benchmarks.harness import Void, written_bytes
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.remote.daemon import running_pid, stop_daemon
from penstock.journal.file_journal import FileJournal

QUEUE = "bench"
INTERVAL_MS = 50
SYNCHRONOUS = {"os": "NORMAL", "sync": "FULL"}
START_S_MAX = 10.0

Push = Callable[[Any], object]
Cycle = Callable[[Any], Sequence[bytes]]


class Store(Protocol):
    """A queue on a directory. With `batch` 1 its verbs take one body, else a list of them."""

    def pusher(self, batch: int) -> Push:
        """A function for one thread that pushes and returns when the messages are durable."""
        ...

    def cycler(self, batch: int) -> Cycle:
        """A function for one thread that pushes, pulls and deletes; returns the bodies pulled."""
        ...

    def drain(self) -> Iterable[bytes]:
        """The bodies of everything that can still be pulled, each once."""
        ...

    def counters(self) -> "Counters":
        """The disk traffic of the store so far."""
        ...

    def close(self) -> None:
        """Closes the store."""
        ...


class Counters:
    """Bytes written to the disk, and if known the syncs and bytes of the journal's stream."""

    def __init__(self, written: int, syncs: int = 0, appended: int = 0) -> None:
        self.written = written
        self.syncs = syncs
        self.appended = appended


class Penstock:
    """Penstock through its public blocking API, at any URL."""

    def __init__(self, url: str) -> None:
        self.queues = penstock.connect(url)
        self.queues.create(QUEUE)
        self._syncs = 0
        self._journal: FileJournal | None = None
        service = self.queues.service
        if isinstance(service, BlockingEngine):
            journal = service._engine.journal
            if isinstance(journal, FileJournal):
                self._journal = journal
                self._sync = journal.segments.sync
                journal.segments.sync = self._count_sync  # type: ignore[method-assign]

    def _count_sync(self) -> Any:
        self._syncs += 1
        return self._sync()

    def pusher(self, batch: int) -> Push:
        """One call for each body, or one for the batch."""
        if batch == 1:
            return partial(self.queues.push, QUEUE)
        return partial(self.queues.push_many, QUEUE)

    def cycler(self, batch: int) -> Cycle:
        """Three calls, for one message or for many."""
        queues = self.queues
        push, pull, delete = queues.push, queues.pull, queues.delete
        push_many, pull_many = queues.push_many, queues.pull_many

        def cycle(body: bytes) -> tuple[bytes]:
            push(QUEUE, body)
            claim = pull(QUEUE)
            if claim is None or not delete(claim):
                raise Void("a pull found no message, or a delete deleted nothing")
            return (claim.body,)

        def cycle_many(bodies: list[bytes]) -> list[bytes]:
            push_many(QUEUE, bodies)
            claims = pull_many(QUEUE, batch)
            if not all(deleted is True for deleted in queues.delete_many(claims)):
                raise Void("a delete deleted nothing")
            return [claim.body for claim in claims]

        return cycle if batch == 1 else cycle_many

    def drain(self) -> Iterable[bytes]:
        """Pulls and deletes a thousand at a time."""
        while claims := self.queues.pull_many(QUEUE, 1_000):
            if not all(deleted is True for deleted in self.queues.delete_many(claims)):
                raise Void("a delete deleted nothing")
            yield from (claim.body for claim in claims)

    def counters(self) -> Counters:
        """Of this process; a daemon's are its own."""
        if self._journal is None:
            return Counters(written_bytes())
        return Counters(written_bytes(), self._syncs, self._journal.segments.end_offset)

    def close(self) -> None:
        """Closes the connection or the engine."""
        self.queues.close()


class Daemon(Penstock):
    """Penstock's daemon, which the first connection starts; all threads share that one."""

    def __init__(self, path: Path, durability: str) -> None:
        super().__init__(f"file:{path}?durability={durability}&interval_ms={INTERVAL_MS}")
        self._path = path
        self._pid = running_pid(path)

    def counters(self) -> Counters:
        """What the daemon wrote."""
        return Counters(written_bytes(self._pid))

    def close(self) -> None:
        """Closes the connection, and ends the daemon."""
        super().close()
        stop_daemon(self._path)


class OneByOne:
    """A store without a call for several messages: a batch is that many calls."""

    def push(self, body: bytes) -> None:
        """Pushes one."""
        raise NotImplementedError

    def cycle(self, body: bytes) -> bytes:
        """Pushes, pulls and deletes one; the body pulled."""
        raise NotImplementedError

    def pusher(self, batch: int) -> Push:
        """One call for each body."""
        push = self.push

        def push_each(bodies: list[bytes]) -> None:
            for body in bodies:
                push(body)

        return push if batch == 1 else push_each

    def cycler(self, batch: int) -> Cycle:
        """Three calls for each body."""
        cycle = self.cycle
        if batch == 1:
            return lambda body: (cycle(body),)
        return lambda bodies: [cycle(body) for body in bodies]

    def counters(self) -> Counters:
        """Of this process: all of these are libraries."""
        return Counters(written_bytes())


class LiteQueue(OneByOne):
    """litequeue: a row in SQLite; put, pop and done are a transaction each."""

    def __init__(self, path: Path, durability: str) -> None:
        from litequeue import LiteQueue as Peer  # type: ignore[import-not-found, unused-ignore]

        self.peer = Peer(path / "lite.db")
        set_synchronous(self.peer.conn, durability)
        # pop and done on one connection are transactions of its own: one thread at a time.
        self.lock = threading.Lock()

    def push(self, body: bytes) -> None:
        """One statement, which SQLite commits by itself."""
        self.peer.put(body.decode())

    def cycle(self, body: bytes) -> bytes:
        """put, pop, done; the row stays, marked as done."""
        peer = self.peer
        peer.put(body.decode())
        message = peer.pop()
        if message is None:
            raise Void("litequeue returned no message")
        peer.done(message.message_id)
        return bytes(message.data, "ascii")

    def drain(self) -> Iterable[bytes]:
        """Read from the table: popping them one by one would take longer than the race."""
        rows = self.peer.conn.execute("SELECT data FROM Queue WHERE status = 0")
        return [row[0].encode() for row in rows]

    def close(self) -> None:
        """Closes the database."""
        self.peer.close()


class LiteQueueInTransactions(LiteQueue):
    """litequeue with a transaction of the caller around several puts."""

    def pusher(self, batch: int) -> Push:
        """One transaction for the batch."""
        peer, lock = self.peer, self.lock

        def push_together(bodies: list[bytes]) -> None:
            with lock, peer.transaction():
                for body in bodies:
                    peer.put(body.decode())

        return push_together


class PersistQueueSqlite(OneByOne):
    """persist-queue's SQLiteAckQueue; put, get and ack are a transaction each."""

    def __init__(self, path: Path, durability: str) -> None:
        from persistqueue import (  # type: ignore[import-not-found, unused-ignore]
            SQLiteAckQueue,
        )

        self.peer = SQLiteAckQueue(str(path), multithreading=True)
        set_synchronous(self.peer._putter, durability)

    def push(self, body: bytes) -> None:
        """One transaction."""
        self.peer.put(body)

    def cycle(self, body: bytes) -> bytes:
        """put, get, ack; the row stays, marked as done."""
        self.peer.put(body)
        row = self.peer.get(block=False, raw=True)
        self.peer.ack(id=row["pqid"])
        return bytes(row["data"])

    def drain(self) -> Iterable[bytes]:
        """Read from the table, as for litequeue; 2 and more are taken or done."""
        return [bytes(row["data"]) for row in self.peer.queue() if int(row["status"]) < 2]

    def close(self) -> None:
        """Closes the database."""
        self.peer.close()


class PersistQueueFile(OneByOne):
    """persist-queue's Queue: pickles in chunk files, and an index replaced at every call."""

    def __init__(self, path: Path, durability: str) -> None:
        from persistqueue import Queue  # type: ignore[import-not-found, unused-ignore]

        if durability != "os":
            raise NotImplementedError("persist-queue's file queue syncs once a chunk, not a call")
        self.peer = Queue(str(path / "file"), tempdir=str(path))

    def push(self, body: bytes) -> None:
        """One write, and a new index renamed over the old one."""
        self.peer.put(body)

    def cycle(self, body: bytes) -> bytes:
        """put, get, task_done."""
        self.peer.put(body)
        got = self.peer.get(block=False)
        self.peer.task_done()
        return bytes(got)

    def drain(self) -> Iterable[bytes]:
        """Gets and finishes every item."""
        while not self.peer.empty():
            yield self.peer.get(block=False)
            self.peer.task_done()

    def close(self) -> None:
        """Drops the reference, which closes its files: it has no close."""
        del self.peer


def set_synchronous(connection: sqlite3.Connection, durability: str) -> None:
    """Sets the durability of a SQLite connection and checks that it is in effect."""
    wanted = SYNCHRONOUS.get(durability)
    if wanted is None:
        raise NotImplementedError(f"SQLite has no durability {durability}")
    connection.execute(f"PRAGMA synchronous = {wanted}")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if (level, mode) != ({"NORMAL": 1, "FULL": 2}[wanted], "wal"):
        raise RuntimeError(f"SQLite is at synchronous={level}, journal_mode={mode}")


class Beanstalkd:
    """beanstalkd with a binlog, on a Unix socket; several commands go out in one write."""

    FLAGS = {"os": ["-F"], "interval": [f"-f{INTERVAL_MS}"], "sync": ["-f0"]}  # noqa: RUF012

    def __init__(self, path: Path, durability: str) -> None:
        program = shutil.which("beanstalkd")
        if program is None:
            raise NotImplementedError("beanstalkd is not installed")
        self.address = str(path / "socket")
        Path(self.address).unlink(missing_ok=True)
        command = [program, "-b", str(path), *self.FLAGS[durability], "-l", f"unix:{self.address}"]
        self.process = subprocess.Popen(command)
        self.drainer = BeanstalkConnection(self.address)

    def pusher(self, batch: int) -> Push:
        """A connection of its own."""
        put = BeanstalkConnection(self.address).put
        return put if batch > 1 else lambda body: put([body])

    def cycler(self, batch: int) -> Cycle:
        """A connection of its own; three writes for one or many."""
        connection = BeanstalkConnection(self.address)

        def cycle(bodies: list[bytes]) -> list[bytes]:
            connection.put(bodies)
            found = connection.reserve(len(bodies))
            connection.delete([number for number, _ in found])
            return [body for _, body in found]

        return cycle if batch > 1 else lambda body: cycle([body])

    def drain(self) -> Iterable[bytes]:
        """Reserves and deletes a hundred at a time."""
        connection = self.drainer
        while ready := min(100, connection.ready()):
            found = connection.reserve(ready)
            connection.delete([number for number, _ in found])
            yield from (body for _, body in found)

    def counters(self) -> Counters:
        """What the server wrote."""
        return Counters(written_bytes(self.process.pid))

    def close(self) -> None:
        """Ends the server; its binlog stays."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class BeanstalkConnection:
    """The part of beanstalkd's protocol that the race needs."""

    def __init__(self, address: str) -> None:
        give_up_s = time.monotonic() + START_S_MAX
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(address)
                break
            except OSError:
                self.socket.close()
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.01)
        self.replies = self.socket.makefile("rb", 1 << 16)

    def put(self, bodies: Sequence[bytes]) -> None:
        """Puts them all with one write."""
        self.socket.sendall(
            b"".join([b"put 0 0 3600 %d\r\n%b\r\n" % (len(body), body) for body in bodies])
        )
        for _ in bodies:
            self._expect(b"INSERTED")

    def reserve(self, count: int) -> list[tuple[bytes, bytes]]:
        """Reserves so many, which must exist: the numbers and the bodies."""
        self.socket.sendall(b"reserve-with-timeout 0\r\n" * count)
        found = []
        for _ in range(count):
            number, size = self._expect(b"RESERVED")
            body = self.replies.read(int(size) + 2)
            found.append((number, body[:-2]))
        return found

    def delete(self, numbers: Sequence[bytes]) -> None:
        """Deletes them all with one write."""
        self.socket.sendall(b"".join([b"delete %b\r\n" % number for number in numbers]))
        for _ in numbers:
            self._expect(b"DELETED")

    def ready(self) -> int:
        """How many can be reserved."""
        self.socket.sendall(b"stats-tube default\r\n")
        (size,) = self._expect(b"OK")
        for line in self.replies.read(int(size) + 2).splitlines():
            if line.startswith(b"current-jobs-ready:"):
                return int(line.split()[1])
        raise Void("the stats of beanstalkd have no current-jobs-ready")

    def _expect(self, word: bytes) -> list[bytes]:
        reply = self.replies.readline().split()
        if not reply or reply[0] != word:
            raise Void(f"beanstalkd answered {reply!r} instead of {word!r}")
        return reply[1:]


def memory(path: Path, durability: str) -> Penstock:
    """The engine without a disk, the measure for `os`."""
    return Penstock("memory:")


def embedded(path: Path, durability: str) -> Penstock:
    """Penstock's engine in this process."""
    return Penstock(f"file:{path}?embedded=1&durability={durability}&interval_ms={INTERVAL_MS}")


STORES: dict[str, Callable[[Path, str], Store]] = {
    "memory": memory,
    "penstock embedded": embedded,
    "penstock daemon": Daemon,
    "litequeue": LiteQueue,
    "litequeue, own transactions": LiteQueueInTransactions,
    "persist-queue SQLite": PersistQueueSqlite,
    "persist-queue file": PersistQueueFile,
    "beanstalkd": Beanstalkd,
}
PEER_OF = {
    "litequeue": "litequeue",
    "litequeue, own transactions": "litequeue",
    "persist-queue SQLite": "persist-queue",
    "persist-queue file": "persist-queue",
}
