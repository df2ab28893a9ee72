"""Opens `cluster:nats://…`: a router, or a node.

`penstock.connect` opens a router: it owns no shards, and may be started and stopped at any time.
`penstock serve` opens a node, which owns some of the shards, and a router in the same process that
executes the commands of its clients.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from penstock.backends.portal import Portal
from penstock.clock import Clock
from penstock.cluster.address import ClusterAddress, read_address, read_node_name
from penstock.cluster.jetstream import JetStream, open_client
from penstock.cluster.log import ReadRegister, Unanswered
from penstock.cluster.membership import (
    ARCHIVE_KEY,
    ARCHIVE_OFF,
    ARCHIVE_ON,
    REPLICAS,
    create_or_read_settings,
    read_cluster_settings,
    set_register,
)
from penstock.cluster.node import ClusterNode
from penstock.cluster.node_clock import open_clock
from penstock.cluster.node_directory import NodeDirectory
from penstock.cluster.router import Router
from penstock.errors import BackendLost, InvalidField
from penstock.service import REDRIVE_MAX, AsyncQueueService, Command, QueueService
from penstock.url import BackendUrl

R = TypeVar("R")
# How long a router waits for the first node of a new cluster.
_FIRST_NODE_S: Final = 10.0


def open_service(url: BackendUrl, clock: Clock | None) -> QueueService:
    """The blocking service. Raises InvalidField or BackendLost."""
    _refuse_clock(clock)
    address = read_address(url)
    return Portal(lambda: open_router(address))


async def open_async_service(url: BackendUrl, clock: Clock | None) -> AsyncQueueService:
    """The asyncio service. Raises InvalidField or BackendLost."""
    _refuse_clock(clock)
    return await open_router(read_address(url))


def _refuse_clock(clock: Clock | None) -> None:
    if clock is not None:
        raise InvalidField("clock: a cluster uses the clocks of its nodes; leave it out")


async def open_router(
    address: ClusterAddress, draw: Callable[[int], int] = secrets.randbelow
) -> Router:
    """A router to a cluster that has been started. Raises BackendLost.

    `draw` gives a random number below its argument.
    """
    client = await open_client(address, "penstock router")
    replicated = JetStream(client, address.name)
    loop = asyncio.get_running_loop()
    give_up = loop.time() + _FIRST_NODE_S
    try:
        while True:
            try:
                found = await replicated.execute(ReadRegister("cluster"))
            except Unanswered:
                found = None
            if found is not None:
                settings = read_cluster_settings(found)
                return await Router.open(replicated, client, address.name, settings, draw=draw)
            if loop.time() > give_up:
                raise BackendLost(
                    f"{address.shown}: the cluster {address.name!r} has no node yet; "
                    "start one with penstock serve --store URL"
                )
            await asyncio.sleep(0.1)
    except BaseException:
        await client.close()
        raise


class NodeService:
    """The `AsyncQueueService` of a process that also owns shards."""

    LACKS: ClassVar[Mapping[str, str]] = Router.LACKS
    redrive_max: int = REDRIVE_MAX

    def __init__(self, node: ClusterNode, router: Router) -> None:
        self.node = node
        self.router = router

    async def execute(self, command: Command[R]) -> R:
        """Executes the command on the owner of its shard."""
        return await self.router.execute(command)

    async def announce(self, endpoint: str) -> None:
        """Writes the URL of this process's endpoint to the cluster's registers."""
        await self.node.announce(endpoint)

    async def close(self) -> None:
        """Hands the shards over and leaves the cluster."""
        await self.node.stop()
        await self.router.close()


async def open_serving_node(url: BackendUrl) -> NodeService:
    """The node that `penstock serve --store URL` is. Raises PenstockError."""
    archive = url.options.get("archive")
    if archive is not None and not archive.strip():
        raise InvalidField("url: archive= is empty; give a directory, or archive=none")
    return await open_node(read_address(url), node=read_node_name(url), archive=archive)


async def open_node(
    address: ClusterAddress,
    *,
    node: str | None = None,
    directory: Path | None = None,
    clock: Clock | None = None,
    archive: str | None = None,
) -> NodeService:
    """Starts a node; creates the cluster if there is none. Raises BackendLost or StoreUnusable.

    `directory` is for the local copies of shards; it is removed when the node stops. `archive` is
    the directory of the archive, or "none" to end the archive of the whole cluster.
    """
    archive_path = None if archive in (None, "none") else Path(archive or "")
    name = node or f"{socket.gethostname().partition('.')[0]}-{secrets.token_hex(3)}"
    client = await open_client(address, f"penstock node {name}")
    replicated = JetStream(client, address.name)
    copies: NodeDirectory | None = None
    try:
        await replicated.prepare_registers(address.replicas or REPLICAS)
        settings = await replicated.run(create_or_read_settings(address.shards, address.replicas))
        await replicated.prepare(settings.shards, settings.replicas)
        archive_revision = 0
        if archive is not None:
            value = ARCHIVE_OFF if archive_path is None else ARCHIVE_ON
            archive_revision = await replicated.run(set_register(ARCHIVE_KEY, value))
        node_clock = await open_clock(replicated, settings.shards)
        router = await Router.open(replicated, client, address.name, settings, node_clock.now_ms)
        copies = NodeDirectory(directory)
        member = ClusterNode(
            name,
            replicated,
            client,
            address.name,
            settings,
            copies,
            node_clock,
            clock,
            archive_path,
            archive_revision,
        )
        await member.start(router)
    except BaseException:
        if copies is not None:
            copies.remove()
        await client.close()
        raise
    return NodeService(member, router)
