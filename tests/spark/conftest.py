"""One Spark session for all of these tests: starting it costs more than any of them."""

import contextlib
import os
import warnings
from importlib.util import find_spec

import pytest

import penstock
from penstock.backends.remote.daemon import stop_daemon
from tests.conftest import IN_CI

if IN_CI and find_spec("pyspark") is None:
    raise RuntimeError("penstock[spark] is not installed, and CI must not skip")


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """A session on two threads, whose own files go with the tests'."""
    from penstock.spark.session import make_session

    os.environ["SPARK_LOCAL_DIRS"] = str(tmp_path_factory.mktemp("spark"))
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A task that fails is tried once more, as on a cluster.
        session = make_session(master="local[2,2]", conf=conf)
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path):
    """Queues that other processes reach too."""
    store = tmp_path / "store"
    yield f"file:{store}?durability=os"
    stop_daemon(store)


@pytest.fixture
def queues(url):
    """The queues there."""
    with penstock.connect(url) as queues:
        yield queues


@pytest.fixture
def shown():
    """What somebody who waits is shown: each status of the steps, from the beginning."""
    with watched_steps() as found:
        yield found


@contextlib.contextmanager
def watched_steps():
    """A list to which each status of the steps is added."""
    from penstock.spark.progress import StepStatus, show_steps, status

    found: list[StepStatus] = []

    def add():
        now = status()
        if now is not None:
            found.append(now)

    show_steps(add)
    try:
        yield found
    finally:
        show_steps()
