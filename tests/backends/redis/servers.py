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

PATIENCE_S = 30.0
REDIS = shutil.which("redis-server", path=SEARCH_PATH) or "redis-server"


class RedisServer:
    """A redis-server with a data directory of its own; it can be stopped, stalled and started."""

    def __init__(self, *words, port=None, program=(REDIS,), environment=None):
        self.directory = Path(
            tempfile.mkdtemp(prefix="penstock-redis-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.port = port or lasting_port()
        self._words = words
        self._program = program
        self._environment = environment
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
            return self.ask("PING") == "+PONG"
        except OSError:
            return False

    def ask(self, *words):
        """The first line of the reply to one command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as link:
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            link.sendall(
                b"*%d\r\n" % len(parts)
                + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            )
            return link.makefile("rb").readline().decode().strip()

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def terminate(self):
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    @contextlib.contextmanager
    def stalled(self):
        """The server exists and does not answer."""
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


def until(holds, patience_s=PATIENCE_S):
    """Waits until it holds; fails when patience runs out."""
    give_up = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < give_up, "waited in vain"
        threading.Event().wait(0.01)
    return found
