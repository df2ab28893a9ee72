"""Nodes of a cluster in the process of a test, on real NATS servers."""

import asyncio
from contextlib import AsyncExitStack

from penstock.aio import AsyncQueues
from penstock.cluster.address import read_address
from penstock.cluster.membership import SHARDS
from penstock.cluster.open import open_node, open_router
from penstock.cluster.placement import ranked
from penstock.url import read_url

TIMEOUT_S = 60


class Cluster:
    """Some nodes, each with its own connection, and routers."""

    def __init__(self, url, path):
        self.url = url
        self.address = read_address(read_url(url))
        self.shards = self.address.shards or SHARDS
        self.path = path
        self.nodes = {}
        self.archive = None
        self.undo = AsyncExitStack()

    async def add(self, *names):
        for name in names:
            path = self.path / name
            options = {"directory": path, "archive": self.archive}
            service = await open_node(self.address, node=name, **options)
            self.nodes[name] = service
            self.undo.push_async_callback(self.end, name)

    async def end(self, name):
        service = self.nodes.pop(name, None)
        if service is not None:
            await service.close()

    async def crash(self, name):
        """Ends a node as a kill would: it hands nothing over, and its connection is closed."""
        service = self.nodes.pop(name)
        await service.node._client.close()
        await service.node.abandon()

    async def connect(self, **options):
        router = await open_router(self.address, **options)
        self.undo.push_async_callback(router.close)
        return AsyncQueues(router)

    async def open_queue(self, name, nodes=("a",), **settings):
        """Adds nodes, and creates a queue through a router of its own, which is returned."""
        await self.add(*nodes)
        queues = await self.connect()
        await queues.create(name, **settings)
        return queues

    async def until(self, is_so):
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def owners(self):
        return {shard: name for name, service in self.nodes.items() for shard in service.node.owned}

    async def until_settled(self):
        """Waits until every shard is owned by the first node in its rank, so that none moves."""
        belong = {shard: ranked(shard, self.nodes)[0] for shard in range(self.shards)}
        await self.until(lambda: self.owners() == belong)

    def owned_shards(self):
        return [each for node in self.nodes.values() for each in node.node.owned.values()]

    async def until_owned(self, *names):
        """Waits until all shards are owned, and each of these nodes has some."""
        await self.until(
            lambda: len(self.owners()) == self.shards and set(names) <= set(self.owners().values())
        )
