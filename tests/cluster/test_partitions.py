"""NATS servers in network namespaces of their own, with the links between them cut.

Each server has a link to every other one and one to this process, and one node connected to it.
The node and the clients of the minority must get no answers, the majority must continue, and all
must recover when the links are up again.
"""

import asyncio
import itertools
import os
import subprocess
import time
from contextlib import AsyncExitStack

import pytest

from penstock.aio import AsyncQueues
from penstock.cluster.address import read_address
from penstock.cluster.nats_servers import find_program
from penstock.cluster.open import open_node, open_router
from penstock.errors import BackendLost
from penstock.url import read_url
from tests.cluster.ledger import LoadLedger
from tests.conftest import FULL
from tests.measure import SLACK

PARTITIONS = 200 if FULL else 6
HEALED_S = 15 * SLACK
TIMEOUT_S = 60
SERVERS = (1, 2, 3)
CONFIGURATION = """
server_name: "n{number}"
listen: "0.0.0.0:4222"
max_payload: 8MB
ping_interval: "1s"
ping_max: 2
authorization {{ user: "penstock", password: "secret" }}
jetstream {{ store_dir: "{root}/{number}", sync_interval: always }}
cluster {{
  name: "penstock"
  listen: "0.0.0.0:6222"
  no_advertise: true
  authorization {{ user: "penstock", password: "secret" }}
  routes: [{routes}]
}}
"""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Three namespaces; a link between each two of them, and from each to this process."""

    def __init__(self):
        self.start = f"pst{os.getpid() % 10_000}"
        # A network that no other test run uses at the same time.
        self.net = f"10.{200 + os.getpid() % 50}"

    def name(self, number):
        return f"{self.start}n{number}"

    def device(self, at, to):
        return f"{self.start}v{at}{to}"

    def address(self, at, to):
        """The address of server `at` on its link to `to`; 0 is this process."""
        low, high = sorted((at, to))
        return f"{self.net}.{10 * low + high}.{1 if at == low else 2}"

    def make(self):
        for number in SERVERS:
            ip("netns", "add", self.name(number))
            ip("-n", self.name(number), "link", "set", "lo", "up")
        for one, two in itertools.combinations((0, *SERVERS), 2):
            ends = self.device(one, two), self.device(two, one)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for at, to, device in ((one, two, ends[0]), (two, one, ends[1])):
                inside = ["-n", self.name(at)] if at else []
                if at:
                    ip("link", "set", device, "netns", self.name(at))
                ip(*inside, "addr", "add", f"{self.address(at, to)}/30", "dev", device)
                ip(*inside, "link", "set", device, "up")

    def remove(self):
        for number in SERVERS:
            # The links end with the namespaces.
            subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True)

    def cut(self, one, two):
        """Cuts the link between two servers."""
        ip("-n", self.name(one), "link", "set", self.device(one, two), "down")

    def join(self, one, two):
        ip("-n", self.name(one), "link", "set", self.device(one, two), "up")

    def cut_one_way(self, one, two):
        """Drops what one server sends to the other, but not the other direction."""
        name = self.name(one)
        ip("-n", name, "route", "add", "blackhole", f"{self.address(two, one)}/32")

    def allow_both_ways(self, one, two):
        ip("-n", self.name(one), "route", "del", "blackhole", f"{self.address(two, one)}/32")


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory):
    """The network with a NATS server in each namespace."""
    network = Network()
    processes = []
    try:
        try:
            network.make()
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        root = tmp_path_factory.mktemp("partitions")
        for number in SERVERS:
            routes = ", ".join(
                f'"nats-route://penstock:secret@{network.address(other, number)}:6222"'
                for other in SERVERS
                if other != number
            )
            path = root / f"{number}.conf"
            path.write_text(CONFIGURATION.format(number=number, root=root, routes=routes))
            command = ["ip", "netns", "exec", network.name(number), find_program(), "-c", str(path)]
            with open(root / f"{number}.out", "wb") as out:
                processes.append(subprocess.Popen(command, stdout=out, stderr=out))
        yield network
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(TIMEOUT_S)
        network.remove()


class SpreadNodes:
    """A node and a router at each server."""

    def __init__(self, network, path):
        self.network = network
        self.path = path
        self.undo = AsyncExitStack()
        self.queues = {}

    def address(self, number):
        place = f"{self.network.address(number, 0)}:4222"
        url = f"cluster:nats://penstock:secret@{place}?insecure=1&shards=3"
        return read_address(read_url(url))

    async def start(self):
        for number in SERVERS:
            node = await self.open(open_node, number, node=f"node{number}")
            self.undo.push_async_callback(node.close)
        for number in SERVERS:
            router = await self.open(open_router, number)
            self.undo.push_async_callback(router.close)
            self.queues[number] = AsyncQueues(router)

    async def open(self, kind, number, **more):
        if kind is open_node:
            more["directory"] = self.path / str(number)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    return await kind(self.address(number), **more)
                except BackendLost:
                    # The servers are starting.
                    await asyncio.sleep(0.1)


async def disturb(spread, kind, number, ledgers):
    """Cuts server `number` off until the others have answered; the time to recover after that."""
    network = spread.network
    others = [each for each in SERVERS if each != number]
    change, back = {
        "majority": (network.cut, network.join),
        "one-way": (network.cut_one_way, network.allow_both_ways),
        "bridge": (network.cut, network.join),
    }[kind]
    cut = others[:1] if kind == "bridge" else others
    for other in cut:
        change(number, other)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            # In a bridge one server still reaches both others.
            await asyncio.gather(*(ledgers[each].next_answers(30) for each in others[-1:]))
        if kind == "majority":
            # Nothing answers, or a node that was the owner says that it cannot know.
            with pytest.raises((TimeoutError, BackendLost)):
                async with asyncio.timeout(1):
                    await spread.queues[number].push("minority", b"refused")
    finally:
        for other in cut:
            back(number, other)
    began_s = time.monotonic()
    async with asyncio.timeout(HEALED_S):
        await asyncio.gather(*(ledger.next_answers(10) for ledger in ledgers.values()))
    return time.monotonic() - began_s


@pytest.mark.service("iproute2")
def test_partitions_between_the_servers_lose_nothing(partitioned, tmp_path, record_property):
    """Row 11: majority, one-way and bridge; the minority refuses, and it heals within 15 s."""
    healed = []

    async def work():
        spread = SpreadNodes(partitioned, tmp_path)
        async with spread.undo:
            await spread.start()
            ledgers = {
                number: LoadLedger(queues, [f"at{number}", f"and{number}"])
                for number, queues in spread.queues.items()
            }
            await spread.queues[1].create("minority")
            for ledger in ledgers.values():
                await ledger.begin()
                await ledger.next_answers(20)
            kinds = itertools.cycle(("majority", "one-way", "bridge"))
            for count, kind in zip(range(PARTITIONS), kinds, strict=False):
                healed.append(await disturb(spread, kind, SERVERS[count % 3], ledgers))
            return [wrong for ledger in ledgers.values() for wrong in await ledger.end()]

    assert asyncio.run(work()) == []
    figure = f"{len(healed)} partitions, 0 answered lost, healed in {max(healed):.1f} s"
    record_property("figure", figure)
