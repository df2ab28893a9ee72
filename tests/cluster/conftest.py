"""Three NATS servers for all tests of the cluster, started once."""

import asyncio
import itertools
import json

import pytest

from penstock.cluster.nats_servers import NatsServers
from tests.cluster.nodes import Cluster
from tests.cluster.processes import LocalCluster, penstock_cluster

_names = (f"test{n}" for n in itertools.count())


@pytest.fixture(scope="session")
def nats_servers(tmp_path_factory):
    servers = NatsServers(tmp_path_factory.mktemp("cluster"))
    servers.start()
    yield servers
    servers.stop()


@pytest.fixture
def cluster_url(nats_servers):
    """The URL of a cluster of its own on the shared servers."""
    return f"{nats_servers.url}?name={next(_names)}&shards=2"


@pytest.fixture
def on_cluster(cluster_url, quick_path):
    def run(work, shards=4):
        async def within():
            cluster = Cluster(cluster_url.replace("shards=2", f"shards={shards}"), quick_path)
            async with cluster.undo:
                await work(cluster)

        asyncio.run(within())

    return run


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory):
    """Three nodes as processes, and their archive."""
    root = tmp_path_factory.mktemp("local")
    options = ("--json", "--port", "0", "--shards", "4", "--archive", str(root / "archive"))
    up = penstock_cluster("up", root, *options)
    cluster = LocalCluster(root, json.loads(up))
    yield cluster
    cluster.end_restarted()
    penstock_cluster("down", root)
