"""Where Spark runs, or why it does not: in one sentence, soon, and before anything is changed."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import ipaddress
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from penstock import cli
from penstock.errors import InvalidField
from penstock.spark.java import CacheUnusable, archive_options, cache_directory, find_java
from penstock.spark.session import (
    LOCAL,
    SparkUnreachable,
    check_address,
    make_session,
    prepare_environment,
)
from tests.spark.journals import write_store

pytestmark = pytest.mark.service("default-jre-headless")
NOBODY = 65_534


@pytest.fixture
def closed_port():
    """A port of loopback at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


@pytest.fixture
def silent_port():
    """A port at which something listens that is no Spark."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--master=spark://127.0.0.1:{port}", "no Spark master answers there"),
        ("--remote=sc://127.0.0.1:{port}", "no Spark Connect server answers there"),
        ("--remote=sc://127.0.0.1:{port}/;token=s3cret", "no Spark Connect server answers there"),
    ],
)
def test_an_address_at_which_nothing_listens_is_refused_by_name(
    option, said, closed_port, tmp_path, capsys
):
    store = write_store(tmp_path / "store", [])
    assert cli.main(["pipeline", "run", "--journal", str(store), "--lake", str(tmp_path / "lake")])\
        == 0  # fmt: skip
    capsys.readouterr()
    option = option.format(port=closed_port)
    for words in (
        # One makes a lake, one has nothing to do, and one needs a session.
        ["run", "--journal", str(store), "--lake", str(tmp_path / "new")],
        ["run", "--journal", str(store), "--lake", str(tmp_path / "lake")],
        ["sql", "--lake", str(tmp_path / "lake"), "select 1"],
    ):
        assert cli.main(["pipeline", *words, option]) == 4
        output = capsys.readouterr()
        assert not output.out
        [line] = output.err.splitlines()
        assert f":{closed_port}: {said}: Connection refused" in line
        assert "s3cret" not in line
    assert not (tmp_path / "new").exists()


def test_of_several_masters_one_must_listen(closed_port, silent_port):
    check_address(f"spark://127.0.0.1:{closed_port},127.0.0.1:{silent_port}", None)
    with pytest.raises(SparkUnreachable, match="no Spark master"):
        check_address(f"spark://127.0.0.1:{closed_port},127.0.0.1:{closed_port}", None)


def test_what_is_no_connect_server_is_refused_in_seconds(silent_port, monkeypatch):
    monkeypatch.setattr("penstock.spark.session._CONNECT_S", 1.0)
    with pytest.raises(SparkUnreachable, match=r"no Spark Connect server .*, but something else"):
        make_session(remote=f"sc://127.0.0.1:{silent_port}")


@pytest.mark.parametrize(
    ("master", "remote", "said"),
    [
        ("spark://", None, r"master: 'spark://' is not spark://HOST:PORT"),
        ("spark://host", None, "is not spark://HOST:PORT"),
        ("spark://host:70000", None, "is not spark://HOST:PORT"),
        (None, "host:15002", "remote: 'host:15002' is not an address of Spark Connect"),
        (None, "sc://host:nine;token=s3cret", "remote: 'sc://host:nine' is not an address"),
        ("local[2]", "sc://host:1", "has a master of its own"),
    ],
)
def test_what_is_no_address_is_refused_by_name(master, remote, said):
    with pytest.raises(InvalidField, match=said):
        check_address(master, remote)


def test_only_loopback_can_reach_a_local_session_and_none_of_its_pages_is_open(spark):
    assert spark.sparkContext.uiWebUrl is None
    java = spark.sparkContext._gateway.proc.pid
    found = re.findall(
        r"LISTEN +\d+ +\d+ +(\S+):\d+ .*\bpid=(\d+)\b",
        subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout,
    )
    addresses = [address.strip("[]") for address, pid in found if int(pid) == java]
    assert addresses
    for address in addresses:
        parsed = ipaddress.ip_address(address)
        assert (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
    # Other users of the machine are on loopback, too: Spark's own ports ask for a secret.
    assert spark.conf.get("spark.authenticate") == "true"


def test_a_driver_of_a_cluster_elsewhere_keeps_an_address_that_executors_can_reach(monkeypatch):
    monkeypatch.delenv("SPARK_LOCAL_HOSTNAME", raising=False)
    # Set and deleted, so that what the function sets is undone.
    monkeypatch.setenv("SPARK_LOCAL_IP", "")
    for master, address in (
        ("spark://10.1.2.3:7077", None),
        ("spark://127.0.0.1:7077,10.1.2.3:7077", None),
        ("yarn", None),
        ("spark://127.0.0.1:7077", "127.0.0.1"),
        ("spark://[::1]:7077", "127.0.0.1"),
        (LOCAL, "127.0.0.1"),
    ):
        monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
        prepare_environment(master)
        assert os.environ.get("SPARK_LOCAL_IP") == address, master


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache directory of a user who has none yet."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_directory()
    assert found is not None
    assert found == tmp_path / "penstock"
    assert found.stat().st_mode & 0o077 == 0
    return found


@pytest.mark.root
def test_a_cache_directory_that_another_user_prepared_is_not_used(cache):
    for path in (cache, cache.parent):
        os.chown(path, NOBODY, -1)
        with pytest.raises(CacheUnusable, match=r"belongs to user 65534.*set XDG_CACHE_HOME"):
            cache_directory()
        os.chown(path, 0, -1)
    assert cache_directory() == cache


def test_a_cache_directory_that_all_users_can_write_is_not_used(cache):
    for path in (cache, cache.parent):
        path.chmod(0o777)
        with pytest.raises(CacheUnusable, match=f"{path}: every user can write it"):
            cache_directory()
        path.chmod(0o1777 if path == cache.parent else 0o755)
    assert cache_directory() == cache


@pytest.fixture
def home(cache, tmp_path, monkeypatch):
    """The home of a Java that does no more than what is asked of it here."""
    java = tmp_path / "jdk" / "bin" / "java"
    server = tmp_path / "jdk" / "lib" / "server"
    java.parent.mkdir(parents=True)
    server.mkdir(parents=True)
    (server / "libjvm.so").write_text("")
    (server / "classes.jsa").write_text("")
    java.write_text(
        """#!/bin/sh
        for argument do
          case $argument in
            -version) echo 'openjdk version "17.0.1"' >&2 ;;
            -XX:ArchiveClassesAtExit=*) echo classes >"${argument#*=}" ;;
            fail) exit 3 ;;
          esac
        done
        """
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    home = find_java()
    assert home.parent == cache
    return home


def test_an_archive_of_classes_has_its_name_once_it_is_complete(home, cache):
    assert archive_options(home, ["4.3"], makes=False) == []
    [making, *_] = archive_options(home, ["4.3"], makes=True)
    java = home / "bin" / "java"
    # A JVM that fails leaves nothing.
    assert subprocess.run([java, making, "fail"], check=False).returncode == 3
    assert not list(cache.glob("*.jsa*"))
    assert subprocess.run([java, making], check=False).returncode == 0
    [archive] = cache.glob("*.jsa*")
    assert archive.read_text() == "classes\n"
    [using, *_] = archive_options(home, ["4.3"], makes=True)
    assert using == f"-XX:SharedArchiveFile={archive}"
    # Two that were started at the same time: the second replaces what the first has made.
    assert subprocess.run([java, making], check=False).returncode == 0
    assert list(cache.glob("*.jsa*")) == [archive]


def test_an_archive_is_of_one_java_and_one_pyspark(home, cache):
    [making, *_] = archive_options(home, ["4.3"], makes=True)
    subprocess.run([home / "bin" / "java", making], check=True)
    assert archive_options(home, ["4.3"], makes=False)
    assert archive_options(home, ["4.4"], makes=False) == []
    (home / "lib" / "server" / "libjvm.so").write_text("newer")
    assert archive_options(home, ["4.3"], makes=False) == []


def test_an_archive_that_others_can_write_is_not_used(home, cache):
    [making, *_] = archive_options(home, ["4.3"], makes=True)
    subprocess.run([home / "bin" / "java", making], check=True)
    [archive] = cache.glob("*.jsa")
    archive.chmod(0o666)
    assert archive_options(home, ["4.3"], makes=True) == []
    archive.rename(archive.with_suffix(".other"))
    archive.symlink_to(archive.with_suffix(".other"))
    assert archive_options(home, ["4.3"], makes=True) == []


def test_a_java_that_has_no_archive_of_its_own_gets_none(home):
    (home / "lib" / "server" / "classes.jsa").unlink()
    assert archive_options(home, ["4.3"], makes=True) == []


COUNTS = """
import sys
from pathlib import Path
from penstock.spark.session import make_session

spark = make_session(master="local[1]", archives=True, conf={"spark.driver.memory": "600m"})
assert spark.range(10).count() == 10
java = spark.sparkContext._gateway.proc
maps = Path(f"/proc/{java.pid}/maps").read_text()
print("classes-" in maps)
spark.stop()
java.stdin.close()
java.wait()
"""


@pytest.mark.timeout(600)
def test_a_second_jvm_takes_its_classes_from_the_archive_of_the_first(tmp_path):
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    variables.pop("SPARK_CONF_DIR", None)
    if cache_home := os.environ.get("JAVA_HOME"):
        # The script of these tests' own session is of another cache directory.
        variables["JAVA_HOME"] = str((Path(cache_home) / "lib").resolve().parent)
    said = [
        subprocess.run(
            [sys.executable, "-c", COUNTS], env=variables, capture_output=True, text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    # Nothing of Java's about archives is among the output, either.
    assert said == ["False\n", "True\n"]
