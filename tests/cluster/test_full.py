"""NATS servers without room: commands fail in time, and the shard continues once there is room."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import pytest

from penstock.cluster.nats_servers import NatsServers
from penstock.cluster.retry import COMMAND_TIMEOUT_S
from penstock.errors import BackendLost, StoreFull
from tests.cluster.nodes import TIMEOUT_S, Cluster
from tests.cluster.processes import in_memory
from tests.ports import lasting_port

LIMIT_BYTES = 24_000_000
BODY = b"x" * 200_000


def make_servers(root, **options):
    return NatsServers(root, ports=[lasting_port() for _ in range(6)], **options)


@pytest.fixture
def limited_servers():
    """Servers with a limit of storage."""
    root = Path(tempfile.mkdtemp(prefix="penstock-full-", dir=in_memory()))
    servers = make_servers(root, stored_bytes_max=LIMIT_BYTES)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 MB for the stores of all servers."""
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        warnings.warn("cannot mount a tmpfs: a real full disk is not tested", stacklevel=2)
        pytest.skip("cannot mount a tmpfs")
    yield root
    subprocess.run(["umount", root], check=True)


@asynccontextmanager
async def cluster_on(servers, path):
    cluster = Cluster(f"{servers.url}?name=full&shards=1", path)
    async with cluster.undo:
        yield cluster


class Ballast:
    """A stream of another program on the same servers."""

    def __init__(self, servers):
        self._url = f"nats://penstock:{servers.password}@127.0.0.1:{servers.ports[0]}"

    async def __aenter__(self):
        self._client = await nats.connect(self._url)
        self._streams = self._client.jetstream()
        await self._streams.add_stream(name="ballast", num_replicas=3)
        return self

    async def __aexit__(self, *_):
        await self._client.close()

    async def fill(self, size):
        for _ in range(size // len(BODY)):
            await self._streams.publish("ballast", BODY)

    async def remove(self):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await self._streams.delete_stream("ballast")
                except (nats.errors.Error, TimeoutError):
                    # The servers are choosing a leader.
                    await asyncio.sleep(0.1)
                else:
                    return


async def fill_with_pushes(queues):
    """Pushes until that fails in the documented time; the error, and how many were answered."""
    answered = 0
    while True:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S + 5):
                await queues.push("orders", BODY)
        except (BackendLost, StoreFull) as error:
            return error, answered
        answered += 1


async def until_pushed(queues):
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await queues.push("orders", b"again", dedup_id="again")
            except (BackendLost, StoreFull):
                await asyncio.sleep(0.1)
            else:
                return


def owned_status(cluster):
    (node,) = cluster.nodes.values()
    return node.node.status()["owned"]["0"]


def shown_status(url):
    """What `penstock cluster status` prints."""
    command = [sys.executable, "-m", "penstock", "cluster", "status", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout


def test_servers_at_their_limit_are_reported_and_the_shard_continues(
    limited_servers, tmp_path, caplog
):
    async def check():
        async with cluster_on(limited_servers, tmp_path) as cluster:
            queues = await cluster.open_queue("orders")
            async with Ballast(limited_servers) as ballast:
                await ballast.fill(LIMIT_BYTES * 3 // 4)
                error, answered = await fill_with_pushes(queues)
                assert type(error) is BackendLost
                assert "insufficient resources" in str(error)
                with pytest.raises(StoreFull, match="no room"):
                    await queues.push("orders", b"refused")
                assert "insufficient resources" in owned_status(cluster)["stall"]
                assert "nothing can be appended" in caplog.text
                shown = await asyncio.to_thread(shown_status, cluster.url)
                assert "shard 0 keeps nothing: shard.0: NATS refused it" in shown
                await ballast.remove()
                await until_pushed(queues)
            assert owned_status(cluster)["stall"] == ""
            assert "keeps extents again" in caplog.text
            # What was answered, the push of unknown result, and the last one.
            assert (await queues.stats("orders")).visible == answered + 2

    asyncio.run(check())


@pytest.mark.filterwarnings("default")
def test_servers_whose_disk_was_full_are_enough_once_they_are_restarted(
    small_disk, tmp_path, monkeypatch
):
    """NATS disables JetStream when its disk is full, until it is restarted."""
    monkeypatch.setattr("penstock.cluster.shard_server.STALLED_S", 2.0)

    async def check():
        servers = make_servers(small_disk, stored_bytes_max=1 << 40)
        await asyncio.to_thread(servers.start)
        try:
            async with cluster_on(servers, tmp_path) as cluster:
                queues = await cluster.open_queue("orders")
                error, answered = await fill_with_pushes(queues)
                assert type(error) is BackendLost
                assert "JetStream is disabled" in owned_status(cluster)["stall"]
                command = ["mount", "-o", "remount,size=256m", str(small_disk)]
                await asyncio.to_thread(subprocess.run, command, check=True)
                await asyncio.to_thread(servers.stop)
                await asyncio.to_thread(servers.start)
                await until_pushed(queues)
                assert (await queues.stats("orders")).visible == answered + 2
        finally:
            await asyncio.to_thread(servers.stop)

    asyncio.run(check())
