"""A cluster of real processes, started by `penstock cluster up`, for tests."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.cluster.address import read_address
from penstock.cluster.log import Unanswered
from penstock.cluster.nats_servers import NatsServers, find_program
from penstock.cluster.operations import operate
from penstock.url import read_url
from tests.conftest import MEMORY
from tests.ports import lasting_port

TIMEOUT_S = 60
POLL_S = 0.05
# All nodes are asked each time.
STATUS_S = 0.2


def in_memory():
    """A directory in memory, if it has enough room for the stores of three servers."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1 << 30
    return MEMORY if has_room else None


@contextmanager
def nats_in_memory():
    """Three NATS servers with their files in memory: these tests do not simulate power cuts."""
    root = Path(tempfile.mkdtemp(prefix="penstock-", dir=in_memory()))
    # The system would give ports that it may give to other processes before the servers listen.
    servers = NatsServers(root, ports=[lasting_port() for _ in range(6)])
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
        shutil.rmtree(root, ignore_errors=True)


def penstock_cluster(action, root, *more):
    """Runs `penstock cluster ACTION`; its output."""
    command = [sys.executable, "-m", "penstock", "cluster", action, "--directory", str(root)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


class LocalCluster:
    """The processes of a cluster."""

    def __init__(self, root, state):
        self.root = root
        self.archive = root / "archive"
        self.url = state["url"]
        self.nodes = {node["name"]: node for node in state["nodes"]}
        self.nats = [each["pid"] for each in state["nats"]]
        self.restarted = []
        self.restarted_nats = []
        self.is_up = True
        self.address = read_address(read_url(self.url))

    async def status(self):
        return await operate(self.address, lambda each: each.status())

    async def until_replaced(self, shard, owner, timeout_s):
        """Waits until the shard's register has another owner."""

        async def look(operator):
            async with asyncio.timeout(timeout_s):
                while await operator.owner(shard) == owner:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)

        await operate(self.address, look)

    def spread(self, queue, *shards):
        """Spreads a queue, or returns how it is spread, by the command line."""
        words = [queue, *map(str, shards), "--json"]
        return json.loads(penstock_cluster("spread", self.root, *words))

    def move_queue(self, queue, to):
        """Moves a queue to a shard, by the command line."""
        return json.loads(
            penstock_cluster("move-queue", self.root, queue, "--to", str(to), "--json")
        )

    def reshard(self, shards):
        """Adds shards, by the command line."""
        return json.loads(penstock_cluster("reshard", self.root, str(shards), "--json"))

    async def owner(self, shard):
        return await operate(self.address, lambda each: each.owner(shard))

    async def until(self, is_so):
        """Waits until `is_so` holds for the status of every shard."""

        async def look(operator):
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    # After a NATS server was killed, the registers have no leader for some time.
                    with suppress(Unanswered):
                        if all(map(is_so, (await operator.status()).shards)):
                            return
                    await asyncio.sleep(STATUS_S)

        await operate(self.address, look)

    async def until_served(self):
        """Waits until every shard has an owner that answers, and a standby."""
        await self.until(lambda each: each.is_live and each.standby)

    async def until_archived(self):
        """Waits until everything that was answered is in the archive."""
        await self.until(lambda each: each.is_live and not each.unarchived_bytes)

    def signal(self, node, number):
        os.kill(self.nodes[node]["pid"], number)

    def start_again(self, node):
        """Starts a node that was killed."""
        store = f"{self.url}&node={node}&archive={self.archive}"
        environment = {**os.environ, "PENSTOCK_STORE": store}
        environment.pop("PENSTOCK_URL", None)
        with open(self.root / f"{node}.out", "ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "serve", "--port", "0"],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.nodes[node]["pid"] = process.pid
        self.restarted.append(process)

    def start_nats_again(self, number):
        """Starts a NATS server that was killed."""
        configuration = self.root / "nats" / f"{number + 1}.conf"
        with open(self.root / "nats" / f"{number + 1}.out", "ab") as out:
            process = subprocess.Popen(
                [find_program(), "-c", str(configuration)],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.nats[number] = process.pid
        self.restarted_nats.append(process)

    def down(self):
        """Stops everything; the nodes hand over through the NATS servers, which end last.

        Returns how many processes the command says that it ended.
        """
        if not self.is_up:
            return 0
        self.is_up = False
        end(self.restarted)
        done = json.loads(penstock_cluster("down", self.root, "--json"))
        end(self.restarted_nats)
        return done["ended"]


def end(processes):
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(TIMEOUT_S)
