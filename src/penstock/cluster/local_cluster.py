"""A whole cluster on this machine, to try it: NATS servers and nodes as processes.

ROOT/cluster.json   its URL and its processes; readable by its owner only
ROOT/nats/          the NATS servers (`nats_servers`)
ROOT/NODE.out       the output of each node
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

import msgspec

from penstock.cluster.address import read_address
from penstock.cluster.membership import check_shards
from penstock.cluster.nats_servers import NatsServers
from penstock.errors import InvalidField, StoreInUse, StoreUnusable, UnavailableError
from penstock.files import check_named, make_directories, open_in, read_in, remove_in, write_in
from penstock.url import read_url

if TYPE_CHECKING:
    from penstock.cluster.operations import Operator

NODES: Final = 3
_STATE: Final = "cluster.json"
_STATE_BYTES_MAX: Final = 1 << 20
_OUTPUT_BYTES_MAX: Final = 1 << 16
_STARTED_S: Final = 60.0
_STOPPED_S: Final = 30.0


class LocalProcess(msgspec.Struct, kw_only=True):
    """A process; its number may be used again, but not with this start time."""

    pid: int
    began: str | None

    @property
    def is_running(self) -> bool:
        """Whether it still runs."""
        return self.began is not None and _start_ticks(self.pid) == self.began


class LocalNode(LocalProcess, kw_only=True):
    """The process of a node."""

    name: str
    endpoint: str = ""


class LocalState(msgspec.Struct):
    """The content of the state file."""

    url: str
    nats: list[LocalProcess]
    nodes: list[LocalNode]
    archive: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether any of its processes runs."""
        return any(each.is_running for each in (*self.nats, *self.nodes))


@contextmanager
def _checked(root: Path) -> Iterator[None]:
    """Raises StoreUnusable for files that cannot be used, or that another user has prepared."""
    try:
        check_named(root)
        yield
    except OSError as error:
        raise StoreUnusable(f"{root}: {error.strerror or error}") from error


def read_state(root: Path) -> LocalState:
    """The content of the state file. Raises InvalidField if there is none, or StoreUnusable."""
    state = _read_state(root)
    if state is None:
        if (root / "nats").is_dir():
            raise InvalidField(
                f"directory: the cluster in {root} was taken down; penstock cluster up starts it "
                "again, with its data"
            )
        raise InvalidField(
            f"directory: {root} has no cluster; penstock cluster up starts one there"
        )
    return state


