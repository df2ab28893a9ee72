"""The benchmark of brokers checks every lifecycle; a broker that loses a message voids the run."""

import pytest

from penstock.service import CreateQueue, Purge
from tests.server.carrot.conftest import BrokerInThread

carrot = pytest.importorskip("benchmarks.carrot", reason="the source archive has no benchmarks")
from benchmarks import harness  # noqa: E402


@pytest.fixture
def broker():
    started = BrokerInThread()
    started.submit(CreateQueue(carrot.QUEUE))
    yield started
    started.stop()


@pytest.mark.parametrize(("name", "depth"), [("carrot", 1), ("carrot", 16), ("carrot batched", 16)])
def test_a_driver_puts_reserves_and_deletes_every_message_once(broker, name, depth):
    assert carrot.lifecycles(broker.port, name, depth, 512) > 0
    assert broker.server.requests_seen >= 3 * 512 // (depth if "batched" in name else 1)
    assert broker.stats(carrot.QUEUE).messages == 0


def test_a_message_that_the_benchmark_did_not_push_voids_the_run(broker):
    broker.ask(b"\x00\xff" + carrot.QUEUE.encode() + b"\0" + b"y" * 255)
    broker.submit(Purge(carrot.QUEUE))
    with broker.connect() as client:
        client.put(carrot.QUEUE, b"y" * carrot.BODY_BYTES)
    with pytest.raises(harness.Void, match="1 were never pulled, and 1 were pulled twice"):
        carrot.lifecycles(broker.port, "carrot", 1, 16)


def test_answers_of_beanstalkd_and_redis_are_read_when_they_are_complete():
    body = b"x" * carrot.BODY_BYTES
    reserved = b"RESERVED 7 256\r\n" + body + b"\r\n"
    assert carrot.BEANSTALK.reserved(reserved[:-1], 1) is None
    assert carrot.BEANSTALK.reserved(reserved * 2, 2) == ([body, body], [b"7", b"7"])
    popped = b"*2\r\n$5\r\nbench\r\n$256\r\n" + body + b"\r\n"
    assert carrot.REDIS.reserved(popped[:-1], 1) is None
    assert carrot.REDIS.reserved(popped * 2, 2) == ([body, body], [])
