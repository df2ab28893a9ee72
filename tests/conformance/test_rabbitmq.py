"""Row 8: the RabbitMQ adapter fulfils the contract, except for its LACKS, at a real broker.

Time is real time, by the broker's clock; a second of the suite is 70 ms.
"""

import pytest

import penstock
import penstock.aio
from penstock.testing.conformance import ConformanceSuite, Contract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from tests.conformance.awaited import FromAnyThread
from tests.conftest import FULL

# How often in a row the same state must be read until it counts as final.
EQUAL_READS = 8
pytestmark = pytest.mark.service("rabbitmq-server")


@pytest.fixture(scope="module")
def blocking(rabbit):
    with penstock.connect(rabbit.url) as queues:
        yield queues


@pytest.fixture(scope="module")
def awaited(rabbit):
    queues = FromAnyThread(lambda: penstock.aio.connect(rabbit.url + "?queues=quorum"))
    yield queues
    queues.end()


class OnABroker(Contract):
    """The broker moves a delayed message through several queues, so delays end a little late."""

    SCALE = 0.07
    LATE_S = 0.06


class TestRabbitmq(OnABroker, ConformanceSuite):
    """The whole suite, blocking, on classic queues."""

    @pytest.fixture
    def queues(self, blocking):
        return blocking


class TestRabbitmqQuorum(OnABroker, ConformanceSuite if FULL else DeadLetterContract):  # type: ignore[misc]
    """Quorum queues, through asyncio: dead letters, and with FULL the whole suite."""

    @pytest.fixture
    def queues(self, awaited):
        return awaited

    def seen(self):
        return self._settled(super().seen)

    def counts(self, queue):
        return self._settled(lambda: super(TestRabbitmqQuorum, self).counts(queue))

    def _settled(self, look):
        """The state that stays: a quorum queue counts returned messages a moment later."""
        states = [look()]

        def is_settled():
            states.append(look())
            return (
                all(state == states[-1] for state in states[-EQUAL_READS:])
                and len(states) > EQUAL_READS
            )

        self.until(is_settled)
        return states[-1]
