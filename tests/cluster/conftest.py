"""Three NATS servers for the tests of a module, and clusters on them."""

import asyncio
import itertools
import json

import pytest

from tests.cluster.nodes import Cluster
from tests.cluster.processes import LocalCluster, nats_in_memory, penstock_cluster

_names = (f"test{n}" for n in itertools.count())


# Per module, not per session: unused servers would take processor time from other tests.
@pytest.fixture(scope="module")
def nats_servers():
    with nats_in_memory() as servers:
        yield servers


@pytest.fixture
def cluster_url(nats_servers):
    """The URL of a new cluster on the shared servers."""
    return f"{nats_servers.url}?name={next(_names)}&shards=2"


@pytest.fixture
def on_cluster(cluster_url, quick_path, monkeypatch):
    # Shards are moved sooner than in production: all nodes of a test start at once.
    monkeypatch.setattr("penstock.cluster.ownership._SETTLED_S", 0.2)

    def run(work, shards=4):
        async def within():
            cluster = Cluster(cluster_url.replace("shards=2", f"shards={shards}"), quick_path)
            async with cluster.undo:
                await work(cluster)

        asyncio.run(within())

    return run


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory):
    """Three nodes as processes, with an archive."""
    root = tmp_path_factory.mktemp("local")
    options = ("--json", "--port", "0", "--shards", "4", "--archive", str(root / "archive"))
    up = penstock_cluster("up", root, *options)
    cluster = LocalCluster(root, json.loads(up))
    yield cluster
    cluster.down()
