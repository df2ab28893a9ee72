"""A whole cluster on this machine, to try it: NATS servers and nodes as processes.

ROOT/cluster.json   its URL and its processes; readable by its owner only
ROOT/nats/          the NATS servers (`nats_servers`)
ROOT/NODE.out       the output of each node
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from penstock.cluster.nats_servers import NatsServers
from penstock.errors import InvalidField, StoreInUse, UnavailableError

_STARTED_S: Final = 60.0
_STOPPED_S: Final = 30.0


def state_path(root: Path) -> Path:
    """The file that lists the running processes."""
    return root / "cluster.json"


def read_state(root: Path) -> dict[str, Any]:
    """The content of the state file. Raises InvalidField if there is none."""
    try:
        state: dict[str, Any] = json.loads(state_path(root).read_text())
    except (OSError, ValueError):
        raise InvalidField(
            f"directory: {root} has no cluster; penstock cluster up starts one there"
        ) from None
    return state


def start_cluster(
    root: Path, nodes: int, port: int, shards: int, archive: Path | None = None
) -> dict[str, Any]:
    """Starts three NATS servers and some nodes; returns the state that it writes.

    With `archive`, the nodes write the shards' streams there as segment files. Raises StoreInUse if
    a cluster runs there already, UnavailableError if a process does not start.
    """
    root = root.absolute()
    if state_path(root).exists() and any(map(is_ours, _processes(read_state(root)))):
        raise StoreInUse(
            f"{root}: a cluster is already running there; penstock cluster down stops it"
        )
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    servers = NatsServers(root)
    state: dict[str, Any] = {"url": f"{servers.url}?shards={shards}", "nats": [], "nodes": []}
    own_url = state["url"]
    if archive is not None:
        own_url += f"&archive={quote(str(archive.absolute()), safe='/')}"
    try:
        servers.start()
        state["nats"] = [_describe(each.pid) for each in servers.processes if each is not None]
        for number in range(nodes):
            state["nodes"].append(_start_node(root, own_url, number, port))
        _write_state(root, state)
        for node in state["nodes"]:
            node["endpoint"] = _wait_for(root, node)
        _write_state(root, state)
    except BaseException:
        _end(state)
        servers.stop()
        state_path(root).unlink(missing_ok=True)
        raise
    return state


def _start_node(root: Path, url: str, number: int, port: int) -> dict[str, Any]:
    name = f"node{number + 1}"
    command = [sys.executable, "-m", "penstock", "serve", "--json"]
    command += ["--port", str(port + number if port else 0)]
    # The URL contains the password: other users cannot read the environment of a process.
    environment = {**os.environ, "PENSTOCK_STORE": f"{url}&node={name}"}
    for variable in ("PENSTOCK_URL", "PENSTOCK_DATA"):
        environment.pop(variable, None)
    with open(root / f"{name}.out", "wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return {"name": name, **_describe(process.pid)}


def _wait_for(root: Path, node: dict[str, Any]) -> str:
    """Waits until a node has started; the URL of its endpoint. Raises UnavailableError."""
    out = root / f"{node['name']}.out"
    deadline_s = time.monotonic() + _STARTED_S
    while time.monotonic() < deadline_s:
        first = out.read_text().partition("\n")
        if first[1] and first[0].startswith("{"):
            return str(json.loads(first[0])["url"])
        if first[1] or not is_ours(node):
            break
        time.sleep(0.05)
    raise UnavailableError(f"{node['name']} did not start; its output is in {out}")


def stop_cluster(root: Path) -> int:
    """Stops the processes of a cluster; how many have ended. Raises InvalidField."""
    root = root.absolute()
    state = read_state(root)
    ended = _end(state)
    state_path(root).unlink(missing_ok=True)
    return ended


def _end(state: dict[str, Any]) -> int:
    """Ends the nodes, then the NATS servers: a node needs them to hand its shards over."""
    ended = 0
    for group in ("nodes", "nats"):
        alive = [each for each in state[group] if is_ours(each)]
        for each in alive:
            os.kill(each["pid"], signal.SIGTERM)
        deadline_s = time.monotonic() + _STOPPED_S
        while any(map(is_ours, alive)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for each in filter(is_ours, alive):
            os.kill(each["pid"], signal.SIGKILL)
        ended += len(alive)
    return ended


def _processes(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [*state["nodes"], *state["nats"]]


def _describe(pid: int) -> dict[str, Any]:
    return {"pid": pid, "began": _start_ticks(pid)}


def is_ours(process: dict[str, Any]) -> bool:
    """Whether a process still runs; its start time shows that its number was not reused."""
    return process["began"] is not None and _start_ticks(process["pid"]) == process["began"]


def _start_ticks(pid: int) -> str | None:
    """The start time of a process in ticks of the system clock; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _write_state(root: Path, state: dict[str, Any]) -> None:
    path = state_path(root)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(state, file, indent=1)
