"""A cluster of real processes, as `penstock cluster up` starts it, for tests."""

import asyncio
import json
import os
import subprocess
import sys

from penstock.cluster.address import read_address
from penstock.cluster.operations import operate
from penstock.url import read_url

PATIENCE_S = 60


def penstock_cluster(action, root, *more):
    """What the command prints."""
    command = [sys.executable, "-m", "penstock", "cluster", action, "--directory", str(root)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


class LocalCluster:
    """The processes of a cluster, by what they are."""

    def __init__(self, root, state):
        self.root = root
        self.archive = root / "archive"
        self.url = state["url"]
        self.nodes = {node["name"]: node for node in state["nodes"]}
        self.nats = [each["pid"] for each in state["nats"]]
        self.restarted = []

    async def status(self):
        return await operate(read_address(read_url(self.url)), lambda each: each.status())

    def spread(self, queue, *shards):
        """Spreads a queue, or asks how it is spread, as people do."""
        words = [queue, *map(str, shards), "--json"]
        return json.loads(penstock_cluster("spread", self.root, *words))

    async def owner(self, shard):
        return (await self.status()).shards[shard].owner

    async def until_served(self):
        """Waits until every shard has an owner that answers, and a standby."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await self.status()
                if all(each.is_live and each.standby for each in status.shards):
                    return

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

    def end_restarted(self):
        for process in self.restarted:
            process.terminate()
        for process in self.restarted:
            process.wait(PATIENCE_S)
