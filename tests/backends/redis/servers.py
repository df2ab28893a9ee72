"""Real Redis servers for the tests: one, a cluster of three, and one with Sentinels."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from tests.conftest import MEMORY, SEARCH_PATH
from tests.ports import lasting_port

TIMEOUT_S = 60.0
REDIS = shutil.which("redis-server", path=SEARCH_PATH) or "redis-server"


class RedisServer:
    """A redis-server with a data directory of its own; it can be stopped, stalled and started."""

    def __init__(self, *words, port=None, program=(REDIS,), environment=None, ready="+PONG"):
        self.directory = Path(
            tempfile.mkdtemp(prefix="penstock-redis-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.port = port or lasting_port()
        self._words = words
        self._program = program
        self._environment = environment
        self._ready = ready
        self.process = self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def start(self):
        """Starts it with the data that it had."""
        process = subprocess.Popen(
            [
                *self._program,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)),
                *("--save", "", "--logfile", str(self.directory / "log")),
                *self._words,
            ],
            env=self._environment,
        )
        until(lambda: self._answers() or process.poll() is not None)
        assert process.poll() is None, (self.directory / "log").read_text()
        self.process = process
        return process

    def _answers(self):
        try:
            return self.ask("PING") == self._ready
        except OSError:
            return False

    def ask(self, *words):
        """The first line of the reply to one command; of a text, the whole text."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as link:
            parts = [str(word).encode() for word in words]
            link.sendall(
                b"*%d\r\n" % len(parts)
                + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            )
            answer = link.makefile("rb")
            line = answer.readline().decode().strip()
            return answer.read(int(line[1:])).decode() if line.startswith("$") else line

    def kill(self):
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def terminate(self):
        self.process.terminate()
        self.process.wait(TIMEOUT_S)

    @contextlib.contextmanager
    def stalled(self):
        """During the block the server is running but does not answer."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def until(holds, timeout_s=TIMEOUT_S):
    """Waits until the condition is true; fails after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < give_up, f"not true after {timeout_s} s"
        threading.Event().wait(0.01)
    return found


class RedisCluster:
    """Three redis-servers that share the slots of a Redis Cluster, without replicas."""

    SLOTS = ((0, 5_460), (5_461, 10_922), (10_923, 16_383))

    def __init__(self, *words):
        self.servers = []
        for _ in range(3):
            self.servers.append(
                RedisServer("--cluster-enabled", "yes", *words, port=cluster_port())
            )
        try:
            self._share_slots()
        except BaseException:
            self.close()
            raise

    def _share_slots(self):
        for server, (low, high) in zip(self.servers, self.SLOTS, strict=True):
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", low, high) == "+OK"
        # Each node meets each other one: by gossip alone it may take half a minute.
        for server in self.servers:
            for other in self.servers:
                if other is not server:
                    assert server.ask("CLUSTER", "MEET", "127.0.0.1", other.port) == "+OK"
        until(lambda: all(map(self._is_complete, self.servers)))

    def _is_complete(self, server):
        info = server.ask("CLUSTER", "INFO")
        return "cluster_state:ok" in info and "cluster_known_nodes:3" in info

    @property
    def url(self):
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}"

    def close(self):
        for server in self.servers:
            server.close()


def cluster_port():
    """A free port for a node; that of its cluster bus, ten thousand higher, is free, too."""
    while True:
        port = lasting_port()
        try:
            socket.create_server(("127.0.0.1", port + 10_000)).close()
        except OSError:
            continue
        return port


class Sentinels:
    """A master with a replica, and a Sentinel that promotes the replica if the master ends."""

    def __init__(self):
        self.master = RedisServer("--appendonly", "yes")
        self.servers = [self.master]
        try:
            self.replica = RedisServer("--replicaof", f"127.0.0.1 {self.master.port}")
            self.servers.append(self.replica)
            until(lambda: "master_link_status:up" in self.replica.ask("INFO", "replication"))
            self.sentinel = self._start_sentinel()
        except BaseException:
            self.close()
            raise

    def _start_sentinel(self):
        file = self.master.directory / "sentinel.conf"
        file.write_text(
            f"sentinel monitor orders 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds orders 500\n"
            "sentinel failover-timeout orders 2000\n"
        )
        sentinel = RedisServer("--sentinel", program=(REDIS, str(file)))
        self.servers.append(sentinel)
        until(lambda: "slaves=1" in sentinel.ask("INFO", "sentinel"))
        return sentinel

    @property
    def url(self):
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/orders"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for server in self.servers:
            server.close()
