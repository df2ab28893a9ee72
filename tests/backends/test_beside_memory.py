"""Row 8: random commands get the same replies from a store on files, or elsewhere, as in memory.

A store on files is closed and opened again now and then, which must change no later reply. Pytest
prints a seed that fails; it repeats the same run.
"""

from contextlib import ExitStack

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.backends.remote.asynchronous import AsyncRemote
from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.client import Queues
from penstock.clock import ManualClock
from tests.backends.beside import STEPS, ServicePair
from tests.conftest import FULL
from tests.measure import IN_SCORE
from tests.server.conftest import ServerInThread

SEEDS = range(2_000 if FULL else 20 if IN_SCORE else 4)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def memory(clock):
    with penstock.connect("memory:", clock=clock) as queues:
        yield queues


@pytest.fixture
def server(clock, quick_path):
    server = ServerInThread(quick_path, clock=clock)
    yield server
    server.stop()


def run(pair):
    pair.create_queues()
    for _ in range(STEPS):
        pair.step()
    pair.compare_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_have_the_same_replies_on_files_that_are_reopened(
    seed, clock, memory, quick_path
):
    url = f"file:{quick_path / 'store'}?embedded=1&durability=os"
    with ExitStack() as stack:

        def opened():
            # Closes the one before.
            stack.pop_all().close()
            return stack.enter_context(penstock.connect(url, clock=clock))

        run(ServicePair(memory, opened(), clock, seed, reopen=opened))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_have_the_same_replies_by_a_socket(seed, clock, memory, server):
    with Queues(Remote(server.endpoint)) as queues:
        run(ServicePair(memory, queues, clock, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_have_the_same_replies_by_tcp_and_asyncio(seed, clock, memory, server):
    endpoint = TcpEndpoint("127.0.0.1", server.port)
    with Queues(Portal(lambda: AsyncRemote.open(endpoint))) as queues:
        run(ServicePair(memory, queues, clock, seed))