def _read_state(root: Path) -> LocalState | None:
    with _checked(root):
        try:
            content = read_in(root, _STATE, _STATE_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        return msgspec.json.decode(content, type=LocalState)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StoreUnusable(f"{root / _STATE}: cannot be read: {error}") from None


def _write_state(root: Path, state: LocalState) -> None:
    write_in(root, _STATE, json.dumps(msgspec.to_builtins(state), indent=1).encode())


def start_cluster(
    root: Path, nodes: int | None, port: int, shards: int | None, archive: Path | None = None
) -> tuple[LocalState, list[str]]:
    """Starts three NATS servers and some nodes, or those that have ended; the state that it writes.

    The second result names what was started if the others ran already. `shards` is for a new
    cluster; one that is there must have so many. With `archive`, the nodes write the shards'
    streams there as segment files. Raises StoreInUse if all of them run, UnavailableError if a
    process does not start, StoreUnusable if the directory cannot be used.
    """
    root = root.absolute()
    with _checked(root):
        make_directories(root)
        state = _read_state(root)
        if state is not None and state.is_running:
            if archive is not None and str(archive.absolute()) != state.archive:
                raise InvalidField(
                    f"archive: this cluster runs with {state.archive or 'no archive'}; "
                    "penstock cluster down stops it, then give another one to up"
                )
            return state, _start_missing(root, state, nodes, port, shards)
        servers = NatsServers(root)
        kept = None if archive is None else str(archive.absolute())
        state = LocalState(f"{servers.url}?name=penstock", [], [], kept)
        options = "" if shards is None else f"&shards={shards}"
        try:
            servers.start()
            state.nats = [_describe(each.pid) for each in servers.processes if each is not None]
            began = []
            for number in range(nodes or NODES):
                node_port = port + number if port else 0
                node, at = _start_node(root, state, f"node{number + 1}", node_port, options)
                state.nodes.append(node)
                began.append(at)
            _write_state(root, state)
            for node, at in zip(state.nodes, began, strict=True):
                node.endpoint = _wait_for(root, node, at)
            _check_shards(state, shards)
            _write_state(root, state)
        except BaseException:
            _end(state)
            servers.stop()
            remove_in(root, _STATE)
            raise
        return state, []


def _check_shards(state: LocalState, named: int | None) -> None:
    """Raises InvalidField if a cluster that runs has another number of shards."""
    if named is not None:
        from penstock.cluster.operations import operate

        async def number(operator: "Operator") -> int:
            return operator.shards

        address = read_address(read_url(state.url))
        check_shards(named, asyncio.run(operate(address, number)))


def _start_missing(
    root: Path, state: LocalState, nodes: int | None, port: int, shards: int | None
) -> list[str]:
    """Starts the processes of a cluster that have ended, and more nodes if there should be more."""
    started: list[str] = []
    servers = NatsServers(root, url=state.url)
    for number, server in enumerate(state.nats):
        if not server.is_running:
            servers.start_one(number)
            servers.wait_for(number)
            process = servers.processes[number]
            assert process is not None
            state.nats[number] = _describe(process.pid)
            started.append(f"NATS server {number + 1}")
            _write_state(root, state)
    _check_shards(state, shards)
    for number in range(max(len(state.nodes), nodes or 0)):
        name = f"node{number + 1}"
        if number < len(state.nodes):
            if state.nodes[number].is_running:
                continue
            port_before = urlsplit(state.nodes[number].endpoint).port or 0
            node, at = _start_node(root, state, name, port_before)
            state.nodes[number] = node
        else:
            node, at = _start_node(root, state, name, port + number if port else 0)
            state.nodes.append(node)
        started.append(name)
        _write_state(root, state)
        node.endpoint = _wait_for(root, node, at)
        _write_state(root, state)
    if not started:
        raise StoreInUse(
            f"{root}: a cluster is already running there; penstock cluster down stops it"
        )
    return started


def _start_node(
    root: Path, state: LocalState, name: str, port: int, options: str = ""
) -> tuple[LocalNode, int]:
    """Starts a node; also returns where its output begins in the file."""
    command = [sys.executable, "-m", "penstock", "serve", "--json", "--port", str(port)]
    if state.archive is not None:
        options += f"&archive={quote(state.archive, safe='/')}"
    # The URL contains the password: other users cannot read the environment of a process.
    environment = {**os.environ, "PENSTOCK_STORE": f"{state.url}{options}&node={name}"}
    for variable in ("PENSTOCK_URL", "PENSTOCK_DATA"):
        environment.pop(variable, None)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with os.fdopen(open_in(root, f"{name}.out", flags), "ab") as out:
        begin = os.fstat(out.fileno()).st_size
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return LocalNode(name=name, pid=process.pid, began=_start_ticks(process.pid)), begin


def _wait_for(root: Path, node: LocalNode, begin: int) -> str:
    """Waits until a node has started; the URL of its endpoint. Raises UnavailableError."""
    deadline_s = time.monotonic() + _STARTED_S
    text = ""
    while time.monotonic() < deadline_s:
        text = _read_output(root, node.name, begin)
        # The last part is a line that is not complete.
        for line in text.split("\n")[:-1]:
            if line.startswith("{"):
                return str(json.loads(line)["url"])
        if not node.is_running:
            break
        time.sleep(0.05)
    reason = text.strip().rpartition("\n")[2].removeprefix("penstock: ")
    raise UnavailableError(
        f"{node.name} did not start: {reason or 'it says nothing'} "
        f"(its output is in {root / node.name}.out)"
    )


def _read_output(root: Path, name: str, begin: int) -> str:
    with os.fdopen(open_in(root, f"{name}.out"), "rb") as file:
        file.seek(begin)
        return file.read(_OUTPUT_BYTES_MAX).decode(errors="replace")


def stop_cluster(root: Path) -> int:
    """Stops the processes of a cluster; how many have ended. Raises InvalidField, StoreUnusable."""
    root = root.absolute()
    ended = _end(read_state(root))
    with _checked(root):
        remove_in(root, _STATE)
    return ended


def _end(state: LocalState) -> int:
    """Ends the nodes, then the NATS servers: a node needs them to hand its shards over."""
    ended = 0
    groups: tuple[list[LocalProcess], ...] = ([*state.nodes], state.nats)
    for group in groups:
        alive = [each for each in group if _signal(each, signal.SIGTERM)]
        deadline_s = time.monotonic() + _STOPPED_S
        while any(each.is_running for each in alive) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for each in alive:
            _signal(each, signal.SIGKILL)
        ended += len(alive)
    return ended


def _signal(process: LocalProcess, number: signal.Signals) -> bool:
    """Sends a signal to a process, if it still runs."""
    try:
        # From here on, the number cannot come to mean another process.
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not process.is_running:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _describe(pid: int) -> LocalProcess:
    return LocalProcess(pid=pid, began=_start_ticks(pid))


def _start_ticks(pid: int) -> str | None:
    """The start time of a process in ticks of the system clock; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
