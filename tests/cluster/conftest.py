"""Three NATS servers for all tests of the cluster, started once."""

import itertools

import pytest

from penstock.cluster.nats_servers import NatsServers

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
