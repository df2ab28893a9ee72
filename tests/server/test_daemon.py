"""Daemons as real processes: how they start, end, are killed, and where their files are."""

import asyncio
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock
import penstock.aio
from penstock.backends.engine.store import open_engine
from penstock.backends.remote.daemon import (
    connect_socket,
    daemon_directory,
    running_pid,
    socket_path,
    stop_daemon,
)
from penstock.backends.remote.starting import daemon_status
from penstock.cli import daemon as command
from penstock.cli.parser import Parser
from penstock.cli.session import Session
from penstock.errors import BackendLost, InvalidField, StoreInUse, StoreUnusable, UnavailableError
from penstock.wire.frames.frames import PRELUDE
from tests.server.conftest import TIMEOUT_S, DaemonProcess, end_daemon, until


def connect(store, **options):
    extra = "".join(f"&{name}={value}" for name, value in options.items())
    return penstock.connect(f"file:{store}?durability=os{extra}")


def live_pid(store):
    """The process number of a daemon that must be there."""
    pid = running_pid(store)
    assert pid is not None
    return pid


@pytest.fixture
def run_python(store):
    """Start Python processes that can use Penstock; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code, *words):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def result_of(process):
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return out


# Starting.


def test_the_first_client_starts_the_daemon_and_the_next_finds_it(store):
    with connect(store) as first, connect(store) as second:
        first.create("orders")
        first.push("orders", b"x")
        claim = second.pull("orders")
        assert claim is not None
        assert claim.body == b"x"
        assert first.service.status()["pid"] == second.service.status()["pid"]
        assert first.service.status()["pid"] == running_pid(store) != os.getpid()


STARTER = """
import sys, penstock
with penstock.connect(f"file:{sys.argv[1]}?durability=os") as queues:
    queues.create("orders")
    queues.push("orders", sys.argv[2].encode())
    print(queues.service.status()["pid"])
"""


def test_of_ten_clients_at_once_one_starts_the_daemon_and_all_are_served(store, run_python):
    starters = [run_python(STARTER, store, number) for number in range(10)]
    pids = {result_of(starter).strip() for starter in starters}
    assert len(pids) == 1
    with connect(store) as queues:
        assert {str(queues.service.status()["pid"])} == pids
        bodies = {claim.body for claim in queues.pull_many("orders", 20)}
        assert bodies == {b"%d" % number for number in range(10)}


def test_the_daemon_survives_its_starter_and_is_not_its_child(store, run_python):
    pid = int(result_of(run_python(STARTER, store, 1)))
    assert running_pid(store) == pid
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, group, session = int(status[1]), int(status[2]), int(status[3])
    assert parent != os.getpid()
    assert group == session != os.getsid(0)
    with connect(store) as queues:
        claim = queues.pull("orders")
        assert claim is not None
        assert queues.service.status()["pid"] == pid


def test_only_the_owner_may_read_the_files_of_the_daemon(store):
    with connect(store):
        modes = {
            path.relative_to(store).as_posix(): stat.S_IMODE(path.lstat().st_mode)
            for path in [store, *store.rglob("*")]
        }
    assert modes["daemon"] == 0o700
    assert modes["daemon/socket"] == 0o600
    assert not any(mode & 0o077 for mode in modes.values())


def test_a_directory_that_others_may_enter_does_not_open_the_socket_to_them(store):
    store.mkdir(mode=0o755)
    store.chmod(0o755)
    with connect(store):
        assert stat.S_IMODE(daemon_directory(store).stat().st_mode) == 0o700


def test_the_socket_of_a_path_that_is_too_long_is_in_another_directory(tmp_path):
    store = tmp_path / ("x" * 100) / "store"
    store.parent.mkdir()
    try:
        with connect(store) as queues:
            queues.create("orders")
            place = socket_path(store)
            assert place.parent.parent != store
            assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
            assert (daemon_directory(store) / "elsewhere").read_text().strip() == str(place)
            with connect(store) as other:
                assert other.list() == ["orders"]
    finally:
        end_daemon(store)
    assert not place.exists()


def test_a_daemon_started_by_a_short_path_is_found_by_a_long_one(tmp_path, store):
    long = tmp_path / ("x" * 100) / "store"
    long.mkdir(parents=True)
    store.symlink_to(long)
    with connect(store) as queues:
        queues.create("orders")
        with connect(long) as other:
            assert other.list() == ["orders"]
        assert running_pid(long) == running_pid(store)
        assert stop_daemon(long) is not None


def test_a_daemon_in_a_container_is_stopped_by_its_process_number_outside(store):
    with in_a_container("-m", "penstock.server.daemon", store) as daemon:
        until(lambda: connectable(store))
        assert running_pid(store) == 1, "its process number in the container"
        stopped = stop_daemon(store)
        assert stopped is not None
        assert stopped > 1
        assert daemon.wait(TIMEOUT_S) == 0


def test_a_daemon_outside_of_a_container_cannot_be_stopped_from_within_it(store):
    with connect(store):
        code = "from penstock.backends.remote.daemon import stop_daemon; "
        code += f"stop_daemon({str(store)!r})"
        with in_a_container("-c", code, stderr=subprocess.PIPE, text=True) as process:
            _, complaint = process.communicate(timeout=TIMEOUT_S)
        assert complaint.strip().endswith(
            "its daemon runs in another container; stop it from there"
        )
        assert live_pid(store)


def in_a_container(*words, **options):
    """A Python process in a PID namespace of its own."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return subprocess.Popen([*unshare, sys.executable, *map(str, words)], **options)


