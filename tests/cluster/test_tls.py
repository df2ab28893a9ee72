"""Nodes and routers connect to NATS over TLS; certificates and passwords are checked."""

import asyncio
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.aio import AsyncQueues
from penstock.cluster.address import read_address
from penstock.cluster.nats_servers import find_program
from penstock.cluster.open import open_node, open_router
from penstock.errors import BackendLost
from penstock.url import read_url
from tests.ports import lasting_port
from tests.rabbit import CERTIFICATE

pytestmark = [
    pytest.mark.service("openssl"),
    pytest.mark.usefixtures("failed_handshakes_collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONFIGURATION = """
listen: "127.0.0.1:{port}"
authorization {{ user: "penstock", password: "right" }}
jetstream {{ store_dir: "{root}/data", sync_interval: always }}
tls {{ cert_file: "{root}/cert.pem", key_file: "{root}/key.pem" }}
"""


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory):
    """A NATS server that requires TLS: its port, and the directory of its certificate."""
    root = tmp_path_factory.mktemp("tls")
    make_certificate(root)
    port = lasting_port()
    (root / "nats.conf").write_text(CONFIGURATION.format(port=port, root=root))
    with nats_server(root / "nats.conf"):
        yield port, root


def make_certificate(root: Path) -> None:
    files = ["-keyout", str(root / "key.pem"), "-out", str(root / "cert.pem")]
    subprocess.run([*CERTIFICATE, *files], check=True, capture_output=True)


@contextmanager
def nats_server(configuration):
    process = subprocess.Popen(
        [find_program(), "-c", str(configuration)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "Server is ready" in line:
                break
        yield process
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def address(port, ca, user="penstock:right"):
    return read_address(
        read_url(f"cluster:tls://{user}@127.0.0.1:{port}?ca={ca}&shards=2&replicas=1")
    )


def test_a_node_and_a_router_work_over_tls(tls_server, tmp_path):
    port, root = tls_server

    async def work():
        at = address(port, root / "cert.pem")
        node = await open_node(at, node="a", directory=tmp_path / "a")
        queues = AsyncQueues(await open_router(at))
        try:
            await queues.create("orders")
            await queues.push("orders", b"secret")
            claim = await queues.pull("orders", wait=10)
            assert claim is not None
            assert claim.body == b"secret"
        finally:
            await queues.service.close()
            await node.close()

    asyncio.run(work())


@pytest.mark.parametrize("wrong", ["authority", "password", "no password"])
def test_a_wrong_authority_or_password_is_refused(tls_server, tmp_path, wrong):
    port, root = tls_server
    ca, user = root / "cert.pem", "penstock:right"
    if wrong == "authority":
        make_certificate(tmp_path)
        ca = tmp_path / "cert.pem"
    elif wrong == "password":
        user = "penstock:wrong-0815"
    else:
        user = "penstock"

    async def work():
        with pytest.raises(BackendLost) as caught:
            await open_router(address(port, ca, user))
        return str(caught.value)

    error = asyncio.run(work())
    assert f"127.0.0.1:{port}" in error
    assert "0815" not in error
    assert ("certificate" in error.lower()) == (wrong == "authority")


def test_a_client_without_tls_is_refused(tls_server):
    port, _ = tls_server

    async def work():
        url = f"cluster:nats://penstock:right@127.0.0.1:{port}"
        with pytest.raises(BackendLost):
            await open_router(read_address(read_url(url)))

    asyncio.run(work())
