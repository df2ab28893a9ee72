"""The RabbitMQ adapter holds the contract, but for what it lacks, against a real broker.

Time is real, and the broker's own: the suite's second is 70 ms.
"""

import pytest

import penstock
import penstock.aio
from penstock.testing.conformance import ConformanceSuite, Contract
from penstock.testing.conformance.dead_letters import DeadLetterContract
from tests.conformance.awaited import FromAnyThread
from tests.conftest import FULL

# How often in a row the same state is read before it is taken for what stays.
ALIKE = 8
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
    """A delay is many hops of a message, and each takes a moment."""

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
            return all(state == states[-1] for state in states[-ALIKE:]) and len(states) > ALIKE

        self.until(is_settled)
        return states[-1]
