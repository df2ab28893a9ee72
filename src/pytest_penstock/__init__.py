"""The fixtures of Penstock for pytest; it is loaded by every run, so it imports what is used.

    penstock_server    an account of its own on the server of the run; its url and its variables
    penstock_sqs       a boto3 client of that account
    penstock_endpoint  the same account in the environment, for code that makes its own clients
    penstock_queues    queues in this process, in memory
    penstock_tasks     a TaskApp in this process, whose tasks are run until none is left
    penstock_clock     the clock of all that this test uses: advance(hours=12)

The mark `penstock(clock="auto")` says how the clock of a test moves. When a test fails, its report
tells what happened to each message.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.testing.fixtures import TestClock, TestTasks
    from penstock.testing.places import QueuePlace, TestAccount, TestQueues

_PLACES = pytest.StashKey[list[Any]]()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers", "penstock(clock): how the clock of the test moves: manual, auto or system"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Adds to the report of a failed test what happened to the messages of each queue."""
    report = yield
    places = item.stash.get(_PLACES, None)
    if places and report.when == "call" and report.failed:
        from penstock.testing.fixtures import sections_of

        report.sections += sections_of(places)
    return report


def _place(request: pytest.FixtureRequest, place: "QueuePlace") -> None:
    request.node.stash.setdefault(_PLACES, []).append(place)


def _mode(request: pytest.FixtureRequest) -> str:
    mark = request.node.get_closest_marker("penstock")
    return "manual" if mark is None else _clock(*mark.args, **mark.kwargs)


def _clock(clock: str = "manual") -> str:
    """What the mark says. An argument that it does not have is a TypeError, and not left out."""
    return clock


@pytest.fixture(scope="session")
def penstock_url(request: pytest.FixtureRequest) -> str:
    """The address of the server of the run, which is started when it is first needed."""
    from penstock.testing import places

    if not hasattr(request.config, "workerinput"):
        return places.own_url()
    temporary: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return places.run_url(temporary.getbasetemp().parent)


@pytest.fixture
def penstock_server(request: pytest.FixtureRequest, penstock_url: str) -> "Iterator[TestAccount]":
    """An account of its own on the server of the run, with its own queues and clock."""
    from penstock.testing import places

    worker = getattr(request.config, "workerinput", {}).get("workerid", "gw0")
    account = places.TestAccount(penstock_url, places.next_account(int(worker[2:])))
    _place(request, account)
    with places.opened(account, _mode(request)):
        yield account


@pytest.fixture
def penstock_sqs(penstock_server: "TestAccount") -> Iterator[Any]:
    """A boto3 client of the test's account."""
    client = penstock_server.client()
    yield client
    client.close()


@pytest.fixture
def penstock_endpoint(penstock_server: "TestAccount") -> Iterator[str]:
    """The address of the endpoint; the environment leads every SDK to the test's account."""
    from penstock.testing import places

    with places.in_environment(penstock_server):
        yield penstock_server.url


@pytest.fixture
def penstock_queues(request: pytest.FixtureRequest) -> "Iterator[TestQueues]":
    """Queues in this process, in memory, on a clock of their own."""
    from penstock.testing import places

    with places.in_process(_mode(request)) as queues:
        _place(request, queues)
        yield queues


@pytest.fixture
def penstock_tasks(penstock_queues: "TestQueues") -> "Iterator[TestTasks]":
    """A TaskApp in this process, for new tasks or in place of another app's store."""
    from penstock.testing.fixtures import TestTasks

    tasks = TestTasks(penstock_queues)
    yield tasks
    tasks.close()


@pytest.fixture
def penstock_clock(request: pytest.FixtureRequest) -> "TestClock":
    """The clock of every server and store that this test uses."""
    from penstock.testing.fixtures import TestClock

    return TestClock(request.node.stash.setdefault(_PLACES, []))
