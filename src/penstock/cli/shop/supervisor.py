"""The processes of the demo: the server and the shop, each started again when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import penstock
from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.starting import DaemonEndpoint
from penstock.errors import UnavailableError

VISIBILITY_S: Final = 4
_ROLES: Final = ("producer", "producer", "orders", "orders", "mail")
_STOP_S: Final = 20.0
_DRAIN_S: Final = 40.0
QUEUES: Final = ("orders", "mail", "orders-dead")


class ServerProcess:
    """`penstock serve`, with the button that kills it, on one port for the whole demo."""

    def __init__(self, store: Path, port: int) -> None:
        self._store = store
        self._port = port
        self.kills = 0
        self.url = ""
        # How long each restart took until the server answered.
        self.restarts_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it listens. Raises UnavailableError."""
        words = [sys.executable, "-m", "penstock", "serve", "--data", str(self._store), "--json"]
        words += ["--port", str(self._port), "--kill-button"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        # What its console writes about who did what goes there, too.
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C is for the demo alone, which then ends the others.
                start_new_session=True,
            )
            assert self._process.stdout is not None
            try:
                line = self._process.stdout.readline()
            except BaseException:
                # Most likely Ctrl-C, which does not reach it.
                self._process.kill()
                self._process.wait()
                self._close()
                raise
            if not line:
                self._process.communicate()
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip()
                raise UnavailableError(f"demo: the server did not start: {said}")
        self.url = json.loads(line)["url"]
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self._process.kill()

    def wait(self) -> None:
        """Waits for its end."""
        self._process.wait()

    def restart_if_ended(self) -> bool:
        """Starts it again if it has ended, by whatever; whether it had."""
        if self._process.poll() is None:
            return False
        self._close()
        self.kills += 1
        began_s = time.monotonic()
        self.start()
        self.restarts_s.append(time.monotonic() - began_s)
        return True

    def stop(self) -> None:
        """Ends it in an orderly way."""
        _end(self._process)
        self._close()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


class ShopProcesses:
    """The producers and consumers."""

    def __init__(self, server: ServerProcess, directory: Path, client: str) -> None:
        self._client = client
        self._server = server
        self._directory = directory
        self.crashes = 0
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def open(self) -> None:
        """Creates the queues, and starts everybody."""
        with self.queues() as queues:
            queues.create("orders-dead")
            queues.create(
                "orders",
                visibility_timeout=VISIBILITY_S,
                dead_letter="orders-dead",
                max_receives=3,
            )
            queues.create("mail", visibility_timeout=VISIBILITY_S)
        self._processes = [(role, self._start(role)) for role in _ROLES]

    def queues(self) -> penstock.Queues:
        """A client of the store, which starts no daemon while the server is away."""
        store = self._directory / "store"
        return penstock.Queues(Remote(DaemonEndpoint(store, starts=False)))

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "penstock.cli.shop.process", role, self._client]
        return subprocess.Popen(
            [*words, self._server.url, str(self._directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def replace_crashed(self) -> None:
        """Starts again those that were killed."""
        for place, (role, process) in enumerate(self._processes):
            if process.poll() is not None and process.returncode != 0:
                self.crashes += 1
                self._processes[place] = role, self._start(role)

    def begin_to_close(self) -> None:
        """No more orders; consumers go on."""
        (self._directory / "closing").touch()

    def is_empty(self) -> bool:
        """Whether everything was consumed, or is a dead letter."""
        if any(role == "producer" and each.poll() is None for role, each in self._processes):
            return False
        try:
            with self.queues() as queues:
                return all(queues.stats(name).messages == 0 for name in ("orders", "mail"))
        except UnavailableError:
            return False

    def drain(self) -> None:
        """Waits until the queues are empty; not forever, because poison may be at the head."""
        until_s = time.monotonic() + _DRAIN_S
        while not self.is_empty() and time.monotonic() < until_s:
            self._server.restart_if_ended()
            self.replace_crashed()
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends everybody."""
        for _, process in self._processes:
            _end(process)

    def orders_in(self, name: str) -> set[str]:
        """The orders that a queue holds."""
        from penstock.cli.export import messages_of

        with self.queues() as queues:
            contents: list[dict[str, Any]] = [
                json.loads(message.body) for message, _ in messages_of(queues, name)
            ]
        return {str(content["order"]) for content in contents}


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
