"""A cluster of three RabbitMQ nodes: quorum queues outlive the loss of one."""

import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import penstock
from penstock.backends.rabbitmq.target import read_target
from penstock.errors import BackendLost, InvalidField, UnavailableError
from penstock.url import read_url
from tests.conftest import FULL
from tests.ports import lasting_port
from tests.rabbit import Broker

pytestmark = pytest.mark.service("rabbitmq-server")
TIMEOUT_S = 60
in_full = pytest.mark.skipif(not FULL, reason="with FULL=1: three nodes take their time to start")


def test_the_nodes_of_a_url_are_read_and_tried_in_order():
    target = read_target(read_url("amqp://u:secret@a:1/v?nodes=b:2,c,[::1]:3"))
    assert [(node.host, node.port) for node in target.nodes] == [
        ("a", 1), ("b", 2), ("c", 5672), ("::1", 3)
    ]  # fmt: skip
    assert {node.vhost for node in target.nodes} == {"v"}
    for bad in ("b:x", ":5", "b:0", "b/c", "u@b:1"):
        with pytest.raises(InvalidField, match="nodes="):
            read_target(read_url(f"amqp://u:secret@a:1/?nodes={bad}"))


def test_a_node_that_cannot_be_reached_is_skipped(rabbit):
    dead_port = lasting_port()
    url = f"amqp://127.0.0.1:{dead_port}/?nodes=127.0.0.1:{rabbit.port}"
    with penstock.connect(url) as queues:
        assert isinstance(queues.list(), list)
    with pytest.raises(BackendLost, match=f"{dead_port}: cannot connect"):
        penstock.connect(f"amqp://127.0.0.1:{dead_port}/?nodes=127.0.0.1:{dead_port}")


@pytest.fixture(scope="module")
def nodes():
    """Three brokers that are one cluster."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-rabbit-"))
    brokers: list[Broker] = []
    try:
        for number in range(3):
            (directory / str(number)).mkdir()
            first = brokers[0] if brokers else None
            brokers.append(Broker(directory / str(number), first))
            brokers[-1].start()
        # A quorum queue has a member on each node that is known to run when it is declared.
        brokers[0].control("await_online_nodes", "3")
        yield brokers
    finally:
        for broker in brokers[:0:-1]:
            broker.end(is_last=False)
        for broker in brokers[:1]:
            broker.end()
        shutil.rmtree(directory, ignore_errors=True)


def url_of(nodes, first=0):
    ordered = [*nodes[first:], *nodes[:first]]
    others = ",".join(f"127.0.0.1:{node.port}" for node in ordered[1:])
    return f"{ordered[0].url}?queues=quorum&timeout=20&nodes={others}"


def again(use):
    """Repeats a call that fails for a while only, until a node answers, for up to TIMEOUT_S."""
    pause = threading.Event()
    for _ in range(TIMEOUT_S * 5):
        with suppress(UnavailableError):
            return use()
        pause.wait(0.2)
    return use()


@in_full
def test_a_quorum_queue_loses_nothing_when_the_node_in_use_is_killed(nodes):
    """Row 12: pushes that were confirmed are there, whichever node is killed."""
    with penstock.connect(url_of(nodes)) as queues:
        queues.create("orders", visibility_timeout=60)
        # A quorum queue that is younger than a second may not survive a kill.
        again(lambda: queues.push("orders", b"first"))
        confirmed = [b"first"]
        for number in range(60):
            if number == 20:
                nodes[0].stop(signal.SIGKILL)
            body = b"%d" % number
            again(lambda body=body: queues.push("orders", body))
            confirmed.append(body)
        # A new connection must not need the killed node.
        with penstock.connect(url_of(nodes, 1)) as other:
            assert other.list() == ["orders"]
            taken = []
            while claim := again(lambda: other.pull("orders")):
                taken.append(claim.body)
                again(lambda claim=claim: other.delete(claim))
        # A push that failed may have arrived, and was pushed again: twice at most, and never lost.
        assert set(taken) == set(confirmed)
        assert len(taken) <= len(confirmed) + 3
        nodes[0].start()
        again(lambda: queues.push("orders", b"last"))
        assert again(lambda: queues.pull("orders")).body == b"last"
