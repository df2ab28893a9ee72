"""The suite itself: it skips tests of behaviours in LACKS, and fails for any other wrong one."""

import inspect
import os
import subprocess
import sys
import time

import pytest

import penstock
import penstock.testing.conformance as conformance
from penstock.testing.conformance import BEHAVIOURS, ConformanceSuite, Contract, behaviour

BACKEND = """
import penstock
import pytest
from penstock import ManualClock, Queues
from penstock.backends import open_service
from penstock.service import Push
from penstock.testing.conformance import ConformanceSuite
import msgspec


class Discarding:
    '''A memory engine that discards dedup ids.'''

    LACKS = {lacks}

    def __init__(self, clock):
        self._service = open_service("memory:?history=1000", clock)
        self.close = self._service.close

    def execute(self, command):
        if type(command) is Push:
            command = msgspec.structs.replace(command, dedup_id=None)
        return self._service.execute(command)


class TestDiscarding(ConformanceSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock):
        with Queues(Discarding(clock)) as queues:
            yield queues
"""
TESTS = [
    member
    for name, member in inspect.getmembers(ConformanceSuite, inspect.isfunction)
    if name.startswith("test_")
]


def run_suite(folder, lacks: dict[str, str], *options: str) -> tuple[int, str]:
    """Runs the suite on the backend that discards dedup ids in a Python of its own."""
    module = folder / "test_discarding.py"
    module.write_text(BACKEND.replace("{lacks}", repr(lacks)))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(module)]
    ran = subprocess.run(
        [*command, f"--rootdir={folder}", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return ran.returncode, ran.stdout


def test_every_test_of_the_suite_names_its_behaviours():
    without = [test.__name__ for test in TESTS if not getattr(test, "behaviours", ())]
    assert without == []
    assert len(TESTS) > 120


def test_every_behaviour_has_a_test():
    tested = {key for test in TESTS for key in getattr(test, "behaviours", ())}
    assert tested == set(BEHAVIOURS)


def test_a_behaviour_that_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match="unknown thing"):
        behaviour("unknown thing")
    with pytest.raises(ValueError, match="none named"):
        behaviour()


@pytest.mark.timeout(300)
def test_a_backend_without_a_behaviour_that_is_not_in_its_lacks_fails(tmp_path):
    status, output = run_suite(tmp_path, {}, "-k", "dedup")
    assert status == 1
    assert "test_the_same_dedup_id_gives_the_first_id_and_enqueues_nothing" in output
    assert "skipped" not in output


@pytest.mark.timeout(300)
def test_a_test_of_a_behaviour_in_lacks_is_skipped_with_the_reason(tmp_path):
    lacks = dict.fromkeys(("dedup", "dedup window", "dedup per group"), "no ids are kept")
    status, output = run_suite(tmp_path, lacks, "-k", "dedup_id_is_kept or in_the_order")
    assert status == 0
    assert "lacks dedup: no ids are kept" in output
    assert " passed" in output
    assert "failed" not in output


@pytest.mark.timeout(300)
def test_an_entry_of_lacks_that_is_not_a_behaviour_fails(tmp_path):
    status, output = run_suite(tmp_path, {"unknown thing": "a reason"}, "-k", "lacks")
    assert status == 1
    assert "unknown thing" in output


@pytest.mark.timeout(300)
def test_an_entry_of_lacks_without_a_reason_fails(tmp_path):
    status, output = run_suite(tmp_path, {"dedup": ""}, "-k", "lacks")
    assert status == 1
    assert "every entry of LACKS gives its reason" in output


class InRealTime(Contract):
    """A test that always fails, after a pause in the suite's time and busy work in real time."""

    def __init__(self, gives, passes, takes_s):
        self.store = penstock.connect("memory:")
        self.tried = []
        self._clock, self._made = None, []
        self._gives, self._passes, self._takes_s = gives, passes, takes_s

    @behaviour("timeout")
    def fails(self):
        self.tried.append((self.SCALE * self._slower, self.queue()))
        if self._gives:
            self.store.push(self.tried[-1][1], "x", delay=self.seconds(3))
        if self._passes:
            self.pass_time(self._passes)
        until_s = time.monotonic() + self._takes_s
        while time.monotonic() < until_s:
            pass
        raise AssertionError("at a deadline")


@pytest.mark.parametrize(
    ("scale", "gives", "passes", "takes_s", "scales"),
    [
        (0.001, False, 1, 0.1, [0.001, 0.004, 0.016]),
        (0.001, True, 0, 0.1, [0.001, 0.004, 0.016]),
        (15, True, 0.001, 0, [15]),
        (0.001, False, 0, 0.1, [0.001]),
    ],
    ids=["late", "late before it waits", "in time", "of no time"],
)
def test_only_a_test_whose_steps_took_too_long_is_run_again(scale, gives, passes, takes_s, scales):
    suite = type("Scaled", (InRealTime,), {"SCALE": scale})(gives, passes, takes_s)
    with suite.store, pytest.raises(AssertionError, match="at a deadline"):
        suite.fails()
    assert [scale for scale, _ in suite.tried] == pytest.approx(scales)
    # Each try has queues of its own.
    assert suite._made == [suite.tried[-1][1]]


def test_importing_the_suite_without_pytest_gives_an_error_in_one_sentence():
    program = "import sys; sys.modules['pytest'] = None; import penstock.testing.conformance"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith(
        "the conformance suite is run by pytest, which is not installed: pip install pytest"
    )


def test_importing_the_testing_package_needs_no_pytest():
    program = "import sys; sys.modules['pytest'] = None; import penstock.testing; print('fine')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "fine\n"


def test_the_suite_can_be_imported_by_name():
    assert set(conformance.__all__) == {"BEHAVIOURS", "ConformanceSuite", "Contract", "behaviour"}
