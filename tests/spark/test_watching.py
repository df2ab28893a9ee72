"""A run that goes on: its metrics move while it works, and its memory does not grow with it."""

import re
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from penstock import cli
from penstock.cli.lake.watch import Watch
from penstock.core.events import Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark.lake import Lake, Table
from penstock.spark.queries import query_session
from tests.conftest import FULL
from tests.ports import lasting_port
from tests.spark.journals import write_store
from tests.spark.lakes import await_ingested, version_of

pytestmark = [
    pytest.mark.service("default-jre-headless"), pytest.mark.usefixtures("spark"),
    pytest.mark.timeout(600),
]  # fmt: skip
QUEUE = [QueueCreated(1, 1, "q", QueueSettings())]
ROUNDS = 200 if FULL else 12


def figures(port):
    """The figures of the lake that Prometheus would read now, by their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = re.findall(r"^penstock_lake_(\w+)(?:\{.*\})? (\S+)$", answer.read().decode(), re.M)
    return {name: float(value) for name, value in lines}


def test_the_metrics_of_a_journal_that_was_never_level_move_during_its_first_ingest(
    tmp_path, monkeypatch
):
    pushes = [[Pushed(n, 1, n, b"x" * 100)] for n in range(1, 601)]
    store = write_store(tmp_path / "s", [QUEUE, *pushes])
    port = lasting_port()
    seen = []
    commit = Table._commit

    def watched(self, *arguments):
        if self.path.name == "events":
            seen.append(figures(port))
        commit(self, *arguments)

    def wait(self):
        seen.append(figures(port))
        return False

    monkeypatch.setattr(Table, "_commit", watched)
    monkeypatch.setattr(Watch, "wait", wait)
    words = ["pipeline", "run", "--watch", "--metrics-port", str(port), "--batch", "20KiB"]
    assert cli.main([*words, "--lake", str(tmp_path / "lake"), "--journal", str(store)]) == 0
    *during, last = seen
    assert len(during) > 3
    behind = [each["behind_bytes"] for each in during]
    assert behind == sorted(set(behind), reverse=True)
    seconds = [each["behind_seconds"] for each in during]
    assert seconds == sorted(set(seconds))
    came = [each["events_total"] for each in during]
    assert came == sorted(set(came))
    assert came[0] == during[0]["events_per_second"] == 0
    assert all(each["events_per_second"] > 0 for each in (*during[1:], last))
    assert (last["behind_bytes"], last["behind_seconds"], last["events_total"]) == (0, 0, 601)


def test_a_watching_run_rebuilds_the_tables_in_its_first_round_only(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s", [QUEUE, [Pushed(1, 1, 1, b"x")]])
    words = ["pipeline", "run", "--lake", str(tmp_path / "lake"), "--journal", str(store)]
    assert cli.main(words) == 0
    messages = Lake.open(tmp_path / "lake").table("messages", "")
    versions = [version_of(messages)]

    def wait(self):
        versions.append(version_of(messages))
        return len(versions) < 4

    monkeypatch.setattr(Watch, "wait", wait)
    assert cli.main([*words, "--watch", "--rebuild"]) == 0
    before, *after = versions
    assert after == [before + 1] * 3


def test_what_is_appended_is_added_by_one_query_that_goes_on(spark, tmp_path, monkeypatch):
    """And the end of the run is the end of the query."""
    store = write_store(tmp_path / "s", [QUEUE, [Pushed(1, 1, 1, b"x")]])
    queries = query_session(spark).streams
    seen = []

    def wait(self):
        [query] = queries.active
        seen.append((query.runId, Lake.open(tmp_path / "lake").table("messages", "").rows()))
        if len(seen) < 4:
            write_store(
                store, [[Pushed(n, 1, n, b"x")] for n in (2 * len(seen), 2 * len(seen) + 1)]
            )
            await_ingested(tmp_path / "lake", store)
        return len(seen) < 4

    monkeypatch.setattr(Watch, "wait", wait)
    words = ["pipeline", "run", "--watch", "--every", "100ms", "--lake", str(tmp_path / "lake")]
    assert cli.main([*words, "--journal", str(store)]) == 0
    assert len({run for run, _ in seen}) == 1
    assert [rows for _, rows in seen] == [1, 3, 5, 7]
    assert queries.active == []


def test_without_the_package_for_metrics_one_sentence_says_what_to_install(
    tmp_path, monkeypatch, capsys
):
    store = write_store(tmp_path / "s", [])
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    words = ["pipeline", "run", "--lake", str(tmp_path / "lake"), "--journal", str(store)]
    assert cli.main([*words, "--watch", "--metrics-port", "1"]) > 1
    said = capsys.readouterr().err
    assert "needs prometheus_client: `pip install 'PATH-OF-THE-CLONE[spark]'`" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "lake").exists()


# Eight threads have memory at the same time; then malloc says how many arenas it has.
THREADS = """
import ctypes
import threading

