"""What every test shares: hypothesis profiles, a quick directory, services that may be missing."""

import gc
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

SERVICES = Path(__file__).parent.parent / "tools" / "services.txt"
# Debian keeps servers in sbin, which is not on every user's path.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
IN_CI = os.environ.get("CI") == "true"
# Whether the tests of the scorecard that have larger figures use those: `make score FULL=1`.
FULL = os.environ.get("PENSTOCK_FULL") == "1"

# A number for tests that look at other cases in each run; it is in their names, and setting the
# variable repeats them. Workers of a parallel run have it from the first process. In CI it is
# always the same, as the examples of hypothesis are.
SEED = int(
    os.environ.setdefault("TEST_SEED", "1000" if IN_CI else str(random.randrange(1_000, 1_000_000)))
)

# No deadlines, because a slow machine is not a fault of the code. In CI the examples are the same
# in every run, so that a new failure is caused by a change and not by new examples.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# For `make score MUTANTS=1`: whether an example fails is enough, making it small takes minutes.
hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("ci"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
PROFILE = os.environ.get("PENSTOCK_PROFILE", "ci" if IN_CI else "local")
hypothesis.settings.load_profile(PROFILE)

# What the JVMs of tests run is planned once: their optimising compiler takes longer than it saves.
# Without it they have 48 MB for compiled code, which Spark fills: then Java drops some of it, and
# compiles it again.
QUICK_JVMS = dict.fromkeys(
    ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"),
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m",
)
os.environ.update(QUICK_JVMS)

NOT_INSTALLED = "service not installed: "
MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path):
    """A directory in memory, if the system has /dev/shm: for tests that do not test the disk."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def services() -> dict[str, str]:
    """Read the list that `make services` installs: package to program."""
    lines = [line.split() for line in SERVICES.read_text().splitlines()]
    return {line[0]: line[1] for line in lines if line and not line[0].startswith("#")}


# These come first in a parallel run: started last, each would run while the other workers are idle.
LONGEST = (
    "spark",
    "jvm",
    "rabbitmq",
    "console",
    "tests/conformance/test_sqs.py::TestSqs",
    "tests/server/test_conformance.py",
    "tests/server/sqs/test_load.py",
)
# Most of these start JVMs of their own; the servers of the documents listen at the same port.
JVM_OF_THEIR_OWN = (
    "tests/docs/",
    "tests/spark/test_consume_killed.py",
    "tests/spark/test_elsewhere.py",
    "tests/spark/test_examples.py",
    "tests/spark/test_increments.py",
    "tests/spark/test_run_options.py",
    "tests/spark/test_warm.py",
)


def group_of(nodeid):
    """The name of the group of tests that one worker of a parallel run gets: they share fixtures.

    Tests with Spark are two groups of about the same length, so that no more than two sessions are
    started and two workers share them. All tests that need RabbitMQ are another, and those of the
    console, which share a browser.
    """
    path, *within = nodeid.partition("[")[0].split("::")
    if path.startswith(JVM_OF_THEIR_OWN):
        return "jvm"
    if path.startswith("tests/spark/"):
        return "spark"
    if path.startswith("tests/server/console/"):
        return "console"
    if "rabbitmq" in path:
        return "rabbitmq"
    return "::".join([path, *within[:-1]])


def rank_of(nodeid):
    """The rank of the test's group in the order of the run."""
    group = group_of(nodeid)
    return next((n for n, name in enumerate(LONGEST) if group.startswith(name)), len(LONGEST))


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_runtest_setup(item):
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        if IN_CI:
            pytest.fail("needs root, and CI must not skip", pytrace=False)
        pytest.skip("needs root, to become another user")
    for mark in item.iter_markers("service"):
        (package,) = mark.args
        program = services().get(package)
        if program is None:
            pytest.fail(f"{package} is not in tools/services.txt", pytrace=False)
        if shutil.which(program, path=SEARCH_PATH):
            continue
        if IN_CI:
            pytest.fail(f"{package} is not installed, and CI must not skip", pytrace=False)
        pytest.skip(NOT_INSTALLED + package)


def pytest_terminal_summary(terminalreporter):
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    missing = Counter(r.split(NOT_INSTALLED)[1].rstrip("')") for r in reasons if NOT_INSTALLED in r)
    for package, count in missing.items():
        line = f"WARNING: {count} tests SKIPPED because {package} is not installed: make services"
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.fixture
def failed_handshakes_collected():
    """Runs the garbage collector, which alone closes the sockets of failed TLS handshakes.

    Their warnings are ignored by a `filterwarnings` mark of the test.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def rabbit():
    """The RabbitMQ broker that all tests of this run share."""
    # Imported late: a test of this file runs it where the other tests cannot be imported.
    from tests.rabbit import shared_broker

    with shared_broker() as broker:
        yield broker