def connectable(store):
    link = connect_socket(store)
    if link is not None:
        link.close()
    return link is not None


def test_files_left_by_a_crash_do_not_keep_a_daemon_from_starting(store):
    with connect(store) as queues:
        queues.create("orders")
        pid = live_pid(store)
        os.kill(pid, signal.SIGKILL)
        until(lambda: running_pid(store) is None)
        assert socket_path(store).exists()
        assert connect_socket(store) is None
    with connect(store) as queues:
        assert queues.list() == ["orders"]
        assert running_pid(store) != pid


def test_the_process_id_of_the_last_daemon_is_not_used_for_the_next(store):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    place = daemon_directory(store)
    place.mkdir(parents=True)
    with open(place / "pid", "w+b", buffering=0) as file:
        file.write(b"%d\n" % gone.pid)
        fcntl.flock(file, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(running_pid, store)
            file.seek(0)
            file.truncate()
            file.write(b"%d\n" % os.getpid())
            assert asking.result(TIMEOUT_S) == os.getpid()
    assert running_pid(store) is None


# Errors that prevent its start: one sentence each, and nothing is changed.


def refusal(store, kind, **options):
    with pytest.raises(kind) as caught:
        connect(store, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert running_pid(store) is None
    return str(caught.value)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    assert "is a file; a store is a directory" in refusal(path, StoreUnusable)
    assert path.read_text() == "text"


def test_a_directory_with_files_of_other_programs_is_refused(tmp_path):
    path = tmp_path / "other"
    path.mkdir()
    (path / "file").write_text("text")
    assert "is not empty, and is not a Penstock store" in refusal(path, StoreUnusable)
    assert [each.name for each in path.iterdir()] == ["file"]


def test_a_store_of_another_version_is_refused(store):
    store.mkdir()
    (store / "store").write_text("penstock store, format 99\n")
    assert "another format" in refusal(store, StoreUnusable)
    assert [each.name for each in store.iterdir()] == ["store"]


def test_a_store_that_is_embedded_in_another_process_is_refused(store):
    with penstock.connect(f"file:{store}?embedded=1") as queues:
        queues.create("orders")
        complaint = refusal(store, StoreInUse)
        assert f"by process {os.getpid()}; end that process, or use file:{store}" in complaint
    with connect(store) as queues:
        assert queues.list() == ["orders"]


def test_a_store_with_a_daemon_cannot_be_embedded(store):
    with connect(store), pytest.raises(StoreInUse, match=f"process {running_pid(store)}; end"):
        penstock.connect(f"file:{store}?embedded=1")


def test_options_that_contradict_the_running_daemon_are_refused(store):
    with connect(store):
        with pytest.raises(InvalidField, match="durability=sync was asked for"):
            penstock.connect(f"file:{store}?durability=sync")
        with pytest.raises(InvalidField, match="durability"):
            penstock.connect(f"file:{store}?durability=perhaps")
        with penstock.connect(f"file:{store}") as queues:
            assert queues.list() == []


def test_the_error_of_a_daemon_that_cannot_start_has_its_last_output(store, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(UnavailableError, match="its daemon did not start"):
        connect(store)


def test_the_error_of_a_daemon_that_cannot_listen_names_its_socket(store):
    connect(store).close()
    end_daemon(store)
    (socket_path(store) / "in the way").mkdir(parents=True)
    with pytest.raises(UnavailableError, match=r"its daemon failed: .*daemon/socket"):
        connect(store)


def damaged_store(store):
    """A store that was killed, with one bit of a synced entry flipped."""
    with penstock.connect(f"file:{store}?embedded=1") as queues:
        queues.create("orders")
        queues.push("orders", b"damaged")
        queues.push("orders", b"whole")
    path = store / "journal" / "000000000000.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"damaged")] ^= 1
    path.write_bytes(data)


DAMAGE = "store: the journal is damaged: data does not match its checksum, "


def test_a_daemon_reports_damage_that_opening_found(store):
    """Row 4: in its output file if a client started it, on stderr if a user did."""
    damaged_store(store)
    with connect(store) as queues:
        assert [claim.body for claim in queues.pull_many("orders", 10)] == [b"whole"]
        assert (store / "daemon" / "output").read_text().count(DAMAGE) == 1
    end_daemon(store)
    printed = DaemonProcess(store).stop()
    assert printed.count(DAMAGE) == 1
    assert f"; penstock check {store} says what is lost" in printed


# Ending.


def test_the_daemon_ends_after_its_idle_time_without_a_connection(store):
    with connect(store, idle=1) as queues:
        queues.create("orders")
        pid = running_pid(store)
    until(lambda: running_pid(store) is None)
    assert not socket_path(store).exists()
    with connect(store, idle=1) as queues:
        assert queues.list() == ["orders"]
        assert running_pid(store) != pid


def test_the_daemon_stays_while_a_client_is_connected(store):
    with connect(store, idle=1) as queues:
        queues.create("orders")
        pid = running_pid(store)
        # Longer than its idle time; the client sends no other request meanwhile.
        assert queues.pull("orders", wait=2.5) is None
        assert running_pid(store) == pid


def test_after_a_stop_clients_continue_with_the_next_daemon(store):
    with connect(store) as queues:
        queues.create("orders")
        queues.push("orders", b"x")
        claim = queues.pull("orders")
        assert claim is not None
        pid = stop_daemon(store)
        assert running_pid(store) is None
        # The key is in the directory, so the second daemon accepts receipts of the first.
        assert queues.delete(claim) is True
        assert running_pid(store) not in (None, pid)


def test_a_push_after_a_stop_adds_one_message(store):
    with connect(store) as queues:
        queues.create("orders")
        for number in range(5):
            stop_daemon(store)
            queues.push("orders", b"%d" % number)
        assert queues.stats("orders").visible == 5


def test_asyncio_clients_continue_with_the_next_daemon_too(store):
    async def main():
        async with await penstock.aio.connect(f"file:{store}?durability=os") as queues:
            await queues.create("orders")
            waiting = asyncio.create_task(queues.pull("orders", wait=60))
            while not (await queues.stats("orders")).waiting_pulls:
                pass
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, stop_daemon, store)
            await queues.push("orders", b"x")
            claim = await waiting
            assert claim is not None
            return claim.body

    assert asyncio.run(asyncio.wait_for(main(), TIMEOUT_S)) == b"x"


def test_the_error_of_a_daemon_that_does_not_answer_differs_from_no_daemon(store):
    with connect(store):
        pid = live_pid(store)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(BackendLost):
                daemon_status(store, timeout_s=0.2)
            with pytest.raises(UnavailableError, match="has not ended within"):
                stop_daemon(store, 0.1)
        finally:
            os.kill(pid, signal.SIGCONT)


# Killed while producers and consumers use it.

PRODUCER = """
import sys, penstock
from penstock.errors import BackendLost
store, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with penstock.connect(f"file:{store}?durability=os") as queues:
    for number in range(count):
        body = f"{name}/{number}"
        if number % 2:
            queues.push("orders", body, dedup_id=body)
            print("kept", body, flush=True)
        else:
            try:
                queues.push("orders", body)
                print("kept", body, flush=True)
            except BackendLost:
                print("unknown", body, flush=True)
"""
CONSUMER = """
import sys, penstock
with penstock.connect(f"file:{sys.argv[1]}?durability=os") as queues:
    while True:
        claims = queues.pull_many("orders", 5, wait=60, visibility_timeout=2)
        for claim in claims:
            try:
                queues.delete(claim)
            except penstock.StaleReceipt:
                continue
            if claim.body == b"stop":
                sys.exit()
            print(claim.body.decode(), flush=True)
"""


def test_no_message_is_lost_when_it_is_killed_while_many_processes_use_it(store, run_python):
    """Row 1: SIGKILL of a daemon under load."""
    producers, each, kills = 3, 300, 4
    with connect(store) as queues:
        queues.create("orders")
        consumers = [run_python(CONSUMER, store) for _ in range(3)]
        working = [run_python(PRODUCER, store, name, each) for name in range(producers)]
        pids = set()
        for _ in range(kills):
            pid = until(lambda: running_pid(store))
            seen = queues.service.status()["requests_seen"]
            until(
                lambda seen=seen: (
                    queues.service.status()["requests_seen"] > seen + 50
                    or all(process.poll() is not None for process in working)
                )
            )
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: running_pid(store) != pid)
        printed = [line.split() for process in working for line in result_of(process).splitlines()]
        until(lambda: queues.stats("orders").messages == 0)
        for _ in consumers:
            queues.push("orders", b"stop")
        done = [body for process in consumers for body in result_of(process).split()]
    kept = {body for word, body in printed if word == "kept"}
    unknown = {body for word, body in printed if word == "unknown"}
    assert len(printed) == producers * each
    assert len(pids) > 1
    assert kept <= set(done)
    assert set(done) <= kept | unknown
    # Only a push whose answer was lost in a kill may be unknown: at most one of each producer.
    assert len(unknown) <= kills * producers


def test_claims_survive_a_crash_and_its_messages_return_when_they_run_out(store):
    with connect(store) as queues:
        queues.create("orders")
        queues.push("orders", b"a")
        queues.push("orders", b"b")
        kept = queues.pull("orders", visibility_timeout=600)
        ended = queues.pull("orders", visibility_timeout=1)
        assert kept is not None
        assert ended is not None
        os.kill(live_pid(store), signal.SIGKILL)
        assert queues.delete(kept) is True
        again = queues.pull("orders", wait=20)
        assert again is not None
        assert (again.id, again.epoch) == (ended.id, 2)
        with pytest.raises(penstock.StaleReceipt):
            queues.delete(ended)


# On the command line.


def run_command(*words):
    """Run `penstock daemon …` in this process; its status."""
    parser = Parser(prog="penstock daemon")
    command.add_arguments(parser)
    arguments = parser.parse_args(words, Namespace(json=False, url=None))
    with Session() as session:
        return command.run(session, arguments)


def test_status_and_stop_report_by_text_and_by_exit_status(store, capsys):
    assert run_command("status", str(store)) == 1
    assert capsys.readouterr().out == f"no daemon runs for {store}\n"
    assert run_command("stop", str(store)) == 1
    capsys.readouterr()
    with connect(store):
        assert run_command("status", f"file:{store}") == 0
        shown = capsys.readouterr().out
        assert f"runs as process {running_pid(store)}" in shown
        assert str(socket_path(store)) in shown
        pid = running_pid(store)
        assert run_command("stop", str(store)) == 0
        assert capsys.readouterr().out == f"stopped the daemon of {store}, process {pid}\n"
    assert run_command("status", str(store)) == 1


def test_status_and_stop_report_in_json_for_programs(store, capsys):
    assert run_command("status", str(store), "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"path": str(store), "running": False}
    with connect(store):
        assert run_command("status", str(store), "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["running"], printed["pid"]) == (True, running_pid(store))
        assert run_command("stop", str(store), "--json") == 0
        assert json.loads(capsys.readouterr().out)["stopped"] == printed["pid"]


def test_status_of_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(StoreUnusable, match="is a file"):
        run_command("status", str(path))


# Started by `daemon run`, and on TCP.


def test_daemon_run_serves_the_socket_and_tcp_and_ends_at_sigterm(store):
    daemon = DaemonProcess(store, "--listen", "127.0.0.1:0")
    with penstock.connect(f"penstock://127.0.0.1:{daemon.port}") as by_tcp:
        by_tcp.create("orders")
        with penstock.connect(f"file:{store}") as by_socket:
            assert by_socket.list() == ["orders"]
    assert daemon.stop() == ""
    assert daemon.process.returncode == 0
    # It has released the store, which can be opened at once.
    open_engine(store).close()


def test_the_error_of_a_second_daemon_run_names_the_holder_at_once(store):
    with connect(store):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.server.daemon", store],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 8
        assert done.stderr == (
            f"penstock: {store}: process {running_pid(store)} (a daemon) holds it already; use it "
            f"there or as file:{store}, or end it with: penstock daemon stop {store}\n"
        )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], "give --token-file and --tls-cert with --tls-key"),
        (["--listen", "nonsense:port"], "is not of the form HOST:PORT"),
        (["--listen", "0.0.0.0:0", "--token-file", "/nowhere"], "cannot read '/nowhere'"),
        (["--durability", "perhaps"], "durability"),
    ],
)
def test_wrong_options_are_refused_before_the_store_is_opened(store, words, complaint):
    done = subprocess.run(
        [sys.executable, "-m", "penstock.server.daemon", store, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("penstock: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (store / "journal").exists()


def test_a_client_of_another_protocol_on_the_socket_is_answered_in_frames(store):
    with connect(store):
        link = connect_socket(store)
        assert link is not None
        with link:
            link.settimeout(TIMEOUT_S)
            link.sendall(b"hello?")
            assert link.recv(100).startswith(PRELUDE)