from penstock.cli.lake.watch import share_freed_memory

share_freed_memory()
import pyarrow as pa

all_have = threading.Barrier(8)

def have():
    held = bytearray(10_000)
    all_have.wait()

threads = [threading.Thread(target=have) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
print(pa.default_memory_pool().backend_name, flush=True)
stdout = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.fixture
def no_pool_chosen(monkeypatch):
    """The environment as it is before a watching run: a test before this may have had one."""
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)


@pytest.mark.usefixtures("no_pool_chosen")
def test_the_threads_of_a_watching_run_share_what_ended_ones_have_freed():
    shared, alone = (
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        ).stdout
        for text in (THREADS, THREADS.replace("\nshare_freed_memory()", ""))
    )
    assert shared.splitlines()[0] == "system" != alone.splitlines()[0]
    assert shared.count("<heap nr=") == 2 < alone.count("<heap nr=")


# Between two rounds the journal grows, by messages of which some end; then the memory is measured.
GROWS = """
import sys
from pathlib import Path

from penstock import cli
from penstock.cli.lake.watch import Watch
from penstock.core.events import Claimed, Deleted, Pushed
from tests.spark.journals import write_store

store, lake, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
resident = []

def wait(self):
    status = Path("/proc/self/status").read_text()
    resident.append(int(status.split("VmRSS:")[1].split()[0]))
    first = 1 + 50 * len(resident)
    lives = [
        [Pushed(n, 1, n, b"x" * 500), Claimed(n, 1, n, 1, n + 9, None, "w"), Deleted(n, 1, n, 1)]
        for n in range(first, first + 50)
    ]
    write_store(store, lives)
    if len(resident) < rounds:
        # Not before the command has chosen how Arrow allocates.
        from tests.spark.lakes import await_ingested

        await_ingested(lake, store)
    return len(resident) < rounds

Watch.wait = wait
words = ["pipeline", "run", "--watch", "--every", "100ms", "--lake", lake]
if rounds > 50:
    words += ["--on-finding", "true"]
assert cli.main([*words, "--journal", str(store)]) == 0
import pyarrow
assert pyarrow.default_memory_pool().backend_name == "system"
print("resident", *resident)
"""


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_pool_chosen")
def test_the_memory_of_a_watching_run_is_flat_after_its_tenth_round(tmp_path):
    """Row 18: each round reads what is new and makes the tables; with many rounds, audits them."""
    store = write_store(tmp_path / "s", [QUEUE])
    done = subprocess.run(
        [sys.executable, "-c", GROWS, store, tmp_path / "lake", str(ROUNDS)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    resident = list(map(int, done.stdout.splitlines()[-1].split()[1:]))
    assert len(resident) == ROUNDS
    # In KiB: what the allocators of DuckDB, Arrow and Delta keep differs from round to round.
    assert max(resident[-2:]) < max(resident[7:10]) + 8_000, resident
